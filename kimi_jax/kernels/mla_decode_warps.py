"""What warps of the Hopper MLA decode decide each for itself: whether a maximum moves, whether sums are rescaled.

Pallas has no branch that one warp takes alone, so this is written in Mosaic's own operations, register by register.
Knows which thread of a warpgroup holds what (`plgpu.Layout.WGMMA`), not where it comes from or goes
(`kernels.mla_decode_roles`).
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, nvvm, scf, vector

WGMMA = plgpu.Layout.WGMMA
BY_ROW, BY_COLUMN = WGMMA.reduce(1), WGMMA.reduce(0)
SLACK = 8.0  # weights of 2^8 are as good as any in floating point


def weigh(scores: Any, top: Any, total: Any, scale: float) -> tuple[Any, Any, Any, Any]:
    """weights = 2^(scale scores - new_top)    keep = 2^(top - new_top)    new_total = keep total + sum weights

    scores: [64, 64], head by slot; top, total: [64]. A head's top moves, to its largest scaled score, only where that
    exceeds it by more than SLACK. To know the largest, threads must ask each other; whether any exceeds, a warp knows
    at once, of its 16 heads, and mostly none does. Returns weights (bfloat16), new_top, keep, and a new_total of which
    each of the four threads of a row holds a part (`settle`).
    """
    row = plgpu.ShapeDtypeStruct(top.shape, jnp.float32, layout=BY_ROW)
    weights = plgpu.ShapeDtypeStruct(scores.shape, jnp.bfloat16, layout=WGMMA)
    in_registers: Any = plgpu.inline_mgpu(arg_types=(WGMMA, BY_ROW, BY_ROW), return_type=(weights, row, row, row))

    @in_registers
    def inline(_, scores, top, total):
        pairs = scores.registers.reshape(-1, 2)
        of_rows = [[_part(pair, k) for pair in pairs[:, r] for k in range(2)] for r in range(2)]
        tops, totals = ([_part(x, 0) for x in array.registers.flat] for array in (top, total))
        weights, *rows = weigh_rows(of_rows, tops, totals, scale)
        by_column = [weights[r][c] for c in range(len(pairs)) for r in range(2)]
        return _like(scores, by_column), *(_like(top, [_joined(x) for x in row]) for row in rows)

    return inline(scores, top, total)


def weigh_rows(scores, tops, totals, scale):
    """What `weigh` says, of one thread's part of its two rows."""
    largest = [arith.mulf(_tree(arith.maximumf, row), _f32(scale)) for row in scores]
    far = [_exceeds(x, top) for x, top in zip(largest, tops, strict=True)]

    def moved():
        of_row = [_over_row(arith.maximumf, x) for x in largest]
        new = [arith.select(_exceeds(x, top), x, top) for x, top in zip(of_row, tops, strict=True)]
        return [*new, *(_exp2(arith.subf(top, x)) for top, x in zip(tops, new, strict=True))]

    *new_tops, keep, other_keep = _choose(_any_of_warp(arith.ori(*far)), moved, [*tops, _f32(1), _f32(1)])
    weights, new_totals = [], []
    for row, new_top, total, k in zip(scores, new_tops, totals, (keep, other_keep), strict=True):
        down = arith.negf(new_top)
        p = [_exp2(math.fma(s, _f32(scale), down)) for s in row]
        weights.append([_packed(*p[c : c + 2]) for c in range(0, len(p), 2)])
        new_totals.append(math.fma(total, k, _tree(arith.addf, p)))
    return weights, new_tops, [keep, other_keep], new_totals


def settle(total: Any) -> Any:
    """The sum of what the four threads of a row hold."""
    row = plgpu.ShapeDtypeStruct(total.shape, jnp.float32, layout=BY_ROW)
    in_registers: Any = plgpu.inline_mgpu(arg_types=(BY_ROW,), return_type=row)

    @in_registers
    def inline(_, total):
        return _like(total, [_joined(_over_row(arith.addf, _part(x, 0))) for x in total.registers.flat])

    return inline(total)


def rescale(sums: Any, keep: Any) -> Any:
    """sums [M, N] times keep [N]; nothing to do for a warp all of whose factors are 1."""
    result = plgpu.ShapeDtypeStruct(sums.shape, jnp.float32, layout=WGMMA)
    in_registers: Any = plgpu.inline_mgpu(arg_types=(WGMMA, BY_COLUMN), return_type=result)

    @in_registers
    def inline(_, sums, keep):
        return _like(sums, rescale_columns(list(sums.registers.flat), list(keep.registers.flat)))

    return inline(sums, keep)


def rescale_columns(pairs, factors):
    """What `rescale` says, of one thread's part: pairs of neighbours of a row, their two rows in turn."""
    changed = [arith.cmpf(arith.CmpFPredicate.UNE, _part(f, k), _f32(1)) for f in factors for k in range(2)]

    def scaled():
        return [arith.mulf(pair, factors[n // 2 % len(factors)]) for n, pair in enumerate(pairs)]

    return _choose(_any_of_warp(_tree(arith.ori, changed)), scaled, pairs)


def heads_only(query: Any, heads: int) -> Any:
    """query [64, K] with zeros in the rows that are no head's, which send no warp the long way where all is kept."""
    if heads == query.shape[0]:
        return query
    result = plgpu.ShapeDtypeStruct(query.shape, query.dtype, layout=WGMMA)
    in_registers: Any = plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=result)

    @in_registers
    def inline(_, query):
        thread = arith.remui(mgpu.utils.thread_idx(), _i32(128))
        warp, lane = arith.divui(thread, _i32(32)), arith.remui(thread, _i32(32))
        row = arith.addi(arith.muli(warp, _i32(16)), arith.divui(lane, _i32(4)))
        here = [arith.cmpi(arith.CmpIPredicate.ult, arith.addi(row, _i32(8 * r)), _i32(heads)) for r in range(2)]
        pairs = list(query.registers.flat)
        zero = mgpu.utils.c(0.0, pairs[0].type)
        return _like(query, [arith.select(here[n % 2], pair, zero) for n, pair in enumerate(pairs)])

    return inline(query)


def meet() -> None:
    """Until all four warps of the warpgroup are here; a `commit_smem` that waits for no memory."""
    in_registers: Any = plgpu.inline_mgpu()

    @in_registers
    def inline(_):
        mgpu.utils.warpgroup_barrier()

    inline()


def _exceeds(largest, top):
    return arith.cmpf(arith.CmpFPredicate.OGT, largest, arith.addf(top, _f32(SLACK)))


def _tree(op, xs):
    xs = list(xs)
    while len(xs) > 1:
        xs = [op(*xs[n : n + 2]) if n + 1 < len(xs) else xs[n] for n in range(0, len(xs), 2)]
    return xs[0]


def _over_row(op, x):
    """Of the four neighbouring threads of a row."""
    for distance in (1, 2):
        x = op(x, mgpu.utils.shfl_bfly(x, distance))
    return x


def _any_of_warp(condition):
    return nvvm.vote_sync(_i32(-1), condition, ir.Attribute.parse("#nvvm.vote_sync_kind<any>"))


def _choose(condition, make, old):
    """What `make` makes where the condition holds, else the old."""
    branch: Any = scf.IfOp(condition, [x.type for x in old], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        scf.yield_(make())
    with ir.InsertionPoint(branch.else_block):
        scf.yield_(old)
    return list(branch.results)


def _exp2(x) -> Any:
    return llvm.inline_asm(ir.F32Type.get(), [x], "ex2.approx.ftz.f32 $0, $1;", "=f,f")


def _f32(x):
    return arith.constant(ir.F32Type.get(), float(x))


def _i32(x):
    return arith.constant(ir.IntegerType.get_signless(32), x)


def _part(register, k):
    return vector.extract(register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([k]))


def _joined(*xs):
    return vector.from_elements(ir.VectorType.get((len(xs),), xs[0].type), list(xs))


def _packed(a, b):
    return arith.truncf(ir.VectorType.get((2,), ir.BF16Type.get()), _joined(a, b))


def _like(array, registers):
    """An array that lies in the threads as another does."""
    new = np.empty(len(registers), object)
    new[:] = registers
    return mgpu.FragmentedArray(_registers=new.reshape(array.registers.shape), _layout=array.layout, _is_signed=None)
