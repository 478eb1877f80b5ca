"""Loops without `mark_step()` next to the same loops with it, and to eager: where steps end by themselves.

In: loops as people write them. Out: a table: time of a round of each, misses and compiles after the warm-up. Run by
`bench.py --unmarked`. The three forms of a loop run in processes of their own, side by side, and take turns.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import median
from time import perf_counter
from typing import Any

import torch
from tables import Table
from torch import nn
from torch.nn import functional
from workers import Worker, answer_commands

FORMS = ("eager", "marked", "unmarked")
_WARM_UP = 60  # rounds, twice: before and after the compiles that they cause
_SECONDS = 0.5  # of a window

Round = Callable[[int], None]
Mark = Callable[[], None]


def _batches(width: int, count: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(32, width, generator=generator), torch.randint(0, 10, (32,), generator=generator))
        for _ in range(count)
    ]


def _network(width: int, device: str, results: int = 10) -> nn.Module:
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.LayerNorm(width), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(width, results)).to(device)


class _Setup:
    """A model, an optimizer and batches that come from the host."""

    def __init__(self, width: int, device: str, optimizer: Callable[..., Any] = torch.optim.AdamW) -> None:
        self.device = device
        self.batches = _batches(width)
        self.model = _network(width, device)
        self.optimizer = optimizer(self.model.parameters())

    def batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = self.batches[number % len(self.batches)]
        return x.to(self.device), y.to(self.device)

    def loss(self, number: int) -> torch.Tensor:
        x, y = self.batch(number)
        return functional.cross_entropy(self.model(x), y)

    def evaluate(self, mark: Mark, batches: int) -> float:
        right = torch.zeros((), device=self.device)
        with torch.no_grad():
            for number in range(batches):
                x, y = self.batch(number)
                right += (self.model(x).argmax(1) == y).sum()
                mark()
        return right.item()


def training_read_at_random(width: int, device: str, mark: Mark) -> Round:
    setup, chance = _Setup(width, device), random.Random(0)

    def one_round(number: int) -> None:
        loss = setup.loss(number)
        setup.optimizer.zero_grad()
        loss.backward()
        setup.optimizer.step()
        mark()
        if chance.random() < 0.1:
            loss.item()

    return one_round


def accumulation(width: int, device: str, mark: Mark) -> Round:
    setup = _Setup(width, device)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(setup.optimizer, 10_000)

    def one_round(number: int) -> None:
        for part in range(4):
            (setup.loss(4 * number + part) / 4).backward()
        nn.utils.clip_grad_norm_(setup.model.parameters(), 1.0)
        setup.optimizer.step()
        setup.optimizer.zero_grad()
        schedule.step()
        mark()

    return one_round


def average_of_weights(width: int, device: str, mark: Mark) -> Round:
    setup = _Setup(width, device)
    averaged = torch.optim.swa_utils.AveragedModel(
        setup.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99), use_buffers=False
    )

    def one_round(number: int) -> None:
        setup.loss(number).backward()
        setup.optimizer.step()
        setup.optimizer.zero_grad()
        averaged.update_parameters(setup.model)
        mark()

    return one_round


def two_networks(width: int, device: str, mark: Mark) -> Round:
    setup = _Setup(width, device)
    critic = _network(width, device, 1)
    makes = _network(width, device, width)
    theirs, ours = torch.optim.Adam(critic.parameters()), torch.optim.Adam(makes.parameters())

    def one_round(number: int) -> None:
        x, _ = setup.batch(number)
        made = makes(torch.randn_like(x))
        loss = functional.softplus(critic(made.detach())).mean() + functional.softplus(-critic(x)).mean()
        theirs.zero_grad()
        loss.backward()
        theirs.step()
        ours.zero_grad()
        functional.softplus(-critic(made)).mean().backward()
        ours.step()
        mark()
        if number % 10 == 9:
            loss.item()

    return one_round


def evaluation(width: int, device: str, mark: Mark) -> Round:
    setup = _Setup(width, device)
    return lambda number: setup.evaluate(mark, 20) and None


def epochs_with_evaluation(width: int, device: str, mark: Mark) -> Round:
    setup = _Setup(width, device)

    def one_round(number: int) -> None:
        for step in range(10):
            setup.loss(step).backward()
            setup.optimizer.step()
            setup.optimizer.zero_grad()
            mark()
        setup.evaluate(mark, 5)

    return one_round


def lbfgs(width: int, device: str, mark: Mark) -> Round:
    setup = _Setup(width, device, lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3))

    def one_round(number: int) -> None:
        def closure() -> torch.Tensor:
            setup.optimizer.zero_grad()
            loss = setup.loss(0)
            loss.backward()
            return loss

        setup.optimizer.step(closure)
        mark()

    return one_round


def gradients_without_an_optimizer(width: int, device: str, mark: Mark) -> Round:
    setup = _Setup(width, device)
    parameters = list(setup.model.parameters())

    def one_round(number: int) -> None:
        gradients = torch.autograd.grad(setup.loss(number), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= 0.01 * gradient
        mark()

    return one_round


def inner_loop(width: int, device: str, mark: Mark) -> Round:
    """Meta-learning: steps within a step, by `torch.func`."""
    setup = _Setup(width, device)

    def one_round(number: int) -> None:
        weights = dict(setup.model.named_parameters())
        x, y = setup.batch(number)
        for _ in range(3):
            loss = functional.cross_entropy(torch.func.functional_call(setup.model, weights, (x,)), y)
            gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            weights = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
        outer = functional.cross_entropy(torch.func.functional_call(setup.model, weights, (x,)), y)
        setup.optimizer.zero_grad()
        outer.backward()
        setup.optimizer.step()
        mark()

    return one_round


def relaxation(width: int, device: str, mark: Mark) -> Round:
    x = [torch.rand(width, width, device=device)]

    def one_round(number: int) -> None:
        for _ in range(50):
            x[0] = (x[0].roll(1, 0) + x[0].roll(-1, 0) + x[0].roll(1, 1) + x[0].roll(-1, 1)) / 4
            mark()
        if number % 10 == 9:
            x[0].sum().item()

    return one_round


def k_means(width: int, device: str, mark: Mark) -> Round:
    points = torch.randn(1024, width, generator=torch.Generator().manual_seed(0)).to(device)

    def one_round(number: int) -> None:
        centres = points[:16]
        for _ in range(20):
            nearest = functional.one_hot(torch.cdist(points, centres).argmin(1), 16).to(points.dtype)
            centres = (nearest.t() @ points) / nearest.sum(0).clamp(min=1)[:, None]
            mark()
        centres.sum().item()

    return one_round


def decoding(width: int, device: str, mark: Mark) -> Round:
    cell, head = nn.GRUCell(width, width).to(device), nn.Linear(width, width).to(device)

    def one_round(number: int) -> None:
        state = torch.zeros(8, width, device=device)
        token = torch.ones(8, width, device=device)
        with torch.no_grad():
            for step in range(20):
                state = cell(token, state)
                token = head(state).softmax(-1)
                mark()
                if step % 10 == 9:
                    token.argmax(-1).tolist()

    return one_round


LOOPS: dict[str, Callable[[int, str, Mark], Round]] = {
    loop.__name__.replace("_", " "): loop
    for loop in (
        training_read_at_random, accumulation, average_of_weights, two_networks, evaluation, epochs_with_evaluation,
        lbfgs, gradients_without_an_optimizer, inner_loop, relaxation, k_means, decoding,
    )
}  # fmt: skip
WIDTHS = (32, 256)


# ----- within a process


class _Form:
    """One form of one loop, warmed up."""

    def __init__(self, name: str, width: int, form: str) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._number = 0
        device, mark = "cpu", _nothing
        if form != "eager":
            import lazy_backend

            device = "lazy"
            mark = lazy_backend.mark_step if form == "marked" else _nothing
        self._loop = LOOPS[name](width, device, mark)
        for _ in range(2):
            self._rounds(_WARM_UP)
            if form != "eager":
                lazy_backend.wait_for_compiles()
        self._counted = self._counts() if form != "eager" else {}

    def _rounds(self, count: int) -> None:
        for _ in range(count):
            self._loop(self._number)
            self._number += 1

    @staticmethod
    def _counts() -> dict[str, int]:
        import lazy_backend

        names = {"misses": "UncachedCompile", "compiles": "Compile", "steps": "MarkStep"}
        return {name: lazy_backend.metrics.counter_value(counter) for name, counter in names.items()}

    def answer(self, command: str) -> dict[str, Any]:
        if command == "window":
            begin, rounds = perf_counter(), 0
            while (seconds := perf_counter() - begin) < _SECONDS:
                self._rounds(10)
                rounds += 10
            return {"seconds": seconds / rounds}
        late = {name: count - self._counted[name] for name, count in self._counts().items()} if self._counted else {}
        return {"late": late, "rounds": self._number - 2 * _WARM_UP}


def _nothing() -> None:
    """No mark."""


def main(names: Sequence[str], rounds: int, show: Callable[[Table], str]) -> None:
    """Measure and print."""
    rows = []
    for name in names:
        for width in WIDTHS:
            rows.append([f"{name}, {width}", *_row(name, width, rounds)])
            print(*rows[-1], sep=" | ", file=sys.stderr)
    head = [
        "loop, width",
        "eager ms",
        "marked",
        "unmarked",
        "unmarked / marked",
        "late misses",
        "late compiles",
        "steps a round",
    ]
    print(show(Table("Loops without marks", head, rows)))


def _row(name: str, width: int, rounds: int) -> list[str]:
    with ExitStack() as stack:
        workers = [
            stack.enter_context(Worker(form, [sys.executable, __file__, name, str(width), form], {})) for form in FORMS
        ]
        windows: list[list[float]] = [[worker.ask("window")["seconds"] for worker in workers] for _ in range(rounds)]
        counts = [worker.ask("counts") for worker in workers]
    eager, marked, unmarked = (median(column) for column in zip(*windows, strict=True))
    ratio = median(window[2] / window[1] for window in windows)
    late = [f"{counts[2]['late'][what]} ({counts[1]['late'][what]})" for what in ("misses", "compiles")]
    steps = counts[2]["late"]["steps"] / counts[2]["rounds"]
    times = [f"{eager * 1e3:.2f}", f"{marked * 1e3:.2f}", f"{unmarked * 1e3:.2f}"]
    return [*times, f"{ratio:.2f}", *late, f"{steps:.1f}"]


if __name__ == "__main__":
    answer_commands(_Form(sys.argv[1], int(sys.argv[2]), sys.argv[3]).answer)
