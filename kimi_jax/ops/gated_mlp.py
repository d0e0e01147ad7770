"""A gated feed-forward network on plain arrays; one rank's slice of the hidden width gives its part of the sum."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from kimi_jax.ops.linear import project


def gated_mlp(
    x: Float[Array, "*X D"],
    gate_up: Float[Array, "2 F D"],
    down: Float[Array, "D F"],
    activation: Callable[[Array, Array], Array],
) -> Float32[Array, "*X D"]:
    """y = W_down act(W_gate x, W_up x), accumulated in float32. gate_up stacks W_gate and W_up."""
    hidden = project(x, gate_up)
    return project(activation(hidden[..., 0, :], hidden[..., 1, :]), down, jnp.float32)
