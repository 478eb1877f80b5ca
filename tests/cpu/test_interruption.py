"""Ctrl-C, raising signal handlers, and code that runs in the middle of ours: nothing is lost, stuck or wrong after."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
import itertools
import os
import signal
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

import pytest
import torch
from forks import TORCH
from harness import assert_same, count, run_program, run_python, thread_state
from interruption import Interrupted, Place, interrupt, places_of, raise_interrupted
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lazy_backend
from lazy_backend.errors import LazyBackendError
from lazy_backend.ports.fake_tensors import FakeTensorMode
from lazy_backend.ports.thread_modes import function_depth
from lazy_backend.recording import record
from lazy_backend.replay import unseen_reads
from lazy_backend.tensors.tensor import LazyTensor

# a file that is opened in the very moment of an interruption is closed by Python, with a warning
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


# SIGALRMs in each variant of a test; more of them for a longer look.
NUM_SIGNALS = int(os.environ.get("LAZY_BACKEND_TEST_SIGNALS", "250"))


def _itself(value: Any) -> Any:
    return value


class Training:
    """A model on the lazy device with its loop, and the same in eager. `captured`: "step", "parts" or ""."""

    def __init__(self, captured: str, verifies: bool = True) -> None:
        torch.manual_seed(0)
        self.eager = self.make()
        self.model = copy.deepcopy(self.eager).to("lazy")
        self.inputs = self.make_inputs()
        capture: Callable[[Any], Any] = lazy_backend.capture if captured == "parts" else _itself
        self.update = self._update(capture(self.model), capture)
        self.step: Callable[..., Any] = self._plain(self.update)
        if captured == "step":  # a check of what is replayed would refuse reads, those of a handler too
            self.step = lazy_backend.capture(self.update, verify_every=None if verifies else 0)
        self.eager_step = self._update(self.eager, _itself)
        self.lazy_inputs = [tensor.to("lazy") for tensor in self.inputs]

    def make(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Dropout(0.0), nn.Linear(4, 2))

    def make_inputs(self) -> list[torch.Tensor]:
        return [torch.randn(5, 3), torch.randn(5, 2)]

    def loss(self, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(model(inputs), targets)

    def _update(self, model: nn.Module, capture: Callable[[Any], Any]) -> Callable[..., torch.Tensor]:
        optimizer = capture(torch.optim.SGD(model.parameters(), lr=0.1, foreach=False))

        def update(*inputs: torch.Tensor) -> torch.Tensor:
            loss = self.loss(model, *inputs)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return update

    def _plain(self, update: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def step(*inputs: torch.Tensor) -> torch.Tensor:
            loss = update(*inputs)
            lazy_backend.mark_step()
            return loss

        return step

    def resize(self, batch: int) -> None:
        """Other inputs, whose steps are another program."""
        self.inputs = [torch.randn(batch, 3), torch.randn(batch, 2)]
        self.lazy_inputs = [tensor.to("lazy") for tensor in self.inputs]

    def train(self) -> torch.Tensor:
        return self.step(*self.lazy_inputs)

    def state(self) -> list[torch.Tensor]:
        return [parameter.detach().cpu() for parameter in self.model.parameters()]

    def check(self, before: list[torch.Tensor]) -> None:
        """Each parameter is as before the step or after it, and the next step gives what eager gives from there."""
        with torch.no_grad():
            for parameter, value in zip(self.eager.parameters(), before, strict=True):
                parameter.copy_(value)
        self.eager_step(*self.inputs)
        after = [parameter.detach().clone() for parameter in self.eager.parameters()]
        now = self.state()
        for value, one, other in zip(now, before, after, strict=True):
            assert self.are_equal(value, one) or self.are_equal(value, other)
        with torch.no_grad():
            for parameter, value in zip(self.eager.parameters(), now, strict=True):
                parameter.copy_(value)
        self.compare(self.train(), self.eager_step(*self.inputs))
        self.compare_state()

    def compare_state(self) -> None:
        for value, parameter in zip(self.state(), self.eager.parameters(), strict=True):
            self.compare(value, parameter.detach())

    def are_equal(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        return torch.equal(one, other)

    def compare(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        assert_same(actual, expected)


class CompiledTraining(Training):
    """The same by Inductor, whose results are not eager's bit for bit. The runs of its steps are beside recording."""

    def __init__(self, captured: str, verifies: bool = True) -> None:
        lazy_backend.config.backend = "inductor"
        lazy_backend.config.compile_after_operators = 0
        super().__init__(captured, verifies)
        for _ in range(5):
            self.train()
        lazy_backend.config.compile_after_operators = 1 << 60  # what interruptions make is interpreted
        with count("ExecuteBeside") as runs:
            self.train()
            settle()
        assert runs()

    def are_equal(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        return torch.allclose(one, other, rtol=1e-5, atol=1e-7)

    def compare(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(actual.detach().cpu(), expected.detach())


class Transformer(Training):
    def make(self) -> nn.Module:
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        return nn.Sequential(nn.Embedding(7, 8), layer, nn.Linear(8, 7))

    def make_inputs(self) -> list[torch.Tensor]:
        return [torch.arange(10).view(2, 5) % 7, torch.arange(10) % 7]

    def loss(self, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets)


_USUAL = thread_state()


def check_clean() -> None:
    """No lock is held, and this thread is as it was."""
    assert thread_state() == _USUAL
    for device in ("cpu", "lazy"):
        leaf = torch.ones(2, device=device, requires_grad=True)
        (leaf * leaf).sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.tolist() == [2.0, 2.0]
    gc.enable()
    made: list[Any] = []
    thread = threading.Thread(target=lambda: made.append((torch.ones(2, device="lazy") + 1).tolist()), daemon=True)
    thread.start()
    thread.join(timeout=20)
    assert made == [[2.0, 2.0]], "another thread waits for ever"


def settle() -> None:
    """What an interrupted run would have computed is poisoned, and that is told once."""
    with contextlib.suppress(LazyBackendError):
        lazy_backend.wait_device_ops()


def try_at(training: Training, place: Place, time: int) -> None:
    before = training.state()
    with contextlib.suppress(Interrupted):
        interrupt(training.train, place, time, raise_interrupted)
    settle()
    check_clean()
    training.check(before)


def try_reading_at(training: Training, place: Place, time: int, again: int = 0) -> None:
    """A handler reads the state and computes in the midst of a step, which is eager's all the same.

    With `again`, it comes once more, so many places later.
    """
    with torch.no_grad():
        for parameter, value in zip(training.eager.parameters(), training.state(), strict=True):
            parameter.copy_(value)
    weight = torch.full((3,), 2.0).to("lazy")  # has its value: a handler cannot read what the run beneath it makes
    sums: list[float] = []

    def handle() -> None:
        sums.append((weight * 2 + 1).sum().item())
        assert all(torch.isfinite(value).all() for value in training.state())
        lazy_backend.mark_step()

    losses: list[torch.Tensor] = []
    reached = interrupt(lambda: losses.append(training.train()), place, time, handle, again)
    training.compare(losses[0], training.eager_step(*training.inputs))
    training.compare_state()
    assert sums == [15.0] * len(sums)
    assert reached <= len(sums) <= reached * (1 + bool(again))
    check_clean()


def try_recording_at(training: Training, place: Place, time: int) -> None:
    """A handler computes in the midst of a step, and reads nothing."""
    with torch.no_grad():
        for parameter, value in zip(training.eager.parameters(), training.state(), strict=True):
            parameter.copy_(value)
    weight = torch.full((3,), 2.0).to("lazy")
    sums: list[torch.Tensor] = []
    losses: list[torch.Tensor] = []
    reached = interrupt(
        lambda: losses.append(training.train()), place, time, lambda: sums.append((weight * 2 + 1).sum())
    )
    training.compare(losses[0], training.eager_step(*training.inputs))
    training.compare_state()
    assert [one.item() for one in sums] == [15.0] * reached
    check_clean()


def trained(kind: type[Training], captured: str, verifies: bool = True) -> Training:
    training = kind(captured, verifies)
    for _ in range(5):
        training.train()
    return training


def times_of(number: int) -> list[int]:
    """The first, a middle and the last one of `number` times."""
    return sorted({1, number // 2 + 1, number})


def check_all(
    make: Callable[[], Training], attempts: list[tuple[Place, int]], attempt: Callable[[Training, Place, int], None]
) -> None:
    """Make each attempt on the same training, or on a new one after a failure, and tell of all failures."""
    training = make()
    failures: list[str] = []
    for place, time in attempts:
        try:
            attempt(training, place, time)
        except Exception as error:
            failures.append(f"{place[0]}:{place[1]} ({place[2]}), time {time}: {type(error).__name__}: {error}")
            training = make()
    assert not failures, "\n".join([f"{len(failures)} of {len(attempts)} failed", *failures])


@pytest.fixture
def stride(request: pytest.FixtureRequest) -> int:
    """Of how many places one is tried where trying is slow: all with --runslow, as `make interruptions` tries."""
    return 1 if request.config.getoption("--runslow") else 24


modes = pytest.mark.parametrize("background", ["always", "never"])
ways = pytest.mark.parametrize("captured", ["", "step", "parts"], ids=["plain", "captured", "parts"])


# ----- exceptions


@modes
@ways
@pytest.mark.parametrize("kind", [Training, Transformer])
@pytest.mark.timeout(900)
def test_an_exception_at_any_line_leaves_a_step_done_or_not(
    kind: type[Training], captured: str, background: str, stride: int
) -> None:
    lazy_backend.config.run_in_background = background
    places = places_of(trained(kind, captured).train)
    attempts = [(place, time) for place, number in places.items() for time in times_of(number)]
    check_all(lambda: trained(kind, captured), attempts[:: 1 if kind is Training else stride], try_at)


@ways
@pytest.mark.timeout(900)
def test_an_exception_at_any_line_about_a_run_beside(captured: str, stride: int) -> None:
    places = places_of(trained(CompiledTraining, captured).train)
    attempts = [(place, time) for place, number in places.items() for time in times_of(number)]
    check_all(lambda: trained(CompiledTraining, captured), attempts[:: max(1, stride // 4)], try_at)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("first_sight", ["run", "record"])
def test_an_exception_at_any_line_of_an_unseen_program(first_sight: str, stride: int) -> None:
    lazy_backend.config.first_sight = first_sight
    training = trained(Training, captured="")
    training.resize(6)
    places = places_of(training.train)
    sizes = iter(range(7, 1_000_000))

    def attempt(training: Training, place: Place, time: int) -> None:
        training.resize(next(sizes))
        try_at(training, place, time)

    attempts = [(place, time) for place, number in places.items() for time in times_of(number)]
    check_all(lambda: trained(Training, ""), attempts[::stride], attempt)


@modes
@ways
def test_ctrl_c_at_any_moment(captured: str, background: str) -> None:
    """Signals at random moments, as the system sends them."""
    lazy_backend.config.run_in_background = background
    training = trained(Training, captured)

    places: list[list[str]] = []

    def handler(signum: int, frame: Any) -> None:
        places.append(traceback.format_stack(frame))
        raise KeyboardInterrupt

    random = Random(0)
    before = signal.signal(signal.SIGALRM, handler)
    try:
        for _ in range(NUM_SIGNALS):
            places.clear()
            end = monotonic() + 20.0
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 2e-3))
                while monotonic() < end:
                    training.train()
                pytest.fail(f"nothing was raised; the handler was called at\n{''.join(places[0] if places else [])}")
            except KeyboardInterrupt:
                signal.setitimer(signal.ITIMER_REAL, 0)
            # torch.no_grad, which optimizers use, is Python and may itself be interrupted before it puts the mode back
            torch.set_grad_enabled(True)
            settle()
            check_clean()
            training.check(training.state())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        torch.set_grad_enabled(True)


class CountingStep:
    """A captured step with a count on the CPU: after n calls the total on the device is 1 + 2 + ... + n."""

    def __init__(self, verifies: bool = True) -> None:
        lazy_backend.config.run_in_background = "never"
        self.count, self.total = torch.zeros(()), torch.zeros(2, device="lazy")
        self.step = lazy_backend.capture(self.body, verify_every=None if verifies else 0)
        for _ in range(5):
            self.step()

    def body(self) -> None:
        self.count.add_(1)
        self.total.add_(torch.ones(2, device="lazy"), alpha=self.count.item())

    def expected(self) -> float:
        number = int(self.count)
        return number * (number + 1) / 2


def test_an_exception_at_any_line_of_a_replay_advances_a_count_once_or_not() -> None:
    made = CountingStep()
    places = places_of(made.step)
    assert any(place[0].endswith("formula_program.py") for place in places)
    for place, number in places.items():
        for time in times_of(number):
            made = CountingStep()
            with contextlib.suppress(Interrupted):
                interrupt(made.step, place, time, raise_interrupted)
            settle()
            assert made.count in (5, 6), place
            total = made.total[0].item()
            assert total == made.expected() or total == made.expected() - int(made.count), place
            # what interrupts a run, and nothing else, keeps a committed step from computing its total
            assert total == made.expected() or "replay" not in Path(place[0]).parts, place
            made.step()
            assert made.count in (6, 7), place


def test_a_replay_within_a_replay_advances_a_count_twice() -> None:
    places = places_of(CountingStep().step, instructions=True)
    made = CountingStep()
    count = 5
    for place, number in places.items():
        for time in times_of(number):
            reached = interrupt(made.step, place, time, made.step)
            count += 1 + reached
            assert made.count == count, (place, time)
            assert made.total.tolist() == [made.expected()] * 2, (place, time)


@pytest.mark.parametrize("again", [0, 1, 3])
def test_a_replay_within_a_recorded_call_loses_neither(again: int) -> None:
    # a comparison there would see no float of the body, see limits.md
    made, other, sizes = CountingStep(verifies=False), torch.zeros(2, device="lazy"), itertools.count(2)

    def call() -> None:
        other.add_(torch.ones(next(sizes), device="lazy").mean())  # unseen: recorded in Python

    places = places_of(call, instructions=True)
    for number, (place, times) in enumerate(places.items(), 1):
        lazy_backend.mark_step(wait=True)
        assert other.tolist() == [number] * 2, place
        interrupt(call, place, times // 2 + 1, made.step, again)
        assert made.total.tolist() == [made.expected()] * 2, place
    assert made.count > 5 + len(places) // 2 > 100


@pytest.mark.filterwarnings("ignore:.* got other shapes:lazy_backend.CaptureWarning")
def test_interruptions_leave_no_hook_behind(stride: int) -> None:
    """What watches a body is put in place for one call, and removed by the next one if that was interrupted."""
    from torch.nn.modules import module as torch_modules
    from torch.optim import optimizer as torch_optimizers

    def hooks() -> int:
        modules, optimizers = torch_modules._global_forward_pre_hooks, torch_optimizers._global_optimizer_pre_hooks
        return len(modules) + len(optimizers) + torch._C._len_torch_function_stack()

    dispatch, before = LazyTensor.__torch_dispatch__, hooks()
    training = trained(Training, captured="step")
    sizes = iter(range(6, 1_000_000))

    def train() -> None:
        training.resize(next(sizes))  # a new program, whose body runs as written
        training.train()

    places = [place for place in places_of(train) if place[0].endswith(("captured_state.py", "torch_hooks.py"))]
    assert {Path(place[0]).name for place in places} == {"captured_state.py", "torch_hooks.py"}
    for place in places[:: max(1, stride // 4)]:
        with contextlib.suppress(Interrupted):
            interrupt(train, place, 1, raise_interrupted)
        settle()
        train()
        assert LazyTensor.__torch_dispatch__ == dispatch, place
        assert hooks() == before, place


def test_an_exception_at_any_line_loses_no_step_that_has_ended() -> None:
    lazy_backend.config.backend = "inductor"
    lazy_backend.config.run_in_background = "always"
    state = {"total": torch.zeros(3, device="lazy")}

    def step() -> None:
        state["total"] = state["total"] * 1 + 1
        lazy_backend.mark_step()

    def end_a_step_and_read() -> None:
        step()
        state["total"].sum().item()

    for _ in range(6):
        step()
    with count("ExecuteBeside") as runs:
        step()
        settle()
    assert runs()
    places = places_of(end_a_step_and_read)
    assert len(places) > 100
    for place, number in places.items():
        for time in times_of(number):
            expected = state["total"][0].item() + 1
            step()
            ended = state["total"]
            with contextlib.suppress(Interrupted):
                interrupt(end_a_step_and_read, place, time, raise_interrupted)
            assert ended.tolist() == [expected] * 3, (place, time)
            state["total"] = ended
            settle()


# Where blocks are entered and left, in Python
_MANAGERS = [type(contextlib.contextmanager(iter)(())), contextlib.ExitStack, FakeTensorMode, TorchDispatchMode]
_AROUND_BLOCKS = {
    inspect.unwrap(getattr(one, name)).__code__ for one in _MANAGERS for name in ("__enter__", "__exit__")
}


@pytest.mark.parametrize("first_sight", ["run", "record"])
def test_an_exception_about_any_block_of_an_unseen_step_leaves_autograd_on(first_sight: str) -> None:
    """PyTorch's fake kernels have blocks in which this thread is without autograd."""
    lazy_backend.config.first_sight = first_sight
    lazy_backend.config.backend = "aot_eager"
    sizes = iter(range(7, 1_000_000))
    weight = torch.ones(3, device="lazy", requires_grad=True)

    def step() -> None:
        nn.functional.gelu(torch.ones(next(sizes), 3, device="lazy") * weight).softmax(0).sum().backward()
        lazy_backend.mark_step()

    def interrupted_at(number: int) -> bool:
        left = number

        def count_instructions(frame: Any, event: str, arg: Any) -> Any:
            nonlocal left
            if frame.f_code not in _AROUND_BLOCKS:
                return None
            frame.f_trace_lines, frame.f_trace_opcodes = False, True
            left -= event == "opcode"
            if not left:
                sys.settrace(None)
                raise Interrupted
            return count_instructions

        try:
            sys.settrace(count_instructions)
            step()
            return False
        except Interrupted:
            return True
        finally:
            sys.settrace(None)

    step()
    number = 1
    while interrupted_at(number):
        settle()
        check_clean()
        number += 23 if first_sight == "record" else 7
    assert number > (200 if first_sight == "record" else 20)


def test_an_exception_in_what_watches_a_captured_call_leaves_no_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is called for each call of the body, so a signal often comes in there."""
    norm, given = nn.LayerNorm(4).to("lazy"), torch.ones(3, 4, device="lazy")
    watch, left = unseen_reads._Watch.__call__, 0

    def interrupted(watcher: Any, frame: Any, event: str, function: Any) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise Interrupted
        watch(watcher, frame, event, function)

    monkeypatch.setattr(unseen_reads._Watch, "__call__", interrupted)
    for number in itertools.count(1):
        left = number
        with contextlib.suppress(Interrupted):
            lazy_backend.capture(lambda x: norm(x))(given)
        if left > 0:
            break
        settle()
        assert function_depth() == 0, number
    assert number > 100


class Timeout(Exception):
    """What the handlers of programs raise that limit a call's time."""


@pytest.mark.parametrize("background", ["always", "never"])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("raised", [Timeout, KeyboardInterrupt])
def test_what_a_signal_handler_raises_reaches_the_program_as_it_is(
    raised: type[BaseException], backend: str, background: str
) -> None:
    lazy_backend.config.backend, lazy_backend.config.run_in_background = backend, background
    weight = torch.full((16, 16), 1 / 16, device="lazy")

    calls = 0

    class Handler:
        def __call__(self, number: int, frame: Any) -> None:
            nonlocal calls
            calls += 1
            raise raised

    random = Random(0)

    def compute() -> None:
        end, value = monotonic() + 20.0, weight
        # Python drops what is raised within a finalizer or a callback of a weak reference: then it comes once more
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 2e-3), 0.2)
        while monotonic() < end:
            for _ in range(5):
                value = value @ weight
            lazy_backend.mark_step()
            value[0, 0].item()

    before = signal.signal(signal.SIGALRM, functools.partial(Handler()))
    try:
        for _ in range(NUM_SIGNALS):
            with pytest.raises(raised):
                compute()
            signal.setitimer(signal.ITIMER_REAL, 0)
            settle()
            check_clean()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert calls <= 1.05 * NUM_SIGNALS
    assert weight[0, 0].item() == 1 / 16


def _decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return function(*args)

    return call


def _raise_timeout(number: int, frame: Any) -> None:
    raise Timeout


def _raise_once(number: int, frame: Any) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise Timeout


def _raise_without_frame(number: int, frame: Any) -> None:
    del frame
    raise Timeout


@_decorated
def _refuse(frame: Any = None) -> None:
    raise ValueError("refused")


def _refuse_in_a_ring() -> None:
    one, other = torch.OutOfMemoryError("refused"), torch.OutOfMemoryError("refused")
    one.__cause__, other.__cause__ = other, one
    raise one


class _Raising(Exception):
    def __init__(self, *args: Any) -> None:
        raise Timeout


_asked: list[str] = []


@torch.library.custom_op("interruption_tests::disturbed", mutates_args=())
def _disturbed(x: torch.Tensor) -> torch.Tensor:
    what = _asked.pop() if _asked else ""
    if what == "refuse":
        _refuse()
    if what == "with a frame":
        _refuse(sys._getframe())
    if what == "in a ring":
        _refuse_in_a_ring()
    if what:
        try:
            signal.raise_signal(signal.SIGUSR1)
        except Timeout as error:
            if what == "wrap":
                raise ValueError("refused") from error
            raise
    return x * 2


@_disturbed.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize("what", ["interrupt", "wrap", "refuse", "with a frame", "in a ring"])
@pytest.mark.parametrize(
    "handler",
    [_raise_timeout, _raise_once, _raise_without_frame, _decorated(_raise_timeout), torch.no_grad()(_raise_timeout),
     _Raising, functools.lru_cache(_raise_timeout)],
)  # fmt: skip
def test_handlers_are_told_from_operators_that_fail(handler: Any, what: str) -> None:
    lazy_backend.config.run_in_background, lazy_backend.config.compile = "never", "off"
    x = torch.ones(3, device="lazy")
    lazy_backend.mark_step(wait=True)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        made = _disturbed(x)
        _asked.append(what)
        with pytest.raises(Timeout if what == "interrupt" else LazyBackendError) as raised:
            lazy_backend.mark_step(wait=True)
    finally:
        signal.signal(signal.SIGUSR1, before)
        _asked.clear()
    assert what == "interrupt" or "refused" in str(raised.value)
    with pytest.raises(LazyBackendError):
        made.tolist()
    settle()
    assert (x + 1).tolist() == [2.0] * 3


def test_a_handler_may_read_anything_while_a_steps_results_are_handed_out() -> None:
    lazy_backend.config.backend = "inductor"
    lazy_backend.config.run_in_background = "always"
    other = torch.full((4,), 2.0, device="lazy")
    state = {"total": torch.zeros(3, device="lazy")}
    lazy_backend.mark_step(wait=True)

    def step() -> None:
        state["total"] = state["total"] * 1 + 1
        state["part"] = state["total"][1:]  # results that share memory are copied apart
        lazy_backend.mark_step()

    def handle() -> None:
        found.append((other * 2 + 1).sum().item())
        lazy_backend.mark_step()

    def two_steps() -> None:
        step()
        step()

    for _ in range(6):
        step()
    settle()
    places = places_of(two_steps, instructions=True)
    found: list[float] = []
    attempts = [(place, time) for place, number in places.items() for time in times_of(number)]
    for place, time in attempts[::4]:
        expected = state["total"][0].item() + 2
        interrupt(two_steps, place, time, handle)
        assert state["total"].tolist() == [expected] * 3, (place, time)
    assert set(found) == {20.0}


@pytest.mark.parametrize("delay", [0.01, 0.1, 0.3])
def test_ctrl_c_while_the_first_tensor_is_made(delay: float, tmp_path: Path) -> None:
    """PyTorch imports much when it first asks Python for a call."""
    code = f"""
    import signal
    import torch
    import lazy_backend

    def interrupt(*_):
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, {delay})
        while True:
            (torch.ones(3, device="lazy") @ torch.ones(3, device="lazy")).item()
    except KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, 0)
    print((torch.ones(3, device="lazy") @ torch.ones(3, device="lazy")).item())
    """
    assert run_python(textwrap.dedent(code), tmp_path) == "3.0\n"


def test_ctrl_c_in_the_first_captured_call_leaves_pytorch_imported_whole(tmp_path: Path) -> None:
    code = """
    import os, signal, sys, torch, lazy_backend
    from lazy_backend.ports.table import REPLAYS

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "torch._dynamo.config":
                os.kill(os.getpid(), signal.SIGINT)

    x = torch.ones(3, device="lazy")
    x.tolist()
    sys.meta_path.insert(0, Finder)
    try:
        lazy_backend.capture(lambda x: x * 2)(x)
    except KeyboardInterrupt:
        print("interrupted")
    print(torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist(), REPLAYS.obstacle())
    """
    assert run_python(textwrap.dedent(code), tmp_path) == "interrupted\n[2.0, 2.0] None\n"


def test_the_error_of_a_run_that_was_interrupted_says_so() -> None:
    lazy_backend.config.run_in_background = "never"
    lazy_backend.config.compile = "off"
    training = trained(Training, captured="")
    places = places_of(training.train)
    kernel = max((place for place in places if place[0].endswith("serial.py")), key=places.__getitem__)
    made: list[torch.Tensor] = []

    def train() -> None:
        made.append(training.update(*training.lazy_inputs))
        lazy_backend.mark_step()

    with pytest.raises(Interrupted):
        interrupt(train, kernel, 3, raise_interrupted)
    with pytest.raises(LazyBackendError, match="the run was interrupted by Interrupted"):
        made[0].tolist()


# ----- code that runs in the middle of ours


@modes
@ways
@pytest.mark.timeout(900)
# a handler that cuts the graph within each of a captured module's first calls
@pytest.mark.filterwarnings("ignore::lazy_backend.CaptureWarning")
@pytest.mark.parametrize("attempt", [try_reading_at, try_recording_at])
def test_a_handler_may_read_and_compute_at_any_moment(
    attempt: Callable[[Training, Place, int], None], captured: str, background: str, stride: int
) -> None:
    """What it reads has its value, or it is told that the run it interrupted computes it; the step is eager's."""
    lazy_backend.config.run_in_background = background
    places = places_of(trained(Training, captured).train, instructions=True)
    attempts = [(place, time) for place, number in places.items() for time in times_of(number)]
    # a captured body that is recorded anew refuses reads, those of a handler too
    check_all(lambda: trained(Training, captured, False), attempts[:: max(1, stride // 2)], attempt)


@ways
@pytest.mark.timeout(900)
@pytest.mark.parametrize("attempt", [try_reading_at, try_recording_at])
@pytest.mark.filterwarnings("ignore::lazy_backend.CaptureWarning")
def test_a_handler_may_read_and_compute_about_a_run_beside(
    attempt: Callable[[Training, Place, int], None], captured: str, stride: int
) -> None:
    places = places_of(trained(CompiledTraining, captured).train, instructions=True)
    attempts = [(place, time) for place, number in places.items() for time in times_of(number)]
    # a captured body that is recorded anew refuses reads, those of a handler too
    check_all(lambda: trained(CompiledTraining, captured, False), attempts[::stride], attempt)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("again", [0, 1, 5])
def test_a_handler_may_read_and_compute_in_an_unseen_program(again: int, stride: int) -> None:
    training = trained(Training, captured="")
    training.resize(6)
    places = places_of(training.train, instructions=True)
    sizes = iter(range(7, 1_000_000))

    def attempt(training: Training, place: Place, time: int) -> None:
        training.resize(next(sizes))
        try:
            try_reading_at(training, place, time, again)
        except AssertionError as error:  # of PyTorch's fake mode, to the handler: see limits.md
            if "allow_non_fake_inputs" not in str(error):
                raise
            settle()

    attempts = [(place, time) for place, number in places.items() for time in times_of(number)]
    stride = 1 if stride == 1 else (4 if again else 2) * stride
    check_all(lambda: trained(Training, ""), attempts[again % stride :: stride], attempt)


@pytest.mark.parametrize("first_sight", ["run", "record"])
@pytest.mark.parametrize("again", [0, 2])
def test_a_call_is_not_lost_by_a_handler_that_reads(again: int, first_sight: str) -> None:
    """At every moment of a call that is the first or a later one of its trace, in a known or an unseen program."""
    lazy_backend.config.first_sight = first_sight
    total = torch.zeros(3, device="lazy")
    sizes = iter(range(2, 1_000_000))

    def program(fresh: bool) -> None:
        width = next(sizes) if fresh else 1
        total.mul_(1.0).add_(torch.ones(width, device="lazy").sum() / width)

    for fresh in (False, True):
        for _ in range(4):
            program(fresh=False)
            lazy_backend.mark_step()
        places = places_of(functools.partial(program, fresh), instructions=True)
        lazy_backend.mark_step()
        count = total[0].item()
        attempts = [(place, time) for place, number in places.items() for time in times_of(number)]
        for place, time in attempts[:: 6 if again else 1]:
            interrupt(functools.partial(program, fresh), place, time, total.tolist, again)
            lazy_backend.mark_step()
            count += 1
            assert total.tolist() == [count] * 3, (place, time)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda tensor: tensor[1:],
    "columns": lambda tensor: tensor[:, 1:],
    "t": lambda tensor: tensor.t(),
    "unbind": lambda tensor: tensor.unbind(0)[1],
    "chunk": lambda tensor: tensor.chunk(2)[0],
}


def assign_data(tensor: torch.Tensor, other: torch.Tensor) -> None:
    tensor.data = other


@pytest.mark.parametrize("assign", [assign_data, torch.Tensor.set_, lambda tensor, other: tensor.t_()])
@pytest.mark.parametrize("view", VIEWS)
def test_a_handler_may_let_an_operand_stand_for_other_data(
    view: str, assign: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the call or after it: a view has the memory that its value comes from."""
    # another object than the recorder in C++ knows: somebody watches calls, which Python therefore gets
    monkeypatch.setattr(LazyTensor, "__torch_dispatch__", staticmethod(record.dispatch))
    look, given = VIEWS[view], (torch.arange(12.0).reshape(3, 4), torch.full((3, 4), 50.0))

    def finish(made: torch.Tensor, *operands: torch.Tensor) -> list[Any]:
        value = made.clone()
        made.add_(100)
        return [tensor.tolist() for tensor in (value, made, *operands)]

    def in_eager(comes_first: bool) -> list[Any]:
        tensor, other = (one.clone() for one in given)
        if comes_first:
            assign(tensor, other)
        made = look(tensor)
        if not comes_first:
            assign(tensor, other)
        return finish(made, tensor, other)

    def begin() -> list[torch.Tensor]:
        operands = [one.to("lazy", copy=True) for one in given]
        lazy_backend.mark_step()
        return operands

    def interrupted_at(place: Place) -> list[Any]:
        operands, made = begin(), []
        assert interrupt(lambda: made.append(look(operands[0])), place, 1, lambda: assign(*operands))
        return finish(made[0], *operands)

    for _ in range(3):
        finish(look(operands := begin()[0]), operands)
    tensor = begin()[0]
    places = places_of(lambda: look(tensor), instructions=True)
    lazy_backend.mark_step()
    assert places
    expected = in_eager(True), in_eager(False)
    assert [place for place in places if interrupted_at(place) not in expected] == []


@pytest.fixture
def little_to_search() -> None:
    """A search for garbage leaves out what PyTorch keeps of the programs above, for which it takes a second."""
    gc.collect()
    gc.freeze()


@modes
@pytest.mark.usefixtures("little_to_search")
def test_finalizers_may_read_and_compute(background: str) -> None:
    """They run where the collector happens to: on the thread of a run too, which they are told."""
    lazy_backend.config.run_in_background = background
    read: list[float] = []
    refused: list[str] = []

    class Noisy:
        def __init__(self) -> None:
            self.itself = self
            self.tensor = torch.ones(3, device="lazy") * 2

        def __del__(self) -> None:
            try:
                read.append((self.tensor + 1).sum().item())
            except LazyBackendError as error:
                refused.append(str(error))

    training = trained(Training, captured="")
    with torch.no_grad():
        for parameter, value in zip(training.eager.parameters(), training.state(), strict=True):
            parameter.copy_(value)
    before = gc.get_threshold()
    gc.set_threshold(20, 2, 2)
    try:
        for _ in range(40):
            Noisy()
            assert_same(training.train(), training.eager_step(*training.inputs))
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert read == [9.0] * (40 - len(refused))
    assert all("no value" in text or "interrupted a run" in text for text in refused)
    assert background == "always" or not refused
    check_clean()


@pytest.mark.usefixtures("little_to_search")
def test_a_finalizer_of_a_dead_cycle_uses_what_nobody_held() -> None:
    """The collector clears weak references into the cycle before it calls the finalizer."""
    read: list[Any] = []
    count = torch.ones(3, device="lazy")

    class Reader:
        def __init__(self) -> None:
            self.tensor = torch.ones(3, device="lazy") * 2
            self.itself = self

        def __del__(self) -> None:
            read.append((self.tensor.tolist(), (self.tensor + count).tolist()))

    for first_sight in ("run", "record", "run"):
        lazy_backend.config.first_sight = first_sight
        Reader()
        gc.collect()
    assert read == [([2.0] * 3, [3.0] * 3)] * 3


@pytest.mark.usefixtures("little_to_search")
def test_finalizers_of_one_dead_cycle_each_find_their_values() -> None:
    """The first one's read cuts the trace in which the tensors of the others are pending."""
    read: list[Any] = []

    class Reader:
        def __init__(self) -> None:
            self.tensor = torch.ones(3, device="lazy") * 2
            self.others: list[Reader] = []

        def __del__(self) -> None:
            read.append((self.tensor + 1).tolist())
            read.append(self.tensor.tolist())

    for first_sight in ("run", "record", "run"):
        lazy_backend.config.first_sight = first_sight
        readers = [Reader() for _ in range(3)]
        for reader in readers:
            reader.others = list(readers)
        del readers, reader
        gc.collect()
    assert read == [[3.0] * 3, [2.0] * 3] * 9


def test_a_finalizer_that_computes_while_the_interpreter_shuts_down_raises(tmp_path: Path) -> None:
    code = """
import sys
import torch, lazy_backend
lazy_backend.config.compile = "off"

class Keeper:
    def __init__(self):
        self.tensor = torch.ones(3, device="lazy")
        self.compute()

    def compute(self):
        return (self.tensor + 1).sum().item()

    def __del__(self):
        self.compute()

sys.stderr = sys.stdout
keeper = Keeper()
print("done")
"""
    assert run_program(code, tmp_path, TORCH).startswith("done\n")  # and the process is not aborted


@pytest.mark.timeout(120)
def test_a_fork_finds_no_lock_held_by_a_thread_that_stays_behind(tmp_path: Path) -> None:
    code = """
import os, threading
import torch, lazy_backend
from lazy_backend import metrics
lazy_backend.config.compile = "off"
x = torch.arange(3.0, device="lazy")
(x + 1).tolist()  # PyTorch imports modules at the first operator, and a fork may come in the midst of that
over = threading.Event()

def work():
    while not over.is_set():
        metrics.increment("MarkStep")
        (x + 1).sum()
        lazy_backend.mark_step()

threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
codes = []
for _ in range(20):
    child = os.fork()
    if child == 0:
        ok = (x * 2).tolist() == [0.0, 2.0, 4.0]
        metrics.increment("MarkStep")
        lazy_backend.mark_step(wait=True)
        os._exit(0 if ok and len(lazy_backend.explain().records) else 1)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
over.set()
for thread in threads:
    thread.join()
print(set(codes), (x + 1).tolist())
"""
    assert run_program(code, tmp_path, TORCH) == "{0} [1.0, 2.0, 3.0]\n"


_numbers = itertools.count(1)


def _many_calls(x: torch.Tensor) -> None:
    lazy_backend.config.max_trace_length = 8
    for _ in range(20):
        x = x + 1


def _another_dtype(x: torch.Tensor) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        x.add(1)
    finally:
        torch.set_default_dtype(torch.float32)


# What a finalizer may do with a tensor wherever it comes; it reads nothing.
_LATER: dict[str, Callable[[torch.Tensor], object]] = {
    "mark_step": lambda x: lazy_backend.mark_step(),
    "sync": lambda x: torch.lazy.synchronize(),
    "a known call": lambda x: x + 1,
    "an unseen call": lambda x: x.roll(next(_numbers)),
    "an unseen write": lambda x: x.add_(x.roll(next(_numbers)).zero_()),
    "an unseen call, mark_step and a known call": lambda x: (x.roll(next(_numbers)), lazy_backend.mark_step(), x + 1),
    "many calls": _many_calls,
    "another default dtype": _another_dtype,
    "a batch": lambda x: torch.ones(3).to("lazy") + x,
}


class Flipping:
    """A program of calls that write: x becomes 1 - x, which shows calls that ran twice or not at all.

    `kind`: "known", "unseen" (each time with a call not seen before), or "captured".
    """

    def __init__(self, kind: str) -> None:
        lazy_backend.config.first_sight = "run"
        self.kind = kind
        # no comparison with the body: a finalizer's calls in it would count as its own
        self.body = lazy_backend.capture(self.write, verify_every=0) if kind == "captured" else self.write
        self.x, self.other = torch.full((3,), 3.0, device="lazy"), torch.arange(3.0, device="lazy")
        self.expected = 3.0
        for _ in range(3):
            self.flip()
        self.other.add(1)
        lazy_backend.mark_step()

    def write(self) -> None:
        self.x.neg_()
        self.x.add_(1)

    def flip(self) -> None:
        if self.kind == "unseen":
            self.x.roll(next(_numbers))
        self.body()
        lazy_backend.mark_step()
        self.expected = 1 - self.expected


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:.* without a mark_step:lazy_backend.errors.GraphCutWarning")
@pytest.mark.parametrize("background", ["never", "always"])
@pytest.mark.parametrize("kind", ["known", "unseen", "captured"])
@pytest.mark.parametrize("does", _LATER)
def test_calls_run_once_whatever_a_finalizer_does_at_any_moment(
    does: str, kind: str, background: str, stride: int
) -> None:
    lazy_backend.config.run_in_background = background
    made = Flipping(kind)
    places = places_of(made.flip, instructions=True)
    attempts = [(place, time) for place, number in places.items() for time in times_of(number)]
    for place, time in attempts[:: max(1, stride // 2)]:
        interrupt(made.flip, place, time, functools.partial(_LATER[does], made.other))
        lazy_backend.config.max_trace_length = 100_000
        lazy_backend.mark_step(wait=True)
        assert made.x.tolist() == [made.expected] * 3, (place, time)
        assert made.other.tolist() == [0.0, 1.0, 2.0], (place, time)


_begun, _goes_on = threading.Event(), threading.Event()


@torch.library.custom_op("interruption_tests::collecting", mutates_args=())
def _collecting(x: torch.Tensor) -> torch.Tensor:
    _begun.set()
    _goes_on.wait(10)
    gc.collect()
    return x * 2


@_collecting.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class _Dead:
    """A dead cycle whose finalizer does something."""

    def __init__(self, does: Callable[[], object], done: list[str]) -> None:
        self.itself, self.does, self.done = self, does, done

    def __del__(self) -> None:
        try:
            self.does()
            self.done.append("done")
        except LazyBackendError as error:
            self.done.append(str(error))


@pytest.mark.filterwarnings("ignore:.* without a mark_step:lazy_backend.errors.GraphCutWarning")
@pytest.mark.parametrize("does", [*_LATER, "read", "reset"])
@pytest.mark.parametrize("first_sight", ["record", "run"])
def test_a_finalizer_on_the_devices_thread_runs_nothing_that_comes_later(first_sight: str, does: str) -> None:
    """Neither what another thread has recorded meanwhile, which takes what the run gives, nor what it recorded."""
    lazy_backend.config.mark_steps = "auto"
    other = torch.full((3,), 5.0, device="lazy")
    x, written = torch.ones(3, device="lazy"), torch.zeros(3, device="lazy")
    lazy_backend.mark_step(wait=True)
    actions = _LATER | {"read": lambda x: (x + 1).tolist(), "reset": lambda x: lazy_backend.ir_cache.reset()}
    for number in range(3):  # unseen, and known
        done: list[str] = []
        _begun.clear()
        _goes_on.clear()
        lazy_backend.config.first_sight = first_sight if number else "record"
        made = _collecting(x)
        written.add_(made)
        lazy_backend.mark_step()  # the run begins on the device's thread
        assert _begun.wait(10)
        written.mul_(made)
        later = made + written
        gc.disable()
        try:
            _Dead(functools.partial(actions[does], other), done)
            _goes_on.set()
            lazy_backend.wait_device_ops()
        finally:
            gc.enable()
        gc.collect()
        assert len(done) == 1
        assert "interrupted a run" in done[0] or does in _LATER
        assert later.tolist() == (2 + written).tolist()
    assert written.tolist() == [((2 * 2) + 2) * 2 * 2 + 4.0] * 3
