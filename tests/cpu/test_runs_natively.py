"""Training steps run by C++ alone, and so beside recording, whatever this version of Inductor writes for Python."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness import count
from torch import nn

import lazy_backend
from lazy_backend import metrics

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from shared.workloads import GPT, WORKLOADS, GPTSize, Training, Workload, make_training

SIZE = GPTSize(layers=2, width=16, heads=2, vocabulary=32, length=8, batch=2)


class Words(nn.Module):
    """An embedding and a linear layer, for any number of tokens; `forward` gives the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(SIZE.vocabulary, SIZE.width)
        self.head = nn.Linear(SIZE.width, SIZE.vocabulary)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.token(inputs)).flatten(0, 1), targets.flatten())


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.randint(SIZE.vocabulary, (SIZE.batch, SIZE.length + 1))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def sequences() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 3, 32), torch.randint(10, (4,))


def with_dropout_and_clipping(training: Training) -> None:
    """Add what examples/train_gpt.py has and the benchmark has not."""
    model, update = training.model, training.optimizer.step
    for block in model.modules():
        if isinstance(block, nn.Sequential) and isinstance(block[0], nn.Linear):
            block.append(nn.Dropout(0.1))

    def clipped() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update()

    training.update = clipped


def unchanged(training: Training) -> None:
    pass


PROGRAMS: dict[str, tuple[Workload, Callable[[Training], None]]] = {
    "mlp": (WORKLOADS["mlp"], with_dropout_and_clipping),
    "cnn": (WORKLOADS["cnn"], unchanged),
    "lstm": (replace(WORKLOADS["lstm"], batch=sequences), unchanged),
    "cells": (replace(WORKLOADS["cells"], batch=sequences), unchanged),
    "gpt": (replace(WORKLOADS["gpt-adamw"], model=lambda: GPT(SIZE), batch=tokens), with_dropout_and_clipping),
    "lengths": (replace(WORKLOADS["lengths"], model=Words, batch=tokens, lengths=(8, 5, 7, 6)), unchanged),
}


@pytest.mark.scenario
@pytest.mark.parametrize("name", PROGRAMS)
def test_steps_need_no_python(name: str) -> None:
    lazy_backend.config.backend, lazy_backend.config.compile = "inductor", "background"
    lazy_backend.config.run_in_background = "always"
    workload, change = PROGRAMS[name]
    training = make_training(workload, "lazy")
    change(training)
    with count("ExecuteBeside") as runs, count("CompileFailed") as failures:
        for _ in range(12):
            training.step()
            lazy_backend.mark_step()
            assert lazy_backend.wait_for_compiles(300)
        lazy_backend.wait_device_ops()
    said = [name for name in metrics.counter_names() if name.startswith(("RunFromPython", "CheckLeftOut"))]
    assert said == []
    assert not failures()
    assert runs() >= 2
