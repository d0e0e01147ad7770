"""One rank alone: its bytes and its work are those of one rank among the others."""

import jax
import pytest

from kimi_jax.config import Config
from kimi_jax.measuring import rank_slice
from kimi_jax.measuring.machine import Machine, Timing
from kimi_jax.measuring.rank_slice import RankModel, estimate, leading
from kimi_jax.measuring.timing import Decoding, Row
from kimi_jax.planning.compile_check import compile_step
from kimi_jax.planning.plan import plan
from kimi_jax.runtime import Model
from kimi_jax.steps import BURST
from tests import layouts
from tests.layouts import helix

K3 = Config.named("kimi-k3")
LAYOUT = helix(1, 4, tokens_per_block=4)


def _shape(model, *path):
    here = model.declared
    for name in path:
        here = here[name]
    return here.shape


def test_a_rank_of_k3_holds_what_the_plan_says_at_the_widths_that_the_layout_gives():
    layout = helix(1, 16)
    model = RankModel(K3, layout)
    leaves = jax.tree.leaves(model.abstract())
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) == plan(K3, layout).weights
    kda, mla, dense, moe = (
        ("layers", 0, "attention"),
        ("layers", 3, "attention"),
        ("layers", 0, "ffn"),
        ("layers", 1, "ffn"),
    )
    assert _shape(model, *kda, "qkv") == (6, 3, 128, 7168)
    assert _shape(model, *mla, "q_b") == (96, 192, 1536) and _shape(model, *mla, "v_b") == (96, 128, 512)
    assert _shape(model, *mla, "g") == (6, 128, 7168) and _shape(model, *mla, "o") == (7168, 6, 128)
    assert _shape(model, *dense, "down") == (7168, 2112) and _shape(model, *moe, "shared_down") == (7168, 384)
    assert _shape(model, *moe, "experts_gate_up_packed") == (56, 2, 3072, 1792)
    assert _shape(model, *moe, "latent_up") == (7168, 3584) and _shape(model, "lm_head") == (10240, 7168)
    context, batch = 1 << 20, 8
    cache = model.cache_structs(batch, context)
    made = plan(K3, layout, batch=batch, context=context)
    bytes_held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache.layers))
    assert bytes_held == made.kv_cache + made.kda_state + made.conv_state
    assert cache.layers[3].rows.shape == (8, 1, 65536, 576)


def test_a_rank_alone_does_the_work_of_a_rank_among_others():
    config = layouts.SMALL_K3
    executables = []
    for model in (RankModel(config, LAYOUT, "float32"), Model(config, LAYOUT, "float32")):
        executables.append(compile_step(model, 4, 64))
    alone, among = executables
    assert alone.memory_analysis().argument_size_in_bytes == among.memory_analysis().argument_size_in_bytes
    flops = [executable.cost_analysis()["flops"] for executable in executables]
    assert flops[0] == pytest.approx(flops[1], rel=0.05)


@pytest.mark.slow
def test_a_rank_alone_decodes():
    model = RankModel(layouts.SMALL_K3, LAYOUT, "float32")
    model.fill()
    decoding = Decoding(model, 2, 256, rank=0)
    row = decoding.time(Machine("test", 1, 1e9, 1e9, {}), 16)
    assert row.capacity == 256 and row.floor > 0
    assert 0 <= row.experts_hit.fullest <= min(12, row.experts_hit.all) <= 2 * 3
    assert decoding.state.lengths.tolist() == [16 + 6 * 32] * 2
    assert 32 <= BURST  # a timed burst is one run of the loop


def test_an_estimate_adds_the_layers_that_were_not_timed_and_the_exchanges():
    def row(seconds):
        return Row("decode", 8, 1, 1024, 2048, Timing(seconds, seconds, seconds), 1, 1, 1.0, None)

    machine = Machine("test", 1, 1e12, 1e15, {})
    found = estimate(K3, helix(1, 16), "bfloat16", machine, row(1e-3), row(1.75e-3))
    made = plan(K3, helix(1, 16))
    assert found.computed == pytest.approx(1e-3 + 89 / 4 * 0.75e-3)
    assert found.sent == 8 * made.sent_a_token and found.collectives == 1 + 69 + 2 * 24 + 1 + 92 + 1
    exchanged = found.collectives * rank_slice.LATENCY + found.sent / rank_slice.LINK_RATE
    assert found.total == pytest.approx(found.computed + exchanged)


def test_the_first_layers_are_those_of_the_model():
    cut = leading(K3, 8)
    assert cut.mla_layers == (3, 7) and cut.num_hidden_layers == 8
    assert [cut.is_moe(layer) for layer in range(8)] == [K3.is_moe(layer) for layer in range(8)]
