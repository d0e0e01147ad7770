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

from kimi_jax.kernels.mla_decode import LOG2E

TILE = 64  # slots a step, the rows of a wgmma; also the columns of 128 bytes, the widest swizzle
EMPTY = -1e30
WGMMA = plgpu.Layout.WGMMA
BY_ROW, BY_COLUMN = WGMMA.reduce(1), WGMMA.reduce(0)


class Memory(NamedTuple):
    """A program's shared memory and its barriers. A full barrier says that data came, a free one that it was used."""

    query: Any  # [TILE, rest]: of each head, what is not kept in registers; None where everything is
    ring: Any  # [ring, TILE, columns] of the cache; first, the queries that will be kept
    weights: Any  # [2, TILE, TILE]: head by slot, of even and odd tiles
    keep: Any  # [2, TILE]: by head, factors of what was summed before
    lse: Any  # [TILE]
    query_full: Any
    full: Any
    free: Any
    weights_full: Any
    weights_free: Any


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
    kept: int

    def order(self, i, c):
        """How many chunks, those of the queries included, the ring takes before chunk c of tile i."""
        return self.kept + (i - self.first) * self.chunks + c

    def place(self, i, c):
        """Where in the ring chunk c of tile i lies."""
        return lax.rem(self.order(i, c), self.depth)

    def turn(self, i):
        """Which of the two buffers the weights of tile i lie in."""
        return lax.rem(i - self.first, 2)


def copy_tiles(q_ref, rows_ref, mem: Memory, at: Stretch):
    """The queries, then tile after tile into the ring, each chunk as soon as its place was given back by all."""
    columns = mem.ring.shape[2]
    shared = "block" if lax.axis_size("block") > 1 else None
    rows = pl.ds(0, at.heads.size)
    for c in range(at.kept):
        chunk = q_ref.at[at.b, 0, at.heads, pl.ds(c * columns, columns)]
        plgpu.copy_gmem_to_smem(chunk, mem.ring.at[c, rows], mem.full.at[c])
    if mem.query is not None:
        rest = q_ref.at[at.b, 0, at.heads, pl.ds(at.kept * columns, mem.query.shape[1])]
        plgpu.copy_gmem_to_smem(rest, mem.query.at[rows], mem.query_full)

    @pl.loop(at.first, at.last)
    def _tile(i):
        for c in range(at.chunks):
            slot = at.place(i, c)
            pl.when(at.order(i, c) >= at.depth)(functools.partial(plgpu.barrier_wait, mem.free.at[slot]))
            chunk = rows_ref.at[at.b, 0, pl.ds(i * TILE, TILE), pl.ds(c * columns, columns)]
            plgpu.copy_gmem_to_smem(chunk, mem.ring.at[slot], mem.full.at[slot], collective_axes=shared)

    copied = at.order(at.last, 0)

    @pl.loop(jnp.maximum(copied - at.depth, 0), copied)
    def _drain(n):  # a program may not end while others of its cluster still arrive on its barriers
        plgpu.barrier_wait(mem.free.at[lax.rem(n, at.depth)])


def form_weights(mem: Memory, at: Stretch, latent, scale):
    """Scores and weights, tile by tile; what the two halves need to keep of their sums; at the end the lse."""
    queries = _queries(mem, at)

    def scores_of(i, wait):
        def product(acc):
            _begin_scores(acc, queries, mem, at, i, wait)
            return _end_scores(acc, mem, at, i, latent)

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

    safe = jnp.where(total > 0, total, 1.0)
    mem.lse[...] = jnp.where(total > 0, (top + jnp.log2(safe)) / LOG2E, -jnp.inf)
    _hand_over(mem, at, at.last, 1.0 / safe)

    @pl.when(at.last > at.first)
    def _drain():
        plgpu.barrier_wait(mem.weights_free.at[1 - at.turn(at.last)])

    plgpu.barrier_wait(mem.weights_free.at[at.turn(at.last)])


def _queries(mem: Memory, at: Stretch):
    """The chunks of the queries, each in registers or in shared memory. Rows behind the heads hold anything."""
    columns, queries = mem.ring.shape[2], []
    for c in range(at.kept):
        plgpu.barrier_wait(mem.full.at[c])
        queries.append(plgpu.layout_cast(mem.ring.at[c][...], WGMMA))
    if lax.axis_size("block") > 1:
        plgpu.commit_smem()  # on a cluster's barrier one warp arrives for all four: they must all have read
    for c in range(at.kept):
        _give_back(mem, c, 2)
    if mem.query is not None:
        plgpu.barrier_wait(mem.query_full)
        queries += [mem.query.at[:, pl.ds(start, columns)] for start in range(0, mem.query.shape[1], columns)]
    return queries


def _give_back(mem: Memory, slot, times):
    """A slot of the ring is free after two arrivals of each program that shares the copies."""
    for _ in range(times):
        plgpu.barrier_arrive(mem.free.at[slot])


def _begin_scores(acc, queries, mem: Memory, at: Stretch, i, wait):
    for c, query in enumerate(queries):
        if wait:
            plgpu.barrier_wait(mem.full.at[at.place(i, c)])
        plgpu.wgmma(acc, query, mem.ring.at[at.place(i, c)].T)


def _end_scores(acc, mem: Memory, at: Stretch, i, latent):
    """The halves multiply what they use of a tile after its scores, so that this warpgroup frees only the rest."""
    scores = acc[...]
    for c in range(at.chunks):
        if c * mem.ring.shape[2] >= latent:
            _give_back(mem, at.place(i, c), 2)
    return scores


def _clear_unseen(mem: Memory, at: Stretch, i):
    """Zeros in the slots that no query may see: a weight of 0 does not hide a NaN."""
    seen = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 0, layout=WGMMA) + i * TILE < at.length
    for c in range(at.chunks):
        plgpu.barrier_wait(mem.full.at[at.place(i, c)])
        for start in range(0, mem.ring.shape[2], TILE):
            part = mem.ring.at[at.place(i, c), :, pl.ds(start, TILE)]
            x = plgpu.layout_cast(part[...], WGMMA)
            part[...] = jnp.where(seen, x, jnp.zeros_like(x))
    plgpu.commit_smem()


def _weigh(mem: Memory, at: Stretch, i, scale, scores, top, total):
    """top: the largest scaled score of a head so far; total: the sum of its weights."""
    new_top = jnp.maximum(top, jnp.max(scores, axis=1) * scale)
    keep = jnp.exp2(top - new_top)
    p = jnp.exp2(scores * scale - lax.broadcast_in_dim(new_top, scores.shape, [0]))
    _hand_over(mem, at, i, keep, p)
    return new_top, total * keep + jnp.sum(p, axis=1)


def _hand_over(mem: Memory, at: Stretch, i, keep, p=None):
    turn = at.turn(i)

    @pl.when(i - at.first >= 2)
    def _wait():
        plgpu.barrier_wait(mem.weights_free.at[turn])

    if p is not None:
        mem.weights.at[turn][...] = p.astype(jnp.bfloat16)
    mem.keep.at[turn][...] = keep
    plgpu.commit_smem()
    plgpu.barrier_arrive(mem.weights_full.at[turn])


def sum_weighted(out_ref, mem: Memory, at: Stretch, low, height, lse_ref=None):
    """out[low : low + height], transposed: the latents are the rows of the products. With lse_ref, the lse too."""
    N, columns = at.heads.size, mem.ring.shape[2]
    rows = pl.ds(0, N)
    parts = [divmod(low + j * TILE, columns) for j in range(height // TILE)]
    times = {c: 1 if c * columns < height < (c + 1) * columns else 2 for c, _ in parts}  # 1: both use it

    def scaled(acc, turn):
        keep = plgpu.layout_cast(mem.keep.at[turn, rows][...], BY_COLUMN)
        return acc * lax.broadcast_in_dim(keep, acc.shape, [1])

    def fold(i, acc):
        turn = at.turn(i)
        plgpu.barrier_wait(mem.weights_full.at[turn])

        def product(acc_ref):
            for j, (c, start) in enumerate(parts):
                lat = mem.ring.at[at.place(i, c), :, pl.ds(start, TILE)]
                plgpu.wgmma(acc_ref.at[pl.ds(j * TILE, TILE)], lat.T, mem.weights.at[turn, rows].T)

        acc = _accumulate(scaled(acc, turn), product)
        for c in times:
            _give_back(mem, at.place(i, c), times[c])
        plgpu.barrier_arrive(mem.weights_free.at[turn])
        return acc

    acc = plgpu.layout_cast(jnp.zeros((height, N), jnp.float32), WGMMA)
    acc = lax.fori_loop(at.first, at.last, fold, acc)
    turn = at.turn(at.last)
    plgpu.barrier_wait(mem.weights_full.at[turn])
    acc = scaled(acc, turn)
    if lse_ref is not None:
        lse_ref[at.b, at.split, at.heads] = plgpu.layout_cast(mem.lse.at[rows][...], BY_COLUMN)
    plgpu.barrier_arrive(mem.weights_free.at[turn])
    acc = plgpu.layout_cast(acc, plgpu.Layout.WGMMA_TRANSPOSED)  # so that a thread's pairs lie side by side
    out_ref.at[at.b, at.split, at.heads, pl.ds(low, height)].T[...] = acc


def _accumulate(acc, product):
    """acc plus the products; in a function of its own because interpret mode has no run_state."""
    return pl.run_state(product)(plgpu.WGMMAAccumulatorRef.init(acc))
