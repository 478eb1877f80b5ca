"""What captured code reads may change between any two calls: each call is that of the code as written."""

from __future__ import annotations

import abc
import array
import functools
import gc
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from harness import assert_same, count
from torch import nn

import lazy_backend
from lazy_backend import capture
from lazy_backend.ports.cpython import names_read

SCALE: Any = 1.0
SETTINGS = types.ModuleType("settings_of_the_user")


class Kind(Enum):
    PLAIN = 1
    DOUBLE = 2


class OfClass:
    factor = inherited = 1.0


class Derived(OfClass):
    pass


class Faster(OfClass):
    factor = 3.0


class Meta(type):
    rate = 1.0


class OfMeta(metaclass=Meta):
    pass


class Weighted(list[float]):
    weight = 1.0


class Slotted:
    __slots__ = ("factor",)


@dataclass
class Inner:
    factor: float = 1.0
    sizes: tuple[int, ...] = (1, 2)
    kinds: set[int] = field(default_factory=lambda: {1})


def scaled(x: torch.Tensor, by: float = 1.0, *, more: float = 1.0) -> torch.Tensor:
    return x * by * more


def scaled_otherwise(x: torch.Tensor, by: float = 1.0, *, more: float = 1.0) -> torch.Tensor:
    return x * by * more + 1


class World:
    """All that `read` reads, and ways to change each part of it."""

    def __init__(self) -> None:
        self.number, self.kind, self.text, self.nothing = 1.0, Kind.PLAIN, "a", None
        self.inner, self.of_class, self.slotted = Inner(), OfClass(), Slotted()
        self.derived = Derived()
        self.slotted.factor = 1.0  # type: ignore[attr-defined]
        self.table, self.listed, self.queue = {"k": 1.0}, [1.0, [1.0]], deque([1.0])
        self.array, self.host = np.ones(3), torch.ones(3)
        self.weighted, self.numbers, self.bytes = Weighted(), array.array("d", [1.0]), bytearray(b"\1")
        self.hidden = {"k": 1.0}
        self.proxy, self.partial = types.MappingProxyType(self.hidden), functools.partial(float.__mul__, 1.0)
        self.helper: Any = types.FunctionType(scaled.__code__, globals(), "helper", (1.0,))
        self.helper.__kwdefaults__ = {"more": 1.0}
        self.helper.mark = 1.0
        self.variable: Any = 1.0
        self.plain = type("Plain", (), {})()
        self.plain.rate = 1.0
        SETTINGS.factor = 1.0  # type: ignore[attr-defined]

    def reader(self, with_host: bool = True) -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[Any], None]]:
        """A function that reads everything, and one that sets the variable that it closes over."""
        variable = 1.0

        def set_variable(value: Any) -> None:
            nonlocal variable
            variable = value

        def read(x: torch.Tensor, own: float = 1.0) -> torch.Tensor:
            y = x * own * OfMeta.rate * self.weighted.weight * self.numbers[0] * self.bytes[0]
            y = y * self.proxy["k"] * self.partial(1.0)
            y = y * self.helper(x) * SCALE * self.number * self.inner.factor * OfClass.factor * self.of_class.factor
            y = y * self.table["k"] * self.listed[0] * self.listed[1][0] * self.queue[0] * variable
            y = y * float(self.array[0]) * float(sum(self.inner.sizes)) * float(len(self.inner.kinds))
            y = y * SETTINGS.factor * self.derived.inherited * self.slotted.factor * self.helper.mark  # type: ignore[attr-defined]
            y = y * self.plain.rate
            if self.kind is Kind.DOUBLE or DOUBLED in sys.argv:
                y = y + y
            if self.text == "b" and self.nothing is None:
                y = y - 1
            return y * self.host.to(x.device) if with_host else y

        self.read = read
        return read, set_variable


DOUBLED = "--doubled"


def changes(world: World, set_variable: Callable[[Any], None], value: float) -> dict[str, Callable[[], Any]]:
    kind = type(world.plain)

    def find(self: Any, name: str) -> Any:
        return value if name == "rate" else object.__getattribute__(self, name)

    return {
        "a global": lambda: globals().__setitem__("SCALE", value),
        "a variable": lambda: set_variable(value),
        "an attribute": lambda: setattr(world, "number", value),
        "an enumerator": lambda: setattr(world, "kind", Kind.DOUBLE if value > 2 else Kind.PLAIN),
        "a string": lambda: setattr(world, "text", "b" if value > 2 else "a"),
        "None": lambda: setattr(world, "nothing", value if value > 2 else None),
        "an attribute of an attribute": lambda: setattr(world.inner, "factor", value),
        "an object": lambda: setattr(world, "inner", Inner(value)),
        "a tuple": lambda: setattr(world.inner, "sizes", (int(value), 2)),
        "a set": lambda: world.inner.kinds.add(int(value)),
        "a class": lambda: setattr(OfClass, "factor", value),
        "an attribute that hides one of the class": lambda: setattr(world.of_class, "factor", value),
        "another class of an object": lambda: setattr(world.of_class, "__class__", Faster if value > 2 else OfClass),
        "a class that derives": lambda: setattr(Derived, "inherited", value),
        "a slot": lambda: setattr(world.slotted, "factor", value),
        "an entry of a dict": lambda: world.table.__setitem__("k", value),
        "another dict": lambda: setattr(world, "table", {"k": value}),
        "an entry of a list": lambda: world.listed.__setitem__(0, value),
        "an entry of a list in a list": lambda: world.listed[1].__setitem__(0, value),  # type: ignore[index]
        "a deque": lambda: world.queue.__setitem__(0, value),
        "an array": lambda: world.array.__setitem__(0, value),
        "a tensor on the CPU": lambda: world.host.fill_(value),
        "another tensor on the CPU": lambda: setattr(world, "host", torch.full((3,), value)),
        "defaults": lambda: setattr(world.helper, "__defaults__", (value,)),
        "defaults of keywords": lambda: world.helper.__kwdefaults__.__setitem__("more", value),
        "code": lambda: setattr(world.helper, "__code__", (scaled_otherwise if value > 2 else scaled).__code__),
        "an attribute of a function": lambda: setattr(world.helper, "mark", value),
        "another function": lambda: setattr(world, "helper", _named(value)),
        "defaults of the function itself": lambda: setattr(world.read, "__defaults__", (value,)),
        "a metaclass": lambda: setattr(Meta, "rate", value),
        "an attribute of a list": lambda: setattr(world.weighted, "weight", value),
        "an array of numbers": lambda: world.numbers.__setitem__(0, value),
        "bytes": lambda: world.bytes.__setitem__(0, int(value)),
        "a dict behind a proxy": lambda: world.hidden.__setitem__("k", value),
        "a function within a partial": lambda: world.partial.__setstate__((float.__mul__, (value,), {}, None)),
        "an attribute of a module": lambda: setattr(SETTINGS, "factor", value),
        "a property that hides an attribute": lambda: setattr(kind, "rate", property(lambda _: value)),
        "how attributes are found": lambda: setattr(kind, "__getattribute__", find),
        "a list of Python's library": lambda: sys.argv.append(DOUBLED) if value > 2 else None,
    }


def _named(value: float) -> Any:
    made: Any = types.FunctionType(scaled.__code__, globals(), "named", (value,))
    made.__kwdefaults__, made.mark = {"more": 1.0}, 1.0
    return made


NAMES = list(changes(World(), lambda _: None, 1.0))


class ScaledSGD(torch.optim.Optimizer):
    def __init__(self, params: Any, read: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.read = read

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(self.read(parameter.grad) * group["lr"])


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    lazy_backend.config.compile = "off"
    yield
    globals()["SCALE"] = OfClass.factor = Derived.inherited = Meta.rate = 1.0
    del Derived.inherited
    sys.argv[:] = [one for one in sys.argv if one != DOUBLED]


@pytest.mark.parametrize("name", NAMES)
def test_a_captured_function_reads_what_its_code_would(name: str) -> None:
    world = World()
    read, set_variable = world.reader()
    f, x = capture(read), torch.ones(3)
    with count("CapturedCall") as replayed:
        for number in range(12):
            if number == 6:
                changes(world, set_variable, 3.0)[name]()
            assert_same(f(x.to("lazy")), read(x))
    assert replayed() >= 6  # before the change, and after two calls that ran as written


@pytest.mark.parametrize("name", [name for name in NAMES if "tensor" not in name])
def test_a_captured_module_reads_what_its_code_would(name: str) -> None:
    world = World()
    read, set_variable = world.reader(with_host=False)

    class Reads(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return read(super().forward(x))

    torch.manual_seed(0)
    plain = Reads(3, 3)
    torch.manual_seed(0)
    captured = capture(Reads(3, 3).to("lazy"))

    def step(module: nn.Module, device: str) -> list[torch.Tensor]:
        module.zero_grad()
        result = module(torch.ones(2, 3, device=device))
        result.sum().backward()
        lazy_backend.mark_step()
        return [result, *(p.grad for p in module.parameters() if p.grad is not None)]

    with count("RegionJump") as jumped:
        for number in range(14):
            if number == 7:
                changes(world, set_variable, 3.0)[name]()
            for got, wanted in zip(step(captured, "lazy"), step(plain, "cpu"), strict=True):
                torch.testing.assert_close(got.cpu(), wanted)
    assert jumped() >= 8


@pytest.mark.parametrize("name", [name for name in NAMES if "tensor" not in name])
def test_a_captured_optimizer_reads_what_its_code_would(name: str) -> None:
    world = World()
    read, set_variable = world.reader(with_host=False)
    weights = [torch.ones(3, device=device, requires_grad=True) for device in ("lazy", "cpu")]
    optimizers = [ScaledSGD([weight], read) for weight in weights]
    capture(optimizers[0])
    with count("RegionJump") as jumped:
        for number in range(14):
            if number == 7:
                changes(world, set_variable, 3.0)[name]()
            for weight, optimizer in zip(weights, optimizers, strict=True):
                weight.grad = torch.full_like(weight, 0.5)
                optimizer.step()
            lazy_backend.mark_step()
            assert_same(weights[0].detach(), weights[1].detach())
    assert jumped() >= 8


@pytest.mark.filterwarnings("ignore::lazy_backend.CaptureWarning")  # values change often
def test_an_attribute_that_comes_where_getattr_gave_one() -> None:
    class Giving:
        def __getattr__(self, name: str) -> float:
            return 2.0

    giving = Giving()

    def read(x: torch.Tensor) -> torch.Tensor:
        return x * giving.rate

    f, x = capture(read), torch.ones(3)
    with count("CapturedCall") as replayed:
        for number in range(6):
            if number == 4:
                giving.rate = 3.0
            assert_same(f(x.to("lazy")), read(x))
    assert replayed() >= 2


@pytest.mark.filterwarnings("ignore::lazy_backend.errors.CaptureWarning")  # it runs as written, and says so
def test_what_is_among_the_modules_is_read_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "of_this_test", types.SimpleNamespace(gain=2.0))  # type: ignore[misc]

    def read(x: torch.Tensor) -> torch.Tensor:
        return x * sys.modules["of_this_test"].gain

    layer = nn.Identity()

    def named_otherwise(x: torch.Tensor) -> torch.Tensor:
        return read(x) if sys.byteorder and list(layer.modules()) else x

    f, x = capture(named_otherwise), torch.ones(3)
    for number in range(6):
        if number == 4:
            monkeypatch.setitem(sys.modules, "of_this_test", types.SimpleNamespace(gain=3.0))  # type: ignore[misc]
        assert_same(f(x.to("lazy")), read(x))


# changes before many calls in a row have the function called as written for good, which is told
@pytest.mark.filterwarnings("ignore::lazy_backend.errors.CaptureWarning")
@pytest.mark.parametrize("seed", range(20))
def test_each_call_between_random_changes_is_that_of_the_code(seed: int) -> None:
    world, chance = World(), random.Random(seed)
    read, set_variable = world.reader()
    f, x = capture(read), torch.ones(3)
    with count("CapturedCall") as replayed:
        for _ in range(120):
            for _ in range(chance.choice((0, 0, 0, 0, 0, 0, 0, 0, 1, 2))):
                changed = changes(world, set_variable, float(chance.randint(1, 4)))
                changed[chance.choice(NAMES)]()
            assert_same(f(x.to("lazy")), read(x))
    assert replayed() >= 10


def test_an_equal_value_is_no_change() -> None:
    world = World()
    read, set_variable = world.reader()
    f = capture(read)
    with count("CapturedCall") as replayed:
        for number in range(12):
            set_variable(float(f"{1.0}"))
            world.inner.sizes = (1, number - number + 2)
            f(torch.ones(3, device="lazy"))
    assert replayed() == 10


def test_what_only_the_caller_names_does_not_stop_replays() -> None:
    world, seen = World(), []
    read, _ = world.reader()
    f = capture(read)
    world.step = 0  # type: ignore[attr-defined]
    with count("CapturedCall") as replayed:
        for number in range(12):
            world.step = number  # type: ignore[attr-defined]
            seen.append(f(torch.ones(3, device="lazy")))
    assert replayed() == 10


def test_a_loop_s_number_that_is_named_as_a_method_does_not_stop_replays() -> None:
    """`step` is a global of many scripts, and `optimizer.step()` no reason to look at it."""
    space: dict[str, Any] = {"torch": torch, "capture": capture, "replays": 0}
    source = """
layer = torch.nn.Linear(3, 3).to("lazy")
optimizer = torch.optim.SGD(layer.parameters(), 0.1)
@capture
def train(x):
    optimizer.zero_grad()
    loss = layer(x).sum()
    loss.backward()
    optimizer.step()
    return loss
for step in range(12):
    train(torch.ones(2, 3).to("lazy"))
"""
    with count("CapturedCall") as replayed:
        exec(source, space)
    assert replayed() >= 8


def test_what_a_body_writes_is_not_what_it_goes_by() -> None:
    ran = {"count": 0}

    def body(x: torch.Tensor) -> torch.Tensor:
        ran["count"] += 1
        return x * 2

    f = capture(body)
    with count("CapturedCall") as replayed:
        for number in range(20):
            f(torch.ones(2 + number % 2, device="lazy"))
    assert replayed() == 16
    assert ran["count"] == 4


def test_the_change_is_named() -> None:
    f = capture(lambda x: x * 2 if SCALE > 0 else x)

    def call_often() -> None:
        for number in range(40):
            globals()["SCALE"] += number > 3
            f(torch.ones(3, device="lazy"))

    with pytest.warns(lazy_backend.CaptureWarning, match="SCALE, which its code may read, is another one"):
        call_often()


def test_names_that_code_reads() -> None:
    def reads(a: Any) -> Any:
        a.written = len(a.read)
        a.called(SCALE).also_read.called_too()
        import math

        return [lambda: NAMES, math.cos(1)]

    found = names_read(reads.__code__)
    assert found == ({"len", "SCALE"}, {"read", "also_read"}, {"math"}, set(), False, set(), found.keys, set())


def test_names_that_code_only_writes() -> None:
    kept = None

    def writes(a: Any) -> Any:
        global LATEST
        nonlocal kept
        LATEST = kept = a
        own = None

        def inner() -> None:
            nonlocal own
            own = a

        inner()

    assert (names_read(writes.__code__).written, kept) == ({"LATEST", "kept"}, None)


class Special:
    """What code reads by methods that it does not name, by decorators and by strings."""

    of_class = in_static = 1.0

    def __init__(self) -> None:
        self.by_property = self.item = self.called = self.operand = self.hidden = self.by_string = 1.0

    @property
    def value(self) -> float:
        return self.by_property

    def __getitem__(self, number: int) -> float:
        return self.item

    def __call__(self) -> float:
        return self.called

    def __rmul__(self, other: Any) -> Any:
        return other * self.operand

    def __getattr__(self, name: str) -> Any:
        if name == "unknown":
            return self.__dict__["hidden"]
        raise AttributeError(name)

    @classmethod
    def from_class(cls) -> float:
        return cls.of_class

    @staticmethod
    def static() -> float:
        return Special.in_static


@pytest.mark.parametrize(
    "name",
    ["by_property", "item", "called", "operand", "hidden", "by_string", "of_class", "in_static", "decorator", "import"],
)
def test_what_is_read_by_methods_that_nobody_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = types.ModuleType("settings_that_are_imported")
    settings.factor = 1.0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, settings.__name__, settings)
    special, factors = Special(), {"decorator": 1.0}

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def decorated(x: torch.Tensor) -> torch.Tensor:
            return function(x) * factors["decorator"]  # type: ignore[no-any-return]

        return decorated

    @decorate
    def read(x: torch.Tensor) -> torch.Tensor:
        from settings_that_are_imported import factor  # type: ignore[import-not-found]

        y = x * special.value * special[0] * special() * special.unknown * factor * getattr(special, "by_" + "string")
        return y * special.from_class() * special.static() * (1.0 * special)  # type: ignore[operator]

    f, x = capture(read), torch.ones(3)
    with count("CapturedCall") as replayed:
        for number in range(12):
            if number == 6 and name == "decorator":
                factors[name] = 2.0
            elif number == 6 and name == "import":
                settings.factor = 2.0  # type: ignore[attr-defined]
            elif number == 6:
                monkeypatch.setattr(Special if name in vars(Special) else special, name, 2.0)
            assert_same(f(x.to("lazy")), read(x))
    assert replayed() >= 6


@pytest.mark.parametrize("what", ["a global", "an attribute"])
def test_a_module_that_changes_before_each_call_is_told_and_runs_as_written(what: str) -> None:
    class Scaled(nn.Linear):
        factor = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * SCALE * self.factor

    module, x = capture(Scaled(3, 3).to("lazy")), torch.ones(2, 3, device="lazy")

    def call(changes: bool = True) -> None:
        if changes and what == "a global":
            globals()["SCALE"] += 1.0
        elif changes:
            module.factor += 1.0
        expected = nn.functional.linear(x, module.weight, module.bias) * SCALE * module.factor
        with torch.no_grad():
            assert torch.equal(module(x).cpu(), expected.cpu())
        lazy_backend.mark_step()

    def call_often() -> None:
        for _ in range(60):
            call()

    with pytest.warns(lazy_backend.CaptureWarning, match="it changed before each of 8 calls: .*(SCALE|factor)"):
        call_often()
    assert lazy_backend.metrics.counter_value("RegionRecorded") <= 10
    with count("RegionJump") as jumped:
        for _ in range(20):
            call(changes=False)
    assert jumped() >= 10


def test_a_function_whose_value_changes_before_each_call_is_soon_called_as_written() -> None:
    f, x = capture(lambda x: x * 2 if SCALE > 0 else x), torch.ones(3, device="lazy")

    def call_often() -> None:
        for _ in range(60):
            globals()["SCALE"] += 1.0
            f(x)

    with pytest.warns(lazy_backend.CaptureWarning, match="changed before each call"):
        call_often()
    assert lazy_backend.metrics.counter_value("CaptureRecorded") <= 12
    with count("CapturedCall") as replayed:
        for _ in range(20):
            f(x)
    assert replayed() >= 10


Counted = abc.ABCMeta("Counted", (), {"__module__": __name__})


@pytest.mark.parametrize("base", [Counted, Sequence])
@pytest.mark.parametrize("is_users", [True, False])
def test_a_class_of_the_users_is_registered_and_one_of_a_package(base: type, is_users: bool) -> None:
    module = __name__ if is_users else "numpy.inside"
    other, asked = type("Other", (), {"__module__": module}), type("Asked", (), {})
    value = asked()
    gc.collect()  # the classes of earlier tests: a registered class that goes is a change

    @capture
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * (2.0 if isinstance(value, base) else 3.0)

    x = torch.ones(2, device="lazy")
    for _ in range(6):
        assert step(x).tolist() == [3.0, 3.0]
    base.register(other)  # type: ignore[attr-defined]
    with count("CapturedCall") as replayed:
        for _ in range(4):
            assert step(x).tolist() == [3.0, 3.0]
    assert (replayed() == 4) == (not is_users and base is Sequence)
    base.register(asked)  # type: ignore[attr-defined]
    assert step(x).tolist() == [2.0, 2.0]
