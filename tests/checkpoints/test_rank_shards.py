"""Per-rank shards of the merged projection: imported, the model says what it said."""

import json
import shutil

import jax
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import kimi_jax
from kimi_jax.checkpoints.rank_shards import hub_tensors_of_ranks, merge_ranks
from kimi_jax.config import Config
from sharding_rules import helix
from tests.checkpoints import making
from tests.helpers import golden

RANKS = 4


@pytest.fixture(scope="module")
def engine(data, tmp_path_factory):
    """kimi-k3-random as an engine would store it: all but q_a and kv_a as on the hub, and a file a rank with the
    merged projections of every MLA layer, `layers.3.fused_qkv_a`.
    """
    folder, root = data / "kimi-k3-random", tmp_path_factory.mktemp("engine")
    config, tensors = Config.from_hf(folder), {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    taken = {n: tensors.pop(n) for n in list(tensors) if n.endswith(("q_a_proj.weight", "kv_a_proj_with_mqa.weight"))}
    save_file(tensors, root / "model-00001-of-00002.safetensors", {"format": "pt"})
    shutil.copy(folder / "config.json", root)
    for rank in range(RANKS):
        shards = {}
        for layer in config.mla_layers:
            own = {n.rpartition(".self_attn.")[2]: a for n, a in taken.items() if f"layers.{layer}." in n}
            parts = (own["q_a_proj.weight"], own["kv_a_proj_with_mqa.weight"])
            shards[f"layers.{layer}.fused_qkv_a"] = np.concatenate([np.split(part, RANKS)[rank] for part in parts])
        save_file(shards, root / f"rank-{rank}.safetensors")
    return root, config, set(tensors)


def shards_of(root, layer):
    shards = []
    for rank in range(RANKS):
        with safe_open(root / f"rank-{rank}.safetensors", framework="np") as file:
            shards.append(file.get_tensor(f"layers.{layer}.fused_qkv_a"))
    return shards


def test_a_folder_completed_from_rank_files_loads_onto_any_layout_as_the_hubs_own_does(engine, data):
    root, config, others = engine
    imported = {}
    for layer in config.mla_layers:
        imported |= hub_tensors_of_ranks(shards_of(root, layer), config, layer)
    second = "model-00002-of-00002.safetensors"
    save_file({name: np.ascontiguousarray(array) for name, array in imported.items()}, root / second)
    weight_map = dict.fromkeys(others, "model-00001-of-00002.safetensors") | dict.fromkeys(imported, second)
    (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    layout = helix(1, 2, shard_qkv_a=True)
    got, wanted = (kimi_jax.load(f, layout=layout, progress=False).params for f in (root, data / "kimi-k3-random"))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), got, wanted)


def test_shards_put_into_a_model_give_its_logits(engine, models):
    root, config, _ = engine
    model = models("kimi-k3-random")
    tokens = golden("kimi-k3-random")["ids_2"][None]
    wanted = np.asarray(model.logits(tokens))
    layers = model.params["layers"]
    originals = {layer: layers[layer]["attention"]["qkv_a"] for layer in config.mla_layers}

    def put(order):
        for layer, original in originals.items():
            value = order(shards_of(root, layer)).astype(original.dtype)
            layers[layer]["attention"]["qkv_a"] = jax.device_put(value, original.sharding)
        return np.asarray(model.logits(tokens))

    try:
        np.testing.assert_array_equal(put(lambda shards: merge_ranks(shards, config)), wanted)
        assert np.abs(put(np.concatenate) - wanted).max() > 0.01 * np.abs(wanted).max()  # the mistake is seen
    finally:
        for layer, original in originals.items():
            layers[layer]["attention"]["qkv_a"] = original


def test_what_is_no_shard_of_the_projection_is_refused():
    config = making.small(q_lora_rank=16)  # 16 + 16 rows of 24
    with pytest.raises(ValueError, match=r"4 shards have shapes \[\(7, 24\)\]: \(8, 24\) was wanted"):
        merge_ranks([np.zeros((7, 24))] * 4, config)
    with pytest.raises(ValueError, match=r"0 shards have shapes \[\]"):
        merge_ranks([], config)
    with pytest.raises(ValueError, match="16 does not divide by ranks=32"):
        merge_ranks([np.zeros((1, 24))] * 32, config)
    with pytest.raises(ValueError, match="no merged q_a"):
        merge_ranks([np.zeros((8, 24))] * 4, making.small(q_lora_rank=None))
    with pytest.raises(ValueError, match=r"layer=0: one of the MLA layers \(1,\) was wanted"):
        hub_tensors_of_ranks([np.zeros((8, 24))] * 4, config, 0)
