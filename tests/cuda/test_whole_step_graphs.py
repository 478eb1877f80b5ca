"""Whole steps as graphs of the device: losses are bit for bit those without, nothing that is held is overwritten."""

from __future__ import annotations

import gc

import pytest
import torch
from backing import (
    BACKING,
    MODELS,
    DeviceLoop,
    assert_launched,
    can_capture,
    counted,
    graphs,
    losses_of,
    needs_gpu,
    same_run,
    wait,
)
from harness import live_tensors

import lazy_backend
from lazy_backend import config, metrics

WAYS = ("plain", "parts", "captured")
STEPS = 50


@pytest.fixture(autouse=True)
def compiled() -> None:
    """Floats that change, as AdamW's, are memory in compiled plans alone. The plans of "eager" are interpreted."""
    config.backend = "aot_eager"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_losses_are_those_without_graphs(name: str, way: str) -> None:
    assert_same_with_graphs(name, way)


@needs_gpu
@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("mlp", "captured"),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in [("gpt", "plain"), ("lstm", "parts")]),
    ],
)
def test_losses_of_inductor_are_those_without_graphs(name: str, way: str) -> None:
    config.backend = "inductor"
    assert_same_with_graphs(name, way)


def assert_same_with_graphs(name: str, way: str) -> None:
    with graphs("off"):
        expected = losses_of(name, way, STEPS)
    with graphs("auto"):
        found = losses_of(name, way, STEPS)
        assert_launched()
    assert same_run(found, expected)


@pytest.mark.parametrize("name", ["mlp", "lstm"])  # the GPT's dropout draws other numbers than eager's
def test_losses_are_close_to_eagers(name: str) -> None:
    eager, _ = losses_of(name, "eager", STEPS)
    with graphs("auto"):
        found, _ = losses_of(name, "captured", STEPS)
    assert found == pytest.approx(eager, rel=1e-3, abs=1e-4)


@pytest.mark.scenario
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_batches_of_varying_size(name: str, way: str) -> None:
    """The last batch of an epoch is smaller: each size has a graph of its own, or none."""
    sizes = (4, 4, 4, 3)
    with graphs("off"):
        expected = losses_of(name, way, STEPS, sizes)
    with graphs("auto"):
        found = losses_of(name, way, STEPS, sizes)
    assert same_run(found, expected)


@pytest.mark.parametrize("way", WAYS)
def test_many_sizes(way: str) -> None:
    """More sizes than graphs are kept."""
    sizes = tuple(range(2, 24))
    with graphs("off"):
        expected = losses_of("mlp", way, 3 * len(sizes), sizes)
    with graphs("auto"):
        found = losses_of("mlp", way, 3 * len(sizes), sizes)
    assert same_run(found, expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_a_learning_rate_that_changes(name: str, way: str) -> None:
    """It is a number on the host, and reaches the graph's memory before each launch."""

    def change(number: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + number)

    with graphs("off"):
        expected = losses_of(name, way, STEPS, change=change)
        fixed = losses_of(name, way, STEPS)
    with graphs("auto"):
        found = losses_of(name, way, STEPS, change=change)
        assert_launched()
    assert same_run(found, expected)
    assert found[0] != fixed[0]


@pytest.mark.parametrize("way", WAYS)
def test_held_losses_keep_their_values(way: str) -> None:
    with graphs("auto"):
        loop = DeviceLoop("mlp", way)
        held, read = [], []
        for number in range(STEPS):
            held.append(loop.step(number))
            read.append(held[-1].item())
        assert [loss.item() for loss in held] == read
        assert len(set(read)) == STEPS
    wait()
    assert [loss.item() for loss in held] == read  # without the graphs too


@pytest.mark.parametrize("way", ["plain", "captured"])
def test_results_that_are_kept_are_not_overwritten(way: str) -> None:
    """Also those that are views, or that a later step reads and changes."""

    def results(mode: str) -> list[list[torch.Tensor]]:
        with graphs(mode):
            torch.manual_seed(0)
            layer = torch.nn.Linear(6, 6).to("lazy")

            def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
                with torch.no_grad():
                    y = layer(x)
                    return y, y[1:3].t(), (y * 2).sum(0)

            called = lazy_backend.capture(step) if way == "captured" else step
            kept: list[tuple[torch.Tensor, ...]] = []
            for number in range(30):
                made = called(torch.full((4, 6), float(number), device="lazy"))
                if way == "plain":
                    lazy_backend.mark_step()
                kept.append(made)
                if number % 7 == 3:
                    kept[number // 2][0].add_(1)  # one of an earlier step
            return [[one.cpu() for one in made] for made in kept]

    for found, expected in zip(results("auto"), results("off"), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_weights_replaced_between_launches_are_seen() -> None:
    """What a graph was captured with may move: loading a checkpoint, `data` of another tensor, `zero_` by hand."""

    def weights(mode: str) -> list[float]:
        with graphs(mode):
            loop = DeviceLoop("mlp", "plain")
            saved = {name: value.clone() for name, value in loop.model.state_dict().items()}
            found = []
            for number in range(STEPS):
                if number == 20:
                    loop.model.load_state_dict(saved)
                if number == 30:
                    with torch.no_grad():
                        for parameter in loop.model.parameters():
                            parameter.mul_(0.5)
                if number == 40:
                    for parameter in loop.model.parameters():
                        parameter.data = parameter.data.clone()
                found.append(loop.step(number).item())
            return found

    assert weights("auto") == weights("off")


def test_memory_does_not_grow() -> None:
    with graphs("auto"):
        loop = DeviceLoop("gpt", "plain")
        for number in range(60):
            loop.step(number)
        before = _memory()
        for number in range(60, 260):
            loop.step(number)
        after = _memory()
    assert {name: value for name, value in after.items() if value > before[name]} == {}, f"{before} before"


def _memory() -> dict[str, int]:
    wait()
    gc.collect()  # what other tests left goes at some time
    found = {"live": live_tensors()}
    if BACKING == "cuda":
        found["allocated"] = torch.cuda.memory_allocated()
        found["reserved"] = torch.cuda.memory_reserved()
        found["graph_pools"] = lazy_backend.memory_stats()["graph_pools"]
    return found


@needs_gpu
def test_the_memory_of_graphs_is_told() -> None:
    with graphs("auto"):
        losses_of("mlp", "plain", STEPS)
        assert_launched()
        stats = lazy_backend.memory_stats()
    assert stats.keys() >= {"allocated", "reserved", "peak", "graph_pools"}
    assert stats["peak"] >= stats["allocated"]
    assert stats["graph_pools"] > 0


# ----- what cannot be captured


@torch.library.custom_op("lazy_test::reads_the_host", mutates_args=())
def reads_the_host(x: torch.Tensor) -> torch.Tensor:
    return x * (2.0 if x.sum().item() > 0 else 3.0)


@reads_the_host.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_what_cannot_be_captured_runs_as_before_and_says_why() -> None:
    def run(mode: str) -> list[list[float]]:
        with graphs(mode):
            results = []
            for number in range(30):
                x = torch.full((4,), float(number - 15), device="lazy")
                y = reads_the_host(x + 1).exp().clamp(max=1e6) - x
                lazy_backend.mark_step()
                results.append(y.tolist())
            return results

    expected = run("off")
    assert run("auto") == expected
    if can_capture():
        assert counted("DeviceGraphRefused") > 0, metrics.counters()
        reasons = [name for name in metrics.counter_names() if name.startswith("DeviceGraphRefused: ")]
        assert reasons, metrics.counter_names()


def test_off_captures_nothing() -> None:
    with graphs("off"):
        losses_of("mlp", "captured", 20)
    assert counted("DeviceGraphCaptured") == counted("DeviceGraphLaunched") == 0


@needs_gpu
def test_graphs_of_the_user_are_not_disturbed() -> None:
    """A capture of the user's own, in another thread of CUDA's eyes, sees nothing of ours."""
    with graphs("auto"):
        loop = DeviceLoop("mlp", "captured")
        for number in range(20):
            loop.step(number)
        wait()
        x = torch.ones(8, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x * 2
        losses = [loop.step(number) for number in range(20, 30)]
        x.fill_(3)
        graph.replay()
        assert y.tolist() == [6.0] * 8
        assert all(loss.isfinite().item() for loss in losses)
