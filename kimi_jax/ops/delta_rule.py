"""Kimi Delta Attention's recurrence: the decay gates, and the gated delta rule by steps and by chunks.

Everything here is float32. Knows nothing of projections, convolutions or of how heads are spread over devices.
A token with g = 0 and beta = 0 leaves the state as it was, so that is what a padded token must carry.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

HIGHEST = lax.Precision.HIGHEST
TILE = 16
STRONGEST = -88.0  # e^-88 is the smallest normal float32; sums of stronger decays would only lose their small terms


def softplus_gate(
    f: Float[Array, "*X H K"], a_log: Float[Array, "H"], dt_bias: Float[Array, "H K"]
) -> Float32[Array, "*X H K"]:
    """g = -exp(a_log) * softplus(f + dt_bias): the log of the decay, g <= 0 without a lower bound.

    Source: Kimi Linear (arXiv 2510.26692), section 4; flash-linear-attention `fla/ops/kda/gate.py`.
    """
    z, a = _gate_inputs(f, a_log, dt_bias)
    return -a * jax.nn.softplus(z)


def lower_bound_gate(
    f: Float[Array, "*X H K"], a_log: Float[Array, "H"], dt_bias: Float[Array, "H K"], lower_bound: float
) -> Float32[Array, "*X H K"]:
    """g = lower_bound * sigmoid(exp(a_log) * (f + dt_bias)): the log of the decay, lower_bound < g < 0.

    Kimi K3's gate, with lower_bound = -5. It takes the place of `softplus_gate`; it is not a clamp of it.

    Source: flash-linear-attention `fla/ops/kda/gate.py`, the branch with a lower bound.
    """
    z, a = _gate_inputs(f, a_log, dt_bias)
    return lower_bound * jax.nn.sigmoid(a * z)


def _gate_inputs(
    f: Float[Array, "*X H K"], a_log: Float[Array, "H"], dt_bias: Float[Array, "H K"]
) -> tuple[Float32[Array, "*X H K"], Float32[Array, "... H 1"]]:
    """f + dt_bias, and exp(a_log) shaped to broadcast with it."""
    leading = tuple(range(f.ndim - 2))
    z = f.astype(jnp.float32) + jnp.expand_dims(dt_bias.astype(jnp.float32), leading)
    return z, jnp.expand_dims(jnp.exp(a_log.astype(jnp.float32))[:, None], leading)


def delta_step(
    q: Float32[Array, "B H K"],
    k: Float32[Array, "B H K"],
    v: Float32[Array, "B H V"],
    g: Float32[Array, "B H K"],
    beta: Float32[Array, "B H"],
    state: Float32[Array, "B H K V"],
) -> tuple[Float32[Array, "B H V"], Float32[Array, "B H K V"]]:
    """S <- Diag(exp g) S;  u = beta (v - S^T k);  S <- S + k u^T;  out = S^T q. One token; returns (out, S).

    q is normalised and scaled, k normalised, g <= 0 the log decay per key channel, beta in (0, 1) the write strength.
    The read follows the write. g = 0 and beta = 0 leave S as it was.

    Computed with one pass over S for both reads and one to write it:
        S^T k after the decay = S^T (e^g k);     S^T q after the write = S^T (e^g q) + (q . k) u.

    Source: Kimi Linear (arXiv 2510.26692), eq. 1; flash-linear-attention `naive_recurrent_kda`.
    """
    # The reads are dots: as sums over the key axis XLA's CPU backend takes 25 times as long.
    decay = jnp.exp(g)
    readers = jnp.stack([k * decay, q * decay], axis=2)
    old = jnp.einsum("bhnk,bhkv->bhnv", readers, state, precision=HIGHEST)
    update = beta[..., None] * (v - old[:, :, 0])
    state = decay[..., None] * state + k[..., :, None] * update[..., None, :]
    overlap = jnp.einsum("bhk,bhk->bh", q, k, precision=HIGHEST)
    return old[:, :, 1] + overlap[..., None] * update, state


def delta_scan(
    q: Float32[Array, "B T H K"],
    k: Float32[Array, "B T H K"],
    v: Float32[Array, "B T H V"],
    g: Float32[Array, "B T H K"],
    beta: Float32[Array, "B T H"],
    state: Float32[Array, "B H K V"],
) -> tuple[Float32[Array, "B T H V"], Float32[Array, "B H K V"]]:
    """`delta_step` for each of T tokens, one after the other. Returns (out, the last state)."""

    def step(state, token):
        out, state = delta_step(*token, state)  # pyright: ignore[reportCallIssue]
        return state, out

    state, out = lax.scan(step, state, tuple(jnp.swapaxes(x, 0, 1) for x in (q, k, v, g, beta)))
    return jnp.swapaxes(out, 0, 1), state


def delta_chunked(
    q: Float32[Array, "B T H K"],
    k: Float32[Array, "B T H K"],
    v: Float32[Array, "B T H V"],
    g: Float32[Array, "B T H K"],
    beta: Float32[Array, "B T H"],
    state: Float32[Array, "B H K V"],
    chunk: int = 64,
) -> tuple[Float32[Array, "B T H V"], Float32[Array, "B H K V"]]:
    """What `delta_scan` computes, C = chunk tokens at a time. Returns (out, the last state).

    Within a chunk entered with state S, and G[t] = g[0] + .. + g[t] (t, j count from the chunk's start):

        A[t, j] = beta[t] sum_K k[t] k[j] exp(G[t] - G[j])   for j < t,   else 0
        M[t, j] =         sum_K q[t] k[j] exp(G[t] - G[j])   for j <= t,  else 0
        U  = (I + A)^-1 (beta V - beta (K exp G) S)
        out = (Q exp G) S + M U
        S' = Diag(exp G[C-1]) S + (K exp(G[C-1] - G))^T U

    Everything but the two lines with S runs for all chunks at once. Every exponent is a sum of g over a run of tokens,
    so <= 0 (see `_decayed_products`): no decay overflows, however strong. chunk is 16, 32, 64, 128 and so on.

    Source: Kimi Linear (arXiv 2510.26692), section 3, the chunkwise form; Yang et al. 2024 (arXiv 2406.06484), eq. 8.
    """
    tokens = q.shape[1]
    q, k, v, g, beta = (_into_chunks(x, chunk) for x in (q, k, v, g, beta))
    beta = beta[..., None]
    g = jnp.maximum(g, STRONGEST)

    with jax.named_scope("within_chunks"):
        products, through, after = _decayed_products(jnp.stack([k, q]), k, g)
        own = jnp.einsum("...ck,...ck->...c", q, k, precision=HIGHEST)
        mixing = products[1] + own[..., None] * jnp.eye(chunk, dtype=own.dtype)[(None,) * (own.ndim - 1)]
        inverse = _unit_lower_inverse(beta * products[0])
        from_values = jnp.matmul(inverse, beta * v, precision=HIGHEST)
        from_state = jnp.matmul(inverse, beta * k * jnp.exp(through), precision=HIGHEST)
        readers = jnp.concatenate([from_state, q * jnp.exp(through)], axis=-2)
        writers = k * jnp.exp(after)
        decay = jnp.exp(through[..., -1, :])

    def step(state, chunk_of):
        readers, writers, decay, from_values = chunk_of
        read = jnp.einsum("bhck,bhkv->bhcv", readers, state, precision=HIGHEST)
        update = from_values - read[:, :, :chunk]
        state = decay[..., None] * state + jnp.einsum("bhck,bhcv->bhkv", writers, update, precision=HIGHEST)
        return state, (update, read[:, :, chunk:])

    with jax.named_scope("across_chunks"):
        state, (update, read) = lax.scan(step, state, (readers, writers, decay, from_values))
    with jax.named_scope("outputs"):
        out = read + jnp.matmul(mixing, update, precision=HIGHEST)
    return _out_of_chunks(out, tokens), state


def _into_chunks(x: Float32[Array, "B T H *X"], chunk: int) -> Float32[Array, "M B H chunk *X"]:
    """Cut T into M chunks, the last one filled with zeros (that is with tokens that do nothing)."""
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % chunk)] + [(0, 0)] * (x.ndim - 2))
    x = x.reshape(x.shape[0], -1, chunk, *x.shape[2:])
    return jnp.moveaxis(x, (1, 3), (0, 2))


def _out_of_chunks(x: Float32[Array, "M B H chunk V"], tokens: int) -> Float32[Array, "B T H V"]:
    x = jnp.moveaxis(x, (0, 2), (1, 3))
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :tokens]


Products = tuple[Float32[Array, "2 *X C C"], Float32[Array, "*X C K"], Float32[Array, "*X C K"]]


def _decayed_products(
    rows: Float32[Array, "2 *X C K"], k: Float32[Array, "*X C K"], g: Float32[Array, "*X C K"]
) -> Products:
    """P[t, j] = sum_K rows[t] k[j] exp(g[j+1] + .. + g[t]) for j < t, else 0.

    Returned with g[0] + .. + g[t] and g[t+1] + .. + g[C-1], by which the next larger block continues: a block is
    halved until TILE tokens are left, and between two halves the exponent is split at the boundary,
        exp(sum from the boundary through t) exp(sum after j up to the boundary),
    both at most 1, so that the square between them is one matrix product. Within a tile the exponent is kept whole.
    """
    size = k.shape[-2]
    if size <= TILE:
        return _decayed_products_of_tile(rows, k, g)
    rows, k, g = (x.reshape(*x.shape[:-2], 2, size // 2, x.shape[-1]) for x in (rows, k, g))
    diagonal, through, after = _decayed_products(rows, k, g)

    later = rows[..., 1, :, :] * jnp.exp(through[..., 1, :, :])[None]
    earlier = k[..., 0, :, :] * jnp.exp(after[..., 0, :, :])
    between = jnp.einsum("n...tk,...jk->n...tj", later, earlier, precision=HIGHEST)
    products = _lower_blocks(diagonal[..., 0, :, :], between, diagonal[..., 1, :, :])

    totals = through[..., -1:, :]
    through = jnp.concatenate([through[..., 0, :, :], totals[..., 0, :, :] + through[..., 1, :, :]], axis=-2)
    after = jnp.concatenate([after[..., 0, :, :] + totals[..., 1, :, :], after[..., 1, :, :]], axis=-2)
    return products, through, after


def _decayed_products_of_tile(
    rows: Float32[Array, "2 *X C K"], k: Float32[Array, "*X C K"], g: Float32[Array, "*X C K"]
) -> Products:
    size = k.shape[-2]
    upto = jnp.tril(jnp.ones((size, size), g.dtype))
    through = jnp.einsum("ts,...sk->...tk", upto, g, precision=HIGHEST)
    after = jnp.einsum("ts,...sk->...tk", 1 - upto, g, precision=HIGHEST)

    before = jnp.tril(jnp.ones((size, size), bool), -1)[(None,) * (k.ndim - 2) + (..., None)]
    exponent = jnp.where(before, through[..., :, None, :] - through[..., None, :, :], -jnp.inf)
    products = jnp.sum(rows[..., :, None, :] * (k[..., None, :, :] * jnp.exp(exponent))[None], axis=-1)
    return products, through, after


def _unit_lower_inverse(a: Float32[Array, "*X C C"]) -> Float32[Array, "*X C C"]:
    """(I + A)^-1 for strictly lower triangular A: by halves down to tiles, by substitution within a tile.

        [[P, 0], [Q, R]]^-1 = [[P^-1, 0], [-R^-1 Q P^-1, R^-1]]

    Every intermediate block is a block of the result, so nothing grows that the result does not hold. The doubling
    series (I - A)(I + A^2)(I + A^4).. raises A to high powers instead, and fails where keys resemble each other.
    """
    size = a.shape[-1]
    if size <= TILE:
        return _unit_lower_inverse_of_tile(a)
    half = size // 2
    first, second = _unit_lower_inverse(jnp.stack([a[..., :half, :half], a[..., half:, half:]]))
    below = jnp.matmul(a[..., half:, :half], first, precision=HIGHEST)
    return _lower_blocks(first, -jnp.matmul(second, below, precision=HIGHEST), second)


def _unit_lower_inverse_of_tile(a: Float32[Array, "*X C C"]) -> Float32[Array, "*X C C"]:
    """Forward substitution on the identity: once row j is final, every row t below loses A[t, j] times it."""
    inverse = jnp.broadcast_to(jnp.eye(a.shape[-1], dtype=a.dtype), a.shape)
    for j in range(a.shape[-1] - 1):
        inverse = inverse - a[..., :, j : j + 1] * inverse[..., j : j + 1, :]
    return inverse


def _lower_blocks(
    upper_left: Float32[Array, "*X C C"], lower_left: Float32[Array, "*X C C"], lower_right: Float32[Array, "*X C C"]
) -> Float32[Array, "*X 2*C 2*C"]:
    """[[upper_left, 0], [lower_left, lower_right]]"""
    top = jnp.concatenate([upper_left, jnp.zeros_like(upper_left)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([lower_left, lower_right], axis=-1)], axis=-2)
