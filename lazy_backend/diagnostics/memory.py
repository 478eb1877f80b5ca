"""Live tensors and memory, sampled while a program runs.

In: counts of live tensors, at the ends of syncs. Out: `MemorySeries`, a bounded list of `MemorySample`s over a whole
run, and a `Peak` per device: what was alive when the most tensors were.

Note [Sampling costs a hundredth]
Counting live tensors takes 0.2 µs each. A sample is taken at the end of a sync (except the first), at most ten times a
second and never sooner than a hundred times what the last sample took, so sampling costs at most 1 % of any program.
When the series is full, every second sample is dropped and the interval doubles: a long run keeps its beginning. A peak
is broken down by line, which takes 2 µs per tensor, so only when a quarter more is alive than at the previous peak.
"""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass
from typing import Any

_INTERVAL = 0.1  # seconds
_MAX_SAMPLES = 2000
_SHARE = 0.01  # of the program's time, at most
_HIGHER = 1.25


@dataclass(frozen=True, slots=True)
class Alive:
    """What a device holds at one moment. `device_bytes`: what PyTorch has allocated on a GPU, None on the CPU."""

    tensors: int
    bytes: int
    device_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class MemorySample:
    """What was alive at the end of a sync. `time`: seconds since the history began; `process_bytes`: resident size."""

    time: float
    step: int
    device: str
    tensors: int
    bytes: int
    device_bytes: int | None
    process_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        return {"type": "memory", **asdict(self)}


@dataclass(frozen=True, slots=True)
class Peak:
    """What was alive on a device at the end of `step`, by line: dicts with `how`, `site`, `tensors` and `bytes`."""

    device: str
    step: int
    tensors: int
    lines: list[dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        return {"type": "peak", **asdict(self)}


class MemorySeries:
    """Samples over a run, at most 2000. See Note [Sampling costs a hundredth]."""

    def __init__(self) -> None:
        self.peaks: dict[str, Peak] = {}
        self.samples: list[MemorySample] = []
        self.due = -math.inf  # seconds since the history began; not 0, as a trace may have begun before the history
        self._most: dict[str, int] = {}  # bytes that a device held at most
        self._interval = _INTERVAL

    def add(self, sample: MemorySample, seconds: float) -> None:
        """Keep a sample that took `seconds`."""
        self.samples.append(sample)
        self.note_bytes(sample.device, sample.bytes)
        if len(self.samples) >= _MAX_SAMPLES:
            del self.samples[1::2]
            self._interval *= 2
        self.due = sample.time + max(self._interval, seconds / _SHARE)

    def copy(self) -> MemorySeries:
        """A copy of the samples and peaks so far."""
        copied = MemorySeries()
        copied.samples, copied.peaks = list(self.samples), dict(self.peaks)
        return copied

    def note_bytes(self, device: str, count: int) -> int:
        """Note that `device` holds so many bytes now. Returns the most that it held so far, or since `forget_most`."""
        most = self._most[device] = max(count, self._most.get(device, 0))
        return most

    def forget_most(self, device: str) -> None:
        """Let `note_bytes` of `device` count from now on."""
        self._most.pop(device, None)

    def is_peak(self, device: str, tensors: int) -> bool:
        """Whether a quarter more tensors are alive than at the last peak, so that a new one is recorded."""
        before = self.peaks.get(device)
        return before is None or tensors > _HIGHER * before.tensors


def process_bytes() -> int | None:
    """Resident memory of this process in bytes; None on systems without `/proc/self/statm`."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None
