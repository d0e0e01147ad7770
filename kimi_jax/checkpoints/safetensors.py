"""A folder of safetensors files, as the hub has them, into sharded parameters: checked first, then streamed.

Every device's shard is filled from the byte ranges it needs, one parameter at a time. Must not know hub names (they
are in `names`), nor where a parameter belongs: it is handed the shardings.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kimi_jax.checkpoints.headers import read_headers
from kimi_jax.checkpoints.matching import Match, Source, match
from kimi_jax.checkpoints.names import canonical, table
from kimi_jax.checkpoints.reading import NUMPY, Box, Target, aligned_empty, deals_out, fill, read_whole
from kimi_jax.checkpoints.report import LoadReport, bar, peak_resident
from kimi_jax.config import Config

Tree = dict[Any, Any]
SMALL = 64 << 20  # bytes of a parameter below which there is nothing to gain from filling it region by region


def inspect(folder: str | Path, config: Config) -> Match:
    """What a folder holds against what `config` wants, from the headers alone; problems are listed, not raised."""
    return match(config, read_headers(Path(folder)))


def load_params(
    folder: str | Path,
    config: Config,
    abstract: Tree,
    shardings: Tree,
    *,
    keep: Callable[[str], bool] | None = None,
    progress: bool = True,
) -> tuple[Tree, LoadReport]:
    """Read a checkpoint folder into the tree of `abstract`, each leaf placed by the same leaf of `shardings`.

    abstract: nested dicts of jax.ShapeDtypeStruct, the paths and shapes of `names.table`. Numbers are cast to its
    dtypes as they arrive, except where `keep(path)` (by default: the table's kept parameters) says as stored.
    Host memory beyond the parameters themselves stays below two of them, and on CPU the parameters are not copied.

    Raises ValueError, before anything is allocated, for a folder that is damaged or does not fit `config`.
    """
    begin, rows = time.perf_counter(), table(config)
    leaves, places = flatten(abstract), flatten(shardings)
    _check_tree({path: leaf.shape for path, leaf in leaves.items()}, {path: row.shape for path, row in rows.items()})
    keep = keep or (lambda path: rows[path].kept)
    found = inspect(folder, config)
    found.raise_problems(folder)

    dtypes = {path: _dtype(found.sources[path], leaf.dtype, keep(path)) for path, leaf in leaves.items()}
    report = _describe(folder, config, found, dtypes)
    arrays: dict[str, jax.Array] = {}
    with bar(sum(_bytes_wanted(found.sources[path], places[path]) for path in leaves), "load", progress) as shown:

        def count(nbytes: int) -> None:
            report.bytes_read += nbytes
            shown.update(nbytes)

        for path, leaf in leaves.items():
            arrays[path] = _load(found.sources[path], leaf.shape, dtypes[path], places[path], count)
    for array in arrays.values():
        for shard in array.addressable_shards:
            name = str(shard.device)
            report.bytes_per_device[name] = report.bytes_per_device.get(name, 0) + shard.data.nbytes
    report.seconds, report.peak_resident = time.perf_counter() - begin, peak_resident()
    return unflatten(arrays, abstract), report


def flatten(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """{"layers": {0: {"o": x}}} -> {"layers/0/o": x}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        flat |= flatten(value, f"{path}/") if isinstance(value, Mapping) else {path: value}
    return flat


def unflatten(flat: Mapping[str, Any], like: Mapping[Any, Any], prefix: str = "") -> Tree:
    """The inverse of `flatten`, with the keys of `like`."""
    return {
        key: unflatten(flat, value, f"{prefix}{key}/") if isinstance(value, Mapping) else flat[f"{prefix}{key}"]
        for key, value in like.items()
    }


def _check_tree(got: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> None:
    differing = [
        f"{path}: {got.get(path, 'absent')} in the model, {wanted.get(path, 'absent')} in the table"
        for path in sorted(got.keys() | wanted.keys())
        if got.get(path) != wanted.get(path)
    ]
    if differing:
        raise ValueError("the model's parameters are not those of checkpoints.names:\n  " + "\n  ".join(differing[:8]))


def _dtype(sources: list[Source], wanted: Any, kept: bool) -> np.dtype:
    """The dtype to hold: the wanted one, or the widest that the parameter is stored in."""
    stored = [NUMPY[source.stored.dtype] for source in sources]
    return max(stored, key=lambda dtype: dtype.itemsize) if kept else np.dtype(wanted)


def _describe(folder: str | Path, config: Config, found: Match, dtypes: Mapping[str, np.dtype]) -> LoadReport:
    """The report so far; also reads the padding, which has no parameter to go to."""
    used = {source.stored.name: source.stored for sources in found.sources.values() for source in sources}
    changed = {  # a tensor that is split counts once
        (source.stored.name, f"{source.stored.dtype} -> {dtypes[path]}")
        for path, sources in found.sources.items()
        for source in sources
        if NUMPY[source.stored.dtype] != dtypes[path]
    }
    return LoadReport(
        folder=str(folder),
        files=len({stored.file for stored in used.values()}),
        tensors=len(used),
        parameters=len(dtypes),
        dtype_changes=dict(Counter(change for _, change in changed)),
        skipped={stored.name: stored.nbytes for stored in found.skipped},
        padding={
            canonical(source.stored.name, config): read_whole(source.stored).reshape(-1)[source.piece.shape[0] :]
            for source in found.padded
        },
    )


def _regions(shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> dict[Box, list[jax.Device]]:
    """The different boxes that this process's devices hold, each with its devices."""
    regions: dict[Box, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = [part.indices(size) for part, size in zip(index or (), shape, strict=True)]
        regions.setdefault(Box(tuple(b[0] for b in bounds), tuple(b[1] for b in bounds)), []).append(device)
    return regions


def _bytes_wanted(sources: list[Source], sharding: jax.sharding.Sharding) -> int:
    """About how many bytes of files one parameter takes: all of them times the share that this process holds."""
    shape = tuple(
        max(source.piece.start[axis] + source.piece.shape[axis] for source in sources)
        for axis in range(len(sources[0].piece.shape))
    )
    share = sum(box.size for box in _regions(shape, sharding)) / math.prod(shape)
    return int(share * sum(math.prod(s.piece.shape) * NUMPY[s.stored.dtype].itemsize for s in sources))


def _load(
    sources: list[Source],
    shape: tuple[int, ...],
    dtype: np.dtype,
    sharding: jax.sharding.Sharding,
    count: Callable[[int], object],
) -> jax.Array:
    """One parameter. Regions that share a read are filled together, others one by one to hold less on the host."""
    regions = list(_regions(shape, sharding).items())
    boxes = [box for box, _ in regions]
    small = math.prod(shape) * dtype.itemsize <= SMALL
    together = small or any(deals_out(source, boxes, dtype) for source in sources)
    groups = [regions] if together else [[region] for region in regions]
    placed: list[jax.Array] = []
    for group in groups:
        targets = [Target(box, aligned_empty(box.shape, dtype)) for box, _ in group]
        for source in sources:
            fill(source, targets, count)
        jax.block_until_ready(placed)  # at most one buffer waits for its transfer while the next is filled
        pairs = [(t.array, device) for t, (_, devices) in zip(targets, group, strict=True) for device in devices]
        placed += jax.device_put(*(list(side) for side in zip(*pairs, strict=True)))
    return jax.make_array_from_single_device_arrays(shape, sharding, placed)
