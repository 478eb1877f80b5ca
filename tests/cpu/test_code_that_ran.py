"""What the code that ran read is guarded, however the body came to it; each call between changes is compared."""

from __future__ import annotations

import sys
import textwrap
import types
from typing import Any

import pytest

from lazy_backend import capture, captures

CALLS, CHANGES_AT = 12, 5

_HEAD = """
import enum, functools, operator, statistics
from collections import namedtuple
from dataclasses import dataclass
import numpy, torch
from torch import nn
x = torch.ones(2, device=device)
gain = 1.0
"""

# Each defines `body`, with the arguments `given`, and `change`, which a call in the middle comes after.
PROGRAMS = {
    "a global that a module within a module reads": """
        class Block(nn.Module):
            def forward(self, x): return x * gain
        model = nn.Sequential(nn.Sequential(Block()))
        def body(x): return model(x)
        def change():
            global gain; gain = 5.0
    """,
    "a method of a module within": """
        class Encoder(nn.Module):
            def encode(self, x): return x * gain
        class Net(nn.Module):
            def __init__(self):
                super().__init__(); self.encoder = Encoder()
            def loss(self, x): return self.encoder.encode(x).sum()
        model = Net()
        def body(x): return model.loss(x)
        def change():
            global gain; gain = 5.0
    """,
    "an attribute of the class of a module within": """
        class Block(nn.Module):
            gain = 1.0
            def forward(self, x): return x * self.gain
        models = [nn.Sequential(Block())]
        def body(x): return models[0](x)
        def change(): Block.gain = 5.0
    """,
    "a method that is exchanged": """
        class Block(nn.Module):
            def scaled(self, x): return x * 1.0
            def forward(self, x): return self.scaled(x)
        model = nn.Sequential(Block())
        def body(x): return model(x)
        def change(): Block.scaled = lambda self, x: x * 5.0
    """,
    "a counter of a class": """
        class Block(nn.Module):
            calls = 0
            def forward(self, x):
                Block.calls += 1
                return x * float(Block.calls)
        model = nn.Sequential(Block())
        def body(x): return model(x)
        def change(): pass
    """,
    "a function that is an argument": """
        def scaled(x): return x * gain
        given = [scaled]
        def body(x, scaled): return scaled(x)
        def change():
            global gain; gain = 5.0
    """,
    "a variable of a function that is an argument": """
        def made(gain):
            def scaled(x): return x * gain
            def change():
                nonlocal gain; gain = 5.0
            return scaled, change
        scaled, change = made(1.0)
        given = [{"scaled": scaled}]
        def body(x, functions): return functions["scaled"](x)
    """,
    "an attribute of a class that is an argument": """
        class Options: gain = 1.0
        given = [Options]
        def body(x, options): return x * options.gain
        def change(): Options.gain = 5.0
    """,
    "a class method": """
        class Scaler:
            gain = 1.0
            @classmethod
            def scaled(cls, x): return x * cls.gain
        body = Scaler.scaled
        def change(): Scaler.gain = 5.0
    """,
    "what is no field of a dataclass": """
        @dataclass
        class Options:
            gain: float = 1.0
            def __post_init__(self): self.twice = 2 * self.gain
        given = [Options()]
        def body(x, options): return x * options.twice
        def change(): given[0].twice = 7.0
    """,
    "a property of a dataclass": """
        @dataclass
        class Options:
            base: float = 1.0
            @property
            def gain(self): return self.base * gain
        given = [Options()]
        def body(x, options): return x * options.gain
        def change():
            global gain; gain = 5.0
    """,
    "a method of a named tuple": """
        class Options(namedtuple("Options", "base")):
            def gain(self): return self.base * gain
        given = [Options(1.0)]
        def body(x, options): return x * options.gain()
        def change():
            global gain; gain = 5.0
    """,
    "a method of a member of an enum": """
        gains = {"TRAIN": 1.0}
        class Mode(enum.Enum):
            TRAIN = 1
            def gain(self): return gains[self.name]
        given = [Mode.TRAIN]
        def body(x, mode): return x * mode.gain()
        def change(): gains["TRAIN"] = 5.0
    """,
    "an attribute of a member of an enum": """
        class Mode(enum.Enum): TRAIN = 1
        Mode.TRAIN.gain = 1.0
        options = {"mode": Mode.TRAIN}
        def body(x): return x * options["mode"].gain
        def change(): Mode.TRAIN.gain = 5.0
    """,
    "a global that a hook reads": """
        model = nn.Identity()
        model.register_forward_hook(lambda module, args, result: result * gain)
        def body(x): return model(x)
        def change():
            global gain; gain = 5.0
    """,
    "an attribute of an object that is a hook": """
        class Hook:
            gain = 1.0
            def __call__(self, module, args, result): return result * self.gain
        hook = Hook()
        model = nn.Identity()
        model.register_forward_hook(hook)
        def body(x): return model(x)
        def change(): hook.gain = 5.0
    """,
    "an object whose method is a hook of a tensor": """
        class Hook:
            def __init__(self): self.gain = 1.0
            def scaled(self, grad): return grad * self.gain
        hook, weight = Hook(), torch.ones(2, device=device, requires_grad=True)
        weight.register_hook(hook.scaled)
        def body(x):
            weight.grad = None
            (weight * x).sum().backward()
            return weight.grad.clone()
        def change(): hook.gain = 5.0
    """,
    "an object whose method is a hook of all modules": """
        class Hook:
            def __init__(self): self.gain = 1.0
            def scaled(self, module, args, result): return result * self.gain
        hook, model = Hook(), nn.Identity()
        handle = nn.modules.module.register_module_forward_hook(hook.scaled)
        def body(x): return model(x)
        def change(): hook.gain = 5.0
        def restore(): handle.remove()
    """,
    "a function of a factory that the body calls, too": """
        def scaled_by(options): return lambda grad: grad * options["gain"]
        options, weight = {"gain": 1.0}, torch.ones(2, device=device, requires_grad=True)
        weight.register_hook(scaled_by(options))
        def body(x):
            weight.grad = None
            scaled = weight * x
            scaled.register_hook(scaled_by({"gain": 2.0}))
            scaled.sum().backward()
            return weight.grad.clone()
        def change(): options["gain"] = 5.0
    """,
    "a body that recurs without end": """
        def deeper(x): return deeper(x) + 1
        def body(x):
            try: return deeper(x)
            except RecursionError: return x * gain
        def change():
            global gain; gain = 5.0
    """,
    "a bound method of a dict": """
        gains = {"gain": 1.0}
        gain_of = gains.get
        def body(x): return x * gain_of("gain")
        def change(): gains["gain"] = 5.0
    """,
    "an object that is a key": """
        class Part: gain = 1.0
        part = Part()
        parts = {part: 2.0}
        def body(x): return sum(x * one.gain * weight for one, weight in parts.items())
        def change(): part.gain = 5.0
    """,
    "another object in a set": """
        class Part:
            def __init__(self, gain): self.gain = gain
        parts = {Part(1.0)}
        def body(x): return sum(x * one.gain for one in parts)
        def change(): parts.clear(); parts.add(Part(5.0))
    """,
    "an array of a class of the user's": """
        class Gains(numpy.ndarray): pass
        gains = numpy.ones(2).view(Gains)
        def body(x): return x * float(gains[0])
        def change(): gains[0] = 5.0
    """,
    "a function of PyTorch that is named through two modules": """
        kept = nn.functional.relu
        def body(x): return nn.functional.relu(x)
        def change(): nn.functional.relu = lambda x: x * 5.0
        def restore(): nn.functional.relu = kept
    """,
    "a format string that reads attributes": """
        class Options: gain = 1.0
        options = Options()
        def body(x): return x * float("{0.gain}".format(options))
        def change(): options.gain = 5.0
    """,
    "getattr by another name": """
        read, name = getattr, "ga" + "in"
        class Options: gain = 1.0
        options = Options()
        def body(x): return x * read(options, name)
        def change(): options.gain = 5.0
    """,
    "a function in the groups of an optimizer": """
        weight = nn.Parameter(torch.ones(2, device=device))
        class Scaled(torch.optim.SGD):
            def step(self):
                for group in self.param_groups:
                    for one in group["params"]:
                        one.grad = group["gain"](one.grad)
                super().step()
        optimizer = Scaled([weight], lr=0.1)
        optimizer.param_groups[0]["gain"] = lambda grad: grad * gain
        def body(x):
            optimizer.zero_grad()
            (weight * x).sum().backward()
            optimizer.step()
            return weight.detach().clone()
        def change():
            global gain; gain = 5.0
    """,
    "a number whose type makes another": """
        given = [0.5]
        def body(x, rate): return x * statistics.mean([rate, 1.0]) * type(rate)(2)
        def change(): given[0] = 1.5
    """,
    "a transform around": """
        def body(x): return x ** 2 * gain
        def called(x): return torch.func.grad(lambda x: body(x).sum())(x)
        def change():
            global gain; gain = 5.0
    """,
    "an attribute that was left out until getattr reads it": """
        class Options: pass
        options, given = Options(), [False]
        def body(x, on): return x * getattr(options, "gain") if on else x + 1
        def before(number): options.gain = float(min(number, 3))
        def change(): given[0] = True; globals().__setitem__("before", later)
        def later(number): options.gain = 7.0 if number < 10 else 9.0
    """,
    "a function that getattr comes to by a constant": """
        def scaled(x): return x * gain
        class Options: pass
        options = Options(); options.scaled = scaled
        def body(x): return getattr(options, "scaled")(x)
        def change():
            global gain; gain = 5.0
    """,
    "an object that getattr comes to by a constant": """
        class Options: pass
        options = Options(); options.inner = Options(); options.inner.gain = 1.0
        def body(x): return x * getattr(options, "inner").gain
        def change(): options.inner.gain = 5.0
    """,
    "an object that a format string comes to": """
        class Options: pass
        options = Options(); options.inner = Options(); options.inner.gain = 1.0
        def body(x): return x * float("{0.inner.gain}".format(options))
        def change(): options.inner.gain = 5.0
    """,
    "a function among the attributes of a tensor": """
        def scaled(x): return x * gain
        x.scaled = scaled
        def body(x): return x.scaled(x)
        def change():
            global gain; gain = 5.0
    """,
}


def results(text: str, device: str, wrap: Any) -> list[Any]:
    module: Any = types.ModuleType(f"program_{device}")
    module.device, module.given = device, []
    sys.modules[module.__name__] = module
    try:
        exec(_HEAD + textwrap.dedent(text), vars(module))
        module.body = wrap(module.body)
        found = []
        for number in range(CALLS):
            if number == CHANGES_AT:
                module.change()
            getattr(module, "before", lambda number: None)(number)
            found.append(getattr(module, "called", module.body)(module.x, *module.given).tolist())
        return found
    finally:
        getattr(module, "restore", lambda: None)()
        del sys.modules[module.__name__]


@pytest.mark.filterwarnings("ignore::lazy_backend.CaptureWarning")
@pytest.mark.parametrize("name", PROGRAMS)
def test_each_call_computes_what_the_function_does(name: str) -> None:
    assert results(PROGRAMS[name], "lazy", capture) == results(PROGRAMS[name], "cpu", lambda one: one)


def test_what_ran_keeps_no_call_from_being_replayed() -> None:
    """Functions and classes that the body makes at each call, and helpers of its own, are no change."""

    class Helper:
        gain = 2.0

        def scaled(self, x: Any) -> Any:
            return x * self.gain

    helper = Helper()

    def body(x: Any, rate: float = 1.0) -> Any:
        def closes_over(y: Any) -> Any:
            return (x + y) * rate - x * rate

        class Local:
            gain = 3.0

            def scaled(self, x: Any) -> Any:
                return x * self.gain

        def recurs(x: Any, depth: int) -> Any:
            return x if depth == 0 else recurs(x + 1, depth - 1)

        return recurs(Local().scaled(closes_over(helper.scaled(x))), 3) + sum(one * x for one in (1.0, 2.0))

    captured = capture(body)
    found = results("def body(x): return function(x)\ndef change(): pass", "lazy", lambda one: captured)
    assert found == [[12.0, 12.0]] * CALLS
    (row,) = (row for row in captures() if row["name"] == body.__qualname__)
    assert row["replays"] >= CALLS - 3, row
