"""The history: a record of every sync, for explanations and reports.

In: facts from the executor as they happen. Out: `history`, a bounded list of `SyncRecord`s with the programs and
compiles that they name; also written to a run log, if `config.log_file` names one. A sync of a known path costs one
record, 1 µs; a new program is compared with earlier ones.

Note [Which program is nearest]
A new program is explained against the nearest of the latest programs, the one that shares most with it: calls that are
equal from the start and, past the first difference, calls of the same operators, since another batch size changes
every call. Among equally near programs the latest is chosen.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

from lazy_backend.cache.process_locks import process_lock
from lazy_backend.cache.trie import TrieNode
from lazy_backend.diagnostics.difference import Difference, difference, similarity
from lazy_backend.diagnostics.memory import Alive, MemorySample, MemorySeries, Peak, process_bytes
from lazy_backend.diagnostics.run_log import RunLog
from lazy_backend.lowering.ir.graph import Graph, print_arg
from lazy_backend.lowering.ir.program import Call, Cut, Entered, Fresh, Result, Token, View
from lazy_backend.ports.autograd_engine import trace_structured, writes_traces
from lazy_backend.ports.cpython import pass_on_interruption
from lazy_backend.ports.table import STRUCTURED_TRACE
from lazy_backend.settings import config

# What to do about a sync that the program did not ask for, by prefix of the cause.
_ADVICE_ON_CUTS = {
    "item()": "keep the tensor, and read it after mark_step() or in lazy_backend.add_step_closure",
    "print": "print in lazy_backend.add_step_closure, or after mark_step()",
    "copy to": "copy after mark_step(), or in lazy_backend.add_step_closure",
    "to_cpu": "read after mark_step()",
    "equal": "compare after mark_step(), or with tensors, as in (a == b).all()",
    "storage": "memory is looked at: do it after mark_step()",
    "data_ptr": "memory is looked at: do it after mark_step()",
    "trace too long": "call lazy_backend.mark_step() once per step, at its end",
    "aten.": "its result depends on values: torch.where or a mask that is multiplied keeps the shape; otherwise do it "
    "after mark_step()",
    "torch.set_default_dtype": "set it once, before the first step",
}

# Number of programs that a new one is compared with.
_MAX_COMPARED = 16
# Number of programs that are kept.
_MAX_PROGRAMS = 1024

Cursor = TrieNode[Call | Cut]


@dataclass(slots=True, eq=False)
class ProgramRecord:
    """A program that was synced: its path in the trie, with every call that a step recorded."""

    number: int
    device: str
    cursor: Cursor
    site: str  # of its first sync
    syncs: int = 0
    graph: str = ""  # of its latest computation: "#3", or "" if there is none yet
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = f"program {self.number}"

    def calls(self) -> list[Call]:
        return [call for call in self.cursor.path() if isinstance(call, Call)]

    def to_dict(self) -> dict[str, Any]:
        """Name, line of the first sync, syncs, graph and calls: operator, line, operands and results with shapes."""
        texts = [_call_to_dict(call) for call in self.calls()]
        return {
            "type": "program",
            "name": self.name,
            "device": self.device,
            "site": self.site,
            "syncs": self.syncs,
            "graph": self.graph,
            "calls": texts,
        }


def _call_to_dict(call: Call) -> dict[str, Any]:
    """`reads`: tokens of operands, once each. `enters`, `makes`: tokens with shapes. `of`: the base of a view."""
    named = [f"{name}={print_arg(arg)}" for name, arg in call.kwargs]
    found: dict[str, Any] = {
        "op": str(call.op),
        "site": call.site,
        "args": ", ".join([*map(print_arg, call.args), *named]),
        "reads": list(dict.fromkeys(map(repr, _tokens((call.args, [arg for _, arg in call.kwargs]))))),
        "makes": [
            [repr(result.token), _shape_of(result)] for result in call.results if isinstance(result, Fresh | View)
        ],
    }
    of = {repr(result.token): repr(result.of) for result in call.results if isinstance(result, View)}
    extra = {
        "enters": [[repr(entered.token), _shape_of(entered)] for entered in call.entered],
        "writes": list(map(repr, call.mutates)),
        "of": of,
    }
    return found | {name: value for name, value in extra.items() if value}


def _shape_of(tensor: Entered | Result) -> str:
    return str(getattr(tensor, "meta", ""))


def _tokens(arg: Any) -> list[Token]:
    if isinstance(arg, Token):
        return [arg]
    return [token for item in arg for token in _tokens(item)] if isinstance(arg, tuple | list) else []


@dataclass(slots=True)
class CompileRecord:
    """One graph that was handed to the compiler, or found compiled on disk.

    `outcome`: "started" while the compiler works, then "compiled" or "failed"; or "loaded" from disk; or "declined" if
    compilers would get a write wrong, or "refused" if a trial found another result, which `error` names. `reason`: why
    the graph was to be compiled. `difference`: for a plan that was replaced, the compiled-in value that changed.
    `begin` and `end` are seconds since the history began; `seconds` is the compiler's time.
    """

    graph: str
    nodes: int
    reason: str
    begin: float
    outcome: str = "started"
    end: float | None = None
    seconds: float = 0.0
    difference: Difference | None = None
    error: str | None = None
    number: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {"type": "compile", **asdict(self)}


@dataclass(frozen=True, slots=True)
class WaitRecord:
    """A wait that the program asked for, between two syncs: in the public function `call`, called at `site`.

    `done`: False if the wait timed out. Times are in seconds; `begin` counts from the start of the history.
    """

    call: str
    site: str
    step: int
    begin: float
    seconds: float
    done: bool

    def to_dict(self) -> dict[str, Any]:
        return {"type": "wait", **asdict(self)}


@dataclass(slots=True)
class SyncRecord:
    """One sync of one device.

    `outcome`: "hit, level 1" (a known path), "hit, level 2" (a new path to a known graph), "disk hit", "generalised
    hit" (the first run of a new shape, served by a plan for many shapes), "new specialisation" (a known graph is
    compiled once more), "miss" (a program, or a live set of one, that was never synced), "replay" (a captured call).
    `plan`: how the graph ran: "as recorded", "interpreted", "compiled", "compiled for many shapes". `nearest`,
    `difference`: unless the sync was a hit, the program that it is compared with, and how the two differ. Times are in
    seconds; `begin`, `wait_begin` and `run_begin` count from the start of the history.
    """

    number: int
    step: int  # counted by mark_step, from 1
    device: str
    program: str
    calls: int
    cause: str
    site: str
    outcome: str
    begin: float
    trace_seconds: float = 0.0
    sync_seconds: float = 0.0
    wait_seconds: float = 0.0
    wait_begin: float = 0.0
    plan: str = ""
    graph: str = ""
    nearest: str | None = None
    difference: Difference | None = None
    compiles: tuple[CompileRecord, ...] = ()  # a list per record would keep the garbage collector busy
    run_begin: float | None = None
    run_seconds: float | None = None
    collective_seconds: float = 0.0  # of the run, waiting for other ranks included

    @property
    def advice(self) -> str:
        """What to do about this sync, in one sentence; "" if nothing."""
        found = advice_on_cut(self.cause)
        if not found and self.difference is not None:
            found = self.difference.advice
        return found or next((c.difference.advice for c in self.compiles if c.difference is not None), "")

    def to_dict(self) -> dict[str, Any]:
        """The record as numbers, strings, lists and dicts, ready for JSON."""
        compiles = [asdict(compiled) for compiled in self.compiles]
        return {"type": "sync", **asdict(self), "compiles": compiles, "advice": self.advice}


def advice_on_cut(cause: str) -> str:
    """What to do about a sync with this cause; "" for a sync that the program asked for."""
    if "its output depends" not in cause and cause.startswith("aten."):
        return "this call is not recorded but runs at once, and what was recorded before it runs first"
    return next((advice for start, advice in _ADVICE_ON_CUTS.items() if cause.startswith(start)), "")


@contextlib.contextmanager
def explaining(record: SyncRecord) -> Iterator[None]:
    """Keep an error in an explanation, which is a bug of ours, from ending a training run.

    The record's difference becomes "unexplained"; the error is raised only if `config.check_graphs`, as in tests.
    """
    try:
        yield
    except Exception as error:
        pass_on_interruption(error)
        if config.check_graphs:
            raise
        text = f"{type(error).__name__}: {error}"
        record.difference = Difference("unexplained", "", text, "please report this together with the program")


class History:
    """The latest syncs, programs and compiles. Thread-safe.

    `alive`, `alive_by_line`: return what a device holds now. `sources`: functions that return further state for the end
    of a report, by name.
    """

    def __init__(self) -> None:
        self._lock = process_lock()
        self.programs: dict[Cursor, ProgramRecord] = {}
        self._program_numbers = itertools.count(1)
        self._compile_numbers = itertools.count(1)
        self.alive: Callable[[str], Alive] | None = None
        self.alive_by_line: Callable[[str], list[dict[str, Any]]] = lambda device: []
        self.sources: dict[str, Callable[[], Any]] = {}
        self.log: RunLog | None = None
        self.clear()

    def clear(self) -> None:
        """Drop all records, count from zero; programs stay known. Closes the log: the next record opens a new run."""
        if self.log is not None:
            self.log.close()
        self.log = None
        self.start = perf_counter()
        self.steps = 0
        self.memory = MemorySeries()
        self.records: deque[SyncRecord] = deque(maxlen=config.explain_records)
        self.compiles: deque[CompileRecord] = deque(maxlen=config.explain_records)
        self.waits: deque[WaitRecord] = deque(maxlen=config.explain_records)
        self._numbers = itertools.count(1)
        self._underway: dict[Graph, CompileRecord] = {}

    def reset(self) -> None:
        """Clear the history, and forget the programs too."""
        self.programs.clear()
        self._program_numbers = itertools.count(1)
        self.clear()

    def now(self) -> float:
        """Seconds since the history began."""
        return perf_counter() - self.start

    # ----- syncs

    def begin_sync(self, device: str, cursor: Cursor, cause: str, site: str, begin: float, is_new: bool) -> SyncRecord:
        """The record of a sync, to `add` when the sync is done. `begin`: when its trace began (`perf_counter`).

        `is_new`: whether the path was never synced.
        """
        program = self.programs.get(cursor)
        if program is None:
            program = self._add_program(device, cursor, site)
        program.syncs += 1
        record = SyncRecord(
            next(self._numbers), self.steps + 1, device, program.name, cursor.depth, cause, site,
            "miss" if is_new else "hit, level 1", begin - self.start, graph=program.graph,
        )  # fmt: skip
        if is_new:
            with explaining(record):
                self._compare(program, record)
        return record

    def add(self, record: SyncRecord) -> None:
        """Keep the record of a sync that is done; its run may still be under way."""
        # not at the first sync: a sample of a GPT takes 1.5 ms, and a first step is slow enough already
        if self.records and record.begin >= self.memory.due:
            self._sample_memory(record)
        self.records.append(record)
        if writes_traces or _cuts.isEnabledFor(logging.INFO) or _recompiles.isEnabledFor(logging.INFO):
            _tell_of_sync(record)
        if config.log_file is not None:
            self._log(record)

    def ran(self, record: SyncRecord, begin: float, seconds: float, communicating: float = 0.0) -> None:
        """Note that the run of `record` took `seconds` from `begin` (`perf_counter`). Takes no lock: a run must not.

        `communicating`: those of its seconds that collectives took.
        """
        record.collective_seconds = communicating  # before the time that says that the run is over
        record.run_begin, record.run_seconds = begin - self.start, seconds
        if self.log is not None:
            self.log.add_run(record.number, record.run_begin, seconds, communicating)

    def waited(self, call: str, site: str, begin: float, done: bool) -> None:
        """Note that the program waited in `call` from `begin` (`perf_counter`) until now."""
        if config.explain:
            wait = WaitRecord(call, site, self.steps + 1, begin - self.start, perf_counter() - begin, done)
            self.waits.append(wait)
            if config.log_file is not None:
                self._log(wait)

    def state(self) -> dict[str, Any]:
        """What the `sources` return now, by name."""
        return {name: read() for name, read in self.sources.items()}

    def _sample_memory(self, record: SyncRecord) -> None:
        if self.alive is None:
            return
        begin = perf_counter()
        alive = self.alive(record.device)
        sample = MemorySample(
            self.now(), record.step, record.device, alive.tensors, alive.bytes, alive.device_bytes, process_bytes()
        )
        if self.memory.is_peak(record.device, alive.tensors):
            peak = Peak(record.device, record.step, alive.tensors, self.alive_by_line(record.device))
            self.memory.peaks[record.device] = peak
            if config.log_file is not None:
                self._log(peak)
        self.memory.add(sample, perf_counter() - begin)
        if config.log_file is not None:
            self._log(sample)

    def _log(self, record: SyncRecord | CompileRecord | WaitRecord | MemorySample | Peak) -> None:
        """Append `record` to the log, after the programs that it names and the log does not have yet."""
        log = self._open_log()
        if isinstance(record, SyncRecord):
            for program in self._programs_for(record, log):
                log.add_program(program.to_dict())
            log.add_sync(record.to_dict())
        else:
            log.add(record.to_dict())

    def _open_log(self) -> RunLog:
        """The log that `config.log_file` names now; a log under another name is closed."""
        log = self.log
        if log is not None and log.name == config.log_file:
            return log
        with self._lock:  # two threads that open the log at the same time would split one run into two
            before, log = self.log, self.log
            if log is None or log.name != config.log_file:
                log = self.log = RunLog(str(config.log_file), self.state, time.time() - self.now())
        if before is not None and before is not log:
            before.close()
        return log

    def _programs_for(self, record: SyncRecord, log: RunLog) -> list[ProgramRecord]:
        """The programs that `record` names and the log does not have yet."""
        names = {record.program, record.nearest} - log.programs
        if not names:
            return []
        return [program for program in self._all_programs() if program.name in names]

    def add_replay(self, device: str, number: int, plan: str, site: str, begin: float) -> SyncRecord:
        """The record of a captured call that was replayed from `begin` until now, kept if `config.explain`. 3 µs."""
        self.steps += 1
        graph = f"#{number}"
        record = SyncRecord(
            next(self._numbers), self.steps, device, f"captured graph {graph}", 0, "a captured call", site, "replay",
            begin - self.start, 0.0, perf_counter() - begin, plan=plan, graph=graph,
        )  # fmt: skip
        if config.explain:
            self.add(record)
        return record

    def _add_program(self, device: str, cursor: Cursor, site: str) -> ProgramRecord:
        with self._lock:
            if len(self.programs) >= _MAX_PROGRAMS:
                self.programs.pop(next(iter(self.programs)), None)
            program = self.programs[cursor] = ProgramRecord(next(self._program_numbers), device, cursor, site)
            return program

    def forget_paths(self, device: str) -> None:
        """Drop the programs of `device` when its paths are forgotten, except those that new ones are compared with."""
        old = [program for program in self._all_programs() if program.device == device]
        for program in old[:-_MAX_COMPARED]:
            self.programs.pop(program.cursor, None)

    def _all_programs(self) -> list[ProgramRecord]:
        """A copy, made in one C call: a signal handler or a finalizer may record a program at any moment."""
        return list(self.programs.values())

    def _compare(self, program: ProgramRecord, record: SyncRecord) -> None:
        """See Note [Which program is nearest]."""
        there = [other for other in self._all_programs() if other.device == program.device]
        known = [other for other in there if other is not program][-_MAX_COMPARED:]
        if not known:
            return
        now = program.calls()
        paths = [(other, other.calls()) for other in known]
        nearest, before = max(paths, key=lambda pair: (similarity(pair[1], now), pair[0].number))
        record.nearest = nearest.name
        record.difference = difference(before, now)

    def name_graph(self, cursor: Cursor, number: int) -> str:
        """Name computation `number`, which the program of `cursor` is bound to, in its record; returns the name."""
        program = self.programs.get(cursor)
        name = f"#{number}"
        if program is not None:
            program.graph = name
        return name

    # ----- compiles

    def compile_began(self, graph: Graph, record: CompileRecord) -> CompileRecord:
        """Add the record of a compile that began. `graph` identifies the compile until `compile_ended`.

        A compile that goes on with another form of the graph, since the compiler has failed, has its record already.
        """
        found = self._underway.get(graph)
        if found is not None:
            return found
        self._underway[graph] = record
        self._add_compile(record)
        return record

    def compile_ended(self, graph: Graph, record: CompileRecord) -> CompileRecord:
        """Complete the record of a compile, or add `record` if the compile was never under way."""
        found = self._underway.pop(graph, None)
        if found is None:
            self._add_compile(record)
            return record
        found.outcome, found.end, found.seconds, found.error = record.outcome, record.end, record.seconds, record.error
        _tell_of_compile(found)
        if config.log_file is not None:
            self._log(found)
        return found

    def _add_compile(self, record: CompileRecord) -> None:
        record.number = next(self._compile_numbers)
        self.compiles.append(record)
        _tell_of_compile(record)
        if config.log_file is not None:
            self._log(record)

    def snapshot(self) -> tuple[Sequence[SyncRecord], Sequence[CompileRecord], Sequence[ProgramRecord]]:
        """Copies of the lists as they are now."""
        with self._lock:
            return list(self.records), list(self.compiles), self._all_programs()


# ----- those who listen: `TORCH_TRACE`, whose events tlparse shows, and `logging`

_all = logging.getLogger("lazy_backend")
_cuts, _recompiles = _all.getChild("cuts"), _all.getChild("recompiles")
if _all.level == logging.NOTSET:  # else a program that logs what it does itself would get all of this too
    _all.setLevel(logging.WARNING)


def _tell_of_sync(record: SyncRecord) -> None:
    _trace("lazy_sync", record)
    is_hit = record.outcome.startswith(("hit", "replay"))
    log = _cuts if advice_on_cut(record.cause) else _all if is_hit else _recompiles
    level = logging.DEBUG if log is _all else logging.INFO
    if log.isEnabledFor(level):
        why = "" if record.difference is None else f", unlike {record.nearest}: {record.difference}"
        text = "step %d, %s: %s by %s at %s, %s, %s%s"
        what = record.device, record.program, record.cause, record.site, record.outcome, record.plan, why
        log.log(level, text, record.step, *what)


def _tell_of_compile(record: CompileRecord) -> None:
    _trace("lazy_compile", record)
    text = "%s, %d nodes: %s in %.1f s, since %s"
    _recompiles.info(text, record.graph or "a graph", record.nodes, record.outcome, record.seconds, record.reason)


def _trace(name: str, record: SyncRecord | CompileRecord) -> None:
    if writes_traces and STRUCTURED_TRACE.fits():
        named = {"name": name, "encoding": "json"}
        trace_structured("artifact", lambda: named, payload_fn=record.to_dict, expect_trace_id=False)


history = History()
