"""Time a model on this machine, beside what the machine could do at best.

The machine is measured first, in the same run: how fast it copies and how fast it multiplies. A step's floor is the
larger of its bytes over that copy rate and its operations over that matrix rate, both counted from shapes. Times are of
warm, compiled calls: the median and the range of several.
"""

import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from kimi_jax import processes, tables
from kimi_jax.config import Config
from kimi_jax.initialise import key_of
from kimi_jax.placement import declared, held
from kimi_jax.runtime import Model, born
from kimi_jax.sampling import Temperature
from kimi_jax.state import State, cache_shapes
from kimi_jax.version import __version__
from sharding_rules import SINGLE, whole_number

BURST = 32  # decode steps a timed call
REPEATS = 5


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median of the repeats, the fastest and the slowest."""

    median: float
    fastest: float
    slowest: float


@dataclass(frozen=True)
class Machine:
    """What the machine does at best: bytes read and written a second by a copy, operations a second by a product."""

    device: str
    copy_rate: float
    matrix_rate: float
    versions: dict[str, str]


@dataclass(frozen=True)
class Row:
    """One measurement. seconds: of a decode step or of a whole prefill; floor: the best the machine allows."""

    what: str
    batch: int
    tokens: int
    context: int
    capacity: int
    seconds: Timing
    bytes: int
    operations: int
    floor: float
    peer: float | None = None  # seconds of the same by the peer


@dataclass
class Report:
    """A machine and what was timed on it."""

    machine: Machine
    model: dict[str, Any]
    rows: list[Row] = field(default_factory=list)

    def to_json(self) -> str:
        """All of it."""
        rows = [asdict(row) for row in self.rows]
        return json.dumps({"machine": asdict(self.machine), "model": self.model, "rows": rows}, indent=1)

    def __repr__(self) -> str:
        head = (
            f"{self.machine.device}: copies {self.machine.copy_rate / 1e9:,.1f} GB/s (read + written), multiplies "
            f"{self.machine.matrix_rate / 1e12:,.2f} TFLOP/s in {self.model['dtype']}"
        )
        rows = [
            (
                row.what, str(row.batch), f"{row.context:,}", f"{row.capacity:,}", milliseconds(row.seconds.median),
                f"{milliseconds(row.seconds.fastest)}..{milliseconds(row.seconds.slowest)}", milliseconds(row.floor),
                f"{row.floor / row.seconds.median:.0%}",
                "" if row.peer is None else milliseconds(row.peer),
                "" if row.peer is None else f"{row.peer / row.seconds.median:.1f}x",
            )
            for row in self.rows
        ]  # fmt: skip
        titles = ["what", "batch", "context", "capacity", "ms", "range", "floor ms", "of floor", "peer ms", "faster"]
        return head + "\n" + tables.text(titles, rows)


def measure_machine(dtype: str) -> Machine:
    """The copy rate and, in `dtype`, the matrix rate of JAX's first device."""
    on_cpu = jax.default_backend() == "cpu"
    size, side = (1 << 27, 1536) if on_cpu else (1 << 32, 8192)
    where = SingleDeviceSharding(jax.local_devices()[0])
    source = born(_random, ((size // 4,), "float32"), where, jax.random.key(0))
    copied = timed(lambda: born(_negated, None, where, source))
    square = born(_random, ((side, side), dtype), where, jax.random.key(1))
    multiplied = timed(lambda: born(_squared, None, where, square))
    versions = {"kimi_jax": __version__, "jax": jax.__version__, "python": platform.python_version()}
    return Machine(jax.devices()[0].device_kind, 2 * size / copied.fastest, 2 * side**3 / multiplied.fastest, versions)


def time_decode(model: Model, machine: Machine, batch: int, context: int, capacity: int) -> Row:
    """Decode steps of `batch` rows that hold `context` tokens each, in bursts on the device.

    Tokens are sampled: greedy rows of random weights soon repeat one token, and would share their experts.
    """
    seeds, live = np.arange(batch, dtype=np.uint32), np.ones(batch, bool)
    stops = np.full(8, -1, np.int32)
    state = filled_state(model, batch, context, capacity)
    token = np.arange(batch, dtype=np.int32) % model.config.vocab_size
    context += BURST * (REPEATS + 1) // 2  # rows grow while they are timed: the floor is that of the middle

    def burst() -> None:
        nonlocal state, token
        state, done = model.burst(state, token, live, Temperature(1.0), seeds, 0, stops, BURST)
        assert int(done.steps) == BURST, "logits were not finite"
        token = done.token

    seconds = timed(burst, divide=BURST)
    nbytes, operations = decode_cost(model, batch, context)
    return _row("decode", machine, batch, 1, context, state.capacity, seconds, nbytes, operations)


def time_prefill(model: Model, machine: Machine, batch: int, tokens: int) -> Row:
    """One pass over prompts of `tokens` tokens, fed at once."""
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (batch, tokens))

    def prefill() -> None:
        logits, _ = model.prefill(ids, None, model.new_state(batch, tokens))
        logits.block_until_ready()

    seconds = timed(prefill)
    nbytes, operations = prefill_cost(model, batch, tokens)
    return _row("prefill", machine, batch, tokens, tokens, tokens, seconds, nbytes, operations)


def decode_cost(model: Model, batch: int, context: int) -> tuple[int, int]:
    """Bytes and operations of one decode step on one device.

    Every weight but the embedding is read once, of the experts only those which are hit (their expected number, for
    independent uniform routing); the latent cache once; the recurrent states are read and written.
    """
    config, layout = model.config, model.layout
    hit = experts_hit(config, batch)
    weights = sum(
        held(layout, p, p.axes) * (hit / config.num_experts if _is_expert(path) else 1)
        for path, p in declared(config, layout, str(model.dtype))
        if path != ("embed",)
    )
    shapes = cache_shapes(config, layout, batch, context, model.dtype)
    state = sum(
        held(layout, getattr(layer, name), f.metadata["axes"]) * (1 if name == "rows" else 2)
        for layer in shapes.layers
        for name, f in layer.__dataclass_fields__.items()
    )
    return int(weights + state), int(_operations(config, layout.ranks, batch, attended=batch * context))


def prefill_cost(model: Model, batch: int, tokens: int) -> tuple[int, int]:
    """Bytes and operations of one pass over `batch` prompts on one device."""
    nbytes, _ = decode_cost(model, batch * tokens, 1)
    attended = batch * tokens * tokens / 2
    return nbytes, int(_operations(model.config, model.layout.ranks, batch * tokens, attended=attended))


def experts_hit(config: Config, tokens: int) -> float:
    """Expected number of different experts that `tokens` tokens reach: E (1 - (1 - k/E)^tokens)."""
    E, k = config.num_experts, config.num_experts_per_token
    return E * (1 - (1 - k / E) ** tokens)


def filled_state(model: Model, batch: int, context: int, capacity: int) -> State:
    """A state whose rows hold `context` tokens of random numbers: nothing may be timed on zeros."""
    state = model.new_state(batch, capacity)
    cache = state.take()
    leaves, structure = jax.tree.flatten(cache.layers)
    keys = [key_of(("state", i), 0) for i in range(len(leaves))]
    filled = [born(_random, (x.shape, str(x.dtype)), x.sharding, key) for x, key in zip(leaves, keys, strict=True)]
    lengths = np.full(batch, context, np.int32)
    placed = processes.put(lengths, cache.lengths.sharding)
    cache = replace(cache, layers=jax.tree.unflatten(structure, filled), lengths=placed)
    return State(cache, model.config, model.layout, model.mesh, lengths)


def timed(call: Callable[[], Any], *, repeats: int = REPEATS, divide: int = 1) -> Timing:
    """Seconds of `call`, after one that compiles and warms up; over `divide` if it does the thing several times."""
    jax.block_until_ready(call())
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(call())
        taken.append((time.perf_counter() - began) / divide)
    return Timing(statistics.median(taken), min(taken), max(taken))


def run(
    model: Model,
    *,
    batches: Sequence[int],
    contexts: Sequence[int],
    capacity: int | None = None,
    prefills: Sequence[int] = (),
    peer: Mapping[tuple[str, int, int], float] = MappingProxyType({}),
) -> Report:
    """Time decode at each batch and context, and prefill of each batch and length.

    peer: the peer's seconds by (what, batch, context), to stand beside ours.
    """
    report = Report(measure_machine(str(model.dtype)), describe(model))
    for batch in batches:
        for context in contexts:
            need = context + BURST * (REPEATS + 1)
            room = need if capacity is None else whole_number("capacity", capacity)
            if room < need:
                raise ValueError(f"capacity={capacity} is too small: context {context} and the timed steps need {need}")
            row = time_decode(model, report.machine, batch, context, room)
            report.rows.append(replace(row, context=context, peer=peer.get(("decode", batch, context))))
        for tokens in prefills:
            row = time_prefill(model, report.machine, batch, tokens)
            report.rows.append(replace(row, peer=peer.get(("prefill", batch, tokens))))
    return report


def describe(model: Model) -> dict[str, Any]:
    """What was timed, in words and numbers."""
    parameters = sum(np.prod(p.shape) for _, p in declared(model.config, model.layout, str(model.dtype)))
    return {
        "parameters": int(parameters),
        "layers": model.config.num_hidden_layers,
        "hidden_size": model.config.hidden_size,
        "experts": f"{model.config.num_experts_per_token} of {model.config.num_experts}",
        "dtype": str(model.dtype),
        "weights": "random" if model.source is None else str(model.source.name),
        **dict(tp=model.layout.tp, cp=model.layout.cp),
    }


def milliseconds(seconds: float) -> str:
    """A time to read, in ms."""
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


def _row(what, machine, batch, tokens, context, capacity, seconds, nbytes, operations) -> Row:
    floor = max(nbytes / machine.copy_rate, operations / machine.matrix_rate)
    return Row(what, batch, tokens, context, capacity, seconds, nbytes, operations, floor)


def _is_expert(path: tuple) -> bool:
    return str(path[-1]).startswith("experts_")


def _operations(config: Config, ranks: int, tokens: int, *, attended: float) -> float:
    """2 a weight and token that meet, and the attention over `attended` pairs of query and key, on one of `ranks`."""
    active = 0.0
    for path, p in declared(config, SINGLE, "bfloat16"):
        if path[0] == "embed" or len(p.shape) == 1:
            continue
        packed = 2 if str(path[-1]).endswith("_packed") else 0 if str(path[-1]).endswith("_scale") else 1
        share = config.num_experts_per_token / config.num_experts if _is_expert(path) else 1
        active += packed * share * float(np.prod(p.shape))
    pair = config.num_attention_heads * (2 * config.kv_lora_rank + config.qk_rope_head_dim)
    step = 3 * config.kda_num_heads * config.kda_head_dim**2
    mixing = len(config.mla_layers) * attended * pair + len(config.kda_layers) * tokens * step
    return 2 * (tokens * active + mixing) / ranks


def _random(about: tuple[tuple[int, ...], str], key: jax.Array) -> jax.Array:
    shape, dtype = about
    return jax.random.normal(key, shape, jnp.dtype(dtype))


def _negated(_: None, x: jax.Array) -> jax.Array:
    return -x


def _squared(_: None, x: jax.Array) -> jax.Array:
    return x @ x
