"""What a folder of safetensors files says it holds, read from the headers alone and believed only where it adds up.

Opens nothing but headers and the index; no tensor is read. Must not know the model: any name and shape is fine here.
"""

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from kimi_jax import strict_json

INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_HEADER = 100_000_000  # bytes: the format's own limit
FORMATS = ("pt", "np", "flax", "jax", "tf", "mlx", "paddle")  # who may have written a file

# Bytes of one element.
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "U32": 4, "I32": 4, "U64": 8, "I64": 8,
    "F8_E4M3": 1, "F8_E5M2": 1, "F16": 2, "BF16": 2, "F32": 4, "F64": 8,
}  # fmt: skip


class Stored(NamedTuple):
    """One tensor in a file: its bytes are nbytes from `begin`, counted from the start of the file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int


def read_headers(folder: Path) -> dict[str, Stored]:
    """Every tensor of a checkpoint folder by its stored name, from one file or an index of shards.

    Raises ValueError, naming file and tensor, for whatever is absent, truncated, repeated or contradictory.
    """
    index, single = folder / INDEX, folder / SINGLE_FILE
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    if index.exists():
        return _read_shards(folder, index)
    if not single.exists():
        raise ValueError(f"{folder}: neither {SINGLE_FILE} nor {INDEX} is there")
    return {stored.name: stored for stored in read_header(single)}


def _read_shards(folder: Path, index: Path) -> dict[str, Stored]:
    weight_map = strict_json.read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{index}: weight_map must be an object of tensor and file names")
    single = folder / SINGLE_FILE
    if single.exists() and SINGLE_FILE not in weight_map.values():
        raise ValueError(f"{single} and {index} are both there, and the index does not name the file: delete one")
    tensors: dict[str, Stored] = {}
    for name in sorted(set(weight_map.values())):
        for stored in read_header(_shard_path(folder, name, index)):
            if weight_map.get(stored.name) != name:
                where = weight_map.get(stored.name, "no file")
                raise ValueError(f"{stored.file}: holds tensor {stored.name}, which {index} says is in {where}")
            tensors[stored.name] = stored
    for name, file in weight_map.items():
        if name not in tensors:
            raise ValueError(f"{folder / file}: tensor {name}, named by {index}, is not in it")
    return tensors


def _shard_path(folder: Path, name: str, index: Path) -> Path:
    """The path of a shard; its name must stay in the folder. Links are followed: the hub's cache is made of them."""
    if not re.fullmatch(r"[A-Za-z0-9_.\-/]+\.safetensors", name) or name.startswith("/") or ".." in name.split("/"):
        raise ValueError(f"{index}: file name {name!r} leaves the folder or is no plain .safetensors name")
    path = folder / name
    if not path.is_file():
        raise ValueError(f"{path}: absent, though {index} names it")
    return path


def read_header(file: Path) -> list[Stored]:
    """The tensors of one file, in the order of their bytes, which must fill the file without a gap or an overlap."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            raise ValueError(
                f"{file}: a header of {length} bytes cannot be in a file of {size} bytes: truncated, or no safetensors"
            )
        text = stream.read(length)
    body = text.rstrip(b" ")
    if not body.startswith(b"{") or not body.endswith(b"}"):
        raise ValueError(f"{file}: the header of {length} bytes is not a JSON object padded with spaces")
    header = strict_json.parse_object(body, f"{file}: header")
    _check_metadata(header.pop("__metadata__", {}), file)
    tensors = sorted(
        (_read_entry(file, name, entry, 8 + length) for name, entry in header.items()),
        key=lambda stored: (stored.begin, stored.nbytes),
    )
    _check_tiling(tensors, file, 8 + length, size)
    return tensors


def _check_metadata(metadata: Any, file: Path) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{file}: __metadata__ must be an object of strings")
    if metadata.get("format", "pt") not in FORMATS:
        raise ValueError(f"{file}: __metadata__ names the format {metadata['format']!r}, not one of {FORMATS}")


def _read_entry(file: Path, name: str, entry: Any, data: int) -> Stored:
    where = f"{file}: tensor {name}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{where}: dtype, shape and data_offsets were wanted, {entry!r} came")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ValueError(f"{where}: unknown dtype {dtype!r}")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"{where}: shape {shape!r} and data_offsets {offsets!r} must be lists of whole numbers")
    begin, end = offsets
    nbytes = math.prod(shape) * ITEM_BYTES[dtype]
    if end - begin != nbytes:
        raise ValueError(f"{where}: {dtype} {shape} takes {nbytes} bytes, data_offsets {offsets} are {end - begin}")
    return Stored(name, file, dtype, tuple(shape), data + begin, nbytes)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_tiling(tensors: Iterable[Stored], file: Path, begin: int, size: int) -> None:
    for stored in tensors:
        if stored.begin != begin:
            what = "overlaps the one before it" if stored.begin < begin else "leaves a gap before it"
            raise ValueError(f"{file}: tensor {stored.name} {what}: it begins at {stored.begin}, {begin} was wanted")
        begin += stored.nbytes
        if begin > size:
            raise ValueError(f"{file}: truncated: tensor {stored.name} ends at {begin}, the file has {size} bytes")
    if begin != size:
        raise ValueError(f"{file}: {size - begin} bytes follow the last tensor")
