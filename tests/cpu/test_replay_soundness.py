"""A captured function does what its body would do, whatever a user changes between calls.

Each program runs twice: on the CPU as written, and on the lazy device within `capture`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import assert_same, count
from torch import nn

import lazy_backend
from lazy_backend import CaptureWarning, capture


@pytest.fixture(autouse=True)
def interpreted() -> None:
    lazy_backend.config.compile = "off"


Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def check(program: Callable[[str, Wrap], Any], replays: int = 1) -> None:
    """Compare what `program(device, wrap)` returns in eager and captured. At least `replays` calls must be replayed."""
    torch.manual_seed(0)
    expected = program("cpu", lambda function: function)
    torch.manual_seed(0)
    with count("CapturedCall") as replayed:
        actual = program("lazy", lambda function: capture(function, verify_every=0))
    assert_same(lazy_backend.to_cpu(actual), expected)
    assert replayed() >= replays


def values(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Copies of what tensors hold now."""
    return [tensor.detach().clone() for tensor in tensors]


def repeat(function: Callable[[], Any], times: int = 6) -> None:
    for _ in range(times):
        function()


def ones(device: str, *shape: int) -> torch.Tensor:
    return torch.ones(*(shape or (3,)), device=device)


# ----- state, followed by place


def test_an_entry_of_a_dict_that_is_popped_and_made_anew() -> None:
    def program(device: str, wrap: Wrap) -> Any:
        state = {"h": torch.zeros(3, device=device)}

        def step(x: torch.Tensor) -> torch.Tensor:
            state["h"] = state["h"] + x[0]
            return state["h"] * 1

        f = wrap(step)
        results = [f(ones(device, 2, 3)) for _ in range(4)]
        saved = state.pop("h")
        state["h"] = torch.zeros(3, device=device)
        results += [f(ones(device, 2, 3)) for _ in range(4)]
        return values(*results, saved, state["h"])

    check(program)


class Memory:
    def __init__(self, device: str) -> None:
        self.hidden = torch.zeros(3, device=device)
        self.pair = (torch.zeros(3, device=device), torch.ones(3, device=device))
        self.many = [torch.zeros(3, device=device)]

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = self.hidden + x
        self.pair = (self.pair[1] + x, self.pair[0] * 2)
        self.many[0] = self.many[0] - x
        return self.hidden * 2


def test_attributes_that_are_saved_reset_and_restored() -> None:
    def program(device: str, wrap: Wrap) -> Any:
        memory = Memory(device)
        f = wrap(memory.step)
        results = [f(ones(device)) for _ in range(4)]
        saved = memory.hidden
        memory.hidden = torch.zeros(3, device=device)
        results += [f(ones(device)) for _ in range(4)]
        memory.hidden = saved
        results += [f(ones(device)) for _ in range(4)]
        return values(*results, saved, memory.hidden)

    check(program)


def test_a_tuple_of_state_that_is_saved_and_restored() -> None:
    def program(device: str, wrap: Wrap) -> Any:
        memory = Memory(device)
        f = wrap(memory.step)
        results = [f(ones(device)) for _ in range(5)]
        saved = memory.pair
        results += [f(ones(device)) for _ in range(3)]
        kept = values(*saved)
        memory.pair = saved
        results += [f(ones(device)) for _ in range(3)]
        return values(*results, *kept, *saved, *memory.pair)

    check(program)


def test_two_states_that_are_exchanged() -> None:
    def program(device: str, wrap: Wrap) -> Any:
        one, other = Memory(device), Memory(device)
        other.hidden = other.hidden + 10

        def step(x: torch.Tensor) -> torch.Tensor:
            one.hidden = one.hidden + x
            other.hidden = other.hidden * 2
            return one.hidden - other.hidden

        f = wrap(step)
        results = [f(ones(device)) for _ in range(4)]
        one.hidden, other.hidden = other.hidden, one.hidden
        results += [f(ones(device)) for _ in range(4)]
        return values(*results, one.hidden, other.hidden)

    check(program)


def test_state_in_a_variable_that_is_rebound() -> None:
    def program(device: str, wrap: Wrap) -> Any:
        hidden = torch.zeros(3, device=device)

        def step(x: torch.Tensor) -> torch.Tensor:
            nonlocal hidden
            hidden = hidden + x
            return hidden * 2

        f = wrap(step)
        results = [f(ones(device)) for _ in range(4)]
        saved, hidden = hidden, torch.zeros(3, device=device)
        results += [f(ones(device)) for _ in range(4)]
        return values(*results, saved, hidden)

    check(program)


def test_state_that_is_updated_in_place_and_replaced_outside() -> None:
    def program(device: str, wrap: Wrap) -> Any:
        state = {"total": torch.zeros(3, device=device)}
        f = wrap(lambda x: state["total"].add_(x) * 1)
        results = [f(ones(device)) for _ in range(4)]
        saved, state["total"] = state["total"], torch.zeros(3, device=device)
        results += [f(ones(device)) for _ in range(4)]
        return values(*results, saved, state["total"])

    check(program)


def test_state_of_a_module_that_is_saved_and_reset() -> None:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("hidden", torch.zeros(3))
            self.pair = (torch.zeros(3), torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.hidden = self.hidden + x
            self.pair = (self.pair[0] + self.hidden, self.pair[1] - x)
            return self.hidden + self.pair[0]

    def program(device: str, wrap: Wrap) -> Any:
        cell = Cell().to(device)
        cell.pair = (torch.zeros(3, device=device), torch.zeros(3, device=device))
        f = wrap(cell)
        results = [f(ones(device)) for _ in range(4)]
        saved, pair = cell.hidden, cell.pair
        cell.hidden = torch.zeros(3, device=device)
        results += [f(ones(device)) for _ in range(4)]
        return values(*results, saved, *pair, cell.hidden, *cell.pair)

    check(program)


def test_state_where_no_code_shows_it_is_not_replayed() -> None:
    cache = threading.local()
    cache.hidden = torch.zeros(3, device="lazy")

    def step(x: torch.Tensor) -> torch.Tensor:
        cache.hidden = cache.hidden + x
        return cache.hidden * 1

    f = capture(step)
    with pytest.warns(CaptureWarning, match="where its code does not show it"):
        results = [f(ones("lazy")) for _ in range(6)]
    assert_same(results, [torch.full((3,), 1.0 + number) for number in range(6)])


# ----- modules


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.act = nn.Tanh()
        self.drop = nn.Dropout(1.0)
        self.scale = 2.0
        self.options = {"shift": 1, "names": ["a", "b"]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.act(layer(x))
        return x * self.scale + self.options["shift"] + len(self.options["names"])  # type: ignore[arg-type, operator]

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        made = self(x).square().mean()
        return made if self.training else made * 0


def trainer(net: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = net(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


MODULE_CHANGES: dict[str, Callable[[Net, str], Any]] = {
    "child replaced": lambda net, device: net.layers.__setitem__(1, nn.Linear(3, 3).to(device)),
    "bias removed": lambda net, device: setattr(net.layers[1], "bias", None),
    "bias replaced": lambda net, device: setattr(net.layers[1], "bias", nn.Parameter(torch.zeros(3, device=device))),
    "layer appended": lambda net, device: net.layers.append(nn.Linear(3, 3).to(device)),
    "layer removed": lambda net, device: net.layers.__delitem__(1),
    "activation replaced": lambda net, device: setattr(net, "act", nn.ReLU()),
    "activation's forward replaced": lambda net, device: setattr(net.act, "forward", torch.relu),
    "number changed": lambda net, device: setattr(net, "scale", -3.0),
    "entry changed": lambda net, device: net.options.__setitem__("shift", 5),
    "list extended": lambda net, device: net.options["names"].append("c"),  # type: ignore[attr-defined]
    "hook": lambda net, device: net.act.register_forward_hook(lambda module, args, made: made * 2),
    "hook of a parameter": lambda net, device: net.layers[0].weight.register_hook(lambda grad: grad * 0),
    "frozen": lambda net, device: net.layers[0].requires_grad_(False),
    "parametrized": lambda net, device: nn.utils.parametrize.register_parametrization(
        net.layers[0], "weight", nn.Tanh()
    ),
}


@pytest.mark.parametrize("change", MODULE_CHANGES)
def test_a_module_that_is_changed_between_training_steps(change: str) -> None:
    def program(device: str, wrap: Wrap) -> Any:
        net = Net().to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        f = wrap(trainer(net, optimizer))
        losses = [f(ones(device, 2, 3)) for _ in range(4)]
        MODULE_CHANGES[change](net, device)
        losses += [f(ones(device, 2, 3)) for _ in range(4)]
        return values(*losses, *net.parameters())

    check(program)


def test_training_flags_of_a_module_whose_method_is_captured() -> None:
    def program(device: str, wrap: Wrap) -> Any:
        net = Net().to(device)
        f = wrap(net.loss)
        results = []
        for training in (True, True, True, True, False, False, False, True):
            net.train(training)
            results.append(f(ones(device, 2, 3)))
        return values(*results)

    check(program)


def test_a_module_that_is_read_but_not_called() -> None:
    def program(device: str, wrap: Wrap) -> Any:
        net = Net().to(device)

        def weighted(x: torch.Tensor) -> torch.Tensor:
            return x @ net.layers[0].weight * (2 if net.training else 3)  # type: ignore[operator]

        f = wrap(torch.no_grad()(weighted))
        results = [f(ones(device, 2, 3)) for _ in range(4)]
        net.eval()
        results += [f(ones(device, 2, 3)) for _ in range(4)]
        net.layers[0] = nn.Linear(3, 3).to(device)
        results += [f(ones(device, 2, 3)) for _ in range(4)]
        return values(*results)

    check(program)


def test_a_variable_that_names_another_module() -> None:
    def program(device: str, wrap: Wrap) -> Any:
        net = Net().to(device)
        f = wrap(lambda x: net(x))
        results = [f(ones(device, 2, 3)) for _ in range(4)]
        net = Net().to(device)
        results += [f(ones(device, 2, 3)) for _ in range(4)]
        return values(*results)

    check(program)


def test_a_body_that_counts_in_a_module_is_not_replayed() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x * 2

    counter = Counter()
    f = capture(counter)
    with pytest.warns(CaptureWarning, match="Counter.calls changed from 3 to 4"):
        repeat(lambda: f(ones("lazy")))
    assert counter.calls == 6


# ----- optimizers


def test_parameters_that_are_added_to_an_optimizer() -> None:
    def program(device: str, wrap: Wrap) -> Any:
        net = Net().to(device)
        optimizer = torch.optim.SGD(net.layers[0].parameters(), lr=0.1)
        f = wrap(trainer(net, optimizer))
        losses = [f(ones(device, 2, 3)) for _ in range(4)]
        optimizer.param_groups[0]["params"].extend(net.layers[1].parameters())
        losses += [f(ones(device, 2, 3)) for _ in range(4)]
        return values(*losses, *net.parameters())

    check(program)


@pytest.mark.parametrize("how", ["clear", "pop", "replace", "load"])
def test_the_state_of_an_optimizer_that_is_changed_outside(how: str) -> None:
    def program(device: str, wrap: Wrap) -> Any:
        net = Net().to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        f = wrap(trainer(net, optimizer))
        losses = [f(ones(device, 2, 3)) for _ in range(4)]
        saved = optimizer.state_dict()
        weight = net.layers[0].weight
        if how == "clear":
            optimizer.state.clear()
        if how == "pop":
            del optimizer.state[weight]
        if how == "replace":
            optimizer.state[weight]["momentum_buffer"] = torch.zeros(3, 3, device=device)
        losses += [f(ones(device, 2, 3)) for _ in range(4)]
        if how == "load":
            optimizer.load_state_dict(saved)
        losses += [f(ones(device, 2, 3)) for _ in range(4)]
        return values(*losses, *net.parameters())

    check(program)


def test_a_grad_that_is_exchanged_for_a_view() -> None:
    def program(device: str, wrap: Wrap) -> Any:
        weight = torch.ones(1, 3, device=device).requires_grad_()

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = (weight * x).sum()
            loss.backward()
            return loss

        f = wrap(step)
        for _ in range(4):
            f(ones(device, 1, 3))
        flat = torch.full((6,), 7.0, device=device)
        flat[:3] = 0
        weight.grad = flat[3:].view(1, 3)
        kept = []
        for _ in range(3):
            f(ones(device, 1, 3))
            kept += values(weight.grad, flat)
        return kept

    check(program)


def test_a_grad_that_is_replaced_and_read_by_the_body() -> None:
    def program(device: str, wrap: Wrap) -> Any:
        weight = torch.ones(1, 3, device=device).requires_grad_()

        def step(x: torch.Tensor) -> torch.Tensor:
            before = weight.grad * 2 if weight.grad is not None else x  # as momentum does
            weight.grad = None
            (weight * x).sum().backward()
            weight.grad = weight.grad + before  # type: ignore[operator]
            return before

        f = wrap(step)
        results = [f(ones(device, 1, 3)) for _ in range(5)]
        flat = torch.arange(6.0).to(device)
        weight.grad = flat[3:].view(1, 3)
        results += [f(ones(device, 1, 3)) for _ in range(3)]
        return values(*results, flat)

    check(program)
