"""Plans of a graph: interpreted, lowered to FX, and with promoted scalars, each against eager."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from builder import CPU, Program, aten, built
from expecttest import assert_expected_inline
from harness import as_bytes, assert_same

from lazy_backend.lowering.checks.refusals import NodeError
from lazy_backend.lowering.compilation import compiler
from lazy_backend.lowering.compilation.compiler import compile_graph, lookup_backend
from lazy_backend.lowering.compilation.fx import Signature, to_fx
from lazy_backend.lowering.compilation.plan_kinds import PlanKind
from lazy_backend.lowering.compilation.request import CompileRequest
from lazy_backend.lowering.compilation.scalars import can_promote
from lazy_backend.lowering.interpreter.serial import SerialGraphExecutor
from lazy_backend.lowering.ir.graph import Graph, Node
from lazy_backend.lowering.ir.portable import StoredGraph
from lazy_backend.lowering.plans import profiling
from lazy_backend.lowering.plans.profiling import CompilePolicy, CompileReport, ProfilingGraphExecutor


def scaled(op=aten.mul.Tensor) -> tuple[Graph, torch.Tensor]:
    program, x = Program(), torch.arange(4.0)
    token = program.input(x)
    return program.graph(program.call(op, token, 2.0)), x


# ----- the interpreted plan


def test_the_interpreter_runs_a_graph() -> None:
    graph, x = scaled()
    assert_same(SerialGraphExecutor(graph).execute([x], [3.0], []), [x * 3])


def test_the_interpreter_takes_its_inputs() -> None:
    graph, x = scaled()
    inputs = [x]
    SerialGraphExecutor(graph).execute(inputs, [3.0], [])
    assert inputs == []


def test_the_interpreter_writes_inputs_in_place() -> None:
    program, x = Program(), torch.ones(2)
    program.call(aten.add_.Tensor, program.input(torch.ones(2)), 1)
    SerialGraphExecutor(program.graph()).execute([x], [], [])
    assert x.tolist() == [2.0, 2.0]


def test_an_operators_error_names_node_and_line() -> None:
    graph, _ = scaled()
    with pytest.raises(NodeError) as caught:
        SerialGraphExecutor(graph).execute(["no tensor"], [3.0], [])
    assert "while running %1: f32[4] = aten.mul(%0, c0)\n  recorded at step.py:1" in str(caught.value)
    assert caught.value.__cause__ is not None


def test_the_same_seed_gives_the_same_numbers() -> None:
    program = Program()
    graph = program.graph(program.call(aten.rand_like.default, program.input(torch.ones(8))))
    plan = SerialGraphExecutor(graph)
    one, same, other = (plan.execute([torch.ones(8)], [], [seed])[0] for seed in (7, 7, 8))
    assert_same(one, same)
    assert not torch.equal(one, other)


# ----- FX


def code_of(graph: Graph, constants: list[float], promoted: set[int], numbers: bool = False) -> str:
    module = to_fx(graph, constants, Signature.of(graph, promoted, numbers))
    return "\n".join(line.split(";")[0].rstrip() for line in module.code.strip().splitlines())


def test_a_literal_stays_in_the_code() -> None:
    assert_expected_inline(
        code_of(scaled()[0], [2.0], set()),
        """\
def forward(self, input_0):
    mul_tensor = torch.ops.aten.mul.Tensor(input_0, 2.0)
    return (mul_tensor,)""",
    )


def test_a_promoted_scalar_is_an_element_of_an_input() -> None:
    assert_expected_inline(
        code_of(scaled()[0], [2.0], {0}),
        """\
def forward(self, input_0, scalars):
    select_int = torch.ops.aten.select.int(scalars, 0, 0)
    _to_copy_default = torch.ops.aten._to_copy.default(select_int, dtype = torch.float32)
    mul = input_0 * _to_copy_default
    return (mul,)""",
    )


def test_numbers_are_arguments() -> None:
    assert_expected_inline(
        code_of(scaled()[0], [2.0], set(), numbers=True),
        """\
def forward(self, input_0, c0):
    mul_tensor = torch.ops.aten.mul.Tensor(input_0, c0)
    return (mul_tensor,)""",
    )


def test_a_compiled_plan_holds_for_its_literals() -> None:
    plan = compile_graph(CompileRequest.of(scaled()[0], [2.0], "aot_eager"))
    assert plan.accepts([2.0])
    assert not plan.accepts([2.5])


@pytest.mark.parametrize(("compiled", "accepted"), [(float("nan"), float("nan")), (float("inf"), float("inf"))])
def test_literals_are_compared_bit_by_bit(compiled: float, accepted: float) -> None:
    assert compile_graph(CompileRequest.of(scaled()[0], [compiled], "aot_eager")).accepts([accepted])


def test_minus_zero_is_not_zero() -> None:
    assert not compile_graph(CompileRequest.of(scaled()[0], [0.0], "aot_eager")).accepts([-0.0])


@pytest.mark.parametrize(
    ("op", "sizes"), [(aten.unsafe_split.Tensor, 2), (aten.unsafe_split_with_sizes.default, [1, 3])]
)
def test_writes_through_the_pieces_of_an_unsafe_split_are_seen(op: torch._ops.OpOverload, sizes: Any) -> None:
    """As where an LSTM's cell writes its gates, of which the backward pass makes the pieces again."""
    program = Program()
    whole = program.call(aten.tanh.default, program.input(torch.rand(4)))
    first, second = program.call(op, whole, sizes)
    program.call(aten.mul_.Tensor, first, 3)
    program.call(aten.mul_.Tensor, whole, 5)
    one = built(program, whole, program.call(aten.sin.default, second))
    plan = compile_graph(CompileRequest.of(one.graph, one.constants, "aot_eager"))
    assert_same(plan.execute(one.fresh(), one.constants, []), one.outputs)


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown backend 'nothing'\n.*one of: eager, .*inductor"):
        lookup_backend("nothing")


# ----- promoted scalars against eager

VALUES = (0.1, -1.7, 3.0, 1e-8, 0.0, 1e30, float("inf"), float("nan"))
ORDINARY = (0.1, -1.7, 3.0)
EXACT = [
    aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar, aten.mul.Tensor, aten.div.Tensor, aten.add_.Tensor,
    aten.mul_.Tensor, aten.div_.Tensor, aten.sub_.Tensor, aten.mul.Scalar, aten.add.Scalar, aten.div.Scalar,
    aten.sub.Scalar, aten.clamp_min.default, aten.clamp_max.default, aten.clamp_min_.default,
    aten.gt.Scalar, aten.ge.Scalar, aten.lt.Scalar, aten.le.Scalar, aten.eq.Scalar, aten.ne.Scalar,
]  # fmt: skip
FILLS = [aten.fill.Scalar, aten.fill_.Scalar]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def sample(dtype: torch.dtype) -> torch.Tensor:
    special = torch.tensor([0.0, -0.0, 1.0, float("inf"), float("-inf"), float("nan"), 0.1, 3.0])
    return torch.cat([torch.randn(24) * 3, special]).to(dtype)


Compare = Callable[[torch.Tensor, torch.Tensor, str], None]


def promoted_run(
    program: Program, wanted: list, inputs: list[torch.Tensor], constants: list[float]
) -> list[torch.Tensor]:
    """Run the program with every constant promoted, as `scalars` in an FX module that runs as it is."""
    graph = program.graph(*wanted)
    assert all(can_promote(node) for node in graph.nodes)
    signature = Signature.of(graph, range(graph.num_constants))
    module = to_fx(graph, [float("nan")] * graph.num_constants, signature)
    packed = torch.tensor([constants[place] for place in signature.scalars], dtype=torch.float64)
    return list(module(*inputs, packed))


def assert_bits(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert actual.dtype == expected.dtype, what
    # a NaN's payload is nobody's promise
    nan = torch.tensor(float("nan"), dtype=expected.dtype) if expected.is_floating_point() else None
    if nan is not None:
        actual, expected = (torch.where(t.isnan(), nan, t) for t in (actual, expected))
    assert as_bytes(actual) == as_bytes(expected), f"{what}\n{actual}\nis not\n{expected}"


def assert_near(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Within a few roundings of the tensor's type; small results of a cancellation within those of its terms."""
    if not expected.is_floating_point():
        assert_bits(actual, expected, what)
        return
    eps = torch.finfo(expected.dtype).eps
    torch.testing.assert_close(
        actual, expected, rtol=4 * eps, atol=16 * eps, equal_nan=True, msg=lambda text: f"{what}: {text}"
    )


def assert_promotes(op: torch._ops.OpOverload, dtype: torch.dtype, value: float, compare: Compare) -> None:
    x, program = sample(dtype), Program()
    mine = x.clone()
    token = program.input(x.clone())
    made = program.call(op, token, value)
    expected = op(x, value)
    outputs = promoted_run(program, [] if made is token else [made], [mine], [value])
    compare(mine if made is token else outputs[0], expected, f"{op} {value}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("op", EXACT + FILLS, ids=str)
def test_a_promoted_scalar_gives_eagers_bits(op: torch._ops.OpOverload, dtype: torch.dtype) -> None:
    for value in VALUES:
        assert_promotes(op, dtype, value, assert_bits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", EXACT, ids=str)
def test_a_promoted_scalar_is_near_eagers_in_short_types(op: torch._ops.OpOverload, dtype: torch.dtype) -> None:
    # eager's own kernels disagree: on the CPU `add` rounds its scalar to the short type and `mul` does not
    for value in ORDINARY:
        assert_promotes(op, dtype, value, assert_near)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", [aten.pow.Tensor_Scalar, aten.pow_.Scalar], ids=str)
def test_a_promoted_exponent_is_near_eagers(op: torch._ops.OpOverload, dtype: torch.dtype) -> None:
    for value in (0.1, -1.7, 3.0, 2.0, 0.0):
        assert_promotes(op, dtype, value, assert_near)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", [aten.add.Tensor, aten.sub.Tensor], ids=str)
def test_a_promoted_alpha_is_near_eagers(op: torch._ops.OpOverload, dtype: torch.dtype) -> None:
    for value in ORDINARY:
        x, y, program = sample(dtype), sample(dtype).flip(0), Program()
        made = program.call(op, program.input(x), program.input(y), alpha=value)
        assert_near(promoted_run(program, [made], [x, y], [value])[0], op(x, y, alpha=value), f"{op} {value}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", [aten.addcmul.default, aten.addcdiv.default], ids=str)
def test_a_promoted_value_is_near_eagers(op: torch._ops.OpOverload, dtype: torch.dtype) -> None:
    for value in (0.1, -1.7, 3.0, 0.0):
        x, y, z, program = sample(dtype), sample(dtype).flip(0), sample(dtype).roll(3), Program()
        made = program.call(op, *map(program.input, (x, y, z)), value=value)
        assert_near(promoted_run(program, [made], [x, y, z], [value])[0], op(x, y, z, value=value), f"{op} {value}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_promoted_weight_of_lerp_is_near_eagers(dtype: torch.dtype) -> None:
    for value in (0.0, 0.1, 0.5, 0.9, 1.0):
        x, y, program = torch.randn(32).to(dtype), torch.randn(32).to(dtype), Program()
        made = program.call(aten.lerp.Scalar, program.input(x), program.input(y), value)
        assert_near(promoted_run(program, [made], [x, y], [value])[0], torch.lerp(x, y, value), str(value))


def test_a_promoted_weight_of_one_gives_the_end() -> None:
    x, y, program = torch.randn(32), torch.randn(32), Program()
    made = program.call(aten.lerp.Scalar, program.input(x), program.input(y), 1.0)
    assert_bits(promoted_run(program, [made], [x, y], [1.0])[0], y, "lerp")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_promoted_masked_fill_gives_eagers_bits(dtype: torch.dtype) -> None:
    x, program = sample(dtype), Program()
    mask = x > 0
    made = program.call(aten.masked_fill.Scalar, program.input(x), program.input(mask), 0.1)
    assert_bits(promoted_run(program, [made], [x, mask], [0.1])[0], x.masked_fill(mask, 0.1), "masked_fill")


FOREACH = [
    aten._foreach_add.Scalar, aten._foreach_mul.Scalar, aten._foreach_div.Scalar, aten._foreach_sub.Scalar,
    aten._foreach_add_.Scalar, aten._foreach_mul_.Scalar, aten._foreach_div_.Scalar,
]  # fmt: skip
FOREACH_LISTS = [
    aten._foreach_add_.ScalarList, aten._foreach_mul_.ScalarList, aten._foreach_div_.ScalarList,
    aten._foreach_mul.ScalarList,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("op", "as_list"), [(op, False) for op in FOREACH] + [(op, True) for op in FOREACH_LISTS], ids=str
)
def test_foreach_scalars_give_eagers_values(op: torch._ops.OpOverload, as_list: bool, dtype: torch.dtype) -> None:
    reference, mine = ([sample(dtype), sample(dtype)[:5].clone()] for _ in range(2))
    reference[0] = mine[0].clone()
    reference[1] = mine[1].clone()
    program = Program()
    scalar = [0.1, -3.0] if as_list else 0.1
    tokens = [program.input(tensor.clone()) for tensor in mine]
    made = program.call(op, tokens, scalar)
    expected = op(reference, scalar)
    outputs = promoted_run(program, made, mine, [0.1, -3.0])
    compare = assert_bits if dtype in (torch.float32, torch.float64) else assert_near
    for actual, wanted in zip(outputs or mine, expected or reference, strict=True):
        compare(actual, wanted, str(op))


@pytest.mark.parametrize(
    "op", [aten._foreach_addcdiv_.Scalar, aten._foreach_addcmul_.Scalar, aten._foreach_addcdiv_.ScalarList]
)
def test_foreach_addcdiv_is_near_eagers(op: torch._ops.OpOverload) -> None:
    lists = [[torch.randn(8), torch.randn(3)] for _ in range(3)]
    mine = [[t.clone() for t in tensors] for tensors in lists]
    scalar = [0.1, -3.0] if op is aten._foreach_addcdiv_.ScalarList else 0.1
    program = Program()
    program.call(op, *[[program.input(t.clone()) for t in tensors] for tensors in lists], scalar)
    op(*lists, scalar)
    promoted_run(program, [], list(itertools.chain(*mine)), [0.1, -3.0])
    for actual, expected in zip(mine[0], lists[0], strict=True):
        assert_near(actual, expected, str(op))


def test_foreach_lerp_is_near_eagers() -> None:
    start, end = [torch.randn(8)], [torch.randn(8)]
    mine, program = [start[0].clone()], Program()
    program.call(aten._foreach_lerp_.Scalar, [program.input(start[0].clone())], [program.input(end[0])], 0.1)
    torch._foreach_lerp_(start, end, 0.1)
    promoted_run(program, [], [mine[0], end[0]], [0.1])
    assert_near(mine[0], start[0], "lerp")


def test_integers_are_not_promoted() -> None:
    program = Program()
    made = program.call(aten.mul.Tensor, program.input(torch.arange(3)), 2.0)
    (node,) = program.graph(made).nodes
    assert node.outputs[0].meta.dtype == torch.float32
    assert can_promote(node)


def test_a_rounding_mode_is_not_promoted() -> None:
    program = Program()
    made = program.call(aten.div.Tensor_mode, program.input(torch.ones(3)), 2.0, rounding_mode="floor")
    (node,) = program.graph(made).nodes
    assert not can_promote(node)


@pytest.mark.parametrize("value", [0.5, 2.0])
def test_a_promoted_scalar_with_an_integer_tensor(value: float) -> None:
    x, program = torch.arange(6), Program()
    made = program.call(aten.mul.Tensor, program.input(x), value)
    assert_bits(promoted_run(program, [made], [x], [value])[0], x * value, "int")


@pytest.mark.parametrize("op", [aten.gt.Scalar, aten.eq.Scalar, aten.le.Scalar], ids=str)
def test_a_promoted_comparison_with_an_integer_tensor(op: torch._ops.OpOverload) -> None:
    x = torch.tensor([0, 1, 2**24 + 1, 2**53 + 1])
    for value in (0.5, 1.0, float(2**24)):
        program = Program()
        made = program.call(op, program.input(x), value)
        assert_bits(promoted_run(program, [made], [x], [value])[0], op(x, value), f"{op} {value}")


def test_a_promoted_scalar_with_a_zero_dimensional_tensor() -> None:
    x, program = torch.tensor(0.3, dtype=torch.bfloat16), Program()
    made = program.call(aten.mul.Tensor, program.input(x), 1.001)
    assert_bits(promoted_run(program, [made], [x], [1.001])[0], x * 1.001, "0-d")


def test_operands_of_two_dtypes() -> None:
    x, y, program = torch.randn(4), torch.randn(4, dtype=torch.float64), Program()
    made = program.call(aten.add.Tensor, program.input(x), program.input(y), alpha=0.1)
    assert_bits(promoted_run(program, [made], [x, y], [0.1])[0], torch.add(x, y, alpha=0.1), "mixed")


# ----- which plan runs

POLICY = CompilePolicy(
    backend="aot_eager", enabled=True, num_profiled_runs=1, max_specializations=2, max_compiled_nodes=1000
)


class Runs:
    """A `ProfilingGraphExecutor` and the reports of its compiles."""

    def __init__(self, graph: Graph) -> None:
        self.reports: list[CompileReport] = []
        self.now = 0.0
        self.executor = ProfilingGraphExecutor(graph, self.reports.append, clock=lambda: self.now)

    def kinds(self, *constants: float, policy: CompilePolicy = POLICY) -> list[str]:
        return [self.executor.plan_for([value], policy).kind.value for value in constants]


def not_promotable() -> Graph:
    program = Program()
    made = program.call(aten.div.Tensor_mode, program.input(torch.ones(3)), 2.0, rounding_mode="floor")
    return program.graph(made)


def test_the_second_run_is_compiled() -> None:
    assert Runs(scaled()[0]).kinds(2.0, 2.0, 2.0) == ["interpreted", "compiled", "compiled"]


def test_a_constant_graph_compiles_once() -> None:
    runs = Runs(scaled()[0])
    runs.kinds(2.0, 2.0, 2.0, 2.0)
    assert len(runs.reports) == 1


def test_a_scalar_that_changed_before_the_compile_is_an_input() -> None:
    runs = Runs(scaled()[0])
    runs.kinds(1.0, 2.0, 3.0, 4.0)
    assert len(runs.reports) == 1


def test_a_scalar_that_changes_later_compiles_once_more() -> None:
    runs = Runs(scaled()[0])
    runs.kinds(1.0, 1.0, 2.0, 3.0, 4.0, 1.0)
    assert len(runs.reports) == 2


def test_a_scalar_that_cannot_be_an_input_is_bounded() -> None:
    runs = Runs(not_promotable())
    assert runs.kinds(1.0, 1.0, 2.0, 3.0, 4.0)[-2:] == ["interpreted"] * 2
    assert len(runs.reports) == 2


def test_a_bounded_scalar_still_finds_its_plans() -> None:
    runs = Runs(not_promotable())
    assert runs.kinds(1.0, 1.0, 2.0, 3.0, 1.0, 2.0)[-2:] == ["compiled"] * 2


def test_nothing_is_compiled_when_compiling_is_off() -> None:
    off = CompilePolicy("aot_eager", enabled=False, num_profiled_runs=1, max_specializations=2, max_compiled_nodes=1000)
    assert Runs(scaled()[0]).kinds(1.0, 1.0, 1.0, policy=off) == ["interpreted"] * 3


def test_more_profiled_runs_can_be_asked_for() -> None:
    later = CompilePolicy(
        "aot_eager", enabled=True, num_profiled_runs=3, max_specializations=2, max_compiled_nodes=1000
    )
    assert Runs(scaled()[0]).kinds(*[1.0] * 4, policy=later) == ["interpreted"] * 3 + ["compiled"]


def test_a_small_graph_is_compiled_once_its_runs_have_called_enough() -> None:
    policy = replace(POLICY, compile_after_operators=4)
    runs = Runs(scaled()[0])  # of one operator
    assert runs.kinds(*[1.0] * 3, policy=policy) == ["interpreted"] * 3
    assert runs.executor.get_debug_state().plan == "small"
    assert runs.kinds(1.0, policy=policy) == ["compiled"]
    assert Runs(scaled()[0]).kinds(1.0, policy=replace(policy, num_profiled_runs=0)) == ["compiled"]


def test_large_results_count_like_operators() -> None:
    program = Program()
    made = program.call(aten.neg.default, program.input(torch.ones(1 << 16)))  # 256 KiB
    policy = replace(POLICY, compile_after_operators=10)
    assert Runs(program.graph(made)).kinds(1.0, 1.0, policy=policy) == ["interpreted", "compiled"]


def test_a_compiler_that_fails_is_asked_once() -> None:
    def broken(module, inputs):
        raise ValueError("no compiler today")

    runs = Runs(scaled()[0])
    policy = CompilePolicy(broken, enabled=True, num_profiled_runs=1, max_specializations=2, max_compiled_nodes=1000)
    assert runs.kinds(1.0, 1.0, 1.0, policy=policy) == ["interpreted"] * 3
    assert [str(report.error) for report in runs.reports] == ["no compiler today"]
    assert runs.executor.get_debug_state().plan == "fallback"


def test_the_debug_state_counts() -> None:
    runs = Runs(scaled()[0])
    runs.kinds(1.0, 2.0, 3.0)
    state = runs.executor.get_debug_state()
    assert (state.runs, state.plan, state.compiles, state.promoted_scalars, state.error) == (3, "optimized", 1, 1, None)


def test_a_flushed_graph_profiles_and_compiles_anew() -> None:
    runs = Runs(scaled()[0])
    runs.kinds(2.0, 2.0)
    runs.executor.debug_flush_compilation_cache()
    assert not runs.executor.is_optimized()
    assert runs.kinds(2.0, 2.0) == ["interpreted", "compiled"]
    assert runs.executor.is_optimized()


RELEASING = replace(POLICY, release_delay=5.0)


def released(graph: Graph, policy: CompilePolicy = RELEASING) -> Runs:
    """A graph that has been optimized for longer than the delay."""
    runs = Runs(graph)
    runs.kinds(1.0, 1.0, policy=policy)
    runs.now = 5.0
    runs.kinds(1.0, policy=policy)
    return runs


def test_an_optimized_graph_is_set_aside_after_the_delay() -> None:
    runs = Runs(scaled()[0])
    states = []
    for now in (0.0, 1.0, 5.9, 6.0):
        runs.now = now
        runs.kinds(1.0, policy=RELEASING)
        states.append(runs.executor.get_debug_state().released)
    assert states == [False, False, False, True]


def test_what_is_set_aside_can_be_freed() -> None:
    # held, so that what the collector frees meanwhile is not counted, and no new one gets the number of an old one
    others = {id(one): one for one in gc.get_objects() if type(one) is Node}

    def nodes() -> int:
        return sum(type(one) is Node and id(one) not in others for one in gc.get_objects())

    runs = Runs(scaled()[0])
    counts = []
    for runs.now in (0.0, 0.0, 5.0):
        runs.kinds(1.0, policy=RELEASING)
        runs.reports.clear()
        counts.append(nodes())
    assert counts == [1, 1, 0]


def test_a_graph_without_a_delay_is_kept() -> None:
    assert not released(scaled()[0], POLICY).executor.get_debug_state().released


def test_an_interpreted_graph_is_kept() -> None:
    runs = Runs(not_promotable())
    for now, value in enumerate((1.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0)):
        runs.now = float(now)
        runs.kinds(value, policy=RELEASING)
    assert not runs.executor.get_debug_state().released


def test_replays_set_aside_too() -> None:
    runs, constants = Runs(scaled()[0]), (1.0,)
    runs.kinds(1.0, 1.0, policy=RELEASING)
    for runs.now in (1.0, 5.0):
        assert runs.executor.ready_plan_for(constants) is not None
    assert runs.executor.get_debug_state().released


def test_a_graph_set_aside_is_compiled_again() -> None:
    runs, x = released(scaled()[0]), torch.arange(4.0)
    plan = runs.executor.plan_for([3.0], RELEASING)
    assert plan.kind is PlanKind.COMPILED
    assert [report.stage for report in runs.reports] == ["compiled"] * 2
    assert_same(plan.execute([x.clone()], [3.0], []), [x * 3])


def test_a_graph_compiled_again_is_set_aside_again() -> None:
    runs = released(scaled()[0])
    states = []
    for now in (6.0, 7.0, 11.0):
        runs.now = now
        runs.kinds(3.0, policy=RELEASING)
        states.append(runs.executor.get_debug_state().released)
    assert states == [False, False, True]


def test_a_graph_set_aside_is_interpreted_again() -> None:
    runs, x = released(not_promotable()), torch.arange(4.0)
    runs.kinds(2.0, policy=RELEASING)
    plan = runs.executor.plan_for([3.0], RELEASING)
    assert plan.kind is PlanKind.INTERPRETED
    assert_same(plan.execute([x.clone()], [3.0], []), [torch.div(x, 3.0, rounding_mode="floor")])


def test_an_error_of_a_plan_set_aside_names_its_calls() -> None:
    program = Program()
    index = program.input(torch.tensor([0]))
    graph = program.graph(program.call(aten.index_select.default, program.input(torch.ones(3)), 0, index))
    runs = Runs(graph)
    for runs.now in (0.0, 1.0, 6.0):
        plan = runs.executor.plan_for([], RELEASING)
    assert runs.executor.get_debug_state().released
    with pytest.raises(NodeError, match=r"out of range(.|\n)*aten\.index_select\(.*\n  recorded at step\.py:1"):
        plan.execute([torch.ones(3), torch.tensor([7])], [], [])


def test_an_operator_of_the_program_keeps_its_graph() -> None:
    """It may be gone when the text is read."""
    with torch.library._scoped_library("lazy_kept", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        program = Program()
        made = program.call(torch.ops.lazy_kept.twice.default, program.input(torch.ones(3)))
        stored = StoredGraph(program.graph(made))
        assert not stored.set_aside()
        assert [node.name for node in stored.get().nodes] == ["lazy_kept.twice"]


def test_every_plan_gives_the_same() -> None:
    graph, x = scaled()
    for value in (1.5, 1.5, 2.5, 3.5):
        runs = Runs(graph)
        for _ in range(2):
            (made,) = runs.executor.plan_for([value], POLICY).execute([x.clone()], [value], [])
            assert_same(made, x * value)


def test_a_graph_of_one_device_says_so() -> None:
    assert scaled()[0].device == CPU


def test_waiting_goes_on_while_threads_add_compiles() -> None:
    made: list[profiling.ProfilingGraphExecutor] = []
    is_over = threading.Event()

    def add() -> None:
        while not is_over.is_set():
            made.append(Runs(scaled()[0]).executor)
            profiling._compiling[id(made[-1])] = made[-1]

    threads = [threading.Thread(target=add) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            assert profiling.wait_for_compiles(60)
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert made


def test_a_compile_here_fixes_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """More threads that run than were there at the compile would write beyond arrays of partial sums."""
    import torch._inductor.config as inductor_config

    seen = []

    def backend(module: torch.fx.GraphModule, examples: list[torch.Tensor]) -> Callable[..., object]:
        seen.append(inductor_config.cpp.threads)
        return module.forward

    monkeypatch.setattr(compiler, "lookup_backend", lambda name: backend)
    before = inductor_config.cpp.threads
    compiler.compile_graph(CompileRequest.of(scaled()[0], [2.0], "inductor"))
    assert (seen, inductor_config.cpp.threads) == ([torch.get_num_threads()], before)
