"""The short convolution against the float64 oracle; its history; what padding may not do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops.short_conv import short_conv
from tests.reference import oracle

B, T, CHANNELS = 3, 7, (2, 5)


def make(width, tokens=T, channels=CHANNELS, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(B, tokens, *channels)), rng.normal(size=(*channels, width))


def run(x, weight, history=None, counts=None, dtype=jnp.float32):
    width = weight.shape[-1]
    if history is None:
        history = np.zeros((x.shape[0], width - 1, *x.shape[2:]))
    counts = np.full(x.shape[0], x.shape[1]) if counts is None else counts
    return jax.jit(short_conv)(
        jnp.asarray(x, dtype), jnp.float32(weight), jnp.asarray(history, dtype), jnp.int32(counts)
    )


def expected(row, weight):
    """One row [T, *C] by the oracle."""
    tokens, width = row.shape[0], weight.shape[-1]
    y = oracle.short_conv(row.reshape(tokens, -1), weight.reshape(-1, 1, width))
    return y.reshape(row.shape)


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("channels", [(11,), (3, 2, 5)])
def test_equals_oracle(width, channels):
    x, weight = make(width, channels=channels)
    y, history = run(x, weight)
    for b in range(B):
        np.testing.assert_allclose(y[b], expected(x[b], weight), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(history, np.float32(x[:, T - width + 1 :]))


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("cuts", [(1,) * T, (3, 4), (2, 0, 5), (1, 6)])
def test_pieces_equal_the_whole(width, cuts):
    x, weight = make(width)
    whole, last = run(x, weight)
    history, pieces, start = None, [], 0
    for size in cuts:
        y, history = run(x[:, start : start + size], weight, history)
        pieces.append(y)
        start += size
    np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), whole, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(history, last)


@pytest.mark.parametrize("counts", [(0, 1, 2), (3, 4, 7), (6, 0, 5)])
def test_history_holds_the_last_real_inputs_of_each_row(counts):
    x, weight = make(4)
    old = np.random.default_rng(1).normal(size=(B, 3, *CHANNELS))
    _, history = run(x, weight, old, counts)
    for b, count in enumerate(counts):
        want = np.concatenate([old[b], x[b, :count]])[-3:]
        np.testing.assert_array_equal(history[b], np.float32(want))


def test_poisoned_padding_changes_no_real_output_and_no_history():
    x, weight = make(4)
    counts = np.array([0, 3, 6])
    padding = np.arange(T)[None, :] >= counts[:, None]
    poisoned = np.where(padding[..., None, None], np.nan, x)
    y, history = run(x, weight, counts=counts)
    poisoned_y, poisoned_history = run(poisoned, weight, counts=counts)
    np.testing.assert_array_equal(poisoned_y, y)
    np.testing.assert_array_equal(poisoned_history, history)


def test_padded_outputs_are_zero():
    x, weight = make(4)
    counts = np.array([0, 3, 6])
    y, _ = run(x, weight, np.ones((B, 3, *CHANNELS)), counts)
    for b, count in enumerate(counts):
        np.testing.assert_array_equal(y[b, count:], 0)
        assert (np.asarray(y[b, :count]) != 0).all()


def test_bfloat16_is_accumulated_in_float32_and_rounded_once():
    x, weight = make(4, tokens=40)
    x = np.float64(jnp.bfloat16(x))
    y, history = run(x, weight, dtype=jnp.bfloat16)
    assert y.dtype == history.dtype == jnp.bfloat16
    want = np.stack([expected(row, np.float64(np.float32(weight))) for row in x])
    equal = np.asarray(y) == np.float32(want).astype(jnp.bfloat16)
    assert equal.mean() > 0.99  # the rest lies between two bfloat16 numbers up to float32 rounding
    np.testing.assert_allclose(np.float64(y), want, rtol=2**-8, atol=1e-6)


def test_bfloat16_weight_is_used_exactly():
    x, weight = make(3)
    weight = jnp.bfloat16(weight)
    history, counts = jnp.zeros((B, 2, *CHANNELS), jnp.float32), jnp.full(B, T)
    y, _ = jax.jit(short_conv)(jnp.float32(x), weight, history, counts)
    np.testing.assert_array_equal(y, run(x, np.float32(weight))[0])
