"""The norms against the float64 oracle, and their roundings."""

import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops.norm import gated_rms_norm, l2_norm, rms_norm
from tests.reference import oracle

B, T, H, D = 2, 3, 5, 24


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.mark.parametrize("shape", [(D,), (T, D), (B, T, H, D)])
def test_rms_norm_equals_oracle(rng, shape):
    x, weight = rng.normal(size=shape), rng.normal(size=D)
    got = rms_norm(jnp.float32(x), jnp.float32(weight), 1e-5)
    np.testing.assert_allclose(got, oracle.rms_norm(x, weight, 1e-5), rtol=2e-6, atol=2e-6)


def test_rms_norm_adds_eps_to_the_mean(rng):
    x, weight = 1e-3 * rng.normal(size=(T, D)), np.ones(D)  # mean square 1e-6: eps is felt
    for eps in (1e-6, 1e-5):
        np.testing.assert_allclose(
            rms_norm(jnp.float32(x), jnp.float32(weight), eps), oracle.rms_norm(x, weight, eps), rtol=2e-6
        )


def test_rms_norm_of_bfloat16_has_float32_statistics_and_rounds_before_the_weight(rng):
    x, weight = jnp.bfloat16(rng.normal(size=(T, 640))), jnp.bfloat16(rng.normal(size=640))
    got = rms_norm(x, weight, 1e-5)
    quotient = oracle.rms_norm(np.float64(x), 1.0, 1e-5).astype(jnp.bfloat16)
    product = (np.float64(quotient) * np.float64(weight)).astype(jnp.bfloat16)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, product)


def test_rms_norm_of_bfloat16_takes_a_float32_weight(rng):
    x, weight = jnp.bfloat16(rng.normal(size=(T, D))), rng.normal(size=D)
    got = rms_norm(x, jnp.float32(weight), 1e-5)
    np.testing.assert_array_equal(got, rms_norm(x, jnp.bfloat16(weight), 1e-5))


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_l2_norm_equals_oracle(rng, size):
    x = size * rng.normal(size=(B, T, H, D))
    np.testing.assert_allclose(l2_norm(jnp.float32(x)), oracle.l2_norm(x), rtol=2e-6, atol=1e-7)


def test_l2_norm_is_float32_and_keeps_zero():
    got = l2_norm(jnp.zeros((T, D), jnp.bfloat16))
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, 0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gated_rms_norm_equals_oracle(rng, dtype):
    x, gate, weight = rng.normal(size=(B, T, H, D)), rng.normal(size=(B, T, H, D)), rng.normal(size=D)
    gate, weight = jnp.asarray(gate, dtype), jnp.asarray(weight, dtype)
    got = gated_rms_norm(jnp.float32(x), gate, weight, 1e-5)
    want = oracle.rms_norm(x, np.float64(weight), 1e-5) * oracle.sigmoid(np.float64(gate))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)
