"""MXFP4 against the float64 oracle: every code under every usable scale, and packing as its inverse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops import mxfp4
from tests.reference import oracle

dequantise = jax.jit(mxfp4.dequantise, static_argnames="dtype")
pack = jax.jit(mxfp4.pack)


def every_code_and_scale():
    """One row a scale; a row holds each of the 16 codes at an even and at an odd place."""
    codes = np.arange(16, dtype=np.uint8)
    packed = codes | (codes[::-1] << 4)
    scales = np.arange(256, dtype=np.uint8)
    return np.tile(packed, (256, 1)), scales[:, None]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_every_code_is_exact_under_scales_2_to_252(dtype):
    packed, scale = every_code_and_scale()
    got = dequantise(jnp.asarray(packed), jnp.asarray(scale), dtype)
    assert got.dtype == dtype
    want = oracle.mxfp4_dequantize(packed, scale)
    np.testing.assert_array_equal(np.float64(got)[2:253], want[2:253])
    assert (np.signbit(np.float64(got)) == np.signbit(want))[2:253].all()  # minus zero stays minus zero


def test_scales_outside_fail_as_documented():
    packed, scale = every_code_and_scale()
    got = np.float64(dequantise(jnp.asarray(packed), jnp.asarray(scale), jnp.float32))
    want = oracle.mxfp4_dequantize(packed, scale)
    for row in (0, 1):
        assert ((got[row] == want[row]) | (got[row] == 0)).all()
    for row in (253, 254):
        fits = np.abs(want[row]) < 2.0**128
        np.testing.assert_array_equal(got[row][fits], want[row][fits])
        assert np.isinf(got[row][~fits]).all()
    assert np.isnan(got[255]).all()


def test_any_leading_axes_and_several_blocks():
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, size=(3, 2, 5, 48), dtype=np.uint8)
    scale = rng.integers(100, 140, size=(3, 2, 5, 3), dtype=np.uint8)
    got = dequantise(jnp.asarray(packed), jnp.asarray(scale), jnp.bfloat16)
    want = oracle.mxfp4_dequantize(packed.reshape(30, 48), scale.reshape(30, 3)).reshape(3, 2, 5, 96)
    np.testing.assert_array_equal(np.float64(got), want)


def test_packing_keeps_representable_numbers():
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, size=(200, 48), dtype=np.uint8)
    packed[:100] &= 0b10111011  # blocks whose largest code is small: another spelling of the same numbers exists
    scale = rng.integers(2, 253, size=(200, 3), dtype=np.uint8)
    scale[:3], scale[100:103] = 2, 252
    values = dequantise(jnp.asarray(packed), jnp.asarray(scale), jnp.float32)
    again = dequantise(*pack(values), jnp.float32)
    np.testing.assert_array_equal(again, values)
    np.testing.assert_array_equal(np.signbit(again), np.signbit(values))


def test_packing_takes_the_nearest_of_the_blocks_numbers():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(40, 96)) * np.exp2(rng.integers(-40, 40, size=(40, 1)))
    packed, scale = pack(jnp.float32(values))
    got = np.float64(dequantise(packed, scale, jnp.float32)).reshape(40, 3, 32)
    grid = np.concatenate([oracle.E2M1, -oracle.E2M1]) * np.exp2(np.float64(scale) - 127)[..., None]
    blocks = np.float64(np.float32(values)).reshape(40, 3, 32)
    nearest = np.abs(blocks[..., None] - grid[:, :, None, :]).min(axis=-1)
    np.testing.assert_array_equal(np.abs(got - blocks), nearest)
    assert (np.abs(blocks).max(-1) <= 6 * np.exp2(np.float64(scale) - 127)).all()
    assert (np.abs(blocks).max(-1) > 3 * np.exp2(np.float64(scale) - 127)).all()


def test_ties_go_to_the_even_code():
    middles = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    values = np.zeros(32)
    values[:7], values[7:14], values[31] = middles, -middles, 6
    packed, scale = pack(jnp.float32(values))
    want = np.array([0, 1, 1, 2, 2, 4, 4.0])
    got = dequantise(packed, scale, jnp.float32)
    np.testing.assert_array_equal(got[:7], want)
    np.testing.assert_array_equal(got[7:14], -want)


def test_zeros_pack_to_zeros():
    packed, scale = pack(jnp.zeros((2, 64), jnp.bfloat16))
    np.testing.assert_array_equal(packed, 0)
    np.testing.assert_array_equal(dequantise(packed, scale, jnp.float32), 0)
