"""Projections of one input that run together: one kernel for all of them where rows are few."""

from collections.abc import Sequence

from flax import nnx
from jaxtyping import Array, Float

from kimi_jax.ops.linear import project_each
from sharding_rules import Layout
from sharding_rules.axes import BATCH, LENGTH


def project_together(
    layout: Layout, xs: Sequence[Float[Array, "B T _"]], weights: Sequence[nnx.Param]
) -> tuple[Float[Array, "B T *O"], ...]:
    """y_i = W_i x_i for each i, on each rank the rows of W_i that it holds.

    A weight is split along its first axis only (no layout splits the others); every x is whole on every rank. Not left
    to XLA, which would gather the weights in front of a kernel.
    """

    def here(*arrays):
        return project_each(arrays[: len(xs)], arrays[len(xs) :])

    split = [weight.axes[0] for weight in weights]
    out = tuple((BATCH, LENGTH, axis) for axis in split)
    run = layout.per_shard(here, [(BATCH, LENGTH)] * len(xs) + [(axis,) for axis in split], out)
    return run(*xs, *(weight[...] for weight in weights))
