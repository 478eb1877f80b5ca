"""Constant folding, and weights that are checked, folded and swapped whole."""

from __future__ import annotations

import pytest
import torch
from builder import Program, aten
from harness import assert_same

from lazy_backend.lowering.checks.refusals import NodeError
from lazy_backend.lowering.interpreter.kernels import make_kernels
from lazy_backend.lowering.ir.graph import Graph, intern_meta
from lazy_backend.lowering.serving.constant_folding import ConstantFolder, split_constants
from lazy_backend.lowering.serving.weights import InputError, Weights, process_weights


def folder(graph: Graph, weights: int, constants: list[float] | None = None) -> ConstantFolder:
    """`graph` split with its first inputs as weights."""
    return split_constants(graph, graph.inputs[:weights], constants or [])


def remaining(graph: Graph, weights: int = 1) -> list[str]:
    return [node.name for node in folder(graph, weights).remaining.nodes]


def scaled_linear() -> tuple[Program, Graph]:
    """x @ (w * 2.5).t(), with the weight first."""
    program = Program()
    w = program.input(torch.ones(3, 2))
    scaled = program.call(aten.t.default, program.call(aten.mul.Tensor, w, 2.5))
    return program, program.graph(program.call(aten.mm.default, program.input(torch.ones(4, 2)), scaled))


# ----- what is folded


def test_what_depends_on_weights_alone_is_computed_once() -> None:
    program, graph = scaled_linear()
    split = folder(graph, 1, program.constants)
    assert [node.name for node in split.remaining.nodes] == ["aten.mm"]
    weight = torch.randn(3, 2)
    (folded,) = split.fold({graph.inputs[0]: weight}).values()
    assert_same(folded, (weight * 2.5).t())


def test_a_view_of_a_weight_stays_a_view() -> None:
    program = Program()
    view = program.call(aten.t.default, program.input(torch.ones(3, 2)))
    graph = program.graph(program.call(aten.mm.default, program.input(torch.ones(4, 2)), view))
    weight = torch.randn(3, 2)
    (folded,) = folder(graph, 1).fold({graph.inputs[0]: weight}).values()
    assert folded.data_ptr() == weight.data_ptr()


def test_what_depends_on_nothing_is_folded() -> None:
    program = Program()
    x = program.input(torch.ones(3))
    positions = program.call(aten.arange.default, 3)
    graph = program.graph(program.call(aten.add.Tensor, x, positions))
    assert remaining(graph, weights=0) == ["aten.add"]


def test_random_numbers_are_drawn_for_each_run() -> None:
    program = Program()
    noise = program.call(aten.rand_like.default, program.input(torch.ones(3)))
    assert remaining(program.graph(program.call(aten.tanh.default, noise))) == ["aten.rand_like", "aten.tanh"]


def test_what_writes_is_not_folded_nor_what_reads_what_is_written() -> None:
    program = Program()
    w, v = program.input(torch.ones(3)), program.input(torch.ones(3))
    doubled = program.call(aten.mul.Tensor, w, 2)
    program.call(aten.add_.Tensor, w, 1)
    fine = program.call(aten.tanh.default, v)
    graph = program.graph(program.call(aten.add.Tensor, doubled, fine))
    assert remaining(graph, weights=2) == ["aten.mul", "aten.add_", "aten.add"]


def test_what_is_written_later_is_not_folded() -> None:
    program = Program()
    doubled = program.call(aten.mul.Tensor, program.input(torch.ones(3)), 2)
    program.call(aten.add_.Tensor, doubled, program.input(torch.ones(3)))
    graph = program.graph(program.call(aten.tanh.default, doubled))
    assert remaining(graph) == ["aten.mul", "aten.add_", "aten.tanh"]


def test_an_output_is_the_callers_and_computed_anew() -> None:
    program = Program()
    graph = program.graph(program.call(aten.mul.Tensor, program.input(torch.ones(3)), 2))
    assert remaining(graph) == ["aten.mul"]


def test_an_error_while_folding_names_the_line() -> None:
    program = Program()
    w = program.input(torch.ones(2, 2))
    product = program.call(aten.mm.default, w, w)
    graph = program.graph(program.call(aten.tanh.default, product))
    with pytest.raises(NodeError, match=r"recorded at step.py:1"):
        folder(graph, 1).fold({graph.inputs[0]: torch.ones(2, 3)})


# ----- processing


def processed(tensors: dict[str, torch.Tensor], written: bool = False) -> Weights:
    program, graph = scaled_linear()
    split = folder(graph, 1, program.constants)
    weight = graph.inputs[0]
    template = make_kernels(split.remaining).template
    return process_weights(tensors, {"w": weight}, [weight] if written else [], split, template)


def test_a_run_starts_from_weights_and_folded_values() -> None:
    weight = torch.randn(3, 2)
    weights = processed({"w": weight})
    assert len(weights.template.inputs) == 1  # x
    held = [value for value in weights.template.values if isinstance(value, torch.Tensor)]
    assert_same(held, [weight, (weight * 2.5).t()])
    assert weights.tensors["w"] is weight


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({}, r"missing \['w'\], unexpected \[\]"),
        ({"w": torch.ones(3, 2), "v": torch.ones(1)}, r"missing \[\], unexpected \['v'\]"),
        ({"w": torch.ones(2, 3)}, r"weight 'w': expected torch.float32 \[3, 2\] on cpu, got torch.float32 \[2, 3\]"),
        ({"w": torch.ones(3, 2).half()}, r"expected torch.float32 .* got torch.float16"),
        ({"w": torch.ones(3, 2, device="meta")}, r"on cpu, got .* on meta"),
        ({"w": 3.0}, r"expected a tensor f32\[3, 2\] on cpu, got float"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit_are_refused(tensors: dict[str, torch.Tensor], text: str) -> None:
    with pytest.raises(InputError, match=text):
        processed(tensors)


@pytest.mark.parametrize("given", [torch.randn(2, 3).t(), torch.randn(4, 2)[1:], torch.nn.Parameter(torch.randn(3, 2))])
def test_weights_that_lie_otherwise_in_memory_are_copied(given: torch.Tensor) -> None:
    held = processed({"w": given}).template.values[0]
    assert_same(held, given.detach().contiguous().clone())
    assert not held.requires_grad


def test_a_weight_that_is_written_is_not_copied() -> None:
    text = r"weight 'w': the graph writes it, so it must lie in memory as f32\[3, 2\], got f32\[3, 2\]\{1,3\}"
    with pytest.raises(InputError, match=text):
        processed({"w": torch.randn(2, 3).t()}, written=True)


def test_the_geometry_is_what_the_graph_was_made_for() -> None:
    _, graph = scaled_linear()
    assert graph.inputs[0].meta is intern_meta((3, 2), (2, 1), 0, torch.float32)
