"""One run: what it is asked for, what it captures, how it ends, and what its threads take over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import pytest
import torch
from builder import VISIT, Built, Program, aten, built, random_graph, visiting, visits
from harness import assert_same

from lazy_backend.lowering.checks.refusals import NodeError
from lazy_backend.lowering.device_graphs.fake import FakeDevice
from lazy_backend.lowering.interpreter.frame import ExecutionFrame
from lazy_backend.lowering.interpreter.graph_executor import GraphExecutor
from lazy_backend.lowering.interpreter.kernels import make_kernels
from lazy_backend.lowering.interpreter.parallel import ParallelGraphExecutor
from lazy_backend.lowering.interpreter.serial import SerialGraphExecutor
from lazy_backend.lowering.interpreter.streams import LeafStreams
from lazy_backend.lowering.interpreter.task import (
    Capture,
    ExecInfo,
    GraphTask,
    current_graph_task_execution_order,
    current_graph_task_id,
    exec_info,
    queue_callback,
)

EXECUTORS = [SerialGraphExecutor, ParallelGraphExecutor]
executors = pytest.mark.parametrize("executor", EXECUTORS)


def new_task(executor: GraphExecutor, program: Built, **options: bool) -> tuple[GraphTask, list[torch.Tensor]]:
    """A task for one run of `executor`, and the inputs it runs on."""
    inputs, frame = program.fresh(), ExecutionFrame()
    frame.fill(executor.kernels.template, inputs, program.constants, program.seeds())
    return GraphTask(executor.kernels, executor.exec_info, frame, **options), inputs


def asked_for(
    executor: type[GraphExecutor], program: Built, outputs: list[int], captures: tuple[Capture, ...] = ()
) -> GraphExecutor:
    """An executor for some of the outputs, by their places."""
    kernels = make_kernels(program.graph)
    info = exec_info(kernels, [program.graph.outputs[place] for place in outputs], captures)
    return executor(program.graph, kernels, info)


# ----- Note [Exec info]


def two_halves() -> Built:
    """Two outputs of one visit each, and a third visit that writes an input."""
    program = Program()
    x, y = program.input(torch.ones(2)), program.input(torch.zeros(2))
    first, second = program.call(VISIT, x, 0), program.call(VISIT, x, 1)
    program.call(aten.add_.Tensor, y, program.call(VISIT, x, 2))
    return built(program, first, second)


@executors
@pytest.mark.parametrize(("asked", "called"), [([0], {0, 2}), ([1], {1, 2}), ([], {2}), ([1, 0], {0, 1, 2})])
def test_only_what_is_needed_runs(executor: type[GraphExecutor], asked: list[int], called: set[int]) -> None:
    program, seen = two_halves(), set()

    def note(who: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: (seen.add(who), x.clone())[1]

    task, inputs = new_task(asked_for(executor, program, asked), program)
    with visiting({who: note(who) for who in range(3)}):
        outputs = asked_for(executor, program, asked).run(task)
    assert seen == called
    assert_same(outputs, [program.outputs[place] for place in asked])
    assert_same(inputs, program.inputs_after)


@executors
@pytest.mark.parametrize("seed", range(20))
def test_each_output_by_itself_is_what_it_is_among_all(executor: type[GraphExecutor], seed: int) -> None:
    program = random_graph(seed)
    inputs = program.fresh()
    everything = SerialGraphExecutor(program.graph).execute(list(inputs), program.constants, program.seeds())
    for place in range(len(everything)):
        runner = asked_for(executor, program, [place])
        task, mine = new_task(runner, program)
        assert_same(runner.run(task), [everything[place]])
        assert_same(mine, inputs)


def test_fewer_kernels_run_for_fewer_outputs() -> None:
    program = two_halves()
    assert len(asked_for(SerialGraphExecutor, program, [0]).exec_info.needed) == len(program.graph.nodes) - 1


def test_what_is_no_output_cannot_be_asked_for() -> None:
    program = two_halves()
    with pytest.raises(ValueError, match=r"%0 is no output of the graph; its outputs are \[%1, %2\]"):
        exec_info(make_kernels(program.graph), [program.graph.inputs[0]])


# ----- captures


def overwritten() -> Built:
    """%1 = x * 2, which is then overwritten with zeros and never read again."""
    program = Program()
    made = program.call(aten.mul.Tensor, program.input(torch.ones(2)), 2)
    total = program.call(aten.sum.default, made)
    program.call(aten.zero_.default, made)
    return built(program, total, made)


@executors
def test_a_captured_value_is_what_its_node_made(executor: type[GraphExecutor]) -> None:
    program = overwritten()
    runner = asked_for(executor, program, [1], (Capture(program.graph.outputs[0]),))
    task, _ = new_task(runner, program)
    assert_same(runner.run(task), [program.outputs[1]])
    assert_same(task.captured_vars, [torch.full((2,), 2.0)])


@executors
def test_hooks_replace_what_is_captured_but_not_the_value(executor: type[GraphExecutor]) -> None:
    program = overwritten()
    hooks = (lambda x: x + 1, lambda x: x.mul_(10))
    runner = asked_for(executor, program, [0, 1], (Capture(program.graph.outputs[0], hooks),))
    task, _ = new_task(runner, program)
    assert_same(runner.run(task), program.outputs)
    assert_same(task.captured_vars, [torch.full((2,), 30.0)])


@executors
def test_an_inner_value_can_be_captured_alone(executor: type[GraphExecutor]) -> None:
    program = visits(5, chained=True)
    inner = [node.outputs[0] for node in program.graph.nodes[:3]]
    called: list[int] = []
    runner = asked_for(executor, program, [], (Capture(inner[2]), Capture(inner[0])))
    task, _ = new_task(runner, program)
    with visiting({3: lambda x: (called.append(3), x.clone())[1], 2: lambda x: x + 5}):
        assert runner.run(task) == []
    assert_same(task.captured_vars, [torch.full((2,), 6.0), torch.ones(2)])
    assert not called


def test_an_input_cannot_be_captured() -> None:
    program = visits(1)
    with pytest.raises(ValueError, match="%0 cannot be captured: it is an input"):
        exec_info(make_kernels(program.graph), [], [Capture(program.graph.inputs[0])])


@executors
def test_a_hook_that_fails_fails_the_run(executor: type[GraphExecutor]) -> None:
    def hook(x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("in the hook")

    program = overwritten()
    runner = asked_for(executor, program, [0], (Capture(program.graph.outputs[0], (hook,)),))
    with pytest.raises(NodeError, match="in the hook"):
        runner.run(new_task(runner, program)[0])


# ----- Note [Reentrant runs]


@executors
@pytest.mark.parametrize("depth", [1, 5])
def test_a_kernel_may_run_the_graph_it_is_in(executor: type[GraphExecutor], depth: int) -> None:
    program = visits(4)
    runner = executor(program.graph)
    depths: list[int] = []

    def nested(x: torch.Tensor) -> torch.Tensor:
        task, _ = new_task(runner, program)
        depths.append(task.reentrant_depth)
        if task.reentrant_depth <= depth:
            return runner.run(task)[0].expand(2).clone()
        return x.clone()

    with visiting({1: nested}):
        (made,) = runner.execute(program.fresh(), [], [])
    # each level sums six ones, and twice what the level below made
    expected = 8.0
    for _ in range(depth):
        expected = 6 + 2 * expected
    assert made.item() == expected
    assert depths == list(range(1, depth + 2))


def test_every_kernel_may_run_a_graph_at_once() -> None:
    program = visits(8)
    runner = ParallelGraphExecutor(program.graph, num_threads=2)

    def nested(x: torch.Tensor) -> torch.Tensor:
        task, _ = new_task(runner, program)
        return runner.run(task)[0].expand(2).clone() if task.reentrant_depth <= 2 else x.clone()

    with visiting(dict.fromkeys(range(8), nested)):
        (made,) = runner.execute(program.fresh(), [], [])
    assert made.item() == 16 * 16 * 16


def test_the_owner_is_the_thread_that_runs() -> None:
    program = visits(1)
    task, _ = new_task(SerialGraphExecutor(program.graph), program)
    assert task.owner == threading.get_ident()
    assert task.reentrant_depth == 0


# ----- the end of a run


@executors
def test_the_future_has_the_outputs(executor: type[GraphExecutor]) -> None:
    program = visits(2)
    runner = executor(program.graph)
    task, _ = new_task(runner, program)
    future: Future[list[torch.Tensor]] = task.future
    outputs = runner.run(task)
    assert future.result(timeout=0) is outputs
    assert not task.has_error


@executors
def test_the_future_has_the_error(executor: type[GraphExecutor]) -> None:
    program = visits(2)
    runner = executor(program.graph)
    task, _ = new_task(runner, program)
    future = task.future
    with visiting({0: None}), pytest.raises(NodeError) as caught:  # None cannot be called
        runner.run(task)
    assert future.exception(timeout=0) is caught.value
    assert task.has_error


def test_an_error_without_signal_leaves_the_future_to_the_owner() -> None:
    program = visits(1)
    task, _ = new_task(SerialGraphExecutor(program.graph), program)
    future = task.future
    task.set_exception_without_signal(ZeroDivisionError())
    task.set_exception_without_signal(KeyError())  # the first one counts
    assert task.has_error
    assert not future.done()
    with pytest.raises(ZeroDivisionError):
        task.raise_noted()
    task.raise_noted()  # it is forgotten


def test_exit_on_error_does_not_wait_for_other_kernels() -> None:
    program = visits(2)
    runner = ParallelGraphExecutor(program.graph)
    go_on, ended, meeting = threading.Event(), threading.Event(), threading.Barrier(2)

    def visitor(x: torch.Tensor) -> torch.Tensor:
        meeting.wait(timeout=30)
        if threading.get_ident() == task.owner:
            raise ZeroDivisionError
        go_on.wait(timeout=30)
        ended.set()
        return x.clone()

    task, _ = new_task(runner, program, exit_on_error=True)
    with visiting({0: visitor, 1: visitor}):
        with pytest.raises(NodeError):
            runner.run(task)
        assert not ended.is_set()
        go_on.set()
        assert ended.wait(timeout=30)


@executors
def test_final_callbacks_run_at_the_end_on_the_callers_thread(executor: type[GraphExecutor]) -> None:
    program = visits(6)
    calls: list[tuple[str, int]] = []

    def again() -> None:
        calls.append(("first", threading.get_ident()))
        queue_callback(lambda: calls.append(("second", threading.get_ident())))

    def visitor(x: torch.Tensor) -> torch.Tensor:
        queue_callback(again)
        return x.clone()

    with visiting({4: visitor}):
        executor(program.graph).execute(program.fresh(), [], [])
    assert calls == [("first", threading.get_ident()), ("second", threading.get_ident())]


@executors
def test_a_callback_that_fails_fails_the_run(executor: type[GraphExecutor]) -> None:
    program = visits(1)

    def fail() -> None:
        raise ZeroDivisionError

    with visiting({0: lambda x: (queue_callback(fail), x.clone())[1]}), pytest.raises(ZeroDivisionError):
        executor(program.graph).execute(program.fresh(), [], [])


def test_callbacks_need_a_run() -> None:
    with pytest.raises(RuntimeError, match="no graph is run on this thread"):
        queue_callback(lambda: None)


# ----- tools


@executors
def test_kernels_see_their_run(executor: type[GraphExecutor]) -> None:
    program = visits(4)
    runner = executor(program.graph)
    task, _ = new_task(runner, program)
    seen: list[int] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(current_graph_task_id())
        assert current_graph_task_execution_order() == list(program.graph.nodes)
        return x.clone()

    with visiting(dict.fromkeys(range(4), look)):
        runner.run(task)
    assert seen == [task.id] * 4
    assert current_graph_task_id() == -1


def test_ids_are_not_used_twice() -> None:
    program = visits(1)
    runner = SerialGraphExecutor(program.graph)
    assert new_task(runner, program)[0].id < new_task(runner, program)[0].id


# ----- Note [Thread-local state]


def on_two_threads(program: Built, look: Callable[[], object], **options: bool) -> dict[int, object]:
    """What `look` finds on the caller's thread and on a worker's, within a kernel each."""
    runner = ParallelGraphExecutor(program.graph)
    found: dict[int, object] = {}
    meeting = threading.Barrier(2)

    def visitor(x: torch.Tensor) -> torch.Tensor:
        meeting.wait(timeout=30)
        found[threading.get_ident()] = look()
        return x.clone()

    with visiting({0: visitor, 1: visitor}):
        runner.run(new_task(runner, program, **options)[0])
    assert len(found) == 2
    return found


@pytest.mark.parametrize("mode", [False, True])
def test_the_grad_mode_is_the_tasks_on_every_thread(mode: bool) -> None:
    program = Program()
    x = program.input(torch.ones(2))
    made = [program.call(aten.mul.Tensor, x, place) for place in range(20)]
    multiplied = built(program, *made)
    runner, weight = ParallelGraphExecutor(multiplied.graph), torch.ones(2, requires_grad=True)
    frame = ExecutionFrame()
    frame.fill(runner.kernels.template, [weight], [], [])
    outputs = runner.run(GraphTask(runner.kernels, runner.exec_info, frame, grad_mode=mode))
    assert {output.requires_grad for output in outputs} == {mode}


@pytest.mark.parametrize("mode", [False, True])
def test_workers_take_over_the_inference_mode(mode: bool) -> None:
    with torch.inference_mode(mode):
        assert set(on_two_threads(visits(2), torch.is_inference_mode_enabled).values()) == {mode}


def test_workers_take_over_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert set(on_two_threads(visits(2), torch.get_num_threads).values()) == {count}
    finally:
        torch.set_num_threads(before)


@executors
def test_autocast_does_not_reach_into_a_run(executor: type[GraphExecutor]) -> None:
    program = Program()
    x = program.input(torch.ones(2, 2))
    product = built(program, program.call(aten.mm.default, x, x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(executor(product.graph).execute(product.fresh(), [], []), product.outputs)


def test_the_callers_stream_waits_for_the_leaves() -> None:
    device = FakeDevice()
    other, idle = device.new_stream(), device.new_stream()
    streams = LeafStreams(device)
    streams.note_leaf()
    with device.on(other):
        streams.note_leaf()
        streams.note_leaf()
    other.time = idle.time = 1
    streams.join()
    assert device.current_stream().seen == {other: 1}


def test_an_idle_run_can_be_waited_for_from_another_thread() -> None:
    program = visits(2)
    runner = ParallelGraphExecutor(program.graph)
    task, _ = new_task(runner, program)
    future, results = task.future, []
    waiting = threading.Thread(target=lambda: results.append(future.result(timeout=30)))
    waiting.start()
    time.sleep(0.01)
    outputs = runner.run(task)
    waiting.join(timeout=30)
    assert results == [outputs]


def test_everything_is_the_default() -> None:
    program = visits(2)
    info: ExecInfo = SerialGraphExecutor(program.graph).exec_info
    assert info.needed == tuple(range(len(program.graph.nodes)))
    assert info.outputs == program.graph.outputs
