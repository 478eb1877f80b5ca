"""Copies from the CPU to a device that go on while the device computes.

In: a tensor on the CPU. Out: a copy on the device, which what is given to the device from then on waits for.

Note [Uploads overlap]
Small tensors are copied as they are: the driver takes them at once, and copies them in the order of the stream of runs.
A copy from memory that may be swapped out makes the program wait for the device, and on the stream of the runs it
waits for them. So a tensor is first copied to pinned memory, by the CPU, and from there on a stream of its own. The
caller may write its tensor as soon as the call returns. An event lets the runs' stream wait for the copy, and the
allocator is told that this stream uses memory that another one made.
"""

from __future__ import annotations

import torch

from lazy_backend.lowering.device_graphs.run_order import with_runs
from lazy_backend.lowering.devices.registration import graph_device
from lazy_backend.lowering.ir.graph import TensorMeta, empty_of

# Larger tensors are copied in pieces by the driver: as much pinned memory would be taken from other programs.
_LARGEST = 64 << 20


def upload_to(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """A copy of `tensor`, which may be on any device, on `device`."""
    graphs = graph_device(device)
    is_dense = tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()
    if graphs is None or tensor.device.type != "cpu" or not is_dense or not 0 < tensor.nbytes <= _LARGEST:
        return with_runs(device, lambda: tensor.to(device, copy=True))
    small = with_runs(device, lambda: graphs.from_pageable(tensor))
    if small is not None:
        return small
    pinned = graphs.pinned_copy(tensor)
    with graphs.on(graphs.upload_stream):
        made = graphs.from_pinned(pinned)
    graphs.wait(graphs.runs_stream, graphs.record(graphs.upload_stream))
    graphs.will_use(graphs.runs_stream, made)
    return made


def uploaded(device: torch.device, tensor: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """A copy of `tensor`, which may be on any device, on `device`, laid out as `meta` says."""
    if tensor.device.type == "cpu" and graph_device(device) is not None:
        if tensor.dtype != meta.dtype or tensor.shape != meta.shape or tensor.stride() != meta.stride:
            tensor = empty_of(meta, tensor.device).copy_(tensor)
        made = upload_to(device, tensor)
        if made.stride() == meta.stride:
            return made
    return with_runs(device, lambda: empty_of(meta, device).copy_(tensor))
