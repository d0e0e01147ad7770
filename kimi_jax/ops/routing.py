"""Which experts a token goes to, and with what weights. Knows nothing of the experts themselves or of devices.

Scores are float32: with hundreds of experts the last chosen and the first left out lie close. Products of float32
numbers are taken at full precision; those of bfloat16 ones are exact, and left to the matrix units, which sum them in
float32.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from kimi_jax.kernels import route as kernel


def route(
    x: Float[Array, "N D"],
    weight: Float[Array, "E D"],
    bias: Float[Array, "E"],
    *,
    top_k: int,
    renormalize: bool,
    scale: float,
    weigh_biased: bool = False,
) -> tuple[Int32[Array, "N k"], Float32[Array, "N k"]]:
    """s = sigmoid(x W^T);  experts = top-k of s + bias;  weights = scale * s[experts] / (sum_k s[experts] + 1e-20).

    N tokens, E experts. The bias only selects: the weights come from the plain scores. Without `renormalize` the
    division is left out. Experts come in descending order of s + bias, equal ones in order of index.

    `weigh_biased` takes the weights from s + bias instead. One released version of the Kimi Linear code does so, since
    it adds the bias in place to a view of the scores; it is here for exact comparison with that code.

    Source: DeepSeek-V3 (arXiv 2412.19437), eqs. 12 to 16, with one expert group.
    """
    logits, how = _logits(x, weight), dict(renormalize=renormalize, scale=scale, weigh_biased=weigh_biased)
    op = partial(choose_experts, top_k=top_k, **how)
    return lax.platform_dependent(logits, bias, cuda=partial(kernel.choose_experts, top_k=top_k, **how), default=op)


def choose_experts(
    logits: Float32[Array, "N E"],
    bias: Float[Array, "E"],
    *,
    top_k: int,
    renormalize: bool,
    scale: float,
    weigh_biased: bool = False,
) -> tuple[Int32[Array, "N k"], Float32[Array, "N k"]]:
    """`route` from the logits x W^T on."""
    scores, selection = _scores(logits, bias)
    biased, experts = lax.top_k(selection, top_k)
    weights = biased if weigh_biased else jnp.take_along_axis(scores, experts, axis=-1)
    if renormalize:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return experts, weights * scale


def margins(
    x: Float[Array, "N D"], weight: Float[Array, "E D"], bias: Float[Array, "E"], *, top_k: int
) -> Float32[Array, "N"]:
    """By how much the last expert chosen leads the first left out, in s + bias; inf where every expert is chosen.

    A token whose margin is smaller than the rounding of its scores may go to another expert on another layout.
    """
    if top_k >= weight.shape[0]:
        return jnp.full(x.shape[:1], jnp.inf)
    best, _ = lax.top_k(_scores(_logits(x, weight), bias)[1], top_k + 1)
    return best[:, top_k - 1] - best[:, top_k]


def _logits(x: Float[Array, "N D"], weight: Float[Array, "E D"]) -> Float32[Array, "N E"]:
    if not x.dtype == weight.dtype == jnp.bfloat16:
        x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    return jnp.einsum("nd,ed->ne", x, weight, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _scores(
    logits: Float32[Array, "N E"], bias: Float[Array, "E"]
) -> tuple[Float32[Array, "N E"], Float32[Array, "N E"]]:
    """s and s + bias."""
    scores = jax.nn.sigmoid(logits)
    return scores, scores + bias.astype(jnp.float32)[None, :]
