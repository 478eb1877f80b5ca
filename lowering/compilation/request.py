"""What a compiler is asked for.

In: a graph and what is to be an input of it. Out: `CompileRequest`, from which the compiler here, the compiler's
process and the disk cache derive all that they need: module, signature, example inputs, key.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx

from lazy_backend.lowering.checks.kernel_calls import left_to_kernels
from lazy_backend.lowering.compilation.examples import Examples, static_examples, symbolic_examples
from lazy_backend.lowering.compilation.fx import Signature, to_fx
from lazy_backend.lowering.ir.graph import Graph
from lazy_backend.lowering.ir.portable import StoredGraph
from lazy_backend.lowering.ir.shapes import Sizes, SymbolicGraph, symbolic_graph

Backend: TypeAlias = str | Callable[[fx.GraphModule, list[torch.Tensor]], Callable[..., Any]]


def runs_module_as_is(backend: Backend) -> bool:
    """Whether the backend calls the module itself, so that Python floats can be arguments."""
    return backend == "eager"


@dataclass(frozen=True, slots=True, eq=False)
class CompileRequest:
    """A graph, for some values of its floats and for some or all of its sizes.

    `constants`: the values of the graph's floats. Those at the places `promoted` become inputs of the compiled code,
    the others literals; all become inputs where `backend` runs the module as it is.
    `sizes`: what the numbers of a symbolic graph are, `stored` being one sample; None for a graph of fixed numbers.
    `shares_blocks`: whether equal blocks may be compiled once, see Note [Blocks compiled once].
    `left`: places of nodes that the compiler does not get, see Note [Left to kernels].
    `shares_threads`: whether the number of threads is that of each run, see Note [Threads follow requests].
    """

    stored: StoredGraph
    constants: tuple[float, ...]
    promoted: frozenset[int]
    backend: Backend
    sizes: Sizes | None = None
    shares_blocks: bool = False
    left: tuple[int, ...] = ()
    shares_threads: bool = False

    @classmethod
    def of(
        cls, graph: Graph, constants: Sequence[float], backend: Backend, promoted: Iterable[int] = ()
    ) -> CompileRequest:
        """A request for a graph that has no `StoredGraph` yet."""
        return cls(StoredGraph(graph), tuple(constants), frozenset(promoted), backend)

    @property
    def graph(self) -> Graph:
        """The graph for a compiler, without symbols."""
        return left_to_kernels(self.stored.get(), self.left)

    @property
    def signature(self) -> Signature:
        """The signature of the compiled code."""
        num_symbols = 0 if self.sizes is None else len(self.sizes.symbols)
        return Signature.of(self.stored.get(), self.promoted, runs_module_as_is(self.backend), num_symbols)

    def specialised(self) -> dict[int, float]:
        """The constants that are compiled in, by place: the code is valid for these values only."""
        if runs_module_as_is(self.backend):
            return {}
        return {place: value for place, value in enumerate(self.constants) if place not in self.promoted}

    def _symbolic(self) -> SymbolicGraph | None:
        return None if self.sizes is None else symbolic_graph(self.stored.get(), self.sizes)

    def module(self) -> fx.GraphModule:
        """The graph for a compiler; each call makes another module."""
        symbolic = self._symbolic()
        if symbolic is None:
            return to_fx(self.graph, self.constants, self.signature)
        graph = left_to_kernels(symbolic.graph, self.left)
        return to_fx(graph, self.constants, self.signature, symbolic.hints)

    def examples(self) -> Examples:
        """The example inputs for the compiler."""
        symbolic = self._symbolic()
        if symbolic is None:
            return static_examples(self.stored.get(), self.signature)
        return symbolic_examples(symbolic, self.signature)

    def key_parts(self) -> tuple[tuple[str, str], ...]:
        """The key parts for what the code depends on besides the graph and the environment."""
        literals = [f"{place}={value.hex()}" for place, value in self.specialised().items()]
        return (
            ("inputs", ", ".join(map(str, sorted(self.promoted)))),
            ("literals", ", ".join(literals)),
            ("sizes", "" if self.sizes is None else json.dumps(self.sizes.to_json())),
            ("blocks", "shared" if self.shares_blocks else ""),
            ("left to kernels", ", ".join(map(str, self.left))),
            ("threads", "shared" if self.shares_threads else ""),
        )

    # For the worker process; the graph itself is sent alongside, as bytes.

    def to_json(self) -> dict[str, Any]:
        return {
            "constants": [constant.hex() for constant in self.constants],
            "promoted": sorted(self.promoted),
            "sizes": None if self.sizes is None else self.sizes.to_json(),
            "shares_blocks": self.shares_blocks,
            "left": self.left,
            "shares_threads": self.shares_threads,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any], graph: Graph, backend: Backend) -> CompileRequest:
        sizes = None if data["sizes"] is None else Sizes.from_json(data["sizes"])
        constants = tuple(map(float.fromhex, data["constants"]))
        promoted = frozenset(data["promoted"])
        settings = data["shares_blocks"], tuple(data["left"]), data["shares_threads"]
        return cls(StoredGraph(graph), constants, promoted, backend, sizes, *settings)
