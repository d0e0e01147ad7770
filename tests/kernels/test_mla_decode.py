"""The MLA decode kernel, interpreted, against `attend_absorbed` in float32."""

import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.kernels.mla_decode import attend_absorbed_step
from kimi_jax.ops.attention import Keys, attend_absorbed

S, R, P = 200, 64, 16
LENGTHS = np.array([200, 0, 77], np.int32)


@pytest.mark.parametrize("heads", [3, 40])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("sharpness", [0.3, 6.0])
def test_decode_kernel_equals_absorbed_attention(heads, splits, sharpness):
    r = np.random.default_rng(heads)
    query = jnp.asarray(r.normal(size=(3, 1, heads, R + P)) * sharpness, jnp.bfloat16)
    rows = jnp.asarray(r.normal(size=(3, 1, S, R + P)), jnp.bfloat16)
    lengths = jnp.asarray(LENGTHS)
    keys = Keys(rows.astype(jnp.float32), lambda slots: slots, (lengths - 1)[:, None], lengths)
    want = attend_absorbed(query.astype(jnp.float32), keys, R, 0.1)

    # What lies behind a row's length is nobody's business.
    stale = rows.at[1].set(jnp.nan).at[2, :, 77:].set(jnp.nan)
    out, lse = attend_absorbed_step(query, stale, lengths, R, 0.1, splits=splits, interpret=True)
    seen = LENGTHS > 0
    np.testing.assert_array_equal(out[1], 0)
    assert np.all(np.isneginf(np.asarray(lse)[~seen]))
    np.testing.assert_allclose(np.asarray(lse)[seen], np.asarray(want.lse)[seen], rtol=1e-5)
    error = np.linalg.norm(out - want.out) / np.linalg.norm(want.out)
    assert error < 1e-2


@pytest.mark.parametrize("splits", [None, 1, 3])
def test_a_nan_in_a_slot_that_is_seen_is_not_lost(splits):
    """splits: of the kernel; None: the op. A NaN shows in the logits, which are checked; a zero would not."""
    r = np.random.default_rng(0)
    query = jnp.asarray(r.normal(size=(1, 1, 3, R + P)), jnp.bfloat16)
    rows = jnp.asarray(r.normal(size=(1, 1, S, R + P)), jnp.bfloat16).at[0, 0, 70].set(jnp.nan)
    lengths = jnp.full((1,), S, jnp.int32)
    if splits is None:
        out, lse = attend_absorbed(query, Keys(rows, lambda slots: slots, (lengths - 1)[:, None], lengths), R, 0.1)
    else:
        out, lse = attend_absorbed_step(query, rows, lengths, R, 0.1, splits=splits, interpret=True)
    assert np.isnan(out).all() and np.isnan(lse).all()
