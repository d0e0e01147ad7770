"""Sources into arrays on devices: every shard filled from the byte ranges it needs, one parameter at a time.

All of them at once for a model, or each when it is asked for, so that a writer holds only what it is writing. Serves
every kind of folder. Must not know names or formats, nor where a parameter belongs: it is handed the shardings.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import add
from typing import Any

import jax
import numpy as np

from kimi_jax.checkpoints.matching import Source
from kimi_jax.checkpoints.reading import NUMPY, Box, Target, aligned_zeros, deals_out, fill
from kimi_jax.checkpoints.report import LoadReport, bar, peak_resident

Tree = dict[Any, Any]
SMALL = 8 << 20  # bytes; a parameter below is read whole and then cut


@dataclass(frozen=True)
class Deferred:
    """An array that is not there yet: `make` makes it, anew each time."""

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], jax.Array]

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


def defer(
    sources: Mapping[str, list[Source]],
    abstract: Tree,
    shardings: Tree,
    keep: Mapping[str, bool],
    report: LoadReport,
    count: Callable[[int], object] = lambda nbytes: None,
) -> Tree:
    """The tree of `abstract` with a `Deferred` in the place of each array, filled from `sources` by path when made.

    Numbers are cast to the dtypes of `abstract` as they arrive; where `keep` says so they stay as stored. A parameter
    that is larger than its sources along an axis ends in zeros. `report` is told what changes, and with `count` the
    bytes as they are read.
    """
    leaves, places = flatten(abstract), flatten(shardings)
    dtypes = {path: _dtype(sources[path], leaf.dtype, keep[path]) for path, leaf in leaves.items()}
    changed = {  # a tensor that is split counts once
        (source.stored.file, source.stored.name, f"{source.stored.dtype} -> {dtypes[path]}")
        for path in leaves
        for source in sources[path]
        if NUMPY[source.stored.dtype] != dtypes[path]
    }
    report.dtype_changes, report.parameters = dict(Counter(change for *_, change in changed)), len(leaves)

    def counted(nbytes: int) -> None:
        report.bytes_read += nbytes
        count(nbytes)

    deferred = {
        path: Deferred(
            leaf.shape, dtypes[path], partial(_load, sources[path], leaf.shape, dtypes[path], places[path], counted)
        )
        for path, leaf in leaves.items()
    }
    return unflatten(deferred, abstract)


def place(
    sources: Mapping[str, list[Source]],
    abstract: Tree,
    shardings: Tree,
    keep: Mapping[str, bool],
    report: LoadReport,
    progress: bool,
) -> Tree:
    """The tree of `abstract` with arrays: all that `defer` would make. `report` is completed."""
    begin, places = time.perf_counter(), flatten(shardings)
    wanted = sum(_bytes_wanted(sources[path], leaf.shape, places[path]) for path, leaf in flatten(abstract).items())
    with bar(wanted, "load", progress) as shown:
        deferred = flatten(defer(sources, abstract, shardings, keep, report, shown.update))
        arrays = {path: leaf.make() for path, leaf in deferred.items()}
    for array in arrays.values():
        for shard in array.addressable_shards:
            name = str(shard.device)
            report.bytes_per_device[name] = report.bytes_per_device.get(name, 0) + shard.data.nbytes
    report.seconds, report.peak_resident = time.perf_counter() - begin, peak_resident()
    return unflatten(arrays, abstract)


def made(array: jax.Array | Deferred) -> jax.Array:
    """The array itself."""
    return array.make() if isinstance(array, Deferred) else array


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


def check_tree(abstract: Tree, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Raise unless the model has the parameters of the table, each at least as large."""
    got = {path: leaf.shape for path, leaf in flatten(abstract).items()}
    differing = [
        f"{path}: {got.get(path, 'absent')} in the model, {wanted.get(path, 'absent')} in the table"
        for path in sorted(got.keys() | wanted.keys())
        if path not in got
        or path not in wanted
        or len(got[path]) != len(wanted[path])
        or any(have < want for have, want in zip(got[path], wanted[path], strict=True))
    ]
    if differing:
        raise ValueError("the model's parameters are not those of checkpoints.names:\n  " + "\n  ".join(differing[:8]))


def regions(shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> dict[Box, list[Any]]:
    """The different boxes that this process's devices hold, each with its devices."""
    found: dict[Box, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = [part.indices(size) for part, size in zip(index or (), shape, strict=True)]
        found.setdefault(Box(tuple(b[0] for b in bounds), tuple(b[1] for b in bounds)), []).append(device)
    return found


def bytes_to_read(sources: Mapping[str, list[Source]], abstract: Tree, shardings: Tree) -> dict[str, int]:
    """By device: the bytes of files that its shards are made of. Nothing is read."""
    totals: Counter[str] = Counter()
    places = flatten(shardings)
    for path, leaf in flatten(abstract).items():
        for box, devices in regions(leaf.shape, places[path]).items():
            nbytes = 0
            for piece, stored, _ in sources[path]:
                own = Box(piece.start, tuple(map(add, piece.start, piece.shape)))
                both = own.meet(box)
                nbytes += 0 if both is None else both.size * NUMPY[stored.dtype].itemsize
            totals.update({str(device): nbytes for device in devices})
    return dict(totals)


def _dtype(sources: list[Source], wanted: Any, kept: bool) -> np.dtype:
    """The dtype to hold: the wanted one, or the widest that the parameter is stored in."""
    stored = [NUMPY[source.stored.dtype] for source in sources]
    return max(stored, key=lambda dtype: dtype.itemsize) if kept else np.dtype(wanted)


def _bytes_wanted(sources: list[Source], shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> int:
    """About how many bytes of files one parameter takes: all of them times the share that this process holds."""
    share = sum(box.size for box in regions(shape, sharding)) / math.prod(shape)
    return int(share * sum(math.prod(s.piece.shape) * NUMPY[s.stored.dtype].itemsize for s in sources))


def _load(
    sources: list[Source],
    shape: tuple[int, ...],
    dtype: np.dtype,
    sharding: jax.sharding.Sharding,
    count: Callable[[int], object],
) -> jax.Array:
    """One parameter, filled region by region to hold the least on the host.

    Regions that share a read are filled together. A small parameter is filled whole and cut: the calls would cost more.
    """
    held = regions(shape, sharding)
    whole = Box((0,) * len(shape), shape)
    if whole.size * dtype.itemsize <= SMALL and sum(box.size for box in held) == whole.size:
        target = _filled([whole], sources, dtype, count)[0].array
        cuts = [target[box.slices(whole.begin)] for box in held]
        placed: list[jax.Array] = _put([cut if len(held) == 1 else _aligned(cut) for cut in cuts], list(held.values()))
        return jax.make_array_from_single_device_arrays(shape, sharding, placed)
    together = any(deals_out(source, list(held), dtype) for source in sources)
    placed = []
    for boxes in [list(held)] if together else [[box] for box in held]:
        targets = _filled(boxes, sources, dtype, count)
        jax.block_until_ready(placed)  # at most one buffer waits for its transfer while the next is filled
        placed += _put([target.array for target in targets], [held[box] for box in boxes])
    return jax.make_array_from_single_device_arrays(shape, sharding, placed)


def _filled(boxes: list[Box], sources: list[Source], dtype: np.dtype, count: Callable[[int], object]) -> list[Target]:
    targets = [Target(box, aligned_zeros(box.shape, dtype)) for box in boxes]
    for source in sources:
        fill(source, targets, count)
    return targets


def _aligned(values: np.ndarray) -> np.ndarray:
    copy = aligned_zeros(values.shape, values.dtype)
    copy[...] = values
    return copy


def _put(arrays: list[np.ndarray], devices: list[list[Any]]) -> list[jax.Array]:
    """Each array on all of its devices."""
    pairs = [(array, device) for array, its in zip(arrays, devices, strict=True) for device in its]
    return jax.device_put(*(list(side) for side in zip(*pairs, strict=True)))
