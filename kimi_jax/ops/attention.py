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

from kimi_jax.kernels import mla_decode
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
    it inside the decode loop makes XLA copy the whole cache (measured). position_of: global position of a slot.
    query_positions: a query sees the keys at or before its own position. lengths: how many leading slots a row's last
    query may look at.
    """

    rows: Float[Array, "B 1 S Z"]
    position_of: Callable[[Int[Array, " C"]], Int[Array, " C"]]
    query_positions: Int[Array, "B T"]
    lengths: Int[Array, " B"]


def attend_absorbed(query: Float[Array, "B T H Z"], keys: Keys, latent: int, scale: float) -> Partial:
    """Attention in the latent space: keys and values are the cached rows themselves.

        score_s = scale (q_h . row_s)        out = sum_s p_s row_s[:latent]

    query: W_UK^T q_nope beside q_pe, so that q . row = q_nope . k_nope + q_pe . k_pe; scale: (nope + rope)^-1/2.
    out is in the latent space (V = latent): the caller applies W_UV. For few queries: a row is read once for all heads.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.2, weight absorption.
    """
    op = partial(_attend_rows, keys, latent, scale)
    if not mla_decode.supports(query, latent):
        return op(query, keys.rows, keys.lengths)
    kernel = partial(mla_decode.attend_absorbed_step, latent=latent, scale=scale)
    part = jax.lax.platform_dependent(query, keys.rows, keys.lengths, cuda=kernel, default=lambda *a: tuple(op(*a)))
    return Partial(*part)


def _attend_rows(keys: Keys, latent: int, scale: float, query: Float[Array, "B T H Z"], rows: Array, lengths: Array):
    """The absorbed form in plain XLA: rows and lengths are those of `keys`, passed as operands."""
    keys = keys._replace(rows=rows, lengths=lengths)
    B, T, H, Z = query.shape
    flat = query.reshape(B, T * H, Z)

    def block(rows: Float[Array, "B C Z"]):
        scores = jnp.einsum("bmz,bcz->bmc", flat, rows, preferred_element_type=jnp.float32) * scale

        def weigh(p: Float[Array, "B T H C"]):
            p = p.reshape(B, T * H, -1)
            out = jnp.einsum("bmc,bcr->bmr", p, rows[..., :latent], preferred_element_type=jnp.float32)
            return out.reshape(B, T, H, latent)

        return scores.reshape(B, T, H, -1), weigh

    return _online_softmax(block, keys, (*query.shape[:3], latent), query.dtype)


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

    scale: (nope + rope)^-1/2. For many queries: fewer operations a query and key than the absorbed form.

    Source: DeepSeek-V2 (arXiv 2405.04434), equations 9 to 19, without the rotation.
    """
    latent = k_b.shape[-1]

    def block(rows: Float[Array, "B C Z"]):
        lat, pe = rows[..., :latent], rows[..., latent:]
        k = project(lat, k_b)
        v = project(lat, v_b)
        scores = jnp.einsum("bthk,bchk->bthc", q_nope, k, preferred_element_type=jnp.float32)
        scores += jnp.einsum("bthp,bcp->bthc", q_pe, pe, preferred_element_type=jnp.float32)
        return scores * scale, lambda p: jnp.einsum("bthc,bchv->bthv", p, v, preferred_element_type=jnp.float32)

    return _online_softmax(block, keys, (*q_nope.shape[:3], v_b.shape[1]), q_nope.dtype)


def _online_softmax(block: Callable, keys: Keys, shape: tuple[int, ...], dtype: jnp.dtype) -> Partial:
    """Fold the blocks of `keys` into one Partial: running maximum, sum and weighted values, all float32.

    block(rows) -> (scores, weigh): scores of a block of rows, and the function from weights to their weighted values.
    """
    size = min(KEY_BLOCK, keys.rows.shape[2])
    last = keys.rows.shape[2] - size

    def body(i, carry):
        top, total, weighted = carry
        start = jnp.minimum(i * size, last)  # the last block may reach back into the one before: seen slots are masked
        slots = start + jnp.arange(size, dtype=jnp.int32)
        visible = (keys.position_of(slots)[None, None] <= keys.query_positions[..., None]) & (slots >= i * size)[
            None, None
        ]
        scores, weigh = block(jax.lax.dynamic_slice_in_dim(keys.rows, start, size, axis=2)[:, 0])
        scores = jnp.where(visible[:, :, None, :], scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(-1))
        safe_top = jnp.where(jnp.isneginf(new_top), 0.0, new_top)  # exp(-inf - -inf) is NaN
        p = jnp.exp(scores - safe_top[..., None])
        keep = jnp.exp(top - safe_top)
        return new_top, total * keep + p.sum(-1), weighted * keep[..., None] + weigh(p.astype(dtype))

    start = (jnp.full(shape[:3], -jnp.inf), jnp.zeros(shape[:3]), jnp.zeros(shape))
    top, total, weighted = jax.lax.fori_loop(0, (keys.lengths.max() + size - 1) // size, body, start)
    seen = total > 0
    safe_total = jnp.where(seen, total, 1.0)
    return Partial(
        jnp.where(seen[..., None], weighted / safe_total[..., None], 0.0),
        jnp.where(seen, top + jnp.log(safe_total), -jnp.inf),
    )
