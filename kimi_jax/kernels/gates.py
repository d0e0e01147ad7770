"""KDA's per-token quantities inside the kernels of one token."""

import jax
import jax.numpy as jnp


def log_decay(z, a, lower_bound: float | None):
    """g = -a softplus(z), or K3's lower_bound sigmoid(a z) (see `ops.delta_rule`); z = f + dt_bias, a = e^a_log."""
    if lower_bound is None:
        return -a * (jnp.maximum(z, 0.0) + jnp.log(1.0 + jnp.exp(-jnp.abs(z))))
    return lower_bound * jax.nn.sigmoid(a * z)


def unit(x):
    """x / |x| along the last axis, as `ops.norm.l2_norm`."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
