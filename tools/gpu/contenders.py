"""Who takes part in `gpu_check.py`, and the process that each of them runs in.

In: commands, one JSON object per line on stdin. Out: one JSON object per line on stdout.
Commands: `about` (the machine), `smoke` (one check), `start` (a cold start up to the steady state), `round`, `memory`,
`graphs`; the end of stdin ends the process. Every contender trains as its users would, with defaults: the lazy ones
compile in the background, so their first step is what a user waits for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import platform
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from shared import contenders
from shared.contenders import Contender, compiled_graphs
from shared.workers import Reply, answer_commands
from shared.workloads import Training

from gpu import smoke
from gpu.training import Scale, make_gpu_training

# Losses that are compared with eager's, from the first step on. More steps amplify rounding.
NUM_LOSSES = 10

# Steps and seconds without a compile or a capture after which a contender counts as being in its steady state: of real
# models, and of tiny ones.
_QUIET = {False: (40, 1.0), True: (12, 0.1)}

# Steps whose median is the final speed of a start, and what counts as fast beside it.
_FINAL_STEPS, _FAST = 20, 1.1


# ----- contenders


def _eager(device: str, scale: Scale) -> Contender:
    return Contender(device, wait=_waiting(device))


def _compiled(mode: str) -> Callable[[str, Scale], Contender]:
    """`torch.compile` of the model, as its documentation says; the optimizer is eager's."""

    def make(device: str, scale: Scale) -> Contender:
        # a compiler takes ten seconds for the tiniest model, and the tool's own logic needs none
        options: dict[str, Any] = {"backend": "aot_eager"} if scale.tiny else {"mode": mode}

        def prepare(training: Training) -> None:
            training.forward = torch.compile(training.model, **options)

        return Contender(device, prepare=prepare, wait=_waiting(device), compiles=compiled_graphs)

    return make


def _lazy(device: str, scale: Scale) -> Contender:
    """A plain loop on the lazy device."""
    import lazy_backend

    lazy_backend.config.device = device
    if scale.tiny:
        # floats that change are inputs, as with inductor: with "eager", whose floats are numbers, no step is launched
        lazy_backend.config.backend, lazy_backend.config.compile_after_operators = "aot_eager", 0
    wait = _waiting(device)

    def wait_for_all() -> None:
        lazy_backend.wait_device_ops()
        wait()

    return Contender(
        "lazy",
        mark=lazy_backend.mark_step,
        wait=wait_for_all,
        compiles=lambda: lazy_backend.metrics.counter_value("Compile"),
    )


def _lazy_parts(device: str, scale: Scale) -> Contender:
    """A plain loop whose model and optimizer are captured."""

    def prepare(training: Training) -> None:
        import lazy_backend

        lazy_backend.capture(training.model)
        training.update = lazy_backend.capture(training.optimizer).step

    return dataclasses.replace(_lazy(device, scale), prepare=prepare)


def _lazy_captured(device: str, scale: Scale) -> Contender:
    """The whole step as a captured function: replays run no Python of it, and each ends a step by itself."""

    def prepare(training: Training) -> None:
        import lazy_backend

        training.train = lazy_backend.capture(training.train)

    plain = _lazy(device, scale)
    return Contender("lazy", prepare=prepare, wait=plain.wait, compiles=plain.compiles)


def _waiting(device: str) -> Callable[[], None]:
    return torch.cuda.synchronize if device == "cuda" else _nothing


def _nothing() -> None:
    return None


GPU_CONTENDERS: dict[str, Callable[[str, Scale], Contender]] = {
    "eager": _eager,
    "reduce-overhead": _compiled("reduce-overhead"),
    "lazy": _lazy,
    "captured": _lazy_captured,
    "compile": _compiled("default"),
    "captured-parts": _lazy_parts,
    "max-autotune": _compiled("max-autotune"),
}
LAZY_CONTENDERS = ("lazy", "captured", "captured-parts")


@dataclass(slots=True)
class Running:
    """One contender with its training, in this process."""

    contender: Contender
    training: Training
    device: str
    scale: Scale
    is_lazy: bool
    warned: list[str]


# ----- measurements


def start(running: Running, limit: float) -> Reply:
    """From the first step until nothing is compiled or captured any more, at most `limit` seconds.

    Every step is waited for, so that each has a time of its own; steps until it is fast are compared with such steps.
    """
    contender, training = running.contender, running.training
    seconds: list[float] = []
    losses: list[float] = []
    begin = changed_at = perf_counter()
    known, changed_step = None, 0
    quiet_steps, quiet_seconds = _QUIET[running.scale.tiny]
    while True:
        before = perf_counter()
        if not seconds:
            contender.prepare(training)
        training.step()
        contender.mark()
        contender.wait()
        after = perf_counter()
        seconds.append(after - before)
        if len(losses) < NUM_LOSSES:
            losses.append(float(training.loss))  # was computed: reads no more than a number
        activity = _activity(running)
        if activity != known or _is_compiling(running):
            known, changed_at, changed_step = activity, after, len(seconds)
        is_quiet = len(seconds) - changed_step >= quiet_steps and after - changed_at >= quiet_seconds
        if is_quiet or after - begin > limit:
            break
    final = statistics.median(seconds[-_FINAL_STEPS:])
    slow = slow_steps(seconds, final)
    return {
        "first": seconds[0],
        "steps": len(seconds),
        "steps_until_fast": slow,
        "seconds_until_fast": sum(seconds[:slow]),
        "final": final,
        "settled": is_quiet,
        "losses": losses,
        "compiles": contender.compiles(),
    }


def slow_steps(seconds: Sequence[float], final: float) -> int:
    """Steps until it is fast: from then on, medians of five are within 1.1 x of `final`, and so is the first step."""
    windows = [statistics.median(seconds[place : place + 5]) for place in range(max(1, len(seconds) - 4))]
    first = 1 + max((place for place, window in enumerate(windows) if window > _FAST * final), default=-1)
    return next((place for place in range(first, len(seconds)) if seconds[place] <= _FAST * final), len(seconds))


def _activity(running: Running) -> object:
    """Changes whenever something was compiled or captured."""
    if not running.is_lazy:
        return running.contender.compiles()
    names = ("Compile", "UncachedCompile", "DeviceGraphCaptured", "DeviceGraphRefused")
    metrics = importlib.import_module("lazy_backend").metrics
    return [metrics.counter_value(name) for name in names]


def _is_compiling(running: Running) -> bool:
    if not running.is_lazy:
        return False
    states = importlib.import_module("lazy_backend").computation.get_debug_states().values()
    return any(state.plan == "compiling" for state in states)


def run_round(running: Running, steps: int) -> Reply:
    """Seconds for `steps` steady steps, by the host's clock and by the device's; the device is idle at both ends."""
    contender = running.contender
    contender.wait()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if running.device == "cuda" else []
    begin = perf_counter()
    if events:
        events[0].record()
    for _ in range(steps):
        running.training.step()
        contender.mark()
    contender.wait()
    if events:
        events[1].record()
        events[1].synchronize()
    host = perf_counter() - begin
    device = 1e-3 * events[0].elapsed_time(events[1]) if events else host
    return {"seconds": host, "device_seconds": device, "compiles": contender.compiles()}


def memory(running: Running, steps: int) -> Reply:
    """Bytes at the peak of steady steps, pools of captured graphs counted whole: nobody else can have them."""
    if running.device != "cuda":
        if not sys.platform.startswith("linux"):
            return {"peak": None}
        found = contenders.memory(running.contender, running.training, steps)
        return {"peak": found["live"] + found["rise"]}
    running.contender.wait()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run_round(running, steps)
    pools = [one for one in torch.cuda.memory_snapshot() if tuple(one.get("segment_pool_id", (0, 0))) != (0, 0)]
    in_pools, whole = (sum(one[name] for one in pools) for name in ("allocated_size", "total_size"))
    allocated = torch.cuda.max_memory_allocated()
    return {
        "peak": allocated - in_pools + whole,
        "allocated": allocated,
        "pools": whole,
        "reserved": torch.cuda.max_memory_reserved(),
    }


def graphs(running: Running) -> Reply:
    """What the lazy device counted of captured graphs, with reasons for refusals, and what else may slow it down."""
    if not running.is_lazy:
        return {"warnings": running.warned}
    package = importlib.import_module("lazy_backend")
    told = ("DeviceGraph", "CompileFailed", "CompileDeclined", "GraphCut")
    found = {name: value for name, value in package.metrics.counters().items() if name.startswith(told)}
    stats = getattr(package, "memory_stats", None)
    return {"counters": found, "memory": stats() if stats is not None else {}, "warnings": running.warned}


# ----- the process


def about(device: str) -> Reply:
    """The machine that this runs on."""
    found = {"torch": torch.__version__, "python": platform.python_version(), "device": platform.processor() or "CPU"}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info()
        found |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "devices": torch.cuda.device_count(),
            "cuda": torch.version.cuda,
            "free_bytes": free,
            "total_bytes": total,
        }
    return found


_MEASUREMENTS: dict[str, Callable[..., Reply]] = {
    "start": start, "round": run_round, "memory": memory, "graphs": graphs,
}  # fmt: skip


def serve(contender: str, workload: str, device: str, scale: Scale) -> None:
    """Answer commands until stdin ends."""
    running: Running | None = None
    is_lazy = contender in LAZY_CONTENDERS
    with graphs_on(device) if is_lazy else contextlib.nullcontext():

        def answer(name: str, **arguments: Any) -> Reply:
            nonlocal running
            if name == "about":
                return about(device)
            if name == "smoke":
                return smoke.run_check(device=device, tiny=scale.tiny, **arguments)
            if running is None:
                running = _prepared(contender, workload, device, scale)
            return _MEASUREMENTS[name](running, **arguments)

        answer_commands(answer)


def _prepared(contender: str, workload: str, device: str, scale: Scale) -> Running:
    warned: list[str] = []
    warnings.showwarning = (
        lambda message, kind, file, line, *_: warned.append(  # type: ignore[assignment]
            f"{kind.__name__} at {Path(file).name}:{line}: {message}".splitlines()[0][:300]
        )
    )
    made = GPU_CONTENDERS[contender](device, scale)
    training = make_gpu_training(workload, made.device, scale)
    made.mark()
    made.wait()
    return Running(made, training, device, scale, contender in LAZY_CONTENDERS, warned)


def graphs_on(device: str) -> contextlib.AbstractContextManager[Any]:
    """On the CPU, the fake of a device that can capture graphs, if this version of the package has it."""
    if device == "cuda":
        return contextlib.nullcontext()
    try:
        fake = importlib.import_module("lazy_backend.lowering.device_graphs.fake")
        devices = importlib.import_module("lazy_backend.lowering.devices.registration")
    except ModuleNotFoundError:
        return contextlib.nullcontext()
    found: contextlib.AbstractContextManager[Any] = devices.use_device(fake.FakeDevice())
    return found
