"""Damaged folders: each fault is a ValueError that names file and tensor, before anything is allocated."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from kimi_jax.checkpoints import folders, hub_read, reading
from kimi_jax.checkpoints.headers import INDEX, read_header, read_headers
from tests.checkpoints import failing, making

CONFIG = making.small()
FIRST, LAST = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
O_PROJ = "model.layers.0.self_attn.o_proj.weight"


@pytest.fixture(scope="module")
def arrays():
    return making.hub_arrays(CONFIG)


@pytest.fixture
def folder(tmp_path, arrays) -> Path:
    """A sound checkpoint of two shards, to be damaged."""
    return making.write(tmp_path / "checkpoint", CONFIG, arrays, shards=2)


@pytest.fixture(scope="module")
def trees():
    return making.abstract(CONFIG), making.shardings(CONFIG)


def parts(file: Path) -> tuple[dict, bytes]:
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def assemble(file: Path, header: dict | bytes, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def holding(folder: Path, tensor: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][tensor]


def fails(folder: Path, trees, *words: str) -> None:
    failing.fails(folder, CONFIG, *trees, *words)


@pytest.mark.parametrize(
    "kept, word",
    [(0, "cannot be in a file of 0 bytes"), (5, "in a file of 5 bytes"), (8, "in a file of 8 bytes"),
     (100, "in a file of 100 bytes"), (-1, "truncated: tensor"), (-1000, "truncated: tensor")],
)  # fmt: skip
def test_a_truncated_shard(folder, trees, kept, word):
    file = folder / LAST
    file.write_bytes(file.read_bytes()[:kept])
    fails(folder, trees, str(file), word)


def test_a_shard_with_bytes_too_many(folder, trees):
    with (folder / FIRST).open("ab") as file:
        file.write(b"\0")
    fails(folder, trees, str(folder / FIRST), "1 bytes follow the last tensor")


@pytest.mark.parametrize("bit", [0, 1, 5, 9, 20, 33, 63])
def test_a_flipped_header_length(folder, trees, bit):
    file = folder / FIRST
    raw = bytearray(file.read_bytes())
    raw[bit // 8] ^= 1 << bit % 8
    file.write_bytes(raw)
    fails(folder, trees, str(file), "header")


def test_an_index_that_names_an_absent_file(folder, trees):
    (folder / LAST).unlink()
    fails(folder, trees, str(folder / LAST), "absent", INDEX)


def test_a_tensor_that_the_index_places_in_the_wrong_shard(folder, trees):
    index = json.loads((folder / INDEX).read_text())
    file = index["weight_map"][O_PROJ]
    index["weight_map"][O_PROJ] = FIRST if file == LAST else LAST
    (folder / INDEX).write_text(json.dumps(index))
    fails(folder, trees, str(folder / file), O_PROJ)


def test_a_tensor_that_the_index_does_not_know(folder, trees):
    index = json.loads((folder / INDEX).read_text())
    file = index["weight_map"].pop(O_PROJ)
    (folder / INDEX).write_text(json.dumps(index))
    fails(folder, trees, str(folder / file), O_PROJ, "no file")


def test_a_tensor_that_only_the_index_knows(folder, trees):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.ghost.weight"] = FIRST
    (folder / INDEX).write_text(json.dumps(index))
    fails(folder, trees, str(folder / FIRST), "model.ghost.weight")


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/../../b.safetensors", "c:\\x.safetensors",
                                  "..", "", "model.bin"])  # fmt: skip
def test_a_path_that_climbs_out_of_the_folder(folder, trees, name):
    (folder.parent / "outside.safetensors").write_bytes((folder / FIRST).read_bytes())
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = {key: name if file == FIRST else file for key, file in index["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps(index))
    fails(folder, trees, INDEX, repr(name), "leaves the folder")


def test_links_such_as_the_hubs_cache_makes_are_followed(folder, trees, tmp_path):
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for file in (FIRST, LAST):
        (folder / file).rename(blobs / file)
        (folder / file).symlink_to(Path("..") / "blobs" / file)
    folders.load_params(folder, CONFIG, *trees, progress=False)


def test_a_tensor_of_the_wrong_shape(tmp_path, arrays, trees):
    swapped = arrays | {O_PROJ: np.ascontiguousarray(arrays[O_PROJ].T)}
    folder = making.write(tmp_path, CONFIG, swapped)
    fails(folder, trees, "model.safetensors", O_PROJ, "[48, 24]", "[24, 48]")


def test_the_wrong_number_of_decay_rates(tmp_path, arrays, trees):
    name = "model.layers.0.self_attn.A_log"
    fails(making.write(tmp_path, CONFIG, arrays | {name: np.zeros(7, np.float32)}), trees, name, "[7]", "longer")


@pytest.mark.parametrize("dtype", ["F7", "bf16", "Q4", 3, None, ["F32"]])
def test_a_dtype_nobody_knows(folder, trees, dtype):
    file = holding(folder, O_PROJ)
    header, data = parts(file)
    header[O_PROJ]["dtype"] = dtype
    assemble(file, header, data)
    fails(folder, trees, str(file), O_PROJ, "unknown dtype", repr(dtype))


@pytest.mark.parametrize("dtype", [np.int32, np.float64, np.uint8, np.bool_])
def test_a_dtype_that_no_weight_has(tmp_path, arrays, trees, dtype):
    folder = making.write(tmp_path, CONFIG, arrays | {O_PROJ: arrays[O_PROJ].astype(dtype)})
    fails(folder, trees, "model.safetensors", O_PROJ, "BF16 or F16 or F32 was wanted")


def test_packed_bytes_of_another_dtype(tmp_path):
    config = making.small_k3()
    arrays = making.hub_arrays(config)
    name = "language_model.model.layers.1.block_sparse_moe.experts.3.w2.weight_scale"
    folder = making.write(tmp_path, config, arrays | {name: arrays[name].astype(np.float32)})
    with pytest.raises(ValueError, match=r"w2\.weight_scale is F32; U8 was wanted"):
        folders.load_params(folder, config, making.abstract(config), making.shardings(config), progress=False)


def test_two_shards_with_the_same_tensor(folder, trees):
    file = holding(folder, O_PROJ)
    other = folder / (FIRST if file.name == LAST else LAST)
    (header, data), (source, values) = parts(other), parts(file)
    begin, end = source[O_PROJ]["data_offsets"]
    header[O_PROJ] = source[O_PROJ] | {"data_offsets": [len(data), len(data) + end - begin]}
    assemble(other, header, data + values[begin:end])
    fails(folder, trees, f"{other}: holds tensor {O_PROJ}, which", f"says is in {file.name}")


def test_two_spellings_of_the_same_tensor(tmp_path, arrays, trees):
    twice = arrays | {"model.layers.0.block_sparse_moe.up_proj.weight": arrays["model.layers.0.mlp.up_proj.weight"]}
    fails(making.write(tmp_path, CONFIG, twice), trees, "model.layers.0.mlp.up_proj.weight", "the same parameter")


def test_config_and_weights_that_disagree(tmp_path, arrays, trees):
    folder = making.write(tmp_path, CONFIG, arrays)
    for change, words in (
        (dict(vocab_size=41), ("embed_tokens.weight has shape [40, 24]; config.json wants [41, 24]", "2 misshapen")),
        (dict(mla_layers=(2,)), ("missing", "unexpected", "layers.1.self_attn")),
        (dict(num_experts=7), ("experts.7.w1.weight is unexpected", "misshapen")),
        (dict(num_hidden_layers=4), ("model.layers.3.", "is missing")),
        (dict(use_full_rank_gate=True), ("g_proj.weight", "g_a_proj.weight")),
    ):
        config = making.small(**change)
        with pytest.raises(ValueError) as error:
            folders.load_params(folder, config, making.abstract(config), making.shardings(config), progress=False)
        for word in words:
            assert word in str(error.value), str(error.value)


def test_packed_experts_that_the_config_does_not_announce(tmp_path):
    arrays = making.hub_arrays(making.small_k3())
    config = making.small_k3(packed_experts=False)
    folder = making.write(tmp_path, config, arrays)
    found = hub_read.inspect(folder, config)
    assert "config.json has no quantization_config" in next(p for p in found.unexpected if "_packed" in p)
    assert not found.misshapen and len(found.missing) == 3 * 8 * 2
    with pytest.raises(ValueError, match="48 missing, 96 unexpected"):
        found.raise_problems(folder)


@pytest.mark.parametrize("extra", ["model.layers.0.self_attn.g_b_proj.bias", "model.layers.3.input_layernorm.weight",
                                   "vision_tower.patch_embed.proj.weight"])  # fmt: skip
def test_a_tensor_too_many(tmp_path, arrays, trees, extra):
    fails(making.write(tmp_path, CONFIG, arrays | {extra: np.zeros(3, np.float32)}), trees, extra, "is unexpected")


def test_a_tensor_too_few(tmp_path, arrays, trees):
    fewer = {name: value for name, value in arrays.items() if name != O_PROJ}
    fails(making.write(tmp_path, CONFIG, fewer), trees, O_PROJ, "[24, 48] is missing", str(tmp_path))


def test_duplicate_keys_in_a_header(folder, trees):
    file = holding(folder, O_PROJ)
    header, data = parts(file)
    text = json.dumps(header).encode()
    entry = json.dumps({O_PROJ: header[O_PROJ]}).encode()
    assemble(file, text[:-1] + b", " + entry[1:], data)
    fails(folder, trees, str(file), O_PROJ, "occurs twice")


def test_duplicate_keys_in_the_index(folder, trees):
    text = (folder / INDEX).read_text()
    (folder / INDEX).write_text(text.replace('"weight_map": {', f'"weight_map": {{"{O_PROJ}": "{FIRST}", ', 1))
    fails(folder, trees, INDEX, O_PROJ, "occurs twice")


@pytest.mark.parametrize(
    "change, word",
    [
        (dict(data_offsets=[0, 10]), "takes"), (dict(shape=[-24, -48]), "whole numbers"), (dict(extra=1), "wanted"),
        (dict(shape="ab"), "whole numbers"), (dict(data_offsets=[5]), "whole numbers"), (dict(shape=[24.0]), "whole"),
        (dict(shape=[True, 48]), "whole numbers"), (dict(shape=[10**30, 10**30]), "takes"),
    ],
)  # fmt: skip
def test_an_entry_that_does_not_add_up(folder, trees, change, word):
    file = holding(folder, O_PROJ)
    header, data = parts(file)
    header[O_PROJ] |= change
    assemble(file, header, data)
    fails(folder, trees, str(file), O_PROJ, word)


@pytest.mark.parametrize("by, word", [(-4, "overlaps"), (4, "gap")])
def test_tensors_that_overlap_or_leave_a_gap(folder, trees, by, word):
    file = folder / FIRST
    header, data = parts(file)
    tensors = sorted((k for k in header if k != "__metadata__"), key=lambda k: header[k]["data_offsets"])
    begin, end = header[tensors[3]]["data_offsets"]
    header[tensors[3]]["data_offsets"] = [begin + by, end + by]
    assemble(file, header, data)
    fails(folder, trees, str(file), word)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b'{"a":' * 200_000, b"\xff{}", b"{}\t", b'{"a": 1}'])
def test_a_header_that_is_no_table_of_tensors(tmp_path, text):
    file = tmp_path / "model.safetensors"
    assemble(file, text, b"")
    with pytest.raises(ValueError, match=re.escape(str(file))):
        read_header(file)


def test_neither_a_file_nor_an_index(tmp_path):
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        read_headers(tmp_path)
    with pytest.raises(ValueError, match="no such folder"):
        read_headers(tmp_path / "absent")


def test_a_left_over_single_file_beside_an_index(folder, trees):
    (folder / "model.safetensors").write_bytes((folder / FIRST).read_bytes())
    fails(folder, trees, "both there", "delete one")


def test_a_file_that_shrinks_while_it_is_read(folder, trees, monkeypatch):
    plain, calls = reading._read_all, []

    def shrinking(stream, run, stored):
        calls.append(stored.name)
        if len(calls) == 20:
            with stored.file.open("r+b") as file:
                file.truncate(stored.begin)
        plain(stream, run, stored)

    monkeypatch.setattr(reading, "_read_all", shrinking)
    with pytest.raises(ValueError, match="the file ended while it was read") as error:
        folders.load_params(folder, CONFIG, *trees, progress=False)
    assert calls[19] in str(error.value)


def test_flipped_bytes_in_headers_never_load_something_else(tmp_path):
    """200 flips: an error, or (in the free text about the writer) the very same table of tensors."""
    config = making.small(num_hidden_layers=2, num_experts=2)
    folder = making.write(tmp_path, config, making.hub_arrays(config))
    file, rng = folder / "model.safetensors", np.random.default_rng(5)
    sound, intact = file.read_bytes(), read_headers(folder)
    end, harmless = 8 + int.from_bytes(sound[:8], "little"), 0
    for _ in range(200):
        raw = bytearray(sound)
        raw[rng.integers(end)] ^= int(rng.integers(1, 256))
        file.write_bytes(raw)
        try:
            found = hub_read.inspect(folder, config)
            found.raise_problems(folder)
        except ValueError as error:
            assert str(folder) in str(error)
        else:
            harmless += 1
            assert read_headers(folder) == intact
    assert harmless <= 4


def test_problems_are_counted_and_the_first_are_listed(tmp_path, arrays):
    few = {name: value for name, value in arrays.items() if "experts." not in name}
    folder = making.write(tmp_path, CONFIG, few)
    found = hub_read.inspect(folder, CONFIG)
    assert len(found.missing) == len(arrays) - len(few) and not found.unexpected and not found.misshapen
    with pytest.raises(ValueError, match=f"and {len(found.missing) - 8} more"):
        found.raise_problems(folder)
