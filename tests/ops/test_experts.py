"""Grouped experts against a plain loop in float64 and against the dense sibling; what they may not cost."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops import mxfp4
from kimi_jax.ops.activations import situ, swiglu
from kimi_jax.ops.experts import experts_and_shared, experts_dense, experts_grouped, experts_packed
from kimi_jax.ops.gated_mlp import gated_mlp
from tests.reference import oracle

E, D, F, K = 7, 64, 32, 3


@functools.partial(jax.jit, static_argnames=("form", "activation"))
def run(form, *, activation=swiglu, **inputs):
    return form(**inputs, activation=activation)


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


FORMS = pytest.mark.parametrize("form", [experts_dense, experts_grouped], ids=["dense", "grouped"])


@FORMS
@pytest.mark.parametrize("tokens", [1, 2, 5, 40, 200])
def test_forms_equal_a_plain_loop(form, tokens):
    inputs = make(tokens)
    got = run(form, **inputs)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, by_hand(**inputs), rtol=1e-5, atol=1e-5)


def test_shared_experts_are_added_to_the_routed_ones():
    rng, width = np.random.default_rng(3), 256  # one that the kernels take
    shapes = [(2, width), (2, 2, width, width), (2, width, width), (2, width, width), (width, width)]
    x, *weights = [jnp.asarray(rng.normal(size=shape) * width**-0.5, jnp.bfloat16) for shape in shapes]
    chosen, parts = jnp.int32([[0, 1], [2, 1]]), jnp.float32([[0.3, 0.7], [0.6, 0.4]])

    @jax.jit
    def both_ways(x, *weights):
        routed = experts_grouped(x, chosen, parts, *weights[:2], activation=swiglu, first=1)
        one = experts_and_shared(x, chosen, parts, *weights, activation=swiglu, first=1)
        return one, routed + gated_mlp(x, weights[2], weights[3], swiglu)

    np.testing.assert_allclose(*both_ways(x, *weights), rtol=1e-2, atol=1e-4)


@FORMS
@pytest.mark.parametrize("tokens", [2, 60])
def test_the_ranks_parts_sum_to_the_whole(form, tokens):
    inputs = make(tokens, all_experts=3 * E)
    total = 0
    for first in (0, E, 2 * E):
        part = run(form, **inputs, first=jnp.int32(first))
        np.testing.assert_allclose(part, by_hand(**inputs, first=first), rtol=1e-5, atol=1e-5)
        total += part
    assert (np.asarray(total) != 0).all()


@FORMS
@pytest.mark.parametrize("tokens", [2, 60])
@pytest.mark.parametrize("first", [E, -E])
def test_a_rank_without_tokens_returns_exact_zeros(form, tokens, first):
    inputs = make(tokens)
    np.testing.assert_array_equal(run(form, **inputs, first=jnp.int32(first)), 0)


@pytest.mark.parametrize("tokens", [2, 33, 64])
def test_one_expert_may_take_every_token(tokens):
    inputs = make(tokens) | {"chosen": jnp.full((tokens, K), E - 1, jnp.int32)}
    np.testing.assert_allclose(run(experts_grouped, **inputs), by_hand(**inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 40])
def test_activation_is_the_callers(tokens):
    inputs = make(tokens)
    got = run(experts_grouped, **inputs, activation=capped)
    want = run(experts_dense, **inputs, activation=capped)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert np.abs(got - run(experts_grouped, **inputs)).max() > 0.1


def capped(gate, up):
    return situ(gate, up, 0.5, 0.7)


@pytest.mark.parametrize("tokens", [2, 60])
def test_a_poisoned_token_stays_alone(tokens):
    inputs = make(tokens)
    poisoned = inputs | {"x": inputs["x"].at[-1].set(jnp.nan)}
    got, want = run(experts_grouped, **poisoned), run(experts_grouped, **inputs)
    np.testing.assert_array_equal(got[:-1], want[:-1])
    assert np.isnan(got[-1]).all()


@pytest.mark.parametrize("tokens", [2, 60])
def test_an_experts_bfloat16_output_is_rounded_before_it_is_weighed_in_float32(tokens):
    inputs = make(tokens, jnp.bfloat16)
    got = run(experts_grouped, **inputs)
    one = jnp.ones((tokens, 1), jnp.float32)
    want = np.zeros((tokens, D), np.float32)
    for k in range(K):
        alone = run(experts_grouped, **inputs | {"chosen": inputs["chosen"][:, k : k + 1], "weights": one})
        np.testing.assert_array_equal(alone, alone.astype(jnp.bfloat16).astype(jnp.float32))
        want += np.float32(inputs["weights"][:, k : k + 1]) * np.float32(alone)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("tokens", [1, 40])
def test_packed_equals_grouped_on_the_dequantised_weights_bit_for_bit(tokens, dtype):
    inputs, packed = make_packed(tokens, dtype)
    twin = {
        name: jax.jit(mxfp4.dequantise, static_argnums=2)(packed[f"{name}_packed"], packed[f"{name}_scale"], dtype)
        for name in ("gate_up", "down")
    }
    for first in (0, 2):
        got = run(experts_packed, **inputs, **packed, first=jnp.int32(first))
        want = run(experts_grouped, **inputs, **twin, first=jnp.int32(first))
        np.testing.assert_array_equal(got, want)
        assert (np.asarray(got) != 0).any()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("form", [experts_grouped, experts_packed])
def test_nothing_as_large_as_all_experts_weights_is_made(form, tokens, dtype):
    inputs = make(tokens, dtype)
    if form is experts_packed:
        inputs, packed = make_packed(tokens, dtype)
        inputs = inputs | packed
    made = {name: shape for name, shape in arrays_made(run.lower(form, **inputs).compile().as_text())}
    too_large = {name: shape for name, shape in made.items() if np.prod(shape) >= E * D * F}
    assert made and not too_large


@pytest.mark.parametrize("tokens", [1, 40])
def test_pairs_of_other_ranks_run_no_block(tokens):
    """The loop's bound counts blocks of held experts: a rank without tokens makes no turn."""
    inputs = make(tokens)
    calls = []

    def counting(gate, up):
        jax.debug.callback(lambda: calls.append(1))
        return swiglu(gate, up)

    for first, wanted in ((E, 0), (0, tokens * K if tokens == 1 else None)):
        calls.clear()
        jax.block_until_ready(run(experts_grouped, **inputs, first=jnp.int32(first), activation=counting))
        jax.effects_barrier()
        assert len(calls) == wanted or (wanted is None and E <= len(calls) < tokens * K)


def make_packed(tokens, dtype):
    inputs = make(tokens, dtype)
    gate_up, gate_up_scale = jax.jit(mxfp4.pack)(inputs.pop("gate_up").astype(jnp.float32))
    down, down_scale = jax.jit(mxfp4.pack)(inputs.pop("down").astype(jnp.float32))
    return inputs, {
        "gate_up_packed": gate_up,
        "gate_up_scale": gate_up_scale,
        "down_packed": down,
        "down_scale": down_scale,
    }


def arrays_made(program):
    """(instruction, shape) of everything that a compiled program holds in memory, less its arguments and tuples."""
    fused = False
    for line in program.splitlines():
        if line.endswith("{"):
            fused = line.lstrip().startswith(("%fused", "%wrapped", "fused", "wrapped"))
        found = re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = \w+\[([\d,]+)\]\S* ([\w\-]+)\(", line)
        if found and not fused and found[3] not in ("parameter", "get-tuple-element"):
            yield found[1], [int(size) for size in found[2].split(",")]
