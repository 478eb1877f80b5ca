"""Run a graph op by op, in program order, on the calling thread.

In: a checked graph. Out: a plan that runs it exactly as eager would, freeing every value after its last use.
This is the interpreted plan: it needs no compiler and starts at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lazy_backend.lowering.aliasing import OutputAliases, storages_of
from lazy_backend.lowering.ir import Constant, Graph, Node, Value
from lazy_backend.lowering.rng import run_seeded


class NodeError(RuntimeError):
    """An operator failed while a graph ran. `__cause__` is what it raised."""

    def __init__(self, node: Node, cause: BaseException) -> None:
        super().__init__(f"{cause}\n  while running {node}\n  recorded at {node.site or 'an unknown line'}")
        self.node = node


# Reads an argument for one run from (values, constants); None: the argument is a literal.
Reader = Callable[[list[Any], Sequence[float]], Any]


def _reader(arg: Any) -> Reader | None:
    if isinstance(arg, Value):
        number = arg.number
        return lambda values, constants: values[number]
    if isinstance(arg, Constant):
        index = arg.index
        return lambda values, constants: constants[index]
    if isinstance(arg, tuple):
        readers = [_reader(item) for item in arg]
        literals = list(arg)
        if not any(readers):
            return lambda values, constants: literals
        return lambda values, constants: [
            literal if read is None else read(values, constants)
            for literal, read in zip(literals, readers, strict=True)
        ]
    return None


class Instruction:
    """One node made ready to run: argument readers, where results go, and what dies here."""

    __slots__ = ("node", "args", "reads", "kwargs", "kwarg_reads", "stores", "frees", "single")

    def __init__(self, node: Node, frees: Sequence[int]) -> None:
        self.node = node
        self.args = [list(arg) if isinstance(arg, tuple) else arg for arg in node.args]
        self.reads = [(i, read) for i, arg in enumerate(node.args) if (read := _reader(arg)) is not None]
        self.kwargs = {name: list(arg) if isinstance(arg, tuple) else arg for name, arg in node.kwargs}
        self.kwarg_reads = [(name, read) for name, arg in node.kwargs if (read := _reader(arg)) is not None]
        operands = set(node.inputs())
        self.stores = [(i, out.number) for i, out in enumerate(node.outputs) if out is not None and out not in operands]
        self.single = len(node.outputs) == 1 and not node.returns_list
        self.frees = tuple(frees)

    def run(self, values: list[Any], constants: Sequence[float], seeds: Sequence[int], device: torch.device) -> None:
        args = self.args.copy()
        for i, read in self.reads:
            args[i] = read(values, constants)
        kwargs = self.kwargs
        if self.kwarg_reads:
            kwargs = kwargs.copy()
            for name, read in self.kwarg_reads:
                kwargs[name] = read(values, constants)
        node = self.node
        if node.seed is None:
            result = node.op(*args, **kwargs)
        else:
            result = run_seeded(node.op, seeds[node.seed], device, args, kwargs)
        if self.single:
            for _, number in self.stores:
                values[number] = result
        else:
            for i, number in self.stores:
                values[number] = result[i]
        for number in self.frees:
            values[number] = None


class SerialGraphExecutor:
    """The interpreted plan of one graph. May be run by one thread at a time per call; holds no state between runs."""

    kind = "interpreted"

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._count = 1 + max((v.number for v in _all_values(graph)), default=-1)
        self._inputs = [value.number for value in graph.inputs]
        self._outputs = [value.number for value in graph.outputs]
        self._instructions = _instructions(graph)
        self._aliases = OutputAliases()

    def execute(
        self, inputs: list[torch.Tensor], constants: Sequence[float], seeds: Sequence[int]
    ) -> list[torch.Tensor]:
        """Run once. Takes ownership of `inputs` (the list is emptied), so that what dies in the run is freed early.

        Raises `NodeError`, which names the operator and the user's line.
        """
        taken = frozenset[int]() if self._aliases.is_known() else storages_of(inputs)
        values: list[Any] = [None] * self._count
        for place, number in enumerate(self._inputs):
            values[number] = inputs[place]
        inputs.clear()
        device = self.graph.device
        with torch.no_grad():
            for instruction in self._instructions:
                try:
                    instruction.run(values, constants, seeds, device)
                except Exception as error:
                    raise NodeError(instruction.node, error) from error
            return self._aliases.separate(taken, [values[number] for number in self._outputs])


def _all_values(graph: Graph) -> list[Value]:
    made = [value for node in graph.nodes for value in node.outputs if value is not None]
    return [*graph.inputs, *made]


def _instructions(graph: Graph) -> list[Instruction]:
    last_use: dict[Value, int] = {}
    for place, node in enumerate(graph.nodes):
        for value in (*node.inputs(), *(v for v in node.outputs if v is not None)):
            last_use[value] = place
    for value in graph.outputs:
        last_use.pop(value, None)
    frees: list[list[int]] = [[] for _ in graph.nodes]
    for value, place in last_use.items():
        frees[place].append(value.number)
    return [Instruction(node, dying) for node, dying in zip(graph.nodes, frees, strict=True)]
