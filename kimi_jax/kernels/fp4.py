"""MXFP4 weights inside a kernel: words of eight codes, and scales, to bfloat16 in registers."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int32, UInt8

CODES = 8  # in a word
GROUP = 4  # words, that is 32 weights, that share a scale

# Byte j of two words, twice each, fills a register; of each half of it one nibble n becomes (n << 12 | n << 6), so that
# its sign is at bit 15 and its magnitude at bits 8..6 of a bfloat16, which then is the E2M1 number times 2^-126
# (subnormals included: both formats lose their leading one at exponent 0).
WIDEN = (
    "{{ .reg .b32 c, big; prmt.b32 c, $1, $2, {bytes:#x}; and.b32 c, c, {mask:#x}; mul.lo.u32 c, c, {factor:#x};"
    " and.b32 c, c, 0x81C081C0; mov.b32 big, 0x7E807E80; mul.rn.bf16x2 c, c, big; mul.rn.bf16x2 $0, c, $3; }}"
)
NIBBLES = dict(mask=0x000F000F, factor=0x1040), dict(mask=0x00F000F0, factor=0x104)
WIDEN_EACH = [WIDEN.format(bytes=0x4400 + 0x1111 * j, **nibble) for j in range(4) for nibble in NIBBLES]


def words(packed: UInt8[Array, "*X bytes"]) -> Int32[Array, "*X bytes//4"]:
    """Four bytes as one number, the first the lowest."""
    return lax.bitcast_convert_type(packed.reshape(*packed.shape[:-1], -1, 4), jnp.int32)


def split(x: Float[Array, "N D"]) -> Float[Array, "N D"]:
    """The inputs of each word's first code, then those of the second, and so on."""
    N, D = x.shape
    return x.reshape(N, D // CODES, CODES).swapaxes(1, 2).reshape(N, D)


def places(column, width: int):
    """Where `split` puts a column of `width`."""
    return column // CODES + (column % CODES) * (width // CODES)


def widen(codes, scale, interpret: bool):
    """The weights of each word's first code, its second and so on, eight [R, C] bfloat16; exact for scales 2 to 252.

    See `ops.mxfp4`. codes [R, C] int32, scale [R, C // 4] uint8.
    """
    rows, columns = codes.shape
    power = lax.bitcast_convert_type(scale.astype(jnp.int16) << 7, jnp.bfloat16)[:, :, None]
    power = jnp.broadcast_to(power, (rows, columns // GROUP, GROUP)).reshape(rows, columns)
    if interpret:
        return [_number((codes >> (4 * i)) & 15) * power for i in range(CODES)]
    return [
        plgpu.elementwise_inline_asm(
            asm, args=[codes, power], constraints="=r,r,r,r", pack=2,
            result_shape_dtypes=[jax.ShapeDtypeStruct(codes.shape, jnp.bfloat16)],
        )[0]
        for asm in WIDEN_EACH
    ]  # fmt: skip


def _number(code):
    """The E2M1 number of a code, through float32: CPUs flush subnormals."""
    magnitude = code & 7
    exponent = lax.bitcast_convert_type((126 + magnitude // 2) << 23, jnp.float32)
    mantissa = 1.0 + (magnitude % 2).astype(jnp.float32) * 0.5
    value = jnp.where(magnitude < 2, magnitude.astype(jnp.float32) * 0.5, exponent * mantissa)
    return jnp.where(code >= 8, -value, value).astype(jnp.bfloat16)
