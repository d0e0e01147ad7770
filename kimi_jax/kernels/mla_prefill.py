"""MLA's expanded attention of many query tokens a row (flash attention), as one mergeable partial result.

The sibling of `ops.attention.attend_expanded`. Knows how many leading slots a query sees, not their positions.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int32

from kimi_jax.kernels.approximate import LOG2E
from kimi_jax.kernels.device import hopper_or_newer
from kimi_jax.ops.linear import project

EXPANDED_BYTES = 2**30  # of keys and values held at a time, unless one block of keys is more
SHORTEST_STRETCH = 4096  # slots; a shorter one would read and write the running result too often
POWER = "{ .reg .f32 x; fma.rn.f32 x, $1, $2, $3; ex2.approx.ftz.f32 $0, x; }"
WIDEST = 320  # K + P + V: two blocks of 128 keys and values and one of queries fill a multiprocessor's memory


def supports(q_nope: Float[Array, "B T H K"], q_pe: Float[Array, "B T H P"], v_b: Float[Array, "H V R"]) -> bool:
    """Whether `attend_expanded_tiles` can stand in: many tokens in bfloat16, and widths that matrix units take."""
    widths = q_nope.shape[-1], q_pe.shape[-1], v_b.shape[1]
    fits = all(w >= 16 and w & (w - 1) == 0 for w in widths) and sum(widths) <= WIDEST
    return q_nope.shape[1] > 1 and fits and q_nope.dtype == jnp.bfloat16 and hopper_or_newer()


def attend_expanded_tiles(
    q_nope: Float[Array, "B T H K"],
    q_pe: Float[Array, "B T H P"],
    rows: Float[Array, "B 1 S Z"],
    seen: Int32[Array, "B T"],
    k_b: Float[Array, "H K R"],
    v_b: Float[Array, "H V R"],
    scale: float,
    *,
    stretch: int | None = None,
    query_block: int | None = None,
    key_block: int | None = None,
    warps: int | None = None,
    stages: int = 2,
    interpret: bool = False,
) -> tuple[Float32[Array, "B T H V"], Float32[Array, "B T H"]]:
    """Attention over keys and values expanded from the latents, in tiles of queries and keys.

        score_s = scale (q_nope . W_UK lat_s + q_pe . pe_s)
        out = sum_s softmax(score)_s W_UV lat_s             lse = ln sum_s exp(score_s)

    over the slots s < seen[b, t] of row = (lat, pe). Keys and values are expanded one stretch of the cache at a time,
    up to the last stretch that any query sees; a tile of queries folds the blocks of keys up to the last one that it
    sees into what the stretches before gave. seen = 0 gives out = 0 and lse = -inf.

    Floor: 2 (K + P + V) operations a head and pair of query and slot seen, and 2 R (K + V) a head and slot expanded.
    Source: DeepSeek-V2 (arXiv 2405.04434), equations 9 to 19, without the rotation; the tiles as in FlashAttention-2
    (arXiv 2307.08691).
    """
    (B, T, H, K), (V, latent), S = q_nope.shape, v_b.shape[1:], rows.shape[2]
    query_block = query_block or max(64, min(128, pl.next_power_of_2(T)))
    key_block = key_block or query_block
    affordable = EXPANDED_BYTES // (B * H * (K + V) * rows.dtype.itemsize) // key_block * key_block
    size = min(S, stretch or max(key_block, min(affordable, max(SHORTEST_STRETCH, T))))
    attend = functools.partial(
        _attend_stretch,
        scale=scale * LOG2E,
        query_block=query_block,
        key_block=key_block,
        warps=warps or query_block // 16,
        stages=stages,
        interpret=interpret,
    )

    def step(i: int | Array, prior: tuple[Array, ...]):
        begin = jnp.int32(i * size)
        start = jnp.minimum(begin, S - size)  # the last stretch may reach back: its first slots are skipped
        lat = lax.dynamic_slice(rows, (0, 0, start, 0), (B, 1, size, latent))[:, 0]
        here = jnp.clip(seen - begin, 0, size)
        k, v = project(lat, k_b), project(lat, v_b)
        return attend(q_nope, q_pe, rows, k, v, here, jnp.stack([begin, begin - start]), prior)

    first = step(0, ())
    return first if size == S else lax.fori_loop(1, (seen.max() + size - 1) // size, step, first)


def _attend_stretch(
    q_nope: Float[Array, "B T H K"],
    q_pe: Float[Array, "B T H P"],
    rows: Float[Array, "B 1 S Z"],
    k: Float[Array, "B C H K"],
    v: Float[Array, "B C H V"],
    seen: Int32[Array, "B T"],
    begins: Int32[Array, "2"],
    prior: tuple[Array, ...],
    *,
    scale: float,
    query_block: int,
    key_block: int,
    warps: int,
    stages: int,
    interpret: bool,
) -> tuple[Float32[Array, "B T H V"], Float32[Array, "B T H"]]:
    """One stretch of the cache, which starts at begins[0] of rows and begins[1] of k and v; prior: out and lse before.

    seen counts within the stretch. The memory of prior becomes the result's.
    """
    B, T, H, _ = q_nope.shape
    arrays = (q_nope, q_pe, rows, k, v, seen, begins)
    return pl.pallas_call(
        functools.partial(_attend_tile, scale=scale, query_block=query_block, key_block=key_block, interpret=interpret),
        out_shape=(
            jax.ShapeDtypeStruct((B, T, H, v.shape[-1]), jnp.float32),
            jax.ShapeDtypeStruct((B, T, H), jnp.float32),
        ),
        grid=(pl.cdiv(T, query_block), H, B),
        input_output_aliases={len(arrays) + i: i for i in range(len(prior))},
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name="mla_attend_tile",
    )(*arrays, *prior)


def _attend_tile(
    q_nope_ref, q_pe_ref, rows_ref, k_ref, v_ref, seen_ref, begins_ref, *refs, scale, query_block, key_block, interpret
):
    *prior_refs, out_ref, lse_ref = refs
    tile, h, b = pl.num_programs(0) - 1 - pl.program_id(0), pl.program_id(1), pl.program_id(2)  # long tiles first
    T, P, V = q_pe_ref.shape[1], q_pe_ref.shape[3], v_ref.shape[3]
    some = pl.ds(tile * query_block, query_block)
    live = tile * query_block + jnp.arange(query_block, dtype=jnp.int32) < T
    seen = plgpu.load(seen_ref.at[b, some], mask=live, other=0)
    last = jnp.max(seen)

    def attend():
        q_nope = plgpu.load(q_nope_ref.at[b, some, h, :], mask=live[:, None], other=0.0)
        q_pe = plgpu.load(q_pe_ref.at[b, some, h, :], mask=live[:, None], other=0.0)
        row, expanded = begins_ref[0], begins_ref[1]

        def fold(i, carry, masked):
            top, total, weighted = carry
            slots = i * key_block + jnp.arange(key_block, dtype=jnp.int32)
            near = functools.partial(plgpu.load, mask=(slots < last)[:, None], other=0.0)
            load = near if masked else plgpu.load
            at = pl.ds(expanded + i * key_block, key_block)
            k = load(k_ref.at[b, at, h, :])
            pe_at = pl.ds(row + i * key_block, key_block)
            pe = load(rows_ref.at[b, jnp.int32(0), pe_at, pl.ds(rows_ref.shape[3] - P, P)])
            scores = _dot(q_nope, k, 1) + _dot(q_pe, pe, 1)
            if masked:
                scores = jnp.where(slots[None, :] < seen[:, None], scores, -jnp.inf)
            new_top = jnp.maximum(top, jnp.max(scores, axis=1) * scale)
            keep = jnp.exp2(top - new_top)
            p = _power(scores, scale, new_top[:, None], interpret)
            v = load(v_ref.at[b, at, h, :])
            weighted = weighted * keep[:, None] + _dot(p.astype(v.dtype), v, 0)
            return new_top, total * keep + jnp.sum(p, axis=1), weighted

        if prior_refs:
            lse = plgpu.load(prior_refs[1].at[b, some, h], mask=live, other=-jnp.inf)
            weighted = plgpu.load(prior_refs[0].at[b, some, h, :], mask=live[:, None], other=0.0)
            carry = jnp.maximum(lse * LOG2E, -1e30), jnp.where(lse == -jnp.inf, 0.0, 1.0), weighted
        else:
            zero = jnp.zeros((query_block,), jnp.float32)
            carry = zero - 1e30, zero, jnp.zeros((query_block, V), jnp.float32)
        whole = jnp.min(jnp.where(live, seen, last)) // key_block  # blocks that every query sees all of
        carry = lax.fori_loop(0, whole, functools.partial(fold, masked=False), carry)
        blocks = (last + key_block - 1) // key_block
        top, total, weighted = lax.fori_loop(whole, blocks, functools.partial(fold, masked=True), carry)
        safe = jnp.where(total != 0, total, 1.0)
        plgpu.store(out_ref.at[b, some, h, :], weighted / safe[:, None], mask=live[:, None])
        lse = jnp.where(total != 0, (top + jnp.log2(safe)) / LOG2E, -jnp.inf)
        plgpu.store(lse_ref.at[b, some, h], lse, mask=live)

    if prior_refs:
        pl.when(last > 0)(attend)
    else:
        attend()


def _power(scores, scale, top, interpret):
    """2^(scale scores - top), 0 below 2^-126: two instructions, where exp2 and its argument take six."""
    if interpret:
        return jnp.exp2(scores * scale - top)
    args = [scores, jnp.full(scores.shape, scale, jnp.float32), jnp.broadcast_to(-top, scores.shape)]
    (p,) = plgpu.elementwise_inline_asm(
        POWER, args=args, constraints="=f,f,f,f", pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(scores.shape, jnp.float32)],
    )  # fmt: skip
    return p


def _dot(a, b, over):
    """a[m, i] times b, summed over b's axis `over`; float32."""
    return lax.dot_general(a, b, (((1,), (over,)), ((), ())), preferred_element_type=jnp.float32)
