"""The mixture of experts: whole experts on their ranks, every rank sees every token, one all-reduce a layer.

The router is replicated. Routed and shared experts run in one per-shard region and are summed in float32 before the
all-reduce. `LatentMoE` is K3's: the routed experts work in a narrower space, with a norm after their sum.
"""

from functools import partial

import jax
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kimi_jax.config import Config
from kimi_jax.layers.mlp import activation
from kimi_jax.layers.named import declare
from kimi_jax.ops.experts import experts_grouped
from kimi_jax.ops.gated_mlp import gated_mlp
from kimi_jax.ops.routing import route
from sharding_rules import Layout
from sharding_rules.axes import BATCH, EMBED, EXPERTS, HIDDEN, LENGTH


class MoE(nnx.Module):
    """Sigmoid top-k routing over E experts, plus shared experts on the same input (Kimi Linear).

        s = sigmoid(W_r x)    I = top-k of s + bias    w = s[I] / sum s[I] * scale
        y = sum_{i in I} w_i expert_i(x) + shared(x)

    Source: DeepSeek-V3 (arXiv 2412.19437), section 2.1.2; Kimi Linear (arXiv 2510.26692).
    """

    def __init__(self, config: Config, layout: Layout, dtype: DTypeLike):
        E, F, D = config.num_experts, config.moe_intermediate_size, config.hidden_size
        Fs = F * config.num_shared_experts
        self.config, self.layout = config, layout
        self.router = declare((E, D), (None, EMBED), dtype)
        self.router_bias = declare((E,), (None,), dtype, init="router_bias")
        self.experts_gate_up = declare((E, 2, F, D), (EXPERTS, None, None, None), dtype)
        self.experts_down = declare((E, D, F), (EXPERTS, None, None), dtype)
        self.shared_gate_up = declare((2, Fs, D), (None, HIDDEN, EMBED), dtype)
        self.shared_down = declare((D, Fs), (EMBED, HIDDEN), dtype)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        config, layout = self.config, self.layout
        tokens = x.reshape(-1, x.shape[-1])
        with jax.named_scope("route"):
            chosen, weights = route(
                tokens, self.router[...], self.router_bias[...], top_k=config.num_experts_per_token,
                renormalize=config.moe_renormalize, scale=config.routed_scaling_factor,
                weigh_biased=config.router_weight_uses_bias,
            )  # fmt: skip
        with jax.named_scope("experts"):
            run = layout.per_shard(
                partial(_experts_here, axis=layout.mesh_axes(EXPERTS), activation=activation(config)),
                [(), (), (), (EXPERTS,), (EXPERTS,), (None, HIDDEN), (None, HIDDEN)],
                (),
            )
            y = run(
                tokens, chosen, weights, self.experts_gate_up[...], self.experts_down[...], self.shared_gate_up[...],
                self.shared_down[...],
            )  # fmt: skip
        return layout.constrain(y.astype(x.dtype).reshape(x.shape), BATCH, LENGTH, EMBED)


def _experts_here(
    x: Float[Array, "N D"],
    chosen: Int[Array, "N k"],
    weights: Float[Array, "N k"],
    gate_up: Float[Array, "E 2 F D"],
    down: Float[Array, "E D F"],
    shared_gate_up: Float[Array, "2 Fs D"],
    shared_down: Float[Array, "D Fs"],
    *,
    axis: tuple[str, ...],
    activation,
) -> Float[Array, "N D"]:
    """One rank's routed experts and its slice of the shared ones, summed with everybody's in float32."""
    first = jax.lax.axis_index(axis) * gate_up.shape[0]
    routed = experts_grouped(x, chosen, weights, gate_up, down, activation=activation, first=first)
    return jax.lax.psum(routed + gated_mlp(x, shared_gate_up, shared_down, activation), axis)
