"""One context per lazy device, made at first use.

Source: torch/csrc/lazy/core/lazy_graph_executor.h, `DeviceContextArena`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from lazy_backend.diagnostics.memory import Alive
from lazy_backend.errors import DeviceError
from lazy_backend.lowering.devices.cpu import CPU
from lazy_backend.lowering.devices.interface import BackingDevice
from lazy_backend.lowering.devices.registration import backing_devices, default_backing
from lazy_backend.lowering.ir import rng
from lazy_backend.settings import config
from lazy_backend.tensors.locks import DeviceLocker
from lazy_backend.tensors.state import DeviceContext, new_queue

Device = torch.device | str | int | None


class _CurrentIndex(threading.local):
    """The device that `"lazy"` without an index means in a thread, as for CUDA."""

    def __init__(self) -> None:
        self.index = 0


class DeviceContextArena:
    """All device contexts, made at first use."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._contexts: dict[int, DeviceContext] = {}
        self._current = _CurrentIndex()
        self.prepare: Callable[[], None] = lambda: None  # called once, before the first context is made

    @property
    def current(self) -> int:
        """Index of this thread's current device."""
        return self._current.index

    @current.setter
    def current(self, index: int) -> None:
        self._current.index = index

    def backing_type(self) -> str:
        """Name of the type of device behind this one: the setting, or else what this machine has."""
        chosen = config.device
        return default_backing() if chosen is None else str(chosen)

    def backing(self) -> BackingDevice:
        chosen = config.device  # as `backing_type`, without a call: every sync asks
        return backing_devices[default_backing() if chosen is None else chosen]

    def device_count(self) -> int:
        backing = self.backing()
        return int(config.num_devices) if backing is CPU else backing.device_count()

    def get_device_context(self, index: int | None) -> DeviceContext:
        """The context of `lazy:index`, or of the current device. Raises `DeviceError` for an index out of range."""
        index = self.current if index is None else index
        found = self._contexts.get(index)
        return self._make_context(index) if found is None else found

    def made_context(self, index: int | None) -> DeviceContext | None:
        """The context of `lazy:index`, or of the current device, if it was used before."""
        return self._contexts.get(self.current if index is None else index)

    def _make_context(self, index: int) -> DeviceContext:
        count, found = self.device_count(), self.backing()
        if not 0 <= index < count:
            advice = (
                "lazy_backend.config.num_devices sets how many there are on the CPU"
                if found is CPU
                else f"one lazy device stands for each {found.name} device"
            )
            raise DeviceError(f"there is no device lazy:{index}\n  devices: lazy:0 to lazy:{count - 1} ({advice})")
        prepare, self.prepare = self.prepare, lambda: None
        try:
            prepare()
        except BaseException:  # interrupted
            self.prepare = prepare
            raise
        with self._lock:
            return self._contexts.setdefault(index, DeviceContext(index, found.device(index)))

    def default_device(self) -> torch.device:
        """What `"lazy"` without an index means now."""
        return torch.device("lazy", self.current)

    def get_active_devices(self) -> list[DeviceContext]:
        """The contexts made so far, lowest index first."""
        if len(self._contexts) == 1:
            return list(self._contexts.values())
        return [context for _, context in sorted(self._contexts.items())]

    def for_all_device_contexts(self, function: Callable[[DeviceContext], None]) -> None:
        for context in self.get_active_devices():
            function(context)

    def describe_aside(self) -> list[str]:
        """What ran at once instead of being recorded, for users."""
        devices = [context for context in self.get_active_devices() if context.aside.stretches]
        return [f"{context.name} {context.aside.describe()}" for context in devices]

    def alive(self, device: str) -> Alive:
        """How much is alive on `device`."""
        return self.get_device_context(torch.device(device).index).alive()

    def live_by_line(self, device: str) -> list[dict[str, Any]]:
        """`DeviceContext.live_by_line` of `device`."""
        return self.get_device_context(torch.device(device).index).live_by_line()

    def all_live_by_line(self) -> list[dict[str, Any]]:
        """`DeviceContext.live_by_line` of all devices."""
        return [row for context in self.get_active_devices() for row in context.live_by_line()]

    def get_rng_seed(self, generator: torch.Generator | None = None) -> int:
        """A seed for the next random op, from `generator` or the one in use. See Note [Random numbers are data]."""
        return rng.draw_seed(generator)

    def set_rng_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def get_running_seed(self) -> int:
        return torch.default_generator.initial_seed()

    def read_counters(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for context in self.get_active_devices():
            total.update(context.read_counters())
        return total

    def reset_counters(self) -> None:
        self.for_all_device_contexts(DeviceContext.reset_counters)

    def reset(self) -> None:
        """Forget every context, as tests do: traces are dropped, and the contexts' tensors must not be used again."""
        with self._lock:
            contexts, self._contexts = self._contexts, {}
        for context in contexts.values():
            context.queue.close(timeout=60)
            context.trie.reset()
        self.current = 0

    def reset_after_fork(self) -> None:
        """In a forked child, make new locks and queues, with no run under way: the threads stayed with the parent."""
        self._lock = threading.RLock()
        for context in self._contexts.values():
            context.lock = threading.RLock()
            context.locker = DeviceLocker(context.index)
            context.queue = new_queue(context.index)


contexts = DeviceContextArena()


def compile_backend() -> str | Callable[..., Any]:
    """The `torch.compile` backend for graphs: the setting, or else that of the backing device."""
    chosen: str | Callable[..., Any] | None = config.backend
    return contexts.backing().compile_backend if chosen is None else chosen


def context_of(device: Device) -> DeviceContext:
    """The context of `lazy`, `lazy:1`, `1`, or the current device. Raises `DeviceError` for anything else."""
    if device is None or device == "":
        return contexts.get_device_context(None)
    if isinstance(device, int):
        return contexts.get_device_context(device)
    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        raise DeviceError(f"{device!r} names no device\n  expected 'lazy' or 'lazy:<index>'") from error
    if parsed.type != "lazy":
        raise DeviceError(f"expected a lazy device, got {str(parsed)!r}\n  as in 'lazy' or 'lazy:0'")
    return contexts.get_device_context(parsed.index)
