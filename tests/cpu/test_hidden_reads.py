"""Whatever captured code reads without being given it, in each way that the random programs know: each call is eager's.

For each expression, every change is made in turn, with calls between. What captured code is may not matter: a function
that is captured, and a module that calls one.
"""

from __future__ import annotations

import builtins
import decimal
import gc
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from harness import assert_same
from random_reads import all_reads, names
from torch import nn

import lazy_backend
from lazy_backend import capture

# Calls before the first change, enough to be replayed, and after each.
FIRST, AFTER = 4, 3
READS = [(setup, value, changes) for setup, values, changes in all_reads() for value in values]

pytestmark = pytest.mark.filterwarnings("ignore::lazy_backend.CaptureWarning")  # many cannot be replayed, and say so


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    lazy_backend.config.compile = "off"
    yield
    decimal.setcontext(decimal.Context())
    for name in ("RANDOM_BUILTIN", "RANDOM_ABSENT"):
        if hasattr(builtins, name):
            delattr(builtins, name)
    made = ("random_program_", "random_package", "random_absent")
    for name in [name for name in sys.modules if name.startswith(made)]:
        del sys.modules[name]


class Program:
    """A module of Python's with the values, a function that reads one, and the changes."""

    def __init__(self, setup: str, value: str, changes: tuple[str, ...]) -> None:
        module = types.ModuleType(f"random_program_{id(self)}")
        sys.modules[module.__name__] = module  # where dataclasses look for it
        self.space = vars(module)
        self.space |= {"torch": torch, "NOW": 1} | names()
        exec(compile(setup + f"\ndef read(x): return x * ({value})\n", "<program>", "exec"), self.space)
        self._changes = changes

    def change(self, number: int) -> None:
        self.space["NOW"] = number + 2
        with suppress(Exception):  # some need others before
            exec(compile(self._changes[number], "<program>", "exec"), self.space)

    def result(self, call: Callable[[torch.Tensor], torch.Tensor], device: str) -> Any:
        try:
            return call(torch.tensor([1.0, 2.0], device=device)).cpu()
        except lazy_backend.LazyBackendError:
            raise
        except Exception as error:  # the program's own
            return type(error)


def as_module(read: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    space = types.ModuleType("of_a_module")
    space.read = read  # type: ignore[attr-defined]

    class Reads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return space.read(x)  # type: ignore[no-any-return]

    return capture(Reads())


@pytest.mark.parametrize("captured", [capture, as_module], ids=["function", "module"])
@pytest.mark.parametrize(("setup", "value", "changes"), READS, ids=[value for _, value, _ in READS])
def test_each_call_reads_what_is_there(
    setup: str, value: str, changes: tuple[str, ...], captured: Callable[[Any], Any]
) -> None:
    gc.collect()
    programs = [Program(setup, value, changes) for _ in range(2)]
    plain, lazy = programs[0].space["read"], captured(programs[1].space["read"])

    def compare(after: str) -> None:
        wanted, got = programs[0].result(plain, "cpu"), programs[1].result(lazy, "lazy")
        lazy_backend.mark_step()
        if isinstance(wanted, type) or isinstance(got, type):
            assert isinstance(wanted, type), after
            assert isinstance(got, type), after
        else:
            assert_same(got, wanted)

    for _ in range(FIRST):
        compare("at first")
    for number, _ in itertools.product(range(len(changes)), range(AFTER)):
        if not _:
            for program in programs:
                program.change(number)
        compare(changes[number])


def of_tensors(device: str) -> dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], list[Callable[[], Any]]]]:
    """Reads of what tensors say besides their values, each with changes."""
    tensor, leaf = torch.ones(2, device=device), torch.ones(2, device=device, requires_grad=True)
    several = [tensor]
    tensor.scale = 2.0  # type: ignore[attr-defined]

    def append() -> None:
        several.append(tensor)

    def set_scale(value: float) -> None:
        tensor.scale = value  # type: ignore[attr-defined]

    def set_grad(value: torch.Tensor | None) -> None:
        leaf.grad = value

    return {
        "how many": (lambda x: x * len(several), [append, several.pop]),
        "an attribute": (lambda x: x * tensor * tensor.scale, [lambda: set_scale(3.0), lambda: set_scale(0.5)]),  # type: ignore[attr-defined]
        "whether it requires gradients": (
            lambda x: x * (2.0 if tensor.requires_grad else 0.5),
            [tensor.requires_grad_, lambda: tensor.requires_grad_(False)],
        ),
        "whether it has a gradient": (
            lambda x: x * (2.0 if leaf.grad is None else 0.5),
            [lambda: set_grad(torch.ones(2, device=device)), lambda: set_grad(None)],
        ),
        "an attribute of an argument": (lambda x: x * getattr(x, "scale", 2.0), []),
    }


@pytest.mark.parametrize("captured", [capture, as_module], ids=["function", "module"])
@pytest.mark.parametrize("name", list(of_tensors("cpu")))
def test_each_call_asks_tensors_anew(name: str, captured: Callable[[Any], Any]) -> None:
    (plain, changes), (written, others) = of_tensors("cpu")[name], of_tensors("lazy")[name]
    lazy = captured(written)
    for number in range(FIRST + AFTER * 4):
        if number >= FIRST and number % AFTER == 0 and changes:
            for change in (changes, others):
                change[number // AFTER % 2]()
        given = [torch.tensor([1.0, 2.0], device=device) for device in ("cpu", "lazy")]
        if name == "an attribute of an argument" and number >= FIRST:
            for one in given:
                one.scale = float(number // 5)  # type: ignore[attr-defined]
        assert_same(lazy(given[1]).detach(), plain(given[0]).detach())
        lazy_backend.mark_step()
