"""What a device offers to those who launch whole runs: capture, streams, events, generators, memory.

In: nothing. Out: `GraphDevice` and `DeviceGraph`, which a new accelerator implements and gives to `devices.use_device`,
as the tests do with `fake.FakeDevice`.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of one device: held by tensors, held by the allocator, and the most that tensors held so far."""

    allocated: int
    reserved: int
    peak: int


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
    def new_generator(self) -> torch.Generator:
        """A generator of random numbers on the device."""

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
    def release_cached(self) -> None:
        """Give back memory that the allocator keeps for reuse."""

    @abstractmethod
    def memory(self) -> DeviceMemory:
        """How much memory is in use."""

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
