"""The decoder against the float64 oracle's golden files, whole, in chunks and step by step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kimi_jax
from kimi_jax.generation.generate import feed
from kimi_jax.layers.chunk import Chunk
from kimi_jax.model import Stream
from tests.helpers import golden, relative_rms, worst

LOGITS = 2e-4  # of the largest logit: float32 against the float64 oracle
CHUNKS = 1e-5  # of the largest: one order of summation against another


def hidden_states(model: kimi_jax.Model, ids: np.ndarray) -> list[np.ndarray]:
    """The residual stream after every layer, [T, D] each."""
    tokens, cache = jnp.asarray(ids)[None], model.new_state(1, len(ids)).take()

    def walk(params, cache):
        decoder = nnx.merge(model.graph, params)
        chunk = Chunk(cache.lengths, jnp.full((1,), len(ids), jnp.int32))
        stream = Stream(decoder.enter(tokens, chunk))
        return [stream.h for stream, _ in decoder.walk(stream, chunk, cache.layers)]

    with jax.set_mesh(model.mesh):
        return [np.asarray(h[0]) for h in jax.jit(walk)(model.params, cache)]


@pytest.mark.parametrize("name", ["kimi-linear-tiny", "kimi-linear-random"])
def test_logits_equal_the_oracle(models, name):
    model, gold = models(name), golden(name)
    for i in range(sum(key.startswith("ids_") for key in gold)):
        logits = np.asarray(model.logits(gold[f"ids_{i}"][None])[0])
        assert worst(logits, gold[f"logits_{i}"]) <= LOGITS


def test_hidden_state_after_each_layer_equals_the_oracle(models):
    model, gold = models("kimi-linear-random"), golden("kimi-linear-random")
    hidden = hidden_states(model, gold["ids_1"])
    assert len(hidden) == len(gold["hidden_1"]) == model.config.num_hidden_layers
    for mine, wanted in zip(hidden, gold["hidden_1"], strict=True):
        assert worst(mine, wanted) <= LOGITS


def test_bfloat16_stays_near_the_oracle(tiny):
    model, gold = kimi_jax.load(tiny, dtype="bfloat16", progress=False), golden("kimi-linear-tiny")
    for i in range(4):
        logits = np.asarray(model.logits(gold[f"ids_{i}"][None])[0])
        assert relative_rms(logits, gold[f"logits_{i}"]) <= 2e-2


@pytest.mark.parametrize("chunk", [7, 100, *(pytest.param(c, marks=pytest.mark.slow) for c in (1, 64))])
def test_one_pass_equals_chunks_and_steps_for_every_length(models, chunk):
    """Rows of 1 to 130 tokens, as one ragged batch: logits and everything that the state holds."""
    model = models("kimi-linear-random")
    ids = np.random.default_rng(7).integers(0, model.config.vocab_size, 130).tolist()
    prompts = [ids[:n] for n in range(1, 131)]
    whole = np.asarray(model.logits(np.array([ids]))[0])
    one_pass, kept = feed(model, prompts, model.new_state(130, 130), 256)
    logits, state = feed(model, prompts, model.new_state(130, 130), chunk)
    assert worst(np.asarray(logits), whole) <= CHUNKS
    assert worst(np.asarray(one_pass), whole) <= CHUNKS
    assert state.lengths.tolist() == list(range(1, 131))
    for mine, wanted in zip(jax.tree.leaves(state.cache), jax.tree.leaves(kept.cache), strict=True):
        assert worst(np.asarray(mine), np.asarray(wanted)) <= CHUNKS


def test_a_row_by_itself_leaves_the_same_state_as_in_a_batch(models):
    model = models("kimi-linear-random")
    ids = np.random.default_rng(8).integers(0, model.config.vocab_size, 70).tolist()
    _, batch = feed(model, [ids[:50], ids, ids[:3]], model.new_state(3, 130))
    _, alone = feed(model, [ids[:50]], model.new_state(1, 130))
    for mine, wanted in zip(jax.tree.leaves(batch.row(0).cache), jax.tree.leaves(alone.cache), strict=True):
        assert worst(np.asarray(mine), np.asarray(wanted)) <= CHUNKS


def test_a_resting_row_keeps_its_state_bit_for_bit(models):
    model = models("kimi-linear-random")
    _, state = feed(model, [[5, 6, 7], [8, 9]], model.new_state(2, 64))
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(state.row(1).cache)]
    _, state = model.prefill(np.array([[1, 2, 3, 4], [9, 9, 9, 9]]), [4, 0], state)
    _, state = model.prefill(np.array([[1], [9]]), [1, 0], state)
    for old, new in zip(before, jax.tree.leaves(state.row(1).cache), strict=True):
        assert np.array_equal(old, np.asarray(new))


def test_padding_full_of_nan_changes_nothing(models):
    """The padding token's embedding is NaN: every padded position of every layer would carry it."""
    model = models("kimi-linear-random")
    ids = np.random.default_rng(9).integers(1, model.config.vocab_size, 40).tolist()
    prompts = [ids[:5], ids, ids[:17]]
    clean, clean_state = feed(model, prompts, model.new_state(3, 64))
    embed = model.params["embed"]
    try:
        model.params["embed"] = embed.at[0].set(jnp.nan)
        logits, state = feed(model, prompts, model.new_state(3, 64))
    finally:
        model.params["embed"] = embed
    assert np.array_equal(np.asarray(logits), np.asarray(clean))
    for mine, wanted in zip(jax.tree.leaves(state.cache), jax.tree.leaves(clean_state.cache), strict=True):
        assert np.array_equal(np.asarray(mine), np.asarray(wanted))
