"""Declaring parameters: shape, logical axes, dtype and initial scale, once, with no array behind it.

From these declarations come the abstract tree, its shardings, the random weights and what the loader must fill.
"""

from flax import nnx
from jax import ShapeDtypeStruct
from jax.typing import DTypeLike


def declare(
    shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: DTypeLike, *, init: str = "fan_in"
) -> nnx.Param:
    """An abstract parameter.

    axes: one logical name (or None) a dimension, kept under the inert key `axes`: flax attaches no mesh to it.
    dtype: the model's; where the checkpoint's own is kept whatever the model's is (`checkpoints.names`), the hub's.
    init: how `random_model` draws it; see `kimi_jax.initialise`.
    """
    if len(axes) != len(shape):
        raise ValueError(f"axes={axes} names {len(axes)} axes of a parameter of shape {shape}")
    return nnx.Param(ShapeDtypeStruct(shape, dtype), axes=axes, init=init)
