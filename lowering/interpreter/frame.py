"""Frames, which hold the values of one run, and the pool that keeps frames between runs.

In: a template, and the inputs, constants and seeds of one run. Out: `ExecutionFrame`; `FramePool`, with one frame per
run in flight.
Source: torch/nativert/executor (`ExecutionFrame`, `getExecutorFrameFromPool`, `clearStaleExecutionFrames`).

Note [Slots]
A frame is one list. Its first slots hold the graph's values by number, then come the constants, then the literal
arguments of all kernels. So a kernel gathers its arguments with one call, whatever their kinds. Literals and constants
stay for the whole run; a value's slot is emptied after the value's last use.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True, eq=False)
class FrameTemplate:
    """The initial contents of a frame, the same for every run of a graph. See Note [Slots]."""

    values: list[Any]  # never written after construction
    inputs: tuple[int, ...]  # slots of the tensors that are passed to a run
    first_constant: int
    # those of a region that is the whole graph, made at its first run, with gaps for what is passed to a run
    operands: list[Any] = field(default_factory=list)

    def holding(self, held: Mapping[int, torch.Tensor]) -> FrameTemplate:
        """This template with tensors in some slots; a run is then not passed those tensors."""
        values = self.values.copy()
        for slot, tensor in held.items():
            values[slot] = tensor
        inputs = tuple(slot for slot in self.inputs if slot not in held)
        return FrameTemplate(values, inputs, self.first_constant)


class ExecutionFrame:
    """The values of one run, by slot. `buffers`: memory that the frame owns, as pairs of slot and tensor."""

    __slots__ = ("values", "constants", "seeds", "buffers")

    def __init__(self, buffers: Sequence[tuple[int, torch.Tensor]] = ()) -> None:
        self.values: list[Any] = []
        self.constants: Sequence[float] = ()
        self.seeds: Sequence[int] = ()
        self.buffers = buffers

    def fill(
        self,
        template: FrameTemplate,
        inputs: Sequence[torch.Tensor],
        constants: Sequence[float],
        seeds: Sequence[int],
    ) -> None:
        """Prepare for a run: `inputs` fill the template's input slots, in that order."""
        values = self.values
        values[:] = template.values
        for slot, tensor in zip(template.inputs, inputs, strict=True):
            values[slot] = tensor
        values[template.first_constant : template.first_constant + len(constants)] = constants
        for slot, buffer in self.buffers:
            values[slot] = buffer
        self.constants = constants
        self.seeds = seeds

    def clear(self) -> None:
        """Release all values except the buffers."""
        self.values.clear()


class FramePool:
    """The frames of one executor: one per run in flight, reused by later runs and dropped when unused for `max_age`.

    `max_age` and `clock` are in seconds. Safe to use from any thread.
    """

    def __init__(self, new_frame: Callable[[], ExecutionFrame], max_age: float, clock: Callable[[], float]) -> None:
        self._new_frame = new_frame
        self._max_age = max_age
        self._clock = clock
        self._lock = threading.RLock()
        self._num_in_use = 0
        # the most recently used frame is taken first, so that the others become stale; the oldest are on the left
        self._idle: deque[tuple[float, ExecutionFrame]] = deque()

    @property
    def num_frames(self) -> int:
        """Number of frames, in use and idle."""
        with self._lock:
            return self._num_in_use + len(self._idle)

    @contextmanager
    def frame(self) -> Iterator[ExecutionFrame]:
        """A frame for one run. After an error it is dropped: a kernel still running elsewhere may write to it."""
        with self._lock:
            self._num_in_use += 1
            taken = self._idle.pop()[1] if self._idle else None
        try:
            if taken is None:
                taken = self._new_frame()
            yield taken
            taken.clear()
            with self._lock:
                self._idle.append((self._clock(), taken))
        finally:
            with self._lock:
                self._num_in_use -= 1
        self.clear_stale()

    def clear_stale(self) -> None:
        """Drop the frames that have been idle for more than `max_age` seconds."""
        with self._lock:
            oldest_kept = self._clock() - self._max_age
            while self._idle and self._idle[0][0] < oldest_kept:
                self._idle.popleft()
