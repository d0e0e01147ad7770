"""What `save_write` wrote with orbax, read back onto any other layout.

    path/3/                  the newest number counts: a save becomes visible by one rename, then older ones go
        config.json, tokenizer files    as the hub has them
        kimi_jax.json        shape and dtype of every parameter; K3's padding
        params/              orbax: one plain zarr array a parameter, one file a shard

Arrays are not compressed, so a shard's file is its bytes, and reading is what `placing` does for hub files: each byte
once, any layout, no more memory. (orbax's own restore reads a replicated parameter once a device.) Must not know hub
names, nor where a parameter belongs.
"""

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kimi_jax import strict_json
from kimi_jax.checkpoints.headers import Stored
from kimi_jax.checkpoints.matching import Match, Source
from kimi_jax.checkpoints.names import Piece, table
from kimi_jax.checkpoints.reading import NUMPY
from kimi_jax.checkpoints.report import LoadReport
from kimi_jax.config import Config

MANIFEST = "kimi_jax.json"
UNFINISHED = ".unfinished-"
FORMAT = 1
ZARR_DTYPES = {"bfloat16": "BF16", "<f4": "F32", "<f2": "F16", "|u1": "U8"}
# What every array's own description must say besides shape, chunks and dtype.
ZARR = {"compressor": None, "filters": None, "order": "C", "zarr_format": 2, "dimension_separator": "."}


def current(path: str | Path) -> Path | None:
    """The folder of the newest finished save in `path`; None if `path` is no folder of saves.

    Raises ValueError if there is an unfinished save and no finished one.
    """
    path = Path(path)
    if (path / MANIFEST).is_file():
        return path
    if finished := versions(path):
        return path / str(finished[-1])
    if unfinished := next(path.glob(f"{UNFINISHED}*"), None):
        raise ValueError(
            f"{path} holds no finished checkpoint, only what a save left that was killed: {unfinished.name}"
        )
    return None


def inspect(path: str | Path, config: Config) -> Match:
    """What the newest save holds against what `config` wants; problems are listed, not raised.

    Raises ValueError, naming the file and the parameter, for what is truncated or contradicts itself.
    """
    rows, folder, result = table(config), _newest(path), Match()
    said = _read_manifest(folder)["parameters"]
    where = folder / MANIFEST
    result.unexpected = [f"{where}: parameter {name} is unexpected" for name in said if name not in rows]
    for name, row in rows.items():
        array = folder / "params" / name.replace("/", ".")
        if name not in said:
            result.missing.append(f"{where}: parameter {name} is missing")
        elif tuple(said[name]["shape"]) != row.shape:
            result.misshapen.append(
                f"{where}: parameter {name} has shape {said[name]['shape']}; config.json wants {list(row.shape)}"
            )
        elif not (array / ".zarray").is_file():
            result.missing.append(f"{array}: parameter {name} is missing")
        else:
            result.sources[name] = _sources(array, name, said[name])
    return result


def describe(path: str | Path, config: Config, found: Match) -> LoadReport:
    """The report before loading, with the padding."""
    folder = _newest(path)
    return LoadReport(
        folder=str(folder),
        files=sum(map(len, found.sources.values())),
        tensors=len(found.sources),
        padding=_padding(folder),
    )


def versions(path: Path) -> list[int]:
    """The numbers of the finished saves in a folder, ascending."""
    return sorted(int(file.parent.name) for file in path.glob(f"*/{MANIFEST}") if file.parent.name.isdecimal())


def _newest(path: str | Path) -> Path:
    folder = current(path)
    if folder is None:
        raise ValueError(f"{path}: no checkpoint that kimi_jax.save wrote is there")
    return folder


def _read_manifest(folder: Path) -> dict[str, Any]:
    file = folder / MANIFEST
    manifest = strict_json.read_object(file)
    if manifest.keys() != {"format", "parameters", "padding"} or manifest["format"] != FORMAT:
        raise ValueError(f"{file}: format {FORMAT} with its parameters and padding was wanted")
    if not isinstance(manifest["parameters"], dict):
        raise ValueError(f"{file}: parameters must be an object")
    for name, said in manifest["parameters"].items():
        if not isinstance(said, dict) or said.keys() != {"shape", "dtype"} or not isinstance(said["shape"], list):
            raise ValueError(f"{file}: parameter {name}: shape and dtype were wanted, {said!r} came")
    return manifest


def _padding(folder: Path) -> dict[str, np.ndarray]:
    said = _read_manifest(folder)["padding"]
    try:
        return {name: np.array(tail["values"], tail["dtype"]) for name, tail in said.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / MANIFEST}: padding {said!r} cannot be read: {error}") from error


def _sources(folder: Path, name: str, said: Mapping[str, Any]) -> list[Source]:
    """The files of one array, each a box of the parameter; all of them must be there and of the right size."""
    where = f"{folder}: parameter {name}"
    array = strict_json.read_object(folder / ".zarray")
    shape, chunks, dtype = array.get("shape"), array.get("chunks") or [], ZARR_DTYPES.get(str(array.get("dtype")))
    if any(array.get(key) != value for key, value in ZARR.items()) or dtype is None:
        raise ValueError(f"{where}: its .zarray describes another format than kimi_jax.save writes")
    if not isinstance(shape, list) or shape != said["shape"] or str(NUMPY[dtype]) != said["dtype"]:
        raise ValueError(f"{where} is {array['dtype']} {shape}; {MANIFEST} says {said['dtype']} {said['shape']}")
    if (
        not isinstance(chunks, list)
        or len(chunks) != len(shape)
        or not all(isinstance(chunk, int) and chunk > 0 for chunk in chunks)
    ):
        raise ValueError(f"{where}: chunks {chunks!r} do not go with shape {shape}")
    nbytes, none = math.prod(chunks) * NUMPY[dtype].itemsize, (0,) * len(shape)
    sources = []
    for index in itertools.product(*(range(-(-size // chunk)) for size, chunk in zip(shape, chunks, strict=True))):
        file = folder / ".".join(map(str, index))
        if not file.is_file() or file.stat().st_size != nbytes:
            state = f"has {file.stat().st_size} bytes, {nbytes} were wanted" if file.is_file() else "is missing"
            raise ValueError(f"{file}, a part of parameter {name}, {state}")
        start = tuple(i * chunk for i, chunk in zip(index, chunks, strict=True))
        box = tuple(min(chunk, size - first) for chunk, size, first in zip(chunks, shape, start, strict=True))
        piece = Piece(name, tuple(chunks), tuple(chunks), none, box, start)
        sources.append(Source(piece, Stored(name, file, dtype, tuple(chunks), 0, nbytes)))
    return sources
