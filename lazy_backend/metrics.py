"""Counters and metrics: what happened, how often, how long.

In: events from the rest of the package. Out: the functions of `torch._lazy.metrics`, and structured data.
Counters that would cost something on every recorded call (`CreateLtcTensor`, `lazy::<op>`) are not counted there: the
recorder's paths know what they contain, and sources registered here add them up when somebody asks.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

_SAMPLES = 1024

_lock = threading.Lock()
_counters: Counter[str] = Counter()
_metrics: defaultdict[str, MetricData] = defaultdict(lambda: MetricData())
_sources: list[Source] = []


@dataclass(slots=True)
class MetricData:
    """A series of values: how many, their sum, and the latest 1024 of them."""

    count: int = 0
    total: float = 0.0
    samples: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLES))

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.samples.append(value)

    def percentile(self, percent: float) -> float:
        """Of the kept samples; 0.0 if there are none."""
        ordered = sorted(self.samples)
        return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else 0.0


@dataclass(frozen=True, slots=True)
class Source:
    """Counters that are computed when asked for. `reset` makes them count from zero again."""

    read: Callable[[], Counter[str]]
    reset: Callable[[], None]


def add_source(source: Source) -> None:
    _sources.append(source)


def increment(name: str, by: int = 1) -> None:
    with _lock:
        _counters[name] += by


def observe(name: str, value: float) -> None:
    """Add a value to a metric. Times are in seconds."""
    with _lock:
        _metrics[name].add(value)


def observe_step(counters: tuple[str, ...], **values: float) -> None:
    """Several counters and metrics at once, as a sync has them: one lock instead of one each."""
    with _lock:
        for counter in counters:
            _counters[counter] += 1
        for name, value in values.items():
            _metrics[name].add(value)


def _all_counters() -> Counter[str]:
    with _lock:
        total = Counter(_counters)
    for source in _sources:
        total.update(source.read())
    return +total


def counter_names() -> list[str]:
    """Names of all counters that are not zero, sorted."""
    return sorted(_all_counters())


def counter_value(name: str) -> int:
    """How often `name` happened since the start or the last `reset`; 0 if never."""
    return _all_counters()[name]


def counters() -> dict[str, int]:
    """All counters that are not zero."""
    return dict(sorted(_all_counters().items()))


def metric_names() -> list[str]:
    with _lock:
        return sorted(_metrics)


def metric_data(name: str) -> MetricData | None:
    """Count, sum and recent samples of a metric (times in seconds), or None if it never occurred."""
    with _lock:
        data = _metrics.get(name)
        return None if data is None else MetricData(data.count, data.total, deque(data.samples, maxlen=_SAMPLES))


def reset() -> None:
    """Set every counter and metric to zero."""
    for source in _sources:
        source.reset()
    with _lock:
        _counters.clear()
        _metrics.clear()


def metrics_report() -> str:
    """Every metric and counter, one block each, as torch._lazy prints them."""
    lines = []
    for name in metric_names():
        data = metric_data(name)
        assert data is not None
        lines += [f"Metric: {name}", f"  TotalSamples: {data.count}", f"  Accumulator: {_printed(name, data.total)}"]
        points = " ".join(f"{p}%={_printed(name, data.percentile(p))};" for p in (1, 5, 50, 95, 99))
        lines.append(f"  Percentiles: {points}")
    for name, value in counters().items():
        lines += [f"Counter: {name}", f"  Value: {value}"]
    return "\n".join(lines)


_SHORT_COUNTERS = ("MarkStep", "UncachedCompile", "CachedCompile", "GraphCut", "CompileFailed")
_SHORT_METRICS = ("TraceTime", "SyncTime", "ExecuteTime", "CompileTime", "DeviceLockWait")


def short_report() -> str:
    """What a training loop should look at, in a few lines: steps, compiles, cuts with their causes, times."""
    found = counters()
    lines = [f"{name}: {found.get(name, 0)}" for name in _SHORT_COUNTERS]
    lines += [f"{name}: {value}" for name, value in found.items() if name.startswith(("aten::", "GraphCut:"))]
    for name in _SHORT_METRICS:
        data = metric_data(name)
        if data is not None:
            mean = _printed(name, data.total / data.count)
            lines.append(f"{name}: {data.count} x {mean}, {_printed(name, data.total)} in all")
    return "\n".join(lines)


def _printed(name: str, value: float) -> str:
    if not name.endswith(("Time", "Wait")):
        return f"{value:g}"
    return f"{value * 1e6:.0f} us" if value < 1e-3 else f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"
