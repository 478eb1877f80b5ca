"""Look at graphs before they run. Names of `torch._lazy.debug`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lazy_backend.computation import check_lazy
from lazy_backend.lowering.fx import to_fx
from lazy_backend.lowering.ir import Graph
from lazy_backend.sync import executor


def dump_ir(tensors: Sequence[torch.Tensor], format: str = "text") -> str:
    """The graph that computes `tensors`, which stay pending.

    `format` "text": the program with shapes and user lines. "backend": the FX code that a compiler gets.
    """
    graph = _graph_of(tensors)
    if format == "text":
        return str(graph)
    if format == "backend":
        # floats as arguments: their values belong to a run, not to the program
        module, _ = to_fx(graph, [0.0] * graph.num_constants, frozenset(), numbers=True)
        return str(module.code)
    raise ValueError(f"unknown format {format!r}\n  expected 'text' or 'backend'")


def render_ir_graph(tensors: Sequence[torch.Tensor]) -> str:
    """The graph that computes `tensors`, in Graphviz's dot language: data edges solid, effects dashed."""
    graph = _graph_of(tensors)
    lines = ["digraph G {"]
    makers: dict[int, str] = {}
    for value in graph.inputs:
        makers[value.number] = f"in{value.number}"
        lines.append(f'  in{value.number} [label="{value!r}: {value.meta}", shape=box]')
    for place, (node, effects) in enumerate(zip(graph.nodes, graph.effects(), strict=True)):
        lines.append(f'  n{place} [label="{node.name}"]')
        lines += [f"  {makers[value.number]} -> n{place}" for value in dict.fromkeys(node.inputs())]
        lines += [f"  n{earlier} -> n{place} [style=dashed]" for earlier in sorted(effects)]
        makers |= {value.number: f"n{place}" for value in node.outputs if value is not None}
    for value in graph.outputs:
        lines += [
            f'  out{value.number} [label="{value!r}", shape=box]',
            f"  {makers[value.number]} -> out{value.number}",
        ]
    return "\n".join([*lines, "}"])


def _graph_of(tensors: Sequence[torch.Tensor]) -> Graph:
    return executor.post_order_of(check_lazy(tensors)).graph
