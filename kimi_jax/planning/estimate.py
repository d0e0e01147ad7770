"""An estimate of what activations take on one device. Everything else that `plan` says is exact; this is not.

Counted are the arrays which one step must hold at once: the residual stream, the largest set of intermediates of any
part of a layer, and the logits. XLA may fuse some of them away, or keep copies.
"""

import jax.numpy as jnp

from kimi_jax.config import Config
from kimi_jax.generation.generate import PREFILL_CHUNK
from kimi_jax.layers.mla import attention_heads
from kimi_jax.ops.attention import KEY_BLOCK
from sharding_rules import Layout, axes

FLOAT32 = 4
TILE = 4 * KEY_BLOCK  # queries, and keys, that XLA's form of prefill attention takes at once; CUDA's kernel holds less
DELTA_CHUNK = 64  # tokens that the chunked delta rule takes at once


def activations(config: Config, layout: Layout, batch: int, context: int, dtype: str) -> int:
    """Bytes which the larger of two steps holds: a prefill chunk of `batch` rows, or a decode step."""
    prefill = step(config, layout, batch, min(context, PREFILL_CHUNK), dtype)
    return max(prefill, step(config, layout, batch, 1, dtype))


def step(config: Config, layout: Layout, batch: int, length: int, dtype: str, *, tile: int = TILE) -> int:
    """Bytes of the activations of a step of `batch` x `length` tokens: stream + largest part + logits.

    tile: queries, and keys, that prefill attention takes at once; TILE on accelerators, KEY_BLOCK on CPUs.
    """
    tokens, size = batch * length, jnp.dtype(dtype).itemsize
    blocks = -(-config.num_hidden_layers // config.attn_res_block_size) if config.attn_res_block_size else 0
    # The stream, its normed copy and what a part adds to it; attention residuals keep one sum a block beside them.
    stream = tokens * config.hidden_size * ((3 + blocks) * size + FLOAT32)
    parts = [_mla(config, layout, batch, length, size, tile), _kda(config, layout, tokens, length, size)]
    if config.first_k_dense_replace:
        parts.append(_dense(config, layout, tokens, size))
    if config.first_k_dense_replace < config.num_hidden_layers:
        parts.append(_moe(config, layout, tokens, size))
    logits = batch * config.vocab_size * FLOAT32
    return stream + max(parts) + logits + logits // layout.shards(axes.VOCAB)


def _mla(config: Config, layout: Layout, batch: int, length: int, size: int, tile: int) -> int:
    """Queries, the packed exchange; for a tile of queries the scores of a block of keys, their weights, the sums."""
    heads = attention_heads(config, layout) // layout.shards(axes.HEADS)
    absorbed = length == 1
    width = config.kv_lora_rank if absorbed else config.v_head_dim
    query = (config.kv_lora_rank if absorbed else 0) + config.qk_head_dim
    keys = KEY_BLOCK if absorbed else tile
    a_query = 2 * query * size + 3 * (width + 1) * FLOAT32
    in_tile = keys * (2 * FLOAT32 + size) + 2 * width * FLOAT32
    a_key = 0 if absorbed else (config.qk_head_dim + width) * size
    return batch * heads * (length * a_query + min(length, tile) * in_tile + keys * a_key)


def _kda(config: Config, layout: Layout, tokens: int, length: int, size: int) -> int:
    """Projections, the convolved q, k, v, the float32 arrays of the recurrence (by chunks, unless it is one token)."""
    heads, K = config.kda_num_heads // layout.shards(axes.KDA_HEADS), config.kda_head_dim
    projected, mixed = 8 * K * size, 5 * K * FLOAT32
    chunked = 0 if length == 1 else (9 * K + 3 * DELTA_CHUNK) * FLOAT32
    return tokens * heads * (projected + mixed + chunked)


def _dense(config: Config, layout: Layout, tokens: int, size: int) -> int:
    """Gate, up, their product, and the partial sum."""
    hidden = config.intermediate_size // layout.shards(axes.HIDDEN)
    return tokens * (3 * hidden * size + config.hidden_size * FLOAT32)


def _moe(config: Config, layout: Layout, tokens: int, size: int) -> int:
    """Router scores, one row for each pair of token and chosen expert (twice, then in float32), the shared experts, and
    the one expert whose weights are in use.

    The pairs are not split over the ranks: any rank's experts may be chosen by all.
    """
    width, pairs = config.expert_hidden_size, tokens * config.num_experts_per_token
    shared = config.shared_intermediate_size // layout.shards(axes.HIDDEN)
    one_expert = 3 * width * config.moe_intermediate_size * size
    return (
        tokens * config.num_experts * 2 * FLOAT32
        + pairs * width * (2 * size + FLOAT32)
        + tokens * (3 * shared * size + 2 * config.hidden_size * FLOAT32)
        + one_expert
    )
