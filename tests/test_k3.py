"""Kimi K3's text backbone against the float64 oracle, and the mutants that those tests must notice."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kimi_jax
from kimi_jax.config import KIMI_K3
from kimi_jax.layers.block import AttnResBlock
from kimi_jax.model import AttnResTransformer, Stream, guard
from kimi_jax.ops import delta_rule
from sharding_rules import helix
from tests.helpers import golden, logits_of_each, worst
from tests.reference import oracle
from tests.test_model import hidden_states

LOGITS = 2e-4
SENSITIVE = 0.05  # what a mutant must move, of the largest logit
NAMES = ["kimi-k3-random", "kimi-k3-random-bf16"]


@pytest.fixture(scope="module")
def packed(models):
    return models("kimi-k3-random")


@pytest.fixture(scope="module")
def logits_by_name(models):
    """logits_by_name(name) -> that checkpoint's logits of the golden prompts, of 1, 17 and 70 tokens."""

    @functools.cache
    def get(name):
        return logits_of_each(models(name), [golden(name)[f"ids_{i}"] for i in range(3)])

    return get


@pytest.fixture(scope="module")
def spoken(packed):
    """The greedy completions of the golden prompts, and the text of the program that decoded them."""
    gold, ends = golden("kimi-k3-random"), packed.eos_token_ids
    packed.eos_token_ids = ()
    outs = kimi_jax.generate(packed, [gold[f"ids_{i}"].tolist() for i in range(3)], max_new_tokens=24)
    packed.eos_token_ids = ends
    (loop,) = packed._burst.executables.values()
    return outs, loop.as_text()


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_the_oracle(models, logits_by_name, name):
    """All tokens at once; and one token by itself, which takes other ops."""
    model, gold = models(name), golden(name)
    for i, logits in enumerate(logits_by_name(name)):
        assert worst(logits, gold[f"logits_{i}"]) <= LOGITS
    assert gold["ids_0"].shape == (1,)
    assert worst(np.asarray(model.logits(gold["ids_0"][None])[0]), gold["logits_0"]) <= LOGITS


def test_hidden_state_after_every_layer_equals_the_oracle(packed):
    gold = golden("kimi-k3-random")
    hidden = hidden_states(packed, gold["ids_1"])
    assert len(hidden) == len(gold["hidden_1"])
    for mine, wanted in zip(hidden, gold["hidden_1"], strict=True):
        assert worst(mine, wanted) <= LOGITS


def test_greedy_tokens_equal_the_oracle(spoken):
    gold, (outs, _) = golden("kimi-k3-random"), spoken
    assert [out.tokens for out in outs] == [gold[f"greedy_{i}"].tolist() for i in range(3)]


def test_packed_experts_and_their_twin_are_bitwise_equal(logits_by_name):
    for packed, wide in zip(*map(logits_by_name, NAMES), strict=True):
        assert np.array_equal(packed, wide)


def test_experts_widened_on_purpose_give_the_same_logits(data, packed):
    wide = kimi_jax.load(data / "kimi-k3-random", dtype="float32", experts="bfloat16", progress=False)
    ffn = wide.params["layers"][1]["ffn"]
    assert ffn["experts_gate_up"].dtype == jnp.bfloat16
    assert not any(name.endswith("_packed") for name in ffn)


def test_widening_what_is_not_packed_is_refused(data):
    with pytest.raises(ValueError, match=r"experts='bfloat16'.*are not packed"):
        kimi_jax.load(data / "kimi-k3-random-bf16", experts="bfloat16")


def test_a_compiled_decode_step_holds_no_wide_array_the_size_of_a_layers_experts(packed, spoken):
    config, E = packed.config, packed.config.num_experts
    _, text = spoken
    assert f"u8[{E}," in text  # the packed ones
    for shape in (
        (E, 2, config.moe_intermediate_size, config.expert_hidden_size),
        (E, config.expert_hidden_size, config.moe_intermediate_size),
    ):
        for dtype in ("bf16", "f32"):
            assert f"{dtype}[{','.join(map(str, shape))}]" not in text


# Compiling is what the tests below cost: the first four layers, which are KDA dense, two KDA MoE and MLA MoE, have all
# that is asked about. The nine, in blocks of three, are held against the oracle above.
FIRST = 4


def first_layers(model: kimi_jax.Model, **changes) -> kimi_jax.Model:
    """The same model cut off after FIRST layers, perhaps with another configuration."""
    mla = tuple(i for i in model.config.mla_layers if i < FIRST)
    config = dataclasses.replace(model.config, num_hidden_layers=FIRST, mla_layers=mla, **changes)
    cut = kimi_jax.Model(config, model.layout, "float32")
    cut.params = {**model.params, "layers": {i: model.params["layers"][i] for i in range(FIRST)}}
    return cut


@functools.cache
def raw_and_params(folder: Path):
    """The oracle's configuration and parameters of a checkpoint."""
    return oracle.load(folder)


@pytest.mark.parametrize("size", [1, 2, 3, 20])
def test_attention_residuals_of_every_block_size(models, data, size):
    """4 layers: blocks that divide the depth, that do not, and one longer than the model."""
    raw, params = raw_and_params(data / "kimi-k3-random-bf16")
    ids = np.arange(11)
    wanted = oracle.forward({**raw, "num_hidden_layers": FIRST, "attn_res_block_size": size}, params, ids)
    model = first_layers(models("kimi-k3-random-bf16"), attn_res_block_size=size)
    assert worst(np.asarray(model.logits(ids[None])[0]), wanted) <= LOGITS


QUICK = [(4, 2, True)]
SLOW = [
    (tp, cp, on) for tp, cp in [(1, 8), (2, 4), (4, 2), (8, 1)] for on in (False, True) if (tp, cp, on) not in QUICK
]


@pytest.mark.parametrize(
    ("tp", "cp", "shard_qkv_a"), [*QUICK, *(pytest.param(*layout, marks=pytest.mark.slow) for layout in SLOW)]
)
def test_every_layout_gives_the_tokens_of_one_device(data, packed, tp, cp, shard_qkv_a):
    gold = golden("kimi-k3-random")
    layout = helix(tp, cp, shard_qkv_a=shard_qkv_a, tokens_per_block=4)
    model = kimi_jax.load(data / "kimi-k3-random", layout=layout, dtype="float32", progress=False)
    model.eos_token_ids = ()
    outs = kimi_jax.generate(model, [gold[f"ids_{i}"].tolist() for i in (1, 2)], max_new_tokens=24)
    assert [out.tokens for out in outs] == [gold[f"greedy_{i}"].tolist() for i in (1, 2)]


def test_the_real_sizes_fit_exactly_these_ranks():
    for ranks in (1, 2, 4, 8, 16, 32):
        guard(KIMI_K3, helix(1, ranks), 32)
    for tp, cp in [(1, 3), (3, 2), (1, 12), (5, 1)]:
        with pytest.raises(ValueError, match=r"tp \* cp in \{1, 2, 4, 8, 16, 32\} is valid"):
            guard(KIMI_K3, helix(tp, cp), 32)


# Mutants: each breaks one rule and must move the logits


IDS = golden("kimi-k3-random")["ids_2"]


@pytest.fixture(scope="module")
def wanted(data):
    """The oracle's logits of IDS, after the first layers."""
    raw, params = raw_and_params(data / "kimi-k3-random")
    return oracle.forward({**raw, "num_hidden_layers": FIRST}, params, IDS)


@pytest.fixture(scope="module")
def unbroken(packed):
    return first_layers(packed)


@pytest.fixture
def moved(packed, unbroken, wanted):
    """moved(params=None, **changes) -> how far the first layers are from the oracle: with other parameters, in the same
    program, or else with a changed configuration, in one that is traced anew and has what a test broke in the code.
    """

    def get(params=None, **changes):
        model = first_layers(packed, **changes) if params is None else unbroken
        if params is not None:
            model.params = params
        return worst(np.asarray(model.logits(IDS[None])[0]), wanted)

    before = unbroken.params
    yield get
    unbroken.params = before


def test_the_unbroken_model_moves_nothing(moved, unbroken):
    assert moved(unbroken.params) <= LOGITS


def test_a_clamp_in_place_of_the_lower_bound_gate_is_noticed(moved, monkeypatch):
    def clamped(f, a_log, dt_bias, lower_bound):
        return jnp.maximum(delta_rule.softplus_gate(f, a_log, dt_bias), lower_bound)

    monkeypatch.setattr(delta_rule, "lower_bound_gate", clamped)
    assert moved() > SENSITIVE


def broken_step(self, index, block, stream, cache, chunk, *, late_mix, mixed_sum):
    h, stored = stream.h, stream.stored
    boundary = index % self.config.attn_res_block_size == 0
    if late_mix and boundary:
        stored = (*stored, h)
    x = block.mix_for_attention(stored, h) if stored else h
    _, attended, cache = block.attend((x,), cache, chunk)
    if boundary:
        h, stored = attended, stored if late_mix else (*stored, h)
    else:
        h = (x if mixed_sum else h) + attended
    _, fed = block.feed((block.mix_for_ffn(stored, h),))
    return Stream((h, fed), stored), cache


@pytest.mark.parametrize("fault", ["late_mix", "mixed_sum"])
def test_a_broken_residual_order_is_noticed(moved, monkeypatch, fault):
    """The mix after the append at a boundary; the attention output added to the mix."""
    faults = {"late_mix": False, "mixed_sum": False, fault: True}

    def step(self, index, block: AttnResBlock, stream, cache, chunk):
        return broken_step(self, index, block, stream, cache, chunk, **faults)

    monkeypatch.setattr(AttnResTransformer, "step", step)
    assert moved() > SENSITIVE


def test_a_missing_latent_norm_is_noticed(moved, monkeypatch):
    from kimi_jax.layers import moe

    monkeypatch.setattr(moe, "rms_norm", lambda x, weight, eps: x)
    assert moved() > SENSITIVE


def test_biased_routing_weights_are_noticed(moved):
    assert moved(router_weight_uses_bias=True) > SENSITIVE


def test_swapped_nibbles_are_noticed(moved, unbroken):
    def swap(path, leaf):
        return (leaf << 4) | (leaf >> 4) if str(path[-1].key).endswith("_packed") else leaf

    assert moved(jax.tree_util.tree_map_with_path(swap, unbroken.params)) > SENSITIVE


def test_a_log_taken_from_its_tail_is_noticed(moved, packed, unbroken):
    """Stored length 24 for 16 heads: the last 16 instead of the first."""
    tails = packed.report.padding
    assert len(tails) == len(packed.config.kda_layers)
    params = jax.tree.map(lambda leaf: leaf, unbroken.params)
    for layer in unbroken.config.kda_layers:
        attention = params["layers"][layer]["attention"]
        tail = next(value for name, value in tails.items() if f".{layer}." in name)
        whole = np.concatenate([np.asarray(attention["A_log"]), tail])
        attention["A_log"] = jnp.asarray(whole[len(tail) :])
    assert moved(params) > SENSITIVE


def test_the_load_report_counts_what_was_left_out(packed, data):
    assert Path(packed.report.folder) == data / "kimi-k3-random"
    assert len(packed.report.skipped) == 3  # vision tensors
    unused = packed.params["layers"][0]
    assert unused["attention_res_norm"].shape == (packed.config.hidden_size,)  # kept for export
