"""Convert and dry run: the same bits in the other kind of folder, little memory, whole or not there."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

import kimi_jax
from kimi_jax.__main__ import main
from kimi_jax.checkpoints import folders, reading, save_write
from kimi_jax.config import Config
from sharding_rules import helix
from tests.checkpoints import making
from tests.checkpoints.making import stored

BF16 = ml_dtypes.bfloat16


def hub(folder: Path, config: Config) -> Path:
    """A checkpoint of two shards; K3's decay rates are stored with a tail that is not zero."""
    arrays = making.hub_arrays(config, BF16)
    for name in [name for name in arrays if name.endswith("A_log") and config.is_k3]:
        arrays[name] = np.concatenate([np.arange(8), [1.5, 0, -2]]).astype(np.float32)
    return making.write(folder, config, arrays, shards=2)


@pytest.fixture(scope="module")
def k3(tmp_path_factory) -> tuple[Path, Path]:
    """A K3 with packed experts as the hub has it, and converted to a save that is cut for 2 x 4 ranks."""
    root = tmp_path_factory.mktemp("k3")
    hub(root / "hub", making.small_k3(num_hidden_layers=2))
    kimi_jax.convert(root / "hub", root / "saved", layout=helix(2, 4), progress=False)
    return root / "hub", root / "saved"


def params(folder: Path, *mesh: int):
    return kimi_jax.load(folder, layout=helix(*mesh), progress=False).params


def assert_same(a, b):
    jax.tree.map(
        lambda x, y: np.testing.assert_array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8)), a, b
    )


# ---------------------------------------------------------------------------------------------------------- round trips
def test_k3_comes_back_bit_for_bit_with_packed_experts_and_padding(k3, tmp_path):
    folder, saved = k3
    report = kimi_jax.convert(saved, tmp_path / "back", progress=False)
    assert stored(tmp_path / "back") == stored(folder)
    assert (tmp_path / "back" / "config.json").read_text() == (saved / "1" / "config.json").read_text()
    assert json.loads((saved / "1" / "config.json").read_text()) == json.loads((folder / "config.json").read_text())
    assert report.nonzero_padding == ["model.layers.0.self_attn.A_log"]
    assert report.dtype_changes == {} and repr(report).startswith(f"converted {saved / '1'}")


def test_kimi_linear_comes_back_bit_for_bit(tmp_path):
    folder = hub(tmp_path / "hub", making.small())
    kimi_jax.convert(folder, tmp_path / "saved", progress=False)
    kimi_jax.convert(tmp_path / "saved", tmp_path / "back", shard_size="20KB", progress=False)
    assert stored(tmp_path / "back") == stored(folder)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 2


@pytest.mark.parametrize("mesh", [(1, 8), (2, 4), (4, 2), (8, 1), (1, 1), (1, 2)], ids=str)
def test_a_converted_save_is_loaded_onto_any_layout_as_the_hubs_folder_is(k3, mesh):
    folder, saved = k3
    assert_same(params(folder, *mesh), params(saved, *mesh))


def test_a_model_that_was_loaded_converted_saved_and_exported_is_the_same(k3, tmp_path):
    _, saved = k3
    model = kimi_jax.load(saved, layout=helix(4, 2, shard_qkv_a=True), progress=False)
    kimi_jax.save(model, tmp_path / "again", progress=False)
    fewer = kimi_jax.load(tmp_path / "again", layout=helix(1, 2), progress=False)
    kimi_jax.export_safetensors(fewer, tmp_path / "out", progress=False)
    assert stored(tmp_path / "out") == stored(k3[0])


# -------------------------------------------------------------------------------------------------------------- options
def test_the_layout_says_how_a_save_is_cut(k3, tmp_path):
    _, saved = k3
    kimi_jax.convert(saved, tmp_path / "whole", to="orbax", progress=False)

    def cuts(path):
        return len(list((path / "1" / "params" / "embed").glob("[0-9]*")))

    assert (cuts(saved), cuts(tmp_path / "whole")) == (8, 1)
    assert_same(params(saved, 1, 1), params(tmp_path / "whole", 1, 1))


def test_dtype_changes_numbers_the_config_and_no_packed_expert(k3, tmp_path):
    folder, saved = k3
    report = kimi_jax.convert(saved, tmp_path / "wide", dtype="float32", progress=False)
    assert Config.from_hf(tmp_path / "wide").dtype == "float32" and report.dtype_changes.keys() == {"BF16 -> float32"}
    before, after = stored(folder), stored(tmp_path / "wide")
    assert before.keys() == after.keys()
    for name, (dtype, shape, raw) in before.items():
        if dtype == "BF16" and after[name][0] == "F32":
            raw = np.frombuffer(raw, BF16).astype(np.float32).tobytes()
        assert after[name][1:] == (shape, raw)
    widened = {name for name in before if before[name][0] != after[name][0]}
    assert widened and not any("experts." in name and "shared" not in name for name in widened)


def test_what_means_nothing_is_refused(k3, tmp_path):
    folder, saved = k3
    with pytest.raises(ValueError, match="layout: safetensors are not cut"):
        kimi_jax.convert(saved, tmp_path / "out", layout=helix(1, 2))
    with pytest.raises(ValueError, match="to='zarr': 'orbax' or 'safetensors' was wanted"):
        kimi_jax.convert(saved, tmp_path / "out", to="zarr")
    with pytest.raises(ValueError, match="exists and is not empty"):
        kimi_jax.convert(saved, folder)
    with pytest.raises(ValueError, match="a save wants a folder of its own"):
        kimi_jax.convert(folder, folder.parent)


# ------------------------------------------------------------------------------------------------------- whole or not
@pytest.mark.parametrize("to", ["orbax", "safetensors"])
def test_a_conversion_that_fails_midway_leaves_nothing(k3, tmp_path, monkeypatch, to):
    plain, calls = reading._read_all, []

    def fails(stream, run, tensor):
        calls.append(tensor.name)
        if len(calls) == 20:
            raise OSError("the disk has gone")
        plain(stream, run, tensor)

    monkeypatch.setattr(reading, "_read_all", fails)
    with pytest.raises(OSError, match="the disk has gone"):
        kimi_jax.convert(k3[0], tmp_path / "out", to=to, progress=False)
    assert len(calls) >= 20 and not list(tmp_path.rglob("*.*"))


def test_an_interrupted_save_is_given_up_and_the_old_one_stays(k3, tmp_path, monkeypatch, ctrl_c):
    import _thread
    import time

    kimi_jax.convert(k3[0], tmp_path / "out", progress=False)
    plain = save_write._batches

    def interrupted(sizes):
        batches = list(plain(sizes))
        yield batches[0]
        _thread.interrupt_main()
        time.sleep(1)  # until the main thread has noticed
        yield from batches

    monkeypatch.setattr(save_write, "_batches", interrupted)
    with pytest.raises(KeyboardInterrupt):
        kimi_jax.convert(k3[0], tmp_path / "out", progress=False)
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == ["1"]


MEMORY = """
import sys
import kimi_jax

def status(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) * 1024

small, big, to = sys.argv[1:]
kimi_jax.convert(small, small + "-" + to, to=to, progress=False)  # what the libraries themselves take is not counted
before = status("VmRSS")
kimi_jax.convert(big, big + "-" + to, to=to, progress=False)
print(status("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("to", ["orbax", "safetensors"])
def test_a_conversion_holds_two_parameters_and_not_the_checkpoint(tmp_path, to):
    config = making.small(hidden_size=512, num_hidden_layers=9, num_experts=32, moe_intermediate_size=512)
    folder = making.write(tmp_path / "big", config, making.hub_arrays(config, BF16), shards=3)
    hub(tmp_path / "small", making.small())
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path / "small"), str(folder), to], capture_output=True, text=True,
        check=True, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    total = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    largest = 32 * 2 * 512 * 512 * 2
    assert total > 400 << 20
    assert int(done.stdout) <= 2 * largest + save_write.BATCH + (32 << 20), (to, int(done.stdout), total, largest)


# -------------------------------------------------------------------------------------------------------------- command
def test_the_command_converts_and_says_so(k3, tmp_path, capsys):
    folder, _ = k3
    assert main(["convert", str(folder), str(tmp_path / "out"), "--layout", "1x2"]) == 0
    said = capsys.readouterr()
    assert said.out.endswith(f"wrote {tmp_path / 'out'}\n") and said.err == ""
    assert "CAUTION   the unused tail of model.layers.0.self_attn.A_log is not zero" in said.out
    assert folders.kind_of(tmp_path / "out") == "orbax"
    assert main(["convert", str(tmp_path / "out"), str(folder)]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_a_dry_run_reads_no_tensor_and_its_status_says_whether_it_would_load(k3, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reading, "_read_all", None)
    for path in k3:
        assert main(["convert", str(path), "--dry-run", "--layout", "2x4"]) == 0
        assert capsys.readouterr().out.count("would read") == 8
    arrays = making.hub_arrays(making.small(), BF16)
    arrays["stray"] = arrays.pop("model.norm.weight")
    making.write(tmp_path, making.small(), arrays)
    assert main(["convert", str(tmp_path), "--dry-run"]) == 1
    said = capsys.readouterr().out
    assert "missing: norm" in said and "unexpected: model.safetensors: tensor stray" in said


def test_a_dry_run_of_a_save_lists_what_is_wrong(k3, tmp_path, capsys):
    saved = tmp_path / "saved"
    kimi_jax.convert(k3[0], saved, progress=False)
    file = saved / "1" / "kimi_jax.json"
    manifest = json.loads(file.read_text())
    manifest["parameters"]["stray"] = manifest["parameters"].pop("norm")
    manifest["parameters"]["embed"]["shape"] = [1, 2]
    file.write_text(json.dumps(manifest))
    (saved / "1" / "params" / "lm_head" / ".zarray").unlink()
    assert main(["convert", str(saved), "--dry-run"]) == 1
    said = capsys.readouterr().out
    for words in ("parameter norm is missing", "parameter lm_head is missing", "parameter stray is unexpected",
                  "parameter embed has shape [1, 2]; config.json wants [40, 24]"):  # fmt: skip
        assert words in said


def test_the_command_wants_a_place_to_write_to_and_a_layout_that_reads(k3, capsys):
    assert main(["convert", str(k3[0])]) == 2
    assert "DST is missing" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["convert", str(k3[0]), "x", "--layout", "2,4"])
    assert "TPxCP, such as 2x4, was wanted" in capsys.readouterr().err
