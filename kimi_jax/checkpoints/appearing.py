"""A folder that appears whole or not at all: written under another name, then renamed.

Of several processes the first makes and renames it, when all have written their part.
"""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from kimi_jax.processes import is_first, wait_for_all


def refuse_taken(path: Path) -> None:
    """Raise ValueError if `path` is there and is not an empty folder."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} exists and is not empty; give a new folder")


@contextlib.contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `path` at the end of the block, or is removed if the block raises."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    if is_first():
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    wait_for_all("the folder is there")
    try:
        yield unfinished
        wait_for_all("the folder is written")
        if is_first():
            if path.exists():
                path.rmdir()
            unfinished.rename(path)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    wait_for_all("the folder has appeared")
