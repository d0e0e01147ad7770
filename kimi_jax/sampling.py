"""Choosing the next token: a row of logits and a key in, a token id out.

Every choice is a frozen dataclass whose numbers are traced leaves: another temperature reuses the compiled step. The
draws add Gumbel noise to the logits and take the largest sum, which is an exact draw from their softmax; the noise of
a token depends on its id and the row's key alone, so `TopK(W)`, `TopP(1)`, `MinP(0)` and `Temperature` agree token for
token. Must not know: the model, the tokenizer, when a text ends.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int, Key, Shaped, UInt32

from sharding_rules import whole_number

T = TypeVar("T", bound=type)
Number = int | float | np.number | Array
SEEDS = 2**32  # a seed is 32 bits


def row_seeds(seed: Any, rows: int) -> UInt32[np.ndarray, "B"]:
    """seeds[i] = seed + i; of a list, its own numbers.

    seed: 0 <= seed + i < 2^32; a list holds one number a row.

    Raises ValueError for a number out of range, or a list that does not hold `rows` numbers.
    """
    given = seed if isinstance(seed, Iterable) else [whole_number("seed", seed, least=-SEEDS) + i for i in range(rows)]
    seeds = [whole_number("seed", number, least=-SEEDS) for number in given]  # its range is checked below, by row
    if len(seeds) != rows:
        raise ValueError(f"seed has {len(seeds)} numbers for {rows} prompts: pass one for each prompt, or a single int")
    for i, number in enumerate(seeds):
        if not 0 <= number < SEEDS:
            raise ValueError(f"seed={number} for row {i}: wanted 0 <= seed < 2**32; pass a smaller seed")
    return np.array(seeds, np.uint32)


def row_keys(seeds: UInt32[Array, "B"], steps: int | Int[Array, ""] | Int[Array, "B"]) -> Key[Array, "B"]:
    """keys[i] = fold_in(key(seeds[i]), steps[i]): a row's draws follow from its own seed and its own step.

    steps: how many tokens the row has drawn before this one, one number for all rows or one each.
    """
    steps = jnp.broadcast_to(jnp.asarray(steps), seeds.shape)
    return jax.vmap(lambda seed, step: jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), step))(
        seeds, steps
    )


def token_logprobs(logits: Float32[Array, "B W"], tokens: Int[Array, "B"]) -> Float32[Array, "B"]:
    """log softmax(logits)[token] of each row, by the logits as the model gave them: no temperature, nothing cut."""
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def _as_leaves(cls: T) -> T:
    """Register a dataclass as a pytree of its numbers. Rebuilding skips the checks: JAX puts tracers in their place."""
    names = [field.name for field in fields(cls)]

    def flatten(self):
        return [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in names], None

    def unflatten(_, leaves):
        self = object.__new__(cls)
        for name, leaf in zip(names, leaves, strict=True):
            object.__setattr__(self, name, leaf)
        return self

    jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
    return cls


def _check(self: Any, name: str, holds: Callable[[Any], bool], wanted: str, number: type = float) -> None:
    """Keep field `name` as a Python number, so that 1 and 1.0 share a compiled step; ValueError if it does not hold."""
    value = getattr(self, name)
    if isinstance(value, Array):  # made inside a compiled function, or a number that lives on the device
        return
    kind = (int, np.integer) if number is int else (int, float, np.integer, np.floating)
    if isinstance(value, bool) or not isinstance(value, kind) or not holds(value):
        raise ValueError(f"{type(self).__name__}({name}={value!r}): wanted {wanted}")
    object.__setattr__(self, name, number(value))


def _check_temperature(self: Any) -> None:
    _check(
        self,
        "t",
        lambda t: math.isfinite(t) and np.finfo(np.float32).tiny <= t <= np.finfo(np.float32).max,
        "a finite float32 above 0; for the likeliest token take Greedy()",
    )


def _scaled(logits: Float32[Array, "W"], t: Number) -> Float32[Array, "W"]:
    """(logits - max) / t: the largest is 0 at any temperature, so nothing overflows upwards."""
    return (logits - jnp.max(logits)) / t


def _draw(scaled: Float32[Array, "W"], keep: Bool[Array, "W"], key: Key[Array, ""]) -> Int[Array, ""]:
    """argmax over the kept tokens of scaled + Gumbel noise: a draw from their softmax."""
    return jnp.argmax(jnp.where(keep, scaled + jax.random.gumbel(key, scaled.shape), -jnp.inf))


def _best_until(logits: Float32[Array, "W"], weight: Shaped[Array, "W"], wanted: Number) -> Bool[Array, "W"]:
    """The fewest best tokens whose weights sum to `wanted` or more; of equal logits the lower ids first.

    No sort: the bits of a float, with the sign handled, order like the float itself, so the logit of the last token
    that belongs in is found bit by bit from the top, one pass over the row for each of the 32.
    """
    bits = lax.bitcast_convert_type(jnp.where(logits == 0, 0.0, logits), jnp.uint32)  # -0 and 0 are equal logits
    top = jnp.uint32(1 << 31)
    order = jnp.where(bits >= top, ~bits, bits | top)

    def set_bit(i, cut):
        trial = cut | (top >> i.astype(jnp.uint32))
        enough = jnp.sum(jnp.where(order >= trial, weight, 0)) >= wanted
        return jnp.where(enough, trial, cut)

    cut = lax.fori_loop(0, 32, set_bit, jnp.uint32(0))
    above, level = order > cut, jnp.where(order == cut, weight, 0)
    before = jnp.sum(jnp.where(above, weight, 0)) + jnp.cumsum(level) - level
    return above | ((order == cut) & (before < wanted))


@_as_leaves
@dataclass(frozen=True)
class Greedy:
    """The likeliest token; of equal ones the lowest id."""

    def __call__(self, logits: Float32[Array, "B W"], keys: Key[Array, "B"]) -> Int[Array, "B"]:
        """argmax_w logits[b, w]; the keys are not used."""
        return jnp.argmax(logits, axis=-1)


@_as_leaves
@dataclass(frozen=True)
class Temperature:
    """A draw from softmax(logits / t). t > 0: towards 0 the likeliest token, 1 the model's own distribution."""

    t: Number

    def __post_init__(self):
        _check_temperature(self)

    def __call__(self, logits: Float32[Array, "B W"], keys: Key[Array, "B"]) -> Int[Array, "B"]:
        """One token a row, each from its own key."""

        def row(logits, key):
            return _draw(_scaled(logits, self.t), jnp.ones(logits.shape, bool), key)

        return jax.vmap(row)(logits, keys)


@_as_leaves
@dataclass(frozen=True)
class TopK:
    """A draw from softmax(logits / t) over the k likeliest tokens; of equal logits the lower ids first. k >= 1."""

    k: Number
    t: Number = 1.0

    def __post_init__(self):
        _check(self, "k", lambda k: 1 <= k < 2**31, "a whole number of 1 or more; without limit: Temperature(t)", int)
        _check_temperature(self)

    def __call__(self, logits: Float32[Array, "B W"], keys: Key[Array, "B"]) -> Int[Array, "B"]:
        """One token a row, each from its own key."""

        def row(logits, key):
            return _draw(_scaled(logits, self.t), _best_until(logits, jnp.ones(logits.shape, jnp.int32), self.k), key)

        return jax.vmap(row)(logits, keys)


@_as_leaves
@dataclass(frozen=True)
class TopP:
    """A draw from softmax(logits / t) over its nucleus: the fewest likeliest tokens of mass p or more. 0 < p <= 1.

    Source: Holtzman et al., The Curious Case of Neural Text Degeneration, section 3.1; the mass is counted after the
    temperature, as transformers does.
    """

    p: Number
    t: Number = 1.0

    def __post_init__(self):
        _check(self, "p", lambda p: 0 < p <= 1, "0 < p <= 1; for the likeliest token take Greedy()")
        _check_temperature(self)

    def __call__(self, logits: Float32[Array, "B W"], keys: Key[Array, "B"]) -> Int[Array, "B"]:
        """One token a row, each from its own key."""
        mass = jnp.maximum(self.p, jnp.finfo(jnp.float32).tiny)  # a p that float32 rounds to 0 still keeps one token

        def row(logits, key):
            scaled = _scaled(logits, self.t)
            nucleus = _best_until(logits, jax.nn.softmax(scaled), mass) | (mass >= 1)  # the sum may round to 1 early
            return _draw(scaled, nucleus, key)

        return jax.vmap(row)(logits, keys)


@_as_leaves
@dataclass(frozen=True)
class MinP:
    """A draw from softmax(logits / t) over the tokens at least p times as likely as the likeliest. 0 <= p <= 1.

    At p = 1 the likeliest token and its exact equals are left. Source: Nguyen et al., Min-p Sampling, section 3; the
    temperature comes first, as in transformers.
    """

    p: Number
    t: Number = 1.0

    def __post_init__(self):
        _check(self, "p", lambda p: 0 <= p <= 1, "0 <= p <= 1; p is a share of the likeliest token's probability")
        _check_temperature(self)

    def __call__(self, logits: Float32[Array, "B W"], keys: Key[Array, "B"]) -> Int[Array, "B"]:
        """One token a row, each from its own key."""

        def row(logits, key):
            scaled = _scaled(logits, self.t)
            return _draw(scaled, scaled >= jnp.log(self.p), key)

        return jax.vmap(row)(logits, keys)


Sampling = Greedy | Temperature | TopK | TopP | MinP
