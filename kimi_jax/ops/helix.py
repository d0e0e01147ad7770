"""Helix attention on one rank: write the new rows into the own stripe, attend over it, exchange, merge the own heads.

Runs inside a per-shard region (`Layout.per_shard`); collectives take the mesh axis as an argument. Prefill and decode,
one stripe and many, go the same way. Which position lives where is `sharding_rules.stripes`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kimi_jax.ops.attention import Keys, Partial, attend_absorbed, attend_expanded
from kimi_jax.ops.linear import per_head
from sharding_rules import stripes


class Stripe(NamedTuple):
    """Where this rank stands in the ownership rule: `rank` of `ranks` along mesh `axis`, `block` positions a turn."""

    axis: tuple[str, ...]
    rank: Int[Array, ""]
    ranks: int
    block: int


def write_rows(
    cache: Float[Array, "B 1 S Z"],
    rows: Float[Array, "B T Z"],
    positions: Int[Array, "B T"],
    live: Bool[Array, "B T"],
    stripe: Stripe,
) -> Float[Array, "B 1 S Z"]:
    """cache[b, 0, slot(p)] = row of p for each live position p which this rank owns; all else stays as it is.

    Foreign and padded positions are sent past the end, where the scatter drops them: -1 would wrap to the last slot.
    """
    owned = live & (stripes.owner(positions, stripe.block, stripe.ranks) == stripe.rank)
    slots = jnp.where(owned, stripes.slot(positions, stripe.block, stripe.ranks), cache.shape[2])
    batch = jnp.arange(cache.shape[0], dtype=jnp.int32)[:, None]
    return cache.at[batch, 0, slots].set(rows.astype(cache.dtype), mode="drop")


def merge(parts: Partial) -> Float[Array, "B T H V"]:
    """Merge N partials of the same queries over disjoint keys, stacked along a leading axis, exactly.

        out = sum_i w_i out_i / sum_i w_i        w_i = exp(lse_i - max lse)

    A part that saw nothing (lse = -inf) is left out by selection, so that even a NaN in it does no harm; a query that
    nobody saw a key for gets 0, one that saw a NaN gets NaN.

    Source: Helix Parallelism (arXiv 2507.07120), section 2.1; the empty rows as in vLLM's DCP combine.
    """
    top = parts.lse.max(0, keepdims=True)
    top = jnp.where(jnp.isneginf(top), 0.0, top)
    weights = jnp.exp(parts.lse - top)
    total = weights.sum(0)
    seen = (weights != 0)[..., None]
    out = jnp.where(seen, weights[..., None] * jnp.where(seen, parts.out, 0.0), 0.0).sum(0)
    return out / jnp.where(total != 0, total, 1.0)[..., None]


def combine(part: Partial, stripe: Stripe) -> Float[Array, "B T Hc V"]:
    """Exchange partials over the stripes and merge: all heads over own keys -> own chunk of the heads over all keys.

    One all-to-all: the statistic travels as one more column of the output. Rank c of the axis receives heads
    [c H/N, (c+1) H/N) of every rank, N = ranks. The bytes do not depend on the context. On an axis of one device every
    rank's chunk comes back to where it was sent from, whatever N is: `measuring.rank_slice` times one rank so.
    """
    B, T, H, V = part.out.shape
    packed = jnp.concatenate([part.out, part.lse[..., None]], axis=-1)
    packed = jnp.moveaxis(packed.reshape(B, T, stripe.ranks, H // stripe.ranks, V + 1), 2, 0)
    packed = jax.lax.all_to_all(packed, stripe.axis, split_axis=0, concat_axis=0, tiled=True)
    return merge(Partial(packed[..., :V], packed[..., V]))


def helix_attention(
    q_nope: Float[Array, "B T H K"],
    q_pe: Float[Array, "B T H P"],
    rows: Float[Array, "B T Z"],
    cache: Float[Array, "B 1 S Z"],
    k_b: Float[Array, "H K R"],
    v_b: Float[Array, "H V R"],
    starts: Int[Array, " B"],
    counts: Int[Array, " B"],
    *,
    axis: tuple[str, ...],
    ranks: int,
    block: int,
) -> tuple[Float[Array, "B T Hc V"], Float[Array, "B 1 S Z"]]:
    """Causal latent attention of T new tokens over cache and themselves -> (this rank's head chunk, its updated
    stripe).

    rows: the new tokens' latent and positional part; every rank has all of them and keeps the ones it owns. starts:
    tokens which each row of the batch holds already; counts: how many of the T are real. Every rank computes every
    query. One token is attended in the absorbed form, several in the expanded one: the exchange is then of the value
    width.
    """
    T, heads, latent = q_nope.shape[1], q_nope.shape[2], k_b.shape[-1]
    scale = (q_nope.shape[-1] + q_pe.shape[-1]) ** -0.5
    stripe = Stripe(axis, jax.lax.axis_index(axis), ranks, block)
    steps = jnp.arange(T, dtype=jnp.int32)[None]
    positions = starts[:, None] + steps
    live = steps < counts[:, None]
    with jax.named_scope("cache_write"):
        cache = write_rows(cache, rows, positions, live, stripe)

    ends = starts + counts
    keys = Keys(
        cache,
        lambda slots: stripes.position(slots, stripe.rank, block, ranks),
        jnp.minimum(positions, ends[:, None] - 1),  # padded queries look at no more than real ones
        stripes.local_length(ends, stripe.rank, block, ranks),
    )
    with jax.named_scope("attend"):
        if T == 1:
            absorbed = per_head(q_nope, k_b, over=1)
            part = attend_absorbed(jnp.concatenate([absorbed, q_pe], axis=-1), keys, latent, scale)
        else:
            part = attend_expanded(q_nope, q_pe, keys, k_b, v_b, scale)
    with jax.named_scope("combine"):
        out = combine(part, stripe).astype(q_nope.dtype)
    if T == 1:
        chunk = jax.lax.dynamic_slice_in_dim(v_b, stripe.rank * (heads // ranks), heads // ranks)
        out = per_head(out, chunk, over=2)
    return out, cache
