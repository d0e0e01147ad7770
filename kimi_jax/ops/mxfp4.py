"""MXFP4, the number format of K3's packed experts: 4-bit codes, one power-of-two scale for 32 of them.

Bytes are as in the checkpoint; nothing here knows which weight they belong to.
"""

import itertools

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, UInt8

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCK = 32
LOWEST_SCALE, HIGHEST_SCALE = 2, 252  # scales under which every code is a normal float32, hence a normal bfloat16


def dequantise(
    packed: UInt8[Array, "*X bytes"], scale: UInt8[Array, "*X bytes//16"], dtype: DTypeLike
) -> Float[Array, "*X 2*bytes"]:
    """W[i] = (-1)^(n >> 3) * [0, 0.5, 1, 1.5, 2, 3, 4, 6][n & 7] * 2^(scale[i // 32] - 127), in `dtype`.

    n is the low nibble of packed[i // 2] for even i, the high one for odd i; i counts along the last axis, the inputs
    of a projection. A code has two significant bits, so bfloat16 and float32 hold the result exactly for scales 2 to
    252 (float16 does not have the range). Outside: under 0 and 1 what is not a normal float32 may be flushed to zero,
    under 253 and 254 what exceeds float32 becomes infinite, and 255, the format's NaN, gives NaN.

    Source: OCP Microscaling Formats 1.0, sections 5.3.3 (E2M1), 5.4.1 (E8M0); compressed-tensors
    `mxfp4-pack-quantized`.
    """
    values = E2M1 + tuple(-value for value in E2M1)  # by code
    pairs = jnp.array([(values[byte & 15], values[byte >> 4]) for byte in range(256)], jnp.float32)
    # A table of bytes: with the nibbles taken apart by shifts XLA's CPU backend took ten times as long.
    unscaled = pairs.at[packed.astype(jnp.int32)].get(mode="promise_in_bounds")
    blocks = unscaled.reshape(*scale.shape, BLOCK) * _power_of_two(scale)[..., None]
    return blocks.reshape(*packed.shape[:-1], -1).astype(dtype)


def pack(values: Float[Array, "*X I"]) -> tuple[UInt8[Array, "*X I//2"], UInt8[Array, "*X I//32"]]:
    """The nearest MXFP4 numbers, (packed, scale): `dequantise` of them is `values` where those are representable.

    A block of 32 gets the smallest scale 2 to 252 under which its largest magnitude is at most 6, then each value the
    nearest code, ties to the even one. One set of numbers has several spellings: bytes do not survive a round trip
    through `dequantise`, the numbers do.
    """
    blocks = values.astype(jnp.float32).reshape(*values.shape[:-1], -1, BLOCK)
    fraction, exponent = jnp.frexp(jnp.max(jnp.abs(blocks), axis=-1))
    exponent = exponent - jnp.where(fraction > 0.75, 2, 3)  # 0.75 * 2^3 = 6
    scale = jnp.clip(127 + exponent, LOWEST_SCALE, HIGHEST_SCALE).astype(jnp.uint8)

    magnitude = jnp.abs(blocks) * _power_of_two(254 - scale)[..., None]
    # A value half way between codes i and i + 1 takes the even one.
    middles = [(low + high) / 2 for low, high in itertools.pairwise(E2M1)]
    passed = [magnitude >= middle if i % 2 else magnitude > middle for i, middle in enumerate(middles)]
    code = sum(middle.astype(jnp.uint8) for middle in passed)
    nibbles = code | (jnp.signbit(blocks).astype(jnp.uint8) << 3)
    nibbles = nibbles.reshape(*values.shape[:-1], -1, 2)
    return nibbles[..., 0] | (nibbles[..., 1] << 4), scale


def _power_of_two(scale: UInt8[Array, "*X"]) -> Float32[Array, "*X"]:
    """2^(scale - 127) for 1 to 254, by writing float32's exponent field; 0 gives 0 and 255 NaN."""
    power = lax.bitcast_convert_type(scale.astype(jnp.uint32) << 23, jnp.float32)
    return jnp.where(scale == 255, jnp.nan, power)
