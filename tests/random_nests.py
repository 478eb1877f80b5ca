"""Random programs of nested loops without marks: training, evaluation and others, with reads at random places.

In: a seed. Out: a `RandomNest`, whose `run` executes on any device some rounds of the outermost loop. If reads are at
the same places in each round, and no optimizer reads, its programs settle.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch
from torch import nn

from lazy_backend import metrics

Optimizers = Callable[..., torch.optim.Optimizer]

_LOOPS = (
    "train", "evaluate", "relax", "accumulate", "alternate", "learn_to_learn", "generate_batches", "raise_within",
    "decode", "begin_anew", "search",
)  # fmt: skip
_OPTIMIZERS: tuple[Optimizers, ...] = (
    lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
)


class Interrupted(Exception):
    """Raised in the middle of a step."""


class RandomNest:
    """An outermost loop over inner ones, each of some length, repeated some times."""

    def __init__(self, seed: int) -> None:
        choose = random.Random(seed)
        self.seed = seed
        count = choose.choice((1, 2, 2, 3))
        self.loops = [
            (choose.choice(_LOOPS), choose.choice((1, 2, 3, 5, 20)) * choose.choice((1, 1, 2, 3))) for _ in range(count)
        ]
        self.reads = choose.choice((0.0, 0.0, 0.1, 0.3))
        self.width = choose.choice((3, 5, 8))
        self.optimizer = choose.choice(_OPTIMIZERS)
        self.zeroes_first = choose.random() < 0.5
        self.reads_alike = choose.random() < 0.5

    def settles(self) -> bool:
        """Whether each round of the outermost loop records the same programs: those of LBFGS depend on values."""
        return (self.reads_alike or not self.reads) and "search" not in dict(self.loops)

    def rounds_to_settle(self) -> int:
        """After how many rounds no program is new: three, and as many as make a few steps of operators alone."""
        calls = {"relax": 30, "decode": 13}
        if not all(name in calls for name, _ in self.loops):
            return 3
        return max(3, -(-1024 // sum(length * calls[name] for name, length in self.loops)))

    def run(self, device: str, rounds: int) -> tuple[list[torch.Tensor], list[int]]:
        """Values that were read or are there at the end, and misses of each round."""
        run = NestRun(self, device)
        misses = [run.round() for _ in range(rounds)]
        return run.result(), misses


class NestRun:
    """A run of a nest: models, optimizers, and the body of each kind of loop."""

    def __init__(self, nest: RandomNest, device: str) -> None:
        self._nest, self._device, width = nest, device, nest.width
        torch.manual_seed(nest.seed)
        self._model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2)).to(device)
        self._critic = nn.Linear(2, 1).to(device)
        self._optimizer = nest.optimizer(self._model.parameters())
        self._of_critic = nest.optimizer(self._critic.parameters())
        self._search = torch.optim.LBFGS(self._model.parameters(), lr=0.05, max_iter=2)
        self._choose = random.Random(nest.seed + 1)
        self._values: list[torch.Tensor] = []
        self._older: list[torch.Tensor] = []
        self.number = 0  # of batches in this round
        self._grid = torch.rand(width, width).to(device)
        self._total = torch.zeros((), device=device)
        self._state = torch.zeros(2, width, device=device)

    def round(self) -> int:
        """A round of the outermost loop, and its misses."""
        self.number, before = 0, metrics.counter_value("UncachedCompile")
        if self._nest.reads_alike:
            self._choose.seed(self._nest.seed + 1)
            self._older.clear()
        for name, length in self._nest.loops:
            for _ in range(length):
                getattr(self, name)()
        return metrics.counter_value("UncachedCompile") - before

    def result(self) -> list[torch.Tensor]:
        kept = [*self._model.parameters(), *self._critic.parameters(), self._grid, self._total, self._state]
        return self._values + [tensor.detach().cpu().clone() for tensor in kept]

    def _read(self, tensor: torch.Tensor) -> None:
        """Read a value of this step or an older one, perhaps."""
        if self._choose.random() >= self._nest.reads:
            return
        kind, tensor = self._choose.randrange(4), tensor.detach()
        if kind == 0:
            self._values.append(tensor.sum().cpu())
        elif kind == 1:
            self._values.append(tensor.cpu().clone())
        elif kind == 2 and self._older:
            self._values.append(self._older.pop(0).cpu().clone())
        elif bool(tensor.sum() > 0):
            self._values.append(tensor.cpu() + 1)
        self._older.append(tensor)
        del self._older[:-2]

    def _batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.number += 1
        generator = torch.Generator().manual_seed(self.number % 7)
        x, y = torch.randn(4, self._nest.width, generator=generator), torch.randn(4, 2, generator=generator)
        return x.to(self._device), y.to(self._device)

    def _loss(self) -> torch.Tensor:
        x, y = self._batch()
        out = self._model(x)
        self._read(out)
        return (out - y).pow(2).mean()

    def _step(self, loss: torch.Tensor) -> None:
        if self._nest.zeroes_first:
            self._optimizer.zero_grad()
        loss.backward()
        self._read(loss)
        self._optimizer.step()
        self._read(next(self._model.parameters()))
        if not self._nest.zeroes_first:
            self._optimizer.zero_grad()

    # ----- the bodies of loops

    def train(self) -> None:
        self._step(self._loss())

    def evaluate(self) -> None:
        with torch.no_grad():
            x, y = self._batch()
            self._total = self._total + (self._model(x) > y).sum()
            self._read(self._total)

    def relax(self) -> None:
        for _ in range(6):
            self._grid = (self._grid.roll(1, 0) + self._grid.roll(-1, 1)) / 2 + 0.1
            self._read(self._grid)

    def accumulate(self) -> None:
        self._optimizer.zero_grad()
        for _ in range(3):
            (self._loss() / 3).backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def alternate(self) -> None:
        made = self._model(self._batch()[0])
        self._of_critic.zero_grad()
        self._critic(made.detach()).pow(2).mean().backward()
        self._of_critic.step()
        self._optimizer.zero_grad()
        self._critic(made).mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._read(made)

    def learn_to_learn(self) -> None:
        weights = dict(self._model.named_parameters())
        x, y = self._batch()
        for _ in range(2):
            loss = (torch.func.functional_call(self._model, weights, (x,)) - y).pow(2).mean()
            gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            weights = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
            self._read(loss)
        self._step((torch.func.functional_call(self._model, weights, (x,)) - y).pow(2).mean())

    def generate_batches(self) -> None:
        def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for _ in range(3):
                x, y = self._batch()
                self._read(x * 2)
                yield x + 1, y

        with torch.no_grad():
            for x, y in batches():
                self._total = (self._model(x) - y).sum()
                self._read(self._total)

    def raise_within(self) -> None:
        try:
            loss = self._loss()
            self._read(loss)
            loss.backward()
            if self.number % 3 == 0:
                raise Interrupted
            self._optimizer.step()
        except Interrupted:
            pass
        self._optimizer.zero_grad()

    def decode(self) -> None:
        with torch.no_grad():
            state = torch.zeros(2, self._nest.width, device=self._device)
            for _ in range(4):
                state = torch.tanh(state + self._grid.sum(0))
                self._read(state)
            self._state = state

    def begin_anew(self) -> None:
        self._optimizer = self._nest.optimizer(self._model.parameters())
        self.train()
        self.train()

    def search(self) -> None:
        x, y = self._batch()

        def closure() -> torch.Tensor:
            self._search.zero_grad()
            loss = (self._model(x) - y).pow(2).mean()
            loss.backward()
            return loss

        self._search.step(closure)
