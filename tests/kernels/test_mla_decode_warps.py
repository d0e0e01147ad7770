"""What warps of the Hopper MLA decode decide, on simulated threads, against a softmax in float64."""

import types

import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.kernels import mla_decode_warps
from kimi_jax.kernels.mla_decode_warps import BY_COLUMN, BY_ROW, WGMMA, rescale_columns, weigh_rows

SCALE = 0.1
THREADS = np.arange(128)
ROWS = 16 * (THREADS // 32) + THREADS % 32 // 4  # a thread's first row; its second lies 8 further


@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    """Arrays of one value a thread, instead of the operations that a compiler would lay down."""
    operations = types.SimpleNamespace(
        addf=np.add,
        subf=np.subtract,
        mulf=np.multiply,
        negf=np.negative,
        maximumf=np.maximum,
        ori=np.logical_or,
        select=np.where,
        cmpf=lambda compare, a, b: compare(a, b),
        CmpFPredicate=types.SimpleNamespace(OGT=np.greater, UNE=np.not_equal),
        fma=lambda a, b, c: (np.float64(a) * b + c).astype(np.float32),
    )
    simulation = {
        "arith": operations,
        "math": operations,
        "_f32": np.float32,
        "_exp2": np.exp2,
        "_packed": lambda a, b: np.stack([a, b], -1).astype(jnp.bfloat16),
        "_part": lambda pair, k: pair[..., k],
        "_over_row": _over_row,
        "_any_of_warp": lambda condition: np.repeat(condition.reshape(4, 32).any(1), 32),
        "_choose": _choose,
    }
    for name, operation in simulation.items():
        monkeypatch.setattr(mla_decode_warps, name, operation)


def _over_row(op, x):
    return np.repeat(op.reduce(x.reshape(-1, 4), 1), 4)


def _choose(condition, make, old):
    return [
        np.where(condition.reshape(-1, *np.ones(np.ndim(n) - 1, int)), n, x) for n, x in zip(make(), old, strict=True)
    ]


def _spread(tile):
    """A tile's scores as the threads hold them: of each of two rows, two of every eight columns."""
    columns = [8 * c + 2 * (THREADS % 4) + k for c in range(8) for k in range(2)]
    return [[tile[ROWS + 8 * r, column] for column in columns] for r in range(2)]


def _gathered(weights):
    tile = np.zeros((64, 64), np.float32)
    for r in range(2):
        for c, pair in enumerate(weights[r]):
            for k in range(2):
                tile[ROWS + 8 * r, 8 * c + 2 * (THREADS % 4) + k] = pair[:, k]
    return tile


def _by_row(row):
    return np.concatenate([row[r].reshape(4, 8, 4)[..., 0, None] for r in range(2)], 1).reshape(64)


def _start():
    return [np.full(128, -1e30, np.float32)] * 2, [np.zeros(128, np.float32)] * 2


def _fold(tile, tops, totals):
    return weigh_rows(_spread(tile), list(tops), list(totals), SCALE)


def _tiles():
    """Scores whose maxima hold, rise, leap within what float32 holds and leap beyond it."""
    tiles = np.random.default_rng(0).normal(size=(6, 64, 64)).astype(np.float32) * 20
    tiles[1, 3, 5] += 90
    tiles[2, 17, 60] += 2000
    tiles[3, 18, 0] += 5e4
    tiles[4, 19:24] += 60
    tiles[5, :, 32:] = -np.inf
    return tiles


def test_weights_and_factors_make_a_softmax():
    tiles, (tops, totals) = _tiles(), _start()
    values = np.random.default_rng(1).normal(size=(6, 64, 8))
    out = np.zeros((64, 8))
    for tile, value in zip(tiles, values, strict=True):
        weights, tops, keeps, totals = _fold(tile, tops, totals)
        out = out * _by_row(keeps)[:, None] + _gathered(weights) @ value
    total = _by_row([_over_row(np.add, x) for x in totals])
    scores = np.concatenate(tiles, 1).astype(np.float64) * SCALE
    p = np.exp2(scores - scores.max(1, keepdims=True))
    np.testing.assert_allclose(_by_row(tops) + np.log2(total), scores.max(1) + np.log2(p.sum(1)), rtol=1e-6)
    want = p / p.sum(1, keepdims=True) @ values.reshape(-1, 8)
    assert np.linalg.norm(out / total[:, None] - want) < 4e-3 * np.linalg.norm(want)


def test_the_largest_weight_so_far_lies_between_1_and_256():
    largest, (tops, totals) = np.zeros(64), _start()
    for tile in _tiles():
        weights, tops, keeps, totals = _fold(tile, tops, totals)
        largest = np.maximum(largest * _by_row(keeps), _gathered(weights).max(1))
        assert largest.min() > 0.99 and largest.max() < 257


def test_a_maximum_moves_only_for_scores_far_above_it():
    tile = _tiles()[0]
    _, tops, _, totals = _fold(tile, *_start())
    risen = tile.copy()
    risen[5] += 7.9 / SCALE
    risen[9] += 8.1 / SCALE
    _, new_tops, keeps, _ = _fold(risen, tops, totals)
    moved = _by_row(new_tops) != _by_row(tops)
    np.testing.assert_array_equal(np.flatnonzero(moved), [9])
    np.testing.assert_allclose(_by_row(keeps)[9], 2.0**-8.1, rtol=1e-4)
    assert np.all(_by_row(keeps)[~moved] == 1)


def test_a_warp_forms_maxima_only_where_one_moves(monkeypatch):
    asked = []
    monkeypatch.setattr(mla_decode_warps, "_any_of_warp", lambda far: asked.append(far.reshape(4, 32).any(1)) or far)
    tile = _tiles()[0]
    _, tops, _, totals = _fold(tile, *_start())
    tile[20] += 100 / SCALE
    _fold(tile, tops, totals)
    np.testing.assert_array_equal(asked, [[True] * 4, [False, True, False, False]])


@pytest.mark.parametrize("changed", [None, 0, 13, 47])
def test_sums_are_rescaled_by_their_columns_factors_in_every_warp_that_holds_one(changed):
    sums = np.random.default_rng(2).normal(size=(128, 48)).astype(np.float32)
    keep = np.ones(48, np.float32)
    if changed is not None:
        keep[changed] = 0.25
    held = [(64 * m + ROWS + 8 * r, 8 * c + 2 * (THREADS % 4)) for m in range(2) for c in range(6) for r in range(2)]
    factors = [np.stack([keep[column], keep[column + 1]], -1) for _, column in held[:12:2]]

    def pairs(x):
        return [np.stack([x[row, column], x[row, column + 1]], -1) for row, column in held]

    np.testing.assert_array_equal(rescale_columns(pairs(sums), factors), pairs(sums * keep))


def test_registers_lie_in_the_order_that_is_taken_for_granted():
    """Of a product: blocks of 64 rows, then eight columns, then the two rows of a thread; of one dimension alike."""

    def order(layout, *shape):
        return tuple(n for n in layout.to_mgpu().registers_shape(shape) if n > 1)

    assert order(WGMMA, 64, 64) == (8, 2) and order(WGMMA, 128, 48) == (2, 6, 2)
    assert order(BY_ROW, 64) == (2,) and order(BY_COLUMN, 48) == (6,)
