"""`config.mark_step_on_optimizer_step`: steps that end by themselves, in loops of every kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from harness import assert_same, count, grid, run_program
from torch import nn

import lazy_backend
from lazy_backend import config
from lazy_backend.diagnostics.history import history
from lazy_backend.execution.forgotten_steps import forgotten_steps


@pytest.fixture(autouse=True)
def by_itself(fresh_state: None) -> Iterator[None]:
    forgotten_steps.reset()  # its warning would be an error
    with config.patch(mark_step_on_optimizer_step=True):
        yield


Optimizers = Callable[[nn.Module], torch.optim.Optimizer]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def made(device: str, optimizer: Optimizers = sgd) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(device)
    return model, optimizer(model)


def loss_of(model: nn.Module, device: str) -> torch.Tensor:
    return model(grid(device, 4, 3)).pow(2).mean()


def train(device: str, steps: int = 5, optimizer: Optimizers = sgd, after: Callable[[], None] = lambda: None) -> list:
    model, chosen = made(device, optimizer)
    losses = []
    for _ in range(steps):
        chosen.zero_grad()
        loss = loss_of(model, device)
        loss.backward()
        chosen.step()
        losses.append(loss.detach())
        after()
    return [loss.cpu() for loss in losses]


def test_each_step_of_the_optimizer_ends_a_step() -> None:
    with count("MarkStep") as steps, count("GraphCut") as cuts:
        losses = train("lazy")
    assert (steps(), cuts()) == (5, 0)
    assert_same(losses, train("cpu"))


def test_a_loop_that_also_marks_its_steps_has_no_more_of_them() -> None:
    before = history.steps
    with count("MarkStep") as steps, count("SyncTensorsGraph") as syncs:
        train("lazy", after=lazy_backend.mark_step)
    assert (steps(), syncs(), history.steps - before) == (5, 5, 5)


def test_a_mark_step_that_follows_other_operators_counts() -> None:
    x = torch.ones(3, device="lazy")
    with count("MarkStep") as steps, count("SyncTensorsGraph") as syncs:
        train("lazy", steps=1)
        y = x + 1
        lazy_backend.mark_step()
        lazy_backend.mark_step()  # of nothing, and not after a step that ended by itself
    assert (steps(), syncs()) == (3, 2)
    assert_same(y, torch.full((3,), 2.0))


def test_closures_run_with_either_end() -> None:
    seen: list[str] = []
    model, optimizer = made("lazy")
    lazy_backend.add_step_closure(seen.append, ("before",))
    loss_of(model, "lazy").backward()
    optimizer.step()
    assert seen == ["before"]
    lazy_backend.add_step_closure(seen.append, ("after",))
    lazy_backend.mark_step()
    assert seen == ["before", "after"]


def test_accumulated_gradients_are_one_step() -> None:
    def run(device: str) -> list[torch.Tensor]:
        model, optimizer = made(device)
        for number in range(6):
            (loss_of(model, device) / 3).backward()
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach().cpu() for p in model.parameters()]

    with count("MarkStep") as steps, count("SyncTensorsGraph") as syncs:
        parameters = run("lazy")
    assert steps() == 2
    assert syncs() == 2
    assert_same(parameters, run("cpu"))


def test_each_of_two_optimizers_ends_a_step() -> None:
    def run(device: str) -> list[torch.Tensor]:
        generator, ours = made(device)
        critic = nn.Linear(1, 1).to(device)
        theirs = sgd(critic)
        for _ in range(4):
            critic(generator(grid(device, 4, 3)).detach()).mean().backward()
            theirs.step()
            theirs.zero_grad()
            critic(generator(grid(device, 4, 3))).neg().mean().backward()
            ours.step()
            ours.zero_grad()
        return [p.detach().cpu() for p in (*generator.parameters(), *critic.parameters())]

    with count("MarkStep") as steps, count("GraphCut") as cuts:
        parameters = run("lazy")
    assert (steps(), cuts()) == (8, 0)
    assert_same(parameters, run("cpu"))


def test_the_closures_of_lbfgs_end_no_step() -> None:
    def run(device: str) -> list[torch.Tensor]:
        model, _ = made(device)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

        def evaluate() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, device)
            loss.backward()
            return loss

        return [optimizer.step(evaluate).detach().cpu() for _ in range(2)]

    with count("MarkStep") as steps:
        losses = run("lazy")
    assert steps() == 2
    assert_same(losses, run("cpu"))


def test_an_optimizer_on_the_cpu_ends_nothing() -> None:
    x = torch.ones(3, device="lazy")
    lazy_backend.mark_step()
    with count("MarkStep") as steps:
        y = x + 1
        train("cpu")
    assert steps() == 0
    assert_same(y, torch.full((3,), 2.0))


@pytest.mark.parametrize("capture_model", [False, True])
def test_a_captured_optimizer_ends_its_steps_too(capture_model: bool) -> None:
    def run(device: str) -> list[torch.Tensor]:
        model, optimizer = made(device, lambda m: torch.optim.AdamW(m.parameters(), lr=0.01))
        if device == "lazy":
            lazy_backend.capture(optimizer)
            if capture_model:
                lazy_backend.capture(model)
        losses = []
        for _ in range(70):  # beyond the comparison at the 64th
            optimizer.zero_grad()
            loss = loss_of(model, device)
            loss.backward()
            optimizer.step(None)  # as Accelerate calls it: no closure
            losses.append(loss.detach())
        return [loss.cpu() for loss in losses]

    with count("MarkStep") as steps, count("RegionJump") as jumps, count("UncachedCompile") as graphs:
        losses = run("lazy")
    assert steps() == 70
    assert jumps() > 60 * (1 + 2 * capture_model)
    assert graphs() <= 3
    assert_same(losses, run("cpu"))


@pytest.mark.parametrize("captured", [False, True])
def test_a_scaled_step_ends_after_it_was_undone(captured: bool) -> None:
    def run(device: str) -> list[torch.Tensor]:
        model, optimizer = made(device, lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True))
        if captured and device == "lazy":
            lazy_backend.capture(optimizer)
        scaler = torch.amp.GradScaler(device, init_scale=4.0)
        losses = []
        for number in range(12):
            optimizer.zero_grad()
            loss = loss_of(model, device) * (float("inf") if number in (0, 6, 7) else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.detach())
        return [loss.cpu() for loss in losses]

    with count("MarkStep") as steps, count("GraphCut") as cuts, count("SyncTensorsGraph") as syncs:
        losses = run("lazy")
    assert (steps(), cuts()) == (12, 0)
    assert syncs() <= 13  # the scale's last update is pending when the losses are fetched
    assert_same(losses, run("cpu"))


def test_a_captured_function_is_one_step() -> None:
    def run(device: str) -> list[torch.Tensor]:
        model, optimizer = made(device)

        def step(inputs: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(inputs).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        call = lazy_backend.capture(step) if device == "lazy" else step
        return [call(grid(device, 4, 3)).cpu() for _ in range(5)]

    assert_same(run("lazy"), run("cpu"))


def test_a_block_of_a_step_ends_once() -> None:
    model, optimizer = made("lazy")
    for _ in range(3):
        with count("SyncTensorsGraph") as syncs, lazy_backend.step(strict=True):
            optimizer.zero_grad()
            loss_of(model, "lazy").backward()
            optimizer.step()
        assert syncs() == 1


def test_steps_end_as_written_once_it_is_switched_off() -> None:
    with count("MarkStep") as steps:
        train("lazy", steps=2)
        config.mark_step_on_optimizer_step = False
        train("lazy", steps=1)
    assert steps() == 2


def test_the_environment_variable_serves_a_script_that_names_no_package(tmp_path) -> None:
    code = """
import torch
model = torch.nn.Linear(4, 1).to("lazy")
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    model(torch.ones(8, 4, device="lazy")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
import lazy_backend
print(lazy_backend.metrics.counter_value("MarkStep"))
"""
    settings = {"LAZY_BACKEND_MARK_STEP_ON_OPTIMIZER_STEP": "1", "LAZY_BACKEND_BACKEND": "eager"}
    assert run_program(code, tmp_path, **settings).strip() == "4"
