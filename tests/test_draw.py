"""Pictures: the text says of every device what JAX says that it holds, and HTML says the same, escaped."""

import re
from collections import Counter

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import kimi_jax
from kimi_jax import tables
from kimi_jax.checkpoints.report import LoadReport
from kimi_jax.drawing.draw import draw
from kimi_jax.runtime import Model
from sharding_rules import helix
from tests import layouts

SPREAD = helix(2, 4, tokens_per_block=4)


def numbers(words: str) -> list[int]:
    """The inverse of how runs of devices are written: "0-2, 5" -> [0, 1, 2, 5]."""
    spans = [span.split("-") for span in words.split(", ")]
    return [n for span in spans for n in range(int(span[0]), int(span[-1]) + 1)]


def read(picture: str) -> dict[int, dict[str, str]]:
    """What a picture's text says: device -> {axis: the slice of it that the device holds}, for axes that are split."""
    said: dict[int, dict[str, str]] = {}
    for table in picture.split("\n\n")[1:]:
        lines = table.splitlines()
        rule = next(i for i, line in enumerate(lines) if set(line) <= {"-", " "})
        names, *rows = (re.split("  +", line.strip()) for line in (lines[rule - 1], *lines[rule + 1 :]))
        if names[:2] == ["axis", "size"]:
            continue
        outer = dict(pair.rsplit(" ", 1) for pair in lines[0].split(", ")) if rule == 2 else {}
        for row in rows:
            if len(names) == 1:
                cells = {row[0]: {}}
            elif len(names) == 2 and names[1] in ("devices", "ranks"):
                cells = {row[1]: {names[0]: row[0]}}
            else:
                down, across = names[0].split(" \\ ")
                cells = {c: {down: row[0], across: at} for c, at in zip(row[1:], names[1:], strict=True)}
            for devices, where in cells.items():
                said |= {device: outer | where for device in numbers(devices)}
    return said


def real(sharding, shape, names) -> dict[int, dict[str, str]]:
    """The same from JAX's own map."""
    held = {
        device.id: {name: "{}:{}".format(*at.indices(size)) for name, at, size in zip(names, index, shape, strict=True)}
        for device, index in sharding.devices_indices_map(shape).items()
    }
    split = [name for name in names if len({where[name] for where in held.values()}) > 1]
    return {device: {name: where[name] for name in split} for device, where in held.items()}


CASES = [
    ((), ()),
    ((16,), ()),
    ((16,), (("b", "a"),)),
    ((6, 8), (None, ("a", "c"))),
    ((6, 8), ("c", "b")),
    ((3, 4, 5, 6), (None, "a", None, "b")),
    ((4, 6, 5, 8), ("b", "c", None, "a")),
    ((2, 1, 4, 2, 3), ("c", None, ("a",), "b")),
]


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(jax.sharding.AxisType.Auto,) * 3)


@pytest.mark.parametrize(("shape", "spec"), CASES, ids=str)
def test_the_text_gives_each_device_the_block_that_it_holds(mesh, shape, spec):
    names = [f"axis {i}" for i in range(len(shape))]
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    array = jax.device_put(np.zeros(shape, np.float32), sharding)
    wanted = real(array.sharding, shape, names)
    assert read(repr(draw(array))) == wanted and len(wanted) == 8
    assert read(repr(draw(jax.ShapeDtypeStruct(shape, np.int8, sharding=sharding)))) == wanted
    assert read(repr(draw(shape, sharding))) == wanted
    abstract = NamedSharding(mesh.abstract_mesh, PartitionSpec(*spec))
    assert read(repr(draw(shape, abstract))) == wanted  # ranks, for want of devices


def test_an_array_on_one_device_is_drawn():
    device = jax.devices()[3]
    assert read(repr(draw((4, 5), SingleDeviceSharding(device)))) == {3: {}}


def test_a_picture_counts_bytes_parts_and_copies(mesh):
    array = jax.device_put(np.zeros((4, 6, 5), np.float32), NamedSharding(mesh, PartitionSpec("a", None, None)))
    text = repr(draw(array, axes=("heads", "slots", None)))
    assert "float32[4, 6, 5] = 480 B on 8 devices (a=2 x b=2 x c=2)" in text
    assert "each holds float32[2, 6, 5] = 240 B; 4 copies of each block, over b, c" in text
    assert re.search(r"heads +4 +a +2 +2\n", text) and re.search(r"slots +6 +- +1 +6\n", text) and "axis 2" in text


def test_html_holds_the_cells_of_the_text_escaped(mesh):
    sharding = NamedSharding(mesh, PartitionSpec("a", ("b", "c")))
    html = draw((2, 8), sharding, axes=("<b>", "&"))._repr_html_()
    assert "<b>" not in html and "&lt;b&gt; \\ &amp;" in html
    found = re.findall(r"background:rgba[^>]*>([\d, -]+)<", html)
    assert [numbers(cell) for cell in found] == [[device] for device in range(8)]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: draw("weights"), "a str cannot be drawn"),
        (lambda: draw(np.zeros((2, 3))), "a ndarray of shape [2, 3] has no sharding"),
        (lambda: draw(jax.ShapeDtypeStruct((2,), np.int8)), "has no sharding"),
        (lambda: draw(jax.numpy.zeros((2, 3)), axes=("heads",)), "names 1 axes, but the array has 2"),
    ],
)
def test_what_cannot_be_drawn_is_said(call, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        call()


@pytest.fixture(scope="module")
def model():
    """Zeros on a layout: nothing runs, so nothing is compiled."""
    made = Model(layouts.SMALL, SPREAD, "float32")
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), made.abstract())
    made.params = jax.device_put(zeros, made.shardings())
    return made


def held_by_first(tree) -> int:
    """Bytes on device 0, from the arrays' shards."""
    shards = (s for leaf in jax.tree.leaves(tree) for s in leaf.addressable_shards if s.device.id == 0)
    return sum(shard.data.nbytes for shard in shards)


def test_a_model_is_drawn_with_all_that_a_device_holds(model):
    picture = draw(model)
    assert picture.nbytes == held_by_first(model.params)
    explained = kimi_jax.explain(model.config, SPREAD, dtype="float32")
    assert Counter((k.name, k.times, k.axes, k.nbytes) for k in picture.kinds) == Counter(
        (w.name, w.times, w.axes, w.nbytes) for w in explained.weights
    )
    largest = max(repr(picture).splitlines(), key=lambda line: line.count("█"))
    assert largest.split()[0] == max(picture.kinds, key=lambda k: k.nbytes).name
    experts = model.params["layers"][1]["ffn"]["experts_down"]
    assert read(repr(picture["moe.experts_down"])) == real(experts.sharding, experts.shape, ("experts", "f", "d"))
    with pytest.raises(KeyError, match=r"'moe\.gate' is not one of embed"):
        picture["moe.gate"]


def test_a_state_is_drawn_with_all_that_a_device_holds(model):
    state = model.new_state(2, 32)
    picture = draw(state)
    assert picture.nbytes == held_by_first(state.cache)
    rows = state.cache.layers[1].rows
    assert read(repr(picture["mla.rows"])) == real(rows.sharding, rows.shape, ("batch", "stripes", "slots", "latent"))


def test_what_users_hold_prints_itself_in_a_notebook_and_is_escaped(model):
    state = model.new_state(2, 32)
    said = kimi_jax.Completion([7, 8], "<i>&", "stop", logprobs=[0.0, -np.log(4).item()])
    report = LoadReport("<folder>", bytes_read=2048, bytes_per_device={"cpu:0": 1024, "cpu:1": 2048})
    for thing in (state, said, report):
        html = thing._repr_html_()
        assert html.count("<td") == html.count("</td>") > 1
        assert "<i>" not in html and "<folder>" not in html
    assert "&lt;i&gt;&amp;" in said._repr_html_() and "0.250" in said._repr_html_()
    assert "2, 1.00 KiB to 2.00 KiB each" in report._repr_html_() and "2, 1.00 KiB to 2.00 KiB each" in repr(report)
    assert "capacity=32" in state._repr_html_()
    state.take()
    assert "consumed" in state._repr_html_()


def test_bars_are_as_long_as_their_part():
    assert [str(tables.Bar(part)) for part in (0.0, 0.5, 1.0, 7.0)] == ["", "█" * 10, "█" * 20, "█" * 20]
    lengths = [len(str(tables.Bar(i / 160)).rstrip("▏▎▍▌▋▊▉")) for i in range(161)]
    assert lengths == [i // 8 for i in range(161)]
    assert "width:2.00em" in tables.html("", ("",), [(tables.Bar(0.25),)])
