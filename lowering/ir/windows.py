"""Windows of a storage as chains of views that compilers can invert.

In: the geometry of a storage's base, and of a tensor in that storage. Out: `(operator, further arguments, geometry)`
for each view on the way from the base to the tensor, or None if there is no such chain.
`as_strided` addresses fixed locations in memory, whatever its base has become. In a compiled graph the base is a new
value after each write, and its memory layout may differ from that of the base it stands for; then `as_strided` takes
the wrong elements, without an error. Slices and views take the right ones, or fail.
"""

from __future__ import annotations

from typing import Any

import torch

from lazy_backend.lowering.ir.graph import TensorMeta, empty_of, meta_of

aten = torch.ops.aten

Step = tuple[torch._ops.OpOverload, tuple[Any, ...], TensorMeta]


def chain_to(base: TensorMeta, window: TensorMeta) -> list[Step] | None:
    """The chain of views from `base` to `window`. Both have the same dtype, and no conj and neg bits."""
    if not window.numel:
        return None
    every = range(len(window.shape))
    longer = [dim for dim in every if window.shape[dim] != 1]
    # a dimension of size 1 may have any stride: it is cut out like the others, or added at the end
    return _chain(base, window, [*every]) or (_chain(base, window, longer) if len(longer) < len(every) else None)


def _chain(base: TensorMeta, window: TensorMeta, dims: list[int]) -> list[Step] | None:
    """The chain that cuts the dimensions `dims` of `window` out of the base and adds the others."""
    chain = _Chain(base)
    dims.sort(key=lambda dim: (-window.stride[dim], -window.shape[dim]))
    if not chain.flatten() or not chain.cut(window, dims):
        return None
    chain.permute(tuple(dims.index(dim) for dim in sorted(dims)))
    for dim in range(len(window.shape)):
        if dim not in dims:
            chain.unsqueeze(dim)
    return chain.steps if chain.meta is window else None


class _Chain:
    """Makes the views on a meta tensor, so that PyTorch itself computes their strides."""

    def __init__(self, base: TensorMeta) -> None:
        self.view = empty_of(base, torch.device("meta"))
        self.steps: list[Step] = []

    @property
    def meta(self) -> TensorMeta:
        return meta_of(self.view)

    def _add(self, op: torch._ops.OpOverload, *args: Any) -> None:
        self.view = op(self.view, *args)
        self.steps.append((op, args, self.meta))

    def flatten(self) -> bool:
        """Flatten to one dimension, in memory order. False if the base has an offset or gaps."""
        base = self.meta
        self.permute(tuple(sorted(range(len(base.shape)), key=lambda dim: (-base.stride[dim], -base.shape[dim]))))
        if base.storage_offset or not self.view.is_contiguous():
            return False
        if len(base.shape) != 1:
            self._add(aten.view.default, (base.numel,))
        return True

    def permute(self, order: tuple[int, ...]) -> None:
        if order != tuple(range(len(order))):
            self._add(aten.permute.default, order)

    def unsqueeze(self, dim: int) -> None:
        self._add(aten.unsqueeze.default, dim)

    def cut(self, window: TensorMeta, dims: list[int]) -> bool:
        """Cut the flat base into the dimensions `dims` of `window`, longest stride first.

        Returns False if one of them does not divide the base into rows.
        """
        length, start = self.view.shape[0], window.storage_offset  # of the current row, and of the window in that row
        for place, dim in enumerate(dims):
            size, stride = window.shape[dim], window.stride[dim]
            inner = 1 + sum((window.shape[inner] - 1) * window.stride[inner] for inner in dims[place + 1 :])
            end = start + (size - 1) * stride + inner
            if inner > stride or end > length:
                return False
            if place == len(dims) - 1:
                self._slice(start, end, stride)
                return True
            first = min(start, length - size * stride)  # so that all rows are whole, including the last
            if first < 0 or start - first + inner > stride:
                return False
            self._slice(first, first + size * stride)
            self._add(aten.view.default, (*self.view.shape[:-1], size, stride))
            length, start = stride, start - first
        self._add(aten.select.int, self.view.dim() - 1, start)
        return True

    def _slice(self, start: int, end: int, step: int = 1) -> None:
        dim = self.view.dim() - 1
        if (start, end, step) != (0, self.view.shape[dim], 1):
            self._add(aten.slice.Tensor, dim, start, end, *(() if step == 1 else (step,)))
