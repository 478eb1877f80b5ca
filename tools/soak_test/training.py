"""The trainings of the soak: small, the same on every device, and resumed from a checkpoint at any step.

    PYTHONPATH=tools python tools/soak_test/training.py --program mlp --folder /tmp/run --steps 1000

In: a program's name and a folder. Out: in the folder, a checkpoint that is replaced every few steps, and `losses`: one
line per step, its number and the loss as exact hexadecimal text. Started again, it goes on from the checkpoint.
"""

from __future__ import annotations

import argparse
import array
import math
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from shared.workloads import CNN, GPT, MLP, Batch, GPTSize
from torch import nn
from torch.nn import functional

import lazy_backend
from soak_test.run import show_stacks_on_signal

_GPT_SIZE = GPTSize(layers=1, width=16, heads=2, vocabulary=32, length=16, batch=2, fused_attention=True)
_LENGTHS = (16, 8, 12, 5)

# The weights of all threads' models are drawn from one generator.
_drawing = threading.Lock()


class VaryingGPT(GPT):
    """A GPT for sequences of any length up to that of its size."""

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.token(inputs) + self.position(self.positions[: inputs.shape[1]])
        logits = self.head(self.norm(self.blocks(x)))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass(frozen=True, slots=True)
class Program:
    """A model, its optimizer and its data. Batches depend on the number of the step alone."""

    model: Callable[[int], nn.Module]  # from a width
    batch: Callable[[int, torch.Generator], Batch]
    fused: bool = False
    captured: bool = False


def _vectors(number: int, generator: torch.Generator) -> Batch:
    return torch.randn(8, 16, generator=generator), torch.randint(4, (8,), generator=generator)


def _images(number: int, generator: torch.Generator) -> Batch:
    return torch.randn(4, 3, 8, 8, generator=generator), torch.randint(4, (4,), generator=generator)


def _tokens(number: int, generator: torch.Generator) -> Batch:
    length = _LENGTHS[number % len(_LENGTHS)]
    tokens = torch.randint(_GPT_SIZE.vocabulary, (_GPT_SIZE.batch, length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


PROGRAMS = {
    "mlp": Program(lambda width: MLP(16, width, 4), _vectors),
    "captured": Program(lambda width: MLP(16, width, 4), _vectors, fused=True, captured=True),
    "cnn": Program(lambda width: CNN(max(1, width // 8), 4), _images),
    "gpt": Program(lambda width: VaryingGPT(_GPT_SIZE), _tokens),
}


@dataclass
class Training:
    """A program on a device, at step `number`."""

    program: Program
    device: str
    width: int = 32
    seed: int = 0
    number: int = 0
    model: nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    schedule: torch.optim.lr_scheduler.LRScheduler = field(init=False)

    def __post_init__(self) -> None:
        with _drawing, torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            self.model = self.program.model(self.width).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, fused=self.program.fused or None)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 0.6 + 0.4 * math.cos(n / 50))
        self._generator = torch.Generator()
        self._train = self._update
        if self.program.captured and self.device == "lazy":
            self._train = lazy_backend.capture(self._update)

    def step(self) -> torch.Tensor:
        """Train on the next batch; the loss, not read. Marks the step on the lazy device."""
        self._generator.manual_seed(self.seed * 1_000_003 + self.number)
        inputs, targets = self.program.batch(self.number, self._generator)
        loss = self._train(inputs.to(self.device), targets.to(self.device))
        self.schedule.step()
        if self.device == "lazy":
            lazy_backend.mark_step()
        self.number += 1
        return loss

    def _update(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = self.model(inputs, targets)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()

    def save(self, file: Path) -> None:
        """Whole or not at all, whenever this process is killed."""
        partial = file.with_suffix(".partial")
        torch.save(
            {
                "number": self.number,
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "schedule": self.schedule.state_dict(),
            },
            partial,
        )
        partial.replace(file)

    def load(self, file: Path, map_location: str) -> None:
        """Go on where `save` was called."""
        state = torch.load(file, map_location=map_location)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.number = state["number"]


class Twin:
    """The losses of the same training in eager, computed when they are asked for."""

    def __init__(self, name: str, width: int = 32, seed: int = 0) -> None:
        self._training = Training(PROGRAMS[name], "cpu", width, seed)
        self._losses = array.array("d")  # 8 bytes per step, in runs of millions

    def loss(self, number: int) -> float:
        while len(self._losses) <= number:
            self._losses.append(self._training.step().item())
        return self._losses[number]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train, resumably.")
    parser.add_argument("--program", choices=PROGRAMS, default="mlp")
    parser.add_argument("--folder", type=Path, required=True, help="of the checkpoint and the losses")
    parser.add_argument("--steps", type=int, required=True, help="number of the last step")
    parser.add_argument("--every", type=int, default=10, help="steps from one checkpoint to the next (default 10)")
    parser.add_argument("--width", type=int, default=32, help="of the model (default 32)")
    parser.add_argument("--backend", default="eager", help="of the lazy device (default eager)")
    parser.add_argument("--load-to", choices=("cpu", "lazy"), default="cpu", help="map_location of the checkpoint")
    return parser.parse_args()


def main() -> None:
    show_stacks_on_signal()
    arguments = parse_arguments()
    lazy_backend.config.backend = arguments.backend
    checkpoint, losses = arguments.folder / "checkpoint", arguments.folder / "losses"
    training = Training(PROGRAMS[arguments.program], "lazy", arguments.width)
    if checkpoint.exists():
        training.load(checkpoint, arguments.load_to)
    file = os.open(losses, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    while training.number < arguments.steps:
        first = training.number
        made = [training.step() for _ in range(min(arguments.every, arguments.steps - first))]
        read = lazy_backend.to_cpu(made)
        text = "".join(f"{first + place} {loss.item().hex()}\n" for place, loss in enumerate(read))
        os.write(file, text.encode())
        training.save(checkpoint)


if __name__ == "__main__":
    main()
