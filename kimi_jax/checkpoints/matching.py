"""Which stored tensor fills which parameter: the table of names held against the headers of a folder.

Decides before anything is allocated; reads no tensor. Must not know devices.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kimi_jax.checkpoints.headers import Stored
from kimi_jax.checkpoints.names import Parameter, Piece, Shape, canonical, is_skipped, table
from kimi_jax.config import Config

FLOATS = ("BF16", "F16", "F32")
SCALED = ("F8_E4M3", "F8_E5M2")  # numbers only together with a scale
SCALE_BLOCK = 128  # rows and columns that share one scale
SCALE_SUFFIXES = ("_scale_inv", "_scale")
SHOWN = 8  # problems that an error lists


class Source(NamedTuple):
    """A piece of a parameter with the tensor that fills it, and the tensor's scales if it has them."""

    piece: Piece
    stored: Stored
    scale: Stored | None = None


@dataclass
class Match:
    """The outcome for one folder. Loading wants the three lists of problems to be empty."""

    sources: dict[str, list[Source]] = field(default_factory=dict)
    skipped: list[Stored] = field(default_factory=list)
    padded: list[Source] = field(default_factory=list)  # stored longer than the parameter
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)  # or of a dtype that cannot be right

    def raise_problems(self, folder: object) -> None:
        """One ValueError with the first of the problems, if there are any."""
        problems = [*self.misshapen, *self.missing, *self.unexpected]
        if problems:
            more = f"\n  and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
            raise ValueError(
                f"{folder}: the tensors do not fit config.json: {len(self.misshapen)} misshapen, "
                f"{len(self.missing)} missing, {len(self.unexpected)} unexpected:\n  "
                + "\n  ".join(problems[:SHOWN])
                + more
            )


def match(config: Config, tensors: Mapping[str, Stored]) -> Match:
    """Pair every parameter of the table with the tensors of a folder; see `Match`."""
    result = Match()
    found: dict[str, Stored] = {}
    for stored in tensors.values():
        if is_skipped(stored.name, config):
            result.skipped.append(stored)
            continue
        name = canonical(stored.name, config)
        if name in found:
            other = found[name]
            raise ValueError(
                f"{stored.file}: tensor {stored.name} and {other.name} of {other.file} are the same parameter"
            )
        found[name] = stored
    used: set[str] = set()
    for path, row in table(config).items():
        pieces, result.sources[path] = _spelling(row, found), []
        for piece in pieces:
            name = row.prefix + piece.name
            if name not in found:
                result.missing.append(f"{path}: tensor {name} {list(piece.hub_shape)} is missing")
                continue
            used.add(name)
            _add(result, path, row, Source(piece, found[name], _scale(name, found, used)))
    packed_hint = "" if config.packed_experts else "; config.json has no quantization_config for packed experts"
    for name in found.keys() - used:
        hint = packed_hint if name.endswith(("_packed", "_scale")) else ""
        result.unexpected.append(f"{found[name].file.name}: tensor {found[name].name} is unexpected{hint}")
    result.unexpected.sort()
    return result


def _spelling(row: Parameter, found: Mapping[str, Stored]) -> tuple[Piece, ...]:
    """The row's own tensors, or the fused one if that is what is stored."""
    fused = row.fused and all(row.prefix + piece.name in found for piece in row.fused)
    return row.fused if fused and row.prefix + row.pieces[0].name not in found else row.pieces


def _scale(name: str, found: Mapping[str, Stored], used: set[str]) -> Stored | None:
    """The scales beside a tensor of 8-bit floats."""
    if found[name].dtype not in SCALED:
        return None
    for scale in (name + suffix for suffix in SCALE_SUFFIXES):
        if scale in found:
            used.add(scale)
            return found[scale]
    return None


def _add(result: Match, path: str, row: Parameter, source: Source) -> None:
    """Take a source if shape, dtype and scale are right; else note why not."""
    piece, stored, scale = source
    length = math.prod(stored.shape)
    padded = piece.open_ended and length > piece.shape[0] and len(_squeeze(stored.shape)) == 1
    if padded:
        source = Source(piece._replace(hub_shape=stored.shape, view=(length,)), stored, scale)
    if problem := _shape_problem(source.piece, stored) or _dtype_problem(row, stored, scale):
        result.misshapen.append(f"{stored.file.name}: tensor {stored.name} {problem}")
        return
    result.sources[path].append(source)
    if padded:
        result.padded.append(source)


def _shape_problem(piece: Piece, stored: Stored) -> str | None:
    if stored.shape == piece.hub_shape or _squeeze(stored.shape) == _squeeze(piece.hub_shape):
        return None
    at_least = ", or longer" if piece.open_ended else ""
    return f"has shape {list(stored.shape)}; config.json wants {list(piece.hub_shape)}{at_least}"


def _dtype_problem(row: Parameter, stored: Stored, scale: Stored | None) -> str | None:
    wanted = ("U8",) if row.packed else FLOATS
    if stored.dtype in wanted:
        return None
    if stored.dtype not in SCALED or row.packed or row.kept:
        return f"is {stored.dtype}; {' or '.join(wanted)} was wanted"
    if scale is None:
        names = " or ".join(stored.name + suffix for suffix in SCALE_SUFFIXES)
        return f"is {stored.dtype} without scales: {names} is missing, and its numbers mean nothing alone"
    blocks = (*stored.shape[:-2], *(-(-size // SCALE_BLOCK) for size in stored.shape[-2:]))
    if len(stored.shape) < 2 or scale.shape != blocks or scale.dtype not in FLOATS:
        return (
            f"is {stored.dtype} with scales {scale.name} {scale.dtype} {list(scale.shape)}; one number for each "
            f"{SCALE_BLOCK}x{SCALE_BLOCK} block, {list(blocks)}, was wanted"
        )
    return None


def _squeeze(shape: Iterable[int]) -> Shape:
    """Without axes of size 1, which some write and others leave out: they do not change the order of elements."""
    return tuple(size for size in shape if size != 1)
