"""Which plan runs a graph.

In: a graph and the constants of one run. Out: an `ExecutionPlan`.
A graph's first run is interpreted, so that nothing waits for a compiler. From the second sight on it is compiled, since
only what recurs is worth a compile: in another process, while runs go on being interpreted, or not at all if the disk
has it, or if one symbolic plan serves all shapes of the program. A compile that fails leaves the graph interpreted for
good. What is kept of a graph only to compile it again is set aside when it has been optimized for a while.
Source: torch/csrc/jit/runtime/profiling_graph_executor_impl.h (profiling, optimized and fallback plan, release of the
profiling graph after a delay).

Note [No step pays twice]
A step in which a graph is made is slow as it is: the program is canonicalised, printed for its key and planned, 13 ms
of a GPT's whole step. To see which programs it is related to, to look for it on disk and to send it to the compiler
takes another 8. So where a compile happens in the background, the run for which the graph was made does not ask for
it; the next ones do, a piece each (`PendingCompile.advance`). Only if the disk is likely to have it, as after
`lazy_backend.cache.load`, that run looks there at once: to run compiled, it saves more than the search costs.

Note [Small graphs wait]
Around the steps of a loop lie small programs: gradients set to zero before the first step, the mean of a few losses, a
metric's update. A compile costs one or two seconds of a core whatever the size, and saves such a run some microseconds,
so that loops of trainers paid for six compiles where two mattered. So a graph is compiled once its runs have called as
many operators as `CompilePolicy.compile_after_operators`. Large results count like operators, since fusing saves their
way through memory. The count is made of the graph alone, not of clocks: what is compiled must not vary between runs of
one program.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from lazy_backend.cache.computation_cache import Key
from lazy_backend.cache.weak_table import WeakTable
from lazy_backend.lowering.artefacts.run_thread import Overlap
from lazy_backend.lowering.compilation.background import worker
from lazy_backend.lowering.compilation.compiler import CompiledPlan, CompiledRun
from lazy_backend.lowering.compilation.plan_kinds import PlanKind
from lazy_backend.lowering.compilation.request import runs_module_as_is
from lazy_backend.lowering.device_graphs.launcher import launches
from lazy_backend.lowering.interpreter.serial import SerialGraphExecutor
from lazy_backend.lowering.ir.functional import NotFunctional, why_not_functional
from lazy_backend.lowering.ir.graph import Graph
from lazy_backend.lowering.ir.portable import StoredGraph
from lazy_backend.lowering.plans.families import Family, Form, Member, SizedPlan
from lazy_backend.lowering.plans.pending_compile import compiles_elsewhere
from lazy_backend.lowering.plans.policy import CompilePolicy
from lazy_backend.lowering.plans.specialise import CompileReport, GraphCompiler
from lazy_backend.lowering.plans.trial import Trial


class ExecutionPlan(Protocol):
    """A runnable form of a graph."""

    conforms: bool  # whether a run has shown that its results lie in memory as they were recorded
    num_runs: int
    shortest_run: float  # seconds, of the runs but the first, which is slower; infinite before
    overlap: Overlap

    @property
    def kind(self) -> PlanKind:
        """How it computes the graph."""

    def execute(
        self, inputs: list[torch.Tensor], constants: Sequence[float], seeds: Sequence[int]
    ) -> list[torch.Tensor]:
        """Run once; takes ownership of `inputs`."""

    def run_beside(self) -> CompiledRun | None:
        """A run to begin on a thread that has no Python, instead of `execute`; None if runs need Python."""


@dataclass(slots=True)
class GraphExecutorState:
    """What `get_debug_state` shows."""

    runs: int
    plan: str  # "profiling", "small", "compiling", "optimized" or "fallback"
    compiles: int
    promoted_scalars: int
    specialized_plans: int
    error: str | None
    released: bool = False  # what is kept of the graph for another compile is set aside
    device_graph: str | None = None  # "launched", or why runs are not launched as one graph of the device


class ProfilingGraphExecutor:
    """Hands out the plan for each run of one graph. Thread-safe."""

    def __init__(
        self,
        graph: Graph,
        report: Callable[[CompileReport], None],
        key: Key | None = None,
        find_family: Callable[[Graph], Family] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stored = StoredGraph(graph)
        self.runs = 0
        self._report = report
        self._key = key
        # family and member are found only when the graph recurs: until then no plan is shared
        self._find_family = find_family
        self._membership: tuple[Family, Member] | None = None
        self.form: Form | None = None  # of the paths that lead to this graph
        self._compiler = GraphCompiler(self.stored, report, key)
        self._is_new = True
        self.is_small = False  # whether the latest run was interpreted for that; see Note [Small graphs wait]
        self._work: int | None = None  # of one run, once it was needed
        self._declined: NotFunctional | None = None
        self._is_checked = False  # whether `_declined` has been determined
        self._due: tuple[tuple[float, ...], CompilePolicy] | None = None  # see Note [No step pays twice]
        self._profiling_plan: SerialGraphExecutor | None = None
        self._latest = "profiling"
        # the latest result of `ready_plan_for`, with its constants, none of which is zero or NaN
        self._ready: tuple[tuple[float, ...], ExecutionPlan] | None = None
        self._clock = clock
        self._release_delay = math.inf
        self._release_at: float | None = None  # None while the latest run was interpreted
        self._lock = threading.RLock()

    @property
    def compiles(self) -> int:
        return self._compiler.compiles

    def plan_for(self, constants: Sequence[float], policy: CompilePolicy) -> ExecutionPlan:
        """The plan for a run with these constants. Compiles before it returns unless `policy.background`."""
        with self._lock:
            self.runs += 1
            self._compiler.observe(constants)
            plan: ExecutionPlan | None = None
            recurs = policy.enabled and self.stored.num_nodes > 0 and self.runs > policy.num_profiled_runs
            self.is_small = recurs and self._is_small(policy)
            if recurs and not self.is_small:
                if self._is_new and _postpones(policy) and compiles_elsewhere(policy.backend, self.stored.device):
                    self._due = tuple(constants), policy
                else:
                    self._due = None
                    plan = self._verified(self._compiled(constants, policy))
            self._is_new = False
            self._latest = "profiling" if plan is None else "optimized"
            self._ready = None
            is_compiling = self.is_compiling()
            if is_compiling or isinstance(plan, Trial):
                _compiling[id(self)] = self
            if plan is None:
                plan = self._interpreted(may_launch=self._stays_interpreted(policy))
                self._release_at = None
            elif not is_compiling and not isinstance(plan, Trial):
                self._profiling_plan = None
                self._release_delay = policy.release_delay
                if not self.stored.is_set_aside():
                    self._release_when_due()
            return plan

    def _is_small(self, policy: CompilePolicy) -> bool:
        """Whether the runs so far have called too few operators for a compile. See Note [Small graphs wait]."""
        if not policy.num_profiled_runs or self.runs * self.stored.num_nodes >= policy.compile_after_operators:
            return False
        if self._work is None:
            self._work = _work_of(self.stored.get())
        return self.runs * self._work < policy.compile_after_operators

    def _verified(self, plan: CompiledPlan | SizedPlan | None) -> ExecutionPlan | None:
        """`plan`, its trial, or None while other ranks try it. See Note [A plan is tried before it is used]."""
        compiled, sizes = (plan.plan, plan.sizes) if isinstance(plan, SizedPlan) else (plan, ())
        if compiled is None or compiled.proof.covers(sizes):
            return plan
        if compiled.proof.waits(sizes):
            return None
        return Trial(compiled, sizes, self._interpreted(may_launch=False), self._tell_of_trial)

    def _tell_of_trial(self, verdict: str, seconds: float) -> None:
        self._report(CompileReport(self.stored.get(), verdict, seconds))

    def _compiled(self, constants: Sequence[float], policy: CompilePolicy) -> CompiledPlan | SizedPlan | None:
        if self._declines(policy):
            return None
        if self._membership is None and self._find_family is not None:
            self._membership = self._find_family(self.stored.get()), Member(self.stored, self._key)
        if self._membership is None:
            return self._compiler.plan_for(constants, policy)
        family, member = self._membership
        shared = family.plan_for(member, constants, self._compiler.changed, policy, self.form, self.runs)
        if shared is None and member.is_static:
            return self._compiler.plan_for(constants, policy)
        return shared

    def _declines(self, policy: CompilePolicy) -> bool:
        """Whether the graph is interpreted for good, since compilers would get a write wrong. Checked only once."""
        if runs_module_as_is(policy.backend):
            return False
        if not self._is_checked:
            self._is_checked = True
            graph = self.stored.get()
            self._declined = why_not_functional(graph)
            if self._declined is not None:
                self._report(CompileReport(graph, "declined", error=self._declined))
        return self._declined is not None

    def is_compiling(self) -> bool:
        """Whether a compile is under way or due, or a trial is judged."""
        if self._due is not None or self._compiler.is_compiling() or self._compiler.is_judging():
            return True
        return self._membership is not None and self._membership[0].is_compiling()

    def begin_due(self) -> None:
        """Request now the compile that the next runs would request."""
        with self._lock:
            due, self._due = self._due, None
            if due is not None:
                self._compiled(*due)
            if self._membership is not None:
                self._membership[0].begin_due()
            self._compiler.begin_due()

    def ready_plan_for(self, constants: tuple[float, ...]) -> ExecutionPlan | None:
        """As `plan_for`, if there is a plan compiled for this graph alone; otherwise None, and no run is counted.

        Nearly always it is that of the run before, and found without the lock: threads that each hold it for a moment
        at every request would end up waiting for one another, at the price of a switch of threads for each.
        """
        ready, compiler = self._ready, self._compiler
        if ready is None or ready[0] != constants or compiler.whole_graph is not None or compiler.is_compiling():
            with self._lock:
                ready = self._find_ready(constants)
            if ready is None:
                return None
        self.runs += 1
        if not self.stored.is_set_aside():
            release_at = self._release_at
            if release_at is None or self._clock() >= release_at:
                with self._lock:
                    self._release_when_due()
        return ready[1]

    def _find_ready(self, constants: tuple[float, ...]) -> tuple[tuple[float, ...], ExecutionPlan] | None:
        compiler = self._compiler
        plan = None if compiler.is_compiling() or compiler.has_untried() else compiler.find_for_run(constants)
        if plan is None:
            return None
        found = constants, plan
        # 0.0 is the same as -0.0 only where tuples are compared
        self._ready = None if 0.0 in constants else found
        compiler.observe(constants)
        return found

    def _release_when_due(self) -> None:
        """Called at each run of a compiled plan until the graph is set aside: 0.1 µs, and less afterwards."""
        now = self._clock()
        if self._release_at is None:
            self._release_at = now + self._release_delay
        elif now >= self._release_at:
            self._release_at = None
            self.stored.set_aside()

    def note_run(self, constants: Sequence[float]) -> None:
        """Count the run in which the graph was recorded as a profiled run."""
        with self._lock:
            self.runs += 1
            self._compiler.observe(constants)

    def adopt_compiled(self) -> None:
        """Take a finished compile now, if there is one, rather than at the next run."""
        if self._membership is not None:
            self._membership[0].adopt_compiled()
        with self._lock:
            self._compiler.adopt()

    def is_optimized(self) -> bool:
        return self._latest == "optimized" or bool(self._compiler.plans)

    def get_debug_state(self) -> GraphExecutorState:
        plans, error = self._compiler.plans, self._declined or self._compiler.error
        if error is None and self._membership is not None and not self._membership[1].is_static:
            family, member = self._membership
            error = family.error() or member.limited
        plan = "optimized" if self.is_optimized() else "fallback" if error else "profiling"
        if plan == "profiling":
            plan = "compiling" if self.is_compiling() else "small" if self.is_small else plan
        promoted = plans[-1].signature.scalars if plans else ()
        text = None if error is None else str(error)
        released = self.stored.is_set_aside()
        launchers = [one.launcher for one in (*plans, self._profiling_plan) if one is not None and one.launcher]
        launched = next((state for one in launchers if (state := one.describe())), None)
        return GraphExecutorState(self.runs, plan, self.compiles, len(promoted), len(plans), text, released, launched)

    def debug_flush_compilation_cache(self) -> None:
        """Forget every plan and error: the next runs profile and compile anew. Source: `debugFlushCompilationCache`."""
        with self._lock:
            self._compiler = GraphCompiler(self.stored, self._report, self._key)
            if self._membership is not None:
                family, member = self._membership
                family.forget(member)
            self._profiling_plan = self._ready = self._release_at = self._due = None
            self._latest = "profiling"
            self.is_small = False
            self.runs = 0

    def leave_family(self) -> None:
        """Let others have a share of the limits: this graph is dropped."""
        if self._membership is not None:
            family, member = self._membership
            family.leave(member)

    def _stays_interpreted(self, policy: CompilePolicy) -> bool:
        """Whether there will be no compiled plan for such runs."""
        return not policy.enabled or self._declined is not None or self._compiler.error is not None

    def _interpreted(self, may_launch: bool) -> SerialGraphExecutor:
        if self._profiling_plan is None:
            self._profiling_plan = SerialGraphExecutor(self.stored.get())
        if may_launch and self._profiling_plan.launcher is None:
            self._profiling_plan.launcher = launches.launcher_of(self.stored)
        return self._profiling_plan


# What an interpreted call costs (10 µs), in bytes that a core writes in that time.
_BYTES_PER_OPERATOR = 1 << 16


def _work_of(graph: Graph) -> int:
    """The operators of one run, and those that the bytes of their results stand for."""
    results = {value for node in graph.nodes for value in node.outputs if value is not None}
    return len(graph.nodes) + sum(value.meta.nbytes for value in results) // _BYTES_PER_OPERATOR


def _postpones(policy: CompilePolicy) -> bool:
    """See Note [No step pays twice]."""
    return policy.background and not policy.expects_hits


# Executors whose graph, at their latest run, was being compiled in the background or due to be.
_compiling: WeakTable[int, ProfilingGraphExecutor] = WeakTable()


def pending_compiles() -> int:
    """The number of graphs whose compile is under way or due."""
    return sum(executor.is_compiling() for executor in list(_compiling))


def wait_for_compiles(
    timeout: float | None = None, asks: bool = True, meanwhile: Callable[[], None] | None = None
) -> bool:
    """Wait until no compile is under way or due; False if `timeout` seconds were not enough.

    `asks`: whether due compiles are requested now; otherwise they are left to later runs, and not waited for.
    `meanwhile` is called again and again until then.
    """
    with worker.awaited(timeout):
        for executor in list(_compiling) if asks else ():
            executor.begin_due()
        end = math.inf if timeout is None else time.monotonic() + timeout
        finished = worker.wait(timeout, meanwhile)
        while finished and _go_on(asks):  # with a search, or after one
            finished = worker.wait(None if timeout is None else end - time.monotonic(), meanwhile)
    for executor in list(_compiling):
        executor.adopt_compiled()
        _compiling.discard(id(executor))
    return finished


def _go_on(asks: bool) -> bool:
    """Take what the compiler has answered. Returns whether it was asked again."""
    for executor in list(_compiling):
        executor.adopt_compiled()
        if asks:
            executor.begin_due()
    return not worker.wait(0)
