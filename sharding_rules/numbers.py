"""Whole numbers that a user gives, checked in one way everywhere."""

import operator
from typing import Any


def whole_number(name: str, value: Any, *, least: int = 1, most: int | None = None) -> int:
    """`value` as an int. Raises ValueError that names the argument unless it is a whole number in range; bools are not.

    Anything with `__index__` will do: numpy's and jax's integers are whole numbers too.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < least or (most is not None and number > most):
        wanted = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name}={value!r}: a whole number {wanted} is wanted")
    return number
