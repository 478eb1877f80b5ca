"""Which plan runs a graph.

In: a graph and the constants of one run. Out: an `ExecutionPlan`.
A graph's first run is interpreted, so that nothing waits for a compiler. From the second sight on it is compiled, since
only what recurs is worth a compile: in another process, while runs go on being interpreted, or not at all if the disk
has it. A compile that fails leaves the graph interpreted for good. Seed: profiling_graph_executor_impl (profiling,
optimized and fallback plan).

Note [Scalars promote once]
Floats are literals at first, because compilers fold them. A float that was seen to change becomes an input. If a
literal changes after the compile, all floats that can be inputs become inputs at once: so scalars cost one further
compile per graph, ever. A float that cannot be an input (`eps` of a norm) gets `max_specializations` plans; beyond that
the graph is interpreted.
"""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from lazy_backend.cache.computation import Key
from lazy_backend.lowering.artefact import made_for
from lazy_backend.lowering.background import Job, NotPortableThere, compiler_settings, process_state, worker
from lazy_backend.lowering.compiler import Backend, CompiledPlan, compile_graph, load_graph, lookup_backend
from lazy_backend.lowering.ir import Graph, constants_of
from lazy_backend.lowering.portable import NotPortable
from lazy_backend.lowering.scalars import can_promote
from lazy_backend.lowering.serial import SerialGraphExecutor


class ExecutionPlan(Protocol):
    """A runnable form of a graph."""

    kind: str
    conforms: bool  # whether a run has shown that its results lie in memory as they were recorded

    def execute(
        self, inputs: list[torch.Tensor], constants: Sequence[float], seeds: Sequence[int]
    ) -> list[torch.Tensor]:
        """Run once; takes ownership of `inputs`."""


class ArtefactStore(Protocol):
    """Where compiled graphs outlive the process."""

    def get(self, key: Key) -> bytes | None: ...

    def put(self, key: Key, payload: bytes) -> bool: ...


@dataclass(frozen=True, slots=True)
class CompilePolicy:
    """When and with what a graph is compiled. Arrives as an argument, so that nothing here reads settings."""

    backend: Backend
    enabled: bool
    num_profiled_runs: int
    max_specializations: int
    max_compiled_nodes: int
    background: bool = False
    store: ArtefactStore | None = None


class GraphTooLarge(RuntimeError):
    """A graph above the bound: compilers take far more than linear time, so a forgotten mark_step would hang."""


@dataclass(frozen=True, slots=True)
class CompileReport:
    """One compile that began, ended or failed, or one graph found compiled on disk; for metrics and messages."""

    graph: Graph
    stage: str  # "started" (in the background), "compiled", "loaded" (from disk), "failed"
    seconds: float = 0.0
    plan: CompiledPlan | None = None
    error: Exception | None = None


@dataclass(slots=True)
class GraphExecutorState:
    """What `get_debug_state` shows."""

    runs: int
    plan: str  # "profiling", "compiling", "optimized" or "fallback"
    compiles: int
    promoted_scalars: int
    specialized_plans: int
    error: str | None


@dataclass(frozen=True, slots=True)
class _Request:
    """A compile under way, and what it was asked for."""

    job: Job
    constants: tuple[float, ...]
    promoted: frozenset[int]
    policy: CompilePolicy


class ProfilingGraphExecutor:
    """Hands out the plan for each run of one graph. Safe from any thread."""

    def __init__(self, graph: Graph, report: Callable[[CompileReport], None], key: Key | None = None) -> None:
        self.graph = graph
        self.report = report
        self.key = key  # without one nothing is stored
        self.runs = 0
        self.compiles = 0
        self.error: Exception | None = None
        self._profiling_plan: SerialGraphExecutor | None = None
        self._optimized_plans: list[CompiledPlan] = []
        self._seen: tuple[float, ...] | None = None
        self._changed: set[int] = set()
        self._promotable: frozenset[int] | None = None
        self._request: _Request | None = None
        self._ready: tuple[tuple[float, ...], CompiledPlan] | None = None  # what `ready_plan_for` gave last
        self._lock = threading.Lock()

    def plan_for(self, constants: Sequence[float], policy: CompilePolicy) -> ExecutionPlan:
        """The plan for a run with these constants. Compiles before it returns unless `policy.background`."""
        with self._lock:
            self.runs += 1
            self._observe(constants)
            if not policy.enabled or self.error is not None or self.runs <= policy.num_profiled_runs:
                return self._interpreted()
            self._adopt()
            plan = self._find(constants)
            if plan is None and self._request is None and len(self._optimized_plans) < policy.max_specializations:
                self._compile(constants, policy)
                plan = self._find(constants)
            return plan or self._interpreted()

    def ready_plan_for(self, constants: tuple[float, ...]) -> ExecutionPlan | None:
        """As `plan_for`, if a compiled plan is there; otherwise None, and nothing is counted."""
        with self._lock:
            # the same object as last time: comparing floats bit by bit takes 1 µs for three
            plan = self._ready[1] if self._ready is not None and self._ready[0] is constants else self._find(constants)
            if plan is None or self._request is not None:
                return None
            self._ready = constants, plan
            self.runs += 1
            self._observe(constants)
            return plan

    def note_run(self, constants: Sequence[float]) -> None:
        """The graph ran while it was recorded; that counts as a profiled run."""
        with self._lock:
            self.runs += 1
            self._observe(constants)

    def adopt_compiled(self) -> None:
        """Take a compile that has ended, if there is one; otherwise the next run does."""
        with self._lock:
            self._adopt()

    def is_optimized(self) -> bool:
        return bool(self._optimized_plans)

    def get_debug_state(self) -> GraphExecutorState:
        promoted = self._optimized_plans[-1].signature.scalars if self._optimized_plans else ()
        plan = "optimized" if self._optimized_plans else "fallback" if self.error else "profiling"
        if self._request is not None and not self._optimized_plans:
            plan = "compiling"
        error = None if self.error is None else str(self.error)
        return GraphExecutorState(self.runs, plan, self.compiles, len(promoted), len(self._optimized_plans), error)

    def debug_flush_compilation_cache(self) -> None:
        """Forget every plan and error: the next runs profile and compile anew. Seed: `debugFlushCompilationCache`."""
        with self._lock:
            self._optimized_plans.clear()
            self._ready = None
            self._profiling_plan = self._request = self.error = self._seen = None
            self._changed.clear()
            self.runs = 0

    def _find(self, constants: Sequence[float]) -> CompiledPlan | None:
        return next((plan for plan in self._optimized_plans if plan.accepts(constants)), None)

    def _interpreted(self) -> SerialGraphExecutor:
        if self._profiling_plan is None:
            self._profiling_plan = SerialGraphExecutor(self.graph)
        return self._profiling_plan

    def _observe(self, constants: Sequence[float]) -> None:
        if self._seen is None:
            self._seen = tuple(constants)
        elif self._seen is not constants and self._seen != tuple(constants):
            # != also holds for a constant that is NaN: it is promoted, which is right if not cheap
            self._changed.update(i for i, (a, b) in enumerate(zip(self._seen, constants, strict=True)) if a != b)
            self._seen = tuple(constants)

    # ----- compiling

    def _compile(self, constants: Sequence[float], policy: CompilePolicy) -> None:
        """Add a plan for these constants, or begin to: from disk, in the compiler's process, or here."""
        promoted = self._promotable_constants()
        if not self._optimized_plans:
            promoted &= self._changed
        elsewhere = compiles_elsewhere(policy.backend, self.graph)
        if not elsewhere:
            lookup_backend(policy.backend)  # a misspelt name is the user's error, not the compiler's
        nodes = len(self.graph.nodes)
        if nodes > policy.max_compiled_nodes:
            bound = f"it has more nodes than config.max_compiled_nodes = {policy.max_compiled_nodes}"
            self._fail(GraphTooLarge(bound), 0.0)
        elif not elsewhere:
            self._compile_here(constants, promoted, policy)
        elif not self._load(constants, promoted, policy):
            self._begin(constants, promoted, policy)

    def _compile_here(self, constants: Sequence[float], promoted: frozenset[int], policy: CompilePolicy) -> None:
        start = time.perf_counter()
        try:
            plan = compile_graph(self.graph, constants, promoted, policy.backend)
        except Exception as error:
            self._fail(error, time.perf_counter() - start)
        else:
            self._add(plan, "compiled", time.perf_counter() - start)

    def _load(self, constants: Sequence[float], promoted: frozenset[int], policy: CompilePolicy) -> bool:
        """Take the plan from disk, if it is there."""
        if policy.store is None or self.key is None:
            return False
        start = time.perf_counter()
        data = policy.store.get(artefact_key(self.key, constants, promoted))
        if data is None:
            return False
        try:
            plan = load_graph(data, self.graph, constants, promoted)
        except Exception:
            return False  # made by a version that wrote something else: the compiler makes a new one
        self._add(plan, "loaded", time.perf_counter() - start)
        return True

    def _begin(self, constants: Sequence[float], promoted: frozenset[int], policy: CompilePolicy) -> None:
        """Have the compiler's process compile. See Note [Compiles happen elsewhere]."""
        try:
            job = worker.submit(self.graph, constants, promoted)
        except NotPortable:
            self._compile_here(constants, promoted, policy)
            return
        self._request = _Request(job, tuple(constants), promoted, policy)
        _compiling.add(self)
        self.report(CompileReport(self.graph, "started"))
        if not policy.background:
            worker.wait_for(job)
            self._adopt()

    def _adopt(self) -> None:
        """Turn a compile that has ended into a plan."""
        request = self._request
        if request is None:
            return
        worker.poll()
        job = request.job
        if not job.done:
            return
        self._request = None
        _compiling.discard(self)
        if isinstance(job.error, NotPortableThere):
            self._compile_here(request.constants, request.promoted, request.policy)
        elif job.error is not None:
            self._fail(job.error, job.seconds)
        elif job.result is not None:
            self._take(job.result, request)

    def _take(self, data: bytes, request: _Request) -> None:
        try:
            plan = load_graph(data, self.graph, request.constants, request.promoted)
        except Exception as error:
            self._fail(error, request.job.seconds)
            return
        self._add(plan, "compiled", request.job.seconds)
        if request.policy.store is not None and self.key is not None:
            request.policy.store.put(artefact_key(self.key, request.constants, request.promoted), data)

    def _add(self, plan: CompiledPlan, stage: str, seconds: float) -> None:
        self.compiles += stage == "compiled"
        # a plan with more inputs serves what the older ones did
        self._optimized_plans = [p for p in self._optimized_plans if not _covers(plan, p)] + [plan]
        self._profiling_plan = self._ready = None
        self.report(CompileReport(self.graph, stage, seconds, plan))

    def _fail(self, error: Exception, seconds: float) -> None:
        self.error = error
        self.report(CompileReport(self.graph, "failed", seconds, error=error))

    def _promotable_constants(self) -> frozenset[int]:
        """See Note [Scalars promote once]. A constant used by two nodes needs a rule for both."""
        if self._promotable is None:
            fixed = {place for node in self.graph.nodes if not can_promote(node) for place in constants_of(node)}
            self._promotable = frozenset(range(self.graph.num_constants)) - fixed
        return self._promotable


def _covers(new: CompiledPlan, old: CompiledPlan) -> bool:
    return new.specialised.items() <= old.specialised.items()


# Those whose graph is being compiled in the background.
_compiling: weakref.WeakSet[ProfilingGraphExecutor] = weakref.WeakSet()


def wait_for_compiles(timeout: float | None = None) -> bool:
    """Wait until nothing is being compiled; False if `timeout` seconds were not enough."""
    finished = worker.wait(timeout)
    for executor in list(_compiling):
        executor.adopt_compiled()
    return finished


def compiles_elsewhere(backend: Backend, graph: Graph) -> bool:
    """Whether the compiler's process compiles for this backend: the one whose results can be sent."""
    return backend == "inductor" and graph.device.type == "cpu" and hasattr(os, "register_at_fork")


def artefact_key(key: Key, constants: Sequence[float], promoted: frozenset[int]) -> Key:
    """The exact key of a compiled graph: the graph's own, what was compiled in, and what it was compiled with."""
    literals = [f"{place}={value.hex()}" for place, value in enumerate(constants) if place not in promoted]
    parts = (
        ("inputs", ", ".join(map(str, sorted(promoted)))),
        ("literals", ", ".join(literals)),
        ("artefact", json.dumps(made_for(), sort_keys=True)),
        ("state", json.dumps(process_state(), sort_keys=True)),
        ("settings", json.dumps(compiler_settings(), sort_keys=True)),
    )
    return Key((*key.parts, *parts))
