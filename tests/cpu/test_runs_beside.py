"""Runs beside recording: the same results, errors and state, without the GIL, and only where that gains something."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import count, run_python
from torch import nn

import lazy_backend
from lazy_backend import ExecutionError, PoisonedTensorError
from lazy_backend.lowering.artefacts.run_thread import Overlap, available_cores
from lazy_backend.lowering.compilation.compiler import CompiledRun
from lazy_backend.tensors.contexts import contexts


@pytest.fixture(autouse=True)
def compiled() -> None:
    lazy_backend.config.backend = "inductor"


def warm(step: Callable[[], Any]) -> None:
    """Call until runs take place beside recording."""
    for _ in range(4):
        kept = step()
        lazy_backend.mark_step()
    lazy_backend.wait_device_ops()
    with count("ExecuteBeside") as runs:
        kept = step()
        lazy_backend.mark_step()
        lazy_backend.wait_device_ops()
    assert runs() == 1
    del kept


class LongRun:
    """A step of products, which takes a tenth of a second or so."""

    def __init__(self) -> None:
        self.weight = torch.full((1024, 1024), 1 / 1024, device="lazy")
        self.state = torch.ones(1024, 1024, device="lazy")
        warm(self.step)
        start = time.perf_counter()
        self.step()
        lazy_backend.mark_step()
        lazy_backend.wait_device_ops()
        self.seconds = time.perf_counter() - start

    def step(self) -> None:
        for _ in range(4):
            self.state = self.state @ self.weight


def is_over() -> bool:
    """Whether the run under way has ended. Asks nobody to hand out its results."""
    run: Any = contexts.get_device_context(0).locker._run
    return run is None or run.is_over()


@pytest.fixture
def greedy() -> Iterator[None]:
    """Threads keep the GIL until they give it away."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("greedy")
def test_a_run_goes_on_while_python_computes() -> None:
    long = LongRun()
    long.step()
    lazy_backend.mark_step()
    assert not is_over()
    end = time.perf_counter() + 10 * long.seconds
    while time.perf_counter() < end:
        pass
    assert is_over()
    assert long.state[0, 0].item() == pytest.approx(1.0)


def test_nobody_asks_for_the_results_of_a_run_until_an_event_does() -> None:
    long = LongRun()
    long.step()
    lazy_backend.mark_step()
    event = torch.lazy.Event()  # type: ignore[attr-defined]
    polls = 0
    while not event.query():
        polls += 1
        time.sleep(0.001)
    assert polls
    assert contexts.get_device_context(0).locker.is_idle()


@pytest.mark.scenario
def test_training_is_that_of_runs_within_the_call() -> None:
    def losses(where: str, optimizer: Callable[..., torch.optim.Optimizer]) -> list[list[float]]:
        torch.manual_seed(0)
        lazy_backend.config.run_in_background = where
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4)).to("lazy")
        own = optimizer(model.parameters(), lr=0.05)
        kept = []
        for number in range(12):
            inputs, targets = torch.randn(6, 8).to("lazy"), torch.randn(6, 4).to("lazy")
            loss = nn.functional.mse_loss(model(inputs), targets)
            own.zero_grad(set_to_none=number % 2 == 0)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            own.step()
            lazy_backend.mark_step()
            kept.append(loss.detach())
        return [[loss.item() for loss in kept], *[parameter.tolist() for parameter in model.parameters()]]

    for optimizer in (torch.optim.SGD, torch.optim.AdamW):
        losses("never", optimizer)  # its graphs are interpreted at first
        with count("ExecuteBeside") as runs:
            beside = losses("always", optimizer)
        assert runs() >= 6
        assert beside == losses("never", optimizer)


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x[2:],
        lambda x: x[:, 3:7],
        lambda x: x.t()[4:],
        lambda x: x[1:, ::2],
        lambda x: x[6:],
        lambda x: x.half()[2:],
        lambda x: x.long()[1:],
        lambda x: torch.view_as_complex(x.reshape(6, 5, 2)).imag[1:],
    ],
)
def test_inputs_that_are_views(look: Callable[[torch.Tensor], torch.Tensor]) -> None:
    whole = torch.arange(60.0).reshape(6, 10)
    own = look(whole.to("lazy"))
    lazy_backend.mark_step()
    made: list[torch.Tensor] = []

    def step() -> None:
        made.append(own * 2 + 1)

    warm(step)
    torch.testing.assert_close(made[-1].cpu(), look(whole) * 2 + 1)
    own.mul_(3)  # what a run writes in place
    lazy_backend.mark_step()
    torch.testing.assert_close(own.cpu(), look(whole) * 3)


def test_inputs_are_freed_within_the_run() -> None:
    """They are those of the run alone once it has begun, and it does not wait for the GIL to free them."""
    alive: list[weakref.ref[torch.Tensor]] = []
    weight = torch.full((64, 64), 1 / 64, device="lazy")
    total = torch.zeros((), device="lazy")

    def step() -> None:
        nonlocal total
        batch = torch.ones(64, 64).to("lazy")
        alive.append(weakref.ref(batch._data.storage.tensor))
        total = total + (batch @ weight).sum()

    warm(step)
    step()
    lazy_backend.mark_step()
    assert alive[-1]() is None
    assert total.item() == 64 * 64 * len(alive)


class Lookup:
    """A step that fails where an index is out of range."""

    def __init__(self) -> None:
        self.table = torch.arange(8.0).reshape(4, 2).to("lazy")
        self.good, self.bad = torch.tensor([1, 2]).to("lazy"), torch.tensor([1, 9]).to("lazy")
        warm(lambda: self.step(self.good))

    def step(self, index: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(index, self.table) * 2


def read(made: torch.Tensor) -> None:
    made.tolist()


def wait(made: torch.Tensor) -> None:
    lazy_backend.wait_device_ops()


def sync(made: torch.Tensor) -> None:
    made.add_(1)
    lazy_backend.mark_step()


@pytest.mark.parametrize("find", [read, wait, sync])
def test_an_error_is_raised_once_with_its_lines(find: Callable[[torch.Tensor], None]) -> None:
    lookup = Lookup()
    made = lookup.step(lookup.bad)
    lazy_backend.mark_step()
    with pytest.raises(ExecutionError, match=r"(?s)out of range.*test_runs_beside\.py"):
        find(made)
    with pytest.raises(PoisonedTensorError):
        made.tolist()
    assert lookup.step(lookup.good).tolist() == [[4.0, 6.0], [8.0, 10.0]]


def test_a_run_that_cannot_begin_takes_place_within_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    lookup = Lookup()

    def refuse(self: CompiledRun, inputs: list[torch.Tensor], constants: Any, seeds: Any) -> None:
        inputs.clear()
        raise MemoryError

    monkeypatch.setattr(CompiledRun, "begin", refuse)
    with count("ExecuteBeside") as runs:
        made = lookup.step(lookup.good)
        lazy_backend.mark_step()
        lazy_backend.wait_device_ops()
    assert runs() == 0
    assert made.tolist() == [[4.0, 6.0], [8.0, 10.0]]


def test_settings_of_the_thread_that_records_hold_in_the_run() -> None:
    tiny = torch.full((64,), 1e-39).to("lazy")
    made: list[torch.Tensor] = []

    def step() -> None:
        made.append(tiny * 0.5)

    warm(step)
    try:
        torch.set_flush_denormal(True)
        warm(step)
        assert made[-1].cpu().count_nonzero() == 0
    finally:
        torch.set_flush_denormal(False)
    warm(step)
    assert made[-1].cpu().count_nonzero() == 64


def test_many_threads_and_devices() -> None:
    lazy_backend.config.num_devices = 2
    failures: list[BaseException] = []

    def train(index: int) -> None:
        try:
            total = torch.zeros(16, device=f"lazy:{index % 2}")
            for number in range(200):
                total = total + 1
                if number % 17 == index:
                    assert total[0].item() == number + 1
                lazy_backend.mark_step(f"lazy:{index % 2}")
            assert total.tolist() == [200.0] * 16
        except BaseException as raised:
            failures.append(raised)

    threads = [threading.Thread(target=train, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


PREAMBLE = """
import os, sys, time, torch, lazy_backend
lazy_backend.config.compile = "foreground"
lazy_backend.config.run_in_background = "always"
lazy_backend.config.compile_after_operators = 0
weight = torch.full((1024, 1024), 1 / 1024, device="lazy")
state = torch.ones(1024, 1024, device="lazy")
def step():
    global state
    for _ in range(4):
        state = state @ weight
    lazy_backend.mark_step()
for _ in range(6):
    step()
lazy_backend.wait_device_ops()
step()
assert lazy_backend.metrics.counter_value("ExecuteBeside") >= 1
"""


def test_the_end_of_a_program_waits_for_a_run(tmp_path: Path) -> None:
    assert run_python(PREAMBLE + "print('done')", tmp_path) == "done\n"


def test_a_fork_during_a_run(tmp_path: Path) -> None:
    code = """
child = os.fork()
step()
who = "child" if child == 0 else "parent"
os.write(1, f"{who} {round(state[0, 0].item(), 3)}\\n".encode())  # in one piece: the other process writes here, too
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    assert sorted(run_python(PREAMBLE + code, tmp_path).splitlines()) == ["child 1.0", "parent 1.0"]


# ----- where runs take place


@pytest.mark.skipif(available_cores() <= 1, reason="needs two cores")
def test_a_loop_that_waits_for_each_step_runs_within_it() -> None:
    lazy_backend.config.run_in_background = "auto"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        value = torch.ones(4, device="lazy")

        def step() -> None:
            nonlocal value
            value = value * 1.0
            lazy_backend.mark_step()

        warm(step)
        with count("ExecuteBeside") as runs:
            for _ in range(40):
                step()
                value.tolist()
        assert 1 <= runs() <= 20
    finally:
        torch.set_num_threads(threads)


def test_overlap_is_tried_again_and_ever_more_seldom() -> None:
    overlap = Overlap()
    assert all(overlap.pays() for _ in range(100))

    def note(number: int, waited: float) -> None:
        for _ in range(number):
            overlap.note(seconds=1.0, waited=waited)

    note(8, waited=0.999999)
    assert [overlap.pays() for _ in range(65)] == [False] * 64 + [True]
    note(1, waited=0.5)
    note(3, waited=0.999999)
    assert [overlap.pays() for _ in range(129)] == [False] * 128 + [True]
    note(8, waited=0.5)
    note(7, waited=0.999999)
    assert all(overlap.pays() for _ in range(100))
    note(1, waited=0.999999)
    assert [overlap.pays() for _ in range(65)] == [False] * 64 + [True]


def test_a_run_beside_gains_what_it_takes_within_the_call() -> None:
    overlap = Overlap()

    def note(number: int, waited: float) -> None:
        for _ in range(number):
            overlap.note(seconds=1.7e-5, waited=waited)

    note(8, waited=0.0)
    assert not overlap.pays()  # to hand it over takes as long
    for _ in range(64):
        overlap.note_within(6e-5)
    overlap.note_within(1.0)  # interrupted
    assert [overlap.pays() for _ in range(64)] == [False] * 63 + [True]
    note(100, waited=0.0)
    assert overlap.pays()
    note(100, waited=1e-4)  # somebody waits
    assert not overlap.pays()
