"""Streams and events of the lazy device: `torch.lazy.Stream` and its neighbours, which libraries look for.

What a device records has one order, and its runs have one too. So work is in no stream but that of the program, waiting
for another stream has nothing to do, and what an event marks is done when everything recorded before it is.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import AbstractContextManager, nullcontext

import torch

from lazy_backend.errors.sites import user_site
from lazy_backend.errors.tracebacks import hide_internals
from lazy_backend.execution.sync import executor
from lazy_backend.tensors.contexts import Device, context_of
from lazy_backend.tensors.state import DeviceContext, Epoch


class Event:
    """Marks everything that was recorded before `record`, or before it is first asked."""

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        device: Device = None,
    ) -> None:
        """The arguments are those of `torch.cuda.Event` and `torch.Event`; none but `device` has an effect."""
        self._device = device
        self._context: DeviceContext | None = None
        self._trace: weakref.ref[Epoch] | None = None  # that has what was recorded last

    @property
    def device(self) -> torch.device | None:
        """The device whose work the event marks; None before `record`."""
        return None if self._context is None else self._context.device

    def record(self, stream: Stream | None = None) -> None:
        """Mark what was recorded so far on the device of the stream, or of the event."""
        device = self._device if stream is None else stream.device_index
        self._context = context = context_of(device)
        is_pending = context.has_pending() and context.trace.computed is not True
        self._trace = weakref.ref(context.trace.epoch) if is_pending else None

    def wait(self, stream: Stream | None = None) -> None:
        """Have no effect: what is recorded later runs later."""

    def query(self) -> bool:
        """Whether everything recorded before `record` is done. What is still pending begins to run."""
        context = self._begin()
        context.locker.finish_if_over()
        return context.locker.is_idle()

    @hide_internals
    def synchronize(self) -> None:
        """Run what is pending from before `record`, and wait until it is done."""
        executor.wait_device_ops([self._begin()])

    def _begin(self) -> DeviceContext:
        """Begin what is pending from before `record`, which is now if it was not called; later steps stay as they are.

        Returns the device.
        """
        if self._context is None:
            self.record()
        context, trace = self._context, self._trace
        assert context is not None
        if trace is not None and trace() is context.trace.epoch:
            executor.sync_live_tensors_graph([context], wait=False, cause="an event")
        return context

    def elapsed_time(self, end_event: Event) -> float:
        """Raise `RuntimeError`: the work before an event may run long after it."""
        raise RuntimeError(
            f"events of the lazy device have no times\n  at {user_site()}\n"
            "  time whole steps: call lazy_backend.wait_device_ops(), or use lazy_backend.explain() and torch.profiler"
        )


class Stream:
    """Takes work in the order of the program, like every other stream."""

    stream_id = 0  # there is one order
    device_type = 17  # `Lazy` in c10/core/DeviceType.h

    def __init__(self, device: Device = None, priority: int = 0) -> None:
        self.priority = priority
        self._device = device

    @property
    def device_index(self) -> int:
        """Index of the stream's device, by default of the current one."""
        return context_of(self._device).index

    @property
    def device(self) -> torch.device:
        return context_of(self._device).device

    def wait_stream(self, stream: Stream) -> None:
        """Have no effect: what is recorded later runs later."""

    def wait_event(self, event: Event) -> None:
        """Have no effect: what is recorded later runs later."""

    def record_event(self, event: Event | None = None) -> Event:
        """Have `event`, or a new one, mark what was recorded so far, and return it."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        """Whether everything recorded is done. What is pending begins to run."""
        return self.record_event().query()

    @hide_internals
    def synchronize(self) -> None:
        """Run what is pending on the stream's device and wait for it, as `torch.lazy.synchronize()` does."""
        self.record_event().synchronize()

    def __enter__(self) -> Stream:
        _entered.streams.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        _entered.streams.pop()


_default = Stream()


class _Entered(threading.local):
    """The streams whose `with` blocks this thread is in, innermost last; before them, the stream outside of blocks."""

    def __init__(self) -> None:
        self.streams: list[Stream] = [_default]


_entered = _Entered()


def current_stream(device: Device = None) -> Stream:
    """The stream whose `with` block this is, or that of `set_stream`, or the default one."""
    return _entered.streams[-1]


def default_stream(device: Device = None) -> Stream:
    """The stream that is current outside of all blocks, before any `set_stream`."""
    return _default


def set_stream(stream: Stream | None) -> None:
    """Make `stream` the current one of this thread; None changes nothing."""
    if stream is not None:
        _entered.streams[-1] = stream


def stream(stream: Stream | None) -> AbstractContextManager[Stream | None]:
    """A context manager within which `stream` is the current one; None changes nothing."""
    return nullcontext() if stream is None else stream
