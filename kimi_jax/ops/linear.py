"""Products with weights in the checkpoint's order, y = W x, as one plain matrix product each.

Weights are stored [out..., in] or [out, in...]; both sides are flattened to two dimensions before the product, because
a product with several free dimensions makes XLA transpose (and copy) the weight first. A sharded axis must be the first
of the ones that are merged, so that flattening keeps it whole.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kimi_jax.kernels import project_few as kernel


def project(x: jax.Array, weight: jax.Array, out_dtype: DTypeLike | None = None) -> jax.Array:
    """y[n..., o...] = sum_d x[n..., d] weight[o..., d]: from one axis to any number of them.

    out_dtype: of the accumulated result, default the dtype of x.
    """
    flat = _product(x.reshape(-1, x.shape[-1]), weight.reshape(-1, weight.shape[-1]), out_dtype or x.dtype)
    return flat.reshape(*x.shape[:-1], *weight.shape[:-1])


def project_each(xs: Sequence[jax.Array], weights: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """`project` of each x by its weight; the leading axes of all x are alike. On CUDA one kernel for few rows."""

    def op(*arrays):
        return tuple(map(project, arrays[: len(xs)], arrays[len(xs) :]))

    def in_one_kernel(*arrays):
        flat = [array.reshape(-1, array.shape[-1]) for array in arrays]
        products = kernel.project_few(flat[: len(xs)], flat[len(xs) :])
        return tuple(
            y.reshape(*x.shape[:-1], *weight.shape[:-1]) for x, weight, y in zip(xs, weights, products, strict=True)
        )

    if not all(kernel.supports(x, weight) for x, weight in zip(xs, weights, strict=True)):
        return op(*xs, *weights)
    return jax.lax.platform_dependent(*xs, *weights, cuda=in_one_kernel, default=op)


def collect(x: jax.Array, weight: jax.Array, out_dtype: DTypeLike | None = None) -> jax.Array:
    """y[n..., o] = sum_i x[n..., i...] weight[o, i...]: the weight's trailing axes, several at once, to one."""
    inner = weight.ndim - 1
    size = math.prod(weight.shape[1:])
    flat = _product(x.reshape(-1, size), weight.reshape(-1, size), out_dtype or x.dtype)
    return flat.reshape(*x.shape[: x.ndim - inner], weight.shape[0])


def per_head(x: jax.Array, weight: jax.Array, *, over: int) -> jax.Array:
    """y[b, t, h, o] = sum_i x[b, t, h, i] weight[h, o, i]: each head by its own matrix.

    over: which axis of the weight is summed, 2 (as written) or 1 (weight[h, i, o]).
    """
    B, T, H, _ = x.shape
    flat = x.reshape(B * T, H, -1).swapaxes(0, 1)
    out = jax.lax.dot_general(flat, weight, (((2,), (over,)), ((0,), (0,))))
    return out.swapaxes(0, 1).reshape(B, T, H, -1)


def _product(x: jax.Array, weight: jax.Array, out_dtype: DTypeLike) -> jax.Array:
    dtype = jnp.dtype(out_dtype)
    return jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
