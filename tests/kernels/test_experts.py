"""The expert kernels, interpreted, against every expert on every token in float32."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kimi_jax.kernels import fp4
from kimi_jax.kernels.experts_few import experts_few
from kimi_jax.kernels.experts_few_packed import BFLOAT16_TOKENS, experts_few_packed
from kimi_jax.kernels.experts_many import experts_many, experts_many_packed
from kimi_jax.kernels.experts_one import experts_one
from kimi_jax.ops import mxfp4
from kimi_jax.ops.activations import swiglu
from kimi_jax.ops.experts import experts_dense
from kimi_jax.ops.gated_mlp import gated_mlp
from tests.kernels.assembly import carried_out

K, HELD, ALL, F, D = 3, 4, 9, 64, 128
BLOCKS = (64, 64, 64, 32)


def _case(tokens, F=F, D=D):
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


@pytest.mark.parametrize("which", range(K))
def test_one_token_kernel_equals_dense_and_the_one_for_few(which):
    """Of 9 experts 4 are held, from the first, second or third of those that the token chose on."""
    case = _case(1)
    first = jnp.sort(case[1][0])[which]
    got = _run(experts_one, *case, first=first, columns=(64, 32))
    assert _error(got, *case, first) < 1e-2
    few = _run(experts_few, *case, first=first, blocks=BLOCKS)
    np.testing.assert_allclose(got, few, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("tokens", [1, 21])
def test_few_tokens_kernel_equals_dense(tokens):
    case = _case(tokens)
    first = jnp.min(case[1]) if tokens == 1 else jnp.int32(3)
    got = _run(experts_few, *case, first=first, blocks=BLOCKS)
    assert _error(got, *case, first) < 1e-2


@pytest.mark.parametrize(
    ("kernel", "tokens"),
    [
        (partial(experts_few, blocks=(32, 64, 64, 32)), 1),
        (partial(experts_few, blocks=(32, 64, 64, 32)), 21),
        (experts_one, 1),
    ],
    ids=["few, 1", "few, 21", "one"],
)
def test_shared_experts_come_along_as_one_more_expert(kernel, tokens):
    case, scale = _case(tokens), D**-0.5
    r = np.random.default_rng(9)
    shared = [jnp.asarray(r.normal(size=shape) * scale, jnp.bfloat16) for shape in [(2, F // 2, D), (D, F // 2)]]
    first = jnp.min(case[1])
    alone, both = _run(kernel, *case, first=first), _run(kernel, *case, tuple(shared), first=first)
    want = gated_mlp(case[0].astype(jnp.float32), *(w.astype(jnp.float32) for w in shared), swiglu)
    assert np.linalg.norm(both - alone - want) / np.linalg.norm(want) < 1e-2


@pytest.mark.parametrize("block", [32, 16])
def test_many_tokens_kernel_equals_dense(block):
    case = _case(50)
    got = _run(experts_many, *case, first=3, block=block, blocks=BLOCKS)
    assert _error(got, *case, 3) < 1e-2


def _packed_case(tokens, F=F, D=D):
    """A case's arguments with its weights in MXFP4, and those weights widened again."""
    x, chosen, weights, *wide = _case(tokens, F, D)
    gate_up, down = (jax.jit(mxfp4.pack)(w) for w in wide)
    wide = [jax.jit(partial(mxfp4.dequantise, dtype=jnp.float32))(*p) for p in (gate_up, down)]
    return (x, chosen, weights, *gate_up, *down), wide


@pytest.mark.parametrize("tokens", [1, 19, 33])
def test_few_tokens_packed_kernel_equals_dense_on_dequantised_weights(tokens):
    case, wide = _packed_case(tokens, 4 * F, 4 * D)
    assert (jnp.bincount(case[1].reshape(-1))[3:7].max() > 4) == (tokens > 1)  # more pairs than two programs take
    first = jnp.min(case[1]) if tokens == 1 else jnp.int32(3)
    got = _run(experts_few_packed, *case, first=first)
    assert _error(got, *case[:3], *wide, first) < 1e-2


def test_many_tokens_packed_kernel_equals_dense_on_dequantised_weights():
    case, wide = _packed_case(19)
    got = _run(experts_many_packed, *case, first=3, blocks=(64, 16, 64, 8))
    assert _error(got, *case[:3], *wide, 3) < 1e-2


@pytest.mark.parametrize("tokens", [1, BFLOAT16_TOKENS + 1])
def test_no_scale_makes_a_sum_of_the_packed_kernel_over_or_underflow_on_its_way(tokens):
    (*case, scale), _ = _packed_case(tokens, 4 * F, 4 * D)
    first = jnp.min(case[1])
    run = jax.jit(lambda scale: experts_few_packed(*case, scale, activation=swiglu, first=first, interpret=True))
    want = np.asarray(run(jnp.full_like(scale, 120)), np.float64)
    for power in 20, 240:
        got = np.asarray(run(jnp.full_like(scale, power)), np.float64)
        np.testing.assert_array_equal(got, want * 2.0 ** (power - 120))


def test_tokens_of_every_size_pass_the_packed_kernel_that_multiplies_in_float16():
    """Each is divided by a power of two near its largest: only what is far below that may be lost."""
    (x, *rest), wide = _packed_case(BFLOAT16_TOKENS + 1, 4 * F, 4 * D)
    sizes = jnp.ones(len(x), x.dtype).at[:3].set(jnp.asarray([0, 1e-12, 1e8], x.dtype))
    x = (x * sizes[:, None]).at[3, 5].set(1e4)
    got = np.asarray(_run(experts_few_packed, x, *rest), np.float64)
    want = np.asarray(_dense(x, *rest[:2], *wide, jnp.int32(0)), np.float64)
    hit = np.linalg.norm(want, axis=1) > 0
    assert hit[[1, 2, 3]].all() and not got[~hit].any()
    assert (np.linalg.norm(got - want, axis=1)[hit] < 1e-2 * np.linalg.norm(want, axis=1)[hit]).all()


@pytest.mark.parametrize("scale", [2, 127, 252])
def test_widened_words_are_the_dequantised_numbers_bit_for_bit(scale):
    packed = jnp.arange(256, dtype=jnp.uint8).reshape(2, 128)
    scales = jnp.full((2, 8), scale, jnp.uint8).at[1].add(jnp.uint8(1 if scale < 252 else 0))
    parts = fp4.widen(fp4.words(packed), scales, interpret=True)
    _assert_split(parts, mxfp4.dequantise(packed, scales, jnp.bfloat16))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_numbers_of_halves_are_the_dequantised_numbers_without_their_scale(dtype):
    packed = jnp.arange(256, dtype=jnp.uint8).reshape(2, 128)
    one = jnp.full((2, 8), 127, jnp.uint8)
    parts = [x.astype(jnp.bfloat16) for x in fp4.numbers(fp4.halves(packed), dtype, interpret=True)]
    _assert_split([x / fp4.unit(dtype, interpret=True) for x in parts], mxfp4.dequantise(packed, one, jnp.bfloat16))


@pytest.mark.parametrize(
    ("texts", "dtype", "unit"),
    [(fp4.OF_HALVES, jnp.bfloat16, 2.0**-126), (fp4.OF_HALVES_FLOAT16, jnp.float16, 2.0**-14)],
)
def test_the_instructions_make_the_numbers_that_interpret_mode_makes(texts, dtype, unit):
    halves = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(over="ignore"):
        made = [carried_out(text.replace("{{", "{"), {"$1": halves.view(np.uint32)})["$0"] for text in texts]
    want = fp4.numbers(jnp.asarray(halves), jnp.float32, interpret=True)
    for got, number in zip(made, want, strict=True):
        got = got.view(np.uint16).view(jnp.dtype(dtype)).astype(np.float64)
        np.testing.assert_array_equal(got / unit, np.asarray(number, np.float64))


def _assert_split(parts, want):
    """Bit for bit, in the order that `fp4.split` and `fp4.places` say."""
    got, codes = jnp.concatenate(parts, axis=1), len(parts)
    np.testing.assert_array_equal(got.view(jnp.int16), fp4.split(want, codes).view(jnp.int16))
    at = fp4.places(jnp.arange(256, dtype=jnp.int32), 256, codes)
    np.testing.assert_array_equal(got[:, at].view(jnp.int16), want.view(jnp.int16))


def test_tokens_without_a_held_expert_get_zero():
    x, _, weights, *wide = _case(5)
    chosen = jnp.broadcast_to(jnp.arange(6, 6 + K, dtype=jnp.int32), (5, K))
    for kernel in experts_few, experts_many:
        np.testing.assert_array_equal(_run(kernel, x, chosen, weights, *wide, blocks=BLOCKS), 0)
    np.testing.assert_array_equal(_run(experts_one, x[:1], chosen[:1], weights[:1], *wide), 0)
