"""MXFP4 weights inside a kernel: elements of four or eight codes, and scales, to bfloat16 or float16 in registers.

A kernel reads uint16 of four codes (`halves`) or int32 of eight (`words`). Tensor cores take two neighbours of a row in
one register: two halves arrive as such a pair, two words in two registers, from which pairs are picked byte by byte.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int32, UInt8, UInt16

GROUP = 32  # weights that share a scale
IN_HALF, IN_WORD = 4, 8  # codes

# Of each half of register c one nibble n becomes (n << 12 | n << 6), so that its sign is at bit 15 and its magnitude at
# bits 8..6 of a bfloat16, which then is the E2M1 number times 2^-126 (subnormals included: both formats lose their
# leading one at exponent 0).
SMALL = "{{ .reg .b32 c, big; {pick} and.b32 c, c, {mask:#x}; mul.lo.u32 c, c, {factor:#x}; and.b32 c, c, 0x81C081C0;"
SCALED = SMALL + " mov.b32 big, 0x7E807E80; mul.rn.bf16x2 c, c, big; mul.rn.bf16x2 $0, c, $3; }}"
NIBBLES = dict(mask=0x000F000F, factor=0x1040), dict(mask=0x00F000F0, factor=0x104)
OF_HALVES = [  # a register holds two elements
    (SMALL + " mov.b32 $0, c; }}").format(pick=pick, **nibble)
    for pick in ("mov.b32 c, $1;", "shr.u32 c, $1, 8;")
    for nibble in NIBBLES
]
OF_WORDS = [  # byte j of two elements, twice each, fills a register
    SCALED.format(pick=f"prmt.b32 c, $1, $2, {0x4400 + 0x1111 * j:#x};", **nibble)
    for j in range(4)
    for nibble in NIBBLES
]

# As float16, one for each half as well: sign at bit 15, magnitude at bits 11..9, which is the E2M1 number times 2^-14.
# All of it lies in a byte, so that the codes of the low and of the high byte share the work before the shift:
# ptxas merges what is the same.
FLOAT16 = "{{ .reg .b32 c, d; {pick} lop3.b32 c, c, d, 0x80808080, 0xE4;{shift} and.b32 $0, c, 0x8E008E00; }}"
OF_HALVES_FLOAT16 = [
    FLOAT16.format(pick=pick, shift=shift)
    for shift in (" shl.b32 c, c, 8;", "")
    for pick in ("shl.b32 c, $1, 4; shl.b32 d, $1, 1;", "mov.b32 c, $1; shr.u32 d, $1, 3;")
]


def words(packed: UInt8[Array, "*X bytes"]) -> Int32[Array, "*X bytes//4"]:
    """Four bytes as one number, the first the lowest."""
    return lax.bitcast_convert_type(packed.reshape(*packed.shape[:-1], -1, 4), jnp.int32)


def halves(packed: UInt8[Array, "*X bytes"]) -> UInt16[Array, "*X bytes//2"]:
    """Two bytes as one number, the first the lower."""
    return lax.bitcast_convert_type(packed.reshape(*packed.shape[:-1], -1, 2), jnp.uint16)


def split(x: Float[Array, "N D"], codes: int = IN_WORD) -> Float[Array, "N D"]:
    """The inputs of each element's first code, then those of the second, and so on."""
    N, D = x.shape
    return x.reshape(N, D // codes, codes).swapaxes(1, 2).reshape(N, D)


def places(column, width: int, codes: int = IN_WORD):
    """Where `split` puts a column of `width`."""
    return column // codes + (column % codes) * (width // codes)


def widen(words, scale, interpret: bool):
    """The weights of each word's first code, its second and so on, each [R, C] bfloat16; exact for scales 2 to 252.

    See `ops.mxfp4`. words [R, C] int32, scale [R, C / 4] uint8.
    """
    rows, columns = words.shape
    power = lax.bitcast_convert_type(scale.astype(jnp.int16) << 7, jnp.bfloat16)[:, :, None]
    power = jnp.broadcast_to(power, (*scale.shape, GROUP // IN_WORD)).reshape(rows, columns)
    if interpret:
        return [number * power for number in _each_number(words, IN_WORD)]
    return [_asm(text, [words, power], "=r,r,r,r") for text in OF_WORDS]


def numbers(halves, dtype, interpret: bool):
    """The E2M1 numbers of each half's first code, its second and so on, times `unit`, each [R, C] of dtype. Exact.

    dtype: bfloat16 or float16, for which a code takes 1.4 instructions instead of 1.6.
    """
    if interpret:
        return [x.astype(dtype) * jnp.asarray(unit(dtype, interpret), dtype) for x in _each_number(halves, IN_HALF)]
    return [_asm(text, [halves], "=r,r", dtype) for text in (OF_HALVES if dtype == jnp.bfloat16 else OF_HALVES_FLOAT16)]


def unit(dtype, interpret: bool) -> float:
    """What `numbers` are multiples of: CPUs flush subnormals of bfloat16."""
    if dtype == jnp.float16:
        return 2.0**-14
    return 1.0 if interpret else 2.0**-126


def _asm(text, args, registers, dtype=jnp.bfloat16):
    results = [jax.ShapeDtypeStruct(args[0].shape, dtype)]
    return plgpu.elementwise_inline_asm(text, args=args, constraints=registers, pack=2, result_shape_dtypes=results)[0]


def _each_number(elements, codes):
    return [_number((elements.astype(jnp.int32) >> (4 * i)) & 15) for i in range(codes)]


def _number(code):
    """The E2M1 number of a code, through float32."""
    magnitude = code & 7
    exponent = lax.bitcast_convert_type((126 + magnitude // 2) << 23, jnp.float32)
    mantissa = 1.0 + (magnitude % 2).astype(jnp.float32) * 0.5
    value = jnp.where(magnitude < 2, magnitude.astype(jnp.float32) * 0.5, exponent * mantissa)
    return jnp.where(code >= 8, -value, value).astype(jnp.bfloat16)
