"""Example inputs for a compiler.

In: a graph, concrete or symbolic. Out: SymInts for the symbols, then fake tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from lazy_backend.lowering.compilation.fx import Signature
from lazy_backend.lowering.ir.graph import Graph, empty_of
from lazy_backend.lowering.ir.shapes import Geometry, SymbolicGraph
from lazy_backend.lowering.products.product import TensorLayout
from lazy_backend.ports.fake_tensors import FakeTensorMode
from lazy_backend.ports.replacements import inductor


@dataclass(frozen=True, slots=True)
class Examples:
    """What a module is compiled for: SymInts for the symbols of a symbolic graph, then fake tensors."""

    arguments: list[Any]
    mode: Any  # a fake mode
    symbols: list[Any]  # SymInts

    def tracing(self) -> AbstractContextManager[object]:
        """A context in which a compiler keeps the symbols symbolic."""
        if not self.symbols:
            return contextlib.nullcontext()
        return inductor.tracing(self.mode)

    def sizes(self) -> list[int]:
        """What the symbols are in the graph that the examples were made for."""
        return list(map(inductor.hint, self.symbols))

    def layouts(self) -> list[TensorLayout]:
        """Of the tensors, for these sizes."""
        tensors = self.arguments[len(self.symbols) :]
        return [TensorLayout(_hints(one.shape), _hints(one.stride()), str(one.dtype)[6:]) for one in tensors]

    def guards(self) -> str | None:
        """The compiler's guards on the symbols, an expression over `L['t0']`, ...; complete after the compile."""
        shape_env = self.mode.shape_env
        return shape_env.produce_guards_expression(self.symbols) if shape_env is not None and self.symbols else None


def _hints(numbers: Sequence[Any]) -> tuple[int, ...]:
    return tuple(map(inductor.hint, numbers))


def static_examples(graph: Graph, signature: Signature) -> Examples:
    """Fake inputs with exactly the graph's geometry."""
    mode = FakeTensorMode()
    with mode:
        inputs = [empty_of(value.meta, graph.device) for value in graph.inputs]
        return Examples([*inputs, *_extra_inputs(graph, signature)], mode, [])


def symbolic_examples(symbolic: SymbolicGraph, signature: Signature) -> Examples:
    """Fake inputs whose sizes are expressions of the symbols. All occurrences of a symbol share one SymInt."""
    shape_env, symbols = inductor.symbols_with(symbolic.hints)
    mode = FakeTensorMode(shape_env=shape_env)
    with mode:
        tensors = [
            _fake_input(geometry, value.meta.dtype, symbolic.graph.device, symbols)
            for geometry, value in zip(symbolic.inputs, symbolic.graph.inputs, strict=True)
        ]
        tensors += _extra_inputs(symbolic.graph, signature)
    return Examples([*symbols, *tensors], mode, symbols)


def _fake_input(geometry: Geometry, dtype: torch.dtype, device: torch.device, symbols: Sequence[Any]) -> torch.Tensor:
    shape = [size.at(symbols) for size in geometry.shape]
    stride = [size.at(symbols) for size in geometry.stride]
    offset = geometry.storage_offset.at(symbols)
    if isinstance(offset, int) and offset == 0:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)
    whole = offset + 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    return torch.empty(whole, dtype=dtype, device=device).as_strided(shape, stride, offset)


def _extra_inputs(graph: Graph, signature: Signature) -> list[torch.Tensor]:
    """Tensors for what a module takes after the graph's inputs: real ones, or fake ones within a fake mode."""
    extra = []
    if signature.scalars:
        extra.append(torch.empty(len(signature.scalars), dtype=torch.float64, device=graph.device))
    if signature.seeds:
        extra.append(torch.empty(graph.num_seeds, dtype=torch.int64, device="cpu"))
    return extra
