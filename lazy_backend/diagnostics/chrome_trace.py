"""The history as a timeline for Perfetto (ui.perfetto.dev) or chrome://tracing.

In: the records of syncs and compiles. Out: a file in the Trace Event Format, with one lane each for recording,
compiling and the device's queue, and more lanes where slices of a kind overlap. An arrow leads from each sync to its
run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lazy_backend.diagnostics.explanation import Explanation, explain
from lazy_backend.diagnostics.history import CompileRecord, SyncRecord, WaitRecord, history

# Seconds by which rounding may separate two equal times.
_TOLERANCE = 1e-9

# Lanes, in display order.
_RECORDING, _COMPILING, _QUEUE = "recording", "compiling", "queue"


@dataclass(frozen=True, slots=True)
class _Slice:
    """An interval of the timeline, with the intervals inside it. `begin`: seconds since the history began."""

    name: str
    kind: str
    begin: float
    seconds: float
    args: dict[str, Any]
    inner: tuple[_Slice, ...] = ()
    flow: tuple[str, int] | None = None  # ("s", sync) where an arrow starts, ("f", sync) where it ends

    @property
    def end(self) -> float:
        return self.begin + self.seconds


@dataclass(slots=True)
class _Lane:
    """A row of the timeline: slices that do not overlap."""

    name: str
    number: int
    slices: list[_Slice] = field(default_factory=list)

    def is_free(self, begin: float) -> bool:
        return not self.slices or self.slices[-1].end <= begin + _TOLERANCE


def export_chrome_trace(path: str | Path, last: int | None = None) -> None:
    """Write the syncs and compiles of this process to `path` as a timeline. `last`: only the latest so many syncs.

    Open the file in ui.perfetto.dev or chrome://tracing. The recording lane shows the recording of each step and its
    sync, with the wait for the previous run inside the sync; the compiling lane shows each compile, until the step that
    picked up its plan; the queue lane shows runs. Needs `config.explain`.
    """
    with open(path, "w") as file:
        json.dump({"traceEvents": list(_events(explain(last))), "displayTimeUnit": "ms"}, file)


def _events(explanation: Explanation) -> Iterator[dict[str, Any]]:
    process = os.getpid()
    yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": "lazy_backend"}}
    found: list[dict[str, Any]] = []
    for lane in _lanes(explanation):
        place = {"pid": process, "tid": lane.number}
        yield {"ph": "M", "name": "thread_name", **place, "args": {"name": lane.name}}
        yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": lane.number}}
        found += [event | place for slice_ in lane.slices for event in _events_of(slice_)]
    yield from sorted(found, key=lambda event: event["ts"])


def _events_of(slice_: _Slice) -> Iterator[dict[str, Any]]:
    begin, end = round(slice_.begin * 1e6, 3), round(slice_.end * 1e6, 3)  # microseconds, to the nanosecond
    about = {"name": slice_.name, "cat": slice_.kind}
    yield {"ph": "X", **about, "ts": begin, "dur": round(end - begin, 3), "args": slice_.args}
    for inner in slice_.inner:
        yield from _events_of(inner)
    if slice_.flow is not None:
        kind, number = slice_.flow
        arrow = {"ph": kind, "id": number, "name": "scheduled", "cat": "flow", "ts": begin}
        yield arrow | {"bp": "e"} if kind == "f" else arrow


# ----- from records to lanes


def _lanes(explanation: Explanation) -> list[_Lane]:
    lanes: list[_Lane] = []
    devices = sorted({record.device for record in explanation.records})
    for device in devices:
        records = [record for record in explanation.records if record.device == device]
        waits = [_wait(wait) for wait in explanation.waits] if device == devices[0] else []
        lanes += _placed(f"{device} {_RECORDING}", [*_recording(records), *waits], len(lanes))
    lanes += _placed(_COMPILING, [_compiling(compiled) for compiled in explanation.compiles], len(lanes))
    for device in devices:
        records = [record for record in explanation.records if record.device == device]
        runs = [run for record in records if (run := _run(record)) is not None]
        lanes += _placed(f"{device} {_QUEUE}", runs, len(lanes))
    return lanes


def _placed(name: str, slices: Sequence[_Slice], before: int) -> list[_Lane]:
    """The slices in as few lanes as possible; one empty lane if there are no slices."""
    lanes = [_Lane(name, before + 1)]
    for slice_ in sorted(slices, key=lambda found: found.begin):
        free = next((lane for lane in lanes if lane.is_free(slice_.begin)), None)
        if free is None:
            free = _Lane(f"{name} {len(lanes) + 1}", before + len(lanes) + 1)
            lanes.append(free)
        free.slices.append(slice_)
    return lanes


def _recording(records: Sequence[SyncRecord]) -> list[_Slice]:
    """A device's recordings and syncs. A trace begins within the previous sync; its slice begins at that sync's end."""
    slices: list[_Slice] = []
    for record in records:
        sync = _sync(record)
        begin = max(record.begin, slices[-1].end if slices else 0.0)
        if begin < sync.begin:
            args = {"program": record.program, "calls": record.calls, "step": record.step}
            slices.append(_Slice(f"record {record.program}", "record", begin, sync.begin - begin, args))
        slices.append(sync)
    return slices


def _sync(record: SyncRecord) -> _Slice:
    wait = _Slice("wait for the device", "wait", record.wait_begin, record.wait_seconds, {})
    return _Slice(
        "replay" if record.outcome == "replay" else f"sync: {record.outcome}",
        "sync",
        record.begin + record.trace_seconds,
        record.sync_seconds + record.wait_seconds,
        _about(record),
        (wait,) if record.wait_seconds else (),
        None if record.run_begin is None else ("s", record.number),
    )


def _wait(wait: WaitRecord) -> _Slice:
    """A wait that the program asked for. It belongs to no device and is shown in the first device's recording lane."""
    args = {"site": wait.site, "step": wait.step, "done": wait.done}
    return _Slice(f"wait: {wait.call}", "wait", wait.begin, wait.seconds, args)


def _about(record: SyncRecord) -> dict[str, Any]:
    """The details shown for a selected sync, without the empty ones."""
    about = {
        "step": record.step,
        "cause": record.cause,
        "site": record.site,
        "program": record.program,
        "graph": record.graph,
        "plan": record.plan,
        "nearest": record.nearest,
        "difference": None if record.difference is None else str(record.difference),
        "advice": record.advice,
    }
    return {name: value for name, value in about.items() if value}


def _compiling(compiled: CompileRecord) -> _Slice:
    end = history.now() if compiled.end is None else compiled.end
    about = {"reason": compiled.reason, "outcome": compiled.outcome, "compiler_seconds": compiled.seconds}
    args = {**about, "nodes": compiled.nodes, "error": compiled.error or ""}
    return _Slice(f"compile graph {compiled.graph}", "compile", compiled.begin, end - compiled.begin, args)


def _run(record: SyncRecord) -> _Slice | None:
    if record.run_begin is None or record.run_seconds is None:
        return None
    args = {"plan": record.plan, "program": record.program, "step": record.step}
    name = f"graph {record.graph}"
    return _Slice(name, "run", record.run_begin, record.run_seconds, args, flow=("f", record.number))
