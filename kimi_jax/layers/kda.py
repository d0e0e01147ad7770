"""Kimi Delta Attention: a delta rule with one decay a head and key channel, over a state of fixed size.

`KDA` has Kimi Linear's softplus decay and low-rank output gate; `FullRankKDA` K3's full-rank gate. Which decay is in
force is a function chosen by the configuration. Heads are independent from the projections to o_proj, so the middle of
the layer runs on each rank's own heads.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kimi_jax.config import Config
from kimi_jax.layers.chunk import Chunk
from kimi_jax.layers.named import declare
from kimi_jax.layers.projections import project_together
from kimi_jax.ops.kda import mix_heads
from kimi_jax.ops.linear import collect, project
from sharding_rules import Layout
from sharding_rules.axes import BATCH, EMBED, KDA_HEADS, LENGTH

CONV = (BATCH, None, KDA_HEADS, None, None)
RECURRENT = (BATCH, KDA_HEADS, None, None)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeltaState:
    """conv [B, Wc-1, H, 3, K]: the last inputs of the q, k, v convolutions, oldest first; recurrent [B, H, K, V]
    float32."""

    conv: Any = field(metadata={"axes": CONV})
    recurrent: Any = field(metadata={"axes": RECURRENT})

    @staticmethod
    def shape(config: Config, batch: int, dtype: DTypeLike) -> "DeltaState":
        """The state's shape; it does not depend on the capacity."""
        H, K = config.kda_num_heads, config.kda_head_dim
        return DeltaState(
            jax.ShapeDtypeStruct((batch, config.conv_width - 1, H, 3, K), dtype),
            jax.ShapeDtypeStruct((batch, H, K, K), jnp.float32),
        )


class KDA(nnx.Module):
    """Kimi Delta Attention with a low-rank output gate (Kimi Linear).

        q, k, v = silu(conv(W x))    q <- q / |q| K^-1/2    k <- k / |k|    beta = sigmoid(W_b x)
        g = -exp(A) softplus(W_fb W_fa x + dt)                                        (log decay, a key channel)
        S <- Diag(e^g) S;  S <- S + beta k (v - S^T k)^T;  o = S^T q
        out = W_o [ RMS(o) * sigmoid(W_gb W_ga x) ]

    Source: Kimi Linear (arXiv 2510.26692), section 3; fla-org/flash-linear-attention fla/layers/kda.py.
    """

    def __init__(self, config: Config, layout: Layout, dtype: DTypeLike):
        H, K, D = config.kda_num_heads, config.kda_head_dim, config.hidden_size
        # As the hub stores them: Kimi Linear's convolution and o_norm in the model's dtype, K3's in float32.
        stored = dtype if config.gate_lower_bound is None else jnp.float32
        self.config, self.layout = config, layout
        self.qkv = declare((H, 3, K, D), (KDA_HEADS, None, None, EMBED), dtype)
        self.conv = declare((H, 3, K, config.conv_width), (KDA_HEADS, None, None, None), stored)
        self.f_a = declare((K, D), (None, EMBED), dtype)
        self.f_b = declare((H, K, K), (KDA_HEADS, None, None), dtype)
        self.A_log = declare((H,), (KDA_HEADS,), jnp.float32, init="a_log")
        self.dt_bias = declare((H, K), (KDA_HEADS, None), jnp.float32, init="dt_bias")
        self.b = declare((H, D), (KDA_HEADS, EMBED), dtype)
        self.o_norm = declare((K,), (None,), stored, init="ones")
        self.o = declare((D, H, K), (EMBED, KDA_HEADS, None), dtype, init="fan_in_heads")
        self._declare_gate(config, dtype)

    def __call__(
        self, x: Float[Array, "B T D"], state: DeltaState, chunk: Chunk
    ) -> tuple[Float[Array, "B T D"], DeltaState]:
        heads = (BATCH, LENGTH, KDA_HEADS)
        mix = self.layout.per_shard(
            partial(mix_heads, lower_bound=self.config.gate_lower_bound, eps=self.config.rms_norm_eps),
            [
                heads, heads, heads, heads, (KDA_HEADS,), (KDA_HEADS,), (KDA_HEADS,),
                (), CONV, RECURRENT, (BATCH,),
            ],
            (heads, CONV, RECURRENT),
        )  # fmt: skip
        with jax.named_scope("kda_project"):
            qkv, f, b, gate = self._project(x)
        with jax.named_scope("kda_mix"):
            out, conv, recurrent = mix(
                qkv, f, b, gate, self.conv[...], self.A_log[...], self.dt_bias[...], self.o_norm[...], state.conv,
                state.recurrent, chunk.counts,
            )  # fmt: skip
        with jax.named_scope("kda_output"):
            y = collect(out, self.o[...])
            return self.layout.constrain(y, BATCH, LENGTH, EMBED), DeltaState(conv, recurrent)

    def _declare_gate(self, config: Config, dtype: DTypeLike) -> None:
        H, K, D = config.kda_num_heads, config.kda_head_dim, config.hidden_size
        self.g_a = declare((K, D), (None, EMBED), dtype)
        self.g_b = declare((H, K, K), (KDA_HEADS, None, None), dtype)

    def _project(self, x: Float[Array, "B T D"]) -> tuple[Array, Array, Array, Array]:
        """qkv, the decay's f, b and the output gate, all but qkv as they are before their activations."""
        qkv, b, f, gate = project_together(self.layout, [x] * 4, [self.qkv, self.b, self.f_a, self.g_a])
        f, gate = project_together(self.layout, [f, gate], [self.f_b, self.g_b])
        return qkv, f, b, gate


class FullRankKDA(KDA):
    """KDA whose output gate is one full-rank projection (Kimi K3)."""

    def _declare_gate(self, config: Config, dtype: DTypeLike) -> None:
        shape = (config.kda_num_heads, config.kda_head_dim, config.hidden_size)
        self.g = declare(shape, (KDA_HEADS, None, EMBED), dtype)

    def _project(self, x: Float[Array, "B T D"]) -> tuple[Array, Array, Array, Array]:
        qkv, b, f, gate = project_together(self.layout, [x] * 4, [self.qkv, self.b, self.f_a, self.g])
        return qkv, project(f, self.f_b[...]), b, gate
