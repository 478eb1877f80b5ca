"""The graph: what is compiled, interpreted, printed and compared.

In: nothing from this package. Out: `TensorMeta`, `Value`, `Node`, `Graph`, `check_graph`, `dependencies`.
A graph is a program: its nodes are in program order and mutate their operands as the recorded calls did. Two values
with the same `storage` share memory.

Note [Program order and effects]
A mutated value keeps its number, so data edges alone do not order a program. `effects` adds the missing edges, per
storage: read after write, write after write and write after read. Any order that respects data and effect edges
(`dependencies`) computes the same results; program order is one such order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import torch

from lazy_backend.cache.weak_table import WeakTable
from lazy_backend.ports.dispatcher import OpOverload

# Arguments of a node: values, constants and literals, nested in tuples where the schema has lists.
Arg: TypeAlias = Any


class TensorMeta:
    """Shape, stride and storage offset (in elements) and dtype of one tensor. Interned: compare with `is`.

    `conj` and `neg` are the bits of the lazily conjugated or negated views that `x.conj()` and `x.imag` return.
    """

    __slots__ = ("shape", "stride", "storage_offset", "dtype", "conj", "neg", "_text", "__weakref__")

    def __init__(
        self,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        storage_offset: int,
        dtype: torch.dtype,
        conj: bool,
        neg: bool,
    ) -> None:
        self.shape = shape
        self.stride = stride
        self.storage_offset = storage_offset
        self.dtype = dtype
        self.conj = conj
        self.neg = neg
        self._text: str | None = None

    def __repr__(self) -> str:
        return f"TensorMeta({self})"

    def __str__(self) -> str:
        """`f32[4, 8]`, with the strides if they are not contiguous, and the offset if it is not zero."""
        if self._text is None:  # cached: a key prints hundreds of values but few different geometries
            self._text = self._printed()
        return self._text

    def _printed(self) -> str:
        text = f"{_short_dtype(self.dtype)}{list(self.shape)}"
        if self.stride != contiguous_stride(self.shape):
            text += "{" + ",".join(map(str, self.stride)) + "}"
        if self.storage_offset:
            text += f"@{self.storage_offset}"
        return text + " conj" * self.conj + " neg" * self.neg

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of the elements (not of the storage behind them)."""
        return self.numel * self.dtype.itemsize


_metas: WeakTable[tuple[Any, ...], TensorMeta] = WeakTable()


def intern_meta(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    storage_offset: int,
    dtype: torch.dtype,
    conj: bool = False,
    neg: bool = False,
) -> TensorMeta:
    """The unique `TensorMeta` with these properties."""
    found = _metas.get((shape, stride, storage_offset, dtype, conj, neg))
    if found is None:
        # a `torch.Size` equals its tuple, which is kept
        key = (tuple(shape), tuple(stride), int(storage_offset), dtype, conj, neg)
        # setdefault: two threads may race here, and metas are compared by identity
        found = _metas.setdefault(key, TensorMeta(*key))
    return found


def meta_of(tensor: torch.Tensor) -> TensorMeta:
    """The meta of a strided tensor (real or fake)."""
    offset: Any = tensor.storage_offset()
    return intern_meta(tensor.shape, tensor.stride(), offset, tensor.dtype, tensor.is_conj(), tensor.is_neg())


def empty_of(meta: TensorMeta, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor of exactly this geometry, without conj and neg bits; fake under a fake tensor mode."""
    if not meta.storage_offset:
        return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=device)
    storage = torch.empty(extent(meta), dtype=meta.dtype, device=device)
    return storage.as_strided(meta.shape, meta.stride, meta.storage_offset)


def extent(meta: TensorMeta) -> int:
    """Number of elements from the start of the storage through the tensor's last element."""
    if not meta.numel:
        return meta.storage_offset
    return meta.storage_offset + 1 + sum((n - 1) * step for n, step in zip(meta.shape, meta.stride, strict=True))


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides; an empty dimension counts as size 1, as in torch."""
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def is_contiguous(meta: TensorMeta) -> bool:
    return meta.stride == contiguous_stride(meta.shape)


def _short_dtype(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    for long, short in (("bfloat", "bf"), ("float", "f"), ("complex", "c"), ("uint", "u"), ("int", "i")):
        if name.startswith(long):
            return short + name.removeprefix(long)
    return name


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Value:
    """One tensor of a graph: an input or a node's result. Compared by identity.

    `number` is the value's position in program order; `storage` identifies its memory.
    """

    number: int
    meta: TensorMeta
    storage: int

    def __repr__(self) -> str:
        return f"%{self.number}"


@dataclass(frozen=True, slots=True)
class Constant:
    """A Python float of the program, by its index among the graph's constants; each run supplies the number."""

    index: int

    def __repr__(self) -> str:
        return f"c{self.index}"


# By name: the program's own operators, kept alive. A program may unregister one, and register another of its name.
_registered: dict[str, list[OpOverload]] = {}


def _registration_of(op: OpOverload) -> str:
    """The mark of an operator that the program registered by a name that another had before: "#2", "#3" and so on."""
    if op.namespace in ("aten", "prims"):
        return ""
    known = _registered.setdefault(op.name(), [])
    if op not in known:
        known.append(op)
    number = known.index(op)
    return f"#{number + 1}" if number else ""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Node:
    """One operator call."""

    op: OpOverload
    args: tuple[Arg, ...]  # schema order
    kwargs: tuple[tuple[str, Arg], ...]
    outputs: tuple[Value | None, ...]  # one per result; a mutated operand is its own result
    mutates: tuple[Value, ...]  # operands written in place
    returns_list: bool  # whether the results come as one list, as from `split` or `_foreach_mul`
    seed: int | None  # index among the graph's seeds if the op draws random numbers, else None
    site: str  # user line that first recorded the call; never part of a key
    frames: tuple[str, ...] = ()  # outer user lines, innermost first, if requested

    @property
    def name(self) -> str:
        """`aten.mm`, or `aten.add.out` where the overload is neither `default` nor `Tensor`."""
        return str(self.op).removesuffix(".default").removesuffix(".Tensor") + _registration_of(self.op)

    def inputs(self) -> list[Value]:
        """The operands, in schema order, once for each use."""
        return _leaves(self, Value)

    def __str__(self) -> str:
        results = ", ".join(["_" if out is None else f"%{out.number}: {out.meta}" for out in self.outputs])
        return f"{results}{' = ' if results else ''}{self.name}({self._printed_args()})"

    def _printed_args(self) -> str:
        printed = [print_arg(arg) for arg in self.args]
        printed += [f"{name}={print_arg(arg)}" for name, arg in self.kwargs]
        if self.seed is not None:
            printed.append(f"seed=s{self.seed}")
        return ", ".join(printed)


def _add_leaves(args: Sequence[Arg], kind: type, found: list[Any]) -> None:
    """Append the leaves of type `kind`; the schema's lists are tuples here."""
    for arg in args:
        if arg.__class__ is kind:
            found.append(arg)
        elif isinstance(arg, tuple):
            _add_leaves(arg, kind, found)


def _leaves(node: Node, kind: type) -> list[Any]:
    found: list[Any] = []
    _add_leaves(node.args, kind, found)
    if node.kwargs:
        _add_leaves([arg for _, arg in node.kwargs], kind, found)
    return found


def constants_of(node: Node) -> list[int]:
    """The indices of the node's floats among the graph's constants."""
    return [constant.index for constant in _leaves(node, Constant)]


def makes_views(node: Node) -> bool:
    """Whether the node does nothing but make views of its operands."""
    if node.mutates or node.seed is not None or not node.outputs:
        return False
    storages = {value.storage for value in node.inputs()}
    return all(value is not None and value.storage in storages for value in node.outputs)


def print_arg(arg: Arg) -> str:
    """Exact text of an argument: equal texts mean equal arguments."""
    if isinstance(arg, tuple):
        return "[" + ", ".join(map(print_arg, arg)) + "]"
    return repr(arg)


def map_arg(fn: Callable[[Arg], Arg], arg: Arg) -> Arg:
    """`arg` with `fn` applied to every leaf; the schema's lists stay tuples."""
    if isinstance(arg, tuple):
        return tuple(map_arg(fn, item) for item in arg)
    return fn(arg)


def with_values(node: Node, move: Callable[[Arg], Arg]) -> Node:
    """`node` with `move` applied to every operand, result and argument."""
    return replace(
        node,
        args=map_arg(move, node.args),
        kwargs=tuple((name, map_arg(move, arg)) for name, arg in node.kwargs),
        outputs=map_arg(move, node.outputs),
        mutates=map_arg(move, node.mutates),
    )


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Graph:
    """A pruned program with numbered values.

    A run takes one tensor per input, `num_constants` floats and `num_seeds` seeds, and returns the `outputs`, each of
    which owns its storage: a caller that holds views makes them again from their base.

    `held`: in a graph that a pass has rewritten, the values that exist before a run and are not passed to it: memory to
    write into (Note [Planned buffers]) and values that depend on weights alone (Note [What is folded]). Held values may
    share a storage with each other and with inputs.
    """

    inputs: tuple[Value, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Value, ...]
    num_constants: int
    num_seeds: int
    device: torch.device  # the backing device, on which the graph runs
    held: tuple[Value, ...] = ()

    def __repr__(self) -> str:
        return f"Graph({len(self.inputs)} inputs, {len(self.nodes)} nodes, {len(self.outputs)} outputs)"

    def __str__(self) -> str:
        """The program with user lines, for people to read."""
        return self._printed(_print_lines)

    def text(self) -> str:
        """The program without user lines. The text is exact, so it is the graph's own key."""
        return self._printed(lambda node: "")

    def _printed(self, suffix: Callable[[Node], str]) -> str:
        heads = [f"{value!r}: {value.meta}" for value in self.inputs]
        counts = f"{self.num_constants} constants, {self.num_seeds} seeds"
        held = ", ".join(f"{value!r}: {value.meta}" for value in self.held)
        counts += f"; held {held}" if held else ""
        lines = [f"graph({', '.join(heads)}; {counts}) on {self.device}:"]
        lines += [f"  {node}{suffix(node)}" for node in self.nodes]
        lines.append(f"  return {', '.join(map(repr, self.outputs))}")
        return "\n".join(lines)

    def mutated_inputs(self) -> tuple[int, ...]:
        """Indices of the inputs whose storage some node writes."""
        written = {value.storage for node in self.nodes for value in node.mutates}
        return tuple(place for place, value in enumerate(self.inputs) if value.storage in written)

    def effects(self) -> list[set[int]]:
        """The effect edges of the nodes; see the function `effects`."""
        return effects(self.nodes)


def _print_lines(node: Node) -> str:
    further = "".join(f"\n      # from {frame}" for frame in node.frames)
    return f"  # {node.site}{further}" if node.site else ""


class Step(Protocol):
    """The interface shared by a node and a kernel of many nodes: operands, results, and operands that are written."""

    @property
    def outputs(self) -> tuple[Value | None, ...]: ...

    @property
    def mutates(self) -> tuple[Value, ...]: ...

    def inputs(self) -> Sequence[Value]: ...


def effects(steps: Sequence[Step]) -> list[set[int]]:
    """For each step, the earlier steps it must follow beyond its data edges.

    See Note [Program order and effects].
    """
    last_write: dict[int, int] = {}
    reads_since: dict[int, list[int]] = {}
    edges: list[set[int]] = []
    for place, step in enumerate(steps):
        after: set[int] = set()
        written = {value.storage for value in step.mutates}
        for storage in {value.storage for value in step.inputs()} | written:
            if storage in last_write:
                after.add(last_write[storage])
            if storage in written:
                after.update(reads_since.pop(storage, ()))
                last_write[storage] = place
            else:
                reads_since.setdefault(storage, []).append(place)
        after.discard(place)
        edges.append(after)
    return edges


def dependencies(steps: Sequence[Step]) -> list[set[int]]:
    """For each step, the earlier steps it must follow: the makers of its operands, and those in `effects`."""
    makers: dict[Value, int] = {}
    edges = effects(steps)
    for place, step in enumerate(steps):
        edges[place].update(makers[value] for value in step.inputs() if value in makers)
        for value in step.outputs:
            if value is not None:
                makers.setdefault(value, place)
    return edges


class MalformedGraph(AssertionError):
    """A graph that breaks a rule of `check_graph`: a defect of this project, not of the user's program."""


def check_graph(graph: Graph) -> Graph:
    """Return `graph` if it is well formed, else raise `MalformedGraph` with the rule and the node.

    - Every operand is an input, a held value, or the result of an earlier node.
    - Numbers of results rise in program order, and no number is used twice.
    - A mutated value is an operand of its node.
    - No two inputs share a storage; outputs are results of nodes, and no two share a storage.
    - Constants and seeds are within the declared counts.
    """
    known = {*graph.inputs, *graph.held}
    taken = {v.number for v in known}
    highest = -1
    _require(len({v.storage for v in graph.inputs}) == len(graph.inputs), "two inputs share a storage", graph)
    for node in graph.nodes:
        operands = node.inputs()
        _require(known.issuperset(operands), "an operand is used before it is defined", graph, node)
        _require(set(node.mutates) <= set(operands), "a mutated value is no operand", graph, node)
        in_range = all(index < graph.num_constants for index in constants_of(node))
        _require(in_range, "a constant is out of range", graph, node)
        results = [v for v in node.outputs if v is not None and v not in known]
        numbers = [v.number for v in results]
        unused = len(set(numbers)) == len(numbers) and taken.isdisjoint(numbers)
        _require(unused, "a number is used twice", graph, node)
        rising = numbers == sorted(numbers) and all(number > highest for number in numbers)
        _require(rising, "numbers do not rise", graph, node)
        highest = max([highest, *numbers])
        taken.update(numbers)
        known.update(results)
        _require(node.seed is None or node.seed < graph.num_seeds, "a seed is out of range", graph, node)
    own = known.difference(graph.inputs, graph.held)
    _require(own.issuperset(graph.outputs), "an output is no result of a node", graph)
    storages = [v.storage for v in graph.outputs]
    _require(len(set(storages)) == len(storages), "two outputs share a storage", graph)
    return graph


def _require(holds: bool, rule: str, graph: Graph, node: Node | None = None) -> None:
    """Print `node` and `graph` only if the rule is broken: this is called for each node of each graph in tests."""
    if not holds:
        at = "" if node is None else f":\n  {node}"
        raise MalformedGraph(f"malformed graph: {rule}{at}\nin\n{graph}")
