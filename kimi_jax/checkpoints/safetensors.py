"""A folder of safetensors files, as the hub has them, into sharded parameters: checked first, then streamed.

Must not know hub names (they are in `names`), nor where a parameter belongs: it is handed the shardings.
"""

from pathlib import Path

from kimi_jax.checkpoints.headers import read_headers
from kimi_jax.checkpoints.matching import Match, match
from kimi_jax.checkpoints.names import canonical, table
from kimi_jax.checkpoints.placing import Tree, check_tree, flatten, place
from kimi_jax.checkpoints.reading import read_whole
from kimi_jax.checkpoints.report import LoadReport
from kimi_jax.config import Config


def inspect(folder: str | Path, config: Config) -> Match:
    """What a folder holds against what `config` wants, from the headers alone; problems are listed, not raised."""
    return match(config, read_headers(Path(folder)))


def load_params(
    folder: str | Path,
    config: Config,
    abstract: Tree,
    shardings: Tree,
    keep: Tree | None = None,
    *,
    progress: bool = True,
) -> tuple[Tree, LoadReport]:
    """Read a checkpoint folder into the tree of `abstract`, each leaf placed by the same leaf of `shardings`.

    abstract: nested dicts of jax.ShapeDtypeStruct, the paths and shapes of `names.table`, or larger: then the rest is
    zero. Numbers are cast to its dtypes as they arrive, except where `keep`, a tree of True and False (by default the
    table's), says as stored. Host memory beyond the parameters stays below two of them; on CPU they are not copied.

    Raises ValueError, before anything is allocated, for a folder that is damaged or does not fit `config`.
    """
    rows = table(config)
    check_tree(abstract, {path: row.shape for path, row in rows.items()})
    found = inspect(folder, config)
    found.raise_problems(folder)
    report = describe(folder, config, found)
    kept = {path: row.kept for path, row in rows.items()} if keep is None else flatten(keep)
    return place(found.sources, abstract, shardings, kept, report, progress), report


def describe(folder: str | Path, config: Config, found: Match) -> LoadReport:
    """The report before loading; also reads the padding, which has no parameter to go to."""
    used = {source.stored.name: source.stored for sources in found.sources.values() for source in sources}
    return LoadReport(
        folder=str(folder),
        files=len({stored.file for stored in used.values()}),
        tensors=len(used),
        skipped={stored.name: stored.nbytes for stored in found.skipped},
        padding={
            canonical(source.stored.name, config): read_whole(source.stored).reshape(-1)[source.piece.shape[0] :]
            for source in found.padded
        },
    )
