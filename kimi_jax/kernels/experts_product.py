"""What the routed experts for few and many tokens share: an expert's rows times a block of tokens; the weighted sum."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int, Int32

from kimi_jax.kernels import fp4


def products(weight_refs, experts_rows, row, load_x, width, *, rows, columns, tokens, interpret):
    """total[r, n] = sum_c weight[*index, row + r, c] x[n, c] for each index of `experts_rows`, float32 [rows, tokens].

    weight_refs: one reference to plain weights, or two, to words of codes and scales (see `fp4`). load_x(at, size):
    columns of all tokens, read once for all products. columns: of the weight as stored, held at a time; width: of x.
    """
    some = pl.ds(row, rows)

    def plain(i, sums):
        at = i * columns
        x = load_x(at, columns)
        return tuple(
            total + _dot(plgpu.load(weight_refs[0].at[(*index, some, pl.ds(at, columns))]), x)
            for total, index in zip(sums, experts_rows, strict=True)
        )

    def packed(i, sums):
        at, groups, stretch = i * columns, columns * fp4.IN_WORD // fp4.GROUP, width // fp4.IN_WORD
        xs = [load_x(code * stretch + at, columns) for code in range(fp4.IN_WORD)]
        new = []
        for total, index in zip(sums, experts_rows, strict=True):
            words = plgpu.load(weight_refs[0].at[(*index, some, pl.ds(at, columns))])
            scale = plgpu.load(weight_refs[1].at[(*index, some, pl.ds(i * groups, groups))])
            for weight, x in zip(fp4.widen(words, scale, interpret), xs, strict=True):
                total = total + _dot(weight, x)
            new.append(total)
        return tuple(new)

    fold = plain if len(weight_refs) == 1 else packed
    zero = jnp.zeros((rows, tokens), jnp.float32)
    return lax.fori_loop(0, weight_refs[0].shape[-1] // columns, fold, (zero,) * len(experts_rows))


def weighted_sum(
    outputs: Float[Array, "N k D"],
    chosen: Int32[Array, "N k"],
    weights: Float32[Array, "N k"],
    first: int | Int[Array, ""],
    experts: int,
) -> Float32[Array, "N D"]:
    """sum_k weights[n, k] outputs[n, k] over the experts first .. first + experts - 1, in the order of k.

    What is not held was never written, and may be anything. One chain of sums, not a sum over an array of terms: XLA
    makes one kernel of it.
    """
    held = (chosen >= first) & (chosen < first + experts)
    terms = (
        jnp.where(held[:, i, None], outputs[:, i].astype(jnp.float32) * weights[:, i, None], 0)
        for i in range(chosen.shape[1])
    )
    return sum(terms)  # pyright: ignore[reportReturnType]


def _dot(weight, x):
    return lax.dot_general(weight, x, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
