"""`Layout`: one frozen table from logical axes to mesh axes, and what follows from it: specs, constraints, shardings.

It knows no model: whoever owns an array says what its axes are called. Layouts are compared by value, so they can be
closed over by compiled functions and used as static arguments.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from sharding_rules import axes as names
from sharding_rules.mesh import AXES, CP, TP, abstract_mesh, device_mesh
from sharding_rules.numbers import whole_number

Axes: TypeAlias = Sequence[str | None]  # one logical name an array axis; None: never split
MeshAxes: TypeAlias = tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """Where every named axis lives on a mesh (tp, cp).

    rules: (logical axis, mesh axes) pairs, one for each name in `sharding_rules.axes`; () is replicated.
    tokens_per_block: consecutive positions which one stripe of the latent cache takes before the next stripe's turn.
    pad_heads: MLA heads that tp * cp does not divide are padded up with zeros.
    """

    tp: int
    cp: int
    rules: tuple[tuple[str, MeshAxes], ...]
    tokens_per_block: int = 64
    pad_heads: bool = False

    def __post_init__(self):
        for name, value in (("tp", self.tp), ("cp", self.cp), ("tokens_per_block", self.tokens_per_block)):
            whole_number(name, value)
        known = [name for name, _ in self.rules]
        if sorted(known) != sorted(names.ALL):
            odd = sorted(set(known) ^ set(names.ALL))
            raise ValueError(f"rules must name each logical axis of sharding_rules.axes once; these differ: {odd}")
        for name, mesh_axes in self.rules:
            if not set(mesh_axes) <= set(AXES) or len(set(mesh_axes)) != len(mesh_axes):
                raise ValueError(f"{name}={mesh_axes!r}: mesh axes are a tuple out of {AXES}, each at most once")
        # Checked here so that the error names the rule; spec() checks that two axes of one array do not collide.
        for name in (names.BATCH, names.LENGTH, names.SLOTS, names.LATENT, names.EMBED, names.Q_LORA, names.KV_LORA):
            if self.mesh_axes(name):
                raise ValueError(f"{name}={self.mesh_axes(name)!r}: no code splits this axis; leave it replicated")
        if self.mesh_axes(names.STRIPES) != (CP,):
            raise ValueError(f"stripes={self.mesh_axes(names.STRIPES)!r}: the latent cache is striped over ({CP!r},)")
        if (*self.mesh_axes(names.HEADS), CP) != self.mesh_axes(names.HEADS_MERGED):
            raise ValueError(
                f"heads={self.mesh_axes(names.HEADS)!r}, heads_merged={self.mesh_axes(names.HEADS_MERGED)!r}: the "
                f"combine splits each rank's heads over {CP!r}, so heads_merged must be heads followed by {CP!r}"
            )
        if set(self.mesh_axes(names.HIDDEN)) != set(self.mesh_axes(names.EXPERTS)):
            raise ValueError(
                f"hidden={self.mesh_axes(names.HIDDEN)!r}, experts={self.mesh_axes(names.EXPERTS)!r}: routed and "
                "shared experts are summed in one all-reduce, so both must be split over the same mesh axes; replace "
                "both"
            )

    @property
    def ranks(self) -> int:
        """Devices of the whole group, tp * cp."""
        return self.tp * self.cp

    def mesh_axes(self, axis: str) -> MeshAxes:
        """The mesh axes over which the logical `axis` is split, () if it is replicated."""
        for name, mesh_axes in self.rules:
            if name == axis:
                return mesh_axes
        raise ValueError(f"unknown logical axis {axis!r}; the names are {', '.join(names.ALL)}")

    def shards(self, axis: str) -> int:
        """Into how many parts the logical `axis` is split."""
        return math.prod({TP: self.tp, CP: self.cp}[mesh_axis] for mesh_axis in self.mesh_axes(axis))

    def spec(self, *axes: str | None) -> PartitionSpec:
        """The PartitionSpec of an array with these logical axes, without trailing Nones (unequal specs recompile).

        Raises ValueError if two of the axes want the same mesh axis.
        """
        entries = [None if axis is None else self.mesh_axes(axis) or None for axis in axes]
        used = [mesh_axis for entry in entries for mesh_axis in entry or ()]
        if len(set(used)) != len(used):
            raise ValueError(
                f"axes {axes} of one array all want mesh axes {used}: a mesh axis can split only one of them"
            )
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*(entry[0] if entry and len(entry) == 1 else entry for entry in entries))

    def sharding(self, mesh: Mesh | AbstractMesh, *axes: str | None) -> NamedSharding:
        """The sharding of an array with these logical axes on `mesh`."""
        return NamedSharding(mesh, self.spec(*axes))

    def shard_shape(self, shape: Sequence[int], *axes: str | None) -> tuple[int, ...]:
        """What one device holds of an array of this shape with these logical axes. Needs no device.

        Raises ValueError if a size does not divide.
        """
        return self.sharding(self.abstract_mesh(), *axes).shard_shape(tuple(shape))

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Pin an intermediate to these logical axes; the mesh comes from `jax.set_mesh`."""
        return jax.lax.with_sharding_constraint(x, self.spec(*axes))

    def per_shard(self, f: Callable, in_axes: Sequence[Axes | Any], out_axes: Any) -> Callable:
        """`f` run on each device's own shards (shard_map); the mesh comes from `jax.set_mesh`.

        in_axes: for each argument its logical axes, a tuple of names; out_axes: one such tuple, or a tuple of them.
        """
        specs = tuple(self.spec(*axes) for axes in in_axes)
        several = bool(out_axes) and isinstance(out_axes[0], tuple)
        out = tuple(self.spec(*axes) for axes in out_axes) if several else self.spec(*out_axes)
        return jax.shard_map(f, in_specs=specs, out_specs=out, check_vma=False)

    def mesh(self, devices: Sequence[jax.Device] | None = None) -> Mesh:
        """The mesh of this layout over real (or simulated) devices."""
        return device_mesh(self.tp, self.cp, devices)

    def abstract_mesh(self) -> AbstractMesh:
        """The mesh of this layout, with no device behind it."""
        return abstract_mesh(self.tp, self.cp)

    def replace(self, **rules: str | MeshAxes | None) -> "Layout":
        """A layout with some rules changed: `layout.replace(latent_moe=("tp", "cp"))`; None replicates."""
        changed = {
            name: () if to is None else (to,) if isinstance(to, str) else tuple(to) for name, to in rules.items()
        }
        for name in changed:
            self.mesh_axes(name)
        return dataclasses.replace(self, rules=tuple((name, changed.get(name, to)) for name, to in self.rules))

    def resized(self, tp: int, cp: int) -> "Layout":
        """The same rules and options on a mesh of another shape."""
        return dataclasses.replace(self, tp=tp, cp=cp)
