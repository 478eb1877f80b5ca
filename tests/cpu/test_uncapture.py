"""`uncapture` gives back what was captured, and `captures` tells what became of the calls."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import lazy_backend
from lazy_backend import config, metrics
from lazy_backend.replay.accounts import NEW_PLACE


@pytest.fixture(autouse=True)
def interpreted() -> None:
    config.backend = "eager"


def rows() -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in lazy_backend.captures()}


class Loop:
    """A model, AdamW and a schedule from seed 0."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).to("lazy")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler: Any = None

    def step(self, number: int) -> float:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number)).to("lazy")
        loss = self.model(x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        lazy_backend.mark_step()
        return loss.item()


def test_a_module_and_an_optimizer_run_as_written_again() -> None:
    plain, loop = Loop(), Loop()
    expected = [plain.step(number) for number in range(30)]
    lazy_backend.capture(loop.model)
    lazy_backend.capture(loop.optimizer)
    found = [loop.step(number) for number in range(15)]
    counted = rows()
    assert counted["Sequential"]["calls"] == counted["AdamW"]["calls"] == 15
    assert min(counted["Sequential"]["replays"], counted["AdamW"]["replays"]) > 5
    assert "test_uncapture.py" in counted["AdamW"]["site"]
    assert lazy_backend.uncapture(loop.model) is loop.model
    assert lazy_backend.uncapture(loop.optimizer) is loop.optimizer
    jumps = metrics.counter_value("RegionJump")
    found += [loop.step(number) for number in range(15, 30)]
    assert metrics.counter_value("RegionJump") == jumps
    assert found == expected
    assert not {"step", "zero_grad"} & loop.optimizer.__dict__.keys()
    lazy_backend.capture(loop.model)  # and once more
    for number in range(15):
        loop.step(number)
    assert metrics.counter_value("RegionJump") > jumps


@pytest.mark.parametrize("order", ["scheduler first", "capture first"])
def test_schedules_go_on(order: str) -> None:
    plain, loop = Loop(), Loop()
    plain.scheduler = torch.optim.lr_scheduler.ExponentialLR(plain.optimizer, 0.9)
    expected = [plain.step(number) for number in range(24)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # that steps are not seen by the scheduler
        if order == "capture first":
            lazy_backend.capture(loop.optimizer)
        loop.scheduler = torch.optim.lr_scheduler.ExponentialLR(loop.optimizer, 0.9)
        if order == "scheduler first":
            lazy_backend.capture(loop.optimizer)
        found = [loop.step(number) for number in range(12)]
        lazy_backend.uncapture(loop.optimizer)
        replays = rows()["AdamW"]["replays"] if "AdamW" in rows() else 0
        found += [loop.step(number) for number in range(12, 24)]
    assert found == expected
    assert "AdamW" not in rows() or rows()["AdamW"]["replays"] == replays


def test_a_backward_of_a_replayed_call_comes_after_uncapture() -> None:
    loop = Loop()
    lazy_backend.capture(loop.model)
    for number in range(12):
        loop.step(number)
    x = torch.ones(3, 4, device="lazy")
    loop.optimizer.zero_grad()
    loss = loop.model(x).sum()
    lazy_backend.uncapture(loop.model)
    loss.backward()
    found = [parameter.grad.cpu() for parameter in loop.model.parameters() if parameter.grad is not None]
    loop.optimizer.zero_grad()
    loop.model(x).sum().backward()
    expected = [parameter.grad.cpu() for parameter in loop.model.parameters() if parameter.grad is not None]
    assert len(found) == 4
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_functions() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    captured = lazy_backend.capture(double)
    for _ in range(10):
        captured(torch.ones(3, device="lazy"))
    row = next(row for name, row in rows().items() if name.endswith("double"))
    assert row["kind"] == "function"
    assert row["calls"] == 10
    assert row["replays"] == metrics.counter_value("CapturedCall") > 5
    assert "captured function" in str(lazy_backend.explain())
    assert lazy_backend.uncapture(captured) is double
    assert lazy_backend.uncapture(double) is double
    assert lazy_backend.uncapture(lazy_backend.capture(captured)) is double
    assert row["microseconds_per_replay"] is None


def test_a_step_that_was_held_on_to() -> None:
    loop = Loop()
    lazy_backend.capture(loop.optimizer)
    held = loop.optimizer.step
    for number in range(12):
        loop.step(number)
    lazy_backend.uncapture(loop.optimizer)
    replays = metrics.counter_value("RegionJump")
    for _ in range(3):
        held()
        lazy_backend.mark_step()
    assert metrics.counter_value("RegionJump") == replays


def test_reasons_are_told() -> None:
    kept = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(x * 2)
        return x + 1

    captured = lazy_backend.capture(keep)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lazy_backend.CaptureWarning)
        for _ in range(8):
            captured(torch.ones(3, device="lazy"))
    (row,) = (row for name, row in rows().items() if name.endswith("keep"))
    assert row["replays"] == 0
    assert sum(row["as_written"].values()) > 0


def test_a_step_without_an_end_is_a_reason() -> None:
    lazy_backend.mark_step()  # from now on, steps of this thread end here alone
    model = lazy_backend.capture(nn.Linear(4, 8).to("lazy"))
    optimizer = lazy_backend.capture(torch.optim.SGD(model.parameters(), lr=0.1))
    for number in range(70):
        optimizer.zero_grad()
        model(torch.full((3, 4), float(number)).to("lazy")).std().backward()
        optimizer.step()
    found = rows()
    assert found["Linear"]["replays"] == found["SGD"]["replays"] == 0
    assert NEW_PLACE in found["Linear"]["as_written"]
    assert NEW_PLACE in found["SGD"]["as_written"]


def test_what_is_not_captured_is_returned() -> None:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    assert lazy_backend.uncapture(module) is module
    assert lazy_backend.uncapture(optimizer) is optimizer
