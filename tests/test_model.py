"""The decoder against the float64 oracle's golden files, whole, in chunks and step by step."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kimi_jax
from kimi_jax.generation.generate import feed
from kimi_jax.layers.chunk import Chunk
from tests import layouts
from tests.helpers import golden, logits_of_each, relative_rms, worst

LOGITS = 2e-4  # of the largest logit: float32 against the float64 oracle
CHUNKS = 1e-5  # of the largest: one order of summation against another


def hidden_states(model: kimi_jax.Model, ids: np.ndarray) -> list[np.ndarray]:
    """The residual stream after every layer, [T, D] each."""
    tokens, cache = jnp.asarray(ids)[None], model.new_state(1, len(ids)).take()

    def walk(params, cache):
        decoder = nnx.merge(model.graph, params)
        chunk = Chunk(cache.lengths, jnp.full((1,), len(ids), jnp.int32))
        return [stream.h for stream, _ in decoder.walk(decoder.enter(tokens, chunk), chunk, cache.layers)]

    with jax.set_mesh(model.mesh):
        return [np.asarray(h[0]) for h in jax.jit(walk)(model.params, cache)]


@pytest.fixture(scope="module")
def small():
    """KDA dense, MLA MoE: what the tests need that compare the model with itself."""
    return layouts.one_device()


def check_logits(model: kimi_jax.Model, gold: dict[str, np.ndarray], error: Callable, tolerance: float) -> None:
    """All prompts as one batch, and one by itself if it is a single token, which takes other ops."""
    prompts = [gold[f"ids_{i}"] for i in range(sum(key.startswith("ids_") for key in gold))]
    for i, logits in enumerate(logits_of_each(model, prompts)):
        assert error(logits, gold[f"logits_{i}"]) <= tolerance
    for i, ids in enumerate(prompts):
        if len(ids) == 1:
            assert error(np.asarray(model.logits(ids[None])[0]), gold[f"logits_{i}"]) <= tolerance


@pytest.mark.parametrize("name", ["kimi-linear-tiny", "kimi-linear-random"])
def test_logits_equal_the_oracle(models, name):
    check_logits(models(name), golden(name), worst, LOGITS)


def test_hidden_state_after_each_layer_equals_the_oracle(models):
    model, gold = models("kimi-linear-random"), golden("kimi-linear-random")
    hidden = hidden_states(model, gold["ids_1"])
    assert len(hidden) == len(gold["hidden_1"]) == model.config.num_hidden_layers
    for mine, wanted in zip(hidden, gold["hidden_1"], strict=True):
        assert worst(mine, wanted) <= LOGITS


@pytest.mark.parametrize("config", [layouts.SMALL, layouts.SMALL_K3], ids=["Kimi Linear", "K3"])
def test_the_residual_stream_stays_in_the_models_dtype(config):
    """What the feed-forward adds is float32: its sum with the stream is not."""
    model = kimi_jax.random_model(config, dtype="bfloat16")
    chunk = Chunk(jnp.zeros(1, jnp.int32), jnp.full((1,), 3, jnp.int32))

    def walk(params, cache):
        decoder = nnx.merge(model.graph, params)
        streams = [stream for stream, _ in decoder.walk(decoder.enter(jnp.zeros((1, 3), int), chunk), chunk, cache)]
        return [stream.h for stream in streams], decoder.finish(streams[-1])

    with jax.set_mesh(model.mesh):
        seen = jax.eval_shape(walk, model.params, model.new_state(1, 3).take().layers)
    assert {x.dtype for x in jax.tree.leaves(seen)} == {jnp.dtype("bfloat16")}


def test_bfloat16_stays_near_the_oracle(tiny):
    model = kimi_jax.load(tiny, dtype="bfloat16", progress=False)
    check_logits(model, golden("kimi-linear-tiny"), relative_rms, 2e-2)


EVERY_LENGTH = [np.random.default_rng(7).integers(0, layouts.SMALL.vocab_size, 130).tolist()[:n] for n in range(1, 131)]


@pytest.fixture(scope="module")
def one_pass(small):
    """Logits after each of 130 tokens, and logits and state of EVERY_LENGTH, all in one piece."""
    whole = np.asarray(small.logits(np.array(EVERY_LENGTH[-1:]))[0])
    return whole, *feed(small, EVERY_LENGTH, small.new_state(130, 130), 256)


@pytest.mark.parametrize("chunk", [7, 100, *(pytest.param(c, marks=pytest.mark.slow) for c in (1, 64))])
def test_one_pass_equals_chunks_and_steps_for_every_length(small, one_pass, chunk):
    """Rows of 1 to 130 tokens, as one ragged batch: logits and everything that the state holds."""
    whole, at_once, kept = one_pass
    logits, state = feed(small, EVERY_LENGTH, small.new_state(130, 130), chunk)
    assert worst(np.asarray(logits), whole) <= CHUNKS
    assert worst(np.asarray(at_once), whole) <= CHUNKS
    assert state.lengths.tolist() == list(range(1, 131))
    for mine, wanted in zip(jax.tree.leaves(state.cache), jax.tree.leaves(kept.cache), strict=True):
        assert worst(np.asarray(mine), np.asarray(wanted)) <= CHUNKS


def test_a_row_by_itself_leaves_the_same_state_as_in_a_batch(small):
    ids = np.random.default_rng(8).integers(0, small.config.vocab_size, 70).tolist()
    _, batch = feed(small, [ids[:50], ids, ids[:3]], small.new_state(3, 130))
    _, alone = feed(small, [ids[:50]], small.new_state(1, 130))
    for mine, wanted in zip(jax.tree.leaves(batch.row(0).cache), jax.tree.leaves(alone.cache), strict=True):
        assert worst(np.asarray(mine), np.asarray(wanted)) <= CHUNKS


def test_a_resting_row_keeps_its_state_bit_for_bit(small):
    _, state = feed(small, [[5, 6, 7], [8, 9]], small.new_state(2, 64))
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(state.row(1).cache)]
    _, state = small.prefill(np.array([[1, 2, 3, 4], [9, 9, 9, 9]]), [4, 0], state)
    _, state = small.prefill(np.array([[1], [9]]), [1, 0], state)
    for old, new in zip(before, jax.tree.leaves(state.row(1).cache), strict=True):
        assert np.array_equal(old, np.asarray(new))


def test_padding_full_of_nan_changes_nothing(small):
    """The padding token's embedding is NaN: every padded position of every layer would carry it."""
    ids = np.random.default_rng(9).integers(1, small.config.vocab_size, 40).tolist()
    prompts = [ids[:5], ids, ids[:17]]
    clean, clean_state = feed(small, prompts, small.new_state(3, 64))
    embed = small.params["embed"]
    try:
        small.params["embed"] = embed.at[0].set(jnp.nan)
        logits, state = feed(small, prompts, small.new_state(3, 64))
    finally:
        small.params["embed"] = embed
    assert np.array_equal(np.asarray(logits), np.asarray(clean))
    for mine, wanted in zip(jax.tree.leaves(state.cache), jax.tree.leaves(clean_state.cache), strict=True):
        assert np.array_equal(np.asarray(mine), np.asarray(wanted))
