"""Compute while collectives are under way.

In: a graph whose collectives are single calls. Out: the same graph, with some of them as two calls: one begins where
the collective stands, one finishes before the first call that needs the result.

Note [Collectives in the background]
What stands between the two calls runs while the ranks communicate. Beginnings keep the order of the program, which is
the same on all ranks, and each collective is finished once, in the same graph: the order tensor sees to both, as for
single calls. The values are those of the single call, bit for bit: it is the same collective of a copy of the operand,
whose result is written where the collective would have written it. The copies cost, and so do two calls where one was,
so a collective is split only if enough is done in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lazy_backend.lowering.collectives.communication import beginning_of, collective, collective_of
from lazy_backend.lowering.ir.graph import Arg, Graph, Node, Value, intern_meta, with_values
from lazy_backend.lowering.ir.passes import graph_pass
from lazy_backend.ports.dispatcher import base_name, function_schema

aten = torch.ops.aten

# What has to be computed in between, as calls of operators; large operands count like calls.
MIN_WORK = 20
_BYTES_PER_CALL = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class _Split:
    """A collective that begins at one place and is finished before the node at another one."""

    place: int
    end: int


@graph_pass("overlap collectives")
def overlap_collectives(graph: Graph) -> Graph:
    """`graph`, in which what is worth it communicates in the background."""
    splits = _worthwhile(graph, MIN_WORK) if graph.device.type == "cpu" else []
    return _Rewriter(graph, splits).run() if splits else graph


def _worthwhile(graph: Graph, min_work: int) -> list[_Split]:
    """The collectives that are to be split, in program order."""
    places = [place for place, node in enumerate(graph.nodes) if _may_be_split(node)]
    if not places:
        return []
    uses = _uses(graph)
    found = []
    for place in places:
        target = graph.nodes[place].args[0]
        end = next((use for use in uses[target.storage] if use > place), len(graph.nodes))
        if _work(graph.nodes[place + 1 : end]) >= min_work:
            found.append(_Split(place, end))
    return found


def _may_be_split(node: Node) -> bool:
    if base_name(node.op) != collective_of(node.op):
        return False
    meta = node.args[0].meta
    return not meta.conj and not meta.neg


def _uses(graph: Graph) -> dict[int, list[int]]:
    """For each storage, the places of the nodes that read or write it. A view of it does neither."""
    found: dict[int, list[int]] = {}
    for place, node in enumerate(graph.nodes):
        if not _is_view(node):
            for storage in {value.storage for value in node.inputs()}:
                found.setdefault(storage, []).append(place)
    return found


def _is_view(node: Node) -> bool:
    """Whether a node only makes other tensors of the memory of its operands."""
    storages = {value.storage for value in node.inputs()}
    made = [value for value in node.outputs if value is not None]
    return bool(made) and not node.mutates and all(value.storage in storages for value in made)


def _work(nodes: Sequence[Node]) -> int:
    """What a run of these nodes does, counted in calls. Another collective is a reason by itself."""
    work = 0
    for node in nodes:
        if collective_of(node.op) is not None:
            work += MIN_WORK
        elif not _is_view(node):
            work += 1 + sum(value.meta.nbytes for value in node.inputs()) // _BYTES_PER_CALL
    return work


class _Rewriter:
    """Splits collectives, and numbers the values anew."""

    def __init__(self, graph: Graph, splits: Sequence[_Split]) -> None:
        self._graph = graph
        self._begins = {split.place for split in splits}
        self._ends: dict[int, list[int]] = {}
        for split in splits:
            self._ends.setdefault(split.end, []).append(split.place)
        values = [*graph.inputs, *(value for node in graph.nodes for value in node.outputs if value is not None)]
        self._storages = 1 + max(value.storage for value in values)
        self._new: dict[Value, Value] = {value: replace(value, number=n) for n, value in enumerate(graph.inputs)}
        self._count = len(graph.inputs)
        self._tickets: dict[int, Value] = {}
        self._nodes: list[Node] = []

    def run(self) -> Graph:
        for place, node in enumerate(self._graph.nodes):
            self._finish_before(place)
            if place in self._begins:
                self._begin(place, node)
            else:
                self._nodes.append(self._numbered(node))
        self._finish_before(len(self._graph.nodes))
        return replace(
            self._graph,
            inputs=tuple(self._new[value] for value in self._graph.inputs),
            nodes=tuple(self._nodes),
            outputs=tuple(self._new[value] for value in self._graph.outputs),
        )

    def _numbered(self, node: Node) -> Node:
        for value in node.outputs:
            if value is not None and value not in self._new:
                self._new[value] = replace(value, number=self._next())
        return with_values(node, self._renumber)

    def _renumber(self, arg: Arg) -> Arg:
        return self._new[arg] if isinstance(arg, Value) else arg

    def _next(self) -> int:
        self._count += 1
        return self._count - 1

    def _made(self, shape: tuple[int, ...], dtype: torch.dtype) -> Value:
        """A new value with memory of its own."""
        stride = torch.empty(shape, device="meta").stride()
        self._storages += 1
        return Value(self._next(), intern_meta(shape, tuple(stride), 0, dtype), self._storages - 1)

    def _begin(self, place: int, node: Node) -> None:
        ticket = self._tickets[place] = self._made((1,), torch.int64)
        order = _order(node)
        begun = with_values(replace(node, outputs=(), mutates=(order,)), self._renumber)
        op = collective(beginning_of(base_name(node.op)))
        self._nodes.append(replace(begun, op=op, outputs=(ticket,)))

    def _finish_before(self, place: int) -> None:
        for begun in self._ends.get(place, ()):
            node = self._graph.nodes[begun]
            target, order = self._new[node.args[0]], self._new[_order(node)]
            shape, dtype = target.meta.shape, target.meta.dtype
            result = self._made(shape, dtype)
            args = self._tickets[begun], order, shape, dtype
            self._nodes.append(replace(node, op=collective("finish"), args=args, outputs=(result,), mutates=(order,)))
            written: Any = replace(node, op=aten.copy_.default, args=(target, result))
            self._nodes.append(replace(written, outputs=(target,), mutates=(target,)))


def _order(node: Node) -> Value:
    """The order tensor among a collective's operands."""
    names = [argument.name for argument in function_schema(node.op).arguments]
    found: Value = node.args[names.index("order")]
    return found
