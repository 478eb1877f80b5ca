"""A device whose memory is the CPU's and whose rules are CUDA's, for tests on machines without a GPU.

In: what a `GraphDevice` is asked for. Out: the same results as on a device that captures, or `RuleBroken`, where a GPU
would fail, or go on with wrong numbers.

Note [What the fake enforces]
A capture runs nothing: calls that write leave their operands alone, and what others make is laid out and filled with
NaN. A launch makes the calls again, into the memory of the capture. These are errors:
- in a capture, to read a value on the host, to seed a generator, or to draw from one that is not registered;
- to launch a graph that uses memory from outside its pool which was freed since, or an operand of its capture which is
  no operand of the launch;
- to launch a graph on another stream than before without waiting for that one;
- to launch where memory that the graph reads was written on another stream for whose event nobody waits, or was made
  there without a note that this stream uses it.
Only calls of PyTorch's operators are seen. If a kernel of Inductor runs in a capture, that is an error too, unless the
fake was asked to repeat whole calls, about which it then knows nothing.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lazy_backend.lowering.devices.interface import DeviceGraph, GraphDevice
from lazy_backend.lowering.ir.rng import drawing_from
from lazy_backend.ports import trees
from lazy_backend.ports.dispatcher import DispatchKey, DispatchKeySet, OpOverload
from lazy_backend.ports.fake_tensors import FakeTensorMode
from lazy_backend.ports.tensor_types import address_of, neg_view, storage_behind
from lazy_backend.ports.thread_modes import TorchDispatchMode

R = TypeVar("R")

aten = torch.ops.aten

# Calls that give a value to the host, besides those whose tags say so.
_HOST_READS = frozenset(
    (
        aten._local_scalar_dense.default,
        aten.equal.default,
        aten.is_nonzero.default,
        aten._linalg_check_errors.default,
    )
)
_READING_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class RuleBroken(RuntimeError):
    """What would fail on a GPU, or compute something else there."""


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _identity(generator: torch.Generator) -> int:
    """Of the generator itself: the dispatcher makes other Python objects for it."""
    return address_of(generator)


def _indexes(op: Any, args: Any) -> bool:
    """Whether this is `x[i]` without masks, whose shape is known."""
    masks = (torch.bool, torch.uint8)
    return op is aten.index.Tensor and not any(one.dtype in masks for one in _tensors(args[1]))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in trees.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class _Outside:
    """A tensor in memory that is not of the pool: a graph has its address, and does not keep it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.address = storage.data_ptr()
        self._reference = StorageWeakRef(storage)
        self._dtype, self._is_conj, self._is_neg = tensor.dtype, tensor.is_conj(), tensor.is_neg()
        self._geometry = tensor.storage_offset(), tensor.shape, tensor.stride()

    def found(self, named: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """What lies at its address now: among the operands of a launch, or where it was."""
        operand = named.get(self.address)
        storage: Any = operand
        if operand is not None:
            storage = operand.untyped_storage()
        elif not self._reference.expired():
            storage = storage_behind(self._reference.cdata)
        else:
            raise RuleBroken("a graph uses memory from outside its pool that was freed since the capture")
        made = torch.empty(0, dtype=self._dtype).set_(storage, *self._geometry)
        made = made.conj() if self._is_conj else made
        return neg_view(made) if self._is_neg else made


@dataclass(frozen=True, slots=True)
class _Launched:
    """One call of a graph, and the memory that its new results have."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    made: tuple[tuple[int, torch.Tensor], ...]  # by place among the results

    def run(self, named: Mapping[int, torch.Tensor]) -> None:
        def found(leaf: Any) -> Any:
            return leaf.found(named) if isinstance(leaf, _Outside) else leaf

        results = trees.tree_leaves(self.op(*trees.tree_map(found, self.args), **trees.tree_map(found, self.kwargs)))
        for place, memory in self.made:
            memory.copy_(results[place])


class _Capture(TorchDispatchMode):
    """Notes calls instead of making them. See Note [What the fake enforces]."""

    def __init__(self, generators: Sequence[torch.Generator], reads: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.calls: list[_Launched] = []
        self.outside: set[int] = set()  # addresses
        self.pool: dict[int, torch.Tensor] = {}  # held: a pool's memory is not reused
        self._fakes = FakeTensorMode()
        self._generators = {_identity(generator) for generator in generators}
        self.operands = {_address(tensor) for tensor in reads}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op.namespace not in ("aten", "prims"):  # its kernel calls operators, and is not called by a launch
            with self:
                return op.redispatch(DispatchKeySet(DispatchKey.CPU), *args, **kwargs)
        if op in _HOST_READS or (any(tag in op.tags for tag in _READING_TAGS) and not _indexes(op, args)):
            raise RuleBroken(f"operation not permitted when stream is capturing: {op} reads a value on the host")
        self._check_generators(op, args, kwargs)
        if op.is_view:
            return op(*args, **kwargs)
        return self._note(op, args, kwargs)

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of `tensor` is of the pool."""
        return _address(tensor) in self.pool

    def _as_address(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not _address(leaf) or self.has(leaf):
            return leaf
        self.outside.add(_address(leaf))
        return _Outside(leaf)

    def _check_generators(self, op: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        for one in trees.tree_leaves((args, kwargs)):
            if isinstance(one, torch.Generator) and _identity(one) not in self._generators:
                raise RuleBroken(f"{op} draws from a generator that is not registered with the graph")

    def _note(self, op: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """What a call would return: its written operands, and new memory."""
        operands = {id(one): one for one in _tensors((args, kwargs))}
        fakes = {key: self._fakes.from_tensor(one) for key, one in operands.items()}
        operand_of = {id(fake): operands[key] for key, fake in fakes.items()}

        def fake(leaf: Any) -> Any:
            return fakes.get(id(leaf), leaf)

        with self._fakes:
            results = op(*trees.tree_map(fake, args), **trees.tree_map(fake, kwargs))
        leaves, structure = trees.tree_flatten(results)
        made = []
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                continue
            if id(leaf) in operand_of:
                leaves[place] = operand_of[id(leaf)]
                continue
            memory = leaves[place] = _unwritten(leaf)
            if _address(memory):
                self.pool[_address(memory)] = memory
            made.append((place, memory))
        args, kwargs = trees.tree_map(self._as_address, (tuple(args), kwargs))
        self.calls.append(_Launched(op, args, kwargs, tuple(made)))
        return trees.tree_unflatten(leaves, structure)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the memory of `tensor`."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())  # type: ignore[call-overload, no-any-return]


def _values(tensor: torch.Tensor) -> torch.Tensor:
    return _whole(tensor).clone()


def _unwritten(like: torch.Tensor) -> torch.Tensor:
    """Memory laid out as `like`, with values that no program computes."""
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    if made.is_floating_point() or made.is_complex():
        made.fill_(math.nan)
    return made


class FakeGraph(DeviceGraph):
    """The calls of one capture."""

    def __init__(self, device: FakeDevice, capture: _Capture) -> None:
        self._device = device
        self._capture = capture
        self._is_released = False
        self._latest: FakeEvent | None = None  # the end of the latest launch
        self.nbytes = sum(memory.untyped_storage().nbytes() for memory in capture.pool.values())

    def launch(self, reads: Sequence[torch.Tensor]) -> None:
        if self._is_released:
            raise RuleBroken("a graph was launched after its release")
        self._latest = self._device.follow(self._latest)
        named = {_address(tensor): tensor for tensor in reads}
        for address in self._capture.outside:
            if address in named:
                self._device.check_use(named[address])
            elif address in self._capture.operands:
                raise RuleBroken("a graph uses an operand of its capture that is no operand of this launch")
        for call in self._capture.calls:
            call.run(named)
        self._device.num_launches += 1

    def release(self) -> None:
        self._is_released = True


class RepeatedCall(DeviceGraph):
    """A call that each launch makes again, without rules."""

    def __init__(
        self, device: FakeDevice, call: Callable[[], Any], generators: Sequence[torch.Generator], results: Any
    ) -> None:
        self._device = device
        self._call = call
        self._generators = generators
        self._results = results

    @classmethod
    def of(
        cls, device: FakeDevice, call: Callable[[], R], generators: Sequence[torch.Generator]
    ) -> tuple[DeviceGraph, R]:
        results = call()
        device.num_captures += 1
        return cls(device, call, generators, _tensors(results)), results

    def launch(self, reads: Sequence[torch.Tensor]) -> None:
        with drawing_from(self._generators):
            for memory, made in zip(self._results, _tensors(self._call()), strict=True):
                memory.copy_(made)
        self._device.num_launches += 1

    def release(self) -> None:
        self._results = []


class FakeStream:
    """A stream: how much was given to it, and how much of others it has waited for."""

    def __init__(self) -> None:
        self.time = 0
        self.seen: dict[FakeStream, int] = {}


@dataclass(frozen=True, slots=True)
class FakeEvent:
    """A moment of a stream."""

    stream: FakeStream
    time: int


@dataclass(slots=True)
class _Written:
    """Where memory was written last, and the streams that said they use it."""

    reference: StorageWeakRef
    event: FakeEvent
    users: list[FakeStream]


class FakeDevice(GraphDevice):
    """See Note [What the fake enforces]."""

    def __init__(self, repeats_calls: bool = False) -> None:
        self._repeats = repeats_calls
        self.num_launches = 0
        self.num_captures = 0
        self._default = FakeStream()
        self._streams = threading.local()  # the current one of each thread
        self._written: dict[int, _Written] = {}

    def captured(
        self, call: Callable[[], R], generators: Sequence[torch.Generator], reads: Sequence[torch.Tensor]
    ) -> tuple[DeviceGraph, R]:
        states = [generator.get_state() for generator in generators]
        seeds = [generator.initial_seed() for generator in generators]
        capture = _Capture(generators, reads)
        before = [_values(tensor) for tensor in reads]
        try:
            if self._repeats:
                graph, result = RepeatedCall.of(self, call, generators)
                return graph, result
            with capture:
                result = call()
            self._check_seen(capture, before, reads, result)
            if [generator.initial_seed() for generator in generators] != seeds:
                raise RuleBroken("a generator was seeded while its stream was capturing")
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
            for tensor, values in zip(reads, before, strict=True):
                _whole(tensor).copy_(values)
        self.num_captures += 1
        return FakeGraph(self, capture), result

    @staticmethod
    def _check_seen(
        capture: _Capture, before: Sequence[torch.Tensor], reads: Sequence[torch.Tensor], result: Any
    ) -> None:
        is_written = any(not torch.equal(_values(tensor), values) for tensor, values in zip(reads, before, strict=True))
        if is_written or not all(capture.has(tensor) for tensor in _tensors(result) if _address(tensor)):
            raise RuleBroken("a kernel ran in the capture that is no operator of PyTorch")

    def pinned_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def new_stream(self) -> FakeStream:
        return FakeStream()

    def current_stream(self) -> FakeStream:
        current: FakeStream = getattr(self._streams, "current", self._default)
        return current

    def default_stream(self) -> FakeStream:
        return self._default

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before = self.current_stream()
        try:
            self._streams.current = stream
            yield
        finally:
            self._streams.current = before

    def from_pinned(self, pinned: torch.Tensor) -> torch.Tensor:
        made = pinned.clone()
        stream = self.current_stream()
        stream.time += 1
        written = _Written(StorageWeakRef(made.untyped_storage()), FakeEvent(stream, stream.time), [stream])
        self._written[_address(made)] = written
        return made

    def from_pageable(self, tensor: torch.Tensor) -> torch.Tensor | None:
        return None

    def record(self, stream: FakeStream) -> FakeEvent:
        return FakeEvent(stream, stream.time)

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        stream.seen[event.stream] = max(event.time, stream.seen.get(event.stream, 0))

    def will_use(self, stream: FakeStream, tensor: torch.Tensor) -> None:
        written = self._written.get(_address(tensor))
        if written is not None:
            written.users.append(stream)

    def follow(self, before: FakeEvent | None) -> FakeEvent:
        """A launch on the current stream, which must have waited for the one before."""
        stream = self.current_stream()
        if before is not None and before.stream is not stream and stream.seen.get(before.stream, 0) < before.time:
            raise RuleBroken("a graph is launched while its launch on another stream may still run")
        stream.time += 1
        return FakeEvent(stream, stream.time)

    def check_use(self, tensor: torch.Tensor) -> None:
        """Raise `RuleBroken` if the current stream may not read `tensor` yet."""
        written = self._written.get(_address(tensor))
        if written is None or written.reference.expired():
            return
        event, stream = written.event, self.current_stream()
        if event.stream is not stream and stream.seen.get(event.stream, 0) < event.time:
            raise RuleBroken("memory is used before the event of the stream that writes it")
        if not any(one is stream for one in written.users):
            raise RuleBroken("memory of another stream is used without a note, and might be reused too early")
