"""The dry run: says what loading would do, from headers alone."""

import jax
import numpy as np
import pytest

from kimi_jax.checkpoints import folders, hub_read, reading, save_write
from kimi_jax.checkpoints.contents import Contents
from kimi_jax.config import Config
from tests.checkpoints import making


@pytest.fixture
def unread(monkeypatch):
    """Makes reading any tensor an error."""

    def refuse(*_):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(reading, "_read_all", refuse)


def test_a_dry_run_counts_what_each_device_would_read(data, unread):
    folder = data / "kimi-k3-random"
    config = Config.from_hf(folder)
    tree, places = making.abstract(config), making.shardings(config, (1, 8), "first")
    run = folders.dry_run(folder, config, tree, places)
    assert run.ok and len(run.skipped) == 3 and len(run.bytes_per_device) == 8
    found = hub_read.inspect(folder, config)
    total = sum(s.stored.nbytes for sources in found.sources.values() for s in sources)
    alone = folders.dry_run(folder, config, tree, making.shardings(config, (1, 1), "none"))
    k_b = sum(s.stored.nbytes for path, sources in found.sources.items() if path.endswith("k_b") for s in sources)
    padding = sum(8 * 4 for _ in found.padded)
    (whole,) = alone.bytes_per_device.values()
    assert whole == total - k_b - padding  # kv_b fills two parameters
    (each,) = set(run.bytes_per_device.values())
    assert whole / 8 < each < whole / 4  # what does not divide is read by all
    assert "would read" in repr(run) and "fits config.json" in repr(run)


def test_a_dry_run_and_a_load_count_the_same_bytes(data):
    folder = data / "kimi-linear-random"
    config = Config.from_hf(folder)
    tree, places = making.abstract(config), making.shardings(config, (1, 1), "none")
    run = folders.dry_run(folder, config, tree, places)
    _, report = folders.load_params(folder, config, tree, places, progress=False)
    assert sum(run.bytes_per_device.values()) == report.bytes_read


def test_a_dry_run_lists_every_problem_and_raises_none(tmp_path, unread):
    config = making.small()
    hub = making.hub_arrays(config)
    name = "model.layers.0.self_attn.o_proj.weight"
    hub["stray"] = hub.pop("model.norm.weight")
    hub[name] = hub[name][:-1]
    run = folders.dry_run(
        making.write(tmp_path, config, hub), config, making.abstract(config), making.shardings(config)
    )
    assert not run.ok and run.bytes_per_device == {}
    assert [len(problems) for problems in (run.missing, run.unexpected, run.misshapen)] == [1, 1, 1]
    for word in ("does not fit", "missing: norm", "unexpected: model.safetensors: tensor stray", f"tensor {name}"):
        assert word in repr(run)


def test_a_dry_run_of_a_save(tmp_path, unread):
    config = making.small(num_hidden_layers=2)
    places = making.shardings(config)
    params = jax.tree.map(
        lambda leaf, place: jax.device_put(np.ones(leaf.shape, leaf.dtype), place), making.abstract(config), places
    )
    save_write.save_params(tmp_path / "saved", Contents(config, params), progress=False)
    run = folders.dry_run(tmp_path / "saved", config, making.abstract(config), places)
    held = sum(shard.data.nbytes for array in jax.tree.leaves(params) for shard in array.addressable_shards)
    assert run.ok and sum(run.bytes_per_device.values()) == held
