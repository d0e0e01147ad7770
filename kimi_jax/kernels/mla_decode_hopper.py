"""MLA's absorbed attention of one query token a row on Hopper: warpgroups with roles, fed by asynchronous copies.

The sibling of `kernels.mla_decode` for GPUs with wgmma and TMA; same contract, same merge of stretches.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from kimi_jax.kernels.approximate import LOG2E
from kimi_jax.kernels.device import PROGRAMS
from kimi_jax.kernels.mla_decode import merge_stretches
from kimi_jax.kernels.mla_decode_roles import TILE, Memory, Stretch, copy_tiles, form_weights, sum_weighted

MOST_HEADS = 64  # a program's: 512 latents by 64 heads fill the registers of two warpgroups
SCORES, FIRST_HALF, SECOND_HALF, COPIES = range(4)  # what each of the four warpgroups does
SHARED = 227 * 1024 - 2048  # bytes of shared memory a program may use, less its barriers
REGISTERS = 512  # of each of the 128 threads of the four warpgroups, together
COPY_REGISTERS = 32
SCORING = 80  # registers of the scores' warpgroup beside the queries it keeps
SHORTEST = 4096  # slots; measured on an H200: at 1,024 `mla_decode` is faster (9.7 against 11.8 us), at 8,192 slower


def supports(query: Float[Array, "B T H Z"], slots: int, latent: int) -> bool:
    """Whether `attend_absorbed_hopper` can stand in and pays: one token, in parts of whole tiles that fit a program's
    memory, over a cache that is not short.
    """
    Z = query.shape[-1]
    whole = Z % TILE == 0 and latent % (2 * TILE) == 0 and latent < Z <= 640 and latent <= 512
    few = query.shape[2] <= 2 * MOST_HEADS
    return query.shape[1] == 1 and slots >= SHORTEST and whole and few and query.dtype == jnp.bfloat16


def attend_absorbed_hopper(
    query: Float[Array, "B 1 H Z"],
    rows: Float[Array, "B 1 S Z"],
    lengths: Int32[Array, " B"],
    latent: int,
    scale: float,
    *,
    ring: int | None = None,
    kept: int | None = None,
    splits: int | None = None,
    interpret: Any = None,
) -> tuple[Float32[Array, "B 1 H R"], Float32[Array, "B 1 H"]]:
    """score_s = scale (q_h . row_s)    out = sum_s softmax(score)_s row_s[:latent]    lse = ln sum_s exp(score_s)

    over the slots s < lengths[b]; what later slots hold does not matter. lengths[b] = 0 gives out = 0 and lse = -inf.
    A program folds every `splits`-th tile of 64 slots for up to 64 heads, so that all of them read one part of the
    cache at a time. One warpgroup copies the tiles, their latents in two chunks, one for each half of the output, into
    a ring of `ring` chunks. One forms scores and weights; the heads are its rows, so that the first `kept` parts of the
    queries (positions, one half of the latents, the other) stay in its registers; the maximum that a head's weights are
    relative to seldom moves (`mla_decode_warps.weigh`). Two hold half of the output's latents each, with the latents as
    rows, so that the heads are padded to 8 and no further. More heads than 64 are a cluster of programs which read the
    same copies. Scores and sums take turns at the tensor cores: a tile is summed while the next is weighed, the last
    part of one half when the next weights are stored, which reads of shared memory hold up. The programs' outputs are
    rounded to bfloat16, then merged in float32.

    interpret: `plgpu.InterpretGPUParams()` runs on a CPU, with kept=0: it cannot multiply what is in registers; nor has
    it what `mla_decode_warps` is written in, nor run_state, so that a test puts plain forms in their places.

    Floor: 2 Z bytes a slot, or 2 H (Z + latent) operations. Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.2; the
    split as in flash-decoding (Dao et al. 2023), the roles as in FlashAttention-3 (arXiv 2407.08608).
    """
    B, _, H, Z = query.shape
    blocks = pl.cdiv(H, MOST_HEADS)
    N = pl.cdiv(H, blocks * 8) * 8
    splits = splits or max(1, min(PROGRAMS // (B * blocks), pl.cdiv(rows.shape[2], TILE)))
    parts = Z - latent, latent // 2, latent // 2
    _, scoring = _registers(N)
    kept = sum(sum(parts[:k]) // 4 <= scoring - SCORING for k in (1, 2, 3)) if kept is None else kept
    rest = sum(parts[kept:])
    ring = ring or (SHARED - 2 * TILE * (rest + 2 * parts[0] + 2 * TILE + 6)) // (TILE * latent)
    if ring < 4:
        raise ValueError(f"ring={ring} does not hold two tiles of two chunks: give at least 4")
    query = jnp.pad(query, ((0, 0), (0, 0), (0, blocks * N - H), (0, 0)))
    outs, lses = plgpu.kernel(
        functools.partial(_attend_stretch, scale=scale * LOG2E, splits=splits, N=N, kept=kept),
        out_type=(
            jax.ShapeDtypeStruct((B, splits, blocks * N, latent), jnp.bfloat16),
            jax.ShapeDtypeStruct((B, splits, blocks * N), jnp.float32),
        ),
        grid=(splits, B),
        grid_names=("split", "row"),
        cluster=(blocks,),
        cluster_names=("block",),
        num_threads=4,
        thread_name="role",
        scratch_types=[_memory(rest, parts, ring, blocks)],
        # No thread reads what another wrote but by a barrier of its own, so Mosaic need not add any.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
        interpret=interpret,
        kernel_name="mla_attend_stretch_hopper",
    )(query, rows, lengths)
    if splits == 1:
        return outs[:, :, :H].astype(jnp.float32), lses[:, :, :H]
    out, lse = merge_stretches(outs, lses, interpret=interpret is not None)
    return out[:, :, :H], lse[:, :, :H]


def _registers(N):
    """Of a thread that holds a half of the output: its sums and what its products need; and what is left to score."""
    held = min(2 * N + (40 if N > 48 else 32), (REGISTERS - COPY_REGISTERS) // 3)
    return held, min(232, REGISTERS - COPY_REGISTERS - 2 * held)


def _memory(rest, parts, ring, blocks) -> Memory:
    swizzled = functools.partial(
        plgpu.SMEM,
        dtype=jnp.bfloat16,
        transforms=(plgpu.TilingTransform((8, TILE)), plgpu.SwizzleTransform(128)),
    )
    free = plgpu.Barrier
    if blocks > 1:
        free = functools.partial(plgpu.ClusterBarrier, collective_axes=("block",))
    return Memory(
        query=swizzled((TILE, rest)) if rest else None,
        ring=swizzled((ring, TILE, parts[1])),
        rope=swizzled((2, TILE, parts[0])),
        weights=swizzled((2, TILE, TILE)),
        keep=plgpu.SMEM((2, TILE), jnp.float32),
        lse=plgpu.SMEM((TILE,), jnp.float32),
        query_full=plgpu.Barrier(),
        full=plgpu.Barrier(num_barriers=ring),
        free=free(num_barriers=ring),
        rope_full=plgpu.Barrier(num_barriers=2),
        rope_free=free(num_barriers=2),
        weights_full=plgpu.Barrier(num_barriers=2),
        weights_free=plgpu.Barrier(num_barriers=2, num_arrivals=2),
        turn=plgpu.Barrier(num_barriers=2),
    )


def _attend_stretch(q_ref, rows_ref, lengths_ref, out_ref, lse_ref, mem: Memory, *, scale, splits, N, kept):
    split, b, role = lax.axis_index("split"), lax.axis_index("row"), lax.axis_index("role")
    heads = pl.ds(lax.axis_index("block") * N, N)
    at = Stretch(b, split, splits, heads, mem.ring.shape[0], kept)
    held, scoring = _registers(N)

    @pl.when(role == COPIES)
    def _copies():
        plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
        copy_tiles(q_ref, rows_ref, lengths_ref, mem, at)

    @pl.when(role == SCORES)
    def _scores():
        _set_registers(scoring)
        form_weights(lengths_ref, mem, at, scale)

    @pl.when(role == FIRST_HALF)
    def _first_half():
        _set_registers(held)
        sum_weighted(out_ref, lengths_ref, mem, at, 0, lse_ref)

    @pl.when(role == SECOND_HALF)
    def _second_half():
        _set_registers(held)
        sum_weighted(out_ref, lengths_ref, mem, at, 1)


def _set_registers(n):
    plgpu.set_max_registers(n, action="increase" if n > REGISTERS // 4 else "decrease")
