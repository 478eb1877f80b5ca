"""Captured code reads what is outside of it: switches of the process, other modules, other optimizers.

Each call is that of the code as written.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import count
from test_region_promises import Wrap, check
from torch import nn

import lazy_backend
from lazy_backend import mark_step

pytestmark = pytest.mark.filterwarnings("ignore::lazy_backend.CaptureWarning")


@pytest.fixture(autouse=True)
def interpreted() -> None:
    lazy_backend.config.compile = "off"


class Calls(nn.Module):
    """A module whose forward calls a function."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class Scaled(torch.optim.Optimizer):
    """An optimizer that multiplies gradients by what a function gives for them."""

    def __init__(self, parameters: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(parameters, {})
        self.function = function

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(self.function(parameter.grad))


# How code that is captured calls a function of a tensor.
Form = Callable[[Wrap, str, Callable[[torch.Tensor], torch.Tensor]], Callable[[torch.Tensor], torch.Tensor]]


def in_function(wrap: Wrap, device: str, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return wrap(function)


def in_module(wrap: Wrap, device: str, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return wrap(Calls(function))


def in_optimizer(wrap: Wrap, device: str, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    parameter = nn.Parameter(torch.zeros(3).to(device))
    optimizer = wrap(Scaled([parameter], function))

    def call(x: torch.Tensor) -> torch.Tensor:
        parameter.grad = x
        optimizer.step()
        return parameter.detach().clone()

    return call


FORMS = {"function": in_function, "module": in_module, "optimizer": in_optimizer}
REPLAYED = {"function": "CapturedCall", "module": "RegionJump", "optimizer": "RegionJump"}
in_each_form = pytest.mark.parametrize("form", FORMS)


def changes_are_seen(
    form: str,
    world: Callable[[str], tuple[Callable[[torch.Tensor], torch.Tensor], list[Callable[[], Any]]]],
    replayed: int = 1,
) -> None:
    """Calls before and after each change of what a function reads give what the function gives.

    `world`: the function and the changes, for a device. `replayed`: so many calls before the first change at least.
    """

    def program(device: str, wrap: Wrap) -> list[Any]:
        function, changes = world(device)
        call = FORMS[form](wrap, device, function)
        values: list[Any] = []

        def call_often() -> None:
            for number in range(6):
                values.append(call(torch.arange(3, dtype=torch.float32).add(number).to(device)))
                mark_step()

        with count(REPLAYED[form]) as replays:
            call_often()
        is_captured = device == "lazy" and getattr(wrap, "__name__", "") == "capture"
        assert not is_captured or replays() >= replayed
        for change in changes:
            change()
            call_often()
        return values

    check(program)


# ----- switches of the process


def _set(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


# How code asks for each, and how a program sets it; the value that is set.
SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Any]] = {
    "oneDNN": (*_set(torch.backends.mkldnn, "enabled"), False),
    "precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
    "deterministic": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    "dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "threads": (torch.get_num_threads, torch.set_num_threads, 3),
    "attention": (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp, False),
    "fast path": (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False),
    "einsum": (*_set(torch.backends.opt_einsum, "strategy"), "greedy"),
    "cuDNN": (*_set(torch.backends.cudnn, "benchmark"), True),
    "warnings": (torch.is_warn_always_enabled, torch.set_warn_always, True),
}


@in_each_form
@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_of_the_process(name: str, form: str) -> None:
    read, write, value = SWITCHES[name]
    before = read()

    def world(device: str) -> tuple[Any, list[Any]]:
        def function(x: torch.Tensor) -> torch.Tensor:
            return x * (2.0 if read() == before else 3.0)

        return function, [lambda: write(value), lambda: write(before)]

    try:
        changes_are_seen(form, world)
    finally:
        write(before)


# ----- other modules and optimizers


class Other(nn.Module):
    """A module that code names, and that is no part of what is captured."""

    rate = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.parts = 2.0, nn.ModuleList([nn.Identity(), nn.ReLU()])
        self.register_buffer("host", torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x * self.scale * self.rate


class Frozen(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 5.0


def _hook(module: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor:
    return result * 3.0


def _set_rate(other: Other) -> None:
    type(other).rate = 4.0


CHANGES: dict[str, Callable[[Any], Any]] = {
    "an attribute": lambda other: setattr(other, "scale", 3.0),
    "a new attribute": lambda other: setattr(other, "rate", 3.0),
    "of the class": _set_rate,
    "a part": lambda other: other.parts.append(nn.Hardtanh()),
    "another part": lambda other: other.parts.__setitem__(0, nn.Sigmoid()),
    "its mode": lambda other: other.eval(),
    "a hook": lambda other: other.register_forward_hook(_hook),
    "a hook within": lambda other: other.parts[1].register_forward_hook(_hook),
    "its class": lambda other: setattr(other, "__class__", type("More", (Frozen, type(other)), {})),
    "a tensor on the CPU": lambda other: other.host.fill_(3.0),
}


@in_each_form
@pytest.mark.parametrize("name", CHANGES)
def test_another_module(name: str, form: str) -> None:
    def world(device: str) -> tuple[Any, list[Any]]:
        other = type("OfTest", (Other,), {})()

        def function(x: torch.Tensor) -> torch.Tensor:
            return other(x) * (1.0 if other.training else 7.0) * other.host.item()

        return function, [lambda: CHANGES[name](other)]

    changes_are_seen(form, world)


@in_each_form
def test_the_settings_of_another_optimizer(form: str) -> None:
    def world(device: str) -> tuple[Any, list[Any]]:
        other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.5)
        (group,) = other.param_groups

        def function(x: torch.Tensor) -> torch.Tensor:
            return x * other.param_groups[0]["lr"] * (2.0 if other.param_groups[0]["nesterov"] else 3.0)

        return function, [lambda: group.update(lr=0.2), lambda: group.update(nesterov=True)]

    changes_are_seen(form, world)


def test_a_module_with_a_counter_in_another_one_runs_as_written() -> None:
    class Counts(nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x * self.calls

    def world(device: str) -> tuple[Any, list[Any]]:
        other = Counts()
        return lambda x: other(x), [lambda: setattr(other, "calls", 0)]

    for form in FORMS:
        changes_are_seen(form, world, replayed=0)


def test_another_module_that_is_replaced_is_not_kept_alive() -> None:
    class World:
        other: Any = None

    world = World()

    def call(other: nn.Module) -> Any:
        world.other = other.to("lazy")
        for _ in range(4):
            module(torch.ones(3, device="lazy"))
            mark_step()
        return weakref.ref(other)

    module = lazy_backend.capture(Calls(lambda x: x * (2.0 if world.other.training else 3.0)))
    first = call(nn.Linear(2, 2))
    second = call(nn.Linear(2, 2))
    gc.collect()
    assert first() is None
    assert second() is not None


# ----- values that the code itself writes


@in_each_form
def test_a_value_that_the_first_call_alone_writes(form: str) -> None:
    def world(device: str) -> tuple[Any, list[Any]]:
        class Lazily:
            rate = 2.0

            @functools.cached_property
            def factor(self) -> float:
                return self.rate

        table: dict[str, float] = {}
        lazily = Lazily()

        def function(x: torch.Tensor) -> torch.Tensor:
            return x * table.setdefault("a", 2.0) * lazily.factor

        return function, [
            lambda: table.update(a=3.0),
            table.clear,
            lambda: setattr(lazily, "rate", 4.0),
            lambda: delattr(lazily, "factor"),
            lambda: setattr(lazily, "factor", 5.0),
        ]

    changes_are_seen(form, world)


@pytest.mark.parametrize("form", ["function", "module"])
def test_a_value_that_calls_of_another_shape_write(form: str) -> None:
    """Calls of one shape read it and do not write it."""

    def program(device: str, wrap: Wrap) -> list[Any]:
        table = {"a": 1.0}

        def function(x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] == 2:
                table["a"] = 2.0
            return x * table["a"]

        call = FORMS[form](wrap, device, function)
        values = []
        for size in (3, 3, 3, 3, 2, 3, 3, 3):
            values.append(call(torch.ones(size).to(device)))
            mark_step()
        return values

    check(program)


def test_calls_of_several_shapes_that_count_are_replayed() -> None:
    counts = {"calls": 0}

    def function(x: torch.Tensor) -> torch.Tensor:
        counts["calls"] += 1
        return x * 2.0

    module = lazy_backend.capture(Calls(function))
    with count("RegionJump") as jumps:
        for number in range(12):
            module(torch.ones(2 + number % 2, device="lazy"))
            mark_step()
    assert jumps() >= 6


def test_values_that_change_to_and_fro_are_remembered() -> None:
    table = {"a": 1.0}
    module = lazy_backend.capture(Calls(lambda x: x * table["a"]))
    with count("RegionJump") as jumps:
        for number in range(16):
            table["a"] = 1.0 + number % 2
            result = module(torch.ones(2, device="lazy"))
            mark_step()
            assert result.tolist() == [table["a"]] * 2
    assert jumps() >= 8


# ----- tensors


@pytest.mark.parametrize("form", ["module", "optimizer"])
def test_a_name_for_a_parameter_that_becomes_one_for_another_tensor(form: str) -> None:
    """It was recorded as the parameter, which is still there."""

    def program(device: str, wrap: Wrap) -> list[Any]:
        named: dict[str, Any] = {}

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(3))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * named["weight"]

        class Steps(torch.optim.Optimizer):
            @torch.no_grad()
            def step(self, closure: Any = None) -> Any:
                named["weight"].sub_(named["weight"].grad)

        net = Net().to(device)
        other = nn.Parameter(torch.full((3,), 5.0).to(device))
        named["weight"] = net.weight
        optimizer = Steps([net.weight, other], {})
        wrap(net if form == "module" else optimizer)
        values: list[Any] = []
        for number in range(12):
            if number == 6:
                named["weight"] = other
            if form == "module":
                with torch.no_grad():
                    values.append(net(torch.ones(3).to(device)))
            else:
                net.weight.grad, other.grad = torch.ones(3).to(device), torch.ones(3).to(device)
                optimizer.step()
                values += [net.weight.detach().clone(), other.detach().clone()]
            mark_step()
        return values

    check(program, num_jumps=2)


@pytest.mark.parametrize("form", ["module", "optimizer"])
def test_attributes_and_gradients_of_parameters(form: str) -> None:
    def program(device: str, wrap: Wrap) -> list[Any]:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(3))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                weight: Any = self.weight
                x = x * weight * weight.scale * getattr(weight, "later", 1.0)
                return x if weight.grad is None else x + 1

        class Steps(torch.optim.Optimizer):
            @torch.no_grad()
            def step(self, closure: Any = None) -> Any:
                for p in self.param_groups[0]["params"]:
                    p.sub_(p.grad * p.scale * getattr(p, "later", 1.0))

        net = Net().to(device)
        weight: Any = net.weight
        weight.scale = 2.0
        optimizer = Steps(net.parameters(), {})
        wrap(net if form == "module" else optimizer)
        values: list[Any] = []
        for number in range(24):
            if number == 6:
                weight.scale = 5.0
            elif number == 12:
                weight.later = 7.0
            elif number == 18 and form == "module":
                weight.grad = torch.ones(3).to(device)
            if form == "module":
                with torch.no_grad():
                    values.append(net(torch.ones(3).to(device)))
            else:
                weight.grad = torch.ones(3).to(device)
                optimizer.step()
                values.append(weight.detach().clone())
            mark_step()
        return values

    check(program, num_jumps=6)


def test_an_optimizer_of_a_class_that_exec_made() -> None:
    def program(device: str, wrap: Wrap) -> list[Any]:
        space: dict[str, Any] = {"Optimizer": torch.optim.Optimizer, "no_grad": torch.no_grad}
        exec(
            "class Steps(Optimizer):\n"
            "    rate = 2.0\n"
            "    @no_grad()\n"
            "    def step(self, closure=None):\n"
            "        for p in self.param_groups[0]['params']:\n"
            "            p.sub_(p.grad * self.rate)\n",
            space,
        )
        parameter, values = nn.Parameter(torch.ones(3).to(device)), []
        optimizer = wrap(space["Steps"]([parameter], {}))
        for number in range(12):
            if number == 6:
                space["Steps"].rate = 3.0
            parameter.grad = torch.ones(3).to(device)
            optimizer.step()
            values.append(parameter.detach().clone())
            mark_step()
        return values

    check(program, num_jumps=4)
