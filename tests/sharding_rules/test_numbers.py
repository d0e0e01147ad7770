"""Whole numbers, and what is none."""

import jax.numpy as jnp
import numpy as np
import pytest

from sharding_rules import whole_number


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), jnp.int32(3)])
def test_integers_of_every_library_are_whole_numbers(value):
    assert whole_number("n", value) == 3 and type(whole_number("n", value)) is int


@pytest.mark.parametrize("value", [0, -1, 2.0, 1.5, "3", None, True, np.float32(3), [3], float("nan")])
def test_anything_else_is_refused_by_name(value):
    with pytest.raises(ValueError, match=r"n=.*: a whole number of at least 1 is wanted"):
        whole_number("n", value)


def test_a_number_above_the_most_is_refused_with_the_range():
    with pytest.raises(ValueError, match="n=8: a whole number from 2 to 7 is wanted"):
        whole_number("n", 8, least=2, most=7)
