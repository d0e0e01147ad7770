"""Parameters saved with orbax and read back onto any other layout; a save is whole or it is not there.

    path/3/                  the newest number counts: a save becomes visible by one rename, then older ones go
        config.json, tokenizer files    as the hub has them
        kimi_jax.json        shape and dtype of every parameter; K3's padding
        params/              orbax: one plain zarr array a parameter, one file a shard

Arrays are written by orbax without compression, so a shard's file is its bytes, and reading is what `placing` does for
hub files: each byte once, any layout, no more memory. (orbax's own restore reads a replicated parameter once a device.)
Must not know hub names, nor where a parameter belongs.
"""

import contextlib
import itertools
import json
import logging
import math
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kimi_jax import hf_config, strict_json
from kimi_jax.checkpoints.export import copy_companions
from kimi_jax.checkpoints.headers import Stored
from kimi_jax.checkpoints.matching import Source
from kimi_jax.checkpoints.names import Piece, table
from kimi_jax.checkpoints.placing import Tree, check_tree, flatten, place, unflatten
from kimi_jax.checkpoints.reading import NUMPY
from kimi_jax.checkpoints.report import LoadReport, bar
from kimi_jax.config import Config

MANIFEST = "kimi_jax.json"
UNFINISHED = ".unfinished-"
FORMAT = 1
ZARR_DTYPES = {"bfloat16": "BF16", "<f4": "F32", "<f2": "F16", "|u1": "U8"}
# What every array's own description must say besides shape, chunks and dtype.
ZARR = {"compressor": None, "filters": None, "order": "C", "zarr_format": 2, "dimension_separator": "."}
POLL = 0.2  # seconds between looks at how much is written


def current(path: str | Path) -> Path | None:
    """The folder of the newest finished save in `path`; None if `path` is no folder of saves.

    Raises ValueError if there is an unfinished save and no finished one.
    """
    path = Path(path)
    if (path / MANIFEST).is_file():
        return path
    if finished := _versions(path):
        return path / str(finished[-1])
    if unfinished := next(path.glob(f"{UNFINISHED}*"), None):
        raise ValueError(
            f"{path} holds no finished checkpoint, only what a save left that was killed: {unfinished.name}"
        )
    return None


def load_params(
    path: str | Path,
    config: Config,
    abstract: Tree,
    shardings: Tree,
    keep: Tree | None = None,
    *,
    progress: bool = True,
) -> tuple[Tree, LoadReport]:
    """Like `safetensors.load_params`, from a folder that `save_params` wrote, whatever layout it was saved from.

    Raises ValueError, naming the file and the parameter, for what is missing, truncated, or not of `config`'s shape.
    """
    rows = table(config)
    check_tree(abstract, {name: row.shape for name, row in rows.items()})
    sources = inspect(path, config)
    folder = current(path)
    assert folder is not None
    kept = {name: row.kept for name, row in rows.items()} if keep is None else flatten(keep)
    report = LoadReport(
        folder=str(folder),
        files=sum(map(len, sources.values())),
        tensors=len(sources),
        padding=_padding(folder),
    )
    return place(sources, abstract, shardings, kept, report, progress), report


def inspect(path: str | Path, config: Config) -> dict[str, list[Source]]:
    """The files of every parameter, after checking that all are there, whole, and of `config`'s shapes.

    Raises ValueError as `load_params` does.
    """
    rows, folder = table(config), current(path)
    if folder is None:
        raise ValueError(f"{path}: no checkpoint that kimi_jax.save wrote is there")
    manifest = _read_manifest(folder)
    problems = [f"parameter {name} is missing" for name in rows if name not in manifest["parameters"]]
    problems += [f"parameter {name} is unexpected" for name in manifest["parameters"] if name not in rows]
    problems += [
        f"parameter {name} has shape {said['shape']}; config.json wants {list(rows[name].shape)}"
        for name, said in manifest["parameters"].items()
        if name in rows and tuple(said["shape"]) != rows[name].shape
    ]
    if problems:
        raise ValueError(f"{folder / MANIFEST} does not fit config.json:\n  " + "\n  ".join(problems[:8]))
    return {name: _sources(folder / "params", name, said) for name, said in manifest["parameters"].items()}


def save_params(
    path: str | Path,
    config: Config,
    params: Tree,
    *,
    raw_config: Mapping[str, Any] | None = None,
    padding: Mapping[str, np.ndarray] | None = None,
    source: str | Path | None = None,
    progress: bool = True,
    wait: bool = True,
) -> "Saving":
    """Save into the folder `path`, in place of what was saved there before; killed at any moment, that stays.

    params: the tree of `names.table`, on any layout. raw_config, padding, source: as for `export.export_params`.
    wait: False returns while the files are being written; call `.wait()` before the program ends.

    Raises ValueError if the folder holds anything but saves.
    """
    path, rows = Path(path), table(config)
    check_tree(params, {name: row.shape for name, row in rows.items()})
    own = {str(number) for number in _versions(path)}
    for entry in path.iterdir() if path.exists() else ():
        if entry.name not in own and not entry.name.startswith(UNFINISHED):
            raise ValueError(f"{path} holds {entry.name}: a save wants a folder of its own")
    held = {name: _cut(array, rows[name].shape) for name, array in flatten(params).items()}
    number = max(_versions(path), default=0) + 1
    unfinished = path / f"{UNFINISHED}{number}"
    for left_over in path.glob(f"{UNFINISHED}*"):
        shutil.rmtree(left_over)
    unfinished.mkdir(parents=True)
    raw, dtype = dict(raw_config or config.to_hf()), str(held["embed"].dtype)
    raw = raw if dtype == config.dtype else hf_config.with_dtype(raw, dtype)  # so that loading changes nothing
    (unfinished / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    copy_companions(source, unfinished)
    manifest = {
        "format": FORMAT,
        "parameters": {name: {"shape": list(a.shape), "dtype": str(a.dtype)} for name, a in held.items()},
        "padding": {
            name: {"dtype": str(tail.dtype), "values": [float(value) for value in tail]}
            for name, tail in (padding or {}).items()
        },
    }
    (unfinished / MANIFEST).write_text(json.dumps(manifest))
    saving = Saving(unfinished, path / str(number), unflatten(held, params), progress)
    if wait:
        saving.wait()
    return saving


class Saving:
    """A save that may still be going on. `wait` returns when it is whole, or raises what went wrong."""

    def __init__(self, unfinished: Path, finished: Path, params: Tree, progress: bool):
        self.path = finished
        self._error: BaseException | None = None
        self._unfinished, self._progress = unfinished, progress
        self._total = sum(array.nbytes for array in jax.tree.leaves(params))
        self._thread = threading.Thread(target=self._run, args=(params,), name="kimi_jax save")
        self._thread.start()

    @property
    def done(self) -> bool:
        """True when nothing is being written any more, for better or worse."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Until the save is whole; shows how much is written."""
        with bar(self._total, "save", self._progress) as shown:
            while not self.done:
                self._thread.join(POLL)
                if self._progress:
                    shown.update(min(_size(self._unfinished), self._total) - shown.n if not self.done else 0)
            shown.update(self._total - shown.n)
        if self._error is not None:
            raise self._error

    def _run(self, params: Tree) -> None:
        try:
            _write(self._unfinished / "params", params)
            self._unfinished.rename(self.path)
        except BaseException as error:  # handed to whoever waits
            self._error = error
            shutil.rmtree(self._unfinished, ignore_errors=True)
            return
        for number in _versions(self.path.parent):
            if number < int(self.path.name):
                gone = self.path.with_name(f"{UNFINISHED}{number}")
                self.path.with_name(str(number)).rename(gone)  # no longer a save, before it is half deleted
                shutil.rmtree(gone, ignore_errors=True)


def _write(folder: Path, params: Tree) -> None:
    """Save the arrays with orbax: plain zarr, a file a shard."""
    import orbax.checkpoint as ocp  # takes a second; loading does not need it

    # Dealing a replicated array out among its devices would copy it, and leave files of a few rows each.
    arrays = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=False,
        use_zarr3=False,
        use_compression=False,
        type_handler_registry=ocp.type_handlers.create_type_handler_registry((jax.Array, arrays)),
    )
    with _without_merge_notice(), ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(os.path.abspath(folder), args=ocp.args.PyTreeSave(params))


@contextlib.contextmanager
def _without_merge_notice() -> Iterator[None]:
    """orbax warns at each save that there is nothing to merge; there never is, in this format."""

    def keeps(record: logging.LogRecord) -> bool:
        return "Skipping merge" not in record.getMessage()

    logger = logging.getLogger("absl")
    logger.addFilter(keeps)
    try:
        yield
    finally:
        logger.removeFilter(keeps)


def _versions(path: Path) -> list[int]:
    """The numbers of the finished saves in a folder, ascending."""
    return sorted(int(file.parent.name) for file in path.glob(f"*/{MANIFEST}") if file.parent.name.isdecimal())


def _size(folder: Path) -> int:
    """Bytes in a folder that is being written."""
    total = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):  # renamed meanwhile
                total += os.path.getsize(os.path.join(parent, name))
    return total


def _cut(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Without what the layout added behind the parameter."""
    return array if array.shape == shape else array[tuple(slice(size) for size in shape)]


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
    folder = folder / name.replace("/", ".")
    where = f"{folder}: parameter {name}"
    if not (folder / ".zarray").is_file():
        raise ValueError(f"{where} is missing")
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
