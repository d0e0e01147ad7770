"""Projections into an attention's heads and out of them, on each rank its own heads: one kernel where rows are few.

Not left to XLA, which would gather the weights in front of a kernel.
"""

from collections.abc import Sequence

import jax
from flax import nnx
from jaxtyping import Array, Float

from kimi_jax.ops.linear import collect, project_each
from sharding_rules import Layout
from sharding_rules.axes import BATCH, EMBED, LENGTH


def project_together(
    layout: Layout, xs: Sequence[Float[Array, "B T _"]], weights: Sequence[nnx.Param]
) -> tuple[Float[Array, "B T *O"], ...]:
    """y_i = W_i x_i for each i, on each rank the rows of W_i that it holds.

    A weight is split along its first axis only (no layout splits the others); every x is whole on every rank.
    """

    def here(*arrays):
        return project_each(arrays[: len(xs)], arrays[len(xs) :])

    split = [weight.axes[0] for weight in weights]
    out = tuple((BATCH, LENGTH, axis) for axis in split)
    run = layout.per_shard(here, [(BATCH, LENGTH)] * len(xs) + [(axis,) for axis in split], out)
    return run(*xs, *(weight[...] for weight in weights))


def project_out(layout: Layout, x: Float[Array, "B T H V"], weight: nnx.Param) -> Float[Array, "B T D"]:
    """y = sum_h W_h x_h, W [D, H, V]: each rank's heads, and one all-reduce over the ranks that hold heads."""
    heads = weight.axes[1]

    def here(x, weight):
        return jax.lax.psum(collect(x, weight), layout.mesh_axes(heads))

    run = layout.per_shard(here, [(BATCH, LENGTH, heads), (EMBED, heads)], (BATCH, LENGTH, EMBED))
    return run(x, weight[...])
