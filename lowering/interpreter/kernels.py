"""Nodes made ready to run.

In: a graph. Out: `KernelGraph`: its kernels in an order that may run, and what a frame holds before a run.
A kernel is one aten call (`OpKernel`), or a region of the graph for which the caller supplies a kernel
(`serving/regions.py`). Source: torch/nativert/executor (`OpKernel`, `KernelFactory`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lazy_backend.lowering.checks.refusals import NodeError
from lazy_backend.lowering.interpreter.frame import ExecutionFrame, FrameTemplate
from lazy_backend.lowering.ir.graph import Arg, Constant, Graph, Node, Step, Value
from lazy_backend.lowering.ir.rng import run_seeded


class Kernel(Step, Protocol):
    """One step of a run. A kernel holds no state of a run, so concurrent runs may share it."""

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes that the kernel computes."""

    def compute(self, frame: ExecutionFrame) -> None:
        """Read the operands from their slots and write the results to theirs."""

    def describe(self, error: Exception) -> Exception:
        """`error`, which `compute` raised, with the user's line added."""


# Types of arguments that may differ from run to run, or contain such arguments; all others are literals.
_PER_RUN = (Value, Constant, tuple)


class OpKernel:
    """One call of an operator. See Note [Slots]."""

    __slots__ = (
        "node", "_op", "_device", "_arguments", "_kwargs", "_kwarg_slots", "_lists", "_inputs", "_stores",
        "_is_single", "_is_plain",
    )  # fmt: skip

    def __init__(self, node: Node, slots: _SlotTable, device: torch.device) -> None:
        operands: dict[Value, None] = {}
        lists: list[tuple[int, list[int]]] = []
        self.node = node
        self._op = node.op
        self._device = device
        self._arguments = _getter([slots.place(arg, operands, lists) for arg in node.args])
        self._kwargs = {name: arg for name, arg in node.kwargs if not isinstance(arg, _PER_RUN)}
        self._kwarg_slots = tuple(
            [(name, slots.place(arg, operands, lists)) for name, arg in node.kwargs if isinstance(arg, _PER_RUN)]
        )
        # tuples: thousands of lists would keep the garbage collector busy
        self._lists = tuple(lists)
        self._inputs = tuple(operands)
        self._stores = tuple(
            [(i, out.number) for i, out in enumerate(node.outputs) if out is not None and out not in operands]
        )
        self._is_single = len(node.outputs) == 1 and not node.returns_list
        self._is_plain = not lists and not self._kwarg_slots and node.seed is None

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (self.node,)

    @property
    def outputs(self) -> tuple[Value | None, ...]:
        return self.node.outputs

    @property
    def mutates(self) -> tuple[Value, ...]:
        return self.node.mutates

    def inputs(self) -> Sequence[Value]:
        return self._inputs

    def compute(self, frame: ExecutionFrame) -> None:
        values = frame.values
        if self._is_plain:
            result = self._op(*self._arguments(values), **self._kwargs)
        else:
            result = self._call(frame)
        if self._is_single:
            for _, slot in self._stores:
                values[slot] = result
        else:
            for i, slot in self._stores:
                values[slot] = result[i]

    def _call(self, frame: ExecutionFrame) -> Any:
        """Call the operator with lists or keywords built for this run, or with a seed."""
        values = frame.values
        for slot, elements in self._lists:
            values[slot] = [values[element] for element in elements]
        args = self._arguments(values)
        kwargs = self._kwargs | {name: values[slot] for name, slot in self._kwarg_slots}
        for slot, _ in self._lists:
            values[slot] = None  # otherwise the list would keep its tensors alive
        seed = self.node.seed
        if seed is None:
            return self._op(*args, **kwargs)
        return run_seeded(self._op, frame.seeds, seed, self._device, args, kwargs)

    def describe(self, error: Exception) -> Exception:
        return NodeError(self.node, error)


def _getter(slots: Sequence[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """A function that gathers slots in a tuple. An `itemgetter` of several takes 50 ns, a comprehension 250."""
    if len(slots) > 1:
        return operator.itemgetter(*slots)
    if not slots:
        return lambda values: ()
    (slot,) = slots
    return lambda values: (values[slot],)


class _SlotTable:
    """Assigns the slots of one graph. See Note [Slots]."""

    def __init__(self, graph: Graph, num_values: int) -> None:
        self.first_constant = num_values
        self.values: list[Any] = [None] * (num_values + graph.num_constants)

    def place(self, arg: Arg, operands: dict[Value, None], lists: list[tuple[int, list[int]]]) -> int:
        """The slot of an argument. Adds its values to `operands`, and lists that each run must rebuild to `lists`."""
        if isinstance(arg, Value):
            operands[arg] = None
            return arg.number
        if isinstance(arg, Constant):
            return self.first_constant + arg.index
        self.values.append(arg)
        slot = len(self.values) - 1
        if isinstance(arg, tuple):
            if any(isinstance(item, _PER_RUN) for item in arg):
                self.values[slot] = None
                lists.append((slot, [self.place(item, operands, lists) for item in arg]))
            else:
                self.values[slot] = list(arg)
        return slot


@dataclass(frozen=True, slots=True, eq=False)
class KernelGraph:
    """A graph as kernels, in a valid order."""

    graph: Graph
    kernels: tuple[Kernel, ...]
    template: FrameTemplate


def make_kernels(graph: Graph, parts: Sequence[Node | Kernel] | None = None) -> KernelGraph:
    """The kernels of `graph`: one per node, in program order; or one for each of `parts`, some of which are kernels."""
    made = [value.number for node in graph.nodes for value in node.outputs if value is not None]
    num_values = 1 + max([value.number for value in (*graph.inputs, *graph.held)] + made, default=-1)
    slots = _SlotTable(graph, num_values)
    kernels = tuple(
        OpKernel(part, slots, graph.device) if isinstance(part, Node) else part
        for part in (graph.nodes if parts is None else parts)
    )
    template = FrameTemplate(slots.values, tuple(value.number for value in graph.inputs), slots.first_constant)
    return KernelGraph(graph, kernels, template)
