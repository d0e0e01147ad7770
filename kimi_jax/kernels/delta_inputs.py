"""What KDA feeds to the delta rule, for many tokens: convolution, SiLU and norms of q, k and v, and the decays.

The elementwise part in front of `delta_chunks`, in one pass over the projections.
"""

import functools
import math
import operator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int32

from kimi_jax.kernels.gates import log_decay, unit

LOG2E = math.log2(math.e)
STRONGEST = -88.0  # as in `ops.delta_rule`


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
    rows: int = 16,
    warps: int = 4,
    interpret: bool = False,
) -> tuple[Float[Array, "B T H 3 K"], Float32[Array, "B T H K"]]:
    """q, k, v after convolution, SiLU and norms, and the binary logarithms of the decays: zeros in padded tokens."""
    B, T, H, _, K = qkv.shape
    return pl.pallas_call(
        functools.partial(_prepare, rows=rows, lower_bound=lower_bound),
        out_shape=(jax.ShapeDtypeStruct(qkv.shape, qkv.dtype), jax.ShapeDtypeStruct((B, T, H, K), jnp.float32)),
        grid=(pl.cdiv(T, rows), H, B),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="kda_prepare",
    )(qkv, f, conv_weight, a_log, dt_bias, conv_state, counts)


def _prepare(
    qkv_ref, f_ref, conv_weight_ref, a_log_ref, dt_bias_ref, conv_ref, counts_ref, mixed_ref, g_ref, *,
    rows, lower_bound,
):  # fmt: skip
    h, row = pl.program_id(1), pl.program_id(2)
    K, T = qkv_ref.shape[-1], qkv_ref.shape[1]
    here = pl.ds(pl.program_id(0) * rows, rows)
    token = pl.program_id(0) * rows + jnp.arange(rows, dtype=jnp.int32)
    inside = jnp.broadcast_to((token < T)[:, None], (rows, K))
    live = (token < counts_ref[row])[:, None]

    for i in range(3):
        y = lax.cond(  # only a row's first program has any of the history
            pl.program_id(0) == 0,
            functools.partial(_convolved, qkv_ref, conv_weight_ref, row, h, i, token, conv_ref),
            functools.partial(_convolved, qkv_ref, conv_weight_ref, row, h, i, token, None),
        )
        y = jnp.where(live, y * jax.nn.sigmoid(y), 0.0).astype(qkv_ref.dtype).astype(jnp.float32)
        if i < 2:
            y = unit(y) * (K**-0.5 if i == 0 else 1.0)
        plgpu.store(mixed_ref.at[row, here, h, jnp.int32(i), :], y.astype(mixed_ref.dtype), mask=inside)

    f = plgpu.load(f_ref.at[row, here, h, :], mask=inside, other=0.0)
    g = log_decay(f.astype(jnp.float32) + dt_bias_ref[h, :][None, :], jnp.exp(a_log_ref[h]), lower_bound)
    g = jnp.where(live, jnp.maximum(g, STRONGEST) * LOG2E, 0.0)
    plgpu.store(g_ref.at[row, here, h, :], g, mask=inside)


def _convolved(qkv_ref, weight_ref, row, h, i, token, history_ref):
    """sum_j weight[j] x[token - (W - 1) + j] for the tokens [R], before SiLU; x before 0 from the history, or 0."""
    (T, K), width = (qkv_ref.shape[1], qkv_ref.shape[-1]), weight_ref.shape[-1]
    shape = (token.shape[0], K)
    channel = jnp.arange(K, dtype=jnp.int32)[None, :]

    def load(ref, at, mask):
        place = tuple(jnp.broadcast_to(x, shape) for x in (row, at[:, None], h, jnp.int32(i), channel))
        return plgpu.load(ref.at[place], mask=jnp.broadcast_to(mask[:, None], shape), other=0.0).astype(jnp.float32)

    def term(j):
        at = token - (width - 1) + j
        x = load(qkv_ref, jnp.clip(at, 0, T - 1), (at >= 0) & (at < T))
        if history_ref is not None:
            x += load(history_ref, jnp.clip(at + width - 1, 0, width - 2), at < 0)
        return weight_ref[h, i, :, j].astype(jnp.float32)[None, :] * x

    return functools.reduce(operator.add, map(term, range(width)))
