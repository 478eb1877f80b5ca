"""Waits for the device: after them a read takes no time. The work takes a quarter of a second, and is known."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness import RANK_PROGRAM, count, run_program, run_ranks

import lazy_backend
from lazy_backend.tensors.contexts import contexts

WIDTH, PRODUCTS = 768, 16


def work(x: torch.Tensor) -> torch.Tensor:
    y = x
    for _ in range(PRODUCTS):
        y = (y @ x) / WIDTH
    return y


def seconds(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def event() -> None:
    marked = torch.Event("lazy")
    marked.record()
    marked.synchronize()


def event_of_the_module() -> None:
    torch.lazy.current_stream().record_event().synchronize()


def polled_event() -> None:
    marked = torch.Event(torch.device("lazy"), enable_timing=False)
    marked.record()
    while not marked.query():
        time.sleep(0.001)


def polled_stream() -> None:
    while not torch.lazy.current_stream().query():
        time.sleep(0.001)


def fork() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


WAITS = {
    "torch.lazy.synchronize": lambda: torch.lazy.synchronize(),
    "mark_step": lambda: lazy_backend.mark_step(wait=True),
    "event": event,
    "an event of the module": event_of_the_module,
    "a polled event": polled_event,
    "torch.Stream": lambda: torch.Stream("lazy").synchronize(),
    "a polled stream": polled_stream,
    "a fork": fork,
}
INPUTS: list[torch.Tensor] = []


@pytest.fixture(autouse=True)
def known(fresh_state: None) -> None:
    """The work was done twice before."""
    lazy_backend.config.compile = "off"
    x = torch.full((WIDTH, WIDTH), 0.5, device="lazy")
    INPUTS[:] = [x]
    for _ in range(2):
        work(x)
        lazy_backend.mark_step(wait=True)


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS.keys())
def test_after_a_wait_a_read_takes_no_time(wait: Callable[[], None]) -> None:
    y = work(INPUTS[0])
    assert contexts.get_active_devices()[0].has_pending()
    with count("GraphCut") as cuts:
        waited, read = seconds(wait), seconds(lambda: y[0, 0].item())
    assert cuts() == 0
    assert read < waited / 4


@pytest.mark.parametrize("end", ["step", "stop"])
def test_the_end_of_a_profiled_step_waits(end: str) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        y = work(INPUTS[0])
        waited = seconds(getattr(profiler, end))
        assert seconds(lambda: y[0, 0].item()) < waited / 4


def test_an_event_leaves_later_steps_as_they_are() -> None:
    y = work(INPUTS[0])
    marked = torch.Event("lazy")
    assert marked.device is None
    marked.record()
    assert marked.device == torch.device("lazy:0")
    lazy_backend.mark_step()
    later = y + 1
    marked.synchronize()
    assert marked.query()
    assert contexts.get_active_devices()[0].has_pending()
    del later


def test_streams_and_events_of_other_devices_are_those_of_pytorch() -> None:
    original = torch.Event.__mro__[1]
    assert type(torch.Event("cpu")) is original
    assert isinstance(torch.Event("cpu"), torch.Event)
    assert not isinstance(torch.Event("lazy"), torch.Event)
    assert issubclass(torch.Event, original)

    class Own(torch.Event):
        pass

    assert type(Own("cpu")) is Own
    assert isinstance(Own("cpu"), torch.Event)
    assert not isinstance(torch.Event("cpu"), Own)


def test_what_is_recorded_runs_before_the_program_ends(tmp_path: Path) -> None:
    code = """
import torch, lazy_backend
lazy_backend.config.compile = "off"
table = torch.ones(5, device="lazy")
for place in (0, 0, 5):
    y = table[torch.tensor([place]).to("lazy")]
    lazy_backend.mark_step() if place == 0 else None
print("done")
"""
    done = run_program(code + "\nimport sys; sys.stderr = sys.stdout", tmp_path)
    assert done.startswith("done\n")
    assert "out of bounds" in done


RANKS = """
x = torch.ones(64, 64, device="lazy")
for _ in range(3):
    y = x @ x + 1
    lazy_backend.mark_step()
for barrier in (dist.barrier, dist.monitored_barrier):
    y = x @ x + 1
    assert y._data.storage.tensor is None
    barrier()
    assert y._data.storage.tensor is not None
dist.destroy_process_group()
"""


def test_a_barrier_waits(tmp_path: Path) -> None:
    for rank in run_ranks(RANK_PROGRAM + RANKS, tmp_path, arguments=["eager"]):
        assert rank.returncode == 0, rank.stderr
