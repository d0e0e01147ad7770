"""NoPE latent attention over one stretch of the latent cache, as mergeable partial results.

Both forms walk the cache in blocks of keys up to the longest live row, so their cost follows the length and not the
capacity. A `Partial` is exact on its own and merges exactly with others (`kimi_jax.ops.helix`). These functions know
positions, not who holds them: the caller says which position each cache slot has.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kimi_jax.kernels import mla_decode, mla_decode_hopper, mla_prefill
from kimi_jax.kernels.device import hopper_for_mosaic
from kimi_jax.ops.linear import project

KEY_BLOCK = 256  # cache slots a step of the loop; bounds the scores held at once


class Partial(NamedTuple):
    """Attention over some of the keys.

        out = sum_s softmax(score)_s value_s        lse = ln sum_s exp(score_s)

    `out` is normalised by its own sum; a query which saw no key has out = 0 and lse = -inf. Both float32.
    """

    out: Float[Array, "B T H V"]
    lse: Float[Array, "B T H"]


class Keys(NamedTuple):
    """The cache as one rank sees it, and who may look at what.

    rows: latent (kv_lora) and positional part of each slot of one stripe. The stripe's axis of size 1 stays: dropping
    it inside the decode loop makes XLA copy the whole cache (measured). position_of: global position of a slot, which
    grows with the slot. query_positions: a query sees the keys at or before its own position. lengths: how many leading
    slots a row's last query may look at.
    """

    rows: Float[Array, "B 1 S Z"]
    position_of: Callable[[Int[Array, " C"]], Int[Array, " C"]]
    query_positions: Int[Array, "B T"]
    lengths: Int[Array, " B"]


def slots_seen(keys: Keys) -> Int[Array, "B T"]:
    """How many leading slots each query sees."""
    positions = keys.position_of(jnp.arange(keys.rows.shape[2], dtype=jnp.int32))
    found = jnp.searchsorted(positions, keys.query_positions, side="right", method="scan_unrolled")  # one GPU kernel
    return found.astype(jnp.int32)


def attend_absorbed(query: Float[Array, "B T H Z"], keys: Keys, latent: int, scale: float) -> Partial:
    """Attention in the latent space: keys and values are the cached rows themselves.

        score_s = scale (q_h . row_s)        out = sum_s p_s row_s[:latent]

    query: W_UK^T q_nope beside q_pe, so that q . row = q_nope . k_nope + q_pe . k_pe; scale: (nope + rope)^-1/2.
    out is in the latent space (V = latent): the caller applies W_UV. For few queries: a row is read once for all heads.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.2, weight absorption.
    """

    def op(query: Float[Array, "B T H Z"], rows: Float[Array, "B 1 S Z"], lengths: Int[Array, " B"]):
        heads_first = query.swapaxes(1, 2)
        return tuple(_absorbed(heads_first, keys._replace(rows=rows, lengths=lengths), latent, scale))

    arrays = (query, keys.rows, keys.lengths)
    if hopper_for_mosaic() and mla_decode_hopper.supports(query, keys.rows.shape[2], latent):
        kernel = mla_decode_hopper.attend_absorbed_hopper
    elif mla_decode.supports(query, latent):
        kernel = mla_decode.attend_absorbed_step
    else:
        return Partial(*op(*arrays))
    kernel = partial(kernel, latent=latent, scale=scale)
    return Partial(*jax.lax.platform_dependent(*arrays, cuda=kernel, default=op))


def attend_expanded(
    q_nope: Float[Array, "B T H K"],
    q_pe: Float[Array, "B T H P"],
    keys: Keys,
    k_b: Float[Array, "H K R"],
    v_b: Float[Array, "H V R"],
    scale: float,
) -> Partial:
    """Attention over keys and values expanded from the latents, block by block.

        k_s = (W_UK lat_s, pe_s)   v_s = W_UV lat_s   score_s = scale (q . k_s)   out = sum_s p_s v_s

    scale: (nope + rope)^-1/2. For many queries: fewer operations a query and key than the absorbed form. Queries go in
    tiles, each up to the last key that it may see; the tile's size is the platform's.

    Source: DeepSeek-V2 (arXiv 2405.04434), equations 9 to 19, without the rotation.
    """

    def tiled(q_nope, q_pe, rows, query_positions, *, tile: int, block: int):
        held = keys._replace(rows=rows)
        T = q_nope.shape[1]
        if T <= tile:
            return tuple(_expanded(q_nope, q_pe, held, query_positions, k_b, v_b, scale, block))
        tiles = -(-T // tile)

        def cut(x: Array) -> Array:
            x = jnp.pad(x, [(0, 0), (0, tiles * tile - T), *[(0, 0)] * (x.ndim - 2)], mode="edge")
            return x.reshape(x.shape[0], tiles, tile, *x.shape[2:]).swapaxes(0, 1)

        def one(part: tuple[Array, Array, Array]):
            return tuple(_expanded(part[0], part[1], held, part[2], k_b, v_b, scale, block))

        parts = jax.lax.map(one, (cut(q_nope), cut(q_pe), cut(query_positions)))
        return tuple(x.swapaxes(0, 1).reshape(x.shape[1], tiles * tile, *x.shape[3:])[:, :T] for x in parts)

    arrays = (q_nope, q_pe, keys.rows, keys.query_positions)
    small, large = partial(tiled, tile=256, block=KEY_BLOCK), partial(tiled, tile=1024, block=4 * KEY_BLOCK)
    if not mla_prefill.supports(q_nope, q_pe, v_b):
        return Partial(*jax.lax.platform_dependent(*arrays, cpu=small, default=large))

    def kernel(q_nope, q_pe, rows, query_positions):
        seen = slots_seen(keys._replace(rows=rows, query_positions=query_positions))
        return mla_prefill.attend_expanded_tiles(q_nope, q_pe, rows, seen, k_b, v_b, scale)

    return Partial(*jax.lax.platform_dependent(*arrays, cpu=small, cuda=kernel, default=large))


def _absorbed(query: Float[Array, "B H T Z"], keys: Keys, latent: int, scale: float) -> Partial:
    B, H, T, Z = query.shape
    flat = query.reshape(B, H * T, Z)

    def block(rows: Float[Array, "B C Z"]):
        scores = jnp.einsum("bmz,bcz->bmc", flat, rows, preferred_element_type=jnp.float32) * scale

        def weigh(p: Float[Array, "B H T C"]):
            p = p.reshape(B, H * T, -1)
            out = jnp.einsum("bmc,bcr->bmr", p, rows[..., :latent], preferred_element_type=jnp.float32)
            return out.reshape(B, H, T, latent)

        return scores.reshape(B, H, T, -1), weigh

    return _online_softmax(block, keys, keys.query_positions, (B, H, T, latent), query.dtype, KEY_BLOCK)


def _expanded(q_nope, q_pe, keys: Keys, query_positions, k_b, v_b, scale: float, size: int) -> Partial:
    latent = k_b.shape[-1]
    q = jnp.concatenate([q_nope, q_pe], axis=-1).swapaxes(1, 2)  # [B, H, T, K+P]

    def block(rows: Float[Array, "B C Z"]):
        lat, pe = rows[..., :latent], rows[..., latent:]
        k, v = project(lat, k_b).swapaxes(1, 2), project(lat, v_b).swapaxes(1, 2)  # [B, H, C, K], [B, H, C, V]
        k = jnp.concatenate([k, jnp.broadcast_to(pe[:, None], (*k.shape[:3], pe.shape[-1]))], axis=-1)
        scores = jnp.einsum("bhtk,bhck->bhtc", q, k, preferred_element_type=jnp.float32) * scale
        return scores, lambda p: jnp.einsum("bhtc,bhcv->bhtv", p, v, preferred_element_type=jnp.float32)

    shape = (*q.shape[:3], v_b.shape[1])
    return _online_softmax(block, keys, query_positions, shape, q.dtype, size)


def _online_softmax(
    block: Callable, keys: Keys, query_positions: Int[Array, "B T"], shape: tuple[int, ...], dtype: jnp.dtype, size: int
) -> Partial:
    """Fold the blocks of `keys` into one Partial: running maximum, sum and weighted values, all float32, heads first.

    block(rows) -> (scores [B, H, T, C], weigh): of a block of rows, and the function from weights to weighted values.
    """
    slots = keys.rows.shape[2]
    size = min(size, slots)
    needed = (keys.position_of(jnp.arange(slots, dtype=jnp.int32)) <= query_positions.max()).sum(dtype=jnp.int32)

    def body(i, carry):
        top, total, weighted = carry
        start = jnp.minimum(i * size, slots - size)  # the last block may reach back: slots seen before are masked
        here = start + jnp.arange(size, dtype=jnp.int32)
        seen = (keys.position_of(here)[None, None] <= query_positions[..., None]) & (here >= i * size)[None, None]
        scores, weigh = block(jax.lax.dynamic_slice_in_dim(keys.rows, start, size, axis=2)[:, 0])
        scores = jnp.where(seen[:, None], scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(-1))
        safe_top = jnp.where(jnp.isneginf(new_top), 0.0, new_top)  # exp(-inf - -inf) is NaN
        p = jnp.exp(scores - safe_top[..., None])
        keep = jnp.exp(top - safe_top)
        return new_top, total * keep + p.sum(-1), weighted * keep[..., None] + weigh(p.astype(dtype))

    start = (jnp.full(shape[:3], -jnp.inf), jnp.zeros(shape[:3]), jnp.zeros(shape))
    top, total, weighted = jax.lax.fori_loop(0, (needed + size - 1) // size, body, start)
    some = total != 0  # a NaN that was seen is not nothing
    safe_total = jnp.where(some, total, 1.0)
    out = jnp.where(some[..., None], weighted / safe_total[..., None], 0.0)
    lse = jnp.where(some, top + jnp.log(safe_total), -jnp.inf)
    return Partial(out.swapaxes(1, 2), lse.swapaxes(1, 2))
