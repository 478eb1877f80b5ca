"""`torch.compile(..., backend="lazy")` of functions of lazy tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import TORCH
from harness import assert_same, count, grid, run_program
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import lazy_backend
import lazy_backend.dynamo  # as the first torch.compile(backend="lazy") does


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="lazy", fullgraph=True)


def filled(module: nn.Module, device: str) -> nn.Module:
    """`module` on `device`, with the same weights on each."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape) / 2)
    return module.to(device)


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def test_the_backend_is_found_by_name(tmp_path: Path) -> None:
    code = """
import sys, torch
print("torch._dynamo" in sys.modules)
f = torch.compile(lambda x: x * 2 + 1, backend="lazy", fullgraph=True)
print(f(torch.ones(3, device="lazy")).tolist())
"""
    assert run_program(code, tmp_path, TORCH, LAZY_BACKEND_COMPILE="off") == "False\n[3.0, 3.0, 3.0]\n"


# ----- without autograd: traced once, replayed


def test_a_model_is_replayed() -> None:
    model = filled(layers(), "lazy").eval()
    expected = filled(layers(), "cpu").eval()
    run = compiled(model)
    with torch.no_grad(), count("CapturedCall") as replays, count("lazy::addmm") as recorded:
        for i in range(6):
            assert_same(run(grid("lazy", 3, 4) + i), expected(grid("cpu", 3, 4) + i))
    assert replays() == 4
    assert recorded() == 2 * 2


def test_a_model_whose_parameters_have_gradients_is_replayed() -> None:
    model = filled(nn.Linear(4, 2), "lazy")
    model(grid("lazy", 3, 4)).sum().backward()
    run = compiled(model)
    with torch.no_grad(), count("CapturedCall") as replays:
        for _ in range(4):
            assert not run(grid("lazy", 3, 4)).requires_grad
    assert replays() == 2


def test_statistics_are_updated_by_replays() -> None:
    lazy, eager = filled(layers(), "lazy"), filled(layers(), "cpu")
    run = compiled(lazy)
    with torch.no_grad():
        for i in range(5):
            assert_same(run(grid("lazy", 3, 4) + i), eager(grid("cpu", 3, 4) + i))
    assert_same(lazy[1].running_mean, eager[1].running_mean)
    assert_same(lazy[1].num_batches_tracked, eager[1].num_batches_tracked)


def test_arguments_that_share_memory_are_updated() -> None:
    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return b * 2

    run = compiled(function)
    for device in ("cpu", "lazy"):
        base = grid(device, 4)
        results = [(run if device == "lazy" else function)(base[1:], base[:3]).tolist() for _ in range(4)]
        assert results == [[0.0, 4.0 + 2 * i, 6.0 + 2 * i] for i in range(4)]


def test_random_numbers_are_drawn_anew() -> None:
    run = compiled(lambda x: torch.dropout(x, 0.5, True))
    drawn = [run(torch.ones(64, device="lazy")).tolist() for _ in range(5)]
    assert len({tuple(values) for values in drawn}) == 5


def test_shapes_may_change() -> None:
    model, expected = filled(nn.Linear(4, 2), "lazy"), filled(nn.Linear(4, 2), "cpu")
    run = compiled(model)
    with torch.no_grad():
        for rows in (3, 3, 3, 5, 5, 5, 7, 7, 3):
            assert_same(run(grid("lazy", rows, 4)), expected(grid("cpu", rows, 4)))


def test_a_branch_on_a_python_value_is_looked_at_again() -> None:
    scale = [2]
    run = compiled(lambda x: x * 3 if scale[0] > 2 else x + 3)
    found = []
    for value in (2, 2, 2, 5, 5, 2):
        scale[0] = value
        found.append(run(grid("lazy", 3))[1].item())
    assert found == [4.0, 4.0, 4.0, 3.0, 3.0, 4.0]


def test_tensors_are_made_on_the_device_without_an_index() -> None:
    run = compiled(lambda x: x + torch.ones(3, device="lazy") + torch.ones(3, device=x.device) + x.to("lazy"))
    for _ in range(4):
        assert run(grid("lazy", 3)).tolist() == [2.0, 4.0, 6.0]


def test_the_second_device(two_devices: tuple[torch.device, torch.device]) -> None:
    run = compiled(lambda x: (x * 2 + torch.ones(3, device=x.device), x.device))
    for _ in range(3):
        for device in two_devices:
            result, seen = run(grid(str(device), 3))
            assert (result.device, seen, result.tolist()) == (device, device, [1.0, 3.0, 5.0])


def test_a_compiled_function_within_a_captured_one_is_part_of_it() -> None:
    run = compiled(lambda x: x * 2)
    step = lazy_backend.capture(lambda x: run(x) + 1)
    with count("CapturedCall") as replays:
        found = [step(grid("lazy", 3) + i).tolist() for i in range(5)]
    assert found == [[2 * i + 1.0, 2 * i + 3.0, 2 * i + 5.0] for i in range(5)]
    assert replays() == 3


# ----- with autograd: recorded


def train(device: str, wrap: Callable[[nn.Module], Callable[..., Any]]) -> nn.Module:
    model = filled(layers(), device)
    run = wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for i in range(4):
        loss = run(grid(device, 3, 4) / 10 + i).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        lazy_backend.mark_step()
    return model


def test_training_is_eagers() -> None:
    with count("SyncTensorsGraph") as graphs, count("CapturedCall") as replays:
        lazy = train("lazy", compiled)
    assert (graphs(), replays()) == (4, 0)  # forward, backward and optimizer are one graph
    assert_same(lazy.state_dict(), train("cpu", lambda model: model).state_dict())


def test_gradients_within_a_block_that_asks_for_them() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return x * x

    run = compiled(function)
    x = grid("lazy", 3).requires_grad_()
    with torch.no_grad():
        for _ in range(3):
            assert run(x).requires_grad
    run(x).sum().backward()
    assert x.grad.tolist() == [0.0, 2.0, 4.0]


# ----- what is not replayed


def test_a_read_breaks_the_graph() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        return y * 2 if y.sum().item() > 3 else y

    run = torch.compile(function, backend="lazy")
    assert [run(grid("lazy", 3) - i).tolist() for i in range(3)] == [[2.0, 4.0, 6.0], [0.0, 1.0, 2.0], [-1.0, 0.0, 1.0]]


def test_a_graph_of_cpu_tensors_runs_as_written_with_a_warning() -> None:
    with pytest.warns(lazy_backend.CompileWarning, match=r"graph of tensors on cpu, which runs as written"):
        assert compiled(lambda x: x * 2)(torch.ones(2)).tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    "trace",
    [
        lambda f, x: torch.compile(f, backend="eager")(x),
        lambda f, x: torch.compile(f, backend="inductor")(x),
        lambda f, x: torch.export.export(nn.ReLU(), (x,)),
        lambda f, x: make_fx(f)(x),
        torch.func.linearize,
        lambda f, x: torch.library.opcheck(torch.ops.aten.sin.default, (x,), test_utils="test_schema"),
    ],
)
def test_other_tracers_go_on_saying_what_to_do(trace: Callable[..., Any]) -> None:
    compiled(torch.sin)(grid("lazy", 3))
    with pytest.raises(Exception, match=r"does not take lazy tensors[^!]*backend=.lazy."):
        trace(torch.sin, grid("lazy", 3))


def test_training_is_replayed_within_its_steps() -> None:
    """Forward and backward of a compiled model take no Python, and each step is one graph."""

    def train(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).to(device)
        compiled = torch.compile(model, backend="lazy") if device == "lazy" else model
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        losses = []
        for _ in range(12):
            loss = compiled(torch.randn(4, 3).to(device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            lazy_backend.mark_step()
            losses.append(loss.detach())
        return [value.detach().cpu() for value in (*losses, *model.parameters())]

    expected = train("cpu")
    with count("RegionJump") as jumps, count("SyncTensorsGraph") as graphs:
        found = train("lazy")
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert jumps() >= 16
    assert graphs() == 12
