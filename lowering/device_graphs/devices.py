"""Which device launches whole runs.

In: a backing device. Out: its `GraphDevice`, or None for a device without.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lazy_backend.lowering.device_graphs.cuda import CudaDevice
from lazy_backend.lowering.device_graphs.interface import GraphDevice

_installed: dict[str, GraphDevice] = {}  # by device type, instead of the device's own


def graph_device(device: torch.device) -> GraphDevice | None:
    """What launches whole runs on `device`; None if nothing does."""
    found = _installed.get(device.type)
    if found is not None or device.type != "cuda":
        return found
    return _cuda(device)


@functools.cache
def _cuda(device: torch.device) -> GraphDevice:
    return CudaDevice(device)


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
