"""What `gpu_check.py` found: kept after every measurement, shown as tables beside the goals.

In: records of measurements by key. Out: a JSON file and a Markdown file, written anew with each record, so that nothing
is lost when time runs out; tables; what did not hold.
A record's `status` is `ok`, `failed` (with `error`) or `not run` (with `why`).
"""

from __future__ import annotations

import json
import math
import os
import statistics
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.tables import Table

from gpu.contenders import GPU_CONTENDERS, LAZY_CONTENDERS
from gpu.smoke import CHECKS
from gpu.training import GPU_WORKLOADS

Record = dict[str, Any]

# What must agree for results of an earlier run to be kept.
IDENTITY = ("device", "torch", "commit", "sources", "scale")


def smoke_key(check: str) -> str:
    return f"smoke: {check}"


def bench_key(workload: str, contender: str) -> str:
    return f"bench: {workload}: {contender}"


TESTS_KEY = "tests"


@dataclass(slots=True)
class GpuResults:
    """All records so far, and the files they are written to."""

    folder: Path
    about: dict[str, Any] = field(default_factory=dict)
    records: dict[str, Record] = field(default_factory=dict)

    @property
    def json(self) -> Path:
        return self.folder / "gpu_check.json"

    @property
    def markdown(self) -> Path:
        return self.folder / "gpu_check.md"

    def load(self) -> None:
        """Take over what an earlier run measured; raises ValueError if it was of something else."""
        if not self.json.exists():
            return
        found = json.loads(self.json.read_text())
        for name in IDENTITY:
            if found["about"].get(name) != self.about.get(name):
                raise ValueError(f"{self.json} is of {name} {found['about'].get(name)}, not {self.about.get(name)}")
        self.records = {key: record for key, record in found["records"].items() if record["status"] == "ok"}

    def is_measured(self, key: str) -> bool:
        return self.records.get(key, {}).get("status") == "ok"

    def put(self, key: str, status: str, **found: Any) -> None:
        """Keep a record, and write both files."""
        self.records[key] = {"status": status, **found}
        self.write()

    def write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        document = {"about": self.about, "records": self.records}
        _replace(self.json, json.dumps(document, indent=1) + "\n")
        try:
            text = report(self.about, self.records)
        except Exception:  # a fault in a table must not cost the measurements that follow
            text = f"the tables could not be made; {self.json.name} has all figures\n\n{traceback.format_exc()}"
        _replace(self.markdown, text)


def _replace(path: Path, text: str) -> None:
    """Write a file whole: whoever is killed meanwhile leaves the one before."""
    other = path.with_suffix(".part")
    other.write_text(text)
    os.replace(other, path)


# ----- goals


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound on a contender's speed or peak memory, in those of another contender."""

    contender: str
    figure: str  # "speed": at least `bound`; "peak": at most
    base: str
    bound: float
    workloads: Sequence[str]

    def ratio(self, records: dict[str, Record], workload: str) -> float | None:
        own, other = (records.get(bench_key(workload, name), {}) for name in (self.contender, self.base))
        if self.figure == "speed":
            return speed_ratio(own, other)
        return _ratio(_peak(own), _peak(other))

    def is_held(self, ratio: float) -> bool:
        return ratio >= self.bound if self.figure == "speed" else ratio <= self.bound

    @property
    def text(self) -> str:
        sign, of = (">=", "of the speed of") if self.figure == "speed" else ("<=", "of the peak memory of")
        return f"{sign} {self.bound:.2f} x {of} {self.base}"


_EVERYWHERE = tuple(GPU_WORKLOADS)
GOALS = (
    Goal("captured", "speed", "reduce-overhead", 1.2, ("mlp", "lstm", "gpt-small")),
    Goal("captured", "speed", "reduce-overhead", 1.05, ("gpt2",)),
    Goal("lazy", "speed", "eager", 1.0, _EVERYWHERE),
    *(Goal(name, "peak", "eager", 1.05, _EVERYWHERE) for name in LAZY_CONTENDERS),
)


def speed_ratio(own: Record, other: Record) -> float | None:
    """How many times as fast as `other`: medians of all rounds."""
    return _ratio(_milliseconds(other), _milliseconds(own))


def _ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or not other else one / other


def _milliseconds(record: Record) -> float | None:
    rounds = record.get("rounds")
    return statistics.median(rounds) if rounds else None


def _peak(record: Record) -> float | None:
    found: float | None = (record.get("memory") or {}).get("peak")
    return found


# ----- correctness


def loss_difference(own: Record, eager: Record) -> float | None:
    """The largest relative difference of losses to eager's; infinite where one is no number. None without both."""
    if "start" not in own or "start" not in eager:
        return None
    pairs = zip(own["start"]["losses"], eager["start"]["losses"], strict=False)
    differences = [abs(a - b) / max(1.0, abs(b)) for a, b in pairs]
    return max((one if math.isfinite(one) else math.inf for one in differences), default=math.inf)


def failures(records: dict[str, Record]) -> list[str]:
    """What does not hold: smoke checks, tests, losses, and lazy contenders that do not run. Empty if all holds."""
    found = []
    for key, record in records.items():
        kind, _, rest = key.partition(": ")
        contender = rest.rpartition(": ")[2]
        if record["status"] == "failed" and (kind != "bench" or contender in LAZY_CONTENDERS):
            found.append(f"{key}: {record['error']}")
        if kind == "smoke" and record["status"] == "not run":
            found.append(f"{key}: {record['why']}")
    for name, workload in GPU_WORKLOADS.items():
        eager = records.get(bench_key(name, "eager"), {})
        for contender, record in _known(name, records).items():
            difference = loss_difference(record, eager)
            if difference is not None and not difference <= workload.tolerance:
                key = bench_key(name, contender)
                found.append(f"{key}: losses differ from eager's by {difference:.1e}, more than {workload.tolerance}")
    return found


# ----- tables


def report(about: dict[str, Any], records: dict[str, Record]) -> str:
    """All there is, as Markdown."""
    wrong = failures(records)
    ended = about.get("ended", "still running, or was killed")
    lines = [
        "# GPU check",
        "",
        *(f"- {name}: {value}" for name, value in about.items() if name != "ended"),
        f"- ended: {ended}",
        "",
        "Smoke, tests and losses hold." if not wrong else "Does not hold:",
        *(["", *(f"- {one}" for one in wrong)] if wrong else []),
    ]
    tables = [table.markdown() for table in make_gpu_tables(records) if table.rows]
    return "\n".join(lines) + "\n\n" + "\n\n".join(tables) + "\n"


def make_gpu_tables(records: dict[str, Record]) -> list[Table]:
    """Every table that there are records for, the goals first."""
    benches = [make(name, records) for name in GPU_WORKLOADS for make in (_speed_table, _cost_table)]
    return [_goals_table(records), _smoke_table(records), _tests_table(records), *benches, _missing_table(records)]


def _smoke_table(records: dict[str, Record]) -> Table:
    rows = []
    for check in CHECKS:
        record = records.get(smoke_key(check))
        if record is not None:
            seen = record.get("seen") or record.get("error") or record["why"]
            rows.append([check, record["status"], _figure(record.get("seconds"), "{:.1f}"), seen])
    return Table("Smoke", ["check", "status", "seconds", "seen"], rows)


def _tests_table(records: dict[str, Record]) -> Table:
    record = records.get(TESTS_KEY)
    if record is None:
        return Table("Tests", [], [])
    said = [record.get("summary") or record.get("error") or record["why"], *record.get("lines", [])]
    rows = [["tests/cuda", record["status"], _figure(record.get("seconds"), "{:.1f}"), "<br>".join(said)]]
    return Table("Tests", ["tests", "status", "seconds", "summary"], rows)


def _goals_table(records: dict[str, Record]) -> Table:
    rows = []
    for goal in GOALS:
        for workload in goal.workloads:
            ratio, own = goal.ratio(records, workload), records.get(bench_key(workload, goal.contender), {})
            if ratio is not None:
                rows.append([f"{goal.contender}, {goal.text}", workload, f"{ratio:.2f}", _verdict(goal, ratio, own)])
    return Table("Goals", ["goal", "workload", "measured", "held"], rows)


def _verdict(goal: Goal, ratio: float, record: Record) -> str:
    if record.get("tiny"):
        return "not judged"
    return "yes" if goal.is_held(ratio) else "no"


def _speed_table(workload: str, records: dict[str, Record]) -> Table:
    known = _known(workload, records)
    rows, notes = [], []
    for name, record in known.items():
        rounds = record.get("rounds", [])
        goals = [
            f"{goal.text}: {_verdict(goal, ratio, record)}"
            for goal in GOALS
            if goal.contender == name and workload in goal.workloads and goal.figure == "speed"
            if (ratio := goal.ratio(records, workload)) is not None
        ]
        cells = [
            name if record["status"] == "ok" else f"{name} ({record['status']})",
            _figure(_milliseconds(record), "{:.3f}"),
            f"{min(rounds):.3f} to {max(rounds):.3f}" if rounds else "-",
            _figure(speed_ratio(record, known.get("eager", {})), "{:.2f}"),
            _figure(speed_ratio(record, known.get("reduce-overhead", {})), "{:.2f}"),
            "; ".join(goals) or "-",
            _figure(loss_difference(record, known.get("eager", {})), "{:.1e}"),
        ]
        rows.append(cells)
        notes += _notes(name, record)
    head = ["contender", "ms/step", "range", "speed / eager", "/ reduce-overhead", "goal", "losses - eager's"]
    return Table(f"{_title(workload, known)}: speed", head, rows, "\n\n".join(notes))


def _cost_table(workload: str, records: dict[str, Record]) -> Table:
    known = _known(workload, records)
    rows = []
    for name, record in known.items():
        start, peak = record.get("start"), _peak(record)
        if start is None:
            continue
        counted = [str(_counted(record, f"DeviceGraph{what}")) for what in ("Captured", "Launched", "Refused")]
        cells = [
            name,
            _figure(None if peak is None else peak / 2**20, "{:,.1f}"),
            _figure(_ratio(peak, _peak(known.get("eager", {}))), "{:.2f}"),
            f"{start['first']:.2f}",
            f"{start['steps_until_fast']:,}",
            f"{start['seconds_until_fast']:.2f}",
            str(start["compiles"]),
            ", ".join(counted) if name in LAZY_CONTENDERS and "graphs" in record else "-",
        ]
        rows.append(cells)
    head = ["contender", "peak MiB", "/ eager", "first step s", "steps until fast", "s until fast", "compiles"]
    return Table(f"{_title(workload, known)}: costs", [*head, "graphs captured, launched, refused"], rows)


def _counted(record: Record, name: str) -> int:
    """A counter's value, or the sum of those that have its name with a reason."""
    counters = record.get("graphs", {}).get("counters", {})
    return max(counters.get(name, 0), sum(value for key, value in counters.items() if key.startswith(f"{name}: ")))


def _known(workload: str, records: dict[str, Record]) -> dict[str, Record]:
    """Records of a workload by contender, in the order in which contenders are listed."""
    prefix = bench_key(workload, "")
    ours = {key: one for key, one in records.items() if key.startswith(prefix) and one["status"] != "not run"}
    found = {key.removeprefix(prefix): one for key, one in ours.items()}
    order = list(GPU_CONTENDERS)
    return dict(sorted(found.items(), key=lambda one: order.index(one[0]))) if found.keys() <= set(order) else found


def _title(workload: str, known: dict[str, Record]) -> str:
    record = next(iter(known.values()), {})
    batch = f", batch {record['batch']}" if record.get("batch") else ""
    return GPU_WORKLOADS[workload].title + batch + (" (tiny sizes instead)" if record.get("tiny") else "")


def _notes(name: str, record: Record) -> list[str]:
    """What explains a row: reasons, warnings, a start that was cut short."""
    found = record.get("graphs", {})
    notes = [f"{name} fails: {record['error']}"] if "error" in record else []
    notes += [f"{name}: {reason}, {count} x" for reason, count in found.get("counters", {}).items() if ": " in reason]
    notes += [f"{name} warns: {warning}" for warning in found.get("warnings", [])[:5]]
    if record.get("start", {}).get("settled") is False:
        notes.append(f"{name}: was still compiling or capturing when its time was over")
    late = record.get("late_compiles")
    return notes + ([f"{name}: {late} compiles during the rounds"] if late else [])


def _missing_table(records: dict[str, Record]) -> Table:
    rows = [[key, record["why"]] for key, record in records.items() if record["status"] == "not run"]
    return Table("Not run", ["what", "why"], rows)


def _figure(value: Any, form: str) -> str:
    show: Callable[[Any], str] = form.format
    return "-" if value is None else show(value)
