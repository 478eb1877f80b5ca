"""Compiled regions: parts of a served graph, each run as one kernel.

In: a region, which is a graph of its own, and when and with what graphs are compiled. Out: `DelegateKernel`, and
`Families`, in which the regions of graphs for several shapes find each other.
Source: torch/nativert/executor/DelegateExecutor.h.

Note [Regions compile as steps do]
The plans of a region are a `ProfilingGraphExecutor`'s, as a step's are: from disk, if a process compiled the region
before; otherwise from the compiler's process, while requests are interpreted; and interpreted for good, with a report,
if the compiler fails. A region is there to be run again, so its compile is asked for when it is made. Regions that
differ only in shapes share plans as steps do, too (Note [Programs of many shapes]): the first shape has a plan of its
own, and the second one asks for a plan with symbolic sizes, which further shapes then find.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence

import torch

from lazy_backend.cache.computation_cache import BoundedTable
from lazy_backend.lowering.artefacts.environment import Environment, environment
from lazy_backend.lowering.interpreter.frame import ExecutionFrame, FrameTemplate
from lazy_backend.lowering.interpreter.kernels import KernelGraph
from lazy_backend.lowering.ir.graph import Graph, Node, Value, empty_of
from lazy_backend.lowering.ir.shapes import skeleton
from lazy_backend.lowering.plans.cached_computation import make_key
from lazy_backend.lowering.plans.families import Family
from lazy_backend.lowering.plans.policy import CompilePolicy
from lazy_backend.lowering.plans.profiling import ExecutionPlan, ProfilingGraphExecutor
from lazy_backend.lowering.plans.specialise import CompileReport
from lazy_backend.lowering.products.thread_choice import num_threads_for
from lazy_backend.lowering.serving.request_threads import request_threads

# Programs of one served function, shapes aside. Branches on sizes and regions make several; each keeps a few plans.
_MAX_FAMILIES = 64


class Families:
    """What regions of the graphs of one served function share: a `Family` for each program and its settings."""

    def __init__(self, report: Callable[[CompileReport], None]) -> None:
        self._report = report
        self._table: BoundedTable[Hashable, Family] = BoundedTable(lambda: _MAX_FAMILIES)

    def finder(self, settings: Environment) -> Callable[[Graph], Family]:
        """What finds the family of a region under these settings."""
        return functools.partial(self._find, settings)

    def _find(self, settings: Environment, region: Graph) -> Family:
        # a region is given all floats of its graph, and a family compares those of its members
        key = skeleton(region), region.num_constants, region.num_seeds, settings
        return self._table.get_or_add(key, lambda: Family(self._report))


class DelegateKernel:
    """A region of a graph: one call that stands for many nodes. See Note [Regions compile as steps do].

    Its floats are compiled in: `constants` are those of the whole graph.
    """

    __slots__ = ("region", "mutates", "_chooser", "_policy", "_constants", "_places", "_shares")

    def __init__(
        self,
        region: Graph,
        constants: Sequence[float],
        policy: CompilePolicy,
        report: Callable[[CompileReport], None] = lambda report: None,
        families: Families | None = None,
    ) -> None:
        self.region = region
        self.mutates: tuple[Value, ...] = tuple(region.inputs[place] for place in region.mutated_inputs())
        self._places = {value.number: place for place, value in enumerate(region.inputs)}
        self._policy = policy
        self._constants = tuple(constants) if region.num_constants else ()
        self._shares = policy.shares_threads and num_threads_for(region) is None
        settings = environment(policy.backend)
        key = None if policy.store is None else make_key(region, settings)
        find_family = None if families is None else families.finder(settings)
        self._chooser = ProfilingGraphExecutor(region, report, key, find_family)
        self._chooser.plan_for(self._constants, policy)
        self._chooser.begin_due()

    def plan_for_run(self) -> ExecutionPlan:
        """The plan of the next run, which counts as one: compiled, or interpreted until it is."""
        ready = self._chooser.ready_plan_for(self._constants)
        return self._chooser.plan_for(self._constants, self._policy) if ready is None else ready

    def drop(self) -> None:
        """Note that no further request takes this region."""
        self._chooser.leave_family()

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.region.nodes

    @property
    def outputs(self) -> tuple[Value, ...]:
        return self.region.outputs

    def inputs(self) -> Sequence[Value]:
        return self.region.inputs

    def compute(self, frame: ExecutionFrame) -> None:
        values = frame.values
        operands = [_as_recorded(values[value.number], value) for value in self.region.inputs]
        copied = [
            (values[value.number], operand)
            for value, operand in zip(self.region.inputs, operands, strict=True)
            if value in self.mutates and operand is not values[value.number]
        ]
        results = self._execute(operands, frame.seeds)
        for original, written in copied:
            original.copy_(written)
        for value, result in zip(self.region.outputs, results, strict=True):
            values[value.number] = result

    def run_whole(
        self,
        template: FrameTemplate,
        arguments: Sequence[torch.Tensor],
        own: Sequence[tuple[int, torch.Tensor]],
        seeds: Sequence[int],
    ) -> list[torch.Tensor]:
        """Run once as the only kernel of its graph, without a frame. See `whole_region`.

        `arguments`: of the graph. `own`: tensors of this run for slots of the template.
        """
        if not template.operands:
            values = template.values
            template.operands[:] = [
                None if values[value.number] is None else _as_recorded(values[value.number], value)
                for value in self.region.inputs
            ]
        operands = template.operands.copy()
        for slot, argument in zip(template.inputs, arguments, strict=True):
            operands[self._places[slot]] = argument
        for slot, tensor in own:
            operands[self._places[slot]] = tensor
        return self._execute(operands, seeds)

    def _execute(self, operands: list[torch.Tensor], seeds: Sequence[int]) -> list[torch.Tensor]:
        plan = self.plan_for_run()  # beforehand: a compile asks for the number of threads
        if self._shares:
            return request_threads.run(plan.execute, operands, self._constants, seeds)
        return plan.execute(operands, self._constants, seeds)

    def describe(self, error: Exception) -> Exception:
        return error  # a `PlanError`, which names the calls that may have failed, or a `NodeError`


def whole_region(kernels: KernelGraph) -> DelegateKernel | None:
    """The region that a graph consists of."""
    match kernels.kernels:
        case [DelegateKernel() as region] if region.outputs == kernels.graph.outputs:
            numbers = {value.number for value in region.region.inputs}
            return region if numbers.issuperset(kernels.template.inputs) else None
    return None


def _as_recorded(tensor: torch.Tensor, value: Value) -> torch.Tensor:
    """`tensor` with the strides that a region was compiled for: kernels and their fake versions may differ there."""
    if tensor.stride() == value.meta.stride:
        return tensor
    return empty_of(value.meta, tensor.device).copy_(tensor)
