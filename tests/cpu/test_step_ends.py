"""`config.mark_steps`: steps that end by themselves, in loops of every kind."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from harness import assert_same, count, grid, run_program
from random_nests import NestRun, RandomNest
from torch import nn

import lazy_backend
from lazy_backend import GraphCutWarning, config
from lazy_backend.diagnostics.history import history
from lazy_backend.execution.step_ends import loop_of
from lazy_backend.tensors.contexts import contexts


@pytest.fixture(autouse=True)
def by_itself(fresh_state: None) -> Iterator[None]:
    with config.patch(mark_steps="auto"):
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
    with count("MarkStep") as steps, count("SyncTensorsGraph") as syncs:
        train("lazy", steps=1)
        y = torch.ones(3, device="lazy") + 1
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


@pytest.mark.parametrize("batches", ["one", "none", "one for each"])
def test_optimizers_that_step_one_after_the_other_come_to_end_one_step(batches: str) -> None:
    def run(device: str) -> list[torch.Tensor]:
        generator, ours = made(device)
        critics = [nn.Linear(1, 1).to(device) for _ in range(2)]
        theirs = [sgd(critic) for critic in critics]
        x = torch.ones(4, 3).to(device)
        for number in range(7):
            if batches == "one":
                x = torch.full((4, 3), 0.1 * number).to(device)
            for critic, optimizer in zip([*critics, critics[0]], [*theirs, ours], strict=True):
                if batches == "one for each":
                    x = torch.full((4, 3), 0.1 * number).to(device)
                critic(generator(x)).mean().backward()
                optimizer.step()
                for each in (*theirs, ours):
                    each.zero_grad()
        return [p.detach().cpu() for model in (generator, *critics) for p in model.parameters()]

    with count("SyncTensorsGraph") as syncs, count("GraphCut") as cuts:
        parameters = run("lazy")
    assert (syncs(), cuts()) == (7 * 3 if batches == "one for each" else 2 * 3 + 5, 0)
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
        config.mark_steps = "by hand"
        train("lazy", steps=1)
    assert steps() == 2


def test_a_script_that_names_no_package_needs_no_mark(tmp_path) -> None:
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
    assert run_program(code, tmp_path, LAZY_BACKEND_BACKEND="eager").strip() == "4"
    assert run_program(code, tmp_path, LAZY_BACKEND_BACKEND="eager", LAZY_BACKEND_MARK_STEPS="by hand").strip() == "0"


# ----- without an optimizer


def evaluated(device: str, batches: int, inline: bool = False) -> torch.Tensor:
    """Right answers of a model; `inline`: labels are moved where they are used."""
    model, _ = made(device)
    right = torch.zeros((), device=device)
    with torch.no_grad():
        for number in range(batches):
            x, y = torch.full((4, 3), 0.1 * number), torch.full((4, 1), 0.01 * number)
            x, y = x.to(device), y if inline else y.to(device)
            right += (model(x) > y.to(device)).sum()
    return right


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("first_sight", ["run", "record"])
def test_each_batch_of_an_evaluation_is_a_step(first_sight: str, inline: bool) -> None:
    config.first_sight = first_sight
    expected = evaluated("cpu", 30)
    with count("MarkStep") as steps, count("UncachedCompile") as misses:
        assert_same(evaluated("lazy", 30, inline), expected)
    assert 27 <= steps() <= 31
    assert misses() <= 5
    with count("UncachedCompile") as misses:
        assert_same(evaluated("lazy", 30, inline), expected)
    assert misses() <= 1


def test_an_evaluation_keeps_no_batches() -> None:
    alive: list[int] = []
    with torch.no_grad():
        total = torch.zeros((), device="lazy")
        for _ in range(60):
            total += torch.ones(100_000).to("lazy").mean()
            alive.append(len(contexts.get_device_context(None).get_live_tensors()))
    assert max(alive[10:]) <= max(alive[:10]) + 2
    assert total.item() == 60.0


def test_epochs_with_evaluation_settle() -> None:
    def run(device: str) -> list[torch.Tensor]:
        model, optimizer = made(device)
        losses = []
        for _ in range(4):
            for _ in range(3):
                x, y = torch.ones(4, 3).to(device), torch.ones(4, 1)
                loss = (model(x) - y.to(device)).pow(2).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                for number in range(5):
                    losses.append(model(torch.full((4, 3), float(number)).to(device)).sum())
        return [loss.cpu() for loss in losses]

    expected = run("cpu")
    with count("MarkStep") as steps:
        assert_same(run("lazy"), expected)
    assert steps() == 4 * (3 + 4) - 1  # the first batch comes with the second, and the losses' read ends the last
    with count("UncachedCompile") as misses:
        assert_same(run("lazy"), expected)
    assert misses() <= 2


def test_a_batch_without_gradients_within_a_step_ends_nothing() -> None:
    def run(device: str) -> list[torch.Tensor]:
        (model, optimizer), (teacher, _) = made(device), made(device)
        for number in range(6):
            out = model(torch.full((4, 3), float(number)).to(device))
            with torch.no_grad():
                taught = teacher(torch.full((4, 3), float(number + 1)).to(device))
            (out - taught).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().cpu() for p in model.parameters()]

    with count("SyncTensorsGraph") as syncs:
        parameters = run("lazy")
    assert syncs() == 6
    assert_same(parameters, run("cpu"))


def test_batches_that_are_added_up_become_one_step() -> None:
    def run(device: str, updates: int) -> list[torch.Tensor]:
        model, optimizer = made(device)
        for _ in range(updates):
            for number in range(3):
                (model(torch.full((4, 3), float(number)).to(device)).mean() / 3).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().cpu() for p in model.parameters()]

    run("lazy", 3)
    with count("MarkStep") as steps, count("UncachedCompile") as misses:
        parameters = run("lazy", 6)
    assert (steps(), misses()) == (6, 0)
    assert_same(parameters, run("cpu", 6))


@pytest.mark.parametrize("rounds", [700, 1500])
def test_a_loop_of_nothing_but_operators_settles(rounds: int) -> None:
    def run(device: str) -> torch.Tensor:
        x = torch.arange(16.0).reshape(4, 4).to(device)
        for _ in range(rounds):
            x = (torch.roll(x, 1, 0) + torch.roll(x, -1, 0) + torch.roll(x, 1, 1) + torch.roll(x, -1, 1)) / 4 + 0.5
        return x.cpu()

    expected = run("cpu")
    with count("MarkStep") as steps, count("UncachedCompile") as misses:
        assert_same(run("lazy"), expected)
    assert steps() > (9 * rounds - 4096) // 150
    assert misses() <= 5
    with count("UncachedCompile") as misses:
        assert_same(run("lazy"), expected)
    assert misses() <= 2


def test_layers_are_no_loop() -> None:
    """A step of an optimizer that was seen once is not cut, however often the calls of a layer come."""

    def run(device: str, steps: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = [layer for _ in range(400) for layer in (nn.Linear(3, 3), nn.Tanh(), nn.LayerNorm(3))]
        model = nn.Sequential(*layers).to(device)
        optimizer = sgd(model)
        losses = []
        for _ in range(steps):
            loss = model(torch.ones(2, 3).to(device)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [loss.cpu() for loss in losses]

    run("lazy", 2)
    with count("SyncTensorsGraph") as syncs:
        losses = run("lazy", 3)
    assert syncs() <= 4
    assert_same(losses, run("cpu", 3))


# ----- threads


def test_a_thread_that_marks_its_steps_gets_no_others() -> None:
    evaluated("lazy", 1)
    lazy_backend.mark_step()
    with count("MarkStep") as steps:
        train("lazy")
        evaluated("lazy", 10)
    assert steps() == 0
    found: list[int] = []

    def other() -> None:
        with count("MarkStep") as steps:
            train("lazy")
        found.append(steps())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found == [5]


def test_a_loop_without_an_optimizer_that_needs_gradients_is_bounded() -> None:
    def run(device: str) -> torch.Tensor:
        weight = torch.ones(3, 1).to(device).requires_grad_()
        for number in range(40):
            (torch.full((4, 3), 0.01 * number).to(device) @ weight).pow(2).mean().backward()
            with torch.no_grad():
                weight -= 0.1 * weight.grad
                weight.grad = None
        return weight.detach().cpu()

    with count("MarkStep") as steps:
        found = run("lazy")
    assert steps() == 40 - 1 - 16
    assert_same(found, run("cpu"))


BATCH = 400_000  # bytes


def summed(device: str, batches: int, after: Callable[[], object] = lambda: None) -> torch.Tensor:
    """The sum of batches that are used once, and of their places, as of labels."""
    total = torch.zeros((), device=device)
    for number in range(batches):
        x, places = torch.full((BATCH // 4,), 0.1 * number).to(device), torch.arange(4).to(device)
        total += x.mean() + places.sum()
        after()
    return total


def kept() -> int:
    """Bytes alive on the device."""
    return contexts.get_device_context(None).alive().bytes


@pytest.mark.parametrize("first_sight", ["run", "record"])
def test_many_bytes_after_marks_are_cut_and_told(first_sight: str) -> None:
    config.first_sight = first_sight
    lazy_backend.mark_step()
    expected, alive = summed("cpu", 40), []
    with config.patch(max_pending_bytes=4 * BATCH, run_in_background="never"):
        with pytest.warns(GraphCutWarning, match="bytes came to lazy:0 without a mark_step"):
            assert_same(summed("lazy", 40, lambda: alive.append(kept())), expected)
        assert max(alive) < 7 * BATCH
        with count("UncachedCompile") as misses:
            assert_same(summed("lazy", 40), expected)
    assert misses() <= 2


@pytest.mark.parametrize("marks", ["auto", "by hand"])
def test_pending_bytes_are_bounded_before_anything_recurs(marks: str) -> None:
    config.mark_steps, alive = marks, []
    with config.patch(max_pending_bytes=4 * BATCH, run_in_background="never"), warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphCutWarning)
        result = summed("lazy", 14, lambda: alive.append(kept()))  # fewer than a step with gradients may take
    assert_same(result, summed("cpu", 14))
    assert max(alive) < 7 * BATCH


def test_strict_mode_cuts_nothing_for_memory() -> None:
    lazy_backend.mark_step()
    with config.patch(max_pending_bytes=4 * BATCH, strict=True), count("TrimIrGraph") as cuts:
        result = summed("lazy", 14)
    assert_same(result, summed("cpu", 14))
    assert cuts() == 0


@pytest.mark.parametrize("pattern", ["a" * 30, "abc" * 20, "xyz" + "ab" * 40, ("ab" * 6 + "c") * 9, "xyz" + "abc" * 50])
def test_the_loop_at_the_end_of_calls(pattern: str) -> None:
    found = loop_of(pattern, [False] * len(pattern))
    assert found is not None
    size = len(found.round)
    begin = len(pattern) - end_of_period(pattern, size)
    assert "".join(found.round) == pattern[begin : begin + size]
    assert found.length % size == 0
    assert (len(pattern) + found.left - begin) % found.length == 0
    for shorter in range(1, size):  # no shorter round covers half of them
        assert end_of_period(pattern, shorter) - shorter < max(2 * shorter, len(pattern) // 2)


def end_of_period(pattern: str, size: int) -> int:
    """The length of the longest end of `pattern` that consists of equal rounds."""
    places = range(size, len(pattern))
    return next((i for i in places if pattern[-1 - i] != pattern[-1 - i + size]), len(pattern))


def test_inputs_come_with_the_first_round_of_a_loop_alone() -> None:
    pattern = "xyz" + "abc" * 20
    found = loop_of(pattern, [place < 6 for place in range(len(pattern))])
    assert found is not None
    assert "".join(found.round) == "abc"
    assert (len(pattern) - 3 + found.left) % found.length == 0
    assert loop_of(pattern, [place % 3 == 0 for place in range(len(pattern))]) is None


@pytest.mark.parametrize("pattern", ["", "a", "ab", "abcdefgh", "abab", "abcdefghij" + "ab" * 4])
def test_no_loop(pattern: str) -> None:
    assert loop_of(pattern, [False] * len(pattern)) is None


# ----- random programs


@pytest.mark.parametrize("steps_aside", [False, True])
@pytest.mark.parametrize("block", [0, 1, *(pytest.param(block, marks=pytest.mark.slow) for block in range(2, 40))])
def test_random_nests_of_loops_equal_eager_and_settle(block: int, steps_aside: bool) -> None:
    for seed in range(4 * block, 4 * block + 4):
        with config.patch(step_aside=steps_aside, first_sight="run"):
            assert_nest_runs_like_eager(RandomNest(seed))


def assert_nest_runs_like_eager(nest: RandomNest) -> None:
    first = nest.rounds_to_settle()
    found, misses = nest.run("lazy", first + 4)
    assert_same(found, nest.run("cpu", first + 4)[0])
    assert not nest.settles() or not any(misses[first:]), (nest.seed, nest.loops, misses)


def test_threads_run_nests_of_loops_at_once() -> None:
    nests = [RandomNest(seed) for seed in range(6)]
    runs = [NestRun(nest, "lazy") for nest in nests]  # here, as weights are drawn from the process's generator
    results: dict[int, list[torch.Tensor]] = {}

    def run(place: int) -> None:
        for _ in range(3):
            runs[place].round()
        results[place] = runs[place].result()

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for place, nest in enumerate(nests):
        assert_same(results[place], nest.run("cpu", 3)[0])
