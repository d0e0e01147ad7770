"""Grouped experts against a plain loop in float64 and against the dense sibling; what they may not cost."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kimi_jax.ops.activations import situ, swiglu
from kimi_jax.ops.experts import experts_dense, experts_grouped

from tests.reference import oracle

E, D, F, K = 7, 24, 20, 3


def make(tokens, dtype=jnp.float32, seed=0, all_experts=E):
    rng = np.random.default_rng(seed)
    return {
        "x": jnp.asarray(rng.normal(size=(tokens, D)), dtype),
        "chosen": jnp.int32(np.argsort(rng.uniform(size=(tokens, all_experts)), axis=-1)[:, :K]),
        "weights": jnp.float32(rng.uniform(size=(tokens, K))),
        "gate_up": jnp.asarray(rng.normal(size=(E, 2, F, D)) * D**-0.5, dtype),
        "down": jnp.asarray(rng.normal(size=(E, D, F)) * F**-0.5, dtype),
    }


def by_hand(x, chosen, weights, gate_up, down, first=0):
    x, weights, gate_up, down = (np.float64(a) for a in (x, weights, gate_up, down))
    y = np.zeros_like(x)
    for n, k in np.ndindex(*chosen.shape):
        e = int(chosen[n, k]) - first
        if 0 <= e < E:
            gate, up = gate_up[e] @ x[n]
            y[n] += weights[n, k] * (down[e] @ (gate * oracle.sigmoid(gate) * up))
    return y


@pytest.mark.parametrize("form", [experts_dense, experts_grouped])
@pytest.mark.parametrize("tokens", [1, 2, 5, 40, 200])
def test_forms_equal_a_plain_loop(form, tokens):
    inputs = make(tokens)
    got = form(**inputs, activation=swiglu)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, by_hand(**inputs), rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("form", [experts_dense, experts_grouped])
@pytest.mark.parametrize("tokens", [2, 60])
def test_the_ranks_parts_sum_to_the_whole(form, tokens):
    inputs = make(tokens, all_experts=3 * E)
    run = jax.jit(lambda first: form(**inputs, activation=swiglu, first=first))  # one program, first is traced
    total = 0
    for first in (0, E, 2 * E):
        part = run(jnp.int32(first))
        np.testing.assert_allclose(part, by_hand(**inputs, first=first), rtol=1e-5, atol=5e-6)
        total += part
    assert (np.asarray(total) != 0).all()


@pytest.mark.parametrize("form", [experts_dense, experts_grouped])
@pytest.mark.parametrize("tokens", [1, 60])
def test_a_rank_without_tokens_returns_exact_zeros(form, tokens):
    inputs = make(tokens)
    np.testing.assert_array_equal(form(**inputs, activation=swiglu, first=E), 0)
    np.testing.assert_array_equal(form(**inputs, activation=swiglu, first=-E), 0)


@pytest.mark.parametrize("tokens", [1, 2, 33, 64, 200])
def test_one_expert_may_take_every_token(tokens):
    inputs = make(tokens) | {"chosen": jnp.full((tokens, K), E - 1, jnp.int32)}
    np.testing.assert_allclose(experts_grouped(**inputs, activation=swiglu), by_hand(**inputs), rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("tokens", [3, 100])
def test_activation_is_the_callers(tokens):
    inputs = make(tokens)
    got = experts_grouped(**inputs, activation=lambda gate, up: situ(gate, up, 0.5, 0.7))
    want = experts_dense(**inputs, activation=lambda gate, up: situ(gate, up, 0.5, 0.7))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=5e-6)
    assert np.abs(got - experts_grouped(**inputs, activation=swiglu)).max() > 0.1


@pytest.mark.parametrize("tokens", [1, 60])
def test_an_experts_bfloat16_output_is_rounded_before_it_is_weighed_in_float32(tokens):
    inputs = make(tokens, jnp.bfloat16)
    got = experts_grouped(**inputs, activation=swiglu)
    want = np.zeros((tokens, D), np.float32)
    for k in range(K):
        one = experts_grouped(
            **inputs | {"chosen": inputs["chosen"][:, k : k + 1], "weights": jnp.ones((tokens, 1))}, activation=swiglu
        )
        np.testing.assert_array_equal(one, one.astype(jnp.bfloat16).astype(jnp.float32))
        want += np.float32(inputs["weights"][:, k : k + 1]) * np.float32(one)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
