"""The gates and the three forms of the delta rule against the float64 oracle, at their hardest inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops.delta_rule import delta_chunked, delta_scan, delta_step, lower_bound_gate, softplus_gate
from tests.reference import oracle

B, T, H, K, V = 2, 150, 3, 20, 12  # 150 tokens: two whole chunks and a broken one
step = jax.jit(delta_step)
scan = jax.jit(delta_scan)
chunked = jax.jit(delta_chunked, static_argnames="chunk")
FORMS = pytest.mark.parametrize("form", [scan, chunked], ids=["scan", "chunked"])


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def make(tokens=T, seed=0):
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
    got = step(**{name: x if name == "state" else x[:, 0] for name, x in float32(inputs).items()})
    assert_close(got, (out[:, 0], state), 1e-6)


@FORMS
@pytest.mark.parametrize("tokens", [64, T])
def test_forms_equal_oracle(form, tokens):
    inputs = make(tokens)
    assert_close(form(**float32(inputs)), by_oracle(inputs), 1e-6)


@pytest.mark.parametrize("chunk", [16, 32])
def test_chunk_length_does_not_matter(chunk):
    inputs = make()
    assert_close(chunked(**float32(inputs), chunk=chunk), by_oracle(inputs), 1e-6)


@FORMS
def test_no_tokens_leave_the_state(form):
    inputs = float32(make(0))
    out, state = form(**inputs)
    assert out.shape == (B, 0, H, V)
    np.testing.assert_array_equal(state, inputs["state"])


@FORMS
@pytest.mark.parametrize("decay", [0.0, -1e-4, -5.0, -20.0, -3e38])
def test_any_decay_is_finite_and_right(form, decay):
    inputs = make()
    inputs["g"] = np.full_like(inputs["g"], decay)
    assert_close(form(**float32(inputs)), by_oracle(inputs), 2e-6)


@FORMS
def test_weak_decay_between_strong_ones_keeps_its_precision(form):
    inputs = make()
    strong = np.random.default_rng(1).uniform(size=inputs["g"].shape) < 0.3
    inputs["g"] = np.where(strong, -20.0, -1e-3)
    assert_close(form(**float32(inputs)), by_oracle(inputs), 1e-5)


@FORMS
@pytest.mark.parametrize("decay", [0.0, -1e-4, -1e-2])
def test_correlated_keys_with_full_writes_are_stable(form, decay):
    inputs = make()
    rng = np.random.default_rng(1)
    inputs["k"] = unit(rng.normal(size=(B, 1, H, K)) + 1e-2 * rng.normal(size=(B, T, H, K)))
    inputs["beta"] = np.full_like(inputs["beta"], 0.9999)
    inputs["g"] = np.full_like(inputs["g"], decay)
    assert_close(form(**float32(inputs)), by_oracle(inputs), 1e-5)


@FORMS
def test_idle_tokens_leave_the_state_bit_for_bit(form):
    inputs = float32(make())
    idle = {name: jnp.zeros_like(x) for name, x in inputs.items() if name in ("k", "v", "g", "beta")}
    _, state = form(**(inputs | idle))
    np.testing.assert_array_equal(state, inputs["state"])


@FORMS
@pytest.mark.parametrize("real", [1, 63, 64, 100])
def test_idle_tokens_after_the_real_ones_change_nothing(form, real):
    inputs = make()
    short = {name: x if name == "state" else x[:, :real] for name, x in inputs.items()}
    for name in ("k", "v", "g", "beta"):
        inputs[name][:, real:] = 0
    out, state = form(**float32(inputs))
    assert_close((out[:, :real], state), by_oracle(short), 2e-6)


@FORMS
def test_pieces_equal_the_whole(form):
    inputs = make(128)
    tokens = {name: x for name, x in float32(inputs).items() if name != "state"}
    state, outs = jnp.float32(inputs["state"]), []
    for piece in (slice(0, 64), slice(64, 128)):
        out, state = form(**{name: x[:, piece] for name, x in tokens.items()}, state=state)
        outs.append(out)
    assert_close((jnp.concatenate(outs, axis=1), state), by_oracle(inputs), 2e-6)


def test_chunked_form_exponentiates_no_positive_number(monkeypatch):
    exp = jnp.exp

    def largest_exponents(**inputs):
        seen = []
        with monkeypatch.context() as patch:
            patch.setattr(jnp, "exp", lambda x: (seen.append(jnp.max(x)), exp(x))[1])
            delta_chunked(**inputs)
        return seen

    inputs = float32(make())
    inputs["g"] = inputs["g"] * 20
    seen = jax.jit(largest_exponents)(**inputs)
    assert len(seen) > 5 and max(seen) <= 0
