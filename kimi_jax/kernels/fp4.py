"""MXFP4 weights inside a kernel: codes and scales to bfloat16 in registers."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

GROUP = 16  # bytes, that is 32 weights, that share a scale

# A byte widened to 16 bits, two to a register: a nibble n becomes (n << 12 | n << 6), so that its sign is at bit 15
# and its magnitude at bits 8..6 of a bfloat16, which then is the E2M1 number times 2^-126 (subnormals included:
# both formats lose their leading one at exponent 0).
SPREAD = "prmt.b32 $0, $2, 0, 0x4140; prmt.b32 $1, $2, 0, 0x4342;"
NIBBLES = (
    "{{ .reg .b32 c; and.b32 c, $1, {mask}; mul.lo.u32 c, c, {factor}; and.b32 c, c, 0x81C081C0;"
    " mul.rn.bf16x2 $0, c, $2; }}"
)
LOW = NIBBLES.format(mask="0x000F000F", factor="0x1040")
HIGH = NIBBLES.format(mask="0x00F000F0", factor="0x104")


def split(x: Float[Array, "N D"]) -> Float[Array, "N D"]:
    """The even columns, then the odd ones: the inputs of low nibbles, then those of high ones."""
    N, D = x.shape
    return x.reshape(N, D // 2, 2).swapaxes(1, 2).reshape(N, D)


def places(column, width: int):
    """Where `split` puts a column of `width`."""
    return column // 2 + (column % 2) * (width // 2)


def widen(codes, scale, interpret: bool):
    """The weights of the low nibbles and of the high ones, two [R, C] bfloat16; exact for scales 2 to 252.

    See `ops.mxfp4`. codes [R, C] uint8, scale [R, C // 16] uint8.
    """
    rows, columns = codes.shape
    power = lax.bitcast_convert_type(scale.astype(jnp.int16) << 7, jnp.bfloat16)[:, :, None]
    power = jnp.broadcast_to(power, (rows, columns // GROUP, GROUP)).reshape(rows, columns)
    if interpret:
        low, high = _small(codes & 15), _small(codes >> 4)
    else:
        low, high = _scaled(codes)
    return low * power, high * power


def _scaled(codes):
    """The E2M1 numbers of the low and of the high nibbles, bfloat16."""
    (spread,) = plgpu.elementwise_inline_asm(
        SPREAD, args=[codes], constraints="=r,=r,r", pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(codes.shape, jnp.int16)],
    )  # fmt: skip
    big = jnp.full(codes.shape, 2.0**126, jnp.bfloat16)
    return [
        plgpu.elementwise_inline_asm(
            asm, args=[spread, big], constraints="=r,r,r", pack=2,
            result_shape_dtypes=[jax.ShapeDtypeStruct(codes.shape, jnp.bfloat16)],
        )[0]
        for asm in (LOW, HIGH)
    ]  # fmt: skip


def _small(code):
    """`_scaled` without assembly, through float32: CPUs flush subnormals."""
    magnitude = (code & 7).astype(jnp.int32)
    exponent = lax.bitcast_convert_type((126 + magnitude // 2) << 23, jnp.float32)
    mantissa = 1.0 + (magnitude % 2).astype(jnp.float32) * 0.5
    value = jnp.where(magnitude < 2, magnitude.astype(jnp.float32) * 0.5, exponent * mantissa)
    return jnp.where(code >= 8, -value, value).astype(jnp.bfloat16)
