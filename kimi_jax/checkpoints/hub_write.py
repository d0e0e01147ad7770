"""Parameters back into a folder as the hub has it: the table's names, safetensors shards, an index, config.json.

Streams: on the host there is one parameter at a time. Must not know hub names, nor how the parameters are laid out.
"""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax
import numpy as np

from kimi_jax.checkpoints.appearing import appearing, refuse_taken
from kimi_jax.checkpoints.contents import Contents, write_json
from kimi_jax.checkpoints.headers import INDEX, SINGLE_FILE
from kimi_jax.checkpoints.names import Parameter, Piece, Shape, canonical, hub_tensors, table
from kimi_jax.checkpoints.placing import Deferred, made
from kimi_jax.checkpoints.reading import NUMPY, Box
from kimi_jax.checkpoints.report import bar
from kimi_jax.config import Config
from kimi_jax.processes import agree, fetch, is_first

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "B": 1, "": 1}
SPELLED = {dtype: name for name, dtype in NUMPY.items()}


class _Out(NamedTuple):
    """One tensor to be written."""

    name: str
    shape: Shape
    dtype: np.dtype
    uses: list[tuple[str, Piece]]  # the parameters that fill it
    tail: np.ndarray | None  # stored behind them: K3's padding

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def export_params(
    path: str | Path, contents: Contents, *, shard_size: str | int = "5GB", progress: bool = True
) -> list[Path]:
    """Write a checkpoint folder that transformers reads -> its weight files.

    What was loaded in its stored dtype comes back bit for bit; numbers held in another dtype are cast to config.json's,
    except those that the table keeps. shard_size: "5GB" (decimal), "2GiB" or bytes.

    The folder appears when it is complete. Raises ValueError if it is there already and not empty.
    """
    path, limit, arrays = Path(path), parse_size(shard_size), contents.arrays()
    agree("export_safetensors", path=str(path), there=path.exists(), shard_size=limit)
    refuse_taken(path)
    shards = _plan(contents.config, arrays, contents.padding, limit)
    names = [SINGLE_FILE] if len(shards) == 1 else [
        f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)
    ]  # fmt: skip
    with appearing(path) as unfinished:
        write = _write_shard if is_first() else _help_with_shard
        with bar(sum(out.nbytes for shard in shards for out in shard), "export", progress) as shown:
            held = _Held(arrays)  # of all shards: a parameter that two of them share is fetched once
            for name, shard in zip(names, shards, strict=True):
                for nbytes in write(unfinished / name, shard, held):
                    shown.update(nbytes)
        if is_first():
            if len(shards) > 1:
                _write_index(unfinished / INDEX, dict(zip(names, shards, strict=True)))
            write_json(unfinished / "config.json", contents.hub())
            contents.copy_companions(unfinished)
    return [path / name for name in names]


def parse_size(size: str | int) -> int:
    """ "5GB" -> 5 * 10**9; raises ValueError for anything but a positive number with a known unit."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([A-Za-z]*)", str(size))
    if not found or found[2] not in UNITS or float(found[1]) * UNITS[found[2]] < 1:
        raise ValueError(f"shard_size={size!r}: a size like 5GB or 500MiB was wanted")
    return int(float(found[1]) * UNITS[found[2]])


def _plan(
    config: Config, arrays: Mapping[str, jax.Array | Deferred], padding: Mapping[str, np.ndarray], limit: int
) -> list[list[_Out]]:
    """The tensors of each shard, in the table's order, so that a parameter is fetched once."""
    rows, shards, size = table(config), [[]], 0
    for name, uses in hub_tensors(config).items():
        row, piece = rows[uses[0][0]], uses[0][1]
        tail = padding.get(canonical(name, config))
        shape = piece.hub_shape if tail is None else (piece.shape[0] + len(tail),)
        out = _Out(name, shape, _dtype(config, row, arrays[uses[0][0]].dtype), uses, tail)
        if shards[-1] and size + out.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(out)
        size += out.nbytes
    return shards


def _dtype(config: Config, row: Parameter, held: np.dtype) -> np.dtype:
    return np.dtype(held) if row.kept or row.packed else np.dtype(NUMPY[_hub_dtype(config.dtype)])


def _hub_dtype(dtype: str) -> str:
    return {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}[dtype]


def _write_index(file: Path, shards: Mapping[str, Sequence[_Out]]) -> None:
    total = sum(out.nbytes for shard in shards.values() for out in shard)
    weight_map = {out.name: name for name, shard in shards.items() for out in shard}
    write_json(file, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def _write_shard(file: Path, shard: Sequence[_Out], held: "_Held") -> Iterator[int]:
    """Write one file, tensor by tensor -> the bytes of each. Wide dtypes come first, so that each starts aligned."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins, at = {}, 0
    for out in sorted(shard, key=lambda out: (-out.dtype.itemsize, out.name)):
        begins[out.name] = at
        header[out.name] = {
            "dtype": SPELLED[out.dtype],
            "shape": list(out.shape),
            "data_offsets": [at, at + out.nbytes],
        }
        at += out.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb", buffering=0) as stream:
        _write(stream, len(text).to_bytes(8, "little") + text)
        first = stream.tell()
        stream.truncate(first + at)
        for out in shard:
            stream.seek(first + begins[out.name])
            _write(stream, _assemble(out, held))
            yield out.nbytes
        os.fsync(stream.fileno())  # before the rename that makes it count


def _help_with_shard(file: Path, shard: Sequence[_Out], held: "_Held") -> Iterator[int]:
    """What the other processes do while the first writes: hand it their parts of the parameters, in the same order."""
    for out in shard:
        _assemble(out, held)
        yield out.nbytes


def _assemble(out: _Out, held: "_Held") -> np.ndarray:
    """The tensor's bytes. Without a copy if one shard of one parameter holds just them."""
    if len(out.uses) == 1 and out.tail is None:
        ((path, piece),) = out.uses
        values = held.box(path, Box(piece.start, tuple(map(sum, zip(piece.start, piece.shape, strict=True)))))
        return np.ascontiguousarray(values.astype(out.dtype, copy=False))
    whole = np.empty(math.prod(out.shape), out.dtype)
    length = whole.size
    if out.tail is not None:
        length -= len(out.tail)
        whole[length:] = out.tail
    for path, piece in out.uses:
        view = whole[:length].reshape(piece.view)
        box = Box(piece.start, tuple(map(sum, zip(piece.start, piece.shape, strict=True))))
        view[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))] = held.box(path, box)
    return whole


class _Held:
    """Boxes of parameters on the host; of the parameters themselves, the last two that were asked for."""

    def __init__(self, arrays: Mapping[str, jax.Array | Deferred]):
        self.arrays = arrays
        self.fetched: dict[str, list[tuple[Box, np.ndarray]]] = {}

    def box(self, path: str, box: Box) -> np.ndarray:
        """The elements of a box; a view if one device's shard has them all."""
        if path not in self.fetched:
            if len(self.fetched) > 1:
                del self.fetched[next(iter(self.fetched))]
            self.fetched[path] = _fetch(made(self.arrays[path]))
        shards = self.fetched[path]
        for own, values in shards:
            if own.meet(box) == box:
                return values[box.slices(own.begin)]
        result = np.empty(box.shape, shards[0][1].dtype)
        for own, values in shards:
            if both := own.meet(box):
                result[both.slices(box.begin)] = values[both.slices(own.begin)]
        return result


def _fetch(array: jax.Array) -> list[tuple[Box, np.ndarray]]:
    """The different shards of an array as numpy, each with its box; on CPU these are the devices' own buffers."""
    if not array.is_fully_addressable:
        return [(Box((0,) * array.ndim, array.shape), fetch(array))]
    shards: dict[Box, np.ndarray] = {}
    for shard in array.addressable_shards:
        bounds = [part.indices(size) for part, size in zip(shard.index, array.shape, strict=True)]
        box = Box(tuple(b[0] for b in bounds), tuple(b[1] for b in bounds))
        if box not in shards:
            data = shard.data
            if shard.device.platform != "cpu":  # np.asarray alone would leave its copy cached on the device's array
                data = jax.device_put(data, jax.local_devices(backend="cpu")[0])
            shards[box] = np.asarray(data)
    return list(shards.items())


def _write(stream: BinaryIO, data: bytes | np.ndarray) -> None:
    left = memoryview(data if isinstance(data, bytes) else data.reshape(-1).view(np.uint8).data)
    while left:
        left = left[stream.write(left) :]
