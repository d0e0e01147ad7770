"""The pairs of (token, expert) in the order of their experts: a counting sort for `experts_many`.

A general sort compares keys of any size, in a dozen kernels; here a key is one of a few hundred experts.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Int32

PAIRS = 256  # pairs a program counts and places


def order_by_expert(
    local: Int32[Array, " P"], experts: int, *, warps: int = 8, interpret: bool = False
) -> tuple[Int32[Array, " Q"], Int32[Array, " E"]]:
    """order[i] = which pair is the i-th when sorted by expert, equal ones as they come; and the pairs of each expert.

    Pairs of other than the experts 0 .. E-1 are left out. Behind the last pair there is room for PAIRS more (Q = P +
    PAIRS), whose entries are anything.

    Each program counts its pairs by expert; then it is known where they go. Floor: 8 bytes a pair.
    """
    pairs, width = local.shape[0], pl.next_power_of_2(experts)
    chunks = pl.cdiv(pairs, PAIRS)
    call = functools.partial(
        pl.pallas_call,
        grid=(chunks,),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
    )
    counts = call(
        functools.partial(_count, width=width),
        out_shape=jax.ShapeDtypeStruct((chunks, width), jnp.int32),
        name="experts_count_pairs",
    )(local)
    each = jnp.sum(counts, axis=0)
    starts = _counts_before(counts) + (jnp.cumsum(each) - each)[None, :]
    order = call(
        functools.partial(_place, experts=experts),
        out_shape=jax.ShapeDtypeStruct((pairs + PAIRS,), jnp.int32),
        name="experts_place_pairs",
    )(local, starts)
    return order, each[:experts]


def _counts_before(counts: Int32[Array, "M E"]) -> Int32[Array, "M E"]:
    """What the chunks before each chunk hold: one product, exact in bfloat16 as no count is above PAIRS = 2^8.

    A cumulative sum by XLA takes longer than both kernels.
    """
    chunk = jnp.arange(counts.shape[0], dtype=jnp.int32)
    earlier = (chunk[None, :] < chunk[:, None]).astype(jnp.bfloat16)
    return jnp.dot(earlier, counts.astype(jnp.bfloat16), preferred_element_type=jnp.float32).astype(jnp.int32)


def _count(local_ref, counts_ref, *, width):
    _, local = _chunk(local_ref)
    hits = local[:, None] == jnp.arange(width, dtype=jnp.int32)[None, :]
    counts_ref[pl.program_id(0), :] = jnp.sum(jnp.where(hits, 1, 0), axis=0)


def _place(local_ref, starts_ref, order_ref, *, experts):
    pair, local = _chunk(local_ref)
    held = (local >= 0) & (local < experts)
    start = plgpu.load(starts_ref.at[pl.program_id(0), jnp.where(held, local, 0)])
    ahead = (local[:, None] == local[None, :]) & (pair[:, None] < pair[None, :])
    place = start + jnp.sum(jnp.where(ahead, 1, 0), axis=0)
    behind = local_ref.shape[0] + jnp.arange(PAIRS, dtype=jnp.int32)
    plgpu.store(order_ref.at[jnp.where(held, place, behind)], pair, mask=held)


def _chunk(local_ref):
    """This program's pairs, and the expert of each, -1 where there is no pair."""
    pair = pl.program_id(0) * PAIRS + jnp.arange(PAIRS, dtype=jnp.int32)
    some = local_ref.at[pl.ds(pl.program_id(0) * PAIRS, PAIRS)]
    return pair, plgpu.load(some, mask=pair < local_ref.shape[0], other=-1)
