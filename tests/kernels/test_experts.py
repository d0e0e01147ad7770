"""The expert kernels, interpreted, against every expert on every token in float32."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.kernels import fp4
from kimi_jax.kernels.experts_few import experts_few
from kimi_jax.kernels.experts_few_packed import experts_few_packed
from kimi_jax.kernels.experts_many import experts_many, experts_many_packed
from kimi_jax.ops import mxfp4
from kimi_jax.ops.activations import swiglu
from kimi_jax.ops.experts import experts_dense
from kimi_jax.ops.gated_mlp import gated_mlp

K, HELD, ALL, F, D = 3, 4, 9, 64, 128
BLOCKS = (64, 64, 64, 32)
HALVES, WORDS = (64, 32, 64, 16), (64, 16, 64, 8)  # of four weights, of eight


def _case(tokens):
    r = np.random.default_rng(tokens)

    def normal(*shape, scale=1.0, dtype=jnp.bfloat16):
        return jnp.asarray(r.normal(size=shape) * scale, dtype)

    chosen = jnp.asarray(np.stack([r.permutation(ALL)[:K] for _ in range(tokens)]), jnp.int32)
    return (
        normal(tokens, D), chosen, normal(tokens, K, dtype=jnp.float32), normal(HELD, 2, F, D, scale=D**-0.5),
        normal(HELD, D, F, scale=F**-0.5),
    )  # fmt: skip


def _run(kernel, *arrays, first=0, **about):
    """The kernel, compiled whole: one by one, its small ops take more time than it does."""
    return jax.jit(partial(kernel, activation=swiglu, interpret=True, **about))(*arrays, first=jnp.int32(first))


@jax.jit
def _dense(x, chosen, weights, gate_up, down, first):
    f32 = jnp.float32
    return experts_dense(
        x.astype(f32), chosen, weights, gate_up.astype(f32), down.astype(f32), activation=swiglu, first=first
    )


def _error(got, x, chosen, weights, gate_up, down, first):
    want = _dense(x, chosen, weights, gate_up, down, jnp.int32(first))
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.parametrize("tokens", [1, 21])
def test_few_tokens_kernel_equals_dense(tokens):
    case = _case(tokens)
    first = jnp.min(case[1]) if tokens == 1 else jnp.int32(3)
    got = _run(experts_few, *case, first=first, blocks=BLOCKS)
    assert _error(got, *case, first) < 1e-2


@pytest.mark.parametrize("tokens", [1, 21])
def test_shared_experts_come_along_as_one_more_expert(tokens):
    case, scale = _case(tokens), D**-0.5
    r = np.random.default_rng(9)
    shared = [jnp.asarray(r.normal(size=shape) * scale, jnp.bfloat16) for shape in [(2, F // 2, D), (D, F // 2)]]
    alone = _run(experts_few, *case, first=3, blocks=(32, 64, 64, 32))
    both = _run(experts_few, *case, tuple(shared), first=3, blocks=(32, 64, 64, 32))
    want = gated_mlp(case[0].astype(jnp.float32), *(w.astype(jnp.float32) for w in shared), swiglu)
    assert np.linalg.norm(both - alone - want) / np.linalg.norm(want) < 1e-2


@pytest.mark.parametrize("block", [32, 16])
def test_many_tokens_kernel_equals_dense(block):
    case = _case(50)
    got = _run(experts_many, *case, first=3, block=block, blocks=BLOCKS)
    assert _error(got, *case, 3) < 1e-2


@pytest.mark.parametrize(
    ("kernel", "blocks", "tokens"),
    [(experts_few_packed, HALVES, 1), (experts_few_packed, HALVES, 40), (experts_many_packed, WORDS, 19)],
)
def test_packed_kernels_equal_dense_on_dequantised_weights(kernel, blocks, tokens):
    x, chosen, weights, *wide = _case(tokens)
    assert (jnp.bincount(chosen.reshape(-1))[3] > 8) == (tokens == 40)  # more than one round of eight
    packed = [jax.jit(mxfp4.pack)(w) for w in wide]
    wide = [jax.jit(partial(mxfp4.dequantise, dtype=jnp.float32))(*p) for p in packed]
    first = jnp.min(chosen) if tokens == 1 else 3
    weights_of = *packed[0], *packed[1]
    got = _run(kernel, x, chosen, weights, *weights_of, first=first, blocks=blocks)
    assert _error(got, x, chosen, weights, *wide, first) < 1e-2


@pytest.mark.parametrize("elements", [fp4.words, fp4.halves])
@pytest.mark.parametrize("scale", [2, 127, 252])
def test_widened_elements_are_the_dequantised_numbers_bit_for_bit(scale, elements):
    packed = jnp.arange(256, dtype=jnp.uint8).reshape(2, 128)
    scales = jnp.full((2, 8), scale, jnp.uint8).at[1].add(jnp.uint8(1 if scale < 252 else 0))
    want = jax.jit(partial(mxfp4.dequantise, dtype=jnp.bfloat16))(packed, scales)
    parts = jax.jit(lambda x, scales: fp4.widen(elements(x), scales, interpret=True))(packed, scales)
    got, codes = jnp.concatenate(parts, axis=1), len(parts)
    np.testing.assert_array_equal(got.view(jnp.int16), fp4.split(want, codes).view(jnp.int16))
    at = fp4.places(jnp.arange(256, dtype=jnp.int32), 256, codes)
    np.testing.assert_array_equal(got[:, at].view(jnp.int16), want.view(jnp.int16))


def test_tokens_without_a_held_expert_get_zero():
    x, _, weights, *wide = _case(5)
    chosen = jnp.broadcast_to(jnp.arange(6, 6 + K, dtype=jnp.int32), (5, K))
    for kernel in experts_few, experts_many:
        np.testing.assert_array_equal(_run(kernel, x, chosen, weights, *wide, blocks=BLOCKS), 0)
