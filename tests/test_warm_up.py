"""model.warm_up: all that a generate of that shape needs is compiled, nothing is run, and nothing is skipped."""

import gc

import jax
import numpy as np
import pytest

import kimi_jax
from kimi_jax.runtime import Model
from sharding_rules import helix
from tests.layouts import SMALL, one_device

BATCH, CAPACITY, BUCKET = 2, 96, 16
PROMPTS = [[5], [1, 2, 3, 4, 5, 6, 7]]


@pytest.fixture
def compiled():
    """The compilations since the test began."""
    seen = []
    listener = lambda event, _, **__: seen.append(event) if "backend_compile" in event else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listener)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listener)


def fresh() -> Model:
    """A model on two devices that has compiled nothing."""
    model = Model(SMALL, helix(1, 2, tokens_per_block=4), "float32")
    model.params = jax.device_put(one_device().params, model.shardings())
    return model


def test_generate_compiles_nothing_after_a_warm_up_of_its_shape_which_ran_nothing(compiled):
    model = fresh()
    before = model.new_state(BATCH, CAPACITY)
    held = [np.asarray(leaf) for leaf in jax.tree.leaves(before.cache)]
    gc.collect()
    live = sum(array.nbytes for array in jax.live_arrays())
    model.warm_up(BATCH, CAPACITY, [BUCKET])
    gc.collect()
    assert sum(array.nbytes for array in jax.live_arrays()) - live < before.bytes // 100
    assert compiled
    compiled.clear()
    found = kimi_jax.generate(model, PROMPTS, max_new_tokens=9, capacity=CAPACITY)
    assert compiled == []
    assert [row.tokens for row in found] == [
        row.tokens for row in kimi_jax.generate(one_device(), PROMPTS, max_new_tokens=9, capacity=CAPACITY)
    ]
    for leaf, was in zip(jax.tree.leaves(before.cache), held, strict=True):  # the state made before: as it was
        assert np.array_equal(np.asarray(leaf), was)
    logits, after = model.prefill([[5] + [0] * 15, [*PROMPTS[1], *[0] * 9]], [1, 7], before)
    assert after.lengths.tolist() == [1, 7]
    assert np.asarray(logits).argmax(-1).tolist() == [row.tokens[0] for row in found]


def test_a_warm_up_needs_no_weights_and_runs_no_step(compiled):
    """From shapes alone: there is nothing to run on. Not even the empty state is left to compile."""
    model = fresh()
    params = model.params
    model.params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
    model.warm_up(1, 8)
    model.params = params
    compiled.clear()
    assert kimi_jax.generate(model, [7], max_new_tokens=2, capacity=8)[0].tokens  # a prompt of 1 token needs no bucket
    assert compiled == []


@pytest.mark.parametrize("sizes", [(0, 8, [1]), (1, 0, [1]), (1, 8, [0])])
def test_a_shape_that_makes_no_sense_is_an_error(sizes):
    with pytest.raises(ValueError, match=r"=0: a whole number"):
        fresh().warm_up(*sizes)


def test_a_shape_that_cannot_be_compiled_is_an_error_and_is_not_skipped(monkeypatch):
    model = fresh()
    extend = model._extend.compile

    def only_single_tokens(params, tokens, *rest):
        if tokens.shape[1] > 1:
            raise RuntimeError("this shape cannot be compiled")
        return extend(params, tokens, *rest)

    monkeypatch.setattr(model._extend, "compile", only_single_tokens)
    with pytest.raises(RuntimeError, match="cannot be compiled"):
        model.warm_up(1, 8, [BUCKET])
