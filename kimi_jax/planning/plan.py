"""`plan`: what a model under a layout takes on each device and sends between them, without a device or a weight.

Bytes of weights and states are exact: they are the shard shapes of what the model declares. Activations are an
estimate, collectives follow formulas; `kimi_jax.planning.compile_check` holds both against the compiled step.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kimi_jax import tables
from kimi_jax.config import Config
from kimi_jax.layers.mla import LatentCache
from kimi_jax.model import checked_dtype, guard, sizes
from kimi_jax.placement import declared, describe, held, layout_json
from kimi_jax.planning import estimate
from kimi_jax.planning.collectives import Collective, needed
from kimi_jax.planning.devices import DEVICES, GIB, usable
from kimi_jax.runtime import MOST_TOKENS
from kimi_jax.state import cache_shapes
from kimi_jax.tables import Bar, human
from sharding_rules import SINGLE, Layout, axes, valid_meshes, whole_number


@dataclass(frozen=True, repr=False)
class Plan:
    """What one device holds, in bytes, and what a token costs in collectives.

    weights, kv_cache, kda_state, conv_state: exact, for `batch` sequences of `capacity` tokens (`context` rounded up to
    whole stripes). activations: an estimate (`kimi_jax.planning.estimate`). parts: the weights again, by part of the
    model. collectives: of a decode step. qkv_a_saving: what sharding the merged q_a|kv_a projection saves a device, or
    would; None for a model without one.
    """

    config: Config
    layout: Layout
    batch: int
    context: int
    capacity: int
    dtype: str
    weights: int
    kv_cache: int
    kda_state: int
    conv_state: int
    activations: int
    parts: dict[str, int]
    collectives: tuple[Collective, ...]
    qkv_a_saving: int | None

    @property
    def total(self) -> int:
        """Bytes a device, the estimate included."""
        return self.weights + self.kv_cache + self.kda_state + self.conv_state + self.activations

    @property
    def kv_cache_a_token(self) -> int:
        """Bytes of latent cache that one token of one sequence takes, all ranks of the striping together."""
        return self.kv_cache * self.layout.shards(axes.STRIPES) // (self.batch * self.capacity)

    @property
    def sent_a_token(self) -> float:
        """Bytes that a device sends for one token of a decode step."""
        return sum((c.sent * c.times for c in self.collectives), 0.0)

    def room(self, device: str | int) -> int:
        """Bytes left on a device, negative if the plan does not fit.

        device: a name in DEVICES, or bytes that may be used.
        """
        return usable(device) - self.total

    def fits(self, device: str | int) -> bool:
        """Whether a device can hold it: see `room`."""
        return self.room(device) >= 0

    def table(self) -> str:
        """All of it as plain text."""
        memory = [(name, f"{size:,}", human(size), note) for name, size, note in self._memory()]
        parts = [tables.text(("a device", "bytes", "", ""), memory), self._fits_line(), tables.text(*self._traffic())]
        return "\n\n".join([self._title(), *parts, self._notes()])

    def to_json(self) -> dict[str, Any]:
        """All of it as values that json can write; sizes in bytes."""
        fields = ("batch", "context", "capacity", "dtype", "weights", "kv_cache", "kda_state", "conv_state")
        return {
            "layout": layout_json(self.layout),
            **{name: getattr(self, name) for name in (*fields, "activations", "total", "parts", "qkv_a_saving")},
            "kv_cache_a_token": self.kv_cache_a_token,
            "collectives": [{**c._asdict(), "payload": c.payload, "sent": c.sent} for c in self.collectives],
            "room": {device: self.room(device) for device in DEVICES},
        }

    def __repr__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        rows = [(name, f"{n:,}", human(n), note, Bar(n / self.total)) for name, n, note in self._memory()]
        memory = tables.html(self._title(), ("a device", "bytes", "", "", "of the total"), rows)
        traffic = tables.html("collectives of one decoded token", *self._traffic())
        return memory + traffic + tables.paragraph(f"{self._fits_line()}\n{self._notes()}")

    def _title(self) -> str:
        return (
            f"{describe(self.layout)}; batch {self.batch}, context {self.context:,} "
            f"(capacity {self.capacity:,}), {self.dtype}"
        )

    def _memory(self) -> list[tuple[str, int, str]]:
        """Name, bytes and a note of each line."""
        return [
            ("weights", self.weights, "exact"),
            *((f"  {part}", size, "") for part, size in self.parts.items()),
            *((name, getattr(self, name), "exact") for name in ("kv_cache", "kda_state", "conv_state")),
            ("activations", self.activations, "estimate"),
            ("total", self.total, ""),
        ]

    def _traffic(self):
        rows = [
            (c.part, str(c.times), c.kind, f"{c.over}: {', '.join(self.layout.mesh_axes(c.over))}", str(c.ranks),
             f"{c.payload:,}", f"{c.sent * c.times:,.0f}")
            for c in self.collectives
        ]  # fmt: skip
        if rows:
            count = sum(c.times for c in self.collectives)
            rows.append(("all", str(count), "", "", "", "", f"{self.sent_a_token:,.0f}"))
        return ("part", "layers", "collective", "over", "ranks", "payload B", "sent B a token, all layers"), rows

    def _fits_line(self) -> str:
        rooms = {device: self.room(device) for device in DEVICES}
        said = (
            f"{name} {f'yes, {human(room)} left' if room >= 0 else f'no, {human(-room)} short'}"
            for name, room in rooms.items()
        )
        return "fits: " + "; ".join(said)

    def _notes(self) -> str:
        notes = [f"latent cache: {self.kv_cache_a_token:,} bytes a token of a sequence, over all its stripes"]
        if self.qkv_a_saving:
            verb = "saves" if self.layout.shards(axes.QKV_A) > 1 else "would save"
            notes.append(
                f"shard_qkv_a=True {verb} {self.qkv_a_saving:,} bytes a device ({self.qkv_a_saving / GIB:.3f} GiB)"
            )
        return "\n".join(notes)


def plan(config: Config, layout: Layout, *, batch: int = 1, context: int = 8192, dtype: str = "bfloat16") -> Plan:
    """What `config` takes under `layout`: bytes a device and collectives a token. Needs no device and makes no array.

    batch: sequences in flight, each of up to `context` tokens. dtype: of weights and caches ("bfloat16", "float32");
    what the checkpoint keeps in a dtype of its own stays so. Activations are those of a prefill chunk.

    Raises ValueError if the layout does not fit the model.
    """
    for name, value in (("batch", batch), ("context", context)):
        whole_number(name, value, most=MOST_TOKENS)
    dtype = checked_dtype(dtype)
    guard(config, layout)
    parts: Counter[str] = Counter()
    alike = Counter((_part(path, config), parameter) for path, parameter in declared(config, layout, dtype))
    for (part, parameter), times in alike.items():
        parts[part] += times * held(layout, parameter, parameter.axes)
    cache = cache_shapes(config, layout, batch, context, dtype)
    states: Counter[str] = Counter()
    capacity = context
    for layer in cache.layers:
        for field in dataclasses.fields(layer):
            states[field.name] += held(layout, getattr(layer, field.name), field.metadata["axes"])
        if isinstance(layer, LatentCache):
            capacity = layer.rows.shape[1] * layer.rows.shape[2]
    return Plan(
        config, layout, batch, context, capacity, dtype,
        weights=sum(parts.values()),
        kv_cache=states["rows"],
        kda_state=states["recurrent"],
        conv_state=states["conv"],
        activations=estimate.activations(config, layout, batch, context, dtype),
        parts=dict(parts.most_common()),
        collectives=needed(config, layout, dtype),
        qkv_a_saving=_qkv_a_saving(config, layout, dtype),
    )  # fmt: skip


def layouts_that_fit(
    config: Config,
    device: str | int = "H200",
    *,
    layout: Layout = SINGLE,
    context: int = 8192,
    batch: int = 1,
    max_ranks: int = 64,
    dtype: str = "bfloat16",
) -> list[Plan]:
    """Every (tp, cp) of up to `max_ranks` devices on which the model fits: fewest devices first, then fewest bytes.

    device: a name in DEVICES, or bytes that may be used. layout: the rules and options to keep; its mesh does not
    matter.
    """
    usable(device)
    whole_number("max_ranks", max_ranks)
    meshes = valid_meshes(layout, sizes(config, layout), max_ranks)
    plans = [plan(config, layout.resized(*mesh), batch=batch, context=context, dtype=dtype) for mesh in meshes]
    return sorted((p for p in plans if p.fits(device)), key=lambda p: (p.layout.ranks, p.total))


def fits_table(plans: Sequence[Plan], device: str | int) -> str:
    """Plans below each other as one table."""
    header = "ranks, tp x cp, weights, kv_cache, states, activations, total, left, collectives, sent B a token"
    rows = []
    for p in plans:
        sizes = (p.weights, p.kv_cache, p.kda_state + p.conv_state, p.activations, p.total, p.room(device))
        mesh = f"{p.layout.tp} x {p.layout.cp}"
        count = sum(c.times for c in p.collectives)
        rows.append((str(p.layout.ranks), mesh, *map(human, sizes), str(count), f"{p.sent_a_token:,.0f}"))
    return tables.text(header.split(", "), rows)


def _part(path: tuple, config: Config) -> str:
    if path[0] != "layers":
        return "embedding, head, norm"
    _, layer, block, *rest = path
    if block == "attention":
        return "MLA" if config.is_mla(layer) else "KDA"
    if block != "ffn":
        return "layers' norms" if config.attn_res_block_size is None else "layers' norms, attention residuals"
    if not config.is_moe(layer):
        return "dense MLP"
    if rest[0].startswith("latent"):
        return "latent MoE projections"
    return "routed experts" if rest[0].startswith("experts") else "shared experts, router"


def _qkv_a_saving(config: Config, layout: Layout, dtype: str) -> int | None:
    """Bytes a device by which q_a|kv_a split over all ranks is smaller than replicated."""
    if config.q_lora_rank is None:
        return None
    merged = [p for _, p in declared(config, layout, dtype) if axes.QKV_A in p.axes]
    everywhere = layout.replace(**{axes.QKV_A: layout.mesh_axes(axes.HEADS_MERGED)})
    nowhere = layout.replace(**{axes.QKV_A: None})
    try:
        return sum(held(nowhere, p, p.axes) - held(everywhere, p, p.axes) for p in merged)
    except ValueError:  # it cannot be split over this many ranks
        return 0
