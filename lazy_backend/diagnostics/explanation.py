"""Why was this compiled? Why was the graph cut? The answers, as data and as text.

In: the history. Out: `explain()`, which returns an `Explanation` to print: one line for consecutive syncs that are
alike; for the others, the first difference from the nearest known program, with the user's line on both sides, and
advice.
"""

from __future__ import annotations

import html
import itertools
import json
import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lazy_backend.diagnostics.difference import shown_site
from lazy_backend.diagnostics.history import CompileRecord, ProgramRecord, SyncRecord, WaitRecord, history
from lazy_backend.diagnostics.memory import MemorySeries
from lazy_backend.diagnostics.run_log import describe_process, source_lines
from lazy_backend.errors.tracebacks import hide_internals


@dataclass(frozen=True, slots=True, repr=False)
class Explanation:
    """What the syncs of a process did, oldest first."""

    records: Sequence[SyncRecord]
    compiles: Sequence[CompileRecord]
    programs: Sequence[ProgramRecord]
    memory: MemorySeries
    waits: Sequence[WaitRecord] = ()
    captured: Sequence[dict[str, Any]] = ()  # what became of the calls of captured modules and optimizers
    ports_off: Sequence[str] = ()  # what this PyTorch cannot offer, and what that costs
    aside: Sequence[str] = ()  # devices whose calls ran at once, since recording did not pay

    def misses(self) -> list[SyncRecord]:
        """The syncs that have something to explain: all but hits on known paths and replays without advice."""
        return [record for record in self.records if not _is_plain(record)]

    def to_dict(self) -> dict[str, Any]:
        """The explanation as numbers, strings, lists and dicts, ready for JSON."""
        return {
            "records": [record.to_dict() for record in self.records],
            "compiles": [compiled.to_dict() for compiled in self.compiles],
            "programs": [program.to_dict() for program in self.programs],
            "captured": list(self.captured),
            "ports_off": list(self.ports_off),
            "aside": list(self.aside),
        }

    def save(self, path: str | Path) -> None:
        """Write a run log (JSON lines), as `config.log_file` does: `python -m lazy_backend.report path` shows it."""
        with open(path, "w") as file:
            for line in self.lines():
                file.write(json.dumps(line) + "\n")

    def lines(self) -> Iterator[dict[str, Any]]:
        """What `save` writes: one dict per sync, compile, program and so on, each with its `type`."""
        programs = [program.to_dict() for program in self.programs]
        records = [record.to_dict() for record in self.records]
        yield describe_process(time.time() - history.now())
        yield source_lines(programs, records)
        yield from programs
        yield from (compiled.to_dict() for compiled in self.compiles)
        yield from records
        yield from (sample.to_dict() for sample in self.memory.samples)
        yield from (wait.to_dict() for wait in self.waits)
        yield from (peak.to_dict() for peak in self.memory.peaks.values())
        yield {"type": "state", **history.state()}

    def __str__(self) -> str:
        return "\n".join([self._summary(), *itertools.chain.from_iterable(self._entries())])

    __repr__ = __str__  # what an interactive session shows

    def _repr_html_(self) -> str:
        """What a notebook shows: the lines of `print`, with what differs and the advice folded until one looks."""
        entries = []
        for first, *more in self._entries():
            line = html.escape(first)
            folded = html.escape(textwrap.dedent("\n".join(more)))
            entries.append(f"<details><summary>{line}</summary><pre>{folded}</pre></details>" if more else line)
        items = "".join(f"<li>{entry}</li>" for entry in entries)
        return f"<b>{html.escape(self._summary())}</b><ul>{items}</ul>"

    def _entries(self) -> Iterator[list[str]]:
        """The lines of each group of syncs that are alike, and of each captured object."""
        for _, group in itertools.groupby(self.records, key=_look):
            yield _printed(list(group))
        for row in self.captured:
            yield _captured(row)
        for text in (*self.aside, *self.ports_off):
            yield text.splitlines()

    def _summary(self) -> str:
        outcomes = Counter(record.outcome for record in self.records)
        counted = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
        compiled = [c for c in self.compiles if c.outcome in ("compiled", "failed")]
        seconds = sum(c.seconds for c in compiled)
        programs = len({record.program for record in self.records})
        return (
            f"{_plural(len(self.records), 'sync')} of {_plural(programs, 'program')}"
            f"{': ' if counted else ''}{counted}; {_plural(len(compiled), 'compile')}, {seconds:.1f} s"
        )


@hide_internals
def explain(last: int | None = None) -> Explanation:
    """One record per sync since process start or the last `metrics.reset()`. `last`: only the latest so many syncs.

    `print(lazy_backend.explain())` shows, for every sync that was not a hit, how it differed from the nearest known
    program, with your line on both sides. With `config.explain = False` no records are kept.
    """
    records, compiles, programs = history.snapshot()
    chosen = records if last is None else records[-last:]
    captured = history.sources.get("captured", list)()
    off = history.sources.get("ports off", list)()
    aside = history.sources.get("stepping aside", list)()
    return Explanation(chosen, compiles, programs, history.memory.copy(), list(history.waits), captured, off, aside)


def explain_record(record: SyncRecord) -> str:
    """One sync as text."""
    return "\n".join(_printed([record]))


def _is_plain(record: SyncRecord) -> bool:
    return record.outcome in ("hit, level 1", "replay") and not record.advice


def _look(record: SyncRecord) -> tuple[Any, ...]:
    """The grouping key for printing: consecutive syncs with equal keys become one line."""
    alone = None if record.difference is None and not record.compiles else record.number
    return record.device, record.program, record.outcome, record.plan, record.cause, record.site, alone


def _printed(group: Sequence[SyncRecord]) -> list[str]:
    first, last = group[0], group[-1]
    steps = f"step {first.step}" if first.step == last.step else f"steps {first.step} to {last.step}"
    times = "" if len(group) == 1 else f", {len(group)} times"
    lines = [
        f"{steps}, {first.program} ({_plural(first.calls, 'call')}): {first.outcome}, {first.plan}{times}, "
        f"by {first.cause} at {shown_site(first.site) or 'an unknown line'}"
    ]
    if first.difference is not None:
        nearest = "itself" if first.nearest == first.program else first.nearest
        lines.append(f"    unlike {nearest} in {str(first.difference).replace(chr(10), chr(10) + '    ')}")
    elif first.outcome == "miss":
        lines.append(f"    the first program that was recorded on {first.device}")
    for compiled in first.compiles:
        lines.append(f"    {_compile_line(compiled)}")
        if compiled.difference is not None:
            lines.append(f"      {str(compiled.difference).replace(chr(10), chr(10) + '      ')}")
    if first.advice:
        lines.append(f"    -> {first.advice}")
    return lines


def _captured(row: dict[str, Any]) -> list[str]:
    cost = row["microseconds_per_replay"]
    lines = [
        f"captured {row['kind']} {row['name']} at {row['site']}: {row['replays']} of {row['calls']} calls replayed"
        f"{'' if cost is None else f', {cost:.0f} µs each'}"
    ]
    for reason, count in row["as_written"].items():
        lines.append(f"    {_plural(count, 'call')} as written: {reason.replace(chr(10), chr(10) + '    ')}")
    return lines


def _compile_line(compiled: CompileRecord) -> str:
    what = {"started": "being compiled", "loaded": "found compiled on disk"}.get(compiled.outcome, compiled.outcome)
    seconds = f" in {compiled.seconds:.1f} s" if compiled.seconds else ""
    error = f": {compiled.error}" if compiled.error else ""
    return f"graph {compiled.graph} ({_plural(compiled.nodes, 'node')}) {what}{seconds}, since {compiled.reason}{error}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
