"""Streams of one run.

In: the caller's current stream. Out: every thread launches kernels on that stream, and at the end the stream waits for
work that kernels left on streams of their own.
All threads share one stream, so the device runs kernels in the order of their launches, and the edges of a graph need
no events. Source: torch/csrc/autograd/graph_task.h (`leaf_streams`, `caller_current_streams_`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from lazy_backend.lowering.devices.interface import GraphDevice


class LeafStreams:
    """The caller's stream on a device, and the other streams on which kernels without users may still run."""

    def __init__(self, device: GraphDevice) -> None:
        self._device = device
        self._caller = device.current_stream()
        self._leaves: list[Any] = []

    def caller_current(self) -> AbstractContextManager[Any]:
        """Make the caller's stream current on this thread."""
        return self._device.on(self._caller)

    def note_leaf(self) -> None:
        """Remember this thread's current stream after a kernel without users, which may have switched streams."""
        stream = self._device.current_stream()
        if stream != self._caller and stream not in self._leaves:
            self._leaves.append(stream)

    def join(self) -> None:
        """Make the caller's stream wait for all leaf streams."""
        for stream in self._leaves:
            self._device.wait(self._caller, self._device.record(stream))
