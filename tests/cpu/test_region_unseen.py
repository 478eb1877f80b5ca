"""Captured modules and optimizers that do what no jump over recorded calls does: each call equals the plain loop's.

Bodies that read a value which is already there, run operators at once where nothing is pending, or treat the tensors
that they are given as more than data.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lazy_backend
from lazy_backend import capture, captures

pytestmark = pytest.mark.filterwarnings("ignore::lazy_backend.CaptureWarning")

CALLS, CHANGES_AT = 12, 7


@pytest.fixture(autouse=True)
def interpreted() -> None:
    lazy_backend.config.compile = "off"


class Reading(nn.Module):
    def __init__(self, read: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("factor", torch.ones(1))
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).mean() * self.read(self, x)


READS: dict[str, Callable[[Any, Tensor], Any]] = {
    "item": lambda module, x: module.factor.item(),
    "tolist": lambda module, x: module.factor.tolist()[0],
    "cpu": lambda module, x: float(module.factor.cpu()),
    "repr": lambda module, x: 1.0 if "1" in repr(module.factor) else 3.0,
    "of an argument": lambda module, x: x[0].sum().item(),
    "of the whole argument": lambda module, x: x.tolist()[0][0],
}


def _losses(device: str, name: str, mark: bool) -> list[float]:
    torch.manual_seed(0)
    model = Reading(READS[name]).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if device == "lazy":
        capture(model)
        capture(optimizer)
    found = []
    for number in range(CALLS):
        if number == CHANGES_AT:
            model.factor.fill_(3.0)
        x = torch.full((2, 4), float(number // 5 + 1)).to(device)
        if mark and device == "lazy":
            lazy_backend.mark_step(wait=True)  # the values that are read are there
        loss = model(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return [loss.item() for loss in found]


@pytest.mark.parametrize("mark", [False, True], ids=["unmarked", "marked"])
@pytest.mark.parametrize("name", READS)
def test_values_that_a_module_reads_are_those_of_each_call(name: str, mark: bool) -> None:
    assert _losses("lazy", name, mark) == pytest.approx(_losses("cpu", name, mark), rel=1e-6)


def _sparse(device: str) -> list[float]:
    torch.manual_seed(0)
    table = nn.Embedding(5, 2, sparse=True).to(device)
    head = nn.Linear(2, 1).to(device)
    optimizer = torch.optim.SGD([*table.parameters(), *head.parameters()], lr=0.1)
    if device == "lazy":
        capture(optimizer)
    places = torch.tensor([1, 1, 3]).to(device)
    found = []
    for _ in range(CALLS):
        optimizer.zero_grad()
        head(table(places)).square().sum().backward()
        optimizer.step()
        found.append(table.weight[1, 0].item())
    return found


def test_a_captured_optimizer_goes_on_training_a_sparse_table() -> None:
    assert _sparse("lazy") == pytest.approx(_sparse("cpu"), rel=1e-6)


def _shared_count(device: str) -> list[float]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=True)
    if device == "lazy":
        capture(optimizer)
    x = torch.ones(2, 3).to(device)
    found = []
    for number in range(CALLS):
        if number == 1:
            optimizer.state[model.bias]["step"] = optimizer.state[model.weight]["step"]
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        found.append(float(optimizer.state[model.bias]["step"]))
    return [*found, model.weight[0, 0].item()]


def test_a_tensor_that_a_list_holds_twice_is_written_twice() -> None:
    assert _shared_count("lazy") == pytest.approx(_shared_count("cpu"), rel=1e-5)


# ----- what a module's backward reads


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * float(os.environ["LAZY_TEST_VALUE"])


GAIN = [1.0]


def _gain() -> float:
    return GAIN[0]


@torch.library.custom_op("lazy_test_unseen::same", mutates_args=())
def same(x: Tensor) -> Tensor:
    return x.clone()


same.register_fake(torch.empty_like)
same.register_autograd(lambda ctx, grad: grad * _gain())


def _hooked_by_environment(x: Tensor) -> Tensor:
    y = x * 1
    y.register_hook(lambda grad: grad * float(os.environ["LAZY_TEST_VALUE"]))
    return y


def _hooked(x: Tensor) -> Tensor:
    y = x * 1
    y.register_hook(lambda grad: grad * _gain())
    return y


BACKWARDS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "a function that reads the environment": (Scaled.apply, False),
    "a hook that reads the environment": (_hooked_by_environment, False),
    "a hook that reads a global": (_hooked, True),
    "a custom operator's": (same, True),
}


class Passing(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x)) * 2


@pytest.mark.parametrize("name", BACKWARDS)
def test_a_backward_reads_what_is_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def gradients(device: str) -> list[float]:
        module = Passing(BACKWARDS[name][0]).to(device)
        if device == "lazy":
            capture(module)
        found = []
        for number in range(2 * CALLS):
            GAIN[0] = 1.0 if number < CALLS else 3.0
            monkeypatch.setenv("LAZY_TEST_VALUE", str(GAIN[0]))
            module.zero_grad()
            module(torch.ones(2, 2).to(device)).sum().backward()
            assert module.layer.bias.grad is not None
            found.append(module.layer.bias.grad.item())
        if device == "lazy":
            (row,) = (row for row in captures() if row["name"] == "Passing")
            assert bool(row["replays"]) is BACKWARDS[name][1], row
        return found

    assert gradients("lazy") == gradients("cpu")


# ----- the tensors that a module is given


class Hooked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.register_hook(lambda grad: grad * 10)
        return x * 2


class Branching(nn.Module):
    def __init__(self, ask: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.ask = ask

    def forward(self, x: Tensor) -> Tensor:
        return x * (2 if self.ask(x) else 3)


class Keeping(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        result = x * 2
        result.retain_grad()
        return result


class Following(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(x.square().sum(), x, create_graph=True)
        return slope * x


class Asking(nn.Module):
    """Follows its argument itself, as models of forces do."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.detach()
        y.requires_grad_(True)
        return y.square() * x


MODULES: dict[str, Callable[[], nn.Module]] = {
    "a hook": Hooked,
    "is_leaf": lambda: Branching(lambda x: x.is_leaf),
    "grad_fn": lambda: Branching(lambda x: x.grad_fn is None),
    "is_leaf by getattr": lambda: Branching(lambda x: getattr(x, "is_leaf")),  # noqa: B009
    "output_nr": lambda: Branching(lambda x: x.output_nr == 0),
    "_base": lambda: Branching(lambda x: x._base is None),
    "an attribute": lambda: Branching(lambda x: x.tag == 7),  # type: ignore[attr-defined]
    "a parameter": lambda: Branching(lambda x: isinstance(x, nn.Parameter)),
    "retain_grad": Keeping,
    "a gradient within": Following,
    "requires_grad_": Asking,
}


def _gradients(device: str, make: Callable[[], nn.Module], is_leaf: bool) -> list[Any]:
    module = make()
    if device == "lazy":
        capture(module)
    found: list[Any] = []
    for number in range(CALLS):
        weight = nn.Parameter(torch.full((2,), 1.0 + number).to(device))
        given: Any = weight if is_leaf else weight * 1
        given.tag = 7
        result = module(given)
        result.sum().backward()
        kept = result.grad if result.retains_grad else None
        found.append((result.detach(), weight.grad, kept))
    return [[None if one is None else one.tolist() for one in each] for each in found]


@pytest.mark.parametrize("is_leaf", [True, False], ids=["leaf", "computed"])
@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_given_its_callers_tensors(name: str, is_leaf: bool) -> None:
    assert _gradients("lazy", MODULES[name], is_leaf) == _gradients("cpu", MODULES[name], is_leaf)


def test_a_module_that_follows_an_argument_runs_as_written() -> None:
    class Force(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x.requires_grad_(True)
            energy = self.layer(x).square().sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
            return energy, force

    def energies(device: str) -> list[float]:
        torch.manual_seed(0)
        model = Force().to(device)
        if device == "lazy":
            capture(model)
        found = []
        for _ in range(CALLS):
            energy, force = model(torch.ones(3, 2).to(device))
            (energy + force.square().sum()).backward()
            found.append(energy.item())
        return found

    assert energies("lazy") == pytest.approx(energies("cpu"), rel=1e-6)


def test_a_copy_by_its_dict_is_a_module_of_its_own() -> None:
    model = capture(nn.Linear(3, 1).to("lazy"))
    x = torch.ones(2, 3, device="lazy")
    for _ in range(6):
        model(x).sum().backward()
    copied = nn.Linear.__new__(nn.Linear)
    copied.__dict__ = model.__dict__.copy()
    copied._parameters = {name: parameter.detach() * 10 for name, parameter in model._parameters.items()}  # type: ignore
    assert torch.allclose(copied(x).cpu(), 10 * model(x).detach().cpu())


def test_second_derivatives_are_told_as_the_reason() -> None:
    class Curved(nn.Sequential):
        pass

    model = capture(Curved(nn.Linear(3, 1), nn.Tanh()).to("lazy"))
    for _ in range(CALLS):
        x = torch.ones(2, 3, device="lazy", requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
    (row,) = (row for row in captures() if row["name"] == "Curved")
    assert not row["replays"]
    assert "its gradients are differentiated again" in row["as_written"]
