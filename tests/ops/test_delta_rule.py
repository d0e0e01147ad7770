"""The gates and the three forms of the delta rule against the float64 oracle, at their hardest inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kimi_jax.ops.delta_rule import delta_chunked, delta_scan, delta_step, lower_bound_gate, softplus_gate

from tests.reference import oracle

B, H, K, V = 2, 3, 20, 12
FORMS = [delta_scan, delta_chunked]


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def make(tokens, seed=0):
    """q, k, v, g, beta, state in float64, sized as the model makes them; K and V differ."""
    rng = np.random.default_rng(seed)
    return {
        "q": unit(rng.normal(size=(B, tokens, H, K))) * K**-0.5,
        "k": unit(rng.normal(size=(B, tokens, H, K))),
        "v": rng.normal(size=(B, tokens, H, V)),
        "g": -rng.exponential(size=(B, tokens, H, K)),
        "beta": rng.uniform(size=(B, tokens, H)),
        "state": rng.normal(size=(B, H, K, V)),
    }


def float32(inputs):
    return {name: jnp.float32(x) for name, x in inputs.items()}


def by_oracle(inputs):
    """The oracle on the float32-rounded inputs, row by row."""
    rows = [{name: np.float64(np.float32(x[b])) for name, x in inputs.items()} for b in range(B)]
    out, state = zip(*(oracle.kda_recurrence(**row) for row in rows), strict=True)
    return np.stack(out), np.stack(state)


def assert_close(got, want, tolerance):
    for a, b in zip(got, want, strict=True):
        assert np.isfinite(np.asarray(a)).all()
        assert np.abs(np.asarray(a) - b).max() <= tolerance * np.abs(b).max()


@pytest.mark.parametrize("leading", [(), (2, 5)])
def test_gates_equal_oracle(leading):
    rng = np.random.default_rng(0)
    f, a_log, dt_bias = 10 * rng.normal(size=(*leading, H, K)), rng.normal(size=H), rng.normal(size=(H, K))
    arrays = [jnp.float32(a) for a in (f, a_log, dt_bias)]
    np.testing.assert_allclose(softplus_gate(*arrays), oracle.kda_gate(f, a_log, dt_bias), rtol=1e-5, atol=1e-6)
    want = oracle.kda_gate(f, a_log, dt_bias, -5.0)
    np.testing.assert_allclose(lower_bound_gate(*arrays, -5.0), want, rtol=1e-5, atol=1e-6)
    assert np.abs(want - oracle.kda_gate(f, a_log, dt_bias)).max() > 0.1  # two different gates, not one and its clamp


def test_gates_are_float32_and_finite_at_extremes():
    f = jnp.bfloat16([[[-3e38, -100.0, 0.0, 100.0, 3e38]]])
    for g in (
        softplus_gate(f, jnp.zeros(1), jnp.zeros((1, 5))),
        lower_bound_gate(f, jnp.zeros(1), jnp.zeros((1, 5)), -5.0),
    ):
        assert g.dtype == jnp.float32
        assert np.isfinite(g).all() and (np.asarray(g) <= 0).all()


def test_step_equals_oracle():
    inputs = make(1)
    out, state = by_oracle(inputs)
    got = delta_step(**{name: x if name == "state" else x[:, 0] for name, x in float32(inputs).items()})
    assert_close(got, (out[:, 0], state), 1e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [1, 15, 64, 65, 150])
def test_forms_equal_oracle(form, tokens):
    inputs = make(tokens)
    assert_close(form(**float32(inputs)), by_oracle(inputs), 1e-6)


@pytest.mark.parametrize("chunk", [16, 32, 128])
def test_chunk_length_does_not_matter(chunk):
    inputs = make(150)
    assert_close(delta_chunked(**float32(inputs), chunk=chunk), by_oracle(inputs), 1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_no_tokens_leave_the_state(form):
    inputs = float32(make(0))
    out, state = form(**inputs)
    assert out.shape == (B, 0, H, V)
    np.testing.assert_array_equal(state, inputs["state"])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("decay", [0.0, -1e-4, -5.0, -20.0, -1e4])
def test_any_decay_is_finite_and_right(form, decay):
    inputs = make(330)
    inputs["g"] = np.full_like(inputs["g"], decay)
    assert_close(form(**float32(inputs)), by_oracle(inputs), 2e-6)


@pytest.mark.parametrize("form", FORMS)
def test_weak_decay_between_strong_ones_keeps_its_precision(form):
    inputs = make(200)
    strong = np.random.default_rng(1).uniform(size=inputs["g"].shape) < 0.3
    inputs["g"] = np.where(strong, -20.0, -1e-3)
    assert_close(form(**float32(inputs)), by_oracle(inputs), 1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("decay", [0.0, -1e-4, -1e-2])
def test_correlated_keys_with_full_writes_are_stable(form, decay):
    inputs = make(200)
    rng = np.random.default_rng(1)
    inputs["k"] = unit(rng.normal(size=(B, 1, H, K)) + 1e-2 * rng.normal(size=(B, 200, H, K)))
    inputs["beta"] = np.full_like(inputs["beta"], 0.9999)
    inputs["g"] = np.full_like(inputs["g"], decay)
    assert_close(form(**float32(inputs)), by_oracle(inputs), 1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_idle_tokens_leave_the_state_bit_for_bit(form):
    inputs = float32(make(70))
    idle = {name: jnp.zeros_like(x) for name, x in inputs.items() if name in ("k", "v", "g", "beta")}
    _, state = form(**(inputs | idle))
    np.testing.assert_array_equal(state, inputs["state"])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("real", [1, 63, 64, 100])
def test_idle_tokens_after_the_real_ones_change_nothing(form, real):
    inputs = float32(make(130))
    idle = {name: inputs[name].at[:, real:].set(0) for name in ("k", "v", "g", "beta")}
    short = {name: x if name == "state" else x[:, :real] for name, x in inputs.items()}
    out, state = form(**(inputs | idle))
    want_out, want_state = form(**short)
    np.testing.assert_allclose(out[:, :real], want_out, rtol=0, atol=1e-6)
    np.testing.assert_allclose(state, want_state, rtol=0, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_pieces_equal_the_whole(form):
    inputs = float32(make(150))
    whole, last = form(**inputs)
    tokens = {name: x for name, x in inputs.items() if name != "state"}
    state, outs = inputs["state"], []
    for start, end in ((0, 70), (70, 71), (71, 150)):
        out, state = form(**{name: x[:, start:end] for name, x in tokens.items()}, state=state)
        outs.append(out)
    np.testing.assert_allclose(jnp.concatenate(outs, axis=1), whole, rtol=0, atol=2e-6)
    np.testing.assert_allclose(state, last, rtol=0, atol=2e-6)


def test_chunked_form_exponentiates_no_positive_number():
    """Every exp in its program sees only numbers <= 0, whatever g <= 0 it is given."""
    inputs = float32(make(130))
    closed = jax.make_jaxpr(delta_chunked)(*inputs.values())
    seen = []

    def evaluate(jaxpr, consts, args):
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        for equation in jaxpr.eqns:
            operands = [x.val if hasattr(x, "val") else values[x] for x in equation.invars]
            if equation.primitive.name == "exp":
                seen.append(float(jnp.max(operands[0])))
            results = equation.primitive.bind(*operands, **equation.params)
            results = results if equation.primitive.multiple_results else [results]
            values.update(zip(equation.outvars, results, strict=True))

    evaluate(closed.jaxpr, closed.consts, list(inputs.values()))
    assert len(seen) >= 3 and max(seen) <= 0
