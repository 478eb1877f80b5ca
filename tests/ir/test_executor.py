"""One graph for many callers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from builder import VISIT, Program, aten, visiting
from harness import assert_same
from torch.utils import _pytree as pytree

from lazy_backend.lowering.checks.refusals import NodeError
from lazy_backend.lowering.ir.graph import meta_of
from lazy_backend.lowering.ir.program import Token
from lazy_backend.lowering.plans.policy import at_once
from lazy_backend.lowering.serving.executor import Executor, ExecutorConfig, GraphSignature
from lazy_backend.lowering.serving.weights import InputError

SIZE, BATCH = 64, 32  # large enough for results to be planned
CONFIGS = [
    ExecutorConfig(),
    ExecutorConfig(num_threads=2),
    ExecutorConfig(policy=at_once("aot_eager")),
    ExecutorConfig(num_threads=2, policy=at_once("aot_eager"), supported=lambda node: node.name != "aten.tanh"),
]
configs = pytest.mark.parametrize("config", CONFIGS, ids=["serial", "parallel", "compiled", "parallel regions"])

Weights = dict[str, torch.Tensor]


def new_weights(seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(SIZE, SIZE, generator=generator) / 8 for name in ("first", "second")}


def model(weights: Weights, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(x @ weights["first"].t() * 0.5)
    return torch.tanh(hidden @ weights["second"].t()) + y


def served(config: ExecutorConfig | None = None, weights: Weights | None = None, **specs: Any) -> Executor:
    """`model` as an executor: inputs y, x and one that is not used."""
    weights = weights or new_weights(0)
    program = Program()
    tokens = {name: program.input(tensor) for name, tensor in weights.items()}
    x, y = program.input(torch.ones(BATCH, SIZE)), program.input(torch.ones(BATCH, SIZE))
    hidden = x
    for place, name in enumerate(("first", "second")):
        product = program.call(aten.mm.default, hidden, program.call(aten.t.default, tokens[name]))
        hidden = program.call(aten.tanh.default, product if place else program.call(aten.mul.Tensor, product, 0.5))
    return executor_of(
        program,
        [program.call(aten.add.Tensor, hidden, y)],
        weights={name: (tokens[name], weights[name]) for name in weights},
        user={"y": y, "x": x, "unused": None},
        config=config,
        **specs,
    )


def executor_of(
    program: Program,
    wanted: Sequence[Token],
    weights: dict[str, tuple[Token, torch.Tensor]],
    user: dict[str, Token | None],
    config: ExecutorConfig | None = None,
    **specs: Any,
) -> Executor:
    data = program.canonical(*wanted)
    places = {name: token and data.parameter_sequence[token.index] for name, token in user.items()}
    signature = GraphSignature(
        weights=tuple((name, data.parameter_sequence[token.index]) for name, (token, _) in weights.items()),
        user_inputs=tuple(places.items()),
        examples=tuple(
            meta_of(torch.ones(1)) if place is None else data.graph.inputs[place].meta for place in places.values()
        ),
        **specs,
    )
    constants = [program.constants[place] for place in data.constants]
    return Executor(data.graph, signature, {name: given for name, (_, given) in weights.items()}, constants, config)


def some_inputs(seed: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y, x = torch.randn(BATCH, SIZE, generator=generator), torch.randn(BATCH, SIZE, generator=generator)
    return [y, x, torch.ones(1)]


# ----- calls


@configs
def test_a_call_computes_the_model(config: ExecutorConfig) -> None:
    executor, weights = served(config), new_weights(0)
    for seed in range(3):
        y, x, unused = some_inputs(seed)
        assert_same(executor.execute([y, x, unused]), [model(weights, x, y)])


@configs
def test_a_call_keeps_its_arguments(config: ExecutorConfig) -> None:
    executor, inputs = served(config), some_inputs()
    before = [tensor.clone() for tensor in inputs]
    executor.execute(inputs)
    assert_same(inputs, before)


@configs
def test_results_belong_to_the_caller(config: ExecutorConfig) -> None:
    executor, inputs = served(config), some_inputs()
    (first,) = executor.execute(inputs)
    expected = first.clone()
    first.zero_()
    (second,) = executor.execute(inputs)
    assert_same(second, expected)
    assert_same(first, torch.zeros(BATCH, SIZE))


def test_arguments_may_lie_in_memory_as_they_like() -> None:
    y, x, unused = some_inputs()
    odd = [y.t().contiguous().t(), torch.cat([x, x])[BATCH:], unused]
    assert_same(served().execute(odd), [model(new_weights(0), x, y)])


def test_arguments_that_require_gradients_give_results_that_do_not() -> None:
    y, x, unused = some_inputs()
    (made,) = served().execute([y, x.requires_grad_(), unused])
    assert not made.requires_grad


def test_a_tree_of_arguments() -> None:
    y, x, unused = some_inputs()
    _, in_spec = pytree.tree_flatten((([y, x],), {"extra": unused, "more": {}}))
    _, out_spec = pytree.tree_flatten({"out": 0})
    executor = served(in_spec=in_spec, out_spec=out_spec)
    expected = {"out": model(new_weights(0), x, y)}
    assert_same(executor.execute_tree(([y, x],), {"extra": unused, "more": {}}), expected)
    assert_same(executor.execute_tree(([y, x],), {"more": {}, "extra": unused}), expected)
    with pytest.raises(InputError, match=r"do not fit: the keyword arguments are .*\n  expected TreeSpec.*\n"):
        executor.execute_tree(([y, x],), {"extra": unused})
    with pytest.raises(InputError, match="arguments do not fit: 1 of them are positional, not 2"):
        executor.execute_tree((y, x), {"extra": unused, "more": {}})
    with pytest.raises(InputError, match="arguments do not fit: argument 0 is put together"):
        executor.execute_tree(((y, x),), {"extra": unused, "more": {}})


def test_a_tree_needs_a_spec() -> None:
    with pytest.raises(InputError, match="no in_spec"):
        served().execute_tree((), {})


# ----- validation


@pytest.mark.parametrize(
    ("place", "given", "text"),
    [
        (0, torch.ones(9, SIZE), r"input 'y': expected torch.float32 \[32, 64\] on cpu, got torch.float32 \[9, 64\]"),
        (1, torch.ones(BATCH, SIZE).double(), r"input 'x': expected torch.float32 .*, got torch.float64"),
        (1, torch.ones(BATCH, SIZE, device="meta"), r"input 'x': expected .* on cpu, got .* on meta"),
        (1, 3, r"input 'x': expected a tensor f32\[32, 64\] on cpu, got int"),
        (2, torch.ones(1).int(), r"input 'unused': expected torch.float32 \[1\] on cpu, got torch.int32 \[1\] on cpu"),
        (2, None, r"input 'unused': expected a tensor f32\[1\] on cpu, got NoneType"),
    ],
)  # fmt: skip
def test_an_input_that_does_not_fit_is_named(place: int, given: Any, text: str) -> None:
    inputs = some_inputs()
    inputs[place] = given
    with pytest.raises(InputError, match=text):
        served().validate_inputs(inputs)


def test_missing_inputs_are_counted() -> None:
    with pytest.raises(InputError, match=r"expected 3 inputs \(y, x, unused\), got 2"):
        served().execute(some_inputs()[:2])


def test_what_the_graph_does_not_use_may_lie_in_memory_in_any_way() -> None:
    y, x, _ = some_inputs()
    executor = served()
    assert_same(executor.execute([y, x, torch.ones(1, 2)[:, 1]]), executor.execute([y, x, torch.ones(1)]))


def accumulating() -> Executor:
    """total += x; the result is total * 2."""
    program = Program()
    total, x = program.input(torch.ones(4)), program.input(torch.ones(4))
    program.call(aten.add_.Tensor, total, x)
    doubled = program.call(aten.mul.Tensor, total, 2)
    return executor_of(program, [doubled], {}, {"total": total, "x": x})


def test_an_input_is_written_in_place() -> None:
    total = torch.ones(4)
    assert_same(accumulating().execute([total, torch.ones(4)]), [torch.full((4,), 4.0)])
    assert_same(total, torch.full((4,), 2.0))


def test_an_input_that_is_written_must_have_memory_of_its_own() -> None:
    total = torch.ones(4)
    with pytest.raises(InputError, match="input 'total' is written and shares its memory with another input"):
        accumulating().execute([total, total])
    with pytest.raises(InputError, match="input 'total': the graph writes it, so it must lie in memory as"):
        accumulating().execute([torch.ones(8)[::2], torch.ones(4)])


def test_random_numbers_follow_the_seed() -> None:
    program = Program()
    x = program.input(torch.ones(4))
    executor = executor_of(program, [program.call(aten.rand_like.default, x)], {}, {"x": x})
    made = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        made += executor.execute([torch.ones(4)])
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])
    assert not torch.equal(made[2], executor.execute([torch.ones(4)])[0])


def test_an_error_leaves_the_executor_usable() -> None:
    program = Program()
    x = program.input(torch.ones(4))
    executor = executor_of(program, [program.call(VISIT, x, 0)], {}, {"x": x})
    with visiting({0: None}), pytest.raises(NodeError, match=r"recorded at step.py:1"):
        executor.execute([torch.ones(4)])
    assert executor.num_execution_frames == 0
    assert_same(executor.execute([torch.ones(4)]), [torch.ones(4)])


# ----- weights


@configs
def test_swapped_weights_count_from_the_next_call_on(config: ExecutorConfig) -> None:
    executor, (y, x, unused) = served(config), some_inputs()
    for seed in (1, 2, 1):
        weights = new_weights(seed)
        executor.swap_weights(weights)
        assert executor.weights == weights
        assert_same(executor.execute([y, x, unused]), [model(weights, x, y)])


def test_weights_that_do_not_fit_change_nothing() -> None:
    executor, (y, x, unused) = served(), some_inputs()
    with pytest.raises(InputError, match="missing"):
        executor.swap_weights({})
    assert_same(executor.execute([y, x, unused]), [model(new_weights(0), x, y)])


@configs
def test_a_hundred_calls_see_old_or_new_weights_never_a_mix(config: ExecutorConfig) -> None:
    executor, (y, x, unused) = served(config), some_inputs()
    versions = [new_weights(seed) for seed in range(4)]
    expected = [model(weights, x, y) for weights in versions]
    results: list[torch.Tensor] = []
    over = threading.Event()

    def swap() -> None:
        while not over.is_set():
            for weights in versions:
                executor.swap_weights(weights)

    def call() -> None:
        results.extend(executor.execute([y, x, unused])[0] for _ in range(10))

    swapping, calling = threading.Thread(target=swap), [threading.Thread(target=call) for _ in range(10)]
    for thread in (swapping, *calling):
        thread.start()
    for thread in calling:
        thread.join(timeout=60)
    over.set()
    swapping.join(timeout=60)
    assert len(results) == 100
    assert all(any(torch.equal(result, one) for one in expected) for result in results)
    fewest = 1 if config.policy is None else 0  # a graph that is one region is run without a frame
    assert fewest <= executor.num_execution_frames <= 10


def test_runs_that_write_a_weight_take_turns() -> None:
    program, counter = Program(), torch.zeros(1)
    weight, x = program.input(torch.zeros(1)), program.input(torch.zeros(1))
    before = program.call(aten.clone.default, weight)
    program.call(aten.add_.Tensor, weight, program.call(VISIT, x, 0))
    difference = program.call(aten.sub.Tensor, weight, before)
    executor = executor_of(program, [difference], {"counter": (weight, counter)}, {"x": x})
    results: list[float] = []

    def call() -> None:
        results.extend(executor.execute([torch.ones(1)])[0].item() for _ in range(20))

    threads = [threading.Thread(target=call) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert results == [1.0] * 100
    assert counter.item() == 100


# ----- frames


def test_a_frame_for_each_run_in_flight() -> None:
    program = Program()
    x = program.input(torch.ones(4))
    now = [0.0]
    config = ExecutorConfig(max_frame_age=10.0, clock=lambda: now[0])
    executor = executor_of(program, [program.call(VISIT, x, 0)], {}, {"x": x}, config)
    together = threading.Barrier(4)

    def meet(x: torch.Tensor) -> torch.Tensor:
        together.wait(timeout=30)
        return x.clone()

    with visiting({0: meet}):
        threads = [threading.Thread(target=executor.execute, args=([torch.ones(4)],)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
    assert executor.num_execution_frames == 4
    now[0] = 11.0
    executor.clear_stale_execution_frames()
    assert executor.num_execution_frames == 0


# ----- looking


def test_the_schemas_of_all_kernels() -> None:
    schemas = served().kernel_schemas
    assert sorted(schemas) == ["aten::add.Tensor", "aten::mm.out", "aten::mul.out", "aten::tanh.out"]
    assert str(schemas["aten::add.Tensor"]).startswith("aten::add.Tensor(Tensor self, Tensor other")


def test_the_signature_is_there() -> None:
    assert [name for name, _ in served().graph_signature.user_inputs] == ["y", "x", "unused"]


@configs
def test_nodes_are_timed_one_by_one(config: ExecutorConfig) -> None:
    executor, inputs = served(config), some_inputs()
    metrics = executor.benchmark_nodes(inputs, warmup=1, runs=3)
    assert len(metrics.seconds_per_node) == len(metrics.names) == sum(metrics.instances_per_type.values())
    assert all(seconds > 0 for seconds in metrics.seconds_per_node)
    assert sum(metrics.seconds_per_type.values()) == pytest.approx(metrics.total_seconds)
    assert_same(executor.execute(inputs), [model(new_weights(0), inputs[1], inputs[0])])


def test_timing_writes_no_input() -> None:
    total = torch.ones(4)
    accumulating().benchmark_nodes([total, torch.ones(4)], warmup=1, runs=2)
    assert_same(total, torch.ones(4))


def test_the_measured_peak_is_the_planned_one() -> None:
    executor = served()
    assert executor.layout is not None
    assert executor.layout.planned_bytes == 2 * BATCH * SIZE * 4
    assert executor.layout.peak_bytes == 3 * BATCH * SIZE * 4  # and the output
    assert executor.benchmark_nodes(some_inputs(), warmup=0, runs=1).peak_bytes == executor.layout.peak_bytes
