"""Captured modules and optimizers in programs that change what no signature shows: floats, modes, strides, copies.

Each program runs on the CPU, on the lazy device, and there with captured parts.
"""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from test_region_promises import Wrap, check
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import lazy_backend
from lazy_backend import mark_step

pytestmark = pytest.mark.filterwarnings("ignore::lazy_backend.CaptureWarning")


@pytest.fixture(autouse=True)
def interpreted() -> None:
    lazy_backend.config.compile = "off"


# ----- optimizers


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", ["RAdam", "SGD", "NAdam", "Adadelta"])
def test_a_branch_on_a_float_while_another_program_precedes_the_step(name: str, foreach: bool) -> None:
    """The step before is another one for a while: the trie has jumps of one branch at one place, of both at another."""

    def program(device: str, wrap: Wrap) -> list[Any]:
        a, b = (nn.Parameter(torch.ones(3).to(device)) for _ in range(2))
        groups = [{"params": [a], "weight_decay": 0.5}, {"params": [b], "weight_decay": 0.0}]
        optimizer = wrap(getattr(torch.optim, name)(groups, lr=0.1, foreach=foreach))
        for step in range(30):
            if step in (6, 18):  # the decay moves from group to group, and back
                first, second = optimizer.param_groups
                first["weight_decay"], second["weight_decay"] = second["weight_decay"], first["weight_decay"]
            for parameter in (a, b):
                parameter.grad = torch.full((3,), 1.0 + step % 3).to(device)
                if 4 <= step < 12:
                    parameter.grad.mul_(0.5)
            optimizer.step()
            mark_step()
        return [a, b]

    check(program, num_jumps=6)


def test_a_float_that_turns_calls_off() -> None:
    def program(device: str, wrap: Wrap) -> list[Any]:
        parameter = nn.Parameter(torch.ones(3).to(device))
        optimizer = wrap(torch.optim.SGD([parameter], lr=0.1, weight_decay=0.5))
        for step in range(20):
            if step % 6 == 0:
                optimizer.param_groups[0]["weight_decay"] = 0.5 if step % 12 else 0.0
            parameter.grad = torch.ones(3).to(device)
            if 6 <= step < 10:
                parameter.grad.mul_(0.5)
            optimizer.step()
            mark_step()
        return [parameter]

    check(program)


def test_a_step_that_autograd_follows() -> None:
    def program(device: str, wrap: Wrap) -> list[Any]:
        w = torch.arange(1.0, 4.0).to(device).requires_grad_()
        p = w.clone()
        optimizer = wrap(torch.optim.SGD([p], lr=0.1, differentiable=True))
        for _ in range(6):
            p.grad = w * w
            optimizer.step()
            mark_step()
        return [torch.autograd.grad(p.sum(), w)[0]]

    check(program)


class _Plain(torch.optim.Optimizer):
    """Looks at `requires_grad`, and counts in a dict within its state."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                counts = self.state[parameter].setdefault("counts", {"n": 0})
                counts["n"] += 1
                if parameter.requires_grad:
                    parameter.sub_(parameter.grad, alpha=group["lr"])
                if counts["n"] % 5 == 0:
                    parameter.mul_(2.0)


def test_an_optimizer_of_the_users_own() -> None:
    def program(device: str, wrap: Wrap) -> list[Any]:
        p, q = (nn.Parameter(torch.ones(2).to(device)) for _ in range(2))
        optimizer = wrap(_Plain([p, q], lr=0.1))
        for step in range(14):
            p.grad, q.grad = torch.ones(2).to(device), torch.ones(2).to(device)
            q.requires_grad_(step < 6)
            optimizer.step()
            mark_step()
        return [p, q, optimizer.state[p]["counts"]["n"]]

    check(program)


# ----- modules


def test_a_copy_of_a_parametrized_module() -> None:
    module = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)).to("lazy").eval()
    lazy_backend.capture(module)
    zeros = torch.zeros(1, 2, device="lazy")
    for _ in range(2):
        made = copy.deepcopy(module)
        with torch.no_grad():
            made.bias.fill_(100.0)
        assert made(zeros).tolist() == [[100.0, 100.0]]
        module(zeros)


def test_what_stands_for_a_captured_module_in_its_attributes_is_not_copied() -> None:
    module = lazy_backend.capture(nn.Linear(2, 2).to("lazy"))
    entry = module.__dict__["_compiled_call_impl"]
    assert copy.deepcopy(entry) is None
    assert pickle.loads(pickle.dumps(entry)) is None


def test_gradients_of_other_strides() -> None:
    def program(device: str, wrap: Wrap) -> list[Any]:
        model = wrap(nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(device))
        values = []
        for step in range(12):
            model.zero_grad()
            y = model(torch.ones(2, 3, 4).to(device))
            loss = (y.transpose(0, 2) * torch.ones(4, 3, 2).to(device)).sum() if step % 7 == 5 else y.sin().sum()
            loss.backward()
            values.append(model[0].weight.grad)
            mark_step()
        return values

    check(program, num_jumps=4)


def test_gradients_of_another_dtype() -> None:
    def program(device: str, wrap: Wrap) -> list[Any]:
        model = wrap(nn.Linear(4, 4).bfloat16().to(device))
        values = []
        for step in range(10):
            model.zero_grad()
            if step == 6:
                for parameter in model.parameters():
                    parameter.grad_dtype = torch.float32
            model(torch.ones(2, 4, dtype=torch.bfloat16).to(device)).sum().backward()
            values += [model.weight.grad, str(model.bias.grad.dtype)]
            mark_step()
        return values

    check(program, num_jumps=4)


def test_a_residual_added_in_place() -> None:
    def program(device: str, wrap: Wrap) -> list[Any]:
        model, values = wrap(nn.Linear(4, 4).to(device)), []
        for _ in range(8):
            model.zero_grad()
            x = torch.ones(2, 3, 4).to(device)
            y = model(x)
            y += x
            y.square().sum().backward()
            values += [model.weight.grad, y]
            mark_step()
        return values

    check(program)


class _Doubled(torch.utils._python_dispatch.TorchDispatchMode):
    """Lets no gradient as it is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ops.aten.mm.default else result


def test_a_mode_around_the_backward() -> None:
    def program(device: str, wrap: Wrap) -> list[Any]:
        model, values = wrap(nn.Linear(2, 3).to(device)), []
        for step in range(9):
            model.zero_grad()
            loss = model(torch.ones(1, 2).to(device)).sum()
            if step % 3 == 2:
                with FlopCounterMode(display=False) as counter, _Doubled():
                    loss.backward()
                values.append(counter.get_total_flops())
            else:
                loss.backward()
            values.append(model.weight.grad)
            mark_step()
        return values

    check(program)


class _Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w * x).sqrt()


def test_anomalies_are_looked_for_in_the_backward_alone() -> None:
    model = lazy_backend.capture(_Root().to("lazy"))
    for _ in range(6):
        model.zero_grad()
        (model(torch.ones(2).to("lazy")).sum() * 0).backward()
        mark_step()
    loss = model(torch.ones(2).to("lazy")).sum() * 0
    with torch.autograd.set_detect_anomaly(True), pytest.raises(RuntimeError, match="returned nan values"):
        loss.backward()


def test_attributes_of_results() -> None:
    class Tagged(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            y.tag = 7  # type: ignore[attr-defined]
            return y

    def program(device: str, wrap: Wrap) -> list[Any]:
        model, values = wrap(Tagged(2, 2).to(device)), []
        for _ in range(6):
            y = model(torch.ones(1, 2).to(device))
            y.sum().backward()
            values += [y, y.tag]
            mark_step()
        return values

    check(program)


class _Locked:
    """An attribute beside what has none: a lock."""

    def __init__(self) -> None:
        self.factor, self.lock = 2.0, threading.Lock()


def test_attributes_beside_a_lock() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.settings = _Locked()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.settings.factor

    def program(device: str, wrap: Wrap) -> list[Any]:
        model, values = wrap(Net()), []
        for step in range(8):
            if step == 5:
                model.settings.factor = 3.0
            values.append(model(torch.ones(1).to(device)))
            mark_step()
        return values

    check(program, num_jumps=2)


def test_calls_before_which_the_module_changed_have_a_reason() -> None:
    """As an actor that collects what its calls returned, in lists that are cleared after each episode."""
    model = nn.Linear(3, 2).to("lazy")
    model.saved = []  # type: ignore[assignment]
    lazy_backend.capture(model)
    for _ in range(6):
        for number in range(3):
            model.saved.append(model(torch.full((3,), float(number)).to("lazy")))  # type: ignore[operator]
        torch.stack(model.saved).sum().backward()  # type: ignore[arg-type]
        model.saved.clear()  # type: ignore[operator]
        mark_step()
    (row,) = [one for one in lazy_backend.captures() if one["kind"] == "module" and one["name"] == "Linear"]
    assert row["as_written"]["it changed before the call: Linear.saved[0] was added"] == 6
