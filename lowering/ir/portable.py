"""Graphs as bytes, and back.

In: a `Graph`. Out: JSON text from which another process builds an equal graph. The text contains no code, and nothing
in it is executed. Operators are written by name, so the reading process must have registered any custom operators.
Callables, tensors and other objects that a graph may hold as literals raise `NotPortable`.

Note [Graphs are set aside]
Once a graph is optimized, it is needed only for a second compile, an error or printing. As objects, the graph of a step
of a 24-block GPT takes 1.2 MB; as compressed text, 76 kB. So the objects that would keep a graph for such a case share
a `StoredGraph`, which may keep only the text, and rebuilds the graph on demand in 30 ms.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Callable
from typing import Any

import torch

from lazy_backend.lowering.collectives.communication import define_collectives
from lazy_backend.lowering.ir.graph import Arg, Constant, Graph, Node, TensorMeta, Value, intern_meta
from lazy_backend.lowering.recurrent.layer_operators import define_recurrent
from lazy_backend.ports.dispatcher import OpOverload


class NotPortable(ValueError):
    """The graph holds an object that has no text form, or names an operator that is unknown to this process."""


def to_bytes(graph: Graph) -> bytes:
    """`graph` as JSON. Raises `NotPortable`, also for a graph that holds values, which only its executor has."""
    if graph.held:
        raise NotPortable(f"the graph holds values: {', '.join(map(repr, graph.held))}")
    return json.dumps(_Writer().graph(graph), separators=(",", ":")).encode()


def from_bytes(data: bytes) -> Graph:
    """The graph written by `to_bytes`. Raises `NotPortable` for operators that are not registered here."""
    return _Reader(json.loads(data)).graph()


class StoredGraph:
    """A graph that may be set aside as text and is rebuilt on demand. See Note [Graphs are set aside]."""

    __slots__ = ("device", "num_inputs", "num_nodes", "num_outputs", "_graph", "_text")

    def __init__(self, graph: Graph) -> None:
        self.device = graph.device
        self.num_inputs, self.num_nodes, self.num_outputs = len(graph.inputs), len(graph.nodes), len(graph.outputs)
        self._graph: Graph | None = graph
        self._text: bytes | None = None

    def get(self) -> Graph:
        """The graph, or an equal one rebuilt from the text."""
        graph = self._graph
        if graph is None:
            assert self._text is not None
            graph = self._graph = from_bytes(zlib.decompress(self._text))
        return graph

    def is_set_aside(self) -> bool:
        return self._graph is None

    def set_aside(self) -> bool:
        """Keep only the text from now on. Returns False, and keeps the graph, if it has no text form."""
        graph = self._graph
        if graph is not None:
            if self._text is None and _is_for_good(graph):
                with contextlib.suppress(NotPortable):
                    self._text = zlib.compress(to_bytes(graph), 1)
            if self._text is None:
                return False
            self._graph = None  # a thread that has just called `get` has a reference of its own
        return True


def _is_for_good(graph: Graph) -> bool:
    """Whether all operators can be found by name later: a program may unregister its custom operators."""
    return all(node.op.namespace in ("aten", "prims") for node in graph.nodes)


def _name(item: torch.dtype | torch.layout | torch.memory_format) -> str:
    return str(item).removeprefix("torch.")


class _Writer:
    def __init__(self) -> None:
        self.metas: list[Any] = []
        self.places: dict[TensorMeta, int] = {}
        self.written: set[Value] = set()

    def graph(self, graph: Graph) -> dict[str, Any]:
        return {
            "inputs": [self.value(value) for value in graph.inputs],
            "nodes": [self.node(node) for node in graph.nodes],
            "outputs": [value.number for value in graph.outputs],
            "constants": graph.num_constants,
            "seeds": graph.num_seeds,
            "device": str(graph.device),
            "metas": self.metas,
        }

    def node(self, node: Node) -> list[Any]:
        return [
            node.op.name(),
            self.arg(node.args)[1],
            [[name, self.arg(arg)] for name, arg in node.kwargs],
            [None if value is None else self.value(value) for value in node.outputs],
            [value.number for value in node.mutates],
            node.returns_list,
            node.seed,
            node.site,
        ]

    def value(self, value: Value) -> list[int]:
        """The value's number and, at its first occurrence, its geometry and storage."""
        if value in self.written:
            return [value.number]
        self.written.add(value)
        return [value.number, self.meta(value.meta), value.storage]

    def meta(self, meta: TensorMeta) -> int:
        place = self.places.get(meta)
        if place is None:
            place = self.places[meta] = len(self.metas)
            geometry = (list(meta.shape), list(meta.stride), meta.storage_offset)
            self.metas.append([*geometry, _name(meta.dtype), meta.conj, meta.neg])
        return place

    def arg(self, arg: Arg) -> Any:
        """Ints, bools, strings and None as they are; everything else as a list that starts with its kind."""
        kind = arg.__class__
        if kind is Value:
            return ["value", arg.number]
        if kind is int or arg is None or isinstance(arg, (bool, int, str)):
            return arg
        if kind is Constant:
            return ["constant", arg.index]
        if isinstance(arg, tuple):
            return ["tuple", [self.arg(item) for item in arg]]
        if isinstance(arg, float):
            return ["float", arg.hex()]  # exact, NaN and infinities included
        if isinstance(arg, complex):
            return ["complex", arg.real.hex(), arg.imag.hex()]
        if isinstance(arg, torch.dtype | torch.layout | torch.memory_format):
            return ["torch", _name(arg)]
        if isinstance(arg, torch.device):
            return ["device", str(arg)]
        raise NotPortable(f"a {type(arg).__name__} has no text")


class _Reader:
    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self.metas = [self.meta(*meta) for meta in data["metas"]]
        self.values: dict[int, Value] = {}
        self.kinds: dict[str, Callable[..., Arg]] = {
            "value": lambda number: self.values[number],
            "constant": Constant,
            "tuple": lambda items: tuple(self.arg(item) for item in items),
            "float": float.fromhex,
            "complex": lambda real, imag: complex(float.fromhex(real), float.fromhex(imag)),
            "torch": lambda name: getattr(torch, name),
            "device": torch.device,
        }

    def graph(self) -> Graph:
        data = self.data
        inputs = tuple(self.value(*value) for value in data["inputs"])
        nodes = tuple(self.node(*node) for node in data["nodes"])
        outputs = tuple(self.values[number] for number in data["outputs"])
        return Graph(inputs, nodes, outputs, data["constants"], data["seeds"], torch.device(data["device"]))

    def node(
        self,
        name: str,
        args: list[Any],
        kwargs: list[tuple[str, Any]],
        outputs: list[Any],
        mutates: list[int],
        returns_list: bool,
        seed: int | None,
        site: str,
    ) -> Node:
        return Node(
            _operator(name),
            tuple(self.arg(arg) for arg in args),
            tuple((key, self.arg(arg)) for key, arg in kwargs),
            tuple(None if value is None else self.value(*value) for value in outputs),
            tuple(self.values[number] for number in mutates),
            returns_list,
            seed,
            site,
        )

    def value(self, number: int, meta: int | None = None, storage: int = 0) -> Value:
        if meta is not None:
            self.values[number] = Value(number, self.metas[meta], storage)
        return self.values[number]

    @staticmethod
    def meta(shape: list[int], stride: list[int], offset: int, dtype: str, conj: bool, neg: bool) -> TensorMeta:
        return intern_meta(tuple(shape), tuple(stride), offset, getattr(torch, dtype), conj, neg)

    def arg(self, arg: Any) -> Arg:
        return self.kinds[arg[0]](*arg[1:]) if isinstance(arg, list) else arg


def _operator(name: str) -> OpOverload:
    """`aten::add.Tensor` -> the overload. `OpOverload.name()` leaves "default" out."""
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    if namespace == "lazy_backend":
        define_collectives()
        define_recurrent()
    try:
        found = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    except AttributeError:
        raise NotPortable(f"operator {name} is not registered in this process") from None
    return found  # type: ignore[no-any-return]
