"""The expert kernels, interpreted, against every expert on every token in float32."""

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


def _error(got, x, chosen, weights, gate_up, down, first):
    f32 = jnp.float32
    want = experts_dense(
        x.astype(f32), chosen, weights, gate_up.astype(f32), down.astype(f32), activation=swiglu, first=first
    )
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.parametrize("tokens", [1, 21])
def test_few_tokens_kernel_equals_dense(tokens):
    case = _case(tokens)
    first = jnp.min(case[1]) if tokens == 1 else jnp.int32(3)
    got = experts_few(*case, activation=swiglu, first=first, blocks=BLOCKS, interpret=True)
    assert _error(got, *case, first) < 1e-2


@pytest.mark.parametrize("tokens", [1, 21])
def test_shared_experts_come_along_as_one_more_expert(tokens):
    case, scale = _case(tokens), D**-0.5
    r = np.random.default_rng(9)
    shared = [jnp.asarray(r.normal(size=shape) * scale, jnp.bfloat16) for shape in [(2, F // 2, D), (D, F // 2)]]
    alone = experts_few(*case, activation=swiglu, first=3, blocks=(32, 64, 64, 32), interpret=True)
    both = experts_few(*case, tuple(shared), activation=swiglu, first=3, blocks=(32, 64, 64, 32), interpret=True)
    want = gated_mlp(case[0].astype(jnp.float32), *(w.astype(jnp.float32) for w in shared), swiglu)
    assert np.linalg.norm(both - alone - want) / np.linalg.norm(want) < 1e-2


@pytest.mark.parametrize("block", [32, 16])
def test_many_tokens_kernel_equals_dense(block):
    case = _case(50)
    got = experts_many(*case, activation=swiglu, first=3, block=block, blocks=BLOCKS, interpret=True)
    assert _error(got, *case, 3) < 1e-2


@pytest.mark.parametrize(
    ("kernel", "blocks", "tokens"),
    [(experts_few_packed, HALVES, 1), (experts_few_packed, HALVES, 40), (experts_many_packed, WORDS, 19)],
)
def test_packed_kernels_equal_dense_on_dequantised_weights(kernel, blocks, tokens):
    x, chosen, weights, *wide = _case(tokens)
    assert (jnp.bincount(chosen.reshape(-1))[3] > 8) == (tokens == 40)  # more than one round of eight
    packed = [mxfp4.pack(w) for w in wide]
    wide = [mxfp4.dequantise(*p, jnp.float32) for p in packed]
    first = jnp.min(chosen) if tokens == 1 else 3
    weights_of = *packed[0], *packed[1]
    got = kernel(x, chosen, weights, *weights_of, activation=swiglu, first=first, blocks=blocks, interpret=True)
    assert _error(got, x, chosen, weights, *wide, first) < 1e-2


@pytest.mark.parametrize("elements", [fp4.words, fp4.halves])
@pytest.mark.parametrize("scale", [2, 127, 252])
def test_widened_elements_are_the_dequantised_numbers_bit_for_bit(scale, elements):
    packed = jnp.arange(256, dtype=jnp.uint8).reshape(2, 128)
    scales = jnp.full((2, 8), scale, jnp.uint8).at[1].add(jnp.uint8(1 if scale < 252 else 0))
    want = mxfp4.dequantise(packed, scales, jnp.bfloat16)
    parts = fp4.widen(elements(packed), scales, interpret=True)
    got, codes = jnp.concatenate(parts, axis=1), len(parts)
    np.testing.assert_array_equal(got.view(jnp.int16), fp4.split(want, codes).view(jnp.int16))
    at = fp4.places(jnp.arange(256, dtype=jnp.int32), 256, codes)
    np.testing.assert_array_equal(got[:, at].view(jnp.int16), want.view(jnp.int16))


def test_tokens_without_a_held_expert_get_zero():
    x, _, weights, *wide = _case(5)
    chosen = jnp.broadcast_to(jnp.arange(6, 6 + K, dtype=jnp.int32), (5, K))
    for kernel in experts_few, experts_many:
        np.testing.assert_array_equal(
            kernel(x, chosen, weights, *wide, activation=swiglu, blocks=BLOCKS, interpret=True), 0
        )
