"""The two gated activations: SwiGLU (Kimi Linear) and SiTU (Kimi K3). Knows nothing of weights.

Both are computed in float32 and rounded once, to the dtype of the gate.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def swiglu(gate: Float[Array, "*X"], up: Float[Array, "*X"]) -> Float[Array, "*X"]:
    """silu(gate) * up, with silu(x) = x * sigmoid(x); in the dtype of the gate.

    Source: Shazeer 2020 (arXiv 2002.05202), eq. 6.
    """
    hidden = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)
    return hidden.astype(gate.dtype)


def situ(
    gate: Float[Array, "*X"], up: Float[Array, "*X"], beta: float | None, linear_beta: float | None
) -> Float[Array, "*X"]:
    """beta * tanh(gate / beta) * sigmoid(gate) * [linear_beta * tanh(up / linear_beta)]; in the dtype of the gate.

    The sigmoid sees the gate before the tanh caps it. `beta` None or 0 counts as 1; `linear_beta` None leaves `up` as
    it is. With both given, |result| < beta * linear_beta; with both going to infinity it becomes `swiglu`.

    Source: Kimi K3 configuration `activation_situ_beta`, `activation_situ_linear_beta` and its modelling code.
    """
    dtype, gate, up = gate.dtype, gate.astype(jnp.float32), up.astype(jnp.float32)
    beta = beta or 1.0
    if linear_beta is not None:
        up = linear_beta * jnp.tanh(up / linear_beta)
    return (beta * jnp.tanh(gate / beta) * jax.nn.sigmoid(gate) * up).astype(dtype)
