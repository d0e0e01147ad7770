"""Attention Residuals, Kimi K3's mix of earlier sums of the residual stream. Knows nothing of layers or blocks'
sizes."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32


def attn_res(
    blocks: Sequence[Float[Array, "B T D"]],
    h: Float[Array, "B T D"],
    norm: Float[Array, "D"],
    proj: Float[Array, "D"],
    eps: float,
) -> Float[Array, "B T D"]:
    """sum_i softmax_i(e)_i V_i,  e_i = proj . (norm * V_i / sqrt(mean_D(V_i^2) + eps)),  V = (*blocks, h).

    Per token; the mixed values are not normalised. float32 throughout, rounded once to the dtype of h. Without blocks
    it is h. `norm` and `proj` meet in a single vector, and the sources are read where they lie, not stacked.

    Source: Attention Residuals (Kimi Team, 2026), as used by Kimi K3's modelling code; no 1 / sqrt(D), no temperature.
    """
    sources = [*blocks, h]
    query = norm.astype(jnp.float32) * proj.astype(jnp.float32)
    shares = jax.nn.softmax(jnp.stack([_score(source, query, eps) for source in sources]), axis=0)
    mix = sum(share[..., None] * source.astype(jnp.float32) for share, source in zip(shares, sources, strict=True))
    return mix.astype(h.dtype)  # pyright: ignore[reportAttributeAccessIssue]


def _score(source: Float[Array, "B T D"], query: Float32[Array, "D"], eps: float) -> Float32[Array, "B T"]:
    source = source.astype(jnp.float32)
    product = jnp.einsum("btd,d->bt", source, query, precision=lax.Precision.HIGHEST)
    return product * lax.rsqrt(jnp.mean(source * source, axis=-1) + eps)
