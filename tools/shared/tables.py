"""The benchmark's results as text.

In: the JSON-able results of `bench`. Out: aligned tables for a terminal, or markdown, and pages that have it.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Table:
    """A title, a head and rows of text."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def aligned(self) -> str:
        """For a terminal: columns of equal width."""
        lines = [self.head, *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.head))]
        printed = ["  ".join(map(_justified, line, widths, range(len(line)))) for line in lines]
        printed.insert(1, "-" * len(printed[0]))
        return "\n".join([f"{self.title}", *(line.rstrip() for line in printed), *_noted(self.note)])

    def markdown(self) -> str:
        rules = ["---"] + ["---:"] * (len(self.head) - 1)
        lines = ["| " + " | ".join(line) + " |" for line in (self.head, rules, *self.rows)]
        return "\n".join([f"### {self.title}", "", *lines, *(["", self.note] if self.note else [])])


def _justified(cell: str, width: int, place: int) -> str:
    return cell.rjust(width) if place else cell.ljust(width)


def _noted(note: str) -> list[str]:
    return [note] if note else []


def make_tables(results: Result) -> list[Table]:
    """Every table that `results` has figures for."""
    tables: list[Table] = []
    for workload in results["workloads"]:
        for make in (_recording, _speed, _cold_start, _memory):
            table = make(workload)
            if table.rows:
                tables.append(table)
    if results.get("growth"):
        tables.append(_growth(results["growth"]))
    return tables


# ----- one function per table


def _recording(workload: Result) -> Table:
    found = {name: _trace_medians(contender["traces"]) for name, contender in workload["contenders"].items()}
    rows = [_recording_row(name, own, found.get("ltc")) for name, own in found.items() if own]
    head = ["contender", "ops", "trace µs", "µs/op", "mark_step µs", "µs/op", "called µs", "per op / LTC", "step / LTC"]
    return Table(f"{workload['title']}: recording one step", head, rows)


def _recording_row(name: str, own: Result, ltc: Result | None) -> list[str]:
    operators, trace, sync = own["operators"], own["trace"], own["sync"]
    costs = [_micro(trace, 0), _micro(trace / operators), _micro(sync, 0), _micro(sync / operators)]
    ratios = ["-", "-"]
    if ltc:
        of_step = (trace + sync) / (ltc["trace"] + ltc["sync"])
        ratios = [f"{of_step * ltc['operators'] / operators:.2f}", f"{of_step:.2f}"]
    return [name, f"{operators:.0f}", *costs, _micro(own["called"], 0), *ratios]


def _trace_medians(traces: list[Result]) -> Result | None:
    """Medians over the rounds of the figures of `trace`."""
    found = [trace for trace in traces if trace]
    return {key: statistics.median(trace[key] for trace in found) for key in found[0]} if found else None


def _speed(workload: Result) -> Table:
    contenders = workload["contenders"]
    base = contenders.get("eager", {}).get("rounds")
    rows = []
    for name, contender in contenders.items():
        if "error" in contender:
            rows.append([name, "fails", "-", "-", "-"])
            continue
        seconds = contender.get("rounds", [])
        if not seconds or not base:
            continue
        ratios = [eager / own for eager, own in zip(base, seconds, strict=True)]
        speeds = workload["steps"] / statistics.median(seconds)
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        late = str(contender["late_compiles"])
        rows.append([name, f"{speeds:.1f}", f"{statistics.median(ratios):.2f}", spread, late])
    failures = [f"{name} fails: {c['error']}" for name, c in contenders.items() if "error" in c]
    head = ["contender", "steps/s", "speed / eager's", "range over rounds", "compiles after 60 steps"]
    return Table(f"{workload['title']}: steady state", head, rows, "\n".join(failures))


def _cold_start(workload: Result) -> Table:
    contenders = workload["contenders"]
    eager = contenders.get("eager", {}).get("start")
    rows = []
    for name, contender in contenders.items():
        start = contender.get("start")
        if start is None:
            continue
        loss = f"{start['loss'] - eager['loss']:+.1e}" if eager else "-"
        times = [f"{start[key]:.3f}" for key in ("first", "longest_later", "total")]
        rows.append([name, *times, str(start["compiles"]), loss])
    head = ["contender", "first step s", "longest later step s", "60 steps s", "compiles", "loss - eager's"]
    return Table(f"{workload['title']}: the first 60 steps of a process", head, rows)


def _memory(workload: Result) -> Table:
    found = {name: c["memory"] for name, c in workload["contenders"].items() if c.get("memory")}
    peaks = {name: m["live"] + m["rise"] for name, m in found.items()}
    base = peaks.get("eager")
    rows = []
    for name, memory in found.items():
        ratio = f"{peaks[name] / base:.2f}" if base else "-"
        rows.append([name, _mebi(memory["live"]), _mebi(memory["rise"]), ratio])
    head = ["contender", "live MiB", "rise within steps MiB", "sum / eager's"]
    return Table(f"{workload['title']}: memory in the steady state", head, rows)


def _growth(growth: Result) -> Table:
    rows = []
    for kind, lengths in growth.items():
        for row in lengths:
            figures = [_micro(row[key], 2) for key in ("known", "sync", "unseen", "first_sync")]
            rows.append([f"`{kind}`", f"{row['length']:,}", *figures])
    head = ["program", "calls", "known path µs/op", "its mark_step µs/op", "first sight µs/op", "its mark_step µs/op"]
    return Table("Growth: one trace of many calls", head, rows)


def compile_times(results: Sequence[Result]) -> Table:
    """What graphs of more and more blocks take to compile."""
    rows = []
    before: Result | None = None
    for result in results:
        cpu, blocks = result["cpu_seconds"], result["blocks"]
        further = "-" if before is None else f"{(cpu - before['cpu_seconds']) / (blocks - before['blocks']):.2f}"
        figures = [f"{cpu:.1f}", f"{cpu / blocks:.2f}", further, f"{result['seconds']:.1f}"]
        rows.append([str(blocks), f"{result['nodes']:,}", *figures])
        before = result
    head = ["blocks", "nodes", "compile CPU s", "CPU s per block", "per block more than above", "compile s"]
    return Table("Compile time: GPT, foreach AdamW, a whole step", head, rows)


def _micro(seconds: float, digits: int = 2) -> str:
    return f"{seconds * 1e6:,.{digits}f}"


def _mebi(count: float) -> str:
    return f"{count / 2**20:.1f}"


def replace_block(page: str, name: str, block: str) -> str:
    """`page` with `block` between its two marks of this name."""
    marks = rf"(<!-- {name}: begin -->\n).*?(<!-- {name}: end -->)"
    found, count = re.subn(marks, lambda match: f"{match[1]}{block}\n{match[2]}", page, flags=re.S)
    if count != 1:
        raise ValueError(f"expected one pair of marks '{name}: begin' and '{name}: end', found {count}")
    return found


render: dict[str, Callable[[Table], str]] = {"text": Table.aligned, "markdown": Table.markdown}
