"""Graphs as bytes and back: the same text, sites and storages, whatever stands in them; the rest is refused by name."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from builder import CPU, Program, aten
from harness import grid
from random_programs import random_program

import lazy_backend
from lazy_backend.execution import inspection
from lazy_backend.lowering.interpreter.serial import SerialGraphExecutor
from lazy_backend.lowering.ir.graph import Constant, Graph, Node, Value, check_graph, intern_meta
from lazy_backend.lowering.ir.portable import NotPortable, StoredGraph, from_bytes, to_bytes


def values_of(graph: Graph) -> list[Value]:
    made = [value for node in graph.nodes for value in node.outputs if value is not None]
    return [*graph.inputs, *made]


def assert_survives(graph: Graph) -> Graph:
    """`graph`, after it went through bytes and came back the same."""
    found = check_graph(from_bytes(to_bytes(graph)))
    assert found.text() == graph.text()
    assert str(found) == str(graph)  # with the user's lines
    for one, other in zip(values_of(found), values_of(graph), strict=True):
        assert (one.number, one.storage) == (other.number, other.storage)
        assert one.meta is other.meta
    for one, other in zip(found.nodes, graph.nodes, strict=True):
        assert one.op is other.op
        assert (one.returns_list, one.seed, one.site) == (other.returns_list, other.seed, other.site)
        assert [value.number for value in one.mutates] == [value.number for value in other.mutates]
    assert found.device == graph.device
    return found


# ----- programs

META = intern_meta((2, 3), (3, 1), 0, torch.float32)


def literal(*args: Any, op: torch._ops.OpOverload = aten.add.Tensor, **kwargs: Any) -> Graph:
    """One call of `op` with an input and these arguments, which no operator has to accept: nothing runs."""
    x, y = Value(0, META, 0), Value(1, META, 1)
    node = Node(op, (x, *args), tuple(kwargs.items()), (y,), (), False, None, "train.py:3")
    return Graph((x,), (node,), (y,), 2, 0, CPU)


LITERALS = {
    "none": None,
    "true": True,
    "false": False,
    "int": -(2**62),
    "text": 'with "quotes", \\ and ü',
    "text_that_looks_like_a_kind": "value",
    "float": 0.1,
    "minus_zero": -0.0,
    "tiny": 5e-324,
    "nan": math.nan,
    "inf": math.inf,
    "minus_inf": -math.inf,
    "complex": complex(0.1, -0.0),
    "complex_nan": complex(math.nan, -math.inf),
    "constant": Constant(1),
    "empty_list": (),
    "list": (1, 2, -3),
    "list_of_lists": ((1, None), (), (True, (0.5, "a"))),
    "size": torch.Size([2, 3]),
    "device": CPU,
    "device_with_index": torch.device("cuda", 1),
    "layout": torch.strided,
    **{str(dtype): dtype for dtype in (torch.bfloat16, torch.bool, torch.complex32, torch.float8_e4m3fn, torch.uint16)},
    **{
        str(form): form
        for form in (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
    },
}


@pytest.mark.parametrize("name", LITERALS)
def test_an_argument_survives(name: str) -> None:
    assert_survives(literal(LITERALS[name]))
    assert_survives(literal(other=LITERALS[name]))
    assert_survives(literal((LITERALS[name],)))


@pytest.mark.parametrize("name", LITERALS)
def test_an_argument_keeps_its_type(name: str) -> None:
    (node,) = from_bytes(to_bytes(literal(LITERALS[name]))).nodes
    expected = tuple if isinstance(LITERALS[name], tuple) else type(LITERALS[name])
    assert type(node.args[1]) is expected


def test_a_float_keeps_its_bits() -> None:
    for value in (0.1, -0.0, 5e-324, math.pi * 1e300):
        (node,) = from_bytes(to_bytes(literal(value))).nodes
        assert node.args[1].hex() == value.hex()


def traced(program: Callable[[], torch.Tensor | list[torch.Tensor]]) -> Graph:
    """The graph that the recorder makes of `program`."""
    made = program()
    return inspection.post_order_of(made if isinstance(made, list) else [made]).graph  # type: ignore[arg-type]


def written_in_place() -> torch.Tensor:
    x = grid("lazy", 4, 6)
    x[1].mul_(2)
    x.t()[0] = 5
    return x.add(1)


def with_views() -> torch.Tensor:
    x = torch.complex(grid("lazy", 4), grid("lazy", 4))
    return torch.view_as_real(x.conj().resolve_conj())[:, 1:].t() + x.imag


PROGRAMS: dict[str, Callable[[], torch.Tensor | list[torch.Tensor]]] = {
    "constants": lambda: grid("lazy", 4) * 2.5 + 0.5,
    "nan_and_inf": lambda: (grid("lazy", 4) * math.nan).clamp(-math.inf, math.inf),
    "shapes_from_floats": lambda: torch.arange(0.0, 2.0, 0.5, device="lazy"),
    "complex": lambda: grid("lazy", 4) * (1 + 2j),
    "dtype": lambda: torch.zeros(3, dtype=torch.bfloat16, device="lazy").to(torch.float64),
    "memory_format": lambda: grid("lazy", 1, 2, 3, 4).contiguous(memory_format=torch.channels_last) + 1,
    "multi_output": lambda: list(grid("lazy", 4, 6).max(1)),
    "one_of_several_outputs": lambda: torch.nn.functional.layer_norm(grid("lazy", 4, 6), (6,)),
    "list_result": lambda: list(torch._foreach_mul([grid("lazy", 4), grid("lazy", 2, 3)], [1.0, 2.0])),
    "list_of_views": lambda: grid("lazy", 4, 6).split([1, 2, 3], 1)[1] + 1,
    "optional_tensors": lambda: (grid("lazy", 4, 6) + 0)[:, torch.tensor([1, 2], device="lazy")],
    "written_in_place": written_in_place,
    "views": with_views,
    "seeds": lambda: torch.nn.functional.dropout(grid("lazy", 4)) + torch.rand(4, device="lazy"),
    "keywords": lambda: torch.add(grid("lazy", 4), grid("lazy", 4), alpha=2).sum(0, keepdim=True, dtype=torch.float64),
    "out": lambda: torch.add(grid("lazy", 4), 1, out=torch.empty(4, device="lazy")),
    "text": lambda: grid("lazy", 4).div(2, rounding_mode="floor"),
    "nothing_recorded_but_a_factory": lambda: torch.full((2, 0), 3, device="lazy"),
    "dunder": lambda: grid("lazy", 4, dtype=torch.int64).__iand__(3) + 1,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_recorded_graph_survives(name: str) -> None:
    assert_survives(traced(PROGRAMS[name]))


def test_a_graph_that_holds_values_is_refused() -> None:
    graph = replace(literal(1), held=(Value(7, META, 7),))
    with pytest.raises(NotPortable, match="holds values: %7"):
        to_bytes(graph)
    assert not StoredGraph(graph).set_aside()


def watch_graphs(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """The graphs that are recorded from here on, each of which is to survive."""
    seen: list[Graph] = []
    # every new graph is checked before it runs
    module = sys.modules["lazy_backend.execution.computations"]
    monkeypatch.setattr(module, "check_graph", lambda graph: seen.append(assert_survives(graph)))
    return seen


@pytest.mark.parametrize("seed", range(500, 540))
def test_every_graph_of_a_random_program_survives(seed: int, monkeypatch) -> None:
    seen = watch_graphs(monkeypatch)
    random_program(seed).run("lazy", lazy_backend.mark_step)
    assert seen


def test_a_graph_of_a_training_step_survives(monkeypatch) -> None:
    seen = watch_graphs(monkeypatch)
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Dropout()).to("lazy")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(2):
        optimizer.zero_grad()
        model(grid("lazy", 2, 1, 5, 5)).square().mean().backward()
        optimizer.step()
        lazy_backend.mark_step()
    assert max(len(graph.nodes) for graph in seen) > 20


def test_a_graph_that_came_back_computes_the_same() -> None:
    program, x = Program(), torch.arange(4.0)
    graph = program.graph(program.call(aten.mul.Tensor, program.input(x), 2.0))
    expected = SerialGraphExecutor(graph).execute([x.clone()], [3.0], [])
    found = SerialGraphExecutor(assert_survives(graph)).execute([x.clone()], [3.0], [])
    assert torch.equal(found[0], expected[0])


def test_a_graph_without_nodes_survives() -> None:
    assert_survives(Graph((), (), (), 0, 0, torch.device("cuda", 1)))


def test_a_custom_operator_survives() -> None:
    @torch.library.custom_op("lazy_portable::twice", mutates_args={"x"})
    def twice(x: torch.Tensor) -> None:
        x.mul_(2)

    assert_survives(literal(op=torch.ops.lazy_portable.twice.default))


def test_equal_graphs_have_equal_bytes() -> None:
    assert to_bytes(literal(1)) == to_bytes(literal(1))


def test_the_bytes_are_json() -> None:
    json.loads(to_bytes(traced(PROGRAMS["nan_and_inf"])))


# ----- what is refused


@pytest.mark.parametrize(
    ("value", "kind"), [(torch.ones(1), "Tensor"), (print, "builtin_function_or_method"), (object(), "object")]
)
def test_what_has_no_text_is_refused_by_its_type(value: object, kind: str) -> None:
    with pytest.raises(NotPortable, match=f"a {kind} has no text"):
        to_bytes(literal(value))


@pytest.mark.parametrize(
    "name", ["lazy_nowhere::op", "lazy_nowhere::op.out", "aten::no_such_operator", "aten::add.no_such_overload"]
)
def test_an_unknown_operator_is_refused_by_its_name(name: str) -> None:
    data = to_bytes(literal()).replace(b"aten::add.Tensor", name.encode())
    with pytest.raises(NotPortable, match=f"operator {name} is not registered in this process"):
        from_bytes(data)


def test_an_operator_whose_library_is_gone_is_refused() -> None:
    library = torch.library.Library("lazy_portable_gone", "DEF")
    library.define("op(Tensor x) -> Tensor")
    data = to_bytes(literal(op=torch.ops.lazy_portable_gone.op.default))
    library._destroy()
    with pytest.raises(NotPortable, match="lazy_portable_gone::op is not registered"):
        from_bytes(data)
