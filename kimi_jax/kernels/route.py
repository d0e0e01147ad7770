"""The choice of experts, from the router's logits to experts and weights in one pass.

The sibling of the part of `ops.routing.route` behind its product: XLA sorts all scores and goes over them four times.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int32

TAKEN = -(2**31)  # below every score, as `_ordered` has them


def choose_experts(
    logits: Float32[Array, "N E"],
    bias: Float[Array, " E"],
    *,
    top_k: int,
    renormalize: bool,
    scale: float,
    weigh_biased: bool = False,
    warps: int | None = None,
    interpret: bool = False,
) -> tuple[Int32[Array, "N k"], Float32[Array, "N k"]]:
    """s = sigmoid(logits);  experts = top-k of s + bias;  weights = scale * s[experts] / (sum_k s[experts] + 1e-20).

    As `ops.routing.route`, its order and its ties included. A program owns one token: it holds all its scores and takes
    the largest k times.

    Floor: the time of a kernel; 4 E bytes a token. Source: the same.
    """
    N, E = logits.shape
    width = pl.next_power_of_2(E)
    weigh = functools.partial(_weights, renormalize=renormalize, scale=scale)
    kernel = functools.partial(_choose, weigh=weigh, top_k=top_k, width=width, weigh_biased=weigh_biased)
    return pl.pallas_call(
        kernel,
        out_shape=(jax.ShapeDtypeStruct((N, top_k), jnp.int32), jax.ShapeDtypeStruct((N, top_k), jnp.float32)),
        grid=(N,),
        compiler_params=plgpu.CompilerParams(num_warps=warps or max(1, width // 256), num_stages=1),
        interpret=interpret,
        name="choose_experts",
    )(logits, bias)


def _choose(logits_ref, bias_ref, chosen_ref, weights_ref, *, weigh, top_k, width, weigh_biased):
    token = pl.program_id(0)
    E, slots = bias_ref.shape[0], pl.next_power_of_2(top_k)
    expert = jnp.arange(width, dtype=jnp.int32)
    slot = jnp.arange(slots, dtype=jnp.int32)
    everything = pl.ds(token * 0, width)

    logits = plgpu.load(logits_ref.at[token, everything], mask=expert < E, other=0.0)
    bias = plgpu.load(bias_ref.at[everything], mask=expert < E, other=0.0)
    key = jnp.where(expert < E, _ordered(jax.nn.sigmoid(logits) + bias.astype(jnp.float32)), TAKEN)

    chosen = jnp.zeros((slots,), jnp.int32)
    for i in range(top_k):
        best = jnp.min(jnp.where(key == jnp.max(key), expert, width))
        chosen = jnp.where(slot == i, best, chosen)
        key = jnp.where(expert == best, TAKEN, key)

    inside = slot < top_k
    scores = jax.nn.sigmoid(plgpu.load(logits_ref.at[token, chosen], mask=inside, other=0.0))
    if weigh_biased:
        scores = scores + plgpu.load(bias_ref.at[chosen], mask=inside, other=0.0).astype(jnp.float32)
    some = pl.ds(token * 0, slots)
    plgpu.store(chosen_ref.at[token, some], chosen, mask=inside)
    plgpu.store(weights_ref.at[token, some], weigh(jnp.where(inside, scores, 0.0)), mask=inside)


def _ordered(x: Float32[Array, "*X"]) -> Int32[Array, "*X"]:
    """Whole numbers in the order of x, NaN above all: warps compare them in one instruction."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(x != x, 0x7FFFFFFF, jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


def _weights(scores, *, renormalize, scale):
    return (scores / (jnp.sum(scores) + 1e-20) if renormalize else scores) * scale
