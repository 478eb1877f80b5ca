"""Captured modules whose step is cut between forward and backward, as by trainers that log in each step: replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import assert_same, count
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lazy_backend
from lazy_backend import capture, mark_step

STEPS = 16
Read = Callable[[torch.Tensor, int], None]


@pytest.fixture(autouse=True, params=["run", "record"])
def first_sight(request: pytest.FixtureRequest) -> None:
    lazy_backend.config.compile = "off"
    lazy_backend.config.first_sight = request.param


def read(value: torch.Tensor, step: int) -> None:
    value.item()


def read_at_times(value: torch.Tensor, step: int) -> None:
    if step % 3 == 2:
        value.item()


def mark(value: torch.Tensor, step: int) -> None:
    mark_step()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(), mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(self.second, self.first(x), use_reentrant=False)
        return result


class Tied(nn.Module):
    """Its weight is looked up, and used as a view."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(self.table(x.long().clamp(0, 3))).tanh() @ self.table.weight.t()).mean(1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.new_zeros(x.shape[0], 8)
        for _ in range(3):
            h = self.cell(x, h)
        return self.out(h)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "layers": mlp,
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)),
    "dropout": lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4)),
    "checkpoint": Checkpointed,
    "a weight and its view": Tied,
    "a cell in a loop": Recurrent,
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0),
}


def train(device: str, make: Callable[[], nn.Module], between: Read, captured: bool) -> list[Any]:
    torch.manual_seed(0)
    model = make().to(device)
    if captured:
        capture(model)
    optimizer = torch.optim.Adam(model.parameters())
    found = []
    for step in range(STEPS):
        x = torch.arange(24.0).reshape(2, 3, 4)[step % 2].to(device) / 7
        x = x.requires_grad_(step > 7)
        loss = F.mse_loss(model(x), torch.ones(3, 4, device=device))
        if device == "lazy":
            between(loss, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if device == "lazy":
            mark_step()
        found += [loss.detach(), x.grad]
    return [*found, *(parameter.detach() for parameter in model.parameters())]


@pytest.mark.parametrize("between", [read, read_at_times, mark])
@pytest.mark.parametrize("name", MODELS)
def test_both_are_replayed(name: str, between: Read) -> None:
    with count("RegionJump") as jumps:
        found = train("lazy", MODELS[name], between, captured=True)
    assert jumps() >= STEPS / 2  # calls of two kinds, the first ones of each as written
    device = "lazy" if name == "dropout" else "cpu"  # which draws other random numbers
    expected = train(device, MODELS[name], between, captured=False)
    assert_same(found, [value if value is None else value.cpu() for value in expected])


def several(device: str, captured: bool) -> list[Any]:
    """Two modules and two batches before an optimizer's step, read at each place."""
    torch.manual_seed(0)
    first, second = mlp().to(device), mlp().to(device)
    if captured:
        capture(first)
        capture(second)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    found = []
    for step in range(STEPS):
        for batch in range(2):
            h = first(torch.full((3, 4), step + batch / 3).to(device)[:, :4])
            h.sum().item()
            loss = second(h).square().mean() + h.mean()
            loss.item()
            loss.backward()
            first[0].weight.grad.sum().item()
        optimizer.step()
        optimizer.zero_grad()
        mark_step()
        found.append(loss.detach())
    return [*found, *(parameter.detach() for parameter in first.parameters())]


def test_several_modules_and_batches() -> None:
    with count("RegionJump") as jumps:
        found = several("lazy", captured=True)
    assert jumps() >= 3 * STEPS
    assert_same(found, several("cpu", captured=False))


class Keeping(nn.Module):
    """Keeps one of the tensors that it makes."""

    def __init__(self, kept: str, keep: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.outer, self.kept, self.keep = nn.Linear(4, 4), nn.Linear(4, 4), kept, keep

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        used, unused = h.tanh(), h.detach() + 1
        self.keep({"used": used, "unused": unused, "view": used.t()}[self.kept].detach())
        return self.outer(used)


@pytest.mark.parametrize("kept", ["used", "unused", "view"])
@pytest.mark.filterwarnings("ignore::lazy_backend.CaptureWarning")
def test_a_module_that_keeps_what_it_makes_is_not(kept: str) -> None:
    results = {}
    for device in ("cpu", "lazy"):
        torch.manual_seed(0)
        memory: list[torch.Tensor] = []
        model = Keeping(kept, memory.append).to(device)
        if device == "lazy":
            capture(model)
        with count("RegionJump") as jumps:
            for step in range(STEPS):
                loss = model(torch.full((3, 4), step / 4).to(device)).sum()
                loss.item()
                loss.backward()
                mark_step()
        assert len(memory) == STEPS
        results[device] = memory
    assert jumps() == 0
    assert "keeps" in str(lazy_backend.explain())
    assert_same(results["lazy"], results["cpu"])


@pytest.mark.parametrize("what", ["weight", "argument"])
def test_writing_after_the_cut_to_what_the_backward_uses_is_an_error(what: str) -> None:
    model = capture(mlp().to("lazy"))
    for step in range(6):
        x = torch.ones(3, 4).to("lazy")
        loss = model(x).sum()
        loss.item()
        if step == 5:
            with torch.no_grad():
                {"weight": model[2].weight, "argument": x}[what].mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        else:
            loss.backward()
        mark_step()


@pytest.mark.filterwarnings("ignore::lazy_backend.CaptureWarning")
def test_other_gradients_after_the_cut_run_the_body_again() -> None:
    results = {}
    for device in ("cpu", "lazy"):
        torch.manual_seed(0)
        model = mlp().to(device)
        if device == "lazy":
            capture(model)
        found = []
        for step in range(8):
            model.zero_grad()
            x = torch.ones(3, 4).to(device).requires_grad_()
            made = model(x).sum()
            made.item()
            if step == 6:
                (gradient,) = torch.autograd.grad(made, x, create_graph=True)
                made = gradient.square().sum()
                made.item()
            made.backward()
            found += [x.grad, model[0].weight.grad]
            mark_step()
        results[device] = found
    assert_same(results["lazy"], results["cpu"])
