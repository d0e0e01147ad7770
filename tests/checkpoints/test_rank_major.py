"""Rank-major rows: restored exactly, for every number of ranks that divides, and refused otherwise."""

import numpy as np
import pytest

from kimi_jax.checkpoints.rank_major import logical_to_rank_major, rank_major_to_logical

K3 = (1536, 512 + 64)


def stored(logical: np.ndarray, parts, ranks: int) -> np.ndarray:
    """What the ranks would hold, built row by row."""
    rows, first = [], np.cumsum([0, *parts])
    for rank in range(ranks):
        for part, begin in zip(parts, first, strict=False):
            share = part // ranks
            rows += [logical[begin + rank * share + i] for i in range(share)]
    return np.array(rows)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 16, 192])
@pytest.mark.parametrize("parts", [K3, (192, 384, 576)], ids=str)
def test_unique_rows_come_back_in_order(parts, ranks):
    logical = np.arange(2 * sum(parts)).reshape(-1, 2)
    held = stored(logical, parts, ranks)
    np.testing.assert_array_equal(rank_major_to_logical(held, parts, ranks), logical)
    np.testing.assert_array_equal(logical_to_rank_major(logical, parts, ranks), held)
    assert ranks == 1 or (held != logical).any()


def test_a_missed_restore_leaves_a_sixteenth_of_the_rows_in_place():
    logical = np.arange(sum(K3))
    held = logical_to_rank_major(logical, K3, 16)
    assert (held == logical).sum() == 132 and held.size == 2112


@pytest.mark.parametrize("ranks", [5, 7, 128, 0])
def test_ranks_that_do_not_divide_are_refused(ranks):
    with pytest.raises(ValueError, match=f"ranks={ranks} does not divide"):
        rank_major_to_logical(np.zeros((2112, 3)), K3, ranks)


def test_a_gather_of_the_wrong_width_is_refused():
    with pytest.raises(ValueError, match=r"2048 rows came; parts=\[1536, 576\] are 2112"):
        rank_major_to_logical(np.zeros((2048, 3)), K3, 4)
