"""What the instructions in the kernels' texts do, carried out with numpy: interpret mode knows none of them."""

from collections.abc import Mapping

import numpy as np


def _multiply_add(a, b, c):
    """Of floats, in float64, then rounded."""
    a, b, c = (x.view(np.float32).astype(np.float64) for x in (a, b, c))
    return (a * b + c).astype(np.float32).view(np.uint32)


INSTRUCTIONS = {
    "mov": lambda a: a,
    "shl": lambda a, n: a << n,
    "shr": lambda a, n: a >> n,
    "and": lambda a, b: a & b,
    "mul": lambda a, b: a * b,
    "lop3": lambda a, b, c, table: (a & c) | (b & ~c) if table == 0xE4 else None,
    "fma": _multiply_add,
}


def carried_out(text: str, registers: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All registers, of uint32, when the instructions of a text are done."""
    held = dict(registers)
    for line in text.strip("{} ").split(";"):
        name, *operands = line.replace(",", " ").split() or [".reg"]
        if not name.startswith("."):
            to, *of = operands
            of = [held[x] if x in held else np.uint32(int(x, 0)) for x in of]
            held[to] = INSTRUCTIONS[name.split(".")[0]](*of)
    return held
