"""Multi-head latent attention without positions, over a latent cache striped by the layout.

`MLA` projects queries directly, `LowRankMLA` through a query latent merged with the key/value one, `GatedMLA` adds K3's
output gate. All three attend through `ops.helix`, on one device and on many.
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
from kimi_jax.ops.helix import helix_attention
from kimi_jax.ops.linear import collect, project
from kimi_jax.ops.norm import rms_norm
from sharding_rules import Layout, stripes
from sharding_rules.axes import (
    BATCH,
    EMBED,
    HEADS,
    HEADS_MERGED,
    KV_LORA,
    LATENT,
    LENGTH,
    Q_LORA,
    QKV_A,
    SLOTS,
    STRIPES,
)  # fmt: skip

ROWS = (BATCH, STRIPES, SLOTS, LATENT)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentCache:
    """rows [B, N, S, R+P]: position p lies in stripe owner(p), slot(p) (`sharding_rules.stripes`); N stripes of S
    slots."""

    rows: Any = field(metadata={"axes": ROWS})

    @staticmethod
    def shape(config: Config, layout: Layout, batch: int, capacity: int, dtype: DTypeLike) -> "LatentCache":
        """The cache's shape for `capacity` tokens a row, rounded up to whole rounds of blocks."""
        slots = stripes.capacity(capacity, layout.tokens_per_block, layout.cp) // layout.cp
        width = config.kv_lora_rank + config.qk_rope_head_dim
        return LatentCache(jax.ShapeDtypeStruct((batch, layout.cp, slots, width), dtype))


def attention_heads(config: Config, layout: Layout) -> int:
    """MLA heads as held: padded up to a multiple of the ranks if the layout says so."""
    heads = config.num_attention_heads
    return -(-heads // layout.ranks) * layout.ranks if layout.pad_heads else heads


class MLA(nnx.Module):
    """Latent attention with a direct query projection (Kimi Linear).

        (lat, pe) = W_kva x      lat <- RMS(lat)      q_h = W_q,h x      k_h = (W_UK,h lat, pe)      v_h = W_UV,h lat
        o_h = softmax(q_h k_h^T / sqrt(nope + rope)) v_h                  out = sum_h W_o,h o_h

    The positional part of queries and keys exists but is never rotated. The cache holds (RMS(lat), pe).

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1; Kimi Linear (arXiv 2510.26692), section on NoPE MLA.
    """

    def __init__(self, config: Config, layout: Layout, dtype: DTypeLike):
        H, R, V = attention_heads(config, layout), config.kv_lora_rank, config.v_head_dim
        K, D = config.qk_nope_head_dim, config.hidden_size
        self.config, self.layout = config, layout
        self._declare_down(config, dtype)
        self.kv_norm = declare((R,), (KV_LORA,), dtype, init="ones")
        self.k_b = declare((H, K, R), (HEADS, None, KV_LORA), dtype)
        self.v_b = declare((H, V, R), (HEADS, None, KV_LORA), dtype)
        self.o = declare((D, H, V), (EMBED, HEADS_MERGED, None), dtype, init="fan_in_heads")

    def __call__(
        self, x: Float[Array, "B T D"], cache: LatentCache, chunk: Chunk
    ) -> tuple[Float[Array, "B T D"], LatentCache]:
        config, layout = self.config, self.layout
        with jax.named_scope("mla_project"):
            q, lat, pe = self._project(x)
            rows = jnp.concatenate([rms_norm(lat, self.kv_norm[...], config.mla_latent_norm_eps), pe], axis=-1)
        attend = layout.per_shard(
            partial(
                helix_attention, axis=layout.mesh_axes(STRIPES), ranks=layout.cp, block=layout.tokens_per_block
            ),
            [
                (BATCH, LENGTH, HEADS), (BATCH, LENGTH, HEADS), (BATCH, LENGTH, LATENT), ROWS, (HEADS,), (HEADS,),
                (BATCH,), (BATCH,),
            ],
            ((BATCH, LENGTH, HEADS_MERGED), ROWS),
        )  # fmt: skip
        with jax.named_scope("mla_attend"):
            q_nope, q_pe = jnp.split(q, [config.qk_nope_head_dim], axis=-1)
            out, new_rows = attend(
                q_nope, q_pe, rows, cache.rows, self.k_b[...], self.v_b[...], chunk.starts, chunk.counts
            )
        with jax.named_scope("mla_output"):
            y = collect(self._gate(x, out), self.o[...])
            return layout.constrain(y, BATCH, LENGTH, EMBED), LatentCache(new_rows)

    def _declare_down(self, config: Config, dtype: DTypeLike) -> None:
        R, P, D = config.kv_lora_rank, config.qk_rope_head_dim, config.hidden_size
        H, QK = attention_heads(config, self.layout), config.qk_nope_head_dim + config.qk_rope_head_dim
        self.kv_a = declare((R + P, D), (QKV_A, EMBED), dtype)
        self.q = declare((H, QK, D), (HEADS, None, EMBED), dtype)

    def _project(self, x: Float[Array, "B T D"]):
        """Queries, key/value latent (not yet normalised) and positional part."""
        q, down = project_together(self.layout, [x, x], [self.q, self.kv_a])
        lat, pe = jnp.split(self.layout.constrain(down, BATCH, LENGTH, None), [self.config.kv_lora_rank], axis=-1)
        return q, lat, pe

    def _gate(self, x: Float[Array, "B T D"], out: Float[Array, "B T H V"]) -> Float[Array, "B T H V"]:
        """The output before o_proj; ungated here."""
        return out


class LowRankMLA(MLA):
    """MLA with a query latent, its down-projection merged with the key/value one: rows q_a, then kv_a.

        (c, lat, pe) = W_qkva x      q_h = W_qb,h RMS(c)

    Merged, the projection is one product and, with its rows over all ranks, one all-gather of the latents.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.3.
    """

    def _declare_down(self, config: Config, dtype: DTypeLike) -> None:
        Q, R, P, D = config.q_lora_rank, config.kv_lora_rank, config.qk_rope_head_dim, config.hidden_size
        H, QK = attention_heads(config, self.layout), config.qk_nope_head_dim + P
        assert Q is not None
        self.qkv_a = declare((Q + R + P, D), (QKV_A, EMBED), dtype)
        self.q_norm = declare((Q,), (Q_LORA,), dtype, init="ones")
        self.q_b = declare((H, QK, Q), (HEADS, None, Q_LORA), dtype)

    def _project(self, x: Float[Array, "B T D"]):
        Q = self.q_norm[...].shape[0]
        c, lat, pe = jnp.split(self._down(x, self.qkv_a[...]), [Q, Q + self.config.kv_lora_rank], axis=-1)
        c = rms_norm(c, self.q_norm[...], self.config.mla_latent_norm_eps)
        return project(c, self.q_b[...]), lat, pe

    def _down(self, x: Float[Array, "B T D"], weight: Float[Array, "F D"]) -> Float[Array, "B T F"]:
        """x W^T with W's rows wherever QKV_A says, the result whole on every rank.

        Pinned to the shards first and then to all: constrained to the whole at once, XLA would gather the weight.
        """
        y = self.layout.constrain(project(x, weight), BATCH, LENGTH, QKV_A)
        return self.layout.constrain(y, BATCH, LENGTH, None)


class GatedMLA(LowRankMLA):
    """LowRankMLA whose heads are gated before o_proj (Kimi K3): o <- o * sigmoid(W_g x), with the layer's input x."""

    def __init__(self, config: Config, layout: Layout, dtype: DTypeLike):
        super().__init__(config, layout, dtype)
        shape = (attention_heads(config, layout), config.v_head_dim, config.hidden_size)
        self.g = declare(shape, (HEADS_MERGED, None, EMBED), dtype)

    def _gate(self, x: Float[Array, "B T D"], out: Float[Array, "B T H V"]) -> Float[Array, "B T H V"]:
        return out * jax.nn.sigmoid(project(x, self.g[...]))
