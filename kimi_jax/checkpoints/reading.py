"""Bytes of files into boxes of parameters: each wanted byte once, no file mapped, nothing held but the destination.

Files are read, not mapped: mapped pages count as resident memory. Must not know hub names, configs or devices.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from operator import add, lt, sub
from typing import BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from kimi_jax.checkpoints.headers import Stored
from kimi_jax.checkpoints.matching import SCALE_BLOCK, Source
from kimi_jax.checkpoints.names import Piece, Shape

NUMPY = {
    "U8": np.dtype(np.uint8),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
DIRECT_RUN = 16 << 10  # bytes; shorter runs cost more as calls than as a copy
CHUNK = 8 << 20  # bytes that are held while they are cast or dealt out
ALIGNMENT = 64  # bytes; XLA on CPU takes such a buffer as it is


class Box(NamedTuple):
    """The elements from `begin` up to `end` along each axis."""

    begin: Shape
    end: Shape

    @property
    def shape(self) -> Shape:
        """Its length along each axis."""
        return tuple(map(sub, self.end, self.begin))

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(map(sub, self.end, self.begin))

    def meet(self, other: "Box") -> "Box | None":
        """What both hold; None if that is nothing."""
        begin = tuple(map(max, self.begin, other.begin))
        end = tuple(map(min, self.end, other.end))
        return Box(begin, end) if all(map(lt, begin, end)) else None

    def moved(self, by: Sequence[int]) -> "Box":
        """The same box, so far along each axis."""
        return Box(tuple(map(add, self.begin, by)), tuple(map(add, self.end, by)))

    def slices(self, origin: Sequence[int]) -> tuple[slice, ...]:
        """This box in an array whose first element is at `origin`."""
        return tuple(map(slice, map(sub, self.begin, origin), map(sub, self.end, origin)))


class Target(NamedTuple):
    """An array to fill: a box of a parameter."""

    box: Box
    array: np.ndarray


def aligned_zeros(shape: Shape, dtype: np.dtype) -> np.ndarray:
    """Like np.zeros, which costs nothing until it is touched, but placed so that XLA on CPU need not copy it."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.zeros(nbytes + ALIGNMENT, np.uint8)
    first = -raw.ctypes.data % ALIGNMENT
    return raw[first : first + nbytes].view(dtype).reshape(shape)


def fill(source: Source, targets: Sequence[Target], count: Callable[[int], object]) -> None:
    """Put what `source` holds into the targets that overlap its piece; `count` is told the bytes read."""
    piece, stored = source.piece, source.stored
    overlaps = _overlaps(piece, [target.box for target in targets])
    if not overlaps:
        return
    with stored.file.open("rb", buffering=0) as stream:
        if not any(_needs_scratch(source, overlap, targets[overlap.target].array.dtype) for overlap in overlaps):
            for overlap in overlaps:
                outer = _outer_axes(piece.view, overlap.box.shape, overlap.target_shape)
                count(_read_box(stream, stored, piece.view, overlap.box, _part(targets, overlap), outer))
            return
        scale = None if source.scale is None else read_whole(source.scale).astype(np.float32)
        for whole, wanted in _shared_reads(overlaps):
            for chunk in _chunks(whole, CHUNK // NUMPY[stored.dtype].itemsize):
                values = np.empty(chunk.shape, NUMPY[stored.dtype])
                outer = _outer_axes(piece.view, chunk.shape, chunk.shape)
                count(_read_box(stream, stored, piece.view, chunk, values, outer))
                if scale is not None:
                    values = values.astype(np.float32) * _scales(piece, scale, stored.shape[-1], chunk)
                for overlap in wanted:
                    if both := overlap.box.meet(chunk):
                        _part(targets, overlap)[both.slices(overlap.box.begin)] = values[both.slices(chunk.begin)]


def deals_out(source: Source, regions: Sequence[Box], dtype: np.dtype) -> bool:
    """True if the source is read once for several regions together, so that their arrays must be there all at once."""
    overlaps = _overlaps(source.piece, regions)
    scratch = any(_needs_scratch(source, overlap, dtype) for overlap in overlaps)
    return scratch and any(len(served) > 1 for _, served in _shared_reads(overlaps))


def read_whole(stored: Stored) -> np.ndarray:
    """One whole tensor, for the small ones."""
    array = np.empty(stored.shape, NUMPY[stored.dtype])
    with stored.file.open("rb", buffering=0) as stream:
        _read_box(stream, stored, stored.shape, Box((0,) * array.ndim, stored.shape), array, outer=0)
    return array


class _Overlap(NamedTuple):
    """Where a piece meets one target: a box of the piece's view, and the same elements as part of the target."""

    target: int
    box: Box
    part: Box
    target_shape: Shape


def _overlaps(piece: Piece, regions: Sequence[Box]) -> list[_Overlap]:
    own = Box(piece.start, tuple(map(sum, zip(piece.start, piece.shape, strict=True))))
    to_view = [offset - start for offset, start in zip(piece.offset, piece.start, strict=True)]
    return [
        _Overlap(i, both.moved(to_view), both.moved([-b for b in region.begin]), region.shape)
        for i, region in enumerate(regions)
        if (both := own.meet(region))
    ]


def _needs_scratch(source: Source, overlap: _Overlap, dtype: np.dtype) -> bool:
    """True if the bytes are not just what the target holds, or come in runs too short for a call each."""
    if source.scale is not None or NUMPY[source.stored.dtype] != dtype:
        return True
    shape = overlap.box.shape
    outer = _outer_axes(source.piece.view, shape, overlap.target_shape)
    return outer > 0 and math.prod(shape[outer:]) * dtype.itemsize < DIRECT_RUN


def _outer_axes(view: Shape, shape: Shape, target_shape: Shape) -> int:
    """Leading axes to step through so that a box of `shape` is one run inside, in the file's view and in the target."""
    axes = len(shape)
    while axes > 0 and (axes == len(shape) or view[axes] == shape[axes] == target_shape[axes]):
        axes -= 1
    while axes > 0 and shape[axes - 1] == 1:
        axes -= 1
    return axes


def _shared_reads(overlaps: Sequence[_Overlap]) -> list[tuple[Box, Sequence[_Overlap]]]:
    """Boxes to read, with the overlaps that each serves: one for all if they take most of it, else one each."""
    begins, ends = zip(*(overlap.box for overlap in overlaps), strict=True)
    hull = Box(tuple(map(min, zip(*begins, strict=True))), tuple(map(max, zip(*ends, strict=True))))
    if hull.size <= 2 * sum(overlap.box.size for overlap in overlaps):
        return [(hull, overlaps)]
    return [(overlap.box, [overlap]) for overlap in overlaps]


def _part(targets: Sequence[Target], overlap: _Overlap) -> np.ndarray:
    return targets[overlap.target].array[overlap.part.slices((0,) * len(overlap.target_shape))]


def _read_box(stream: BinaryIO, stored: Stored, view: Shape, box: Box, array: np.ndarray, outer: int) -> int:
    """Read a box of a tensor seen as `view` into an array of the box's shape, run by run -> bytes read.

    Inside the first `outer` axes the elements are one run in the file and in the array.
    """
    strides = [math.prod(view[axis + 1 :]) * array.itemsize for axis in range(len(view))]
    first = stored.begin + sum(begin * stride for begin, stride in zip(box.begin, strides, strict=True))
    for index in np.ndindex(*box.shape[:outer]):
        run = array[index].reshape(-1).view(np.uint8)
        stream.seek(first + sum(i * stride for i, stride in zip(index, strides, strict=False)))
        _read_all(stream, run, stored)
    return array.nbytes


def _read_all(stream: BinaryIO, run: np.ndarray, stored: Stored) -> None:
    done = 0
    while done < run.size:
        got = stream.readinto(memoryview(run)[done:])  # type: ignore[attr-defined]
        if not got:
            raise ValueError(f"{stored.file}: tensor {stored.name}: the file ended while it was read")
        done += got


def _chunks(box: Box, limit: int) -> Iterator[Box]:
    """Cut a box, along its outermost axes, into boxes of at most `limit` elements."""
    axis = next((i for i, size in enumerate(box.shape) if size > 1), None)
    if box.size <= limit or axis is None:
        yield box
        return
    step = max(1, box.shape[axis] * limit // box.size)
    for begin in range(box.begin[axis], box.end[axis], step):
        end = min(begin + step, box.end[axis])
        part = Box(
            (*box.begin[:axis], begin, *box.begin[axis + 1 :]),
            (*box.end[:axis], end, *box.end[axis + 1 :]),
        )
        yield from _chunks(part, limit)


def _scales(piece: Piece, scale: np.ndarray, columns: int, box: Box) -> np.ndarray:
    """The scale of each element in a box of the view: scale[..., row // 128, column // 128] of the stored tensor."""
    inner = next(axis for axis in range(len(piece.view) + 1) if math.prod(piece.view[axis:]) == columns)
    axes = [np.arange(begin, end) for begin, end in zip(box.begin, box.end, strict=True)]
    rows, places = (_flat(axes[part], piece.view[part]) for part in (slice(None, inner), slice(inner, None)))
    *lead, row = np.unravel_index(
        rows, (*scale.shape[:-2], math.prod(piece.view[:inner]) // math.prod(scale.shape[:-2]))
    )
    return scale[*lead, row // SCALE_BLOCK][..., places // SCALE_BLOCK]


def _flat(axes: Sequence[np.ndarray], view: Shape) -> np.ndarray:
    """The row-major numbers of a grid of indices."""
    flat = np.zeros((), np.intp)
    for index, size in zip(axes, view, strict=True):
        flat = flat[..., None] * size + index
    return flat
