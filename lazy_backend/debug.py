"""Inspect graphs before they run, and export what a process did. Names follow `torch._lazy.debug`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from lazy_backend.computation import check_lazy
from lazy_backend.diagnostics.chrome_trace import export_chrome_trace
from lazy_backend.diagnostics.difference import shown_site
from lazy_backend.diagnostics.history import history
from lazy_backend.errors.tracebacks import hide_internals
from lazy_backend.execution import inspection
from lazy_backend.lowering.compilation.fx import Signature, to_fx
from lazy_backend.lowering.ir.graph import Graph, Node, Value

__all__ = ["dump_ir", "dump_runtime", "export_chrome_trace", "render_ir_graph"]


@hide_internals
def dump_ir(tensors: Sequence[torch.Tensor], format: str = "text") -> str:
    """The graph that computes `tensors`, which stay pending.

    `format` "text": the program with shapes and user lines, up to `config.source_frames` lines per call. "dot": the
    output of `render_ir_graph`. "fx" (or "backend"): the FX code that a compiler gets. Raises `ValueError` for any
    other format.
    """
    if format not in ("text", "dot", "fx", "backend"):
        raise ValueError(f"unknown format {format!r}\n  expected 'text', 'dot', 'fx' or 'backend'")
    graph = _graph_of(tensors)
    if format == "text":
        return str(graph)
    if format == "dot":
        return _to_dot(graph, False)
    # floats as arguments: their values belong to a run, not to the program
    module = to_fx(graph, [0.0] * graph.num_constants, Signature.of(graph, numbers=True))
    return str(module.code)


@hide_internals
def render_ir_graph(tensors: Sequence[torch.Tensor], lines: bool = False) -> str:
    """The graph that computes `tensors`, in Graphviz's dot language: data edges solid, effects dashed.

    `lines`: show the user's line, with its text, in each node.
    """
    return _to_dot(_graph_of(tensors), lines)


def _graph_of(tensors: Sequence[torch.Tensor]) -> Graph:
    return inspection.graph_of(check_lazy(tensors))


def _to_dot(graph: Graph, lines: bool) -> str:
    return "\n".join(["digraph G {", *_dot_lines(graph, lines), "}"])


def _dot_lines(graph: Graph, lines: bool) -> Iterator[str]:
    makers: dict[Value, str] = {}
    for value in graph.inputs:
        makers[value] = f"in{value.number}"
        yield f"  in{value.number} [label={_quoted(f'{value!r}: {value.meta}')}, shape=box]"
    for place, (node, effects) in enumerate(zip(graph.nodes, graph.effects(), strict=True)):
        yield f"  n{place} [label={_quoted(_label(node, lines))}]"
        for value in dict.fromkeys(node.inputs()):
            yield f"  {makers[value]} -> n{place}"
        for earlier in sorted(effects):
            yield f"  n{earlier} -> n{place} [style=dashed]"
        makers |= {value: f"n{place}" for value in node.outputs if value is not None}
    for value in graph.outputs:
        yield f"  out{value.number} [label={_quoted(f'{value!r}: {value.meta}')}, shape=box]"
        yield f"  {makers[value]} -> out{value.number}"


def _label(node: Node, lines: bool) -> str:
    if not lines or not node.site:
        return node.name
    return "\n".join([node.name, shown_site(node.site), *node.frames])


def _quoted(text: str) -> str:
    """`text` as a string of the dot language, in which a backslash begins an escape."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def dump_runtime() -> str:
    """What this process holds, part by part, for a bug report: numbers of entries, and plain values. Reads no tensor.

    A part that holds nothing is left out.
    """
    lines = []
    for name, holds, values in history.sources["runtime"]():
        held = [f"    {path or 'value'} = {value!r}" for path, value in values.items() if value not in (None, 0, "")]
        if held:
            lines += [f"{name}: {holds}", *held]
    return "\n".join(lines) + "\n"
