"""MXFP4, the number format of K3's packed experts: 4-bit codes, one power-of-two scale for 32 of them.

Bytes are as in the checkpoint; nothing here knows which weight they belong to.
"""

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, UInt8

BLOCK = 32
LOWEST, HIGHEST = 2, 252  # scales under which every code is a normal float32, hence a normal bfloat16


def dequantise(
    packed: UInt8[Array, "*X bytes"], scale: UInt8[Array, "*X bytes//16"], dtype: DTypeLike
) -> Float[Array, "*X 2*bytes"]:
    """W[i] = (-1)^(n >> 3) * [0, 0.5, 1, 1.5, 2, 3, 4, 6][n & 7] * 2^(scale[i // 32] - 127), in `dtype`.

    n is the low nibble of packed[i // 2] for even i, the high one for odd i; i counts along the last axis, the inputs
    of a projection. A code has two significant bits, so bfloat16 and float32 hold the result exactly for scales 2 to
    252 (float16 does not have the range). Outside: under 0 and 1 what is not a normal float32 may be flushed to zero,
    under 253 and 254 what exceeds float32 becomes infinite, and 255, the format's NaN, gives NaN.

    Source: OCP Microscaling Formats 1.0, sections 5.3.3 (E2M1), 5.4.1 (E8M0); compressed-tensors `mxfp4-pack-quantized`.
    """
    nibbles = (packed[..., None] >> jnp.array([0, 4], jnp.uint8)[(None,) * packed.ndim]) & 15
    nibbles = nibbles.reshape(*scale.shape, BLOCK).astype(jnp.int32)

    # Twice the magnitude is an integer: 0 1 2 3, then in steps of two 4 6, then in steps of four 8 12.
    code = nibbles & 7
    twice = jnp.where(code < 4, code, jnp.where(code < 6, 2 * code - 4, 4 * code - 16))
    magnitude = 0.5 * twice.astype(jnp.float32)
    values = jnp.where(nibbles < 8, magnitude, -magnitude) * _power_of_two(scale)[..., None]
    return values.reshape(*scale.shape[:-1], -1).astype(dtype)


def pack(values: Float[Array, "*X I"]) -> tuple[UInt8[Array, "*X I//2"], UInt8[Array, "*X I//32"]]:
    """The nearest MXFP4 numbers, (packed, scale): `dequantise` of them is `values` where those are representable.

    A block of 32 gets the smallest scale 2 to 252 under which its largest magnitude is at most 6, then each value the
    nearest code, ties to the even one. One set of numbers has several spellings: bytes do not survive a round trip
    through `dequantise`, the numbers do.
    """
    blocks = values.astype(jnp.float32).reshape(*values.shape[:-1], -1, BLOCK)
    fraction, exponent = jnp.frexp(jnp.max(jnp.abs(blocks), axis=-1))
    exponent = exponent - jnp.where(fraction > 0.75, 2, 3)  # 0.75 * 2^3 = 6
    scale = jnp.clip(127 + exponent, LOWEST, HIGHEST).astype(jnp.uint8)

    magnitude = jnp.abs(blocks) * _power_of_two(254 - scale)[..., None]
    code = sum(
        above.astype(jnp.uint8)
        for middle in (0.25, 1.25, 2.5, 5.0)  # of codes 0|1, 2|3, 4|5, 6|7: a tie goes down, to the even code
        for above in [magnitude > middle]
    ) + sum(
        above.astype(jnp.uint8)
        for middle in (0.75, 1.75, 3.5)  # of codes 1|2, 3|4, 5|6: a tie goes up
        for above in [magnitude >= middle]
    )
    nibbles = code | (jnp.signbit(blocks).astype(jnp.uint8) << 3)
    nibbles = nibbles.reshape(*values.shape[:-1], -1, 2)
    return nibbles[..., 0] | (nibbles[..., 1] << 4), scale


def _power_of_two(scale: UInt8[Array, "*X"]) -> Float32[Array, "*X"]:
    """2^(scale - 127) for 1 to 254, by writing float32's exponent field; 0 gives 0 and 255 NaN."""
    power = lax.bitcast_convert_type(scale.astype(jnp.uint32) << 23, jnp.float32)
    return jnp.where(scale == 255, jnp.nan, power)
