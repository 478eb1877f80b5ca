"""Train a small convolutional network on handwritten digits, on `device="lazy"`.

    python examples/train_digits.py --device lazy

It shows that a plain training loop becomes a lazy one by `.to("lazy")` and one `mark_step()` per step: each step is
recorded, found in the cache and run in the background. With `--device cpu` the same program runs in eager. A lazy run
ends with its accuracy, what the device did per step, and how far the losses are from eager's.
"""

from __future__ import annotations

import contextlib
import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from common import Row, Run, Stopwatch, finished, one_core_for_python, parser, present, progress
from torch import Tensor, nn
from torch.nn import functional as F

import lazy_backend

DATA = Path(__file__).resolve().parent / "data" / "digits.csv.gz"
TEST_IMAGES = 360
BATCH = 64
EPOCHS = 10


@dataclass(frozen=True)
class Digits:
    """Images f32[n, 1, 8, 8] with pixels from 0 to 1, labels i64[n]."""

    images: Tensor
    labels: Tensor

    def steps_per_epoch(self) -> int:
        return len(self.labels) // BATCH

    def batches(self, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch, in random order, without the rest that fills no batch: with one shape, all steps are one graph."""
        order = torch.randperm(len(self.labels), generator=generator)
        for chosen in order.split(BATCH)[: self.steps_per_epoch()]:
            yield self.images[chosen], self.labels[chosen]


def load_digits() -> tuple[Digits, Digits]:
    """The images to train with and those to test with, always the same ones."""
    with gzip.open(DATA, "rt") as file:
        table = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.float32))
    table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))]
    images, labels = (table[:, :-1] / 16).reshape(-1, 1, 8, 8), table[:, -1].long()
    train = Digits(images[TEST_IMAGES:], labels[TEST_IMAGES:])
    test = Digits(images[:TEST_IMAGES], labels[:TEST_IMAGES])
    return train, test


def build_model(seed: int) -> nn.Module:
    """Two convolutions and a linear layer, on the CPU."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 2 * 2, 10),
    )


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> Tensor:
    """One step. Returns its loss, which nothing here reads: on the lazy device nothing has run yet."""
    loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def train(device: str, epochs: int = EPOCHS, seed: int = 0) -> Run:
    """Train from scratch on `device`."""
    digits, _ = load_digits()
    model = build_model(seed).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if device == "lazy":
        # their calls are replayed without Python from here on, once two of them were recorded alike
        lazy_backend.capture(model)
        lazy_backend.capture(optimizer)
    generator = torch.Generator().manual_seed(seed)
    epoch_steps = digits.steps_per_epoch()
    losses: list[Tensor] = []
    stopwatch = Stopwatch()
    batches = (batch for _ in range(epochs) for batch in digits.batches(generator))
    with progress(batches, epochs * epoch_steps, device) as bar:
        for images, labels in bar:
            losses.append(train_step(model, optimizer, images.to(device), labels.to(device)))
            lazy_backend.mark_step()  # on the CPU there is nothing pending, and it does nothing
            stopwatch.lap()
            if len(losses) % epoch_steps == 0:
                # once per epoch, as reading a loss waits for its step
                mean = mean_loss(losses[-epoch_steps:])
                bar.write(f"{device}  epoch {len(losses) // epoch_steps:2}  loss {mean:.4f}")
                # training need not wait for the compiler; the demo does, to show the compiled step
                lazy_backend.wait_for_compiles()
    return finished(model, losses, stopwatch)


def mean_loss(losses: list[Tensor]) -> float:
    return torch.stack(lazy_backend.to_cpu(losses)).mean().item()


@torch.no_grad()
def accuracy(model: nn.Module, device: str) -> float:
    """The part of the test images that `model` knows, from 0 to 1. They go through it in one batch."""
    _, digits = load_digits()
    model.eval()
    right = model(digits.images.to(device)).argmax(dim=1) == digits.labels.to(device)
    return right.float().mean().item()


def evaluate(model: nn.Module, device: str) -> Row:
    return "test accuracy", f"{accuracy(model, device):.2%}"


def main() -> None:
    arguments = parser("Train a convolutional network on handwritten digits.")
    arguments.add_argument("--epochs", type=int, default=EPOCHS, help="(default: %(default)s)")
    chosen = arguments.parse_args()

    def run(device: str) -> Run:
        beside = device == "lazy" and chosen.backend == "inductor"
        with one_core_for_python() if beside else contextlib.nullcontext():
            return train(device, chosen.epochs, chosen.seed)

    present(chosen, run, evaluate)


if __name__ == "__main__":
    main()
