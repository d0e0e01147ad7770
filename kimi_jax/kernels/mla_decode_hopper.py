"""MLA's absorbed attention of one query token a row on Hopper: warpgroups with roles, fed by asynchronous copies.

The sibling of `kernels.mla_decode` for GPUs with wgmma and TMA; same contract, same merge.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from kimi_jax.kernels.mla_decode import LOG2E, PROGRAMS, merge_stretches

TILE = 64  # slots a step, the rows of a wgmma; also the columns of one chunk: 128 bytes, the widest swizzle
SCORES, FIRST_HALF, SECOND_HALF, COPIES = range(4)  # the warpgroups and what each does
SHARED = 227 * 1024 - 2048  # bytes of shared memory for a program, less barriers
EMPTY = -1e30
COPY_REGISTERS = 32


def attend_absorbed_hopper(
    query: Float[Array, "B 1 H Z"],
    rows: Float[Array, "B 1 S Z"],
    lengths: Int32[Array, " B"],
    latent: int,
    scale: float,
    *,
    head_block: int | None = None,
    columns: int | None = None,
    ring: int | None = None,
    splits: int | None = None,
    ahead: int = 0,
    early: bool = False,
    interpret=None,
) -> tuple[Float32[Array, "B 1 H R"], Float32[Array, "B 1 H"]]:
    B, _, H, Z = query.shape
    R = latent
    columns = columns or (3 * TILE if Z % (3 * TILE) == 0 else TILE)
    blocks = -(-H // (head_block or 64))
    N = -(-H // blocks // 8) * 8
    splits = splits or max(1, min(PROGRAMS // (B * blocks), -(-rows.shape[2] // TILE)))
    scratch = 1024 * (N // 8)
    held = 2 * N * Z + 2 * (2 * N * TILE + 4 * N) + scratch
    ring = ring or (SHARED - held) // (2 * TILE * columns)
    if ring < Z // columns + ahead:
        raise ValueError(f"ring={ring} holds less than a step: {Z // columns} chunks + ahead={ahead}; give more")
    query = jnp.pad(query, ((0, 0), (0, 0), (0, blocks * N - H), (0, 0)))
    transforms = (plgpu.TilingTransform((8, TILE)), plgpu.SwizzleTransform(128))
    bf16, f32 = jnp.bfloat16, jnp.float32
    free = plgpu.Barrier(num_barriers=ring, num_arrivals=3)
    if blocks > 1:
        free = plgpu.ClusterBarrier(collective_axes=("block",), num_barriers=ring, num_arrivals=3)
    kernel = functools.partial(_attend, ahead=ahead, early=early, shared="block" if blocks > 1 else None, latent=latent, scale=scale * LOG2E, splits=splits)
    outs, lses = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((B, splits, blocks * N, R), f32),
            jax.ShapeDtypeStruct((B, splits, blocks * N), f32),
        ),
        grid=(splits, B),
        grid_names=("split", "row"),
        cluster=(blocks,),
        cluster_names=("block",),
        num_threads=4,
        thread_name="role",
        scratch_types=dict(
            q_smem=plgpu.SMEM((N, Z), bf16, transforms=transforms),
            ring=plgpu.SMEM((ring, TILE, columns), bf16, transforms=transforms),
            p_smem=plgpu.SMEM((2, N, TILE), bf16, transforms=transforms),
            keep_smem=plgpu.SMEM((2, N), f32),
            q_here=plgpu.Barrier(),
            full=plgpu.Barrier(num_barriers=ring),
            free=free,
            p_full=plgpu.Barrier(num_barriers=2),
            p_free=plgpu.Barrier(num_barriers=2, num_arrivals=2),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=scratch),
        interpret=interpret,
        kernel_name="mla_attend_stretch_hopper",
    )(query, rows, lengths)
    if splits == 1:
        return outs[:, :, :H], lses[:, :, :H]
    out, lse = merge_stretches(outs, lses, interpret=bool(interpret))
    return out[:, :, :H], lse[:, :, :H]


def _attend(
    q_ref, rows_ref, lengths_ref, out_ref, lse_ref,
    *, q_smem, ring, p_smem, keep_smem, q_here, full, free, p_full, p_free, shared, ahead, early, latent, scale, splits
):
    block, split, b = lax.axis_index("block"), lax.axis_index("split"), lax.axis_index("row")
    role = lax.axis_index("role")
    depth, _, columns = ring.shape
    N, Z = q_smem.shape
    chunks = Z // columns
    half = latent // 2
    by_head = plgpu.Layout.WGMMA.reduce(0)

    length = lengths_ref[b]
    tiles = (length + TILE - 1) // TILE
    share = (tiles + splits - 1) // splits
    first = jnp.minimum(split * share, tiles)
    last = jnp.minimum(first + share, tiles)
    whole = jnp.minimum(last, length // TILE)

    def place(i, c):
        return lax.rem((i - first) * chunks + c, depth)

    def users(c):
        """How many of the halves need chunk c."""
        start, end = c * columns, (c + 1) * columns
        return sum(max(start, low) < min(end, low + half) for low in (0, half))

    @pl.when(role == COPIES)
    def _copies():
        plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
        plgpu.copy_gmem_to_smem(q_ref.at[b, 0, pl.ds(block * N, N)], q_smem, q_here)

        @pl.loop(first, last)
        def _tile(i):
            for c in range(chunks):
                slot = place(i, c)

                @pl.when((i - first) * chunks + c >= depth)
                def _wait():
                    plgpu.barrier_wait(free.at[slot])

                plgpu.copy_gmem_to_smem(
                    rows_ref.at[b, 0, pl.ds(i * TILE, TILE), pl.ds(c * columns, columns)],
                    ring.at[slot],
                    full.at[slot],
                    collective_axes=shared,
                )

        loaded = (last - first) * chunks

        @pl.loop(jnp.maximum(loaded - depth, 0), loaded)
        def _drain(n):
            plgpu.barrier_wait(free.at[lax.rem(n, depth)])

    @pl.when(role == SCORES)
    def _scores():
        _set_registers(min(232, 512 - COPY_REGISTERS - 2 * (2 * N + 40)))
        plgpu.barrier_wait(q_here)

        def begin(acc, i, some, wait=True):
            for c in some:
                slot = place(i, c)
                if wait:
                    plgpu.barrier_wait(full.at[slot])
                plgpu.wgmma(acc, ring.at[slot], q_smem.at[:, pl.ds(c * columns, columns)].T)

        def end(acc, i):
            scores = acc[...]
            for c in range(chunks):
                for _ in range(3 - users(c)):
                    plgpu.barrier_arrive(free.at[place(i, c)])
            return scores * scale

        def weigh(i, scores, top, total):
            turn = lax.rem(i - first, 2)
            new_top = jnp.maximum(top, jnp.max(scores, axis=0))
            keep = jnp.exp2(top - new_top)
            p = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, [1]))
            total = total * lax.broadcast_in_dim(keep, p.shape, [1]) + p

            @pl.when(i - first >= 2)
            def _wait():
                plgpu.barrier_wait(p_free.at[turn])

            p_smem.at[turn].T[...] = p.astype(jnp.bfloat16)
            keep_smem.at[turn][...] = keep
            plgpu.commit_smem()
            plgpu.barrier_arrive(p_full.at[turn])
            return new_top, total

        def step(i, carry):
            scores, top, total = carry

            def overlapped(acc):
                begin(acc, i + 1, range(ahead))
                top_total = weigh(i, scores, top, total)
                begin(acc, i + 1, range(ahead, chunks))
                return end(acc, i + 1), *top_total

            return pl.run_scoped(overlapped, plgpu.ACC((TILE, N), jnp.float32))

        def whole_tiles(_, carry):
            def alone(acc):
                begin(acc, first, range(chunks))
                return end(acc, first)

            scores = pl.run_scoped(alone, plgpu.ACC((TILE, N), jnp.float32))
            scores, *carry = lax.fori_loop(first, whole - 1, step, (scores, *carry))
            return weigh(whole - 1, scores, *carry)

        def cut_tile(i, carry):
            seen = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 0, layout=plgpu.Layout.WGMMA) + i * TILE < length
            for c in range(chunks):
                plgpu.barrier_wait(full.at[place(i, c)])
                for start in range(0, columns, TILE):
                    some = ring.at[place(i, c), :, pl.ds(start, TILE)]
                    x = plgpu.load(some, layout=plgpu.Layout.WGMMA)
                    some[...] = jnp.where(seen, x, jnp.zeros_like(x))
            plgpu.commit_smem()

            def alone(acc):
                begin(acc, i, range(chunks), wait=False)
                return end(acc, i)

            scores = pl.run_scoped(alone, plgpu.ACC((TILE, N), jnp.float32))
            slots = plgpu.broadcasted_iota(jnp.int32, (TILE, N), 0, layout=plgpu.Layout.WGMMA) + i * TILE
            return weigh(i, jnp.where(slots < length, scores, -jnp.inf), *carry)

        top = plgpu.layout_cast(jnp.full((N,), EMPTY, jnp.float32), by_head)
        total = plgpu.layout_cast(jnp.zeros((TILE, N), jnp.float32), plgpu.Layout.WGMMA)
        carry = lax.fori_loop(0, jnp.minimum(whole - first, 1), whole_tiles, (top, total))
        top, total = lax.fori_loop(whole, last, cut_tile, carry)
        total = jnp.sum(total, axis=0)
        safe = jnp.where(total > 0, total, 1.0)
        turn = lax.rem(last - first, 2)

        @pl.when(last - first >= 2)
        def _wait():
            plgpu.barrier_wait(p_free.at[turn])

        keep_smem.at[turn][...] = 1.0 / safe
        plgpu.barrier_arrive(p_full.at[turn])
        lse = jnp.where(total > 0, (top + jnp.log2(safe)) / LOG2E, -jnp.inf)
        lse_ref[b, split, pl.ds(block * N, N)] = lse

        @pl.when(last > first)
        def _drain():
            plgpu.barrier_wait(p_free.at[1 - turn])

        plgpu.barrier_wait(p_free.at[turn])

    def weighted(part):
        _set_registers(2 * N + 40)
        at = [divmod((part * half + j * TILE), columns) for j in range(half // TILE)]
        final = {j: c for c, j in {c: j for j, (c, _) in enumerate(at)}.items()}  # the last product of each chunk

        def scaled(acc, turn):
            keep = plgpu.load(keep_smem.at[turn], layout=by_head)
            return acc * lax.broadcast_in_dim(keep, acc.shape, [1])

        def fold(i, acc):
            turn = lax.rem(i - first, 2)
            plgpu.barrier_wait(p_full.at[turn])
            acc = scaled(acc, turn)

            def product(acc_ref):
                for j, (c, start) in enumerate(at):
                    lat = ring.at[place(i, c), :, pl.ds(start, TILE)]
                    plgpu.wgmma(acc_ref.at[pl.ds(j * TILE, TILE)], lat.T, p_smem.at[turn].T)
                if early:
                    for j, c in sorted(final.items()):
                        plgpu.wgmma_wait(len(at) - 1 - j)
                        plgpu.barrier_arrive(free.at[place(i, c)])

            acc = _accumulate(acc, product)
            if not early:
                for c in final.values():
                    plgpu.barrier_arrive(free.at[place(i, c)])
            plgpu.barrier_arrive(p_free.at[turn])
            return acc

        acc = plgpu.layout_cast(jnp.zeros((half, N), jnp.float32), plgpu.Layout.WGMMA)
        acc = lax.fori_loop(first, last, fold, acc)
        turn = lax.rem(last - first, 2)
        plgpu.barrier_wait(p_full.at[turn])
        acc = scaled(acc, turn)
        plgpu.barrier_arrive(p_free.at[turn])
        acc = plgpu.layout_cast(acc, plgpu.Layout.WGMMA_TRANSPOSED)
        out_ref.at[b, split, pl.ds(block * N, N), pl.ds(part * half, half)].T[...] = acc

    for part in range(2):
        pl.when(role == (FIRST_HALF, SECOND_HALF)[part])(functools.partial(weighted, part))


def _set_registers(n):
    plgpu.set_max_registers(n, action="increase" if n > 128 else "decrease")


def _accumulate(acc, product):
    return pl.run_state(product)(plgpu.ACC.init(acc))
