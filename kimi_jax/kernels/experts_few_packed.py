"""The routed experts on MXFP4 weights for few tokens: bound by what widening the codes of the experts hit takes.

The sibling of `ops.experts.experts_packed` for up to 64 tokens. As `experts_few`, except that a program does not
multiply all tokens by its expert's rows: it takes those that chose the expert, eight at a time, which is the least that
tensor cores multiply out of registers. With more than eight it reads and widens its rows again.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int, Int32, UInt8

from kimi_jax.kernels import fp4
from kimi_jax.kernels.experts_few import Activation, store_columns, tokens_of
from kimi_jax.kernels.experts_product import products, weighted_sum

CODES = 4  # in an element: see `fp4.halves`
SLOTS = 8  # tokens at a time


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
    blocks: tuple[int, int, int, int] = (64, 64, 128, 64),  # measured on an H200, as are the stages
    stages: int = 3,
    warps: int = 4,
    interpret: bool = False,
) -> Float32[Array, "N D"]:
    """`experts_few` on MXFP4 weights, widened in registers (see `fp4`).

    blocks: rows and *elements* of four weights held at a time, by the first product, then by the second. Floor:
    3 F D (1/2 + 1/32) bytes for each expert that a token chose.
    """
    (N, k), (E, _, F, half) = chosen.shape, gate_up_packed.shape
    first = jnp.asarray(first, jnp.int32).reshape(1)
    programs = min(N * k, E)
    common = dict(by_pair=N * k <= E, padded=max(16, pl.next_power_of_2(N)), interpret=interpret)
    params = plgpu.CompilerParams(num_warps=warps, num_stages=stages)
    hidden = pl.pallas_call(
        functools.partial(_gate_up, activation=activation, rows=blocks[0], columns=blocks[1], **common),
        out_shape=jax.ShapeDtypeStruct((N, k, F), x.dtype),
        grid=(F // blocks[0], programs),
        compiler_params=params,
        interpret=interpret,
        name="experts_few_packed_gate_up",
    )(fp4.split(x, CODES), chosen, first, fp4.halves(gate_up_packed), gate_up_scale)
    outputs = pl.pallas_call(
        functools.partial(_down, rows=blocks[2], columns=blocks[3], **common),
        out_shape=jax.ShapeDtypeStruct((N, k, 2 * half), x.dtype),
        grid=(2 * half // blocks[2], programs),
        compiler_params=params,
        interpret=interpret,
        name="experts_few_packed_down",
    )(hidden, chosen, first, fp4.halves(down_packed), down_scale)
    return weighted_sum(outputs, chosen, weights, first[0], E)


def _gate_up(x_ref, chosen_ref, first_ref, *refs, activation, rows, by_pair, padded, **tile):
    *weight_refs, hidden_ref = refs
    row = pl.program_id(0) * rows
    width, hidden_width = x_ref.shape[-1], hidden_ref.shape[-1]

    def run(e, token, which, live):
        load_x = functools.partial(_load, x_ref, (token,), live)
        indices = (e, jnp.int32(0)), (e, jnp.int32(1))
        gate, up = products(weight_refs, indices, row, load_x, width, rows=rows, tokens=SLOTS, **tile)
        dtype = hidden_ref.dtype
        at = fp4.places(row + jnp.arange(rows, dtype=jnp.int32), hidden_width, CODES)
        store_columns(hidden_ref, activation(gate.astype(dtype), up.astype(dtype)), at, token, which, live)

    _for_each_slots(chosen_ref, first_ref, weight_refs[0].shape[0], by_pair, padded, run)


def _down(hidden_ref, chosen_ref, first_ref, *refs, rows, by_pair, padded, **tile):
    *weight_refs, out_ref = refs
    row = pl.program_id(0) * rows

    def run(e, token, which, live):
        load_hidden = functools.partial(_load, hidden_ref, (token, which), live)
        width = hidden_ref.shape[-1]
        (out,) = products(weight_refs, ((e,),), row, load_hidden, width, rows=rows, tokens=SLOTS, **tile)
        at = row + jnp.arange(rows, dtype=jnp.int32)
        store_columns(out_ref, out.astype(out_ref.dtype), at, token, which, live)

    _for_each_slots(chosen_ref, first_ref, weight_refs[0].shape[0], by_pair, padded, run)


def _for_each_slots(chosen_ref, first_ref, held, by_pair, padded, run):
    """run(expert, token, which, live) for each eight of the tokens that took this program's expert.

    token, which [8]: a token and which of its choices the expert is; live [8]: whether there is one.
    """
    e, mine, took, which = tokens_of(chosen_ref, first_ref, by_pair, padded)
    took = (took & mine & (e >= 0) & (e < held)).astype(jnp.int32)
    count, rank = jnp.sum(took), jnp.cumsum(took) - took
    token = jnp.arange(padded, dtype=jnp.int32)
    slot = jnp.arange(SLOTS, dtype=jnp.int32)

    def some(i, _):
        place = i * SLOTS + slot
        here = (took[:, None] > 0) & (rank[:, None] == place[None, :])

        def taken(of_tokens):
            return jnp.sum(jnp.where(here, of_tokens[:, None], 0), axis=0)

        run(e, taken(token), taken(which), place < count)

    lax.fori_loop(0, (count + SLOTS - 1) // SLOTS, some, None)


def _load(ref, place, live, at, size):
    """ref[*place, at : at + size] for the tokens that are live, 0 for the others."""
    shape = (live.shape[0], size)
    column = at + jnp.arange(size, dtype=jnp.int32)
    index = tuple(jnp.broadcast_to(i, shape) for i in (*(i[:, None] for i in place), column[None, :]))
    return plgpu.load(ref.at[index], mask=jnp.broadcast_to(live[:, None], shape), other=0.0)
