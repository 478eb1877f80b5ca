"""Runs of a plan, launched as one graph of the device once they recur.

In: the inputs of a run, and the function that computes it. Out: its outputs.

Note [Launched as one graph]
A compiled step of a small model is some hundred kernels of a few microseconds each, and giving them to the device takes
longer than they do. So when runs of a plan recur with equal sizes, one is captured: what it gives to the device becomes
one graph, whose launch takes some microseconds. A graph has the addresses of its memory, and each run must give it what
it would have read and written:
- inputs that stay where they are, such as parameters and an optimizer's state, are used in place. Others are copied
  into the graph's own memory before the launch, and copied back after it if the plan writes them. Which is which is
  seen in the runs before. An input that moves although it did not before is copied from then on, by another graph;
- outputs are handed out as they lie in the graph's pool, where the next launch overwrites them. Those that were seen
  to outlive the next run, such as losses that are kept, are handed out as copies instead. If another one is in use when
  the next run comes, the graph is given up, and the next one copies that output. So gradients, which die in the next
  step, cost nothing;
- floats are memory already (`Signature.scalars`); the floats of an interpreted plan, which are not, and sizes choose
  among the graphs of the plan. Seeds go to a generator for each random op, seeded before the launch.
What cannot be captured goes on as before: the reason is counted, and kept for `get_debug_state`.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lazy_backend.cache.process_locks import process_lock
from lazy_backend.cache.weak_table import WeakTable
from lazy_backend.lowering.collectives.communication import is_collective
from lazy_backend.lowering.devices.interface import DeviceGraph, GraphDevice
from lazy_backend.lowering.devices.registration import backing_of, graph_device
from lazy_backend.lowering.ir.graph import Graph, Node
from lazy_backend.lowering.ir.portable import StoredGraph
from lazy_backend.lowering.ir.rng import drawing_from
from lazy_backend.ports.cpython import pass_on_interruption
from lazy_backend.ports.dispatcher import runs_python
from lazy_backend.ports.table import DEVICE_GRAPHS
from lazy_backend.ports.tensor_types import address_of, foreach_copy, storage_use_count

Compute: TypeAlias = Callable[[list[torch.Tensor], Sequence[int]], list[torch.Tensor]]

# Runs of one plan with equal sizes before one is captured: the first may tune kernels, two more show what moves.
_RUNS_BEFORE = 3
# Graphs of one plan, for its latest sizes. Each holds the memory of a whole run.
_MAX_GRAPHS = 8
# Graphs that one plan makes for the same sizes, since inputs moved: after these it makes no more.
_MAX_CAPTURES = 4


class CannotCapture(Exception):
    """Why a plan's runs are not launched as one graph."""


@dataclass(slots=True)
class _Captured:
    """One graph, and where its inputs and outputs lie."""

    graph: DeviceGraph
    inputs: list[torch.Tensor]  # the graph's own memory for inputs that move; for others, no memory
    moving: list[tuple[int, torch.Tensor]]  # places of inputs that move, and their memory in a row
    addresses: list[int]  # of inputs that stay; 0 for others
    copied_back: list[int]
    outputs: list[torch.Tensor]
    generators: list[torch.Generator]
    # per output: its address, how often its memory is held if nobody else holds it, whether it is handed out as a copy
    output_addresses: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    is_copied: list[bool] = field(default_factory=list)

    def used_outputs(self) -> list[int]:
        """Outputs of the launch before that somebody still uses, in the memory that a launch would overwrite."""
        return [
            place
            for place, one in enumerate(self.outputs)
            if not self.is_copied[place] and _count_of(one) > self.held[place]
        ]

    def is_disturbed(self) -> bool:
        """Whether outputs do not lie where the graph writes them: somebody may have resized one."""
        return any(one.data_ptr() != address for one, address in zip(self.outputs, self.output_addresses, strict=True))


@dataclass(slots=True)
class _Recurring:
    """The runs of one plan with equal sizes."""

    num_runs: int = 0
    num_captures: int = 0
    addresses: list[int] = field(default_factory=list)  # of the inputs of the run before
    moves: set[int] = field(default_factory=set)
    captured: _Captured | None = None
    outlive: set[int] = field(default_factory=set)  # outputs that are used after the next run has begun
    latest: list[StorageWeakRef] = field(default_factory=list)  # the outputs of the run before

    def note_inputs(self, tensors: Sequence[torch.Tensor]) -> None:
        addresses = [tensor.data_ptr() for tensor in tensors]
        if self.addresses:
            self.moves.update(place for place, one in enumerate(addresses) if one != self.addresses[place])
        self.addresses = addresses
        self.outlive.update(place for place, one in enumerate(self.latest) if not one.expired())
        self.num_runs += 1

    def note_outputs(self, outputs: Sequence[torch.Tensor]) -> None:
        self.latest = [StorageWeakRef(one.untyped_storage()) for one in outputs]


class _User:
    """A run, or a call of `release`."""


class GraphLauncher:
    """Launches the runs of one plan. Thread-safe: a run that finds another under way is computed without a graph."""

    def __init__(self, device: GraphDevice, graph: Graph) -> None:
        self._device, self._placed = device, graph.device
        self._num_seeds = graph.num_seeds
        self._written = _written_inputs(graph)
        self._recurring: OrderedDict[Hashable, _Recurring] = OrderedDict()
        # who uses the graphs now; weakly, so that an interrupt at any line leaves nobody in it
        self._users: WeakTable[str, _User] = WeakTable()
        self._stream: Any = None  # of the latest launch
        self.refused: str | None = None

    @property
    def is_launching(self) -> bool:
        """Whether there is a graph."""
        return any(one.captured is not None for one in list(self._recurring.values()))

    @property
    def pool_bytes(self) -> int:
        found = [one.captured for one in list(self._recurring.values())]
        return sum(one.graph.nbytes for one in found if one is not None)

    def describe(self) -> str | None:
        """`"launched"`, or why runs are not; None if that is not known yet."""
        return "launched" if self.is_launching else self.refused

    def run(
        self, compute: Compute, tensors: list[torch.Tensor], seeds: Sequence[int], which: Hashable
    ) -> list[torch.Tensor]:
        """Compute one run. Takes ownership of `tensors`. `which`: sizes and floats, which a graph has in itself."""
        if self.refused is not None or not launches.enabled:
            return compute(tensors, seeds)
        user = _User()
        try:
            try:
                if self._users.setdefault("", user) is user:
                    return self._run_alone(compute, tensors, seeds, which)
            finally:
                self._leave(user)
        finally:
            self._leave(user)  # an interrupt may have kept the line above from it, and its traceback keeps `user`
        return compute(tensors, seeds)

    def _leave(self, user: _User) -> None:
        if self._users.get("") is user:
            self._users.discard("")

    def _run_alone(
        self, compute: Compute, tensors: list[torch.Tensor], seeds: Sequence[int], which: Hashable
    ) -> list[torch.Tensor]:
        recurring = self._find(which)
        if recurring.captured is not None:
            return self._launch_or_compute(recurring, recurring.captured, compute, tensors, seeds)
        recurring.note_inputs(tensors)
        if recurring.num_runs > _RUNS_BEFORE:
            captured = self._capture(recurring, compute, tensors)
            if captured is not None:
                return self._launch(captured, tensors, seeds)
        outputs = compute(tensors, seeds)
        recurring.note_outputs(outputs)
        return outputs

    def release(self) -> int:
        """Give back the memory of all graphs, unless a run uses them. They are captured again if runs go on.

        Returns the bytes.
        """
        user = _User()
        try:
            try:
                return self._release_all() if self._users.setdefault("", user) is user else 0
            finally:
                self._leave(user)
        finally:
            self._leave(user)  # as in `run`

    def _release_all(self) -> int:
        nbytes = self.pool_bytes
        found = list(self._recurring.values())
        self._recurring.clear()  # first: an interrupt leaves no runs behind whose graph is gone
        for recurring in found:
            self._drop(recurring)
        return nbytes

    def _find(self, which: Hashable) -> _Recurring:
        found = self._recurring.get(which)
        if found is None:
            found = self._recurring[which] = _Recurring()
            if len(self._recurring) > _MAX_GRAPHS:
                self._drop(self._recurring.popitem(last=False)[1])
        else:
            self._recurring.move_to_end(which)
        return found

    @staticmethod
    def _drop(recurring: _Recurring) -> None:
        captured, recurring.captured = recurring.captured, None
        if captured is not None:
            captured.outputs.clear()
            captured.graph.release()

    # ----- capture

    def _capture(self, recurring: _Recurring, compute: Compute, tensors: Sequence[torch.Tensor]) -> _Captured | None:
        """The graph of a run with these inputs, which is not computed by that; None if there can be none."""
        try:
            if recurring.num_captures == _MAX_CAPTURES:
                raise CannotCapture("its inputs keep moving, or its outputs are used in ever new ways")
            recurring.num_captures += 1
            # what lies in the pool is not the inference tensors of a caller, which others may not write
            with torch.inference_mode(False):
                captured = self._captured(recurring, compute, tensors)
        except Exception as error:
            pass_on_interruption(error)
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            self.refused = re.sub(r" at 0x[0-9a-f]+", "", reason)  # equal reasons are counted under one name
            if isinstance(error, torch.OutOfMemoryError):
                launches.release()
                backing_of(self._placed).empty_cache()
            launches.count("DeviceGraphRefused", f"DeviceGraphRefused: {self.refused}")
            for one in list(self._recurring.values()):
                self._drop(one)
            return None
        recurring.captured = captured
        launches.count("DeviceGraphCaptured")
        return captured

    def _captured(self, recurring: _Recurring, compute: Compute, tensors: Sequence[torch.Tensor]) -> _Captured:
        moves = recurring.moves
        _check_shared_memory(tensors, moves, self._written)
        inputs = [_memory_like(one) if place in moves else one for place, one in enumerate(tensors)]
        generators = [backing_of(self._placed).new_generator(self._placed) for _ in range(self._num_seeds)]
        with drawing_from(generators):
            graph, outputs = self._device.captured(
                lambda: compute(list(inputs), range(self._num_seeds)), generators, inputs
            )
        captured = _Captured(
            graph,
            [one if place in moves else one.new_empty(0) for place, one in enumerate(inputs)],
            [(place, _flat(inputs[place])) for place in sorted(moves)],
            [0 if place in moves else one.data_ptr() for place, one in enumerate(inputs)],
            sorted(moves & self._written),
            outputs,
            generators,
        )
        captured.output_addresses = [one.data_ptr() for one in outputs]
        captured.held = [_count_of(one) for one in outputs]
        captured.is_copied = [place in recurring.outlive for place in range(len(outputs))]
        return captured

    # ----- launch

    def _launch_or_compute(
        self,
        recurring: _Recurring,
        captured: _Captured,
        compute: Compute,
        tensors: list[torch.Tensor],
        seeds: Sequence[int],
    ) -> list[torch.Tensor]:
        moved = [
            place
            for place, (one, address) in enumerate(zip(tensors, captured.addresses, strict=True))
            if address and one.data_ptr() != address
        ]
        used = captured.used_outputs()
        if not (moved or used or captured.is_disturbed()):
            return self._launch(captured, tensors, seeds)
        recurring.moves.update(moved)
        recurring.outlive.update(used)
        self._drop(recurring)
        launches.count("DeviceGraphGivenUp")
        return compute(tensors, seeds)

    def _wait_for_other_stream(self) -> None:
        """Threads that serve may have streams of their own: the graph's memory is one."""
        stream = self._device.current_stream()
        if self._stream is not None and stream != self._stream:
            self._device.wait(stream, self._device.record(self._stream))
        self._stream = stream

    def _launch(self, captured: _Captured, tensors: list[torch.Tensor], seeds: Sequence[int]) -> list[torch.Tensor]:
        self._wait_for_other_stream()
        reads = tensors.copy()
        if captured.moving:
            foreach_copy([own for _, own in captured.moving], [_flat(tensors[place]) for place, _ in captured.moving])
            for place, _ in captured.moving:
                reads[place] = captured.inputs[place]
        for generator, seed in zip(captured.generators, seeds, strict=True):
            generator.manual_seed(seed)
        back = [(tensors[place], captured.inputs[place]) for place in captured.copied_back]
        tensors.clear()  # an input that was copied and is held by nobody gives its memory back here
        captured.graph.launch(reads)
        reads.clear()
        for tensor, own in back:
            _flat(tensor).copy_(_flat(own))
        launches.count("DeviceGraphLaunched")
        pairs = zip(captured.outputs, captured.is_copied, strict=True)
        return [_copied(one) if is_copied else one.detach() for one, is_copied in pairs]


def _count_of(tensor: torch.Tensor) -> int:
    """How often the memory of `tensor` is held: by tensors, and by users of its one `untyped_storage()` object.

    PyTorch's CUDA graph trees ask the same way. It counts that object once, however many hold it.
    """
    storage = tensor.untyped_storage()
    return storage_use_count(address_of(storage)) + sys.getrefcount(storage)


def _copied(output: torch.Tensor) -> torch.Tensor:
    made = output.clone()
    if made.stride() == output.stride():
        return made
    made = _memory_like(output)  # `clone` closes gaps
    _flat(made).copy_(_flat(output))
    return made


def _extent(tensor: torch.Tensor) -> int:
    """How many elements lie from the first to the last of `tensor`."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The memory from the first to the last element of `tensor`, however these lie in it."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.as_strided((_extent(tensor),), (1,), tensor.storage_offset())


def _memory_like(tensor: torch.Tensor) -> torch.Tensor:
    """Memory of the graph for an input that moves, laid out alike. What is aligned stays aligned."""
    flat = torch.empty(_extent(tensor), dtype=tensor.dtype, device=tensor.device)
    return flat.as_strided(tensor.shape, tensor.stride())


def _check_shared_memory(tensors: Sequence[torch.Tensor], moves: set[int], written: frozenset[int]) -> None:
    """Raise `CannotCapture` if inputs of which one moves and one is written look into the same memory."""
    places: dict[int, set[int]] = {}
    for place, tensor in enumerate(tensors):
        if tensor.device.type == "meta" or tensor.is_conj() or tensor.is_neg():
            raise CannotCapture("an input has no memory of its own")
        if tensor.numel():
            places.setdefault(tensor.untyped_storage().data_ptr(), set()).add(place)
    for shared in places.values():
        if len(shared) > 1 and shared & moves and shared & written:
            raise CannotCapture("inputs that move share memory")


def _written_inputs(graph: Graph) -> frozenset[int]:
    """The inputs that a run writes, by place."""
    written = {value.storage for node in graph.nodes for value in node.mutates}
    return frozenset(place for place, value in enumerate(graph.inputs) if value.storage in written)


# Namespaces of operators whose kernels in Python do the same in each run.
_REPEATABLE = ("aten", "prims", "rngprims", "lazy_backend", "quantized_decomposed")
_MASKS = (torch.bool, torch.uint8)
# These read a value on the host, and their tags do not say so.
_HOST_READS = frozenset((torch.ops.aten._linalg_check_errors.default,))


def why_not_captured(graph: Graph, device_type: str) -> str | None:
    """Why no run of `graph` can be launched as one graph; None if nothing is known to speak against it."""
    for node in graph.nodes:
        tags = node.op.tags
        if is_collective(node.op):
            return "it communicates"
        if node.op in _HOST_READS or torch.Tag.cudagraph_unsafe in tags or _has_dynamic_shape(node):
            return f"{node.op} cannot be captured"
        if node.op.namespace not in _REPEATABLE and runs_python(node.op, device_type):
            return f"{node.op} is Python code, which a launch would not run"
    return None


def _has_dynamic_shape(node: Node) -> bool:
    if torch.Tag.dynamic_output_shape not in node.op.tags:
        return False
    # `x[i]` with whole numbers has the shape of `i`; only masks are counted first
    indices = node.inputs()[1:]
    return node.op is not torch.ops.aten.index.Tensor or any(one.meta.dtype in _MASKS for one in indices)


class Launches:
    """All launchers of the process, and what they did."""

    def __init__(self) -> None:
        self.enabled = True
        self._launchers: WeakTable[int, GraphLauncher] = WeakTable()
        self._lock = process_lock()
        self._counted: Counter[str] = Counter()

    def launcher_of(self, stored: StoredGraph) -> GraphLauncher | None:
        """A launcher for a plan of this graph; None where no device launches graphs."""
        device = graph_device(stored.device)
        if device is None or not DEVICE_GRAPHS.fits():
            return None
        graph = stored.get()
        made = GraphLauncher(device, graph)
        made.refused = why_not_captured(graph, stored.device.type)
        if made.refused is not None:
            self.count("DeviceGraphRefused", f"DeviceGraphRefused: {made.refused}")
        self._launchers[id(made)] = made
        return made

    def count(self, *names: str) -> None:
        with self._lock:
            for name in names:
                self._counted[name] += 1

    def read_counters(self) -> Counter[str]:
        with self._lock:
            return Counter(self._counted)

    def reset_counters(self) -> None:
        with self._lock:
            self._counted.clear()

    def pool_bytes(self) -> int:
        """Bytes of the pools of all graphs."""
        return sum(one.pool_bytes for one in list(self._launchers))

    def release(self) -> int:
        """Give back the memory of all graphs that no run is using. Returns the bytes."""
        return sum(one.release() for one in list(self._launchers))


launches = Launches()
