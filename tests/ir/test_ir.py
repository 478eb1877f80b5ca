"""The graph's parts: metas, printing, and what `check_graph` refuses."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from builder import CPU, Program, aten

from lazy_backend.lowering.ir.graph import (
    Constant,
    Graph,
    MalformedGraph,
    Node,
    Value,
    check_graph,
    contiguous_stride,
    intern_meta,
    map_arg,
    meta_of,
    print_arg,
)

F32 = intern_meta((2,), (1,), 0, torch.float32)


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.ones(2, 3), "f32[2, 3]"),
        (torch.ones(()), "f32[]"),
        (torch.ones(2, 3).t(), "f32[3, 2]{1,3}"),
        (torch.ones(6)[2:], "f32[4]@2"),
        (torch.ones(1, dtype=torch.bfloat16), "bf16[1]"),
        (torch.ones(1, dtype=torch.uint8), "u8[1]"),
        (torch.ones(1, dtype=torch.int64), "i64[1]"),
        (torch.ones(1, dtype=torch.bool), "bool[1]"),
        (torch.ones(1, dtype=torch.complex64), "c64[1]"),
        (torch.ones(2, 0, 3), "f32[2, 0, 3]"),
        (torch.ones(3, 1).expand(3, 4), "f32[3, 4]{1,0}"),
    ],
)
def test_a_meta_prints(tensor: torch.Tensor, text: str) -> None:
    assert str(meta_of(tensor)) == text


def test_equal_metas_are_one_object() -> None:
    assert meta_of(torch.ones(2, 3)) is meta_of(torch.zeros(2, 3))
    assert meta_of(torch.ones(2, 3)) is not meta_of(torch.ones(2, 3).t())


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (2, 0, 3), (0,), (1, 1)])
def test_contiguous_strides_are_torchs(shape: tuple[int, ...]) -> None:
    assert contiguous_stride(shape) == torch.empty(shape).stride()


def test_a_meta_knows_its_bytes() -> None:
    assert meta_of(torch.ones(2, 3, dtype=torch.float64)).nbytes == 48


@pytest.mark.parametrize("value", [1, True, None, "sum", torch.float32, 1.5, (1, (True, 2))])
def test_equal_texts_are_equal_arguments(value: object) -> None:
    others = [1, True, None, "sum", "1", torch.float32, 1.5, (1, (True, 2)), (1, True, 2), (1,), 2]
    assert [other for other in others if print_arg(other) == print_arg(value)] == [
        other for other in others if type(other) is type(value) and other == value
    ]


def test_map_arg_keeps_the_nesting() -> None:
    assert map_arg(lambda leaf: leaf + 1, (1, (2, 3))) == (2, (3, 4))


def well_formed() -> Graph:
    program = Program()
    x = program.input(torch.ones(2))
    y = program.call(aten.mul.Tensor, x, 2.0)
    return program.graph(program.call(aten.add.Tensor, y, y))


def node(op: torch._ops.OpOverload, args: tuple, outputs: tuple, mutates: tuple = (), seed: int | None = None) -> Node:
    return Node(op, args, (), outputs, mutates, returns_list=False, seed=seed, site="")


def test_a_well_formed_graph_passes() -> None:
    graph = well_formed()
    assert check_graph(graph) is graph


x, y, z = (Value(number, F32, storage) for number, storage in ((0, 0), (1, 1), (2, 2)))
neg = node(aten.neg.default, (x,), (y,))


@pytest.mark.parametrize(
    ("rule", "nodes", "inputs", "outputs"),
    [
        ("an operand is used before it is defined", [node(aten.neg.default, (z,), (y,))], [x], [y]),
        ("a mutated value is no operand", [node(aten.neg.default, (x,), (y,), (z,))], [x], [y]),
        ("a number is used twice", [neg, node(aten.neg.default, (x,), (Value(1, F32, 5),))], [x], [y]),
        ("a seed is out of range", [node(aten.rand_like.default, (x,), (y,), seed=0)], [x], [y]),
        ("two inputs share a storage", [neg], [x, Value(7, F32, 0)], [y]),
        ("an output is no result of a node", [neg], [x], [x]),
        ("two outputs share a storage", [neg, node(aten.neg.default, (x,), (Value(2, F32, 1),))], [x], "both"),
    ],
)
def test_a_broken_rule_is_named(rule: str, nodes: list[Node], inputs: list[Value], outputs) -> None:
    if outputs == "both":
        outputs = [n.outputs[0] for n in nodes]
    graph = Graph(tuple(inputs), tuple(nodes), tuple(outputs), 0, 0, CPU)
    with pytest.raises(MalformedGraph, match=f"malformed graph: {rule}"):
        check_graph(graph)


def test_a_constant_beyond_the_count_is_refused() -> None:
    graph = dataclasses.replace(well_formed(), num_constants=0)
    with pytest.raises(MalformedGraph, match="constant"):
        check_graph(graph)


def test_numbers_that_fall_are_refused() -> None:
    high, low = Value(5, F32, 1), Value(3, F32, 2)
    nodes = (node(aten.neg.default, (x,), (high,)), node(aten.neg.default, (high,), (low,)))
    with pytest.raises(MalformedGraph, match="number"):
        check_graph(Graph((x,), nodes, (low,), 0, 0, CPU))


def test_the_error_shows_the_graph() -> None:
    with pytest.raises(MalformedGraph, match=r"graph\(%0: f32\[2\]"):
        check_graph(Graph((x,), (neg,), (x,), 0, 0, CPU))


def test_parts_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        x.number = 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        neg.site = "elsewhere"


def test_constants_print_by_place() -> None:
    assert repr(Constant(3)) == "c3"


def test_an_overload_that_says_more_is_named() -> None:
    assert node(aten.add.out, (), ()).name == "aten.add.out"
    assert neg.name == "aten.neg"
