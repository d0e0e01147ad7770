"""KDA's middle for one token a row on Hopper: the state comes into shared memory and goes back by asynchronous copies.

The sibling of `kernels.delta_step` for GPUs with TMA; same contract.
"""

import functools
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32

from kimi_jax.kernels.gates import log_decay

WIDTH = 128  # of a head: a value a thread
PART = 32  # rows of the state that are copied, read and written together
LAST = WIDTH // PART - 1
AGAINST, QUERY, KEY, DECAY = range(4)  # `Memory.keys`: read with -beta k e^g and q e^g, written with k and e^g
# Thread n holds element n of every vector, and column n of the state: it reads and writes what is its own.
LANES = plgpu.Layout.TILED(plgpu.Tiling(((WIDTH,), (32,), (1,))), (-3,), (-2,), -1)
COLUMNS = plgpu.Layout.TILED(plgpu.Tiling(((1, WIDTH), (32,), (1,))), (-3,), (-2,), -1)


class Memory(NamedTuple):
    """A program's shared memory; barriers that say that a part of the state has come; a barrier for all threads."""

    state: Any  # [K, K]
    keys: Any  # [4, K]: what row k of the state is multiplied by, by AGAINST, QUERY, KEY and DECAY
    full: Any
    met: Any


class Small(NamedTuple):
    """What a head of one row has beside its state: lists by q, k, v and by tap; scalars b, a_log, count."""

    inputs: list[list[Any]]
    taps: list[list[Any]]
    f: Any
    dt_bias: Any
    gate: Any
    o_norm: Any
    b: Any
    a_log: Any
    count: Any


def supports(qkv: Float[Array, "B T H 3 K"]) -> bool:
    """Whether `mix_heads_step_hopper` can stand in: one token in bfloat16, and a head a warpgroup wide."""
    return qkv.shape[1] == 1 and qkv.shape[-1] == WIDTH and qkv.dtype == jnp.bfloat16


def mix_heads_step_hopper(
    qkv: Float[Array, "B 1 H 3 K"],
    f: Float[Array, "B 1 H K"],
    b: Float[Array, "B 1 H"],
    gate: Float[Array, "B 1 H K"],
    conv_weight: Float[Array, "H 3 K W"],
    a_log: Float32[Array, " H"],
    dt_bias: Float32[Array, "H K"],
    o_norm: Float[Array, " K"],
    conv_state: Float[Array, "B W-1 H 3 K"],
    recurrent: Float32[Array, "B H K K"],
    counts: Int32[Array, " B"],
    *,
    lower_bound: float | None,
    eps: float,
    interpret: Any = None,
) -> tuple[Float[Array, "B 1 H K"], Float[Array, "B W-1 H 3 K"], Float32[Array, "B H K K"]]:
    """S <- Diag(e^g) S + k u^T;  out = RMS(S^T q) sigmoid(gate), as `delta_step.mix_heads_step`, which has the letters.

    A warpgroup owns one head of one row; its state of K^2 float32 is on its way while the K-long part is computed, and
    comes and goes in parts. Three of them fit a multiprocessor, so that one computes while others copy. Both states are
    changed in place; a row with counts[b] = 0 keeps them bit for bit.

    interpret: `plgpu.InterpretGPUParams()` runs on a CPU.

    Floor: 8 B H K^2 bytes. Source: Kimi Linear (arXiv 2510.26692), eq. 1.
    """
    B, _, H, _, K = qkv.shape
    # Only what is given as a reference can be changed in place.
    history, state = jax.new_ref(conv_state), jax.new_ref(recurrent)
    out = plgpu.kernel(
        functools.partial(_mix_head, lower_bound=lower_bound, eps=eps),
        out_type=jax.ShapeDtypeStruct((B, 1, H, K), qkv.dtype),
        grid=(H, B),
        grid_names=("head", "row"),
        scratch_types=[
            Memory(
                plgpu.SMEM((K, K), jnp.float32),
                plgpu.SMEM((4, K), jnp.float32),
                plgpu.Barrier(num_barriers=K // PART),
                plgpu.Barrier(),
            )
        ],
        # No barriers between loads and stores: all that the threads share is `keys`, committed once.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
        kernel_name="kda_mix_heads_step_hopper",
    )(qkv, f, b, gate, conv_weight, a_log, dt_bias, o_norm, history, state, counts)
    return out, jax.freeze(history), jax.freeze(state)


def _mix_head(
    qkv_ref, f_ref, b_ref, gate_ref, conv_weight_ref, a_log_ref, dt_bias_ref, o_norm_ref, conv_ref, state_ref,
    counts_ref, out_ref, mem: Memory, *, lower_bound, eps,
):  # fmt: skip
    h, row = lax.axis_index("head"), lax.axis_index("row")
    K, taps = mem.state.shape[0], conv_weight_ref.shape[-1]
    small = Small(
        inputs=[
            [*(_vector(conv_ref.at[row, j, h, i]) for j in range(taps - 1)), _vector(qkv_ref.at[row, 0, h, i])]
            for i in range(3)
        ],
        taps=[[_vector(conv_weight_ref.at[h, i, :, j]) for j in range(taps)] for i in range(3)],
        f=_vector(f_ref.at[row, 0, h]),
        dt_bias=_vector(dt_bias_ref.at[h]),
        gate=_vector(gate_ref.at[row, 0, h]),
        o_norm=_vector(o_norm_ref),
        b=b_ref[row, 0, h],
        a_log=a_log_ref[h],
        count=counts_ref[row],
    )
    # Behind the small loads: what is asked for after the state comes after it.
    for n in range(K // PART):
        plgpu.copy_gmem_to_smem(state_ref.at[row, h, _part(n)], mem.state.at[_part(n)], mem.full.at[n])
    plgpu.barrier_arrive(mem.met)  # without it the compiler would wait for one load before it starts the next
    plgpu.barrier_wait(mem.met)
    scaled_v, overlap = _prepare(small, mem.keys, lower_bound)
    update, queried, last = _read(mem, scaled_v)

    @pl.when(small.count > 0)
    def _live():
        _write(mem, update, last, state_ref.at[row, h])
        for i, inputs in enumerate(small.inputs):
            for j, (old, new) in enumerate(pairwise(inputs)):
                conv_ref[row, j, h, i, :] = new.astype(old.dtype)
        out = (queried + overlap * update).astype(out_ref.dtype).astype(jnp.float32)
        weighed = out * lax.rsqrt(jnp.sum(out * out) / K + eps) * small.o_norm.astype(jnp.float32)
        out_ref[row, 0, h, :] = (weighed * _sigmoid(small.gate.astype(jnp.float32))).astype(out_ref.dtype)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(small.count <= 0)
    def _resting():
        out_ref[row, 0, h, :] = jnp.zeros((K,), out_ref.dtype)


def _vector(ref):
    return plgpu.load(ref, layout=LANES, optimized=False)  # pyright: ignore[reportCallIssue]: an argument less since 0.12


def _sigmoid(x):
    return 1.0 / (1.0 + jnp.exp(-x))


def _prepare(small: Small, keys, lower_bound):
    """beta v and q . k of a head; -beta k e^g, q e^g, k and e^g go into `keys`, q and k normalised and q scaled.

    So nothing is left to do between the last of the state and the update: v and beta alone would be computed there.
    """

    def convolved(inputs, taps):
        dtype = inputs[-1].dtype
        y = sum(
            tap.astype(jnp.float32) * x.astype(dtype).astype(jnp.float32) for tap, x in zip(taps, inputs, strict=True)
        )
        return (y * _sigmoid(y)).astype(dtype).astype(jnp.float32)

    q, k, v = (convolved(inputs, taps) for inputs, taps in zip(small.inputs, small.taps, strict=True))
    z = small.f.astype(jnp.float32) + small.dt_bias
    decay = jnp.exp(log_decay(z, jnp.exp(small.a_log), lower_bound))
    beta = _sigmoid(small.b.astype(jnp.float32))
    qq, kk, qk = jnp.sum(q * q), jnp.sum(k * k), jnp.sum(q * k)
    of_q, of_k = lax.rsqrt(qq + 1e-6) * WIDTH**-0.5, lax.rsqrt(kk + 1e-6)
    q, k, overlap = q * of_q, k * of_k, qk * of_q * of_k
    for which, x in ((AGAINST, k * decay * -beta), (QUERY, q * decay), (KEY, k), (DECAY, decay)):
        keys[which, :] = x
    plgpu.commit_smem()
    return beta * v, overlap


def _part(n):
    return pl.ds(n * PART, PART)


def _rows(mem: Memory, n):
    """Part n of the state."""
    return plgpu.load(mem.state.at[_part(n)], layout=COLUMNS, optimized=False)  # pyright: ignore[reportCallIssue]: as above


def _key(mem: Memory, which, n):
    """What part n of the state is multiplied by: an element of one of the `keys` for a row."""
    ref = mem.keys.at[which, _part(n)]
    key = plgpu.load(ref, layout=COLUMNS.reduce(1), optimized=False)  # pyright: ignore[reportCallIssue]: as above
    return lax.broadcast_in_dim(key, (PART, WIDTH), (0,))


def _read(mem: Memory, scaled_v):
    """u = beta (v - S^T (e^g k)) and S^T (e^g q), part by part as they come; the last part, which stays in registers.

    Of a row without a token too: no program may end before its copies have.
    """

    def add(n, sums):
        plgpu.barrier_wait(mem.full.at[n])
        rows = _rows(mem, n)
        more = [jnp.sum(_key(mem, which, n) * rows, axis=0) for which in (AGAINST, QUERY)]
        return [total + x for total, x in zip(sums, more, strict=True)], rows

    zero = plgpu.layout_cast(jnp.zeros((WIDTH,), jnp.float32), LANES)
    sums = lax.fori_loop(0, LAST, lambda n, sums: add(n, sums)[0], [scaled_v, zero])
    (update, queried), last = add(LAST, sums)
    return update, queried, last


def _write(mem: Memory, update, last, state_ref):
    """S <- Diag(e^g) S + k u^T, the last part first; each is on its way back while the next is computed."""
    update = lax.broadcast_in_dim(update, (PART, WIDTH), (1,))

    def put(n, rows):
        mem.state[_part(n), :] = _key(mem, DECAY, n) * rows + _key(mem, KEY, n) * update
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(mem.state.at[_part(n)], state_ref.at[_part(n)])

    put(LAST, last)
    pl.loop(0, LAST)(lambda n: put(n, _rows(mem, n)))
