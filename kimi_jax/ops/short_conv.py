"""The short causal convolution before KDA, with its decode history. Knows nothing of q, k, v or of heads.

A row of the batch is right-padded: only its first `counts` tokens are real.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def short_conv(
    x: Float[Array, "B T *C"],
    weight: Float[Array, "*C Wc"],
    history: Float[Array, "B Wc-1 *C"],
    counts: Int[Array, "B"],
) -> tuple[Float[Array, "B T *C"], Float[Array, "B Wc-1 *C"]]:
    """y[t] = silu(sum_i weight[i] * x[t - (Wc - 1) + i]), a depthwise convolution per channel; i = 0 .. Wc - 1.

    The last tap multiplies the current token; tokens before x[0] come from `history`, oldest first (zeros at the start
    of a sequence). Sum and SiLU are float32, rounded once to the dtype of x. *C are any channel axes.

    counts[b] in 0..T is the number of real tokens of row b. The new history is the last Wc - 1 real inputs (not
    outputs) of that row, so a row without tokens keeps the one it had. Padding follows the real tokens, so it reaches
    none of them, and its own outputs are selected to be zero: NaN in it is harmless.

    Source: Kimi Linear (arXiv 2510.26692), section 4; flash-linear-attention `fla/modules/convolution.py`.
    """
    tokens, width = x.shape[1], weight.shape[-1]
    channel_axes = tuple(range(2, x.ndim))
    real = jnp.expand_dims(jnp.arange(tokens)[None, :] < counts[:, None], channel_axes)

    inputs = jnp.concatenate([history.astype(x.dtype), x], axis=1)
    taps = jnp.expand_dims(weight.astype(jnp.float32), (0, 1))
    y = sum(taps[..., i] * inputs[:, i : i + tokens].astype(jnp.float32) for i in range(width))
    y = jnp.where(real, jax.nn.silu(y), 0).astype(x.dtype)

    return y, history_after(x, history, counts)


def history_after(
    x: Float[Array, "B T *C"], history: Float[Array, "B P *C"], counts: Int[Array, "B"]
) -> Float[Array, "B P *C"]:
    """The last P = Wc - 1 real inputs of each row, of which the first counts[b] of x are real; see `short_conv`."""
    if x.shape[1] == 0:
        return history.astype(x.dtype)
    channel_axes = tuple(range(2, x.ndim))
    past = history.shape[1]
    token = counts[:, None] - past + jnp.arange(past, dtype=jnp.int32)[None]
    row = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]
    new = x[row, jnp.clip(token, 0)]
    old = history[row, jnp.clip(token + past, 0, past - 1)]
    return jnp.where(jnp.expand_dims(token >= 0, channel_axes), new, old.astype(x.dtype))
