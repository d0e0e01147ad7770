"""What is right for some prompts, what a model makes of them, and where the two differ first.

A model is fed the right tokens, prompts and continuations, whatever it would have chosen itself: one early difference
does not hide what comes after. Knows steps, not layouts; what is a pass is decided in `parity`.
"""

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile

import jax
import numpy as np

from kimi_jax.config import Config
from kimi_jax.runtime import Model
from kimi_jax.steps import Observed

Place = int | str  # a layer's index, "embedding" or "head"


class Seen(NamedTuple):
    """What came out of one row of n tokens: the arrays of `steps.Observed`, the row's own.

    logits [n, W], hidden [l, n, D], margins [M, n]. l is 1 + L, the stream as it enters first; of files it may be L.
    """

    logits: np.ndarray
    hidden: np.ndarray | None
    margins: np.ndarray | None


class Row(NamedTuple):
    """One prompt and what is right for it.

    ids, greedy: the prompt, and the tokens that follow. right: after the first tokens of both, of one file only after
    those of the prompt, and perhaps without hidden states and margins.
    """

    ids: list[int]
    greedy: list[int]
    right: Seen


class Difference(NamedTuple):
    """Where a run differs from what is right: see `parity.Case`."""

    error: float
    layer: Place | None
    token: tuple[int, int] | None
    near_tie: bool
    near_routings: int


def run_alone(model: Model, prompts: Sequence[list[int]], new: int) -> list[Row]:
    """What a model says is right: each prompt by itself, in one piece, then `new` greedy tokens one by one."""
    longest = max(map(len, prompts))
    rows = []
    for ids in prompts:
        state, greedy, parts = model.new_state(1, longest + new), [], []
        piece, width = ids, longest
        while len(greedy) < new:
            observed, state = model.observe([piece + [0] * (width - len(piece))], [len(piece)], state)
            parts.append(_of_row(jax.device_get(observed), 0, len(piece)))
            greedy.append(int(parts[-1].logits[-1].argmax()))
            piece, width = greedy[-1:], 1
        rows.append(Row(ids, greedy, _joined(parts)))
    return rows


def run(model: Model, rows: Sequence[Row], chunk: int, padding: int, batch: int) -> list[Seen]:
    """What a model makes of the right tokens, `batch` rows at a time: prompts in calls of `chunk` columns, the last
    `padding` of which hold junk, then a token at a time. Rows that have no more tokens, or are not there, rest.
    """
    seen, real = [], chunk - padding
    for first in range(0, len(rows), batch):
        group = rows[first : first + batch]
        state = model.new_state(batch, capacity(rows))
        parts: list[list[Seen]] = [[] for _ in group]
        prompts = [[row.ids[i : i + real] for i in range(0, len(row.ids), real)] for row in group]
        tails = [[[token] for token in row.greedy[:-1]] for row in group]
        for pieces, width in ((prompts, chunk), (tails, 1)):
            for now in zip_longest(*pieces, fillvalue=[]):
                tokens, counts = _padded(now, batch, width, model.config.vocab_size - 1)
                observed, state = model.observe(tokens, counts, state)
                observed = jax.device_get(observed)
                for index, part in enumerate(parts):
                    part.append(_of_row(observed, index, int(counts[index])))
        seen += [_joined(part) for part in parts]
    return seen


def capacity(rows: Sequence[Row]) -> int:
    """Tokens that the longest row comes to."""
    return max(len(row.ids) + len(row.greedy) for row in rows)


def compare(rows: Sequence[Row], seen: Sequence[Seen], tolerance: float) -> Difference:
    """Hold a run against what is right; errors count as parts of the largest right value."""
    pairs = list(zip(rows, seen, strict=True))
    largest = max(float(np.abs(row.right.logits).max()) for row in rows)
    error = max(_worst(s.logits, row.right.logits) for row, s in pairs) / largest
    wrong, near = _tokens(pairs, 2 * tolerance * largest)
    margins = [s.margins if row.right.margins is None else row.right.margins for row, s in pairs]
    return Difference(
        error,
        _first_layer(pairs, error, tolerance),
        wrong or near,
        near is not None and wrong is None,
        sum(int((m < tolerance).sum()) for m in margins if m is not None),
    )


def read_golden(path: str | Path, config: Config, new: int) -> list[Row]:
    """The rows of an .npz: `ids_i`, `logits_i`, `greedy_i` (its first `new` tokens) and perhaps `hidden_i`, i = 0, 1...

    Raises ValueError if it is no such file or is not of this model.
    """
    try:
        with np.load(path) as file:
            data = dict(file)
    except (OSError, ValueError, BadZipFile, TypeError) as error:
        raise ValueError(f"golden={str(path)!r} is not an .npz file that can be read: {error}") from error
    rows = []
    while f"ids_{len(rows)}" in data:
        i = len(rows)
        missing = [name for name in (f"logits_{i}", f"greedy_{i}") if name not in data]
        if missing:
            raise ValueError(f"golden={str(path)!r} has ids_{i} and no {missing[0]}")
        ids, greedy = data[f"ids_{i}"].tolist(), data[f"greedy_{i}"].tolist()[:new]
        right = Seen(data[f"logits_{i}"], data.get(f"hidden_{i}"), None)
        layers = config.num_hidden_layers if right.hidden is None else len(right.hidden)
        if right.logits.shape != (len(ids), config.vocab_size) or layers != config.num_hidden_layers:
            raise ValueError(
                f"golden={str(path)!r}: logits_{i} has shape {right.logits.shape} for {len(ids)} tokens and there are "
                f"hidden states of {layers} layers; the model has {config.vocab_size} ids and "
                f"{config.num_hidden_layers} layers. Is it of another checkpoint?"
            )
        rows.append(Row(ids, greedy, right))
    if not rows:
        raise ValueError(f"golden={str(path)!r} has no ids_0; its arrays are {', '.join(data) or 'none'}")
    return rows


def _of_row(observed: Observed, row: int, count: int) -> Seen:
    return Seen(observed.logits[row, :count], observed.hidden[:, row, :count], observed.margins[:, row, :count])


def _joined(parts: Sequence[Seen]) -> Seen:
    logits, hidden, margins = zip(*parts, strict=True)
    return Seen(np.concatenate(logits), np.concatenate(hidden, 1), np.concatenate(margins, 1))


def _padded(pieces: Sequence[Sequence[int]], batch: int, width: int, junk: int) -> tuple[np.ndarray, np.ndarray]:
    """Pieces of rows -> tokens [batch, width] with junk behind them, and how many are real."""
    tokens, counts = np.full((batch, width), junk), np.zeros(batch, np.int32)
    for row, piece in enumerate(pieces):
        tokens[row, : len(piece)], counts[row] = piece, len(piece)
    return tokens, counts


def _worst(mine: np.ndarray, right: np.ndarray) -> float:
    """The largest error where there is a right value; not a number counts as infinite."""
    error = np.abs(mine[: len(right)].astype(np.float64) - right).max()
    return float(np.nan_to_num(error, nan=np.inf))


def _first_layer(pairs: Sequence[tuple[Row, Seen]], error: float, tolerance: float) -> Place | None:
    """The first output, from the embedding on, that is further off than the tolerance."""
    both = ((row.right.hidden, s.hidden) for row, s in pairs)
    known = [(right, mine) for right, mine in both if right is not None and mine is not None]
    for back in range(-max((len(right) for right, _ in known), default=0), 0):
        largest = max(np.abs(right[back]).max() for right, _ in known)
        if max(_worst(mine[back], right[back]) for right, mine in known) > tolerance * largest:
            layer = len(known[0][1]) + back - 1
            return "embedding" if layer < 0 else layer
    return "head" if error > tolerance and len(known) == len(pairs) else None


def _tokens(pairs: Sequence[tuple[Row, Seen]], near: float):
    """The first (row, new token) that differs by its logits, and the first that differs with logits closer than
    `near`."""
    first: dict[bool, tuple[int, int]] = {}
    for index, (row, seen) in enumerate(pairs):
        after = seen.logits[len(row.ids) - 1 :]
        for step, (logits, right) in enumerate(zip(after, row.greedy, strict=True)):
            chosen = logits.argmax()
            if chosen != right:
                first.setdefault(bool(logits[chosen] - logits[right] <= near), (index, step))
    return first.get(False), first.get(True)
