"""Config: what a hub config means, what it must not leave open, and what is refused."""

import dataclasses
import json
import subprocess
import sys

import pytest

from kimi_jax import config as config_module
from kimi_jax import hf_config
from kimi_jax.config import KIMI_K3, KIMI_LINEAR_48B, Config

CHECKPOINTS = ("kimi-linear-random", "kimi-k3-random", "kimi-k3-random-bf16")


@pytest.fixture
def linear() -> dict:
    return json.loads((config_module.ASSETS / "configs" / "kimi-linear-48b.json").read_text())


@pytest.fixture
def k3() -> dict:
    return json.loads((config_module.ASSETS / "configs" / "kimi-k3.json").read_text())


def refused(hub, *words: str) -> None:
    with pytest.raises(ValueError) as error:
        Config.from_hf(hub)
    for word in words:
        assert word in str(error.value)


def test_kimi_linear_48b_says_what_the_specification_says():
    c = KIMI_LINEAR_48B
    assert c.mla_layers == (3, 7, 11, 15, 19, 23, 26)
    assert c.kda_layers == tuple(layer for layer in range(27) if layer not in c.mla_layers)
    assert (c.vocab_size, c.hidden_size, c.num_hidden_layers, c.q_lora_rank) == (163840, 2304, 27, None)
    assert (c.num_attention_heads, c.kv_lora_rank, c.qk_nope_head_dim, c.qk_rope_head_dim) == (32, 512, 128, 64)
    assert (c.kda_num_heads, c.kda_head_dim, c.conv_width) == (32, 128, 4)
    assert (c.num_experts, c.num_experts_per_token, c.num_shared_experts) == (256, 8, 1)
    assert (c.moe_intermediate_size, c.intermediate_size, c.first_k_dense_replace) == (1024, 9216, 1)
    assert (c.hidden_act, c.moe_renormalize, c.routed_scaling_factor) == ("silu", True, 2.446)
    assert (c.rms_norm_eps, c.mla_latent_norm_eps, c.router_weight_uses_bias) == (1e-5, 1e-6, False)
    assert (c.gate_lower_bound, c.attn_res_block_size, c.routed_expert_hidden_size) == (None, None, None)
    assert not (c.use_full_rank_gate or c.mla_use_output_gate or c.latent_moe_use_norm or c.packed_experts or c.is_k3)
    assert (c.dtype, c.bos_token_id, c.eos_token_ids, c.pad_token_id) == ("bfloat16", 163584, (163586,), 163839)
    assert c.max_length == 1048576


def test_kimi_k3_says_what_the_specification_says():
    c = KIMI_K3
    assert c.mla_layers == (*range(3, 92, 4), 92) and len(c.kda_layers) == 69
    assert (c.hidden_size, c.num_hidden_layers, c.q_lora_rank, c.kda_num_heads) == (7168, 93, 1536, 96)
    assert (c.num_experts, c.num_experts_per_token, c.num_shared_experts) == (896, 16, 2)
    assert (c.expert_hidden_size, c.moe_intermediate_size, c.shared_intermediate_size) == (3584, 3072, 6144)
    assert (c.hidden_act, c.situ_beta, c.situ_linear_beta, c.intermediate_size) == ("situ", 4.0, 25.0, 33792)
    assert (c.gate_lower_bound, c.use_full_rank_gate, c.mla_use_output_gate) == (-5.0, True, True)
    assert (c.attn_res_block_size, c.latent_moe_use_norm, c.packed_experts, c.is_k3) == (12, True, True, True)
    assert (c.routed_scaling_factor, c.pad_token_id, c.max_length) == (1.0, 163839, 1048576)


def test_layers_have_exactly_one_kind():
    assert [KIMI_LINEAR_48B.is_mla(layer) for layer in range(8)] == [False, False, False, True] * 2
    assert [KIMI_LINEAR_48B.is_moe(layer) for layer in range(3)] == [False, True, True]
    assert KIMI_LINEAR_48B.qk_head_dim == 192


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_folder_its_file_and_its_dict_say_the_same(data, name):
    folder = data / name
    raw = json.loads((folder / "config.json").read_text())
    assert Config.from_hf(folder) == Config.from_hf(str(folder / "config.json")) == Config.from_hf(raw)


def test_what_transformers_re_saved_is_read(tiny):
    c = Config.from_hf(tiny)
    assert (c.mla_layers, c.first_k_dense_replace, c.conv_width, c.q_lora_rank) == ((3, 7), 1, 4, 96)


def test_the_text_config_alone_is_enough(k3):
    alone = Config.from_hf(k3["text_config"])
    assert dataclasses.replace(alone, pad_token_id=KIMI_K3.pad_token_id) == KIMI_K3


def test_kinds_are_told_by_keys_not_by_names(k3, linear):
    k3["text_config"]["model_type"] = k3["model_type"] = linear["model_type"] = "llama"
    assert Config.from_hf(k3) == KIMI_K3 and Config.from_hf(linear) == KIMI_LINEAR_48B


@pytest.mark.parametrize("c", [KIMI_LINEAR_48B, KIMI_K3], ids=["linear", "k3"])
@pytest.mark.parametrize(
    "change",
    [
        {},
        dict(eos_token_ids=(7, 9), bos_token_id=None, pad_token_id=None),
        dict(eos_token_ids=(), dtype="float32", router_weight_uses_bias=True, mla_latent_norm_eps=1e-5),
        dict(num_shared_experts=0, first_k_dense_replace=3, hidden_act="situ", situ_beta=2.0),
        dict(q_lora_rank=77, mla_layers=(0, 1), conv_width=3, gate_lower_bound=-2.0, attn_res_block_size=5),
    ],
)
def test_to_hf_and_back_is_the_same_config(c, change):
    changed = dataclasses.replace(c, **change)
    assert Config.from_hf(changed.to_hf()) == changed
    assert Config.from_hf(json.loads(json.dumps(changed.to_hf()))) == changed


@pytest.mark.parametrize("published", ["linear", "k3"])
def test_to_hf_says_what_the_published_file_says(published, request):
    hub = request.getfixturevalue(published)
    ours = {"linear": KIMI_LINEAR_48B, "k3": KIMI_K3}[published].to_hf()
    for mine, theirs in ((ours, hub), (ours.get("text_config", {}), hub.get("text_config", {}))):
        rename = {"model_max_length": "max_position_embeddings"} if "attn_res_block_size" in mine else {}
        mine = {rename.get(key, key): value for key, value in mine.items()}
        assert mine.keys() - theirs.keys() <= {"pad_token_id"}  # K3's stands at the top level only
        for key in mine.keys() & theirs.keys() - {"quantization_config", "text_config"}:
            assert mine[key] == theirs[key], key
        assert theirs.keys() - mine.keys() <= hf_config.IGNORED.keys() | hf_config.TOP_IGNORED.keys() | {"topk_method"}


@pytest.mark.parametrize(
    "hub_key, other",
    [("moe_renormalize", "norm_topk_prob"), ("num_experts", "num_local_experts"), ("dtype", "torch_dtype"),
     ("num_experts_per_token", "num_experts_per_tok"), ("num_shared_experts", "n_shared_experts"),
     ("num_expert_group", "n_group"), ("model_max_length", "max_position_embeddings")],
)  # fmt: skip
def test_other_spellings_of_a_key_are_read(linear, hub_key, other):
    linear[other] = linear.pop(hub_key)
    assert Config.from_hf(linear) == KIMI_LINEAR_48B


def test_two_spellings_that_disagree_are_refused(linear):
    refused(linear | {"num_local_experts": 8}, "num_experts=256", "num_local_experts=8")


def test_transformers_own_layer_keys_are_enough(linear):
    layers = ["full_attention" if i in KIMI_LINEAR_48B.mla_layers else "linear_attention" for i in range(27)]
    del linear["linear_attn_config"], linear["first_k_dense_replace"]
    linear |= dict(layer_types=layers, mlp_layer_types=["dense"] + ["sparse"] * 26, linear_head_dim=128,
                   linear_num_heads=32, linear_conv_kernel_dim=4)  # fmt: skip
    assert Config.from_hf(linear) == KIMI_LINEAR_48B


def test_null_and_absent_mean_the_same(k3):
    text = k3["text_config"]
    for key in ("activation_situ_linear_beta", "attn_res_block_size", "routed_expert_hidden_size", "q_lora_rank"):
        text[key] = None
    text["activation_situ_beta"] = None
    text["linear_attn_config"]["gate_lower_bound"] = None
    with_null = Config.from_hf(k3)
    for key in ("activation_situ_linear_beta", "attn_res_block_size", "routed_expert_hidden_size", "q_lora_rank"):
        del text[key]
    del text["activation_situ_beta"], text["linear_attn_config"]["gate_lower_bound"]
    assert Config.from_hf(k3) == with_null
    assert (with_null.situ_beta, with_null.situ_linear_beta, with_null.gate_lower_bound) == (1.0, None, None)


def test_a_situ_beta_of_zero_counts_as_one(k3):
    k3["text_config"]["activation_situ_beta"] = 0
    assert Config.from_hf(k3).situ_beta == 1.0


def test_several_end_tokens_are_kept_in_order(linear):
    assert Config.from_hf(linear | {"eos_token_id": [5, 3]}).eos_token_ids == (5, 3)
    assert Config.from_hf(linear | {"eos_token_id": None}).eos_token_ids == ()


def test_top_level_values_fill_what_the_text_leaves_open(k3):
    del k3["text_config"]["eos_token_id"], k3["text_config"]["dtype"]
    k3 |= {"eos_token_id": [11, 12], "dtype": "float32"}
    c = Config.from_hf(k3)
    assert (c.eos_token_ids, c.dtype) == ((11, 12), "float32")


@pytest.mark.parametrize("key", ["sliding_window", "mtp_loss", "num_attention_head"])
def test_an_unknown_key_is_named(linear, k3, key):
    refused(linear | {key: 1}, f"unknown key {key}")
    refused(k3 | {key: 1}, f"unknown key {key}", "beside text_config")
    k3["text_config"][key] = 1
    refused(k3, f"unknown key {key}")
    linear["linear_attn_config"][key] = 1
    refused(linear, f"unknown key {key}", "linear_attn_config")


def test_every_ignored_key_has_a_reason():
    for reason in (hf_config.IGNORED | hf_config.TOP_IGNORED | hf_config.QUANTIZATION_IGNORED).values():
        assert len(reason.split()) >= 1 and reason
    assert not hf_config.IGNORED.keys() & hf_config.FIXED.keys()


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(mla_use_nope=False), ("mla_use_nope=False", "rotary")),
        (dict(mla_use_nope=None), ("mla_use_nope=None", "rotary")),
        (dict(tie_word_embeddings=True), ("tie_word_embeddings=True", "tied")),
        (dict(attention_bias=True), ("attention_bias=True", "bias")),
        (dict(num_expert_group=8), ("num_expert_group=8", "groups")),
        (dict(n_group=2), ("n_group=2", "groups")),
        (dict(topk_group=4), ("topk_group=4", "groups")),
        (dict(num_nextn_predict_layers=1), ("num_nextn_predict_layers=1", "MTP")),
        (dict(num_key_value_heads=8), ("num_key_value_heads=8", "num_attention_heads=32")),
        (dict(moe_layer_freq=2), ("moe_layer_freq=2",)),
        (dict(moe_layer_freq=True), ("moe_layer_freq=True",)),
        (dict(moe_router_activation_func="softmax"), ("moe_router_activation_func='softmax'", "sigmoid")),
        (dict(topk_method="greedy"), ("topk_method='greedy'",)),
        (dict(hidden_act="gelu"), ("hidden_act='gelu'", "silu", "situ")),
        (dict(dtype="int8"), ("dtype='int8'", "bfloat16")),
        (dict(vocab_size=0), ("vocab_size=0", "at least 1")),
        (dict(hidden_size="2304"), ("hidden_size='2304'", "whole number")),
        (dict(hidden_size=2304.0), ("hidden_size=2304.0", "whole number")),
        (dict(num_experts=True), ("num_experts=True", "whole number")),
        (dict(moe_renormalize=1), ("moe_renormalize=1", "true or false")),
        (dict(rms_norm_eps=0), ("rms_norm_eps=0", "more than 0")),
        (dict(num_experts_per_token=257), ("num_experts_per_token=257", "num_experts=256")),
        (dict(eos_token_id=["x"]), ("eos_token_id=['x']", "token ids")),
        (dict(layer_types=["full_attention"] * 27), ("layer_types[0]", "contradicts")),
        (dict(layer_types=["full_attention"]), ("layer_types", "27")),
        (dict(mlp_layer_types=["sparse"] * 27), ("first_k_dense_replace=1", "mlp_layer_types")),
        (dict(mlp_layer_types=["sparse"] * 26 + ["dense"]), ("mlp_layer_types", "dense ones before")),
        (dict(linear_attn_config=None), ("missing",)),
        (dict(linear_attn_config=[1]), ("linear_attn_config",)),
        (dict(quantization_config={"quant_method": "fp8"}), ("quantization_config", "MXFP4")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_is_not_implemented_or_contradictory_is_refused(linear, change, words):
    refused(linear | change, *words)


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(kda_layers=None), ("kda_layers",)),
        (dict(full_attn_layers=[4, 8, 12, 16, 20, 24]), ("layer 27", "neither")),
        (dict(full_attn_layers=[3, 4, 8, 12, 16, 20, 24, 27]), ("layer 3", "both")),
        (dict(full_attn_layers=[4, 4, 8, 12, 16, 20, 24, 27]), ("twice",)),
        (dict(full_attn_layers=[0, 4, 8, 12, 16, 20, 24, 27]), ("1..27",)),
        (dict(full_attn_layers=[4, 8, 12, 16, 20, 24, 28]), ("1..27",)),
        (dict(gate_lower_bound=5.0), ("gate_lower_bound=5.0", "below 0")),
        (dict(num_heads=None), ("num_heads", "missing")),
    ],
)
def test_the_layer_lists_must_place_every_layer_once(linear, change, words):
    linear["linear_attn_config"] |= change
    refused(linear, *words)


@pytest.mark.parametrize(
    "path, value",
    [
        (("format",), "nvfp4-pack-quantized"), (("quant_method",), "fp8"), (("kv_cache_scheme",), {"num_bits": 8}),
        (("config_groups", "group_0", "weights", "group_size"), 16),
        (("config_groups", "group_0", "weights", "num_bits"), 8),
        (("config_groups", "group_0", "input_activations"), {"num_bits": 8}),
        (("config_groups", "group_1"), {}),
    ],
)  # fmt: skip
def test_any_quantization_but_k3s_is_refused(k3, path, value):
    node = k3["text_config"]["quantization_config"]
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    refused(k3, "quantization_config", path[-1])


def test_a_quantization_that_says_too_little_is_refused(k3):
    del k3["text_config"]["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"]
    refused(k3, "group_size is missing")


@pytest.mark.parametrize("key", ["vocab_size", "kv_lora_rank", "first_k_dense_replace", "rms_norm_eps", "hidden_act"])
def test_a_missing_key_is_named(linear, key):
    del linear[key]
    refused(linear, f"key {key} is missing")


def test_the_two_levels_of_k3_must_agree(k3):
    refused(k3 | {"tie_word_embeddings": True}, "tie_word_embeddings")


def test_a_file_that_is_no_config_is_an_error_that_names_it(tmp_path):
    refused(tmp_path, str(tmp_path / "config.json"), "no such file")
    file = tmp_path / "config.json"
    for text, word in (("{", "JSON"), ("[1]", "list"), ('{"a": 1, "a": 2}', "'a' occurs twice"), ('{"a": NaN}', "NaN"),
                       ("[" * 100_000, "JSON")):  # fmt: skip
        file.write_text(text)
        refused(file, str(file), word)


def test_impossible_configs_cannot_be_made():
    for change, word in (
        (dict(mla_layers=(3, 2)), "mla_layers"), (dict(mla_layers=(27,)), "mla_layers"),
        (dict(num_hidden_layers=20), "mla_layers"), (dict(packed_experts=True, hidden_size=48), "divide by 32"),
        (dict(situ_linear_beta=0.0), "situ_linear_beta"), (dict(attn_res_block_size=0), "attn_res_block_size"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=word):
            dataclasses.replace(KIMI_LINEAR_48B, **change)


def test_a_config_can_be_a_key_and_cannot_be_changed():
    assert {KIMI_K3: 1}[KIMI_K3] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        KIMI_K3.vocab_size = 3  # type: ignore[misc]


def test_importing_reads_no_file():
    program = (
        "import sys\n"
        "sys.addaudithook(lambda event, args: event == 'open' and str(args[0]).endswith('.json') and sys.exit(3))\n"
        "import kimi_jax.config"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=config_module.ASSETS.parents[1]).returncode == 0


def test_an_unknown_published_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="kimi-k3, kimi-linear-48b"):
        Config.named("kimi-k2")
    with pytest.raises(AttributeError, match="KIMI_K2"):
        config_module.KIMI_K2  # noqa: B018
