"""Which kernel an op becomes where it is lowered for a GPU: the forms for few tokens, as the layers call them."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from kimi_jax.ops.activations import swiglu
from kimi_jax.ops.experts import experts_and_shared
from kimi_jax.ops.linear import project_each
from kimi_jax.ops.norm import sum_rms_norm
from tests.helpers import lowered_for_a_gpu

D, F, E, TOP = 2304, 1024, 16, 8
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")  # JAX 0.12


def _array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(("tokens", "kernel"), [(1, "experts_one_down"), (2, "experts_few_down")])
def test_experts(tokens, kernel):
    chosen, weights = (_array(tokens, TOP, dtype=dtype) for dtype in (jnp.int32, jnp.float32))
    held = _array(E, 2, F, D), _array(E, D, F), _array(2, F, D), _array(D, F)
    call = partial(experts_and_shared, activation=swiglu)
    assert kernel in lowered_for_a_gpu(call, _array(tokens, D), chosen, weights, *held)


def test_a_norm_with_a_term_in_float32():
    terms = _array(1, 1, D), _array(1, 1, D, dtype=jnp.float32)
    text = lowered_for_a_gpu(lambda weight, *terms: sum_rms_norm(terms, weight, 1e-5), _array(D), *terms)
    assert "sum_rms_norm_rows" in text


@pytest.mark.parametrize("tokens", [1, 2])
def test_projections(tokens):
    arrays = _array(tokens, D), _array(256, D), _array(32, D)
    assert "project_few" in lowered_for_a_gpu(lambda x, w, v: project_each([x, x], [w, v]), *arrays)
