"""Every counter and metric that can occur: its meaning, and its name in Lazy Tensor Core and torch_xla.

In: the name of a counter or metric. Out: its entry in `COUNTERS` or `METRICS`. A test checks that nothing else is
counted, and that `docs/metrics.md` has the same entries.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Meaning:
    """A counter or metric. A name with `<parts>` stands for many names, whose parts become labels when exported."""

    name: str
    meaning: str
    unit: str = ""  # of a metric's values; a counter has none
    elsewhere: tuple[str, ...] = ()  # names in other backends, where they differ
    exported: str = ""  # name for Prometheus, if it does not follow from `name`

    def labels(self, name: str) -> dict[str, str] | None:
        """The parts of `name` if this is its entry, else None."""
        found = _pattern(self.name).fullmatch(name)
        return None if found is None else found.groupdict()


@functools.cache
def _pattern(name: str) -> re.Pattern[str]:
    # a namespace and an operator are words; reasons, causes and lines are any text; a line may be empty
    parts = {"op": r"[\w.:]+", "namespace": r"\w+", "line": ".*"}
    pieces = re.split(r"<(\w+)>", name)
    texts = [re.escape(p) if i % 2 == 0 else f"(?P<{p}>{parts.get(p, '.+')})" for i, p in enumerate(pieces)]
    return re.compile("".join(texts), flags=re.S)


COUNTERS = (
    Meaning("MarkStep", "calls of `mark_step`"),
    Meaning("SyncTensorsGraph", "traces that were cut and scheduled, for whatever reason"),
    Meaning("SyncedTensorsWithIR", "tensors alive at those syncs that got their values from them"),
    Meaning("UncachedCompile", "syncs whose graph was new"),
    Meaning("CachedCompile", "syncs whose graph was known"),
    Meaning("Compile", "calls of the compiler that gave a plan"),
    Meaning("CompileFailed", "calls of the compiler that gave none: the graph is interpreted"),
    Meaning("CompileDeclined", "graphs that are interpreted because compilers would get a write wrong"),
    Meaning("CompileDeclined: <reason> at <line>", "the same, by reason and line", exported="compile_declined_by_line"),
    Meaning(
        "RunFromPython: <reason>",
        "compiled graphs whose kernels are called by Inductor's Python code, by what C++ could not do",
        exported="run_from_python",
    ),
    Meaning(
        "CheckLeftOut: <check>",
        "checks in Inductor's Python code that C++ does not know and leaves out: of what operators return",
        exported="check_left_out",
    ),
    Meaning("PlanAgreed", "compiled graphs that computed what the interpreter computes, and are used from then on"),
    Meaning("PlanSuspected", "compiled graphs whose differences had to be compared with those that rounding makes"),
    Meaning("PlanRefused", "compiled graphs that computed something else, and are not used"),
    Meaning("PlanRepaired", "compiled graphs that leave to PyTorch's kernels what the compiler gets wrong or fails on"),
    Meaning("PlanUnverified", "compiled graphs used without a trial, for which memory did not suffice"),
    Meaning("ShapeLimitPassed", "programs with more shapes than the settings give plans to"),
    Meaning("ExecuteComputation", "graphs that ran, steps and replays; a first step too, which runs as it is recorded"),
    Meaning("ExecuteBeside", "those of them that took place beside recording, on a thread that needs no Python"),
    Meaning("DeviceGraphLaunched", "of these, those that were launched as one graph of the device"),
    Meaning("DeviceGraphCaptured", "such graphs that were made"),
    Meaning("DeviceGraphGivenUp", "such graphs that no longer held, since an input moved or an output was in use"),
    Meaning("DeviceGraphRefused", "plans that the device cannot launch as one graph"),
    Meaning("DeviceGraphRefused: <reason>", "the same, by reason", exported="device_graph_refused_by_reason"),
    Meaning("ExecuteFailed", "graphs that ran and raised", elsewhere=("ThreadPoolException",)),
    Meaning("CaptureRecorded", "calls of captured functions that ran as written"),
    Meaning("CapturedCall", "calls of captured functions that were replayed"),
    Meaning("ServedShape", "shapes of requests for which a served function was recorded, beside the example's"),
    Meaning("ServedShapeDropped", "of these, those dropped to stay within `config.max_served_shapes`"),
    Meaning("ServedRefused", "requests refused, since `max_requests` of `serve` were under way"),
    Meaning("RegionJump", "forwards, backwards and steps of captured modules and optimizers that were replayed"),
    Meaning("RegionRecorded", "those that ran as written, to learn from them or because something changed"),
    Meaning("GraphCut", "reads and calls that cut a trace", elsewhere=("EarlySyncLiveTensorsCount",)),
    Meaning("GraphCut: <cause> at <line>", "the same, by cause and line", exported="graph_cut_by_line"),
    Meaning(
        "GradScalerRead: <reason>",
        "steps of a GradScaler that read whether gradients are finite, by why they could not do without",
        exported="grad_scaler_read",
    ),
    Meaning("StretchAtOnce", "stretches of the program whose calls ran at once, since recording them takes longer"),
    Meaning("CallAtOnce", "their calls"),
    Meaning(
        "SteppedAside: <reason>",
        "times that stretches began to run at once, by what they are like",
        exported="stepped_aside",
    ),
    Meaning(
        "RecordedAgain: <reason>", "times that such stretches were recorded again, by why", exported="recorded_again"
    ),
    Meaning("TrimIrGraph", "traces cut because they grew past `config.max_trace_length` or `config.max_pending_bytes`"),
    Meaning("Fallback: <op> (<reason>) at <line>", "calls that were not recorded but ran at once", exported="fallback"),
    Meaning("lazy::<op>", "recorded calls", elsewhere=("xla::<op>",), exported="recorded_call"),
    Meaning("DeviceDataCacheHit", "0-d host constants that were uploaded before"),
    Meaning("DeviceDataCacheMiss", "0-d host constants that were not"),
    Meaning("CreateLtcTensor", "storages made", elsewhere=("CreateXlaTensor",)),
    Meaning("DestroyLtcTensor", "storages gone; the difference is what is alive", elsewhere=("DestroyXlaTensor",)),
    Meaning("DiskCacheHit", "compiled graphs found on disk", elsewhere=("PersistentCacheHit",)),
    Meaning("DiskCacheHitBehind", "of these, those in a folder of `config.cache_dirs`, or in a file that was loaded"),
    Meaning("DiskCacheRejected", "of the hits, those that could not be loaded and are compiled again"),
    Meaning("DiskCacheMiss", "compiled graphs that were not there", elsewhere=("PersistentCacheMiss",)),
    Meaning("DiskCacheWrite", "compiled graphs written there"),
    Meaning("DiskCacheEviction", "old ones removed, to stay below `config.cache_bytes`"),
    Meaning("DiskCacheCorrupt", "files that were damaged", elsewhere=("PersistentCacheDeserializeFailure",)),
    Meaning("DiskCacheError", "files that could not be read or written"),
    Meaning("CacheLoaded", "compiled graphs that `cache.load` or `torch.compiler.load_cache_artifacts` took"),
    Meaning("CacheSkipped: <reason>", "compiled graphs that these did not take, by reason", exported="cache_skipped"),
    # last, as this pattern fits any name with two colons
    Meaning(
        "<namespace>::<op>",
        "calls of this operator that were not recorded but ran at once",
        exported="fallback_op",
    ),
)

METRICS = (
    Meaning("TraceTime", "the time from one sync to the next: recording, and whatever else the loop did", "seconds"),
    Meaning(
        "SyncTime",
        "`mark_step` itself, with a compile in the foreground if there was one, without the wait for the run before",
        "seconds",
    ),
    Meaning("DeviceLockWait", "that wait: the loop is ahead of the device", "seconds"),
    Meaning("ExecuteTime", "the run, wherever it happens; of a first step, what its calls took", "seconds"),
    Meaning("CompileTime", "the compiler, in its own process or here", "seconds"),
    Meaning("TrialTime", "the first run of a compiled graph beside the interpreter, and comparing the two", "seconds"),
    Meaning("LoadTime", "taking a compiled graph from disk", "seconds", ("PersistentCacheLoad",)),
    Meaning("EagerOpExecuteTime", "calls that ran at once: those that cannot be recorded, and eager mode's", "seconds"),
    Meaning("TransferToDeviceTime", "uploads; on CUDA a copy may go on afterwards", "seconds", ("TensorToData",)),
    Meaning("TransferFromDeviceTime", "downloads, without the wait for what they read", "seconds"),
    Meaning("OutboundData", "of one upload", "bytes"),
    Meaning("InboundData", "of one download", "bytes"),
    Meaning("TensorsGraphSize", "graphs when they were new", "nodes"),
    Meaning("InputOutputAliasCount", "inputs that such a graph updates in place, keeping their memory", "inputs"),
)


@functools.lru_cache(4096)
def entry_of(name: str) -> tuple[Meaning, dict[str, str]] | None:
    """The entry of a counter or metric and the parts of its name; None for a name that cannot occur."""
    for entry in (*COUNTERS, *METRICS):
        labels = entry.labels(name)
        if labels is not None:
            return entry, labels
    return None


@functools.lru_cache(4096)
def own_name(name: str) -> str:
    """This package's name for `name`, which may be one of Lazy Tensor Core or torch_xla."""
    for entry in (*COUNTERS, *METRICS):
        for other in entry.elsewhere:
            found = _pattern(other).fullmatch(name)
            if found is not None:
                return entry.name.replace("<op>", found.groupdict().get("op", ""))
    return name
