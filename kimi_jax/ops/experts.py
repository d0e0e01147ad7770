"""The routed experts: each token through its chosen experts, and the weighted sum. Knows nothing of collectives.

A device holds the experts first .. first + E - 1 of all; what other devices' experts add is not its business, and
their pairs of (token, expert) cost it nothing. Summing the devices' results is the caller's.

One loop over blocks of rows serves plain and packed weights. A block belongs to one expert, so a block reads (and
dequantises) one expert's weights, and the loop's bound is the number of blocks that hold a row.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Int32, UInt8

from kimi_jax.kernels import experts_few, experts_few_packed, experts_many, experts_one
from kimi_jax.ops import mxfp4
from kimi_jax.ops.gated_mlp import gated_mlp
from kimi_jax.ops.linear import project

Activation = Callable[[Array, Array], Array]
ROWS = 32


def experts_dense(
    x: Float[Array, "N D"],
    chosen: Int32[Array, "N k"],
    weights: Float32[Array, "N k"],
    gate_up: Float[Array, "E 2 F D"],
    down: Float[Array, "E D F"],
    *,
    activation: Activation,
    first: int | Int[Array, ""] = 0,
) -> Float32[Array, "N D"]:
    """`experts_grouped` the slow and plain way: every expert on every token, then only the chosen ones are added."""
    outputs = jax.vmap(lambda gate_up, down: _expert(x, gate_up, down, activation))(gate_up, down)
    held = first + jnp.arange(down.shape[0], dtype=jnp.int32)
    pairs = chosen[:, :, None] == held[None, None, :]
    weights_of_held = jnp.sum(jnp.where(pairs, weights[:, :, None], 0), axis=1)
    terms = jnp.where(
        weights_of_held.T[:, :, None] == 0, 0, weights_of_held.T[:, :, None] * outputs.astype(jnp.float32)
    )
    return jnp.sum(terms, axis=0)


def experts_grouped(
    x: Float[Array, "N D"],
    chosen: Int32[Array, "N k"],
    weights: Float32[Array, "N k"],
    gate_up: Float[Array, "E 2 F D"],
    down: Float[Array, "E D F"],
    *,
    activation: Activation,
    first: int | Int[Array, ""] = 0,
) -> Float32[Array, "N D"]:
    """y[n] = sum_k weights[n, k] * down_e activation(gate_e x[n], up_e x[n]),  e = chosen[n, k] - first.

    The sum runs over those e that are held here, 0 <= e < E, and is zero where there are none. `chosen` are ids among
    all experts; `first`, the first one held, may be traced. gate_up[e] stacks the gate's and the up-projection's rows.
    Each expert's output is rounded to the dtype of x; weighing and summing is float32, in the order of k, so a token's
    result depends neither on the other tokens nor on their number beyond the rounding of the matrix products.

    Source: Kimi Linear's modelling code, `KimiSparseMoeBlock`; blocks of rows sorted by expert as in MegaBlocks
    (arXiv 2211.15841), without its padding of the weights.
    """

    def expert_weights(e):
        # XLA's CPU backend slices bfloat16 as float32, and would widen the whole stacks ahead of the loop if nothing
        # tied them to an iteration.
        (gate_up_of_all, down_of_all), e = lax.optimization_barrier(((gate_up, down), e))
        return gate_up_of_all[e], down_of_all[e]

    return _over_blocks(x, chosen, weights, down.shape[0], expert_weights, activation=activation, first=first)  # pyright: ignore[reportReturnType]


def experts_packed(
    x: Float[Array, "N D"],
    chosen: Int32[Array, "N k"],
    weights: Float32[Array, "N k"],
    gate_up_packed: UInt8[Array, "E 2 F D//2"],
    gate_up_scale: UInt8[Array, "E 2 F D//32"],
    down_packed: UInt8[Array, "E D F//2"],
    down_scale: UInt8[Array, "E D F//32"],
    *,
    activation: Activation,
    first: int | Int[Array, ""] = 0,
) -> Float32[Array, "N D"]:
    """`experts_grouped` on MXFP4 weights (see `mxfp4`): equal to it on the dequantised weights, bit for bit.

    An expert is dequantised to the dtype of x when a block needs it, never a whole layer's at once.
    """

    def expert_weights(e):
        gate_up = mxfp4.dequantise(gate_up_packed[e], gate_up_scale[e], x.dtype)
        return gate_up, mxfp4.dequantise(down_packed[e], down_scale[e], x.dtype)

    return _over_blocks(x, chosen, weights, down_packed.shape[0], expert_weights, activation=activation, first=first)  # pyright: ignore[reportReturnType]


def experts(x, chosen, weights, gate_up, down, *, activation, first=0) -> Float32[Array, "N D"]:
    """`experts_grouped` in the form that is fastest where it runs: on CUDA a kernel for one token, few or many."""
    run = partial(experts_grouped, activation=activation)
    if not experts_few.supports_widths(x, down.shape[2]):
        return run(x, chosen, weights, gate_up, down, first=first)
    few = experts_few.supports(x, down.shape[2])
    kernel = partial(_for_few(x) if few else experts_many.experts_many, activation=activation)
    return _by_platform(kernel, run, first, x, chosen, weights, gate_up, down)


def experts_and_shared(
    x, chosen, weights, gate_up, down, shared_gate_up, shared_down, *, activation, first=0
) -> Float32[Array, "N D"]:
    """`experts`, plus the shared experts' `gated_mlp` of the same tokens: on CUDA, for few, in the same kernels."""
    hidden = down.shape[2]
    if not (experts_few.supports(x, hidden) and experts_few.supports_shared(hidden, shared_down.shape[1])):
        routed = experts(x, chosen, weights, gate_up, down, activation=activation, first=first)
        return routed + gated_mlp(x, shared_gate_up, shared_down, activation)

    def op(x, chosen, weights, gate_up, down, shared_gate_up, shared_down, first):
        routed = experts_grouped(x, chosen, weights, gate_up, down, activation=activation, first=first)
        return routed + gated_mlp(x, shared_gate_up, shared_down, activation)

    def kernel(x, chosen, weights, gate_up, down, *shared, first):
        return _for_few(x)(x, chosen, weights, gate_up, down, shared, activation=activation, first=first)

    return _by_platform(kernel, op, first, x, chosen, weights, gate_up, down, shared_gate_up, shared_down)


def experts_of_packed(x, chosen, weights, *packed, activation, first=0) -> Float32[Array, "N D"]:
    """`experts_packed` in the form that is fastest where it runs, like `experts`."""
    run, hidden = partial(experts_packed, activation=activation), 2 * packed[2].shape[2]
    if not experts_few.supports_widths(x, hidden):
        return run(x, chosen, weights, *packed, first=first)
    few = experts_few.supports(x, hidden)
    kernel = experts_few_packed.experts_few_packed if few else experts_many.experts_many_packed
    return _by_platform(partial(kernel, activation=activation), run, first, x, chosen, weights, *packed)


def _for_few(x: Float[Array, "N D"]) -> Callable[..., Float32[Array, "N D"]]:
    return experts_one.experts_one if x.shape[0] == 1 else experts_few.experts_few


def _by_platform(kernel, op, first, *arrays):
    return lax.platform_dependent(
        jnp.int32(first),
        *arrays,
        cuda=lambda first, *arrays: kernel(*arrays, first=first),
        default=lambda first, *arrays: op(*arrays, first=first),
    )


def _expert(
    x: Float[Array, "R D"], gate_up: Float[Array, "2 F D"], down: Float[Array, "D F"], activation: Activation
) -> Float[Array, "R D"]:
    hidden = project(x, gate_up)
    return project(activation(hidden[:, 0], hidden[:, 1]), down)


def _over_blocks(x, chosen, weights, num_experts, expert_weights, *, activation, first):
    """Sort the pairs by expert, run blocks of rows that share one, put the results back in the tokens' order."""
    tokens, top_k = chosen.shape
    pairs = tokens * top_k
    rows = _rows_per_block(pairs, num_experts)

    local = chosen.reshape(-1) - first
    held = (local >= 0) & (local < num_experts)
    local = jnp.where(held, local, num_experts)  # pairs of other devices sort last
    order = jnp.argsort(local, stable=True).astype(jnp.int32)
    padded_order = jnp.pad(order, (0, rows - 1))

    experts = jnp.arange(num_experts, dtype=jnp.int32)
    counts = jnp.sum(local[None, :] == experts[:, None], axis=1, dtype=jnp.int32)
    first_row = jnp.cumsum(counts) - counts
    blocks = -(-counts // rows)
    last_block = jnp.cumsum(blocks)

    def block(b, outputs):
        e = jnp.sum(last_block <= b, dtype=jnp.int32)
        row = first_row[e] + (b - (last_block[e] - blocks[e])) * rows
        tokens_of_rows = lax.dynamic_slice_in_dim(padded_order, row, rows) // top_k
        result = _expert(x[tokens_of_rows], *expert_weights(e), activation)  # pyright: ignore[reportCallIssue]
        # Rows past the end of this expert belong to the next block, which comes later and overwrites them.
        return lax.dynamic_update_slice_in_dim(outputs, result, row, axis=0)

    outputs = jnp.zeros((pairs + rows - 1, x.shape[1]), x.dtype)
    outputs = lax.fori_loop(0, last_block[-1], block, outputs)

    place = jnp.zeros(pairs, jnp.int32).at[order].set(jnp.arange(pairs, dtype=jnp.int32), unique_indices=True)
    terms = outputs[place].astype(jnp.float32) * weights.reshape(-1, 1)
    terms = jnp.where(held[:, None], terms, 0).reshape(tokens, top_k, -1)
    return sum(terms[:, i] for i in range(top_k))


def _rows_per_block(pairs: int, num_experts: int) -> int:
    """One row a block while experts rarely share tokens (nothing is computed in vain), else up to 32."""
    rows = 1
    while rows < ROWS and rows * num_experts < pairs:
        rows *= 2
    return rows
