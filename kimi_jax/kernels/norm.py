"""RMSNorm of few rows, each in one program, with the residual add before it.

The sibling of `ops.norm.rms_norm` and `add_rms_norm`: XLA makes two kernels of a single row, its mean square and its
quotient.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

MOST_ROWS = 64


def supports(x: Float[Array, "*X D"]) -> bool:
    """Whether these can stand in: few rows, short enough to hold whole, long enough to be worth a kernel."""
    return x.size <= MOST_ROWS * x.shape[-1] and 1024 <= x.shape[-1] <= 16384


def rms_norm_rows(
    x: Float[Array, "*X D"], weight: Float[Array, " D"], eps: float, *, warps: int = 8, interpret: bool = False
) -> Float[Array, "*X D"]:
    """weight * cast(x / sqrt(mean_D(x^2) + eps)), in the dtype of x; the roundings of `ops.norm.rms_norm`.

    Floor: the time of a kernel; a row is read once and written once.
    """
    (out,) = _run((x,), weight, eps, warps, interpret)
    return out


def add_rms_norm_rows(
    x: Float[Array, "*X D"],
    y: Float[Array, "*X D"],
    weight: Float[Array, " D"],
    eps: float,
    *,
    warps: int = 8,
    interpret: bool = False,
) -> tuple[Float[Array, "*X D"], Float[Array, "*X D"]]:
    """x + y, and `rms_norm_rows` of it."""
    total, out = _run((x, y), weight, eps, warps, interpret)
    return total, out


def _run(terms, weight, eps, warps, interpret):
    shape, D = terms[0].shape, terms[0].shape[-1]
    rows = [term.reshape(-1, D) for term in terms]
    outs = pl.pallas_call(
        functools.partial(_normalise, terms=len(rows), eps=eps, width=pl.next_power_of_2(D)),
        out_shape=[jax.ShapeDtypeStruct(rows[0].shape, rows[0].dtype)] * len(rows),
        grid=(rows[0].shape[0],),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="add_rms_norm_rows" if len(rows) > 1 else "rms_norm_rows",
    )(*rows, weight)
    return [out.reshape(shape) for out in outs]


def _normalise(*refs, terms, eps, width):
    term_refs, weight_ref, *sum_refs, out_ref = refs[:terms], *refs[terms:]
    row, D = pl.program_id(0), out_ref.shape[1]
    inside = jnp.arange(width, dtype=jnp.int32) < D
    everything = pl.ds(row * 0, width)
    x, *others = [plgpu.load(ref.at[row, everything], mask=inside, other=0.0) for ref in term_refs]
    for other in others:
        x = x + other
    for ref in sum_refs:
        plgpu.store(ref.at[row, everything], x, mask=inside)
    weight = plgpu.load(weight_ref.at[everything], mask=inside, other=0.0)
    wide = x.astype(jnp.float32)
    normed = (wide * lax.rsqrt(jnp.sum(wide * wide) / D + eps)).astype(out_ref.dtype)
    plgpu.store(out_ref.at[row, everything], weight.astype(out_ref.dtype) * normed, mask=inside)
