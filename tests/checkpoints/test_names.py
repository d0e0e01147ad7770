"""The table: complete against the published counts, and every parameter made of the elements that the oracle reads."""

import math
import re

import jax
import numpy as np
import pytest
from safetensors import safe_open

from kimi_jax.checkpoints import folders, names
from kimi_jax.checkpoints.placing import flatten
from kimi_jax.config import KIMI_K3, KIMI_LINEAR_48B, Config
from tests.checkpoints import making
from tests.reference import oracle

CONFIGS = {
    "linear": making.small(),
    "direct-queries": making.small(q_lora_rank=None, mla_layers=(0, 2), num_shared_experts=0),
    "k3": making.small_k3(),
    "k3-widened": making.small_k3(packed_experts=False, latent_moe_use_norm=False),
    "no-latent": making.small_k3(routed_expert_hidden_size=None, hidden_size=32, q_lora_rank=None),
}


def test_the_table_has_as_many_tensors_and_elements_as_the_hub():
    linear, k3 = names.table(KIMI_LINEAR_48B), names.table(KIMI_K3)
    assert len(names.hub_tensors(KIMI_LINEAR_48B)) == 20_493
    assert sum(math.prod(row.shape) for row in linear.values()) == 49_122_681_728
    assert len(names.hub_tensors(KIMI_K3)) == 497_052
    packed = sum(math.prod(row.shape) for row in k3.values() if row.packed)
    assert packed == 1_446_456_066_048
    assert sum(math.prod(row.shape) for row in k3.values()) - packed == 2_779_484_476_000 - 2_722_740_830_208


@pytest.mark.parametrize("folder", ["kimi-linear-random", "kimi-k3-random", "kimi-k3-random-bf16"])
def test_the_names_written_are_those_of_a_hub_checkpoint(data, folder):
    config, stored = Config.from_hf(data / folder), {}
    for file in (data / folder).glob("*.safetensors"):
        with safe_open(file, framework="np") as tensors:
            stored |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}
    stored = {name: shape for name, shape in stored.items() if not names.is_skipped(name, config)}
    written = {name: uses[0][1].hub_shape for name, uses in names.hub_tensors(config).items()}
    assert written.keys() == stored.keys()
    differing = {name for name in stored if written[name] != stored[name]}
    assert all(name.endswith("A_log") for name in differing)  # K3 stores it longer than the head count


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_pieces_tile_every_parameter_and_every_tensor_once(config):
    filled = {name: np.zeros(uses[0][1].hub_shape, int) for name, uses in names.hub_tensors(config).items()}
    for path, row in names.table(config).items():
        for pieces in filter(None, (row.pieces, row.fused)):
            parameter = np.zeros(row.shape, int)
            for piece in pieces:
                assert math.prod(piece.view) == math.prod(piece.hub_shape), path
                assert len(piece.view) == len(piece.offset) == len(piece.shape) == len(piece.start) == len(row.shape)
                parameter[tuple(slice(s, s + n) for s, n in zip(piece.start, piece.shape, strict=True))] += 1
            assert (parameter == 1).all(), path
        for piece in row.pieces:
            view = filled[names.written(row.prefix + piece.name, config)].reshape(piece.view)
            view[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))] += 1
    assert all((count == 1).all() for count in filled.values())


def expected(config: Config, hub: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The parameters as plain numpy makes them from hub tensors (without K3's prefix): written apart from the table."""
    c, out = config, {}
    K, V, R = c.qk_nope_head_dim, c.v_head_dim, c.kv_lora_rank
    H, A, N = c.kda_num_heads, c.kda_head_dim, c.num_attention_heads
    out["embed"], out["lm_head"] = hub["model.embed_tokens.weight"], hub["lm_head.weight"]
    out["norm"] = hub["model.norm.weight"]
    mixes = c.attn_res_block_size is not None
    if mixes:
        out["output_res_norm"] = hub["model.output_attn_res_norm.weight"]
        out["output_res_proj"] = hub["model.output_attn_res_proj.weight"][0]
    for i in range(c.num_hidden_layers):
        hub_i = {k.removeprefix(f"model.layers.{i}."): v for k, v in hub.items() if k.startswith(f"model.layers.{i}.")}
        layer: dict[str, np.ndarray] = {
            "attention_norm": hub_i["input_layernorm.weight"],
            "ffn_norm": hub_i["post_attention_layernorm.weight"],
        }
        if mixes:
            for ours, theirs in (("attention", "self_attention"), ("ffn", "mlp")):
                layer[f"{ours}_res_norm"] = hub_i[f"{theirs}_res_norm.weight"]
                layer[f"{ours}_res_proj"] = hub_i[f"{theirs}_res_proj.weight"][0]
        att = {k.removeprefix("self_attn."): v for k, v in hub_i.items() if k.startswith("self_attn.")}
        if i in c.mla_layers:
            if c.q_lora_rank:
                q_a, kv_a = att["q_a_proj.weight"], att["kv_a_proj_with_mqa.weight"]
                layer["attention/qkv_a"] = np.concatenate([q_a, kv_a])
                layer["attention/q_norm"] = att["q_a_layernorm.weight"]
                layer["attention/q_b"] = np.stack(np.split(att["q_b_proj.weight"], N))
            else:
                layer["attention/kv_a"] = att["kv_a_proj_with_mqa.weight"]
                layer["attention/q"] = np.stack(np.split(att["q_proj.weight"], N))
            heads = np.split(att["kv_b_proj.weight"], N)
            layer["attention/k_b"] = np.stack([head[:K] for head in heads])
            layer["attention/v_b"] = np.stack([head[K:] for head in heads])
            layer["attention/kv_norm"] = att["kv_a_layernorm.weight"]
            assert R == att["kv_a_layernorm.weight"].size
            layer["attention/o"] = np.stack(np.split(att["o_proj.weight"], N, axis=1), axis=1)
            if c.mla_use_output_gate:
                layer["attention/g"] = att["g_proj.weight"].reshape(N, V, -1)
        else:
            layer["attention/qkv"] = np.stack([np.stack(np.split(att[f"{n}_proj.weight"], H)) for n in "qkv"], 1)
            layer["attention/conv"] = np.stack([att[f"{n}_conv1d.weight"][:, 0].reshape(H, A, -1) for n in "qkv"], 1)
            layer["attention/f_a"], layer["attention/b"] = att["f_a_proj.weight"], att["b_proj.weight"]
            layer["attention/f_b"] = np.stack(np.split(att["f_b_proj.weight"], H))
            layer["attention/A_log"] = att["A_log"].reshape(-1)[:H]
            layer["attention/dt_bias"] = np.stack(np.split(att["dt_bias"], H))
            layer["attention/o_norm"] = att["o_norm.weight"]
            layer["attention/o"] = np.stack(np.split(att["o_proj.weight"], H, axis=1), axis=1)
            if c.use_full_rank_gate:
                layer["attention/g"] = np.stack(np.split(att["g_proj.weight"], H))
            else:
                layer["attention/g_a"] = att["g_a_proj.weight"]
                layer["attention/g_b"] = np.stack(np.split(att["g_b_proj.weight"], H))
        block = "block_sparse_moe." if i >= c.first_k_dense_replace else "mlp."
        ffn = {k.removeprefix(block): v for k, v in hub_i.items() if k.startswith(block)}
        if block == "mlp.":
            layer["ffn/gate_up"] = np.stack([ffn["gate_proj.weight"], ffn["up_proj.weight"]])
            layer["ffn/down"] = ffn["down_proj.weight"]
        else:
            layer["ffn/router"], layer["ffn/router_bias"] = ffn["gate.weight"], ffn["gate.e_score_correction_bias"]
            for s in ("_packed", "_scale") if c.packed_experts else ("",):

                def experts(w, s=s, ffn=ffn):
                    return np.stack([ffn[f"experts.{e}.{w}.weight{s}"] for e in range(c.num_experts)])

                layer[f"ffn/experts_gate_up{s}"] = np.stack([experts("w1"), experts("w3")], axis=1)
                layer[f"ffn/experts_down{s}"] = experts("w2")
            if c.num_shared_experts:
                shared = [ffn[f"shared_experts.{n}_proj.weight"] for n in ("gate", "up", "down")]
                layer["ffn/shared_gate_up"], layer["ffn/shared_down"] = np.stack(shared[:2]), shared[2]
            if c.routed_expert_hidden_size:
                layer["ffn/latent_down"] = ffn["routed_expert_down_proj.weight"]
                layer["ffn/latent_up"] = ffn["routed_expert_up_proj.weight"]
                if c.latent_moe_use_norm:
                    layer["ffn/latent_norm"] = ffn["routed_expert_norm.weight"]
        out |= {f"layers/{i}/{name}": value for name, value in layer.items()}
    return out


@pytest.mark.parametrize("spread", ["none", "two"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_parameter_is_what_plain_numpy_makes_of_the_tensors(tmp_path, config, spread):
    hub = making.hub_arrays(config)  # each float element is unique, so a swapped one cannot pass
    folder = making.write(tmp_path, config, hub, shards=3)
    params, report = folders.load_params(
        folder, config, making.abstract(config), making.shardings(config, spread=spread), progress=False
    )
    flat, wanted = (
        flatten(params),
        expected(config, {names.canonical(n, config): a for n, a in hub.items()}),
    )
    assert flat.keys() == wanted.keys()
    for path, array in flat.items():
        assert array.dtype == wanted[path].dtype, path
        np.testing.assert_array_equal(np.asarray(array), wanted[path], err_msg=path)
    assert report.bytes_read == sum(array.nbytes for array in hub.values())


@pytest.mark.parametrize("folder", ["kimi-linear-tiny", "kimi-linear-random", "kimi-k3-random-bf16"])
def test_parameters_are_the_numbers_that_the_oracle_reads(data, tiny, folder):
    folder = tiny if folder == "kimi-linear-tiny" else data / folder
    config, (_, hub) = Config.from_hf(folder), oracle.load(folder)
    params, _ = folders.load_params(
        folder, config, making.abstract(config), making.shardings(config, spread="two"), progress=False
    )
    flat, wanted = flatten(params), expected(config, hub)
    assert flat.keys() == wanted.keys()
    for path, array in flat.items():
        np.testing.assert_array_equal(np.asarray(array).astype(np.float64), wanted[path], err_msg=path)


def test_packed_experts_keep_the_bytes_of_the_file(data):
    folder = data / "kimi-k3-random"
    config = Config.from_hf(folder)
    params, _ = folders.load_params(
        folder, config, making.abstract(config), making.shardings(config, spread="first"), progress=False
    )
    ffn, (_, hub) = params["layers"][5]["ffn"], oracle.load(folder)
    for name, matrices in (("experts_gate_up", ("w1", "w3")), ("experts_down", ("w2",))):
        packed, scale = (np.asarray(ffn[f"{name}_{part}"]) for part in ("packed", "scale"))
        assert packed.dtype == scale.dtype == np.uint8
        for e in range(config.num_experts):
            for j, w in enumerate(matrices):
                index = (e, j) if len(matrices) == 2 else (e,)
                ours = oracle.mxfp4_dequantize(packed[index], scale[index])
                np.testing.assert_array_equal(ours, hub[f"model.layers.5.block_sparse_moe.experts.{e}.{w}.weight"])


def renamed(hub: dict[str, np.ndarray], rule) -> dict[str, np.ndarray]:
    return {rule(name): value for name, value in hub.items()}


def loads_the_same(tmp_path, config, hub, other) -> None:
    """The folder with other spellings gives the very parameters of the hub's."""
    results = []
    for i, arrays in enumerate((hub, other)):
        folder = making.write(tmp_path / str(i), config, arrays)
        args = folder, config, making.abstract(config), making.shardings(config, spread="two")
        results.append(folders.load_params(*args, progress=False)[0])
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), *results)


def test_the_dense_layers_as_transformers_saves_them_are_read(tmp_path):
    config = making.small()
    hub = making.hub_arrays(config)
    other = renamed(hub, lambda name: name.replace(".mlp.", ".block_sparse_moe."))
    assert "model.layers.0.block_sparse_moe.gate_proj.weight" in other
    loads_the_same(tmp_path, config, hub, other)


def test_the_fused_tensors_of_transformers_classes_are_read(tmp_path):
    config = making.small()
    hub = making.hub_arrays(config)
    other = renamed(hub, lambda name: name.replace("block_sparse_moe.", "mlp."))
    for layer in config.kda_layers:
        name = f"model.layers.{layer}.self_attn."
        other[f"{name}conv1d.weight"] = np.concatenate([other.pop(f"{name}{n}_conv1d.weight") for n in "qkv"])
        for moved in ("A_log", "dt_bias", "f_a_proj.weight", "f_b_proj.weight"):
            other[f"{name}forget_gate.{moved}"] = other.pop(name + moved)
    for layer in (1, 2):
        name = f"model.layers.{layer}.mlp.experts."
        w1, w2, w3 = (
            np.stack([other.pop(f"{name}{e}.{w}.weight") for e in range(config.num_experts)])
            for w in ("w1", "w2", "w3")
        )
        other[f"{name}gate_up_proj"], other[f"{name}down_proj"] = np.concatenate([w1, w3], axis=1), w2
    loads_the_same(tmp_path, config, hub, other)


def test_convolutions_of_rank_two_are_read_and_not_reversed(tmp_path):
    config = making.small()
    hub = making.hub_arrays(config)
    other = {name: value[:, 0] if "conv1d" in name else value for name, value in hub.items()}
    assert other["model.layers.0.self_attn.q_conv1d.weight"].ndim == 2
    loads_the_same(tmp_path, config, hub, other)


@pytest.mark.parametrize(
    "rule",
    [
        lambda name: name.removeprefix("language_model."),
        lambda name: name.replace("language_model.model.", "language_model."),
        lambda name: re.sub(r"(res)_(norm|proj)\.weight", r"\1.\2_weight", name),
    ],
    ids=["no-prefix", "no-inner-model", "early-names"],
)
def test_other_spellings_of_k3_are_read(tmp_path, rule):
    config = making.small_k3()
    hub = making.hub_arrays(config)
    other = renamed(hub, rule)
    assert other.keys() != hub.keys()
    loads_the_same(tmp_path, config, hub, other)


def test_what_keeps_its_stored_dtype():
    def kept(config):
        return {path.split("/")[-1] for path, row in names.table(config).items() if row.kept}

    assert kept(making.small()) == {"A_log", "dt_bias", "router_bias"}
    assert kept(making.small_k3()) == {"A_log", "dt_bias", "router_bias", "conv", "o_norm"}
