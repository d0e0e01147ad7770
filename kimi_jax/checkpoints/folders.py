"""One way into both kinds of checkpoint folder: what orbax saved, and safetensors as the hub has them."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from kimi_jax.checkpoints import orbax, safetensors
from kimi_jax.checkpoints.placing import Tree, bytes_to_read
from kimi_jax.checkpoints.report import LoadReport
from kimi_jax.config import Config
from kimi_jax.tables import human

ENDS = 4096  # bytes at each end of a file that a fingerprint reads


def locate(path: str | Path) -> Path:
    """The folder that holds config.json and the tokenizer's files: of a folder of saves, its newest."""
    return orbax.current(path) or Path(path)


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
    path: str | Path,
    config: Config,
    abstract: Tree,
    shardings: Tree,
    keep: Tree | None = None,
    *,
    progress: bool = True,
) -> tuple[Tree, LoadReport]:
    """`safetensors.load_params` or `orbax.load_params`, by what is in the folder."""
    kind = safetensors if orbax.current(path) is None else orbax
    return kind.load_params(path, config, abstract, shardings, keep, progress=progress)


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
    if orbax.current(path) is not None:
        sources, skipped, problems = orbax.inspect(path, config), [], ([], [], [])
    else:
        found = safetensors.inspect(path, config)
        sources, skipped = found.sources, [stored.name for stored in found.skipped]
        problems = (found.missing, found.unexpected, found.misshapen)
    counted = {} if any(problems) else bytes_to_read(sources, abstract, shardings)
    return DryRun(str(path), counted, *problems, skipped)
