"""Captured steps with every optimizer, as users make it: losses and weights are those of eager, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import assert_same, count
from torch import nn
from torch.optim import lr_scheduler

import lazy_backend
from lazy_backend import capture

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"weight_decay": 0.1},
    "Adam": {"weight_decay": 0.01, "amsgrad": True},
    "NAdam": {"weight_decay": 0.01, "decoupled_weight_decay": True},
    "RAdam": {"weight_decay": 0.01, "decoupled_weight_decay": True},
    "Adamax": {"weight_decay": 0.01},
    "Adagrad": {"weight_decay": 0.01, "lr_decay": 0.1},
    "RMSprop": {"weight_decay": 0.01, "momentum": 0.9, "centered": True},
    "Rprop": {},
    "ASGD": {"weight_decay": 0.01, "t0": 5.0},
    "Adadelta": {"weight_decay": 0.01},
    "SGD": {"weight_decay": 0.01, "momentum": 0.9, "nesterov": True},
}
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer, int], Any]] = {
    "constant": lambda optimizer, steps: None,
    "cosine": lambda optimizer, steps: lr_scheduler.CosineAnnealingLR(optimizer, steps),
    "one-cycle": lambda optimizer, steps: lr_scheduler.OneCycleLR(
        optimizer,
        0.05,
        total_steps=steps,
        cycle_momentum=any(name in optimizer.defaults for name in ("momentum", "betas")),
    ),
    "plateau": lambda optimizer, steps: lr_scheduler.ReduceLROnPlateau(optimizer, patience=steps // 8, threshold=0.5),
}
WAYS = ("plain", "clipped", "accumulated", "scaled", "scaled and clipped")
# the pairs of the usual run: skipped steps do not depend on the schedule, and the slow test below takes all pairs
PAIRS = [(schedule, way) for way in WAYS for schedule in SCHEDULES if "scaled" not in way or schedule == "one-cycle"]
OVERFLOWS = 13  # the step whose gradients overflow where losses are scaled


class Run:
    """A tiny network with two groups of parameters, trained on a device."""

    def __init__(self, device: str, name: str, schedule: str, steps: int, way: str, foreach: bool | None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        generator = torch.Generator().manual_seed(1)
        self.batches = [torch.randn(4, 3, generator=generator).to(device) for _ in range(8)]
        self.model.to(device)
        groups = [
            {"params": self.model[0].parameters(), "lr": 0.02},
            {"params": self.model[2].parameters()},
        ]
        if foreach is None:
            foreach = None if device == "lazy" else True  # what a lazy device takes by default
        self.optimizer = getattr(torch.optim, name)(groups, lr=0.01, foreach=foreach, **OPTIMIZERS[name])
        self.schedule = SCHEDULES[schedule](self.optimizer, steps + 2)
        self.scaler = torch.amp.GradScaler(device, init_scale=2.0**16, growth_interval=10)
        self.way = way
        self.steps = steps

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if "scaled" in self.way:
            return self.scaled_step(x, y)
        self.optimizer.zero_grad()
        loss = torch.zeros((), device=x.device)
        for _ in range(4 if self.way == "accumulated" else 1):
            part = (self.model(x) - y[:, :1]).square().mean() / (4 if self.way == "accumulated" else 1)
            part.backward()
            loss = loss + part.detach()
        if self.way == "clipped":
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        return loss

    def scaled_step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = (self.model(x) - y[:, :1]).square().mean()
        self.scaler.scale(loss).backward()
        if "clipped" in self.way:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def train(self, step: Callable[..., torch.Tensor]) -> list[Any]:
        losses, scales = [], []
        for number in range(self.steps):
            x, y = self.batches[number % 8], self.batches[(number + 3) % 8]
            loss = step(x, y * 1e36 if number == OVERFLOWS and "scaled" in self.way else y)
            losses.append(loss.detach())
            if "scaled" in self.way:
                scales.append(self.scaler.scale(torch.ones((), device=x.device)))
            if isinstance(self.schedule, lr_scheduler.ReduceLROnPlateau):
                self.schedule.step(float(loss))
            elif self.schedule is not None:
                self.schedule.step()
        lazy_backend.mark_step()
        state = [value for state in self.optimizer.state.values() for value in state.values()]
        seen = lazy_backend.to_cpu([losses, list(self.model.parameters()), state, scales])
        return [*seen, self.scaler.state_dict()]


def check(name: str, schedule: str, way: str, foreach: bool | None = None, steps: int = 40) -> None:
    lazy_backend.config.compile = "off"
    lazy_backend.config.run_in_background = "never"
    plain = Run("cpu", name, schedule, steps, way, foreach)
    expected = plain.train(plain.step)
    captured = Run("lazy", name, schedule, steps, way, foreach)
    step = capture(captured.step)
    with count("CapturedCall") as replayed:
        found = captured.train(step)
    assert_same(found, expected)
    if "scaled" in way:
        scales = [float(scale) for scale in expected[3]]
        assert scales[OVERFLOWS] < scales[OVERFLOWS - 1] < scales[-1]  # one step was skipped
    # all but the first calls, one where RAdam's branch flips, one or two where the rate of a plateau changes
    assert replayed() >= steps - 10 - 0.05 * (steps - 10)


@pytest.mark.parametrize(("schedule", "way"), PAIRS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_captured_optimizer_trains_as_eager_does(name: str, schedule: str, way: str) -> None:
    check(name, schedule, way)


@pytest.mark.parametrize("schedule", ["constant", "one-cycle"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_captured_optimizer_without_foreach(name: str, schedule: str) -> None:
    check(name, schedule, "clipped", foreach=False)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_captured_optimizer_trains_as_eager_does_for_long(name: str, schedule: str, way: str) -> None:
    check(name, schedule, way, steps=200)
    check(name, schedule, way, foreach=False, steps=200)
