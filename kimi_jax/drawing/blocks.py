"""Which device holds which block of an array of any rank: `ArrayPicture`, read from the array's own sharding.

Nothing here knows which axes a mesh has, what a layout says, or what the array is for.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Sharding

from kimi_jax import tables
from kimi_jax.tables import Row, Tinted, human
from sharding_rules import DeviceMesh

Span = tuple[tuple[int, int], ...]  # where a part begins and ends along each axis
Block = tuple[int, ...]  # which part it is along each axis
Names = Sequence[str | None]  # of an array's axes


class Axis(NamedTuple):
    """One axis of an array: what it is called, its size, the mesh axes that split it ("?" if the sharding does not say)
    and where its parts begin and end."""

    name: str
    size: int
    over: tuple[str, ...]
    parts: tuple[tuple[int, int], ...]

    def part(self, index: int) -> str:
        """The positions of one part, as a slice."""
        start, stop = self.parts[index]
        return f"{start}:{stop}"


@dataclass(frozen=True, repr=False)
class ArrayPicture:
    """Which device holds which block of one array.

    holders: for each block the devices (their ids; on a mesh without devices, ranks in the mesh's order) that hold a
    copy. mesh: the sizes of the mesh axes, empty if the sharding has none.
    """

    dtype: np.dtype | None
    axes: tuple[Axis, ...]
    holders: Mapping[Block, tuple[int, ...]]
    mesh: Mapping[str, int]
    noun: str

    def __repr__(self) -> str:
        parts = [self._title()]
        if self.axes:
            parts.append(tables.text(*self._axes()))
        for about, header, rows in self._grids():
            parts.append("\n".join([*([about] if about else []), tables.text(header, rows)]))
        return "\n\n".join(parts)

    def _repr_html_(self) -> str:
        grids = "".join(tables.html(about, header, rows) for about, header, rows in self._grids())
        return tables.paragraph(self._title()) + (tables.html("", *self._axes()) if self.axes else "") + grids

    def _title(self) -> str:
        shape = tuple(axis.size for axis in self.axes)
        held = tuple(axis.parts[0][1] - axis.parts[0][0] for axis in self.axes)
        mesh = " x ".join(f"{name}={size}" for name, size in self.mesh.items())
        of = sum(map(len, self.holders.values()))
        copies = of // len(self.holders)
        words = [f"{self._sized(shape)} on {of} {self.noun}{'s' if of > 1 else ''}{f' ({mesh})' if mesh else ''}"]
        if of > 1:
            words.append(f"each holds {self._sized(held)}")
            unused = [n for n in self.mesh if self.mesh[n] > 1 and not any(n in axis.over for axis in self.axes)]
            over = f", over {', '.join(unused)}" if unused else ""
            words.append(f"{copies} copies of each block{over}" if copies > 1 else "no block twice")
        return "; ".join(words)

    def _sized(self, shape: Sequence[int]) -> str:
        if self.dtype is None:
            return str(list(shape))
        return f"{self.dtype}{list(shape)} = {human(math.prod(shape) * self.dtype.itemsize)}"

    def _axes(self) -> tuple[Row, list[Row]]:
        rows = []
        for axis in self.axes:
            over = ", ".join(axis.over) or "-"
            start, stop = axis.parts[0]
            rows.append((axis.name, str(axis.size), over, str(len(axis.parts)), str(stop - start)))
        return ("axis", "size", "split over", "parts", "a part"), rows

    def _grids(self) -> Iterator[tuple[str, Row, list[Row]]]:
        """Title, header and rows of each table of blocks: the last two split axes down and across, one table for every
        combination of parts of the others."""
        split = [i for i, axis in enumerate(self.axes) if len(axis.parts) > 1]
        whole = [0] * len(self.axes)
        shade = {devices: i for i, devices in enumerate(dict.fromkeys(self.holders.values()))}

        def cell(*place: tuple[int, int]) -> Tinted:
            block = list(whole)
            for axis, part in place:
                block[axis] = part
            devices = self.holders[tuple(block)]
            return Tinted(runs(devices), shade[devices])

        def parts(i: int) -> range:
            return range(len(self.axes[i].parts))

        if not split:
            yield "", (f"{self.noun}s that hold all of it",), [(cell(),)]
        elif len(split) == 1:
            (down,) = split
            axis = self.axes[down]
            yield "", (axis.name, f"{self.noun}s"), [(axis.part(i), cell((down, i))) for i in parts(down)]
        else:
            *outer, down, across = split
            header = (
                f"{self.axes[down].name} \\ {self.axes[across].name}",
                *map(self.axes[across].part, parts(across)),
            )
            for at in itertools.product(*map(parts, outer)):
                fixed = list(zip(outer, at, strict=True))
                about = ", ".join(f"{self.axes[i].name} {self.axes[i].part(n)}" for i, n in fixed)
                rows: list[Row] = [
                    (self.axes[down].part(r), *(cell(*fixed, (down, r), (across, c)) for c in parts(across)))
                    for r in parts(down)
                ]
                yield about, header, rows


def draw_array(
    shape: tuple[int, ...], dtype: Any, sharding: Sharding, names: Sequence[str | None] | None
) -> ArrayPicture:
    """The picture of an array of this shape on `sharding`; names: of its axes."""
    if names is not None and len(names) != len(shape):
        raise ValueError(f"axes={tuple(names)} names {len(names)} axes, but the array has {len(shape)}: {list(shape)}")
    called = [name or f"axis {i}" for i, name in enumerate(names or [None] * len(shape))]
    noun, held = held_by(sharding, shape)
    parts = [tuple(sorted({span[i] for span in held.values()})) for i in range(len(shape))]
    holders: dict[Block, tuple[int, ...]] = {}
    for device, span in sorted(held.items()):
        block = tuple(own.index(at) for own, at in zip(parts, span, strict=True))
        holders[block] = (*holders.get(block, ()), device)
    over = split_over(sharding, len(shape)) or [("?",) if len(own) > 1 else () for own in parts]
    mesh = getattr(sharding, "mesh", None)
    return ArrayPicture(
        dtype,
        tuple(map(Axis, called, shape, over, parts)),
        dict(sorted(holders.items())),
        {} if mesh is None else dict(mesh.shape),
        noun,
    )


def held_by(sharding: Sharding, shape: tuple[int, ...]) -> tuple[str, dict[int, Span]]:
    """("device", what each holds by its id), or ("rank", the same by its place in a mesh that has no devices)."""
    mesh = getattr(sharding, "mesh", None)
    if mesh is None or isinstance(mesh, DeviceMesh):
        found = sharding.devices_indices_map(shape)
        return "device", {
            device.id: tuple(at.indices(size)[:2] for at, size in zip(index or (), shape, strict=True))
            for device, index in found.items()
        }
    sizes, part = dict(mesh.shape), sharding.shard_shape(shape)
    over = split_over(sharding, len(shape))
    spans = {}
    for rank, place in enumerate(itertools.product(*map(range, sizes.values()))):
        at = dict(zip(sizes, place, strict=True))
        index = [functools.reduce(lambda i, n: i * sizes[n] + at[n], names, 0) for names in over]
        spans[rank] = tuple((i * size, (i + 1) * size) for i, size in zip(index, part, strict=True))
    return "rank", spans


def split_over(sharding: Sharding, rank: int) -> list[tuple[str, ...]]:
    """The mesh axes that split each axis of an array; [] if the sharding has no mesh."""
    spec = getattr(sharding, "spec", None)
    if spec is None:
        return []
    entries = [*spec, *[None] * (rank - len(spec))]
    return [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in entries]


def runs(numbers: Sequence[int]) -> str:
    """Whole numbers in few words: "0-3, 6"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
