"""MXFP4 weights inside a kernel: codes and scales to bfloat16 in registers."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

GROUP = 16  # bytes, that is 32 weights, that share a scale

# Four bytes at a time: a nibble's sign goes to bit 15 and its magnitude to bits 8..6 of a bfloat16, which then is the
# E2M1 number times 2^-126 (subnormals included: both formats lose their leading one at exponent 0).
LOW = (
    "{ .reg .b32 a, b, s;"
    " prmt.b32 a, $2, 0, 0x4140; prmt.b32 b, $2, 0, 0x4342;"
    " shl.b32 s, a, 12; and.b32 s, s, 0x80008000; shl.b32 a, a, 6; lop3.b32 $0, a, 0x01C001C0, s, 0xEA;"
    " shl.b32 s, b, 12; and.b32 s, s, 0x80008000; shl.b32 b, b, 6; lop3.b32 $1, b, 0x01C001C0, s, 0xEA; }"
)
HIGH = (
    "{ .reg .b32 a, b, s;"
    " prmt.b32 a, $2, 0, 0x4140; prmt.b32 b, $2, 0, 0x4342;"
    " shl.b32 s, a, 8; and.b32 s, s, 0x80008000; shl.b32 a, a, 2; lop3.b32 $0, a, 0x01C001C0, s, 0xEA;"
    " shl.b32 s, b, 8; and.b32 s, s, 0x80008000; shl.b32 b, b, 2; lop3.b32 $1, b, 0x01C001C0, s, 0xEA; }"
)


def split(x: Float[Array, "N D"]) -> Float[Array, "N D"]:
    """The even columns, then the odd ones: the inputs of low nibbles, then those of high ones."""
    N, D = x.shape
    return x.reshape(N, D // 2, 2).swapaxes(1, 2).reshape(N, D)


def widen(codes, scale, interpret: bool):
    """The weights of the low and of the high nibbles, bfloat16, exact for scales 2 to 252 (see `ops.mxfp4`).

    codes [R, C] uint8; scale [R, C // 16] uint8.
    """
    rows, columns = codes.shape
    groups = columns // GROUP
    exponent = scale.astype(jnp.uint16).astype(jnp.int16) << 7
    power = lax.bitcast_convert_type(exponent, jnp.bfloat16)
    power = jnp.broadcast_to(power[:, :, None], (rows, groups, GROUP)).reshape(rows, columns)
    if interpret:
        return _small(codes & 15) * power, _small(codes >> 4) * power
    else:
        shape = [jax.ShapeDtypeStruct(codes.shape, jnp.bfloat16)]
        (low,) = plgpu.elementwise_inline_asm(LOW, args=[codes], constraints="=r,=r,r", pack=4, result_shape_dtypes=shape)
        (high,) = plgpu.elementwise_inline_asm(HIGH, args=[codes], constraints="=r,=r,r", pack=4, result_shape_dtypes=shape)
    big = jnp.bfloat16(2.0**126)
    return (low * big) * power, (high * big) * power


def _small(code):
    """E2M1 times 2^-126 as the assembly makes it, but through float32: CPUs flush subnormals."""
    magnitude = (code & 7).astype(jnp.int32)
    exponent = lax.bitcast_convert_type((126 + magnitude // 2) << 23, jnp.float32)
    mantissa = 1.0 + (magnitude % 2).astype(jnp.float32) * 0.5
    value = jnp.where(magnitude < 2, magnitude.astype(jnp.float32) * 0.5, exponent * mantissa)
    return jnp.where(code >= 8, -value, value).astype(jnp.bfloat16)
