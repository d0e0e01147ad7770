"""The floors: what is counted from shapes, against the plan's own count and against figures worked out by hand."""

import pytest

from kimi_jax.config import Config
from kimi_jax.measuring import floors
from kimi_jax.measuring.floors import decode_costs, phase_of, prefill_costs, total
from kimi_jax.planning.plan import plan
from sharding_rules import SINGLE, helix

LINEAR, K3 = Config.named("kimi-linear-48b"), Config.named("kimi-k3")
MATRIX_RATE = 790e12  # of an H200, bfloat16


@pytest.mark.parametrize(("config", "layout"), [(LINEAR, SINGLE), (LINEAR, helix(2, 4)), (K3, helix(1, 16))])
def test_a_decode_step_that_hits_every_expert_reads_what_the_plan_holds(config, layout):
    batch, context = 3, 64 * 16 * 5
    made = plan(config, layout, batch=batch, context=context)
    embedding = config.vocab_size // layout.ranks * config.hidden_size * 2
    # After the combine a rank needs the value half of its own heads alone; `v_b` is held for its tp slice of them.
    heads = config.num_attention_heads
    rest = (heads // layout.tp - heads // layout.ranks) * config.v_head_dim * config.kv_lora_rank * 2
    wanted = (
        made.weights - embedding + batch * config.hidden_size * 2 - len(config.mla_layers) * rest
        + made.kv_cache + 2 * (made.kda_state + made.conv_state)
    )  # fmt: skip
    costs = decode_costs(config, layout, "bfloat16", batch, context, config.num_experts / layout.ranks)
    assert total(costs).bytes == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(("batch", "tokens", "milliseconds"), [(1, 8192, 57), (32, 1024, 226)])
def test_the_weights_of_a_prefill_take_the_time_worked_out_by_hand(batch, tokens, milliseconds):
    costs = prefill_costs(LINEAR, SINGLE, "bfloat16", batch, tokens, 256.0)
    pairs = 7 * 2 * 32 * (128 + 64 + 128) * batch * tokens * (tokens + 1) / 2  # attended in the expanded form
    mixed = 20 * batch * tokens * 32 * (6 * 128**2 + 10 * 128 * 65 / 2 + 2 * 128 * (3 * 4 + 1))  # and convolution, dt
    assert costs[floors.KDA_MIX].operations == pytest.approx(mixed)
    assert costs[floors.ATTEND].operations == pytest.approx(pairs + 7 * 2 * batch * tokens * 32 * 512 * 256)
    weights = (total(costs).operations - pairs - mixed) / MATRIX_RATE
    assert weights * 1e3 == pytest.approx(milliseconds, rel=0.01)


def test_a_prefill_writes_rows_and_states_once_and_reads_no_more_than_the_weights():
    made = plan(LINEAR, SINGLE, batch=2, context=8192)
    costs = prefill_costs(LINEAR, SINGLE, "bfloat16", 2, 8192, 256.0)
    looked_up = 2 * 8192 * LINEAR.hidden_size * 2
    embedding = LINEAR.vocab_size * LINEAR.hidden_size * 2
    kept = made.kv_cache + made.kda_state + made.conv_state
    assert total(costs).bytes == pytest.approx(made.weights - embedding + looked_up + kept, rel=1e-12)


def test_experts_count_by_those_hit():
    few, every = (decode_costs(LINEAR, SINGLE, "bfloat16", 1, 100, h)[floors.EXPERTS].bytes for h in (8.0, 256.0))
    expert = 3 * 2304 * 1024 * 2
    assert every - few == 26 * (256 - 8) * expert


def test_decode_attends_absorbed_and_a_stripe_holds_its_share():
    one, eight = (decode_costs(LINEAR, helix(1, cp), "bfloat16", 4, 1 << 20, 8.0)[floors.ATTEND] for cp in (1, 8))
    pairs = 4 * (1 << 20) * 32 * (2 * 512 + 64)
    assert one.operations == pytest.approx(7 * 2 * (pairs + 4 * 512 * 32 * (128 + 128)))
    assert one.bytes / eight.bytes == pytest.approx(8, rel=0.01)


@pytest.mark.parametrize(
    ("scope", "phase"),
    [
        ("jit(run)/while/body/layer_3/mla_attend/attend/cond/branch_0_fun/mla_attend_stretch/pallas_call", "attend"),
        ("jit(run)/layer_3/mla_attend/combine/all_to_all", "combine"),
        ("jit(run)/layer_0/kda_mix/cond/branch_0_fun/within_chunks/dot_general", "KDA mix"),
        ("jit(run)/while/body/layer_12/add", "norms and sums"),
        ("jit(run)/while/body/head/dot_general", "head"),
        ("jit(run)/while/body/vmap()/reduce_max", "sampling and the rest"),
    ],
)
def test_a_scope_belongs_to_its_innermost_phase(scope, phase):
    assert phase_of(scope) == phase
