"""The Hopper KDA step kernel, interpreted where JAX can do it, against the layer's own middle."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from kimi_jax.kernels.delta_step_hopper import mix_heads_step_hopper, supports
from kimi_jax.ops.kda import mix_heads_plain

B, H, K, WIDTH = 3, 2, 128, 4
InterpretGPUParams: Any = getattr(plgpu, "InterpretGPUParams", None)
interpreted = pytest.mark.skipif(
    InterpretGPUParams is None, reason="this JAX has no interpret mode for Mosaic GPU kernels"
)


def _inputs():
    r = np.random.default_rng(0)

    def normal(*shape, dtype: Any = jnp.bfloat16):
        return jnp.asarray(r.normal(size=shape), dtype)

    f32 = jnp.float32
    return (
        normal(B, 1, H, 3, K), normal(B, 1, H, K), normal(B, 1, H), normal(B, 1, H, K), normal(H, 3, K, WIDTH),
        normal(H, dtype=f32), normal(H, K, dtype=f32), normal(K), normal(B, WIDTH - 1, H, 3, K),
        normal(B, H, K, K, dtype=f32), jnp.asarray([1, 0, 1], jnp.int32),
    )  # fmt: skip


@interpreted
@pytest.mark.parametrize("lower_bound", [None, pytest.param(-5.0, marks=pytest.mark.slow)])
def test_hopper_step_equals_the_layer_and_leaves_a_row_without_a_token_alone(lower_bound):
    inputs = _inputs()
    want = jax.jit(partial(mix_heads_plain, lower_bound=lower_bound, eps=1e-5))(*inputs)
    step = partial(mix_heads_step_hopper, lower_bound=lower_bound, eps=1e-5, interpret=InterpretGPUParams())
    found = jax.jit(step)(*inputs)
    for got, expected, tolerance in zip(found, want, (1e-2, 0, 1e-6), strict=True):
        assert got.dtype == expected.dtype
        got, expected = np.asarray(got, np.float32), np.asarray(expected, np.float32)
        assert np.linalg.norm(got - expected) <= tolerance * np.linalg.norm(expected)
    np.testing.assert_array_equal(found[0][1], 0)
    np.testing.assert_array_equal(found[1][1], inputs[8][1])
    np.testing.assert_array_equal(found[2][1], inputs[9][1])


def test_hopper_step_takes_one_token_of_heads_as_wide_as_a_warpgroup():
    qkv = _inputs()[0]
    assert supports(qkv)
    assert not supports(jnp.concatenate([qkv, qkv], 1))
    assert not supports(qkv[..., :64])
