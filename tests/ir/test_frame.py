"""Frames: what a run starts from, and the pool that keeps them."""

from __future__ import annotations

import contextlib

import pytest
import torch
from builder import CPU, Program, aten, chain

from lazy_backend.lowering.interpreter.frame import ExecutionFrame, FramePool
from lazy_backend.lowering.interpreter.kernels import make_kernels


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def pool(clock: Clock) -> FramePool:
    return FramePool(ExecutionFrame, max_age=10.0, clock=clock)


def test_a_filled_frame_holds_inputs_constants_and_literals() -> None:
    program, x = Program(), torch.ones(2)
    graph = program.graph(program.call(aten.add.Tensor, program.input(x), 2.5, alpha=3))
    frame = ExecutionFrame()
    frame.fill(make_kernels(graph).template, [x], [2.5], [])
    assert frame.values[0] is x
    assert frame.values[1:] == [None, 2.5]  # the result's slot, the constant; `alpha` is the kernel's own


def test_a_template_can_hold_inputs() -> None:
    template = make_kernels(chain(1).graph).template
    held = template.holding({0: torch.zeros(4)})
    frame = ExecutionFrame()
    frame.fill(held, [], [], [])
    assert frame.values[0].tolist() == [0.0] * 4
    assert template.values[0] is None


def test_a_missing_input_is_noticed() -> None:
    with pytest.raises(ValueError, match="zip"):
        ExecutionFrame().fill(make_kernels(chain(1).graph).template, [], [], [])


def test_buffers_stay_when_a_frame_is_cleared() -> None:
    template, buffer = make_kernels(chain(1).graph).template, torch.empty(4)
    frame = ExecutionFrame([(1, buffer)])
    for _ in range(2):
        frame.fill(template, [torch.ones(4)], [], [])
        assert frame.values[1] is buffer
        frame.clear()
    assert frame.values == []


def test_one_frame_serves_one_run_after_the_other() -> None:
    frames = pool(Clock())
    with frames.frame() as first:
        pass
    with frames.frame() as second:
        assert second is first
    assert frames.num_frames == 1


@pytest.mark.parametrize("runs", [1, 2, 5])
def test_the_pool_grows_with_the_runs_in_flight(runs: int) -> None:
    frames = pool(Clock())
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(frames.frame()) for _ in range(runs)]
        assert len(set(taken)) == runs
        assert frames.num_frames == runs
    assert frames.num_frames == runs


def test_a_frame_that_nobody_used_is_dropped() -> None:
    clock = Clock()
    frames = pool(clock)
    with frames.frame(), frames.frame():
        pass
    for clock.now in (5.0, 9.0, 14.0):
        with frames.frame():
            pass
    # the frame used last is used again, so the other one was idle all the time
    assert frames.num_frames == 1


def test_stale_frames_are_dropped_when_asked() -> None:
    clock = Clock()
    frames = pool(clock)
    with frames.frame():
        pass
    clock.now = 10.0
    frames.clear_stale()
    assert frames.num_frames == 1
    clock.now = 10.1
    frames.clear_stale()
    assert frames.num_frames == 0


def test_a_frame_of_a_failed_run_is_dropped() -> None:
    frames = pool(Clock())
    with pytest.raises(ZeroDivisionError), frames.frame():
        raise ZeroDivisionError
    assert frames.num_frames == 0


def test_a_frame_keeps_no_tensor_of_its_run() -> None:
    frames = pool(Clock())
    with frames.frame() as frame:
        frame.fill(make_kernels(chain(1).graph).template, [torch.ones(4, device=CPU)], [], [])
    assert frame.values == []
