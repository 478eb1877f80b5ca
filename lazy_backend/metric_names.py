"""Every counter and metric that can occur: what it means, and what Lazy Tensor Core and torch_xla call it.

In: nothing. Out: `COUNTERS`, `METRICS`, and for the name of an event its entry. A test holds that nothing else is
counted, and that `docs/metrics.md` has the same entries.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """One name. With `<parts>` it stands for many: what differs becomes a label where it is exported."""

    name: str
    meaning: str
    unit: str = ""  # of a metric's values; a counter has none
    elsewhere: tuple[str, ...] = ()  # what others call the same, where that differs
    exported: str = ""  # name for Prometheus, if it does not follow from `name`

    def labels(self, name: str) -> dict[str, str] | None:
        """The parts of `name`, if this is its entry."""
        found = _pattern(self.name).fullmatch(name)
        return None if found is None else found.groupdict()


@functools.cache
def _pattern(name: str) -> re.Pattern[str]:
    # a namespace and an operator are words; reasons, causes and lines are any text, the line perhaps none
    parts = {"op": r"[\w.:]+", "namespace": r"\w+", "line": ".*"}
    pieces = re.split(r"<(\w+)>", name)
    texts = [re.escape(p) if i % 2 == 0 else f"(?P<{p}>{parts.get(p, '.+')})" for i, p in enumerate(pieces)]
    return re.compile("".join(texts), flags=re.S)


COUNTERS = (
    Entry("MarkStep", "calls of `mark_step`"),
    Entry("SyncTensorsGraph", "traces that were cut and scheduled, for whatever reason"),
    Entry("SyncedTensorsWithIR", "tensors alive at those syncs that got their values from them"),
    Entry("UncachedCompile", "syncs whose graph was new"),
    Entry("CachedCompile", "syncs whose graph was known"),
    Entry("Compile", "calls of the compiler that gave a plan"),
    Entry("CompileFailed", "calls of the compiler that gave none: the graph is interpreted"),
    Entry("CompileDeclined", "graphs that are interpreted because compilers would get a write wrong"),
    Entry("CompileDeclined: <reason> at <line>", "the same, by reason and line", exported="compile_declined_by_line"),
    Entry("ShapeLimitPassed", "programs with more shapes than the settings give plans to"),
    Entry("ExecuteComputation", "graphs that ran, steps and replays; a first step too, which runs as it is recorded"),
    Entry("ExecuteFailed", "of these, those that raised", elsewhere=("ThreadPoolException",)),
    Entry("CaptureRecorded", "calls of captured functions that ran as written"),
    Entry("CapturedCall", "calls of captured functions that were replayed"),
    Entry("GraphCut", "reads and calls that cut a trace", elsewhere=("EarlySyncLiveTensorsCount",)),
    Entry("GraphCut: <cause> at <line>", "the same, by cause and line", exported="graph_cut_by_line"),
    Entry("TrimIrGraph", "traces cut because they grew past `config.max_trace_length`"),
    Entry("Fallback: <op> (<reason>) at <line>", "calls that were not recorded but ran at once", exported="fallback"),
    Entry("lazy::<op>", "recorded calls", elsewhere=("xla::<op>",), exported="recorded_call"),
    Entry("DeviceDataCacheHit", "0-d host constants that were uploaded before"),
    Entry("DeviceDataCacheMiss", "0-d host constants that were not"),
    Entry("CreateLtcTensor", "storages made", elsewhere=("CreateXlaTensor",)),
    Entry("DestroyLtcTensor", "storages gone; the difference is what is alive", elsewhere=("DestroyXlaTensor",)),
    Entry("DiskCacheHit", "compiled graphs found on disk", elsewhere=("PersistentCacheHit",)),
    Entry("DiskCacheMiss", "compiled graphs that were not there", elsewhere=("PersistentCacheMiss",)),
    Entry("DiskCacheWrite", "compiled graphs written there"),
    Entry("DiskCacheEviction", "old ones removed, to stay below `config.cache_bytes`"),
    Entry("DiskCacheCorrupt", "files that were damaged", elsewhere=("PersistentCacheDeserializeFailure",)),
    Entry("DiskCacheError", "files that could not be read or written"),
    # last: it fits whatever has two colons
    Entry("<namespace>::<op>", "calls of this operator that were not recorded but ran at once", exported="fallback_op"),
)

METRICS = (
    Entry("TraceTime", "the time from one sync to the next: recording, and whatever else the loop did", "seconds"),
    Entry(
        "SyncTime",
        "`mark_step` itself, with a compile in the foreground if there was one, without the wait for the run before",
        "seconds",
    ),
    Entry("DeviceLockWait", "that wait: the loop is ahead of the device", "seconds"),
    Entry("ExecuteTime", "the run, wherever it happens; of a first step, what its calls took", "seconds"),
    Entry("CompileTime", "the compiler, in its own process or here", "seconds"),
    Entry("LoadTime", "taking a compiled graph from disk", "seconds", ("PersistentCacheLoad",)),
    Entry("EagerOpExecuteTime", "calls that ran at once: those that cannot be recorded, and eager mode's", "seconds"),
    Entry("TransferToDeviceTime", "uploads; on CUDA a copy may go on afterwards", "seconds", ("TensorToData",)),
    Entry("TransferFromDeviceTime", "downloads, without the wait for what they read", "seconds"),
    Entry("OutboundData", "of one upload", "bytes"),
    Entry("InboundData", "of one download", "bytes"),
    Entry("TensorsGraphSize", "graphs when they were new", "nodes"),
    Entry("InputOutputAliasCount", "inputs that such a graph updates in place, keeping their memory", "inputs"),
)


@functools.lru_cache(4096)
def entry_of(name: str) -> tuple[Entry, dict[str, str]] | None:
    """The entry of a counter or metric and the parts of its name; None for a name that cannot occur."""
    for entry in (*COUNTERS, *METRICS):
        labels = entry.labels(name)
        if labels is not None:
            return entry, labels
    return None


@functools.lru_cache(4096)
def own_name(name: str) -> str:
    """`name` as it is called here: names of Lazy Tensor Core and torch_xla are understood too."""
    for entry in (*COUNTERS, *METRICS):
        for other in entry.elsewhere:
            found = _pattern(other).fullmatch(name)
            if found is not None:
                return entry.name.replace("<op>", found.groupdict().get("op", ""))
    return name
