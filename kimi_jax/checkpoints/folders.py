"""One way into both kinds of checkpoint folder: what orbax saved, and safetensors as the hub has them."""

from pathlib import Path

from kimi_jax.checkpoints import orbax, safetensors
from kimi_jax.checkpoints.placing import Tree
from kimi_jax.checkpoints.report import LoadReport
from kimi_jax.config import Config


def locate(path: str | Path) -> Path:
    """The folder that holds config.json and the tokenizer's files: of a folder of saves, its newest."""
    return orbax.current(path) or Path(path)


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
