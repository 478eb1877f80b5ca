"""`torch.optim` with `fused=True`: recorded, eager's bits, and one or two compiles whatever the learning rate does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import assert_same, count
from torch import nn

import lazy_backend
from lazy_backend import config

FUSED: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, lr_decay=0.1, fused=True),
    "adam, tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), fused=True),
    "adamw, tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), fused=True),
}


def trained(name: str, device: str, steps: int = 12) -> list[Any]:
    """Losses, parameters and state after a schedule that changes the rate at each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(device)
    optimizer = FUSED[name](model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    x = torch.randn(5, 8).to(device)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        if device == "lazy":
            lazy_backend.mark_step()
        losses.append(loss.detach())
    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    return [*losses, *(parameter.detach() for parameter in model.parameters()), *state]


@pytest.mark.parametrize("first_sight", ["run", "record"])
@pytest.mark.parametrize("name", FUSED)
def test_training_gives_eagers_bits_without_a_cut(name: str, first_sight: str) -> None:
    config.first_sight = first_sight
    with count("GraphCut") as cuts:
        lazily = trained(name, "lazy")
    assert cuts() == 0
    assert_same(lazily, trained(name, "cpu"))


BACKENDS = [("aot_eager", name) for name in ("momentum", "adam", "amsgrad", "adagrad", "adamw, tensor")]
BACKENDS += [pytest.param("inductor", name, marks=pytest.mark.scenario) for name in ("adam", "adamw, tensor")]


@pytest.mark.parametrize(("backend", "name"), BACKENDS)
def test_a_schedule_compiles_at_most_twice(backend: str, name: str) -> None:
    config.backend = backend
    with count("Compile") as compiles, count("CompileFailed") as failures:
        lazily = trained(name, "lazy")
    assert 1 <= compiles() <= 2
    assert failures() == 0
    for actual, expected in zip(lazily, trained(name, "cpu"), strict=True):
        torch.testing.assert_close(actual.cpu(), expected)


def test_a_rate_that_changes_after_the_compile_compiles_once_more() -> None:
    config.backend = "aot_eager"
    parameter = nn.Parameter(torch.ones(3).to("lazy"))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=True)
    with count("Compile") as compiles:
        for rate in (0.1, 0.1, 0.1, 0.1, 0.05, 0.02, 0.01):
            optimizer.param_groups[0]["lr"] = rate
            parameter.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            lazy_backend.mark_step()
    assert compiles() == 2


def test_torchscript_takes_what_was_changed() -> None:
    """`torch.distributed.optim`, and with it Ignite, compiles the functions of optimizers when it is imported."""
    changed: Any = sys.modules["torch.optim.adadelta"]  # torch.optim deletes the attribute
    names = changed._get_capturable_supported_devices
    assert "lazy" in torch.jit.script(names)()
    assert "lazy" in names()
