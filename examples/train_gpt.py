"""Train a character GPT on the sources of Python's standard library, on `device="lazy"`.

    python examples/train_gpt.py --device lazy

It shows what a training loop has besides a model: AdamW with weight decay for some of the weights, gradient clipping,
a learning rate that changes at every step, tied weights, and losses printed as training goes on, by a step closure.
None of it makes a new graph. With `--device cpu` the same program runs in eager. Ends with the figures of the run, how
far its losses are from eager's, and a sample of what the model writes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from common import Row, Run, Stopwatch, finished, parser, present, progress
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import lazy_backend

SOURCES = ("argparse.py", "ast.py", "calendar.py", "configparser.py", "csv.py", "dataclasses.py", "difflib.py")
CHARACTERS = 200_000  # read at most
HELD_OUT = 10_000  # of them for validation
CONTEXT = 64
BATCH = 8
VALIDATION_BATCH = 64
STEPS = 500
WARMUP = 20
LEARNING_RATE = 3e-3


# ----- the text


@dataclass(frozen=True)
class Text:
    """Characters as numbers, i64[n]; number i stands for `vocabulary[i]`."""

    vocabulary: str
    train: Tensor
    validation: Tensor

    def decode(self, numbers: Tensor) -> str:
        return "".join(self.vocabulary[number] for number in numbers.tolist())


def load_text() -> Text:
    """Some files of the standard library of the Python that runs this."""
    folder = Path(os.__file__).parent
    files = "".join((folder / name).read_text("ascii", errors="ignore") for name in SOURCES)[:CHARACTERS]
    vocabulary = "".join(sorted(set(files)))
    place = {character: number for number, character in enumerate(vocabulary)}
    numbers = torch.tensor([place[character] for character in files])
    return Text(vocabulary, numbers[:-HELD_OUT], numbers[-HELD_OUT:])


def draw(numbers: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pieces of the text and, for each character of them, the next one: i64[count, CONTEXT] twice."""
    starts = torch.randint(len(numbers) - CONTEXT, (count,), generator=generator)
    pieces = numbers.unfold(0, CONTEXT + 1, 1)[starts]
    return pieces[:, :-1], pieces[:, 1:]


def batches(numbers: Tensor, steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return (draw(numbers, BATCH, generator) for _ in range(steps))


# ----- the model


class Attention(nn.Module):
    """Causal self-attention, written out: f32[b, t, width] to the same."""

    mask: Tensor

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project_in = nn.Linear(width, 3 * width)
        self.project_out = nn.Linear(width, width)
        self.register_buffer("mask", torch.ones(CONTEXT, CONTEXT).triu(1).bool(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, width = x.shape
        query, key, value = (
            part.view(b, t, self.heads, width // self.heads).transpose(1, 2)
            for part in self.project_in(x).split(width, dim=2)
        )
        scores = query @ key.transpose(-2, -1) / math.sqrt(width // self.heads)
        weights = scores.masked_fill(self.mask[:t, :t], float("-inf")).softmax(dim=-1)
        return self.project_out((weights @ value).transpose(1, 2).reshape(b, t, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Characters i64[b, t], t up to CONTEXT, to logits of the next ones, f32[b, t, vocabulary]."""

    positions: Tensor

    def __init__(self, vocabulary: int, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.characters.weight
        self.register_buffer("positions", torch.arange(CONTEXT), persistent=False)
        self.apply(_initialise)

    def forward(self, characters: Tensor) -> Tensor:
        x = self.characters(characters) + self.places(self.positions[: characters.shape[1]])
        return self.head(self.norm(self.blocks(x)))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def build_model(vocabulary: int, seed: int) -> GPT:
    """The model, on the CPU."""
    torch.manual_seed(seed)
    return GPT(vocabulary)


# ----- training


def build_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """AdamW that decays matrices, but neither biases nor norms."""
    matrices = [weight for weight in model.parameters() if weight.dim() >= 2]
    others = [weight for weight in model.parameters() if weight.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.99))


def learning_rate(step: int, steps: int) -> float:
    """What step `step` multiplies LEARNING_RATE with: a linear rise, then half a cosine down to a tenth."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    done = (step - WARMUP) / max(1, steps - WARMUP)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def loss_of(model: nn.Module, characters: Tensor, following: Tensor) -> Tensor:
    return F.cross_entropy(model(characters).flatten(0, 1), following.flatten())


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, characters: Tensor, following: Tensor) -> Tensor:
    """One step. Returns its loss, which nothing here reads: on the lazy device nothing has run yet."""
    loss = loss_of(model, characters, following)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def train(device: str, steps: int = STEPS, seed: int = 0) -> Run:
    """Train from scratch on `device`."""
    text = load_text()
    model = build_model(len(text.vocabulary), seed).to(device)
    optimizer = build_optimizer(model)
    if device == "lazy":
        # their calls are replayed without Python from here on, once two of them were recorded alike
        lazy_backend.capture(model)
        lazy_backend.capture(optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, steps))
    losses: list[Tensor] = []
    stopwatch = Stopwatch()
    with progress(batches(text.train, steps, seed), steps, device) as bar:
        for characters, following in bar:
            loss = train_step(model, optimizer, characters.to(device), following.to(device))
            schedule.step()
            losses.append(loss)
            if len(losses) % 50 == 0:
                # runs after mark_step, when there is a loss to read
                lazy_backend.add_step_closure(show_loss, (bar, device, len(losses), loss))
            lazy_backend.mark_step()
            stopwatch.lap()
    return finished(model, losses, stopwatch)


def show_loss(bar: tqdm, device: str, step: int, loss: Tensor) -> None:
    bar.write(f"{device}  step {step:4}  loss {loss.item():.4f}")


# ----- what it learned


@torch.no_grad()
def validation_loss(model: nn.Module, device: str) -> float:
    characters, following = draw(load_text().validation, VALIDATION_BATCH, torch.Generator().manual_seed(0))
    return loss_of(model, characters.to(device), following.to(device)).item()


def evaluate(model: nn.Module, device: str) -> Row:
    return "validation loss", f"{validation_loss(model, device):.4f}"


@torch.no_grad()
def sample(model: nn.Module, device: str, length: int = 200, seed: int = 0) -> str:
    """What `model` writes after the first characters of the validation text."""
    text = load_text()
    context = text.validation[None, :CONTEXT].to(device)
    written: list[Tensor] = []
    torch.manual_seed(seed)
    for _ in range(length):
        chances = model(context)[0, -1].softmax(dim=0)
        written.append(torch.multinomial(chances, 1))
        # as long as before, so that every step is one graph
        context = torch.cat([context[:, 1:], written[-1][None]], dim=1)
        lazy_backend.mark_step()
    return text.decode(torch.cat(lazy_backend.to_cpu(written)))


def main() -> None:
    arguments = parser("Train a character GPT on the sources of Python's standard library.")
    arguments.add_argument("--steps", type=int, default=STEPS, help="(default: %(default)s)")
    chosen = arguments.parse_args()
    run = present(chosen, lambda device: train(device, chosen.steps, chosen.seed), evaluate)
    # a short sample is not worth a compile
    with lazy_backend.config.patch(compile="off"):
        print(f"\na sample\n{sample(run.model, chosen.device, seed=chosen.seed)}")


if __name__ == "__main__":
    main()
