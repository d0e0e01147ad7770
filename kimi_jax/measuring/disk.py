"""Time loading, saving and exporting beside what the disk itself does with the same bytes, in the same run.

The disk's own are reads of the checkpoint's files into one small buffer, reads into new memory of their size (which a
model needs too, and which costs more than a fast disk or a page cache does), and copies that are on the disk when they
are done. Each round does everything once, in an order of its own, so that what else the machine does falls on all
alike.
"""

import json
import math
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from kimi_jax import tables
from kimi_jax.checkpoints.contents import Contents
from kimi_jax.checkpoints.hub_write import export_params
from kimi_jax.checkpoints.placing import Deferred
from kimi_jax.config import Config
from kimi_jax.loading import export_safetensors, load, save
from kimi_jax.placement import weight_bytes
from kimi_jax.runtime import Model
from kimi_jax.tables import human
from sharding_rules import SINGLE, Layout

CHUNK = 8 << 20  # bytes of one plain read
OWN = ("read", "read and keep", "copy")  # the disk's own


@dataclass(frozen=True)
class Row:
    """One thing that was timed. rate: bytes of checkpoint a second, the median of the rounds; share: of each of OWN in
    the same round, the median too.
    """

    what: str
    rate: float
    slowest: float
    fastest: float
    share: dict[str, float]


@dataclass(frozen=True)
class Report:
    """What was timed, and where. cold: the files' pages were dropped from memory before each reading."""

    machine: dict[str, str]
    nbytes: int
    files: int
    rounds: int
    cold: bool
    layout: str
    rows: list[Row]

    def to_json(self) -> str:
        """All of it."""
        return json.dumps(asdict(self), indent=1)

    def __repr__(self) -> str:
        about = "cold" if self.cold else "warm"
        head = f"{human(self.nbytes)} in {self.files} files, {about}, {self.layout}, {self.rounds} rounds"
        rows = [
            (row.what, f"{row.rate / 1e9:.2f}", f"{row.slowest / 1e9:.2f}..{row.fastest / 1e9:.2f}",
             *("" if row.what in OWN else f"{share:.0%}" for share in row.share.values()))
            for row in self.rows
        ]  # fmt: skip
        return f"{head}\n{tables.text(['what', 'GB/s', 'range', *(f'of {own}' for own in OWN)], rows)}"


def run(
    folder: str | Path, *, nbytes: int = 2 * 10**9, rounds: int = 5, cold: bool = False, layout: Layout = SINGLE
) -> Report:
    """Time a random checkpoint of about `nbytes` in a new folder inside `folder`, which is deleted at the end.

    Raises ValueError if there is no room for four of them.
    """
    if (free := shutil.disk_usage(folder).free) < 4 * nbytes:
        raise ValueError(f"{folder} has {human(free)} left; four times {human(nbytes)} was wanted")
    with tempfile.TemporaryDirectory(dir=folder) as name:
        work = Path(name)
        files = write_random(work / "hub", sized(nbytes))
        size = sum(file.stat().st_size for file in files)
        todo, rng = things(work, files, layout), np.random.default_rng(0)
        seconds = [one_round(todo, rng.permutation(list(todo)).tolist(), cold) for _ in range(rounds)]
    rates = {what: [size / taken[what] for taken in seconds] for what in todo}
    machine = {
        "hardware": f"{os.cpu_count()} CPU cores, {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') >> 30} GiB",
        "load average": f"{os.getloadavg()[0]:.1f} before",
        "python": platform.python_version(),
        **{package: version(package) for package in ("jax", "orbax-checkpoint", "numpy")},
    }
    mesh = f"{layout.tp} x {layout.cp} {jax.default_backend()} device{'s' if layout.ranks > 1 else ''}"
    return Report(machine, size, len(files), rounds, cold, mesh, [_row(what, rates) for what in rates])


def sized(nbytes: int) -> Config:
    """Two layers of Kimi Linear 48B, one dense and one MoE, with experts for about so many bytes in bfloat16."""
    config = replace(
        Config.named("kimi-linear-48b"), num_hidden_layers=2, mla_layers=(1,), vocab_size=8192, num_experts=8
    )
    least, expert = (weight_bytes(c, SINGLE, c.dtype) for c in (replace(config, num_experts=count) for count in (8, 9)))
    return replace(config, num_experts=max(8, 8 * round((nbytes - least) / (8 * (expert - least)) + 1)))


def write_random(folder: Path, config: Config) -> list[Path]:
    """A checkpoint of random bits as the hub has it, made a parameter at a time -> its files."""
    rng, model = np.random.default_rng(0), Model(config, SINGLE, config.dtype)

    def make(leaf: jax.ShapeDtypeStruct) -> Deferred:
        dtype = np.dtype(leaf.dtype)

        def bits() -> jax.Array:
            count = math.prod(leaf.shape) * dtype.itemsize
            return jax.device_put(rng.integers(0, 256, count, np.uint8).view(dtype).reshape(leaf.shape))

        return Deferred(leaf.shape, dtype, bits)

    return export_params(folder, Contents(config, jax.tree.map(make, model.abstract())), progress=False)


class Thing(NamedTuple):
    """What is timed: a call, the files that it reads, and the folder that it leaves."""

    call: Callable[[], Any]
    reads: Sequence[Path] = ()
    leaves: Path | None = None


def things(work: Path, files: Sequence[Path], layout: Layout) -> dict[str, Thing]:
    """Everything that is timed, by name. Makes the model that is saved, and a save to load."""
    hub, out = files[0].parent, work / "out"
    model = load(hub, layout=layout, progress=False)
    save(model, work / "saved", progress=False)
    saved = [file for file in (work / "saved").rglob("*") if file.is_file()]
    return {
        "read": Thing(lambda: read(files), files),
        "read and keep": Thing(lambda: [np.fromfile(file, np.uint8) for file in files], files),
        "copy": Thing(lambda: copy(files, out), files, out),
        "load": Thing(lambda: load(hub, layout=layout, progress=False), files),
        "load a save": Thing(lambda: load(work / "saved", layout=layout, progress=False), saved),
        "save": Thing(lambda: save(model, out, progress=False), leaves=out),
        "export": Thing(lambda: export_safetensors(model, out, progress=False), leaves=out),
    }


def one_round(todo: Mapping[str, Thing], order: Sequence[str], cold: bool) -> dict[str, float]:
    """Seconds of each thing, once, in this order."""
    seconds: dict[str, float] = {}
    for what in order:
        call, reads, leaves = todo[what]
        for file in reads if cold else ():
            forget(file)
        began = time.perf_counter()
        jax.block_until_ready(getattr(call(), "params", None))
        seconds[what] = time.perf_counter() - began
        if leaves is not None:
            shutil.rmtree(leaves)
    return seconds


def read(files: Sequence[Path]) -> None:
    """Every byte once, into one buffer."""
    buffer = bytearray(CHUNK)
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def copy(files: Sequence[Path], folder: Path) -> None:
    """Copies that are on the disk when this returns."""
    folder.mkdir()
    for file in files:
        shutil.copyfile(file, folder / file.name)
        with (folder / file.name).open("rb") as stream:
            os.fsync(stream.fileno())


def forget(file: Path) -> None:
    """Drop a file's pages from the system's memory, so that the next reading comes from the disk."""
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _row(what: str, rates: dict[str, list[float]]) -> Row:
    own = rates[what]
    share = {disk: statistics.median(a / b for a, b in zip(own, rates[disk], strict=True)) for disk in OWN}
    return Row(what, statistics.median(own), min(own), max(own), share)
