"""MLA's absorbed attention of one query token a row, split over the latent cache, as one mergeable partial result.

The sibling of `ops.attention.attend_absorbed` at T = 1. Knows how many leading slots a row sees, not their positions.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int32

from kimi_jax.kernels.approximate import LOG2E
from kimi_jax.kernels.device import PROGRAMS


def supports(query: Float[Array, "B T H Z"], latent: int) -> bool:
    """Whether `attend_absorbed_step` can stand in: one token, and power-of-two parts wide enough for matrix units."""
    parts = latent, query.shape[-1] - latent
    return query.shape[1] == 1 and all(p >= 16 and p & (p - 1) == 0 for p in parts) and query.dtype == jnp.bfloat16


def attend_absorbed_step(
    query: Float[Array, "B 1 H Z"],
    rows: Float[Array, "B 1 S Z"],
    lengths: Int32[Array, " B"],
    latent: int,
    scale: float,
    *,
    head_block: int | None = None,
    row_block: int = 64,
    splits: int | None = None,
    warps: int = 4,
    stages: int = 2,
    interpret: bool = False,
) -> tuple[Float32[Array, "B 1 H R"], Float32[Array, "B 1 H"]]:
    """score_s = scale (q_h . row_s)    out = sum_s softmax(score)_s row_s[:latent]    lse = ln sum_s exp(score_s)

    over the slots s < lengths[b]. A row of the cache is read once for up to 32 heads, as key and as value. A program
    folds one stretch of the cache for one block of heads; the slots are the rows of both its products, so that few
    heads do not leave a tile half empty. A second kernel merges the stretches. lengths[b] = 0 gives out = 0 and
    lse = -inf. Slots from lengths[b] on are not read.

    Floor: 2 Z bytes a slot, or 2 H (Z + latent) operations. Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.2; the
    split as in flash-decoding (Dao et al. 2023).
    """
    B, _, H, _ = query.shape
    head_block = head_block or max(16, min(32, pl.next_power_of_2(H)))
    head_blocks = pl.cdiv(H, head_block)
    splits = splits or max(1, min(PROGRAMS // (B * head_blocks), pl.cdiv(rows.shape[2], row_block)))
    kernel = functools.partial(
        _attend_stretch, latent=latent, scale=scale * LOG2E, head_block=head_block, row_block=row_block, splits=splits
    )
    outs, lses = pl.pallas_call(
        kernel,
        out_shape=(
            jax.ShapeDtypeStruct((B, splits, H, latent), jnp.float32),
            jax.ShapeDtypeStruct((B, splits, H), jnp.float32),
        ),
        grid=(head_blocks, splits, B),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name="mla_attend_stretch",
    )(query, rows, lengths)
    if splits == 1:
        return outs, lses
    return merge_stretches(outs, lses, interpret=interpret)


def _attend_stretch(q_ref, rows_ref, lengths_ref, out_ref, lse_ref, *, latent, scale, head_block, row_block, splits):
    block, split, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    stripe = jnp.int32(0)
    H, Z = q_ref.shape[2:]
    first_head = block * head_block
    heads = first_head + jnp.arange(head_block, dtype=jnp.int32)
    here = (heads < H)[:, None]
    some = pl.ds(first_head, head_block)
    q_lat = plgpu.load(q_ref.at[b, stripe, some, pl.ds(0, latent)], mask=here, other=0.0)
    q_pe = plgpu.load(q_ref.at[b, stripe, some, pl.ds(latent, Z - latent)], mask=here, other=0.0)

    length = lengths_ref[b]
    chunks = (length + row_block - 1) // row_block
    share = (chunks + splits - 1) // splits
    first, last = split * share, jnp.minimum(chunks, (split + 1) * share)

    def fold(i, carry):
        top, total, weighted = carry
        slots = i * row_block + jnp.arange(row_block, dtype=jnp.int32)
        seen = slots < length
        at = pl.ds(i * row_block, row_block)
        lat = plgpu.load(rows_ref.at[b, stripe, at, pl.ds(0, latent)], mask=seen[:, None], other=0.0)
        pe = plgpu.load(rows_ref.at[b, stripe, at, pl.ds(latent, Z - latent)], mask=seen[:, None], other=0.0)
        scores = _dot(lat, q_lat, 1) + _dot(pe, q_pe, 1)
        scores = jnp.where(seen[:, None], scores * scale, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=0))
        keep = jnp.exp2(top - new_top)
        p = jnp.exp2(scores - new_top[None, :])
        more = lax.dot_general(lat, p.astype(lat.dtype), (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return new_top, total * keep + jnp.sum(p, axis=0), weighted * keep[None, :] + more

    start = (
        jnp.full((head_block,), -1e30, jnp.float32),
        jnp.zeros((head_block,), jnp.float32),
        jnp.zeros((latent, head_block), jnp.float32),
    )
    top, total, weighted = lax.fori_loop(first, last, fold, start)
    safe = jnp.where(total != 0, total, 1.0)
    plgpu.store(out_ref.at[b, split, some, :], (weighted / safe[None, :]).T, mask=here)
    lse = jnp.where(total != 0, (top + jnp.log2(safe)) / LOG2E, -jnp.inf)
    plgpu.store(lse_ref.at[b, split, some], lse, mask=heads < H)


def merge_stretches(
    outs: Float[Array, "B X H R"],
    lses: Float32[Array, "B X H"],
    *,
    values: int = 16384,
    interpret: bool = False,
) -> tuple[Float32[Array, "B 1 H R"], Float32[Array, "B 1 H"]]:
    """out = sum_x e^(lse_x - lse) out_x,  lse = ln sum_x e^lse_x, over the X stretches of a row's cache.

    A program takes about `values` of outs: all the stretches of some columns.
    """
    B, X, H, R = outs.shape
    width = pl.next_power_of_2(X)
    columns = min(R, 128, max(16, values // width))
    return pl.pallas_call(
        functools.partial(_merge, width=width, columns=columns),
        out_shape=(
            jax.ShapeDtypeStruct((B, 1, H, R), jnp.float32),
            jax.ShapeDtypeStruct((B, 1, H), jnp.float32),
        ),
        grid=(R // columns, H, B),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="mla_merge_stretches",
    )(outs, lses)


def _merge(outs_ref, lses_ref, out_ref, lse_ref, *, width, columns):
    part, h, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    at = jnp.arange(width, dtype=jnp.int32)
    here = at < outs_ref.shape[1]
    every, some = pl.ds(b * 0, width), pl.ds(part * columns, columns)
    lses = plgpu.load(lses_ref.at[b, every, h], mask=here, other=-jnp.inf)
    top = jnp.max(lses)
    safe_top = jnp.where(top == -jnp.inf, 0.0, top)
    weights = jnp.exp(lses - safe_top)
    total = jnp.sum(weights)
    safe = jnp.where(total != 0, total, 1.0)
    outs = plgpu.load(outs_ref.at[b, every, h, some], mask=here[:, None], other=0.0)
    out_ref[b, 0, h, some] = jnp.sum(weights[:, None] * outs.astype(jnp.float32), axis=0) / safe
    lse_ref[b, 0, h] = jnp.where(total != 0, safe_top + jnp.log(safe), -jnp.inf)


def _dot(a, b, over):
    """a[m, i] times b, summed over b's axis `over`; float32."""
    return lax.dot_general(a, b, (((1,), (over,)), ((), ())), preferred_element_type=jnp.float32)
