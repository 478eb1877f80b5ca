"""Memory of the lazy device, and facts about its backing device, as `torch.lazy` tells of them.

In: a lazy device. Out: the answers of the backing device's module, as `torch.cuda`. A CPU has no allocator that counts:
there, memory is that of live lazy tensors, and the machine's.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from lazy_backend.diagnostics.history import history
from lazy_backend.errors.tracebacks import hide_internals
from lazy_backend.execution.sync import executor
from lazy_backend.lowering.devices.registration import backing_of
from lazy_backend.tensors.contexts import Device, context_of
from lazy_backend.tensors.state import DeviceContext

T = TypeVar("T")


def _answer(device: Device, function: str, of_cpu: Callable[[DeviceContext], T], args: Sequence[Any] = ()) -> T:
    """The answer for the device behind `device`: `of_cpu`, or that of a function of its module.

    `args`: of that function, by default the backing device.
    """
    context = context_of(device)
    if context.backing.type == "cpu":
        return of_cpu(context)
    answer: T = getattr(torch.get_device_module(context.backing), function)(*(args or [context.backing]))
    return answer


class MemoryQuestions:
    """The functions of a device module that tell of memory. `device`: by default the current one."""

    @staticmethod
    @hide_internals
    def memory_allocated(device: Device = None) -> int:
        """Bytes that tensors hold: on the CPU, those of live lazy tensors."""
        return _answer(device, "memory_allocated", _allocated)

    @staticmethod
    @hide_internals
    def max_memory_allocated(device: Device = None) -> int:
        """The most bytes that tensors held so far, or since `reset_peak_memory_stats`.

        On the CPU, the most that was seen: by calls of these functions and, with `config.explain`, at ends of steps, at
        most ten times a second.
        """
        return _answer(device, "max_memory_allocated", _peak)

    @staticmethod
    @hide_internals
    def memory_reserved(device: Device = None) -> int:
        """Bytes that the allocator holds. That of the CPU keeps nothing for reuse: as `memory_allocated`."""
        return _answer(device, "memory_reserved", _allocated)

    @staticmethod
    @hide_internals
    def max_memory_reserved(device: Device = None) -> int:
        """The most bytes that the allocator held. On the CPU, as `max_memory_allocated`."""
        return _answer(device, "max_memory_reserved", _peak)

    @staticmethod
    @hide_internals
    def reset_peak_memory_stats(device: Device = None) -> None:
        """Let `max_memory_allocated` and `max_memory_reserved` count from now on."""
        _answer(device, "reset_peak_memory_stats", _forget_peak)

    @staticmethod
    @hide_internals
    def memory_stats(device: Device = None) -> dict[str, Any]:
        """The statistics of `torch.cuda.memory_stats`. On the CPU, those that there are, by the same names."""
        return _answer(device, "memory_stats", _stats)

    @staticmethod
    @hide_internals
    def mem_get_info(device: Device = None) -> tuple[int, int]:
        """Bytes of memory that are free, and all bytes that there are. On the CPU, those of the machine."""
        return _answer(device, "mem_get_info", lambda context: (_free_bytes(), _total_bytes()))

    @staticmethod
    @hide_internals
    def empty_cache() -> None:
        """Give the memory that the device's allocator keeps for reuse back. The CPU's keeps none."""
        context = context_of(None)
        executor.barrier(context)
        backing_of(context.backing).empty_cache()


@dataclass(frozen=True, slots=True)
class CPUProperties:
    """Facts about a CPU, by the names of `torch.cuda.get_device_properties`. `multi_processor_count`: of cores."""

    name: str
    total_memory: int
    multi_processor_count: int
    major: int = 0
    minor: int = 0


class HardwareQuestions:
    """The functions of a device module that tell of the hardware. `device`: by default the current one."""

    @staticmethod
    @hide_internals
    def get_device_name(device: Device = None) -> str:
        """The name of the GPU or of the processor."""
        return _answer(device, "get_device_name", lambda context: _processor_name())

    @staticmethod
    @hide_internals
    def get_device_properties(device: Device = None) -> Any:
        """The properties of the GPU, or those of the processor that have a counterpart."""
        return _answer(device, "get_device_properties", _properties)

    @staticmethod
    @hide_internals
    def get_device_capability(device: Device = None) -> tuple[int, int]:
        """The compute capability of the GPU. A CPU has none: (0, 0)."""
        return _answer(device, "get_device_capability", lambda context: (0, 0))

    @staticmethod
    @hide_internals
    def is_bf16_supported(including_emulation: bool = True) -> bool:
        """Whether there are operators for bfloat16. A CPU has them."""
        return _answer(None, "is_bf16_supported", lambda context: True, [including_emulation])

    @staticmethod
    @hide_internals
    def get_amp_supported_dtype() -> list[torch.dtype]:
        """The dtypes that `torch.autocast("lazy")` takes, as autocast asks device modules for them."""
        return backing_of(context_of(None).backing).autocast_dtypes()

    @staticmethod
    @hide_internals
    def is_tf32_supported() -> bool:
        """Whether the GPU multiplies in TF32. A CPU does not."""
        backing = context_of(None).backing
        return backing.type != "cpu" and bool(torch.get_device_module(backing).is_tf32_supported())

    @staticmethod
    @hide_internals
    def can_device_access_peer(device: Device, peer_device: Device) -> bool:
        """Whether tensors go from one device to the other without the host. Those of the CPU share its memory."""
        both = [context_of(one).backing for one in (device, peer_device)]
        return _answer(device, "can_device_access_peer", lambda context: True, both)


def _allocated(context: DeviceContext) -> int:
    count = context.alive().bytes
    history.memory.note_bytes(context.name, count)
    return count


def _peak(context: DeviceContext) -> int:
    return history.memory.note_bytes(context.name, context.alive().bytes)


def _forget_peak(context: DeviceContext) -> None:
    history.memory.forget_most(context.name)


def _stats(context: DeviceContext) -> dict[str, Any]:
    now, most = _allocated(context), _peak(context)
    held = ("allocated_bytes", "active_bytes", "requested_bytes", "reserved_bytes")
    stats = {f"{kind}.all.{when}": count for kind in held for when, count in (("current", now), ("peak", most))}
    return {**stats, "num_alloc_retries": 0, "num_ooms": 0}


def _properties(context: DeviceContext) -> CPUProperties:
    return CPUProperties(_processor_name(), _total_bytes(), os.cpu_count() or 1)


def _processor_name() -> str:
    return _value_in("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()


def _total_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_bytes() -> int:
    """As `free` prints it: with what the system holds only as caches. Without `/proc`, all there is."""
    kilobytes = _value_in("/proc/meminfo", "MemAvailable").split()
    return int(kilobytes[0]) * 1024 if kilobytes else _total_bytes()


def _value_in(path: str, name: str) -> str:
    """The value of the first line `name: value` of a file; empty if there is none."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((value.strip() for key, _, value in (line.partition(":") for line in lines) if key.strip() == name), "")
