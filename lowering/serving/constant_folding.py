"""Compute what depends on weights alone once, when the weights are loaded.

In: a graph and which of its inputs are weights. Out: `ConstantFolder`: the graph that is left for each run, and `fold`,
which computes the rest from a set of weights. Seed: nativert Executor (`ConstantFolder`).

Note [What is folded]
A node is folded if all its operands are weights or folded, and running it once is as good as each time: it draws no
random numbers, writes nothing, returns something, and nobody writes what it reads or makes. Results that are outputs
stay: they belong to the caller, who may write them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from lazy_backend.lowering.interpreter.frame import ExecutionFrame
from lazy_backend.lowering.interpreter.serial import SerialGraphExecutor
from lazy_backend.lowering.interpreter.task import GraphTask
from lazy_backend.lowering.ir.graph import Graph, Node, Value
from lazy_backend.lowering.ir.passes import graph_pass


@dataclass(frozen=True, slots=True, eq=False)
class ConstantFolder:
    """A graph split in two. `remaining` takes the values of `folded` as further inputs."""

    remaining: Graph
    folded: tuple[Value, ...]
    _folding: SerialGraphExecutor
    _constants: tuple[float, ...]

    @property
    def device(self) -> torch.device:
        return self.remaining.device

    def fold(self, weights: Mapping[Value, torch.Tensor]) -> dict[Value, torch.Tensor]:
        """The folded values for these weights. A view of a weight stays one. Raises `NodeError`."""
        frame = ExecutionFrame()
        kernels = self._folding.kernels
        frame.fill(kernels.template, [weights[value] for value in self._folding.graph.inputs], self._constants, ())
        task = GraphTask(kernels, self._folding.exec_info, frame)
        with task.taken_over():
            self._folding.run_kernels(task)
        return {value: frame.values[value.number] for value in self.folded}


@graph_pass("fold constants")
def split_constants(graph: Graph, weights: Iterable[Value], constants: Iterable[float]) -> ConstantFolder:
    """Split `graph`. See Note [What is folded]."""
    weight_values = tuple(weights)
    fixed = _foldable_nodes(graph, weight_values)
    folding = [node for node in graph.nodes if node in fixed]
    left = [node for node in graph.nodes if node not in fixed]
    made = [value for node in folding for value in node.outputs if value is not None]
    wanted = {value for node in left for value in node.inputs()}
    folded = tuple(value for value in made if value in wanted)
    return ConstantFolder(
        remaining=replace(graph, inputs=graph.inputs + folded, nodes=tuple(left)),
        folded=folded,
        _folding=SerialGraphExecutor(replace(graph, inputs=weight_values, nodes=tuple(folding), outputs=folded)),
        _constants=tuple(constants),
    )


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
