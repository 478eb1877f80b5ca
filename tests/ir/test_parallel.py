"""The parallel executor: order, errors, threads, and the serial executor's results bit for bit."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from builder import VISIT, Built, Program, aten, branches, built, chain, random_graph, visiting, visits, wide
from harness import assert_same, run_program

from lazy_backend.lowering.checks.refusals import NodeError
from lazy_backend.lowering.interpreter.frame import ExecutionFrame
from lazy_backend.lowering.interpreter.graph_executor import GraphExecutor
from lazy_backend.lowering.interpreter.parallel import ParallelGraphExecutor
from lazy_backend.lowering.interpreter.serial import SerialGraphExecutor
from lazy_backend.lowering.ir.graph import dependencies

EXECUTORS = [SerialGraphExecutor, ParallelGraphExecutor]


def run(executor: GraphExecutor, program: Built) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The outputs, and the inputs afterwards."""
    inputs = program.fresh()
    return executor.execute(list(inputs), program.constants, program.seeds()), inputs


def log_visits(program: Built, executor: GraphExecutor) -> list[int]:
    """The order in which visitors were called; each returns a copy."""
    order: list[int] = []

    def visitor(who: int):
        def call(x: torch.Tensor) -> torch.Tensor:
            order.append(who)
            return x.clone()

        return call

    with visiting({who: visitor(who) for who in range(len(program.graph.nodes))}):
        run(executor, program)
    return order


# ----- results


@pytest.mark.parametrize("seed", range(60))
def test_random_graphs_run_as_in_eager(seed: int) -> None:
    program = random_graph(seed)
    serial, parallel = (run(executor(program.graph), program) for executor in EXECUTORS)
    assert_same(parallel, serial)
    if not program.graph.num_seeds:
        assert_same(serial, (program.outputs, program.inputs_after))


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_any_number_of_threads_will_do(threads: int) -> None:
    program = branches(4, 5, 8)
    executor = ParallelGraphExecutor(program.graph, num_threads=threads)
    for _ in range(10):
        assert_same(run(executor, program)[0], program.outputs)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("form", [chain, wide])
def test_ten_thousand_nodes(executor: type[GraphExecutor], form) -> None:
    program = form(10_000)
    assert_same(run(executor(program.graph), program)[0], program.outputs)


def test_a_graph_without_nodes() -> None:
    program = built(Program())
    assert run(ParallelGraphExecutor(program.graph), program) == ([], [])


def test_a_prefilled_frame_can_be_run() -> None:
    program = branches(3, 2, 4)
    executor, frame = ParallelGraphExecutor(program.graph), ExecutionFrame()
    for _ in range(2):
        frame.fill(executor.kernels.template, program.fresh(), program.constants, [])
        assert_same(executor.execute_with_prefilled_frame(frame), program.outputs)


# ----- order


def test_a_chain_runs_in_order() -> None:
    program = visits(20, chained=True)
    assert log_visits(program, ParallelGraphExecutor(program.graph)) == list(range(20))


def test_every_kernel_runs_once() -> None:
    program = visits(50)
    assert sorted(log_visits(program, ParallelGraphExecutor(program.graph, num_threads=4))) == list(range(50))


def test_the_end_of_a_diamond_waits_for_both_sides() -> None:
    program = Program()
    top = program.call(VISIT, program.input(torch.ones(2)), 0)
    sides = [program.call(VISIT, top, who) for who in (1, 2)]
    bottom = program.call(VISIT, program.call(aten.cat.default, sides), 3)
    diamond = built(program, bottom)
    executor = ParallelGraphExecutor(diamond.graph)
    for _ in range(20):
        order = log_visits(diamond, executor)
        assert (order[0], sorted(order[1:3]), order[3]) == (0, [1, 2], 3)


def test_independent_kernels_run_at_the_same_time() -> None:
    program = visits(2)
    meeting = threading.Barrier(2)

    def meet(x: torch.Tensor) -> torch.Tensor:
        meeting.wait(timeout=30)  # breaks unless both are there
        return x.clone()

    with visiting({0: meet, 1: meet}):
        assert_same(run(ParallelGraphExecutor(program.graph), program)[0], program.outputs)


def slowly(x: torch.Tensor) -> torch.Tensor:
    time.sleep(0.02)
    return x.clone()


def test_a_write_waits_for_the_readers_before_it() -> None:
    program = Program()
    x = program.input(torch.ones(2))
    read = program.call(VISIT, x, 0)
    program.call(aten.add_.Tensor, x, 1)
    late = program.call(aten.mul.Tensor, x, 10)
    written = built(program, read, late)
    with visiting({0: slowly}):
        assert_same(run(ParallelGraphExecutor(written.graph), written)[0], [torch.ones(2), torch.full((2,), 20.0)])


def test_a_reader_waits_for_the_write_through_a_view() -> None:
    program = Program()
    x = program.input(torch.ones(2, 2))
    row = program.call(aten.select.int, x, 0, 0)
    program.call(aten.copy_.default, row, program.call(VISIT, program.input(torch.zeros(2)), 0))
    total = program.call(aten.sum.default, x)
    written = built(program, total)
    with visiting({0: slowly}):
        assert_same(run(ParallelGraphExecutor(written.graph), written)[0], [torch.tensor(2.0)])


def test_every_edge_points_backwards() -> None:
    for seed in range(20):
        edges = dependencies(random_graph(seed).graph.nodes)
        assert all(before < place for place, others in enumerate(edges) for before in others)


# ----- memory


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_value_is_freed_after_its_last_use(executor: type[GraphExecutor]) -> None:
    program = Program()
    token = program.input(torch.ones(2))
    for who in range(4):
        token = program.call(VISIT, token, who)
    visited = built(program, token)
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[list[bool]] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        alive.append([tensor() is not None for tensor in made])
        made.append(weakref.ref(x))
        return x.clone()

    with visiting(dict.fromkeys(range(4), look)):
        executor(visited.graph).execute(visited.fresh(), [], [])
    # what the kernel two before this one read is gone; what the one before read may be in its last moments
    assert [before[:-1] for before in alive] == [[], [], [False], [False, False]]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_no_cycle_keeps_a_run_alive(executor: type[GraphExecutor]) -> None:
    program = visits(4)
    runner = executor(program.graph)

    def fail(x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    gc.collect()
    gc.disable()
    try:
        for functions in ({}, {3: fail}):
            tensor = torch.ones(2)
            kept, inputs = weakref.ref(tensor), [tensor]
            del tensor
            with visiting(functions), contextlib.suppress(NodeError):
                runner.execute(inputs, [], [])
            deadline = time.monotonic() + 5
            while kept() is not None and time.monotonic() < deadline:
                time.sleep(0.01)  # a worker may still be letting go
            assert kept() is None
    finally:
        gc.enable()


# ----- errors


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("place", range(6))
def test_an_error_names_its_node(executor: type[GraphExecutor], chained: bool, place: int) -> None:
    program = visits(6, chained)

    def fail(x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError(f"in {place}")

    runner = executor(program.graph)
    with visiting({place: fail}), pytest.raises(NodeError, match=rf"in {place}\n.*\n.*step.py:{place + 1}") as caught:
        run(runner, program)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert_same(run(runner, program)[0], program.outputs)  # nothing is left behind


def test_nothing_starts_after_an_error() -> None:
    program = visits(40, chained=True)
    called: list[int] = []

    def fail(x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    def note(x: torch.Tensor) -> torch.Tensor:
        called.append(1)
        return x.clone()

    functions = dict.fromkeys(range(40), note) | {10: fail}
    with visiting(functions), pytest.raises(NodeError):
        run(ParallelGraphExecutor(program.graph), program)
    assert len(called) == 10


def test_nothing_starts_after_an_error_on_another_thread() -> None:
    program = visits(40)
    caller, called, meeting = threading.get_ident(), [], threading.Barrier(2)

    def visitor(x: torch.Tensor) -> torch.Tensor:
        called.append(True)
        meeting.wait(timeout=30)
        if threading.get_ident() == caller:
            raise ZeroDivisionError
        time.sleep(0.02)
        return x.clone()

    with visiting(dict.fromkeys(range(40), visitor)), pytest.raises(NodeError):
        run(ParallelGraphExecutor(program.graph), program)
    assert len(called) == 2


def test_the_error_comes_when_all_kernels_have_ended() -> None:
    program = visits(2)
    meeting, ended = threading.Barrier(2), []

    def fail(x: torch.Tensor) -> torch.Tensor:
        meeting.wait(timeout=30)
        raise ZeroDivisionError

    def end_later(x: torch.Tensor) -> torch.Tensor:
        meeting.wait(timeout=30)
        time.sleep(0.02)
        ended.append(True)
        return x.clone()

    with visiting({0: fail, 1: end_later}), pytest.raises(NodeError):
        run(ParallelGraphExecutor(program.graph), program)
    assert ended == [True]


# ----- threads


def workers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("graph worker")}


def test_the_threads_end_with_the_executor() -> None:
    before = workers()
    executor = ParallelGraphExecutor(chain(2).graph, num_threads=4)
    mine = workers() - before
    assert len(mine) == 3
    del executor
    for thread in mine:
        thread.join(timeout=30)
        assert not thread.is_alive()


def test_a_stopped_pool_leaves_the_work_to_the_caller() -> None:
    program = branches(3, 3, 4)
    executor = ParallelGraphExecutor(program.graph)
    executor._pool.stop()
    assert_same(run(executor, program)[0], program.outputs)
    executor._pool.start(1)
    assert_same(run(executor, program)[0], program.outputs)
    executor._pool.stop()


def test_runs_at_the_same_time_do_not_meet() -> None:
    program = branches(4, 6, 8)
    executor = ParallelGraphExecutor(program.graph, num_threads=3)
    results: list[list[torch.Tensor]] = []

    def work() -> None:
        results.extend(run(executor, program)[0] for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(results) == 100
    for result in results:
        assert_same(result, program.outputs)


def test_a_forked_child_runs_too(tmp_path) -> None:
    code = """
import os, sys, torch
sys.path[:0] = [{tests!r}, {tests!r} + "/ir"]
from builder import branches
from lazy_backend.lowering.interpreter.parallel import ParallelGraphExecutor
torch.set_num_threads(1)
program = branches(3, 2, 4)
executor = ParallelGraphExecutor(program.graph)
executor.execute(program.fresh(), [], [])
child = os.fork()
made = executor.execute(program.fresh(), [], [])
assert all(map(torch.equal, made, program.outputs))
if not child:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print("both")
"""
    tests = str(Path(__file__).resolve().parent.parent)
    assert run_program(code.format(tests=tests), tmp_path) == "both\n"
