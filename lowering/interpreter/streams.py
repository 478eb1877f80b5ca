"""CUDA streams of one run.

In: the stream that the caller of a run has current. Out: every thread launches on that stream, and what kernels left on
streams of their own is awaited there at the end.
All threads share one stream, so the order in which kernels are launched is the order in which the device runs them,
and the edges of a graph need no events. Seed: graph_task (`leaf_streams`, `caller_current_streams_`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class LeafStreams:
    """The caller's stream on `device`, and the other streams on which kernels without users were left to run."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._caller = torch.cuda.current_stream(device)
        self._leaves: set[torch.cuda.Stream] = set()

    @contextmanager
    def caller_current(self) -> Iterator[None]:
        """Make the caller's stream this thread's."""
        with torch.cuda.stream(self._caller):
            yield

    def note_leaf(self) -> None:
        """A kernel that nobody waits for has been launched by this thread, maybe from a stream it made current."""
        stream = torch.cuda.current_stream(self._device)
        if stream != self._caller:
            self._leaves.add(stream)

    def join(self) -> None:
        """The caller's stream waits for all leaves."""
        for stream in self._leaves:
            self._caller.wait_stream(stream)
