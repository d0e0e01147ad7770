"""Scaling over the devices that are here: what is counted, what fits, and where two lines cross."""

import dataclasses

import jax
import pytest

from kimi_jax.config import Config
from kimi_jax.measuring import scaling
from kimi_jax.measuring.crossing import Report, Scaled, crossover
from kimi_jax.measuring.machine import Machine, Timing
from kimi_jax.measuring.timing import Row, room
from kimi_jax.planning.collectives import Found
from kimi_jax.planning.plan import plan
from tests.layouts import SMALL, SMALL_K3, helix

K3, LINEAR = Config.named("kimi-k3"), Config.named("kimi-linear-48b")


def _counted(config, batch, contexts, layout):
    fits, _ = scaling.sort_out(config, layout, [(batch, c) for c in contexts], "float32", None)
    return list(scaling.count(config, layout, fits, "float32"))


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (SMALL, helix(1, 2)),
        pytest.param(SMALL, helix(2, 4), marks=pytest.mark.slow),
        pytest.param(SMALL_K3, helix(2, 2, shard_qkv_a=True), marks=pytest.mark.slow),
    ],
)
def test_collectives_are_counted_in_the_compiled_step_as_the_formula_says(config, layout):
    made = plan(config, layout, dtype="float32")
    near, far = _counted(config, 3, [8, 200], layout)
    assert near.collectives == far.collectives == sum(c.times for c in made.collectives)
    assert near.sent == far.sent == pytest.approx(3 * made.sent_a_token)
    assert far.bytes > near.bytes and (near.context, far.context, near.ranks) == (8, 200, layout.ranks)


def test_bytes_that_a_device_sends_follow_the_kind_and_the_dtype():
    buffers = (("bf16", (2, 8)), ("f32", (4,)))
    assert Found("all-gather", buffers, 4, "").sent == (32 + 16) * 3 / 4
    assert Found("all-reduce", buffers, 4, "").sent == (32 + 16) * 3 / 2
    assert Found("all-reduce", (("f32", (8,)),), 2, "", widened=True).sent == 16


def test_layouts_are_all_factorings_that_divide_one_device_first():
    assert [(x.tp, x.cp) for x in scaling.layouts(LINEAR, 4)] == [(1, 1), (1, 4), (2, 2), (4, 1), (1, 2), (2, 1)]
    both = scaling.layouts(K3, 2)
    assert [(x.tp, x.cp, bool(x.mesh_axes("qkv_a"))) for x in both] == [
        (1, 1, False), (1, 2, False), (1, 2, True), (2, 1, False), (2, 1, True),
    ]  # fmt: skip
    odd = dataclasses.replace(SMALL, num_experts=50)
    assert [(x.tp, x.cp) for x in scaling.layouts(odd, 8, (1, 8))] == [(1, 1)]


def test_what_does_not_fit_is_said_and_as_many_layers_are_kept_as_do():
    gib = 1 << 30
    cases = [(4, 8192), (4, 1 << 20)]
    fits, misfits = scaling.sort_out(LINEAR, helix(1, 1), cases, "bfloat16", 110 * gib)
    assert list(fits) == [(4, 8192)] and "context 1,048,576: does not fit" in misfits[0]
    layers = scaling._layers_that_fit(LINEAR, 8, cases, "bfloat16", 10 * gib)
    held = [
        scaling.bytes_held(scaling.leading(LINEAR, n), helix(1, 8), 4, 1 << 20, "bfloat16")
        for n in (layers, layers + 1)
    ]
    assert 1 < layers < 27 and held[0] <= 10 * gib < held[1]
    assert scaling._layers_that_fit(LINEAR, 8, cases, "bfloat16", 138 * gib) == 27
    with pytest.raises(ValueError, match="not one layer fits"):
        scaling._layers_that_fit(LINEAR, 8, cases, "bfloat16", gib // 8)


@pytest.mark.parametrize(
    ("whole", "split", "context"),
    [
        ({10: 1.0, 20: 2.0, 40: 4.0}, {10: 1.5, 20: 2.5, 40: 3.0}, 20 + 20 * 0.5 / 1.5),
        ({10: 1.0, 20: 2.0}, {10: 0.5, 20: 1.0}, 10),
        ({10: 1.0, 20: 2.0}, {10: 0.5, 20: 2.5}, None),
        ({10: 1.0}, {20: 1.0}, None),
    ],
)
def test_the_crossover_is_where_the_split_becomes_faster_for_good(whole, split, context):
    assert crossover(whole, split) == (None if context is None else pytest.approx(context))


def _row(tp, cp, batch, context, seconds):
    timed = Row("decode", batch, 1, context, context, Timing(seconds, seconds, seconds), 1, 1, 0.5 * seconds, None)
    return Scaled(f"{tp}x{cp}", tp * cp, tp, cp, batch, context, 1, 1, 1.0, timed, 0.1 * seconds)


def test_the_report_compares_with_one_device_and_keeps_the_layouts_that_lose():
    rows = [_row(1, 1, 4, c, s) for c, s in ((10, 4.0), (20, 8.0))]
    rows += [_row(2, 1, 4, c, s) for c, s in ((10, 2.0), (20, 6.0))]
    rows += [_row(1, 2, 4, c, s) for c, s in ((10, 3.0), (20, 4.0))]
    report = Report({"layers": 2, "dtype": "bfloat16"}, Machine("H", 2, 1.0, 1.0, {}), rows, ["1x8: not begun"])
    assert report.crossovers == [{"ranks": 2, "batch": 4, "context": 10 + 10 / 3}]
    said = repr(report)
    assert "2.00x" in said and "1.33x" in said and "1x8: not begun" in said
    assert "2 ranks, batch 4: cp pays from context 13 on" in said


def test_a_report_without_one_kind_of_layout_says_nothing_of_what_pays():
    rows = [_row(1, 1, 4, 10, 4.0), _row(1, 2, 4, 10, 3.0)]
    report = Report({"layers": 2, "dtype": "bfloat16"}, Machine("H", 2, 1.0, 1.0, {}), rows)
    assert report.crossovers == [] and "pay" not in repr(report)


@pytest.mark.slow
def test_a_layout_is_timed_with_one_model_and_one_loop_a_batch():
    layout, cases = helix(1, 2), [(1, 16), (2, 16), (2, 100)]
    fits, _ = scaling.sort_out(SMALL, layout, cases, "float32", None)
    rows = list(scaling.measure(SMALL, layout, fits, "float32", Machine("test", 2, 1e9, 1e9, {})))
    assert [(row.batch, row.context) for row in rows] == cases
    made = plan(SMALL, layout, dtype="float32")
    for row in rows:
        assert row.timed.seconds.median > 0 and row.timed.capacity >= room(row.context)
        assert row.collectives == sum(c.times for c in made.collectives)
        assert row.timed.phases == [] and row.in_collectives is None  # no timeline on CPUs


@pytest.mark.slow
def test_on_simulated_devices_a_run_counts_every_layout():
    seen = []
    report = scaling.run(
        SMALL, batches=[2], contexts=[8], dtype="float32", after_each=lambda r: seen.append(len(r.rows))
    )
    assert report.machine is None and len(report.rows) == 1 + 2 * (2 + 3 + 4) == seen[-1]
    assert all(row.timed is None for row in report.rows) and "nothing is timed" in repr(report)
    assert jax.device_count() >= 8
