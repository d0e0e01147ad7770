"""Time the kernels of attention, the delta rule and the experts alone, each beside its floor and its error.

What is called is the op, so that the form is measured which the platform chooses. Times are of the device, from JAX's
profiler, over inputs that together are larger than any cache; the clock's where there is no timeline (CPUs). What has
a state is timed inside one compiled loop, as decoding runs it, where the state is updated in place. The error is the
relative RMS against the op on the same numbers in float32.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array

from kimi_jax import tables
from kimi_jax.compiled import BORN, born
from kimi_jax.measuring.machine import Machine, measure_machine, timed
from kimi_jax.measuring.phases import profiled
from kimi_jax.ops.activations import swiglu
from kimi_jax.ops.attention import Keys, attend_absorbed, attend_expanded
from kimi_jax.ops.experts import experts, experts_grouped, experts_of_packed, experts_packed
from kimi_jax.ops.kda import mix_heads, mix_heads_plain

CACHES = 200_000_000  # bytes of inputs that no cache holds
MOST_SETS = 24
ROUNDS = 8  # of a loop over all sets
MLA, EXPERTS = dict(nope=128, pe=64, latent=512), dict(experts=256, hidden=1024, width=2304, top_k=8)
KDA_WIDTH, CONV = 128, 4


@dataclass(frozen=True)
class Case:
    """A call to time. make: key -> its arrays; call: what is timed; plain: the same by the op in float32; bytes,
    operations: what it must at least move and do; states: which of the arrays are states that the call gives back new,
    in the order in which they stand behind its first result.
    """

    name: str
    make: Callable[[Array], Sequence[Array]]
    call: Callable[..., Any]
    plain: Callable[..., Any]
    bytes: int | float
    operations: int | float
    states: tuple[int, ...] = ()


@dataclass(frozen=True)
class Line:
    """A case that was timed: seconds of a call, by the device's clock or the host's; the seconds that its bytes and
    operations take; its relative error.
    """

    name: str
    seconds: float
    clock: str
    floor: float
    error: float


@dataclass
class Report:
    """All cases, and the machine."""

    machine: Machine
    lines: list[Line] = field(default_factory=list)

    def to_json(self) -> str:
        """All of it."""
        return json.dumps(asdict(self), indent=1)

    def __repr__(self) -> str:
        rows = [
            (line.name, f"{line.seconds * 1e6:,.1f}", line.clock, f"{line.floor * 1e6:,.1f}",
             f"{line.floor / line.seconds:.0%}", f"{line.error:.1e}")
            for line in self.lines
        ]  # fmt: skip
        head = f"{self.machine.device}: copies {self.machine.copy_rate / 1e12:.2f} TB/s, multiplies"
        head += f" {self.machine.matrix_rate / 1e12:,.0f} TFLOP/s"
        return "\n".join([head, tables.text(["kernel", "us", "clock", "floor us", "of floor", "error"], rows)])


def run(cases: Iterable[Case]) -> Report:
    """Time the cases in bfloat16 on JAX's first device."""
    report = Report(measure_machine("bfloat16"))
    for case in cases:
        report.lines.append(_time(case, report.machine))
    return report


def all_cases() -> Iterator[Case]:
    """Decode and prefill attention, the delta rule's step and chunks, and the experts, plain and packed."""
    for heads in (32, 96):
        for slots in (131_072, 1_048_576):
            yield mla_decode(heads, slots)
    yield mla_prefill(32, 8192)
    for batch in (1, 8, 64, 256):
        yield kda(96, batch, 1)
    yield kda(32, 1, 8192)
    for tokens in (1, 32, 256, 4096):
        yield routed(tokens)
    yield packed(32)


def mla_decode(heads: int, slots: int) -> Case:
    """Absorbed attention of one query over a cache."""
    latent, width = MLA["latent"], MLA["latent"] + MLA["pe"]

    def call(query, rows):
        last = jnp.full((1,), slots, jnp.int32)
        return attend_absorbed(query, Keys(rows, lambda s: s, last[:, None] - 1, last), latent, _scale())

    make = partial(_normal, ((1, 1, heads, width), (1, 1, slots, width)))
    operations = 2 * heads * slots * (width + latent)
    return Case(f"MLA decode, {heads} heads, {slots:,} tokens", make, call, call, 2 * slots * width, operations)


def mla_prefill(heads: int, tokens: int) -> Case:
    """Expanded causal attention of a prompt."""
    nope, pe, latent = MLA["nope"], MLA["pe"], MLA["latent"]

    def call(q_nope, q_pe, rows, k_b, v_b):
        last = jnp.full((1,), tokens, jnp.int32)
        keys = Keys(rows, lambda s: s, jnp.arange(tokens, dtype=jnp.int32)[None], last)
        return attend_expanded(q_nope, q_pe, keys, k_b / latent**0.5, v_b / latent**0.5, _scale())

    shapes = (1, tokens, heads, nope), (1, tokens, heads, pe), (1, 1, tokens, latent + pe)
    make = partial(_normal, (*shapes, (heads, nope, latent), (heads, nope, latent)))
    pairs = tokens * (tokens + 1) / 2
    operations = 2 * heads * (pairs * (2 * nope + pe) + 2 * tokens * latent * nope)
    nbytes = 2 * tokens * (heads * (nope + pe) + latent + pe) + 4 * tokens * heads * nope
    return Case(f"MLA prefill, {heads} heads, {tokens:,} tokens", make, call, call, nbytes, operations)


def kda(heads: int, batch: int, tokens: int) -> Case:
    """KDA's middle: the step for one token, the chunks for many."""
    K = KDA_WIDTH

    def make(key):
        one, many = (batch, tokens, heads, K), (batch, tokens, heads)
        history, state = (batch, CONV - 1, heads, 3, K), (batch, heads, K, K)
        weights = (heads, 3, K, CONV), (heads,), (heads, K), (K,)
        arrays = _normal(((*many, 3, K), one, many, one, *weights, history, state), key)
        wide = (5, 6, 9)
        arrays = [x.astype(jnp.float32) if i in wide else x for i, x in enumerate(arrays)]
        return (*arrays, jnp.full((batch,), tokens, jnp.int32))

    about = dict(lower_bound=None, eps=1e-5)
    rows = batch * tokens * heads
    nbytes = 8 * batch * heads * K * K + (0 if tokens == 1 else 2 * rows * 6 * K)
    name = f"KDA step, {heads} heads, batch {batch}" if tokens == 1 else f"KDA chunks, {heads} heads, {tokens:,} tokens"
    call, plain = partial(mix_heads, **about), partial(mix_heads_plain, **about)
    return Case(name, make, call, plain, nbytes, 6 * rows * K * K, states=(8, 9) if tokens == 1 else ())


def routed(tokens: int) -> Case:
    """The routed experts, each token through its own."""
    E, F, D = EXPERTS["experts"], EXPERTS["hidden"], EXPERTS["width"]

    def make(key):
        weights = (x / 32 for x in _normal(((E, 2, F, D), (E, D, F)), key))
        return (*_choice(tokens, key), *weights)

    about = dict(activation=swiglu)
    nbytes, operations = 6 * F * D * _hit(tokens), 6 * F * D * tokens * EXPERTS["top_k"]
    call, plain = partial(experts, **about), partial(experts_grouped, **about)
    return Case(f"experts, {tokens:,} tokens", make, call, plain, nbytes, operations)


def packed(tokens: int) -> Case:
    """`routed` on MXFP4 weights."""
    E, F, D = EXPERTS["experts"], EXPERTS["hidden"], EXPERTS["width"]

    def make(key):
        keys = jax.random.split(key, 2)
        weights = []
        for shape, k in zip(((E, 2, F, D), (E, D, F)), keys, strict=True):
            codes = jax.random.bits(k, (*shape[:-1], shape[-1] // 2), jnp.uint8)
            weights += [codes, jax.random.randint(k, (*shape[:-1], shape[-1] // 32), 118, 123).astype(jnp.uint8)]
        return (*_choice(tokens, key), *weights)

    about = dict(activation=swiglu)
    nbytes, operations = 3 * F * D * (1 / 2 + 1 / 32) * _hit(tokens), 6 * F * D * tokens * EXPERTS["top_k"]
    call, plain = partial(experts_of_packed, **about), partial(experts_packed, **about)
    return Case(f"packed experts, {tokens:,} tokens", make, call, plain, nbytes, operations)


def _time(case: Case, machine: Machine) -> Line:
    where = SingleDeviceSharding(jax.local_devices()[0])
    keys = jax.random.split(jax.random.key(0), min(MOST_SETS, 1 + int(CACHES // case.bytes)))
    sets = [born(_made, case.make, where, key) for key in keys]
    call = partial(born, _called, case.call, where)
    error = _error(call(*sets[0]), _in_float32(partial(born, _called, case.plain, where), sets[0]))

    def all_sets():
        if case.states:
            return born(_looped, (case.call, case.states, where), where, *sets)
        return [call(*arrays) for arrays in sets]

    jax.block_until_ready(all_sets())
    calls = len(sets) * (ROUNDS if case.states else 1)
    events = profiled(all_sets, BORN)
    if sum(event.name.startswith("Memcpy") for event in events) < calls:  # in front of a loop, of what the sets keep
        events = [event for event in events if not event.name.startswith("Memcpy")]
    spent = sum(event.duration for event in events) / 1e9 if events else timed(all_sets).median
    floor = max(case.bytes / machine.copy_rate, case.operations / machine.matrix_rate)
    return Line(case.name, spent / calls, "device" if events else "host", floor, error)


def _looped(about: tuple[Callable, tuple[int, ...], Any], *sets: tuple[Array, ...]) -> list:
    """ROUNDS times the call on each of the sets, each time on the states that it gave back the last time."""
    call, at, where = about

    def called(arrays, states):
        given = dict(zip(at, states, strict=True))
        return born(_called, call, where, *(given.get(i, x) for i, x in enumerate(arrays)))  # one lowering for all

    def each(_, outs):
        return [called(arrays, states) for arrays, (_, *states) in zip(sets, outs, strict=True)]

    return jax.lax.fori_loop(1, ROUNDS, each, [called(arrays, [arrays[i] for i in at]) for arrays in sets])


def _made(make: Callable[[Array], Sequence[Array]], key: Array) -> tuple[Array, ...]:
    return tuple(make(key))


def _called(call: Callable, *arrays: Array) -> Any:
    return call(*arrays)


def _in_float32(plain: Callable, arrays: tuple[Array, ...]) -> Any:
    with jax.default_matmul_precision("highest"):
        return plain(*(x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in arrays))


def _error(got: Any, want: Any) -> float:
    """||got - want|| / ||want|| of the array that is furthest off."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    wide = ((a.astype(jnp.float32), b.astype(jnp.float32)) for a, b in pairs)
    return max(float(jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel())) for a, b in wide)


def _normal(shapes: tuple[tuple[int, ...], ...], key: Array) -> list[Array]:
    keys = jax.random.split(key, len(shapes))
    return [jax.random.normal(k, shape, jnp.bfloat16) for k, shape in zip(keys, shapes, strict=True)]


def _choice(tokens: int, key: Array) -> tuple[Array, Array, Array]:
    """Tokens, the experts that each of them takes, no two of a token alike, and their weights."""
    E, k = EXPERTS["experts"], EXPERTS["top_k"]
    (x,) = _normal(((tokens, EXPERTS["width"]),), key)
    _, chosen = jax.lax.top_k(jax.random.uniform(key, (tokens, E)), k)
    return x, chosen.astype(jnp.int32), jnp.full((tokens, k), 1 / k, jnp.float32)


def _hit(tokens: int) -> float:
    """Experts that `_choice` takes, on average."""
    E, k = EXPERTS["experts"], EXPERTS["top_k"]
    return E * (1 - (1 - k / E) ** tokens)


def _scale() -> float:
    return (MLA["nope"] + MLA["pe"]) ** -0.5
