"""Loops without `mark_step()` next to the same loops with it, and to eager: where steps end by themselves.

In: loops as people write them, and as trainers of other packages run them, on the device by its name alone. Out: a
table: time of a round of each, misses and compiles after the warm-up. Run by `bench.py --unmarked`. The three forms of
a loop run in processes of their own, side by side, and take turns.
"""

from __future__ import annotations

import importlib.util
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from statistics import median
from typing import Any

import torch
from shared.tables import Result, Table
from shared.workers import Worker, WorkerFailed
from torch import nn
from torch.nn import functional

from benchmarks import wild, wild_programs

FORMS = ("eager", "marked", "unmarked")

Round = Callable[[int], Any]  # returns a loss, or nothing
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

    def one_round(number: int) -> Any:
        loss = setup.loss(number)
        setup.optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        setup.optimizer.step()
        mark()
        if chance.random() < 0.1:
            loss.item()
        return loss

    return one_round


def accumulation(width: int, device: str, mark: Mark) -> Round:
    setup = _Setup(width, device)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(setup.optimizer, 10_000)

    def one_round(number: int) -> Any:
        for part in range(4):
            loss = setup.loss(4 * number + part) / 4
            loss.backward()
        loss = loss.detach()
        nn.utils.clip_grad_norm_(setup.model.parameters(), 1.0)
        setup.optimizer.step()
        setup.optimizer.zero_grad()
        schedule.step()
        mark()
        return loss

    return one_round


def average_of_weights(width: int, device: str, mark: Mark) -> Round:
    setup = _Setup(width, device)
    averaged = torch.optim.swa_utils.AveragedModel(
        setup.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99), use_buffers=False
    )

    def one_round(number: int) -> Any:
        loss = setup.loss(number)
        loss.backward()
        loss = loss.detach()
        setup.optimizer.step()
        setup.optimizer.zero_grad()
        averaged.update_parameters(setup.model)
        mark()
        return loss

    return one_round


def two_networks(width: int, device: str, mark: Mark) -> Round:
    setup = _Setup(width, device)
    critic = _network(width, device, 1)
    makes = _network(width, device, width)
    theirs, ours = torch.optim.Adam(critic.parameters()), torch.optim.Adam(makes.parameters())

    def one_round(number: int) -> Any:
        x, _ = setup.batch(number)
        made = makes(torch.randn_like(x))
        loss = functional.softplus(critic(made.detach())).mean() + functional.softplus(-critic(x)).mean()
        theirs.zero_grad()
        loss.backward()
        loss = loss.detach()
        theirs.step()
        ours.zero_grad()
        functional.softplus(-critic(made)).mean().backward()
        ours.step()
        mark()
        if number % 10 == 9:
            loss.item()
        return loss

    return one_round


def evaluation(width: int, device: str, mark: Mark) -> Round:
    setup = _Setup(width, device)
    return lambda number: setup.evaluate(mark, 20)


def epochs_with_evaluation(width: int, device: str, mark: Mark) -> Round:
    setup = _Setup(width, device)

    def one_round(number: int) -> Any:
        for step in range(10):
            loss = setup.loss(step)
            loss.backward()
            loss = loss.detach()
            setup.optimizer.step()
            setup.optimizer.zero_grad()
            mark()
        setup.evaluate(mark, 5)
        return loss

    return one_round


def lbfgs(width: int, device: str, mark: Mark) -> Round:
    setup = _Setup(width, device, lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3))

    def one_round(number: int) -> Any:
        def closure() -> torch.Tensor:
            setup.optimizer.zero_grad()
            loss = setup.loss(0)
            loss.backward()
            return loss

        loss = setup.optimizer.step(closure).detach()
        mark()
        return loss

    return one_round


def gradients_without_an_optimizer(width: int, device: str, mark: Mark) -> Round:
    setup = _Setup(width, device)
    parameters = list(setup.model.parameters())

    def one_round(number: int) -> Any:
        loss = setup.loss(number)
        gradients = torch.autograd.grad(loss, parameters)
        loss = loss.detach()
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= 0.01 * gradient
        mark()
        return loss

    return one_round


def inner_loop(width: int, device: str, mark: Mark) -> Round:
    """Meta-learning: steps within a step, by `torch.func`."""
    setup = _Setup(width, device)

    def one_round(number: int) -> Any:
        weights = dict(setup.model.named_parameters())
        x, y = setup.batch(number)
        for _ in range(3):
            loss = functional.cross_entropy(torch.func.functional_call(setup.model, weights, (x,)), y)
            gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            weights = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
        outer = functional.cross_entropy(torch.func.functional_call(setup.model, weights, (x,)), y)
        setup.optimizer.zero_grad()
        outer.backward()
        outer = outer.detach()
        setup.optimizer.step()
        mark()
        return outer

    return one_round


def distillation(width: int, device: str, mark: Mark) -> Round:
    """A teacher without gradients, whose batch comes in the middle of the step."""
    setup, teacher = _Setup(width, device), _network(width, device).eval()

    def one_round(number: int) -> Any:
        x, y = setup.batch(number)
        out = setup.model(x)
        with torch.no_grad():
            seen = setup.batches[number % len(setup.batches)][0] * 0.9  # another view of it, by the host
            taught = teacher(seen.to(device)).softmax(-1)
        loss = functional.cross_entropy(out, y) + functional.cross_entropy(out, taught)
        setup.optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        setup.optimizer.step()
        mark()
        return loss

    return one_round


def gradient_penalty(width: int, device: str, mark: Mark) -> Round:
    """The critic of a WGAN: a backward through a backward."""
    setup = _Setup(width, device)

    def one_round(number: int) -> Any:
        x, _ = setup.batch(number)
        x.requires_grad_()
        scores = setup.model(x).sum(1)
        (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        loss = scores.mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
        setup.optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        setup.optimizer.step()
        mark()
        return loss

    return one_round


def optimizers_that_take_turns(width: int, device: str, mark: Mark) -> Round:
    """Two optimizers, each after two batches that add up, as in training parts of a model alternately."""
    setup = _Setup(width, device)
    halves = [list(part.parameters()) for part in (setup.model[:6], setup.model[6:])]
    optimizers = [torch.optim.SGD(half, lr=0.01, momentum=0.9) for half in halves]

    def one_round(number: int) -> Any:
        for turn, optimizer in enumerate(optimizers):
            for part in range(2):
                loss = setup.loss(4 * number + 2 * turn + part) / 2
                loss.backward()
            loss = loss.detach()
            optimizer.step()
            setup.model.zero_grad()
            mark()
        return loss

    return one_round


def relaxation(width: int, device: str, mark: Mark) -> Round:
    x = [torch.rand(width, width, device=device)]

    def one_round(number: int) -> Any:
        for _ in range(50):
            x[0] = (x[0].roll(1, 0) + x[0].roll(-1, 0) + x[0].roll(1, 1) + x[0].roll(-1, 1)) / 4
            mark()
        if number % 10 == 9:
            return x[0].sum().item()
        return None

    return one_round


def k_means(width: int, device: str, mark: Mark) -> Round:
    points = torch.randn(1024, width, generator=torch.Generator().manual_seed(0)).to(device)

    def one_round(number: int) -> Any:
        centres = points[:16]
        for _ in range(20):
            nearest = functional.one_hot(torch.cdist(points, centres).argmin(1), 16).to(points.dtype)
            centres = (nearest.t() @ points) / nearest.sum(0).clamp(min=1)[:, None]
            mark()
        return centres.sum().item()

    return one_round


def decoding(width: int, device: str, mark: Mark) -> Round:
    cell, head = nn.GRUCell(width, width).to(device), nn.Linear(width, width).to(device)

    def one_round(number: int) -> Any:
        state = torch.zeros(8, width, device=device)
        token = torch.ones(8, width, device=device)
        with torch.no_grad():
            for step in range(20):
                state = cell(token, state)
                token = head(state).softmax(-1)
                mark()
                if step % 10 == 9:
                    token.argmax(-1).tolist()
        return token[0, 0]

    return one_round


def policy_optimization(width: int, device: str, mark: Mark) -> Round:
    """PPO: a rollout whose actions are read, and epochs of updates from what it collected."""
    steps, count = 32, 8
    actor, critic = _network(width, device, 2), _network(width, device, 1)
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=3e-4)
    effect, generator = 0.1 * torch.randn(2, width), torch.Generator().manual_seed(0)
    state = 0.1 * torch.randn(count, width)

    def rollout() -> list[torch.Tensor]:
        nonlocal state
        rows = []
        with torch.no_grad():
            for _ in range(steps):
                seen = state.to(device)
                logs = actor(seen).log_softmax(-1)
                values = critic(seen).squeeze(-1)
                mark()
                actions = torch.multinomial(logs.cpu().exp(), 1, generator=generator).squeeze(-1)
                state = 0.9 * state + effect[actions]
                chosen = logs.cpu().gather(1, actions[:, None]).squeeze(-1)
                rows.append((seen.cpu(), actions, chosen, values.cpu(), -state.square().mean(1)))
        return [torch.stack(column) for column in zip(*rows, strict=True)]

    def one_round(number: int) -> Any:
        seen, actions, logs, values, rewards = rollout()
        advantages = torch.zeros_like(rewards)
        for step in reversed(range(steps - 1)):
            delta = rewards[step] + 0.99 * values[step + 1] - values[step]
            advantages[step] = delta + 0.99 * 0.95 * advantages[step + 1]
        columns = [column.flatten(0, 1) for column in (seen, actions, logs, advantages, advantages + values)]
        for _ in range(4):
            for rows in torch.randperm(steps * count, generator=generator).split(64):
                x, taken, before, advantage, returns = (column[rows].to(device) for column in columns)
                now = actor(x).log_softmax(-1)
                ratio = (now.gather(1, taken[:, None]).squeeze(-1) - before).exp()
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
                loss = loss + 0.5 * functional.mse_loss(critic(x).squeeze(-1), returns)
                loss = loss + 0.01 * (now.exp() * now).sum(-1).mean()
                optimizer.zero_grad()
                loss.backward()
                loss = loss.detach()
                nn.utils.clip_grad_norm_(parameters, 0.5)
                optimizer.step()
                mark()
        return loss

    return one_round


def generation(width: int, device: str, mark: Mark) -> Round:
    """`generate` of transformers, which reads at each token whether all texts are at their end."""
    from transformers import LogitsProcessor

    class Marks(LogitsProcessor):
        def __call__(self, tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            mark()
            return scores

    model = wild_programs.gpt2(width, 2).to(device).eval()
    model.generation_config.eos_token_id = 63
    prompts = torch.randint(2, 60, (8, 4, 8), generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": 16, "do_sample": False, "logits_processor": [Marks()]}

    def one_round(number: int) -> Any:
        prompt = prompts[number % len(prompts)].to(device)
        tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        mark()
        return tokens.sum().item()

    return one_round


LOOPS: dict[str, Callable[[int, str, Mark], Round]] = {
    loop.__name__.replace("_", " "): loop
    for loop in (
        training_read_at_random, accumulation, average_of_weights, two_networks, evaluation, epochs_with_evaluation,
        lbfgs, gradients_without_an_optimizer, inner_loop, distillation, gradient_penalty, optimizers_that_take_turns,
        relaxation, k_means, decoding, policy_optimization, generation,
    )
}  # fmt: skip
WIDTHS = (32, 256)


# ----- trainers, which own the loop


def transformers_trainer(steps: wild.Steps, width: int) -> None:
    from transformers import Trainer, TrainingArguments

    tokens = torch.randint(64, (256, 32), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = wild_programs.arguments_for(steps, TrainingArguments)
    callbacks = [wild_programs.watched(steps)]
    Trainer(wild_programs.gpt2(width, 2), arguments, train_dataset=rows, callbacks=callbacks).train()


def lightning_trainer(steps: wild.Steps, width: int) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = _network(width, "cpu")

        def training_step(self, batch: Any, index: int) -> Any:
            loss = functional.cross_entropy(self.layers(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("validation", functional.cross_entropy(self.layers(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    data = [torch.utils.data.DataLoader(_batches(width, count), batch_size=None) for count in (16, 4)]
    wild_programs.fit(steps, Module(), *data)


TRAINERS: dict[str, tuple[Callable[[wild.Steps, int], None], tuple[str, ...]]] = {
    "trainer of transformers": (transformers_trainer, ("transformers", "accelerate")),
    "SFT trainer of trl": (partial(wild_programs.trl_sft, depth=2), ("trl", "datasets")),
    "trainer of lightning": (lightning_trainer, ("lightning",)),
}
NAMES = (*LOOPS, *TRAINERS)


# ----- within a process


class _Rounds(wild.Steps):
    """Rounds of a loop. The form "marked" has a mark at the end of each, where people who mark would have it."""

    integrates = False

    def __init__(self, form: str) -> None:
        super().__init__("cpu" if form == "eager" else "lazy")
        self._is_marked = form == "marked"

    def mark(self) -> None:
        if self._is_marked:
            self._lazy.mark_step()

    def ended(self, loss: Any = None) -> None:
        self.mark()
        super().ended(loss)


def serve(name: str, width: int, form: str) -> None:
    """Run a loop until nobody asks any more."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rounds = _Rounds(form)
    if name in TRAINERS:
        TRAINERS[name][0](rounds, width)
    one_round = LOOPS[name](width, rounds.device, rounds.mark)
    for number in count():
        super(_Rounds, rounds).ended(one_round(number))


# ----- beside it


def main(names: Sequence[str], rounds: int, show: Callable[[Table], str]) -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory(prefix="unmarked-") as folder:
        for form in FORMS[1:]:
            wild.fill(f"{folder}/{form}")
        rows = [row for name in names for row in _rows(name, rounds, folder)]
    head = ["loop, width", "eager ms", "marked", "unmarked", "unmarked / marked", "by CPU time"]
    head += ["late misses", "late compiles", "steps a round", "losses"]
    print(show(Table("Loops without marks", head, rows)))


def _rows(name: str, rounds: int, folder: str) -> Iterator[list[str]]:
    packages = TRAINERS[name][1] if name in TRAINERS else ("transformers",) if name == "generation" else ()
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        print(f"bench: {name}: left out, as {', '.join(missing)} is not installed", file=sys.stderr)
        return
    for width in WIDTHS:
        row = [f"{name}, {width}", *_row(name, width, rounds, folder)]
        print(*row, sep=" | ", file=sys.stderr, flush=True)
        yield row


def _worker(name: str, width: int, form: str, folder: str) -> Worker:
    call = f"benchmarks.unmarked.serve({name!r}, {width}, {form!r})"
    return wild.worker(form, call, "cpu" if form == "eager" else "lazy", 1, f"{folder}/{form}")


def _row(name: str, width: int, rounds: int, folder: str) -> list[str]:
    try:
        with ExitStack() as stack:
            workers = [stack.enter_context(_worker(name, width, form, folder)) for form in FORMS]
            settled = [wild.ask(worker, "settle") for worker in workers]
            windows = [[wild.ask(worker, "window") for worker in workers] for _ in range(rounds)]
    except WorkerFailed as failure:
        return [str(failure), *["-"] * 8]
    seconds, cpu = (
        [[window[key] / window["steps"] for window in triple] for triple in windows] for key in ("seconds", "cpu")
    )
    times = [f"{median(column) * 1e3:.2f}" for column in zip(*seconds, strict=True)]
    ratios = [f"{median(unmarked / marked for _, marked, unmarked in triples):.2f}" for triples in (seconds, cpu)]
    late = [f"{_late(windows, 2, name)} ({_late(windows, 1, name)})" for name in ("UncachedCompile", "Compile")]
    steps = _late(windows, 2, "MarkStep") / sum(triple[2]["steps"] for triple in windows)
    return [
        *times,
        *ratios,
        *late,
        f"{steps:.1f}",
        wild.difference([settled[0]["losses"], settled[2]["losses"]]),
    ]


def _late(windows: Sequence[Sequence[Result]], form: int, counter: str) -> int:
    """The count of one form after the warm-up."""
    return sum(triple[form]["counts"].get(counter, 0) for triple in windows)
