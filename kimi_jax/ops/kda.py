"""KDA's middle, everything between its projections and o_proj: convolution, gates, delta rule, gated norm."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from kimi_jax.kernels import delta_chunks, delta_step, delta_step_hopper
from kimi_jax.kernels.device import hopper_for_mosaic
from kimi_jax.ops import delta_rule
from kimi_jax.ops.norm import gated_rms_norm, l2_norm
from kimi_jax.ops.short_conv import history_after, short_conv


def mix_heads(*arrays: Array, lower_bound: float | None, eps: float) -> tuple[Array, Array, Array]:
    """`mix_heads_plain` in the form that is fastest where it runs: on CUDA kernels, for one token or for many."""
    about = dict(lower_bound=lower_bound, eps=eps)
    op = partial(mix_heads_plain, **about)
    if hopper_for_mosaic() and delta_step_hopper.supports(arrays[0]):
        kernel = delta_step_hopper.mix_heads_step_hopper
    elif delta_step.supports(arrays[0]):
        kernel = delta_step.mix_heads_step
    elif delta_chunks.supports(arrays[0]):
        kernel = mix_heads_chunked
    else:
        return op(*arrays)
    return jax.lax.platform_dependent(*arrays, cuda=partial(kernel, **about), default=op)


def mix_heads_plain(
    qkv: Float[Array, "B T H 3 K"],
    f: Float[Array, "B T H K"],
    b: Float[Array, "B T H"],
    gate: Float[Array, "B T H V"],
    conv_weight: Float[Array, "H 3 K W"],
    a_log: Float[Array, " H"],
    dt_bias: Float[Array, "H K"],
    o_norm: Float[Array, " V"],
    conv_state: Float[Array, "B W-1 H 3 K"],
    recurrent: Float[Array, "B H K V"],
    counts: Int[Array, " B"],
    *,
    lower_bound: float | None,
    eps: float,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B W-1 H 3 K"], Float32[Array, "B H K V"]]:
    """q, k, v = silu(conv(qkv));  S <- Diag(e^g) S;  S <- S + beta k (v - S^T k)^T;  out = RMS(S^T q) sigmoid(gate)

    with q and k normalised, q scaled by K^-1/2, g the decay of (f, a_log, dt_bias): the softplus gate, or K3's gate if
    there is a `lower_bound`; beta = sigmoid(b) -> the gated output and the new states. Row b has counts[b] live tokens:
    a padded one has decay 1 and writes nothing, so the state passes through it bit for bit. Heads are independent.

    Source: Kimi Linear (arXiv 2510.26692), section 3; fla-org/flash-linear-attention fla/layers/kda.py.
    """
    mixed, conv_state = short_conv(qkv, conv_weight, conv_state, counts)
    live = (jnp.arange(qkv.shape[1], dtype=jnp.int32)[None] < counts[:, None])[..., None]
    q, k, v = mixed[..., 0, :], mixed[..., 1, :], mixed[..., 2, :]
    q, k = l2_norm(q) * q.shape[-1] ** -0.5, l2_norm(k)
    if lower_bound is None:
        g = delta_rule.softplus_gate(f, a_log, dt_bias)
    else:
        g = delta_rule.lower_bound_gate(f, a_log, dt_bias, lower_bound)
    beta = jnp.where(live, jax.nn.sigmoid(b.astype(jnp.float32)), 0.0)
    g = jnp.where(live[..., None], g, 0.0)
    out, recurrent = _recur(q, k, v.astype(jnp.float32), g, beta, recurrent)
    out = out.astype(qkv.dtype).astype(jnp.float32)
    return gated_rms_norm(out, gate, o_norm, eps).astype(qkv.dtype), conv_state, recurrent


def mix_heads_chunked(
    qkv: Float[Array, "B T H 3 K"],
    f: Float[Array, "B T H K"],
    b: Float[Array, "B T H"],
    gate: Float[Array, "B T H V"],
    conv_weight: Float[Array, "H 3 K W"],
    a_log: Float[Array, " H"],
    dt_bias: Float[Array, "H K"],
    o_norm: Float[Array, " V"],
    conv_state: Float[Array, "B W-1 H 3 K"],
    recurrent: Float[Array, "B H K V"],
    counts: Int[Array, " B"],
    *,
    lower_bound: float | None,
    eps: float,
    interpret: bool = False,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B W-1 H 3 K"], Float32[Array, "B H K V"]]:
    """`mix_heads_plain` through `kernels.delta_chunks`: bfloat16 operands, float32 sums and state."""
    out, recurrent = delta_chunks.mix_chunks(
        qkv, f, b, conv_weight, a_log, dt_bias, conv_state, recurrent, counts, lower_bound=lower_bound,
        interpret=interpret,
    )  # fmt: skip
    out = gated_rms_norm(out.astype(jnp.float32), gate, o_norm, eps).astype(qkv.dtype)
    return out, history_after(qkv, conv_state, counts), recurrent


def _recur(q, k, v, g, beta, state):
    """The delta rule in the form that is fastest here: a step for one token; for many, chunks, or a scan on CPUs."""
    if q.shape[1] == 1:
        out, state = delta_rule.delta_step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], state)
        return out[:, None], state
    return jax.lax.platform_dependent(
        q, k, v, g, beta, state, cpu=delta_rule.delta_scan, default=delta_rule.delta_chunked
    )
