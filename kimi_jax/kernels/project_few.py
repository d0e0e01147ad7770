"""Several products of few rows with weights, in one kernel: bound by the bytes of the weights, each read once.

The sibling of `ops.linear.project` for decode, where a small weight takes less time than the start of its own kernel.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from kimi_jax.kernels.approximate import functions
from kimi_jax.kernels.device import hopper_or_newer

MOST_ROWS = 64
COLUMNS = 128  # of a weight: what every width must be a multiple of


def supports(x: Float[Array, "*N D"], weight: Float[Array, "*O D"]) -> bool:
    """Whether this kernel can stand in: few rows, in bfloat16, of a width in whole tiles."""
    few = x.size <= MOST_ROWS * x.shape[-1] and x.dtype == weight.dtype == jnp.bfloat16
    return few and x.shape[-1] % COLUMNS == 0 and hopper_or_newer()


def project_few(
    xs: Sequence[Float[Array, "N _"]],
    weights: Sequence[Float[Array, "_ _"]],
    *,
    rows: int | None = None,
    columns: int | None = None,
    stages: int | None = None,
    warps: int | None = None,
    interpret: bool = False,
) -> Sequence[Float[Array, "N _"]]:
    """y_i[n, o] = sum_d x_i[n, d] W_i[o, d] for each i, summed in float32, in the dtype of x. O and D differ with i.

    A program takes `rows` rows of one weight, `columns` at a time: a single x by multiplying and adding, more by matrix
    products, `stages` tiles in flight. What is not given is what was fastest on an H200, for the first D.

    Floor: 2 O D bytes a weight.
    """
    N, D = xs[0].shape
    if N == 1:
        kernel = functools.partial(_one_row, fast=functions(interpret=interpret))
        best = (1 if D > 1024 else 16, 256, 1, 1)
    else:
        kernel, best = _some_rows, (32, 128, 5, 2) if D > 1024 else (64, 128, 5, 4)
    rows, columns, stages, warps = (x or y for x, y in zip((rows, columns, stages, warps), best, strict=True))
    tiles = [pl.cdiv(weight.shape[0], rows) for weight in weights]
    return pl.pallas_call(
        functools.partial(_each, run=functools.partial(kernel, rows=rows, columns=columns), tiles=tiles),
        out_shape=[jax.ShapeDtypeStruct((N, weight.shape[0]), x.dtype) for x, weight in zip(xs, weights, strict=True)],
        grid=(sum(tiles),),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name="project_few",
    )(*xs, *weights)


def _each(*refs, run, tiles):
    """run(x, weight, result, the tile's number) of the weight whose tiles this program is among."""
    count = len(tiles)
    program, before = pl.program_id(0), 0
    for i, own in enumerate(tiles):
        here = (program >= before) & (program < before + own)
        pl.when(here)(functools.partial(run, *refs[i::count], program - before))
        before += own


def _one_row(x_ref, weight_ref, out_ref, tile, *, rows, columns, fast):
    O, D = weight_ref.shape
    columns = math.gcd(columns, D)
    row = tile * rows + jnp.arange(rows, dtype=jnp.int32)
    inside = row < O
    sums = jnp.zeros((rows, columns), jnp.float32)
    for at in range(0, D, columns):
        weight = _load_rows(weight_ref, tile, inside, at, rows, columns)
        column = jnp.broadcast_to((at + jnp.arange(columns, dtype=jnp.int32))[None, :], (rows, columns))
        x = plgpu.load(x_ref.at[jnp.zeros_like(column), column])  # where the weight's columns are: nothing to exchange
        sums = fast.multiply_add_bfloat16(weight, x, sums)
    plgpu.store(
        out_ref.at[jnp.int32(0), pl.ds(tile * rows, rows)], jnp.sum(sums, axis=1).astype(out_ref.dtype), mask=inside
    )


def _some_rows(x_ref, weight_ref, out_ref, tile, *, rows, columns):
    (N, D), O = x_ref.shape, weight_ref.shape[0]
    columns, padded = math.gcd(columns, D), max(16, pl.next_power_of_2(N))
    inside = tile * rows + jnp.arange(rows, dtype=jnp.int32) < O
    live = jnp.arange(padded, dtype=jnp.int32) < N
    everyone = pl.ds(tile * 0, padded)

    def add(i, sums):
        at = i * columns
        x = plgpu.load(x_ref.at[everyone, pl.ds(at, columns)], mask=live[:, None], other=0.0)
        weight = _load_rows(weight_ref, tile, inside, at, rows, columns)
        return sums + lax.dot_general(weight, x, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)

    sums = lax.fori_loop(0, D // columns, add, jnp.zeros((rows, padded), jnp.float32))
    some = out_ref.at[everyone, pl.ds(tile * rows, rows)]
    plgpu.store(some, sums.T.astype(out_ref.dtype), mask=live[:, None] & inside[None, :])


def _load_rows(ref, tile, inside, at, rows, columns):
    mask = jnp.broadcast_to(inside[:, None], (rows, columns))
    return plgpu.load(ref.at[pl.ds(tile * rows, rows), pl.ds(at, columns)], mask=mask, other=0.0)
