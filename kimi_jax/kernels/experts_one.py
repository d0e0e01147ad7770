"""The routed experts for a single token: matrix-vector products, bound by the bytes of its k experts.

The sibling of `ops.experts.experts_grouped` where one token is all there is. Nothing is padded to a matrix unit's tile,
and the second product weighs and sums what the experts give: nothing of it goes through memory.
"""

import functools
from collections.abc import Callable
from math import gcd

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int, Int32

from kimi_jax.kernels.approximate import functions

Activation = Callable[[Array, Array], Array]


def experts_one(
    x: Float[Array, "1 D"],
    chosen: Int32[Array, "1 k"],
    weights: Float32[Array, "1 k"],
    gate_up: Float[Array, "E 2 F D"],
    down: Float[Array, "E D F"],
    shared: tuple[Float[Array, "2 G D"], Float[Array, "D G"]] | None = None,
    *,
    activation: Activation,
    first: int | Int[Array, ""] = 0,
    rows: tuple[int, int] = (1, 1),
    columns: tuple[int, int] = (256, 256),
    warps: tuple[int, int] = (1, 1),
    interpret: bool = False,
) -> Float32[Array, "1 D"]:
    """y = sum_k weights[k] * down_e activation(gate_e x, up_e x),  e = chosen[k] - first, 0 <= e < E.

    As `experts_few` for one token, its roundings included, and the order of k. A program takes `rows` rows of the
    result, `columns` of a weight at a time; each pair is for the first product, then the second.

    Floor: 6 F D bytes for each expert that the token chose.
    """
    math = functions(interpret=interpret)
    (_, k), D, F = chosen.shape, x.shape[1], down.shape[2]
    first = jnp.asarray(first, jnp.int32).reshape(1)
    more = 0 if shared is None else 1
    shared_gate_up, shared_down = ((), ()) if shared is None else ((shared[0],), (shared[1],))
    hidden = pl.pallas_call(
        functools.partial(_gate_up, activation=activation, rows=rows[0], columns=columns[0], math=math),
        out_shape=jax.ShapeDtypeStruct((k + more, F), x.dtype),
        grid=(F // rows[0], k + more),
        compiler_params=plgpu.CompilerParams(num_warps=warps[0], num_stages=1),
        interpret=interpret,
        name="experts_one_gate_up",
    )(x, chosen, first, gate_up, *shared_gate_up)
    return pl.pallas_call(
        functools.partial(_down, rows=rows[1], columns=columns[1], math=math),
        out_shape=jax.ShapeDtypeStruct((1, D), jnp.float32),
        grid=(D // rows[1],),
        compiler_params=plgpu.CompilerParams(num_warps=warps[1], num_stages=1),
        interpret=interpret,
        name="experts_one_down",
    )(hidden, chosen, weights, first, down, *shared_down)


def _gate_up(x_ref, chosen_ref, first_ref, gate_up_ref, *refs, activation, rows, columns, math):
    *shared_ref, hidden_ref = refs
    choice, k, dtype = pl.program_id(1), chosen_ref.shape[1], hidden_ref.dtype
    row = pl.program_id(0) * rows

    def run(ref, *index):
        parts = [(*index, jnp.int32(part)) for part in (0, 1)]
        gate, up = _products(ref, parts, row, x_ref, choice * 0, rows=rows, columns=columns, math=math)
        hidden = activation(gate.astype(dtype), up.astype(dtype))
        plgpu.store(hidden_ref.at[choice, pl.ds(row, rows)], hidden)

    if shared_ref:
        pl.when((choice == k) & (row < shared_ref[0].shape[1]))(lambda: run(shared_ref[0]))
    expert = chosen_ref[0, jnp.minimum(choice, k - 1)] - first_ref[0]
    held = (choice < k) & (expert >= 0) & (expert < gate_up_ref.shape[0])
    pl.when(held)(lambda: run(gate_up_ref, expert))


def _down(hidden_ref, chosen_ref, weights_ref, first_ref, down_ref, *refs, rows, columns, math):
    *shared_ref, out_ref = refs
    row, k, dtype = pl.program_id(0) * rows, chosen_ref.shape[1], hidden_ref.dtype
    run = functools.partial(_products, rows=rows, columns=columns, math=math)
    total = jnp.zeros((rows,), jnp.float32)
    for choice in range(k):  # what is not held is not read: a branch would make each expert wait for the one before
        expert = chosen_ref[0, choice] - first_ref[0]
        held = (expert >= 0) & (expert < down_ref.shape[0])
        (out,) = run(down_ref, [(jnp.where(held, expert, 0),)], row, hidden_ref, jnp.int32(choice), mask=held)
        total += jnp.where(held, weights_ref[0, choice] * out.astype(dtype).astype(jnp.float32), 0.0)
    if shared_ref:
        total += run(shared_ref[0], [()], row, hidden_ref, jnp.int32(k))[0]
    plgpu.store(out_ref.at[row * 0, pl.ds(row, rows)], total)


def _products(ref, indices, row, x_ref, x_row, *, rows, columns, math, mask=True):
    """sum_c ref[*index, row + r, c] x[x_row, c] for each index, float32 [rows]; where the mask is False, 0, unread."""
    width = ref.shape[-1]
    columns = gcd(columns, width)
    mask = jnp.broadcast_to(jnp.asarray(mask), (rows, columns))
    sums = [jnp.zeros((rows, columns), jnp.float32)] * len(indices)
    for at in range(0, width, columns):
        column = jnp.broadcast_to((at + jnp.arange(columns, dtype=jnp.int32))[None, :], (rows, columns))
        # x where the weight's columns are: nothing to exchange
        x = plgpu.load(x_ref.at[jnp.full_like(column, x_row), column], mask=mask, other=0.0)
        for i, index in enumerate(indices):
            some = ref.at[(*index, pl.ds(row, rows), pl.ds(at, columns))]
            sums[i] = math.add_product(sums[i], plgpu.load(some, mask=mask, other=0.0), x)
    return [jnp.sum(total, axis=1) for total in sums]
