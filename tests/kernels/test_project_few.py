"""The kernel of several products, interpreted, against each product in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.kernels import project_few as kernel

SHAPES = [(70, 384), (6, 384), (64, 128)]  # a last tile that is not full, a weight smaller than a tile, another width


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_each_product_is_that_of_its_own_rows_and_weight(rows):
    r = np.random.default_rng(0)
    xs = [jnp.asarray(r.normal(size=(rows, width)), jnp.bfloat16) for _, width in SHAPES]
    weights = [jnp.asarray(r.normal(size=shape), jnp.bfloat16) for shape in SHAPES]
    for y, x, weight in zip(kernel.project_few(xs, weights, interpret=True), xs, weights, strict=True):
        want = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
        assert y.dtype == x.dtype
        np.testing.assert_allclose(np.asarray(y, np.float64), want, rtol=2**-8, atol=2**-10)


def test_many_rows_other_widths_and_float32_stay_with_the_op():
    x, weight = jnp.zeros((64, 1, 256), jnp.bfloat16), jnp.zeros((8, 256), jnp.bfloat16)
    assert kernel.supports(x, weight)
    assert not kernel.supports(jnp.zeros((65, 1, 256), jnp.bfloat16), weight)
    assert not kernel.supports(x[..., :200], weight[:, :200])
    assert not kernel.supports(x, weight.astype(jnp.float32))
