"""Run a graph kernel by kernel, in program order, on the calling thread.

In: the kernels of a checked graph. Out: a plan that runs the graph exactly as eager mode would and frees every value
after its last use. This is the interpreted plan: it needs no compiler and starts at once.
Source: torch/nativert/executor/SerialGraphExecutor.h.
"""

from __future__ import annotations

import torch

from lazy_backend.lowering.device_graphs.launcher import launches
from lazy_backend.lowering.interpreter.graph_executor import GraphExecutor
from lazy_backend.lowering.interpreter.kernels import Kernel, KernelGraph
from lazy_backend.lowering.interpreter.layout import last_uses
from lazy_backend.lowering.interpreter.task import ExecInfo, GraphTask
from lazy_backend.lowering.ir.graph import Graph

# A kernel, the indices of the captures taken after it, and the slots to empty.
_Step = tuple[Kernel, tuple[int, ...], tuple[int, ...]]


class SerialGraphExecutor(GraphExecutor):
    """The interpreted plan of one graph."""

    def __init__(self, graph: Graph, kernels: KernelGraph | None = None, info: ExecInfo | None = None) -> None:
        super().__init__(graph, kernels, info)
        self._steps = self._make_steps()

    def _make_steps(self) -> list[_Step]:
        info = self.exec_info
        kernels = [self.kernels.kernels[place] for place in info.needed]
        dying = last_uses(kernels, info.outputs)
        return [
            (kernel, info.captured_at.get(place, ()), tuple(value.number for value in values))
            for kernel, place, values in zip(kernels, info.needed, dying, strict=True)
        ]

    def run_kernels(self, task: GraphTask) -> None:
        frame = task.frame
        values = frame.values
        kernel: Kernel
        try:
            for kernel, captures, frees in self._steps:
                try:  # costs nothing unless it raises
                    kernel.compute(frame)
                except torch.OutOfMemoryError:
                    if kernel.mutates or not launches.release():
                        raise
                    kernel.compute(frame)  # with the memory that graphs of the device had
                if captures:
                    task.capture(captures)
                for slot in frees:
                    values[slot] = None
        except Exception as error:
            described = kernel.describe(error)
            try:
                if described is error:  # an exception that is its own cause would be a chain without an end
                    raise
                raise described from error
            finally:
                del described  # this frame is part of its traceback
