"""The decoder: embedding, blocks, norm, head. Which block stands where is read from the configuration.

Everything goes through one call: tokens [B, T] with a `Chunk` saying where they stand, the layers' caches in, hidden
states and the caches out. Prefill, its chunks and decode differ only in T.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kimi_jax.config import Config
from kimi_jax.layers.block import AttnResBlock, Block, LayerCache, Stored, Terms
from kimi_jax.layers.chunk import Chunk
from kimi_jax.layers.named import declare
from kimi_jax.ops.attn_res import attn_res
from kimi_jax.ops.embedding import embed
from kimi_jax.ops.linear import project
from kimi_jax.ops.norm import rms_norm, sum_rms_norm, sum_terms
from sharding_rules import Layout, Size, axes, check
from sharding_rules.axes import BATCH, EMBED, LENGTH, VOCAB

DTYPES = ("float32", "bfloat16")  # of weights and activations


def checked_dtype(dtype: DTypeLike) -> str:
    """One of DTYPES, from its name or numpy's or jax's type."""
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = None
    if name not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: {' or '.join(map(repr, DTYPES))} was wanted")
    return name


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
    latent = config.routed_expert_hidden_size
    return [
        *heads,
        *merged,
        Size("KDA heads", axes.KDA_HEADS, config.kda_num_heads),
        Size("experts", axes.EXPERTS, config.num_experts),
        Size("hidden of the dense MLP", axes.HIDDEN, config.intermediate_size),
        Size("hidden of the shared experts", axes.HIDDEN, config.moe_intermediate_size * config.num_shared_experts),
        Size("vocabulary", axes.VOCAB, config.vocab_size),
        *([] if latent is None else [Size("width of the latent MoE", axes.LATENT_MOE, latent)]),
    ]


class Stream(NamedTuple):
    """The residual stream behind a layer: the terms of the running sum h, which the next norm adds up on its way (the
    first in the activations' dtype, what the feed-forward adds in float32), and earlier sums that were stored
    (Attention Residuals).
    """

    terms: Terms
    stored: Stored = ()

    @property
    def h(self) -> Float[Array, "B T D"]:
        """The running sum itself."""
        return sum_terms(self.terms)


class Transformer(nnx.Module):
    """h = E[tokens];  per layer  h <- h + attention(RMS(h)),  h <- h + ffn(RMS(h));  logits = W_head RMS(h).

    Parameters are abstract until `kimi_jax.loading` fills them.
    """

    block = Block

    def __init__(self, config: Config, layout: Layout, dtype: DTypeLike):
        W, D = config.vocab_size, config.hidden_size
        self.config, self.layout = config, layout
        self.embed = declare((W, D), (VOCAB, EMBED), dtype, init="unit")
        self.layers = nnx.List([self.block(config, i, layout, dtype) for i in range(config.num_hidden_layers)])
        self.norm = declare((D,), (EMBED,), dtype, init="ones")
        self.lm_head = declare((W, D), (VOCAB, EMBED), dtype)

    def __call__(
        self, tokens: Int[Array, "B T"], chunk: Chunk, caches: tuple[LayerCache, ...]
    ) -> tuple[Float[Array, "B T D"], tuple[LayerCache, ...]]:
        """Hidden states of the fed tokens, ready for `head`, and the caches after them."""
        walked = list(self.walk(self.enter(tokens, chunk), chunk, caches))
        return self.finish(walked[-1][0]), tuple(cache for _, cache in walked)

    def walk(self, stream: Stream, chunk: Chunk, caches: tuple[LayerCache, ...]) -> Iterator[tuple[Stream, LayerCache]]:
        """Layer after layer: the residual stream behind it and its new cache."""
        for index, (block, cache) in enumerate(zip(self.layers, caches, strict=True)):
            with jax.named_scope(f"layer_{index}"):
                stream, cache = self.step(index, block, stream, cache, chunk)
            yield stream, cache

    def run_blocks(self, run: Callable[..., Any]) -> None:
        """Let the attention and the feed-forward of all blocks be called by run(module, *args)."""
        for block in self.layers:
            block.run = run

    def step(
        self, index: int, block: Block, stream: Stream, cache: LayerCache, chunk: Chunk
    ) -> tuple[Stream, LayerCache]:
        """h <- h + attention(RMS(h)),  h <- h + ffn(RMS(h))."""
        h, attended, cache = block.attend(stream.terms, cache, chunk)
        h, fed = block.feed((h, attended))
        return Stream((h, fed)), cache

    def enter(self, tokens: Int[Array, "B T"], chunk: Chunk) -> Stream:
        """E[tokens]; padding enters as zeros, so whatever its embedding holds can reach nobody."""
        axis, at = self.layout.mesh_axes(VOCAB), (BATCH, LENGTH)
        with jax.named_scope("embed"):
            look_up = self.layout.per_shard(partial(embed, axis=axis), [(VOCAB, EMBED), at, at], (*at, EMBED))
            return Stream((look_up(self.embed[...], tokens, chunk.live(tokens.shape[1])),))

    def finish(self, stream: Stream) -> Float[Array, "B T D"]:
        """The final norm."""
        return sum_rms_norm(stream.terms, self.norm[...], self.config.rms_norm_eps)[1]

    def head(self, h: Float[Array, "B T D"]) -> Float[Array, "B T W"]:
        """Logits in float32, whole on every rank: the product is pinned to its shards so that it, not W, is
        gathered.
        """
        with jax.named_scope("head"):
            logits = project(h, self.lm_head[...], jnp.float32)
            logits = self.layout.constrain(logits, BATCH, LENGTH, VOCAB)
            return self.layout.constrain(logits, BATCH, LENGTH, None)


class AttnResTransformer(Transformer):
    """A decoder with Attention Residuals (Kimi K3): sub-layers read a mix of earlier sums, every few layers a new sum
    begins.

        x = mix(stored, h)
        at a boundary: stored <- stored + [h], h <- attention(RMS(x));  else h <- h + attention(RMS(x))
        h <- h + ffn(RMS(mix(stored, h)));      logits = W_head RMS(mix(stored, h)) at the end

    The boundaries are layers 0, b, 2b, ... (b = attn_res_block_size). The mix feeds sub-layers only, the sum stays
    unmixed, and at a boundary the mix comes before the store. Mixing is per token, so nothing of it is cached.

    Source: Attention Residuals (Kimi Team, 2026); Kimi K3 technical report.
    """

    block = AttnResBlock

    def __init__(self, config: Config, layout: Layout, dtype: DTypeLike):
        super().__init__(config, layout, dtype)
        self.output_res_norm = declare((config.hidden_size,), (EMBED,), dtype, init="ones")
        self.output_res_proj = declare((config.hidden_size,), (EMBED,), dtype)

    def step(
        self, index: int, block: AttnResBlock, stream: Stream, cache: LayerCache, chunk: Chunk
    ) -> tuple[Stream, LayerCache]:
        """One layer between two mixes; the sum restarts at a boundary."""
        assert self.config.attn_res_block_size is not None
        h, stored = stream.h, stream.stored
        x = block.mix_for_attention(stored, h) if stored else h
        _, attended, cache = block.attend((x,), cache, chunk)
        if index % self.config.attn_res_block_size == 0:
            h, stored = attended, (*stored, h)
        else:
            h = h + attended
        _, fed = block.feed((block.mix_for_ffn(stored, h),))
        return Stream((h, fed), stored), cache

    def finish(self, stream: Stream) -> Float[Array, "B T D"]:
        """The last mix, and the final norm of it."""
        eps = self.config.rms_norm_eps
        with jax.named_scope("attn_res"):
            h = attn_res(stream.stored, stream.h, self.output_res_norm[...], self.output_res_proj[...], eps)
        return rms_norm(h, self.norm[...], eps)


class Parameter(NamedTuple):
    """What the model declares about one parameter; see `kimi_jax.layers.named.declare`."""

    shape: tuple[int, ...]
    dtype: jnp.dtype
    axes: tuple[str | None, ...]
    init: str


def build(config: Config, layout: Layout, dtype: DTypeLike) -> tuple[nnx.GraphDef, dict]:
    """The model without arrays: its graph, and a pure dict of `Parameter` in the structure of the parameters."""
    decoder = Transformer if config.attn_res_block_size is None else AttnResTransformer
    graph, state = nnx.split(decoder(config, layout, dtype))

    def read(variable: nnx.Variable) -> Parameter:
        value, about = variable.get_value(), variable.get_metadata()
        return Parameter(value.shape, jnp.dtype(value.dtype), about["axes"], about["init"])

    declared = jax.tree.map(read, state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return graph, nnx.to_pure_dict(declared)


def guard(config: Config, layout: Layout, devices: int | None = None) -> None:
    """Raise ValueError unless the layout can hold this model: the guards of `sharding_rules.checks`, before any
    array.
    """
    _check_implemented(config)
    if config.q_lora_rank is None and layout.shards(axes.QKV_A) > 1:
        raise ValueError(
            "shard_qkv_a=True: this model has no q-LoRA, so there is no merged q_a|kv_a projection to shard; use "
            "shard_qkv_a=False"
        )
    hint = "" if layout.pad_heads else "MLA heads can be padded: helix(..., pad_heads=True)"
    uneven = config.num_attention_heads % layout.ranks
    check(layout, sizes(config, layout), devices=devices, hints=[hint] if hint and uneven else [])


def _check_implemented(config: Config) -> None:
    """Combinations that a config can say and no published model has."""
    latent = config.routed_expert_hidden_size is not None
    for wrong, what in (
        (config.num_shared_experts == 0, "num_shared_experts=0"),
        (config.mla_use_output_gate and config.q_lora_rank is None, "an MLA output gate without q-LoRA"),
        (latent and not config.latent_moe_use_norm, "a latent MoE without its norm"),
        (config.packed_experts and not latent, "packed experts that work on the hidden width"),
    ):
        if wrong:
            raise ValueError(f"{what} is not implemented: neither Kimi Linear nor Kimi K3 has it")
