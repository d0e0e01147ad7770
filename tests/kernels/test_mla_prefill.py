"""The MLA prefill kernel, interpreted, against `attend_expanded` in float32."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.kernels.mla_prefill import attend_expanded_tiles
from kimi_jax.ops.attention import Keys, attend_expanded, slots_seen
from sharding_rules import stripes

B, T, H, K, P, V, R, S = 3, 40, 3, 32, 16, 64, 48, 200
STARTS, COUNTS = np.array([0, 159, 37]), np.array([40, 40, 11])  # the last stretch reaches back


@partial(jax.jit, static_argnums=(6, 7))
def kernel(q_nope, q_pe, rows, seen, k_b, v_b, query_block, stretch):
    return attend_expanded_tiles(
        q_nope, q_pe, rows, seen, k_b, v_b, 0.1, query_block=query_block, key_block=16, stretch=stretch, interpret=True
    )


@partial(jax.jit, static_argnums=3)
def plain(queries, rows, positions, position_of, weights):
    return attend_expanded(*queries, Keys(rows, position_of, positions, positions[:, -1]), *weights, 0.1)


def whole(slots):
    return slots


def second_of_two(slots):
    return stripes.position(slots, 1, 4, 2)


@pytest.mark.parametrize("sharpness", [0.3, 3.0])
@pytest.mark.parametrize("position_of", [whole, second_of_two])
@pytest.mark.parametrize(("query_block", "stretch"), [(16, 200), (32, 96)])
def test_prefill_kernel_equals_expanded_attention(sharpness, position_of, query_block, stretch):
    r = np.random.default_rng(5)

    def draw(*shape, size=1.0):
        return jnp.asarray(r.normal(size=shape) * size, jnp.bfloat16)

    q_nope, q_pe, rows = draw(B, T, H, K, size=sharpness), draw(B, T, H, P, size=sharpness), draw(B, 1, S, R + P)
    k_b, v_b = draw(H, K, R, size=R**-0.5), draw(H, V, R, size=R**-0.5)
    steps = STARTS[:, None] + np.arange(T)
    positions = jnp.asarray(np.minimum(steps, (STARTS + COUNTS - 1)[:, None]), jnp.int32)
    seen = slots_seen(Keys(rows, position_of, positions, positions[:, -1]))
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), ((q_nope, q_pe), rows, (k_b, v_b)))
    want = plain(wide[0], wide[1], positions, position_of, wide[2])

    # What lies behind the last slot that a row sees is nobody's business.
    stale = jnp.where((jnp.arange(S)[None] < seen[:, -1:])[:, None, :, None], rows, jnp.nan)
    out, lse = kernel(q_nope, q_pe, stale, seen, k_b, v_b, query_block, stretch)
    empty = np.isneginf(want.lse)
    assert empty.any() == (position_of is second_of_two)
    np.testing.assert_array_equal(np.isneginf(lse), empty)
    np.testing.assert_array_equal(np.asarray(out)[empty], 0)
    np.testing.assert_allclose(np.asarray(lse)[~empty], np.asarray(want.lse)[~empty], atol=2e-2)
    for b in range(B):
        assert np.linalg.norm(out[b] - want.out[b]) < 1e-2 * np.linalg.norm(want.out[b])
