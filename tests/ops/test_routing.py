"""The router against the float64 oracle: which experts, in which order, with which weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops import routing
from tests.reference import oracle

route = jax.jit(routing.route, static_argnames=("top_k", "renormalize", "scale", "weigh_biased"))

N, D, E, K = 37, 24, 11, 3


@pytest.fixture
def inputs():
    rng = np.random.default_rng(0)
    return rng.normal(size=(N, D)), rng.normal(size=(E, D)) * D**-0.5, 0.5 * rng.normal(size=E)


def float32(arrays):
    return [jnp.float32(a) for a in arrays]


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("scale", [2.446])
@pytest.mark.parametrize("weigh_biased", [True, False])
def test_equals_oracle(inputs, renormalize, scale, weigh_biased):
    x, weight, bias = inputs
    config = {
        "num_experts_per_token": K,
        "moe_renormalize": renormalize,
        "routed_scaling_factor": scale,
        "router_weight_uses_bias": weigh_biased,
    }
    want_experts, want_weights, _ = oracle.router(config, weight, bias, x)
    experts, weights = route(*float32(inputs), top_k=K, renormalize=renormalize, scale=scale, weigh_biased=weigh_biased)
    assert experts.dtype == jnp.int32 and weights.dtype == jnp.float32
    np.testing.assert_array_equal(experts, want_experts)
    np.testing.assert_allclose(weights, want_weights, rtol=2e-5)


def test_bias_selects_but_does_not_weigh(inputs):
    x, weight, _ = float32(inputs)
    chosen = [7, 2, 9]
    bias = jnp.zeros(E).at[jnp.array(chosen)].set(jnp.float32([30.0, 20.0, 10.0]))
    experts, weights = route(x, weight, bias, top_k=K, renormalize=False, scale=1.0)
    np.testing.assert_array_equal(experts, np.tile(chosen, (N, 1)))
    np.testing.assert_allclose(weights, jax.nn.sigmoid(x @ weight.T)[:, jnp.array(chosen)], rtol=1e-5)


def test_ties_go_to_the_lower_index(inputs):
    x, weight, _ = float32(inputs)
    experts, _ = route(x, jnp.zeros_like(weight), jnp.zeros(E), top_k=K, renormalize=True, scale=1.0)
    np.testing.assert_array_equal(experts, np.tile(np.arange(K), (N, 1)))


def test_bias_is_added_in_float32(inputs):
    x, weight, _ = float32(inputs)
    bias = jnp.full(E, 1.0).at[5].set(1.0 + 2**-20)  # bfloat16 cannot tell the two apart
    experts, _ = route(x, jnp.zeros_like(weight), bias, top_k=1, renormalize=True, scale=1.0)
    np.testing.assert_array_equal(experts, 5)


def test_bfloat16_inputs_are_widened_before_the_product(inputs):
    x, weight, bias = (jnp.bfloat16(a) for a in inputs)
    got = route(x, weight, bias, top_k=K, renormalize=True, scale=2.0)
    want = route(*(a.astype(jnp.float32) for a in (x, weight, bias)), top_k=K, renormalize=True, scale=2.0)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_product_asks_for_full_precision(inputs):
    text = route.lower(*float32(inputs), top_k=K, renormalize=True, scale=1.0).as_text()
    (dot,) = [line for line in text.splitlines() if "dot_general" in line]
    assert "precision = [HIGHEST, HIGHEST]" in dot
