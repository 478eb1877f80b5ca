"""From a recorded program to its graph: what is pruned, how values are numbered, what feeds the inputs."""

from __future__ import annotations

import torch
from builder import Program, aten
from expecttest import assert_expected_inline

from lazy_backend.lowering.interpreter.serial import SerialGraphExecutor
from lazy_backend.lowering.ir.canonical import Parameter


def linear(program: Program, width: int = 3):
    x, w = program.input(torch.ones(2, 4)), program.input(torch.ones(4, width))
    return x, w, program.call(aten.mm.default, x, w)


# ----- numbering


def test_a_graph_prints_as_a_program() -> None:
    program = Program()
    _, _, y = linear(program)
    z = program.call(aten.add.Tensor, y, 2.5)
    assert_expected_inline(
        str(program.graph(z)),
        """\
graph(%0: f32[2, 4], %1: f32[4, 3]; 1 constants, 0 seeds) on cpu:
  %2: f32[2, 3] = aten.mm(%0, %1)  # step.py:1
  %3: f32[2, 3] = aten.add(%2, c0)  # step.py:2
  return %3""",
    )


def test_the_key_text_has_no_lines() -> None:
    program = Program()
    _, _, y = linear(program)
    assert "step.py" not in program.graph(y).text()


def test_inputs_are_numbered_by_first_use() -> None:
    program = Program()
    x, y = program.input(torch.ones(2)), program.input(torch.ones(3))
    first = program.call(aten.neg.default, y)
    second = program.call(aten.neg.default, x)
    data = program.canonical(first, second)
    assert [p.index for p in data.parameters] == [1, 0]
    assert data.parameter_sequence == (1, 0)


def test_a_repeated_operand_is_one_input() -> None:
    program = Program()
    x = program.input(torch.ones(2))
    y = program.call(aten.add.Tensor, x, x)
    assert len(program.graph(y).inputs) == 1


def test_lists_stay_lists() -> None:
    program = Program()
    x, y = program.input(torch.ones(2)), program.input(torch.ones(2))
    joined = program.call(aten.cat.default, [x, y], 0)
    assert "aten.cat([%0, %1], 0)" in str(program.graph(joined))


def test_several_results_are_named() -> None:
    program = Program()
    values, places = program.call(aten.max.dim, program.input(torch.ones(2, 3)), 1)
    assert_expected_inline(
        program.graph(values, places).text(),
        """\
graph(%0: f32[2, 3]; 0 constants, 0 seeds) on cpu:
  %1: f32[2], %2: i64[2] = aten.max.dim(%0, 1)
  return %1, %2""",
    )


def test_foreach_results_are_a_list() -> None:
    program = Program()
    x, y = program.input(torch.ones(2)), program.input(torch.ones(3))
    made = program.call(aten._foreach_mul.Scalar, [x, y], 2.0)
    (node,) = program.graph(*made).nodes
    assert node.returns_list
    assert len(node.outputs) == 2


# ----- pruning


def test_dead_code_is_pruned() -> None:
    program = Program()
    x, _, y = linear(program)
    program.call(aten.exp.default, y)
    z = program.call(aten.neg.default, x)
    assert_expected_inline(
        program.graph(z).text(),
        """\
graph(%0: f32[2, 4]; 0 constants, 0 seeds) on cpu:
  %1: f32[2, 4] = aten.neg(%0)
  return %1""",
    )


def test_a_pruned_input_is_marked() -> None:
    program = Program()
    x, _, _ = linear(program)
    data = program.canonical(program.call(aten.neg.default, x))
    assert data.parameter_sequence == (0, -1)


def test_programs_that_differ_in_dead_code_are_equal() -> None:
    def text(dead: bool) -> str:
        program = Program()
        _, w, y = linear(program)
        if dead:
            program.call(aten.add.Tensor, program.call(aten.exp.default, w), 3.0)
        z = program.call(aten.mul.Tensor, y, 2.0)
        return program.graph(z).text()

    assert text(dead=True) == text(dead=False)


def test_a_write_to_an_input_is_kept() -> None:
    program = Program()
    x = program.input(torch.ones(2))
    program.call(aten.add_.Tensor, x, 1)
    graph = program.graph()
    assert graph.mutated_inputs() == (0,)
    assert len(graph.nodes) == 1


def test_a_write_to_a_dead_result_is_pruned() -> None:
    program = Program()
    x = program.input(torch.ones(2))
    y = program.call(aten.neg.default, x)
    program.call(aten.add_.Tensor, y, 1)
    z = program.call(aten.exp.default, x)
    assert len(program.graph(z).nodes) == 1


def test_a_write_through_a_view_of_an_output_is_kept() -> None:
    program = Program()
    x = program.input(torch.ones(2, 3))
    y = program.call(aten.neg.default, x)
    view = program.call(aten.select.int, y, 0, 1)
    program.call(aten.zero_.default, view)
    assert_expected_inline(
        program.graph(y).text(),
        """\
graph(%0: f32[2, 3]; 0 constants, 0 seeds) on cpu:
  %1: f32[2, 3] = aten.neg(%0)
  %2: f32[3]@3 = aten.select.int(%1, 0, 1)
  %2: f32[3]@3 = aten.zero_(%2)
  return %1""",
    )


def test_a_write_after_the_last_read_is_pruned() -> None:
    program = Program()
    x = program.input(torch.ones(2))
    y = program.call(aten.neg.default, x)
    z = program.call(aten.exp.default, y)
    program.call(aten.add_.Tensor, y, 1)
    assert len(program.graph(z).nodes) in (2, 3)  # the storage was wanted: keeping the write is allowed
    assert len(program.graph(y).nodes) == 2


def test_constants_of_dead_code_are_left_out() -> None:
    program = Program()
    x = program.input(torch.ones(2))
    program.call(aten.add.Tensor, x, 1.5)
    y = program.call(aten.add.Tensor, x, 2.5)
    data = program.canonical(y)
    assert data.constants == (1,)
    assert data.graph.num_constants == 1


def test_seeds_of_dead_code_are_left_out() -> None:
    program = Program()
    x = program.input(torch.ones(2))
    program.call(aten.rand_like.default, x)
    y = program.call(aten.rand_like.default, x)
    data = program.canonical(y)
    assert data.seeds == (1,)
    assert "seed=s0" in str(data.graph)


# ----- inputs own their storage


def test_two_views_of_one_storage_enter_as_their_base() -> None:
    program = Program()
    base = torch.arange(8.0)
    left, right = program.input(base[:4], base), program.input(base[2:6], base)
    y = program.call(aten.add.Tensor, left, right)
    data = program.canonical(y)
    assert data.parameters == (Parameter(0, base=True),)
    assert_expected_inline(
        data.graph.text(),
        """\
graph(%0: f32[8]; 0 constants, 0 seeds) on cpu:
  %1: f32[4] = aten.slice(%0, 0, 0, 4)
  %2: f32[4]@2 = aten.slice(%0, 0, 2, 6)
  %3: f32[4] = aten.add(%1, %2)
  return %3""",
    )


def test_views_of_any_geometry_are_made_again() -> None:
    program = Program()
    base = torch.arange(8.0)
    x, y = program.input(base[1::2], base), program.input(base.view(4, 2).t(), base)
    z = program.call(aten.mm.default, y, program.call(aten.view.default, x, [4, 1]))
    (made,) = SerialGraphExecutor(program.graph(z)).execute([base.clone()], [], [])
    assert made.tolist() == (base.view(4, 2).t() @ base[1::2, None]).tolist()


def test_one_view_enters_as_itself() -> None:
    program = Program()
    base = torch.arange(8.0)
    y = program.call(aten.neg.default, program.input(base[2:6], base))
    data = program.canonical(y)
    assert data.parameters == (Parameter(0, base=False),)
    assert "%0: f32[4]@2" in str(data.graph)


def test_the_base_itself_needs_no_view() -> None:
    program = Program()
    base = torch.arange(8.0)
    x, view = program.input(base), program.input(base[2:6], base)
    program.call(aten.zero_.default, view)
    y = program.call(aten.neg.default, x)
    assert "aten.neg(%0)" in program.graph(y).text()


def test_a_view_only_used_in_dead_code_does_not_bring_the_base() -> None:
    program = Program()
    base = torch.arange(8.0)
    left, right = program.input(base[:4], base), program.input(base[2:6], base)
    program.call(aten.neg.default, right)
    y = program.call(aten.neg.default, left)
    assert program.canonical(y).parameters == (Parameter(0, base=False),)


def test_which_input_feeds_which_operand_is_in_the_text() -> None:
    def text(swap: bool) -> str:
        program = Program()
        x, y = program.input(torch.ones(2)), program.input(torch.ones(2))
        first = program.call(aten.add.Tensor, x, y)
        second = program.call(aten.sub.Tensor, *((y, x) if swap else (x, y)))
        return program.graph(first, second).text()

    assert text(swap=True) != text(swap=False)


# ----- effects


def edges(program: Program, *wanted) -> list[set[int]]:
    return program.graph(*wanted).effects()


def test_a_read_follows_the_write() -> None:
    program = Program()
    x = program.input(torch.ones(2))
    program.call(aten.add_.Tensor, x, 1)
    y = program.call(aten.neg.default, x)
    assert edges(program, y) == [set(), {0}]


def test_a_write_follows_the_reads() -> None:
    program = Program()
    x = program.input(torch.ones(2))
    y = program.call(aten.neg.default, x)
    z = program.call(aten.exp.default, x)
    program.call(aten.add_.Tensor, x, 1)
    assert edges(program, y, z) == [set(), set(), {0, 1}]


def test_a_write_follows_a_write() -> None:
    program = Program()
    x = program.input(torch.ones(2))
    program.call(aten.add_.Tensor, x, 1)
    program.call(aten.mul_.Tensor, x, 2)
    assert edges(program) == [set(), {0}]


def test_effects_go_through_views() -> None:
    program = Program()
    x = program.input(torch.ones(2, 3))
    row = program.call(aten.select.int, x, 0, 0)
    other = program.call(aten.select.int, x, 0, 1)
    program.call(aten.zero_.default, row)
    y = program.call(aten.neg.default, other)
    assert edges(program, y)[-1] == {2}


def test_other_storages_are_independent() -> None:
    program = Program()
    x, y = program.input(torch.ones(2)), program.input(torch.ones(2))
    program.call(aten.add_.Tensor, x, 1)
    z = program.call(aten.neg.default, y)
    assert edges(program, z) == [set(), set()]
