"""The run log: a run as JSON lines, written during the run or afterwards, and read for the report.

In: records as dicts, each with a `type`. Out: a file, and a `Run` read from such a file.

Note [A run log]
Lines are only ever appended, each in one write, so a log is readable however its process ended; the reader skips a last
line that was cut short. A record that changes after it was written is written again under the same number: a sync's run
(`ran`) along with the next sync, a compile when it ends. Types: `run` (one, first), `program` (before the first sync
that names it), `source` (text of source lines), `sync`, `ran`, `compile`, `wait`, `memory`, `peak` (the last one per
device counts), and `state` (at the end). Several runs may have been appended to one file; the last one counts.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import linecache
import os
import platform
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch

Line = dict[str, Any]


def describe_process(began: float) -> Line:
    """The `run` line: command, directory, process, versions, number of threads, rank, and the time of writing.

    `began`: the time from which the other lines count seconds, as `time.time`.
    """
    return {
        "type": "run",
        "format": 1,
        "command": " ".join(sys.argv),
        "directory": os.getcwd(),
        "process": os.getpid(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "rank": _rank(),
        "began": began,
        "written": time.time(),
    }


def _rank() -> int | None:
    """The number of this process among those that torchrun started; None if there is no other."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdigit() and os.environ.get("WORLD_SIZE") != "1" else None


def file_of_process(name: str) -> str:
    """The file that this process writes: `{pid}` and `{rank}` are filled in. Ranks never share one."""
    rank = _rank()
    if rank is not None and not any(place in name for place in ("{pid}", "{rank}")):
        path = Path(name)
        name = str(path.with_name(f"{path.stem}-rank{rank}{path.suffix}"))
    return name.replace("{pid}", str(os.getpid())).replace("{rank}", str(rank or 0))


def source_lines(programs: Iterable[Line], syncs: Iterable[Line] = (), known: set[str] | None = None) -> Line:
    """The `source` line: the text of every line of user code that `programs` and `syncs` name, except `known` ones."""
    sites = {call["site"] for program in programs for call in program["calls"]}
    sites.update(sync["site"] for sync in syncs)
    found = {site: source_line(site) for site in sites.difference(known or ())}
    return {"type": "source", "lines": found}


def source_line(site: str) -> str:
    """The text of a `file:line`, stripped; "" if it cannot be read."""
    file, _, number = site.rpartition(":")
    return linecache.getline(file, int(number)).strip() if number.isdigit() else ""


class RunLog:
    """Appends to the file `name`. Thread-safe; a forked child writes nothing. See Note [A run log].

    `state` is called on close, at the latest at exit. The first `OSError` goes to standard error and ends the log.
    `began`: the time from which the lines count seconds, as `time.time`.
    """

    def __init__(self, name: str, state: Callable[[], dict[str, Any]], began: float) -> None:
        self.name = name
        self.programs: set[str] = set()
        self._process = os.getpid()
        self._sites: set[str] = set()
        self._running: set[int] = set()  # numbers of the syncs that were written before their run ended
        self._ended: deque[tuple[int, Line]] = deque()  # runs that ended and are not in `_ran` yet
        self._ran: dict[int, Line] = {}  # ended runs by number, until their sync is written
        self._lock = threading.RLock()
        self._state = state
        self._file: BinaryIO | None = None
        try:
            # unbuffered: a line that was written is in the file, whatever happens to the process
            self._file = open(file_of_process(name), "ab", buffering=0)  # noqa: SIM115
        except OSError as error:
            self._give_up(error)
            return
        self.add(describe_process(began))
        atexit.register(self.close)

    def add(self, line: Line) -> None:
        """Write one line."""
        if os.getpid() != self._process:
            return
        with self._lock:
            if self._file is not None:
                try:
                    self._file.write(json.dumps(line).encode() + b"\n")
                except OSError as error:
                    self._give_up(error)

    def add_program(self, program: Line) -> None:
        """Write a program, after the text of those of its source lines that the log does not have yet."""
        self.programs.add(program["name"])
        self._add_source(source_lines([program], known=self._sites))
        self.add(program)

    def add_sync(self, sync: Line) -> None:
        """Write a sync. If its run is still under way, the run is written along with a later sync, or on close."""
        self._add_source(source_lines([], [sync], self._sites))
        self.add(sync)
        with self._lock:
            if sync["run_seconds"] is None:
                self._running.add(sync["number"])
        self._write_runs()
        self._ran.pop(sync["number"], None)

    def add_run(self, number: int, begin: float, seconds: float, communicating: float) -> None:
        """Note that the run of a sync ended. Takes no lock: the lock's holder may be waiting for this run."""
        self._ended.append((number, {"run_begin": begin, "run_seconds": seconds, "collective_seconds": communicating}))

    def _write_runs(self) -> None:
        """Write the runs that ended after their sync was written."""
        with self._lock:
            with contextlib.suppress(IndexError):  # a signal handler may take the last one
                while self._ended:
                    number, run = self._ended.popleft()
                    self._ran[number] = run
            over = self._running & self._ran.keys()
            self._running -= over
            runs = {number: self._ran.pop(number) for number in sorted(over)}
        for number, run in runs.items():
            self.add({"type": "ran", "number": number, **run})

    def close(self) -> None:
        """Write the final state and close the file."""
        atexit.unregister(self.close)
        if os.getpid() != self._process:
            return
        self._write_runs()
        self.add({"type": "state", **self._state()})
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _add_source(self, line: Line) -> None:
        if line["lines"]:
            self._sites.update(line["lines"])
            self.add(line)

    def _give_up(self, error: OSError) -> None:
        self._file = None
        print(f"lazy_backend: no run log any more: {error}", file=sys.stderr)


# ----- reading


@dataclass
class Run:
    """One run, read from a log. Records are as they were written, with later updates filled in."""

    header: Line = field(default_factory=dict)
    programs: dict[str, Line] = field(default_factory=dict)
    syncs: dict[int, Line] = field(default_factory=dict)
    compiles: dict[int, Line] = field(default_factory=dict)
    waits: list[Line] = field(default_factory=list)  # those that the program asked for
    memory: list[Line] = field(default_factory=list)
    peaks: dict[str, Line] = field(default_factory=dict)  # by device
    sources: dict[str, str] = field(default_factory=dict)
    state: Line = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # what the log lacks, for the reader of the report


class RunLogError(ValueError):
    """The file holds no run."""


def read_run(path: str | Path) -> Run:
    """The last run in a file. Raises `RunLogError` if the file holds no run, `OSError` if it cannot be read."""
    broken: list[int] = []
    with open(path, "rb") as file:
        run = collect(_parsed(file, broken))
    if not run.syncs and not run.programs:
        raise RunLogError(
            f"{path} holds no run\n  lazy_backend.config.log_file, LAZY_BACKEND_LOG and "
            "lazy_backend.explain().save(path) write one"
        )
    if broken:
        first = f"the first is line {broken[0]}: the process may have been killed while it wrote"
        run.notes.append(f"{len(broken)} unreadable line(s) left out, {first}.")
    if not run.state:
        run.notes.append("The log ends without the state at exit: the process was killed, or is still running.")
    return run


def _parsed(file: Iterable[bytes], broken: list[int]) -> Iterator[Line]:
    for number, text in enumerate(file, 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except ValueError:
            broken.append(number)
            continue
        if isinstance(line, dict) and "type" in line:
            yield line
        else:
            broken.append(number)


def collect(lines: Iterable[Line]) -> Run:
    """The last run among `lines`."""
    run = Run()
    runs = 0
    for line in lines:
        if line["type"] == "run":
            run, runs = Run(header=line), runs + 1
        else:
            _take(run, line)
    if runs > 1:
        run.notes.append(f"The file holds {runs} runs; this is the last one.")
    _fill_in(run)
    return run


def _take(run: Run, line: Line) -> None:
    kind = line["type"]
    if kind == "program":
        run.programs[line["name"]] = line
    elif kind == "sync":
        run.syncs[line["number"]] = line
        for compiled in line["compiles"]:
            _take_compile(run, compiled)
    elif kind == "ran" and line["number"] in run.syncs:
        run.syncs[line["number"]].update(
            {name: value for name, value in line.items() if name not in ("type", "number")}
        )
    elif kind == "compile":
        _take_compile(run, line)
    elif kind == "memory":
        run.memory.append(line)
    elif kind == "wait":
        run.waits.append(line)
    elif kind == "peak":
        run.peaks[line["device"]] = line
    elif kind == "source":
        run.sources.update(line["lines"])
    elif kind == "state":
        run.state = line


def _take_compile(run: Run, line: Line) -> None:
    """Merge the lines of a compile: written when it begins, with its sync, and when it ends. Any may name the graph."""
    known = run.compiles.get(line["number"])
    if known is None:
        run.compiles[line["number"]] = dict(line)
    elif line["outcome"] != "started":
        run.compiles[line["number"]] = line | {"graph": line["graph"] or known["graph"]}
    else:
        known["graph"] = known["graph"] or line["graph"]


def _fill_in(run: Run) -> None:
    """Update each program from the syncs, which were written later: its graph, and its number of syncs."""
    syncs: dict[str, int] = {}
    for sync in run.syncs.values():
        syncs[sync["program"]] = syncs.get(sync["program"], 0) + 1
        program = run.programs.get(sync["program"])
        if program is not None and sync["graph"]:
            program["graph"] = sync["graph"]
    for name, program in run.programs.items():
        program["syncs"] = max(program["syncs"], syncs.get(name, 0))


# ----- several ranks


def merged(runs: Sequence[Run]) -> Run:
    """The runs of several ranks as one, in which a rank takes the place of a device. See Note [Several ranks].

    Raises `RunLogError` if they are not the runs of several ranks.
    """
    ranks = [run.header.get("rank") for run in runs]
    if None in ranks or len(set(ranks)) < len(ranks):
        told = ", ".join(str(rank) for rank in ranks)
        raise RunLogError(f"these are not the logs of several ranks: their ranks are {told}")
    in_order = sorted(runs, key=lambda run: int(run.header["rank"]))
    start = min(run.header["began"] for run in runs)
    # of what a process has at its end, the first rank's stands for all, but for the graphs
    state = {**in_order[0].state, "computations": []} if in_order[0].state else {}
    whole = Run(header={**in_order[0].header, "ranks": len(runs)}, state=state)
    whole.notes.append(f"{len(runs)} ranks: seconds per step, and of findings, are sums over them.")
    for place, run in enumerate(in_order):
        _add_rank(whole, run, _OfRank(run.header["rank"], place, len(runs), run.header["began"] - start))
    return whole


@dataclass(frozen=True, slots=True)
class _OfRank:
    """How a rank's lines are told from those of others: `place` among `count` ranks, whose clocks differ by `shift`."""

    rank: int
    place: int
    count: int
    shift: float

    def numbered(self, number: int) -> int:
        return number * self.count + self.place

    def named(self, name: str) -> str:
        return f"{name} of rank {self.rank}"

    def line(self, line: Line) -> Line:
        """`line` with names, numbers and times that no other rank has."""
        changed = dict(line)
        for name in ("program", "name", "nearest", "graph"):
            if changed.get(name):
                changed[name] = self.named(changed[name])
        for name in ("begin", "run_begin", "wait_begin", "end", "time"):
            if changed.get(name) is not None:
                changed[name] += self.shift
        if "number" in changed:
            changed["number"] = self.numbered(changed["number"])
        if "compiles" in changed:
            changed["compiles"] = [self.line(compiled) for compiled in changed["compiles"]]
        changed["device"] = f"rank {self.rank}"
        return changed


def _add_rank(whole: Run, run: Run, own: _OfRank) -> None:
    for program in map(own.line, run.programs.values()):
        whole.programs[program["name"]] = program
    for sync in map(own.line, run.syncs.values()):
        whole.syncs[sync["number"]] = sync
    for compiled in map(own.line, run.compiles.values()):
        whole.compiles[compiled["number"]] = compiled
    whole.waits += map(own.line, run.waits)
    whole.memory += map(own.line, run.memory)
    for peak in map(own.line, run.peaks.values()):
        whole.peaks[peak["device"]] = peak
    if whole.state:
        found = run.state.get("computations", ())
        whole.state["computations"] += [line | {"graph": own.named(line["graph"])} for line in found]
    whole.sources.update(run.sources)
    whole.notes += [f"Rank {own.rank}: {note}" for note in run.notes]
