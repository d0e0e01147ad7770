"""Parameters into a folder by orbax; a save is whole or it is not there. The folder is described in `save_read`.

Must not know hub names, nor where a parameter belongs.
"""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kimi_jax import hf_config, processes
from kimi_jax.checkpoints.contents import Contents, write_json
from kimi_jax.checkpoints.names import table
from kimi_jax.checkpoints.placing import Deferred, Tree, made, unflatten
from kimi_jax.checkpoints.report import bar
from kimi_jax.checkpoints.save_read import FORMAT, MANIFEST, UNFINISHED, versions

BATCH = 64 << 20  # bytes of small arrays that are written together
POLL = 0.2  # seconds between looks at how much is written


def save_params(path: str | Path, contents: Contents, *, progress: bool = True, wait: bool = True) -> "Saving":
    """Save into the folder `path`, in place of what was saved there before; killed at any moment, that stays.

    wait: False returns while the files are being written; call `.wait()` before the program ends.

    Raises ValueError if the folder holds anything but saves.
    """
    path, rows, arrays = Path(path), table(contents.config), contents.arrays()
    processes.agree("save", path=str(path), versions=versions(path))
    if not (wait or processes.alone()):
        raise ValueError("wait=False: several processes save together and wait for each other; leave it out")
    own = {str(number) for number in versions(path)}
    for entry in path.iterdir() if path.exists() else ():
        if entry.name not in own and not entry.name.startswith(UNFINISHED):
            raise ValueError(f"{path} holds {entry.name}: a save wants a folder of its own")
    held = {name: _cut(array, rows[name].shape) for name, array in arrays.items()}
    number = max(versions(path), default=0) + 1
    unfinished = path / f"{UNFINISHED}{number}"
    if processes.is_first():
        for left_over in path.glob(f"{UNFINISHED}*"):
            shutil.rmtree(left_over)
        unfinished.mkdir(parents=True)
        _describe(unfinished, contents, held)
    processes.wait_for_all("the folder is there")
    saving = Saving(unfinished, path / str(number), unflatten(held, contents.params), progress)
    if wait:
        saving.wait()
    return saving


def _describe(folder: Path, contents: Contents, held: Mapping[str, Deferred]) -> None:
    """All files but the arrays."""
    hub, dtype = contents.hub(), str(held["embed"].dtype)
    if dtype != contents.config.dtype:
        hub = hf_config.with_dtype(hub, dtype)  # so that loading changes nothing
    write_json(folder / "config.json", hub)
    contents.copy_companions(folder)
    manifest = {
        "format": FORMAT,
        "parameters": {name: {"shape": list(a.shape), "dtype": str(a.dtype)} for name, a in held.items()},
        "padding": {
            name: {"dtype": str(tail.dtype), "values": [float(value) for value in tail]}
            for name, tail in contents.padding.items()
        },
    }
    (folder / MANIFEST).write_text(json.dumps(manifest))


class Saving:
    """A save that may still be going on. `wait` returns when it is whole, or raises what went wrong."""

    def __init__(self, unfinished: Path, finished: Path, params: Tree, progress: bool):
        self.path = finished
        self._error: BaseException | None = None
        self._unfinished, self._progress = unfinished, progress
        self._stop, self._ended = threading.Event(), threading.Event()
        self._total = sum(array.nbytes for array in jax.tree.leaves(params))
        threading.Thread(target=self._run, args=(params,), name="kimi_jax save").start()

    @property
    def done(self) -> bool:
        """True when nothing is being written any more, for better or worse."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Until the save is whole; shows how much is written. Ctrl-C gives it up."""
        try:
            with bar(self._total, "save", self._progress) as shown:
                while not self.done:
                    self._ended.wait(POLL)
                    if self._progress:
                        shown.update(min(_size(self._unfinished), self._total) - shown.n if not self.done else 0)
                shown.update(self._total - shown.n)
        except KeyboardInterrupt:
            self._stop.set()
            self._ended.wait()
            raise
        if self._error is not None:
            raise self._error

    def _run(self, params: Tree) -> None:
        try:
            _write(self._unfinished / "params", params, self._stop)
            processes.wait_for_all("the arrays are written")
            if processes.is_first():
                self._unfinished.rename(self.path)
                self._remove_older()
            processes.wait_for_all("the save is there")
        except BaseException as error:  # handed to whoever waits
            self._error = error
            shutil.rmtree(self._unfinished, ignore_errors=True)
        finally:
            self._ended.set()

    def _remove_older(self) -> None:
        for number in versions(self.path.parent):
            if number < int(self.path.name):
                gone = self.path.with_name(f"{UNFINISHED}{number}")
                self.path.with_name(str(number)).rename(gone)  # no longer a save, before it is half deleted
                shutil.rmtree(gone, ignore_errors=True)


def _write(folder: Path, params: Tree, stop: threading.Event) -> None:
    """Save the arrays with orbax: plain zarr, a file a shard. Raises InterruptedError once `stop` is set."""
    import orbax.checkpoint as ocp  # takes a second; loading does not need it

    class InTurn(ocp.type_handlers.ArrayHandler):
        """Makes and writes a batch of arrays before it makes the next."""

        async def serialize(self, values: Sequence[Deferred], infos: Sequence[Any], args: Any = None) -> list[Any]:
            for batch in _batches([value.nbytes for value in values]):
                if stop.is_set():
                    raise InterruptedError(f"{folder}: the save was given up")
                await self.write_batch([values[i] for i in batch], [infos[i] for i in batch])
            return []

        async def write_batch(self, batch: Sequence[Deferred], infos: Sequence[Any]) -> None:
            writing = await super().serialize([one.make() for one in batch], infos)
            await asyncio.gather(*(asyncio.to_thread(one.result) for one in writing))

    # Dealing a replicated array out among its devices would copy it, and leave files of a few rows each.
    registry = ocp.type_handlers.create_type_handler_registry((Deferred, InTurn(use_replica_parallel=False)))
    with _without_notices():
        handler = ocp.PyTreeCheckpointHandler(
            use_ocdbt=False, use_zarr3=False, use_compression=False, type_handler_registry=registry
        )
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(os.path.abspath(folder), args=ocp.args.PyTreeSave(params))


def _batches(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Consecutive indices whose sizes sum to at most BATCH, or a single larger one."""
    batch, total = [], 0
    for i, size in enumerate(sizes):
        if batch and total + size > BATCH:
            yield batch
            batch, total = [], 0
        batch.append(i)
        total += size
    yield batch


@contextlib.contextmanager
def _without_notices() -> Iterator[None]:
    """orbax warns at each save that there is nothing to merge, which there never is in this format, and that shapes are
    not padded to chunks, which they are not."""

    def keeps(record: logging.LogRecord) -> bool:
        return not any(notice in record.getMessage() for notice in ("Skipping merge", "ArrayMetadata persistence"))

    logger = logging.getLogger("absl")
    logger.addFilter(keeps)
    try:
        yield
    finally:
        logger.removeFilter(keeps)


def _size(folder: Path) -> int:
    """Bytes in a folder that is being written."""
    total = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):  # renamed meanwhile
                total += os.path.getsize(os.path.join(parent, name))
    return total


def _cut(array: jax.Array | Deferred, shape: tuple[int, ...]) -> Deferred:
    """Without what the layout added behind the parameter."""

    def make() -> jax.Array:
        whole = made(array)
        return whole if whole.shape == shape else whole[tuple(slice(size) for size in shape)]

    return Deferred(shape, np.dtype(array.dtype), make)
