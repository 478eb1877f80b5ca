"""Which elements of a storage two tensors share.

In: geometries (`TensorMeta`) of tensors in one storage. Out: whether a tensor covers an element twice, and whether two
tensors overlap.
The answers are exact, except for windows of more than `_MAX_MARKED` elements that no rule decides: those count as
overlapping.
"""

from __future__ import annotations

from collections.abc import Sequence

from lazy_backend.lowering.ir.graph import TensorMeta

# The most elements of a storage (bytes, if dtypes differ in size) that are marked one by one to find overlaps.
_MAX_MARKED = 1 << 24

Dims = tuple[tuple[int, int], ...]  # (size, stride) of each dimension longer than one


def overlaps_itself(meta: TensorMeta) -> bool:
    """Whether two elements share a location, as in `x.expand(2, 3)` or `x.unfold(0, 2, 1)`."""
    dims = _dims(meta)
    if meta.numel < 2 or _is_nested(dims):
        return False
    span = _span(dims)
    if meta.numel > span or any(stride == 0 for _, stride in dims) or span > _MAX_MARKED:
        return True
    return _places(dims).bit_count() < meta.numel


def overlap(one: TensorMeta, other: TensorMeta) -> bool:
    """Whether two tensors of one storage have an element (or a byte of one) in common."""
    if not one.numel or not other.numel:
        return False
    unit = 1 if one.dtype.itemsize == other.dtype.itemsize else None
    starts, windows, width = [], [], []
    for meta in (one, other):
        scale = unit or meta.dtype.itemsize
        starts.append(meta.storage_offset * scale)
        windows.append(tuple((size, stride * scale) for size, stride in _dims(meta)))
        width.append(1 if unit else scale)
    return _windows_meet(starts[0] - starts[1], windows[0], windows[1], width)


def same_window(one: TensorMeta, other: TensorMeta) -> bool:
    """Whether two tensors of one storage cover the same memory, element for element."""
    return (
        one.storage_offset == other.storage_offset
        and one.dtype.itemsize == other.dtype.itemsize
        and one.shape == other.shape
        and _dims(one) == _dims(other)
    )


def _dims(meta: TensorMeta) -> Dims:
    return tuple((n, step) for n, step in zip(meta.shape, meta.stride, strict=True) if n != 1)


def _span(dims: Dims) -> int:
    """Number of elements from the first to the last, inclusive."""
    return 1 + sum((size - 1) * stride for size, stride in dims)


def _is_nested(dims: Dims) -> bool:
    """Whether each dimension steps over the reach of all shorter strides: then no location is covered twice."""
    reach = 1
    for size, stride in sorted(dims, key=lambda dim: dim[1]):
        if stride < reach:
            return False
        reach += (size - 1) * stride
    return True


def _windows_meet(apart: int, one: Dims, other: Dims, width: Sequence[int]) -> bool:
    """Whether two windows overlap.

    `apart`: distance from the start of the second window to that of the first. `width`: length of an element of each.
    """
    if apart >= _span(other) - 1 + width[1] or -apart >= _span(one) - 1 + width[0]:
        return False
    shared = _shared_outer(one, other)
    if shared is not None:
        # both windows repeat at the same stride, and no copy reaches the next one: it is enough to compare one pair of
        # copies and the neighbouring pair, since one window may start a row before the other
        size, stride = shared
        inner = [tuple(dim for dim in dims if dim != shared) for dims in (one, other)]
        if all(_span(dims) - 1 + length <= stride for dims, length in zip(inner, width, strict=True)):
            rows = {apart // stride, apart // stride + 1}
            return any(
                abs(row) < size and _windows_meet(apart - row * stride, inner[0], inner[1], width) for row in rows
            )
    if max(_span(one), _span(other)) + abs(apart) > _MAX_MARKED:
        return True
    first, second = _places(one, width[0]), _places(other, width[1])
    return bool(first << apart & second if apart > 0 else first & second << -apart)


def _shared_outer(one: Dims, other: Dims) -> tuple[int, int] | None:
    """The (size, stride) of the dimension with the longest stride, if both windows have it exactly once."""
    if not one or not other:
        return None
    largest = [max(dims, key=lambda dim: dim[1]) for dims in (one, other)]
    if largest[0] != largest[1] or any(dims.count(largest[0]) != 1 for dims in (one, other)):
        return None
    return largest[0]


def _places(dims: Dims, width: int = 1) -> int:
    """The locations that a window covers, as the bits of an int: 2 MB for 16 million locations."""
    places = (1 << width) - 1
    for size, stride in dims:
        places = _repeated(places, size, stride)
    return places


def _repeated(places: int, times: int, stride: int) -> int:
    """`times` copies of `places` at distance `stride`, by doubling, so that a long dimension takes few steps."""
    if times == 1:
        return places
    half = _repeated(places, times // 2, stride)
    both = half | half << times // 2 * stride
    return both | places << (times - 1) * stride if times % 2 else both
