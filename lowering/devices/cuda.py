"""CUDA: graphs of kernels, streams and events.

Run on an H100 with PyTorch 2.14 (`tools/gpu_check.py`), checked against the sources of 2.13.

Note [How CUDA captures]
A capture records the kernels that a thread gives to one stream and runs none of them. Its memory comes from a pool of
its own, where it stays, since the graph has its addresses. PyTorch lets a thread capture while others go on
(`capture_error_mode="thread_local"`): the main thread may upload meanwhile. `torch.cuda.graph` would collect garbage
first, whose finalizers must not run within a run, so the capture is begun and ended here. A generator is registered
with the graph: a launch reads its seed and offset, so that it draws what it would draw after being seeded in a plain
run.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch.nn.attention import SDPBackend

from lazy_backend.lowering.devices.dependencies import SWITCHED, Dependency, Scope, attribute, precisions
from lazy_backend.lowering.devices.interface import BackingDevice, DeviceGraph, GraphDevice
from lazy_backend.ports.dispatcher import attention_choice
from lazy_backend.ports.replacements import inductor
from lazy_backend.ports.tensor_types import free_cublas_workspaces, raw_stream, register_generators

R = TypeVar("R")

# Bytes that a copy from the host takes at once, as the CUDA C++ Programming Guide has it ("asynchronous concurrent
# execution").
_STAGED = 64 << 10


class CudaGraph(DeviceGraph):
    """A `torch.cuda.CUDAGraph` and its size."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def record(self, call: Callable[[], R], generators: Sequence[torch.Generator]) -> R:
        register_generators(self._graph, generators)
        try:
            self._graph.capture_begin(capture_error_mode="thread_local")
            result = call()
        except BaseException:
            self._abandon()
            raise
        self._graph.capture_end()
        return result

    def _abandon(self) -> None:
        """End a capture that failed; the error to tell of is the one before."""
        with contextlib.suppress(RuntimeError):
            self._graph.capture_end()
        self._graph.reset()

    def launch(self, reads: Sequence[torch.Tensor]) -> None:
        self._graph.replay()

    def release(self) -> None:
        self._graph.reset()


class CudaGraphDevice(GraphDevice):
    """One GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @functools.cached_property
    def _captures(self) -> torch.cuda.Stream:
        """Made by the first capture: the compiler's process asks what captures, and needs no context of CUDA for it."""
        return torch.cuda.Stream(self._device)

    def captured(
        self, call: Callable[[], R], generators: Sequence[torch.Generator], reads: Sequence[torch.Tensor]
    ) -> tuple[DeviceGraph, R]:
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            # the pool cannot use what the allocator keeps of earlier runs, nor what cuBLAS has for the stream of runs,
            # which launches need no longer
            free_cublas_workspaces()
            torch.cuda.empty_cache()
            before = torch.cuda.memory_reserved()
            graph = CudaGraph()
            caller = torch.cuda.current_stream()
            self._captures.wait_stream(caller)
            with torch.cuda.stream(self._captures):
                result = graph.record(call, generators)
            free_cublas_workspaces()  # that of the capture belongs to the graph alone
            caller.wait_stream(self._captures)
            graph.nbytes = max(0, torch.cuda.memory_reserved() - before)
        return graph, result

    def pinned_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        # never the caller's own memory, even if pinned: it may be written as soon as the upload returns
        return torch.empty_like(tensor, pin_memory=True).copy_(tensor)

    def new_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def default_stream(self) -> torch.cuda.Stream:
        return torch.cuda.default_stream(self._device)

    def is_elsewhere(self) -> bool:
        return raw_stream(self._device.index) != 0

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def from_pinned(self, pinned: torch.Tensor) -> torch.Tensor:
        return pinned.to(self._device, non_blocking=True)

    def from_pageable(self, tensor: torch.Tensor) -> torch.Tensor | None:
        # the driver copies so little to memory of its own before it returns; it would read pinned memory later
        if tensor.nbytes > _STAGED or tensor.is_pinned():
            return None
        return tensor.to(self._device, non_blocking=True, copy=True)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        return stream.record_event()

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    def will_use(self, stream: torch.cuda.Stream, tensor: torch.Tensor) -> None:
        tensor.record_stream(stream)


_DEPENDENCIES = (
    Dependency("cuda driver", Scope.ARTEFACT, inductor.cuda_driver),
    *precisions("cuda", SWITCHED),
    attribute("cudnn", torch.backends.cudnn, "enabled", inductor.is_cudnn_enabled, SWITCHED),
    attribute("cudnn benchmark", torch.backends.cudnn, "benchmark", inductor.benchmarks_cudnn, SWITCHED),
    attribute("cudnn deterministic", torch.backends.cudnn, "deterministic", inductor.is_cudnn_deterministic, SWITCHED),
)


class CudaDevice(BackingDevice):
    """All GPUs."""

    compile_backend = "inductor"
    compiles_elsewhere = True
    dependencies = _DEPENDENCIES if torch.backends.cuda.is_built() else ()

    def is_available(self) -> bool:
        return torch.cuda.is_available()

    def capability(self, device: torch.device) -> str:
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name} {properties.major}.{properties.minor}"

    def attention(self, operands: Sequence[Any], options: Mapping[str, Any]) -> SDPBackend:
        chosen = SDPBackend(attention_choice(*operands, **options))
        if chosen == SDPBackend.CUDNN_ATTENTION:  # whose results are partly ints: no such call can be recorded
            params = torch.backends.cuda.SDPAParams(*operands[:6], options["enable_gqa"])  # type: ignore[call-arg]
            if torch.backends.cuda.can_use_flash_attention(params):
                return SDPBackend.FLASH_ATTENTION
            if torch.backends.cuda.can_use_efficient_attention(params):
                return SDPBackend.EFFICIENT_ATTENTION
        return chosen

    def graph_device(self, device: torch.device) -> GraphDevice:
        return _graph_device(device)


@functools.cache
def _graph_device(device: torch.device) -> GraphDevice:
    return CudaGraphDevice(device)


CUDA = CudaDevice("cuda")
