"""What all kernels share."""

import jax
import jax.numpy as jnp

from kimi_jax.kernels.device import lowered_once


def test_calls_alike_share_one_lowering_and_others_have_their_own():
    @lowered_once("power")
    def kernel(x, power):
        return x**power

    def step(x):
        return kernel(kernel(kernel(x, power=2), power=2), power=3)

    text = jax.jit(step).lower(jnp.zeros(4)).as_text()
    assert text.count("func.func private @kernel") == 2
    assert text.count("call @kernel") == 3
