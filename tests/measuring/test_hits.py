"""Which experts a step hits, as `measuring.hits` sees it, against what happens when other experts are spoilt."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax.measuring.hits import Routing, counted
from kimi_jax.runtime import Model
from sharding_rules import SINGLE
from tests import layouts
from tests.layouts import BATCH, CAPACITY, LENGTH, helix

TOKENS = np.array([3, 1, 41, 5])


@functools.cache
def routing(layout=SINGLE):
    """Of the small model, compiled once."""
    return Routing(layouts.one_device() if layout.ranks == 1 else layouts.spread(layout))


def reached(layout=SINGLE):
    model = routing(layout).model
    return routing(layout)(TOKENS[:, None], model.new_state(BATCH, CAPACITY))[0]


def test_an_expert_that_is_not_hit_may_hold_anything_and_one_that_is_may_not():
    model = layouts.one_device()
    (hit,) = reached()  # of the one MoE layer
    assert hit.shape == (48,) and 3 <= hit.sum() <= BATCH * 3
    other = Model(model.config, model.layout, "float32")

    def logits(spoilt):
        def spoil(path, x):
            if path[-1].key != "experts_gate_up":
                return x
            return jnp.where(jnp.asarray(spoilt)[:, None, None, None], jnp.nan, x)

        other.params = jax.tree_util.tree_map_with_path(spoil, model.params)
        return np.asarray(other.decode(TOKENS, other.new_state(BATCH, CAPACITY))[0])

    assert np.isfinite(logits(~hit)).all()
    for expert in np.flatnonzero(hit):
        assert np.isnan(logits(np.arange(48) == expert)).any()


def test_looking_leaves_the_state_as_it_was():
    model = layouts.one_device()
    tokens = np.arange(BATCH * LENGTH).reshape(BATCH, LENGTH)
    _, fed = model.prefill(tokens, None, model.new_state(BATCH, CAPACITY))
    wanted, _ = model.decode(TOKENS, fed.fork())
    _, looked = routing()(TOKENS[:, None], fed)
    found, after = model.decode(TOKENS, looked)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))
    assert after.lengths.tolist() == [LENGTH + 1] * BATCH


def test_every_layout_hits_the_same_experts_and_the_fullest_rank_counts():
    layout = helix(2, 2, tokens_per_block=4)
    one, hit = reached(), reached(layout)
    np.testing.assert_array_equal(hit, one)
    ranks = one.reshape(4, 12).sum(-1)
    found = counted([hit], layouts.spread(layout))
    assert (found.all, found.fullest) == (one.sum(), ranks.max())
    assert counted([hit], layouts.spread(layout), rank=2).fullest == ranks[2]
