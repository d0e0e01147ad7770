"""KDA's middle for many tokens, a chunk at a time: convolution, gates, delta rule, on matrix units in bfloat16.

The sibling of `ops.kda.mix_heads_plain` at T > 1, up to its gated norm. Knows nothing of projections or of how heads
are spread over devices. First what the chunks compute without the state, all at once; then one after the other.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int32

from kimi_jax.kernels.delta_inputs import CHUNK, prepare
from kimi_jax.kernels.delta_within import Chunks, within_chunks
from kimi_jax.kernels.device import PROGRAMS, hopper_or_newer


def supports(qkv: Float[Array, "B T H 3 K"]) -> bool:
    """Whether these kernels can stand in: many bfloat16 tokens, and a head width for whole matrix tiles."""
    K = qkv.shape[-1]
    return qkv.shape[1] > 1 and qkv.dtype == jnp.bfloat16 and K in (64, 128) and hopper_or_newer()


def mix_chunks(
    qkv: Float[Array, "B T H 3 K"],
    f: Float[Array, "B T H K"],
    b: Float[Array, "B T H"],
    conv_weight: Float[Array, "H 3 K W"],
    a_log: Float32[Array, " H"],
    dt_bias: Float32[Array, "H K"],
    conv_state: Float[Array, "B W-1 H 3 K"],
    recurrent: Float32[Array, "B H K V"],
    counts: Int32[Array, " B"],
    *,
    lower_bound: float | None,
    interpret: bool = False,
) -> tuple[Float[Array, "B T H V"], Float32[Array, "B H K V"]]:
    """q, k, v = silu(conv(qkv));  S <- Diag(e^g) S;  S <- S + beta k (v - S^T k)^T;  out = S^T q  for T tokens in turn.

    With q and k normalised, q scaled by K^-1/2. Operands of matrix products are bfloat16, sums float32, the state
    float32: a relative error of about 4e-3. A token at or after counts[b] has decay 1 and writes zeros, whatever finite
    numbers it holds.

    Floor: 2 (3 + 1 + 1 + 1) K bytes and 6 K^2 + 5 K (C + 1) operations a token and head, C = CHUNK. Source: Kimi
    Linear (arXiv 2510.26692), section 3, the chunkwise form, as written out in `ops.delta_rule.delta_chunked`.
    """
    mixed, g = prepare(
        qkv, f, conv_weight, a_log, dt_bias, conv_state, counts, lower_bound=lower_bound, interpret=interpret
    )
    chunks = within_chunks(mixed, g, b, interpret=interpret)
    return across_chunks(chunks, recurrent, qkv.shape[1], interpret=interpret)


def across_chunks(
    chunks: Chunks,
    state: Float32[Array, "B H K V"],
    tokens: int,
    *,
    columns: int | None = None,
    warps: int = 4,
    stages: int = 3,
    interpret: bool = False,
) -> tuple[Float[Array, "B T H V"], Float32[Array, "B H K V"]]:
    """Run the chunks one after the other on the state: one program a head and `columns` of the value axis."""
    B, H, _, V = state.shape
    columns = columns or (32 if B * H * V // 32 <= PROGRAMS else 64)
    dtype = chunks.values.dtype
    return pl.pallas_call(
        functools.partial(_across, columns=columns),
        out_shape=(jax.ShapeDtypeStruct((B, tokens, H, V), dtype), jax.ShapeDtypeStruct(state.shape, state.dtype)),
        grid=(V // columns, H, B),
        input_output_aliases={len(chunks): 1},
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name="kda_across_chunks",
    )(*chunks, state)


def _across(
    erasers_ref, readers_ref, writers_ref, values_ref, mixing_ref, decay_ref, state_ref, out_ref, new_state_ref, *,
    columns,
):  # fmt: skip
    h, row = pl.program_id(1), pl.program_id(2)
    some = pl.ds(pl.program_id(0) * columns, columns)
    C, T = CHUNK, out_ref.shape[1]
    dtype = out_ref.dtype

    def step(m, state):
        rounded = state.astype(dtype)
        update = values_ref[row, m, h, :, some].astype(jnp.float32) - _dot(erasers_ref[row, m, h], rounded)
        update = update.astype(dtype)
        out = _dot(readers_ref[row, m, h], rounded) + _dot(mixing_ref[row, m, h], update)
        inside = (m * C + jnp.arange(C, dtype=jnp.int32) < T)[:, None]
        mask = jnp.broadcast_to(inside, out.shape)
        plgpu.store(out_ref.at[row, pl.ds(m * C, C), h, some], out.astype(dtype), mask=mask)
        written = lax.dot_general(
            writers_ref[row, m, h], update, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        return decay_ref[row, m, h][:, None] * state + written

    state = lax.fori_loop(0, values_ref.shape[1], step, state_ref[row, h, :, some])
    new_state_ref[row, h, :, some] = state


def _dot(a, b):
    return lax.dot_general(
        a, b, (((1,), (0,)), ((), ())), precision=lax.Precision.DEFAULT, preferred_element_type=jnp.float32
    )
