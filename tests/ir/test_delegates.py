"""Compiled regions around interpreted kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from builder import VISIT, Built, Program, aten, built, random_graph, visiting
from harness import assert_same

from lazy_backend.lowering.blocks.stretches import makes_views
from lazy_backend.lowering.checks.refusals import NodeError
from lazy_backend.lowering.interpreter.graph_executor import GraphExecutor
from lazy_backend.lowering.interpreter.kernels import make_kernels
from lazy_backend.lowering.interpreter.parallel import ParallelGraphExecutor
from lazy_backend.lowering.interpreter.serial import SerialGraphExecutor
from lazy_backend.lowering.ir.graph import Graph, Node, check_graph, meta_of
from lazy_backend.lowering.ir.program import Fresh, Token
from lazy_backend.lowering.plans.policy import at_once
from lazy_backend.lowering.serving.partition import Supported, partition
from lazy_backend.lowering.serving.regions import DelegateKernel


def compiled_parts(program: Built, supported: Supported, backend: str = "aot_eager") -> list[DelegateKernel | Node]:
    return [
        DelegateKernel(part, program.constants, at_once(backend)) if isinstance(part, Graph) else part
        for part in partition(program.graph, supported)
    ]


def run(
    program: Built,
    supported: Supported,
    backend: str = "aot_eager",
    executor: type[GraphExecutor] = SerialGraphExecutor,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The outputs, and the inputs afterwards."""
    inputs = program.fresh()
    kernels = make_kernels(program.graph, compiled_parts(program, supported, backend))
    outputs = executor(program.graph, kernels).execute(list(inputs), program.constants, program.seeds())
    return outputs, inputs


def names(program: Built, supported: Supported) -> list[list[str] | str]:
    """Each part: the names of a region's nodes, or the one name of a node."""
    return [
        [node.name.removeprefix("aten.") for node in part.nodes] if isinstance(part, Graph) else part.name
        for part in partition(program.graph, supported)
    ]


def no_visit(node: Node) -> bool:
    return node.op is not VISIT


# ----- regions


def test_a_graph_that_a_compiler_takes_is_one_region() -> None:
    program = random_graph(1)
    (region,) = partition(program.graph, lambda node: True)
    assert isinstance(region, Graph)
    assert region.outputs == program.graph.outputs
    assert len(region.nodes) == len(program.graph.nodes)


def test_a_graph_that_no_compiler_takes_is_interpreted() -> None:
    program = random_graph(1)
    parts = partition(program.graph, lambda node: False)
    assert set(parts) == set(program.graph.nodes)


def test_regions_around_a_node() -> None:
    program = Program()
    x = program.input(torch.ones(4))
    before = program.call(aten.tanh.default, program.call(aten.mul.Tensor, x, 2))
    after = program.call(aten.add.Tensor, program.call(VISIT, before, 0), x)
    assert names(built(program, after), no_visit) == [["mul", "tanh"], "lazy_test.visit", ["add"]]


def test_what_does_not_wait_for_the_node_is_in_the_first_region() -> None:
    program = Program()
    x = program.input(torch.ones(4))
    visited = program.call(VISIT, x, 0)
    independent = program.call(aten.tanh.default, program.call(aten.mul.Tensor, x, 2))
    total = program.call(aten.add.Tensor, visited, independent)
    assert names(built(program, total), no_visit) == [["mul", "tanh"], "lazy_test.visit", ["add"]]


def test_a_write_stays_behind_the_reader_before_it() -> None:
    program = Program()
    x = program.input(torch.ones(4))
    visited = program.call(VISIT, x, 0)
    program.call(aten.add_.Tensor, x, 1)
    assert names(built(program, visited), no_visit) == ["lazy_test.visit", ["add_"]]


def test_views_are_made_again_in_each_part() -> None:
    program = Program()
    base = program.call(aten.mul.Tensor, program.input(torch.ones(2, 2)), 2)
    view = program.call(aten.t.default, base)
    visited = program.call(VISIT, view, 0)
    graph = built(program, program.call(aten.add.Tensor, view, visited))
    assert names(graph, no_visit) == [["mul"], "aten.t", "lazy_test.visit", ["t", "add"]]
    assert_same(run(graph, no_visit)[0], graph.outputs)


@pytest.mark.parametrize("seed", range(30))
def test_every_node_is_in_one_part_and_regions_are_well_formed(seed: int) -> None:
    graph = random_graph(seed).graph
    parts = partition(graph, lambda node: "mul" not in node.name and "cat" not in node.name)
    found: list[Node] = []
    for part in parts:
        if isinstance(part, Graph):
            check_graph(part)
        found += [n for n in (part.nodes if isinstance(part, Graph) else [part]) if not makes_views(n)]
    assert len(found) == len(set(found))
    assert set(found) == {node for node in graph.nodes if not makes_views(node)}


# ----- results


@pytest.mark.parametrize("executor", [SerialGraphExecutor, ParallelGraphExecutor])
@pytest.mark.parametrize("seed", range(12))
def test_random_graphs_run_as_interpreted(executor: type[GraphExecutor], seed: int) -> None:
    program = random_graph(seed, length=24)
    inputs = program.fresh()
    expected = SerialGraphExecutor(program.graph).execute(list(inputs), program.constants, program.seeds())
    found = run(program, lambda node: node.name not in ("aten.tanh", "aten.mm", "aten.add_"), executor=executor)
    assert_same(found, (expected, inputs))


def test_one_through_inductor() -> None:
    program = Program()
    x, y = program.input(torch.randn(8, 8)), program.input(torch.randn(8, 8))
    scaled = program.call(aten.mul.Tensor, program.call(aten.mm.default, x, y), 0.5)
    visited = program.call(VISIT, program.call(aten.t.default, scaled), 0)
    program.call(aten.add_.Tensor, y, visited)
    made = built(program, program.call(aten.tanh.default, visited))
    outputs, inputs = run(made, no_visit, "inductor")
    torch.testing.assert_close(outputs, made.outputs)
    torch.testing.assert_close(inputs, made.inputs_after)


def test_a_backend_that_runs_the_module_as_it_is() -> None:
    program = random_graph(3, length=12)
    assert not program.graph.num_seeds
    assert_same(run(program, lambda node: node.name != "aten.tanh", "eager"), (program.outputs, program.inputs_after))


@torch.library.custom_op("lazy_test::transposing", mutates_args=())
def transposing(x: torch.Tensor) -> torch.Tensor:
    """A copy whose strides are not those that its fake kernel promises."""
    return x.t().contiguous().t()


@transposing.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def transposed_at_run_time(program: Program, grid: torch.Tensor) -> Token:
    """A result that is recorded with the strides of `grid` and computed with others."""
    token = program.call(torch.ops.lazy_test.transposing.default, program.input(grid))
    (result,) = program.calls[-1].results
    assert isinstance(result, Fresh)
    program.calls[-1] = replace(program.calls[-1], results=(replace(result, meta=meta_of(grid)),))
    return token


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_region_takes_operands_with_other_strides_than_recorded(backend: str) -> None:
    program, grid = Program(), torch.arange(6.0).reshape(2, 3)
    doubled = program.call(aten.mul.Tensor, transposed_at_run_time(program, grid), 2)
    outputs, _ = run(built(program, doubled), lambda node: node.name == "aten.mul", backend)
    torch.testing.assert_close(outputs, [grid * 2])


def test_an_operand_with_other_strides_is_written_too() -> None:
    program, grid = Program(), torch.arange(6.0).reshape(2, 3)
    odd = transposed_at_run_time(program, grid)
    program.call(aten.add_.Tensor, odd, 1)
    outputs, _ = run(built(program, program.call(VISIT, odd, 0)), lambda node: node.name == "aten.add_")
    torch.testing.assert_close(outputs, [grid + 1])


def test_an_error_of_values_in_a_region_names_the_call() -> None:
    program = Program()
    table, index = program.input(torch.ones(3)), program.input(torch.tensor([1]))
    picked = program.call(aten.index.Tensor, table, [index])
    graph = built(program, program.call(aten.add.Tensor, picked, 1))
    graph.inputs[1] = torch.tensor([7])
    with pytest.raises(NodeError, match=r"out of bounds(.|\n)*aten.index\(.*\n  recorded at step.py:1"):
        run(graph, lambda node: True)


def test_an_error_between_regions_names_its_node() -> None:
    program = Program()
    x = program.input(torch.ones(3))
    graph = built(program, program.call(VISIT, program.call(aten.tanh.default, x), 0))
    with visiting({0: None}), pytest.raises(RuntimeError, match=r"recorded at step\.py:2"):
        run(graph, no_visit)
