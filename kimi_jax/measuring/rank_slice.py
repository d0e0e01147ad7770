"""One rank's share of a model, alone on one device: what a rank of a large group computes and reads, with no exchange.

The model is the real one under its real layout; its arrays have the shapes that the layout gives to one device, and the
mesh has that device alone. So every part runs the program of rank 0, and each collective gives back what was sent:
numbers mean nothing, times are those of a rank without its exchanges. Those are added from the bytes that they send.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp

from kimi_jax import tables
from kimi_jax.compiled import born
from kimi_jax.config import Config
from kimi_jax.initialise import draw, key_of
from kimi_jax.measuring.floors import decode_costs, total
from kimi_jax.measuring.hits import here
from kimi_jax.measuring.machine import Machine, measure_machine, milliseconds
from kimi_jax.measuring.timing import Decoding, Row, phases_of, room
from kimi_jax.model import Parameter
from kimi_jax.placement import describe
from kimi_jax.planning.collectives import needed
from kimi_jax.runtime import Model
from kimi_jax.state import Cache, cache_shapes, cache_shardings
from sharding_rules import DeviceMesh, Layout, helix, stripes

GROUP = 4  # layers that repeat in K3: three KDA, one MLA
# What an exchange costs, assumed: no device is there to exchange with. Bytes a second that one device sends over NVLink
# 4 (half of its 900 GB/s both ways), and seconds from the last kernel before a collective to the first one behind it.
LINK_RATE, LATENCY = 450e9, 15e-6


@dataclass(frozen=True)
class Alone(Layout):
    """A layout of which one rank is there: its sizes are those of the whole group, its mesh is one device."""

    def mesh(self, devices: Sequence[jax.Device] | None = None) -> DeviceMesh:
        """The mesh of the one rank: the same axes, each of size 1."""
        return helix(1, 1).mesh(devices)


class RankModel(Model):
    """Rank 0 of a model under a layout, on one device, with random weights. It decodes; to prefill, it would need the
    others.
    """

    def __init__(self, config: Config, layout: Layout, dtype: str | None = None, device: jax.Device | None = None):
        alone = Alone(*(getattr(layout, field.name) for field in dataclasses.fields(layout)))
        super().__init__(config, alone, dtype or config.dtype, [device or jax.devices()[0]])
        self.declared = self._per_parameter(
            lambda p: p._replace(shape=layout.shard_shape(p.shape, *p.axes))  # p's axes still say what they are
        )

    def fill(self, seed: int = 0) -> None:
        """Make the weights."""
        self.params = jax.tree_util.tree_map_with_path(
            lambda path, p, at: born(draw, p, at, key_of(tuple(k.key for k in path), seed)),
            self.declared, self.shardings(), is_leaf=lambda x: isinstance(x, Parameter),
        )  # fmt: skip

    def cache_structs(self, batch: int, capacity: int) -> Cache:
        """Shapes and placements of what the rank holds of a state: its stripe, its heads."""
        whole = cache_shapes(self.config, self.layout, batch, capacity, self.dtype)
        placed = cache_shardings(self.config, self.layout, self.mesh)

        def held(layer: Any, at: Any) -> Any:
            fields = {field.name: field.metadata["axes"] for field in dataclasses.fields(layer)}
            return type(layer)(**{
                name: jax.ShapeDtypeStruct(
                    self.layout.shard_shape(getattr(layer, name).shape, *axes), getattr(layer, name).dtype,
                    sharding=getattr(at, name),
                )
                for name, axes in fields.items()
            })  # fmt: skip

        layers = tuple(held(layer, at) for layer, at in zip(whole.layers, placed.layers, strict=True))
        lengths = jax.ShapeDtypeStruct(whole.lengths.shape, whole.lengths.dtype, sharding=placed.lengths)
        return Cache(layers, lengths)

    def _empty(self, batch: int, capacity: int) -> Callable[[], Cache]:
        rounded = stripes.capacity(capacity, self.layout.tokens_per_block, self.layout.cp)
        structs = self.cache_structs(batch, rounded)
        return lambda: jax.tree.map(lambda s: born(_zeros, (s.shape, str(s.dtype)), s.sharding), structs)


@dataclass(frozen=True)
class Estimate:
    """Seconds of a decode step of the whole model on all ranks: what was timed on one, scaled, and the exchanges added.

    first: a step of the model's first GROUP layers, with embedding, head and sampling. group: what GROUP layers more
    take. layers: of the model. collectives, sent: of a whole step, and the bytes that a device sends for it; link_rate,
    latency: what they are assumed to cost.
    """

    layers: int
    first: float
    group: float
    floor: float
    collectives: int
    sent: float
    link_rate: float = LINK_RATE
    latency: float = LATENCY

    @property
    def computed(self) -> float:
        """Seconds without the exchanges."""
        return self.first + (self.layers - GROUP) / GROUP * self.group

    @property
    def exchanged(self) -> float:
        """Seconds of the exchanges, none of them hidden behind anything."""
        return self.collectives * self.latency + self.sent / self.link_rate

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return self.computed + self.exchanged


@dataclass(frozen=True)
class Report:
    """What was timed: rows of a model's first GROUP and first 2 GROUP layers, and what follows for all, by batch and
    context as in the rows.
    """

    machine: Machine
    model: dict[str, Any]
    rows: list[Row]
    estimates: list[Estimate]

    def to_json(self) -> str:
        """All of it."""
        estimates = [
            {**asdict(e), "computed": e.computed, "exchanged": e.exchanged, "total": e.total} for e in self.estimates
        ]
        return json.dumps({**asdict(self), "estimates": estimates}, indent=1)

    def __repr__(self) -> str:
        rows = [
            (str(first.batch), f"{first.context:,}", milliseconds(e.first), milliseconds(e.group),
             milliseconds(e.computed), milliseconds(e.floor), f"{e.floor / e.computed:.0%}", str(e.collectives),
             milliseconds(e.exchanged), milliseconds(e.total))
            for first, e in zip(self.rows[::2], self.estimates, strict=True)
        ]  # fmt: skip
        titles = [
            "batch", "context", f"{GROUP} layers ms", f"{GROUP} more ms", "all, alone", "floor ms", "of floor",
            "collectives", "they take ms", "a step ms",
        ]  # fmt: skip
        of = f"rank 0 of {self.model['layout']}, {self.model['dtype']}"
        scaled = f"timed are {GROUP} and {2 * GROUP} of {self.model['layers']} layers, the rest is scaled"
        assumed = f"{LINK_RATE / 1e9:,.0f} GB/s out of a device and {LATENCY * 1e6:.0f} us a collective, nothing hidden"
        return "\n".join(
            [
                f"{self.machine.device}: {of}; {scaled}",
                tables.text(titles, rows),
                f"an estimate: exchanges are not timed but counted, at {assumed}",
                *(phases_of(row) for row in self.rows if row.phases is not None),
            ]
        )


def run(
    config: Config,
    layout: Layout,
    *,
    batches: Sequence[int],
    contexts: Sequence[int],
    dtype: str | None = None,
    phases: bool = False,
) -> Report:
    """Time decode steps of one rank at each batch and context."""
    dtype = dtype or config.dtype
    machine, cases = measure_machine(dtype), [(batch, context) for batch in batches for context in contexts]
    timed: dict[int, list[Row]] = {}
    for layers in (GROUP, 2 * GROUP):
        model = RankModel(leading(config, layers), layout, dtype)
        model.fill()
        timed[layers] = [
            Decoding(model, batch, room(context), rank=0).time(machine, context, phases=phases)
            for batch, context in cases
        ]
    pairs = list(zip(timed[GROUP], timed[2 * GROUP], strict=True))
    about = {"layers": config.num_hidden_layers, "dtype": dtype, "layout": describe(layout)}
    rows = [row for pair in pairs for row in pair]
    return Report(machine, about, rows, [estimate(config, layout, dtype, machine, *pair) for pair in pairs])


def estimate(config: Config, layout: Layout, dtype: str, machine: Machine, first: Row, second: Row) -> Estimate:
    """The whole model's step from rows of its first GROUP and 2 GROUP layers."""
    costs = decode_costs(config, layout, dtype, first.batch, first.context, here(second.experts_hit))
    exchanges = needed(config, layout, dtype)
    return Estimate(
        config.num_hidden_layers,
        first.seconds.median,
        second.seconds.median - first.seconds.median,
        total(costs).seconds(machine.copy_rate, machine.matrix_rate),
        sum(c.times for c in exchanges),
        first.batch * sum(c.times * c.sent for c in exchanges),
    )


def leading(config: Config, layers: int) -> Config:
    """The first `layers` layers of a model."""
    mla = tuple(layer for layer in config.mla_layers if layer < layers)
    return dataclasses.replace(config, num_hidden_layers=layers, mla_layers=mla)


def _zeros(about: tuple[tuple[int, ...], str]) -> jax.Array:
    shape, dtype = about
    return jnp.zeros(shape, dtype)
