"""What KDA feeds to the delta rule, for many tokens: convolution, SiLU and norms of q, k and v, and the decays.

The elementwise part in front of `delta_chunks`, in one pass over the projections.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int32

from kimi_jax.kernels.approximate import LOG2E, Functions, functions
from kimi_jax.ops.delta_rule import STRONGEST

CHUNK = 64
DECAYS = 3  # the part, after those of q, k and v, that makes the decays


def prepare(
    qkv: Float[Array, "B T H 3 K"],
    f: Float[Array, "B T H K"],
    conv_weight: Float[Array, "H 3 K W"],
    a_log: Float32[Array, " H"],
    dt_bias: Float32[Array, "H K"],
    conv_state: Float[Array, "B W-1 H 3 K"],
    counts: Int32[Array, " B"],
    *,
    lower_bound: float | None,
    chunks: int = 4,
    ahead: int = 8,
    warps: int = 4,
    interpret: bool = False,
) -> tuple[Float[Array, "B T H 3 K"], Float32[Array, "B T H K"]]:
    """q, k, v after convolution, SiLU and norms, and G[t] = log2 of the product of the decays of t's chunk up to t.

    A token at or after counts[b] has q = k = v = 0 and decay 1. q, k, v and G have programs of their own: each walks
    `chunks` chunks side by side, token by token, its tokens loaded `ahead` at a time; the convolution's window is then
    in registers, and so is the sum.
    """
    B, T, H, _, K = qkv.shape
    return pl.pallas_call(
        functools.partial(
            _prepare, chunks=chunks, ahead=ahead, lower_bound=lower_bound, fast=functions(interpret=interpret)
        ),
        out_shape=(jax.ShapeDtypeStruct(qkv.shape, qkv.dtype), jax.ShapeDtypeStruct((B, T, H, K), jnp.float32)),
        grid=((DECAYS + 1) * H, pl.cdiv(T, chunks * CHUNK), B),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="kda_prepare",
    )(qkv, f, conv_weight, a_log, dt_bias, conv_state, counts)


def _prepare(
    qkv_ref, f_ref, conv_weight_ref, a_log_ref, dt_bias_ref, conv_ref, counts_ref, mixed_ref, g_ref, *,
    chunks, ahead, lower_bound, fast,
):  # fmt: skip
    h, part = pl.program_id(0) // (DECAYS + 1), pl.program_id(0) % (DECAYS + 1)
    row = pl.program_id(2)
    first = (pl.program_id(1) * chunks + jnp.arange(chunks, dtype=jnp.int32)) * CHUNK

    @pl.when(part < DECAYS)
    def _():
        _mix(qkv_ref, conv_weight_ref, conv_ref, counts_ref, mixed_ref, row, first, h, part, ahead, fast)

    @pl.when(part == DECAYS)
    def _():
        _sum_decays(f_ref, a_log_ref, dt_bias_ref, counts_ref, g_ref, row, first, h, ahead, lower_bound, fast)


def _mix(qkv_ref, weight_ref, history_ref, counts_ref, mixed_ref, row, first, h, part, ahead, fast: Functions):
    """y[t] = silu(sum_j weight[j] x[t - (W - 1) + j]) for the chunks that start at `first`; y / |y| of q and k."""
    (T, K), width = (qkv_ref.shape[1], qkv_ref.shape[-1]), weight_ref.shape[-1]
    weight = [weight_ref[h, part, :, j].astype(jnp.float32)[None, :] for j in range(width)]
    count, parts = counts_ref[row], jnp.full(first.shape, part, jnp.int32)
    normed, scale = parts < 2, jnp.where(parts == 0, K**-0.5, 1.0).astype(jnp.float32)

    def load(ref, token, mask):
        return _load_tokens(ref, mask, row, token, h, part).astype(jnp.float32)

    def before(j):  # from the history before token 0
        at = first - (width - 1) + j
        x = load(qkv_ref, jnp.maximum(at, 0), (at >= 0) & (at < T))
        return x + load(history_ref, jnp.clip(at + width - 1, 0, width - 2), at < 0)

    def some(i, window):
        token = first + i * ahead
        new = [_load_tokens(qkv_ref, token + n < T, row, token + n, h, part) for n in range(ahead)]
        for n in range(ahead):
            window = (*window, new[n].astype(jnp.float32))
            y = weight[0] * window[0]
            for w, x in zip(weight[1:], window[1:], strict=True):
                y = fast.multiply_add(w, x, y)
            y = jnp.where((token + n < count)[:, None], y * fast.sigmoid(y), 0.0)
            norm = fast.rsqrt(jnp.sum(y * y, axis=-1) + 1e-6) * scale
            y = y * jnp.where(normed, norm, 1.0)[:, None]
            _store_tokens(mixed_ref, y, token + n < T, row, token + n, h, part)
            window = window[1:]
        return window

    lax.fori_loop(0, CHUNK // ahead, some, tuple(before(j) for j in range(width - 1)))


def _sum_decays(f_ref, a_log_ref, dt_bias_ref, counts_ref, g_ref, row, first, h, ahead, lower_bound, fast: Functions):
    """The running sums of the decays' logarithms in the chunks that start at `first`."""
    T = f_ref.shape[1]
    count, dt_bias = counts_ref[row], dt_bias_ref[h, :][None, :] * LOG2E
    a = fast.exp2(jnp.full((1, 1), a_log_ref[h] * LOG2E, jnp.float32))

    def some(i, total):
        token = first + i * ahead
        new = [_load_tokens(f_ref, token + n < T, row, token + n, h) for n in range(ahead)]
        for n in range(ahead):
            z = fast.multiply_add(new[n].astype(jnp.float32), LOG2E, dt_bias)
            g = jnp.maximum(_log2_decay(z, a, lower_bound, fast), STRONGEST * LOG2E)
            total += jnp.where((token + n < count)[:, None], g, 0.0)
            _store_tokens(g_ref, total, token + n < T, row, token + n, h)
        return total

    lax.fori_loop(0, CHUNK // ahead, some, jnp.zeros((first.shape[0], f_ref.shape[-1]), jnp.float32))


def _log2_decay(z, a, lower_bound: float | None, fast: Functions):
    """`gates.log_decay` in binary logarithms, its z too: -a log2(1 + 2^z), or K3's lower_bound / (1 + 2^(-a z))."""
    if lower_bound is None:
        return -a * (jnp.maximum(z, 0.0) + fast.log2(1.0 + fast.exp2(-jnp.abs(z))))
    return lower_bound * LOG2E * fast.reciprocal(1.0 + fast.exp2(-a * z))


def _load_tokens(ref, mask, row, token, h, *part):
    """[R, K] of R tokens that lie anywhere; zero where not `mask` [R]."""
    at = _places(ref, row, token, h, *part)
    return plgpu.load(at, mask=jnp.broadcast_to(mask[:, None], at.shape), other=0.0)


def _store_tokens(ref, x, mask, row, token, h, *part):
    at = _places(ref, row, token, h, *part)
    plgpu.store(at, x.astype(ref.dtype), mask=jnp.broadcast_to(mask[:, None], at.shape))


def _places(ref, row, token, h, *part):
    shape = token.shape[0], ref.shape[-1]
    channel = jnp.arange(ref.shape[-1], dtype=jnp.int32)[None, :]
    return ref.at[tuple(jnp.broadcast_to(x, shape) for x in (row, token[:, None], h, *part, channel))]
