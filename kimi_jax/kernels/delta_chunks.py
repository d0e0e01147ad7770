"""KDA's middle for many tokens, a chunk at a time: convolution, gates, delta rule, on matrix units in bfloat16.

The sibling of `ops.kda.mix_heads_plain` at T > 1, up to its gated norm. Knows nothing of projections or of how heads
are spread over devices. First what the chunks compute without the state, all at once; then one after the other.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int32

from kimi_jax.kernels.delta_inputs import prepare
from kimi_jax.kernels.device import PROGRAMS, hopper_or_newer

CHUNK = 64
LEVELS = CHUNK.bit_length() - 1


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


def supports(qkv: Float[Array, "B T H 3 K"]) -> bool:
    """Whether these kernels can stand in: many bfloat16 tokens, and a head width for whole matrix tiles."""
    K = qkv.shape[-1]
    return qkv.shape[1] > 1 and qkv.dtype == jnp.bfloat16 and K in (64, 128) and hopper_or_newer()


def mix_chunks(
    qkv: Float[Array, "B T H 3 K"],
    f: Float[Array, "B T H K"],
    b: Float[Array, "B T H"],
    conv_weight: Float[Array, "H 3 K W"],
    a_log: Float32[Array, " H"],
    dt_bias: Float32[Array, "H K"],
    conv_state: Float[Array, "B W-1 H 3 K"],
    recurrent: Float32[Array, "B H K V"],
    counts: Int32[Array, " B"],
    *,
    lower_bound: float | None,
    interpret: bool = False,
) -> tuple[Float[Array, "B T H V"], Float32[Array, "B H K V"]]:
    """q, k, v = silu(conv(qkv));  S <- Diag(e^g) S;  S <- S + beta k (v - S^T k)^T;  out = S^T q  for T tokens in turn.

    With q and k normalised, q scaled by K^-1/2. Operands of matrix products are bfloat16, sums float32, the state
    float32: a relative error of about 4e-3. A token at or after counts[b] has decay 1 and writes zeros, whatever finite
    numbers it holds.

    Floor: 2 (3 + 1 + 1 + 1) K bytes and 6 K^2 + 5 K (C + 1) operations a token and head, C = CHUNK. Source: Kimi
    Linear (arXiv 2510.26692), section 3, the chunkwise form, as written out in `ops.delta_rule.delta_chunked`.
    """
    mixed, g = prepare(
        qkv, f, conv_weight, a_log, dt_bias, conv_state, counts, lower_bound=lower_bound, interpret=interpret
    )
    chunks = within_chunks(mixed, g, b, interpret=interpret)
    return across_chunks(chunks, recurrent, qkv.shape[1], interpret=interpret)


def within_chunks(
    mixed: Float[Array, "B T H 3 K"],
    g: Float32[Array, "B T H K"],
    b: Float[Array, "B T H"],
    *,
    warps: int = 4,
    interpret: bool = False,
) -> Chunks:
    """The part of `ops.delta_rule.delta_chunked` that does not need the state, for all chunks at once.

    g: the binary logarithms of the decays, as `prepare` gives them.

    In two kernels, since one would need more registers than there are: how the tokens of a chunk meet, then the rest.
    """
    B, T, H, _, K = mixed.shape
    M, C, dtype = pl.cdiv(T, CHUNK), CHUNK, mixed.dtype

    def struct(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct((B, M, H, *shape), dtype)

    call = functools.partial(
        pl.pallas_call,
        grid=(M, H, B),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
    )
    square = struct(C, C, dtype=jnp.float32)
    products, mixing = call(_products, out_shape=(square, struct(C, C)), name="kda_chunk_products")(mixed, g, b)
    erasers, readers, writers, values, decay = call(
        _factors,
        out_shape=(struct(C, K), struct(C, K), struct(C, K), struct(C, K), struct(K, dtype=jnp.float32)),
        name="kda_chunk_factors",
    )(mixed, g, b, products)
    return Chunks(erasers, readers, writers, values, mixing, decay)


def _products(mixed_ref, g_ref, b_ref, products_ref, mixing_ref):
    """A[t, j] = beta[t] sum_K k[t] k[j] 2^(g[j+1] + .. + g[t]) for j < t;  M[t, j] of q likewise, no beta, j <= t.

    Token t meets the tokens j in the largest block in which they are in different halves: their exponent is then split
    at its middle, into two sums that are both <= 0, and the halves meet in one matrix product.
    """
    m, h, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    dtype = mixed_ref.dtype
    t, j = _token_pairs()
    coarse = _load(g_ref, row, m, h).astype(dtype)

    def level(i, carry):  # a loop, although its bound is known: unrolled, it runs out of registers
        keys, queries = carry
        decay = jnp.exp2(_dot(_ones(_spans(t, j, i), dtype), coarse)).astype(dtype)
        q, k = (_load(mixed_ref, row, m, h, part, volatile=True) for part in (0, 1))  # not kept: too many registers
        of_keys, meet = k * decay, _halves_meet(t, j, i)
        keys += jnp.where(meet, _dot_t(of_keys, of_keys), 0.0)
        queries += jnp.where(meet, _dot_t(q * decay, of_keys), 0.0)
        return keys, queries

    zero = jnp.zeros((CHUNK, CHUNK), jnp.float32)
    keys, queries = lax.fori_loop(0, LEVELS, level, (zero, zero))
    products_ref[row, m, h] = _beta(b_ref, row, m, h) * keys
    q, k = (_load(mixed_ref, row, m, h, part).astype(jnp.float32) for part in (0, 1))
    own = jnp.sum(q * k, axis=1)[:, None]
    mixing_ref[row, m, h] = (queries + jnp.where(t == j, own, 0.0)).astype(dtype)


def _factors(mixed_ref, g_ref, b_ref, products_ref, erasers_ref, readers_ref, writers_ref, values_ref, decay_ref):
    """The rest of `Chunks`: from (I + A)^-1, and from the decays since a chunk's start and up to its end."""
    m, h, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    dtype = mixed_ref.dtype
    t, j = _token_pairs()
    inverse = _unit_lower_inverse(products_ref[row, m, h], t, j).astype(dtype)
    beta = _beta(b_ref, row, m, h)
    values = beta * _load(mixed_ref, row, m, h, 2).astype(jnp.float32)
    values_ref[row, m, h] = _dot(inverse, values.astype(dtype)).astype(dtype)

    g = _load(g_ref, row, m, h)
    coarse, upto = g.astype(dtype), _ones(j <= t, dtype)
    through = _dot(upto, coarse) + _dot(upto, (g - coarse.astype(jnp.float32)).astype(dtype))
    total = jnp.sum(g, axis=0)
    decay_ref[row, m, h] = jnp.exp2(total)
    k = _load(mixed_ref, row, m, h, 1).astype(jnp.float32)
    writers_ref[row, m, h] = (k * jnp.exp2(total[None, :] - through)).astype(dtype)
    through = jnp.exp2(through)
    erasers_ref[row, m, h] = _dot(inverse, (beta * k * through).astype(dtype)).astype(dtype)
    q = _load(mixed_ref, row, m, h, 0).astype(jnp.float32)
    readers_ref[row, m, h] = (q * through).astype(dtype)


def _unit_lower_inverse(a, t, j):
    """(I + A)^-1 for strictly lower triangular A, by blocks of doubling size, as `ops.delta_rule` does:

    [[P, 0], [Q, R]]^-1 = [[P^-1, 0], [-R^-1 Q P^-1, R^-1]]
    """

    def level(i, inverse):
        lower = jnp.where(_halves_meet(t, j, i), a, 0.0)
        return inverse - _dot(inverse, _dot(lower, inverse))

    start = jnp.where(t == j, 1.0, 0.0) - jnp.where(_halves_meet(t, j, 0), a, 0.0)
    return lax.fori_loop(1, LEVELS, level, start)


def _load(ref, row, m, h, *part, volatile=False):
    """A [C, K] of chunk m; zero past the last token."""
    shape = CHUNK, ref.shape[-1]
    inside = (m * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32) < ref.shape[1])[:, None]
    at = ref.at[row, pl.ds(m * CHUNK, CHUNK), h, *map(jnp.int32, part), :]
    return plgpu.load(at, mask=jnp.broadcast_to(inside, shape), other=0.0, volatile=volatile)


def _beta(b_ref, row, m, h):
    inside = m * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32) < b_ref.shape[1]
    b = plgpu.load(b_ref.at[row, pl.ds(m * CHUNK, CHUNK), h], mask=inside, other=0.0)
    return jax.nn.sigmoid(b.astype(jnp.float32))[:, None]


def _token_pairs():
    return jnp.arange(CHUNK, dtype=jnp.int32)[:, None], jnp.arange(CHUNK, dtype=jnp.int32)[None, :]


def _ones(where, dtype):
    return jnp.where(where, jnp.ones((), dtype), jnp.zeros((), dtype))


def _spans(t, j, i):
    """Whether j's decay lies between t and the middle of the block of 2^(i+1) tokens that t is in."""
    middle = (t >> (i + 1) << (i + 1)) + (1 << i) - 1
    return (j > jnp.minimum(t, middle)) & (j <= jnp.maximum(t, middle))


def _halves_meet(t, j, i):
    """Whether t is in the second half and j in the first of one block of 2^(i+1) tokens."""
    of_t = jnp.where((t >> i) & 1 == 1, t >> (i + 1), -1)
    return of_t == jnp.where((j >> i) & 1 == 0, j >> (i + 1), -2)


def across_chunks(
    chunks: Chunks,
    state: Float32[Array, "B H K V"],
    tokens: int,
    *,
    columns: int | None = None,
    warps: int = 4,
    stages: int = 3,
    interpret: bool = False,
) -> tuple[Float[Array, "B T H V"], Float32[Array, "B H K V"]]:
    """Run the chunks one after the other on the state: one program a head and `columns` of the value axis."""
    B, H, _, V = state.shape
    columns = columns or (32 if B * H * V // 32 <= PROGRAMS else 64)
    dtype = chunks.values.dtype
    return pl.pallas_call(
        functools.partial(_across, columns=columns),
        out_shape=(jax.ShapeDtypeStruct((B, tokens, H, V), dtype), jax.ShapeDtypeStruct(state.shape, state.dtype)),
        grid=(V // columns, H, B),
        input_output_aliases={len(chunks): 1},
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name="kda_across_chunks",
    )(*chunks, state)


def _across(
    erasers_ref, readers_ref, writers_ref, values_ref, mixing_ref, decay_ref, state_ref, out_ref, new_state_ref, *,
    columns,
):  # fmt: skip
    h, row = pl.program_id(1), pl.program_id(2)
    some = pl.ds(pl.program_id(0) * columns, columns)
    C, T = CHUNK, out_ref.shape[1]
    dtype = out_ref.dtype

    def step(m, state):
        rounded = state.astype(dtype)
        update = values_ref[row, m, h, :, some].astype(jnp.float32) - _dot(erasers_ref[row, m, h], rounded)
        update = update.astype(dtype)
        out = _dot(readers_ref[row, m, h], rounded) + _dot(mixing_ref[row, m, h], update)
        inside = (m * C + jnp.arange(C, dtype=jnp.int32) < T)[:, None]
        mask = jnp.broadcast_to(inside, out.shape)
        plgpu.store(out_ref.at[row, pl.ds(m * C, C), h, some], out.astype(dtype), mask=mask)
        written = lax.dot_general(
            writers_ref[row, m, h], update, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        return decay_ref[row, m, h][:, None] * state + written

    state = lax.fori_loop(0, values_ref.shape[1], step, state_ref[row, h, :, some])
    new_state_ref[row, h, :, some] = state


def _dot(a, b):
    """a b; float32 operands are rounded to TF32."""
    return _product(a, b, 0)


def _dot_t(a, b):
    """a b^T"""
    return _product(a, b, 1)


def _product(a, b, over):
    return lax.dot_general(
        a, b, (((1,), (over,)), ((), ())), precision=lax.Precision.DEFAULT, preferred_element_type=jnp.float32
    )
