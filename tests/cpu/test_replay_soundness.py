"""A captured function does what its body would do, whatever a user changes between calls.

Each program runs twice: on the CPU as written, and on the lazy device within `capture`.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import pickle
import sys
import threading
import time
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from harness import Counted, Unseen, assert_same, count, unseen_number
from torch import nn

import lazy_backend
from lazy_backend import CaptureError, CaptureWarning, capture
from lazy_backend.replay import captured_state
from lazy_backend.tensors import bodies


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


@pytest.mark.parametrize("at", [1, 2, 4])
def test_two_states_that_are_exchanged(at: int) -> None:
    def program(device: str, wrap: Wrap) -> Any:
        one, other = Memory(device), Memory(device)
        other.hidden = other.hidden + 10

        def step(x: torch.Tensor) -> torch.Tensor:
            one.hidden = one.hidden + x
            other.hidden = other.hidden * 2
            return one.hidden - other.hidden

        f = wrap(step)
        results = []
        for number in range(8):
            if number == at:
                one.hidden, other.hidden = other.hidden, one.hidden
            results.append(f(ones(device)))
        return values(*results, one.hidden, other.hidden)

    check(program)


@pytest.mark.parametrize("at", [1, 2, 4])
def test_two_objects_that_are_exchanged(at: int) -> None:
    def program(device: str, wrap: Wrap) -> Any:
        pair = [Memory(device), Memory(device)]
        pair[1].hidden = pair[1].hidden + 10

        def step(x: torch.Tensor) -> torch.Tensor:
            pair[0].hidden = pair[0].hidden + x
            pair[1].hidden = pair[1].hidden * 2
            return pair[0].hidden - pair[1].hidden

        f = wrap(step)
        results = []
        for number in range(8):
            if number == at:
                pair.reverse()
            results.append(f(ones(device)))
        return values(*results, pair[0].hidden, pair[1].hidden)

    check(program)


def test_objects_that_the_body_exchanges() -> None:
    def program(device: str, wrap: Wrap) -> Any:
        pair = [Memory(device), Memory(device)]
        pair[1].hidden = pair[1].hidden + 10

        def step(x: torch.Tensor) -> torch.Tensor:
            pair[0].hidden = pair[0].hidden + x
            pair[1].hidden = pair[1].hidden * 2
            pair.reverse()
            return pair[0].hidden - pair[1].hidden

        f = wrap(step)
        results = [f(ones(device)) for _ in range(8)]
        return values(*results, pair[0].hidden, pair[1].hidden)

    with pytest.warns(CaptureWarning, match=r"changes which tensor is in pair\[0\]\.pair\[0\]"):
        check(program, replays=0)


class Keeper:
    """Keeps what its body is given, where `how` says."""

    def __init__(self, device: str, how: str) -> None:
        self.how = how
        self.last: Any = torch.zeros(3, device=device)
        self.entries = {"a": torch.zeros(3, device=device)}
        self.items = [torch.zeros(3, device=device)]
        self.total = torch.zeros(3, device=device)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        result = self.total + self.last + self.entries["a"] + self.items[-1]
        self.total = self.total + x[0]
        if self.how == "attribute":
            self.last = x[1]
        elif self.how == "entry":
            self.entries["a"] = x[2]
        elif self.how == "appended":
            self.items.append(x[0])
        elif self.how == "dropped":
            self.entries = {"a": x[0] * 1, "b": x[1].detach()}
        return result


@pytest.mark.parametrize("how", ["attribute", "entry", "appended", "dropped"])
def test_arguments_that_the_body_keeps(how: str) -> None:
    def program(device: str, wrap: Wrap) -> Any:
        keeper = Keeper(device, how)
        f = wrap(keeper.step)
        results = [f(torch.arange(9.0, device=device).view(3, 3) + number) for number in range(9)]
        return values(*results, keeper.last, keeper.total, *keeper.entries.values(), *keeper.items)

    with pytest.warns(CaptureWarning, match="cannot be replayed"):
        check(program, replays=0)


@pytest.mark.parametrize("at", [2, 5])
def test_returned_state_that_is_exchanged_for_another(at: int) -> None:
    """The body returns a tensor that it does not use."""

    def program(device: str, wrap: Wrap) -> Any:
        memory, spare = Memory(device), torch.full((3,), 5.0, device=device)

        def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            memory.many[0] = memory.many[0] + x
            return memory.hidden, memory.pair[0]

        f, results = wrap(step), []
        for number in range(9):
            if number == at:
                memory.hidden, memory.pair = spare, (spare[:2], spare)
            results += values(*f(ones(device)))
        return results

    check(program)


@pytest.mark.parametrize(("first", "every"), [(False, 5), (False, 7), (True, 1), (True, 2), (True, 3)])
def test_gradients_that_the_body_drops_whoever_made_them(first: bool, every: int) -> None:
    """Only some calls find a gradient, which they add to unless they drop it `first`. All leave none."""

    def program(device: str, wrap: Wrap) -> Any:
        used, unused = torch.ones(3, device=device), torch.ones(3, device=device)
        parameters = [nn.Parameter(used), nn.Parameter(unused)]
        optimizer = torch.optim.SGD(parameters, lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            if first:
                optimizer.zero_grad()
            loss = (parameters[0] * x).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        f, found = wrap(step), []
        for number in range(14):
            if number % every == every - 1:
                for parameter in parameters:
                    parameter.grad = ones(device, 3)
            found += [*values(f(ones(device))), [parameter.grad is None for parameter in parameters]]
        return [*found, *values(*parameters)]

    check(program)


@pytest.mark.filterwarnings("ignore::lazy_backend.CaptureWarning")  # it is never replayed
def test_a_gradient_buffer_of_the_user() -> None:
    def program(device: str, wrap: Wrap) -> Any:
        parameter, buffer = nn.Parameter(torch.ones(3, device=device)), torch.ones(3, device=device)

        def step(x: torch.Tensor) -> torch.Tensor:
            buffer.mul_(1.5)
            loss = (parameter * x).sum()
            loss.backward()
            with torch.no_grad():
                parameter.sub_(parameter.grad)
            parameter.grad = None
            return loss.detach()

        f, found = wrap(step), []
        for number in range(12):
            if number not in (7, 8):
                parameter.grad = buffer if number != 9 else buffer * 3
            found += values(f(ones(device)))
        return [*found, *values(parameter, buffer)]

    check(program, replays=0)


def test_a_place_that_the_body_lets_stand_for_another() -> None:
    """At its second call the body stores what is there already: a replay must not rest on that."""

    def program(device: str, wrap: Wrap) -> Any:
        one, other = Memory(device), Memory(device)
        other.hidden = other.hidden + 10

        def step(x: torch.Tensor) -> torch.Tensor:
            one.hidden = other.hidden
            return x * 2

        f = wrap(step)
        for number in range(9):
            f(ones(device))
            if number in (3, 6):
                one.hidden = one.hidden + 1
        return values(one.hidden, other.hidden)

    check(program)


def test_what_the_caller_stores_does_not_stop_replays() -> None:
    class Loop:
        def __init__(self, device: str) -> None:
            self.weight = torch.ones(3, device=device)
            self.batches = [torch.full((3,), float(number), device=device) for number in range(20)]
            self.batch: Any = None
            self.loss: Any = None
            self.losses: list[torch.Tensor] = []

        def step(self, x: torch.Tensor) -> torch.Tensor:
            self.weight = self.weight * 0.9 + x
            return self.weight.sum()

    def program(device: str, wrap: Wrap) -> Any:
        loop = Loop(device)
        step = wrap(loop.step)
        for batch in loop.batches:
            loop.batch = batch
            loop.loss = step(loop.batch)
            loop.losses.append(loop.loss)
        return values(*loop.losses, loop.weight)

    check(program, replays=12)


def test_an_argument_that_is_state_as_well() -> None:
    def program(device: str, wrap: Wrap) -> Any:
        memory = Memory(device)

        def step(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            memory.hidden = memory.hidden * 0.5 + x
            return memory.many[0] * 2

        f, out = wrap(step), torch.ones(3, device=device)
        for number in range(12):
            if number in (2, 6, 7):
                memory.hidden = out
            out = f(ones(device), out)
        return values(out, memory.hidden)

    check(program)


def test_a_tensor_that_is_read_at_one_place_and_kept_at_another() -> None:
    def program(device: str, wrap: Wrap) -> Any:
        memory, first = Memory(device), torch.full((3,), 5.0, device=device)
        holder = {"first": first}

        def step(x: torch.Tensor) -> torch.Tensor:
            memory.hidden = memory.hidden * 0.5 + x
            return holder["first"] + x

        f, found = wrap(step), []
        for number in range(10):
            if number in (3, 4, 8):
                memory.hidden = first
            found += values(f(ones(device)), memory.hidden)
        return found

    check(program)


@pytest.mark.parametrize("at", [1, 2, 4])
def test_two_buffers_and_two_gradients_that_are_exchanged(at: int) -> None:
    def program(device: str, wrap: Wrap) -> Any:
        net = nn.ModuleList(nn.BatchNorm1d(3) for _ in range(2)).to(device)
        first, second = net

        def step(x: torch.Tensor) -> torch.Tensor:
            for number, norm in enumerate(net, 1):
                norm.running_mean = norm.running_mean * number + norm(x).detach().mean(0) + 1
                grad = norm.weight.grad
                norm.weight.grad = x[0] if grad is None else grad * number + x[0]
            return first.running_mean - second.running_mean

        f = wrap(step)
        results = []
        for number in range(8):
            if number == at:
                first.running_mean, second.running_mean = second.running_mean, first.running_mean
                first.weight.grad, second.weight.grad = second.weight.grad, first.weight.grad
            results.append(f(ones(device, 2, 3)))
        return values(*results, *net.buffers(), first.weight.grad, second.weight.grad)

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
        f = wrap(cell.forward)
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
    f = capture(counter.forward)
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


# ----- devices and modes


@pytest.mark.usefixtures("two_devices")
def test_the_device_of_an_argument() -> None:
    f = capture(lambda x: x * 2 + 1)
    for _ in range(3):
        f(ones("lazy"))
    for _ in range(4):
        made = f(ones("lazy:1"))
        assert made.device == torch.device("lazy:1")
        assert_same(made, torch.full((3,), 3.0))
    assert lazy_backend.metrics.counter_value("CapturedCall") == 3
    assert f(ones("lazy")).device == torch.device("lazy:0")


@pytest.mark.usefixtures("two_devices")
def test_a_module_on_the_second_device_and_no_tensor_argument() -> None:
    def program(device: str, wrap: Wrap) -> Any:
        device = "lazy:1" if device == "lazy" else device
        net = Net().to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        x = ones(device, 2, 3)
        step = trainer(net, optimizer)
        f = wrap(lambda: step(x))
        return values(*[f() for _ in range(6)], *net.parameters())

    check(program, replays=4)


@pytest.mark.usefixtures("two_devices")
def test_a_device_that_only_the_body_knows() -> None:
    f = capture(lambda: torch.ones(3, device="lazy:1") * 2)
    for _ in range(6):
        assert_same(f(), torch.full((3,), 2.0))
    assert lazy_backend.metrics.counter_value("CapturedCall") == 3


@pytest.mark.usefixtures("two_devices")
def test_a_body_that_uses_two_devices_is_not_replayed() -> None:
    total = torch.zeros(3, device="lazy:1")

    def step(x: torch.Tensor) -> torch.Tensor:
        total.add_(1)
        return x * 2

    f = capture(step)
    with pytest.warns(CaptureWarning, match="computes on lazy:1, and not only on lazy:0"):
        repeat(lambda: f(ones("lazy")))
    assert_same(total, torch.full((3,), 6.0))


def test_modes_that_the_body_asks_about() -> None:
    def program(device: str, wrap: Wrap) -> Any:
        def step(x: torch.Tensor) -> torch.Tensor:
            dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.get_default_dtype()
            return x.to(dtype) * (2 if torch.is_grad_enabled() else 3)

        f = wrap(step)
        results = []
        for _ in range(2):
            results += [f(ones(device)) for _ in range(3)]
            for dtype in (torch.bfloat16, torch.float16):
                with torch.autocast("cpu", dtype=dtype):
                    results += [f(ones(device)) for _ in range(3)]
            with torch.no_grad():
                results += [f(ones(device)) for _ in range(3)]
            torch.set_default_dtype(torch.float64)
            try:
                results += [f(ones(device).float()) for _ in range(3)]
            finally:
                torch.set_default_dtype(torch.float32)
        return values(*results)

    check(program)


def test_results_under_eager_mode_are_detached_too() -> None:
    weight = ones("lazy").requires_grad_()
    f = capture(lambda x: {"made": weight * x, "n": 1})
    with lazy_backend.eager_mode():
        made = f(ones("lazy"))
    assert not made["made"].requires_grad
    assert made["n"] == 1


# ----- arguments and results that are not tensors


def test_signed_zeros() -> None:
    def program(device: str, wrap: Wrap) -> Any:
        f = wrap(lambda x, s: torch.copysign(x, x * s))
        return [f(ones(device), s) for s in (0.0, 0.0, 0.0, -0.0, -0.0, -0.0, 0.0)]

    check(program)


def test_signed_zeros_of_complex_numbers() -> None:
    f = capture(lambda x, z: x * z.imag.hex().startswith("-"))
    made = [f(ones("lazy"), z) for z in (0j, 0j, 0j, complex(0.0, -0.0), complex(0.0, -0.0))]
    assert [value.sum().item() for value in made] == [0.0, 0.0, 0.0, 3.0, 3.0]


@dataclass
class Options:
    scale: float
    sizes: tuple[int, ...] = (1, 2)


@pytest.mark.parametrize(
    "make",
    [np.float64, np.float32, lambda n: np.int64(n), lambda n: Options(n), lambda n: Options(1.0, (n,)),
     lambda n: types.SimpleNamespace(n=[n]), lambda n: np.array([1.0, n]), lambda n: slice(0, int(n))],
)  # fmt: skip
def test_arguments_by_value(make: Callable[[float], Any]) -> None:
    def number(value: Any) -> float:
        if isinstance(value, Options):
            return value.scale + value.sizes[0]
        if isinstance(value, types.SimpleNamespace):
            return float(value.n[0])
        if isinstance(value, slice):
            return float(value.stop)
        return float(np.asarray(value).sum())

    body = Counted(lambda x, value: x * number(value))
    f = capture(body)
    for n in (2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 2.0, 3.0):
        value = make(n)
        assert_same(f(ones("lazy"), value), ones("cpu") * number(value))
    assert body.runs == 4


def test_an_argument_that_is_changed_in_place() -> None:
    options, array = Options(2.0), np.array([1.0, 2.0])
    f = capture(lambda x, options, array: x * options.scale + array.sum())
    for scale in (2.0, 2.0, 2.0, 3.0, 3.0):
        options.scale = scale
        array[0] = scale
        assert_same(f(ones("lazy"), options, array), torch.full((3,), scale + scale + 2.0))


def test_a_body_that_writes_to_its_argument_is_not_replayed() -> None:
    array = np.zeros(2)

    def step(x: torch.Tensor, array: Any) -> torch.Tensor:
        array[0] = 1 - array[0]
        return x * 2

    f = capture(step)

    def twice() -> None:
        f(ones("lazy"), array)
        f(ones("lazy"), array)

    with pytest.warns(CaptureWarning, match="it changes an argument, of type ndarray"):
        repeat(twice, 5)
    assert array.tolist() == [0.0, 0.0]


def test_arguments_that_never_come_again_are_told_and_not_kept() -> None:
    class Thing:
        pass

    f = capture(lambda x, thing: x * 2)
    alive: list[weakref.ref[Any]] = []

    def call() -> None:
        thing = Thing()
        alive.append(weakref.ref(thing))
        f(ones("lazy"), thing)

    with pytest.warns(CaptureWarning, match="got other shapes or Python values in each of 64 calls"):
        repeat(call, 70)
    gc.collect()
    assert sum(reference() is not None for reference in alive) == 0


COUNTERS: dict[str, Callable[[Any, int], torch.Tensor]] = {
    "another int in each of 8 calls, as 'step', .*\n  pass it as a float": lambda f, number: f(ones("lazy"), number),
    "another int in each of 8 calls, as 'by', .*\n  pass it as a float": lambda f, number: f(ones("lazy"), by=number),
    "another int in each of 8 calls, and": lambda f, number: f(ones("lazy"), inner={"of": number}),
    "another str in each of 8 calls, as 'name', .*\n  leave": lambda f, number: f(ones("lazy"), name=str(number)),
}


@pytest.mark.parametrize("text", COUNTERS)
def test_an_argument_with_another_value_in_each_call_is_told(text: str) -> None:
    def body(x: torch.Tensor, step: int = 0, by: int = 0, name: str = "0", inner: Any = None) -> torch.Tensor:
        return x * (step + by + int(name) + (inner or {}).get("of", 0))

    f, call = capture(body), COUNTERS[text]
    for number in range(7):
        assert_same(call(f, number), torch.full((3,), float(number)))
    with pytest.warns(CaptureWarning, match=f"got {text}"):
        assert_same(call(f, 7), torch.full((3,), 7.0))
    assert_same(call(f, 8), torch.full((3,), 8.0))


def test_an_argument_that_changes_at_times_is_not_told() -> None:
    f = capture(lambda x, epoch: x * epoch)
    for number in range(60):  # warnings are errors
        assert_same(f(ones("lazy"), number // 5), torch.full((3,), float(number // 5)))


def test_an_object_is_told_from_one_that_takes_its_address() -> None:
    class Thing:
        def __init__(self, scale: int) -> None:
            self.scale = scale

    f = capture(lambda x, thing: x * thing.scale)
    for scale in range(20):
        thing = Thing(scale)
        for _ in range(3):
            assert_same(f(ones("lazy"), thing), torch.full((3,), float(scale)))
        del thing


def test_a_captured_method_keeps_no_instance_alive() -> None:
    class Scaled(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.scale = scale

        @capture
        def apply_to(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    instances = [Scaled(float(number)) for number in range(3)]
    for _ in range(4):
        for number, instance in enumerate(instances):
            assert_same(instance.apply_to(ones("lazy")), torch.full((3,), float(number)))
    assert lazy_backend.metrics.counter_value("CapturedCall") == 6
    copied = copy.deepcopy(instances[2])
    copied.scale = 5.0
    assert_same(copied.apply_to(ones("lazy")), torch.full((3,), 5.0))
    assert not pickle.dumps(instances[2].__dict__["_lazy_backend_captured"]).count(b"Scaled")
    alive = [weakref.ref(instance) for instance in instances]
    del instances, instance
    gc.collect()
    assert [reference() for reference in alive] == [None, None, None]


def test_numpy_s_random_numbers_are_noticed() -> None:
    generator = np.random.default_rng(0)
    for draw in (np.random.rand, generator.random):
        f = capture(lambda x, draw=draw: x * 2 if draw() < 0.5 else x)
        with pytest.warns(CaptureWarning, match="draws random numbers on the CPU|recorded"):
            repeat(lambda f=f: f(ones("lazy")), 10)  # type: ignore[misc]


def test_a_generator_of_numpy_that_changes_nothing_recorded() -> None:
    generator = np.random.default_rng(0)
    drawn: list[float] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        drawn[:] = [generator.random()]
        return x * 2

    f = capture(step)
    with pytest.warns(CaptureWarning, match="draws random numbers on the CPU"):
        repeat(lambda: f(ones("lazy")))


def test_an_array_that_is_returned() -> None:
    f = capture(lambda x: (x * 2, np.array([1.0, 2.0]), Options(1.0)))
    for _ in range(5):
        made, array, options = f(ones("lazy"))
        assert_same(made, torch.full((3,), 2.0))
        assert array.tolist() == [1.0, 2.0]
        assert options == Options(1.0)
        array[0], options.scale = 7.0, 7.0  # the caller's own
    assert lazy_backend.metrics.counter_value("CapturedCall") == 3


def test_a_returned_array_that_changes_is_not_replayed() -> None:
    numbers = iter(range(100))
    f = capture(lambda x: (x * 2, np.array([next(numbers)])))
    with pytest.warns(CaptureWarning, match="returned something else"):
        repeat(lambda: f(ones("lazy")))
    assert f(ones("lazy"))[1].tolist() == [6]


# ----- threads


def test_a_pool_that_the_body_waits_for_is_refused() -> None:
    with ThreadPoolExecutor(2) as pool:
        f = capture(lambda x: list(pool.map(lambda number: x * number, range(3))))
        for _ in range(2):
            with pytest.raises(CaptureError, match="a thread uses lazy:0 while the captured function"):
                f(ones("lazy"))
        assert_same(ones("lazy") + 1, torch.full((3,), 2.0))


@pytest.fixture
def threads_in_quick_turns() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("threads_in_quick_turns")
def test_threads_of_a_body_that_was_refused_do_not_stop_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_PATIENCE_IN_WAIT", 0.02)
    for _ in range(40):
        with ThreadPoolExecutor(2) as pool:
            f = capture(lambda x, pool=pool: list(pool.map(lambda number: x * number, range(3))))
            for _ in range(4):
                with pytest.raises(CaptureError, match="a thread uses lazy:0"):
                    f(ones("lazy"))


def test_threads_of_a_body_that_is_no_longer_recorded_are_refused() -> None:
    uses_pool = [False]

    def step(x: torch.Tensor) -> torch.Tensor:
        if uses_pool[0]:
            return sum(pool.map(lambda number: x * number, range(3)))
        return x * next(numbers)

    f, numbers = capture(step), itertools.count()
    with ThreadPoolExecutor(2) as pool:
        with pytest.warns(CaptureWarning):
            repeat(lambda: f(ones("lazy")), 20)
        uses_pool[0] = True
        for _ in range(2):
            with pytest.raises(CaptureError, match="a thread uses lazy:0"):
                f(ones("lazy"))


def test_a_thread_that_the_body_joins_is_refused() -> None:
    made: list[Any] = []

    def compute() -> None:
        try:
            made.append(torch.ones(3, device="lazy").cpu())
        except CaptureError as error:
            made.append(error)

    def step(x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
        return x * 2

    with pytest.raises(CaptureError, match="a thread uses lazy:0"):
        capture(step)(ones("lazy"))
    assert isinstance(made[0], CaptureError)


def test_another_thread_waits_for_a_long_body() -> None:
    begun, made = threading.Event(), []

    def step(x: torch.Tensor) -> torch.Tensor:
        begun.set()
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            sum(range(1000))
        return x * 2

    def other() -> None:
        begun.wait()
        made.append((ones("lazy") + 1).cpu())

    thread = threading.Thread(target=other)
    thread.start()
    assert_same(capture(step)(ones("lazy")), torch.full((3,), 2.0))
    thread.join()
    assert_same(made, [torch.full((3,), 2.0)])


# ----- what is searched


def test_no_call_searches_all_objects_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class Touchy:
        @property
        def __class__(self) -> Any:  # type: ignore[override]
            raise RuntimeError("touched")

    touchy = [Touchy()]
    searched = []

    def get_objects(generation: int | None = None) -> list[Any]:
        searched.append(generation)
        return original(generation)

    original = gc.get_objects
    monkeypatch.setattr(captured_state.gc, "get_objects", get_objects)

    def program(device: str, wrap: Wrap) -> Any:
        memory = Memory(device)
        f = wrap(memory.step)
        results = []
        for number in range(12):
            gc.collect()  # what is there is old
            if number % 4 == 3:
                memory.hidden = torch.zeros(3, device=device)
            results.append(f(ones(device)))
        return values(*results)

    check(program)
    assert searched
    assert set(searched) == {0}
    assert len(touchy) == 1


# ----- verification by default


def test_a_body_that_changed_unseen_is_found_in_time(unseen: Unseen) -> None:
    unseen(2.0)
    f = capture(lambda x: x * unseen_number())
    repeat(lambda: f(ones("lazy")), 63)
    unseen(3.0)
    with pytest.raises(CaptureError, match=r"(?s)no longer does what was captured: .*test_replay_soundness.py:\d+"):
        f(ones("lazy"))


def test_verification_gets_rare() -> None:
    body = Counted(lambda x: x * 2)
    f = capture(body)
    runs = []
    for _ in range(600):
        f(ones("lazy"))
        runs.append(body.runs)
    assert [place + 1 for place in range(600) if place == 0 or runs[place] > runs[place - 1]] == [
        1,
        2,
        64,
        128,
        256,
        512,
    ]


def test_verification_may_be_off() -> None:
    body = Counted(lambda x: x * 2)
    f = capture(body, verify_every=0)
    repeat(lambda: f(ones("lazy")), 200)
    assert body.runs == 2


# ----- where state may be


@functools.lru_cache
def _mask(size: int) -> torch.Tensor:
    return torch.arange(float(size)).to("lazy")


class Slotted:
    __slots__ = ("hidden",)

    def __init__(self, device: str) -> None:
        self.hidden = torch.zeros(3, device=device)


class OnClass:
    hidden: Any = None


def places(device: str) -> dict[str, tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], Any]]]:
    """How to read and write state that is kept in various ways."""
    slotted, module, store = Slotted(device), nn.Module(), defaultdict(list)
    row = deque([torch.zeros(3, device=device)])
    store["a"].append(torch.zeros(3, device=device))
    module.memory = Opaque(device)  # type: ignore[assignment]
    OnClass.hidden = torch.zeros(3, device=device)

    def attribute_of_function() -> torch.Tensor:
        return attribute_of_function.hidden  # type: ignore[attr-defined, no-any-return]

    attribute_of_function.hidden = torch.zeros(3, device=device)  # type: ignore[attr-defined]
    return {
        "slot": (lambda: slotted.hidden, lambda new: setattr(slotted, "hidden", new)),
        "deque": (lambda: row[0], lambda new: row.__setitem__(0, new)),
        "list in a dict": (lambda: store["a"][0], lambda new: store["a"].__setitem__(0, new)),
        "class": (lambda: OnClass.hidden, lambda new: setattr(OnClass, "hidden", new)),
        "object in a module": (
            lambda: module.memory.hidden,  # type: ignore[union-attr, return-value]
            lambda new: setattr(module.memory, "hidden", new),
        ),
        "function": (attribute_of_function, lambda new: setattr(attribute_of_function, "hidden", new)),
    }


class Opaque:
    def __init__(self, device: str) -> None:
        self.hidden = torch.zeros(3, device=device)
        self.lock = threading.Lock()


@pytest.mark.parametrize("kind", places("cpu"))
@pytest.mark.parametrize("in_place", [False, True])
def test_every_place_is_followed(kind: str, in_place: bool) -> None:
    def program(device: str, wrap: Wrap) -> Any:
        read, write = places(device)[kind]

        def step(x: torch.Tensor) -> torch.Tensor:
            if in_place:
                read().add_(x)
            else:
                write(read() + x)
            return read() * 2

        f = wrap(step)
        results = [f(ones(device)) for _ in range(5)]
        saved = read()
        write(torch.zeros(3, device=device))
        results += [f(ones(device)) for _ in range(5)]
        write(saved)
        results += [f(ones(device)) for _ in range(5)]
        return values(*results, read(), saved)

    check(program, replays=3)


def test_a_cached_constant_is_no_obstacle() -> None:
    f = capture(lambda x: x * _mask(3))
    for _ in range(5):
        assert_same(f(ones("lazy")), torch.tensor([0.0, 1.0, 2.0]))
    assert lazy_backend.metrics.counter_value("CapturedCall") == 3


def test_state_that_is_updated_in_place_where_no_code_shows_it_is_not_replayed() -> None:
    cache = threading.local()
    cache.total = torch.zeros(3, device="lazy")
    f = capture(lambda x: cache.total.add_(x) * 1)
    with pytest.warns(CaptureWarning, match=r"uses a tensor at .*test_replay_soundness.py:\d+ that is held where"):
        repeat(lambda: f(ones("lazy")))
    assert_same(cache.total, torch.full((3,), 6.0))


def test_a_helper_that_is_found_late_names_a_global() -> None:
    f = capture(lambda x: _first_helper(x))
    results = [f(ones("lazy")) for _ in range(4)]
    STATE["total"] = torch.zeros(3, device="lazy")
    results += [f(ones("lazy")) for _ in range(4)]
    assert_same(results, [torch.full((3,), float(number)) for number in (1, 2, 3, 4, 1, 2, 3, 4)])
    STATE.clear()


STATE: dict[str, torch.Tensor] = {}


def _first_helper(x: torch.Tensor) -> torch.Tensor:
    return _second_helper(x)


def _second_helper(x: torch.Tensor) -> torch.Tensor:
    STATE["total"] = STATE.get("total", torch.zeros(3, device="lazy")) + x
    return STATE["total"] * 1


def test_an_object_that_answers_anything_for_its_class() -> None:
    class Touchy:
        @property
        def __class__(self) -> Any:  # type: ignore[override]
            raise RuntimeError("touched")

    touchy, net = Touchy(), Net().to("lazy")
    net.__dict__["touchy"] = touchy
    f = capture(lambda x: net(x) * (1 if touchy is not None else 2))
    with torch.no_grad():
        repeat(lambda: f(ones("lazy", 2, 3)))
    assert lazy_backend.metrics.counter_value("CapturedCall") == 4


def test_what_changes_before_every_call_is_told() -> None:
    net = Net().to("lazy")
    f = capture(lambda x: net(x))

    def call() -> None:
        net.scale += 1.0
        f(ones("lazy", 2, 3))

    with pytest.warns(CaptureWarning, match=r"changed"):
        repeat(call, 20)


def test_a_generator_of_torch_that_the_body_seeds_is_noticed() -> None:
    for generator in (torch.Generator(), torch.Generator("lazy")):

        def step(x: torch.Tensor, generator: torch.Generator = generator) -> torch.Tensor:
            generator.manual_seed(generator.initial_seed() + 1)
            return x * 2

        f = capture(step)
        with pytest.warns(CaptureWarning, match="draws random numbers on the CPU"):
            repeat(lambda f=f: f(ones("lazy")))  # type: ignore[misc]
        assert generator.initial_seed() % 10 == (67280421310721 + 6) % 10


def test_global_hooks_are_noticed() -> None:
    def program(device: str, wrap: Wrap) -> Any:
        net = Net().to(device)
        f = wrap(torch.no_grad()(lambda x: net(x)))
        results = [f(ones(device, 2, 3)) for _ in range(4)]
        handle = nn.modules.module.register_module_forward_hook(lambda module, args, made: made * 2)
        results += [f(ones(device, 2, 3)) for _ in range(4)]
        handle.remove()
        results += [f(ones(device, 2, 3)) for _ in range(4)]
        return values(*results)

    check(program, replays=5)


def test_a_default_device_is_noticed() -> None:
    f = capture(lambda x: x * (2 if torch.get_default_device().type == "lazy" else 3))
    results = []
    for _ in range(2):
        results += [f(ones("lazy")) for _ in range(3)]
        for _ in range(3):
            with torch.device("lazy"):
                results.append(f(ones("lazy")))
    assert [int(made[0]) for made in results] == [3, 3, 3, 2, 2, 2] * 2
    assert lazy_backend.metrics.counter_value("CapturedCall") == 8


# ----- what tells tensors apart for autograd, and what leads to them


def test_one_tensor_given_twice_and_two_for_its_memory() -> None:
    def program(device: str, wrap: Wrap) -> Any:
        f = wrap(lambda a, b: torch.autograd.grad((a * a * b).sum(), [a, b]))
        found = []
        for step in range(9):
            x = torch.full((2,), 3.0).to(device).requires_grad_()
            found += values(*f(x, x if step % 3 else x.detach().requires_grad_()))
        return found

    check(program)


def test_hooks_of_arguments_and_of_leaves() -> None:
    def triple(tensor: torch.Tensor) -> None:
        assert tensor.grad is not None
        tensor.grad.mul_(3)

    def program(device: str, wrap: Wrap) -> Any:
        w = ones(device, 2).requires_grad_()

        def step(x: torch.Tensor) -> torch.Tensor:
            (gradient,) = torch.autograd.grad((x * x).sum(), [x])
            w.grad = None
            (w * x.detach()).sum().backward()
            return gradient

        f, found = wrap(step), []
        for number in range(12):
            x = ones(device, 2).requires_grad_()
            if number in (5, 8):
                x.register_hook(lambda gradient, factor=number: gradient * factor)
            if number == 6:
                handle = w.register_hook(lambda gradient: gradient * 10)
            if number == 7:
                handle.remove()
                handle = w.register_hook(lambda gradient: gradient * 100)
            if number == 9:
                handle.remove()
                handle = w.register_post_accumulate_grad_hook(triple)
            gradient = f(x)
            assert w.grad is not None
            found += values(gradient, w.grad)
        return found

    check(program)


def test_tensors_added_to_what_leads_to_tensors() -> None:
    def program(device: str, wrap: Wrap) -> Any:
        one = ones(device, 1)
        by_name, several = {"a": one * 1, "b": one * 10}, [one * 1]

        def compute(x: torch.Tensor) -> torch.Tensor:
            first = next(iter(by_name.values()))
            return torch.stack([x + sum(several), x + first])

        f, found = wrap(compute), []
        for number in range(12):
            if number == 5:
                several.append(one * 100)
            if number == 8:
                by_name["a"] = by_name.pop("a")
            found += values(f(one * number))
        return found

    check(program)


class _AddsOne(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(1.0)


_TAKERS: dict[str, Callable[[], Callable[[torch.Tensor], torch.Tensor]]] = {
    "a function that writes": lambda: lambda x: x.add_(1.0),
    "a module that writes": _AddsOne,
    "a module that saves": lambda: nn.Linear(3, 3).to("lazy"),
}


@pytest.mark.parametrize("name", _TAKERS)
def test_an_inference_tensor_is_refused_as_in_eager(name: str) -> None:
    taker = lazy_backend.capture(_TAKERS[name]())
    for _ in range(4):
        taker(torch.ones(3, 3, device="lazy"))
        lazy_backend.mark_step()
    for _ in range(3):
        with torch.inference_mode():
            x = torch.ones(3, 3, device="lazy")
        with pytest.raises(RuntimeError, match=r"[Ii]nference tensor"):
            taker(x)
        with torch.inference_mode():
            taker(x)


def _halve_a_row(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    row = weight[0]
    row.mul_(0.5)
    return row * 2 + x


def _limit_the_norms(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    norms = []
    for row in weight:
        row.mul_(1 / row.norm().clamp(min=1))
        norms.append(row.norm())
    return torch.stack(norms) + x


def _read_a_view_of_what_was_written(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    view = weight.t()
    weight.mul_(2.0)
    return view * 1 + x


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("body", [_halve_a_row, _limit_the_norms, _read_a_view_of_what_was_written])
def test_a_view_made_without_gradients_serves_after_a_write(body: Callable, mode: Callable) -> None:
    def trained(device: str) -> list[torch.Tensor]:
        weight = nn.Parameter(torch.arange(16.0).reshape(4, 4).to(device))

        def step(x: torch.Tensor) -> torch.Tensor:
            with mode():
                made = body(weight, x)
            return made * x

        call = capture(step) if device == "lazy" else step
        results = [call(torch.full((4,), float(i)).to(device)) for i in range(6)]
        return [*(one.detach().cpu() for one in results), weight.detach().cpu()]

    assert_same(trained("lazy"), trained("cpu"))


def test_a_view_that_cannot_say_whether_it_is_a_leaf_is_an_argument() -> None:
    def trained(device: str) -> torch.Tensor:
        weight = nn.Parameter(torch.arange(4.0).reshape(2, 2).to(device))
        with torch.no_grad():
            view = weight[0]
            view.mul_(2.0)

            def double(x: torch.Tensor) -> torch.Tensor:
                return x * 2

            call = capture(double) if device == "lazy" else double
            return torch.stack([call(view) for _ in range(4)]).cpu()

    assert_same([trained("lazy")], [trained("cpu")])
