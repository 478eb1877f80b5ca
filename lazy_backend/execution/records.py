"""What a sync leaves in the history, and the limits that its record is checked against."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from lazy_backend.diagnostics.debug_log import print_sync
from lazy_backend.diagnostics.history import SyncRecord, explaining, history
from lazy_backend.diagnostics.limits import GraphLimit
from lazy_backend.diagnostics.reasons import explain_binding, note_plan
from lazy_backend.execution.bindings import bindings_of
from lazy_backend.execution.rules import per_thread
from lazy_backend.execution.run import SyncTensorCollection
from lazy_backend.lowering.artefacts.environment import Environment
from lazy_backend.lowering.compilation.plan_kinds import PlanKind
from lazy_backend.lowering.plans.cached_computation import CachedComputation, Computation
from lazy_backend.lowering.plans.policy import CompilePolicy
from lazy_backend.lowering.plans.profiling import ExecutionPlan
from lazy_backend.settings import config


class SyncRecords:
    """Begins and ends the records of syncs, which are made only if explaining, debugging or a limit needs them."""

    def __init__(self) -> None:
        self._limit = GraphLimit("config.max_different_graphs")
        self._limits: dict[str, GraphLimit] = {}  # of regions, by line

    def clear(self) -> None:
        """Forget what the limits have counted."""
        self._limit = GraphLimit("config.max_different_graphs")
        self._limits.clear()

    def begin(self, collection: SyncTensorCollection, settings: Environment, is_bound: bool) -> SyncRecord | None:
        """The record of a sync, with an explanation if path, live set or settings are new; None if nothing needs it."""
        if not (config.explain or config.debug or self._has_limit()):
            return None
        context = collection.context
        cursor, begin = collection.cursor, context.trace.start
        is_new = not is_bound and not bindings_of(cursor)
        record = history.begin_sync(context.name, cursor, collection.cause, collection.site, begin, is_new)
        if is_bound:  # nearly always
            return record
        bindings = bindings_of(cursor)
        if len(bindings) and not bindings.has(collection.indices, settings):
            with explaining(record):
                explain_binding(record, cursor, bindings.known(), collection.indices, settings)
        return record

    def end(self, record: SyncRecord, times: tuple[float, float, float], computation: Computation | None) -> None:
        """Complete the record of a sync; `times`: seconds of trace, wait and sync. Raises `TooManyGraphsError`."""
        record.trace_seconds, record.wait_seconds, record.sync_seconds = times
        if config.debug:
            print_sync(record, computation)
        if config.explain:
            history.add(record)
        if config.max_different_graphs is not None:
            self._limit.check(record, config.max_different_graphs)
        for limit, number in per_thread.limits:
            limit.check(record, number)

    def _has_limit(self) -> bool:
        return config.max_different_graphs is not None or bool(per_thread.limits)

    @contextlib.contextmanager
    def limiting(self, limit: GraphLimit | str, number: int | None) -> Iterator[None]:
        """Within the block this thread's syncs count against `limit`: a `GraphLimit`, or the line of a region."""
        if number is None:
            yield
            return
        if isinstance(limit, str):
            limit = self._limits.setdefault(limit, GraphLimit("max_different_graphs"))
        before = per_thread.limits
        per_thread.limits = (*before, (limit, number))
        try:
            yield
        finally:
            per_thread.limits = before

    def ready_plan(
        self,
        bound: CachedComputation,
        constants: Sequence[float],
        collection: SyncTensorCollection,
        record: SyncRecord | None,
    ) -> ExecutionPlan | None:
        """As `plan_for`, if there is a compiled plan already, as nearly always; otherwise None."""
        chooser = bound.computation.executor
        if record is None:
            return chooser.ready_plan_for(tuple(constants))
        per_thread.record = record
        try:
            plan = chooser.ready_plan_for(tuple(constants))
        finally:
            per_thread.record = None
        if plan is not None:
            note_plan(record, collection.cursor, bound.computation, plan.kind, True, collection.is_new)
        return plan

    def plan_for(
        self,
        bound: CachedComputation,
        constants: Sequence[float],
        policy: CompilePolicy,
        collection: SyncTensorCollection,
        record: SyncRecord | None,
    ) -> ExecutionPlan:
        """The plan of a run. The record, if any, notes which plan it is and what choosing it took."""
        chooser = bound.computation.executor
        if record is None:
            return chooser.plan_for(constants, policy)
        was_optimized = chooser.is_optimized()
        per_thread.record = record
        try:
            plan = chooser.plan_for(constants, policy)
        finally:
            per_thread.record = None
        cursor = collection.cursor
        kind = PlanKind.INTERPRETED_AS_SMALL if chooser.is_small else plan.kind
        note_plan(record, cursor, bound.computation, kind, was_optimized, collection.is_new)
        return plan
