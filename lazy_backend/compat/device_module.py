"""The device module: what `torch.get_device_module("lazy")` returns."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lazy_backend.compat import device_streams as streams
from lazy_backend.compat.device_memory import HardwareQuestions, MemoryQuestions
from lazy_backend.errors.tracebacks import hide_internals
from lazy_backend.execution.sync import executor
from lazy_backend.lowering.devices.registration import backing_of
from lazy_backend.tensors.contexts import Device, context_of, contexts


class _CurrentDevice:
    """`torch.lazy.device(i)`: within the `with` block, `"lazy"` without an index means device `i`."""

    @hide_internals
    def __init__(self, device: Device) -> None:
        self._index = context_of(device).index
        self._before = 0

    def __enter__(self) -> None:
        self._before, contexts.current = contexts.current, self._index

    def __exit__(self, *error: object) -> None:
        contexts.current = self._before


class _DeviceOf(_CurrentDevice):
    """`torch.lazy.device_of(x)`: within the `with` block, the current device is that of `x`, if it is lazy."""

    def __init__(self, obj: torch.Tensor) -> None:
        super().__init__(obj.device if obj.device.type == "lazy" else None)


class DeviceModule(MemoryQuestions, HardwareQuestions):
    """`torch.lazy`: the functions that PyTorch and libraries expect of a device module."""

    __name__ = "torch.lazy"

    @staticmethod
    def is_available() -> bool:
        """Always True: without an accelerator the backing device is the CPU."""
        return True

    @staticmethod
    def init() -> None:
        """Have no effect: the first use of a device makes it."""

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def device_count() -> int:
        """Number of lazy devices: one per backing device, or `config.num_devices` on the CPU."""
        return contexts.device_count()

    @staticmethod
    def current_device() -> int:
        """Index of the device that `"lazy"` without an index means."""
        return contexts.current

    device, device_of = _CurrentDevice, _DeviceOf

    @staticmethod
    @hide_internals
    def set_device(device: Device) -> None:
        """Make `"lazy"` without an index mean `device` from now on. Raises `DeviceError` if there is no such device."""
        contexts.current = context_of(device).index

    @staticmethod
    @hide_internals
    def synchronize(device: Device = None) -> None:
        """Run what is pending on `device` and wait until its work is done. Raises `ExecutionError` if a run failed."""
        context = context_of(device)
        executor.sync_live_tensors_graph([context], wait=True, cause="synchronize")
        backing_of(context.backing).synchronize(context.backing)

    @staticmethod
    def manual_seed(seed: int) -> None:
        """Same as `torch.manual_seed`: lazy random ops draw their seeds from torch's default generator."""
        contexts.set_rng_seed(seed)

    manual_seed_all = manual_seed

    @staticmethod
    def seed() -> int:
        """Seed torch's default generator with a random number, which is returned."""
        return torch.default_generator.seed()

    seed_all = seed

    @staticmethod
    def initial_seed() -> int:
        """The number that torch's default generator was last seeded with."""
        return contexts.get_running_seed()

    @staticmethod
    @hide_internals
    def get_rng_state(device: Device = None) -> torch.Tensor:
        """The state of the generator that lazy random ops draw their seeds from: torch's default one."""
        context_of(device)
        return torch.get_rng_state()

    @staticmethod
    @hide_internals
    def set_rng_state(state: torch.Tensor, device: Device = None) -> None:
        """Set the state of torch's default generator, as returned by `get_rng_state`."""
        context_of(device)
        torch.set_rng_state(state)

    @staticmethod
    @hide_internals
    def get_rng_state_all() -> list[torch.Tensor]:
        """`get_rng_state` of each device."""
        return [torch.get_rng_state() for _ in range(contexts.device_count())]

    @staticmethod
    @hide_internals
    def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
        """Set the state of torch's default generator, as returned by `get_rng_state_all`."""
        for state in new_states:
            torch.set_rng_state(state)

    Stream, Event = streams.Stream, streams.Event
    stream, StreamContext = staticmethod(streams.stream), staticmethod(streams.stream)
    set_stream = staticmethod(streams.set_stream)
    current_stream, default_stream = staticmethod(streams.current_stream), staticmethod(streams.default_stream)

    @staticmethod
    def is_current_stream_capturing() -> bool:
        """Always False: `config.device_graphs` makes graphs of runs, not of the program's calls."""
        return False

    @staticmethod
    def is_in_bad_fork() -> bool:
        return False
