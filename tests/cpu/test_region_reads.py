"""Captured code reads what is outside of it: switches of the process, other modules and optimizers. Each call is that of
the code as written."""

from __future__ import annotations

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
