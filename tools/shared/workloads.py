"""What the benchmark trains: MLPs, LSTMs, a CNN and small GPTs, with the optimizers that go with them.

In: a workload's name and a device. Out: a `Training`, whose `step()` is one training step without any `mark_step`.
The weights and batches of a workload are the same on every device, so that losses can be compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Batch = tuple[torch.Tensor, torch.Tensor]

# Batches kept on the device and used in turn: uploads are not what is measured.
NUM_BATCHES = 4


class MLP(nn.Module):
    """Three layers; `forward` gives the loss."""

    def __init__(self, inputs: int, width: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes)
        )

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.layers(inputs), targets)


class CNN(nn.Module):
    """Two convolutions with batch norm; `forward` gives the loss."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(channels, 2 * channels, 3, padding=1), nn.BatchNorm2d(2 * channels), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * channels, classes),
        )  # fmt: skip

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.layers(inputs), targets)


class Recurrent(nn.Module):
    """An LSTM and a linear layer over its last step; `forward` gives the loss."""

    def __init__(self, inputs: int, width: int, classes: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, width, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(self.lstm(inputs)[0][:, -1]), targets)


class Cells(nn.Module):
    """An LSTM cell in a Python loop, and a linear layer over its last step; `forward` gives the loss."""

    def __init__(self, inputs: int, width: int, classes: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(inputs, width)
        self.head = nn.Linear(width, classes)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        state = None
        for one in inputs.unbind(1):
            state = self.cell(one, state)
        assert state is not None
        return functional.cross_entropy(self.head(state[0]), targets)


class Branches(nn.Module):
    """Small networks beside each other, whose outputs are added; `forward` gives the loss."""

    def __init__(self, branches: int, inputs: int, width: int, classes: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, classes)) for _ in range(branches)
        )

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        outputs = [branch(inputs) for branch in self.branches]
        return functional.cross_entropy(torch.stack(outputs).sum(0), targets)


@dataclass(frozen=True, slots=True)
class GPTSize:
    """Sizes of a GPT and of its batches, in tokens."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    vocabulary: int = 256
    length: int = 64
    batch: int = 4
    fused_attention: bool = False
    slices: bool = False  # LTC's `split` is a fallback, and views of what a fallback returns fail there


class Attention(nn.Module):
    """Causal self-attention, spelt out or through `scaled_dot_product_attention`."""

    mask: torch.Tensor

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.size = size
        self.project_in = nn.Linear(size.width, 3 * size.width)
        self.project_out = nn.Linear(size.width, size.width)
        self.register_buffer("mask", torch.ones(size.length, size.length, dtype=torch.bool).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.size.heads, -1).transpose(1, 2) for part in self._parts(x))
        mixed = self._mixed(q, k, v).transpose(1, 2).reshape(batch, length, width)
        return self.project_out(mixed)

    def _parts(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        width = x.shape[2]
        projected = self.project_in(x)
        if not self.size.slices:
            return projected.split(width, dim=2)
        return [projected[..., start : start + width] for start in range(0, 3 * width, width)]

    def _mixed(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.size.fused_attention:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
        length = q.shape[2]
        mask = self.mask if length == self.size.length else self.mask[:length, :length]
        return scores.masked_fill(mask, float("-inf")).softmax(-1) @ v


class Block(nn.Module):
    """One transformer layer, norms first."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(size.width)
        self.attention = Attention(size)
        self.norm2 = nn.LayerNorm(size.width)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A GPT with learnt positions; `forward` gives the loss."""

    positions: torch.Tensor

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.token = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Embedding(size.length, size.width)
        self.blocks = nn.Sequential(*[Block(size) for _ in range(size.layers)])
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.register_buffer("positions", torch.arange(size.length))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        length = inputs.shape[1]
        positions = self.positions if length == len(self.positions) else self.positions[:length]
        x = self.token(inputs) + self.position(positions)
        logits = self.head(self.norm(self.blocks(x)))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass(slots=True)
class Training:
    """A model, its optimizer and its data on one device.

    `forward`, `update`, and `train`, which calls both, may be replaced by compiled or captured forms. `scheduler`: of
    the learning rate, which each step ends with.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterator[Batch]
    forward: Callable[..., torch.Tensor]
    update: Callable[[], Any]
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
    train: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = field(init=False)
    loss: torch.Tensor = field(default_factory=lambda: torch.zeros(()))

    def __post_init__(self) -> None:
        self.train = self._train

    def step(self) -> None:
        """Train on the next batch. The loss is kept, not read."""
        self.loss = self.train(*next(self.batches))
        if self.scheduler is not None:
            self.scheduler.step()

    def _train(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Forward, backward, optimizer."""
        loss = self.forward(inputs, targets)
        self.optimizer.zero_grad()
        loss.backward()
        self.update()
        return loss.detach()

    def live_bytes(self) -> int:
        """Bytes of parameters, buffers, gradients and optimizer state."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        tensors += [p.grad for p in self.model.parameters() if p.grad is not None]
        states = self.optimizer.state.values()
        tensors += [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass(frozen=True, slots=True)
class Workload:
    """One thing to train."""

    title: str
    model: Callable[[], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    batch: Callable[[], Batch]
    steps: int  # per round: for about half a second, as a process whose turn it is finds cold caches
    lengths: Sequence[int] = ()  # of the batches' second dimension, each of a batch of its own; none: all alike
    schedule: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None

    def batches(self) -> list[Batch]:
        """Those that are used in turn."""
        if not self.lengths:
            return [self.batch() for _ in range(NUM_BATCHES)]
        whole = [(length, self.batch()) for length in self.lengths]
        return [
            (inputs[:, :length].contiguous(), targets[:, :length].contiguous()) for length, (inputs, targets) in whole
        ]


def _mlp_batch() -> Batch:
    return torch.randn(64, 64), torch.randint(10, (64,))


def _cnn_batch() -> Batch:
    return torch.randn(32, 3, 16, 16), torch.randint(10, (32,))


def _lstm_batch() -> Batch:
    return torch.randn(16, 12, 32), torch.randint(10, (16,))


def _gpt_batch() -> Batch:
    size = GPTSize()
    tokens = torch.randint(size.vocabulary, (size.batch, size.length + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, foreach=False)


def _momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, foreach=True)


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=True)


def _plain_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def _plain_adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3)


def _cosine(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100_000)


def _gpt(title: str, size: GPTSize, optimizer: Callable[[Any], torch.optim.Optimizer]) -> Workload:
    return Workload(f"GPT, {size.layers} layers, {title}", lambda: GPT(size), optimizer, _gpt_batch, 40)


WORKLOADS: dict[str, Workload] = {
    "mlp": Workload("MLP, 3 layers, SGD", lambda: MLP(64, 256, 10), _sgd, _mlp_batch, 1000),
    "cnn": Workload("CNN, 2 layers, foreach AdamW", lambda: CNN(16, 10), _adamw, _cnn_batch, 200),
    "lstm": Workload("LSTM, 12 steps, SGD", lambda: Recurrent(32, 64, 10), _sgd, _lstm_batch, 800),
    "cells": Workload("LSTM cells, 12 steps, SGD", lambda: Cells(32, 64, 10), _sgd, _lstm_batch, 500),
    "branches": Workload("eight branches, AdamW", lambda: Branches(8, 64, 64, 10), _plain_adamw, _mlp_batch, 500),
    "schedule": Workload(
        "MLP, 3 layers, Adam, cosine schedule", lambda: MLP(64, 256, 10), _plain_adam, _mlp_batch, 800, schedule=_cosine
    ),
    "lengths": Workload(
        "GPT, 4 layers, AdamW, ten lengths",
        lambda: GPT(GPTSize()),
        _plain_adamw,
        _gpt_batch,
        20,
        lengths=(64, 28, 60, 32, 56, 36, 52, 40, 48, 44),
    ),
    "gpt-sgd": _gpt("foreach SGD with momentum", GPTSize(), _momentum),
    "gpt-adamw": _gpt("foreach AdamW", GPTSize(), _adamw),
    "gpt-slices": _gpt("slices for split, foreach SGD with momentum", GPTSize(slices=True), _momentum),
    "gpt-sdpa": _gpt("scaled_dot_product_attention, foreach AdamW", GPTSize(fused_attention=True), _adamw),
}


def make_training(workload: Workload, device: str) -> Training:
    """The workload on `device`, from seed 0."""
    torch.manual_seed(0)
    model = workload.model()
    batches = workload.batches()
    model = model.to(device)
    moved = [(inputs.to(device), targets.to(device)) for inputs, targets in batches]
    optimizer = workload.optimizer(model.parameters())
    scheduler = None if workload.schedule is None else workload.schedule(optimizer)
    return Training(model, optimizer, itertools.cycle(moved), model, optimizer.step, scheduler)
