"""RMSNorm of few rows, each in one program, with the sum before it.

The sibling of `ops.norm.sum_rms_norm`: XLA makes two kernels of a single row, its mean square and its quotient.
"""

import functools
from collections.abc import Sequence

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


def sum_rms_norm_rows(
    terms: Sequence[Float[Array, "*X D"]],
    weight: Float[Array, " D"],
    eps: float,
    *,
    warps: int = 8,
    interpret: bool = False,
) -> tuple[Float[Array, "*X D"], Float[Array, "*X D"]]:
    """h = the sum of the terms; h and weight * cast(h / sqrt(mean_D(h^2) + eps)), in the dtype of the first term.

    The roundings are those of `ops.norm.sum_rms_norm`. A single term is its own sum, and not written again.

    Floor: the time of a kernel; each term is read once, each result written once.
    """
    shape, D = terms[0].shape, terms[0].shape[-1]
    rows = [term.reshape(-1, D) for term in terms]
    *total, normed = pl.pallas_call(
        functools.partial(_normalise, terms=len(rows), eps=eps, width=pl.next_power_of_2(D)),
        out_shape=[jax.ShapeDtypeStruct(rows[0].shape, rows[0].dtype)] * min(len(rows), 2),
        grid=(rows[0].shape[0],),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="sum_rms_norm_rows" if len(rows) > 1 else "rms_norm_rows",
    )(*rows, weight)
    h = total[0].reshape(shape) if total else terms[0]
    return h, normed.reshape(shape)


def _normalise(*refs, terms, eps, width):
    term_refs, weight_ref, *sum_refs, out_ref = refs[:terms], *refs[terms:]
    row, D = pl.program_id(0), out_ref.shape[1]
    inside = jnp.arange(width, dtype=jnp.int32) < D
    everything = pl.ds(row * 0, width)
    # The weight first: nothing is read ahead of a write, and it takes longest, having most often left the cache.
    weight = plgpu.load(weight_ref.at[everything], mask=inside, other=0.0)
    x, *others = [plgpu.load(ref.at[row, everything], mask=inside, other=0.0) for ref in term_refs]
    for other in others:
        x = x + other.astype(x.dtype)
    for ref in sum_refs:
        plgpu.store(ref.at[row, everything], x, mask=inside)
    wide = x.astype(jnp.float32)
    normed = (wide * lax.rsqrt(jnp.sum(wide * wide) / D + eps)).astype(out_ref.dtype)
    plgpu.store(out_ref.at[row, everything], weight.astype(out_ref.dtype) * normed, mask=inside)
