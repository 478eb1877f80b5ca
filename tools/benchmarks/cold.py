"""The first steps of a training in a new process: how long each takes, until the steady state.

In: workloads and who runs them. Out: a table, one process per row, each with compiler caches of its own; then the lazy
device once more, with the disk cache that it left. First steps vary most from process to process, so those of eager and
of the lazy device are medians of several that take turns. Run by `bench.py --cold`. Times are the caller's, runs
included.
"""

from __future__ import annotations

import gc
import math
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from shared.tables import Table
from shared.workers import returned_by
from shared.workloads import WORKLOADS, Training, make_training

KINDS = ("eager", "lazy", "torch.compile")

# Processes of which a first step is the median.
_ROUNDS = 7

# Steps after the compiler has finished; their median is the steady state.
_STEADY_STEPS = 30

# Seconds to go on if nothing ever says that compiling is over.
_LIMIT = 240.0


def measure(kind: str, name: str, max_steps: float = math.inf) -> dict[str, Any]:
    """Train in this process. Returns seconds: of every step, and until the compiler was done."""
    step, is_compiled = _starter(kind, make_training(WORKLOADS[name], "lazy" if kind == "lazy" else "cpu"))
    gc.collect()  # a full collection takes 0.1 s; whether one falls into the first step depends on what was imported
    start = perf_counter()
    steps: list[float] = []
    compiled_at: float | None = None
    left = _STEADY_STEPS
    while left and len(steps) < max_steps and perf_counter() - start < _LIMIT:
        before = perf_counter()
        step()
        steps.append(perf_counter() - before)
        if compiled_at is None and is_compiled(len(steps)):
            compiled_at = perf_counter() - start
        left -= compiled_at is not None
    return {"steps": steps, "compiled_at": compiled_at}


def _starter(kind: str, training: Training) -> tuple[Any, Any]:
    """A step of the contender, and what tells after so many steps that it compiles no more."""
    if kind == "lazy":
        import lazy_backend

        def step() -> None:
            training.step()
            lazy_backend.mark_step(wait=True)

        def is_compiled(count: int) -> bool:
            # looks only: `wait_for_compiles` would do here, beside the clock, what the steps do for a compile
            states = lazy_backend.computation.get_debug_states().values()
            return count > 9 and all(state.plan != "compiling" for state in states)

        return step, is_compiled
    if kind == "torch.compile":
        training.forward = torch.compile(training.forward)
        training.update = torch.compile(training.optimizer.step)
    return training.step, lambda count: count > 9


def _run(kind: str, name: str, caches: Path, threads: int, max_steps: float = math.inf) -> dict[str, Any]:
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "LAZY_BACKEND_CACHE_DIR": str(caches / "lazy"),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1" if kind == "lazy" else "0",
    }
    call = f"benchmarks.cold.measure({kind!r}, {name!r}, float({str(max_steps)!r}))"
    return returned_by(call, environment, threads)  # type: ignore[no-any-return]


def _first_steps(name: str, threads: int) -> dict[str, float]:
    """Seconds of the first step, the median of `_ROUNDS` processes each."""
    found: dict[str, list[float]] = {"eager": [], "lazy": []}
    for _ in range(_ROUNDS):
        for kind, seconds in found.items():
            with tempfile.TemporaryDirectory(prefix="lazy_backend_cold_") as folder:
                seconds += _run(kind, name, Path(folder), threads, max_steps=1)["steps"]
    return {kind: statistics.median(seconds) for kind, seconds in found.items()}


def _row(label: str, result: dict[str, Any], eager: dict[str, Any], first: float, eager_first: float) -> list[str]:
    steps: list[float] = result["steps"]
    usual = statistics.median(eager["steps"][-_STEADY_STEPS:])
    between = steps[1 : 1 - _STEADY_STEPS]  # up to the first that runs compiled, which loads what was compiled
    later = [statistics.median(between), max(between), statistics.median(steps[-_STEADY_STEPS:])]
    figures = [f"{first * 1e3:,.1f}", f"{first / eager_first:,.2f}", f"{steps[1] * 1e3:,.1f}"]
    return [label, *figures, *(f"{seconds / usual:.2f}" for seconds in later), f"{result['compiled_at'] or 0:.1f}"]


def main(names: Sequence[str], threads: int, show: Callable[[Table], str]) -> None:
    """Print the table for these workloads."""
    rows = []
    for name in names:
        firsts = _first_steps(name, threads)
        with tempfile.TemporaryDirectory(prefix="lazy_backend_cold_") as folder:
            eager = _run("eager", name, Path(folder) / "eager", threads)
            for label in (*KINDS, "lazy, second process"):
                kind = label.split(",")[0]
                result = eager if kind == "eager" else _run(kind, name, Path(folder) / kind, threads)
                first = firsts.get(label, result["steps"][0])
                rows.append(_row(f"{name}, {label}", result, eager, first, firsts["eager"]))
    head = ["", "first step, ms", "time / eager's", "second, ms"]
    head += [f"{which}: time / eager's" for which in ("median", "longest", "steady")]
    note = "median, longest: later steps while the compiler works; steady: after it; beside eager's usual steps"
    print(show(Table("The first steps of a process", [*head, "compiled after, s"], rows, note)))
