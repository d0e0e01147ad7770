"""The counting sort, interpreted, against numpy's stable sort."""

import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.kernels.experts_order import order_by_expert


@pytest.mark.parametrize(("pairs", "experts"), [(1100, 19), (512, 16), (3, 5)])
def test_pairs_are_in_the_order_of_their_experts_and_those_of_others_left_out(pairs, experts):
    local = np.random.default_rng(0).integers(-3, experts + 4, pairs).astype(np.int32)
    held = (local >= 0) & (local < experts)
    want = np.argsort(np.where(held, local, experts), kind="stable")[: held.sum()]
    order, counts = order_by_expert(jnp.asarray(local), experts, interpret=True)
    np.testing.assert_array_equal(order[: held.sum()], want)
    np.testing.assert_array_equal(counts, np.bincount(local[held], minlength=experts))
