"""What `plan` says, to the byte: the published figures, hand counts, compiled steps, and which devices would do."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from kimi_jax.config import KIMI_K3, KIMI_LINEAR_48B
from kimi_jax.model import build
from kimi_jax.placement import declared
from kimi_jax.planning import estimate
from kimi_jax.planning.collectives import needed
from kimi_jax.planning.compile_check import Check, check, check_apart
from kimi_jax.planning.devices import DEVICES, GIB, RESERVED, usable
from kimi_jax.planning.explain import explain
from kimi_jax.planning.plan import Plan, layouts_that_fit, plan
from sharding_rules import SINGLE, helix
from tests.layouts import SMALL, SMALL_K3

K3_SPLIT = helix(1, 16, shard_qkv_a=True)


# ------------------------------------------------------------------------------------- published and hand counts
def test_kimi_k3s_weights_are_counted_to_the_byte():
    """MXFP4 experts, bfloat16 otherwise, float32 gates; layer 0's unread attention residuals are held."""
    assert plan(KIMI_K3, SINGLE).weights == 1_559_965_598_080


def test_kimi_linears_weights_are_the_hubs_total_size():
    assert plan(KIMI_LINEAR_48B, SINGLE).weights == 98_245_528_576


def test_kimi_k3s_states_are_counted_to_the_byte():
    one = plan(KIMI_K3, SINGLE, context=8192)
    assert one.kv_cache == 27_648 * 8192 and one.kv_cache_a_token == 27_648
    assert one.kda_state == 434_110_464
    assert one.conv_state == 15_261_696


@pytest.mark.parametrize("layout", [helix(1, 16), helix(4, 4), helix(16, 1), K3_SPLIT], ids=repr)
def test_states_shrink_with_the_ranks_that_split_them(layout):
    """KDA's with all of them; the latent cache with cp alone."""
    made = plan(KIMI_K3, layout, batch=3, context=4096)
    assert made.kda_state * 16 == 3 * 434_110_464
    assert made.conv_state * 16 == 3 * 15_261_696
    assert made.kv_cache * layout.cp == 3 * 4096 * 27_648
    assert made.kv_cache_a_token == 27_648


def test_shard_qkv_a_saves_the_published_figure():
    saved = 24 * 2112 * 7168 * 2 * 15 // 16
    assert saved == 681_246_720
    on, off = plan(KIMI_K3, K3_SPLIT), plan(KIMI_K3, helix(1, 16))
    assert off.weights - on.weights == on.qkv_a_saving == off.qkv_a_saving == saved
    assert "shard_qkv_a=True saves 681,246,720 bytes a device (0.634 GiB)" in on.table()
    assert "shard_qkv_a=True would save 681,246,720 bytes a device (0.634 GiB)" in off.table()
    assert explain(KIMI_K3, K3_SPLIT)["mla.qkv_a"].shard == (2112 // 16, 7168)
    assert explain(KIMI_K3, helix(1, 16))["mla.qkv_a"].shard == (2112, 7168)
    assert plan(KIMI_LINEAR_48B, helix(1, 16)).qkv_a_saving is None


def test_contexts_round_up_to_whole_stripes():
    made = plan(SMALL, helix(1, 4, tokens_per_block=8), context=65)
    assert made.capacity == 96
    assert made.kv_cache == 96 // 4 * (SMALL.kv_lora_rank + SMALL.qk_rope_head_dim) * 2


def test_float32_takes_twice_what_bfloat16_does_but_for_what_keeps_its_dtype():
    half, full = plan(KIMI_LINEAR_48B, SINGLE), plan(KIMI_LINEAR_48B, SINGLE, dtype="float32")
    gates = 20 * (32 + 4096) * 4  # A_log and dt_bias
    assert full.weights - gates == 2 * (half.weights - gates)
    assert (full.kv_cache, full.kda_state, full.conv_state) == (2 * half.kv_cache, half.kda_state, 2 * half.conv_state)


def test_parts_are_the_weights_again():
    made = plan(KIMI_K3, K3_SPLIT)
    assert sum(made.parts.values()) == made.weights
    assert next(iter(made.parts)) == "routed experts"
    assert made.parts["routed experts"] * 16 == 1_446_456_066_048  # the hub's count of U8 elements


# ---------------------------------------------------------------------------------------- against compiled steps
@pytest.mark.parametrize("config", [SMALL, SMALL_K3], ids=["kimi-linear", "kimi-k3"])
def test_a_compiled_step_takes_in_the_planned_bytes_and_has_the_planned_collectives(config):
    made = plan(config, helix(2, 4, shard_qkv_a=True, tokens_per_block=4), batch=4, context=64, dtype="float32")
    found = check(made)
    assert found.arguments == found.planned and found.differences == () and found.agrees
    assert len(found.collectives) == sum(c.times for c in made.collectives) == 8
    assert "as planned, to the byte" in repr(found) and "as the formula says" in repr(found)
    assert Check.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_a_check_says_what_is_not_as_planned():
    made = plan(SMALL, SINGLE, dtype="float32")
    none = Check(1, (), ("kda: 1 x all-reduce",), 10, 11, 5, 6, 0.5, 7 << 20)
    assert not none.agrees and not dataclasses.replace(none, differences=()).agrees
    assert "but planned were 11" in repr(none) and "NOT as the formula says:\n    kda: 1 x" in repr(none)
    assert made.collectives == ()


def test_the_check_runs_in_a_process_of_its_own_with_devices_of_its_own():
    """Sixteen ranks, which this process does not have."""
    made = plan(SMALL, helix(4, 4, shard_qkv_a=True), batch=1, context=256)
    found = check_apart(made)
    assert found.agrees and {f.ranks for f in found.collectives} == {16, 4}
    assert found.seconds > 0 and found.peak_resident > 50 << 20
    assert json.loads(json.dumps(found.to_json()))["agrees"]


def test_a_failing_process_is_reported():
    made = dataclasses.replace(plan(SMALL, helix(1, 2)), dtype="float8")
    with pytest.raises(RuntimeError, match=r"(?s)compiling tp=1 x cp=2 = 2 ranks failed:.*dtype='float8'"):
        check_apart(made)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [helix(1, 8), helix(8, 1)], ids=repr)
def test_the_estimate_of_activations_is_within_a_factor_of_two_of_xlas(layout):
    """Kimi Linear's own widths, three layers, 1,024 tokens, in float32 (CPUs widen bfloat16)."""
    config = dataclasses.replace(KIMI_LINEAR_48B, num_hidden_layers=3, mla_layers=(1,))
    found = check_apart(plan(config, layout, context=2048, dtype="float32"), length=1024)
    assert found.agrees and 0.5 <= found.estimated / found.temporary <= 2


@pytest.mark.slow
def test_kimi_k3s_decode_step_compiles_for_sixteen_ranks():
    found = check_apart(plan(KIMI_K3, K3_SPLIT, context=131_072))
    assert found.agrees and len(found.collectives) == 236
    assert found.peak_resident < 6 << 30


# ------------------------------------------------------------------------------------------------ which would do
def test_kimi_k3_fits_sixteen_h200_and_not_eight():
    assert plan(KIMI_K3, helix(1, 16), context=131_072).fits("H200")
    assert not plan(KIMI_K3, helix(1, 8), context=131_072).fits("H200")
    assert not plan(KIMI_K3, helix(1, 16), context=131_072).fits("H100")
    smallest = layouts_that_fit(KIMI_K3, "H200", context=131_072)[0]
    assert smallest.layout.ranks == 16


def test_the_search_gives_all_layouts_that_fit_and_none_that_does_not():
    found = layouts_that_fit(KIMI_LINEAR_48B, "H100", context=131_072, batch=16)
    assert [p.layout.ranks for p in found] == sorted(p.layout.ranks for p in found)
    assert found[0].layout.ranks == 2 and all(p.fits("H100") for p in found)
    assert len({(p.layout.tp, p.layout.cp) for p in found}) == len(found) == 20  # all but one device
    assert not plan(KIMI_LINEAR_48B, SINGLE, context=131_072, batch=16).fits("H100")
    assert {p.layout.ranks for p in layouts_that_fit(KIMI_LINEAR_48B, "H100", max_ranks=8)} == {2, 4, 8}
    split = layouts_that_fit(KIMI_K3, "H200", layout=helix(shard_qkv_a=True))
    assert all(p.layout.mesh_axes("qkv_a") for p in split) and split[0].layout.ranks == 16


def test_room_is_what_is_left_of_a_device():
    made = plan(KIMI_LINEAR_48B, helix(2, 4))
    assert made.total == made.weights + made.kv_cache + made.kda_state + made.conv_state + made.activations
    assert made.room("H200") == (139 - RESERVED) * GIB - made.total == usable("H200") - made.total
    assert made.fits(made.total) and not made.fits(made.total - 1)
    with pytest.raises(
        ValueError, match="device='H800': one of A100, H100, H200, B200 was wanted, or a number of bytes"
    ):
        made.fits("H800")


def test_more_context_and_more_rows_take_more():
    base = plan(KIMI_LINEAR_48B, helix(2, 4), batch=1, context=4096)
    long = plan(KIMI_LINEAR_48B, helix(2, 4), batch=1, context=8192)
    wide = plan(KIMI_LINEAR_48B, helix(2, 4), batch=2, context=4096)
    assert long.kv_cache == wide.kv_cache == 2 * base.kv_cache
    assert wide.kda_state == 2 * base.kda_state and long.kda_state == base.kda_state
    assert base.activations == long.activations < wide.activations
    assert estimate.step(KIMI_K3, SINGLE, 1, 1, "bfloat16") < estimate.step(KIMI_K3, SINGLE, 1, 16, "bfloat16")


# ------------------------------------------------------------------------------------------------- what it shows
def test_a_plan_prints_as_text_html_and_json():
    made = plan(KIMI_K3, K3_SPLIT, batch=2, context=1000)
    text = made.table()
    assert repr(made) == text
    for said in ("tp=1 x cp=16 = 16 ranks, shard_qkv_a", "batch 2, context 1,000 (capacity 1,024), bfloat16",
                 f"{made.weights:,}", f"{made.total:,}", "H200 yes", "H100 no", "27,648 bytes a token"):  # fmt: skip
        assert said in text
    html = made._repr_html_()
    assert html.count("<table>") == html.count("</table>") == 2 and f"{made.weights:,}" in html
    values = json.loads(json.dumps(made.to_json()))
    assert values["weights"] == made.weights and values["total"] == made.total
    assert values["layout"]["tp"] == 1 and values["layout"]["rules"]["qkv_a"] == ["tp", "cp"]
    assert set(values["room"]) == set(DEVICES)
    assert sum(c["times"] for c in values["collectives"]) == 236
    assert np.isclose(sum(c["sent"] * c["times"] for c in values["collectives"]), made.sent_a_token)


# -------------------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch=0: a whole number"),
        ({"context": 0}, "context=0: a whole number"),
        ({"dtype": "float16"}, "dtype='float16': 'float32' or 'bfloat16'"),
    ],
)
def test_arguments_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        plan(SMALL, SINGLE, **options)


def test_a_layout_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="tp=1 x cp=3 does not fit"):
        plan(KIMI_K3, helix(1, 3))


def test_declarations_depend_on_the_layout_only_where_heads_are_padded():
    """The search over layouts builds the model once."""
    for layout in (helix(2, 4, shard_qkv_a=True), helix(1, 16)):
        declared_here = build(SMALL_K3, layout, "bfloat16")[1]
        assert declared_here == build(SMALL_K3, SINGLE, "bfloat16")[1]
    odd = dataclasses.replace(SMALL, num_attention_heads=18)
    shapes = dict(declared(odd, helix(2, 4, pad_heads=True), "bfloat16"))
    assert shapes["layers", 1, "attention", "o"].shape == (72, 24, 20)
    padded = plan(odd, helix(2, 4, pad_heads=True))
    assert padded.weights == plan(dataclasses.replace(odd, num_attention_heads=24), helix(2, 4)).weights


def test_formulas_do_not_depend_on_the_batch_or_the_context():
    assert plan(SMALL, helix(2, 4), batch=7, context=999).collectives == needed(SMALL, helix(2, 4), "bfloat16")
    assert isinstance(plan(SMALL, SINGLE), Plan)


@pytest.mark.parametrize(("machine", "cp"), [("16 x H200", 16), ("8 x B200", 8)])
def test_the_readmes_table_of_k3_is_what_plan_says(machine, cp):
    found = plan(KIMI_K3, helix(1, cp), batch=8, context=1 << 20)
    states = found.kda_state + found.conv_state
    room = usable(machine.split()[-1]) - found.total
    parts = (found.weights, found.parts["routed experts"], found.kv_cache, states, found.activations, found.total)
    sizes = " | ".join(f"{nbytes / GIB:.2f} GiB" for nbytes in parts)
    verdict = f"fits, {room / GIB:.2f} GiB left" if room >= 0 else f"does not fit, {-room / GIB:.2f} GiB short"
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    assert f"| {machine} | 1 x {cp} | {sizes} | {verdict} |" in readme
