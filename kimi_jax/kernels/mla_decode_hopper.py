"""MLA's absorbed attention of one query token a row on Hopper: warpgroups with roles, fed by asynchronous copies.

The sibling of `kernels.mla_decode` for GPUs with wgmma and TMA; same contract, same merge of stretches.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from kimi_jax.kernels.mla_decode import LOG2E, PROGRAMS, merge_stretches

TILE = 64  # slots a step, the rows of a wgmma; also the columns of 128 bytes, the widest swizzle
MOST_HEADS = 64  # a program's: 512 latents by 64 heads fill the registers of two warpgroups
SCORES, FIRST_HALF, SECOND_HALF, COPIES = range(4)  # what each of the four warpgroups does
SHARED = 227 * 1024 - 2048  # bytes of shared memory a program may use, less its barriers
REGISTERS = 512  # of each of the 128 threads of the four warpgroups, together
COPY_REGISTERS = 32
EMPTY = -1e30
WGMMA, BY_HEAD = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(0)


def supports(query: Float[Array, "B T H Z"], latent: int) -> bool:
    """Whether `attend_absorbed_hopper` can stand in: one token, in parts of whole tiles that fit a program's memory."""
    Z = query.shape[-1]
    whole = Z % TILE == 0 and latent % (2 * TILE) == 0 and Z <= 640 and latent <= 512
    return query.shape[1] == 1 and whole and query.dtype == jnp.bfloat16


def runs_here() -> bool:
    """Whether this process's devices are Hopper GPUs: a lowering knows "cuda" only, and wgmma is of that generation."""
    return getattr(jax.local_devices()[0], "compute_capability", None) == "9.0"


def attend_absorbed_hopper(
    query: Float[Array, "B 1 H Z"],
    rows: Float[Array, "B 1 S Z"],
    lengths: Int32[Array, " B"],
    latent: int,
    scale: float,
    *,
    head_block: int = MOST_HEADS,
    columns: int | None = None,
    ring: int | None = None,
    splits: int | None = None,
    early: bool = False,
    multicast: bool = True,
    auto_barriers: bool = True,
    interpret: Any = None,
) -> tuple[Float32[Array, "B 1 H R"], Float32[Array, "B 1 H"]]:
    """score_s = scale (q_h . row_s)    out = sum_s softmax(score)_s row_s[:latent]    lse = ln sum_s exp(score_s)

    over the slots s < lengths[b]; what later slots hold does not matter. lengths[b] = 0 gives out = 0 and lse = -inf.
    A program folds one stretch of the cache for up to 64 heads, in tiles of 64 slots. The slots are the rows of the
    scores and the latents those of the output, so that the heads are padded to 8 and no further. One warpgroup copies
    the tiles in chunks of `columns` columns into a ring of `ring` chunks, one forms scores and weights, two hold half
    of the output's latents each. More heads than 64 are a cluster of programs which read the same copies.

    interpret: `plgpu.InterpretGPUParams()` runs on a CPU.

    Floor: 2 Z bytes a slot, or 2 H (Z + latent) operations. Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.2; the
    split as in flash-decoding (Dao et al. 2023), the roles as in FlashAttention-3 (arXiv 2407.08608).
    """
    B, _, H, Z = query.shape
    blocks = pl.cdiv(H, head_block)
    N = pl.cdiv(H, blocks * 8) * 8
    splits = splits or max(1, min(PROGRAMS // (B * blocks), pl.cdiv(rows.shape[2], TILE)))
    columns = columns or (3 * TILE if Z % (3 * TILE) == 0 else TILE)
    reducing = 1024 * (N // 8)
    ring = ring or (SHARED - 2 * N * Z - 2 * (2 * N * TILE + 4 * N) - reducing) // (2 * TILE * columns)
    if ring < Z // columns:
        raise ValueError(f"ring={ring} does not hold a tile of {Z // columns} chunks: give at least as many")
    query = jnp.pad(query, ((0, 0), (0, 0), (0, blocks * N - H), (0, 0)))
    outs, lses = plgpu.kernel(
        functools.partial(
            _attend_stretch, latent=latent, scale=scale * LOG2E, splits=splits, early=early, multicast=multicast
        ),
        out_type=(
            jax.ShapeDtypeStruct((B, splits, blocks * N, latent), jnp.float32),
            jax.ShapeDtypeStruct((B, splits, blocks * N), jnp.float32),
        ),
        grid=(splits, B),
        grid_names=("split", "row"),
        cluster=(blocks,),
        cluster_names=("block",),
        num_threads=4,
        thread_name="role",
        scratch_types=[_memory(N, Z, columns, ring, blocks if multicast else 1)],
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=reducing, unsafe_no_auto_barriers=not auto_barriers
        ),
        interpret=interpret,
        kernel_name="mla_attend_stretch_hopper",
    )(query, rows, lengths)
    out, lse = (outs, lses) if splits == 1 else merge_stretches(outs, lses, interpret=interpret is not None)
    return out[:, :, :H], lse[:, :, :H]


class Memory(NamedTuple):
    """A program's shared memory and its barriers. A full barrier says that data came, a free one that it was used."""

    query: Any  # [N, Z]
    ring: Any  # [ring, TILE, columns] of the cache
    weights: Any  # [2, N, TILE] of even and odd tiles
    keep: Any  # [2, N] factors of what was summed before
    query_full: Any
    full: Any
    free: Any
    weights_full: Any
    weights_free: Any


def _memory(N, Z, columns, ring, blocks) -> Memory:
    swizzled = functools.partial(
        plgpu.SMEM,
        dtype=jnp.bfloat16,
        transforms=(plgpu.TilingTransform((8, TILE)), plgpu.SwizzleTransform(128)),
    )
    free = plgpu.Barrier(num_barriers=ring, num_arrivals=3)
    if blocks > 1:
        free = plgpu.ClusterBarrier(collective_axes=("block",), num_barriers=ring, num_arrivals=3)
    return Memory(
        swizzled((N, Z)),
        swizzled((ring, TILE, columns)),
        swizzled((2, N, TILE)),
        plgpu.SMEM((2, N), jnp.float32),
        plgpu.Barrier(),
        plgpu.Barrier(num_barriers=ring),
        free,
        plgpu.Barrier(num_barriers=2),
        plgpu.Barrier(num_barriers=2, num_arrivals=2),
    )


class Stretch(NamedTuple):
    """What a program works on: tiles first to last, those up to `whole` without an unseen slot."""

    b: Any
    split: Any
    heads: Any
    length: Any
    first: Any
    whole: Any
    last: Any
    chunks: int
    depth: int

    def place(self, i, c):
        """Where in the ring chunk c of tile i lies."""
        return lax.rem((i - self.first) * self.chunks + c, self.depth)

    def turn(self, i):
        return lax.rem(i - self.first, 2)


def _attend_stretch(
    q_ref, rows_ref, lengths_ref, out_ref, lse_ref, mem: Memory, *, latent, scale, splits, early, multicast
):
    split, b, role = lax.axis_index("split"), lax.axis_index("row"), lax.axis_index("role")
    N, Z = mem.query.shape
    depth, _, columns = mem.ring.shape
    length = lengths_ref[b]
    tiles = (length + TILE - 1) // TILE
    share = (tiles + splits - 1) // splits
    first = jnp.minimum(split * share, tiles)
    last = jnp.minimum(first + share, tiles)
    whole = jnp.clip(length // TILE, first, last)  # a stretch may begin behind the last tile
    heads = pl.ds(lax.axis_index("block") * N, N)
    at = Stretch(b, split, heads, length, first, whole, last, Z // columns, depth)
    held = 2 * N + 40  # registers: a half of the output, and what its products need

    @pl.when(role == COPIES)
    def _copies():
        plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
        _copy(q_ref, rows_ref, mem, at, multicast)

    @pl.when(role == SCORES)
    def _scores():
        _set_registers(min(232, REGISTERS - COPY_REGISTERS - 2 * held))
        _score(lse_ref, mem, at, latent, scale)

    @pl.when(role == FIRST_HALF)
    def _first_half():
        _set_registers(held)
        _sum_weighted(out_ref, mem, at, 0, latent // 2, early)

    @pl.when(role == SECOND_HALF)
    def _second_half():
        _set_registers(held)
        _sum_weighted(out_ref, mem, at, latent // 2, latent // 2, early)


def _copy(q_ref, rows_ref, mem: Memory, at: Stretch, multicast):
    columns = mem.ring.shape[2]
    shared = "block" if multicast and lax.axis_size("block") > 1 else None
    plgpu.copy_gmem_to_smem(q_ref.at[at.b, 0, at.heads], mem.query, mem.query_full)

    @pl.loop(at.first, at.last)
    def _tile(i):
        for c in range(at.chunks):
            slot = at.place(i, c)
            again = (i - at.first) * at.chunks + c >= at.depth
            pl.when(again)(functools.partial(plgpu.barrier_wait, mem.free.at[slot]))
            chunk = rows_ref.at[at.b, 0, pl.ds(i * TILE, TILE), pl.ds(c * columns, columns)]
            plgpu.copy_gmem_to_smem(chunk, mem.ring.at[slot], mem.full.at[slot], collective_axes=shared)

    copied = (at.last - at.first) * at.chunks

    @pl.loop(jnp.maximum(copied - at.depth, 0), copied)
    def _drain(n):  # a program may not end while others of its cluster still arrive on its barriers
        plgpu.barrier_wait(mem.free.at[lax.rem(n, at.depth)])


def _score(lse_ref, mem: Memory, at: Stretch, latent, scale):
    """Scores and weights, tile by tile; what the two halves need to keep of their sums; at the end the lse."""
    N = mem.query.shape[0]

    def scores_of(i, wait):
        def product(acc):
            _begin_scores(acc, mem, at, i, wait)
            return _end_scores(acc, mem, at, i, latent)

        return pl.run_scoped(product, plgpu.ACC((TILE, N), jnp.float32))

    def whole_tile(i, top_total):
        return _weigh(mem, at, i, scale, scores_of(i, wait=True), *top_total)

    def cut_tile(i, top_total):
        _clear_unseen(mem, at, i)
        slots = plgpu.broadcasted_iota(jnp.int32, (TILE, N), 0, layout=WGMMA) + i * TILE
        scores = jnp.where(slots < at.length, scores_of(i, wait=False), -jnp.inf)
        return _weigh(mem, at, i, scale, scores, *top_total)

    plgpu.barrier_wait(mem.query_full)
    top = plgpu.layout_cast(jnp.full((N,), EMPTY, jnp.float32), BY_HEAD)
    total = plgpu.layout_cast(jnp.zeros((TILE, N), jnp.float32), WGMMA)
    top_total = lax.fori_loop(at.first, at.whole, whole_tile, (top, total))
    top, total = lax.fori_loop(at.whole, at.last, cut_tile, top_total)

    total = jnp.sum(total, axis=0)
    safe = jnp.where(total > 0, total, 1.0)
    _hand_over(mem, at, at.last, 1.0 / safe)
    lse_ref[at.b, at.split, at.heads] = jnp.where(total > 0, (top + jnp.log2(safe)) / LOG2E, -jnp.inf)

    @pl.when(at.last > at.first)
    def _drain():
        plgpu.barrier_wait(mem.weights_free.at[1 - at.turn(at.last)])

    plgpu.barrier_wait(mem.weights_free.at[at.turn(at.last)])


def _begin_scores(acc, mem: Memory, at: Stretch, i, wait):
    columns = mem.ring.shape[2]
    for c in range(at.chunks):
        if wait:
            plgpu.barrier_wait(mem.full.at[at.place(i, c)])
        plgpu.wgmma(acc, mem.ring.at[at.place(i, c)], mem.query.at[:, pl.ds(c * columns, columns)].T)


def _end_scores(acc, mem: Memory, at: Stretch, i, latent):
    scores, columns, half = acc[...], mem.ring.shape[2], latent // 2
    for c in range(at.chunks):
        start, end = c * columns, (c + 1) * columns
        used_by_halves = sum(max(start, low) < min(end, low + half) for low in (0, half))
        for _ in range(3 - used_by_halves):  # for this warpgroup and for the halves which do not need the chunk
            plgpu.barrier_arrive(mem.free.at[at.place(i, c)])
    return scores


def _clear_unseen(mem: Memory, at: Stretch, i):
    """Zeros in the slots that no query may see: a weight of 0 does not hide a NaN."""
    seen = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 0, layout=WGMMA) + i * TILE < at.length
    for c in range(at.chunks):
        plgpu.barrier_wait(mem.full.at[at.place(i, c)])
        for start in range(0, mem.ring.shape[2], TILE):
            part = mem.ring.at[at.place(i, c), :, pl.ds(start, TILE)]
            x = plgpu.load(part, layout=WGMMA)
            part[...] = jnp.where(seen, x, jnp.zeros_like(x))
    plgpu.commit_smem()


def _weigh(mem: Memory, at: Stretch, i, scale, scores, top, total):
    """top: the largest scaled score so far; total: summed over the slots of a thread alone, threads meet at the end."""
    new_top = jnp.maximum(top, jnp.max(scores, axis=0) * scale)
    keep = jnp.exp2(top - new_top)
    p = jnp.exp2(scores * scale - lax.broadcast_in_dim(new_top, scores.shape, [1]))
    total = total * lax.broadcast_in_dim(keep, p.shape, [1]) + p
    _hand_over(mem, at, i, keep, p)
    return new_top, total


def _hand_over(mem: Memory, at: Stretch, i, keep, p=None):
    turn = at.turn(i)

    @pl.when(i - at.first >= 2)
    def _wait():
        plgpu.barrier_wait(mem.weights_free.at[turn])

    if p is not None:
        mem.weights.at[turn].T[...] = p.astype(jnp.bfloat16)
    mem.keep.at[turn][...] = keep
    plgpu.commit_smem()
    plgpu.barrier_arrive(mem.weights_full.at[turn])


def _sum_weighted(out_ref, mem: Memory, at: Stretch, low, height, early):
    """out[low : low + height], transposed: the latents are the rows of the products."""
    N, columns = mem.query.shape[0], mem.ring.shape[2]
    parts = [divmod(low + j * TILE, columns) for j in range(height // TILE)]

    def scaled(acc, turn):
        keep = plgpu.load(mem.keep.at[turn], layout=BY_HEAD)
        return acc * lax.broadcast_in_dim(keep, acc.shape, [1])

    def fold(i, acc):
        turn = at.turn(i)
        plgpu.barrier_wait(mem.weights_full.at[turn])

        def product(acc_ref):
            for j, (c, start) in enumerate(parts):
                lat = mem.ring.at[at.place(i, c), :, pl.ds(start, TILE)]
                plgpu.wgmma(acc_ref.at[pl.ds(j * TILE, TILE)], lat.T, mem.weights.at[turn].T)
            for c, j in {c: j for j, (c, _) in enumerate(parts)}.items():  # each chunk's last product
                plgpu.wgmma_wait(len(parts) - 1 - j if early else 0)
                plgpu.barrier_arrive(mem.free.at[at.place(i, c)])

        acc = _accumulate(scaled(acc, turn), product)
        plgpu.barrier_arrive(mem.weights_free.at[turn])
        return acc

    acc = plgpu.layout_cast(jnp.zeros((height, N), jnp.float32), WGMMA)
    acc = lax.fori_loop(at.first, at.last, fold, acc)
    turn = at.turn(at.last)
    plgpu.barrier_wait(mem.weights_full.at[turn])
    acc = scaled(acc, turn)
    plgpu.barrier_arrive(mem.weights_free.at[turn])
    acc = plgpu.layout_cast(acc, plgpu.Layout.WGMMA_TRANSPOSED)  # so that a thread's pairs lie side by side
    out_ref.at[at.b, at.split, at.heads, pl.ds(low, height)].T[...] = acc


def _accumulate(acc, product):
    """acc plus the products; in a function of its own because interpret mode has no run_state."""
    return pl.run_state(product)(plgpu.ACC.init(acc))


def _set_registers(n):
    plgpu.set_max_registers(n, action="increase" if n > REGISTERS // 4 else "decrease")
