"""A training script with two faults that make it slow, and the page that shows them.

    python examples/slow_training.py
    open slow_training.html in a browser

Both faults are common in code that was written for eager PyTorch, where they cost next to nothing. `--fixed` trains
without them. docs/tutorial.md finds them from the page alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn

import lazy_backend

FEATURES = 32
BATCH = 64


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).to("lazy")


def train(steps: int) -> list[float]:
    """Train, and watch the loss: the last one, and the mean of all so far."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[Tensor] = []
    means: list[float] = []
    for _ in range(steps):
        inputs = torch.randn(BATCH, FEATURES, device="lazy")
        targets = inputs.square().mean(1, keepdim=True)
        loss = nn.functional.mse_loss(model(inputs), targets)
        if not loss.isfinite():
            raise ValueError("the loss is no number any more")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        mean = torch.stack(losses).mean()
        lazy_backend.mark_step()
        means.append(float(mean))
    return means


def train_fixed(steps: int) -> list[float]:
    """The same, so that every step records the same program, and nothing is read before it ends."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    total = torch.zeros((), device="lazy")
    means: list[float] = []
    for step in range(steps):
        inputs = torch.randn(BATCH, FEATURES, device="lazy")
        targets = inputs.square().mean(1, keepdim=True)
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
        lazy_backend.mark_step()
        means.append(float(total) / (step + 1))  # what a step computed is read after it
        if not means[-1] < float("inf"):
            raise ValueError("the loss is no number any more")
    return means


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train slowly, and show why.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--fixed", action="store_true", help="train without the two faults")
    parser.add_argument("-o", "--output", type=Path, default=Path("slow_training.html"), help="the page")
    given = parser.parse_args(arguments)
    start = perf_counter()
    means = (train_fixed if given.fixed else train)(given.steps)
    print(f"{given.steps} steps in {perf_counter() - start:.1f} s, mean loss {means[-1]:.4f}")
    print(f"see {lazy_backend.report(given.output)}")


if __name__ == "__main__":
    main()
