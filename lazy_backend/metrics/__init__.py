"""Counters and metrics: what happened, how often, how long.

In: events from the rest of the package. Out: the functions of `torch._lazy.metrics`, and structured data.
Counters that would add cost to every recorded call (`CreateLtcTensor`, `lazy::<op>`) are not incremented there: the
recorder's paths know what they contain, and sources registered here add the counts up on request. `metrics.names` lists
all names with their meanings; functions that take a name accept torch_xla's too.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lazy_backend.cache.process_locks import process_lock
from lazy_backend.metrics.names import entry_of, own_name
from lazy_backend.metrics.snapshots import PERCENTILES, Comparison, ScalarWriter, Snapshot, Summary, compare, printed

__all__ = [
    "Comparison",
    "MetricData",
    "Snapshot",
    "Summary",
    "compare",
    "counter_names",
    "counter_value",
    "counters",
    "executed_fallback_ops",
    "metric_data",
    "metric_names",
    "metrics_report",
    "reset",
    "short_report",
    "snapshot",
    "to_json",
    "to_prometheus",
    "to_tensorboard",
]

_SAMPLES = 1024

_lock = process_lock()
# Events that are not added up yet, oldest on the left. Appending is one C call and needs no lock.
_events: deque[tuple[Mapping[str, int], Mapping[str, float]]] = deque()
_MAX_EVENTS = 256
_counters: Counter[str] = Counter()
_metrics: defaultdict[str, _Series] = defaultdict(lambda: _Series())
_sources: list[Source] = []


@dataclass(frozen=True, slots=True)
class MetricData:
    """A series of values: how many, their sum, and the latest 1024 of them, oldest first. Times are in seconds."""

    count: int
    total: float
    samples: tuple[float, ...]
    unit: str = ""

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def percentile(self, percent: float) -> float:
        """A percentile of the kept samples (`percent` from 0 to 100); 0.0 if there are none."""
        ordered = sorted(self.samples)
        return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else 0.0


@dataclass(slots=True)
class _Series:
    """The values of a metric so far."""

    count: int = 0
    total: float = 0.0
    samples: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLES))

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.samples.append(value)


@dataclass(frozen=True, slots=True)
class Source:
    """Counters that are computed when read. `reset` makes them count from zero again."""

    read: Callable[[], Counter[str]]
    reset: Callable[[], None]


def add_source(source: Source) -> None:
    _sources.append(source)


def increment(name: str, by: int = 1) -> None:
    _events.append(({name: by}, {}))
    if len(_events) > _MAX_EVENTS:
        _add_up()


def observe(name: str, value: float) -> None:
    """Add a value to a metric. Times are in seconds."""
    observe_together({}, **{name: value})


def observe_together(counters: Mapping[str, int], **values: float) -> None:
    """Add to several counters and metrics at once, as a sync or a transfer does."""
    _events.append((counters, values))
    if len(_events) > _MAX_EVENTS:
        _add_up()


def observe_in_run(counters: Mapping[str, int], **values: float) -> None:
    """Like `observe_together`, for a run: takes no lock, as the lock's holder may be waiting for that very run.

    A signal handler or a finalizer that interrupts `_add_up` may wait in this way. See Note [Interruption].
    """
    _events.append((counters, values))


def event_sink() -> Callable[[tuple[Mapping[str, int], Mapping[str, float]]], None]:
    """A function that takes counters and values as `observe_in_run` does, and runs no Python."""
    return _events.append


def _add_up() -> None:
    """Add the events so far to the counters and metrics."""
    with _lock:
        while _events:
            try:
                counters, values = _events.popleft()
            except IndexError:  # a signal handler took it
                return
            for counter, by in counters.items():
                _counters[counter] += by
            for name, value in values.items():
                _metrics[name].add(value)


def _all_counters() -> Counter[str]:
    _add_up()
    with _lock:
        total = Counter(_counters)
    for source in _sources:
        total.update(source.read())
    return +total


def counter_names() -> list[str]:
    """Names of all counters that are not zero, sorted."""
    return sorted(_all_counters())


def counter_value(name: str) -> int:
    """A counter's value since process start or the last `reset`; 0 if never counted. Takes torch_xla's names too."""
    return _all_counters()[own_name(name)]


def counters() -> dict[str, int]:
    """All counters that are not zero."""
    return dict(sorted(_all_counters().items()))


def metric_names() -> list[str]:
    """Names of all metrics that occurred, sorted."""
    _add_up()
    with _lock:
        return sorted(_metrics)


def metric_data(name: str) -> MetricData | None:
    """Count, sum and recent samples of a metric (times in seconds), or None if it never occurred.

    Takes torch_xla's names too.
    """
    name = own_name(name)
    _add_up()
    with _lock:
        found = _metrics.get(name)
        return None if found is None else MetricData(found.count, found.total, tuple(found.samples), _unit(name))


def _unit(name: str) -> str:
    found = entry_of(name)
    return "" if found is None else found[0].unit


def executed_fallback_ops() -> list[str]:
    """Operators that ran at once instead of being recorded, such as `aten::nonzero`. The name is torch_xla's."""
    return [name for name in counter_names() if _is_fallback(name)]


def _is_fallback(name: str) -> bool:
    found = entry_of(name)
    return found is not None and found[0].name == "<namespace>::<op>"


def snapshot() -> Snapshot:
    """All counters and metrics up to now."""
    found = {name: data for name in metric_names() if (data := metric_data(name)) is not None}
    summaries = {
        name: Summary(data.count, data.total, data.unit, {p: data.percentile(p) for p in PERCENTILES})
        for name, data in found.items()
    }
    return Snapshot(counters(), summaries)


def to_json() -> str:
    """All counters and metrics up to now, as JSON."""
    return snapshot().to_json()


def to_prometheus() -> str:
    """All counters and metrics up to now, in the text format that Prometheus scrapes."""
    return snapshot().to_prometheus()


def to_tensorboard(writer: ScalarWriter, step: int | None = None) -> None:
    """Write all counters and metrics up to now to `writer`, a `SummaryWriter`, as scalars for `step`."""
    snapshot().to_tensorboard(writer, step)


def reset() -> None:
    """Set every counter and metric to zero."""
    for source in _sources:
        source.reset()
    with _lock:
        _events.clear()
        _counters.clear()
        _metrics.clear()


def metrics_report() -> str:
    """Every metric and counter, one block each, as torch._lazy prints them."""
    taken = snapshot()
    lines = []
    for name, data in taken.metrics.items():
        points = " ".join(f"{percent}%={printed(value, data.unit)};" for percent, value in data.percentiles.items())
        lines += [
            f"Metric: {name}",
            f"  TotalSamples: {data.count}",
            f"  Accumulator: {printed(data.total, data.unit)}",
        ]
        lines.append(f"  Percentiles: {points}")
    for name, value in taken.counters.items():
        lines += [f"Counter: {name}", f"  Value: {value}"]
    return "\n".join(lines)


_SHORT_COUNTERS = ("MarkStep", "UncachedCompile", "CachedCompile", "GraphCut", "CompileFailed")
_SHORT_METRICS = ("TraceTime", "SyncTime", "ExecuteTime", "CompileTime", "DeviceLockWait")


def short_report() -> str:
    """What a training loop should watch, in a few lines: steps, compiles, cuts with their causes, times."""
    taken = snapshot()
    found = taken.counters
    lines = [f"{name}: {found.get(name, 0)}" for name in _SHORT_COUNTERS]
    lines += [f"{name}: {value}" for name, value in found.items() if _is_fallback(name) or name.startswith("GraphCut:")]
    for name in _SHORT_METRICS:
        data = taken.metrics.get(name)
        if data is not None:
            mean, total = (printed(value, data.unit) for value in (data.mean, data.total))
            lines.append(f"{name}: {data.count} x {mean}, {total} in all")
    return "\n".join(lines)
