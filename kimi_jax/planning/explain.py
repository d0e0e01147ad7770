"""`explain`: where each weight lives under a layout, and why; `explain_diff`: what changes from one layout to another.

Layers of one kind are folded into one line. Nothing is allocated.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from kimi_jax import tables
from kimi_jax.config import Config
from kimi_jax.model import Parameter, checked_dtype, guard
from kimi_jax.placement import declared, describe, held, kind, layout_json, order
from kimi_jax.planning.collectives import Collective, needed
from kimi_jax.tables import Bar, human
from sharding_rules import Layout


@dataclass(frozen=True)
class Weight:
    """One weight of one kind of layer: `times` of them, all placed alike.

    name: "kda.qkv", "moe.router", "layer.ffn_norm", "embed". axes: logical, one a dimension. rules: the rules that
    split it, as (logical axis, mesh axes) pairs; () is replicated. shape: of one, whole; shard: what a device holds
    of it. nbytes: what a device holds of all `times`.
    """

    name: str
    times: int
    dtype: str
    axes: tuple[str | None, ...]
    rules: tuple[tuple[str, tuple[str, ...]], ...]
    shape: tuple[int, ...]
    shard: tuple[int, ...]
    nbytes: int

    @property
    def replicated(self) -> bool:
        """Whether every device holds the whole of it."""
        return self.shard == self.shape

    @property
    def placement(self) -> str:
        """The rules in words: "kda_heads: tp, cp", or "replicated"."""
        return "; ".join(f"{axis}: {', '.join(to)}" for axis, to in self.rules) or "replicated"

    def cells(self) -> tuple[str, ...]:
        """One row of a table."""
        shape, shard = ("x".join(map(str, size)) for size in (self.shape, self.shard))
        names = ", ".join(axis or "-" for axis in self.axes)
        return self.name, str(self.times), names, self.placement, self.dtype, shape, shard, f"{self.nbytes:,}"


HEADER = ("weight", "layers", "logical axes", "rule", "dtype", "shape", "a device holds", "bytes")


@dataclass(frozen=True, repr=False)
class Explanation:
    """Every weight of a model under a layout, in the order in which a token meets them."""

    config: Config
    layout: Layout
    dtype: str
    weights: tuple[Weight, ...]

    def __getitem__(self, name: str) -> Weight:
        """The weight of that name."""
        for weight in self.weights:
            if weight.name == name:
                return weight
        raise KeyError(f"{name!r} is not one of {', '.join(weight.name for weight in self.weights)}")

    @property
    def nbytes(self) -> int:
        """Bytes of weights a device holds."""
        return sum(weight.nbytes for weight in self.weights)

    @property
    def replicated(self) -> tuple[Weight, ...]:
        """What every device holds whole, largest first."""
        return tuple(sorted((w for w in self.weights if w.replicated), key=lambda w: -w.nbytes))

    def table(self) -> str:
        """All of it as plain text: each weight, then what stayed replicated."""
        whole = sum(weight.nbytes for weight in self.replicated)
        return "\n\n".join(
            [
                f"{describe(self.layout)}; {self.dtype}; {self.nbytes:,} bytes of weights a device",
                tables.text(HEADER, [weight.cells() for weight in self.weights]),
                f"replicated: {whole:,} bytes ({human(whole)}), largest first",
                tables.text(HEADER, [weight.cells() for weight in self.replicated]),
            ]
        )

    def to_json(self) -> dict[str, Any]:
        """All of it as values that json can write."""
        return {
            "layout": layout_json(self.layout),
            "dtype": self.dtype,
            "bytes": self.nbytes,
            "weights": [_weight_json(weight) for weight in self.weights],
            "replicated": [weight.name for weight in self.replicated],
        }

    def __repr__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        largest = max(weight.nbytes for weight in self.weights)

        def table(title: str, weights: tuple[Weight, ...]) -> str:
            return tables.html(title, (*HEADER, ""), [(*w.cells(), Bar(w.nbytes / largest)) for w in weights])

        title = f"{describe(self.layout)}; {self.dtype}; {self.nbytes:,} bytes of weights a device"
        return table(title, self.weights) + table("replicated, largest first", self.replicated)


def explain(config: Config, layout: Layout, *, dtype: str = "bfloat16") -> Explanation:
    """For each weight: its logical axes, the rules that matched, what a device holds, and its bytes.

    Raises ValueError if the layout does not fit the model.
    """
    guard(config, layout)
    dtype = checked_dtype(dtype)
    folded: dict[tuple[str, Parameter], int] = {}
    for path, parameter in declared(config, layout, dtype):
        key = kind(path, config), parameter
        folded[key] = folded.get(key, 0) + 1
    weights = [_weight(name, times, parameter, layout) for (name, parameter), times in folded.items()]
    return Explanation(config, layout, dtype, tuple(sorted(weights, key=lambda w: order(w.name))))


@dataclass(frozen=True, repr=False)
class Diff:
    """From the explanation `before` to `after`: weights whose placement changes, bytes, and collectives of a decode
    step.

    moved: (before, after) of each weight that moves, most bytes first. gained: bytes a device holds more (negative:
    less). added, dropped: collectives that only one of the two needs.
    """

    before: Explanation
    after: Explanation
    moved: tuple[tuple[Weight, Weight], ...]
    gained: int
    added: tuple[Collective, ...]
    dropped: tuple[Collective, ...]

    def table(self) -> str:
        """All of it as plain text."""
        lines = [
            f"from {describe(self.before.layout)} to {describe(self.after.layout)}: {self.gained:+,} bytes a device"
        ]
        lines += [tables.text(*self._weights()) if self.moved else "no weight moves"]
        lines += [tables.text(*self._collectives()) if self.added or self.dropped else "no collective changes"]
        return "\n\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """All of it as values that json can write."""
        return {
            "before": layout_json(self.before.layout),
            "after": layout_json(self.after.layout),
            "gained": self.gained,
            "moved": [{"before": _weight_json(a), "after": _weight_json(b)} for a, b in self.moved],
            "added": [c._asdict() for c in self.added],
            "dropped": [c._asdict() for c in self.dropped],
        }

    def __repr__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        title = f"from {describe(self.before.layout)} to {describe(self.after.layout)}: {self.gained:+,} bytes a device"
        return tables.html(title, *self._weights()) + tables.html("collectives", *self._collectives())

    def _weights(self):
        rows = [
            (a.name, str(a.times), a.placement, b.placement, "x".join(map(str, a.shard)), "x".join(map(str, b.shard)),
             f"{b.nbytes - a.nbytes:+,}")
            for a, b in self.moved
        ]  # fmt: skip
        return ("weight", "layers", "rule before", "after", "a device held", "holds", "bytes gained"), rows

    def _collectives(self):
        changes = [("-", c) for c in self.dropped] + [("+", c) for c in self.added]
        rows = [
            (sign, c.part, str(c.times), c.kind, c.over, str(c.ranks), f"{c.payload:,}", f"{c.sent * c.times:,.0f}")
            for sign, c in changes
        ]
        return ("", "part", "layers", "collective", "over", "ranks", "payload B", "sent B a token, all layers"), rows


def explain_diff(before: Explanation, after: Explanation) -> Diff:
    """What changes between two layouts of one model: which weights move, bytes gained, collectives added and dropped.

    Raises ValueError if the two do not explain the same model and dtype.
    """
    if before.config != after.config or before.dtype != after.dtype:
        raise ValueError("the two explanations are of different models or dtypes; explain one model under two layouts")
    others = {weight.name: weight for weight in after.weights}
    pairs = [(weight, others[weight.name]) for weight in before.weights]
    moved = [(a, b) for a, b in pairs if (a.rules, a.shard) != (b.rules, b.shard)]
    was, now = (needed(e.config, e.layout, e.dtype) for e in (before, after))
    return Diff(
        before,
        after,
        tuple(sorted(moved, key=lambda pair: -abs(pair[1].nbytes - pair[0].nbytes))),
        after.nbytes - before.nbytes,
        tuple(c for c in now if c not in was),
        tuple(c for c in was if c not in now),
    )


def _weight(name: str, times: int, parameter: Parameter, layout: Layout) -> Weight:
    rules = [(axis, layout.mesh_axes(axis)) for axis in parameter.axes if axis is not None]
    return Weight(
        name,
        times,
        str(jnp.dtype(parameter.dtype)),
        parameter.axes,
        tuple((axis, to) for axis, to in rules if to),
        parameter.shape,
        layout.shard_shape(parameter.shape, *parameter.axes),
        times * held(layout, parameter, parameter.axes),
    )


def _weight_json(weight: Weight) -> dict[str, Any]:
    return {
        **{name: getattr(weight, name) for name in ("name", "times", "dtype", "axes", "shape", "shard", "replicated")},
        "rules": [[axis, list(to)] for axis, to in weight.rules],
        "elements": math.prod(weight.shape),
        "bytes": weight.nbytes,
    }
