"""The protocol of backing devices: what one offers beside the kernels and the device module that PyTorch knows.

In: nothing. Out: `BackingDevice`, whose defaults are right for an accelerator that has these two and no more;
`GraphDevice` and `DeviceGraph`, for streams and for launches of whole runs.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.nn.attention import SDPBackend

from lazy_backend.lowering.devices.cast_lists import ON_ACCELERATORS, CastRule
from lazy_backend.lowering.devices.dependencies import Dependency
from lazy_backend.ports.dispatcher import key_of_device

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of one device: held by tensors, held by the allocator, and the most that tensors held so far."""

    allocated: int
    reserved: int
    peak: int


class BackingDevice:
    """A type of device that runs what is recorded, by PyTorch's name for it. All of its methods have defaults.

    Where `torch.get_device_module(name)` has a function, it is asked: `is_available`, `device_count`, `synchronize`,
    `empty_cache`, `memory_allocated` and the others of `torch.lazy` that tell of memory and hardware.
    """

    # The `torch.compile` backend of its graphs, where `config.backend` names none. "eager" calls the operators.
    compile_backend: str | Callable[..., Any] = "eager"

    # Whether Inductor compiles for it, in a process that has not imported the device's package.
    compiles_elsewhere = False

    # The dtype of an autocast block that names none.
    autocast_dtype = torch.float16

    # The operators of each rule, between spaces: those of PyTorch's macros for accelerators. They count where the
    # device has a kernel for them on its key of autocast, and none may have such a kernel and no rule.
    autocast_rules: Mapping[CastRule, str] = ON_ACCELERATORS

    # The versions of its package, compiler and driver, as text: a part of the keys of artefacts, so that none is used
    # with other versions than it was made for.
    versions = ""

    # Switches that compiled code depends on. See Note [What a key depends on].
    dependencies: tuple[Dependency, ...] = ()

    def __init__(self, name: str) -> None:
        self.name = name

    @functools.cached_property
    def key(self) -> str:
        """The key of its kernels among PyTorch's `DispatchKey`s; those of autocast have the key "Autocast" + `key`."""
        return str(key_of_device(self.name))

    def of_module(self, function: str, *args: Any, default: Any = None) -> Any:
        """The answer of a function of the device module, or `default` if the module has none of that name."""
        found = getattr(torch.get_device_module(self.name), function, None)
        return default if found is None else found(*args)

    def is_available(self) -> bool:
        """Whether this machine has one. It then backs "lazy", unless `config.device` names another."""
        return bool(self.of_module("is_available", default=True))

    def device_count(self) -> int:
        """How many there are: one lazy device for each."""
        return int(self.of_module("device_count", default=1))

    def device(self, index: int) -> torch.device:
        """The device behind `lazy:index`."""
        return torch.device(self.name, index)

    def capability(self, device: torch.device) -> str:
        """A part of the keys of graphs: compiled code for one such text runs on every device that has the same."""
        return str(self.of_module("get_device_capability", device, default=self.name))

    def synchronize(self, device: torch.device) -> None:
        """Wait until the device has done all that it was given."""
        self.of_module("synchronize", device)

    def memory(self, device: torch.device) -> DeviceMemory | None:
        """How much memory is in use; None if the device does not count it."""
        allocated = self.of_module("memory_allocated", device)
        if allocated is None:
            return None
        reserved = self.of_module("memory_reserved", device, default=allocated)
        return DeviceMemory(allocated, reserved, self.of_module("max_memory_allocated", device, default=allocated))

    def empty_cache(self) -> None:
        """Give back memory that the allocator keeps for reuse."""
        self.of_module("empty_cache")

    def autocast_dtypes(self) -> list[torch.dtype]:
        """The dtypes that autocast may cast to."""
        return list(self.of_module("get_amp_supported_dtype", default=(torch.float16, torch.bfloat16)))

    def new_generator(self, device: torch.device) -> torch.Generator:
        """A generator that the device's kernels draw from: equal seeds give equal numbers, in graphs of it as well."""
        return torch.Generator(device)

    def attention(self, operands: Sequence[Any], options: Mapping[str, Any]) -> SDPBackend:
        """The fused kernel of attention for these arguments of `scaled_dot_product_attention`, or `MATH` for none."""
        return SDPBackend.MATH

    def attention_switches(self) -> tuple[Any, ...] | None:
        """All that `attention` depends on besides its arguments and the grad mode. None: it is asked at each call."""
        return None

    def graph_device(self, device: torch.device) -> GraphDevice | None:
        """The streams and graphs of one device. None: runs happen within the call, on the stream of its thread."""
        return None


class DeviceGraph(ABC):
    """What one call did on the device, to be done again. Its memory stays as it is until `release`."""

    nbytes: int = 0  # of its memory pool

    @abstractmethod
    def launch(self, reads: Sequence[torch.Tensor]) -> None:
        """Do it again on the current stream. `reads`: the operands, which lie where they lay at the capture."""

    @abstractmethod
    def release(self) -> None:
        """Give back the memory pool, as soon as no tensor looks into it."""


class GraphDevice(ABC):
    """One device. Streams and events are the device's own objects, which only its methods look into."""

    @functools.cached_property
    def upload_stream(self) -> Any:
        """The stream of uploads."""
        return self.new_stream()

    @functools.cached_property
    def runs_stream(self) -> Any:
        """The stream of all runs. See Note [Runs have one stream]."""
        return self.default_stream()

    @abstractmethod
    def captured(
        self, call: Callable[[], R], generators: Sequence[torch.Generator], reads: Sequence[torch.Tensor]
    ) -> tuple[DeviceGraph, R]:
        """What `call` does on the device, which is not done now, and what it returns: tensors without values so far.

        `generators`: those that `call` draws from; each launch draws from their state at that time. `reads`: its
        operands, as each launch will name them. Raises what `call` raises, and an error of the device if `call` reads a
        value, waits for the device, or uses another one.
        """

    @abstractmethod
    def pinned_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the CPU that the device can read by itself. It may be dropped while the device reads it."""

    @abstractmethod
    def new_stream(self) -> Any:
        """Another stream of the device."""

    @abstractmethod
    def current_stream(self) -> Any:
        """The stream of this thread."""

    @abstractmethod
    def default_stream(self) -> Any:
        """The stream of threads that chose none."""

    def is_elsewhere(self) -> bool:
        """Whether this thread is on another stream than that of runs. Asked at every run and copy."""
        return bool(self.current_stream() != self.runs_stream)

    @abstractmethod
    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Within the block, `stream` is the one of this thread."""

    @abstractmethod
    def from_pinned(self, pinned: torch.Tensor) -> torch.Tensor:
        """A copy on the device, on the current stream; the call does not wait for it."""

    @abstractmethod
    def from_pageable(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A copy on the device of a small tensor on the CPU, on the current stream; None if it is to be pinned first.

        The call waits for nothing on the device, and the tensor may be written as soon as it returns.
        """

    @abstractmethod
    def record(self, stream: Any) -> Any:
        """An event that marks the work given to `stream` so far."""

    @abstractmethod
    def wait(self, stream: Any, event: Any) -> None:
        """Let what is given to `stream` from now on wait for `event`."""

    @abstractmethod
    def will_use(self, stream: Any, tensor: torch.Tensor) -> None:
        """Keep the memory of `tensor`, made on another stream, from reuse while `stream` may use it."""
