"""SwiGLU and SiTU against the float64 oracle, and their limits."""

import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops.activations import situ, swiglu
from tests.reference import oracle


@pytest.fixture
def gate_and_up():
    rng = np.random.default_rng(0)
    return 6 * rng.normal(size=(7, 33)), 40 * rng.normal(size=(7, 33))  # both caps are reached


def float32(arrays):
    return [jnp.float32(a) for a in arrays]


def test_swiglu_is_silu_of_the_gate_times_up(gate_and_up):
    gate, up = gate_and_up
    np.testing.assert_allclose(swiglu(*float32(gate_and_up)), gate * oracle.sigmoid(gate) * up, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("beta, linear_beta", [(4.0, 25.0), (1.5, 3.0), (4.0, None), (None, 25.0), (0.0, None)])
def test_situ_equals_oracle(gate_and_up, beta, linear_beta):
    want = oracle.situ(*gate_and_up, beta, linear_beta)
    np.testing.assert_allclose(situ(*float32(gate_and_up), beta, linear_beta), want, rtol=1e-5, atol=1e-5)


def test_situ_stays_below_the_product_of_its_betas():
    x = jnp.float32([1e4, 1e30])
    np.testing.assert_allclose(situ(x, x, 4.0, 25.0), 100)
    np.testing.assert_allclose(situ(-x, x, 4.0, 25.0), 0)


def test_situ_becomes_swiglu_as_its_betas_grow(gate_and_up):
    arrays = float32(gate_and_up)
    np.testing.assert_allclose(situ(*arrays, 1e4, 1e5), swiglu(*arrays), rtol=1e-4, atol=1e-5)


def test_bfloat16_is_rounded_once(gate_and_up):
    arrays = [jnp.bfloat16(a) for a in gate_and_up]
    gate, up = (np.float64(a) for a in arrays)
    for got, want in (
        (situ(*arrays, 4.0, 25.0), oracle.situ(gate, up, 4.0, 25.0)),
        (swiglu(*arrays), gate * oracle.sigmoid(gate) * up),
    ):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_array_equal(got, np.float32(want).astype(jnp.bfloat16))
