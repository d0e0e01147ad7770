"""Sampling: the draws follow the distribution that numpy computes, rows are independent, numbers do not recompile."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.sampling import Greedy, MinP, Temperature, TopK, TopP, row_keys, row_seeds, token_logprobs

W = 23
DRAWS = 4000


@pytest.fixture(scope="module")
def logits():
    """Seven rows of mutually distinct logits, from flat to sharply peaked."""
    scale = np.geomspace(0.2, 8, 7)[:, None]
    return jnp.asarray(np.random.default_rng(0).normal(size=(7, W)) * scale, jnp.float32)


@jax.jit
def draw(sampling, logits, keys):
    return sampling(logits, keys)


def padded(values, rows):
    """One short row of logits, filled up with impossible tokens, `rows` times: few shapes, so few compilations."""
    row = np.full(W, -np.inf, np.float32)
    row[: len(values)] = values
    return jnp.broadcast_to(jnp.asarray(row), (rows, W))


def keys(rows, step=0, seed=0):
    return row_keys(jnp.asarray(row_seeds(seed, rows)), step)


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def truth(sampling, logits):
    """The distribution of a draw, by sorting, in float64."""
    p = softmax(np.asarray(logits, np.float64) / sampling.t)
    order = np.argsort(-np.asarray(logits, np.float64), kind="stable")
    keep = np.ones(len(p), bool)
    if isinstance(sampling, TopK):
        keep[order[sampling.k :]] = False
    if isinstance(sampling, TopP):
        keep[order[np.cumsum(p[order]) - p[order] >= sampling.p]] = False
    if isinstance(sampling, MinP):
        keep = p >= sampling.p * p.max()
    return np.where(keep, p, 0) / p[keep].sum()


@pytest.mark.parametrize(
    "sampling",
    [Temperature(1.0), Temperature(0.6), Temperature(3.0), TopK(5), TopK(3, 2.0), TopP(0.9), TopP(0.55, 1.7), MinP(0.1),
     MinP(0.3, 2.5)],
    ids=repr,
)  # fmt: skip
def test_draws_follow_the_distribution(sampling, logits):
    for i, row in enumerate(np.asarray(logits)):
        tokens = draw(sampling, jnp.broadcast_to(jnp.asarray(row), (DRAWS, W)), keys(DRAWS, seed=i * DRAWS))
        count, p = np.bincount(np.asarray(tokens), minlength=W), truth(sampling, row)
        assert count[p == 0].sum() == 0
        usual = p * DRAWS >= 5
        seen, wanted = np.append(count[usual], count[~usual].sum()), np.append(p[usual], p[~usual].sum()) * DRAWS
        seen, wanted = seen[wanted > 0], wanted[wanted > 0]
        chi2, freedom = ((seen - wanted) ** 2 / wanted).sum(), len(seen) - 1
        assert chi2 <= freedom + 5 * np.sqrt(2 * freedom) + 5, (sampling, i, chi2, freedom)


def test_greedy_takes_the_lowest_of_equal_tokens():
    x = jnp.asarray([[1, 3, 0, 3], [-5, -5, -5, -5], [0, -1, 7, 7]], jnp.float32)
    np.testing.assert_array_equal(Greedy()(x, keys(3)), [1, 0, 2])


@pytest.mark.parametrize(
    "sampling", [TopK(1), TopK(1, 50.0), TopP(1e-9), TopP(1e-60, 30.0), Temperature(1e-30)], ids=repr
)
def test_the_narrowest_choice_is_greedy_also_with_equal_logits(sampling, logits):
    tied = [padded(x, 7) for x in ([1, 3, 0, 3, 2], [-5, -5, -5, -5], [-0.0, 0.0, -1, 0.0, -0.0])]
    cases = [logits] if isinstance(sampling, Temperature) else [logits, *tied, -logits, logits * 1e30]
    for x in cases:
        for step in range(10):
            np.testing.assert_array_equal(draw(sampling, x, keys(len(x), step)), Greedy()(x, keys(len(x))))


def test_min_p_of_one_is_greedy_for_distinct_logits_and_fair_between_equal_ones(logits):
    for step in range(20):
        np.testing.assert_array_equal(draw(MinP(1, 9.0), logits, keys(7, step)), Greedy()(logits, keys(7)))
    tied = padded([1, 3, 0, 3], DRAWS)
    count = np.bincount(np.asarray(draw(MinP(1), tied, keys(DRAWS))), minlength=W)
    assert count.sum() == count[[1, 3]].sum() and abs(count[1] - DRAWS / 2) < 5 * np.sqrt(DRAWS / 4)


@pytest.mark.parametrize("t", [0.3, 1.0, 4.0])
def test_the_widest_choice_is_temperature_token_for_token(t, logits):
    for step in range(20):
        k = keys(7, step)
        for wide in (TopK(W, t), TopK(W + 100, t), TopP(1, t), MinP(0, t)):
            np.testing.assert_array_equal(draw(wide, logits, k), draw(Temperature(t), logits, k))


def test_top_k_keeps_exactly_k_of_equal_logits():
    x = padded([2, 5, 2, 2, 5, 2, 1], DRAWS)
    assert set(np.asarray(draw(TopK(4, 3.0), x, keys(DRAWS))).tolist()) == {0, 1, 2, 4}


def test_top_p_keeps_the_fewest_tokens_that_reach_p_of_equal_logits():
    x = padded([0] * 10, DRAWS)
    assert set(np.asarray(draw(TopP(0.35), x, keys(DRAWS))).tolist()) == {0, 1, 2, 3}


def test_a_token_of_minus_infinity_is_never_drawn():
    x = padded([-np.inf, 0, -np.inf, 1], DRAWS)
    for sampling in (Greedy(), Temperature(50.0), TopK(4, 50.0), TopP(1.0, 50.0), TopP(0.99, 50.0), MinP(0.0, 50.0)):
        assert set(np.asarray(draw(sampling, x, keys(DRAWS))).tolist()) <= {1, 3}


@pytest.mark.parametrize(
    "sampling", [Greedy(), Temperature(2.0), TopK(4, 2.0), TopP(0.8, 2.0), MinP(0.1, 2.0)], ids=repr
)
def test_a_row_depends_on_its_own_logits_and_key_alone(sampling, logits):
    k = keys(7, step=3)
    together = np.asarray(draw(sampling, logits, k))
    order = np.array([4, 0, 6, 2, 2, 1, 0])
    np.testing.assert_array_equal(draw(sampling, logits[order], k[order]), together[order])
    poisoned = logits.at[3].set(jnp.nan)
    np.testing.assert_array_equal(np.delete(np.asarray(draw(sampling, poisoned, k)), 3), np.delete(together, 3))
    for i in range(7):
        assert int(draw(sampling, logits[i : i + 1], k[i : i + 1])[0]) == together[i]


def test_keys_follow_from_the_rows_own_seed_and_step():
    seeds, steps = jnp.asarray([5, 9, 5], jnp.uint32), jnp.asarray([2, 2, 7], jnp.int32)
    data = np.asarray(jax.random.key_data(row_keys(seeds, steps)))
    assert len({tuple(row) for row in data}) == 3
    for i, (seed, step) in enumerate([(5, 2), (9, 2), (5, 7)]):
        alone = row_keys(jnp.asarray([seed], jnp.uint32), step)
        np.testing.assert_array_equal(jax.random.key_data(alone)[0], data[i])
        wanted = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), step)
        np.testing.assert_array_equal(jax.random.key_data(wanted), data[i])


def test_an_int_seed_counts_up_and_a_list_is_taken_as_it_is():
    np.testing.assert_array_equal(row_seeds(7, 3), [7, 8, 9])
    np.testing.assert_array_equal(row_seeds([4, 0, 2**32 - 1], 3), [4, 0, 2**32 - 1])


@pytest.mark.parametrize(
    ("seed", "rows", "said"),
    [
        (-1, 1, r"seed=-1 for row 0: wanted 0 <= seed < 2\*\*32"),
        (2**32 - 1, 2, r"seed=4294967296 for row 1"),
        ([1, 2], 3, "seed has 2 numbers for 3 prompts"),
    ],
)
def test_a_seed_out_of_range_is_an_error(seed, rows, said):
    with pytest.raises(ValueError, match=said):
        row_seeds(seed, rows)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Temperature(1), Temperature(0.25)),
        (TopK(3, 2), TopK(7, 0.5)),
        (TopP(1, 2), TopP(0.5, 0.5)),
        (MinP(0, 1), MinP(0.5, 2.5)),
    ],
    ids=lambda s: repr(s),
)
def test_another_number_does_not_recompile(first, second, logits):
    step = jax.jit(lambda sampling, logits, keys: sampling(logits, keys))
    for sampling in (first, second):
        step(sampling, logits, keys(7))
    assert step._cache_size() == 1


def test_numbers_are_leaves_and_survive_a_tree_map():
    leaves, tree = jax.tree.flatten(TopK(3, 0.5))
    assert leaves == [3, 0.5] and jax.tree.unflatten(tree, leaves) == TopK(3, 0.5)
    assert jax.tree.map(lambda _: "anything", TopP(0.5)).p == "anything"
    assert jax.tree.leaves(Greedy()) == []
    assert hash(TopK(3, 1)) == hash(TopK(3))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Temperature(0), r"Temperature\(t=0\): wanted a finite float32 above 0; .*Greedy\(\)"),
        (lambda: Temperature(-1.5), r"Temperature\(t=-1.5\)"),
        (lambda: Temperature(float("nan")), r"Temperature\(t=nan\)"),
        (lambda: Temperature(float("inf")), r"Temperature\(t=inf\)"),
        (lambda: Temperature(1e-60), r"Temperature\(t=1e-60\)"),
        (lambda: TopK(0), r"TopK\(k=0\): wanted a whole number of 1 or more"),
        (lambda: TopK(2**31), r"TopK\(k=2147483648\)"),
        (lambda: TopK(2, t=0), r"TopK\(t=0\)"),
        (lambda: TopP(0.0), r"TopP\(p=0.0\): wanted 0 < p <= 1"),
        (lambda: TopP(1.01), r"TopP\(p=1.01\)"),
        (lambda: TopP(float("nan")), r"TopP\(p=nan\)"),
        (lambda: MinP(-0.1), r"MinP\(p=-0.1\): wanted 0 <= p <= 1"),
        (lambda: MinP(2), r"MinP\(p=2\)"),
    ],
)
def test_a_number_out_of_range_is_an_error(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_numbers_of_numpy_and_whole_numbers_become_pythons_own():
    assert [type(leaf) for leaf in jax.tree.leaves(TopK(np.int64(3), 1))] == [int, float]
    assert Temperature(np.float32(0.5)) == Temperature(0.5)
    assert TopK(np.int64(3)) == TopK(3)


def test_logprobs_are_of_the_raw_logits(logits):
    tokens = np.array([0, 5, 22, 1, 7, 3, 11])
    got = token_logprobs(logits, jnp.asarray(tokens))
    wanted = [np.log(softmax(np.asarray(row, np.float64)))[t] for row, t in zip(logits, tokens, strict=True)]
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_bisection_equals_a_sort_on_a_large_vocabulary():
    """163,840 tokens of many magnitudes: the kept sets of TopK and TopP are those of a stable sort."""
    from kimi_jax.sampling import _best_until

    x = np.random.default_rng(1).normal(size=163840).astype(np.float32) * 3
    x[::7] = np.round(x[::7])
    order = np.argsort(-x.astype(np.float64), kind="stable")
    for k in (1, 50, 1000, 163839):
        keep = _best_until(jnp.asarray(x), jnp.ones(x.shape, jnp.int32), k)
        np.testing.assert_array_equal(np.flatnonzero(keep), np.sort(order[:k]))
    p = softmax(x.astype(np.float64))
    for mass in (0.01, 0.5, 0.95):
        keep = np.asarray(_best_until(jnp.asarray(x), jnp.asarray(p, jnp.float32), mass))
        wanted = np.searchsorted(np.cumsum(p[order]), mass) + 1
        assert abs(keep.sum() - wanted) <= max(1, 1e-4 * wanted)
        assert set(np.flatnonzero(keep)) == set(order[: keep.sum()])
