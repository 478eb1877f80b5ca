"""Guessing what numbers of a program have in common, and checking it."""

from __future__ import annotations

import pytest
import torch
from builder import Program

from lazy_backend.lowering.ir.graph import Graph
from lazy_backend.lowering.ir.shapes import Size, generalise, input_sizes, numbers_of, skeleton, symbolic_graph

aten = torch.ops.aten


def sizes_of(*samples: tuple[int, ...], inputs: int = 1, symbols: int = 4) -> str:
    """What the numbers of `samples` are; the first `inputs` of them are sizes of inputs."""
    found = generalise(samples, range(inputs), symbols)
    return "none" if found is None else ", ".join(map(repr, found.sizes))


def test_equal_numbers_are_constants() -> None:
    assert sizes_of((8, 3), (16, 3)) == "s0, 3"


def test_multiples_sums_and_products() -> None:
    assert sizes_of((8, 32, 9, 64, 17), (10, 40, 11, 100, 21)) == "s0, 4*s0, s0 + 1, s0*s0, 2*s0 + 1"


def test_two_sizes_of_inputs_are_two_symbols() -> None:
    assert sizes_of((4, 40, 160), (8, 48, 384), inputs=2) == "s0, s1, s0*s1"


def test_an_input_a_little_larger_is_no_symbol_of_its_own() -> None:
    assert sizes_of((40, 41), (48, 49), inputs=2) == "s0, s0 + 1"


def test_inputs_that_only_happen_to_be_multiples_are_independent() -> None:
    assert sizes_of((4, 40), (8, 80), inputs=2) == "s0, s1"


def test_a_number_that_nothing_explains_is_a_symbol() -> None:
    assert sizes_of((64, 3), (64, 5)) == "64, s0"
    assert sizes_of((8, 3, 4), (16, 11, 12)) == "s0, s0 + -5, s0 + -4"


def test_more_samples_refine_a_guess() -> None:
    """Batch and length doubled together, as it seemed."""
    assert sizes_of((4, 64), (8, 128)) == "s0, 16*s0"
    assert sizes_of((4, 64), (8, 128), (8, 64)) == "s0, s1"


def test_more_symbols_than_allowed_is_no_guess() -> None:
    assert sizes_of((2, 5, 9), (3, 8, 20), inputs=3, symbols=2) == "none"


@pytest.mark.parametrize(
    ("numbers", "bound"), [((12, 48), (12,)), ((12, 47), None), ((0, 0), (0,)), ((12,), None), ((-3, -12), (-3,))]
)
def test_every_number_is_checked(numbers: tuple[int, ...], bound: tuple[int, ...] | None) -> None:
    sizes = generalise(((8, 32), (10, 40)), [0], 4)
    assert sizes is not None
    assert sizes.bind(numbers) == bound


def test_sizes_survive_json() -> None:
    sizes = generalise(((8, 32, 9), (10, 40, 11)), [0], 4)
    assert sizes is not None
    assert type(sizes).from_json(sizes.to_json()) == sizes
    assert Size.from_json(Size((((0, 1), 4), ((), 1))).to_json()).at((2, 3)) == 25


def graph_of(count: int, width: int = 3) -> Graph:
    """x.view(-1) * 2, of a [count, width] input."""
    program = Program()
    x = program.input(torch.ones(count, width))
    flat = program.call(aten.view.default, x, [count * width])
    return program.graph(program.call(aten.mul.Tensor, flat, 2))


def test_graphs_of_one_skeleton_differ_in_numbers_only() -> None:
    assert skeleton(graph_of(4)) == skeleton(graph_of(6))
    assert numbers_of(graph_of(4)) == (4, 3, 3, 1, 0, 12, 2)
    assert input_sizes(graph_of(4)) == [0, 1]


def test_a_symbolic_graph_prints_its_sizes() -> None:
    samples = numbers_of(graph_of(4)), numbers_of(graph_of(6))
    sizes = generalise(samples, [0, 1], 4)
    assert sizes is not None
    symbolic = symbolic_graph(graph_of(6), sizes)
    assert symbolic.hints == (6,)
    assert str(symbolic.graph.nodes[0]) == "%1: f32[18] = aten.view(%0, [3*s0])"
    assert [repr(size) for size in symbolic.inputs[0].shape] == ["s0", "3"]
