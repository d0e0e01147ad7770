"""JSON that says one thing: a repeated key, NaN or anything but an object is an error that names the file.

Knows nothing of configs, checkpoints or arrays.
"""

import json
from pathlib import Path
from typing import Any


def parse_object(text: str | bytes, where: str) -> dict[str, Any]:
    """The JSON object in `text`; `where` names its source in errors.

    Raises ValueError when the text is no JSON, no object, nested without end, or says a key twice: Python's own reader
    would keep the last of two values in silence.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        items: dict[str, Any] = {}
        for key, value in pairs:
            if key in items:
                raise ValueError(f"the key {key!r} occurs twice")
            items[key] = value
        return items

    def no_constant(name: str) -> Any:
        raise ValueError(f"{name} is not a JSON number")

    try:
        value = json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ValueError(f"{where}: not readable as JSON: {reason}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where}: a JSON object was wanted, a {type(value).__name__} came")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; see `parse_object`."""
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{path}: no such file") from None
    return parse_object(text, str(path))
