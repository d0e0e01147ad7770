"""Pictures of where arrays live, in text and in HTML: one array of any rank, or all kinds of arrays that a model holds.

Everything is read from the arrays and their own shardings, so that a picture shows what is, not what was planned.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import jax
from jax.sharding import Sharding

from kimi_jax import tables
from kimi_jax.drawing.blocks import ArrayPicture, Names, draw_array
from kimi_jax.model import Parameter
from kimi_jax.placement import describe, kind, order
from kimi_jax.runtime import Model
from kimi_jax.state import State
from kimi_jax.tables import Bar, Row, human
from sharding_rules.axes import BATCH


class Kind(NamedTuple):
    """Arrays of one kind, all placed alike: `times` of them. example: one of them; nbytes: what a device holds of
    all."""

    name: str
    times: int
    axes: tuple[str | None, ...]
    example: Any
    nbytes: int

    def cells(self, largest: int) -> Row:
        """One row of a table; the bar is a part of `largest` bytes."""
        shape = self.example.shape
        sizes = ("x".join(map(str, size)) or "-" for size in (shape, self.example.sharding.shard_shape(shape)))
        names = ", ".join(axis or "-" for axis in self.axes)
        count = f"{self.nbytes:,}"
        return self.name, str(self.times), names, str(self.example.dtype), *sizes, count, Bar(self.nbytes / largest)


@dataclass(frozen=True, repr=False)
class KindsPicture:
    """What a device holds of a model or a state, one row a kind of array. `picture["kda.qkv"]` draws one kind."""

    title: str
    kinds: tuple[Kind, ...]

    def __getitem__(self, name: str) -> ArrayPicture:
        """The picture of one array of that kind."""
        for one in self.kinds:
            if one.name == name:
                return draw_array(one.example.shape, one.example.dtype, one.example.sharding, one.axes)
        raise KeyError(f"{name!r} is not one of {', '.join(one.name for one in self.kinds)}")

    @property
    def nbytes(self) -> int:
        """Bytes that a device holds."""
        return sum(one.nbytes for one in self.kinds)

    def __repr__(self) -> str:
        return f"{self._title()}\n\n{tables.text(*self._table())}"

    def _repr_html_(self) -> str:
        return tables.html(self._title(), *self._table())

    def _title(self) -> str:
        return f"{self.title}: {self.nbytes:,} bytes ({human(self.nbytes)}) a device"

    def _table(self) -> tuple[Row, list[Row]]:
        largest = max(one.nbytes for one in self.kinds)
        header = ("array", "layers", "logical axes", "dtype", "shape", "a device holds", "bytes", "")
        return header, [one.cells(largest) for one in self.kinds]


def draw(thing: Any, sharding: Sharding | None = None, *, axes: Names | None = None) -> ArrayPicture | KindsPicture:
    """Where something lives: a picture that prints itself as text, and as HTML in a notebook.

    thing: a jax.Array, a ShapeDtypeStruct with a sharding, or a shape with `sharding` beside it, of any rank: one line
    an axis, then which devices hold which block, copies named together. Or a Model or a State: one row a kind of
    array. sharding: any of jax's; a mesh without devices will do. axes: names of an array's axes, None for one without.

    Raises ValueError for what has no sharding, and for names that are not one an axis.
    """
    if isinstance(thing, Model):
        return KindsPicture(f"weights of a model, {describe(thing.layout)}", _kinds_of_model(thing))
    if isinstance(thing, State):
        return KindsPicture(repr(thing), _kinds_of_state(thing))
    if isinstance(thing, tuple | list):
        shape, dtype = tuple(thing), None
    elif hasattr(thing, "shape") and hasattr(thing, "dtype"):
        shape, dtype = tuple(thing.shape), thing.dtype
    else:
        raise ValueError(
            f"a {type(thing).__name__} cannot be drawn: an array or ShapeDtypeStruct, a shape, a Model or a State was "
            "wanted"
        )
    sharding = sharding or getattr(thing, "sharding", None)
    if sharding is None:
        raise ValueError(
            f"a {type(thing).__name__} of shape {list(shape)} has no sharding; put it on devices with jax.device_put, "
            "or give one: draw(shape, sharding)"
        )
    return draw_array(shape, dtype, sharding, axes)


def _kinds_of_model(model: Model) -> tuple[Kind, ...]:
    arrays = jax.tree_util.tree_leaves_with_path(model.params)
    declared = jax.tree.leaves(model.declared, is_leaf=lambda x: isinstance(x, Parameter))
    named = [
        (kind(tuple(key.key for key in path), model.config), parameter.axes, array)
        for (path, array), parameter in zip(arrays, declared, strict=True)
    ]
    return tuple(sorted(_fold(named), key=lambda one: order(one.name)))


def _kinds_of_state(state: State) -> tuple[Kind, ...]:
    named = [
        (
            f"{'mla' if state.config.is_mla(i) else 'kda'}.{field.name}",
            field.metadata["axes"],
            getattr(layer, field.name),
        )
        for i, layer in enumerate(state.cache.layers)
        for field in fields(layer)
    ]
    return tuple(_fold([*named, ("lengths", (BATCH,), state.cache.lengths)]))


def _fold(named: Sequence[tuple[str, Names, Any]]) -> list[Kind]:
    """Arrays of one name, shape, dtype and placement as one kind, in the order in which they first come."""
    groups: dict[Any, list[tuple[str, Names, Any]]] = {}
    for entry in named:
        name, _, array = entry
        groups.setdefault((name, array.shape, array.dtype, array.sharding), []).append(entry)
    kinds = []
    for alike in groups.values():
        name, axes, array = alike[0]
        size = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        kinds.append(Kind(name, len(alike), tuple(axes), array, len(alike) * size))
    return kinds
