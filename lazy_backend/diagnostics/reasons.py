"""The reasons in a `SyncRecord`, derived from what the executor and the compiler report.

In: bindings, plans and compile reports. Out: outcomes, differences and reasons, filled into records.
For a sync of a known path only `note_plan` is called.
"""

from __future__ import annotations

from collections.abc import Sequence

from lazy_backend.diagnostics.difference import (
    Difference,
    difference_of_floats,
    difference_of_outputs,
    difference_of_settings,
)
from lazy_backend.diagnostics.history import CompileRecord, Cursor, SyncRecord, history
from lazy_backend.lowering.artefacts.environment import Environment, environment_names
from lazy_backend.lowering.compilation.compiler import backend_name
from lazy_backend.lowering.compilation.plan_kinds import PlanKind
from lazy_backend.lowering.ir.program import Call
from lazy_backend.lowering.plans.cached_computation import Computation
from lazy_backend.lowering.plans.specialise import CompileReport


def explain_binding(
    record: SyncRecord,
    cursor: Cursor,
    known: Sequence[tuple[tuple[int, ...], Environment]],
    indices: tuple[int, ...],
    settings: Environment,
) -> None:
    """Explain a sync of a known path with a new live set or new settings.

    The difference is from the most similar live set under the same settings, or else from the latest settings.
    `known`: the live sets and settings that the path had before, latest last; at least one.
    """
    same_settings = [other for other, environment in known if environment == settings]
    record.nearest = record.program
    if same_settings:
        nearest = min(reversed(same_settings), key=lambda other: len(set(other).symmetric_difference(indices)))
        calls = [call for call in cursor.path() if isinstance(call, Call)]
        record.difference = difference_of_outputs(calls, nearest, indices)
    else:
        record.difference = _of_settings(known[-1][1], settings)


def _of_settings(before: Environment, now: Environment) -> Difference:
    named = [list(zip(environment_names(), environment, strict=True)) for environment in (before, now)]
    for values in named:
        name, backend = values[0]
        values[0] = name, "interpreted" if backend is None else backend_name(backend)
    return difference_of_settings(*named)


def note_plan(
    record: SyncRecord, cursor: Cursor, computation: Computation, kind: PlanKind, was_optimized: bool, is_new: bool
) -> None:
    """Note which plan a sync of `cursor` got, and so its outcome: how much of the work was cached."""
    record.plan = kind._value_  # as `str(kind)`, without a call
    is_plain = record.outcome == "hit, level 1" and not record.compiles and record.difference is None
    if is_plain and record.graph and (was_optimized or not kind.is_generalised):
        return  # nearly always
    if not record.graph:
        record.graph = history.name_graph(cursor, computation.number)
    if record.difference is not None or record.outcome == "miss":
        record.outcome = "miss" if is_new else "hit, level 2"
    stages = [compiled.outcome for compiled in record.compiles]
    if kind.is_generalised and not was_optimized:
        record.outcome = "generalised hit"
    elif "loaded" in stages:
        record.outcome = "disk hit"
    elif record.outcome != "miss" and any(compiled.reason not in _EXPECTED for compiled in record.compiles):
        record.outcome = "new specialisation"
    for compiled in record.compiles:
        compiled.graph = compiled.graph or record.graph


FIRST_COMPILE = "it recurred"
AFTER_BLOCKS = "its blocks have run for long, and the whole graph may be faster"
_EXPECTED = (FIRST_COMPILE, AFTER_BLOCKS)


def record_compile(report: CompileReport) -> CompileRecord:
    """Add a compile report to the history: as a new record, or as the end of the compile's record."""
    now = history.now()
    reason, found = FIRST_COMPILE, None
    if report.after_blocks:
        reason = AFTER_BLOCKS
    if report.symbolic:
        reason = "a plan for many shapes"
    if report.changed:
        reason = "floats that were compiled in have changed"
        found = difference_of_floats(report.graph, *report.changed[0])
    began = now if report.stage == "started" else now - report.seconds
    error = None if report.error is None else f"{type(report.error).__name__}: {report.error}"
    record = CompileRecord("", len(report.graph.nodes), reason, began, report.stage, difference=found, error=error)
    if report.stage == "started":
        return history.compile_began(report.graph, record)
    record.end, record.seconds = now, report.seconds
    return history.compile_ended(report.graph, record)
