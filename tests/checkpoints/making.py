"""Checkpoints made for a test, and trees and shardings to load them into. Knows the table, not the loader."""

import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from safetensors.numpy import save_file

from kimi_jax.checkpoints import headers, names
from kimi_jax.config import Config

SMALL = dict(
    vocab_size=40, hidden_size=24, num_hidden_layers=3, mla_layers=(1,), num_attention_heads=8, q_lora_rank=16,
    kv_lora_rank=12, qk_nope_head_dim=5, qk_rope_head_dim=4, v_head_dim=7, kda_num_heads=8, kda_head_dim=6,
    conv_width=4, intermediate_size=56, first_k_dense_replace=1, num_experts=8, num_experts_per_token=2,
    num_shared_experts=2,
    moe_intermediate_size=16, moe_renormalize=True, routed_scaling_factor=1.5, rms_norm_eps=1e-5, dtype="bfloat16",
    bos_token_id=1, eos_token_ids=(2,), pad_token_id=3, max_length=64,
)  # fmt: skip
K3 = dict(
    mla_use_output_gate=True, gate_lower_bound=-5.0, use_full_rank_gate=True, hidden_act="situ", situ_beta=4.0,
    situ_linear_beta=25.0, routed_expert_hidden_size=32, latent_moe_use_norm=True, packed_experts=True,
    attn_res_block_size=2, moe_intermediate_size=64,
)  # fmt: skip


def small(**changes) -> Config:
    """A Kimi Linear of three layers with sizes that differ: KDA dense, MLA MoE, KDA MoE."""
    return Config(**(SMALL | changes))


def small_k3(**changes) -> Config:
    return small(**(K3 | changes))


def hub_arrays(config: Config, dtype=np.float32, seed: int = 0) -> dict[str, np.ndarray]:
    """Every hub tensor of `config`. In float32 each element of the float tensors is unique."""
    rng, arrays, first = np.random.default_rng(seed), {}, 0
    packed = {path for path, row in names.table(config).items() if row.packed}
    for name, uses in names.hub_tensors(config).items():
        shape = uses[0][1].hub_shape
        size = int(np.prod(shape))
        if uses[0][0] in packed:
            arrays[name] = rng.integers(0, 256, shape, np.uint8)
        elif np.dtype(dtype) == np.float32:
            arrays[name] = np.arange(first, first + size, dtype=np.float32).reshape(shape)
            first += size
        else:  # random bits of an exponent below the highest: no NaN
            bits = rng.integers(0, 1 << 16, shape, np.uint16)
            arrays[name] = (bits & 0xBFFF).view(ml_dtypes.bfloat16)
    assert first < 1 << 24
    return arrays


def write(folder: Path, config: Config, arrays: dict[str, np.ndarray], shards: int = 1) -> Path:
    """A checkpoint folder: config.json and one file, or shards with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    if shards == 1:
        save_file(arrays, folder / "model.safetensors", {"format": "pt"})
        return folder
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(arrays.items())[i::shards])
        save_file(part, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(a.nbytes for a in arrays.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_large(folder: Path, config: Config) -> Path:
    """The same with random numbers in the hub's dtypes, a shard a layer, of which one at a time is held."""
    rng, rows, shards, weight_map = np.random.default_rng(0), names.table(config), {}, {}
    for name, ((path, piece), *_) in names.hub_tensors(config).items():
        about = piece.hub_shape, np.float32 if rows[path].kept else ml_dtypes.bfloat16
        shards.setdefault(name.rpartition("layers.")[2].partition(".")[0], {})[name] = about
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    for i, wanted in enumerate(shards.values()):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        made = {name: rng.random(shape, np.float32).astype(dtype) for name, (shape, dtype) in wanted.items()}
        save_file(made, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(wanted, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def stored(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor of a folder by name: dtype, shape, bytes."""
    found = {}
    for tensor in headers.read_headers(folder).values():
        raw = tensor.file.read_bytes()[tensor.begin : tensor.begin + tensor.nbytes]
        found[tensor.name] = (tensor.dtype, tensor.shape, raw)
    return found


def nested(flat: dict) -> dict:
    """{"layers/0/o": x} -> {"layers": {0: {"o": x}}}, as flax gives the tree of a model."""
    tree: dict = {}
    for path, value in flat.items():
        *parents, leaf = [int(key) if key.isdigit() else key for key in path.split("/")]
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[leaf] = value
    return tree


def abstract(config: Config, dtype=np.float32) -> dict:
    return nested({
        path: jax.ShapeDtypeStruct(row.shape, np.uint8 if row.packed else dtype)
        for path, row in names.table(config).items()
    })  # fmt: skip


def shardings(config: Config, shape: tuple[int, int] = (2, 4), spread: str = "first") -> dict:
    """A sharding for every parameter over a mesh of `shape`.

    spread: "none" replicates all; "first", "last" and "two" split the first, the last, or two of the axes that divide.
    """
    count = shape[0] * shape[1]
    mesh = jax.make_mesh(shape, ("a", "b"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:count])

    def spec(sizes: tuple[int, ...]) -> PartitionSpec:
        fits = [i for i, size in enumerate(sizes) if size % count == 0]
        if spread == "none" or not fits:
            return PartitionSpec()
        parts: list = [None] * len(sizes)
        if spread == "two":
            free = ["a", "b"]
            for i in reversed(range(len(sizes))):
                if free and sizes[i] % mesh.shape[free[-1]] == 0:
                    parts[i] = free.pop()
        else:
            parts[fits[0] if spread == "first" else fits[-1]] = ("a", "b")
        return PartitionSpec(*parts)

    return nested({path: NamedSharding(mesh, spec(row.shape)) for path, row in names.table(config).items()})
