"""The routed experts on MXFP4 weights for few tokens: bound by the bytes of the experts that were hit.

The sibling of `ops.experts.experts_packed` for up to 64 tokens. What stands between it and that bound is the work of
widening codes, so little is done for each: two codes become numbers in about three instructions, and what 32 of them
share, their scale, is multiplied into their part of the product. Parts are told apart by columns: tensor cores multiply
by at least eight, an expert hit has one or two tokens, so a column is one token's inputs of one group of 32, with zeros
in the places of the other groups.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int, Int32, UInt8

from kimi_jax.kernels import fp4
from kimi_jax.kernels.approximate import functions
from kimi_jax.kernels.experts_few import Activation, store_columns
from kimi_jax.kernels.experts_product import weighted_sum

TOKENS, GROUPS = 2, 4  # of a program, at a time: the eight columns
COLUMNS = TOKENS * GROUPS
ELEMENTS = GROUPS * fp4.GROUP // fp4.IN_HALF
BFLOAT16_TOKENS = 32  # more are multiplied as float16 in the first product: measured on an H200
PIECES = 2  # of ELEMENTS of a row that are fetched together: 128 bytes, half of which would cost the memory the same
# The bfloat16 numbers that `fp4.numbers` makes are so small that their products would not be normal float32.
LIFT = 2.0**64


def experts_few_packed(
    x: Float[Array, "N D"],
    chosen: Int32[Array, "N k"],
    weights: Float32[Array, "N k"],
    gate_up_packed: UInt8[Array, "E 2 F D//2"],
    gate_up_scale: UInt8[Array, "E 2 F D//32"],
    down_packed: UInt8[Array, "E D F//2"],
    down_scale: UInt8[Array, "E D F//32"],
    *,
    activation: Activation,
    first: int | Int[Array, ""] = 0,
    rows: tuple[int, int] | None = None,
    stages: tuple[int, int] | None = None,
    warps: int = 4,
    interpret: bool = False,
) -> Float32[Array, "N D"]:
    """`experts_few` on MXFP4 weights, exact for scales 2 to 252; inputs and hidden values below 2^63.

    For more than BFLOAT16_TOKENS inputs are rounded to 2^-25 of the token's largest.

    rows: held at a time by the first product, then by the second; stages: of their loads. Floor: 3 F D (1/2 + 1/32)
    bytes for each expert that a token chose.
    """
    (N, k), (E, _, F, half) = chosen.shape, gate_up_packed.shape
    # Measured on an H200, as are the warps. Two stages leave the L1 cache room for the scales.
    rows, stages = rows or (64, 64 if N <= 8 else 128), stages or (2 if 8 < N <= BFLOAT16_TOKENS else 3, 3)
    pairs, first = chosen.reshape(-1), jnp.asarray(first, jnp.int32).reshape(1)
    common = dict(top_k=k, interpret=interpret)
    params = [plgpu.CompilerParams(num_warps=warps, num_stages=n) for n in stages]
    # All programs of one stretch of rows after another: those of one expert then find its weights in the L2 cache.
    hidden = pl.pallas_call(
        functools.partial(_gate_up, activation=activation, rows=rows[0], **common),
        out_shape=jax.ShapeDtypeStruct((N, k, F), x.dtype),
        grid=(N * k, F // rows[0]),
        compiler_params=params[0],
        interpret=interpret,
        name="experts_few_packed_gate_up",
    )(*_inputs(x), pairs, first, fp4.halves(gate_up_packed), fp4.words(gate_up_scale))
    outputs = pl.pallas_call(
        functools.partial(_down, rows=rows[1], **common),
        out_shape=jax.ShapeDtypeStruct((N, k, 2 * half), x.dtype),
        grid=(N * k, 2 * half // rows[1]),
        compiler_params=params[1],
        interpret=interpret,
        name="experts_few_packed_down",
    )(hidden, pairs, first, fp4.halves(down_packed), fp4.words(down_scale))
    return weighted_sum(outputs, chosen, weights, first[0], E)


def _inputs(x):
    """x for the first product; for many tokens in float16, each divided by `_power` of its largest, and these [N].

    float16 spares work for each expert, and costs finding the largest.
    """
    x = fp4.split(x, fp4.IN_HALF)
    if x.shape[0] <= BFLOAT16_TOKENS:
        return (_lifted(x),)
    largest = jnp.max(jnp.abs(x), axis=1)
    return (x.astype(jnp.float32) / _power(largest)[:, None]).astype(jnp.float16), largest


def _power(largest):
    """The largest power of two not above it, at least 2^-126."""
    bits = lax.bitcast_convert_type(largest.astype(jnp.float32), jnp.int32)
    return lax.bitcast_convert_type(jnp.maximum(bits & 0x7F800000, 1 << 23), jnp.float32)


def _gate_up(*refs, activation, rows, top_k, interpret):
    *inputs, pairs_ref, first_ref, codes_ref, scale_ref, hidden_ref = refs
    x_ref, largest_ref = (*inputs, None)[:2]
    row = pl.program_id(1) * rows
    dtype, width = hidden_ref.dtype, hidden_ref.shape[-1]

    def run(e, token, which, live):
        parts, load_x = ((e, jnp.int32(0)), (e, jnp.int32(1))), _by_group(x_ref, (token,), live)
        factor = 1 / LIFT if largest_ref is None else _power(_of_tokens(largest_ref, token, live))
        gate, up = _products(codes_ref, scale_ref, parts, row, load_x, factor, rows, interpret)
        hidden = _lifted(activation(gate.astype(dtype), up.astype(dtype)))
        at = fp4.places(row + jnp.arange(rows, dtype=jnp.int32), width, fp4.IN_HALF)
        store_columns(hidden_ref, hidden, at, token, which, live)

    _for_tokens(pairs_ref, first_ref, codes_ref.shape[0], top_k, run)


def _down(hidden_ref, pairs_ref, first_ref, codes_ref, scale_ref, out_ref, *, rows, top_k, interpret):
    row = pl.program_id(1) * rows

    def run(e, token, which, live):
        load_hidden = _by_group(hidden_ref, (token, which), live)
        (out,) = _products(codes_ref, scale_ref, ((e,),), row, load_hidden, 1 / LIFT, rows, interpret)
        at = row + jnp.arange(rows, dtype=jnp.int32)
        store_columns(out_ref, out.astype(out_ref.dtype), at, token, which, live)

    _for_tokens(pairs_ref, first_ref, codes_ref.shape[0], top_k, run)


def _for_tokens(pairs_ref, first_ref, held, top_k, run):
    """run(expert, token, which, live) if this program's pair of token and choice is the first, third .. of its expert.

    token, which [TOKENS]: of this pair and of the expert's next, the token and which of its choices the expert is; live
    [TOKENS]: whether there is such a pair.
    """
    pairs, own = pairs_ref.shape[0], pl.program_id(0)
    pair = jnp.arange(pl.next_power_of_2(pairs), dtype=jnp.int32)
    chosen = plgpu.load(pairs_ref.at[pl.ds(own * 0, pair.size)], mask=pair < pairs, other=-1)
    expert = pairs_ref[own]
    same, e = chosen == expert, expert - first_ref[0]
    before = jnp.sum(jnp.where(same & (pair < own), 1, 0))
    after = jnp.min(jnp.where(same & (pair > own), pair, pairs))

    @pl.when((e >= 0) & (e < held) & (before % TOKENS == 0))
    def _():
        taken = jnp.where(jnp.arange(TOKENS, dtype=jnp.int32) == 0, own, after)
        run(e, taken // top_k, taken % top_k, taken < pairs)


def _by_group(ref, place, live):
    """load(code, at) [ELEMENTS, COLUMNS]: ref[*place, ..] at one code of the elements at .., in its group's column."""
    shape = (ELEMENTS, COLUMNS)
    element, column = jnp.arange(ELEMENTS, dtype=jnp.int32), jnp.arange(COLUMNS, dtype=jnp.int32)
    # lax.div: the compiler must see that eight neighbours share a group, to copy more than one number at a time.
    group = lax.div(element, jnp.full_like(element, ELEMENTS // GROUPS))

    mask = (group[:, None] == (column % GROUPS)[None, :]) & (_columns(live.astype(jnp.int32)) > 0)
    place = tuple(jnp.broadcast_to(_columns(i), shape) for i in place)
    stretch = ref.shape[-1] // fp4.IN_HALF

    def load(code, at):
        input_ = jnp.broadcast_to((code * stretch + at + element)[:, None], shape)
        return plgpu.load(ref.at[(*place, input_)], mask=mask, other=0.0)

    return load


def _of_tokens(ref, token, live):
    """[1, COLUMNS]: ref[n] of each column's token, 1 where there is none."""
    return plgpu.load(ref.at[_columns(token)], mask=_columns(live.astype(jnp.int32)) > 0, other=1.0)


def _columns(of_tokens):
    return jnp.broadcast_to(of_tokens[:, None], (TOKENS, GROUPS)).reshape(1, COLUMNS)


def _products(codes_ref, scale_ref, experts_rows, row, load_x, factor, rows, interpret):
    """factor sum_c weight[*index, row + r, c] x[n, c] for each index of `experts_rows`, float32 [rows, TOKENS]."""
    some, rounds = pl.ds(row, rows), codes_ref.shape[-1] // (PIECES * ELEMENTS)
    multiply_add = functions(interpret=interpret).multiply_add

    def load_scales(i):
        here = pl.ds(jnp.minimum(i, rounds - 1) * PIECES, PIECES)
        # A sector of them lasts several rounds.
        return tuple(
            plgpu.load(scale_ref.at[(*index, some, here)], eviction_policy="evict_last") for index in experts_rows
        )

    def fold(i, carry):
        totals, scales = list(carry[0]), [_powers(words, interpret) for words in carry[1]]
        coming = load_scales(i + 1)  # what a product takes, Triton loads ahead by itself
        for piece in range(PIECES):
            at = (i * PIECES + piece) * ELEMENTS
            xs = [load_x(code, at) for code in range(fp4.IN_HALF)]
            dtype = xs[0].dtype
            lowered = factor * jnp.float32(1 / fp4.unit(dtype, interpret))
            for n, index in enumerate(experts_rows):
                halves = plgpu.load(codes_ref.at[(*index, some, pl.ds(at, ELEMENTS))])
                part = sum(
                    lax.dot_general(w, x, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
                    for w, x in zip(fp4.numbers(halves, dtype, interpret), xs, strict=True)
                )
                totals[n] = multiply_add(part * lowered, scales[n][piece], totals[n])  # so nothing overflows
        return tuple(totals), coming

    zero = jnp.zeros((rows, COLUMNS), jnp.float32)
    start = (zero,) * len(experts_rows), load_scales(jnp.int32(0))
    totals, _ = lax.fori_loop(0, rounds, fold, start)
    return [jnp.sum(total.reshape(rows, TOKENS, GROUPS), axis=2) for total in totals]


def _powers(words, interpret):
    """For each piece what its part is multiplied by, float32 [rows, COLUMNS]. words [rows, PIECES] of GROUPS scales."""
    shape = (words.shape[0], COLUMNS)
    bit = jnp.broadcast_to(8 * (jnp.arange(COLUMNS, dtype=jnp.int32) % GROUPS)[None, :], shape)
    pieces = [jnp.broadcast_to(word, shape) for word in lax.split(words, (1,) * PIECES, axis=1)]
    if interpret:
        scales = [(lax.shift_right_logical(word, bit) & 255) << 23 for word in pieces]
        return [lax.bitcast_convert_type(scale, jnp.float32) for scale in scales]
    rotate = "shf.l.wrap.b32 $0, $1, $1, $2; and.b32 $0, $0, 0x7F800000;"  # a byte to where a float32 has its exponent
    result = [jax.ShapeDtypeStruct(shape, jnp.float32)]
    about: Any = dict(constraints="=r,r,r", pack=1, result_shape_dtypes=result)
    return [plgpu.elementwise_inline_asm(rotate, args=[word, (23 - bit) & 31], **about)[0] for word in pieces]


def _lifted(x):
    return x * jnp.asarray(LIFT, x.dtype)
