"""Captured modules whose backward comes late, through many calls at once, or never."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from harness import assert_same, grid
from torch import nn

import lazy_backend
from lazy_backend import CaptureWarning

NO_BACKWARD = "no backward without retain_graph has run through its results"


def prepared(device: str, module: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    module = (nn.Linear(4, 4) if module is None else module).to(device)
    return lazy_backend.capture(module) if device == "lazy" else module


def account(model: nn.Module) -> dict[str, Any]:
    """What became of the calls of the latest module; `model` must be alive."""
    return lazy_backend.captures()[-1] if next(model.parameters()).device.type == "lazy" else {}


class Weighted(nn.Module):
    """A layer, times a weight that it reads from a namespace."""

    def __init__(self, weights: types.SimpleNamespace) -> None:
        super().__init__()
        self.layer, self.weights = nn.Linear(4, 4), weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.weights.first


@pytest.mark.parametrize("changes", [False, True], ids=["alike", "with other values"])
def test_calls_without_a_backward_say_so_at_the_first_of_them(changes: bool) -> None:
    weights = types.SimpleNamespace(first=1.0)
    model, kept = prepared("lazy", Weighted(weights)), []
    eager = Weighted(weights)
    eager.load_state_dict(model.state_dict())
    expected = []

    def call(numbers: range) -> None:
        for number in numbers:
            weights.first = float(number // 10) if changes else 1.0
            kept.append(model(grid("lazy", 2, 4)))
            expected.append(eager(grid("cpu", 2, 4)))
            lazy_backend.mark_step()

    call(range(8))
    assert list(account(model)["as_written"]) == [NO_BACKWARD]
    with pytest.warns(CaptureWarning, match=f"Weighted runs as written, because {NO_BACKWARD} in 17 steps\n.*no_grad"):
        call(range(8, 30))
    assert account(model)["replays"] == 0
    assert_same([one.detach() for one in kept], [one.detach() for one in expected])


def test_without_gradients_such_calls_are_replayed() -> None:
    model = prepared("lazy")
    with torch.no_grad():
        for _ in range(8):
            model(grid("lazy", 2, 4))
            lazy_backend.mark_step()
    assert account(model)["replays"] > 0


def episodes(device: str) -> tuple[list[Any], dict[str, Any]]:
    """Losses of a policy whose results are read one by one, before one backward goes through all of them."""
    model, losses = prepared(device), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for length in (3, 5, 12, 4, 12):
        kept = []
        for _ in range(length):
            kept.append(model(grid(device, 4) / 8).square().mean())
            losses.append(kept[-1].item())
        optimizer.zero_grad()
        torch.stack(kept).sum().backward()
        optimizer.step()
    return [losses, model.weight.detach().cpu()], account(model)


def test_one_backward_through_calls_of_many_graphs() -> None:
    found, row = episodes("lazy")
    torch.testing.assert_close(found, episodes("cpu")[0])
    assert row["replays"] > 20


def unrolled(device: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Results of a cell that is called many times within each step."""
    model, found = prepared(device), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        hidden = grid(device, 4) / 4
        for _ in range(24):
            hidden = model(hidden).tanh()
        optimizer.zero_grad()
        hidden.square().mean().backward()
        optimizer.step()
        found.append(hidden.detach().cpu())
    return found, account(model)


def test_one_backward_through_many_calls_of_one_graph() -> None:
    found, row = unrolled("lazy")
    torch.testing.assert_close(found, unrolled("cpu")[0])
    assert row["replays"] > 60
    assert row["as_written"] == {}


def with_another_weight_before_the_backward(device: str) -> list[torch.Tensor]:
    """Gradients of a layer whose weight gets other data by `set_`, which gives a leaf another edge."""
    model, found = prepared(device), []
    weight, inputs = model.weight, grid(device, 2, 4) / 8
    for _ in range(6):
        loss = model(inputs).square().sum()
        with torch.no_grad():
            weight.set_(weight * 2)
        loss.backward()
        found.append(weight.grad.cpu().clone())
    return found


def test_a_leaf_that_gets_other_data_before_the_backward() -> None:
    found = with_another_weight_before_the_backward("lazy")
    torch.testing.assert_close(found, with_another_weight_before_the_backward("cpu"))
