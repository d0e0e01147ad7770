"""What each warpgroup of the Hopper MLA decode does: copy tiles, form weights, or sum what is weighted.

Knows one program's stretch of the cache and its shared memory, not how the programs share the work
(`kernels.mla_decode_hopper`).
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kimi_jax.kernels.approximate import LOG2E

TILE = 64  # slots a step, the rows of a wgmma; also the columns of 128 bytes, the widest swizzle
EMPTY = -1e30
WGMMA = plgpu.Layout.WGMMA
BY_ROW, BY_COLUMN = WGMMA.reduce(1), WGMMA.reduce(0)


class Memory(NamedTuple):
    """A program's shared memory and its barriers. A full barrier says that data came, a free one that it was used."""

    query: Any  # [TILE, rest]: of each head, what is not kept in registers; None where everything is
    ring: Any  # [ring, TILE, latent / 2]: a tile's latents, one chunk for each half; first, queries that will be kept
    rope: Any  # [2, TILE, Z - latent]: what only the scores use of a tile; first, of the queries
    weights: Any  # [2, TILE, TILE]: head by slot, of even and odd tiles
    keep: Any  # [2, TILE]: by head, factors of what was summed before
    lse: Any  # [TILE]
    query_full: Any
    full: Any
    free: Any
    rope_full: Any
    rope_free: Any
    weights_full: Any
    weights_free: Any
    turn: Any  # the tensor cores have the next tile's scores behind them


class Stretch(NamedTuple):
    """What a program works on: tiles first to last, those up to `whole` without an unseen slot."""

    b: Any
    split: Any
    heads: Any
    length: Any
    first: Any
    whole: Any
    last: Any
    depth: int
    kept: int

    def order(self, i, half):
        """How many chunks, those of the queries included, the ring takes before a half's of tile i."""
        return max(self.kept - 1, 0) + 2 * (i - self.first) + half

    def place(self, i, half):
        """Where in the ring a half's latents of tile i lie."""
        return lax.rem(self.order(i, half), self.depth)

    def rope_order(self, i):
        """How many tiles' positions, the queries' included, come before those of tile i."""
        return min(self.kept, 1) + i - self.first

    def rope_place(self, i):
        """Where the positions of tile i lie."""
        return lax.rem(self.rope_order(i), 2)

    def parity(self, i):
        """Which of the two buffers the weights of tile i lie in."""
        return lax.rem(i - self.first, 2)

    def parts(self, mem: Memory, i):
        """What tile i consists of, in the order in which it comes, each with the barrier that says so."""
        rope, low, high = self.rope_place(i), self.place(i, 0), self.place(i, 1)
        return [
            (mem.rope.at[rope], mem.rope_full.at[rope]),
            (mem.ring.at[low], mem.full.at[low]),
            (mem.ring.at[high], mem.full.at[high]),
        ]


def columns_of(mem: Memory) -> tuple[Any, Any, Any]:
    """Where the parts of a row lie: the positions, the first and the second half of the latents."""
    width = mem.ring.shape[2]
    return pl.ds(2 * width, mem.rope.shape[2]), pl.ds(0, width), pl.ds(width, width)


def copy_tiles(q_ref, rows_ref, mem: Memory, at: Stretch):
    """The queries, then tile after tile into the ring, each chunk as soon as its place was given back by all."""
    rope, *latents = columns_of(mem)
    shared = "block" if lax.axis_size("block") > 1 else None
    _copy_queries(q_ref, mem, at)

    @pl.loop(at.first, at.last)
    def _tile(i):
        tile = rows_ref.at[at.b, 0, pl.ds(i * TILE, TILE)]
        slot = at.rope_place(i)
        pl.when(at.rope_order(i) >= 2)(functools.partial(plgpu.barrier_wait, mem.rope_free.at[slot]))
        plgpu.copy_gmem_to_smem(tile.at[:, rope], mem.rope.at[slot], mem.rope_full.at[slot], collective_axes=shared)
        for half, some in enumerate(latents):
            slot = at.place(i, half)
            pl.when(at.order(i, half) >= at.depth)(functools.partial(plgpu.barrier_wait, mem.free.at[slot]))
            plgpu.copy_gmem_to_smem(tile.at[:, some], mem.ring.at[slot], mem.full.at[slot], collective_axes=shared)

    # A program may not end while others of its cluster still arrive on its barriers.
    copied, ropes = at.order(at.last, 0), at.rope_order(at.last)

    @pl.loop(jnp.maximum(copied - at.depth, 0), copied)
    def _drain(n):
        plgpu.barrier_wait(mem.free.at[lax.rem(n, at.depth)])

    @pl.loop(jnp.maximum(ropes - 2, 0), ropes)
    def _drain_rope(n):
        plgpu.barrier_wait(mem.rope_free.at[lax.rem(n, 2)])


def _places_of_queries(mem: Memory):
    """Where the parts of the queries that will be kept pass through, with full and free barriers."""
    rope = mem.rope.at[0], mem.rope_full.at[0], mem.rope_free.at[0]
    return [rope, *((mem.ring.at[c], mem.full.at[c], mem.free.at[c]) for c in range(2))]


def _copy_queries(q_ref, mem: Memory, at: Stretch):
    query, rows, columns = q_ref.at[at.b, 0, at.heads], pl.ds(0, at.heads.size), columns_of(mem)
    for part, (place, full, _) in list(zip(columns, _places_of_queries(mem), strict=True))[: at.kept]:
        plgpu.copy_gmem_to_smem(query.at[:, part], place.at[rows], full)
    if mem.query is not None:
        rest = pl.ds(columns[max(at.kept, 1)].start, mem.query.shape[1])
        plgpu.copy_gmem_to_smem(query.at[:, rest], mem.query.at[rows], mem.query_full)


def _queries(mem: Memory, at: Stretch):
    """The parts of the queries, each in registers or in shared memory. Rows behind the heads hold anything."""
    queries, columns = [], columns_of(mem)
    kept = _places_of_queries(mem)[: at.kept]
    for place, full, _ in kept:
        plgpu.barrier_wait(full)
        queries.append(plgpu.layout_cast(place[...], WGMMA))
    _all_warps_did()
    for _, _, free in kept:
        plgpu.barrier_arrive(free)
    if mem.query is not None:
        plgpu.barrier_wait(mem.query_full)
        start = columns[max(at.kept, 1)].start
        queries += [mem.query.at[:, pl.ds(part.start - start, part.size)] for part in columns[at.kept :]]
    return queries


def _all_warps_did():
    """On a cluster's barrier one warp arrives for all four: none of them may still be reading."""
    if lax.axis_size("block") > 1:
        plgpu.commit_smem()


def form_weights(mem: Memory, at: Stretch, scale):
    """Scores and weights, tile by tile; what the two halves need to keep of their sums; at the end the lse."""
    queries = _queries(mem, at)

    def scores_of(i, wait):
        def product(acc):
            for query, (part, full) in zip(queries, at.parts(mem, i), strict=True):
                if wait:
                    plgpu.barrier_wait(full)
                plgpu.wgmma(acc, query, part.T)
            _pass_turn(mem, at, i)
            return acc[...]

        return pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((TILE, TILE), jnp.float32))

    def whole_tile(i, top_total):
        return _weigh(mem, at, i, scale, scores_of(i, wait=True), *top_total)

    def cut_tile(i, top_total):
        _clear_unseen(mem, at, i)
        slots = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 1, layout=WGMMA) + i * TILE
        scores = jnp.where(slots < at.length, scores_of(i, wait=False), -jnp.inf)
        return _weigh(mem, at, i, scale, scores, *top_total)

    top = plgpu.layout_cast(jnp.full((TILE,), EMPTY, jnp.float32), BY_ROW)
    total = plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), BY_ROW)
    top_total = lax.fori_loop(at.first, at.whole, whole_tile, (top, total))
    top, total = lax.fori_loop(at.whole, at.last, cut_tile, top_total)
    _pass_turn(mem, at, at.last)

    safe = jnp.where(total > 0, total, 1.0)
    mem.lse[...] = jnp.where(total > 0, (top + jnp.log2(safe)) / LOG2E, -jnp.inf)
    _hand_over(mem, at, at.last, 1.0 / safe)

    @pl.when(at.last > at.first)
    def _drain():
        plgpu.barrier_wait(mem.weights_free.at[1 - at.parity(at.last)])

    plgpu.barrier_wait(mem.weights_free.at[at.parity(at.last)])


def _pass_turn(mem: Memory, at: Stretch, i):
    """The halves may sum tile i - 1: while the tensor cores do that, tile i is weighed."""

    @pl.when(i > at.first)
    def _pass():
        plgpu.barrier_arrive(mem.turn.at[1 - at.parity(i)])


def _clear_unseen(mem: Memory, at: Stretch, i):
    """Zeros in the slots that no query may see: a weight of 0 does not hide a NaN."""
    seen = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 0, layout=WGMMA) + i * TILE < at.length
    for part, full in at.parts(mem, i):
        plgpu.barrier_wait(full)
        for start in range(0, part.shape[1], TILE):
            some = part.at[:, pl.ds(start, TILE)]
            x = plgpu.layout_cast(some[...], WGMMA)
            some[...] = jnp.where(seen, x, jnp.zeros_like(x))
    plgpu.commit_smem()


def _weigh(mem: Memory, at: Stretch, i, scale, scores, top, total):
    """top: the largest scaled score of a head so far; total: the sum of its weights."""
    new_top = jnp.maximum(top, jnp.max(scores, axis=1) * scale)
    keep = jnp.exp2(top - new_top)
    p = jnp.exp2(scores * scale - lax.broadcast_in_dim(new_top, scores.shape, [0]))
    _hand_over(mem, at, i, keep, p)
    plgpu.barrier_arrive(mem.rope_free.at[at.rope_place(i)])  # after a commit: all warps have read
    return new_top, total * keep + jnp.sum(p, axis=1)


def _hand_over(mem: Memory, at: Stretch, i, keep, p=None):
    parity = at.parity(i)

    @pl.when(i - at.first >= 2)
    def _wait():
        plgpu.barrier_wait(mem.weights_free.at[parity])

    if p is not None:
        mem.weights.at[parity][...] = p.astype(jnp.bfloat16)
    mem.keep.at[parity][...] = keep
    plgpu.commit_smem()
    plgpu.barrier_arrive(mem.weights_full.at[parity])


def sum_weighted(out_ref, mem: Memory, at: Stretch, half, lse_ref=None):
    """A half of out, transposed: the latents are the rows of the products. With lse_ref, the lse too."""
    N, height = at.heads.size, mem.ring.shape[2]
    rows = pl.ds(0, N)

    def scaled(acc, parity):
        keep = plgpu.layout_cast(mem.keep.at[parity, rows][...], BY_COLUMN)
        return acc * lax.broadcast_in_dim(keep, acc.shape, [1])

    def fold(i, acc):
        parity, slot = at.parity(i), at.place(i, half)
        plgpu.barrier_wait(mem.weights_full.at[parity])

        def product(acc_ref):
            plgpu.barrier_wait(mem.turn.at[parity])
            for low in range(0, height, TILE):
                part = mem.ring.at[slot, :, pl.ds(low, TILE)]
                plgpu.wgmma(acc_ref.at[pl.ds(low, TILE)], part.T, mem.weights.at[parity, rows].T)

        acc = _accumulate(scaled(acc, parity), product)
        _all_warps_did()
        plgpu.barrier_arrive(mem.free.at[slot])
        plgpu.barrier_arrive(mem.weights_free.at[parity])
        return acc

    acc = plgpu.layout_cast(jnp.zeros((height, N), jnp.float32), WGMMA)
    acc = lax.fori_loop(at.first, at.last, fold, acc)
    parity = at.parity(at.last)
    plgpu.barrier_wait(mem.weights_full.at[parity])
    acc = scaled(acc, parity)
    if lse_ref is not None:
        lse_ref[at.b, at.split, at.heads] = plgpu.layout_cast(mem.lse.at[rows][...], BY_COLUMN)
    plgpu.barrier_arrive(mem.weights_free.at[parity])

    used = mem.ring.at[at.place(jnp.maximum(at.last - 1, at.first), half), rows]  # this half's last, which nobody fills
    used.T[...] = plgpu.layout_cast(acc.astype(jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(used, out_ref.at[at.b, at.split, at.heads, pl.ds(half * height, height)])
    plgpu.wait_smem_to_gmem(0)


def _accumulate(acc, product):
    """acc plus the products; in a function of its own because interpret mode has no run_state."""
    return pl.run_state(product)(plgpu.WGMMAAccumulatorRef.init(acc))
