"""What a checkpoint folder is written from, whatever its kind, and the files that go beside the weights.

Must not know hub names, nor how a writer stores arrays.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from kimi_jax.checkpoints.names import table
from kimi_jax.checkpoints.placing import Deferred, Tree, check_tree, flatten
from kimi_jax.config import Config

# What may stand beside the weights, and is copied as it is.
COMPANIONS = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tiktoken.model", "tokenization_kimi.py",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json", "vocab.json",
    "merges.txt",
)  # fmt: skip


class Contents(NamedTuple):
    """One model to write.

    params: the tree of `names.table`, on any layout; with `placing.Deferred` leaves there is never more on the host
    than what is being written. hub_config: config.json as it was loaded (default: `config.to_hf()`). padding:
    `LoadReport.padding`. source: a folder to copy the tokenizer's files from.
    """

    config: Config
    params: Tree
    hub_config: Mapping[str, Any] | None = None
    padding: Mapping[str, np.ndarray] = MappingProxyType({})
    source: Path | None = None

    def arrays(self) -> dict[str, jax.Array | Deferred]:
        """The parameters by path. Raises ValueError unless they are those of the table."""
        check_tree(self.params, {name: row.shape for name, row in table(self.config).items()})
        return flatten(self.params)

    def hub(self) -> dict[str, Any]:
        """What config.json says."""
        return dict(self.hub_config or self.config.to_hf())

    def copy_companions(self, folder: Path) -> None:
        """Copy the tokenizer's and the generation's files, those that are there."""
        if self.source is not None:
            for file in (self.source / name for name in COMPANIONS):
                if file.is_file():
                    shutil.copyfile(file, folder / file.name)


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """As people read it."""
    file.write_text(json.dumps(value, indent=2) + "\n")
