"""Optimizers of pytorch-optimizer, captured: eager's bits, and nearly all steps replayed. They count in Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lazy_backend
from lazy_backend import capture, config, mark_step

NUM_STEPS = 60
NAMES = [
    "adabelief", "adabound", "adadelta", "adafactor", "adai", "adam", "adamg", "adams", "adamw", "adan",
    "adapnm", "adasmooth", "adatam", "ademamix", "adopt", "aggmo", "amos", "ano", "diffgrad", "dualadam",
    "ftrl", "lars", "lion", "mars", "nero", "novograd", "padam", "pid", "qhadam", "radam", "schedulefreeadamw",
    "schedulefreesgd", "scion", "sgdsai", "signsgd", "sm3", "tiger", "yogi",
]  # fmt: skip


def train(name: str, device: str) -> tuple[list[torch.Tensor], Any]:
    import pytorch_optimizer

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)).to(device)
    optimizer = pytorch_optimizer.load_optimizer(name)(model.parameters(), lr=1e-3)
    if device == "lazy":
        capture(optimizer)
    losses = []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(torch.randn(4, 8).to(device)), torch.randn(4, 2).to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if device == "lazy":
            mark_step()
    return [one.cpu() for one in (*losses, *model.parameters())], optimizer


@pytest.mark.scenario
@pytest.mark.parametrize("name", NAMES)
def test_steps_are_replayed(name: str) -> None:
    config.backend = "eager"
    expected, _ = train(name, "cpu")
    found, optimizer = train(name, "lazy")
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    row = next(row for row in lazy_backend.captures() if row["kind"] == "optimizer")
    assert row["replays"] >= 0.9 * NUM_STEPS, row
    assert type(optimizer).__name__ == row["name"]
