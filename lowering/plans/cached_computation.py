"""A cached computation, and how a recorded path uses it.

In: a canonical graph and its key. Out: `Computation` (one per key) and `CachedComputation` (one per path and live set).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from lazy_backend.cache.computation_cache import Key
from lazy_backend.lowering.artefacts.environment import Environment, key_parts
from lazy_backend.lowering.collectives.agreement import (
    Collective,
    RunCollectives,
    describe_collective,
    describe_exchange,
)
from lazy_backend.lowering.collectives.communication import collective_of, is_exchange, place_of_common
from lazy_backend.lowering.compilation.compiler import backend_name
from lazy_backend.lowering.devices.registration import backing_of
from lazy_backend.lowering.ir.canonical import Parameter
from lazy_backend.lowering.ir.graph import Graph, Node
from lazy_backend.lowering.plans.families import Family
from lazy_backend.lowering.plans.profiling import ProfilingGraphExecutor
from lazy_backend.lowering.plans.specialise import CompileReport
from lazy_backend.ports.dispatcher import base_name, function_schema

_numbers = itertools.count(1)


class Computation:
    """One canonical graph with all its plans. Compared by identity."""

    __slots__ = ("key", "hash", "executor", "number", "collectives")

    def __init__(
        self,
        key: Key,
        graph: Graph,
        report: Callable[[CompileReport], None],
        find_family: Callable[[Graph], Family] | None = None,
    ) -> None:
        self.key = key
        self.hash = key.hash_hex()
        self.executor = ProfilingGraphExecutor(graph, report, key, find_family)
        self.number = next(_numbers)
        self.collectives = _collectives_of(graph)

    @property
    def graph(self) -> Graph:
        """The canonical graph; rebuilt from its text if it was set aside."""
        return self.executor.stored.get()

    @property
    def name(self) -> str:
        return f"graph #{self.number} {self.hash[:8]} ({self.executor.stored.num_nodes} nodes)"

    def __repr__(self) -> str:
        return f"Computation(#{self.number}, {self.hash[:8]}, {self.executor.stored.num_nodes} nodes)"


@dataclass(frozen=True, slots=True, eq=False)
class CachedComputation:
    """A computation bound to a path, with the trace's inputs, constants and seeds in the order in which it takes them.

    `outputs`: for each output, its place among the storages that are alive, or -1 if no tensor holds it; None if all
    outputs are held, in order.
    """

    computation: Computation
    parameters: tuple[Parameter, ...]
    constants: tuple[int, ...]
    seeds: tuple[int, ...]
    outputs: tuple[int, ...] | None = None
    # the same as `parameters`, as every sync needs it: which inputs, and where bases are taken in place of views
    places: tuple[int, ...] = field(init=False)
    bases: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "places", tuple([one.index for one in self.parameters]))
        object.__setattr__(self, "bases", tuple([place for place, one in enumerate(self.parameters) if one.base]))


def _collectives_of(graph: Graph) -> RunCollectives | None:
    """What a run of `graph` communicates; None for most."""
    found = [_collective(node, name) for node in graph.nodes if (name := collective_of(node.op)) is not None]
    exchanges = [_exchange(node) for node in graph.nodes if is_exchange(node.op)]
    return RunCollectives(found, exchanges) if found or exchanges else None


def _exchange(node: Node) -> Collective:
    tensor, _, peer, tag, group = node.args
    what = describe_exchange(base_name(node.op), tensor.meta.dtype, tensor.meta.shape, peer, tag)
    return Collective(group, what, node.site)


def _collective(node: Node, name: str) -> Collective:
    named = {argument.name: arg for argument, arg in zip(function_schema(node.op).arguments, node.args, strict=True)}
    common = node.args[place_of_common(name)].meta
    what = describe_collective(name, common.dtype, common.shape, named.get("reduction"))
    return Collective(named["group"], what, node.site)


def make_key(graph: Graph, settings: Environment) -> Key:
    """The exact key of `graph` under these settings."""
    backend = settings[0]
    parts = (
        ("torch", torch.__version__),
        ("backend", "interpreted" if backend is None else backend_name(backend)),
        ("device", str(graph.device)),
        ("capability", backing_of(graph.device).capability(graph.device)),
    )
    return Key((*parts, *key_parts(settings), ("graph", graph.text())))
