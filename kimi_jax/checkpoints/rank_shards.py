"""The merged q_a|kv_a projection as engines for GPUs store it, in one shard a rank, put back into the hub's order.

Rank r of n holds rows [q_r | kv_r], the r-th part of both; gathered in rank order that is no matrix of the model,
though its shape is right (see `sharding_rules.rank_major`). Into a model that is loaded:

    merged = merge_ranks(shards, config)
    held = model.params["layers"][layer]["attention"]
    held["qkv_a"] = jax.device_put(merged.astype(model.dtype), held["qkv_a"].sharding)

Into a checkpoint folder, beside its other tensors, that `load` then reads onto any layout:

    tensors = hub_tensors_of_ranks(shards, config, layer)  # of every MLA layer
    safetensors.numpy.save_file(tensors, folder / "model-00002-of-00002.safetensors")  # which the index names too

Must not know files or devices.
"""

from collections.abc import Sequence

import numpy as np

from kimi_jax.checkpoints.names import table, written
from kimi_jax.config import Config
from sharding_rules import rank_major_to_logical


def merge_ranks(shards: Sequence[np.ndarray], config: Config) -> np.ndarray:
    """Shards [(Q + R + P) / n, D] of n ranks, in rank order -> the model's parameter `qkv_a`, [Q + R + P, D].

    Q = q_lora_rank, R + P = kv_lora_rank + qk_rope_head_dim, D = hidden_size; any dtype, numbers are only moved.

    Raises ValueError for a model without q-LoRA, whose q and kv_a are not merged, and for shards that are not equal
    parts of this projection.
    """
    if config.q_lora_rank is None:
        raise ValueError("q_lora_rank is None: this model has no merged q_a|kv_a projection, its kv_a stands alone")
    parts = (config.q_lora_rank, config.kv_lora_rank + config.qk_rope_head_dim)
    shapes = [shard.shape for shard in shards]
    wanted = (sum(parts) // max(len(shards), 1), config.hidden_size)
    if set(shapes) != {wanted}:
        raise ValueError(f"{len(shards)} shards have shapes {sorted(set(shapes))}: {wanted} was wanted of each")
    return rank_major_to_logical(np.concatenate(shards), parts, len(shards), axis=0)


def hub_tensors_of_ranks(shards: Sequence[np.ndarray], config: Config, layer: int) -> dict[str, np.ndarray]:
    """The same as the two tensors that the hub has of MLA layer `layer` (from 0), under its names.

    Raises ValueError as `merge_ranks`, and for a layer that is no MLA layer.
    """
    if not config.is_mla(layer):
        raise ValueError(f"layer={layer}: one of the MLA layers {config.mla_layers} was wanted")
    merged, row = merge_ranks(shards, config), table(config)[f"layers/{layer}/attention/qkv_a"]
    return {
        written(row.prefix + piece.name, config): merged[piece.start[0] : piece.start[0] + piece.shape[0]]
        for piece in row.pieces
    }
