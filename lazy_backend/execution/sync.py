"""Cut a trace, find or make its computation, and run it in the background.

In: what a device recorded. Out: real tensors in the storages that are still alive.
`LazyGraphExecutor` drives the sync; each stage has a module of its own: `bindings` (what the path was bound to before),
`computations` (from path to graph to computation), `run` (the scheduled run), `records` and `compile_reports` (what
users are told), `rules` (whether a sync is allowed). Method names follow torch/csrc/lazy/core/lazy_graph_executor.h, in
snake_case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from lazy_backend import metrics
from lazy_backend.cache.trie import TrieNode
from lazy_backend.diagnostics.debug_log import print_sync
from lazy_backend.diagnostics.history import SyncRecord, history
from lazy_backend.errors import GraphCutWarning, LazyBackendError, PoisonedTensorError
from lazy_backend.errors.sites import purpose_of_read, user_site, warn_user
from lazy_backend.execution.aside import SteppingAside
from lazy_backend.execution.bindings import FirstRun, bindings_of
from lazy_backend.execution.compile_reports import CompileReports
from lazy_backend.execution.computations import Computations, compile_policy, current_environment
from lazy_backend.execution.disk_cache import tell_of_failures, untold_failures
from lazy_backend.execution.records import SyncRecords
from lazy_backend.execution.rules import Rules
from lazy_backend.execution.run import (
    Async,
    RunPlace,
    SyncTensorCollection,
    held_outputs,
    place_of_run,
)
from lazy_backend.lowering.compilation.compiler import CompiledRun
from lazy_backend.lowering.compilation.plan_kinds import PlanKind
from lazy_backend.lowering.ir.program import Call, Cut
from lazy_backend.lowering.ir.ranges import is_profiling, profiled
from lazy_backend.lowering.plans.cached_computation import CachedComputation
from lazy_backend.settings import config
from lazy_backend.tensors.state import DeviceContext, LazyStorage, TensorData, Trace
from lazy_backend.tensors.thread_state import run_clean


@dataclass(slots=True, eq=False)
class _Prepared:
    """A run that is ready to be scheduled, and what it was prepared from."""

    trace: Trace | None  # None once it is scheduled: the trace would keep every input alive during the run
    cursor: TrieNode[Call | Cut]
    run: Async
    trace_start: float
    counted: dict[str, int]

    def fits(self, trace: Trace) -> bool:
        """Whether nothing was recorded or run since."""
        return self.trace is trace and self.cursor is trace.cursor and trace.computed is False


class LazyGraphExecutor:
    """Syncs of all devices."""

    def __init__(self) -> None:
        self.rules = Rules()
        self.records = SyncRecords()
        self.compile_reports = CompileReports()
        self.computations = Computations(self.compile_reports.report)
        self.aside = SteppingAside(self.rules)
        self._trim_warned = False

    def clear_computations(self) -> None:
        """Forget every computation, the families of those that differ only in shapes, and the counts of limits."""
        self.computations.clear()
        self.records.clear()
        self.compile_reports.clear()

    def reset(self) -> None:
        """Everything as after the import."""
        self.clear_computations()
        self.rules.allows_execution = True
        self._trim_warned = False
        self.aside.reset()

    # ----- what a sync collects

    def should_sync_tensor(self, storage: LazyStorage) -> bool:
        """Whether a live storage still waits for its value."""
        return storage.tensor is None and storage.error is None

    def collect_sync_tensors(
        self, context: DeviceContext, cause: str, goes_on: bool = False, is_awaited: bool = False
    ) -> tuple[Trace, SyncTensorCollection]:
        """The trace of `context`, and its live set: the pending storages that are still held.

        The caller holds the context's lock. `goes_on`: whether the trace does; `is_awaited`: whether the caller waits
        for the values.
        """
        site = user_site()
        while True:  # again if a finalizer records something meanwhile
            trace, cursor = context.trace, context.trace.cursor
            given_back = [] if goes_on or not context.given_back.is_used else context.given_back.pending()
            indices, storages = trace.live(goes_on)
            if context.trace is trace and trace.cursor is cursor:
                found = SyncTensorCollection(context, cursor, indices, storages, cause, site, is_awaited, given_back)
                return trace, found

    def extract_ir_and_prepare_tensor_data(
        self, trace: Trace, bound: CachedComputation
    ) -> tuple[list[TensorData], list[float], list[int]]:
        """Pick the computation's parameters, constants and seeds from the trace, in its order."""
        parameters = list(map(trace.inputs.__getitem__, bound.places))
        for place in bound.bases:
            parameters[place] = parameters[place].storage
        constants, seeds = map(trace.constants.__getitem__, bound.constants), map(trace.seeds.__getitem__, bound.seeds)
        return parameters, list(constants), list(seeds)

    # ----- the stages of a sync

    def sync_tensors_graph_internal(self, context: DeviceContext, cause: str, is_awaited: bool = False) -> Async | None:
        """Cut the trace of `context` and schedule it; None if there was nothing to run.

        `is_awaited`: return when the values are there, as for a read, rather than when the run is scheduled.

        A finalizer that interrupts a run on the device's thread runs nothing: what another thread has recorded since
        comes after that run.
        """
        if context.queue.is_here():
            if is_awaited:
                raise within_a_run(cause)
            return None
        if not (is_profiling() and context.has_pending()):
            return self._sync_tensors_graph(context, cause, is_awaited)
        context.trace.end_range()
        with profiled(f"sync ({cause})"):
            return self._sync_tensors_graph(context, cause, is_awaited)

    def _sync_tensors_graph(self, context: DeviceContext, cause: str, is_awaited: bool) -> Async | None:
        if context.body is not None:
            context.wait_for_body()
        start = perf_counter()
        waited_since = 0.0
        # a caller that already holds the lock runs it here: a finalizer on the device's thread may need that lock
        is_held = context.holds_lock()
        prepared: _Prepared | None = None
        while True:
            with context.lock:
                if context.trace.unfinished is not None:
                    self.finish_interrupted(context)
                if context.trace.cursor.depth == 0:
                    return None
                if context.trace.computed:
                    if self._end_computed_trace(context, cause, start):
                        return None
                    continue
                if prepared is None or not prepared.fits(context.trace):
                    prepared = self._prepare(context, cause, is_awaited, not is_held)
                waited_since = waited_since or perf_counter()
                if context.locker.is_idle():
                    if context.locker.untold is not None:
                        self.tensor_collection_barrier(prepared.run.collection)
                    waited = perf_counter() - waited_since
                    if self.schedule_sync_tensors_graph(prepared):
                        break
            # not while the lock is held, see Note [Interruption]
            context.locker.wait_idle()
        return self._finish_sync(prepared, start, waited, waited_since)

    def _prepare(self, context: DeviceContext, cause: str, is_awaited: bool, may_wait: bool) -> _Prepared:
        """Prepare a sync without changing the trace: its computation, plan and run.

        `may_wait`: whether the run may happen on the device's thread, later than this call.
        """
        settings = current_environment()
        trace, collection = self.collect_sync_tensors(context, cause, is_awaited=is_awaited)
        bound = self.computations.try_run_cached_sync(collection, settings)
        record = self.records.begin(collection, settings, bound is not None)
        if untold_failures:
            tell_of_failures()
        counted = {"SyncTensorsGraph": 1, "SyncedTensorsWithIR": len(collection.indices), "CachedCompile": 1}
        if bound is None:
            del counted["CachedCompile"]  # `compile` counts it
            bound = run_clean(self.computations.compile, collection, settings)
        collection.hash = bound.computation.hash
        parameters, constants, seeds = self.extract_ir_and_prepare_tensor_data(trace, bound)
        plan = self.records.ready_plan(bound, constants, collection, record)
        if plan is None:
            plan = run_clean(self.records.plan_for, bound, constants, compile_policy(), collection, record)
        place: tuple[RunPlace, CompiledRun | None] = (RunPlace.WITHIN_CALL, None)
        if may_wait:
            place = place_of_run(context, bound, plan, is_awaited)
        held = held_outputs(bound, collection.storages)
        run = Async(collection, parameters, held, constants, seeds, bound, plan, record, *place)
        return _Prepared(trace, collection.cursor, run, trace.start, counted)

    def schedule_sync_tensors_graph(self, prepared: _Prepared) -> bool:
        """End the trace, whose live storages wait for the run from here on. False if something came in between."""
        run = prepared.run
        context = run.collection.context
        fresh = context.fresh_trace()
        fresh.unfinished = run
        context.registry.register_all(run.collection.storages)
        trace = prepared.trace
        if trace is None or not context.replace_trace(trace, prepared.cursor, fresh, has_run=False):
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
        computation, awaited = run.cached_computation.computation, run.collection.is_awaited
        if run.place is RunPlace.WITHIN_CALL:
            # outside the context's lock, so that other threads may record meanwhile
            run.do()
            context.restart_clock()
        if record is not None:
            self.records.end(record, (trace_seconds, waited, seconds), computation)
        if awaited:
            self.wait_device_ops([context])
        return run

    def tensor_collection_barrier(self, collection: SyncTensorCollection) -> None:
        """Raise the exception of the device's last run, if no caller has seen it yet. See Note [The device lock].

        What was recorded since is poisoned then, since it may depend on that run.
        """
        context = collection.context
        error = context.locker.untold
        if error is None:
            return
        if isinstance(error, LazyBackendError):
            for storage in collection.storages:
                storage.error = error
            context.new_trace()
        context.locker.check_reset_exception()

    def finish_interrupted(self, context: DeviceContext) -> None:
        """Roll back what was being recorded, or complete what was being scheduled, when an exception or another call
        came in between. See Note [Interruption]. The caller holds the context's lock.
        """
        trace = context.trace
        unfinished = trace.unfinished
        if unfinished is None:
            return
        if isinstance(unfinished, Async):
            unfinished.start()
            trace.unfinished = None
        else:  # `unfinished` stays: the call may be going on beneath this one, and must be rolled back again then
            trace.roll_back()
            context.outside.clear()
            if isinstance(trace.computed, Async):  # the run that was to give all recorded calls their values
                trace.computed.start()
                trace.computed.join()
            self._leave_computed(context)

    # ----- syncs without a trace to run: replays, and traces that ran as they were recorded

    def replay(
        self,
        collection: SyncTensorCollection,
        bound: CachedComputation,
        parameters: list[TensorData],
        constants: tuple[float, ...],
        seeds: list[int],
        storages: list[LazyStorage],
        deliveries: list[tuple[Callable[[TensorData, Any], None], TensorData]],
        count: int,
    ) -> Async | None:
        """Schedule a computation without a trace; the caller does the run unless it is in the background.

        `storages` wait for the run, and `deliveries` hand them to their holders. `count`: of the device's runs, when
        the caller began to read the state. The caller holds the context's lock, and nothing is pending. None, with
        nothing done, if a run is under way or something came in between.
        """
        context = collection.context
        begin = perf_counter()
        trace = context.trace
        plan = bound.computation.executor.ready_plan_for(constants)
        if plan is None:
            plan = run_clean(bound.computation.executor.plan_for, constants, compile_policy())
        collection.hash = bound.computation.hash
        if not context.locker.is_idle():
            return None
        self.tensor_collection_barrier(collection)
        record: SyncRecord | None = None
        if config.explain or config.debug:
            number = bound.computation.number
            record = history.add_replay(context.name, number, str(plan.kind), collection.site, begin)
            if config.debug:
                print_sync(record, bound.computation)
        context.paths.create(len(storages))
        context.registry.register_all(storages)
        outputs = held_outputs(bound, storages)
        place = place_of_run(context, bound, plan, is_awaited=False)
        run = Async(collection, parameters, outputs, constants, seeds, bound, plan, record, *place, deliveries)
        if isinstance(trace.unfinished, list):  # the call that this one interrupted finds another trace
            cursor, is_computed = trace.cursor, trace.computed is not False
            if cursor.depth > 0 or not context.replace_trace(trace, cursor, context.fresh_trace(), is_computed):
                return None
            trace = context.trace
        if not context.begin_replay(trace, count, run):
            return None
        run.start()
        trace.unfinished = None
        return run

    def catch_up(self, context: DeviceContext, trace: Trace, changes: int) -> None:
        """Give everything recorded so far its value, without ending the trace. See Note [First sight runs].

        The caller holds the context's lock, no run is under way, and `trace` is the context's and has changed `changes`
        times; nothing happens if something came in between. If this run fails, or an earlier one did, the trace is
        dropped.
        """
        cursor = trace.cursor
        if cursor.depth == 0:
            context.locker.check_reset_exception()
            # no call between the check and the store
            if context.trace is trace and trace.cursor is cursor and trace.changes == changes:
                trace.computed = True
            return
        run = self._prepare_catch_up(context)
        self.tensor_collection_barrier(run.collection)
        # the commit: from here on the run is done once, whatever happens
        if context.trace is not trace or not trace.become_computed(run, cursor, changes):
            return
        run.start()
        run.do()
        try:
            context.locker.check_reset_exception()
        except BaseException:
            context.new_trace()
            raise
        trace.computed = True

    def _prepare_catch_up(self, context: DeviceContext) -> Async:
        policy, settings = compile_policy(), current_environment()
        trace, collection = self.collect_sync_tensors(context, "an unseen call", goes_on=True)
        bound = self.computations.try_run_cached_sync(collection, settings) or run_clean(
            self.computations.compile, collection, settings
        )
        parameters, constants, seeds = self.extract_ir_and_prepare_tensor_data(trace, bound)
        plan = run_clean(bound.computation.executor.plan_for, constants, policy)
        held = held_outputs(bound, collection.storages)
        return Async(collection, parameters, held, constants, seeds, bound, plan)

    def _end_computed_trace(self, context: DeviceContext, cause: str, start: float) -> bool:
        """End a trace that ran while it was recorded. Its graph is made when the path is taken again.

        False, with nothing done, if something came in between.
        """
        settings = current_environment()
        trace, collection = self.collect_sync_tensors(context, cause)
        cursor = collection.cursor
        record = self.records.begin(collection, settings, False)
        context.aside.unseen += 1
        context.registry.register_all(collection.storages)
        constants, fresh = tuple(trace.constants), context.fresh_trace()
        if not context.replace_trace(trace, cursor, fresh, has_run=True):
            return False
        context.given_back.forget(collection.given_back)
        bindings = bindings_of(cursor)
        is_known = bindings.has(collection.indices, settings)
        if not is_known:
            self.computations.note_path(cursor)
            bindings.bind(collection.indices, settings, FirstRun(constants))
        context.paths.take(cursor)
        counted = {"SyncTensorsGraph": 1, "SyncedTensorsWithIR": len(collection.indices), "ExecuteComputation": 1}
        counted["CachedCompile" if is_known else "UncachedCompile"] = 1
        seconds = perf_counter() - start
        times = {"TraceTime": start - trace.start, "SyncTime": seconds, "ExecuteTime": trace.run_seconds}
        metrics.observe_together(counted, **times)
        if record is not None:
            record.plan = str(PlanKind.AS_RECORDED)
            record.outcome = "hit, level 1" if is_known else "miss"
            self.records.end(record, (start - trace.start, 0.0, seconds), None)
        return True

    def defer_again(self, context: DeviceContext) -> None:
        """Defer calls again after a call that was not recorded, in a trace whose calls run as they are recorded.

        Known calls may follow and are deferred, so the trace ends here; if empty, it is just no longer `computed`.
        """
        with context.lock:
            self._leave_computed(context)

    def _leave_computed(self, context: DeviceContext) -> None:
        cause, start = "a call that was not recorded", perf_counter()
        while (trace := context.trace).computed:
            if trace.cursor.depth == 0:  # no call between the check and the store
                trace.computed = False
            elif self._end_computed_trace(context, cause, start):
                return

    def end_computed(self, context: DeviceContext) -> None:
        """End a trace whose calls ran as they were recorded; what follows is deferred."""
        with context.lock:
            if context.trace.computed:
                self.sync_tensors_graph_internal(context, "allow_execution")

    # ----- reasons to sync

    def sync_live_tensors_graph(self, devices: Sequence[DeviceContext], wait: bool, cause: str) -> None:
        """Sync everything pending on `devices`, lowest index first."""
        self.rules.check_allowed(cause)
        # no sync of several devices waits for its run: the next device could not run at the same time
        is_awaited = wait and len(devices) == 1
        for context in devices:
            self.sync_tensors_graph_internal(context, cause, is_awaited)
        if wait:
            self.wait_device_ops(devices)

    def cut(self, context: DeviceContext, cause: str) -> None:
        """Run everything pending on `context` now and wait for it. See Note [A read cuts the graph]."""
        self.rules.check_allowed(cause)
        context.latest_read = object()
        cause = purpose_of_read(cause)
        self.rules.check_not_strict(
            f"{cause} needs a value and would cut the graph, which strict mode does not allow",
            "move it behind mark_step(), or leave strict mode",
        )
        if context.trace.is_empty():
            self.defer_again(context)
        else:
            metrics.increment("GraphCut")
            metrics.increment(f"GraphCut: {cause} at {user_site()}")
            self.sync_tensors_graph_internal(context, cause, is_awaited=True)
            context.aside.cuts += 1
            if context.aside.is_long():
                self.aside.end_stretch(context, "reads")
        self.barrier(context)

    def reset_trim_counter(self, context: DeviceContext) -> None:
        """Cut a trace that grew past `config.max_trace_length`, as in a loop without `mark_step`."""
        self.rules.check_allowed("a trace longer than config.max_trace_length")
        length = context.trace.cursor.depth
        self.rules.check_not_strict(
            f"{length} operators were recorded without a mark_step(), and strict mode does not allow a cut there",
            "call lazy_backend.mark_step() once per step",
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
        self.sync_tensors_graph_internal(context, "trace too long")

    def change_default_dtype(self, context: DeviceContext) -> None:
        """Start a trace under another root after `torch.set_default_dtype`: stored metadata depends on the dtype."""
        with context.lock:
            if context.trace.default_dtype is None:  # the first call under a profiler
                context.begin_traced_range()
                if context.trace.default_dtype is torch.get_default_dtype():
                    return
        if not context.trace.is_empty():
            self.rules.check_allowed("torch.set_default_dtype")
            if context.queue.is_here():
                raise within_a_run("a call after torch.set_default_dtype")
        self.sync_tensors_graph_internal(context, "torch.set_default_dtype")
        with context.lock:
            trace = context.trace
            if trace.is_empty() and trace.default_dtype is not torch.get_default_dtype():
                context.replace_trace(trace, trace.cursor, context.fresh_trace(), trace.computed is not False)

    def begin_anew(self, context: DeviceContext, cause: str, forgets_paths: bool = False) -> None:
        """Sync what was recorded, and begin a trace at the root of the settings that hold now.

        What a finalizer or another thread records meanwhile is synced too.
        """
        if context.queue.is_here():
            raise within_a_run(cause)
        while True:
            self.sync_live_tensors_graph([context], wait=False, cause=cause)
            with context.lock:
                trace, cursor = context.trace, context.trace.cursor
                if cursor.depth == 0:
                    if forgets_paths:
                        context.forget_paths()
                    if context.replace_trace(trace, cursor, context.fresh_trace(), trace.computed is not False):
                        return

    # ----- waiting

    def wait_device_ops(self, devices: Sequence[DeviceContext]) -> None:
        """Wait for the runs under way on `devices` and raise the first exception among them."""
        for context in devices:
            self.barrier(context)
            context.restart_clock()

    def barrier(self, context: DeviceContext) -> None:
        """Wait for the run under way on `context` and raise what it raised."""
        if context.trace.unfinished is not None:
            with context.lock:
                self.finish_interrupted(context)
        context.locker.barrier()


def within_a_run(cause: str) -> LazyBackendError:
    """The error for code that would have to run something, and interrupts a run on the thread of that run."""
    return PoisonedTensorError(
        f"{cause} cannot be done here: this code, a finalizer, interrupted a run, and comes before its end\n"
        f"  at {user_site()}\n  what it needs may be recorded here, and read later"
    )


executor = LazyGraphExecutor()
