"""Random weights: what each kind of parameter is drawn from. Pure functions of a key; placing them is `loading`'s
part."""

import math
import zlib

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kimi_jax.model import Parameter


def draw(parameter: Parameter, key: Array) -> Array:
    """One parameter, drawn as its declaration says, so that activations and gates stay in a trained model's range.

    fan_in: normal with variance 1 / (size of the last axis); fan_in_heads: of the last two; unit: variance 1;
    ones; a_log: ln of uniform(1/2, 2); dt_bias: uniform(-4, 0); router_bias: normal, a hundredth; bits: any byte;
    scales: MXFP4 block scales which make the unpacked weights about fan-in sized.
    """
    shape, dtype, init = parameter.shape, parameter.dtype, parameter.init
    if init == "ones":
        return jnp.ones(shape, dtype)
    if init == "bits":
        return jax.random.bits(key, shape, jnp.uint8)
    if init == "scales":
        return jnp.full(shape, 127 - round(math.log2(3 * math.sqrt(32 * shape[-1]))), jnp.uint8)
    if init == "a_log":
        return jnp.log(jax.random.uniform(key, shape, jnp.float32, 0.5, 2.0)).astype(dtype)
    if init == "dt_bias":
        return jax.random.uniform(key, shape, jnp.float32, -4.0, 0.0).astype(dtype)
    deviation = {
        "unit": lambda: 1.0,
        "router_bias": lambda: 0.01,
        "fan_in": lambda: shape[-1] ** -0.5,
        "fan_in_heads": lambda: (shape[-1] * shape[-2]) ** -0.5,
    }[init]()
    return (jax.random.normal(key, shape, dtype) * deviation).astype(dtype)


def key_of(path: tuple, seed: int) -> Array:
    """The key of the parameter at `path`: the same whatever else the model has, and under every layout."""
    return jax.random.fold_in(jax.random.key(seed), zlib.crc32("/".join(map(str, path)).encode()) & 0x7FFFFFFF)
