"""A captured body that reads what no guard can follow runs as written, at each call, and the reason is told.

Each reads a value that stays the same for the first calls, when it would be replayed, and then changes.
"""

from __future__ import annotations

import contextlib
import contextvars
import cProfile
import itertools
import logging
import os
import random
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lazy_backend
from lazy_backend import CaptureWarning, capture, captures

# Calls that read the same value, and calls in all.
STILL, CALLS = 6, 10


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    lazy_backend.config.compile = "off"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        yield


class World:
    """What bodies read. `set`: what changes between calls."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "value"
        self.folder = folder / "many"
        self.saved = folder / "saved"
        self.folder.mkdir()
        self.of_thread = threading.local()
        self.of_context: contextvars.ContextVar[float] = contextvars.ContextVar("value")
        self.table = dict.fromkeys(range(2000), 0.0)
        self.long = [0.0] * 2000
        self.array = np.zeros(10_000)
        self.values = {"value": 0.0}
        self.referent = threading.Event()  # any object with attributes
        self.reference = weakref.ref(self.referent)
        self.seeds = torch.Generator()
        self.set(1.0)
        # an iterator's values come from itself
        self.iterator = iter([1.0] * STILL + [float(number) for number in range(STILL, CALLS)])
        self.generator = (max(1.0, float(n - STILL)) for n in itertools.count(1))

    def set(self, value: float) -> None:
        os.environ["LAZY_TEST_VALUE"] = str(value)
        self.file.write_text(str(value))
        (self.folder / f"{value}").touch()
        torch.save({"value": value, "tensor": torch.tensor(value)}, self.saved)
        self.of_thread.value = value
        self.of_context.set(value)
        self.table[1500] = self.long[1500] = self.array[9000] = value
        self.values["value"] = value
        torch.manual_seed(int(value))
        random.seed(value)
        self.seeds.manual_seed(int(value))
        self.referent.value = value  # type: ignore[attr-defined]


def of_library(name: str) -> float:
    return float(os.path.expandvars(name))


# What a body reads, by the text that the reason has.
READS: dict[str, Callable[[World], float]] = {
    "os.environ": lambda world: float(os.environ["LAZY_TEST_VALUE"]),
    "os.environ ": lambda world: float(os.getenv("LAZY_TEST_VALUE", "0")),
    "os.environ  ": lambda world: of_library("$LAZY_TEST_VALUE"),
    "io.open()": lambda world: float(Path(world.file).read_text()),
    "os.listdir()": lambda world: float(len(os.listdir(world.folder))),
    "os.stat()": lambda world: float(os.path.getsize(world.file)),
    "thread-local values of of_thread": lambda world: float(world.of_thread.value),
    "the weak reference reference": lambda world: world.reference().value,  # type: ignore[union-attr]
    "ContextVar.get()": lambda world: world.of_context.get(),
    "eval()": lambda world: float(eval("world.values['value']")),
    "table, which has more than 1,000 entries": lambda world: world.table[1500],
    "long, which has more than 1,000 entries": lambda world: world.long[1500],
    "the array array": lambda world: float(world.array[9000]),
    "the iterator iterator": lambda world: next(world.iterator),
    "the iterator generator": lambda world: next(world.generator),
    "torch.from_file()": lambda world: float(torch.from_file(str(world.file), size=3, dtype=torch.uint8)[0].item()),
    "torch.initial_seed()": lambda world: float(torch.initial_seed()),
    "torch.get_rng_state()": lambda world: float(torch.get_rng_state().sum().item() % 97),
    "torch.Generator.initial_seed()": lambda world: float(world.seeds.initial_seed()),
    "torch.Generator.get_state()": lambda world: float(world.seeds.get_state().sum().item() % 97),
    "random.getstate()": lambda world: float(sum(random.getstate()[1]) % 97),
    "time.time()": lambda world: float(time.time() > 0) * world.values["value"],
}


class Scaled(nn.Module):
    def __init__(self, scale: Callable[[], float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * self.scale()


def losses(device: str, world: World, read: Callable[[World], float], kind: str) -> tuple[list[float], dict[str, Any]]:
    """What a loop with a body that reads computes, at each call; and the account of the captured object."""
    wrap: Any = (lambda one: one) if device == "cpu" else capture
    module: Any = Scaled(lambda: read(world)).to(device)
    called = wrap(module) if kind == "module" else module

    def step(x: torch.Tensor) -> torch.Tensor:
        module.zero_grad()
        loss = called(x).sum()
        loss.backward()
        return loss.detach()

    run = wrap(step) if kind == "function" else step
    found = []
    for number in range(CALLS):
        world.set(1.0 if number < STILL else float(number))
        found.append(run(torch.ones(3, device=device)))
        found.append(module.weight.grad[0].clone())
        if device != "cpu":
            lazy_backend.mark_step()
    return [one.item() for one in found], (captures() or [{}])[-1]


@pytest.mark.parametrize("kind", ["function", "module"])
@pytest.mark.parametrize("text", READS, ids=lambda text: text.replace(" ", "_"))
def test_each_call_computes_what_the_loop_as_written_does(text: str, kind: str, tmp_path: Path) -> None:
    expected, _ = losses("cpu", World(_made(tmp_path / "cpu")), READS[text], kind)
    found, row = losses("lazy", World(_made(tmp_path / "lazy")), READS[text], kind)
    assert found == expected
    assert row["replays"] == 0
    assert any(text.strip() in reason for reason in row["as_written"]), row


@pytest.mark.parametrize("kind", ["function", "module"])
@pytest.mark.parametrize("entry", ["value", "tensor"])
def test_what_torch_load_gives_is_read_at_each_call(entry: str, kind: str, tmp_path: Path) -> None:
    def read(world: World) -> float:
        return float(torch.load(world.saved)[entry])

    expected, _ = losses("cpu", World(_made(tmp_path / "cpu")), read, kind)
    found, row = losses("lazy", World(_made(tmp_path / "lazy")), read, kind)
    assert found == expected
    assert row["replays"] == 0


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _replays(body: Callable[[torch.Tensor], Any]) -> int:
    captured = capture(body)
    for _ in range(6):
        captured(torch.ones(3, device="lazy"))
    (row,) = (row for row in captures() if row["name"] == body.__qualname__)
    return int(row["replays"])


def test_messages_and_what_pytorch_reads_by_itself_keep_no_call_from_being_replayed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).to("lazy")
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        logging.getLogger(__name__).warning("a step")  # asks for the time, and for the process
        print("a step")
        with contextlib.suppress(ValueError):
            loss = model(x.view(1, 3, 1).expand(2, 3, 8)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    assert _replays(step) >= 3


def test_globals_of_a_package_whose_decorator_wraps_a_function_are_its_own() -> None:
    # as `torch.compile` makes its wrapper, whose module names thread-local values
    source = "def wrapper(x): return written(x) * (1.0 if of_thread else 2.0)"
    package = {"__name__": "torch._dynamo.eval_frame", "of_thread": threading.local(), "written": torch.sin}
    exec(source, package)
    wrapper = package["wrapper"]
    wrapper.__module__ = __name__
    assert _replays(lambda x: wrapper(x) + 1) >= 3


def test_a_module_within_a_captured_module_is_seen_too(tmp_path: Path) -> None:
    world = World(tmp_path)
    inner = capture(Scaled(lambda: float(os.environ["LAZY_TEST_VALUE"])).to("lazy"))
    outer = capture(nn.Sequential(nn.Linear(3, 3), inner).to("lazy"))
    for number in range(CALLS):
        world.set(1.0 if number < STILL else float(number))
        outer(torch.ones(3, device="lazy")).sum().backward()
        lazy_backend.mark_step()
    rows = captures()[-2:]
    assert [row["replays"] for row in rows] == [0, 0]
    assert all("os.environ" in "".join(row["as_written"]) for row in rows)


def test_an_optimizer_that_reads_runs_as_written(tmp_path: Path) -> None:
    world = World(tmp_path)

    class Reading(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            scale = float(os.environ["LAZY_TEST_VALUE"])
            with torch.no_grad():
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.add_(parameter.grad, alpha=-0.5 * scale)

    ends = []
    for device in ("cpu", "lazy"):
        weight = torch.ones(3, device=device, requires_grad=True)
        optimizer = Reading([weight], lr=0.1)
        if device == "lazy":
            capture(optimizer)
        for number in range(CALLS):
            world.set(1.0 if number < STILL else float(number))
            weight.grad = torch.full((3,), 0.125, device=device)
            optimizer.step()
            if device == "lazy":
                lazy_backend.mark_step()
        ends.append(weight.tolist())
    assert ends[0] == ends[1]
    assert captures()[-1]["replays"] == 0


def test_a_profiler_of_the_program_stays() -> None:
    seen: list[str] = []
    profile = cProfile.Profile()
    before = sys.getprofile()  # of coverage, say
    try:
        sys.setprofile(lambda frame, event, function: seen.append(event))
        mine = sys.getprofile()
        assert _replays(lambda x: x * 2) >= 3
        assert sys.getprofile() is mine
    finally:
        sys.setprofile(before)
    profile.enable()
    assert _replays(lambda x: x * 3) >= 3
    profile.disable()
    assert seen
    assert profile.getstats()


def test_reads_are_seen_under_a_profiler() -> None:
    seen: list[str] = []
    profile = cProfile.Profile()
    before = sys.getprofile()
    for start, stop in (
        (profile.enable, profile.disable),
        (lambda: sys.setprofile(lambda frame, *_: seen.append(frame.f_code.co_name)), lambda: sys.setprofile(before)),
    ):
        captured = capture(lambda x: x * float(os.environ["LAZY_TEST_VALUE"]))
        for number in range(9):
            os.environ["LAZY_TEST_VALUE"] = str(number // 4)
            start()
            try:
                result = captured(torch.ones(3, device="lazy"))
            finally:
                stop()
            assert result.tolist() == [number // 4] * 3
        assert any("os.environ" in reason for reason in captures()[-1]["as_written"])
    assert "encode" in seen


class Opaque:
    """What a profiler in C, as that of pyinstrument, leaves as `sys.getprofile()`."""


def test_under_a_profiler_that_cannot_be_shared_calls_run_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = capture(lambda x: x * float(os.environ["LAZY_TEST_VALUE"]))
    with monkeypatch.context() as patches:
        patches.setattr(sys, "getprofile", Opaque)
        for number in range(9):
            os.environ["LAZY_TEST_VALUE"] = str(number // 4)
            assert captured(torch.ones(3, device="lazy")).tolist() == [number // 4] * 3
        assert any("a profiler of this thread" in reason for reason in captures()[-1]["as_written"])
    del captured
    assert _replays(lambda x: x * 2) >= 3


def test_an_error_in_a_body_leaves_no_profiler() -> None:
    before = sys.getprofile()

    @capture
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("here")

    with pytest.raises(ValueError, match="here"):
        fails(torch.ones(3, device="lazy"))
    assert sys.getprofile() is before


def test_random_numbers_of_a_queue_that_the_body_makes_are_its_own() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        waiting = deque([x, x + 1])
        total = waiting.popleft()
        for one in iter(list(waiting)):
            total = total + one
        return total * next(iter([2.0]))

    assert _replays(body) >= 3


class Trainer:
    """A loop as many write it: a method takes the next batch, and hands it to the one that is captured."""

    def __init__(self, captures_model: bool) -> None:
        torch.manual_seed(0)
        self.dataset = np.random.default_rng(0).normal(size=(100, 64)).astype(np.float32)
        self.batches = itertools.cycle(torch.from_numpy(self.dataset).split(4))
        self.local = threading.local()
        self.losses = [0.0] * 2000
        self.model = nn.Linear(64, 1).to("lazy")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.count, self.loss = 0, torch.zeros(()).to("lazy")
        if captures_model:
            capture(self.optimizer)
        else:
            self.train = capture(self.train)  # type: ignore[method-assign]

    def step(self) -> None:
        self.local.value = next(self.batches)
        self.count += int(not self.loss.requires_grad and self.loss.grad is None and self.scheduler.last_epoch >= 0)
        self.losses[0] = float(self.dataset[0, 0]) + self.count
        self.loss = self.train(self.local.value.to("lazy"))
        self.scheduler.step()

    def train(self, batch: torch.Tensor) -> torch.Tensor:
        loss = self.model(batch).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


@pytest.mark.parametrize("captures_model", [False, True])
def test_other_methods_may_read_what_no_guard_follows(captures_model: bool) -> None:
    trainer = Trainer(captures_model)
    for _ in range(CALLS):
        trainer.step()
        lazy_backend.mark_step()
    row = captures()[-1]
    assert row["replays"] >= CALLS - 5, row
    assert trainer.count == CALLS


class Holder:
    value = "2"


def _beside(function: Callable[[torch.Tensor, Holder], torch.Tensor], wrap: Callable[[Any], Any]) -> None:
    """Call `function` captured, and as written; in the middle, what it reads changes."""
    holder = Holder()
    captured = capture(lambda x: function(x, holder))
    for number in range(12):
        holder.value = "2" if number < 6 else "5"
        found = wrap(lambda: captured(torch.ones(3).to("lazy")).tolist())
        assert found == [float(holder.value)] * 3, number


def test_a_profiler_keeps_nothing_from_being_guarded() -> None:
    def under_a_profiler(call: Callable[[], Any]) -> Any:
        profiler = cProfile.Profile()
        profiler.enable()
        try:
            return call()
        finally:
            profiler.disable()

    _beside(lambda x, holder: x * float(holder.value), under_a_profiler)


def test_a_profiler_within_the_body_keeps_nothing_from_being_guarded() -> None:
    def scaled(x: torch.Tensor, holder: Holder) -> torch.Tensor:
        before = sys.getprofile()
        sys.setprofile(lambda *_: None)
        value = float(holder.value)
        sys.setprofile(None)
        return x * value if before is None else x * float(holder.value)

    _beside(scaled, lambda call: call())
    inner = capture(scaled)
    _beside(lambda x, holder: inner(x, holder), lambda call: call())


def test_a_program_that_runs_as_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs_on_import.py").write_text(
        "from test_unseen_reads import _beside\n"
        "_beside(lambda x, holder: x * float(holder.value), lambda call: call())\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import runs_on_import  # noqa: F401


class ScaledGradient(torch.autograd.Function):
    holder = Holder()

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * float(ScaledGradient.holder.value)


class ScaledInBackward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ScaledGradient.apply(x * self.weight)  # type: ignore[no-any-return]


def test_the_backward_of_a_function_of_autograd_is_read_too() -> None:
    module = capture(ScaledInBackward().to("lazy"))
    for number in range(12):
        ScaledGradient.holder.value = "2" if number < 6 else "5"
        module.zero_grad()
        module(torch.ones(3).to("lazy")).sum().backward()
        assert module.weight.grad.tolist() == [float(ScaledGradient.holder.value)] * 3, number
        lazy_backend.mark_step()


def test_a_context_manager_that_decorates_the_body() -> None:
    holder, weight = Holder(), torch.ones(3).to("lazy")

    @contextlib.contextmanager
    def scaled(weights: list[torch.Tensor], holder: Holder) -> Iterator[None]:
        weights[0].mul_(float(holder.value))
        yield
        weights[0].div_(float(holder.value))

    @scaled([weight], holder)
    def body(x: torch.Tensor) -> torch.Tensor:
        return x * weight

    captured = capture(body)
    for number in range(12):
        holder.value = "2" if number < 6 else "5"
        assert captured(torch.ones(3).to("lazy")).tolist() == [float(holder.value)] * 3, number


class Scale(torch.distributions.AffineTransform):
    """PyTorch's code reads `scale`; so does a method that is not called."""

    def undo(self, y: Any) -> Any:
        return y / self.scale


class Temperature(contextlib.nullcontext):  # type: ignore[type-arg]
    def show(self) -> None:
        print(self.enter_result)


class Slots:
    __slots__ = ("rate",)

    def show(self) -> None:
        print(self.rate)


Slots.learning_rate = Slots.rate  # type: ignore[attr-defined]


def _of_pytorch(scale: Scale, x: torch.Tensor, asks: bool) -> Any:
    return scale.undo(x) if asks else scale(x)


def _of_contextlib(temperature: Temperature, x: torch.Tensor, asks: bool) -> Any:
    if asks:
        temperature.show()
    with temperature as value:
        return x * value


def _of_c(holder: Any, x: torch.Tensor, asks: bool) -> Any:
    if asks:
        print(holder.value)
    return x * {"2.0": 2.0, "5.0": 5.0}["{.value}".format(holder)]  # noqa: UP032


def _by_another_name(slots: Any, x: torch.Tensor, asks: bool) -> Any:
    if asks:
        slots.show()
    return x * slots.learning_rate


@pytest.mark.parametrize(
    ("body", "make", "name"),
    [
        (_of_pytorch, lambda: Scale(0.0, 2.0), "scale"),
        (_of_contextlib, lambda: Temperature(2.0), "enter_result"),
        (_of_c, Holder, "value"),
        (_by_another_name, Slots, "rate"),
    ],
)
@pytest.mark.parametrize("changes", [(6,), (1,), (2, 7), (3, 4, 5)])
def test_what_unseen_code_reads_is_guarded_too(body: Any, make: Any, name: str, changes: tuple[int, ...]) -> None:
    read, asks = make(), False
    captured = capture(lambda x: body(read, x, asks))
    value = 2.0
    for number in range(12):
        value = 7.0 - value if number in changes else value
        setattr(read, name, value)
        assert captured(torch.ones(3).to("lazy")).tolist() == [value] * 3, number
