"""The embedding's lookup where every rank holds a stretch of the vocabulary. Knows nothing of layers or layouts."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def embed(
    rows: Float[Array, "W D"], tokens: Int[Array, "*X"], live: Bool[Array, "*X"], axis: Sequence[str]
) -> Float[Array, "*X D"]:
    """E[tokens], summed over the ranks of `axis`: the rank that holds a token's row gives it, the others zeros.

    rows: this rank's stretch of E, the stretches in the order of the ranks. A token that is not `live` gives zeros; one
    beyond the vocabulary the nearest row. Exact: all summands but one are zero.

    Called per shard. Left to XLA, a lookup of a single token becomes a slice, and in front of a slice it gathers all
    of E. Source: Megatron-LM (arXiv 1909.08053), section 3, the input embedding.
    """
    held, ranks = rows.shape[0], jax.lax.axis_size(axis)
    place = jnp.clip(tokens, 0, held * ranks - 1) - jax.lax.axis_index(axis) * held
    mine = live & (place >= 0) & (place < held)
    found = jnp.take(rows, place, axis=0, mode="clip")
    return jax.lax.psum(jnp.where(mine[..., None], found, jnp.zeros((), rows.dtype)), axis)
