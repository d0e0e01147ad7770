"""What the delta rule's chunks compute without the state, for all chunks at once.

The middle part of `delta_chunks`, in two kernels: tiles of 16 tokens, a warp each; then whole chunks.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32

from kimi_jax.kernels.approximate import Functions, functions
from kimi_jax.kernels.delta_inputs import CHUNK

TILE = 16
TILE_LEVELS, LEVELS = TILE.bit_length() - 1, CHUNK.bit_length() - 1
INVERSE = jnp.float16  # as precise as TF32, and twice as fast; its numbers are at most 1, as are |k| and beta


class Chunks(NamedTuple):
    """What the M chunks of a row do to the state S that they enter with, and what they read from it.

    U = values - erasers S        out = readers S + mixing U        S <- Diag(decay) S + writers^T U
    """

    erasers: Float[Array, "B M H C K"]
    readers: Float[Array, "B M H C K"]
    writers: Float[Array, "B M H C K"]
    values: Float[Array, "B M H C V"]
    mixing: Float[Array, "B M H C C"]
    decay: Float32[Array, "B M H K"]


def within_chunks(
    mixed: Float[Array, "B T H 3 K"],
    g: Float32[Array, "B T H K"],
    b: Float[Array, "B T H"],
    *,
    interpret: bool = False,
) -> Chunks:
    """The part of `ops.delta_rule.delta_chunked` that does not need the state.

    g: the logarithms that `prepare` gives, G. With the products of the tokens of a chunk

        A[t, j] = beta[t] sum_K k[t] k[j] 2^(G[t] - G[j]) for j < t;  M[t, j] of q likewise, no beta, j <= t

    mixing = M, values = (I + A)^-1 beta v, erasers = (I + A)^-1 beta k 2^G, readers = q 2^G, decay = 2^G[end] and
    writers = k 2^(G[end] - G).
    """
    inverse, mixing = _tiles(mixed, g, b, interpret=interpret)
    return _factors(mixed, g, b, inverse, mixing, interpret=interpret)


def _tiles(mixed, g, b, *, width: int = 32, warps: int = 1, interpret: bool):
    """The blocks of TILE x TILE on the diagonals of (I + A)^-1 and M, [B M H C TILE]; `width` channels at a time."""
    B, T, H = g.shape[:3]
    M, fast = pl.cdiv(T, CHUNK), functions(interpret=interpret)

    def struct(dtype):
        return jax.ShapeDtypeStruct((B, M, H, CHUNK, TILE), dtype)

    return pl.pallas_call(
        functools.partial(_tile, width=width, fast=fast),
        out_shape=(struct(jnp.float32), struct(mixed.dtype)),
        grid=(M * (CHUNK // TILE), H, B),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="kda_tiles",
    )(mixed, g, b)


def _tile(mixed_ref, g_ref, b_ref, inverse_ref, mixing_ref, *, width, fast):
    tile, h, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    first = tile * TILE
    t, j = _token_pairs(TILE)

    def channels(n, products):
        part = pl.ds(n * width, width)
        q, k, g = _load_qkg(mixed_ref, g_ref, row, first, TILE, h, part)
        keys, queries = _meet(products, q, k, g, g_ref, row, first, h, n * width, 0, TILE_LEVELS, fast)
        return keys, queries + jnp.where(t == j, _dot_t(q, k), 0.0)

    zero = jnp.zeros((TILE, TILE), jnp.float32)
    keys, queries = lax.fori_loop(0, g_ref.shape[-1] // width, channels, (zero, zero))
    a = _beta(b_ref, row, first, TILE, h, fast)[:, None] * keys
    inverse = jnp.where(t == j, 1.0, 0.0) - jnp.where(_halves_meet(t, j, 0), a, 0.0)
    m, here = tile // (CHUNK // TILE), pl.ds(tile % (CHUNK // TILE) * TILE, TILE)
    inverse_ref[row, m, h, here, :] = _merge_inverses(inverse, a, t, j, 1, TILE_LEVELS)
    mixing_ref[row, m, h, here, :] = queries.astype(mixing_ref.dtype)


def _factors(mixed, g, b, inverse, mixing, *, width: int = 64, warps: int = 4, interpret: bool) -> Chunks:
    """`Chunks`, from what their tiles have; `width` channels at a time, since all would need too many registers."""
    B, T, H, _, K = mixed.shape
    M, C, dtype = pl.cdiv(T, CHUNK), CHUNK, mixed.dtype

    def struct(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct((B, M, H, *shape), dtype)

    made = pl.pallas_call(
        functools.partial(_chunk, width=width, interpret=interpret),
        out_shape=(*4 * [struct(C, K)], struct(C, C), struct(K, dtype=jnp.float32)),
        grid=(M, H, B),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="kda_chunk_factors",
    )(mixed, g, b, inverse, mixing)
    return Chunks(*made)


def _chunk(
    mixed_ref, g_ref, b_ref, tile_inverse_ref, tile_mixing_ref,
    erasers_ref, readers_ref, writers_ref, values_ref, mixing_ref, decay_ref, *, width, interpret,
):  # fmt: skip
    m, h, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    (T, K), dtype, fast = (g_ref.shape[1], g_ref.shape[-1]), mixed_ref.dtype, functions(interpret=interpret)
    first = m * CHUNK
    t, j = _token_pairs(CHUNK)
    beta = _beta(b_ref, row, first, CHUNK, h, fast)

    def channels(n, products):
        part = pl.ds(n * width, width)
        q, k, g = _load_qkg(mixed_ref, g_ref, row, first, CHUNK, h, part)
        products = _meet(products, q, k, g, g_ref, row, first, h, n * width, TILE_LEVELS, LEVELS, fast)
        through = fast.exp2(g)
        readers_ref[row, m, h, :, part] = (q.astype(jnp.float32) * through).astype(dtype)
        k = k.astype(jnp.float32)
        erasers_ref[row, m, h, :, part] = (k * through).astype(dtype)  # not yet: it waits there for the inverse
        total = plgpu.load(g_ref.at[row, jnp.minimum(first + CHUNK, T) - 1, h, part])
        writers_ref[row, m, h, :, part] = (k * fast.exp2(total[None, :] - g)).astype(dtype)
        decay_ref[row, m, h, part] = fast.exp2(total)
        return products

    zero = jnp.zeros((CHUNK, CHUNK), jnp.float32)
    keys, queries = lax.fori_loop(0, K // width, channels, (zero, zero))
    queries += _on_diagonal(tile_mixing_ref, row, m, h, t, j).astype(jnp.float32)
    inverse = _on_diagonal(tile_inverse_ref, row, m, h, t, j)
    mixing_ref[row, m, h] = queries.astype(dtype)
    inverse = _merge_inverses(inverse, beta[:, None] * keys, t, j, TILE_LEVELS, LEVELS)
    inverse = (inverse * beta[None, :]).astype(dtype)
    if not interpret:  # other threads wrote what this one is about to read
        plgpu.debug_barrier()

    def solved(n, _):
        part = pl.ds(n * width, width)
        v = _load(mixed_ref, row, first, CHUNK, h, jnp.int32(2), part)
        values_ref[row, m, h, :, part] = _dot(inverse, v).astype(dtype)
        erasers = _dot(inverse, plgpu.load(erasers_ref.at[row, m, h, :, part], volatile=True)).astype(dtype)
        if not interpret:  # all must have read before one overwrites
            plgpu.debug_barrier()
        erasers_ref[row, m, h, :, part] = erasers

    lax.fori_loop(0, K // width, solved, None)


def _meet(products, q, k, g, g_ref, row, first, h, channel, low, high, fast: Functions):
    """Add to (sum_K k[t] k[j] 2^(G[t] - G[j]), of q likewise) the pairs that first meet at a level in [low, high).

    Token t meets the tokens j in the largest block in which they are in different halves: 2^(G[t] - G[j]) is then
    2^(G[t] - G[middle]) 2^(G[middle] - G[j]), neither exponent above 0, and the halves meet in one matrix product.
    """
    size, width = g.shape
    token, (t, j) = jnp.arange(size, dtype=jnp.int32), _token_pairs(size)
    channels = channel + jnp.arange(width, dtype=jnp.int32)[None, :]

    def level(i, products):  # a loop, although its bounds are known: unrolled, it runs out of registers
        keys, queries = products
        middle = jnp.minimum(first + (token >> (i + 1) << (i + 1)) + (1 << i), g_ref.shape[1]) - 1
        at = tuple(jnp.broadcast_to(x, g.shape) for x in (row, middle[:, None], h, channels))
        decay = fast.decay(g, plgpu.load(g_ref.at[at])).astype(k.dtype)
        of_keys, meet = k * decay, _halves_meet(t, j, i)
        keys += jnp.where(meet, _dot_t(of_keys, of_keys), 0.0)
        queries += jnp.where(meet, _dot_t(q * decay, of_keys), 0.0)
        return keys, queries

    return lax.fori_loop(low, high, level, products)


def _merge_inverses(inverse, a, t, j, low, high):
    """(I + A)^-1 on blocks of 2^high tokens, from that on blocks of 2^low; A strictly lower triangular:

    [[P, 0], [Q, R]]^-1 = [[P^-1, 0], [-R^-1 Q P^-1, R^-1]], as `ops.delta_rule` does
    """

    def level(i, inverse):
        narrow = inverse.astype(INVERSE)
        below = _dot(jnp.where(_halves_meet(t, j, i), a, 0.0).astype(INVERSE), narrow)
        return inverse - _dot(narrow, below.astype(INVERSE))

    return lax.fori_loop(low, high, level, inverse)


def _on_diagonal(ref, row, m, h, t, j):
    """The tiles [C, TILE] of a chunk as the diagonal blocks of a matrix [C, C]."""
    at = tuple(jnp.broadcast_to(x, (CHUNK, CHUNK)) for x in (row, m, h, t, j & (TILE - 1)))
    return plgpu.load(ref.at[at], mask=t >> TILE_LEVELS == j >> TILE_LEVELS, other=0.0)


def _load_qkg(mixed_ref, g_ref, row, first, tokens, h, part):
    q, k = (_load(mixed_ref, row, first, tokens, h, jnp.int32(i), part) for i in (0, 1))
    g = _load(g_ref, row, first, tokens, h, part)
    # the same numbers again: without this, Triton computes every decay of `_meet` twice, once for each layout of k
    return q, k, jnp.where(_inside(g_ref, first, tokens)[:, None], g, 0.0)


def _load(ref, row, first, tokens, h, *rest):
    """[tokens, channels]; zero past the last token."""
    at = ref.at[row, pl.ds(first, tokens), h, *rest]
    inside = _inside(ref, first, tokens)[:, None]
    return plgpu.load(at, mask=jnp.broadcast_to(inside, at.shape), other=0.0)


def _beta(b_ref, row, first, tokens, h, fast: Functions):
    b = plgpu.load(b_ref.at[row, pl.ds(first, tokens), h], mask=_inside(b_ref, first, tokens), other=0.0)
    return fast.sigmoid(b.astype(jnp.float32))


def _inside(ref, first, tokens):
    return first + jnp.arange(tokens, dtype=jnp.int32) < ref.shape[1]


def _token_pairs(tokens):
    token = jnp.arange(tokens, dtype=jnp.int32)
    return token[:, None], token[None, :]


def _halves_meet(t, j, i):
    """Whether t is in the second half and j in the first of one block of 2^(i+1) tokens."""
    of_t = jnp.where((t >> i) & 1 == 1, t >> (i + 1), -1)
    return of_t == jnp.where((j >> i) & 1 == 0, j >> (i + 1), -2)


def _dot(a, b):
    return _product(a, b, 0)


def _dot_t(a, b):
    """a b^T"""
    return _product(a, b, 1)


def _product(a, b, over):
    return lax.dot_general(
        a, b, (((1,), (over,)), ((), ())), precision=lax.Precision.DEFAULT, preferred_element_type=jnp.float32
    )
