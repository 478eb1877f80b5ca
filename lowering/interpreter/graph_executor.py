"""What the serial and the parallel executor share.

In: the kernels of a graph, and what a run must compute (`ExecInfo`). Out: `GraphExecutor`, an `ExecutionPlan`.
Source: torch/nativert/executor/GraphExecutorBase.h.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence

import torch

from lazy_backend.lowering.artefacts.run_thread import Overlap
from lazy_backend.lowering.compilation.compiler import CompiledRun
from lazy_backend.lowering.compilation.plan_kinds import PlanKind
from lazy_backend.lowering.device_graphs.launcher import GraphLauncher
from lazy_backend.lowering.interpreter.frame import ExecutionFrame
from lazy_backend.lowering.interpreter.kernels import KernelGraph, make_kernels
from lazy_backend.lowering.interpreter.task import ExecInfo, GraphTask, GraphTaskGuard, everything
from lazy_backend.lowering.ir.aliasing import OutputAliases, watched_storages
from lazy_backend.lowering.ir.graph import Graph


class GraphExecutor(ABC):
    """Runs the kernels of one graph. Keeps no values between runs; runs may overlap."""

    def __init__(self, graph: Graph, kernels: KernelGraph | None = None, info: ExecInfo | None = None) -> None:
        self.graph = graph
        self.kernels = make_kernels(graph) if kernels is None else kernels
        self.exec_info = everything(self.kernels) if info is None else info
        self._outputs = [value.number for value in self.exec_info.outputs]
        self._aliases = OutputAliases()
        self.launcher: GraphLauncher | None = None
        self.conforms = False
        self.num_runs = 0
        self.shortest_run = math.inf
        self.overlap = Overlap()

    @property
    def kind(self) -> PlanKind:
        is_launched = self.launcher is not None and self.launcher.is_launching
        return PlanKind.INTERPRETED_AND_LAUNCHED if is_launched else PlanKind.INTERPRETED

    def run_beside(self) -> CompiledRun | None:
        """None: interpreted runs need Python."""
        return None

    def execute(
        self, inputs: list[torch.Tensor], constants: Sequence[float], seeds: Sequence[int]
    ) -> list[torch.Tensor]:
        """Run once. Takes ownership of `inputs` (empties the list), so that an input dying in the run is freed early.

        Raises `NodeError`, which names the operator and the user's line.
        """
        if self.launcher is None:
            return self._compute(inputs, constants, seeds)
        which = array("d", constants).tobytes()  # bits: 0.0 is not -0.0
        return self.launcher.run(
            lambda tensors, own_seeds: self._compute(tensors, constants, own_seeds), inputs, seeds, which
        )

    def _compute(
        self, inputs: list[torch.Tensor], constants: Sequence[float], seeds: Sequence[int]
    ) -> list[torch.Tensor]:
        frame = ExecutionFrame()
        frame.fill(self.kernels.template, inputs, constants, seeds)
        inputs.clear()
        return self.execute_with_prefilled_frame(frame)

    def execute_with_prefilled_frame(self, frame: ExecutionFrame) -> list[torch.Tensor]:
        """Run once on a frame that `frame.fill` has prepared."""
        return self.run(GraphTask(self.kernels, self.exec_info, frame))

    def run(self, task: GraphTask) -> list[torch.Tensor]:
        """Run `task` to completion, on this thread and perhaps others. Returns the outputs, which own their memory."""
        frame = task.frame
        taken = watched_storages(frame.values) if self._aliases.copied is None else {}
        with GraphTaskGuard(task):
            try:
                self.run_kernels(task)
                outputs = self._aliases.separate(taken, [frame.values[slot] for slot in self._outputs])
                task.mark_as_completed_and_run_post_processing(outputs)
            except BaseException as error:
                task.set_exception(error)
                raise
        return outputs

    @abstractmethod
    def run_kernels(self, task: GraphTask) -> None:
        """Compute everything that the task needs, and leave the task's outputs in the frame."""
