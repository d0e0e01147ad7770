"""The routed experts for a single token: matrix-vector products, bound by the bytes of its k experts.

The sibling of `ops.experts.experts_grouped` where one token is all there is. Nothing is padded to a tile of the matrix
units, and the second product weighs and sums what the experts give, which never goes through memory.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int, Int32

from kimi_jax.kernels.approximate import functions
from kimi_jax.kernels.experts_few import Activation


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
    columns: tuple[int, int] = (256, 1024),
    interpret: bool = False,
) -> Float32[Array, "1 D"]:
    """y = sum_k weights[k] * down_e activation(gate_e x, up_e x),  e = chosen[k] - first, 0 <= e < E.

    As `experts_few` for one token: its roundings, its order of the k, its `shared`. A program is one warp and gives one
    number of the hidden or of the result; columns: of a weight that it reads at a time, for the first product and for
    the second.

    Floor: 6 F D bytes for each expert that the token chose.
    """
    (_, k), D, F = chosen.shape, x.shape[1], down.shape[2]
    first = jnp.asarray(first, jnp.int32).reshape(1)
    experts = k if shared is None else k + 1
    shared_gate_up, shared_down = ((), ()) if shared is None else ((shared[0],), (shared[1],))
    fast, params = functions(interpret=interpret), plgpu.CompilerParams(num_warps=1, num_stages=1)
    gate_up_sums, down_sums = (functools.partial(_sums, columns=some, fast=fast) for some in columns)
    call = functools.partial(pl.pallas_call, compiler_params=params, interpret=interpret)
    hidden = call(
        functools.partial(_gate_up, activation=activation, sums=gate_up_sums),
        out_shape=jax.ShapeDtypeStruct((experts, F), x.dtype),
        grid=(F, experts),
        name="experts_one_gate_up",
    )(x, chosen, first, gate_up, *shared_gate_up)
    return call(
        functools.partial(_down, sums=down_sums),
        out_shape=jax.ShapeDtypeStruct((1, D), jnp.float32),
        grid=(D,),
        name="experts_one_down",
    )(hidden, chosen, weights, first, down, *shared_down)


def _gate_up(x_ref, chosen_ref, first_ref, gate_up_ref, *refs, activation, sums):
    *shared_ref, hidden_ref = refs
    row, choice = pl.program_id(0), pl.program_id(1)
    k, dtype, gate, up = chosen_ref.shape[1], hidden_ref.dtype, jnp.int32(0), jnp.int32(1)

    def run(ref, *expert):
        rows = [(ref, (*expert, part, row)) for part in (gate, up)]
        gate_sum, up_sum = sums(rows, (x_ref, (jnp.int32(0),)))
        hidden_ref[choice, row] = activation(gate_sum.astype(dtype), up_sum.astype(dtype))

    if shared_ref:
        pl.when((choice == k) & (row < shared_ref[0].shape[1]))(lambda: run(shared_ref[0]))
    expert = chosen_ref[0, jnp.minimum(choice, k - 1)] - first_ref[0]
    held = (choice < k) & (expert >= 0) & (expert < gate_up_ref.shape[0])
    pl.when(held)(lambda: run(gate_up_ref, expert))


def _down(hidden_ref, chosen_ref, weights_ref, first_ref, down_ref, *refs, sums):
    *shared_ref, out_ref = refs
    row, k, dtype = pl.program_id(0), chosen_ref.shape[1], hidden_ref.dtype
    total = jnp.float32(0)
    for choice in range(k):
        # What is not held is not read, its hidden row was never written and may be NaN. Not a branch, in which each
        # expert would wait for the one before.
        expert = chosen_ref[0, choice] - first_ref[0]
        held = (expert >= 0) & (expert < down_ref.shape[0])
        (out,) = sums([(down_ref, (jnp.where(held, expert, 0), row))], (hidden_ref, (jnp.int32(choice),)), mask=held)
        total += jnp.where(held, weights_ref[0, choice] * out.astype(dtype).astype(jnp.float32), 0.0)
    if shared_ref:
        total += sums([(shared_ref[0], (row,))], (hidden_ref, (jnp.int32(k),)))[0]
    out_ref[0, row] = total


def _sums(rows, x, *, columns, fast, mask=True):
    """sum_c row[c] x[c] for each row, float32. rows, x: pairs of a reference and an index, which name the vector
    reference[*index, :]. Where the mask is False, nothing is read and the sums are 0.
    """
    width = rows[0][0].shape[-1]
    columns = math.gcd(columns, width)
    mask = jnp.broadcast_to(jnp.asarray(mask), (columns,))
    totals = [jnp.zeros((columns,), jnp.float32)] * len(rows)
    for at in range(0, width, columns):
        some = pl.ds(at, columns)
        x_part, *parts = (plgpu.load(ref.at[(*index, some)], mask=mask, other=0.0) for ref, index in (x, *rows))
        totals = [fast.multiply_add_bfloat16(part, x_part, total) for total, part in zip(totals, parts, strict=True)]
    return [jnp.sum(total) for total in totals]
