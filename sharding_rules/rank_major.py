"""The other way to split a merged projection, as GPU engines store it: each rank holds its own slice of every part.

    logical      [ part 0          | part 1          ]                         one contiguous matrix
    rank-major   [ p0_0 p1_0 | p0_1 p1_1 | ... | p0_n-1 p1_n-1 ]               what n such shards gather to

Both have the same shape, so a missing restore fails silently: at 16 ranks only one row in sixteen is in place. These
two functions go between them. They take numpy and JAX arrays, inside and outside of compiled code.

Source: the merged-column layers of vLLM (`MergedColumnParallelLinear`) and their gather.
"""

from collections.abc import Sequence
from typing import Any


def rank_major_to_logical(x: Any, parts: Sequence[int], ranks: int, axis: int = -1) -> Any:
    """[p0_0 p1_0 p0_1 p1_1 ...] -> [p0 p1 ...] along `axis`: shards gathered in rank order become the merged array.

    parts: sizes of the merged parts, such as (q_lora, kv_lora + rope); ranks: how many shards there are.

    Raises ValueError for a part that the ranks do not divide, and for a width which is not the sum of the parts.
    """
    axis = _checked(x, parts, ranks, axis)
    shards = x.reshape(*x.shape[:axis], ranks, -1, *x.shape[axis + 1 :])
    restored, first = [], 0
    for size in parts:
        own = shards[(slice(None),) * (axis + 1) + (slice(first, first + size // ranks),)]
        restored.append(own.reshape(*x.shape[:axis], size, *x.shape[axis + 1 :]))
        first += size // ranks
    return x.__array_namespace__().concat(restored, axis=axis)


def logical_to_rank_major(x: Any, parts: Sequence[int], ranks: int, axis: int = -1) -> Any:
    """[p0 p1 ...] -> [p0_0 p1_0 p0_1 p1_1 ...] along `axis`: the inverse of `rank_major_to_logical`, same errors."""
    axis = _checked(x, parts, ranks, axis)
    slices, first = [], 0
    for size in parts:
        part = x[(slice(None),) * axis + (slice(first, first + size),)]
        slices.append(part.reshape(*x.shape[:axis], ranks, size // ranks, *x.shape[axis + 1 :]))
        first += size
    return x.__array_namespace__().concat(slices, axis=axis + 1).reshape(x.shape)


def _checked(x: Any, parts: Sequence[int], ranks: int, axis: int) -> int:
    """The axis counted from the front, if the sizes fit."""
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: at least 1 is wanted")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis={axis}: x has {x.ndim} axes")
    uneven = [size for size in parts if size % ranks]
    if uneven:
        do = [n for n in range(1, min(parts) + 1) if all(size % n == 0 for size in parts)]
        raise ValueError(
            f"parts={tuple(parts)}: {uneven[0]} does not divide by ranks={ranks}; these do: {', '.join(map(str, do))}"
        )
    if x.shape[axis] != sum(parts):
        raise ValueError(
            f"x has {x.shape[axis]} along axis {axis}, but parts={tuple(parts)} sum to {sum(parts)}: it is truncated, "
            "or not this projection"
        )
    return axis % x.ndim
