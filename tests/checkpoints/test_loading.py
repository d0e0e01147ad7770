"""Loading: right dtypes, each byte read once, each device its own part, little memory, and a report that is true."""

import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from safetensors.numpy import load_file

from kimi_jax.checkpoints import folders, hub_read, names, placing, reading
from kimi_jax.config import Config
from kimi_jax.tables import human
from tests.checkpoints import making

BF16 = ml_dtypes.bfloat16


def load(folder, config, dtype=np.float32, shape=(2, 4), spread="two", **options):
    tree, places = making.abstract(config, dtype), making.shardings(config, shape, spread)
    return folders.load_params(folder, config, tree, places, progress=False, **options)


@pytest.mark.parametrize(
    "shape, spread", [((1, 8), "first"), ((8, 1), "last"), ((4, 2), "two"), ((2, 4), "two"), ((2, 4), "none")], ids=str
)
def test_every_layout_holds_the_same_numbers(tmp_path, monkeypatch, shape, spread):
    monkeypatch.setattr(placing, "SMALL", 0)
    config = making.small_k3(num_hidden_layers=2)
    folder = making.write(tmp_path, config, making.hub_arrays(config), shards=2)
    one, _ = load(folder, config, shape=(1, 1), spread="none")
    params, report = load(folder, config, shape=shape, spread=spread)
    places = making.shardings(config, shape, spread)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), one, params)
    assert all(jax.tree.leaves(jax.tree.map(lambda array, place: array.sharding == place, params, places)))
    assert len(report.bytes_per_device) == shape[0] * shape[1]


def test_a_bfloat16_model_of_a_float32_file_rounds_each_number_once(tmp_path):
    config = making.small()
    hub = making.hub_arrays(config)
    params, report = load(making.write(tmp_path, config, hub), config, BF16)
    got = np.asarray(params["layers"][0]["attention"]["o"])
    assert got.dtype == BF16
    np.testing.assert_array_equal(got, hub["model.layers.0.self_attn.o_proj.weight"].astype(BF16).reshape(got.shape))
    kept = sum(name.endswith(("A_log", "dt_bias", "correction_bias")) for name in hub)
    assert report.dtype_changes == {"F32 -> bfloat16": len(hub) - kept}


def test_kept_parameters_keep_the_stored_dtype(data, tiny):
    params, _ = load(data / "kimi-k3-random", Config.from_hf(data / "kimi-k3-random"), BF16)
    attention, ffn = params["layers"][0]["attention"], params["layers"][1]["ffn"]
    assert {attention[name].dtype for name in ("A_log", "dt_bias", "conv", "o_norm")} == {np.dtype(np.float32)}
    assert ffn["router_bias"].dtype == np.float32 and attention["o"].dtype == BF16
    params, _ = load(tiny, Config.from_hf(tiny), np.float32)  # transformers rounded these to bfloat16
    assert params["layers"][0]["attention"]["A_log"].dtype == BF16
    assert params["layers"][0]["attention"]["conv"].dtype == np.float32


def test_each_byte_is_read_once_and_only_if_a_device_wants_it(tmp_path, monkeypatch):
    config = making.small_k3(num_hidden_layers=2)
    folder = making.write(tmp_path, config, making.hub_arrays(config), shards=2)
    runs: list[tuple[Path, int, int]] = []
    plain = reading._read_all

    def watched(stream, run, stored):
        runs.append((stored.file, stream.tell(), stream.tell() + run.size))
        plain(stream, run, stored)

    monkeypatch.setattr(reading, "_read_all", watched)
    monkeypatch.setattr(reading, "DIRECT_RUN", 8)
    monkeypatch.setattr(placing, "SMALL", 0)
    for spread in ("none", "first", "last", "two"):
        runs.clear()
        load(folder, config, spread=spread)
        for file in folder.glob("*.safetensors"):
            own = sorted((begin, end) for name, begin, end in runs if name == file)
            assert all(a[1] == b[0] for a, b in itertools.pairwise(own)), "a gap, or a byte read twice"
            assert own[-1][1] == file.stat().st_size
    # One of eight devices alone reads an eighth.
    places = making.shardings(config, (8, 1), "first")
    embed = hub_read.inspect(folder, config).sources["embed"]
    (box, *_), runs[:] = placing.regions((40, 24), places["embed"]), []
    target = reading.Target(box, np.empty(box.shape, np.float32))
    reading.fill(embed[0], [target], lambda nbytes: None)
    assert sum(end - begin for _, begin, end in runs) == 40 * 24 * 4 // 8


@pytest.mark.parametrize("direct_run, chunk", [(1, 1 << 20), (1 << 20, 200), (64, 1000)])
def test_how_bytes_are_cut_does_not_change_what_is_loaded(tmp_path, monkeypatch, direct_run, chunk):
    config = making.small_k3(num_experts=2, vocab_size=16)
    folder = making.write(tmp_path, config, making.hub_arrays(config))
    whole, _ = load(folder, config, spread="none")
    monkeypatch.setattr(reading, "DIRECT_RUN", direct_run)
    monkeypatch.setattr(reading, "CHUNK", chunk)
    monkeypatch.setattr(placing, "SMALL", 0)
    for spread in ("last", "two"):
        cut, report = load(folder, config, spread=spread)
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), whole, cut)
        assert report.bytes_read == sum(a.nbytes for a in load_file(folder / "model.safetensors").values())


def test_replicated_parameters_share_one_buffer_on_cpu(tmp_path):
    config = making.small()
    params, _ = load(making.write(tmp_path, config, making.hub_arrays(config)), config, spread="none")
    shards = params["embed"].addressable_shards
    assert len(shards) == 8 and len({shard.data.unsafe_buffer_pointer() for shard in shards}) == 1


def test_k3s_padding_is_left_out_kept_for_export_and_reported_unless_zero(tmp_path):
    config = making.small_k3()
    hub = making.hub_arrays(config)
    for layer, tail in ((0, 0.0), (2, 7.5)):
        name = f"language_model.model.layers.{layer}.self_attn.A_log"
        hub[name] = np.concatenate([hub[name], np.full(4, tail, np.float32)])
    params, report = load(making.write(tmp_path, config, hub), config)
    for layer in (0, 2):
        name = f"model.layers.{layer}.self_attn.A_log"
        stored = hub[f"language_model.{name}"]
        np.testing.assert_array_equal(np.asarray(params["layers"][layer]["attention"]["A_log"]), stored[:8])
        np.testing.assert_array_equal(report.padding[name], stored[8:])
    assert report.nonzero_padding == ["model.layers.2.self_attn.A_log"]
    assert "CAUTION   the unused tail of model.layers.2.self_attn.A_log is not zero" in repr(report)


def test_the_image_half_is_skipped_and_counted(data):
    _, report = load(data / "kimi-k3-random", Config.from_hf(data / "kimi-k3-random"))
    stored = {}
    for file in (data / "kimi-k3-random").glob("*.safetensors"):
        stored |= load_file(file)
    images = {name: a.nbytes for name, a in stored.items() if name.startswith(("vision_tower.", "mm_projector."))}
    assert report.skipped == images and len(images) == 3
    assert report.tensors == len(stored) - 3 and report.files == 2
    assert "3 tensors on purpose" in repr(report)


def test_the_report_says_what_was_done(tmp_path):
    config = making.small()
    hub = making.hub_arrays(config)
    params, report = load(making.write(tmp_path, config, hub, shards=3), config, spread="none")
    total = sum(a.nbytes for a in hub.values())
    assert (report.files, report.tensors, report.parameters) == (3, len(hub), len(jax.tree.leaves(params)))
    assert report.bytes_read == total and set(report.bytes_per_device.values()) == {total}
    assert report.dtype_changes == {} and report.seconds > 0 and report.peak_resident > total
    assert f"{len(hub)} tensors in 3 files" in repr(report) and human(total) in repr(report)
    assert [human(n) for n in (0, 1023, 1536, 3 << 40)] == ["0 B", "1023 B", "1.50 KiB", "3.00 TiB"]


def test_the_bar_counts_bytes_and_can_be_silenced(tiny, capsys):
    config = Config.from_hf(tiny)
    tree, places = making.abstract(config), making.shardings(config)
    folders.load_params(tiny, config, tree, places, progress=False)
    assert capsys.readouterr().err == ""
    folders.load_params(tiny, config, tree, places)
    assert "8.27M" in capsys.readouterr().err


def fp8_checkpoint(folder: Path, config: Config, suffix: str, drop: bool = False) -> dict[str, np.ndarray]:
    """Projections in fp8 with a scale for each 128x128 block -> the hub tensors they stand for, in float32."""
    hub, stored, exact = making.hub_arrays(config), {}, {}
    rng = np.random.default_rng(3)
    for name, array in hub.items():
        if array.ndim == 2 and name.endswith("proj.weight") and "_a_proj" not in name:
            rows, columns = array.shape
            values = rng.normal(size=array.shape).astype(ml_dtypes.float8_e4m3fn)
            scale = rng.uniform(0.1, 4, (-(-rows // 128), -(-columns // 128))).astype(np.float32)
            stored[name] = ("F8_E4M3", values)
            if not drop:
                stored[name + suffix] = ("F32", scale)
            grown = np.repeat(np.repeat(scale, 128, 0), 128, 1)[:rows, :columns]
            exact[name] = values.astype(np.float32) * grown
        else:
            stored[name], exact[name] = ("F32", array), array
    folder.mkdir(exist_ok=True)
    write_raw(folder / "model.safetensors", stored)
    return exact


def write_raw(file: Path, stored: dict[str, tuple[str, np.ndarray]]) -> None:
    """A safetensors file of arrays whose dtype the package's own writer may not know."""
    header, blobs, at = {}, [], 0
    for name, (dtype, array) in stored.items():
        blobs.append(array.tobytes())
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + len(blobs[-1])]}
        at += len(blobs[-1])
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


@pytest.mark.parametrize("suffix, spread", [("_scale_inv", "last"), ("_scale", "two"), ("_scale", "none")])
def test_fp8_weights_are_multiplied_with_their_block_scales(tmp_path, monkeypatch, suffix, spread):
    config = making.small(hidden_size=136, intermediate_size=264, v_head_dim=40, qk_nope_head_dim=24)
    monkeypatch.setattr(placing, "SMALL", 0)
    exact = fp8_checkpoint(tmp_path / "fp8", config, suffix)
    plain = making.write(tmp_path / "plain", config, exact)
    monkeypatch.setattr(reading, "CHUNK", 5000)
    got, report = load(tmp_path / "fp8", config, spread=spread)
    wanted, _ = load(plain, config, spread=spread)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), wanted, got)
    assert report.dtype_changes["F8_E4M3 -> float32"] > 10


def test_fp8_without_its_scales_is_refused(tmp_path):
    config = making.small()
    fp8_checkpoint(tmp_path, config, "_scale_inv", drop=True)
    with pytest.raises(
        ValueError, match=r"o_proj.weight is F8_E4M3 without scales: .*_scale_inv or .*_scale is missing"
    ):
        load(tmp_path, config)


def test_a_model_that_is_not_the_tables_is_refused(tmp_path):
    config = making.small()
    folder = making.write(tmp_path, config, making.hub_arrays(config))
    tree = making.abstract(config)
    tree["norm"] = jax.ShapeDtypeStruct((23,), np.float32)
    with pytest.raises(ValueError, match=r"norm: \(23,\) in the model, \(24,\) in the table"):
        folders.load_params(folder, config, tree, making.shardings(config), progress=False)


def test_a_parameter_larger_than_its_tensors_ends_in_zeros(tmp_path):
    config = making.small(num_attention_heads=6)
    folder = making.write(tmp_path, config, making.hub_arrays(config))
    args = making.abstract(config), making.shardings(config, spread="none")
    plain, _ = folders.load_params(folder, config, *args, progress=False)
    tree, mesh = making.abstract(config), jax.make_mesh((8,), ("h",), axis_types=(AxisType.Auto,))
    attention, places = tree["layers"][1]["attention"], args[1]["layers"][1]["attention"]
    for name, axis in {"q_b": 0, "k_b": 0, "v_b": 0, "o": 1}.items():
        shape = list(attention[name].shape)
        shape[axis] = 8
        attention[name] = jax.ShapeDtypeStruct(tuple(shape), np.float32)
        places[name] = NamedSharding(mesh, PartitionSpec(*[None] * axis, "h"))
    padded, _ = folders.load_params(folder, config, tree, args[1], progress=False)
    for name, axis in {"q_b": 0, "k_b": 0, "v_b": 0, "o": 1}.items():
        heads = np.moveaxis(np.asarray(padded["layers"][1]["attention"][name]), axis, 0)
        np.testing.assert_array_equal(
            heads[:6], np.moveaxis(np.asarray(plain["layers"][1]["attention"][name]), axis, 0)
        )
        assert (heads[6:] == 0).all() and (heads[:6] != 0).any()


def test_string_layer_keys_come_back_as_strings(tmp_path):
    config = making.small()
    folder = making.write(tmp_path, config, making.hub_arrays(config))
    as_strings = [
        {**tree, "layers": {str(key): value for key, value in tree["layers"].items()}}
        for tree in (making.abstract(config), making.shardings(config))
    ]
    params, _ = folders.load_params(folder, config, *as_strings, progress=False)
    assert set(params["layers"]) == {"0", "1", "2"}


MEMORY = """
import sys
import jax, ml_dtypes
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")
from kimi_jax.checkpoints import folders
from kimi_jax.config import Config
from tests.checkpoints import making

def peak():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))

folder, spread = sys.argv[1:]
config = Config.from_hf(folder)
tree, places = making.abstract(config, ml_dtypes.bfloat16), making.shardings(config, spread=spread)
jax.block_until_ready(jax.device_put([0.0] * 8, jax.devices()))
before = peak()
params, _ = folders.load_params(folder, config, tree, places, progress=False)
sizes = [array.nbytes for array in jax.tree.leaves(params)]
print(peak() - before, sum(sizes), max(sizes))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("spread", ["last", *(pytest.param(s, marks=pytest.mark.slow) for s in ("none", "first"))])
def test_loading_holds_the_checkpoint_and_little_more(tmp_path, spread):
    config = making.small(hidden_size=512, num_experts=32, moe_intermediate_size=512, vocab_size=4096)
    folder = making.write(tmp_path, config, making.hub_arrays(config, BF16), shards=3)
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(folder), spread], capture_output=True, text=True, check=True,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    grown, total, largest = map(int, done.stdout.split())
    assert total > 100 << 20
    assert grown <= total + largest + (32 << 20), (spread, grown, total, largest)


MODEL_MEMORY = """
import gc, sys
import kimi_jax

def status(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) * 1024

kimi_jax.load(progress=False)  # what the libraries themselves take is not counted
before = status("VmRSS")
model = kimi_jax.load(sys.argv[1], progress=False)
peak, held = status("VmHWM") - before, sum(model.report.bytes_per_device.values())
largest = max(leaf.nbytes for leaf in __import__("jax").tree.leaves(model.params))
del model
gc.collect()
print(peak, held, largest, status("VmRSS") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_512_mb_stays_within_its_bound_and_del_gives_it_back(tmp_path):
    """Peak: the checkpoint, twice its largest stacked parameter and 64 MB; afterwards less than an eighth stays."""
    config = making.small(hidden_size=512, num_experts=160, moe_intermediate_size=512, vocab_size=4096)
    folder = making.write(tmp_path, config, making.hub_arrays(config, BF16), shards=3)
    done = subprocess.run(
        [sys.executable, "-c", MODEL_MEMORY, str(folder)], capture_output=True, text=True, check=True,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    peak, held, largest, left = map(int, done.stdout.split())
    assert held > 480 << 20
    assert peak <= held + 2 * largest + (64 << 20)
    assert left < held // 8


MESH_MEMORY = """
import sys
import kimi_jax, sharding_rules

kimi_jax.simulate_devices(8)
layout = sharding_rules.helix(*map(int, sys.argv[2:]))
model = kimi_jax.load(sys.argv[1], layout=layout, progress=False)
planned = 8 * kimi_jax.plan(model.config, layout, dtype=str(model.dtype)).weights
# Not getrusage: its maximum begins with that of the process which started this one.
peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(peak, planned, sum(model.report.bytes_per_device.values()))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("mesh", [(2, 4), (1, 8)], ids=str)
def test_loading_2_gb_onto_8_devices_peaks_at_most_a_quarter_above_the_plan(tmp_path, mesh):
    """Peak: of the whole process, with Python and its libraries."""
    config = making.small(
        hidden_size=512, num_hidden_layers=11, num_experts=128, moe_intermediate_size=512, vocab_size=4096
    )
    folder = making.write_large(tmp_path / "large", config)
    try:
        done = subprocess.run(
            [sys.executable, "-c", MESH_MEMORY, str(folder), *map(str, mesh)], capture_output=True, text=True,
            check=True, cwd=Path(__file__).parents[2],
        )  # fmt: skip
    finally:
        shutil.rmtree(folder)  # pytest would keep it for three sessions
    peak, planned, held = map(int, done.stdout.split())
    assert planned > 2 * 10**9 and abs(held - planned) < 1e-4 * planned  # a plan cannot know which dtypes were kept
    assert peak <= 1.25 * planned, (peak, planned)


def test_the_hub_names_are_spelled_in_one_file():
    package = Path(names.__file__).parents[1]
    spelled = ("self_attn", "block_sparse_moe", "_proj.weight", "embed_tokens", "layernorm", "language_model")
    found = {
        f"{file.relative_to(package)}: {word}"
        for file in package.rglob("*.py")
        for word in spelled
        if word in file.read_text() and file.name != "names.py"
    }
    assert not found
