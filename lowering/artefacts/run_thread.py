"""The thread on which runs without Python take place beside recording.

In: the functions of an extension that begin a run. Out: the queue that they add it to.
See Note [Runs beside recording].
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

# Of a queue, a list, arguments, which it empties, and a number of threads: adds a job to the list, unless it has one.
Begin = Callable[[Any, list[Any], list[Any], int], None]


@dataclass(frozen=True, slots=True)
class RunStarter:
    """What begins runs of one runner.

    `extension`: that of the runner. `num_threads`: how many compute a run; None for as many as operators use.
    """

    extension: ModuleType
    begin: Begin
    num_threads: int | None = None


# Runs that gained nothing, beyond those that did, after which runs are done otherwise.
_MOST_IN_VAIN = 8
# How many runs are then done otherwise: at first, and after many trials in vain.
_FEWEST_BETWEEN, _MOST_BETWEEN = 64, 4096
# Seconds that handing over a run takes.
_HAND_OVER = 2e-5


class Overlap:
    """Whether runs of a plan beside recording gain anything.

    They do not if somebody waits for each from its beginning, or if other threads have the processors: after an
    operator of the program's own on the CPU, those of OpenMP spin for milliseconds. What a run gains is what it takes
    within the call: three times as long as on a thread that does nothing else, where a short run finds its code and
    data in the caches.
    """

    __slots__ = ("_within", "_in_vain", "_left_out", "_between")

    def __init__(self) -> None:
        self._within = 0.0  # seconds that a run within the call takes, if there was one
        self._in_vain = 0
        self._left_out = 0
        self._between = _FEWEST_BETWEEN

    def pays(self) -> bool:
        """Whether the next run should be done beside recording. Counts that run."""
        if self._in_vain < _MOST_IN_VAIN:
            return True
        self._left_out += 1
        if self._left_out <= self._between:
            return False
        self._left_out = 0
        self._in_vain = _MOST_IN_VAIN - 2  # a short trial
        self._between = min(2 * self._between, _MOST_BETWEEN)
        return True

    def note_within(self, seconds: float) -> None:
        """A run within the call took so long."""
        if self._within:
            seconds = min(seconds, 2 * self._within)  # one that was interrupted says little
            self._within += (seconds - self._within) / 8
        else:
            self._within = seconds

    def note(self, seconds: float, waited: float) -> None:
        """Of a run beside recording, which took so long, somebody waited for so long."""
        if waited + _HAND_OVER > max(seconds, self._within):
            self._in_vain += 1
        elif self._in_vain:
            self._in_vain -= 1
            if not self._in_vain:
                self._between = _FEWEST_BETWEEN


@functools.cache
def available_cores() -> int:
    """The cores that this process may use; those of a machine are shared evenly by the ranks on it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:  # a container's share
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):  # another system, or "max": no limit
        pass
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return cores // int(ranks) if ranks.isdigit() and int(ranks) else cores


class _RunThread:
    """The process's queue of runs, and the thread that does them, which starts at the first one."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.queue: Any = None  # None before the first run

    def queue_of(self, extension: ModuleType) -> Any:
        """The queue. `extension`: any, to make it if there is none."""
        if self.queue is None:
            with self._lock:
                if self.queue is None:
                    queue = extension.make_queue()
                    # a daemon: it never ends
                    threading.Thread(target=_serve, args=(extension, queue), name="lazy runs", daemon=True).start()
                    self.queue = queue
        return self.queue

    def reset_after_fork(self) -> None:
        """In a forked child: the thread stayed with the parent."""
        self._lock = threading.RLock()
        self.queue = None


def _serve(extension: ModuleType, queue: Any) -> None:
    torch.set_grad_enabled(False)  # of this thread
    extension.serve(queue)


run_thread = _RunThread()
