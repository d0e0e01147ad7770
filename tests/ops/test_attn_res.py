"""Attention Residuals against the float64 oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.ops import attn_res as op
from tests.reference import oracle

attn_res = jax.jit(op.attn_res, static_argnames="eps")

B, T, D, EPS = 2, 3, 24, 1e-5


def make(sources, size=1.0):
    rng = np.random.default_rng(sources)
    *blocks, h = size * rng.normal(size=(sources, B, T, D)) * np.arange(1, sources + 1)[:, None, None, None]
    return blocks, h, rng.normal(size=D), rng.normal(size=D)


def by_oracle(blocks, h, norm, proj):
    params = {"mix_norm.weight": norm, "mix_proj.weight": proj[None, :]}
    return np.stack([oracle.attn_res(params, "mix", [block[b] for block in blocks], h[b], EPS) for b in range(B)])


@pytest.mark.parametrize("sources", [1, 2, 5, 9])
@pytest.mark.parametrize("size", [1e-3, 1.0, 100.0])
def test_equals_oracle(sources, size):
    blocks, h, norm, proj = make(sources, size)
    got = attn_res([jnp.float32(b) for b in blocks], *(jnp.float32(a) for a in (h, norm, proj)), EPS)
    np.testing.assert_allclose(got, by_oracle(blocks, h, norm, proj), rtol=2e-5, atol=2e-5 * size)


def test_without_blocks_it_is_h():
    _, h, norm, proj = (jnp.float32(a) for a in ([], *make(1)[1:]))
    np.testing.assert_array_equal(attn_res([], h, norm, proj, EPS), h)


def test_bfloat16_is_mixed_in_float32_and_rounded_once():
    blocks, h, norm, proj = make(6)
    blocks, (h, norm, proj) = [jnp.bfloat16(b) for b in blocks], (jnp.bfloat16(a) for a in (h, norm, proj))
    got = attn_res(blocks, h, norm, proj, EPS)
    assert got.dtype == jnp.bfloat16
    want = by_oracle([np.float64(b) for b in blocks], *(np.float64(a) for a in (h, norm, proj)))
    equal = np.asarray(got) == np.float32(want).astype(jnp.bfloat16)
    assert equal.mean() > 0.99  # the rest lies between two bfloat16 numbers up to float32 rounding


def test_sources_are_not_stacked():
    blocks, h, norm, proj = make(5)
    arguments = [jnp.float32(b) for b in blocks], *(jnp.float32(a) for a in (h, norm, proj))
    text = jax.jit(lambda *a: attn_res(*a, EPS)).lower(*arguments).as_text()
    assert f"{B}x{T}x{D}xf32" in text and f"5x{B}x{T}x{D}xf32" not in text
