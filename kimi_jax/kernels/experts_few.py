"""The routed experts for few tokens: bound by the bytes of the experts that were hit, each read once.

The sibling of `ops.experts.experts_grouped` for 2 to 64 tokens (`experts_one` takes one). No sorting, no gathering: a
program takes one expert's rows of a weight and multiplies all tokens by them, which costs nothing while memory is what
it waits for, and stores only the results of the tokens that chose this expert.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int, Int32

from kimi_jax.kernels.device import hopper_or_newer
from kimi_jax.kernels.experts_product import products, weighted_sum

MOST_TOKENS = 64
Activation = Callable[[Array, Array], Array]


def supports(x: Float[Array, "N D"], hidden: int) -> bool:
    """Whether these kernels, or `experts_one`, can stand in: few bfloat16 tokens, widths in whole blocks."""
    return x.shape[0] <= MOST_TOKENS and supports_widths(x, hidden)


def supports_shared(hidden: int, shared: int) -> bool:
    """Whether `experts_few` and `experts_one` can take shared experts of this hidden width along."""
    return shared % 256 == 0 and shared <= hidden


def supports_widths(x: Float[Array, "N D"], hidden: int) -> bool:
    """Whether the widths and the dtype are those that the kernels, for few tokens and for many, are written for."""
    return x.dtype == jnp.bfloat16 and x.shape[1] % 256 == 0 and hidden % 256 == 0 and hopper_or_newer()


def experts_few(
    x: Float[Array, "N D"],
    chosen: Int32[Array, "N k"],
    weights: Float32[Array, "N k"],
    gate_up: Float[Array, "E 2 F D"],
    down: Float[Array, "E D F"],
    shared: tuple[Float[Array, "2 G D"], Float[Array, "D G"]] | None = None,
    *,
    activation: Activation,
    first: int | Int[Array, ""] = 0,
    blocks: tuple[int, int, int, int] | None = None,
    stages: int | None = None,
    warps: int | None = None,
    interpret: bool = False,
) -> Float32[Array, "N D"]:
    """y[n] = sum_k weights[n, k] * down_e activation(gate_e x[n], up_e x[n]),  e = chosen[n, k] - first, 0 <= e < E.

    As `ops.experts.experts_grouped`, its roundings included. `shared` (gate_up, down) is one more expert that every
    token takes with weight 1, rounded as `ops.gated_mlp` does; G <= F (`supports_shared`). blocks: rows and columns of
    a weight held at a time by the first product, then by the second.

    Floor: 6 F D bytes for each expert that a token chose. Source: the same; each expert's weights are streamed as in a
    matrix-vector product, one program a stretch of rows.
    """
    (N, k), (E, _, F, D) = chosen.shape, gate_up.shape
    tile, best_stages, best_warps = (32, 6, 2) if N <= 8 else (64, 5, 4)  # measured on an H200
    blocks, stages, warps = blocks or (tile, 64, tile, 64), stages or best_stages, warps or best_warps
    by_pair = N * k <= E
    padded = max(16, pl.next_power_of_2(N))
    first = jnp.asarray(first, jnp.int32).reshape(1)
    params = plgpu.CompilerParams(num_warps=warps, num_stages=stages)
    programs, more = min(N * k, E), 0 if shared is None else 1
    common = dict(routed=programs, with_shared=more > 0, by_pair=by_pair, padded=padded, interpret=interpret)
    shared_gate_up, shared_down = ((), ()) if shared is None else ((shared[0],), (shared[1],))
    hidden = pl.pallas_call(
        functools.partial(_gate_up, activation=activation, rows=blocks[0], columns=blocks[1], **common),
        out_shape=jax.ShapeDtypeStruct((N, k + more, F), x.dtype),
        grid=(F // blocks[0], programs + more),
        compiler_params=params,
        interpret=interpret,
        name="experts_few_gate_up",
    )(x, chosen, first, gate_up, *shared_gate_up)
    outputs, *shared_output = pl.pallas_call(
        functools.partial(_down, rows=blocks[2], columns=blocks[3], **common),
        out_shape=[jax.ShapeDtypeStruct((N, k, D), x.dtype)] + [jax.ShapeDtypeStruct((N, D), jnp.float32)] * more,
        grid=(D // blocks[2], programs + more),
        compiler_params=params,
        interpret=interpret,
        name="experts_few_down",
    )(hidden, chosen, first, down, *shared_down)
    return sum(shared_output, weighted_sum(outputs, chosen, weights, first[0], E))  # pyright: ignore[reportReturnType]


def tokens_of(chosen_ref, first_ref, by_pair, padded):
    """This program's expert, whether it has work, and for each token whether and as which of its choices it took it."""
    N, k = chosen_ref.shape
    program = jnp.minimum(pl.program_id(1), N * k - 1)  # the one beyond is the shared experts'
    choices = pl.next_power_of_2(k)
    token = jnp.arange(padded, dtype=jnp.int32)[:, None]
    choice = jnp.arange(choices, dtype=jnp.int32)[None, :]
    start = program * 0
    inside = (token < N) & (choice < k)
    chosen = plgpu.load(chosen_ref.at[pl.ds(start, padded), pl.ds(start, choices)], mask=inside, other=-1)
    if by_pair:
        expert = chosen_ref[program // k, program % k]
        first_pair = jnp.min(jnp.where((chosen == expert) & inside, token * k + choice, N * k))
        mine = first_pair == program
    else:
        expert = program + first_ref[0]
        mine = jnp.max(jnp.where((chosen == expert) & inside, 1, 0)) > 0
    match = (chosen == expert) & inside
    took = jnp.max(jnp.where(match, 1, 0), axis=1) > 0
    which = jnp.max(jnp.where(match, choice, 0), axis=1)
    return expert - first_ref[0], mine, took, which


def _gate_up(x_ref, chosen_ref, first_ref, *refs, activation, rows, routed, with_shared, by_pair, padded, **tile):
    weight_refs, shared_refs, (hidden_ref,) = _sort(refs, with_shared, results=1)
    e, mine, took, which = tokens_of(chosen_ref, first_ref, by_pair, padded)
    mine = mine & (e >= 0) & (e < weight_refs[0].shape[0]) & (pl.program_id(1) < routed)
    N, k = chosen_ref.shape
    row = pl.program_id(0) * rows
    token = jnp.arange(padded, dtype=jnp.int32)
    inside = token < N
    tokens = pl.ds(row * 0, padded)

    def load_x(at, size):
        return plgpu.load(x_ref.at[tokens, pl.ds(at, size)], mask=inside[:, None], other=0.0)

    def run(weight_refs, indices, took, which):
        gate, up = products(weight_refs, indices, row, load_x, x_ref.shape[1], tokens=padded, rows=rows, **tile)
        dtype = hidden_ref.dtype
        hidden = activation(gate.astype(dtype), up.astype(dtype))
        at = row + jnp.arange(rows, dtype=jnp.int32)
        store_columns(hidden_ref, hidden, at, token, which, took)

    parts = jnp.int32(0), jnp.int32(1)
    if with_shared:  # first: the branch that ends the kernel is the one whose addresses stay in uniform registers
        here = (pl.program_id(1) == routed) & (row < shared_refs[0].shape[1])
        pl.when(here)(lambda: run(shared_refs, [(part,) for part in parts], inside, jnp.full_like(which, k)))
    pl.when(mine)(lambda: run(weight_refs, [(e, part) for part in parts], took, which))


def _down(hidden_ref, chosen_ref, first_ref, *refs, rows, routed, with_shared, by_pair, padded, **tile):
    weight_refs, shared_refs, out_refs = _sort(refs, with_shared, results=1 + with_shared)
    e, mine, took, which = tokens_of(chosen_ref, first_ref, by_pair, padded)
    mine = mine & (e >= 0) & (e < weight_refs[0].shape[0]) & (pl.program_id(1) < routed)
    N, k = chosen_ref.shape
    row = pl.program_id(0) * rows
    at = row + jnp.arange(rows, dtype=jnp.int32)
    token = jnp.arange(padded, dtype=jnp.int32)

    def run(weight_refs, index, took, which):
        def load_hidden(at, size):
            column = at + jnp.arange(size, dtype=jnp.int32)
            shape = (padded, size)
            place = jnp.minimum(token, N - 1)[:, None], which[:, None], column[None, :]
            mask = jnp.broadcast_to(took[:, None], shape)
            return plgpu.load(hidden_ref.at[tuple(jnp.broadcast_to(i, shape) for i in place)], mask=mask, other=0.0)

        width = hidden_ref.shape[-1]
        (out,) = products(weight_refs, (index,), row, load_hidden, width, tokens=padded, rows=rows, **tile)
        return out

    if with_shared:

        @pl.when(pl.program_id(1) == routed)
        def _():
            out = run(shared_refs, (), token < N, jnp.full_like(which, k))
            some = out_refs[1].at[pl.ds(row * 0, padded), pl.ds(row, rows)]
            plgpu.store(some, out.T, mask=(token < N)[:, None])

    @pl.when(mine)
    def _():
        out = run(weight_refs, (e,), took, which)
        store_columns(out_refs[0], out.astype(out_refs[0].dtype), at, token, which, took)


def _sort(refs: tuple, with_shared: bool, results: int) -> tuple[tuple, tuple, tuple]:
    """A kernel's references behind the common ones: the routed weights', the shared ones', the results'."""
    weights, outs = refs[:-results], refs[-results:]
    return (weights[:-1], weights[-1:], outs) if with_shared else (weights, (), outs)


def store_columns(ref, value, at, token, which, live):
    """ref[token[n], which[n], at[r]] = value[r, n] for the n that are live."""
    shape = value.shape
    place = tuple(jnp.broadcast_to(i, shape) for i in (token[None, :], which[None, :], at[:, None]))
    plgpu.store(ref.at[place], value, mask=jnp.broadcast_to(live[None, :], shape))
