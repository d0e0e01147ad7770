"""One way into both kinds of checkpoint folder: what was saved with orbax, and safetensors as the hub has them."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from kimi_jax.checkpoints import hub_read, save_read, states
from kimi_jax.checkpoints.matching import Match
from kimi_jax.checkpoints.names import table
from kimi_jax.checkpoints.placing import Tree, bytes_to_read, check_tree, defer, place
from kimi_jax.checkpoints.report import LoadReport
from kimi_jax.config import Config
from kimi_jax.tables import human

ENDS = 4096  # bytes at each end of a file that a fingerprint reads

KINDS = {"orbax": save_read, "safetensors": hub_read}


def kind_of(path: str | Path) -> str:
    """A name in KINDS, by what is in the folder; "safetensors" for what holds neither."""
    return "safetensors" if save_read.current(path) is None else "orbax"


def locate(path: str | Path) -> Path:
    """The folder that holds config.json and the tokenizer's files: of a folder of saves, its newest.

    Raises ValueError if there is no such folder, or one of something else.
    """
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"path={path!r}: a checkpoint folder is wanted")
    path = Path(path)
    if path.is_file():
        raise ValueError(f"{path} is a file: give the folder that it lies in")
    if not path.is_dir():
        raise ValueError(f"{path}: no such folder; a checkpoint of the hub has to be downloaded first (`hf download`)")
    if (path / states.ABOUT).is_file():
        raise ValueError(f"{path} holds a state of sequences, not weights: load_state(model, path) reads it")
    return save_read.current(path) or path


def fingerprint(path: str | Path) -> str:
    """What tells one checkpoint from another without reading it: each file's name, size, first and last bytes.

    Never raises: of a folder that cannot be read it is the reason, so that processes can compare before one fails.
    """
    seen = hashlib.blake2b()
    try:
        folder = locate(path)
        for file in sorted(file for file in folder.rglob("*") if file.is_file()):
            with file.open("rb") as stream:
                ends = stream.read(ENDS)
                stream.seek(max(0, file.stat().st_size - ENDS))
                seen.update(repr((str(file.relative_to(folder)), file.stat().st_size, ends, stream.read())).encode())
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return seen.hexdigest()


def load_params(
    path: str | Path, config: Config, abstract: Tree, shardings: Tree, *, progress: bool = True
) -> tuple[Tree, LoadReport]:
    """Read a checkpoint folder into the tree of `abstract`, each leaf placed by the same leaf of `shardings`.

    abstract: nested dicts of jax.ShapeDtypeStruct, the paths and shapes of `names.table`, or larger: then the rest is
    zero. Numbers are cast to its dtypes as they arrive, except where the table says that they are kept as stored. Host
    memory beyond the parameters stays below two of them; on CPU they are not copied.

    Raises ValueError, before anything is allocated, for a folder that is damaged or does not fit `config`.
    """
    found, report = _checked(path, config, abstract)
    return place(found.sources, abstract, shardings, _kept(config), report, progress), report


def open_params(path: str | Path, config: Config, abstract: Tree, shardings: Tree) -> tuple[Tree, LoadReport]:
    """Like `load_params`, but the leaves are `placing.Deferred`s: nothing is read before they are made."""
    found, report = _checked(path, config, abstract)
    return defer(found.sources, abstract, shardings, _kept(config), report), report


def _checked(path: str | Path, config: Config, abstract: Tree) -> tuple[Match, LoadReport]:
    check_tree(abstract, {name: row.shape for name, row in table(config).items()})
    kind = KINDS[kind_of(path)]
    found = kind.inspect(path, config)
    found.raise_problems(path)
    return found, kind.describe(path, config, found)


def _kept(config: Config) -> dict[str, bool]:
    return {name: row.kept for name, row in table(config).items()}


@dataclass(frozen=True)
class DryRun:
    """What loading would do, from the headers alone. Loading raises if one of the lists holds anything."""

    folder: str
    bytes_per_device: dict[str, int]  # empty if there is a problem
    missing: list[str]
    unexpected: list[str]
    misshapen: list[str]
    skipped: list[str]

    @property
    def ok(self) -> bool:
        """True if loading would go through."""
        return not (self.missing or self.unexpected or self.misshapen)

    def __repr__(self) -> str:
        lines = [f"{self.folder}: {'fits config.json' if self.ok else 'does not fit config.json'}"]
        lines += [f"  {device} would read {human(nbytes)}" for device, nbytes in self.bytes_per_device.items()]
        for title in ("missing", "unexpected", "misshapen"):
            lines += [f"  {title}: {problem}" for problem in getattr(self, title)]
        if self.skipped:
            lines.append(f"  skipped on purpose: {len(self.skipped)} tensors")
        return "\n".join(lines)


def dry_run(path: str | Path, config: Config, abstract: Tree, shardings: Tree) -> DryRun:
    """Check a folder against `config`, and count what each device would read of it; see `DryRun`.

    Raises ValueError only for a folder that cannot be made sense of: a damaged header, say.
    """
    check_tree(abstract, {name: row.shape for name, row in table(config).items()})
    found = KINDS[kind_of(path)].inspect(path, config)
    problems = (found.missing, found.unexpected, found.misshapen)
    counted = {} if any(problems) else bytes_to_read(found.sources, abstract, shardings)
    return DryRun(str(path), counted, *problems, [stored.name for stored in found.skipped])
