"""Windows of a storage as chains of views that compilers can invert.

In: the geometry of a storage's base, and of a tensor in that storage. Out: `(operator, further arguments, geometry)`
for each view on the way from the base to the tensor, or None if there is no such chain. And, for a graph, the memory
that it writes window by window until nothing of what was there is left.
`as_strided` addresses fixed locations in memory, whatever its base has become. In a compiled graph the base is a new
value after each write, and its memory layout may differ from that of the base it stands for; then `as_strided` takes
the wrong elements, without an error. Slices and views take the right ones, or fail.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lazy_backend.lowering.ir.graph import (
    Graph,
    Node,
    TensorMeta,
    Value,
    empty_of,
    intern_meta,
    is_contiguous,
    meta_of,
)
from lazy_backend.ports.dispatcher import OpOverload, function_schema

aten = torch.ops.aten

Step = tuple[OpOverload, tuple[Any, ...], TensorMeta]


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

    def _add(self, op: OpOverload, *args: Any) -> None:
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


# ----- memory that is written piece by piece


@dataclass(slots=True, eq=False)
class Pieces:
    """A flat value that consecutive writes to disjoint pieces cover, and that nothing looks at in between.

    `writes`: the piece that a node at a place writes, in program order. `views`: the places of the nodes that make the
    pieces, which are before `last`, the place of the last write.
    """

    base: Value
    writes: dict[int, Value]
    views: list[int]

    @property
    def last(self) -> int:
        return max(self.writes)

    def in_order(self) -> list[Value]:
        """The pieces as they lie in memory."""
        return sorted(self.writes.values(), key=lambda piece: piece.meta.storage_offset)


def written_in_pieces(graph: Graph) -> list[Pieces]:
    """The memory of `graph` that is written piece by piece, such as the buckets of `DistributedDataParallel`."""
    bases: dict[int, Value] = {}
    for value in (*graph.inputs, *[one for node in graph.nodes for one in node.outputs if one is not None]):
        bases.setdefault(value.storage, value)
    written = {value.storage for node in graph.nodes for value in node.mutates}
    flat = {s for s in written if len(bases[s].meta.shape) == 1 and is_contiguous(bases[s].meta)}
    found: list[Pieces] = []
    makers: dict[Value, int] = {}
    open_ones: dict[int, Pieces] = {}
    for place, node in enumerate(graph.nodes):
        for storage in {value.storage for value in (*node.inputs(), *node.mutates)} & flat:
            if _makes_view(node, storage):
                (view,) = node.outputs
                assert view is not None
                makers[view] = place
                continue
            piece = _overwritten(node, storage, bases[storage], makers)
            if piece is None:
                open_ones.pop(storage, None)
                continue
            one = open_ones.setdefault(storage, Pieces(bases[storage], {}, []))
            if any(_meet(piece, other) for other in one.writes.values()):
                one = open_ones[storage] = Pieces(bases[storage], {}, [])
            one.writes[place] = piece
            if sum(each.meta.numel for each in one.writes.values()) == bases[storage].meta.numel:
                one.views = sorted({maker for each in one.writes.values() for maker in _makers_of(each, graph, makers)})
                if len(one.writes) > 1:
                    found.append(one)
                del open_ones[storage]
    return found


_PIECE_VIEWS = frozenset((aten.slice.Tensor, aten.view.default))


def _makes_view(node: Node, storage: int) -> bool:
    """Whether all that `node` does is to make a contiguous piece of `storage`, at places that are known."""
    if node.op not in _PIECE_VIEWS or node.mutates:
        return False
    sizes = [size for arg in node.args[1:] for size in (arg if isinstance(arg, tuple) else (arg,))]
    return all(type(size) is int for size in sizes)


def _overwritten(node: Node, storage: int, base: Value, makers: dict[Value, int]) -> Value | None:
    """The piece of `storage` that `node` overwrites, if that is all it has to do with this storage."""
    if len(node.mutates) != 1 or node.mutates[0].storage != storage or node.seed is not None:
        return None
    (piece,) = node.mutates
    named = dict(node.kwargs)
    is_copy = node.op is aten.copy_.default and node.args[0] is piece
    if not is_copy and (named.get("out") is not piece or without_out(node.op) is None):
        return None
    others = [*node.args[1 if is_copy else 0 :], *(arg for name, arg in node.kwargs if name != "out")]
    operands = [one for arg in others for one in (arg if isinstance(arg, tuple) else (arg,))]
    if any(isinstance(one, Value) and one.storage == storage for one in operands) or piece not in makers:
        return None
    same_kind = piece.meta.dtype is base.meta.dtype and is_contiguous(
        intern_meta(piece.meta.shape, piece.meta.stride, 0, piece.meta.dtype)
    )
    return piece if same_kind and piece.meta.numel else None


@functools.cache
def without_out(op: OpOverload) -> OpOverload | None:
    """The overload of `op` that returns what `op` writes into `out`."""
    wanted = [(argument.name, str(argument.type)) for argument in function_schema(op).arguments if not argument.is_out]
    packet = op.overloadpacket
    for name in packet.overloads():
        candidate: OpOverload = getattr(packet, name)
        if [(argument.name, str(argument.type)) for argument in function_schema(candidate).arguments] == wanted:
            return candidate
    return None


def _meet(one: Value, other: Value) -> bool:
    return (
        one.meta.storage_offset < other.meta.storage_offset + other.meta.numel
        and other.meta.storage_offset < one.meta.storage_offset + one.meta.numel
    )


def _makers_of(piece: Value, graph: Graph, makers: dict[Value, int]) -> Iterator[int]:
    """The places of the nodes that lead from the base to `piece`."""
    value: Value | None = piece
    while value in makers:
        place = makers[value]
        yield place
        value = next((one for one in graph.nodes[place].inputs() if one.storage == piece.storage), None)
