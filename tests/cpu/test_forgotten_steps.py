"""A loop without `mark_step` is told at the second step of its optimizer; what is no such loop is not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from harness import grid, run_program
from torch import nn

import lazy_backend
from lazy_backend import GraphCutWarning, config
from lazy_backend.execution.forgotten_steps import forgotten_steps


@pytest.fixture(autouse=True)
def watched(fresh_state: None) -> None:
    forgotten_steps.reset()


def model_and_optimizer(device: str = "lazy") -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 2).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, device: str = "lazy") -> torch.Tensor:
    loss = model(grid(device, 4, 3)).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("first_sight", ["run", "record"])
def test_the_second_step_is_told_with_both_lines(first_sight: str) -> None:
    config.first_sight = first_sight
    model, optimizer = model_and_optimizer()
    optimizer.step()  # nothing has a gradient, and nothing is recorded
    update(model, optimizer)
    with pytest.warns(GraphCutWarning) as told:
        optimizer.step()
    (one,) = told
    text = str(one.message)
    first, then = [line for line in text.splitlines() if "test_forgotten_steps.py:" in line]
    assert first.startswith("  first at ")
    assert then.startswith("  then at ")
    assert then.endswith(f":{one.lineno}")
    assert first.rpartition(":")[2] != then.rpartition(":")[2]
    assert "call lazy_backend.mark_step() once per step" in text


def test_it_is_told_once() -> None:
    model, optimizer = model_and_optimizer()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(5):
            update(model, optimizer)
    assert len(told) == 1


def test_a_fused_or_adaptive_optimizer_is_seen_too() -> None:
    model = nn.Linear(3, 2).to("lazy")
    optimizer = torch.optim.AdamW([{"params": []}, {"params": model.parameters()}], fused=True)
    update(model, optimizer)
    with pytest.warns(GraphCutWarning, match=r"AdamW\.step\(\) was called twice"):
        update(model, optimizer)


# ----- what is not told: warnings are errors in the tests


def train_with_steps() -> Iterator[None]:
    model, optimizer = model_and_optimizer()
    for _ in range(3):
        update(model, optimizer)
        lazy_backend.mark_step()
        yield


def read_each_loss() -> Iterator[None]:
    model, optimizer = model_and_optimizer()
    for _ in range(3):
        update(model, optimizer).item()
        yield


def alternate() -> Iterator[None]:
    both = [model_and_optimizer(), model_and_optimizer()]
    for _ in range(3):
        for model, optimizer in both:
            update(model, optimizer)
        lazy_backend.mark_step()
        yield


def accumulate() -> Iterator[None]:
    model, optimizer = model_and_optimizer()
    for step in range(6):
        model(grid("lazy", 4, 3)).sum().backward()
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
            lazy_backend.mark_step()
        yield


def train_on_the_cpu() -> Iterator[None]:
    kept = grid("lazy", 3) * 2  # something is pending
    model, optimizer = model_and_optimizer("cpu")
    for _ in range(3):
        update(model, optimizer, "cpu")
        yield
    del kept


def capture_two_updates() -> Iterator[None]:
    model, optimizer = model_and_optimizer()

    @lazy_backend.capture
    def step() -> torch.Tensor:
        update(model, optimizer)
        return update(model, optimizer)

    for _ in range(4):
        step()
        yield


def run_eagerly() -> Iterator[None]:
    with lazy_backend.eager_mode():
        model, optimizer = model_and_optimizer()
        for _ in range(3):
            update(model, optimizer)
            yield


NOT_TOLD: list[Callable[[], Iterator[None]]] = [
    train_with_steps,
    read_each_loss,
    alternate,
    accumulate,
    train_on_the_cpu,
    capture_two_updates,
    run_eagerly,
]


@pytest.mark.parametrize("program", NOT_TOLD, ids=lambda program: program.__name__)
def test_nothing_is_told_of(program: Callable[[], Iterator[None]]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", GraphCutWarning)
        assert len(list(program())) >= 3


def test_a_dead_optimizer_is_forgotten() -> None:
    model, optimizer = model_and_optimizer()
    update(model, optimizer)
    del optimizer
    _, other = model_and_optimizer()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    update(model, other)


def test_a_program_is_told_without_asking_for_it(tmp_path: Path) -> None:
    code = """
import warnings, torch
model = torch.nn.Linear(3, 2).to("lazy")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    for _ in range(4):
        model(torch.ones(2, 3).to("lazy")).sum().backward()
        optimizer.step()
print(len(told), told[0].category.__name__)
"""
    assert run_program(code, tmp_path) == "1 GraphCutWarning\n"
