"""One layer of the decoder: pre-normed attention and pre-normed feed-forward, of the kinds that its index asks for."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from kimi_jax.config import Config
from kimi_jax.layers.chunk import Chunk
from kimi_jax.layers.kda import KDA, DeltaState, FullRankKDA
from kimi_jax.layers.mla import MLA, GatedMLA, LatentCache, LowRankMLA
from kimi_jax.layers.mlp import MLP
from kimi_jax.layers.moe import LatentMoE, MoE, PackedLatentMoE
from kimi_jax.layers.named import declare
from kimi_jax.ops.attn_res import attn_res
from kimi_jax.ops.norm import sum_rms_norm
from sharding_rules import Layout
from sharding_rules.axes import EMBED

LayerCache = LatentCache | DeltaState
Terms = tuple[Float[Array, "B T D"], ...]  # of a sum, which has the dtype of the first: others may be float32
Stored = tuple[Float[Array, "B T D"], ...]


class Block(nnx.Module):
    """attend: attention(RMS(h));  feed: ffn(RMS(h));  h is the sum of one term or two, and is handed back. Which sums
    there are is the decoder's part; one that has its sum already gives it as the only term.

    run(module, *args): how attention and ffn are called; whoever owns the decoder may put something around it.
    """

    run: Callable[..., Any] = staticmethod(lambda module, *args: module(*args))

    def __init__(self, config: Config, index: int, layout: Layout, dtype: DTypeLike):
        self.eps = config.rms_norm_eps
        self.attention_norm = declare((config.hidden_size,), (EMBED,), dtype, init="ones")
        self.attention = attention_class(config, index)(config, layout, dtype)
        self.ffn_norm = declare((config.hidden_size,), (EMBED,), dtype, init="ones")
        self.ffn = ffn_class(config, index)(config, layout, dtype)

    def attend(
        self, terms: Terms, cache: LayerCache, chunk: Chunk
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"], LayerCache]:
        """h = the sum of the terms, attention(RMS(h)) and the layer's new cache."""
        h, normed = sum_rms_norm(terms, self.attention_norm[...], self.eps)
        return h, *self.run(self.attention, normed, cache, chunk)

    def feed(self, terms: Terms) -> tuple[Float[Array, "B T D"], Float32[Array, "B T D"]]:
        """h = the sum of the terms, and ffn(RMS(h)), not yet rounded."""
        h, normed = sum_rms_norm(terms, self.ffn_norm[...], self.eps)
        return h, self.run(self.ffn, normed)


class AttnResBlock(Block):
    """A block whose two inputs are mixed from earlier sums of the residual stream (Attention Residuals, Kimi K3).

    Layer 0 has no earlier sum to mix into its attention: its two tensors for that are held unused, for export.
    """

    def __init__(self, config: Config, index: int, layout: Layout, dtype: DTypeLike):
        super().__init__(config, index, layout, dtype)
        D = config.hidden_size
        self.attention_res_norm = declare((D,), (EMBED,), dtype, init="ones")
        self.attention_res_proj = declare((D,), (EMBED,), dtype)
        self.ffn_res_norm = declare((D,), (EMBED,), dtype, init="ones")
        self.ffn_res_proj = declare((D,), (EMBED,), dtype)

    def mix_for_attention(self, stored: Stored, h: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """What attention reads: a mix of the stored sums and the running one."""
        with jax.named_scope("attn_res"):
            return attn_res(stored, h, self.attention_res_norm[...], self.attention_res_proj[...], self.eps)

    def mix_for_ffn(self, stored: Stored, h: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """What the feed-forward reads."""
        with jax.named_scope("attn_res"):
            return attn_res(stored, h, self.ffn_res_norm[...], self.ffn_res_proj[...], self.eps)


def attention_class(config: Config, index: int) -> type[MLA] | type[KDA]:
    """Which attention stands in layer `index`."""
    if not config.is_mla(index):
        return FullRankKDA if config.use_full_rank_gate else KDA
    if config.mla_use_output_gate:
        return GatedMLA
    return MLA if config.q_lora_rank is None else LowRankMLA


def ffn_class(config: Config, index: int) -> type[MLP] | type[MoE]:
    """Which feed-forward stands in layer `index`."""
    if not config.is_moe(index):
        return MLP
    if config.routed_expert_hidden_size is None:
        return MoE
    return PackedLatentMoE if config.packed_experts else LatentMoE
