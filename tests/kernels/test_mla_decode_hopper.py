"""The Hopper MLA decode kernel, interpreted where JAX can do it, against `attend_absorbed` in float32."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kimi_jax.kernels import mla_decode_roles, mla_decode_warps
from kimi_jax.kernels.mla_decode_hopper import SHORTEST, attend_absorbed_hopper, supports
from kimi_jax.ops.attention import Keys, attend_absorbed

S, R, P = 300, 128, 64
LENGTHS = np.array([193, 0, 64, 1], np.int32)
InterpretGPUParams: Any = getattr(plgpu, "InterpretGPUParams", None)
interpreted = pytest.mark.skipif(
    InterpretGPUParams is None, reason="this JAX has no interpret mode for Mosaic GPU kernels"
)


def _inputs(heads):
    r = np.random.default_rng(heads)
    query = jnp.asarray(r.normal(size=(4, 1, heads, R + P)) * 2, jnp.bfloat16)
    return query, jnp.asarray(r.normal(size=(4, 1, S, R + P)), jnp.bfloat16), jnp.asarray(LENGTHS)


def _accumulate(acc, product):
    def from_zero(ref):
        product(ref)
        return ref[...]

    return acc + pl.run_scoped(from_zero, plgpu.WGMMAAccumulatorRef(acc.shape, jnp.float32))


def _weigh(scores, top, total, scale):
    """What `mla_decode_warps.weigh` says, of whole rows."""
    largest = jnp.max(scores, axis=1) * scale
    new_top = jnp.where(largest > top + mla_decode_warps.SLACK, largest, top)
    p, keep = jnp.exp2(scores * scale - new_top[:, None]), jnp.exp2(top - new_top)
    return p.astype(jnp.bfloat16), new_top, keep, total * keep + jnp.sum(p, axis=1)


INSTEAD = {
    "_accumulate": _accumulate,
    "weigh": _weigh,
    "settle": lambda total: total,
    "rescale": lambda sums, keep: sums * keep[None, :],
    "meet": plgpu.commit_smem,
}


@interpreted
@pytest.mark.parametrize(
    ("heads", "options"),
    [(3, {"splits": 1, "ring": 4}), (72, {"splits": 2})],
)
def test_hopper_kernel_equals_absorbed_attention(heads, options, monkeypatch):
    # Interpret mode has no run_state, and none of Mosaic's own operations.
    for name, instead in INSTEAD.items():
        monkeypatch.setattr(mla_decode_roles, name, instead)
    query, rows, lengths = _inputs(heads)
    keys = Keys(rows.astype(jnp.float32), lambda slots: slots, (lengths - 1)[:, None], lengths)
    want = attend_absorbed(query.astype(jnp.float32), keys, R, 0.1)

    # What lies behind a row's length is nobody's business.
    stale = rows.at[0, :, 193:].set(jnp.nan).at[1].set(jnp.nan).at[2, :, 64:].set(jnp.nan).at[3, :, 1:].set(jnp.nan)
    out, lse = attend_absorbed_hopper(query, stale, lengths, R, 0.1, kept=0, interpret=InterpretGPUParams(), **options)
    seen = LENGTHS > 0
    np.testing.assert_array_equal(out[1], 0)
    assert np.all(np.isneginf(np.asarray(lse)[~seen]))
    # A sum's relative error is its logarithm's absolute one.
    np.testing.assert_allclose(np.asarray(lse)[seen], np.asarray(want.lse)[seen], rtol=0, atol=1e-5)
    error = np.linalg.norm(out - want.out) / np.linalg.norm(want.out)
    assert error < 1e-2


def test_a_ring_that_cannot_hold_two_tiles_is_refused():
    with pytest.raises(ValueError, match="ring=3 does not hold two tiles"):
        attend_absorbed_hopper(*_inputs(3), R, 0.1, ring=3)


def test_hopper_kernel_takes_one_token_in_whole_tiles():
    query, _, _ = _inputs(3)
    assert supports(query, SHORTEST, R)
    assert not supports(query, SHORTEST - 1, R)
    assert not supports(jnp.concatenate([query, query], 1), SHORTEST, R)
    assert supports(jnp.tile(query, (1, 1, 42, 1)), SHORTEST, R)
    assert not supports(jnp.tile(query, (1, 1, 43, 1)), SHORTEST, R)
    assert not supports(query, SHORTEST, 64)
    assert not supports(query[..., :-16], SHORTEST, R)
    assert not supports(query.astype(jnp.float32), SHORTEST, R)
