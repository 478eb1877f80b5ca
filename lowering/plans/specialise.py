"""The compiled plans of one graph: what is compiled in, and what became an input.

In: a graph, concrete or with symbolic sizes, and the constants of a run. Out: a `CompiledPlan` that holds for them, or
None while the compiler works, or for good if it failed.

Note [Scalars promote once]
Floats are literals at first, because compilers fold them. A float that was seen to change becomes an input. If a
literal changes after the compile, all floats that can be inputs become inputs at once: so scalars cost one further
compile per graph, ever. A float that cannot be an input (`eps` of a norm) gets `max_specializations` plans; beyond that
the graph is interpreted.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from lazy_backend.cache.computation_cache import Key
from lazy_backend.cache.disk import DiskCounts, Place
from lazy_backend.lowering.compilation.background import Job, NotPortableThere, worker
from lazy_backend.lowering.compilation.compiler import Backend, CompiledPlan, compile_graph, load_graph, lookup_backend
from lazy_backend.lowering.compilation.environment import disk_key_parts
from lazy_backend.lowering.compilation.scalars import can_promote
from lazy_backend.lowering.ir.graph import Graph, constants_of
from lazy_backend.lowering.ir.portable import NotPortable, StoredGraph
from lazy_backend.lowering.ir.ranges import profiled
from lazy_backend.lowering.ir.shapes import Sizes


class ArtefactStore(Protocol):
    """Where compiled graphs outlive the process."""

    def get(self, key: Key) -> bytes | None: ...

    def put(self, key: Key, payload: bytes) -> bool: ...

    def place(self) -> Place | None: ...

    def count_elsewhere(self, counts: DiskCounts, last_error: str | None) -> None: ...


@dataclass(frozen=True, slots=True)
class FusionStrategy:
    """How many plans the shapes of one program get. Seed: profiling_graph_executor_impl, `FusionStrategy`.

    `static`: plans for one shape each, before a symbolic one is tried; `dynamic`: symbolic ones, a wrong guess counted
    with the others; `symbols`: sizes that may vary independently.
    """

    static: int = 1
    dynamic: int = 3
    symbols: int = 4


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
    strategy: FusionStrategy = FusionStrategy()
    release_delay: float = math.inf  # seconds a graph is optimized before it is set aside
    compiler_idle: float = math.inf  # seconds the compiler's process waits for more before it is ended


class GraphTooLarge(RuntimeError):
    """A graph above the bound: compilers take far more than linear time, so a forgotten mark_step would hang."""


@dataclass(frozen=True, slots=True)
class CompileReport:
    """A compile that began, ended or failed, a graph found compiled on disk, or limits passed; for metrics and texts.

    `stage`: "started" (in the background), "compiled", "loaded" (from disk), "failed", "declined"
    (`NotFunctional`: no compiler was asked), or "limited" (`TooManyShapes`).
    """

    graph: Graph
    stage: str
    seconds: float = 0.0
    plan: CompiledPlan | None = None
    error: Exception | None = None
    symbolic: bool = False  # for many shapes
    changed: tuple[tuple[int, float, float], ...] = ()  # constants that no plan had: place, value before, value now


@dataclass(frozen=True, slots=True)
class _Request:
    """A compile under way, and what it was asked for."""

    job: Job
    constants: tuple[float, ...]
    promoted: frozenset[int]
    policy: CompilePolicy


class GraphCompiler:
    """Makes and keeps the compiled plans of one graph. The caller sees that one thread at a time uses it.

    `sizes`: what the numbers of a symbolic graph are, `stored` being one sample.
    """

    def __init__(
        self,
        stored: StoredGraph,
        report: Callable[[CompileReport], None],
        key: Key | None = None,
        sizes: Sizes | None = None,
    ) -> None:
        self.stored = stored
        self.report = report
        self.key = key  # without one nothing is stored
        self.sizes = sizes
        self.compiles = 0
        self.error: Exception | None = None
        self.plans: list[CompiledPlan] = []
        self._seen: tuple[float, ...] | None = None
        self.changed: set[int] = set()
        self._promotable: frozenset[int] | None = None
        self._request: _Request | None = None
        self._beginning: Iterator[None] | None = None  # a compile that is being asked for, see `_ask`
        self._changed_values: tuple[tuple[int, float, float], ...] = ()

    @property
    def graph(self) -> Graph:
        return self.stored.get()

    def plan_for(self, constants: Sequence[float], policy: CompilePolicy) -> CompiledPlan | None:
        """A plan for these constants, if there is one; has one made otherwise, unless there are too many."""
        self.adopt()
        plan = self.find(constants)
        if self._beginning is not None:
            self._begin_further()
            plan = plan or self.find(constants)
        elif plan is None and self._wants_another(policy):
            self._compile(constants, policy)
            plan = self.find(constants)
        return plan

    def _wants_another(self, policy: CompilePolicy) -> bool:
        return self.error is None and self._request is None and len(self.plans) < policy.max_specializations

    def is_compiling(self) -> bool:
        return self._request is not None or self._beginning is not None

    def begin_due(self) -> None:
        """Ask at once for the compile that is being asked for."""
        while self._beginning is not None:
            self._begin_further()

    def _begin_further(self) -> None:
        assert self._beginning is not None
        if next(self._beginning, self) is self:
            self._beginning = None

    def find(self, constants: Sequence[float]) -> CompiledPlan | None:
        return next((plan for plan in self.plans if plan.accepts(constants)), None)

    def observe(self, constants: Sequence[float]) -> None:
        """Note which constants change from run to run."""
        if self._seen is None:
            self._seen = tuple(constants)
        elif self._seen is not constants and self._seen != tuple(constants):
            # != also holds for a constant that is NaN: it is promoted, which is right if not cheap
            self.changed.update(i for i, (a, b) in enumerate(zip(self._seen, constants, strict=True)) if a != b)
            self._seen = tuple(constants)

    def _compile(self, constants: Sequence[float], policy: CompilePolicy) -> None:
        """Add a plan for these constants, or begin to: from disk, in the compiler's process, or here."""
        promoted = self._promotable_constants()
        if not self.plans:
            promoted &= self.changed
        self._changed_values = self.plans[-1].refused(constants) if self.plans else ()
        elsewhere = compiles_elsewhere(policy.backend, self.stored.device)
        if not elsewhere:
            lookup_backend(policy.backend)  # a misspelt name is the user's error, not the compiler's
        nodes = len(self.graph.nodes)
        if nodes > policy.max_compiled_nodes:
            bound = f"it has more nodes than config.max_compiled_nodes = {policy.max_compiled_nodes}"
            self._fail(GraphTooLarge(bound), 0.0)
        elif not elsewhere:
            self._compile_here(constants, promoted, policy)
        else:
            self._beginning = self._ask(tuple(constants), promoted, policy)
            if policy.background:
                self._begin_further()
            else:
                with worker.awaited():
                    self.begin_due()

    def _ask(self, constants: Sequence[float], promoted: frozenset[int], policy: CompilePolicy) -> Iterator[None]:
        """Have a plan from elsewhere, in pieces of a millisecond: in the background each run does one of them."""
        if self._load(constants, promoted, policy):
            return
        yield
        worker.start(policy.compiler_idle)
        yield
        self._begin(constants, promoted, policy)

    def _compile_here(self, constants: Sequence[float], promoted: frozenset[int], policy: CompilePolicy) -> None:
        start = time.perf_counter()
        try:
            with profiled("compile"):
                plan = compile_graph(self.graph, constants, promoted, policy.backend, self.sizes, self.stored)
        except Exception as error:
            self._fail(error, time.perf_counter() - start)
        else:
            self._add(plan, "compiled", time.perf_counter() - start)

    def _load(self, constants: Sequence[float], promoted: frozenset[int], policy: CompilePolicy) -> bool:
        """Take the plan from disk, if it is there."""
        if policy.store is None or self.key is None:
            return False
        start = time.perf_counter()
        data = policy.store.get(self._artefact_key(constants, promoted))
        if data is None:
            return False
        try:
            plan = load_graph(data, self.stored, constants, promoted, self.sizes)
        except Exception:
            return False  # made by a version that wrote something else: the compiler makes a new one
        self._add(plan, "loaded", time.perf_counter() - start)
        return True

    def _begin(self, constants: Sequence[float], promoted: frozenset[int], policy: CompilePolicy) -> None:
        """Have the compiler's process compile. See Note [Compiles happen elsewhere]."""
        place = None if policy.store is None or self.key is None else policy.store.place()
        keep = None if place is None else (place, self._artefact_key(constants, promoted))
        try:
            job = worker.submit(self.graph, constants, promoted, self.sizes, policy.compiler_idle, keep)
        except NotPortable:
            self._compile_here(constants, promoted, policy)
            return
        self._request = _Request(job, tuple(constants), promoted, policy)
        self._tell("started")
        if not policy.background:
            with profiled("compile"):
                worker.wait_for(job)
                self.adopt()

    def adopt(self) -> None:
        """Turn a compile that has ended into a plan."""
        request = self._request
        if request is None:
            return
        worker.poll()
        job = request.job
        if not job.done:
            return
        self._request = None
        if request.policy.store is not None and job.kept is not None:
            request.policy.store.count_elsewhere(*job.kept)
        if isinstance(job.error, NotPortableThere):
            self._compile_here(request.constants, request.promoted, request.policy)
        elif job.error is not None:
            self._fail(job.error, job.seconds)
        elif job.result is not None:
            self._take(job.result, request)

    def _take(self, data: bytes, request: _Request) -> None:
        try:
            plan = load_graph(data, self.stored, request.constants, request.promoted, self.sizes)
        except Exception as error:
            self._fail(error, request.job.seconds)
            return
        self._add(plan, "compiled", request.job.seconds)
        store = request.policy.store
        if store is not None and self.key is not None and request.job.kept is None:  # a readonly one: it says so
            store.put(self._artefact_key(request.constants, request.promoted), data)

    def _add(self, plan: CompiledPlan, stage: str, seconds: float) -> None:
        self.compiles += stage == "compiled"
        # a plan with more inputs serves what the older ones did
        self.plans = [p for p in self.plans if not _covers(plan, p)] + [plan]
        self._tell(stage, seconds, plan)

    def _fail(self, error: Exception, seconds: float) -> None:
        self.error = error
        self._tell("failed", seconds, error=error)

    def _tell(
        self, stage: str, seconds: float = 0.0, plan: CompiledPlan | None = None, error: Exception | None = None
    ) -> None:
        symbolic = self.sizes is not None
        self.report(CompileReport(self.graph, stage, seconds, plan, error, symbolic, self._changed_values))

    def _promotable_constants(self) -> frozenset[int]:
        """See Note [Scalars promote once]. A constant used by two nodes needs a rule for both."""
        if self._promotable is None:
            places = [(node, constants_of(node)) for node in self.graph.nodes]
            fixed = {place for node, own in places if own and not can_promote(node) for place in own}
            self._promotable = frozenset(range(self.graph.num_constants)) - fixed
        return self._promotable

    def _artefact_key(self, constants: Sequence[float], promoted: frozenset[int]) -> Key:
        """The exact key of a compiled graph: the graph's own, what was compiled in, and what it was compiled with."""
        assert self.key is not None
        literals = [f"{place}={value.hex()}" for place, value in enumerate(constants) if place not in promoted]
        parts = (
            ("inputs", ", ".join(map(str, sorted(promoted)))),
            ("literals", ", ".join(literals)),
            ("sizes", "" if self.sizes is None else json.dumps(self.sizes.to_json())),
        )
        return Key((*self.key.parts, *parts, *disk_key_parts()))


def _covers(new: CompiledPlan, old: CompiledPlan) -> bool:
    return new.specialised.items() <= old.specialised.items()


def compiles_elsewhere(backend: Backend, device: torch.device) -> bool:
    """Whether the compiler's process compiles for this backend: the one whose results can be sent."""
    return backend == "inductor" and device.type == "cpu" and hasattr(os, "register_at_fork")
