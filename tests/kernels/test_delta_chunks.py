"""The KDA kernels for many tokens, interpreted, against the layer's own middle."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops.kda import mix_heads_chunked, mix_heads_plain

B, T, H, K, WIDTH = 2, 150, 2, 64, 4  # two whole chunks and a broken one
COUNTS = [T, 71]


def _inputs(resemblance=0.0, write=0.0, decay=1.0, forgetting=None, seed=0):
    """resemblance: of the keys, and queries, to each other; write: added to the write strength's logit; forgetting: the
    share of the decays that are as strong as can be, all others next to none."""
    r = np.random.default_rng(seed)
    f32, bf16 = jnp.float32, jnp.bfloat16

    def normal(*shape, dtype=bf16):
        return jnp.asarray(r.normal(size=shape), dtype)

    qkv = normal(B, T, H, 3, K) + bf16(resemblance) * normal(1, 1, H, 3, K)
    f = normal(B, T, H, K)
    if forgetting is not None:
        f = jnp.where(r.random(f.shape) < forgetting, bf16(300.0), bf16(-8.0))
    return (
        qkv, f, normal(B, T, H) + bf16(write), normal(B, T, H, K), normal(H, 3, K, WIDTH),
        normal(H, dtype=f32) + np.log(decay).astype(np.float32), normal(H, K, dtype=f32), normal(K),
        normal(B, WIDTH - 1, H, 3, K), normal(B, H, K, K, dtype=f32), jnp.asarray(COUNTS, jnp.int32),
    )  # fmt: skip


@partial(jax.jit, static_argnames="lower_bound")
def _both(*inputs, lower_bound):
    about = dict(lower_bound=lower_bound, eps=1e-5)
    return mix_heads_chunked(*inputs, **about, interpret=True), mix_heads_plain(*inputs, **about)


def _relative(got, want):
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.parametrize("inputs", [
    {}, {"decay": 1e-3}, {"decay": 50.0}, {"forgetting": 0.1}, {"resemblance": 2.0, "write": 9.0, "decay": 1e-2},
], ids=[
    "usual", "hardly any decay", "strong decay", "strong decays amid hardly any",
    "keys that resemble each other, written in full",
])  # fmt: skip
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_chunk_kernels_equal_the_layer(inputs, lower_bound):
    got, want = _both(*_inputs(**inputs), lower_bound=lower_bound)
    for row, count in enumerate(COUNTS):
        assert _relative(got[0][row, :count], want[0][row, :count]) < 1e-2
    np.testing.assert_array_equal(got[1], want[1])
    assert _relative(got[2], want[2]) < 1e-2
    assert np.isfinite(np.asarray(got[0], np.float32)).all()


def test_chunk_kernels_leave_a_row_without_tokens_alone():
    *inputs, _ = _inputs()
    (_, history, state), _ = _both(*inputs, jnp.asarray([T, 0], jnp.int32), lower_bound=None)
    np.testing.assert_array_equal(history[1], inputs[8][1])
    np.testing.assert_array_equal(state[1], inputs[9][1])


def test_chunk_kernels_go_on_where_they_stopped():
    inputs = _inputs()
    (whole, _, last), _ = _both(*inputs, lower_bound=None)
    weights, states, parts = inputs[4:8], inputs[8:10], []
    step = jax.jit(partial(mix_heads_chunked, lower_bound=None, eps=1e-5, interpret=True))
    for start in (0, T // 2):
        tokens = [x[:, start : start + T // 2] for x in inputs[:4]]
        out, *states = step(*tokens, *weights, *states, jnp.clip(jnp.asarray(COUNTS, jnp.int32) - start, 0, T // 2))
        parts.append(out)
    out = jnp.concatenate(parts, axis=1)
    for row, count in enumerate(COUNTS):
        assert _relative(out[row, :count], whole[row, :count]) < 1e-2
    assert _relative(states[1], last) < 1e-2
