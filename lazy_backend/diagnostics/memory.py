"""What is alive, sampled as a program goes on.

In: counts of live tensors when somebody asks. Out: `MemorySeries`, a bounded list of `MemorySample`s over a whole run,
and a `Peak` per device: what was alive when most was.

Note [Sampling costs a hundredth]
Counting live tensors takes 0.2 µs each. A sample is taken at the end of a sync (but the first), at most ten times a
second and never sooner than a hundred times what the last one took, so it costs at most 1 % of any program. When the
series is full every second sample goes and the interval doubles: a long run keeps its beginning. A peak is looked at
line by line, which takes 2 µs each, so only when a quarter more is alive than at the one before.
"""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass
from typing import Any

_INTERVAL = 0.1  # seconds
_MAX_SAMPLES = 2000
_SHARE = 0.01  # of the time, at most
_HIGHER = 1.25


@dataclass(frozen=True, slots=True)
class Alive:
    """What a device holds at one moment. `device_bytes`: what PyTorch has allocated on a GPU, None on the CPU."""

    tensors: int
    bytes: int
    device_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class MemorySample:
    """What was alive at the end of a sync. `time`: seconds since the history began; `process_bytes`: resident."""

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
        self.due = -math.inf  # seconds since the history began; a trace may have begun before it
        self._interval = _INTERVAL

    def add(self, sample: MemorySample, seconds: float) -> None:
        """Keep a sample that took `seconds`."""
        self.samples.append(sample)
        if len(self.samples) >= _MAX_SAMPLES:
            del self.samples[1::2]
            self._interval *= 2
        self.due = sample.time + max(self._interval, seconds / _SHARE)

    def copy(self) -> MemorySeries:
        """What was sampled until now."""
        copied = MemorySeries()
        copied.samples, copied.peaks = list(self.samples), dict(self.peaks)
        return copied

    def is_peak(self, device: str, tensors: int) -> bool:
        """Whether so much more is alive than at the last peak that it is worth a look."""
        before = self.peaks.get(device)
        return before is None or tensors > _HIGHER * before.tensors


def process_bytes() -> int | None:
    """Resident memory of this process; None where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None
