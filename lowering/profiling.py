"""Which plan runs a graph.

In: a graph and the constants of one run. Out: an `ExecutionPlan`.
A graph's first run is interpreted, so that nothing waits for a compiler; from the second sight on it is compiled, since
only what recurs is worth a compile. Seed: profiling_graph_executor_impl (profiling, optimized and fallback plan).

Note [Scalars promote once]
Floats are literals at first, because compilers fold them. A float that was seen to change becomes an input. If a
literal changes after the compile, all floats that can be inputs become inputs at once: so scalars cost one further
compile per graph, ever. A float that cannot be an input (`eps` of a norm) gets `max_specializations` plans; beyond that
the graph is interpreted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from lazy_backend.lowering.compiler import Backend, CompiledPlan, compile_graph, lookup_backend
from lazy_backend.lowering.ir import Graph, constants_of
from lazy_backend.lowering.scalars import can_promote
from lazy_backend.lowering.serial import SerialGraphExecutor


class ExecutionPlan(Protocol):
    """A runnable form of a graph."""

    kind: str

    def execute(
        self, inputs: list[torch.Tensor], constants: Sequence[float], seeds: Sequence[int]
    ) -> list[torch.Tensor]:
        """Run once; takes ownership of `inputs`."""


@dataclass(frozen=True, slots=True)
class CompilePolicy:
    """When and with what a graph is compiled. Arrives as an argument, so that nothing here reads settings."""

    backend: Backend
    enabled: bool
    num_profiled_runs: int
    max_specializations: int
    max_compiled_nodes: int


class GraphTooLarge(RuntimeError):
    """A graph above the bound: compilers take far more than linear time, so a forgotten mark_step would hang."""


@dataclass(frozen=True, slots=True)
class CompileReport:
    """One finished or failed compile, for metrics and warnings."""

    graph: Graph
    seconds: float
    plan: CompiledPlan | None
    error: Exception | None


@dataclass(slots=True)
class GraphExecutorState:
    """What `get_debug_state` shows."""

    runs: int
    plan: str
    compiles: int
    promoted_scalars: int
    specialized_plans: int
    error: str | None


@dataclass(slots=True)
class ProfilingGraphExecutor:
    """Hands out the plan for each run of one graph. Safe from any thread."""

    graph: Graph
    report: Callable[[CompileReport], None]
    runs: int = 0
    compiles: int = 0
    error: Exception | None = None
    _profiling_plan: SerialGraphExecutor | None = None
    _optimized_plans: list[CompiledPlan] = field(default_factory=list)
    _seen: tuple[float, ...] | None = None
    _changed: set[int] = field(default_factory=set)
    _promotable: frozenset[int] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def plan_for(self, constants: Sequence[float], policy: CompilePolicy) -> ExecutionPlan:
        """The plan for a run with these constants; may compile before it returns."""
        with self._lock:
            self.runs += 1
            self._observe(constants)
            if not policy.enabled or self.error is not None or self.runs <= policy.num_profiled_runs:
                return self._interpreted()
            for plan in self._optimized_plans:
                if plan.accepts(constants):
                    return plan
            if len(self._optimized_plans) >= policy.max_specializations:
                return self._interpreted()
            return self._compile(constants, policy)

    def is_optimized(self) -> bool:
        return bool(self._optimized_plans)

    def get_debug_state(self) -> GraphExecutorState:
        promoted = self._optimized_plans[-1].signature.scalars if self._optimized_plans else ()
        plan = "optimized" if self._optimized_plans else "fallback" if self.error else "profiling"
        error = None if self.error is None else str(self.error)
        return GraphExecutorState(self.runs, plan, self.compiles, len(promoted), len(self._optimized_plans), error)

    def _interpreted(self) -> SerialGraphExecutor:
        if self._profiling_plan is None:
            self._profiling_plan = SerialGraphExecutor(self.graph)
        return self._profiling_plan

    def _observe(self, constants: Sequence[float]) -> None:
        if self._seen is None:
            self._seen = tuple(constants)
        elif self._seen != tuple(constants):
            # != also holds for a constant that is NaN: it is promoted, which is right if not cheap
            self._changed.update(i for i, (a, b) in enumerate(zip(self._seen, constants, strict=True)) if a != b)
            self._seen = tuple(constants)

    def _compile(self, constants: Sequence[float], policy: CompilePolicy) -> ExecutionPlan:
        promoted = self._promotable_constants()
        if not self._optimized_plans:
            promoted &= self._changed
        lookup_backend(policy.backend)  # a misspelt name is the user's error, not the compiler's
        start = time.perf_counter()
        nodes = len(self.graph.nodes)
        try:
            if nodes > policy.max_compiled_nodes:
                raise GraphTooLarge(f"it has more nodes than config.max_compiled_nodes = {policy.max_compiled_nodes}")
            plan = compile_graph(self.graph, constants, promoted, policy.backend)
        except Exception as error:
            self.error = error
            self.report(CompileReport(self.graph, time.perf_counter() - start, None, error))
            return self._interpreted()
        self.compiles += 1
        self.report(CompileReport(self.graph, time.perf_counter() - start, plan, None))
        # a plan with more inputs serves what the older ones did
        self._optimized_plans = [p for p in self._optimized_plans if not _covers(plan, p)] + [plan]
        self._profiling_plan = None
        return plan

    def _promotable_constants(self) -> frozenset[int]:
        """See Note [Scalars promote once]. A constant used by two nodes needs a rule for both."""
        if self._promotable is None:
            fixed = {place for node in self.graph.nodes if not can_promote(node) for place in constants_of(node)}
            self._promotable = frozenset(range(self.graph.num_constants)) - fixed
        return self._promotable


def _covers(new: CompiledPlan, old: CompiledPlan) -> bool:
    return new.specialised.items() <= old.specialised.items()
