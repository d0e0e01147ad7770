"""One measurement: a decode step or a prefill, warm and compiled, with the floor of what it really did beside it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax import processes
from kimi_jax.compiled import STEP, born
from kimi_jax.initialise import key_of
from kimi_jax.measuring.floors import Costs, decode_costs, prefill_costs, total
from kimi_jax.measuring.hits import Hits, Routing, counted, here
from kimi_jax.measuring.machine import REPEATS, Machine, Timing, timed
from kimi_jax.measuring.phases import Event, Phase, phase_times, profiled, table
from kimi_jax.runtime import Model
from kimi_jax.sampling import Temperature
from kimi_jax.state import State
from sharding_rules import stripes, whole_number

BURST = 32  # decode steps a timed call
STEPS = BURST * (REPEATS + 1)  # of one measurement, the first call included
LARGE, ROWS_DRAWN = 1 << 28, 1024  # numbers in an array of a state that is not drawn whole; rows that are
PROFILED = 8  # decode steps under the profiler
NO_TIMELINE = "no phases: JAX's profiler has no timeline of this device"


@dataclass(frozen=True)
class Row:
    """One measurement.

    seconds: of a decode step or of a whole prefill. bytes, operations: of one device, at least; floor: the seconds that
    they take on the machine. experts_hit: see `Hits`; None without routed experts. peer: seconds of the same by the
    peer. phases: None unless asked for, empty where JAX has no timeline of the device.
    """

    what: str
    batch: int
    tokens: int
    context: int
    capacity: int
    seconds: Timing
    bytes: int
    operations: int
    floor: float
    experts_hit: Hits | None
    peer: float | None = None
    phases: list[Phase] | None = None


class Decoding:
    """Decode steps of `batch` rows in bursts on the device, over states of up to `capacity` tokens a row.

    Tokens are sampled: greedy rows of random weights soon repeat one token, and would share their experts.
    """

    def __init__(self, model: Model, batch: int, capacity: int, *, rank: int | None = None):
        self.model, self.batch, self.capacity, self.rank = model, batch, capacity, rank
        self.routing = Routing(model)
        self.token = np.zeros(batch, np.int32)
        self.state: State | None = None

    def compile(self) -> None:
        """Ahead of time; nothing runs."""
        self._compiled()
        if self._counts_hits():
            self.routing.compile(self.batch, 1, self.model.cache_structs(self.batch, self.capacity))

    def text(self) -> str:
        """The compiled loop."""
        return self._compiled().as_text()

    def _compiled(self) -> Any:
        cache = self.model.cache_structs(self.batch, self.capacity)
        return self.model._burst.compile(self.model.params, cache, *self._rest(), want_logprobs=False)

    def time(self, machine: Machine, context: int, *, phases: bool = False) -> Row:
        """Steps of rows that hold `context` tokens when they begin."""
        model, hit = self.model, []
        self._fill(context)

        def look() -> None:
            if self._counts_hits():
                assert self.state is not None
                reached, self.state = self.routing(self.token[:, None], self.state)
                hit.append(reached)

        seconds = timed(self._burst, divide=BURST, before=look)
        hits = self._hits(hit)
        middle = context + STEPS // 2  # rows grow while they are timed: the floor is that of the middle
        costs = decode_costs(model.config, model.layout, str(model.dtype), self.batch, middle, here(hits))
        room = stripes.capacity(self.capacity, model.layout.tokens_per_block, model.layout.cp)
        row = row_of("decode", machine, (self.batch, 1, context, room), seconds, costs, hits)
        if not phases:
            return row
        events = profiled(lambda: self._burst(PROFILED), STEP)
        return with_phases(row, events, self.text() if events else "", PROFILED, costs, machine)

    def _fill(self, context: int) -> None:
        """Rows of `context` tokens: random ones, or those that an earlier measurement left."""
        state = self.state or filled_state(self.model, self.batch, self.capacity)
        cache, lengths = state.take(), np.full(self.batch, context, np.int32)
        cache = replace(cache, lengths=processes.put(lengths, cache.lengths.sharding))
        self.state = State(cache, self.model.config, self.model.layout, self.model.mesh, lengths)
        self.token = np.arange(self.batch, dtype=np.int32) % self.model.config.vocab_size

    def _burst(self, steps: int = BURST) -> None:
        assert self.state is not None
        self.state, done = self.model.burst(self.state, *self._rest(steps))
        assert int(done.steps) == steps, "logits were not finite"
        self.token = done.token

    def _rest(self, steps: int = BURST) -> tuple[Any, ...]:
        """What `steps.burst` takes besides the state."""
        live, seeds = np.ones(self.batch, bool), np.arange(self.batch, dtype=np.uint32)
        stops = np.full(8, -1, np.int32)
        return self.token, live, Temperature(1.0), seeds, 0, stops, steps

    def _counts_hits(self) -> bool:
        """Whether it takes a look to know which experts are hit: one token on one rank reaches as many as it may."""
        return self.routing.layers > 0 and (self.batch > 1 or self.model.layout.ranks > 1)

    def _hits(self, hit: list[np.ndarray]) -> Hits | None:
        k = float(self.model.config.num_experts_per_token)
        return counted(hit, self.model, rank=self.rank) if hit else Hits(k, k) if self.routing.layers else None


def time_prefill(model: Model, machine: Machine, batch: int, tokens: int, *, phases: bool = False) -> Row:
    """One pass over prompts of `tokens` tokens, fed at once."""
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (batch, tokens))
    routing = Routing(model)

    def prefill() -> None:
        logits, _ = model.prefill(ids, None, model.new_state(batch, tokens))
        logits.block_until_ready()

    seconds = timed(prefill)
    hits = counted([routing(ids, model.new_state(batch, tokens))[0]], model) if routing.layers else None
    costs = prefill_costs(model.config, model.layout, str(model.dtype), batch, tokens, here(hits))
    row = row_of("prefill", machine, (batch, tokens, tokens, tokens), seconds, costs, hits)
    if not phases:
        return row
    shapes = jax.ShapeDtypeStruct(ids.shape, jnp.int32), jax.ShapeDtypeStruct((batch,), jnp.int32)
    text = model._extend.compile(model.params, *shapes, model.cache_structs(batch, tokens)).as_text()
    return with_phases(row, profiled(prefill, STEP), text, 1, costs, machine)


def filled_state(model: Model, batch: int, capacity: int) -> State:
    """A state of random numbers: nothing may be timed on zeros. Its rows hold no token yet."""
    leaves, structure = jax.tree.flatten(model.new_state(batch, capacity).take())
    for i, leaf in enumerate(leaves[:-1]):  # the lengths are the last
        leaf.delete()  # first: a cache may be too large to be held twice
        leaves[i] = born(_random, (leaf.shape, str(leaf.dtype)), leaf.sharding, key_of(("state", i), 0))
    return State(
        jax.tree.unflatten(structure, leaves), model.config, model.layout, model.mesh, np.zeros(batch, np.int32)
    )


def room(context: int, capacity: int | None = None) -> int:
    """Tokens a row must hold to be timed at `context`. Raises ValueError if the capacity asked for is less."""
    need = context + STEPS + PROFILED
    if capacity is not None and whole_number("capacity", capacity) < need:
        raise ValueError(f"capacity={capacity} is too small: context {context} and the timed steps need {need}")
    return need if capacity is None else capacity


def row_of(
    what: str, machine: Machine, sizes: tuple[int, int, int, int], seconds: Timing, costs: Costs, hits: Hits | None
) -> Row:
    """A row; sizes: batch, tokens, context, capacity."""
    cost = total(costs)
    floor = cost.seconds(machine.copy_rate, machine.matrix_rate)
    return Row(what, *sizes, seconds, int(cost.bytes), int(cost.operations), floor, hits)


def with_phases(row: Row, events: Sequence[Event], text: str, steps: int, costs: Costs, machine: Machine) -> Row:
    """The row with the times of its phases, if there are events."""
    if not events:
        return replace(row, phases=[])
    seconds = row.seconds.median
    return replace(row, phases=phase_times(events, text, steps=steps, seconds=seconds, costs=costs, machine=machine))


def phases_of(row: Row) -> str:
    """The phases of a row as text, or why there are none."""
    title = f"{row.what}, batch {row.batch}, context {row.context:,}"
    return f"\n{title}\n{table(row.phases) if row.phases else NO_TIMELINE}"


def _random(about: tuple[tuple[int, ...], str], key: jax.Array) -> jax.Array:
    """Normal numbers; of a large array a block of rows again and again, so that no second array of its size is made."""
    shape, dtype = about
    rows = math.gcd(shape[-2], ROWS_DRAWN) if math.prod(shape) > LARGE else shape[-2]
    if rows == shape[-2]:
        return jax.random.normal(key, shape, jnp.dtype(dtype))
    block = jax.random.normal(key, (rows, shape[-1]), jnp.dtype(dtype))
    return jnp.broadcast_to(block, (*shape[:-2], shape[-2] // rows, *block.shape)).reshape(shape)
