"""Compute everything that depends only on weights once, when the weights are loaded.

In: a graph and which of its inputs are weights. Out: `ConstantFolder`: the graph that remains for each run, and `fold`,
which computes the rest from a set of weights. Source: torch/nativert/executor (`ConstantFolder`).

Note [What is folded]
A node is folded if all its operands are weights or folded values, and running the node once is as good as each time:
the node draws no random numbers, writes nothing and returns something, and no node writes what it reads or makes. Nodes
that make outputs are not folded: outputs belong to the caller, who may write to them. The remaining graph has the
folded values that it uses as `held` values, not as inputs: a folded value may be a view of a weight, but inputs own
their storages. If regions are compiled, the remaining graph also makes the views itself: a region then takes each
weight once, however many views of the weight it uses.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from lazy_backend.lowering.interpreter.frame import ExecutionFrame
from lazy_backend.lowering.interpreter.kernels import make_kernels
from lazy_backend.lowering.interpreter.serial import SerialGraphExecutor
from lazy_backend.lowering.interpreter.task import GraphTask, everything
from lazy_backend.lowering.ir.graph import Arg, Constant, Graph, Node, Value, makes_views, map_arg
from lazy_backend.lowering.ir.passes import graph_pass


@dataclass(frozen=True, slots=True, eq=False)
class ConstantFolder:
    """A graph split in two: `remaining` holds the values `folded`, which the other part computes."""

    remaining: Graph
    folded: tuple[Value, ...]
    _folding: SerialGraphExecutor
    _constants: tuple[float, ...]

    def graphs(self) -> tuple[Graph, ...]:
        return self.remaining, self._folding.graph

    @property
    def device(self) -> torch.device:
        return self.remaining.device

    def fold(self, weights: Mapping[Value, torch.Tensor]) -> dict[Value, torch.Tensor]:
        """The folded values for these weights. A view of a weight stays a view. Raises `NodeError`."""
        frame = ExecutionFrame()
        kernels = self._folding.kernels
        frame.fill(kernels.template, [weights[value] for value in self._folding.graph.inputs], self._constants, ())
        task = GraphTask(kernels, self._folding.exec_info, frame)
        with task.taken_over():
            self._folding.run_kernels(task)
        return {value: frame.values[value.number] for value in self.folded}

    def number_values(
        self, names: Mapping[Value, str], known: dict[Hashable, int], adds: bool = False
    ) -> dict[Value, int]:
        """Number the folded values such that equal numbers stand for equal computations from weights of equal names.

        `known`: the computations that have a number, by what they are; if `adds`, new ones are added to it, otherwise
        they get no number.
        """
        numbers: dict[Value, int] = {}

        def give(value: Value, key: Hashable) -> None:
            number = known.setdefault(key, len(known)) if adds else known.get(key)
            if number is not None:
                numbers[value] = number

        def describe(arg: Arg) -> Hashable:
            if isinstance(arg, Value):
                return ("value", numbers.get(arg))
            return ("float", self._constants[arg.index].hex()) if isinstance(arg, Constant) else (arg.__class__, arg)

        for weight, name in names.items():
            give(weight, name)
        for node in self._folding.graph.nodes:
            if numbers.keys() >= set(node.inputs()):
                args = tuple([map_arg(describe, arg) for arg in node.args])
                kwargs = tuple([(name, map_arg(describe, arg)) for name, arg in node.kwargs])
                for place, value in enumerate(node.outputs):
                    if value is not None:
                        give(value, (node.op, args, kwargs, place))
        return numbers

    def without(self, values: Collection[Value]) -> ConstantFolder:
        """As this, but `values` are left to the caller: `fold` neither computes nor returns them."""
        folded = tuple(value for value in self.folded if value not in values)
        wanted = set(folded)
        nodes: list[Node] = []
        for node in reversed(self._folding.graph.nodes):
            if not wanted.isdisjoint(node.outputs):
                nodes.append(node)
                wanted.update(node.inputs())
        graph = replace(self._folding.graph, nodes=tuple(reversed(nodes)))
        return replace(self, folded=folded, _folding=_keeping(folded, graph))


@graph_pass("fold constants")
def split_constants(
    graph: Graph, weights: Iterable[Value], constants: Iterable[float], leaves_views: bool = False
) -> ConstantFolder:
    """Split `graph`. See Note [What is folded]. `leaves_views`: whether the remaining graph makes views itself."""
    weight_values = tuple(weights)
    fixed = _foldable_nodes(graph, weight_values)
    folding = [node for node in graph.nodes if node in fixed]
    gone = {node for node in folding if not (leaves_views and makes_views(node))}
    left = [node for node in graph.nodes if node not in gone]
    made = [value for node in gone for value in node.outputs if value is not None]
    wanted = {value for node in left for value in node.inputs()}
    folded = tuple(sorted(wanted.intersection(made), key=lambda value: value.number))
    return ConstantFolder(
        remaining=replace(graph, nodes=tuple(left), held=graph.held + folded),
        folded=folded,
        _folding=_keeping(folded, replace(graph, inputs=weight_values, nodes=tuple(folding), outputs=())),
        _constants=tuple(constants),
    )


def _keeping(values: tuple[Value, ...], graph: Graph) -> SerialGraphExecutor:
    """Runs all of `graph` and leaves `values` in the frame. They are not outputs, since outputs own their storages."""
    kernels = make_kernels(graph)
    return SerialGraphExecutor(graph, kernels, replace(everything(kernels), outputs=values))


def _foldable_nodes(graph: Graph, weights: tuple[Value, ...]) -> set[Node]:
    touchable = {value.storage for node in graph.nodes for value in node.mutates}
    touchable.update(value.storage for value in graph.outputs)
    known = set(weights)
    foldable: set[Node] = set()
    for node in graph.nodes:
        results = [value for value in node.outputs if value is not None]
        operands = node.inputs()
        if (
            results
            and node.seed is None
            and known.issuperset(operands)
            and touchable.isdisjoint(value.storage for value in (*operands, *results))
            and torch.Tag.nondeterministic_seeded not in node.op.tags
        ):
            foldable.add(node)
            known.update(results)
    return foldable
