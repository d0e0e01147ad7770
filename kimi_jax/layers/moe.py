"""The mixture of experts: whole experts on their ranks, every rank sees every token, one all-reduce a layer.

The router is replicated. Routed and shared experts run in one per-shard region and cross the ranks in one all-reduce of
float32. `LatentMoE` is K3's: its routed experts work in a narrower space, with a norm after their sum. The `Packed...`
classes hold their experts as MXFP4 and widen a tile at a time.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

from kimi_jax.config import MXFP4_GROUP, Config
from kimi_jax.layers.mlp import activation
from kimi_jax.layers.named import declare
from kimi_jax.ops.experts import experts, experts_and_shared, experts_of_packed
from kimi_jax.ops.gated_mlp import gated_mlp
from kimi_jax.ops.linear import project
from kimi_jax.ops.norm import rms_norm
from kimi_jax.ops.routing import margins, route
from sharding_rules import Layout
from sharding_rules.axes import BATCH, EMBED, EXPERTS, HIDDEN, LATENT_MOE, LENGTH

Weights = tuple[Array, ...]


class MoE(nnx.Module):
    """Sigmoid top-k routing over E experts, plus shared experts on the same input (Kimi Linear).

        s = sigmoid(W_r x)    I = top-k of s + bias    w = s[I] / sum s[I] * scale
        y = sum_{i in I} w_i expert_i(x) + shared(x)

    Source: DeepSeek-V3 (arXiv 2412.19437), section 2.1.2; Kimi Linear (arXiv 2510.26692).
    """

    bias_dtype: DTypeLike | None = None  # of the router's bias as the hub stores it; None: the model's

    def __init__(self, config: Config, layout: Layout, dtype: DTypeLike):
        E, D, Fs = config.num_experts, config.hidden_size, config.shared_intermediate_size
        self.config, self.layout = config, layout
        self.router = declare((E, D), (None, EMBED), dtype)
        self.router_bias = declare((E,), (None,), self.bias_dtype or dtype, init="router_bias")
        self._declare_experts(config, dtype)
        self.shared_gate_up = declare((2, Fs, D), (None, HIDDEN, EMBED), dtype)
        self.shared_down = declare((D, Fs), (EMBED, HIDDEN), dtype)

    def __call__(self, x: Float[Array, "B T D"]) -> Float32[Array, "B T D"]:
        tokens = x.reshape(-1, x.shape[-1])
        chosen, weights = self._route(tokens)
        y = self._experts(tokens, tokens, chosen, weights)
        return self.layout.constrain(y.reshape(x.shape), BATCH, LENGTH, EMBED)

    def margins(self, x: Float[Array, "B T D"]) -> Float32[Array, "B T"]:
        """How near each token is to another expert: `ops.routing.margins`."""
        tokens, k = x.reshape(-1, x.shape[-1]), self.config.num_experts_per_token
        return margins(tokens, self.router[...], self.router_bias[...], top_k=k).reshape(x.shape[:2])

    def _declare_experts(self, config: Config, dtype: DTypeLike) -> None:
        E, F, Z = config.num_experts, config.moe_intermediate_size, config.expert_hidden_size
        self.experts_gate_up = declare((E, 2, F, Z), (EXPERTS, None, None, None), dtype)
        self.experts_down = declare((E, Z, F), (EXPERTS, None, None), dtype)

    def _expert_weights(self) -> Weights:
        """The arrays of the routed experts, each split by experts."""
        return self.experts_gate_up[...], self.experts_down[...]

    def _route(self, tokens: Float[Array, "N D"]) -> tuple[Int[Array, "N k"], Float32[Array, "N k"]]:
        config = self.config
        with jax.named_scope("route"):
            return route(
                tokens,
                self.router[...],
                self.router_bias[...],
                top_k=config.num_experts_per_token,
                renormalize=config.moe_renormalize,
                scale=config.routed_scaling_factor,
                weigh_biased=config.router_weight_uses_bias,
            )

    def _experts(self, routed_in, shared_in, chosen, weights) -> Float32[Array, "N *D"]:
        """Each rank's routed experts and its slice of the shared ones, joined and summed over the ranks."""
        axis, held = self.layout.mesh_axes(EXPERTS), self._expert_weights()

        def here(routed_in, shared_in, chosen, weights, shared_gate_up, shared_down, *held):
            first = jax.lax.axis_index(axis) * held[0].shape[0]
            shared = shared_gate_up, shared_down
            return jax.lax.psum(self._both(routed_in, shared_in, chosen, weights, held, shared, first), axis)

        split = [(), (), (), (), (None, HIDDEN), (EMBED, HIDDEN), *[(EXPERTS,)] * len(held)]
        with jax.named_scope("experts"):
            run = self.layout.per_shard(here, split, ())
            return run(routed_in, shared_in, chosen, weights, self.shared_gate_up[...], self.shared_down[...], *held)

    def _both(self, routed_in, shared_in, chosen, weights, held, shared, first) -> Float32[Array, "N *D"]:
        """One rank's part of `_experts`."""
        del shared_in  # the same
        act = activation(self.config)
        return experts_and_shared(routed_in, chosen, weights, *held, *shared, activation=act, first=first)


class LatentMoE(MoE):
    """MoE whose routed experts work in a narrower latent space (Kimi K3).

        z = W_down x      y = W_up RMS( sum_{i in I} w_i expert_i(z) ) + shared(x)

    The router and the shared experts see x itself. Both sums cross the ranks side by side in one all-reduce.

    Source: Kimi K3 technical report, section on latent MoE.
    """

    run_experts = staticmethod(experts)
    bias_dtype = jnp.float32

    def __init__(self, config: Config, layout: Layout, dtype: DTypeLike):
        super().__init__(config, layout, dtype)
        Z, D = config.expert_hidden_size, config.hidden_size
        self.latent_down = declare((Z, D), (LATENT_MOE, EMBED), dtype)
        self.latent_norm = declare((Z,), (None,), dtype, init="ones")
        self.latent_up = declare((D, Z), (EMBED, LATENT_MOE), dtype)

    def __call__(self, x: Float[Array, "B T D"]) -> Float32[Array, "B T D"]:
        layout, tokens, Z = self.layout, x.reshape(-1, x.shape[-1]), self.config.expert_hidden_size
        chosen, weights = self._route(tokens)
        with jax.named_scope("latent_down"):
            z = layout.constrain(project(tokens, self.latent_down[...]), None, LATENT_MOE)
            z = layout.constrain(z, None, None)
        both = self._experts(z, tokens, chosen, weights)
        with jax.named_scope("latent_up"):
            routed = rms_norm(both[:, :Z].astype(x.dtype), self.latent_norm[...], self.config.rms_norm_eps)
            routed = layout.constrain(routed, None, None)  # else a split W_up would split the norm and its input too
            y = project(routed, self.latent_up[...], jnp.float32) + both[:, Z:]
        return layout.constrain(y.reshape(x.shape), BATCH, LENGTH, EMBED)

    def _both(self, routed_in, shared_in, chosen, weights, held, shared, first) -> Float32[Array, "N *D"]:
        act = activation(self.config)
        routed = self.run_experts(routed_in, chosen, weights, *held, activation=act, first=first)
        return jnp.concatenate([routed, gated_mlp(shared_in, shared[0], shared[1], act)], axis=-1)


class PackedLatentMoE(LatentMoE):
    """LatentMoE with routed experts in MXFP4, as K3's checkpoint stores them: pairs of 4-bit values and block
    scales."""

    run_experts = staticmethod(experts_of_packed)

    def _declare_experts(self, config: Config, dtype: DTypeLike) -> None:
        del dtype  # packed is packed, whatever the model computes in
        E, F, Z = config.num_experts, config.moe_intermediate_size, config.expert_hidden_size
        four, three = (EXPERTS, None, None, None), (EXPERTS, None, None)
        self.experts_gate_up_packed = declare((E, 2, F, Z // 2), four, jnp.uint8, init="bits")
        self.experts_gate_up_scale = declare((E, 2, F, Z // MXFP4_GROUP), four, jnp.uint8, init="scales")
        self.experts_down_packed = declare((E, Z, F // 2), three, jnp.uint8, init="bits")
        self.experts_down_scale = declare((E, Z, F // MXFP4_GROUP), three, jnp.uint8, init="scales")

    def _expert_weights(self) -> Weights:
        return (
            self.experts_gate_up_packed[...],
            self.experts_gate_up_scale[...],
            self.experts_down_packed[...],
            self.experts_down_scale[...],
        )
