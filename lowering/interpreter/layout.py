"""Lifetimes of values, and the memory they share.

In: a graph. Out: `last_uses` (which values die at which step), `plan_layout` (a graph whose results share a few
buffers), and the bytes that results take with and without such a plan, planned and measured.
Source: torch/nativert/executor (`LayoutPlanner`).

Note [Planned buffers]
A node whose operator has an `out=` variant can write its result to given memory. The planner rewrites such a node:
`%3 = aten.mm(%1, %2)` becomes `%3 = aten.mm.out(%1, %2, out=%3)`, where the graph holds `%3`: a piece of a buffer that
the frame owns. Values that share a buffer get the buffer's storage number, so the effect edges of the new graph delay a
write until the last reader of the buffer's old contents, in any order a run may choose. A storage is placed only if
nothing can see it after its last use: not if it belongs to an output or an input, nor if an operator outside PyTorch
reads it, since such an operator may return its operand in spite of its schema.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from lazy_backend.lowering.devices.registration import backing_of
from lazy_backend.lowering.ir.graph import Arg, Graph, Node, Step, Value, extent, with_values
from lazy_backend.lowering.ir.passes import graph_pass
from lazy_backend.ports.dispatcher import OpOverload, function_schema, has_kernel

# Smaller results come from the allocator's own caches faster than a call with `out=` is made.
MIN_PLANNED_BYTES = 4096
_ALIGNMENT = 64  # bytes, a cache line


def last_uses(steps: Sequence[Step], kept: Iterable[Value]) -> list[list[Value]]:
    """For each step, the values that die there: no later step uses them, and they are not in `kept`."""
    last_use: dict[Value, int] = {}
    for place, step in enumerate(steps):
        for value in step.inputs():
            last_use[value] = place
        for made in step.outputs:
            if made is not None:
                last_use[made] = place
    for value in kept:
        last_use.pop(value, None)
    dying: list[list[Value]] = [[] for _ in steps]
    for value, place in last_use.items():
        dying[place].append(value)
    return dying


def storage_lifetimes(graph: Graph) -> dict[int, tuple[int, int]]:
    """For each storage, the positions of the first and the last node that touch it."""
    lifetimes: dict[int, tuple[int, int]] = {}
    for place, node in enumerate(graph.nodes):
        for value in (*node.inputs(), *(out for out in node.outputs if out is not None)):
            first, _ = lifetimes.get(value.storage, (place, place))
            lifetimes[value.storage] = first, place
    return lifetimes


def peak_bytes(graph: Graph) -> int:
    """The most bytes that results of `graph` take at once, if each has its own memory until its last use.

    Results in the memory of inputs or of held values do not count.
    """
    foreign = {value.storage for value in (*graph.inputs, *graph.held)}
    outputs = {value.storage for value in graph.outputs}
    sizes: dict[int, int] = {}
    for node in graph.nodes:
        for value in node.outputs:
            if value is not None and value.storage not in foreign:
                sizes.setdefault(value.storage, _bytes_of(value))
    changes = [0] * (len(graph.nodes) + 1)
    for storage, (first, last) in storage_lifetimes(graph).items():
        changes[first] += sizes.get(storage, 0)
        if storage not in outputs:
            changes[last + 1] -= sizes.get(storage, 0)
    current = peak = 0
    for change in changes:
        current += change
        peak = max(peak, current)
    return peak


def _bytes_of(value: Value) -> int:
    return extent(value.meta) * value.meta.dtype.itemsize


# ----- planning


@dataclass(frozen=True, slots=True, eq=False)
class LayoutPlan:
    """See Note [Planned buffers]. `placed`: the values that live in buffers, each with its buffer's index."""

    graph: Graph
    buffer_bytes: tuple[int, ...]
    placed: tuple[tuple[Value, int], ...]

    @property
    def planned_bytes(self) -> int:
        """Bytes of all buffers together, which every frame holds."""
        return sum(self.buffer_bytes)

    @property
    def peak_bytes(self) -> int:
        """Bytes of the buffers, plus the most bytes that all other results take at once."""
        return self.planned_bytes + peak_bytes(self.graph)

    def graphs(self) -> tuple[Graph, ...]:
        return (self.graph,)

    def new_buffers(self) -> list[tuple[int, torch.Tensor]]:
        """Buffers for one frame: the slot and the tensor of each placed value."""
        device = self.graph.device
        buffers = [torch.empty(size, dtype=torch.uint8, device=device) for size in self.buffer_bytes]
        return [(value.number, _piece(buffers[place], value)) for value, place in self.placed]


def _piece(buffer: torch.Tensor, value: Value) -> torch.Tensor:
    meta = value.meta
    return buffer[: _bytes_of(value)].view(meta.dtype).as_strided(meta.shape, meta.stride, 0)


@graph_pass("plan buffers")
def plan_layout(graph: Graph, min_bytes: int = MIN_PLANNED_BYTES) -> LayoutPlan:
    """Place results of at least `min_bytes` in as few buffers as their lifetimes allow."""
    lifetimes = storage_lifetimes(graph)
    visible = _visible_storages(graph)
    buffers = _Buffers()
    placed: dict[int, int] = {}  # storage -> buffer
    dying: list[list[int]] = [[] for _ in graph.nodes]
    for storage, (_, last) in lifetimes.items():
        dying[last].append(storage)
    for node, ends in zip(graph.nodes, dying, strict=True):
        result = node.outputs[0] if node.outputs else None
        if (
            result is not None
            and result.storage not in visible
            and out_variant(node, graph.device) is not None
            and _bytes_of(result) >= min_bytes
        ):
            placed[result.storage] = buffers.take(_bytes_of(result))
        for storage in ends:
            if storage in placed:
                buffers.give_back(placed[storage])
    return _rewritten(graph, placed, buffers)


def _visible_storages(graph: Graph) -> set[int]:
    """Storages that may be read after their last use in the graph, whether or not a schema says so."""
    visible = {value.storage for value in (*graph.inputs, *graph.held, *graph.outputs)}
    for node in graph.nodes:
        if node.op.namespace not in ("aten", "prims"):
            visible.update(value.storage for value in node.inputs())
    return visible


@dataclass(slots=True)
class _Buffers:
    """Buffers by size: a result takes the smallest free buffer that it fits in, or enlarges the largest free one."""

    sizes: list[int] = field(default_factory=list)
    free: list[int] = field(default_factory=list)

    def take(self, nbytes: int) -> int:
        nbytes += -nbytes % _ALIGNMENT
        fitting = [place for place in self.free if self.sizes[place] >= nbytes]
        if fitting:
            taken = min(fitting, key=self.sizes.__getitem__)
        elif self.free:
            taken = max(self.free, key=self.sizes.__getitem__)
            self.sizes[taken] = nbytes
        else:
            self.sizes.append(nbytes)
            return len(self.sizes) - 1
        self.free.remove(taken)
        return taken

    def give_back(self, place: int) -> None:
        self.free.append(place)


def _rewritten(graph: Graph, placed: dict[int, int], buffers: _Buffers) -> LayoutPlan:
    storages = [value.storage for node in graph.nodes for value in node.outputs if value is not None]
    first_new = 1 + max([value.storage for value in (*graph.inputs, *graph.held)] + storages, default=-1)
    moved: dict[Value, Value] = {}

    def move(arg: Arg) -> Arg:
        if not isinstance(arg, Value) or arg.storage not in placed:
            return arg
        if arg not in moved:
            moved[arg] = replace(arg, storage=first_new + placed[arg.storage])
        return moved[arg]

    nodes: list[Node] = []
    homes: list[tuple[Value, int]] = []
    made: set[int] = set()
    for node in graph.nodes:
        result = node.outputs[0] if node.outputs else None
        new = with_values(node, move)
        if result is not None and result.storage in placed and result.storage not in made:
            made.add(result.storage)
            new = _writing_out(new, graph.device)
            homes.append((move(result), placed[result.storage]))
        nodes.append(new)
    held = (*graph.held, *(value for value, _ in homes))
    return LayoutPlan(replace(graph, nodes=tuple(nodes), held=held), tuple(buffers.sizes), tuple(homes))


def _writing_out(node: Node, device: torch.device) -> Node:
    op = out_variant(node, device)
    assert op is not None
    (result,) = node.outputs
    assert result is not None
    (name,) = (argument.name for argument in function_schema(op).arguments if argument.is_out)
    return replace(node, op=op, kwargs=(*node.kwargs, (name, result)), mutates=(result,))


# ----- `out=` variants


def out_variant(node: Node, device: torch.device) -> OpOverload | None:
    """The `out=` variant of the node's operator, if that variant has a kernel of its own on `device`."""
    if node.mutates or node.seed is not None or len(node.outputs) != 1 or node.returns_list:
        return None
    return _out_variant(node.op, backing_of(device).key)


@functools.cache
def _out_variant(op: OpOverload, key: str) -> OpOverload | None:
    if op.namespace != "aten" or any(result.alias_info is not None for result in function_schema(op).returns):
        return None
    packet = getattr(torch.ops.aten, function_schema(op).name.removeprefix("aten::"))
    for name in packet.overloads():
        candidate: OpOverload = getattr(packet, name)
        # generated variants, which compute elsewhere and copy, are composite: no kernel under the device's key
        if _writes_result_of(op, candidate) and has_kernel(candidate.name(), key):
            return candidate
    return None


def _writes_result_of(op: OpOverload, candidate: OpOverload) -> bool:
    """Whether `candidate` is `op` with one further argument, the tensor to write to."""
    arguments = function_schema(candidate).arguments
    given = [(argument.name, str(argument.type)) for argument in arguments if not argument.is_out]
    return given == [(a.name, str(a.type)) for a in function_schema(op).arguments] and len(arguments) == len(given) + 1


# ----- measuring


@dataclass(slots=True)
class MemoryMeter:
    """Bytes of the distinct storages that slots hold, now and at the peak, except those at `foreign` addresses."""

    foreign: frozenset[int]
    current: int = 0
    peak: int = 0
    _held: dict[int, tuple[int, int]] = field(default_factory=dict)  # slot -> address, bytes
    _holders: Counter[int] = field(default_factory=Counter)  # address -> number of slots

    def hold(self, slot: int, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        address, nbytes = storage.data_ptr(), storage.nbytes()
        if slot in self._held or address in self.foreign:
            return
        self._held[slot] = address, nbytes
        self._holders[address] += 1
        if self._holders[address] == 1:
            self.current += nbytes
            self.peak = max(self.peak, self.current)

    def release(self, slot: int) -> None:
        if slot not in self._held:
            return
        address, nbytes = self._held.pop(slot)
        self._holders[address] -= 1
        if not self._holders[address]:
            self.current -= nbytes
