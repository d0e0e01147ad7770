"""The routing kernel, interpreted, against `ops.routing` on the same logits."""

import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.kernels import route as kernel
from kimi_jax.ops import routing

N, E, K = 7, 19, 5


def _case():
    r = np.random.default_rng(0)
    logits = r.normal(size=(N, E)).round(1)
    logits[0] = 0.5  # nothing but ties
    return jnp.float32(logits), jnp.bfloat16(0.3 * r.normal(size=E).round(1))


@pytest.mark.parametrize(
    "how", [{"renormalize": True}, {"renormalize": False}, {"renormalize": True, "weigh_biased": True}]
)
def test_kernel_equals_op_ties_included(how):
    how = {"top_k": K, "scale": 2.446, **how}
    logits, bias = _case()
    assert any(len(np.unique(row)) < E for row in np.asarray(logits))
    want = routing.choose_experts(logits, bias, **how)
    experts, weights = kernel.choose_experts(logits, bias, **how, interpret=True)
    np.testing.assert_array_equal(experts, want[0])
    np.testing.assert_allclose(weights, want[1], rtol=1e-6)


def test_scores_that_are_no_numbers_choose_experts_that_exist():
    logits, bias = _case()
    bad = logits.at[:, 3].set(jnp.nan).at[2].set(-jnp.inf).at[4].set(-jnp.nan)
    experts, weights = kernel.choose_experts(bad, bias, top_k=K, renormalize=True, scale=1.0, interpret=True)
    assert all(
        sorted(set(row)) == sorted(row) and 0 <= min(row) and max(row) < E for row in np.asarray(experts).tolist()
    )
    assert np.isnan(weights[0]).all()
