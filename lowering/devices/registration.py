"""The backing devices that there are: the CPU, CUDA, and those that were registered.

In: the name of a device type, or a device. Out: its `BackingDevice`; its `GraphDevice`, or None for one without.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lazy_backend.lowering.devices.cpu import CPU
from lazy_backend.lowering.devices.cuda import CUDA
from lazy_backend.lowering.devices.interface import BackingDevice, GraphDevice

BUILT_IN = (CPU, CUDA)

# By name of the type. Of those that are available, the last one backs "lazy", unless a setting names another.
backing_devices: dict[str, BackingDevice] = {found.name: found for found in BUILT_IN}
_installed: dict[str, GraphDevice] = {}  # by name of the type, instead of the device's own


def backing_of(device: torch.device) -> BackingDevice:
    """The backing device that `device` is one of."""
    return backing_devices[device.type]


def register(device: BackingDevice) -> None:
    """Add `device`, or replace the one of this name that was registered before."""
    if backing_devices.get(device.name) in BUILT_IN:
        raise ValueError(f"{device.name!r} is registered already, as a device of PyTorch")
    backing_devices.pop(device.name, None)
    backing_devices[device.name] = device
    default_backing.cache_clear()


@functools.cache
def default_backing() -> str:
    """The name of the type that backs "lazy" where no setting names one."""
    for name, found in reversed(backing_devices.items()):
        if found is not CPU and found.is_available():
            return name
    return CPU.name


def graph_device(device: torch.device) -> GraphDevice | None:
    """What launches whole runs on `device`; None if nothing does."""
    found = _installed.get(device.type)
    backing = backing_devices.get(device.type) if found is None else None
    return found if backing is None else backing.graph_device(device)


@contextmanager
def use_device(device: GraphDevice, device_type: str = "cpu") -> Iterator[GraphDevice]:
    """Within the block, runs on devices of this type are launched by `device`."""
    before = _installed.get(device_type)
    try:
        _installed[device_type] = device
        yield device
    finally:
        _installed.pop(device_type, None)
        if before is not None:
            _installed[device_type] = before
