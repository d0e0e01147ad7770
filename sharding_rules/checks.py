"""The guards: sizes in, ValueErrors out that name the sizes and say which meshes would do.

They are derived from the layout's own table, so an edited rule is guarded too. They know no model: `Size` is all that a
model has to say about itself.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from sharding_rules.layout import Layout
from sharding_rules.mesh import CP, TP

LISTED = 256  # ranks up to which a message lists what would do


class Size(NamedTuple):
    """`what` (in words) has `size` elements along the logical `axis`."""

    what: str
    axis: str
    size: int


def misfits(layout: Layout, sizes: Sequence[Size]) -> list[Size]:
    """The sizes which their axis' number of shards does not divide."""
    return [s for s in sizes if s.size % layout.shards(s.axis)]


def valid_meshes(layout: Layout, sizes: Sequence[Size], devices: int) -> list[tuple[int, int]]:
    """Every (tp, cp) of at most `devices` ranks on which these rules divide all the sizes."""
    split = {(s.size, layout.mesh_axes(s.axis)) for s in sizes}
    meshes = [{TP: tp, CP: cp} for tp in range(1, devices + 1) for cp in range(1, devices // tp + 1)]
    fits = [mesh for mesh in meshes if all(size % math.prod(mesh[axis] for axis in to) == 0 for size, to in split)]
    return [(mesh[TP], mesh[CP]) for mesh in fits]


def check(layout: Layout, sizes: Sequence[Size], *, devices: int | None = None, hints: Sequence[str] = ()) -> None:
    """Raise ValueError unless the layout divides every size.

    devices: how many there are, to list the meshes that would do (at least as many as the layout asks for, and 32).
    hints: further ways out, for the end of the message.
    """
    bad = misfits(layout, sizes)
    if not bad:
        return
    limit = min(max(devices or 0, layout.ranks, 32), LISTED)
    ranks = sorted({tp * cp for tp, cp in valid_meshes(layout, sizes, limit)})
    here = valid_meshes(layout, sizes, min(devices or layout.ranks, LISTED))
    problems = [f"{s.what} ({s.size}) do not divide by the {layout.shards(s.axis)} shards of {s.axis!r}" for s in bad]
    raise ValueError(
        f"tp={layout.tp} x cp={layout.cp} does not fit: {'; '.join(problems)}. "
        f"tp * cp in {{{', '.join(map(str, ranks))}}} is valid up to {limit} ranks; "
        f"(tp, cp) on {devices or layout.ranks} devices: {', '.join(map(str, here)) or 'none'}"
        + "".join(f". {hint}" for hint in hints)
    )
