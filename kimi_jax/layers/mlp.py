"""The dense feed-forward block."""

from collections.abc import Callable
from functools import partial

import jax
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from kimi_jax.config import Config
from kimi_jax.layers.named import declare
from kimi_jax.ops.activations import situ, swiglu
from kimi_jax.ops.gated_mlp import gated_mlp
from sharding_rules import Layout
from sharding_rules.axes import EMBED, HIDDEN


def activation(config: Config) -> Callable[[Array, Array], Array]:
    """The gated activation (gate, up) -> hidden that the configuration names."""
    if config.hidden_act == "silu":
        return swiglu
    return partial(situ, beta=config.situ_beta, linear_beta=config.situ_linear_beta)


class MLP(nnx.Module):
    """y = W_down act(W_gate x, W_up x), the hidden width split over the ranks; one all-reduce."""

    def __init__(self, config: Config, layout: Layout, dtype: DTypeLike):
        F, D = config.intermediate_size, config.hidden_size
        self.config, self.layout = config, layout
        self.gate_up = declare((2, F, D), (None, HIDDEN, EMBED), dtype)
        self.down = declare((D, F), (EMBED, HIDDEN), dtype)

    def __call__(self, x: Float[Array, "B T D"]) -> Float32[Array, "B T D"]:
        axis, act = self.layout.mesh_axes(HIDDEN), activation(self.config)

        def here(x, gate_up, down):
            return jax.lax.psum(gated_mlp(x, gate_up, down, act), axis)

        with jax.named_scope("mlp"):
            run = self.layout.per_shard(here, [(), (None, HIDDEN), (EMBED, HIDDEN)], ())
            return run(x, self.gate_up[...], self.down[...])
