"""Layouts and meshes: what the table says, what it refuses, and what follows from it."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from sharding_rules import SINGLE, Layout, axes, helix
from sharding_rules.mesh import device_mesh


def test_every_logical_axis_has_one_rule_and_one_line_of_meaning():
    assert [axis for axis, _ in helix(2, 4).rules].sort() == list(axes.ALL).sort()
    assert len(set(axes.ALL)) == len(axes.ALL)
    constants = {value for key, value in vars(axes).items() if key.isupper() and isinstance(value, str)}
    assert constants == set(axes.ALL)


def test_the_table_of_the_design():
    every, tp, cp, nowhere = ("tp", "cp"), ("tp",), ("cp",), ()
    table = dict(helix(2, 4).rules)
    assert table == {
        "batch": nowhere, "length": nowhere, "embed": nowhere, "q_lora": nowhere, "kv_lora": nowhere,
        "latent": nowhere, "slots": nowhere, "latent_moe": nowhere, "qkv_a": nowhere,
        "vocab": every, "heads": tp, "heads_merged": every, "stripes": cp, "kda_heads": every, "hidden": every,
        "experts": every,
    }  # fmt: skip
    assert dict(helix(2, 4, shard_qkv_a=True).rules) == table | {"qkv_a": every}
    assert SINGLE == helix(tp=1, cp=1) and SINGLE.ranks == 1


def test_layouts_are_values():
    assert helix(2, 4) == helix(2, 4) and hash(helix(2, 4)) == hash(helix(2, 4))
    assert len({helix(2, 4), helix(4, 2), helix(2, 4, tokens_per_block=8), helix(2, 4, shard_qkv_a=True)}) == 4
    assert helix(2, 4).resized(1, 8) == helix(1, 8)


def test_specs_have_no_trailing_nones():
    layout = helix(2, 4)
    assert layout.spec(axes.BATCH, axes.LENGTH, axes.EMBED) == PartitionSpec()
    assert layout.spec(axes.HEADS, None, axes.KV_LORA) == PartitionSpec("tp")
    assert layout.spec(None, axes.KDA_HEADS, None) == PartitionSpec(None, ("tp", "cp"))
    with pytest.raises(ValueError, match="a mesh axis can split only one of them"):
        layout.spec(axes.HEADS, axes.EXPERTS)


def test_shards_are_counted_and_cut_without_a_device():
    layout = helix(2, 16, shard_qkv_a=True)
    assert [layout.shards(axis) for axis in ("heads", "stripes", "experts", "embed")] == [2, 16, 32, 1]
    assert layout.shard_shape((2112, 7168), axes.QKV_A, axes.EMBED) == (66, 7168)
    assert layout.shard_shape((3, 96, 5), None, axes.HEADS, None) == (3, 48, 5)
    with pytest.raises(ValueError, match="evenly divide"):
        layout.shard_shape((33, 5), axes.EXPERTS, None)


@pytest.mark.parametrize(("tp", "cp"), [(2, 4), (4, 2), (1, 8), (8, 1)])
def test_cp_is_the_fastest_axis_of_the_mesh(tp, cp):
    """Device (t, c) is rank t * cp + c: the head chunk that it owns after the combine."""
    mesh = helix(tp, cp).mesh()
    assert mesh.axis_names == ("tp", "cp") and mesh.axis_types == (AxisType.Auto, AxisType.Auto)
    for t, c in np.ndindex(tp, cp):
        assert mesh.devices[t, c] == jax.devices()[t * cp + c]
    layout = helix(tp, cp)
    owned = layout.sharding(mesh, axes.HEADS_MERGED).devices_indices_map((16,))
    for t, c in np.ndindex(tp, cp):
        first = (t * cp + c) * 16 // 8
        assert owned[mesh.devices[t, c]][0].indices(16)[:2] == (first, first + 2)


def test_a_mesh_takes_the_first_devices_or_the_given_ones():
    assert list(helix(1, 2).mesh().devices.flat) == jax.devices()[:2]
    assert list(helix(2, 1).mesh(jax.devices()[4:]).devices.flat) == jax.devices()[4:6]


@pytest.mark.parametrize(("tp", "cp", "given"), [(4, 4, None), (2, 1, 1)])
def test_too_few_devices_are_an_error_that_says_how_to_simulate_more(tp, cp, given):
    devices = None if given is None else jax.devices()[:given]
    have = 8 if given is None else given
    with pytest.raises(ValueError, match=rf"tp={tp} x cp={cp} needs {tp * cp} devices, but there are {have} \(cpu\)"):
        device_mesh(tp, cp, devices)
    with pytest.raises(ValueError, match=rf"simulate_devices\({tp * cp}\) before JAX starts, or --devices {tp * cp}"):
        helix(tp, cp).mesh(devices)


def test_a_replaced_rule_changes_that_rule_alone():
    layout = helix(2, 4)
    edited = layout.replace(latent_moe=("tp", "cp"), vocab="cp", kda_heads=None)
    changed = {axis: to for axis, to in edited.rules if to != layout.mesh_axes(axis)}
    assert changed == {"latent_moe": ("tp", "cp"), "vocab": ("cp",), "kda_heads": ()}
    assert edited.replace(latent_moe=None, vocab=("tp", "cp"), kda_heads=("tp", "cp")) == layout


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"heads": ("tp", "cp")}, r"heads=\('tp', 'cp'\), heads_merged=\('tp', 'cp'\): the combine"),
        ({"heads_merged": ("cp", "tp")}, r"heads_merged must be heads followed by 'cp'"),
        ({"stripes": "tp"}, r"stripes=\('tp',\): the latent cache is striped over \('cp',\)"),
        ({"batch": "tp"}, r"batch=\('tp',\): no code splits this axis; leave it replicated"),
        ({"embed": "tp"}, r"embed=\('tp',\): no code splits this axis"),
        ({"experts": "tp"}, r"hidden=\('tp', 'cp'\), experts=\('tp',\): routed and shared experts are summed"),
        ({"vocab": ("tp", "tp")}, r"vocab=\('tp', 'tp'\): mesh axes are a tuple out of \('tp', 'cp'\)"),
        ({"vocab": "dp"}, r"vocab=\('dp',\): mesh axes are a tuple out of"),
        ({"head": "tp"}, r"unknown logical axis 'head'; the names are batch, length"),
    ],
)
def test_rules_that_no_code_follows_are_refused_by_name(rules, message):
    with pytest.raises(ValueError, match=message):
        helix(2, 4).replace(**rules)


def test_a_table_must_name_every_axis_once():
    rules = helix(2, 4).rules
    with pytest.raises(ValueError, match=r"these differ: \['batch'\]"):
        Layout(2, 4, rules[1:])
    with pytest.raises(ValueError, match="rules must name each logical axis"):
        Layout(2, 4, (*rules, rules[0]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 0}, "tp=0: a whole number of at least 1"),
        ({"cp": -2}, "cp=-2: a whole number of at least 1"),
        ({"tokens_per_block": 0}, "tokens_per_block=0: a whole number of at least 1"),
        ({"tp": 2, "cp": 4, "moe_tp": 2}, r"moe_tp=2: experts are placed whole, over tp \* cp = 8 ranks; use moe_tp=1"),
        ({"attention_dp": True}, "attention_dp=True: helix splits each sequence's cache over cp"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        helix(**options)
