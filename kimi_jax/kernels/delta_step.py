"""KDA's middle for one token a row, in one pass over the recurrent state: convolution, gates, delta rule, gated norm.

The sibling of `ops.kda.mix_heads_plain` at T = 1. Knows nothing of projections or of how heads are spread over devices.
"""

import functools
from itertools import pairwise

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int32

from kimi_jax.kernels.gates import log_decay, unit

WARPS = 4
COLUMNS = 64  # of the state's value axis, held at a time: half of the state in flight while the other half is worked on


def supports(qkv: Float[Array, "B T H 3 K"]) -> bool:
    """Whether `mix_heads_step` can stand in: one token, and a head width that fills whole warps."""
    K = qkv.shape[-1]
    return qkv.shape[1] == 1 and K >= 32 and K & (K - 1) == 0 and K <= 256


def mix_heads_step(
    qkv: Float[Array, "B 1 H 3 K"],
    f: Float[Array, "B 1 H K"],
    b: Float[Array, "B 1 H"],
    gate: Float[Array, "B 1 H K"],
    conv_weight: Float[Array, "H 3 K W"],
    a_log: Float32[Array, " H"],
    dt_bias: Float32[Array, "H K"],
    o_norm: Float[Array, " K"],
    conv_state: Float[Array, "B W-1 H 3 K"],
    recurrent: Float32[Array, "B H K K"],
    counts: Int32[Array, " B"],
    *,
    lower_bound: float | None,
    eps: float,
    warps: int = WARPS,
    columns: int = COLUMNS,
    interpret: bool = False,
) -> tuple[Float[Array, "B 1 H K"], Float[Array, "B W-1 H 3 K"], Float32[Array, "B H K K"]]:
    """q, k, v = silu(conv(qkv));  S <- Diag(e^g) S;  S <- S + k u^T;  out = RMS(S^T q) sigmoid(gate): one token a row.

        u = beta (v - S^T (e^g k))    g = the decay gate of (f, a_log, dt_bias)    beta = sigmoid(b)

    with q, k normalised, q scaled by K^-1/2. A program owns one head of one row: it reads that head's state once and
    writes it once, in place. A row with counts[b] = 0 keeps both states bit for bit.

    Floor: 8 B H K^2 bytes, the state read and written; everything else is K long. Source: Kimi Linear
    (arXiv 2510.26692), eq. 1; the order of the two reads as in `ops.delta_rule.delta_step`.
    """
    B, _, H, _, K = qkv.shape
    kernel = functools.partial(
        _mix_head,
        lower_bound=lower_bound,
        eps=eps,
        columns=min(columns, K),
        width=conv_weight.shape[-1],
        interpret=interpret,
    )
    return pl.pallas_call(
        kernel,
        out_shape=(
            jax.ShapeDtypeStruct((B, 1, H, K), qkv.dtype),
            jax.ShapeDtypeStruct(conv_state.shape, conv_state.dtype),
            jax.ShapeDtypeStruct(recurrent.shape, recurrent.dtype),
        ),
        grid=(H, B),
        input_output_aliases={8: 1, 9: 2},
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="kda_mix_heads_step",
    )(qkv, f, b, gate, conv_weight, a_log, dt_bias, o_norm, conv_state, recurrent, counts)


def _mix_head(
    qkv_ref, f_ref, b_ref, gate_ref, conv_weight_ref, a_log_ref, dt_bias_ref, o_norm_ref, conv_ref, state_ref,
    counts_ref, out_ref, new_conv_ref, new_state_ref, *, lower_bound, eps, columns, width,
    interpret,
):  # fmt: skip
    h, row = pl.program_id(0), pl.program_id(1)
    K = state_ref.shape[-1]
    tiles = [pl.ds(i, columns) for i in range(0, K, columns)]
    state = state_ref[row, h, :, tiles[0]]
    live = counts_ref[row] > 0
    dtype = qkv_ref.dtype

    moved = []

    def convolved(i):
        token = qkv_ref[row, 0, h, i, :]
        inputs = [conv_ref[row, j, h, i, :] for j in range(width - 1)] + [token]
        taps = [conv_weight_ref[h, i, :, j].astype(jnp.float32) for j in range(width)]
        y = sum(tap * x.astype(dtype).astype(jnp.float32) for tap, x in zip(taps, inputs, strict=True))
        moved.append([jnp.where(live, new.astype(conv_ref.dtype), old) for old, new in pairwise(inputs)])
        return (y * jax.nn.sigmoid(y)).astype(dtype).astype(jnp.float32)

    q, k = unit(convolved(0)) * K**-0.5, unit(convolved(1))
    v = convolved(2)
    k = jnp.where(live, k, 0.0)

    z = f_ref[row, 0, h, :].astype(jnp.float32) + dt_bias_ref[h, :]
    a = jnp.exp(a_log_ref[h])
    decay = jnp.where(live, jnp.exp(log_decay(z, a, lower_bound)), 1.0)
    beta = jnp.where(live, jax.nn.sigmoid(b_ref[row, 0, h].astype(jnp.float32)), 0.0)
    overlap = jnp.sum(q * k)
    k_read, q_read = (k * decay)[:, None], (q * decay)[:, None]

    parts = [v]
    if len(tiles) > 1:
        parts = [_convolved_part(qkv_ref, conv_ref, conv_weight_ref, row, h, tile, width, dtype) for tile in tiles]
    if not interpret:  # every thread loads the history whole: all must have it before one overwrites it
        plgpu.debug_barrier()
    for i, history in enumerate(moved):
        for j, inputs in enumerate(history):
            new_conv_ref[row, j, h, i, :] = inputs

    outs = []
    for i, tile in enumerate(tiles):
        following = state_ref[row, h, :, tiles[i + 1]] if i + 1 < len(tiles) else None
        update = beta * (parts[i] - jnp.sum(k_read * state, axis=0))  # pyright: ignore[reportOperatorIssue]
        out = jnp.sum(q_read * state, axis=0) + overlap * update
        new_state_ref[row, h, :, tile] = decay[:, None] * state + k[:, None] * update[None, :]  # pyright: ignore[reportOperatorIssue]
        outs.append(jnp.where(live, out, 0.0).astype(dtype).astype(jnp.float32))
        state = following

    mean = sum(jnp.sum(out * out) for out in outs) / K
    for tile, out in zip(tiles, outs, strict=True):
        weighed = out * jax.lax.rsqrt(mean + eps) * o_norm_ref[tile].astype(jnp.float32)
        out_ref[row, 0, h, tile] = (weighed * jax.nn.sigmoid(gate_ref[row, 0, h, tile].astype(jnp.float32))).astype(
            dtype
        )


def _convolved_part(qkv_ref, conv_ref, conv_weight_ref, row, h, tile, width, dtype):
    """v's convolution on some of its channels."""
    inputs = [conv_ref[row, j, h, 2, tile] for j in range(width - 1)] + [qkv_ref[row, 0, h, 2, tile]]
    taps = [conv_weight_ref[h, 2, tile, j].astype(jnp.float32) for j in range(width)]
    y = sum(tap * x.astype(dtype).astype(jnp.float32) for tap, x in zip(taps, inputs, strict=True))
    return (y * jax.nn.sigmoid(y)).astype(dtype).astype(jnp.float32)
