"""The KDA step kernel, interpreted, against the layer's own middle."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.kernels import delta_step
from kimi_jax.ops.kda import mix_heads_plain

B, H, K, WIDTH = 3, 5, 32, 4


def _inputs(dtype):
    r = np.random.default_rng(0)

    def normal(*shape, dtype=dtype):
        return jnp.asarray(r.normal(size=shape), dtype)

    f32 = jnp.float32
    return (
        normal(B, 1, H, 3, K), normal(B, 1, H, K), normal(B, 1, H), normal(B, 1, H, K), normal(H, 3, K, WIDTH),
        normal(H, dtype=f32), normal(H, K, dtype=f32), normal(K), normal(B, WIDTH - 1, H, 3, K),
        normal(B, H, K, K, dtype=f32), jnp.asarray([1, 0, 1], jnp.int32),
    )  # fmt: skip


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_step_kernel_equals_the_layer(dtype, lower_bound):
    inputs = _inputs(dtype)
    want = jax.jit(partial(mix_heads_plain, lower_bound=lower_bound, eps=1e-5))(*inputs)
    step = partial(delta_step.mix_heads_step, lower_bound=lower_bound, eps=1e-5, interpret=True)
    for got, expected in zip(jax.jit(step)(*inputs), want, strict=True):
        assert got.dtype == expected.dtype
        got, expected = np.asarray(got, np.float32), np.asarray(expected, np.float32)
        error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
        assert error < (1e-2 if dtype == jnp.bfloat16 else 1e-6)


def test_step_kernel_leaves_a_row_without_a_token_alone():
    inputs = _inputs(jnp.bfloat16)
    out, conv, state = delta_step.mix_heads_step(*inputs, lower_bound=None, eps=1e-5, interpret=True)
    np.testing.assert_array_equal(out[1], 0)
    np.testing.assert_array_equal(conv[1], inputs[8][1])
    np.testing.assert_array_equal(state[1], inputs[9][1])
