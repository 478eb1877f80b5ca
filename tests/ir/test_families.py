"""Which plan a shape of a program gets, and what is said when there is none. No device, no compiler."""

from __future__ import annotations

from dataclasses import replace

import torch
from builder import Program, aten

from lazy_backend.cache.computation_cache import Key
from lazy_backend.lowering.ir.graph import Graph
from lazy_backend.lowering.ir.portable import StoredGraph
from lazy_backend.lowering.plans.families import Family, Member, TooManyShapes
from lazy_backend.lowering.plans.policy import CompilePolicy, FusionStrategy
from lazy_backend.lowering.plans.specialise import CompileReport

POLICY = CompilePolicy("eager", enabled=True, num_profiled_runs=1, max_specializations=4, max_compiled_nodes=1000)


def policy(static: int = 1, dynamic: int = 3, symbols: int = 4) -> CompilePolicy:
    return replace(POLICY, strategy=FusionStrategy(static, dynamic, symbols))


def member(*shape: int) -> Member:
    program = Program()
    x = program.input(torch.ones(shape))
    graph: Graph = program.graph(program.call(aten.mul.Tensor, program.call(aten.exp.default, x), 2))
    return Member(StoredGraph(graph), Key((("graph", graph.text()),)))


class Shapes:
    """A `Family`, what it reported, and whether each member that asked got a plan: its own, a shared one, none."""

    def __init__(self) -> None:
        self.reports: list[CompileReport] = []
        self.family = Family(self.reports.append)

    def ask(self, *members: Member, policy: CompilePolicy = POLICY) -> list[str]:
        found = []
        for member in members:
            plan = self.family.plan_for(member, [], frozenset(), policy)
            found.append("own" if member.is_static else "none" if plan is None else "shared")
        return found

    def limits(self) -> list[str]:
        return [str(report.error) for report in self.reports if report.stage == "limited"]


def test_the_first_shape_has_its_own_plan_and_the_others_share_one() -> None:
    shapes = Shapes()
    assert shapes.ask(member(4), member(6), member(9)) == ["own", "shared", "shared"]
    assert shapes.limits() == []


def test_one_message_for_a_program_past_its_limits() -> None:
    shapes, limited = Shapes(), policy(symbols=1)
    members = [member(2 + n, 3 + 3 * n * n) for n in range(8)]
    assert shapes.ask(*members, *members, policy=limited)[1:8] == ["none"] * 7
    assert len(shapes.limits()) == 1


def test_the_message_names_program_shapes_limits_and_remedy() -> None:
    shapes, limited = Shapes(), policy(static=1, dynamic=0)
    first, second = member(4), member(6)
    shapes.ask(first, second, policy=limited)
    assert second.key is not None
    assert shapes.limits() == [
        f"the program {second.key.hash_hex()[:8]} of 2 nodes came back with 2 shapes, more than its limits allow: "
        "max_static_shapes = 1, max_dynamic_shapes = 0, max_symbols = 4\n"
        "  it starts at step.py:1; shapes that fit none of its plans are interpreted from now on, "
        "with the same results, only slower\n"
        "  pad sizes or sort them into buckets, or raise lazy_backend.config.max_dynamic_shapes"
    ]


def test_a_wrong_guess_too_many() -> None:
    """Rows and columns grow together, then they do not: the second guess is not allowed."""
    shapes, limited = Shapes(), policy(dynamic=1)
    asked = shapes.ask(member(2, 4), member(3, 5), member(4, 6), member(4, 9), policy=limited)
    assert asked == ["own", "shared", "shared", "none"]
    assert "raise lazy_backend.config.max_dynamic_shapes" in shapes.limits()[0]


def test_raised_limits_are_heeded() -> None:
    shapes, shape = Shapes(), member(6)
    assert shapes.ask(member(4), shape, policy=policy(dynamic=0)) == ["own", "none"]
    assert isinstance(shape.limited, TooManyShapes)
    assert shapes.ask(shape, policy=policy(dynamic=1)) == ["shared"]
    assert shape.limited is None


def test_more_symbols_are_heeded() -> None:
    shapes, shape = Shapes(), member(6, 17)
    assert shapes.ask(member(4, 5), shape, policy=policy(symbols=1)) == ["own", "none"]
    assert shapes.ask(shape, policy=policy(symbols=2)) == ["shared"]


def test_sizes_that_are_no_symbols_have_plans_of_their_own() -> None:
    shapes = Shapes()
    assert shapes.ask(member(4, 5), member(1, 5), member(6, 5), member(0, 5)) == ["own", "own", "shared", "own"]


def test_too_many_of_those_pass_the_limits() -> None:
    shapes = Shapes()
    asked = shapes.ask(member(4, 5), member(6, 7), *[member(1, n) for n in range(3, 9)])
    assert asked == ["own", "shared", "own", "own", "own", "own", "none", "none"]
    assert len(shapes.limits()) == 1
    assert "raise lazy_backend.config.max_static_shapes" in shapes.limits()[0]


def test_a_symbolic_plan_outlives_its_samples_graph() -> None:
    shapes, first, second = Shapes(), member(4), member(6)
    shapes.ask(first, second)
    assert second.stored.set_aside()
    plan = shapes.family.plan_for(member(9), [], frozenset(), POLICY)
    assert plan is not None
    (made,) = plan.execute([torch.zeros(9)], [], [])
    assert made.tolist() == [2.0] * 9


def test_a_guess_from_a_sample_that_is_set_aside() -> None:
    shapes = Shapes()
    members = [member(2, 4), member(3, 5), member(4, 6)]
    shapes.ask(*members)
    for one in members:
        assert one.stored.set_aside()
    assert shapes.ask(member(4, 9), members[0], members[2]) == ["shared", "own", "shared"]


def test_a_flushed_member_takes_the_shared_plan_along() -> None:
    shapes, first, second = Shapes(), member(4), member(6)
    shapes.ask(first, second)
    shapes.family.forget(second)
    assert shapes.ask(second) == ["shared"]
    assert [report.stage for report in shapes.reports] == ["compiled"] * 2


def test_a_flushed_member_gives_back_its_place() -> None:
    shapes, first = Shapes(), member(4)
    shapes.ask(first, member(6))
    shapes.family.forget(first)
    assert shapes.ask(member(8), first) == ["own", "shared"]
