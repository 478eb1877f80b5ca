"""Snapshots of counters and metrics, to keep, export and compare.

In: counters and metrics. Out: `Snapshot`, as plain data, as JSON and in Prometheus' text format; `Comparison` of two.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from lazy_backend.metrics.names import COUNTERS, METRICS, Meaning, entry_of

PERCENTILES = (1, 5, 50, 95, 99)


class ScalarWriter(Protocol):
    """What is asked of a `torch.utils.tensorboard.SummaryWriter`, or another logger with this method."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> Any: ...


@dataclass(frozen=True, slots=True)
class Summary:
    """A metric: the number of values, their sum, and percentiles of the latest 1024. Times are in seconds."""

    count: int
    total: float
    unit: str
    percentiles: Mapping[int, float]

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All counters that are not zero and all metrics, by name."""

    counters: Mapping[str, int]
    metrics: Mapping[str, Summary]

    def to_dict(self) -> dict[str, Any]:
        """The snapshot as numbers, strings and dicts; `from_dict` restores it."""
        metrics = {
            name: {
                "count": summary.count,
                "total": summary.total,
                "mean": summary.mean,
                "unit": summary.unit,
                "percentiles": {str(percent): value for percent, value in summary.percentiles.items()},
            }
            for name, summary in self.metrics.items()
        }
        return {"counters": dict(self.counters), "metrics": metrics}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Snapshot:
        metrics = {
            name: Summary(
                found["count"],
                found["total"],
                found["unit"],
                {int(percent): value for percent, value in found["percentiles"].items()},
            )
            for name, found in data["metrics"].items()
        }
        return cls(dict(data["counters"]), metrics)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    def to_prometheus(self) -> str:
        """The text format that Prometheus scrapes (version 0.0.4): counters, and a summary per metric.

        A counter's name is in snake case: `MarkStep` is `lazy_backend_mark_step_total`. Variable parts of a name become
        labels, as in `lazy_backend_recorded_call_total{op="mul"}`. Times are in seconds.
        """
        lines = [line for entry in COUNTERS for line in self._counter_lines(entry)]
        lines += [line for entry in METRICS for line in self._metric_lines(entry)]
        return "\n".join([*lines, ""])

    def to_tensorboard(self, writer: ScalarWriter, step: int | None = None) -> None:
        """Write counters, added up over lines and reasons, and the mean of each metric, as scalars for `step`.

        Tags are the names that `to_prometheus` uses, as `lazy_backend/mark_step`; those of metrics end with the unit.
        """
        for entry in COUNTERS:
            found = [value for counter, value in self.counters.items() if _is_of(entry, counter)]
            if found:
                writer.add_scalar(_tag(entry), sum(found), step)
        for entry in METRICS:
            summary = self.metrics.get(entry.name)
            if summary is not None:
                writer.add_scalar(f"{_tag(entry)}_{entry.unit}", summary.mean, step)

    def _counter_lines(self, entry: Meaning) -> Iterator[str]:
        name = f"{_exported(entry)}_total"
        samples = []
        for counter, value in self.counters.items():
            found = entry_of(counter)
            if found is not None and found[0] is entry:
                samples.append(f"{name}{_labels(found[1])} {value}")
        if samples:
            yield from (f"# HELP {name} {_escaped(entry.meaning)}", f"# TYPE {name} counter", *samples)

    def _metric_lines(self, entry: Meaning) -> Iterator[str]:
        summary = self.metrics.get(entry.name)
        if summary is None:
            return
        name = f"{_exported(entry)}_{entry.unit}"
        yield f"# HELP {name} {_escaped(entry.meaning)}"
        yield f"# TYPE {name} summary"
        for percent, value in summary.percentiles.items():
            yield f"{name}{_labels({'quantile': str(percent / 100)})} {value!r}"
        yield f"{name}_sum {summary.total!r}"
        yield f"{name}_count {summary.count}"


def _exported(entry: Meaning) -> str:
    return "lazy_backend_" + (entry.exported or re.sub(r"(?<!^)(?=[A-Z])", "_", entry.name).lower())


def _tag(entry: Meaning) -> str:
    return _exported(entry).replace("lazy_backend_", "lazy_backend/", 1)


def _is_of(entry: Meaning, counter: str) -> bool:
    found = entry_of(counter)
    return found is not None and found[0] is entry


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    quoted = (f'{name}="{_escaped(value).replace(chr(34), chr(92) + chr(34))}"' for name, value in labels.items())
    return "{" + ",".join(quoted) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


# ----- two snapshots


@dataclass(frozen=True, slots=True)
class Comparison:
    """What differs between two snapshots: before and after, by name; None for a metric that did not occur."""

    counters: Mapping[str, tuple[int, int]]
    metrics: Mapping[str, tuple[Summary | None, Summary | None]]

    def __str__(self) -> str:
        lines = [
            f"{name}: {before} -> {after} ({after - before:+d})" for name, (before, after) in self.counters.items()
        ]
        for name, (before, after) in self.metrics.items():
            change = "" if before is None or after is None else f", {_ratio(before.mean, after.mean)}"
            lines.append(f"{name}: {_summary_text(before)} -> {_summary_text(after)}{change}")
        return "\n".join(lines) or "nothing differs"


def compare(before: Snapshot, after: Snapshot) -> Comparison:
    """The differences between two snapshots, of one process or of two runs."""
    counted = sorted({*before.counters, *after.counters})
    pairs = {name: (before.counters.get(name, 0), after.counters.get(name, 0)) for name in counted}
    observed = sorted({*before.metrics, *after.metrics})
    series = {name: (before.metrics.get(name), after.metrics.get(name)) for name in observed}
    return Comparison(
        {name: pair for name, pair in pairs.items() if pair[0] != pair[1]},
        {name: both for name, both in series.items() if both[0] != both[1]},
    )


def _summary_text(summary: Summary | None) -> str:
    return "none" if summary is None else f"{summary.count} x {printed(summary.mean, summary.unit)}"


def _ratio(before: float, after: float) -> str:
    return f"x {after / before:.2f}" if before else "from 0"


def printed(value: float, unit: str) -> str:
    """A value with its unit, for display."""
    if unit != "seconds":
        return f"{value:g} {unit}".rstrip()
    return f"{value * 1e6:.0f} us" if value < 1e-3 else f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"
