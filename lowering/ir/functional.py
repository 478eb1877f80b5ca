"""Graphs whose writes a compiler would get wrong.

In: a graph. Out: the reason why it must be interpreted, with the user line responsible, or None.

Note [Writes that compilers get wrong]
AOTAutograd has no writes: it replaces a written view by a new value, and inverts the view operators to compute a new
value for the base (`FunctionalInverses.cpp` of 2.13). This is right only if the inverse loses nothing. The result is
wrong, without an error, where a view covers an element twice, where the view was made by `expand` (its inverse is a
sum, which loses the sign of -0.0 even if nothing is repeated), where the view leaves gaps that its inverse fills with
zeros (`unfold`), where a call reads elements that it also writes in another position, and where `as_strided` is applied
to a base whose memory layout has changed since a write. Geometry decides these cases exactly, so the checks here
compare geometries. The inverse of `unfold` is a sum as well: where its windows are pieces, they are lowered as such.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lazy_backend.lowering.ir.graph import Graph, Node, TensorMeta, Value, extent
from lazy_backend.lowering.ir.overlap import overlap, overlaps_itself, same_window
from lazy_backend.ports.dispatcher import function_schema

aten = torch.ops.aten


class NotFunctional(Exception):
    """Why a graph is not compiled, with the user line responsible."""

    def __init__(self, reason: str, site: str) -> None:
        super().__init__(f"{reason}\n  at {site or 'an unknown line'}")
        self.reason = reason
        self.site = site


def why_not_functional(graph: Graph) -> NotFunctional | None:
    """The first reason to interpret `graph`, or None. See Note [Writes that compilers get wrong]."""
    return next((NotFunctional(reason, node.site) for node, reason in unsound_writes(graph)), None)


def unsound_writes(graph: Graph) -> Iterator[tuple[Node, str]]:
    """The nodes whose writes a compiler would get wrong, in program order, each with the reason."""
    written = {value.storage for node in graph.nodes for value in node.mutates}
    makers = _view_makers(graph, written)
    strided = {
        value.storage
        for node in graph.nodes
        if function_schema(node.op).name in _STRIDED
        for value in node.inputs()[:1]
        if value.storage in written
    }
    for node in graph.nodes:
        reason = _reason(node, makers, strided) if node.mutates else None
        if reason is not None:
            yield node, reason


# Operators that address the storage behind their first operand.
_STRIDED = frozenset(("aten::as_strided", "aten::as_strided_copy", "aten::as_strided_scatter"))


def _view_makers(graph: Graph, written: set[int]) -> dict[Value, Node]:
    """For each view of a written storage, the node that makes the view."""
    makers: dict[Value, Node] = {}
    if not written:
        return makers
    seen = {value.storage for value in graph.inputs}
    for node in graph.nodes:
        for value in node.outputs:
            if value is not None and value not in node.mutates:
                if value.storage in seen and value.storage in written:
                    makers.setdefault(value, node)
                seen.add(value.storage)
    return makers


def _reason(node: Node, makers: dict[Value, Node], strided: set[int]) -> str | None:
    for target in node.mutates:
        if target.storage in strided:
            return "a write into memory that as_strided looks at"
        lossy = next(_lossy_views(target, makers), None)
        if lossy is not None:
            return lossy
    return "a call reads memory that it writes as other elements" if _reads_what_it_writes(node) else None


def _lossy_views(target: Value, makers: dict[Value, Node]) -> Iterator[str]:
    """The reasons why inverting the views that lead to `target` would lose data."""
    while True:
        if overlaps_itself(target.meta):
            yield "a write through a view that has elements twice"
        maker = makers.get(target)
        if maker is None:
            return
        source = next(value for value in maker.inputs() if value.storage == target.storage)
        if maker.op is aten.expand.default:
            yield "a write through expand"
        if maker.op is aten.unfold.default and not are_pieces(source.meta, target.meta):
            yield "a write through windows with gaps"
        target = source


def are_pieces(source: TensorMeta, windows: TensorMeta) -> bool:
    """Whether the windows that `unfold` made of `source` are side by side and cover it, so that it could be split."""
    is_covered = 0 < windows.numel == source.numel and len(source.shape) > 0
    return is_covered and not overlaps_itself(windows)


# Pointwise operators that lack the `pointwise` tag in 2.13.
_POINTWISE = ("aten::copy_", "aten::masked_fill_", "aten::fill_", "aten::_foreach_", "aten::_fused_")

# An operand: the value, and its index in a list of tensors, or -1 if it is in no list.
Operand = tuple[Value, int]


def _reads_what_it_writes(node: Node) -> bool:
    """Whether a target overlaps another operand, other than element for element in a pointwise call."""
    written = {value.storage for value in node.mutates}
    operands = sorted(_operands(node, written), key=lambda operand: _bounds(operand[0].meta))
    targets = set(node.mutates)
    is_pointwise = torch.Tag.pointwise in node.op.tags or function_schema(node.op).name.startswith(_POINTWISE)
    open_windows: list[Operand] = []  # operands that extend past the start of the current one
    for value, place in operands:
        begin = _bounds(value.meta)[0]
        open_windows = [other for other in open_windows if _bounds(other[0].meta)[1] > begin]
        for other, other_place in open_windows:
            if value.storage != other.storage or targets.isdisjoint((value, other)):
                continue
            if is_pointwise and place == other_place and same_window(value.meta, other.meta):
                continue  # each element is read only for its own result, before it is written
            if overlap(value.meta, other.meta):
                return True
        open_windows.append((value, place))
    return False


def _operands(node: Node, storages: set[int]) -> list[Operand]:
    """The operands in `storages`, once for each use."""
    found: list[Operand] = []
    for arg in (*node.args, *(arg for _, arg in node.kwargs)):
        listed = enumerate(arg) if isinstance(arg, tuple) else ((-1, arg),)
        found += [(item, place) for place, item in listed if isinstance(item, Value) and item.storage in storages]
    return found


def _bounds(meta: TensorMeta) -> tuple[int, int]:
    """The range of bytes in the storage that a tensor spans."""
    width = meta.dtype.itemsize
    return meta.storage_offset * width, extent(meta) * width
