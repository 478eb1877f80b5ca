"""CUDA streams of one run.

In: the caller's current stream. Out: every thread launches kernels on that stream, and at the end the stream waits for
work that kernels left on streams of their own.
All threads share one stream, so the device runs kernels in the order of their launches, and the edges of a graph need
no events. Seed: graph_task (`leaf_streams`, `caller_current_streams_`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class LeafStreams:
    """The caller's stream on `device`, and the other streams on which kernels without users may still run."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._caller = torch.cuda.current_stream(device)
        self._leaves: set[torch.cuda.Stream] = set()

    @contextmanager
    def caller_current(self) -> Iterator[None]:
        """Make the caller's stream current on this thread."""
        with torch.cuda.stream(self._caller):
            yield

    def note_leaf(self) -> None:
        """Remember this thread's current stream after a kernel without users, which may have switched streams."""
        stream = torch.cuda.current_stream(self._device)
        if stream != self._caller:
            self._leaves.add(stream)

    def join(self) -> None:
        """Make the caller's stream wait for all leaf streams."""
        for stream in self._leaves:
            self._caller.wait_stream(stream)
