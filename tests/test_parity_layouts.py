"""One model, every mesh: the same logits and the same tokens as one device; and broken rules do not pass."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

import kimi_jax
from kimi_jax.config import Config
from kimi_jax.loading import random_model
from kimi_jax.ops import helix as helix_op
from kimi_jax.planning.plan import plan
from kimi_jax.runtime import Model
from sharding_rules import SINGLE, axes, helix
from sharding_rules.layout import Layout
from tests.checkpoints import making
from tests.checkpoints.test_loading import write_raw
from tests.layouts import (
    CAPACITY,
    SMALL,
    SMALL_K3,
    check_parity,
    layouts,
    name,
    one_device,
    outcome,
    spread,
)

BOTH = helix(2, 4, tokens_per_block=4)  # tp and cp above 1: the mesh on which an order can be wrong


@pytest.mark.parametrize("layout", layouts(1, 2, 4, switches=(False,)) + layouts(8), ids=name)
def test_every_mesh_gives_the_logits_and_tokens_of_one_device(layout):
    check_parity(outcome(spread(layout)))


@pytest.mark.slow
@pytest.mark.parametrize("layout", layouts(1, 2, 4, switches=(True,)), ids=name)
def test_every_mesh_of_fewer_than_eight_gives_the_same_with_the_merged_projection_split(layout):
    check_parity(outcome(spread(layout)))


@pytest.mark.parametrize(
    "layout", [helix(2, 4, shard_qkv_a=True, tokens_per_block=4), helix(1, 8, tokens_per_block=4)], ids=name
)
def test_kimi_k3_gives_the_logits_and_tokens_of_one_device(layout):
    check_parity(outcome(spread(layout, SMALL_K3)), SMALL_K3)


@pytest.mark.parametrize(
    "rules",
    [
        {"vocab": None, "hidden": None, "experts": None},
        {"kda_heads": "cp", "hidden": "tp", "experts": "tp"},
        {"heads": (), "heads_merged": "cp", "qkv_a": "cp"},
        {"experts": ("cp", "tp"), "hidden": ("cp", "tp"), "kda_heads": ("cp", "tp"), "vocab": "tp"},
    ],
    ids=str,
)
def test_edited_rules_give_the_logits_and_tokens_of_one_device(rules):
    check_parity(outcome(spread(BOTH.replace(**rules))))


def test_the_latent_moe_may_be_split_by_one_edited_rule():
    layout = BOTH.replace(latent_moe=("tp", "cp"))
    check_parity(outcome(spread(layout, SMALL_K3)), SMALL_K3)
    assert plan(SMALL_K3, layout).weights < plan(SMALL_K3, BOTH).weights


def test_random_weights_are_the_same_under_every_layout():
    for layout in (helix(4, 2), helix(1, 8, shard_qkv_a=True)):
        model = random_model(SMALL, layout=layout, dtype="float32")
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), model.params,
                     one_device().params)  # fmt: skip
        placed = jax.tree.map(lambda x, at: x.sharding.is_equivalent_to(at, x.ndim), model.params, model.shardings())
        assert all(jax.tree.leaves(placed))


SIXTEEN = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 16)
jax.config.update("jax_platforms", "cpu")
if sys.argv[1]:
    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
from tests.layouts import SMALL, SMALL_K3, check_parity, layouts, outcome, spread
config = SMALL_K3 if sys.argv[2] == "k3" else SMALL
for layout in layouts(16):
    check_parity(outcome(spread(layout, config)), config)
print("parity on", len(layouts(16)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("model", ["linear", "k3"])
def test_sixteen_devices_give_the_logits_and_tokens_of_one(model):
    done = subprocess.run(
        [sys.executable, "-c", SIXTEEN, jax.config.jax_compilation_cache_dir or "", model],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "parity on 10" in done.stdout


# ------------------------------------------------------------------------------------- loading, on eight devices
@pytest.mark.parametrize("layout", [helix(2, 4), helix(8, 1), helix(1, 8)], ids=name)
def test_each_device_reads_its_part_once_and_holds_what_the_plan_says(data, layout):
    folder = data / "kimi-linear-random"
    model = kimi_jax.load(folder, layout=layout, progress=False)
    planned = plan(Config.from_hf(folder), layout, dtype=model.config.dtype)
    assert set(model.report.bytes_per_device.values()) == {planned.weights}
    assert len(model.report.bytes_per_device) == 8
    assert model.report.bytes_read <= sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    state = model.new_state(3, 100)
    held = {device: 0 for device in model.mesh.devices.flat}
    for leaf in jax.tree.leaves(state.cache.layers):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    asked = plan(model.config, layout, batch=3, context=100, dtype=model.config.dtype)
    assert set(held.values()) == {asked.kv_cache + asked.kda_state + asked.conv_state}


def test_every_way_to_a_state_splits_kda_heads_over_all_ranks():
    model = spread(BOTH)
    state = model.new_state(2, CAPACITY)
    ways = {
        8: [state, state.fork(), state.fork(2), state.row(1), state.to(helix(8, 1)), state.to(helix(1, 8))],
        4: [state.to(helix(2, 2))],
        1: [state.to(SINGLE)],
    }
    heads = SMALL.kda_num_heads
    for ranks, states in ways.items():
        for layer in (s.cache.layers[0] for s in states):
            assert {shard.data.shape[1] for shard in layer.recurrent.addressable_shards} == {heads // ranks}
            assert {shard.data.shape[2] for shard in layer.conv.addressable_shards} == {heads // ranks}
            assert len(layer.recurrent.addressable_shards) == ranks


def test_a_block_quantised_merged_projection_is_dequantised_onto_its_shards(tmp_path):
    """fp8 with a scale a 128 x 128 block, whose edges fall within the shards: the shards hold the products."""
    config = making.small(hidden_size=136, q_lora_rank=160)
    hub, exact = making.hub_arrays(config), []
    rng, stored = np.random.default_rng(3), {}
    for tensor, array in hub.items():
        if not tensor.startswith("model.layers.1.") or "_a_proj" not in tensor:
            stored[tensor] = ("F32", array)
            continue
        values = rng.normal(size=array.shape).astype(ml_dtypes.float8_e4m3fn)
        scale = rng.uniform(0.1, 4, [-(-size // 128) for size in array.shape]).astype(np.float32)
        stored |= {tensor: ("F8_E4M3", values), tensor + "_scale_inv": ("F32", scale)}
        rows, columns = array.shape
        exact.append((values.astype(np.float32) * np.kron(scale, np.ones((128, 128)))[:rows, :columns], tensor))
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    write_raw(tmp_path / "model.safetensors", stored)
    model = kimi_jax.load(tmp_path, layout=helix(2, 4, shard_qkv_a=True), dtype="float32", progress=False)
    merged = model.params["layers"][1]["attention"]["qkv_a"]
    q_a, kv_a = (next(value for value, tensor in exact if part in tensor) for part in (".q_a_proj", ".kv_a_proj"))
    np.testing.assert_array_equal(np.asarray(merged), np.concatenate([q_a, kv_a]).astype(np.float32))
    assert {shard.data.shape for shard in merged.addressable_shards} == {(22, 136)}


# ---------------------------------------------------------------------------------- what is broken must not pass
def misplaced(model: Model, path: tuple, axis: int, chunk_of) -> dict:
    """The parameters of a model, one of them loaded wrongly: device (t, c) holds chunk chunk_of(t, c) of `axis`."""
    params = jax.tree.map(lambda x: x, model.params)
    node = params
    for key in path[:-1]:
        node = node[key]
    array, devices = node[path[-1]], model.mesh.devices
    chunks = np.split(np.asarray(array), model.layout.ranks, axis=axis)
    parts = [jax.device_put(chunks[chunk_of(t, c)], devices[t, c]) for t, c in np.ndindex(*devices.shape)]
    node[path[-1]] = jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)
    return params


O_PROJ, DENSE_UP = ("layers", 1, "attention", "o"), ("layers", 0, "ffn", "gate_up")
MISPLACED = {
    "as_it_should_be": (O_PROJ, 1, lambda t, c: t * 4 + c),
    "o_proj_in_the_swapped_order": (O_PROJ, 1, lambda t, c: c * 2 + t),
    "o_proj_by_the_wrong_axis": (O_PROJ, 1, lambda t, c: c),
    "shard_0_everywhere": (DENSE_UP, 1, lambda t, c: 0),
}


@pytest.mark.parametrize("mutant", MISPLACED)
def test_a_parameter_loaded_onto_the_wrong_devices_fails_parity(mutant):
    model = spread(BOTH)
    params = model.params
    try:
        model.params = misplaced(model, *MISPLACED[mutant])
        found = outcome(model)
    finally:
        model.params = params
    if mutant == "as_it_should_be":
        check_parity(found)
    else:
        with pytest.raises(AssertionError):
            check_parity(found)


def unchecked(layout: Layout, **rules) -> Layout:
    """A layout with rules that Layout itself would refuse."""
    broken = layout.replace()
    object.__setattr__(broken, "rules", tuple((axis, rules.get(axis, to)) for axis, to in layout.rules))
    return broken


SWAPPED = {"heads_merged": ("cp", "tp")}


def test_a_swapped_mesh_order_fails_parity_where_both_axes_are_above_one():
    with pytest.raises(AssertionError):
        check_parity(outcome(spread(unchecked(BOTH, **SWAPPED))))


def test_a_swapped_mesh_order_is_refused_by_the_layout():
    with pytest.raises(ValueError, match=r"heads_merged=\('cp', 'tp'\): the combine splits each rank's heads"):
        BOTH.replace(**SWAPPED)


def test_a_missing_combine_fails_parity(monkeypatch):
    def own_chunk_only(part, stripe):
        heads = part.out.shape[2] // stripe.ranks
        return jax.lax.dynamic_slice_in_dim(part.out, stripe.rank * heads, heads, axis=2)

    monkeypatch.setattr(helix_op, "combine", own_chunk_only)
    model = Model(SMALL, BOTH, "float32")
    model.params = spread(BOTH).params
    with pytest.raises(AssertionError):
        check_parity(outcome(model))


def test_experts_and_shared_experts_split_differently_are_refused():
    with pytest.raises(ValueError, match=r"hidden=\('tp',\), experts=\('tp', 'cp'\): .* replace both"):
        BOTH.replace(hidden="tp")
    assert BOTH.replace(hidden="tp", experts="tp").shards(axes.EXPERTS) == 2
