"""Normalisations: RMS norms and the L2 norm of KDA's queries and keys. Knows nothing of layers or layouts.

Statistics are float32 whatever the activations are.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from kimi_jax.kernels import norm as kernel


def rms_norm(x: Float[Array, "*X D"], weight: Float[Array, "D"], eps: float) -> Float[Array, "*X D"]:
    """weight * cast(x / sqrt(mean_D(x^2) + eps)), in the dtype of x.

    The quotient is float32; it is rounded to the dtype of x before the weight (rounded likewise) multiplies it, which
    is the order of the published modelling code. Fused kernels multiply first: at most one bfloat16 ulp apart.

    Source: Zhang and Sennrich 2019 (arXiv 1910.07467), eq. 4; transformers `KimiLinearRMSNorm.forward`.
    """
    return sum_rms_norm((x,), weight, eps)[1]


def sum_rms_norm(
    terms: Sequence[Float[Array, "*X D"]], weight: Float[Array, "D"], eps: float
) -> tuple[Float[Array, "*X D"], Float[Array, "*X D"]]:
    """h = `sum_terms(terms)` and `rms_norm` of h. On CUDA one kernel for few rows."""

    def op(weight, *terms):
        h = sum_terms(terms)
        return h, _rms_norm(h, weight, eps)

    def in_one_kernel(weight, *terms):
        return kernel.sum_rms_norm_rows(terms, weight, eps)

    if not kernel.supports(terms[0]):
        return op(weight, *terms)
    return lax.platform_dependent(weight, *terms, cuda=in_one_kernel, default=op)


def sum_terms(terms: Sequence[Float[Array, "*X D"]]) -> Float[Array, "*X D"]:
    """The terms' sum, each rounded to the dtype of the first."""
    first, *others = terms
    return sum((term.astype(first.dtype) for term in others), first)


def _rms_norm(x: Float[Array, "*X D"], weight: Float[Array, "D"], eps: float) -> Float[Array, "*X D"]:
    normed = _over_root_mean_square(x.astype(jnp.float32), eps).astype(x.dtype)
    return _along_last(weight.astype(x.dtype), x.ndim) * normed


def l2_norm(x: Float[Array, "*X K"]) -> Float32[Array, "*X K"]:
    """x / sqrt(sum_K(x^2) + 1e-6), float32.

    The 1e-6 is added to the sum, not to the mean: a mean-based norm would need 1e-6 / K. Zero stays zero.

    Source: flash-linear-attention `fla/modules/l2norm.py`.
    """
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def gated_rms_norm(
    x: Float32[Array, "*X V"], gate: Float[Array, "*X V"], weight: Float[Array, "V"], eps: float
) -> Float32[Array, "*X V"]:
    """x / sqrt(mean_V(x^2) + eps) * weight * sigmoid(gate), float32 throughout; the caller casts.

    KDA's output norm: one mean per head (the last axis is one head's V), one weight shared by all heads, and a sigmoid
    where other gated norms have a SiLU.

    Source: Kimi Linear (arXiv 2510.26692), section 4; flash-linear-attention `FusedRMSNormGated(activation="sigmoid")`.
    """
    weight = _along_last(weight.astype(jnp.float32), x.ndim)
    return _over_root_mean_square(x, eps) * weight * jax.nn.sigmoid(gate.astype(jnp.float32))


def _over_root_mean_square(x: Float32[Array, "*X D"], eps: float) -> Float32[Array, "*X D"]:
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def _along_last(weight: Float[Array, "D"], rank: int) -> Float[Array, "... D"]:
    """[D] with leading axes of one, so that it broadcasts where rank promotion is an error."""
    return weight.reshape((1,) * (rank - 1) + weight.shape)
