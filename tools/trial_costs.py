"""The cost of the step in which a compiled plan is tried, beside eager's steps.

    python tools/trial_costs.py gpt-adamw cnn mlp lstm

In: workloads. Out: a table of CPU time per step, as multiples of eager's: interpreted, in the first run of a compiled
plan that has no trial, and in the most expensive trial; in later steps, with `config.verify_compiled` "once" and "off";
and of the process's peak memory above what it had before the model. With one thread, each in processes of its own, of
which the fastest counts.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from shared.tables import Table
from shared.workloads import WORKLOADS, make_training

import lazy_backend
from lazy_backend import config, metrics

_PROCESSES = 3
_STEPS = 40
_LAST = 15  # of these steps, which are neither trials nor wait for a compile


def main() -> None:
    rows = []
    for name in sys.argv[1:]:
        eager, interpreted, once, off = (_measured(name, way) for way in ("eager", "interpreted", "once", "off"))
        times = [interpreted.later, off.first, once.first, once.later, off.later]
        memory = [f"{one / 2**20:.0f}" for one in (eager.peak, once.first_peak)]
        rows.append((name, f"{1e3 * eager.later:.2f}", *(f"{one / eager.later:.1f}" for one in times), *memory))
    times_eager = "interpreted", "first untried", "trial", "later", "later untried"
    head = ("step", "eager, ms", *times_eager, "eager's peak, MiB", "trial's peak, MiB")
    print(Table("Trials: CPU time of a step, in eager's steps, and memory", head, rows).markdown())


class Measured(NamedTuple):
    """Seconds and peaks of the last steps, and of the most expensive among the first runs of compiled plans."""

    later: float
    peak: float
    first: float
    first_peak: float


def _measured(name: str, way: str) -> Measured:
    command = [sys.executable, __file__, "--one", name, way]
    printed = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(_PROCESSES)]
    return Measured(*map(min, zip(*(map(float, one.split()) for one in printed), strict=True)))


def measure(name: str, way: str) -> None:
    """Print a `Measured`."""
    torch.set_num_threads(1)
    config.cache, config.compile_after_operators, config.run_in_background = False, 0, "never"
    config.mark_steps, config.verify_compiled = "by hand", "off" if way == "off" else "once"
    config.compile = "off" if way == "interpreted" else config.compile
    base = _memory("VmRSS")
    training = make_training(WORKLOADS[name], "cpu" if way == "eager" else "lazy")
    steps, firsts, seen = [], [(0.0, 0)], set[str]()
    for _ in range(_STEPS):
        before, start = _num_trials(), time.process_time()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what is now
        training.step()
        if way != "eager":
            lazy_backend.mark_step(wait=True)
        steps.append((time.process_time() - start, _memory("VmHWM") - base))
        plans = {record.plan for record in lazy_backend.explain().records[-1:]} if way == "off" else set[str]()
        firsts += steps[-1:] if _num_trials() > before or plans & {"compiled"} - seen else ()
        seen |= plans
        lazy_backend.wait_for_compiles()
    seconds, peaks = zip(*steps[-_LAST:], strict=True)
    print(statistics.median(seconds), max(peaks), *(max(column) for column in zip(*firsts, strict=True)))


def _num_trials() -> int:
    return sum(metrics.counter_value(name) for name in ("PlanAgreed", "PlanSuspected", "PlanRefused"))


def _memory(name: str) -> int:
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(name))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    measure(*sys.argv[2:]) if sys.argv[1] == "--one" else main()
