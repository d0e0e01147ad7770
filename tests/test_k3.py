"""Kimi K3's text backbone against the float64 oracle, and the mutants that those tests must notice."""

import dataclasses
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
from tests.helpers import golden, worst
from tests.reference import oracle
from tests.test_model import hidden_states

LOGITS = 2e-4
SENSITIVE = 0.05  # what a mutant must move, of the largest logit
NAMES = ["kimi-k3-random", "kimi-k3-random-bf16"]


@pytest.fixture(scope="module")
def packed(models):
    return models("kimi-k3-random")


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_the_oracle(models, name):
    model, gold = models(name), golden(name)
    for i in range(3):
        logits = np.asarray(model.logits(gold[f"ids_{i}"][None])[0])
        assert worst(logits, gold[f"logits_{i}"]) <= LOGITS


def test_hidden_state_after_every_layer_equals_the_oracle(packed):
    gold = golden("kimi-k3-random")
    hidden = hidden_states(packed, gold["ids_1"])
    assert len(hidden) == len(gold["hidden_1"])
    for mine, wanted in zip(hidden, gold["hidden_1"], strict=True):
        assert worst(mine, wanted) <= LOGITS


def test_greedy_tokens_equal_the_oracle(packed, monkeypatch):
    gold = golden("kimi-k3-random")
    monkeypatch.setattr(packed, "eos_token_ids", ())
    outs = kimi_jax.generate(packed, [gold[f"ids_{i}"].tolist() for i in range(3)], max_new_tokens=24)
    assert [out.tokens for out in outs] == [gold[f"greedy_{i}"].tolist() for i in range(3)]


def test_packed_experts_and_their_twin_are_bitwise_equal(models, packed):
    ids = golden("kimi-k3-random")["ids_2"][None]
    assert np.array_equal(np.asarray(packed.logits(ids)), np.asarray(models("kimi-k3-random-bf16").logits(ids)))


def test_experts_widened_on_purpose_give_the_same_logits(data, packed):
    wide = kimi_jax.load(data / "kimi-k3-random", dtype="float32", experts="bfloat16", progress=False)
    ffn = wide.params["layers"][1]["ffn"]
    assert ffn["experts_gate_up"].dtype == jnp.bfloat16
    assert not any(name.endswith("_packed") for name in ffn)


def test_widening_what_is_not_packed_is_refused(data):
    with pytest.raises(ValueError, match=r"experts='bfloat16'.*are not packed"):
        kimi_jax.load(data / "kimi-k3-random-bf16", experts="bfloat16")


def test_a_compiled_decode_step_holds_no_wide_array_the_size_of_a_layers_experts(packed):
    config, E = packed.config, packed.config.num_experts
    packed.decode([1], packed.new_state(1, 64))
    text = "".join(e.as_text() for e in packed._extend.executables.values())
    for shape in (
        (E, 2, config.moe_intermediate_size, config.expert_hidden_size),
        (E, config.expert_hidden_size, config.moe_intermediate_size),
    ):
        for dtype in ("bf16", "f32"):
            assert f"{dtype}[{','.join(map(str, shape))}]" not in text


@pytest.mark.parametrize("size", [1, 3, 5, 20])
def test_attention_residuals_of_every_block_size(data, size):
    """9 layers: blocks that divide the depth, that do not, and one longer than the model."""
    raw, params = oracle.load(data / "kimi-k3-random-bf16")
    raw = {**raw, "attn_res_block_size": size}
    ids = np.arange(11)
    base = kimi_jax.load(data / "kimi-k3-random-bf16", dtype="float32", progress=False)
    model = kimi_jax.Model(dataclasses.replace(base.config, attn_res_block_size=size), base.layout, "float32")
    model.params = base.params
    assert worst(np.asarray(model.logits(ids[None])[0]), oracle.forward(raw, params, ids)) <= LOGITS


QUICK = [(1, 8, False), (4, 2, True)]
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


@pytest.fixture
def logits_of(packed, data):
    """logits_of(**changes) -> the logits of the packed checkpoint with changed parameters or configuration."""
    ids = golden("kimi-k3-random")["ids_2"][None]

    def get(config=None, params=None):
        model = kimi_jax.Model(config or packed.config, packed.layout, "float32")
        model.params = params or packed.params
        return np.asarray(model.logits(ids)[0])

    return get


def moved(logits) -> float:
    return worst(logits, golden("kimi-k3-random")["logits_2"])


def test_the_unbroken_model_moves_nothing(logits_of):
    assert moved(logits_of()) <= LOGITS


def test_a_clamp_in_place_of_the_lower_bound_gate_is_noticed(logits_of, monkeypatch):
    def clamped(f, a_log, dt_bias, lower_bound):
        return jnp.maximum(delta_rule.softplus_gate(f, a_log, dt_bias), lower_bound)

    monkeypatch.setattr(delta_rule, "lower_bound_gate", clamped)
    assert moved(logits_of()) > SENSITIVE


def broken_step(self, index, block, stream, cache, chunk, *, late_mix, mixed_sum):
    h, stored = stream
    boundary = index % self.config.attn_res_block_size == 0
    if late_mix and boundary:
        stored = (*stored, h)
    x = block.mix_for_attention(stored, h) if stored else h
    attended, cache = block.attend(x, cache, chunk)
    if boundary:
        h, stored = attended, stored if late_mix else (*stored, h)
    else:
        h = (x if mixed_sum else h) + attended
    return Stream(h + block.feed(block.mix_for_ffn(stored, h)), stored), cache


@pytest.mark.parametrize("fault", ["late_mix", "mixed_sum"])
def test_a_broken_residual_order_is_noticed(logits_of, monkeypatch, fault):
    """The mix after the append at a boundary; the attention output added to the mix."""
    faults = {"late_mix": False, "mixed_sum": False, fault: True}

    def step(self, index, block: AttnResBlock, stream, cache, chunk):
        return broken_step(self, index, block, stream, cache, chunk, **faults)

    monkeypatch.setattr(AttnResTransformer, "step", step)
    assert moved(logits_of()) > SENSITIVE


def test_a_missing_latent_norm_is_noticed(logits_of, monkeypatch):
    from kimi_jax.layers import moe

    monkeypatch.setattr(moe, "rms_norm", lambda x, weight, eps: x)
    assert moved(logits_of()) > SENSITIVE


def test_biased_routing_weights_are_noticed(logits_of, packed):
    assert moved(logits_of(config=dataclasses.replace(packed.config, router_weight_uses_bias=True))) > SENSITIVE


def test_swapped_nibbles_are_noticed(logits_of, packed):
    def swap(path, leaf):
        return (leaf << 4) | (leaf >> 4) if str(path[-1].key).endswith("_packed") else leaf

    assert moved(logits_of(params=jax.tree_util.tree_map_with_path(swap, packed.params))) > SENSITIVE


def test_a_log_taken_from_its_tail_is_noticed(logits_of, packed, data):
    """Stored length 24 for 16 heads: the last 16 instead of the first."""
    tails = packed.report.padding
    assert len(tails) == len(packed.config.kda_layers)
    params = jax.tree.map(lambda leaf: leaf, packed.params)
    for layer in packed.config.kda_layers:
        attention = params["layers"][layer]["attention"]
        tail = next(value for name, value in tails.items() if f".{layer}." in name)
        whole = np.concatenate([np.asarray(attention["A_log"]), tail])
        attention["A_log"] = jnp.asarray(whole[len(tail) :])
    assert moved(logits_of(params=params)) > SENSITIVE


def test_the_load_report_counts_what_was_left_out(packed, data):
    assert Path(packed.report.folder) == data / "kimi-k3-random"
    assert len(packed.report.skipped) == 3  # vision tensors
    unused = packed.params["layers"][0]
    assert unused["attention_res_norm"].shape == (packed.config.hidden_size,)  # kept for export
