"""Export: what was loaded comes back, bit for bit, from any layout, in files that others read."""

import itertools
import json

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

import kimi_jax
from kimi_jax.checkpoints import folders, headers
from kimi_jax.checkpoints.contents import Contents
from kimi_jax.checkpoints.hub_write import export_params, parse_size
from kimi_jax.config import Config
from sharding_rules import helix
from tests.checkpoints import making
from tests.checkpoints.making import stored

BF16 = ml_dtypes.bfloat16


def load(folder, config, dtype=BF16, spread="two"):
    tree, places = making.abstract(config, dtype), making.shardings(config, spread=spread)
    return folders.load_params(folder, config, tree, places, progress=False)


@pytest.mark.parametrize(
    "name, spread",
    [("kimi-linear-random", "none"), ("kimi-linear-random", "two"), ("kimi-k3-random", "two"),
     ("kimi-k3-random-bf16", "first")],
)  # fmt: skip
def test_a_hub_checkpoint_comes_back_bit_for_bit(data, tmp_path, name, spread):
    config, raw = Config.from_hf(data / name), json.loads((data / name / "config.json").read_text())
    params, report = load(data / name, config, spread=spread)
    contents = Contents(config, params, hub_config=raw, padding=report.padding)
    export_params(tmp_path / "out", contents, shard_size="1MB", progress=False)
    ours, theirs = stored(tmp_path / "out"), stored(data / name)
    assert ours == {key: value for key, value in theirs.items() if key not in report.skipped}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == raw


def test_the_dense_layers_get_the_hubs_spelling_back(tiny, tmp_path):
    config = Config.from_hf(tiny)
    params, _ = load(tiny, config)
    export_params(tmp_path / "out", Contents(config, params, source=tiny), progress=False)
    ours, theirs = stored(tmp_path / "out"), stored(tiny)
    fixed = {key.replace("layers.0.block_sparse_moe", "layers.0.mlp"): value for key, value in theirs.items()}
    assert ours == fixed and ours.keys() != theirs.keys()
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (tiny / file).read_bytes()
    assert Config.from_hf(tmp_path / "out") == config


def test_the_safetensors_package_reads_the_files(tmp_path):
    config = making.small_k3(hidden_size=25)  # tensors of an odd number of elements
    hub = making.hub_arrays(config, BF16)
    hub |= {name: array.astype(np.float32) for name, array in hub.items() if name.endswith(("A_log", "o_norm.weight"))}
    folder = making.write(tmp_path / "in", config, hub)
    params, _ = load(folder, config)
    files = export_params(tmp_path / "out", Contents(config, params), shard_size=20_000, progress=False)
    assert len(files) > 3
    read = {}
    for file in files:
        read |= load_file(file)
        with safe_open(file, framework="np") as opened:
            assert opened.metadata() == {"format": "pt"}
        for tensor in headers.read_header(file):
            assert tensor.begin % headers.ITEM_BYTES[tensor.dtype] == 0  # torch views them in place
    assert read.keys() == hub.keys()
    for name, array in hub.items():
        assert read[name].tobytes() == array.tobytes() and read[name].shape == array.shape


def test_shards_respect_their_size_and_the_index_is_true(tmp_path):
    config = making.small()
    params, _ = load(making.write(tmp_path / "in", config, making.hub_arrays(config, BF16)), config)
    files = export_params(tmp_path / "out", Contents(config, params), shard_size="10KB", progress=False)
    sizes = [sum(tensor.nbytes for tensor in headers.read_header(file)) for file in files]
    assert max(sizes) <= 10_000 and all(a + b > 5_000 for a, b in itertools.pairwise(sizes))
    index = json.loads((tmp_path / "out" / headers.INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(sizes)
    assert [file.name for file in files] == [
        f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)
    ]
    one = export_params(tmp_path / "one", Contents(config, params), progress=False)
    assert [file.name for file in one] == ["model.safetensors"] and not (tmp_path / "one" / headers.INDEX).exists()


def test_a_tensor_larger_than_a_shard_has_a_file_of_its_own(tmp_path):
    config = making.small()
    params, _ = load(making.write(tmp_path / "in", config, making.hub_arrays(config, BF16)), config)
    files = export_params(tmp_path / "out", Contents(config, params), shard_size=1, progress=False)
    assert all(len(headers.read_header(file)) == 1 for file in files)


def test_a_widened_model_goes_back_to_the_stored_dtype(data, tmp_path):
    folder = data / "kimi-linear-random"
    config = Config.from_hf(folder)
    params, _ = load(folder, config, np.float32)
    export_params(tmp_path / "out", Contents(config, params), progress=False)
    assert stored(tmp_path / "out") == stored(folder)


@pytest.mark.parametrize("tail", [[0.0] * 5, [1.5, -2.0]])
def test_k3s_padding_is_written_back(tmp_path, tail):
    config = making.small_k3()
    hub = making.hub_arrays(config, BF16)
    for layer in config.kda_layers:
        name = f"language_model.model.layers.{layer}.self_attn.A_log"
        hub[name] = np.concatenate([np.arange(8), tail]).astype(np.float32) + layer
    folder = making.write(tmp_path / "in", config, hub)
    params, report = load(folder, config)
    export_params(tmp_path / "out", Contents(config, params, padding=report.padding), progress=False)
    assert stored(tmp_path / "out") == stored(folder)


def test_a_parameter_padded_by_the_layout_loses_its_padding(tmp_path):
    config = making.small(num_attention_heads=6)
    folder = making.write(tmp_path / "in", config, making.hub_arrays(config, BF16))
    tree, places = making.abstract(config, BF16), making.shardings(config, spread="none")
    shape = tree["layers"][1]["attention"]["o"].shape
    tree["layers"][1]["attention"]["o"] = jax.ShapeDtypeStruct((shape[0], 8, shape[2]), BF16)
    params, _ = folders.load_params(folder, config, tree, places, progress=False)
    export_params(tmp_path / "out", Contents(config, params), progress=False)
    assert stored(tmp_path / "out") == stored(folder)


def test_nothing_is_written_over_and_nothing_half_written_stays(tmp_path, monkeypatch):
    config = making.small()
    params, _ = load(making.write(tmp_path / "in", config, making.hub_arrays(config, BF16)), config)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="exists and is not empty"):
        export_params(tmp_path / "out", Contents(config, params), progress=False)
    (tmp_path / "out" / "mine.txt").unlink()
    broken = params | {"norm": params["norm"].copy()}
    broken["norm"].delete()
    with pytest.raises(RuntimeError, match="deleted"):
        export_params(tmp_path / "out", Contents(config, broken), progress=False)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["in", "out"] and not list(
        (tmp_path / "out").iterdir()
    )
    export_params(tmp_path / "out", Contents(config, params), progress=False)
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize(
    "text, size", [("5GB", 5 * 10**9), ("1.5 MiB", 3 << 19), ("7", 7), (7, 7), ("300KB", 300_000), ("12B", 12)]
)
def test_sizes_are_read(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5 gigs", "-1GB", "0", "1e9"])
def test_sizes_that_mean_nothing_are_refused(text):
    with pytest.raises(ValueError, match="shard_size"):
        parse_size(text)


@pytest.mark.parity
def test_transformers_loads_an_export_without_a_missing_key_and_says_the_same(tiny, tmp_path):
    """The same logits as of the original, bit for bit, and the greedy tokens that are ours."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    ours = kimi_jax.load(tiny, dtype="float32", layout=helix(2, 4), progress=False)
    prompt, new_tokens = [256, 72, 105, 33, 90, 12], 48
    ids = torch.tensor([prompt])
    original = transformers.KimiLinearForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    with torch.no_grad():
        wanted = original(ids).logits
    (continued,) = kimi_jax.generate(ours, [prompt], max_new_tokens=new_tokens)
    raw = json.loads((tiny / "config.json").read_text())
    for i, hub_config in enumerate((raw, None)):
        out = tmp_path / str(i)
        contents = Contents(ours.config, ours.params, hub_config=hub_config, source=tiny)
        export_params(out, contents, shard_size="3MB", progress=False)
        model, info = transformers.KimiLinearForCausalLM.from_pretrained(
            out, dtype=torch.float32, output_loading_info=True
        )
        assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
        with torch.no_grad():
            assert torch.equal(wanted, model(ids).logits)
            tokens = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens
            )
        assert tokens[0, len(prompt) :].tolist() == continued.tokens
        assert len(set(continued.tokens)) > 5, "a constant continuation shows nothing"
