"""What each warpgroup of the Hopper MLA decode does: copy tiles, form weights, or sum what is weighted.

Knows one program's tiles of the cache and its shared memory, not how many programs share the work
(`kernels.mla_decode_hopper`).
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kimi_jax.kernels.approximate import LOG2E
from kimi_jax.kernels.mla_decode_warps import BY_COLUMN, BY_ROW, WGMMA, heads_only, meet, rescale, settle, weigh

TILE = 64  # slots a step, the rows of a wgmma; also the columns of 128 bytes, the widest swizzle
EMPTY = -1e30


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
    """What a program works on: of the tiles of row b every `splits`-th from the `split`-th on, counted by i from 0."""

    b: Any
    split: Any
    splits: int
    heads: Any
    depth: int
    kept: int

    def slots(self, i):
        """The first slot of tile i. All programs read neighbouring tiles at a time."""
        return (self.split + i * self.splits) * TILE

    def tiles(self, lengths_ref):
        """The row's length; how many tiles there are without an unseen slot, which come first, and with them."""
        length = lengths_ref[self.b]
        behind = self.splits - 1 - self.split
        return length, (length // TILE + behind) // self.splits, (pl.cdiv(length, TILE) + behind) // self.splits

    def order(self, i, half):
        """How many chunks, those of the queries included, the ring takes before a half's of tile i."""
        return max(self.kept - 1, 0) + 2 * i + half

    def place(self, i, half):
        """Where in the ring a half's latents of tile i lie."""
        return lax.rem(self.order(i, half), self.depth)

    def rope_order(self, i):
        """How many tiles' positions, the queries' included, come before those of tile i."""
        return min(self.kept, 1) + i

    def rope_place(self, i):
        """Where the positions of tile i lie."""
        return lax.rem(self.rope_order(i), 2)

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


def copy_tiles(q_ref, rows_ref, lengths_ref, mem: Memory, at: Stretch):
    """The queries, then tile after tile into the ring, each chunk as soon as its place was given back by all."""
    rope, *latents = columns_of(mem)
    shared = "block" if lax.axis_size("block") > 1 else None
    _copy_queries(q_ref, mem, at)
    _, _, tiles = at.tiles(lengths_ref)

    @pl.loop(0, tiles)
    def _tile(i):
        tile = rows_ref.at[at.b, 0, pl.ds(at.slots(i), TILE)]
        slot = at.rope_place(i)
        pl.when(at.rope_order(i) >= 2)(functools.partial(plgpu.barrier_wait, mem.rope_free.at[slot]))
        plgpu.copy_gmem_to_smem(tile.at[:, rope], mem.rope.at[slot], mem.rope_full.at[slot], collective_axes=shared)
        for half, some in enumerate(latents):
            slot = at.place(i, half)
            pl.when(at.order(i, half) >= at.depth)(functools.partial(plgpu.barrier_wait, mem.free.at[slot]))
            plgpu.copy_gmem_to_smem(tile.at[:, some], mem.ring.at[slot], mem.full.at[slot], collective_axes=shared)

    # A program may not end while others of its cluster still arrive on its barriers.
    copied, ropes = at.order(tiles, 0), at.rope_order(tiles)

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
    """The parts of the queries, each in registers, or in shared memory, where rows behind the heads hold anything."""
    queries, columns = [], columns_of(mem)
    kept = _places_of_queries(mem)[: at.kept]
    for place, full, _ in kept:
        plgpu.barrier_wait(full)
        queries.append(heads_only(plgpu.layout_cast(place[...], WGMMA), at.heads.size))
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
        meet()


def form_weights(lengths_ref, mem: Memory, at: Stretch, scale):
    """Scores and weights, tile by tile; what the two halves need to keep of their sums; at the end the lse."""
    length, whole, tiles = at.tiles(lengths_ref)
    queries = _queries(mem, at)

    def scores_of(i, waits):
        (rope, *latents), (rope_full, *fulls) = zip(*at.parts(mem, i), strict=True)
        if waits:
            plgpu.barrier_wait(rope_full)  # before there is an accumulator, so that nothing need fill it with zeros

        def product(acc):
            plgpu.wgmma(acc, queries[0], rope.T)
            for query, part, full in zip(queries[1:], latents, fulls, strict=True):
                if waits:
                    plgpu.barrier_wait(full)
                plgpu.wgmma(acc, query, part.T)
            _pass_turn(mem, i)
            _wait_for_weights(mem, i)
            return acc[...]

        return pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((TILE, TILE), jnp.float32))

    def fold(i, scores, top, total):
        weights, top, keep, total = weigh(scores, top, total, scale)
        mem.weights.at[_parity(i)][...] = weights
        _hand_over(mem, i, keep)
        plgpu.barrier_arrive(mem.rope_free.at[at.rope_place(i)])  # after a commit: all warps have read
        return top, total

    def whole_tile(i, top_total):
        return fold(i, scores_of(i, waits=True), *top_total)

    def cut_tile(i, top_total):
        _clear_unseen(mem, at, i, length)
        slots = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 1, layout=WGMMA) + at.slots(i)
        return fold(i, jnp.where(slots < length, scores_of(i, waits=False), -jnp.inf), *top_total)

    top = plgpu.layout_cast(jnp.full((TILE,), EMPTY, jnp.float32), BY_ROW)
    total = plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), BY_ROW)
    top_total = lax.fori_loop(0, whole, whole_tile, (top, total))
    top, total = lax.fori_loop(whole, tiles, cut_tile, top_total)
    _pass_turn(mem, tiles)

    total = settle(total)
    safe = jnp.where(total != 0, total, 1.0)
    mem.lse[...] = jnp.where(total != 0, (top + jnp.log2(safe)) / LOG2E, -jnp.inf)
    _wait_for_weights(mem, tiles)
    _hand_over(mem, tiles, 1.0 / safe)

    @pl.when(tiles > 0)
    def _drain():
        plgpu.barrier_wait(mem.weights_free.at[1 - _parity(tiles)])

    plgpu.barrier_wait(mem.weights_free.at[_parity(tiles)])


def _parity(i):
    """Which of the two buffers the weights of tile i lie in."""
    return lax.rem(i, 2)


def _pass_turn(mem: Memory, i):
    """The halves may sum tile i - 1: while the tensor cores do that, tile i is weighed."""

    @pl.when(i > 0)
    def _pass():
        plgpu.barrier_arrive(mem.turn.at[1 - _parity(i)])


def _clear_unseen(mem: Memory, at: Stretch, i, length):
    """Zeros in the slots that no query may see: a weight of 0 does not hide a NaN."""
    seen = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 0, layout=WGMMA) + at.slots(i) < length
    for part, full in at.parts(mem, i):
        plgpu.barrier_wait(full)
        for start in range(0, part.shape[1], TILE):
            some = part.at[:, pl.ds(start, TILE)]
            x = plgpu.layout_cast(some[...], WGMMA)
            some[...] = jnp.where(seen, x, jnp.zeros_like(x))
    plgpu.commit_smem()


def _wait_for_weights(mem: Memory, i):
    """Until the place for the weights of tile i, or of what is handed over after the last, was given back."""

    @pl.when(i >= 2)
    def _wait():
        plgpu.barrier_wait(mem.weights_free.at[_parity(i)])


def _hand_over(mem: Memory, i, keep):
    mem.keep.at[_parity(i)][...] = keep
    plgpu.commit_smem()
    plgpu.barrier_arrive(mem.weights_full.at[_parity(i)])


def sum_weighted(out_ref, lengths_ref, mem: Memory, at: Stretch, half, lse_ref=None):
    """A half of out, transposed: the latents are the rows of the products. With lse_ref, the lse too.

    The second half yields: the last part of a tile's products waits for the next tile's weights, which thus come into
    shared memory without those reads in their way. The first half does not: the scores want its chunk back first.
    """
    _, _, tiles = at.tiles(lengths_ref)
    N, height = at.heads.size, mem.ring.shape[2]
    rows, yields = pl.ds(0, N), half == 1

    def scaled(acc, parity):
        keep = plgpu.layout_cast(mem.keep.at[parity, rows][...], BY_COLUMN)
        return rescale(acc, keep)

    def fold(i, acc):
        parity, slot = _parity(i), at.place(i, half)
        if not yields:
            plgpu.barrier_wait(mem.weights_full.at[parity])

        def product(acc_ref):
            plgpu.barrier_wait(mem.turn.at[parity])
            for low in range(0, height, TILE):
                if yields and low + TILE == height:
                    plgpu.barrier_wait(mem.weights_full.at[1 - parity])
                part = mem.ring.at[slot, :, pl.ds(low, TILE)]
                plgpu.wgmma(acc_ref.at[pl.ds(low, TILE)], part.T, mem.weights.at[parity, rows].T)

        acc = _accumulate(scaled(acc, parity), product)
        _all_warps_did()
        plgpu.barrier_arrive(mem.free.at[slot])
        plgpu.barrier_arrive(mem.weights_free.at[parity])
        return acc

    acc = plgpu.layout_cast(jnp.zeros((height, N), jnp.float32), WGMMA)
    if yields:
        plgpu.barrier_wait(mem.weights_full.at[0])
    acc = lax.fori_loop(0, tiles, fold, acc)
    parity = _parity(tiles)
    if not yields:
        plgpu.barrier_wait(mem.weights_full.at[parity])
    acc = scaled(acc, parity)
    if lse_ref is not None:
        lse_ref[at.b, at.split, at.heads] = plgpu.layout_cast(mem.lse.at[rows][...], BY_COLUMN)
    plgpu.barrier_arrive(mem.weights_free.at[parity])

    used = mem.ring.at[at.place(jnp.maximum(tiles - 1, 0), half), rows]  # this half's last, which nobody fills
    used.T[...] = plgpu.layout_cast(acc.astype(jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(used, out_ref.at[at.b, at.split, at.heads, pl.ds(half * height, height)])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the kernel's end waits for the rest


def _accumulate(acc, product):
    """acc plus the products; in a function of its own because interpret mode has no run_state."""
    return pl.run_state(product)(plgpu.WGMMAAccumulatorRef.init(acc))
