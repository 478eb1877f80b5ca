"""What the records behind `lazy_backend.explain()` cost per training step.

In: workloads. Out: a table: CPU time of a step's recording, and of its `mark_step` without records as if the code were
not there, with `config.explain` off, and on. Run by `bench.py --diagnostics`. Steps take turns in one process; no run
is under way while a step is timed. A known step's recording is the same code in all three, so its median is over all.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import thread_time
from typing import Any

from shared.contenders import hold_queue
from shared.tables import Table
from shared.workers import finding_tools
from shared.workloads import WORKLOADS, make_training

MODES = ("without", "off", "on")

_WARM_UP = 10


def measure(name: str, steps: int) -> dict[str, Any]:
    """Train in this process, `steps` steps per mode. Returns medians in seconds, and the differences to `without`."""
    import lazy_backend

    lazy_backend.config.compile = "off"
    training = make_training(WORKLOADS[name], "lazy")
    traces: list[float] = []
    syncs: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number in range(-_WARM_UP, steps):
        for place in range(len(MODES)):
            mode = MODES[(number + place) % len(MODES)]
            with _mode(mode):
                traced, synced = _step(training.step, lazy_backend.mark_step)
            lazy_backend.wait_device_ops()
            if number >= 0:
                traces.append(traced)
                syncs[mode].append(synced)
    # within a round, so that what slows the machine for a while slows all modes
    extra = {
        mode: statistics.median(now - base for now, base in zip(syncs[mode], syncs["without"], strict=True))
        for mode in MODES
    }
    return {
        "trace": statistics.median(traces),
        "sync": {mode: statistics.median(found) for mode, found in syncs.items()},
        "extra": extra,
    }


def _step(train: Callable[[], None], mark: Callable[[], None]) -> tuple[float, float]:
    begin = thread_time()
    train()
    traced = thread_time() - begin
    release = hold_queue()
    begin = thread_time()
    mark()
    synced = thread_time() - begin
    release()
    return traced, synced


@contextmanager
def _mode(mode: str) -> Iterator[None]:
    import lazy_backend
    from lazy_backend.execution.sync import executor

    with lazy_backend.config.patch(explain=mode == "on"):
        if mode == "without":
            executor.records.begin = lambda *arguments: None  # type: ignore[method-assign]
        try:
            yield
        finally:
            executor.records.__dict__.pop("begin", None)


def main(names: Sequence[str], threads: int, steps: int, show: Callable[[Table], str]) -> None:
    rows = []
    for name in names:
        found = _in_a_process(name, threads, steps)
        whole = found["trace"] + found["sync"]["without"]
        cells = [f"{found['sync'][mode] * 1e6:.1f}" for mode in MODES]
        shares = [f"{found['extra'][mode] * 1e6:+.1f} µs, {found['extra'][mode] / whole:+.2%}" for mode in MODES[1:]]
        rows.append([name, f"{found['trace'] * 1e6:.0f}", *cells, *shares])
    head = ["workload", "recording, µs", *(f"sync {mode}, µs" for mode in MODES), "off costs", "on costs"]
    print(show(Table("Diagnostics: CPU time per step", head, rows)))


def _in_a_process(name: str, threads: int, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        environment = finding_tools(os.environ) | {
            "OMP_NUM_THREADS": str(threads or 1),
            "LAZY_BACKEND_CACHE_DIR": str(Path(folder) / "lazy_backend"),
        }
        command = [sys.executable, __file__, name, str(steps)]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
