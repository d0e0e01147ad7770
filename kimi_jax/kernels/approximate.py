"""The GPU's own instructions, for kernels bound by them: fast approximations of elementary functions, and
multiplications fused with additions, which XLA does not let Triton fuse.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu


class Functions(NamedTuple):
    """Functions of float32 arrays, but the last; what is smaller than the normal numbers may come out as zero."""

    exp2: Callable
    log2: Callable
    reciprocal: Callable
    rsqrt: Callable
    decay: Callable  # a, b -> 2^-|a - b|
    multiply_add: Callable  # a, b, c -> a b + c; broadcasts
    multiply_add_bfloat16: Callable  # a, b, c -> a b + c of bfloat16 a and b, an even number a thread

    def sigmoid(self, x):
        """1 / (1 + e^-x), within 4 units in the last place."""
        return self.reciprocal(1.0 + self.exp2(x * -LOG2E))


def functions(*, interpret: bool) -> Functions:
    """The functions in a kernel: inline assembly, within 2 units in the last place (log2: within 2^-22 near 1).

    Interpreted, they are JAX's own: interpret mode knows no assembly.
    """
    return PLAIN if interpret else APPROXIMATE


def _instruction(name: str) -> Callable:
    return _assembly(f"{name}.approx.ftz.f32 $0, $1;", operands=1)


def _assembly(text: str, *, operands: int) -> Callable:
    def call(*xs):
        shape = jnp.broadcast_shapes(*map(jnp.shape, xs))
        (y,) = plgpu.elementwise_inline_asm(
            text,
            args=[jnp.broadcast_to(jnp.asarray(x, jnp.float32), shape) for x in xs],
            constraints=",".join(["=f", *["f"] * operands]),
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(shape, jnp.float32)],
        )
        return y

    return call


# Two elements at a time: a number of bfloat16 is the upper half of one of float32.
MULTIPLY_ADD_BFLOAT16 = (
    "{.reg .b32 a, b, c, d; shl.b32 a, $2, 16; and.b32 b, $2, 0xffff0000; shl.b32 c, $3, 16; "
    "and.b32 d, $3, 0xffff0000; fma.rn.f32 $0, a, c, $4; fma.rn.f32 $1, b, d, $5;}"
)


def _multiply_add_bfloat16(a, b, c):
    (y,) = plgpu.elementwise_inline_asm(
        MULTIPLY_ADD_BFLOAT16,
        args=[a, b, c],
        constraints="=f,=f,r,r,f,f",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(c.shape, jnp.float32)],
    )
    return y


LOG2E = 1.4426950408889634
APPROXIMATE = Functions(
    exp2=_instruction("ex2"),
    log2=_instruction("lg2"),
    reciprocal=_instruction("rcp"),
    rsqrt=_instruction("rsqrt"),
    decay=_assembly(  # the sign bit is set, in place of two instructions for -|x|
        "{.reg .f32 t; .reg .b32 u; sub.f32 t, $1, $2; mov.b32 u, t; or.b32 u, u, 0x80000000; mov.b32 t, u; "
        "ex2.approx.ftz.f32 $0, t;}",
        operands=2,
    ),
    multiply_add=_assembly("fma.rn.f32 $0, $1, $2, $3;", operands=3),
    multiply_add_bfloat16=_multiply_add_bfloat16,
)
PLAIN = Functions(
    exp2=jnp.exp2,
    log2=jnp.log2,
    reciprocal=lambda x: 1.0 / x,
    rsqrt=jax.lax.rsqrt,
    decay=lambda a, b: jnp.exp2(-jnp.abs(a - b)),
    multiply_add=lambda a, b, c: a * b + c,
    multiply_add_bfloat16=lambda a, b, c: a.astype(jnp.float32) * b.astype(jnp.float32) + c,
)
