"""Rows of merged matrices that were stored rank by rank, back in logical order.

Engines that shard a merged q_a and kv_a store each rank's share of every part: [q_0, kv_0, q_1, kv_1, ...].
...]. The shapes of both orders are equal, so a missed restore is silent. Pure numpy; must not know names or files.
"""

from collections.abc import Sequence

import numpy as np


def rank_major_to_logical(rows: np.ndarray, parts: Sequence[int], ranks: int) -> np.ndarray:
    """[q_0, kv_0, q_1, kv_1, ...] -> [q_0, q_1, ..., kv_0, kv_1, ...] along the first axis.

    rows: what the ranks hold, one rank's rows after the other's (concatenate per-rank files first). parts: rows of each
    merged part over all ranks, such as (q_lora_rank, kv_lora_rank + qk_rope_head_dim). One rank changes nothing.

    Raises ValueError if a part does not divide by the ranks, or the parts are not all the rows.
    """
    shares = _shares(rows, parts, ranks)
    by_rank = rows.reshape(ranks, sum(shares), *rows.shape[1:])
    pieces = np.split(by_rank, np.cumsum(shares)[:-1], axis=1)
    return np.concatenate([piece.reshape(-1, *rows.shape[1:]) for piece in pieces])


def logical_to_rank_major(rows: np.ndarray, parts: Sequence[int], ranks: int) -> np.ndarray:
    """The inverse of `rank_major_to_logical`, with the same errors."""
    shares = _shares(rows, parts, ranks)
    pieces = np.split(rows, np.cumsum(parts)[:-1])
    by_rank = [piece.reshape(ranks, share, *rows.shape[1:]) for piece, share in zip(pieces, shares, strict=True)]
    return np.concatenate(by_rank, axis=1).reshape(rows.shape)


def _shares(rows: np.ndarray, parts: Sequence[int], ranks: int) -> list[int]:
    if ranks < 1 or any(part % ranks for part in parts):
        raise ValueError(f"ranks={ranks} does not divide every merged part of {list(parts)} rows")
    if rows.shape[0] != sum(parts):
        raise ValueError(f"{rows.shape[0]} rows came; parts={list(parts)} are {sum(parts)}")
    return [part // ranks for part in parts]
