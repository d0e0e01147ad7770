"""Saves: back on any layout, bit for bit; whole or not there; and damage is named."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from kimi_jax.checkpoints import folders, save_read, save_write
from kimi_jax.checkpoints.contents import Contents
from kimi_jax.checkpoints.hub_write import export_params
from kimi_jax.checkpoints.placing import flatten
from kimi_jax.config import Config
from tests.checkpoints import failing, making
from tests.checkpoints.making import stored

BF16 = ml_dtypes.bfloat16
LAYOUTS = {(1, 8): "first", (2, 4): "two", (4, 2): "two", (8, 1): "last", (1, 1): "none"}  # and what each splits


def hub_model(folder, config, dtype=BF16, shape=(2, 4), spread="two"):
    tree, places = making.abstract(config, dtype), making.shardings(config, shape, spread)
    return folders.load_params(folder, config, tree, places, progress=False)


def restored(path, config, dtype=BF16, shape=(2, 4), spread="two"):
    tree, places = making.abstract(config, dtype), making.shardings(config, shape, spread)
    params, report = folders.load_params(path, config, tree, places, progress=False)
    assert all(jax.tree.leaves(jax.tree.map(lambda array, place: array.sharding == place, params, places)))
    return params, report


def assert_same(a, b):
    def same(x, y):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8))

    jax.tree.map(same, a, b)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model with the folder that it came from and the folder that it was saved to."""
    config, root = making.small_k3(num_hidden_layers=2), tmp_path_factory.mktemp("model")
    folder = making.write(root / "hub", config, making.hub_arrays(config, BF16))
    params, _ = hub_model(folder, config)
    save_write.save_params(root / "saved", Contents(config, params), progress=False)
    return root, config, params


@pytest.fixture
def saved(model, tmp_path):
    """The folder of a save, to be damaged, its config, and what was saved. Beside it stands the hub's folder."""
    root, config, params = model
    shutil.copytree(root, tmp_path, dirs_exist_ok=True)
    return tmp_path / "saved", config, params


@pytest.mark.parametrize("name", ["kimi-linear-random", "kimi-k3-random"])
def test_hub_to_orbax_to_hub_is_bit_for_bit_across_layouts(data, tmp_path, name):
    config, raw = Config.from_hf(data / name), json.loads((data / name / "config.json").read_text())
    params, report = hub_model(data / name, config, shape=(2, 4), spread="last")
    save_write.save_params(
        tmp_path / "saved", Contents(config, params, hub_config=raw, padding=report.padding), progress=False
    )
    again, second = restored(tmp_path / "saved", config, shape=(8, 1), spread="first")
    saved_raw = json.loads((folders.locate(tmp_path / "saved") / "config.json").read_text())
    assert saved_raw == raw
    export_params(tmp_path / "out", Contents(config, again, hub_config=raw, padding=second.padding), progress=False)
    ours, theirs = stored(tmp_path / "out"), stored(data / name)
    assert ours == {key: value for key, value in theirs.items() if key not in report.skipped}


@pytest.mark.parametrize("layout, spread", LAYOUTS.items(), ids=str)
def test_a_save_is_read_onto_every_layout(saved, layout, spread):
    path, config, params = saved
    again, report = restored(path, config, shape=layout, spread=spread)
    assert_same(params, again)
    assert report.bytes_read == sum(array.nbytes for array in jax.tree.leaves(params))


@pytest.mark.parametrize("layout, spread", LAYOUTS.items(), ids=str)
def test_a_save_from_every_layout_is_the_same(saved, tmp_path, layout, spread):
    _, config, params = saved
    here, _ = hub_model(tmp_path / "hub", config, shape=layout, spread=spread)
    save_write.save_params(tmp_path / "again", Contents(config, here), progress=False)
    assert_same(params, restored(tmp_path / "again", config)[0])


def test_orbax_itself_reads_a_save(saved):
    import orbax.checkpoint as ocp

    path, _, params = saved
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.restore(path / "1" / "params", restore_args=jax.tree.map(
            lambda array: ocp.ArrayRestoreArgs(sharding=array.sharding), _string_keys(params)))  # fmt: skip
    assert_same(_string_keys(params), tree)


def _string_keys(tree):
    return {str(k): _string_keys(v) if isinstance(v, dict) else v for k, v in tree.items()}


def test_dtypes_are_cast_on_the_way_and_kept_ones_are_not(saved):
    path, config, params = saved
    wide, report = restored(path, config, np.float32)
    assert wide["embed"].dtype == np.float32 and report.dtype_changes.keys() == {"BF16 -> float32"}
    np.testing.assert_array_equal(np.asarray(wide["embed"]), np.asarray(params["embed"]).astype(np.float32))
    assert wide["layers"][0]["attention"]["conv"].dtype == BF16  # K3's is kept as it was stored


def test_the_saved_config_says_the_dtype_that_was_saved(tmp_path):
    for config in (making.small(), making.small_k3()):
        folder = making.write(tmp_path / config.hidden_act, config, making.hub_arrays(config, BF16))
        wide, _ = hub_model(folder, config, np.float32)
        path = tmp_path / f"saved-{config.hidden_act}"
        save_write.save_params(path, Contents(config, wide, hub_config=config.to_hf()), progress=False)
        assert Config.from_hf(folders.locate(path)).dtype == "float32"


def test_the_folder_is_told_by_what_is_in_it(saved, tmp_path):
    path, config, params = saved
    assert folders.locate(path) == path / "1" and folders.locate(tmp_path / "hub") == tmp_path / "hub"
    args = config, making.abstract(config, BF16), making.shardings(config)
    for source in (path, path / "1", tmp_path / "hub"):
        assert_same(params, folders.load_params(source, *args, progress=False)[0])
    assert Config.from_hf(folders.locate(path)) == config


def test_tokenizer_files_go_with_a_save(tiny, tmp_path):
    config = Config.from_hf(tiny)
    params, _ = hub_model(tiny, config)
    save_write.save_params(tmp_path / "saved", Contents(config, params, source=tiny), progress=False)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "saved" / "1" / file).read_bytes() == (tiny / file).read_bytes()


def test_a_second_save_takes_the_place_of_the_first(saved):
    path, config, params = saved
    other = jax.tree.map(lambda array: array + np.ones((), array.dtype), params)
    going_on = save_write.save_params(path, Contents(config, other), progress=False, wait=False)
    going_on.wait()
    assert going_on.done and [entry.name for entry in path.iterdir()] == ["2"]
    assert_same(other, restored(path, config)[0])


def test_a_save_that_failed_leaves_the_old_one_and_says_why(saved, monkeypatch):
    path, config, params = saved

    def broken(folder, tree, stop):
        folder.mkdir()
        raise OSError("no space left")

    monkeypatch.setattr(save_write, "_write", broken)
    with pytest.raises(OSError, match="no space left"):
        save_write.save_params(path, Contents(config, params), progress=False)
    assert [entry.name for entry in path.iterdir()] == ["1"]


def test_what_a_killed_save_left_is_no_checkpoint(saved):
    path, config, params = saved
    (path / "1").rename(path / ".unfinished-1")
    with pytest.raises(
        ValueError, match=r"no finished checkpoint, only what a save left that was killed: \.unfinished-1"
    ):
        folders.locate(path)
    save_write.save_params(path, Contents(config, params), progress=False)
    assert [entry.name for entry in path.iterdir()] == ["1"]


def test_a_folder_of_other_things_is_not_saved_into(saved, tiny):
    path, config, params = saved
    (path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds notes.txt: a save wants a folder of its own"):
        save_write.save_params(path, Contents(config, params), progress=False)


def test_the_highest_number_counts(saved):
    path, config, params = saved
    for number in ("9", "10"):
        shutil.copytree(path / "1", path / number)
    assert folders.locate(path) == path / "10"
    save_write.save_params(path, Contents(config, params), progress=False)
    assert [entry.name for entry in path.iterdir()] == ["11"]


def test_numbered_folders_of_someone_else_are_left_alone(saved):
    path, config, params = saved
    (path / "0").mkdir()
    (path / "0" / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match="holds 0: a save wants a folder of its own"):
        save_write.save_params(path, Contents(config, params), progress=False)
    assert (path / "0" / "thesis.tex").exists() and folders.locate(path) == path / "1"


def damaged(path, config, *words):
    failing.fails(path, config, making.abstract(config, BF16), making.shardings(config), *words)


def test_a_missing_array_is_named(saved):
    path, config, _ = saved
    array = path / "1" / "params" / "layers.1.attention.qkv_a"
    array.rename(path / "gone")
    damaged(path, config, str(array), "layers/1/attention/qkv_a is missing")


@pytest.mark.parametrize("how", ["missing", "truncated", "longer"])
def test_a_damaged_part_of_an_array_is_named(saved, how):
    path, config, _ = saved
    part = max((path / "1" / "params" / "embed").glob("[0-9]*"))
    if how == "missing":
        part.unlink()
    else:
        part.write_bytes(part.read_bytes()[:-1] if how == "truncated" else part.read_bytes() + b"\0")
    damaged(path, config, str(part), "embed", {"missing": "is missing"}.get(how, "were wanted"))


@pytest.mark.parametrize(
    "change",
    [dict(compressor={"id": "zstd"}), dict(order="F"), dict(dtype=">f4"), dict(dtype="<f4"), dict(chunks=[0, 0]),
     dict(chunks=[3]), dict(shape=[1, 2])],
    ids=str,
)  # fmt: skip
def test_an_array_described_differently_is_refused(saved, change):
    path, config, _ = saved
    file = path / "1" / "params" / "embed" / ".zarray"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    damaged(path, config, str(file.parent), "embed")


def test_a_save_of_another_config_is_refused(saved):
    path, _, _ = saved
    for change, words in (
        (dict(vocab_size=48), ("embed has shape [40, 24]; config.json wants [48, 24]",)),
        (dict(num_hidden_layers=3), ("layers/2/", "is missing")),
        (dict(latent_moe_use_norm=False), ("latent_norm is unexpected",)),
    ):
        damaged(path, making.small_k3(**(dict(num_hidden_layers=2) | change)), *words)


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", '{"format": 2, "parameters": {}, "padding": {}}', '{"format": 1, "parameters": [], "padding": {}}',
     '{"format": 1, "parameters": {"embed": {"shape": 3, "dtype": "float32"}}, "padding": {}}'],
)  # fmt: skip
def test_a_damaged_manifest_is_named(saved, text):
    path, config, _ = saved
    (path / "1" / save_read.MANIFEST).write_text(text)
    damaged(path, config, save_read.MANIFEST)


@pytest.mark.parametrize("padding", [[], {"a": 1}, {"a": {"values": ["x"], "dtype": "float32"}}], ids=str)
def test_damaged_padding_is_named(saved, padding):
    path, config, _ = saved
    file = path / "1" / save_read.MANIFEST
    file.write_text(json.dumps(json.loads(file.read_text()) | {"padding": padding}))
    damaged(path, config, save_read.MANIFEST, "padding")


def test_flipped_bytes_in_the_descriptions_never_load_something_else(saved):
    """200 flips over the .zarray files of a save: an error, or the very same boxes of the very same files."""
    path, config, _ = saved
    intact, rng, harmless = save_read.inspect(path, config).sources, np.random.default_rng(7), 0
    said = json.loads((path / "1" / save_read.MANIFEST).read_text())["parameters"]
    for _ in range(200):
        name = sorted(intact)[rng.integers(len(intact))]
        file = path / "1" / "params" / name.replace("/", ".") / ".zarray"
        sound = file.read_bytes()
        raw = bytearray(sound)
        raw[rng.integers(len(raw))] ^= int(rng.integers(1, 256))
        file.write_bytes(raw)
        try:
            found = save_read._sources(file.parent, name, said[name])
        except ValueError as error:
            assert str(file.parent) in str(error)
        else:
            harmless += 1
            assert found == intact[name]
        file.write_bytes(sound)
    assert harmless <= 40  # in keys and values that reading does not use


SAVER = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")
import numpy as np
from kimi_jax.checkpoints import save_write
from kimi_jax.checkpoints.contents import Contents
from tests.checkpoints import making

config, path = making.small(hidden_size=256, vocab_size=2048), sys.argv[1]
places = making.shardings(config)
for version in range(1, 10_000):
    params = jax.tree.map(
        lambda leaf, place: jax.device_put(np.full(leaf.shape, version, np.float32), place),
        making.abstract(config),
        places,
    )
    save_write.save_params(path, Contents(config, params), progress=False)
    print(version, flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="kills by signal")
@pytest.mark.parametrize("kills", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_a_save_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path, kills):
    config, rng = making.small(hidden_size=256, vocab_size=2048), np.random.default_rng(kills)
    path, root = tmp_path / "saved", Path(__file__).parents[2]
    for _ in range(kills):
        child = subprocess.Popen([sys.executable, "-c", SAVER, str(path)], stdout=subprocess.PIPE, text=True, cwd=root)
        assert child.stdout is not None
        finished = [int(child.stdout.readline()) for _ in range(2)]
        time.sleep(rng.uniform(0, 0.6))
        os.kill(child.pid, signal.SIGKILL)
        finished += [int(line) for line in child.communicate()[0].split()]
        params, _ = restored(path, config, np.float32)
        values = {float(v) for array in flatten(params).values() for v in np.unique(np.asarray(array))}
        assert len(values) == 1 and values.pop() in (finished[-1], finished[-1] + 1)
