"""Which kernel an op becomes where it is lowered for a GPU: the forms for few tokens, as the layers call them."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from kimi_jax.ops.activations import swiglu
from kimi_jax.ops.experts import experts_and_shared
from kimi_jax.ops.linear import project_each
from kimi_jax.ops.norm import sum_rms_norm

GPU = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
ONE_GPU = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=GPU)
D, F, E, TOP = 2304, 1024, 16, 8


def lowered(call, *shapes):
    """The text of a call with arrays of these shapes, bfloat16 where no dtype is given."""
    structs = [x if hasattr(x, "dtype") else jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in shapes]
    with jax.sharding.use_abstract_mesh(ONE_GPU):
        return jax.jit(call).trace(*structs).lower(lowering_platforms=("cuda",)).as_text()


pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")  # JAX 0.12


@pytest.mark.parametrize(("tokens", "kernel"), [(1, "experts_one_down"), (2, "experts_few_down")])
def test_experts(tokens, kernel):
    chosen, weights = (jax.ShapeDtypeStruct((tokens, TOP), dtype) for dtype in (jnp.int32, jnp.float32))
    held = (E, 2, F, D), (E, D, F), (2, F, D), (D, F)
    assert kernel in lowered(partial(experts_and_shared, activation=swiglu), (tokens, D), chosen, weights, *held)


def test_a_norm_with_a_term_in_float32():
    fed = jax.ShapeDtypeStruct((1, 1, D), jnp.float32)
    text = lowered(lambda x, y, weight: sum_rms_norm((x, y), weight, 1e-5), (1, 1, D), fed, (D,))
    assert "sum_rms_norm_rows" in text


@pytest.mark.parametrize("tokens", [1, 2])
def test_projections(tokens):
    assert "project_few" in lowered(lambda x, w, v: project_each([x, x], [w, v]), (tokens, D), (256, D), (32, D))
