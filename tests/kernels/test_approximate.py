"""The kernels' own instructions that are exact, against what they stand for."""

import jax.numpy as jnp
import numpy as np

from kimi_jax.kernels import approximate
from tests.kernels.assembly import carried_out


def test_each_half_is_multiplied_with_its_own_half():
    r = np.random.default_rng(0)
    a, b = (np.asarray(jnp.asarray(r.normal(size=(1000, 2)), jnp.bfloat16)) for _ in range(2))
    c = r.normal(size=(1000, 2)).astype(np.float32)
    bits = c.view(np.uint32)
    packed = {"$2": a.view(np.uint32)[:, 0], "$3": b.view(np.uint32)[:, 0], "$4": bits[:, 0], "$5": bits[:, 1]}
    done = carried_out(approximate.MULTIPLY_ADD_BFLOAT16, packed)
    got = np.stack([done["$0"], done["$1"]], axis=1).view(np.float32)
    np.testing.assert_array_equal(got, (c + a.astype(np.float64) * b.astype(np.float64)).astype(np.float32))
    np.testing.assert_allclose(
        approximate.PLAIN.multiply_add_bfloat16(jnp.asarray(a), jnp.asarray(b), c), got, rtol=1e-5, atol=1e-6
    )
