"""Cut a trace, find or make its computation, and run it in the background.

In: what a device recorded. Out: real tensors in the storages that are still alive.
Method names follow the seed document lazy_graph_executor, in snake_case.

Note [A read cuts the graph]
Whatever needs a value runs everything pending on the device, once, and waits. Nothing is ever computed twice: unlike
in LTC and torch_xla, a read is not a separate graph whose operators stay pending. Every cut is counted with its cause.

Note [Live sets that differ]
What is alive at a sync becomes an output, so a path is bound once for each live set. A computation with a few outputs
more than are wanted is as good: it runs, and what nobody holds is dropped at once. Where live sets keep differing, as
in a loop that keeps another activation each time, the third is bound to a computation with all outputs that were ever
wanted there, which then serves whatever part of them is alive.

Note [Where a run happens]
On CUDA a run is scheduled on the device's own thread, and Python goes on recording the next step. On the CPU that
thread would have an OpenMP team of its own beside the main thread's: with more threads than cores, libgomp sleeps
between parallel regions, and a GPT's step took twice as long (30 against 15 ms, two cores), far more than overlapping
it with recording gains. So unless operators use one thread, a CPU run happens within the call that synced. So does one
that the caller waits for, as of a read: there is nothing to overlap with, and two switches of threads make a step of an
MLP a tenth longer. Locks, errors and poisoning are the same; `config.run_in_background` decides.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from time import perf_counter
from typing import Any, ParamSpec, TypeVar

import torch

from lazy_backend import metrics
from lazy_backend.cache.computation_cache import BoundedTable, ComputationCache
from lazy_backend.cache.trie import TrieNode
from lazy_backend.diagnostics.debug_log import tell_compile, tell_run, tell_sync, told
from lazy_backend.diagnostics.history import SyncRecord, explaining, history
from lazy_backend.diagnostics.limits import GraphLimit
from lazy_backend.diagnostics.reasons import explain_binding, note_plan, record_compile
from lazy_backend.errors import (
    CompileWarning,
    ExecutionError,
    ExecutionNotAllowedError,
    GraphCutWarning,
    LazyBackendError,
    PoisonedTensorError,
    StrictModeError,
)
from lazy_backend.errors.sites import purpose_of_read, user_site, warn_user
from lazy_backend.execution.disk_cache import current_store
from lazy_backend.lowering.compilation.background import WorkerDied
from lazy_backend.lowering.compilation.compiler import Backend
from lazy_backend.lowering.compilation.environment import Environment, environment
from lazy_backend.lowering.interpreter.kernels import NodeError
from lazy_backend.lowering.ir.canonical import PostOrderData, fresh_slots, run_post_order
from lazy_backend.lowering.ir.functional import NotFunctional
from lazy_backend.lowering.ir.graph import Graph, TensorMeta, check_graph, empty_of
from lazy_backend.lowering.ir.program import Call, Cut, Fresh, Token, View
from lazy_backend.lowering.ir.ranges import is_profiling, profiled
from lazy_backend.lowering.ir.shapes import skeleton
from lazy_backend.lowering.plans.cached_computation import CachedComputation, Computation, make_key
from lazy_backend.lowering.plans.families import Family
from lazy_backend.lowering.plans.profiling import ExecutionPlan
from lazy_backend.lowering.plans.specialise import ArtefactStore, CompilePolicy, CompileReport, FusionStrategy
from lazy_backend.settings import config
from lazy_backend.tensors.locks import DeviceRun, Work
from lazy_backend.tensors.state import DeviceContext, LazyStorage, TensorData, Trace
from lazy_backend.tensors.tensor import LazyTensor, backing_tensor, poisoned
from lazy_backend.tensors.thread_state import run_clean
from lazy_backend.tensors.transfers import downloaded

P = ParamSpec("P")
R = TypeVar("R")

# Live sets remembered per path. They differ from step to step only in odd programs; without a bound those would grow.
_MAX_BINDINGS = 64

# Live sets of a path that get computations of their own, before one with all their outputs is made.
_MAX_LIVE_SETS = 2

# Outputs that nobody holds and that are computed all the same, rather than making another computation.
_MAX_UNWANTED = 2

# Under this name, instead of a live set, a path keeps the outputs of the computation that serves all of them.
_UNION = ("union",)


def _covering(bindings: Mapping[Any, Any], wanted: tuple[int, ...], settings: Environment) -> tuple[int, ...] | None:
    """A set of outputs bound here that holds all of `wanted`: the union if there is one, or one with not many more."""
    needed = set(wanted)
    union: tuple[int, ...] | None = bindings.get((_UNION, settings))
    if union is not None:
        return union if needed.issubset(union) and (union, settings) in bindings else None
    found = [
        indices
        for (indices, other), bound in bindings.items()
        if other == settings
        and isinstance(bound, CachedComputation)
        and bound.outputs is None
        and needed.issubset(indices)
        and len(indices) - len(wanted) <= _MAX_UNWANTED
    ]
    return min(found, key=len, default=None)


# every sync asks, and settings hardly change: 0.5 µs instead of 2
@functools.lru_cache(maxsize=1)
def _policy(
    backend: Backend,
    compile: str,
    num_profiled_runs: int,
    max_specializations: int,
    max_compiled_nodes: int,
    store: ArtefactStore | None,
    max_static_shapes: int,
    max_dynamic_shapes: int,
    max_symbols: int,
    release_delay_seconds: float | None,
    compiler_idle_seconds: float | None,
) -> CompilePolicy:
    """The settings that say how to compile, as the layers below take them."""
    return CompilePolicy(
        backend=backend,
        enabled=compile != "off",
        num_profiled_runs=num_profiled_runs,
        max_specializations=max_specializations,
        max_compiled_nodes=max_compiled_nodes,
        background=compile == "background",
        store=store,
        strategy=FusionStrategy(max_static_shapes, max_dynamic_shapes, max_symbols),
        release_delay=math.inf if release_delay_seconds is None else release_delay_seconds,
        compiler_idle=math.inf if compiler_idle_seconds is None else compiler_idle_seconds,
    )


@dataclass(frozen=True, slots=True)
class SyncTensorsConfig:
    """How a sync behaves.

    `force_ltc_data`: wait until the data is there (a read) rather than return once the run is scheduled. The seed's
    second flag, `sync_ltc_data`, has no use here: a synced tensor always becomes plain data.
    """

    force_ltc_data: bool = False


@dataclass(slots=True)
class SyncTensorCollection:
    """What one sync of one device is about.

    What is prepared rests on `cursor`, not on the context's trace, which a signal handler or a finalizer may replace.
    """

    config: SyncTensorsConfig
    context: DeviceContext
    cursor: TrieNode[Call | Cut]  # where the trace ends
    indices: tuple[int, ...]  # places of the live storages among the pending ones
    storages: list[LazyStorage]  # the same, held strongly from here on
    cause: str
    site: str
    hash: str = ""  # of the computation's key, once it is known
    is_new: bool = False  # whether neither the path nor its graph was known with this live set


@dataclass(frozen=True, slots=True)
class FirstRun:
    """What stands for the computation of a path that ran once, while it was recorded."""

    constants: tuple[float, ...]


@dataclass(slots=True, eq=False)
class Async(Work):
    """One scheduled run. Done by the device's thread, or by whoever waits for it first. See Note [Interruption].

    `deliveries`: what is to stand for a result from now on, each with how it is told; the latest first.
    """

    collection: SyncTensorCollection
    parameters_data: list[tuple[TensorData, bool]]  # each with whether its base is wanted rather than itself
    tensors_data: list[LazyStorage | None]  # per output; None where nobody holds it
    constants: Sequence[float]
    seeds: list[int]
    cached_computation: CachedComputation
    plan: ExecutionPlan
    record: SyncRecord | None = None
    in_background: bool = False
    deliveries: list[tuple[Callable[[TensorData, Any], None], TensorData]] = field(default_factory=list)
    delivered: bool = False
    below: DeviceRun | None = None
    error: BaseException | None = None
    interruption: BaseException | None = None

    def __post_init__(self) -> None:
        Work.__init__(self)

    def makes(self, storage: object) -> bool:
        """Whether the value of `storage` comes from this run."""
        return any(one is storage for one in self.tensors_data)

    def start(self) -> None:
        """From here on the run is under way. May be interrupted, and called again."""
        while latest := self.deliveries[-1:]:
            deliver, data = latest[0]
            deliver(data, self)
            if self.deliveries and self.deliveries[-1][1] is data:  # no signal handler did all of it
                self.deliveries.pop()
        self.delivered = True
        context = self.collection.context
        context.locker.lock(self)
        if self.in_background:
            context.queue.add(self.do)
            self.leave_to_queue()

    def wait(self) -> None:
        """Wait for this run. Raises what it raised, without taking it from the device's lock."""
        self.join()
        if self.error is not None:
            raise self.error

    def perform(self) -> None:
        """Compute and hand out the results.

        An exception is never raised here, so that it surfaces in the same way wherever the run happens; but Ctrl-C is.
        """
        start = perf_counter()
        # finalizers on this thread would find results that are not there yet; they run when this is over
        pauses = not self.in_background and gc.isenabled()
        try:
            if pauses:
                gc.disable()
            if is_profiling():
                with profiled("run"), profiled(f"{self.cached_computation.computation.name}, {self.plan.kind}"):
                    run_clean(self._execute)
            else:
                run_clean(self._execute)
        except Exception as raised:
            self.error = self._describe(raised)
        except BaseException as raised:
            self.interruption = raised
        finally:
            if pauses:
                gc.enable()
        self._report(start, perf_counter() - start)
        if self.interruption is not None:
            raise self.interruption

    def finish(self) -> None:
        """Nothing waits for this run any more, and it keeps no tensor alive. What it did not compute is poisoned."""
        for storage in self.tensors_data:
            if storage is not None and storage.tensor is None and storage.error is None:
                storage.error = self.error or self._was_interrupted()
        self.parameters_data.clear()
        self.tensors_data.clear()
        self.collection.storages.clear()
        self.collection.context.locker.unlock(self, self.error)

    def _execute(self) -> None:
        inputs = [_resolve(data, base) for data, base in self.parameters_data]
        self.parameters_data.clear()
        plan = self.plan
        outputs = plan.execute(inputs, self.constants, self.seeds)
        # a compiled plan has fixed shapes, and results that lie alike in every run; asking takes 0.4 µs each
        is_known = plan.conforms
        conforms = plan.kind == "compiled"
        for place, storage in enumerate(self.tensors_data):
            if storage is not None:
                storage.tensor = outputs[place] if is_known else conform(outputs[place], storage.meta)
            conforms = conforms and (is_known or (storage is not None and storage.tensor is outputs[place]))
            outputs[place] = None  # type: ignore[call-overload]
        plan.conforms = conforms

    def _report(self, start: float, seconds: float) -> None:
        failed = self.error is not None or self.interruption is not None
        counted = {"ExecuteComputation": 1, "ExecuteFailed": 1} if failed else {"ExecuteComputation": 1}
        metrics.observe_in_run(counted, ExecuteTime=seconds)
        if self.record is not None:
            history.ran(self.record, start, seconds)
        if config.debug >= 2:
            device, computation = str(self.collection.context.device), self.cached_computation.computation
            tell_run(device, computation, self.plan.kind, seconds, self.error or self.interruption)

    def _describe(self, raised: Exception) -> BaseException:
        if isinstance(raised, PoisonedTensorError):
            return raised
        error = ExecutionError(f"{raised}\n  in {self._whereabouts()}")
        # a NodeError's text is in this one's
        error.__cause__ = raised.__cause__ if isinstance(raised, NodeError) else raised
        return error

    def _was_interrupted(self) -> BaseException:
        error = ExecutionError(
            f"the run was interrupted by {type(self.interruption or KeyboardInterrupt()).__name__}\n"
            f"  in {self._whereabouts()}"
        )
        error.__cause__ = self.interruption
        return error

    def _whereabouts(self) -> str:
        collection, computation = self.collection, self.cached_computation.computation
        return (
            f"{computation!r}, {self.plan.kind}, on {collection.context.device}\n"
            f"  synced at {collection.site or 'an unknown line'} ({collection.cause})"
        )


@dataclass(slots=True, eq=False)
class _Prepared:
    """A run that is ready to be scheduled, and what it was prepared from."""

    trace: Trace | None  # None once it is scheduled: the trace would keep every input alive during the run
    cursor: TrieNode[Call | Cut]
    run: Async
    trace_start: float
    counted: dict[str, int]

    def fits(self, trace: Trace) -> bool:
        """Whether nothing was recorded since."""
        return self.trace is trace and self.cursor is trace.cursor


def held_outputs(bound: CachedComputation, storages: Sequence[LazyStorage]) -> list[LazyStorage | None]:
    """The storage behind each output of a computation; None where nobody holds it."""
    if bound.outputs is None:
        return list(storages)
    return [storages[place] if place >= 0 else None for place in bound.outputs]


def _resolve(data: TensorData, base: bool) -> torch.Tensor:
    return backing_tensor(data.storage if base else data)


def conform(tensor: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """`tensor` with exactly the geometry that was recorded: users saw it, and views are made from it.

    Kernels and their fake versions agree on shapes; on strides they may differ, and then the tensor is copied.
    """
    if tensor.shape != meta.shape or tensor.dtype != meta.dtype:
        raise LazyBackendError(
            f"internal error: a result was recorded as {meta} and computed as {tensor.dtype} {list(tensor.shape)}\n"
            "  a custom operator's fake kernel may be wrong; otherwise please report this with the program"
        )
    if tensor.stride() == meta.stride and tensor.storage_offset() == meta.storage_offset and not tensor.is_conj():
        return tensor
    return empty_of(meta, tensor.device).copy_(tensor)


def _cache_size() -> int:
    return int(config.computation_cache_size)


class LazyGraphExecutor:
    """Syncs of all devices."""

    def __init__(self) -> None:
        self._cache: ComputationCache[Computation] = ComputationCache(_cache_size)
        self._families: BoundedTable[Hashable, Family] = BoundedTable(_cache_size)
        self._thread = threading.local()
        self._trim_warned = False
        self._worker_died = False
        self._limit = GraphLimit("config.max_different_graphs")
        self._limits: dict[str, GraphLimit] = {}  # of regions, by line
        self.allows_execution = True

    def clear_computations(self) -> None:
        """Forget every computation, which of them differ in shapes only, and how many a limit has counted."""
        self._cache.clear()
        self._families.clear()
        self._worker_died = False
        self._limit = GraphLimit("config.max_different_graphs")
        self._limits.clear()

    def get_computation_cache(self) -> ComputationCache[Computation]:
        return self._cache

    def describe_computations(self) -> list[dict[str, Any]]:
        """The cached computations for a report: name, size and what `get_debug_state` shows. Makes no graph again."""
        return [
            {
                "graph": f"#{computation.number}",
                "hash": computation.hash,
                "nodes": computation.executor.stored.num_nodes,
                "inputs": computation.executor.stored.num_inputs,
                "outputs": computation.executor.stored.num_outputs,
                **asdict(computation.executor.get_debug_state()),
            }
            for computation in self._cache
        ]

    # ----- what a sync collects

    def should_sync_tensor(self, storage: LazyStorage) -> bool:
        """Whether a live storage still waits for its value."""
        return storage.tensor is None and storage.error is None

    def collect_sync_tensors(
        self, context: DeviceContext, sync_config: SyncTensorsConfig, cause: str
    ) -> SyncTensorCollection:
        """The pending storages of `context` that somebody holds. The caller holds the context's lock."""
        site = user_site()
        while True:  # again if a finalizer records something meanwhile
            trace, cursor = context.trace, context.trace.cursor
            indices, storages = trace.live()
            if context.trace is trace and trace.cursor is cursor:
                return SyncTensorCollection(sync_config, context, cursor, indices, storages, cause, site)

    def collect_roots(self, calls: Sequence[Call], indices: Sequence[int]) -> list[Token]:
        """What a graph must compute: the values behind the pending storages at `indices`."""
        fresh = fresh_slots(calls)
        return [fresh[index].token for index in indices]

    # ----- from path to computation

    def run_post_order(
        self, context: DeviceContext, indices: Sequence[int], cursor: TrieNode[Call | Cut] | None = None
    ) -> PostOrderData:
        """The canonical graph of what is recorded on `context`, or up to `cursor`, with the outputs `indices`."""
        cursor = context.trace.cursor if cursor is None else cursor
        calls = [call for call in cursor.path() if isinstance(call, Call)]
        data = run_post_order(calls, self.collect_roots(calls, indices), context.backing)
        if config.check_graphs:
            check_graph(data.graph)
        return data

    def lookup_cached_compile(self, data: PostOrderData, settings: Environment) -> Computation:
        """The computation of this graph, made if it is new."""
        key = make_key(data.graph, settings)
        found = self._cache.get(key)
        if found is not None:
            return found
        aliased = len(data.graph.mutated_inputs())
        metrics.observe_together({}, TensorsGraphSize=len(data.graph.nodes), InputOutputAliasCount=aliased)
        find_family = functools.partial(self._find_family, settings)
        return self._cache.add(key, Computation(key, data.graph, self._report_compile, find_family))

    def _find_family(self, settings: Environment, graph: Graph) -> Family:
        return self._families.get_or_add((skeleton(graph), settings), lambda: Family(self._report_compile))

    def try_run_cached_sync(self, collection: SyncTensorCollection, settings: Environment) -> CachedComputation | None:
        """What this path was bound to before with the same live set and settings, if it was."""
        found = collection.cursor.bindings.get((collection.indices, settings))
        return found if isinstance(found, CachedComputation) else None

    def compile(self, collection: SyncTensorCollection, settings: Environment) -> CachedComputation:
        """Bind a path that is new with this live set to a computation. See Note [Live sets that differ]."""
        bindings: dict[Any, Any] = collection.cursor.bindings
        wanted = collection.indices
        covering = _covering(bindings, wanted, settings)
        if covering is None:
            seen = [indices for indices, other in bindings if other == settings]
            covering = wanted
            if len(seen) >= _MAX_LIVE_SETS or (_UNION, settings) in bindings:
                covering = tuple(sorted({*wanted}.union(*(indices for indices in seen if indices is not _UNION))))
                # the others are to be served by this one from now on
                bindings.clear()
                bindings[(_UNION, settings)] = covering
            bound = self._bind_new(collection, covering, settings)
        else:
            metrics.increment("CachedCompile")
            bound = bindings[(covering, settings)]
        if covering != wanted:
            places = {index: place for place, index in enumerate(wanted)}
            bound = replace(bound, outputs=tuple(places.get(index, -1) for index in covering))
            self._bind(bindings, (wanted, settings), bound)
        return bound

    def _bind_new(
        self, collection: SyncTensorCollection, indices: tuple[int, ...], settings: Environment
    ) -> CachedComputation:
        """Make or find the computation with the outputs `indices`, of which the collection wants some now."""
        wanted, bindings = collection.indices, collection.cursor.bindings
        data = self.run_post_order(collection.context, indices, collection.cursor)
        computation = self.lookup_cached_compile(data, settings)
        bound = CachedComputation(computation, data.parameters, data.constants, data.seeds)
        first = bindings.get((wanted, settings))
        if isinstance(first, FirstRun):
            computation.executor.note_run([first.constants[i] for i in bound.constants])
        is_known = isinstance(first, FirstRun) or computation.executor.runs > 0
        collection.is_new = not is_known
        metrics.increment("CachedCompile" if is_known else "UncachedCompile")
        self._bind(bindings, (indices, settings), bound)
        return bound

    def policy(self) -> CompilePolicy:
        """How to compile now."""
        return _policy(
            config.backend,
            config.compile,
            config.num_profiled_runs,
            config.max_specializations,
            config.max_compiled_nodes,
            current_store(),
            config.max_static_shapes,
            config.max_dynamic_shapes,
            config.max_symbols,
            config.release_delay_seconds,
            config.compiler_idle_seconds,
        )

    def settings(self) -> Environment:
        """All that a key depends on beside the graph, as it is now."""
        return environment(config.backend if config.compile != "off" else None)

    def _report_compile(self, report: CompileReport) -> None:
        nodes = len(report.graph.nodes)
        if config.explain:
            found = record_compile(report)
            record = getattr(self._thread, "record", None)
            if record is not None and found not in record.compiles:
                record.compiles = (*record.compiles, found)
        if config.debug:
            tell_compile(report)
        if report.error is None:
            self._tell_of_compile(report)
            return
        if report.stage == "limited":
            metrics.increment("ShapeLimitPassed")
            warn_user(str(report.error), CompileWarning)
            return
        if isinstance(report.error, NotFunctional):
            self._tell_of_declined(report.error, nodes)
            return
        metrics.observe("CompileTime", report.seconds)
        metrics.increment("CompileFailed")
        if isinstance(report.error, WorkerDied):  # not the graph's fault: told once, until a compile succeeds
            if self._worker_died:
                return
            self._worker_died = True
        cause = str(report.error).strip() or type(report.error).__name__
        warn_user(
            f"a graph of {nodes} nodes could not be compiled with backend {config.backend!r} and is interpreted from "
            f"now on: {type(report.error).__name__}: {cause[:500]}\n  results are the same, only slower; "
            'lazy_backend.config.compile = "off" asks for no compiler',
            CompileWarning,
        )

    @staticmethod
    def _tell_of_declined(declined: NotFunctional, nodes: int) -> None:
        metrics.increment("CompileDeclined")
        metrics.increment(f"CompileDeclined: {declined.reason} at {declined.site}")
        warn_user(
            f"a graph of {nodes} nodes is not compiled but interpreted: {declined}\n"
            "  compilers get such a write wrong; results are eager's, only slower. Write into a clone()",
            CompileWarning,
        )

    def _tell_of_compile(self, report: CompileReport) -> None:
        if report.stage == "compiled":
            self._worker_died = False
            metrics.increment("Compile")
            metrics.observe("CompileTime", report.seconds)
        elif report.stage == "loaded":
            metrics.observe("LoadTime", report.seconds)
        shown = sys.stderr.isatty() if config.progress is None else config.progress
        if shown and not config.debug:
            print(f"lazy_backend: {told(report)}", file=sys.stderr)

    # ----- running

    def sync_tensors_graph_internal(
        self, context: DeviceContext, sync_config: SyncTensorsConfig, cause: str
    ) -> Async | None:
        """Cut the trace of `context` and schedule it; None if there was nothing to run."""
        if not is_profiling():
            return self._sync_tensors_graph(context, sync_config, cause)
        context.trace.end_range()
        with profiled(f"sync ({cause})"):
            return self._sync_tensors_graph(context, sync_config, cause)

    def _sync_tensors_graph(self, context: DeviceContext, sync_config: SyncTensorsConfig, cause: str) -> Async | None:
        start = perf_counter()
        waited_since = 0.0
        # whoever holds the lock meanwhile runs it here: a finalizer on the device's thread may need that lock
        is_held = context.holds_lock()
        background = not is_held and self.runs_in_background(context, sync_config.force_ltc_data)
        prepared: _Prepared | None = None
        while True:
            with context.lock:
                self.finish_interrupted(context)
                if context.trace.is_empty():
                    return None
                if context.trace.computed:
                    self._end_computed_trace(context, sync_config, cause, start)
                    return None
                if prepared is None or not prepared.fits(context.trace):
                    prepared = self._prepare(context, sync_config, cause, background)
                waited_since = waited_since or perf_counter()
                if context.locker.is_idle():
                    self.tensor_collection_barrier(prepared.run.collection)
                    waited = perf_counter() - waited_since
                    if self.schedule_sync_tensors_graph(prepared):
                        break
            # not while the lock is held, see Note [Interruption]
            context.locker.wait_idle()
        return self._finish_sync(prepared, start, waited, waited_since)

    def _prepare(
        self, context: DeviceContext, sync_config: SyncTensorsConfig, cause: str, background: bool
    ) -> _Prepared:
        """Everything about a sync that changes nothing of the trace: its computation, plan and run."""
        trace, settings = context.trace, self.settings()
        collection = self.collect_sync_tensors(context, sync_config, cause)
        bound = self.try_run_cached_sync(collection, settings)
        record = self._begin_record(collection, settings, bound is not None)
        policy = self.policy()
        counted = {"SyncTensorsGraph": 1, "SyncedTensorsWithIR": len(collection.indices), "CachedCompile": 1}
        if bound is None:
            del counted["CachedCompile"]  # `compile` counts
            bound = run_clean(self.compile, collection, settings)
        collection.hash = bound.computation.hash
        parameters, constants, seeds = self.extract_ir_and_prepare_tensor_data(trace, bound)
        plan = run_clean(self._plan_for, bound, constants, policy, collection, record)
        held = held_outputs(bound, collection.storages)
        run = Async(collection, parameters, held, constants, seeds, bound, plan, record, background)
        return _Prepared(trace, collection.cursor, run, trace.start, counted)

    def schedule_sync_tensors_graph(self, prepared: _Prepared) -> bool:
        """End the trace, whose live storages wait for the run from here on. False if something came in between."""
        run = prepared.run
        context = run.collection.context
        fresh = context.fresh_trace()
        fresh.unfinished = run
        context.registry.register_all(run.collection.storages)
        if prepared.trace is None or not context.replace_trace(prepared.trace, prepared.cursor, fresh):
            return False
        prepared.trace = None
        run.start()
        fresh.unfinished = None
        context.paths.take(prepared.cursor)
        return True

    def _finish_sync(self, prepared: _Prepared, start: float, waited: float, waited_since: float) -> Async:
        """Count a sync that is scheduled, and run it unless that happens in the background."""
        run, context = prepared.run, prepared.run.collection.context
        record = run.record
        if record is not None:
            record.wait_begin = waited_since - history.start
        seconds = perf_counter() - start - waited
        trace_seconds = start - prepared.trace_start
        metrics.observe_together(prepared.counted, TraceTime=trace_seconds, DeviceLockWait=waited, SyncTime=seconds)
        computation, awaited = run.cached_computation.computation, run.collection.config.force_ltc_data
        if not run.in_background:
            # outside the context's lock, so that other threads may record meanwhile
            run.do()
            context.restart_clock()
        if record is not None:
            self._end_record(record, (trace_seconds, waited, seconds), computation)
        if awaited:
            self.wait_device_ops([context])
        return run

    def finish_interrupted(self, context: DeviceContext) -> None:
        """Take back what was being recorded, or complete what was being scheduled, when an exception or another call
        came in between. See Note [Interruption]. The caller holds the context's lock.
        """
        trace = context.trace
        unfinished = trace.unfinished
        if unfinished is None:
            return
        if isinstance(unfinished, Async):
            unfinished.start()
            trace.unfinished = None
        else:  # stays: the call may be going on beneath this one, and must be taken back again then
            trace.roll_back()
            context.outside.clear()
            if isinstance(trace.computed, Async):  # the run that was to give all recorded calls their values
                trace.computed.start()
                trace.computed.join()
            self._leave_computed(context)

    def _begin_record(
        self, collection: SyncTensorCollection, settings: Environment, is_bound: bool
    ) -> SyncRecord | None:
        """What a sync will be known by, and its explanation if path, live set or settings are new."""
        if not (config.explain or config.debug or self._has_limit()):
            return None
        context = collection.context
        cursor, begin = collection.cursor, context.trace.start
        record = history.begin_sync(context.name, cursor, collection.cause, collection.site, begin)
        bindings = cursor.bindings
        if not is_bound and bindings and (collection.indices, settings) not in bindings:
            with explaining(record):
                explain_binding(record, cursor, bindings, collection.indices, settings)
        return record

    def _end_record(
        self, record: SyncRecord, times: tuple[float, float, float], computation: Computation | None
    ) -> None:
        """Keep the record of a sync that is done: seconds of trace, wait and sync. Raises `TooManyGraphsError`."""
        record.trace_seconds, record.wait_seconds, record.sync_seconds = times
        if config.debug:
            tell_sync(record, computation)
        if config.explain:
            history.add(record)
        if config.max_different_graphs is not None:
            self._limit.check(record, config.max_different_graphs)
        for limit, number in getattr(self._thread, "limits", ()):
            limit.check(record, number)

    def _has_limit(self) -> bool:
        return config.max_different_graphs is not None or bool(getattr(self._thread, "limits", ()))

    @contextlib.contextmanager
    def limiting(self, limit: GraphLimit | str, number: int | None) -> Iterator[None]:
        """Within the block this thread's syncs count against a region's limit, given itself or as the region's line."""
        if number is None:
            yield
            return
        if isinstance(limit, str):
            limit = self._limits.setdefault(limit, GraphLimit("max_different_graphs"))
        before: tuple[tuple[GraphLimit, int], ...] = getattr(self._thread, "limits", ())
        self._thread.limits = (*before, (limit, number))
        try:
            yield
        finally:
            self._thread.limits = before

    def _plan_for(
        self,
        bound: CachedComputation,
        constants: Sequence[float],
        policy: CompilePolicy,
        collection: SyncTensorCollection,
        record: SyncRecord | None,
    ) -> ExecutionPlan:
        """The plan of a run, and in the record which it is and what it took."""
        chooser = bound.computation.executor
        if record is None:
            return chooser.plan_for(constants, policy)
        was_optimized = chooser.is_optimized()
        self._thread.record = record
        try:
            plan = chooser.plan_for(constants, policy)
        finally:
            self._thread.record = None
        cursor = collection.cursor
        note_plan(record, cursor, bound.computation, plan.kind, was_optimized, collection.is_new)
        return plan

    def replay(
        self,
        collection: SyncTensorCollection,
        bound: CachedComputation,
        parameters: list[tuple[TensorData, bool]],
        constants: tuple[float, ...],
        seeds: list[int],
        storages: list[LazyStorage],
        deliveries: list[tuple[Callable[[TensorData, Any], None], TensorData]],
    ) -> Async | None:
        """Schedule a computation without a trace; the caller does the run unless it is in the background.

        `storages` are to wait for it, and `deliveries` tell who holds them. The caller holds the context's lock, and
        nothing is pending. None, and nothing has happened, if a run is under way or something came in between.
        """
        context = collection.context
        begin = perf_counter()
        trace, count = context.trace, context.locker.count
        plan = bound.computation.executor.ready_plan_for(constants)
        if plan is None:
            plan = run_clean(bound.computation.executor.plan_for, constants, self.policy())
        collection.hash = bound.computation.hash
        if not context.locker.is_idle():
            return None
        self.tensor_collection_barrier(collection)
        record: SyncRecord | None = None
        if config.explain or config.debug:
            number = bound.computation.number
            record = history.add_replay(context.name, number, plan.kind, collection.site, begin)
            if config.debug:
                tell_sync(record, bound.computation)
        context.paths.create(len(storages))
        context.registry.register_all(storages)
        outputs = held_outputs(bound, storages)
        background = self.runs_in_background(context)
        run = Async(collection, parameters, outputs, constants, seeds, bound, plan, record, background, deliveries)
        if not context.begin_replay(trace, count, run):
            return None
        run.start()
        trace.unfinished = None
        return run

    def catch_up(self, context: DeviceContext, changes: int) -> None:
        """Give everything recorded so far its value, without ending the trace. See Note [First sight runs].

        The caller holds the context's lock, no run is under way, and the trace has changed `changes` times; nothing
        happens if something came in between. If this run fails, or an earlier one did, the trace is dropped.
        """
        trace, cursor = context.trace, context.trace.cursor
        if trace.is_empty():
            context.locker.check_reset_exception()
            if trace.cursor.depth == 0 and trace.changes == changes:  # no call between the question and the store
                trace.computed = True
            return
        run = self._prepare_catch_up(context)
        self.tensor_collection_barrier(run.collection)
        if context.trace is not trace or trace.cursor is not cursor or trace.changes != changes:
            return
        trace.become_computed(run)  # the commit: from here on it is run once, whatever happens
        run.start()
        run.do()
        try:
            context.locker.check_reset_exception()
        except BaseException:
            context.new_trace()
            raise
        trace.computed = True

    def _prepare_catch_up(self, context: DeviceContext) -> Async:
        trace, policy, settings = context.trace, self.policy(), self.settings()
        collection = self.collect_sync_tensors(context, SyncTensorsConfig(), "an unseen call")
        bound = self.try_run_cached_sync(collection, settings) or run_clean(self.compile, collection, settings)
        parameters, constants, seeds = self.extract_ir_and_prepare_tensor_data(trace, bound)
        plan = run_clean(bound.computation.executor.plan_for, constants, policy)
        held = held_outputs(bound, collection.storages)
        return Async(collection, parameters, held, constants, seeds, bound, plan)

    def _end_computed_trace(
        self, context: DeviceContext, sync_config: SyncTensorsConfig, cause: str, start: float
    ) -> None:
        """End a trace that ran while it was recorded. Its graph is made when the path is taken again."""
        settings = self.settings()
        collection = self.collect_sync_tensors(context, sync_config, cause)
        record = self._begin_record(collection, settings, False)
        trace, cursor = context.trace, collection.cursor
        key = (collection.indices, settings)
        is_known = key in cursor.bindings
        if not is_known:
            self._bind(cursor.bindings, key, FirstRun(tuple(trace.constants)))
        context.registry.register_all(collection.storages)
        context.new_trace()
        context.paths.take(cursor)
        counted = {"SyncTensorsGraph": 1, "SyncedTensorsWithIR": len(collection.indices), "ExecuteComputation": 1}
        counted["CachedCompile" if is_known else "UncachedCompile"] = 1
        seconds = perf_counter() - start
        times = {"TraceTime": start - trace.start, "SyncTime": seconds, "ExecuteTime": trace.run_seconds}
        metrics.observe_together(counted, **times)
        if record is not None:
            record.plan = "as recorded"
            record.outcome = "hit, level 1" if is_known else "miss"
            self._end_record(record, (start - trace.start, 0.0, seconds), None)

    @staticmethod
    def _bind(bindings: dict[Hashable, Any], key: Hashable, value: CachedComputation | FirstRun) -> None:
        if len(bindings) >= _MAX_BINDINGS:
            bindings.clear()
        bindings[key] = value

    def defer_again(self, context: DeviceContext) -> None:
        """After a call that was not recorded in a trace that runs as it is recorded: known calls may follow.

        They are deferred, so the trace ends here, or takes back that it runs if nothing stands in it.
        """
        with context.lock:
            self._leave_computed(context)

    def _leave_computed(self, context: DeviceContext) -> None:
        trace = context.trace
        if trace.computed and trace.is_empty():
            trace.computed = False
        elif trace.computed:
            self._end_computed_trace(context, SyncTensorsConfig(), "a call that was not recorded", perf_counter())

    def end_computed(self, context: DeviceContext) -> None:
        """End a trace whose calls ran as they were recorded; what follows is deferred."""
        with context.lock:
            if context.trace.computed:
                self.sync_tensors_graph_internal(context, SyncTensorsConfig(), "allow_execution")

    def extract_ir_and_prepare_tensor_data(
        self, trace: Trace, bound: CachedComputation
    ) -> tuple[list[tuple[TensorData, bool]], list[float], list[int]]:
        """Pick from the trace what the computation takes, in its order."""
        parameters = [(trace.inputs[p.index], p.base) for p in bound.parameters]
        return parameters, [trace.constants[i] for i in bound.constants], [trace.seeds[i] for i in bound.seeds]

    def tensor_collection_barrier(self, collection: SyncTensorCollection) -> None:
        """Raise what the device's last run raised, if nobody was told. See Note [The device lock].

        What was recorded since is poisoned then, since it may rest on that run.
        """
        context = collection.context
        error = context.locker.untold_exception()
        if error is None:
            return
        if isinstance(error, LazyBackendError):
            for storage in collection.storages:
                storage.error = error
            context.new_trace()
        context.locker.check_reset_exception()

    def runs_in_background(self, context: DeviceContext, is_awaited: bool = False) -> bool:
        """Whether a run happens on the device's thread. See Note [Where a run happens]."""
        if config.run_in_background == "auto":
            return context.backing.type != "cpu" or (torch.get_num_threads() == 1 and not is_awaited)
        return bool(config.run_in_background == "always")

    def sync_live_tensors_graph(self, devices: Sequence[DeviceContext], wait: bool, cause: str) -> None:
        """Sync everything pending on `devices`, lowest index first."""
        self.check_allowed(cause)
        # one after the other, so several devices do not run at once where the first one's run is waited for
        sync_config = SyncTensorsConfig(force_ltc_data=wait and len(devices) == 1)
        for context in devices:
            self.sync_tensors_graph_internal(context, sync_config, cause)
        if wait:
            self.wait_device_ops(devices)

    def wait_device_ops(self, devices: Sequence[DeviceContext]) -> None:
        """Wait for the runs under way on `devices` and raise what the first of them raised."""
        for context in devices:
            self.barrier(context)
            context.restart_clock()

    def barrier(self, context: DeviceContext) -> None:
        """Wait for the run under way on `context` and raise what it raised."""
        if context.trace.unfinished is not None:
            with context.lock:
                self.finish_interrupted(context)
        context.locker.barrier()

    # ----- reading values

    def call_refusing(
        self, refusal: Callable[[str], LazyBackendError], function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Call `function`. This thread may neither read nor sync in it: it raises what `refusal` makes of the cause."""
        # twice, and plain stores: see Note [Interruption]
        try:
            try:
                self._thread.refusal = refusal
                return function(*args, **kwargs)
            finally:
                self._thread.refusal = None
        finally:
            self._thread.refusal = None

    def is_refusing(self) -> bool:
        return getattr(self._thread, "refusal", None) is not None

    def check_allowed(self, cause: str) -> None:
        """Raise if `cause`, a read or a sync, comes within `call_refusing` or while nothing may run."""
        refusal = getattr(self._thread, "refusal", None)
        if refusal is not None:
            raise refusal(cause)
        if not self.allows_execution:
            raise ExecutionNotAllowedError(
                f"{cause} would run what is pending, which allow_execution(False) does not allow\n  at {user_site()}\n"
                "  lazy_backend.allow_execution(True) allows it again"
            )

    def cut(self, context: DeviceContext, cause: str) -> None:
        """Run everything pending on `context` now and wait for it. See Note [A read cuts the graph]."""
        self.check_allowed(cause)
        cause = purpose_of_read(cause)
        if config.strict or getattr(self._thread, "strict", False):
            raise StrictModeError(
                f"{cause} needs a value and would cut the graph, which strict mode does not allow\n"
                f"  at {user_site()}\n  move it behind mark_step(), or leave strict mode"
            )
        if context.trace.is_empty():
            self.defer_again(context)
        else:
            metrics.increment("GraphCut")
            metrics.increment(f"GraphCut: {cause} at {user_site()}")
            self.sync_tensors_graph_internal(context, SyncTensorsConfig(force_ltc_data=True), cause)
        self.barrier(context)

    @contextlib.contextmanager
    def strict(self) -> Iterator[None]:
        before = getattr(self._thread, "strict", False)
        self._thread.strict = True
        try:
            yield
        finally:
            self._thread.strict = before

    def reset_trim_counter(self, context: DeviceContext) -> None:
        """Cut a trace that grew past `config.max_trace_length`, as in a loop without `mark_step`."""
        self.check_allowed("a trace longer than config.max_trace_length")
        length = context.trace.cursor.depth
        if config.strict or getattr(self._thread, "strict", False):
            raise StrictModeError(
                f"{length} operators were recorded without a mark_step(), and strict mode does not allow a cut there\n"
                f"  at {user_site()}\n  call lazy_backend.mark_step() once per step"
            )
        metrics.increment("TrimIrGraph")
        if not self._trim_warned:
            self._trim_warned = True
            warn_user(
                f"{length} operators were recorded on {context.device} without a mark_step(), so the trace was cut\n"
                f"  at {user_site()}\n  call lazy_backend.mark_step() once per step; "
                "lazy_backend.config.max_trace_length sets the bound",
                GraphCutWarning,
            )
        self.sync_tensors_graph_internal(context, SyncTensorsConfig(), "trace too long")

    def change_default_dtype(self, context: DeviceContext) -> None:
        """Start afresh after `torch.set_default_dtype`, which no key mentions but stored metadata rests on."""
        with context.lock:
            if context.trace.default_dtype is None:  # the first call under a profiler
                context.begin_traced_range()
                if context.trace.default_dtype is torch.get_default_dtype():
                    return
        if not context.trace.is_empty():
            self.check_allowed("torch.set_default_dtype")
        self.sync_tensors_graph_internal(context, SyncTensorsConfig(), "torch.set_default_dtype")
        with context.lock:
            trace = context.trace
            if trace.is_empty() and trace.default_dtype is not torch.get_default_dtype():
                context.replace_trace(trace, trace.cursor, context.fresh_trace())

    def read(self, data: TensorData, cause: str) -> torch.Tensor:
        """The real tensor of `data`, computed first if need be. It is the tensor's own memory: do not write to it."""
        context = data.context
        storage = data.storage
        if storage.error is not None:
            raise poisoned(storage)
        self.compute(context, [storage], cause)
        return run_clean(backing_tensor, data)

    def compute(self, context: DeviceContext, storages: Sequence[LazyStorage], cause: str) -> None:
        """See that `storages` have their values, with a cut only if the trace makes or writes one of them.

        So a thread that logs what earlier steps computed does not disturb the step that is being recorded.
        """
        self.check_allowed(cause)
        with context.lock:
            trace = context.trace
            # an input may be without its value as well, while the run that makes it is under way: that needs no cut
            made_here = [s for s in storages if s.epoch is trace.epoch and s not in trace.groups]
            # a trace whose calls run as they are recorded ends where a deferred one would: it names the same program
            needs_cut = any(trace.computed or self.should_sync_tensor(storage) for storage in made_here)
            used = {trace.groups[s] for s in storages if s in trace.groups}
            if used and not needs_cut:
                needs_cut = not used.isdisjoint(trace.written_groups())
        if needs_cut:
            self.cut(context, cause)
        else:
            self.barrier(context)

    def get_tensors_fused(self, tensors: Sequence[LazyTensor], cause: str) -> list[torch.Tensor]:
        """CPU copies of `tensors`, after one sync of each device among them."""
        for context in dict.fromkeys(tensor._data.context for tensor in tensors):
            storages = [tensor._data.storage for tensor in tensors if tensor._data.context is context]
            self.compute(context, storages, cause)
        return self.fetch_tensors(self.gather_tensors_data(tensors))

    def gather_tensors_data(self, tensors: Sequence[LazyTensor]) -> list[torch.Tensor]:
        """The real tensors of `tensors`, which must have been computed."""
        return [backing_tensor(tensor._data) for tensor in tensors]

    def fetch_tensors(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies on the CPU."""
        return run_clean(
            lambda: [downloaded(t.nbytes, functools.partial(t.detach().to, "cpu", copy=True)) for t in tensors]
        )

    # ----- looking without running

    def post_order_of(self, tensors: Sequence[LazyTensor]) -> PostOrderData:
        """The graph a sync of just these tensors would run; they must be on one device."""
        context = self._common_context(tensors)
        with context.lock:
            wanted = {tensor._data.storage for tensor in tensors}
            indices = [place for place, storage in zip(*context.trace.live(), strict=True) if storage in wanted]
            return self.run_post_order(context, indices)

    def graph_of(self, tensors: Sequence[LazyTensor]) -> Graph:
        """The graph that gives `tensors` themselves, where a sync computes the storages behind them.

        It is there to be looked at: its outputs may share memory, as a view and its base do.
        """
        context = self._common_context(tensors)
        with context.lock:
            trace = context.trace
            wanted = {tensor._data.token for tensor in tensors if tensor._data.epoch is trace.epoch}
            calls = [call for call in trace.cursor.path() if isinstance(call, Call)]
            made = [r.token for call in calls for r in call.results if isinstance(r, Fresh | View)]
            return run_post_order(calls, [token for token in made if token in wanted], context.backing).graph

    @staticmethod
    def _common_context(tensors: Sequence[LazyTensor]) -> DeviceContext:
        devices = {tensor._data.context for tensor in tensors}
        if len(devices) != 1:
            raise ValueError(f"expected tensors of one lazy device, got {len(devices)} devices")
        return devices.pop()

    def get_graph_hash(self, tensors: Sequence[LazyTensor]) -> str:
        data = self.post_order_of(tensors)
        return make_key(data.graph, self.settings()).hash_hex()


executor = LazyGraphExecutor()
history.sources["computations"] = executor.describe_computations
