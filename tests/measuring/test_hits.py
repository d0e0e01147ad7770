"""Which experts a step hits, as `measuring.hits` sees it, against what happens when other experts are spoilt."""

import jax
import jax.numpy as jnp
import numpy as np

from kimi_jax.measuring.hits import Routing, counted
from tests import layouts
from tests.layouts import helix

TOKENS = np.array([[3, 1, 4], [1, 5, 9]], np.int32)


def _look(model, tokens):
    return Routing(model)(tokens, model.new_state(2, 16))


def test_an_expert_that_is_not_hit_may_hold_anything_and_one_that_is_may_not():
    model = layouts.one_device()
    hit, _ = _look(model, TOKENS)
    (layer,) = hit  # the one MoE layer
    assert layer.shape == (48,) and 3 <= layer.sum() <= 6 * 3

    def logits(spoilt):
        other = layouts.Model(model.config, model.layout, "float32")
        other.params = jax.tree_util.tree_map_with_path(
            lambda path, x: (
                jnp.where(jnp.asarray(spoilt)[:, None, None, None], jnp.nan, x)
                if path[-1].key == "experts_gate_up" else x
            ),
            model.params,
        )  # fmt: skip
        return np.asarray(other.logits(TOKENS))

    assert np.isfinite(logits(~layer)).all()
    assert np.isnan(logits(np.arange(48) == np.flatnonzero(layer)[0])).any()


def test_looking_leaves_the_state_as_it_was():
    model = layouts.one_device()
    _, fed = model.prefill(TOKENS, None, model.new_state(2, 16))
    wanted, _ = model.decode([7, 8], fed.fork())
    _, looked = Routing(model)(np.array([[7], [8]]), fed)
    found, after = model.decode([7, 8], looked)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))
    assert after.lengths.tolist() == [4, 4]


def test_every_layout_hits_the_same_experts():
    one, _ = _look(layouts.one_device(), TOKENS)
    model = layouts.spread(helix(2, 2, tokens_per_block=4))
    hit, _ = _look(model, TOKENS)
    np.testing.assert_array_equal(hit, one)
    ranks = one.reshape(4, 12).sum(-1)
    assert counted([hit], model).all == one.sum() and counted([hit], model).fullest == ranks.max()
    assert counted([hit], model, rank=2).fullest == ranks[2]
