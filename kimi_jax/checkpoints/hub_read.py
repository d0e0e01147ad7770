"""A folder of safetensors files, as the hub has them: what is in it, and the report about it.

Must not know hub names (they are in `names`), nor where a parameter belongs.
"""

from pathlib import Path

from kimi_jax.checkpoints.headers import read_headers
from kimi_jax.checkpoints.matching import Match, match
from kimi_jax.checkpoints.names import canonical
from kimi_jax.checkpoints.reading import read_whole
from kimi_jax.checkpoints.report import LoadReport
from kimi_jax.config import Config


def inspect(folder: str | Path, config: Config) -> Match:
    """What a folder holds against what `config` wants, from the headers alone; problems are listed, not raised."""
    return match(config, read_headers(Path(folder)))


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
