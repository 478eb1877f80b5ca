"""Lifetimes, and buffers that several results share."""

from __future__ import annotations

import pytest
import torch
from builder import CPU, VISIT, Built, Program, aten, built, chain, random_graph
from expecttest import assert_expected_inline
from harness import assert_same

from lazy_backend.lowering.interpreter.frame import ExecutionFrame
from lazy_backend.lowering.interpreter.graph_executor import GraphExecutor
from lazy_backend.lowering.interpreter.kernels import make_kernels
from lazy_backend.lowering.interpreter.layout import (
    LayoutPlan,
    MemoryMeter,
    last_uses,
    out_variant,
    peak_bytes,
    plan_layout,
)
from lazy_backend.lowering.interpreter.parallel import ParallelGraphExecutor
from lazy_backend.lowering.interpreter.serial import SerialGraphExecutor


def run_planned(executor: type[GraphExecutor], program: Built, plan: LayoutPlan) -> list[list[torch.Tensor]]:
    """The outputs, and the inputs afterwards, of two runs in one frame."""
    kernels, found = make_kernels(plan.graph), []
    runner, frame = executor(plan.graph, kernels), ExecutionFrame(plan.new_buffers())
    for _ in range(2):
        inputs = program.fresh()
        frame.fill(kernels.template, inputs, program.constants, program.seeds())
        found.append([*runner.execute_with_prefilled_frame(frame), *inputs])
    return found


# ----- lifetimes


def dying(program: Built) -> list[list[int]]:
    found = last_uses(program.graph.nodes, program.graph.outputs)
    return [sorted(value.number for value in values) for values in found]


def test_a_value_dies_where_it_is_used_last() -> None:
    assert dying(chain(3)) == [[0], [1], [2]]


def test_a_result_that_nobody_reads_dies_at_once() -> None:
    program = Program()
    x = program.input(torch.randn(3, 3))
    values, _ = program.call(aten.max.dim, x, 0)
    assert dying(built(program, values)) == [[0, 2]]


def test_the_peak_of_a_chain_is_two_results() -> None:
    assert peak_bytes(chain(10, size=1024).graph) == 2 * 4096


def test_views_keep_their_storage_alive() -> None:
    program = Program()
    base = program.call(aten.mul.Tensor, program.input(torch.ones(1024)), 2)
    view = program.call(aten.slice.Tensor, base, 0, 0, 2)
    other = program.call(aten.mul.Tensor, program.input(torch.ones(1024)), 3)
    graph = program.graph(program.call(aten.add.Tensor, view, program.call(aten.slice.Tensor, other, 0, 0, 2)))
    assert peak_bytes(graph) == 2 * 4096 + 8


# ----- planning


def test_a_planned_node_writes_where_it_is_told() -> None:
    program = Program()
    x = program.input(torch.ones(2, 2))
    product = program.call(aten.mm.default, x, x)
    graph = built(program, program.call(aten.tanh.default, product)).graph
    assert_expected_inline(
        str(plan_layout(graph, min_bytes=0).graph),
        """\
graph(%0: f32[2, 2]; 0 constants, 0 seeds; held %1: f32[2, 2]) on cpu:
  %1: f32[2, 2] = aten.mm.out(%0, %0, out=%1)  # step.py:1
  %2: f32[2, 2] = aten.tanh(%1)  # step.py:2
  return %2""",
    )


def test_a_chain_needs_two_buffers() -> None:
    program = chain(10, size=1024)
    plan = plan_layout(program.graph)
    assert plan.buffer_bytes == (4096, 4096)
    assert len(plan.placed) == 9  # all but the output
    for found in run_planned(SerialGraphExecutor, program, plan):
        assert_same(found, [*program.outputs, *program.inputs_after])


def test_a_larger_result_enlarges_a_free_buffer() -> None:
    program = Program()
    token = program.input(torch.ones(1024))
    for _ in range(3):
        token = program.call(aten.cat.default, [token, token])
        token = program.call(aten.tanh.default, token)
    plan = plan_layout(program.graph(program.call(aten.sum.default, token)))
    assert plan.buffer_bytes == (8 * 4096, 8 * 4096)


def test_small_results_are_left_to_the_allocator() -> None:
    assert plan_layout(chain(10, size=1023).graph).placed == ()


@pytest.mark.parametrize("executor", [SerialGraphExecutor, ParallelGraphExecutor])
@pytest.mark.parametrize("seed", range(40))
def test_random_graphs_run_the_same_in_buffers(executor: type[GraphExecutor], seed: int) -> None:
    program = random_graph(seed)
    inputs = program.fresh()
    expected = SerialGraphExecutor(program.graph).execute(list(inputs), program.constants, program.seeds())
    for found in run_planned(executor, program, plan_layout(program.graph, min_bytes=0)):
        assert_same(found, [*expected, *inputs])


# ----- what must not be placed


def placed_numbers(program: Program, *wanted) -> list[int]:
    plan = plan_layout(program.graph(*wanted), min_bytes=0)
    return [value.number for value, _ in plan.placed]


def test_an_output_has_memory_of_its_own() -> None:
    program = Program()
    made = program.call(aten.tanh.default, program.input(torch.ones(2)))
    assert placed_numbers(program, made) == []


def test_the_base_of_an_outputs_views_is_the_output() -> None:
    program = Program()
    made = program.call(aten.tanh.default, program.input(torch.ones(2)))
    program.call(aten.add_.Tensor, program.call(aten.slice.Tensor, made, 0, 0, 1), 1)
    assert placed_numbers(program, made) == []


def test_a_buffer_waits_for_the_views_of_what_is_in_it() -> None:
    program = Program()
    x = program.input(torch.ones(2))
    first = program.call(aten.tanh.default, x)
    view = program.call(aten.slice.Tensor, first, 0, 0, 1)
    second = program.call(aten.tanh.default, x)
    graph = program.graph(program.call(aten.add.Tensor, view, second))
    assert len(plan_layout(graph, min_bytes=0).buffer_bytes) == 2


def test_what_an_operator_outside_pytorch_reads_is_not_placed() -> None:
    program = Program()
    made = program.call(aten.tanh.default, program.input(torch.ones(2)))
    assert placed_numbers(program, program.call(VISIT, made, 0)) == []


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.clone.default, ()),  # its variant computes elsewhere and copies
        (aten.add_.Tensor, (1,)),
        (aten.t.default, ()),
        (aten.rand_like.default, ()),
        (aten.max.dim, (0,)),
        (aten.split.Tensor, (1,)),
        (VISIT, (0,)),
    ],
    ids=str,
)
def test_operators_without_a_variant(op: torch._ops.OpOverload, args: tuple[int, ...]) -> None:
    program = Program()
    base = program.call(aten.tanh.default, program.input(torch.ones(2, 2)))
    made = program.call(op, base, *args)
    kept = program.call(aten.clone.default, made[0] if isinstance(made, list) else made)
    node = next(node for node in program.graph(kept).nodes if node.op is op)
    assert out_variant(node, CPU) is None


# ----- measuring


def test_a_meter_counts_each_storage_once() -> None:
    meter, base, foreign = MemoryMeter(frozenset()), torch.ones(4), torch.ones(100)
    meter = MemoryMeter(frozenset([foreign.untyped_storage().data_ptr()]))
    meter.hold(0, base)
    meter.hold(1, base[1:])
    meter.hold(2, foreign)
    assert (meter.current, meter.peak) == (16, 16)
    meter.release(0)
    meter.hold(3, torch.ones(2))
    assert (meter.current, meter.peak) == (24, 24)
    meter.release(1)
    meter.release(1)
    meter.release(2)
    assert (meter.current, meter.peak) == (8, 24)
