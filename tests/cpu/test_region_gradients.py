"""Gradients of captured modules where autograd could tell a replay, or a call with a node, from the body as written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Unseen, assert_same, unseen_number
from torch import nn

import lazy_backend
from lazy_backend.errors import CaptureError

pytestmark = pytest.mark.filterwarnings("ignore::lazy_backend.CaptureWarning")

Run = Callable[[str], list[Any]]


def prepared(module: nn.Module, device: str) -> nn.Module:
    module = module.to(device)
    return lazy_backend.capture(module) if device == "lazy" else module


class Linear(nn.Module):
    """A linear layer, and what `compute` makes of it and the arguments."""

    def __init__(self, compute: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.other, self.compute = nn.Linear(4, 4), nn.Linear(4, 4), compute

    def forward(self, *args: Any) -> Any:
        return self.compute(self, *args)


def _tanh_and_more(m: Any, x: torch.Tensor) -> Any:
    h = m.layer(x).tanh()
    return h, m.other(h)


def called_twice_in_a_chain(device: str, last: str) -> list[Any]:
    """At the last step the body of the second call runs again, behind the first one."""
    model = prepared(Linear(_tanh_and_more), device)
    for step in range(5):
        model.zero_grad()
        x = torch.ones(3, 4).to(device).requires_grad_()
        h, b = model(x)
        a, c = model(h)
        loss = a.sum() + b.sum() + c.sum()
        if step == 4 and last == "fewer results":
            loss = a.sum()
        if step == 4 and last == "gradients of gradients":
            (gradient,) = torch.autograd.grad(a.sum(), x, create_graph=True)
            loss = gradient.pow(2).sum()
        loss.backward()
        lazy_backend.mark_step()
    return [p.grad for p in model.parameters()]


def leaf_then_no_leaf(device: str) -> list[Any]:
    model = prepared(nn.Linear(4, 4), device)
    w = torch.ones(4).to(device).requires_grad_()
    found = []
    for step in range(8):
        h = torch.ones(3, 4).to(device) * w
        if step < 4 or step == 6:
            h = h.detach().requires_grad_()
        w.grad = None
        model.zero_grad()
        model(h).sin().sum().backward()
        lazy_backend.mark_step()
        found += [w.grad, model.weight.grad]
    return found


def one_tensor_then_two_for_its_data(device: str) -> list[Any]:
    model = prepared(Linear(lambda m, a, b: (m.layer(a) * b.sin()).sum()), device)
    found: list[Any] = []
    for step in range(12):
        x = torch.ones(3, 4).to(device).requires_grad_()
        y = x if step % 6 < 4 else x.detach().requires_grad_()
        model(x, y).backward()
        lazy_backend.mark_step()
        found += [x.grad, y.grad]
    return found


def written_between(device: str, write: bool = True) -> list[Any]:
    """A result without a gradient, whose memory the backward uses."""

    def compute(m: Any, x: torch.Tensor) -> Any:
        h = m.layer(x).tanh()
        return h.sum(), h.detach()

    model = prepared(Linear(compute), device)
    found: list[Any] = []
    for step in range(6):
        model.zero_grad()
        loss, h = model(torch.ones(3, 4).to(device))
        if step == 5:
            h.mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        else:
            del h
            loss.backward()
            found.append(model.layer.weight.grad.clone())
        lazy_backend.mark_step()
    return found


def view_of_an_argument_written(device: str) -> list[Any]:
    model = prepared(Linear(lambda m, x: (x.view(-1), x + 1)), device)
    w = torch.ones(4).to(device).requires_grad_()
    for _ in range(5):
        x = torch.ones(3, 4).to(device)
        with torch.no_grad():
            flat, _ = model(x)
        z = (x * w).sum()
        flat.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.backward()
        lazy_backend.mark_step()
    return []


def gradients_turned_on_within(device: str) -> list[Any]:
    model = prepared(Linear(torch.enable_grad()(lambda m, x: m.layer(x).sum())), device)
    found: list[Any] = []
    for _ in range(6):
        model.zero_grad()
        with torch.no_grad():
            y = model(torch.ones(3, 4).to(device))
        assert y.requires_grad
        y.backward()
        lazy_backend.mark_step()
        found.append(model.layer.weight.grad)
    return found


def member_that_is_no_leaf(device: str) -> list[Any]:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.layer(x) * self.scale).sin()

    model, hyper = prepared(Scaled(), device), nn.Linear(2, 4).to(device)
    found = []
    for _ in range(6):
        hyper.zero_grad()
        model.scale.detach_()
        model.scale.copy_(hyper(torch.ones(2).to(device)).exp())
        (model(torch.ones(3, 4).to(device)).sum() + (model.scale**2).sum()).backward()
        lazy_backend.mark_step()
        found.append(hyper.weight.grad)
    return found


def list_given_and_returned(device: str) -> list[Any]:
    model = prepared(Linear(lambda m, x, cache: (m.layer(x) * 2, cache)), device)
    cache: list[torch.Tensor] = []
    for _ in range(4):
        y, returned = model(torch.ones(2, 4).to(device), cache)
        returned.append(y.detach())
        lazy_backend.mark_step()
    return [len(cache), *cache]


def list_kept_and_returned(device: str) -> list[Any]:
    model = prepared(Linear(lambda m, x: (m.layer(x), m.history)), device)
    model.history = []
    for _ in range(4):
        y, returned = model(torch.ones(2, 4).to(device))
        returned.append(y.detach())
        lazy_backend.mark_step()
    return [len(model.history), *model.history]


RUNS: dict[str, Run] = {
    "fewer results": lambda device: called_twice_in_a_chain(device, "fewer results"),
    "gradients of gradients": lambda device: called_twice_in_a_chain(device, "gradients of gradients"),
    "leaf then no leaf": leaf_then_no_leaf,
    "one tensor then two for its data": one_tensor_then_two_for_its_data,
    "written between": written_between,
    "view of an argument written": view_of_an_argument_written,
    "gradients turned on within": gradients_turned_on_within,
    "member that is no leaf": member_that_is_no_leaf,
    "list given and returned": list_given_and_returned,
    "list kept and returned": list_kept_and_returned,
}


@pytest.mark.parametrize("first_sight", ["run", "record"])
@pytest.mark.parametrize("name", RUNS)
def test_gradients_are_eagers(name: str, first_sight: str) -> None:
    lazy_backend.config.first_sight = first_sight
    torch.manual_seed(0)
    expected = RUNS[name]("cpu")
    torch.manual_seed(0)
    found = RUNS[name]("lazy")
    if name == "gradients of gradients":  # a leaf's gradients are added in another order there
        pairs = [(one.cpu(), other) for one, other in zip(found, expected, strict=True) if other is not None]
        torch.testing.assert_close(*map(list, zip(*pairs, strict=True)))
    else:
        assert_same(found, expected)


# ----- gradients of gradients, where the body draws random numbers or writes to its buffers


class Counting(nn.Module):
    """Uses a buffer that it writes to at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale.mul_(0.5).add_(0.5)
        return (self.layer(x) * self.scale).tanh()


BODIES: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 4)),
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4)),
    "a buffer": Counting,
}
Gradients = Callable[[nn.Module, Any, torch.Tensor, int], None]


def _hutchinson(model: nn.Module, before: Any, x: torch.Tensor, number: int) -> None:
    """AdaHessian: `.grad` becomes the gradient over the root of the curvature."""
    parameters = [*model.parameters()]
    model(before(x)).square().mean().backward(create_graph=True)
    grads = [p.grad for p in parameters]
    signs = [torch.ones_like(p) for p in parameters]
    found = torch.autograd.grad(grads, parameters, grad_outputs=signs, retain_graph=number % 2 == 0)
    for p, grad, curvature in zip(parameters, grads, found, strict=True):
        p.grad = grad.detach() / (curvature.abs().sqrt() + 1)


def _sophia(first: int) -> Gradients:
    """SophiaH: the curvature at every fifth call."""

    def compute(model: nn.Module, before: Any, x: torch.Tensor, number: int) -> None:
        if number % 5 == first:
            _hutchinson(model, before, x, number)
        else:
            model(before(x)).square().mean().backward()

    return compute


def _penalty(model: nn.Module, before: Any, x: torch.Tensor, number: int) -> None:
    out = model(before(x)).sin().sum()
    (gradient,) = torch.autograd.grad(out, x, create_graph=True)
    (out + gradient.square().sum()).backward()


def _products(model: nn.Module, before: Any, x: torch.Tensor, number: int) -> None:
    """Products of the Hessian with a vector, by two calls of `autograd.grad`."""
    parameters = [*model.parameters()]
    grads = torch.autograd.grad(model(before(x)).square().sum(), parameters, create_graph=True)
    product = sum((grad * p.detach()).sum() for grad, p in zip(grads, parameters, strict=True))
    for p, found in zip(parameters, torch.autograd.grad(product, parameters), strict=True):
        p.grad = found


def _third(model: nn.Module, before: Any, x: torch.Tensor, number: int) -> None:
    leaves = [x, *before.parameters(), *model.parameters()]
    value = model(before(x) * next(model.parameters()).sum()).sin().sum()  # a weight of its own made the argument
    for _ in range(2):
        value = sum(grad.square().sum() for grad in torch.autograd.grad(value, leaves, create_graph=True))
    value.backward()


AGAIN: dict[str, Gradients] = {
    "AdaHessian": _hutchinson,
    "SophiaH": _sophia(1),
    "SophiaH after replays": _sophia(4),
    "a penalty": _penalty,
    "products with the Hessian": _products,
    "third derivatives": _third,
}


# What was replayed runs again, and could not if it used what it has written since; of batch norm, PyTorch has no third
# derivatives from 2.14 on.
IMPOSSIBLE = {("SophiaH after replays", "a buffer"), ("third derivatives", "batch norm")}


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize(
    ("name", "body"), [(name, body) for name in AGAIN for body in BODIES if (name, body) not in IMPOSSIBLE]
)
def test_gradients_of_gradients_from_the_first_call_that_is_asked_for_them(name: str, body: str) -> None:
    def run(captured: bool) -> list[Any]:
        torch.manual_seed(0)
        model, before = BODIES[body]().double().to("lazy"), nn.Linear(4, 4).double().to("lazy")
        if captured:
            lazy_backend.capture(model)
        values: list[Any] = []
        for number in range(10):
            x = torch.linspace(-1, 1, 12).double().reshape(3, 4).to("lazy").requires_grad_()
            AGAIN[name](model, before, x, number)
            with torch.no_grad():
                for p in (*model.parameters(), *before.parameters()):
                    if p.grad is not None:
                        p.sub_(0.01 * p.grad / (1 + p.grad.norm()))  # else rounding grows
                        values.append(p.grad.detach())
                        p.grad = None
            lazy_backend.mark_step()
        return [value.cpu() for value in (*values, *model.state_dict().values())]

    expected = run(False)
    with pytest.warns(lazy_backend.CaptureWarning, match="differentiated again") as warned:
        found = run(True)
    assert len(warned) == 1
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


def test_a_container_that_is_first_kept_by_a_later_call_is_an_error(unseen: Unseen) -> None:
    kept: list[Any] = []

    def compute(m: Any, x: torch.Tensor) -> Any:
        made = [m.layer(x)]
        if unseen_number():  # its body is compared at the 64th call
            kept.append(made)
        return made

    model = prepared(Linear(compute), "lazy")
    for _ in range(63):
        model(torch.ones(2, 4, device="lazy"))[0].sum().backward()
        lazy_backend.mark_step()
    unseen(1.0)
    with pytest.raises(CaptureError, match="returned a list that something else holds"):
        model(torch.ones(2, 4, device="lazy"))
