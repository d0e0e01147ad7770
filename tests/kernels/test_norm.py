"""The norm kernels, interpreted, against `ops.norm`."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.kernels import norm as kernel
from kimi_jax.ops import norm

EPS = 1e-5


def _arrays(dtype):
    r = np.random.default_rng(0)
    return [jnp.asarray(r.normal(size=shape), dtype) for shape in [(3, 2, 1100), (3, 2, 1100), (1100,)]]


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize(("dtype", "rtol"), [(jnp.float32, 1e-6), (jnp.bfloat16, 2**-6)])
def test_the_kernel_equals_the_op(dtype, rtol, terms):
    *both, weight = _arrays(dtype)
    ours = kernel.sum_rms_norm_rows(both[:terms], weight, EPS, interpret=True)
    for got, want in zip(ours, norm.sum_rms_norm(both[:terms], weight, EPS), strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), rtol=rtol)


def test_a_term_of_another_dtype_is_rounded_before_it_is_added():
    x, y, weight = _arrays(jnp.bfloat16)
    wide = y.astype(jnp.float32) * 1.003
    for run in norm.sum_rms_norm, partial(kernel.sum_rms_norm_rows, interpret=True):
        for got, want in zip(run((x, wide), weight, EPS), run((x, wide.astype(x.dtype)), weight, EPS), strict=True):
            assert got.dtype == x.dtype
            np.testing.assert_array_equal(got, want)


def test_long_short_and_many_rows_stay_with_the_op():
    assert kernel.supports(jnp.zeros((64, 1, 2304), jnp.bfloat16))
    for other in (65, 1, 2304), (1, 1, 32768), (1, 1, 512):
        assert not kernel.supports(jnp.zeros(other, jnp.bfloat16))
