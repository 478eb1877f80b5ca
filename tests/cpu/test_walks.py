"""What captures walk: they run no code of the user's, and do not grow with the process."""

from __future__ import annotations

import enum
import functools
import gc
import logging
import random
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness import assert_same
from torch import nn

import lazy_backend
from lazy_backend import capture, mark_step
from lazy_backend.regions import named_by_code
from lazy_backend.replay.reachable import Reachable
from lazy_backend.replay.structure import Structure

pytestmark = pytest.mark.filterwarnings("ignore::lazy_backend.CaptureWarning")

# ----- objects that must be left alone

_is_armed = False
_touched: list[str] = []

_METHODS = (
    "__len__", "__bool__", "__eq__", "__hash__", "__iter__", "__contains__", "__getitem__", "__repr__", "__copy__",
    "__deepcopy__", "__reduce_ex__", "keys", "values", "items",
)  # fmt: skip


def _trapped(name: str, original: Any) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        if _is_armed:
            _touched.append(name)
            raise AssertionError(f"{name} was called")
        return original(self, *args)

    return method


def trapped(base: type, names: tuple[str, ...] = _METHODS) -> type:
    """A class that derives from `base`, and whose methods raise once they are armed."""
    return type(
        f"Trapped{base.__name__}", (base,), {n: _trapped(n, getattr(base, n)) for n in names if hasattr(base, n)}
    )


class Opaque:
    """Attributes, properties and the class itself are computed."""

    def __init__(self) -> None:
        object.__setattr__(self, "number", 1)

    def __getattribute__(self, name: str) -> Any:
        if _is_armed:
            _touched.append(name)
            raise AssertionError(f"{name} was read")
        return object.__getattribute__(self, name)

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise AssertionError("__dict__ was read")


class Slotted:
    __slots__ = ("__hidden", "shown")

    def __init__(self) -> None:
        self.shown = 1

    __getattribute__ = Opaque.__getattribute__


class Meta(type):
    """Classes that cannot be hashed, compared or asked for their name."""

    def __eq__(cls, other: object) -> bool:
        raise AssertionError("a class was compared")

    __hash__ = None  # type: ignore[assignment]

    def __getattribute__(cls, name: str) -> Any:
        if _is_armed:
            _touched.append(name)
            raise AssertionError(f"{name} of a class was read")
        return type.__getattribute__(cls, name)

    def __instancecheck__(cls, instance: object) -> bool:
        raise AssertionError("isinstance was asked")


class OfMeta(metaclass=Meta):
    def __init__(self) -> None:
        self.number = 1


class Colour(enum.Enum):
    RED = 1

    __repr__ = _trapped("__repr__", enum.Enum.__repr__)  # type: ignore[assignment]
    __hash__ = _trapped("__hash__", enum.Enum.__hash__)  # type: ignore[assignment]
    __eq__ = _trapped("__eq__", object.__eq__)  # type: ignore[assignment]


class Package(types.ModuleType):
    def __getattribute__(self, name: str) -> Any:
        if _is_armed:
            raise AssertionError(f"{name} of a module was read")
        return super().__getattribute__(name)


HOSTILE: dict[str, Callable[[], Any]] = {
    "a tuple": lambda: trapped(tuple)((1, -1)),
    "a list": lambda: trapped(list)([1, [2]]),
    "a dict": lambda: trapped(dict)(a=1),
    "an ordered dict": lambda: trapped(OrderedDict)(a=1),
    "a set": lambda: trapped(set)({1, 2}),
    "a frozen set": lambda: trapped(frozenset)({1, 2}),
    "a deque": lambda: trapped(deque)([1, 2]),
    "a string": lambda: trapped(str)("a"),
    "a float": lambda: trapped(float, (*_METHODS, "__float__"))(1.5),
    "a key": lambda: {trapped(object)(): 1, (trapped(object)(), 2): 3},
    "an enumeration": lambda: [Colour.RED, {Colour.RED: 1}],
    "an object": Opaque,
    "slots": Slotted,
    "a metaclass": OfMeta,
    "a class of a metaclass": lambda: OfMeta,
    "a module": lambda: Package("package"),
    "a partial": lambda: trapped(functools.partial, ("__getattribute__", "__call__"))(len),
    "a source of random numbers": random.SystemRandom,
    "a generator": lambda: (i for i in range(3)),
}


@pytest.fixture
def armed() -> Iterator[Callable[[], None]]:
    """Lets hostile objects raise from when it is called until the test has ended."""

    def arm() -> None:
        global _is_armed
        _is_armed = True
        _touched.clear()
        gc.disable()  # else what other tests left is freed meanwhile

    yield arm
    global _is_armed
    _is_armed = False
    gc.enable()


NAMED: Any = None


class Holding(nn.Module):
    """Holds an object in many places, and computes without it."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.itself, self.listed, self.in_a_tuple = held, [held], (1, (held,))
        self.by_name = {"held": held}
        self.configuration = types.SimpleNamespace(held=held, number=1)
        self.closure = lambda: held
        self.linear.inner = held

    def forward(self, x: torch.Tensor, given: Any = None) -> Any:
        if x.dim() > 9:
            return NAMED, self.closure()
        return self.linear(x).tanh()


def _train(model: nn.Module, device: str, **given: Any) -> list[torch.Tensor]:
    losses = []
    for number in range(8):
        x = torch.linspace(-1, number, 6).reshape(2, 3).to(device)
        loss = model(x, **given).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in (model.linear.weight, model.linear.bias):  # type: ignore[union-attr]
                parameter.sub_(0.1 * parameter.grad)
                parameter.grad = None
        losses.append(loss.detach())
        if device == "lazy":
            mark_step()
    return losses


@pytest.mark.parametrize("where", ["module", "argument", "global"])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_captured_module_leaves_the_users_objects_alone(
    name: str, where: str, armed: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    real = Holding(None)
    held = HOSTILE[name]()
    lazy = Holding(held if where == "module" else None)
    lazy.load_state_dict(real.state_dict())
    lazy = capture(lazy.to("lazy"))
    monkeypatch.setattr(sys.modules[__name__], "NAMED", held if where == "global" else None)
    if (where == "argument" and "metaclass" not in name) or where != "argument":  # which PyTorch's trees hash
        armed()
    losses = _train(lazy, "lazy", **({"given": held} if where == "argument" else {}))
    assert _touched == []
    assert_same(losses, _train(real, "cpu"))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_captured_function_leaves_the_users_objects_alone(
    name: str, armed: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    held = HOSTILE[name]()
    real = Holding(None)
    model = Holding(held)
    model.load_state_dict(real.state_dict())
    model.to("lazy")
    monkeypatch.setattr(sys.modules[__name__], "NAMED", held)

    def step(x: torch.Tensor) -> torch.Tensor:
        if x.dim() > 9:
            return NAMED, held  # type: ignore[return-value]
        return model(x).square().mean()

    captured = capture(step)
    armed()
    xs = [torch.linspace(-1, number, 6).reshape(2, 3) for number in range(5)]
    found = [captured(x.to("lazy")) for x in xs]
    assert _touched == []
    assert_same(found, [real(x).square().mean().detach() for x in xs])


@pytest.mark.parametrize("name", HOSTILE)
def test_a_captured_optimizer_leaves_the_users_objects_alone(name: str, armed: Callable[[], None]) -> None:
    torch.manual_seed(0)
    found = []
    for device in ("cpu", "lazy"):
        parameter = nn.Parameter(torch.ones(3).to(device))
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        if device == "lazy":
            held = HOSTILE[name]()
            optimizer.held = [held]  # type: ignore[attr-defined]
            optimizer.param_groups[0]["held"] = held
            optimizer.param_groups[0]["listed"] = [held]
            optimizer.state[parameter]["held"] = held
            capture(optimizer)
            armed()
        for number in range(6):
            parameter.grad = torch.full((3,), float(number)).to(device)
            optimizer.step()
            if device == "lazy":
                mark_step()
        found.append(parameter.detach())
    assert _touched == []
    assert_same(found[1], found[0])


def test_containers_of_the_users_classes_are_still_compared() -> None:
    model = Holding(trapped(list)([1, 2]))
    before = Structure([model])
    list.append(model.itself, 3)
    assert "itself[2] was added" in before.difference(Structure([model]))


# ----- walks do not grow with the process

logger = logging.getLogger(__name__)
package = types.ModuleType("package")
registry: dict[str, Any] = {}
alive: weakref.WeakSet[Any] = weakref.WeakSet()


class Registered:
    classes: dict[int, type] = {}


@functools.cache
def cached(number: int) -> list[int]:
    return [number]


class Naming(nn.Module):
    """Names what is shared by the whole process."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.logger, self.alive = logging.getLogger("its own"), alive

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() > 9:
            logger.warning("%s", (package.first, registry, alive, Registered.classes, cached(1), sys.modules))
        return self.linear(x).tanh()


@pytest.fixture
def grow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    kept: list[Any] = []
    known = logging.Logger.manager.loggerDict
    for holder, name, value in (
        (logging.Logger.manager, "loggerDict", dict(known)),
        (sys.modules[__name__], "registry", {}),
        (Registered, "classes", {}),
    ):
        monkeypatch.setattr(holder, name, value)

    def grow(count: int) -> None:
        for number in range(count):
            logging.getLogger(f"others.of.{number}")
            module = types.ModuleType(f"others_{number}")
            monkeypatch.setitem(sys.modules, module.__name__, module)
            setattr(package, f"name_{number}", module)
            monkeypatch.setitem(globals(), f"global_{number}", module)
            registry[f"name_{number}"] = module
            cached(number)
        kinds = [type(f"Kind{number}", (), {}) for number in range(count // 10)]  # a class takes long
        kept.extend(kinds)
        Registered.classes.update(enumerate(kinds))
        alive.update(kinds)

    package.first = 1  # type: ignore[attr-defined]
    yield grow
    alive.clear()
    cached.cache_clear()
    vars(package).clear()


def test_walks_do_not_grow_with_the_process(grow: Callable[[int], None]) -> None:
    model = Naming()

    def work() -> dict[str, int]:
        sources = Reachable([model], largest=named_by_code._LARGEST_CONTAINER)
        return {"sources": sources.count, "structure": len(Structure([model]).entries)}

    grow(1000)
    before = work()
    grow(10_000)
    assert work() == before
    assert before["sources"] < 1000


def test_walks_from_a_function_do_not_follow_loggers_modules_or_globals(grow: Callable[[int], None]) -> None:
    def step(x: torch.Tensor) -> Any:
        logger.warning("%s", (package.first, alive, sys.modules))
        return x

    grow(1000)
    before = Reachable([step]).count
    grow(10_000)
    assert Reachable([step]).count == before


# ----- calls as written


def test_a_call_as_written_walks_no_code_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Reachable] = []

    class Counted(Reachable):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            found.append(self)
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(named_by_code, "Reachable", Counted)
    model = capture(Naming().to("lazy"))
    for number in range(12):  # each of another shape: none is replayed
        model(torch.ones(number + 1, 3, device="lazy")).sum().backward()
        mark_step()
    assert len(found) == 2  # once more after the first call, whose code names more


DRAWN: Any = None


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if DRAWN is not None and DRAWN.random() < 2:
            x = x * 2
        return self.linear(x)


@pytest.mark.parametrize("first", [None, random.Random(0)], ids=["none before", "another before"])
def test_a_source_of_random_numbers_that_comes_later_is_found(first: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "DRAWN", first)
    model = capture(Drawing().to("lazy"))
    model(torch.ones(1, 3, device="lazy")).sum().backward()
    mark_step()
    for number in range(6):
        monkeypatch.setattr(sys.modules[__name__], "DRAWN", random.Random(number))
        model(torch.ones(2, 3, device="lazy")).sum().backward()
        mark_step()
    assert lazy_backend.metrics.counter_value("RegionJump") in (None, 0)
