"""The routed experts for many tokens: blocks of rows sorted by expert, each block against one expert's weights.

The sibling of `ops.experts.experts_grouped` (and `experts_packed`) for more tokens than `experts_few` takes.
"""

import functools
from itertools import pairwise

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int, Int32, UInt8

from kimi_jax.kernels import fp4
from kimi_jax.kernels.experts_few import Activation
from kimi_jax.kernels.experts_order import PAIRS, order_by_expert
from kimi_jax.kernels.experts_product import products, weighted_sum


def experts_many(
    x: Float[Array, "N D"],
    chosen: Int32[Array, "N k"],
    weights: Float32[Array, "N k"],
    gate_up: Float[Array, "E 2 F D"],
    down: Float[Array, "E D F"],
    *,
    activation: Activation,
    first: int | Int[Array, ""] = 0,
    block: int | None = None,
    split: int | None = None,
    blocks: tuple[int, int, int, int] | None = None,
    stages: int = 4,
    warps: int | None = None,
    interpret: bool = False,
) -> Float32[Array, "N D"]:
    """y[n] = sum_k weights[n, k] * down_e activation(gate_e x[n], up_e x[n]),  e = chosen[n, k] - first, 0 <= e < E.

    As `ops.experts.experts_grouped`, its roundings included. block: rows of tokens in a block, at most PAIRS of
    `experts_order`; an expert's last one takes the smallest of block, block / 2, .. block / split that holds its rows.
    blocks: rows and columns of a weight held at a time by the first product, then by the second.

    Floor: 6 F D bytes for each expert hit, or 6 F D operations for each pair of token and expert. Source: the same.
    """
    E, _, F, D = gate_up.shape
    block = block or _block(chosen.size, E)
    blocks = blocks or ((128, 64, 256, 64) if block > 64 else (64, 128, 64, 128))
    warps = warps or (8 if block > 64 else 4)
    return _run(  # pyright: ignore[reportReturnType]
        x,
        chosen,
        weights,
        first,
        (gate_up,),
        (down,),
        (E, F, D),
        activation,
        block,
        split,
        blocks,
        stages,
        warps,
        interpret,
    )


def experts_many_packed(
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
    block: int | None = None,
    split: int | None = None,
    blocks: tuple[int, int, int, int] = (64, 32, 64, 32),
    stages: int = 3,
    warps: int = 4,
    interpret: bool = False,
) -> Float32[Array, "N D"]:
    """`experts_many` on MXFP4 weights, widened in registers (see `fp4`). blocks count words of eight inputs."""
    E, _, F, half = gate_up_packed.shape
    packed = (fp4.words(gate_up_packed), gate_up_scale), (fp4.words(down_packed), down_scale)
    return _run(  # pyright: ignore[reportReturnType]
        x, chosen, weights, first, *packed, (E, F, 2 * half), activation, block, split, blocks, stages, warps, interpret
    )


def _run(x, chosen, weights, first, gate_up, down, shape, activation, block, split, blocks, stages, warps, interpret):
    (N, k), (E, F, D) = chosen.shape, shape
    pairs, packed = N * k, len(gate_up) == 2
    block = block or _block(pairs, E)
    if block > PAIRS:
        raise ValueError(f"block={block} is more than the {PAIRS} rows that the order has behind its last pair")
    split = split or (4 if block > 64 else 2)
    order, table = _plan(chosen.reshape(-1) - first, E, block, interpret)
    count = table.shape[1]
    params = plgpu.CompilerParams(num_warps=warps, num_stages=stages)
    sizes = tuple(s for s in (16, 32, 64, 128, 256) if max(16, block // split) <= s <= block)
    common = dict(sizes=sizes, interpret=interpret)
    hidden = pl.pallas_call(
        functools.partial(_gate_up, activation=activation, rows=blocks[0], columns=blocks[1], top_k=k, **common),
        out_shape=jax.ShapeDtypeStruct((pairs + block, F), x.dtype),
        grid=(F // blocks[0], count),
        compiler_params=params,
        interpret=interpret,
        name="experts_many_gate_up",
    )(fp4.split(x) if packed else x, order, table, *gate_up)
    outputs = pl.pallas_call(
        functools.partial(_down, rows=blocks[2], columns=blocks[3], **common),
        out_shape=jax.ShapeDtypeStruct((pairs, D), x.dtype),
        grid=(D // blocks[2], count),
        compiler_params=params,
        interpret=interpret,
        name="experts_many_down",
    )(hidden, order, table, *down)
    return weighted_sum(outputs.reshape(N, k, D), chosen, weights, first, E)


def _block(pairs: int, experts: int) -> int:
    """Rows of a block: twice what an expert gets on average, since an expert's last block may be smaller."""
    return max(32, min(128, pl.next_power_of_2(max(1, 2 * pairs // experts))))


def _plan(
    local: Int32[Array, " P"], num_experts: int, block: int, interpret: bool
) -> tuple[Int32[Array, " Q"], Int32[Array, "3 X"]]:
    """The pairs in the order of their experts, and for each block its expert, first row and number of rows."""
    pairs = local.shape[0]
    order, counts = order_by_expert(local, num_experts, interpret=interpret)
    end = jnp.cumsum(counts)
    blocks = -(-counts // block)
    last_block = jnp.cumsum(blocks)
    b = jnp.arange(pairs // block + min(num_experts, pairs), dtype=jnp.int32)
    e = jnp.minimum(jnp.sum(last_block[None, :] <= b[:, None], axis=1, dtype=jnp.int32), num_experts - 1)
    row = (end - counts)[e] + (b - (last_block - blocks)[e]) * block
    rows = jnp.where(b < last_block[-1], jnp.clip(end[e] - row, 0, block), 0)
    return order, jnp.stack([e, row, rows])


def _gate_up(x_ref, order_ref, table_ref, *refs, activation, rows, top_k, sizes, **tile):
    *weight_refs, hidden_ref = refs
    b = pl.program_id(1)
    e, first_row, count = table_ref[0, b], table_ref[1, b], table_ref[2, b]
    row = pl.program_id(0) * rows

    def run(size):
        within = jnp.arange(size, dtype=jnp.int32)
        token = order_ref[pl.ds(first_row, size)] // top_k

        def load_x(at, width):
            shape = (size, width)
            column = at + jnp.arange(width, dtype=jnp.int32)
            place = tuple(jnp.broadcast_to(i, shape) for i in (token[:, None], column[None, :]))
            return plgpu.load(x_ref.at[place], mask=jnp.broadcast_to((within < count)[:, None], shape), other=0.0)

        indices = (e, jnp.int32(0)), (e, jnp.int32(1))
        gate, up = products(weight_refs, indices, row, load_x, x_ref.shape[1], tokens=size, rows=rows, **tile)
        dtype = hidden_ref.dtype
        at = row + jnp.arange(rows, dtype=jnp.int32)
        if len(weight_refs) > 1:
            at = fp4.places(at, hidden_ref.shape[-1])
        _store(hidden_ref, activation(gate.astype(dtype), up.astype(dtype)), first_row + within, at, within < count)

    _in_smallest(sizes, count, run)


def _down(hidden_ref, order_ref, table_ref, *refs, rows, sizes, **tile):
    *weight_refs, out_ref = refs
    b = pl.program_id(1)
    e, first_row, count = table_ref[0, b], table_ref[1, b], table_ref[2, b]
    row = pl.program_id(0) * rows

    def run(size):
        within = jnp.arange(size, dtype=jnp.int32)

        def load_hidden(at, width):
            some = hidden_ref.at[pl.ds(first_row, size), pl.ds(at, width)]
            return plgpu.load(some, mask=(within < count)[:, None], other=0.0)

        (out,) = products(weight_refs, ((e,),), row, load_hidden, hidden_ref.shape[-1], tokens=size, rows=rows, **tile)
        pair = order_ref[pl.ds(first_row, size)]
        _store(out_ref, out.astype(out_ref.dtype), pair, row + jnp.arange(rows, dtype=jnp.int32), within < count)

    _in_smallest(sizes, count, run)


def _in_smallest(sizes, count, run):
    """run(size) with the smallest of the ascending sizes that holds `count` rows; nothing if there are none."""
    for below, size in pairwise((0, *sizes)):
        pl.when((count > below) & (count <= size))(functools.partial(run, size))


def _store(ref, value, at_rows, at_columns, live):
    """ref[at_rows[n], at_columns[r]] = value[r, n] where live[n]."""
    shape = value.shape
    place = tuple(jnp.broadcast_to(i, shape) for i in (at_rows[None, :], at_columns[:, None]))
    plgpu.store(ref.at[place], value, mask=jnp.broadcast_to(live[None, :], shape))
