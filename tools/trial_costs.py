"""The cost of the step in which a compiled plan is tried, beside eager's steps.

    python tools/trial_costs.py gpt-adamw cnn mlp lstm

In: workloads. Out: a table of CPU time per step and of the process's peak memory above what it had before the model: in
eager, in the steps that are trials, and in the steps after them with `config.verify_compiled` "once" and "off". Each in
a process of its own, with one thread.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from shared.tables import Table
from shared.workloads import WORKLOADS, make_training

import lazy_backend
from lazy_backend import config, metrics

_STEPS = 40
_LAST = 15  # of these steps, which are neither trials nor wait for a compile


def main() -> None:
    rows = []
    for name in sys.argv[1:]:
        (eager, peak, *_), (after, _, trial, tried), (off, *_) = (
            _measured(name, way) for way in ("eager", "once", "off")
        )
        figures = f"{1e3 * eager:.2f}", f"{trial / eager:.1f}", f"{1e3 * after:.2f}", f"{1e3 * off:.2f}"
        rows.append((name, *figures, f"{peak / 2**20:.0f}", f"{tried / 2**20:.0f}"))
    head = (
        "step",
        "eager, ms",
        "trial, times eager",
        "later, ms",
        "untried, ms",
        "eager's peak, MiB",
        "trial's peak, MiB",
    )
    print(Table("Trials: CPU time and memory of a step", head, rows).markdown())


def _measured(name: str, way: str) -> list[float]:
    command = [sys.executable, __file__, "--one", name, way]
    return list(map(float, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()))


def measure(name: str, way: str) -> None:
    """Print seconds and the peak of the last steps, and of the most expensive trial."""
    torch.set_num_threads(1)
    config.cache, config.compile_after_operators, config.run_in_background = False, 0, "never"
    config.mark_steps, config.verify_compiled = "by hand", "off" if way == "off" else "once"
    base = _memory("VmRSS")
    training = make_training(WORKLOADS[name], "cpu" if way == "eager" else "lazy")
    steps, trials = [], [(0.0, 0)]
    for _ in range(_STEPS):
        before, start = _num_trials(), time.process_time()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what is now
        training.step()
        if way != "eager":
            lazy_backend.mark_step(wait=True)
        steps.append((time.process_time() - start, _memory("VmHWM") - base))
        trials += steps[-1:] if _num_trials() > before else ()
        lazy_backend.wait_for_compiles()
    seconds, peaks = zip(*steps[-_LAST:], strict=True)
    print(statistics.median(seconds), max(peaks), *(max(column) for column in zip(*trials, strict=True)))


def _num_trials() -> int:
    return sum(metrics.counter_value(name) for name in ("PlanAgreed", "PlanSuspected", "PlanRefused"))


def _memory(name: str) -> int:
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(name))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    measure(*sys.argv[2:]) if sys.argv[1] == "--one" else main()
