"""The decoder: embedding, blocks, norm, head. Which block stands where is read from the configuration.

Everything goes through one call: tokens [B, T] with a `Chunk` saying where they stand, the layers' caches in, hidden
states and the caches out. Prefill, its chunks and decode differ only in T.
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kimi_jax.config import Config
from kimi_jax.layers.chunk import Chunk
from kimi_jax.layers.kda import KDA, DeltaState, FullRankKDA
from kimi_jax.layers.mla import MLA, GatedMLA, LatentCache, LowRankMLA
from kimi_jax.layers.mlp import MLP
from kimi_jax.layers.moe import MoE
from kimi_jax.layers.named import declare
from kimi_jax.ops.linear import project
from kimi_jax.ops.norm import rms_norm
from sharding_rules import Layout, Size, axes, check
from sharding_rules.axes import BATCH, EMBED, LENGTH, VOCAB

LayerCache = LatentCache | DeltaState


def sizes(config: Config, layout: Layout) -> list[Size]:
    """What a layout has to divide, by name."""
    heads = [] if layout.pad_heads else [
        Size("MLA heads", axes.HEADS, config.num_attention_heads),
        Size("MLA heads", axes.HEADS_MERGED, config.num_attention_heads),
    ]  # fmt: skip
    rows = config.kv_lora_rank + config.qk_rope_head_dim
    merged = [Size("rows of kv_a, kv_lora + rope", axes.QKV_A, rows)]
    if config.q_lora_rank is not None:
        merged.append(Size("rows of q_a, q_lora", axes.QKV_A, config.q_lora_rank))
    return [
        *heads,
        *merged,
        Size("KDA heads", axes.KDA_HEADS, config.kda_num_heads),
        Size("experts", axes.EXPERTS, config.num_experts),
        Size("hidden of the dense MLP", axes.HIDDEN, config.intermediate_size),
        Size("hidden of the shared experts", axes.HIDDEN, config.moe_intermediate_size * config.num_shared_experts),
        Size("vocabulary", axes.VOCAB, config.vocab_size),
    ]


class Block(nnx.Module):
    """One layer: pre-normed attention (KDA or MLA) and pre-normed feed-forward (dense or MoE)."""

    def __init__(self, config: Config, index: int, layout: Layout, dtype: DTypeLike):
        self.eps = config.rms_norm_eps
        self.attention_norm = declare((config.hidden_size,), (EMBED,), dtype, init="ones")
        self.attention = _attention_class(config, index)(config, layout, dtype)
        self.ffn_norm = declare((config.hidden_size,), (EMBED,), dtype, init="ones")
        self.ffn = (MoE if config.is_moe(index) else MLP)(config, layout, dtype)

    def attend(self, x: Float[Array, "B T D"], cache: LayerCache, chunk: Chunk):
        """attention(RMS(x)) -> what to add to the residual, the layer's new cache."""
        return self.attention(rms_norm(x, self.attention_norm[...], self.eps), cache, chunk)

    def feed(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """ffn(RMS(x)): what to add to the residual."""
        return self.ffn(rms_norm(x, self.ffn_norm[...], self.eps))


class Transformer(nnx.Module):
    """h = E[tokens];  per layer  h <- h + attention(RMS(h)),  h <- h + ffn(RMS(h));  logits = W_head RMS(h).

    Parameters are abstract until `kimi_jax.runtime` fills them.
    """

    def __init__(self, config: Config, layout: Layout, dtype: DTypeLike):
        W, D = config.vocab_size, config.hidden_size
        self.config, self.layout = config, layout
        self.embed = declare((W, D), (VOCAB, EMBED), dtype, init="unit")
        self.layers = nnx.List([Block(config, i, layout, dtype) for i in range(config.num_hidden_layers)])
        self.norm = declare((D,), (EMBED,), dtype, init="ones")
        self.lm_head = declare((W, D), (VOCAB, EMBED), dtype)

    def __call__(
        self, tokens: Int[Array, "B T"], chunk: Chunk, caches: tuple[LayerCache, ...]
    ) -> tuple[Float[Array, "B T D"], tuple[LayerCache, ...]]:
        """Hidden states of the fed tokens, ready for `head`, and the caches after them."""
        hidden, new_caches = None, []
        for hidden, cache in self.walk(tokens, chunk, caches):
            new_caches.append(cache)
        assert hidden is not None
        return self.finish(hidden), tuple(new_caches)

    def walk(
        self, tokens: Int[Array, "B T"], chunk: Chunk, caches: tuple[LayerCache, ...]
    ) -> Iterator[tuple[Float[Array, "B T D"], LayerCache]]:
        """Layer after layer: the residual stream behind it and its new cache."""
        h = self.enter(tokens, chunk)
        for index, (block, cache) in enumerate(zip(self.layers, caches, strict=True)):
            with jax.named_scope(f"layer_{index}"):
                attended, cache = block.attend(h, cache, chunk)
                h = h + attended
                h = h + block.feed(h)
            yield h, cache

    def enter(self, tokens: Int[Array, "B T"], chunk: Chunk) -> Float[Array, "B T D"]:
        """E[tokens]; padding enters as zeros, so whatever its embedding holds can reach nobody."""
        with jax.named_scope("embed"):
            h = jnp.take(self.embed[...], tokens, axis=0, mode="clip")
            h = jnp.where(chunk.live(tokens.shape[1])[..., None], h, jnp.zeros((), h.dtype))
            return self.layout.constrain(h, BATCH, LENGTH, EMBED)

    def finish(self, h: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The final norm."""
        return rms_norm(h, self.norm[...], self.config.rms_norm_eps)

    def head(self, h: Float[Array, "B T D"]) -> Float[Array, "B T W"]:
        """Logits in float32, whole on every rank: the product is pinned to its shards so that it, not W, is gathered."""
        with jax.named_scope("head"):
            logits = project(h, self.lm_head[...], jnp.float32)
            logits = self.layout.constrain(logits, BATCH, LENGTH, VOCAB)
            return self.layout.constrain(logits, BATCH, LENGTH, None)


def _attention_class(config: Config, index: int) -> type[MLA] | type[KDA]:
    if not config.is_mla(index):
        return FullRankKDA if config.use_full_rank_gate else KDA
    if config.mla_use_output_gate:
        return GatedMLA
    return MLA if config.q_lora_rank is None else LowRankMLA


class Parameter(NamedTuple):
    """What the model declares about one parameter; see `kimi_jax.layers.named.declare`."""

    shape: tuple[int, ...]
    dtype: jnp.dtype
    axes: tuple[str | None, ...]
    init: str


def build(config: Config, layout: Layout, dtype: DTypeLike) -> tuple[nnx.GraphDef, dict]:
    """The model without arrays: its graph, and a pure dict of `Parameter` in the structure of the parameters."""
    graph, state = nnx.split(Transformer(config, layout, dtype))

    def read(variable: nnx.Variable) -> Parameter:
        value, about = variable.get_value(), variable.get_metadata()
        return Parameter(value.shape, jnp.dtype(value.dtype), about["axes"], about["init"])

    declared = jax.tree.map(read, state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return graph, nnx.to_pure_dict(declared)


def guard(config: Config, layout: Layout, devices: int | None = None) -> None:
    """Raise ValueError unless the layout can hold this model: the guards of `sharding_rules.checks`, before any array."""
    if config.q_lora_rank is None and layout.shards(axes.QKV_A) > 1:
        raise ValueError(
            "shard_qkv_a=True: this model has no q-LoRA, so there is no merged q_a|kv_a projection to shard; use "
            "shard_qkv_a=False"
        )
    hint = "" if layout.pad_heads else "MLA heads can be padded: helix(..., pad_heads=True)"
    uneven = config.num_attention_heads % layout.ranks
    check(layout, sizes(config, layout), devices=devices, hints=[hint] if hint and uneven else [])
