"""`torch.amp.GradScaler("lazy")`: steps with infinite gradients are skipped as in eager mode, and nothing is read."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness import assert_same
from torch import nn

import lazy_backend
from lazy_backend import CaptureError, config, metrics

INFINITE = (0, 1, 5, 11, 12)  # steps with an infinite gradient: the first, two in a row, some later

# By default eager updates parameters one by one on the CPU, the lazy device in lists: their last bits may differ.
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "foreach": True}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "Adam amsgrad": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True, "foreach": True}),
    "NAdam": (torch.optim.NAdam, {"foreach": True}),
    "RAdam": (torch.optim.RAdam, {"foreach": True}),
    "Rprop": (torch.optim.Rprop, {"foreach": True}),
    "RMSprop": (torch.optim.RMSprop, {"foreach": True}),
    "Adagrad": (torch.optim.Adagrad, {"foreach": True}),
    "Adadelta": (torch.optim.Adadelta, {"foreach": True}),
    "Adamax": (torch.optim.Adamax, {"foreach": True}),
}


class Training:
    """A model, an optimizer and a scaler; `step(number)` is one step."""

    def __init__(self, device: str, name: str = "AdamW", clip: bool = False, accumulate: int = 1) -> None:
        torch.manual_seed(0)
        self.device, self.clip, self.accumulate = device, clip, accumulate
        self.model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4)).to(device)
        kind, options = OPTIMIZERS[name]
        self.optimizer: torch.optim.Optimizer = kind(self.model.parameters(), **options)
        self.scaler = torch.amp.GradScaler(device, init_scale=256.0, growth_interval=3)

    def backward(self, number: int) -> torch.Tensor:
        numbers = torch.Generator().manual_seed(number)
        for micro in range(self.accumulate):
            x = torch.randn(6, 8, generator=numbers)
            if number in INFINITE and micro == 0:
                x[0, 0] = float("inf")
            with torch.autocast(self.device, torch.float16):
                loss: torch.Tensor = self.model(x.to(self.device)).float().square().mean() / self.accumulate
            self.scaler.scale(loss).backward()
        return loss.detach()

    def step(self, number: int) -> torch.Tensor:
        loss = self.backward(number)
        if self.clip:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        lazy_backend.mark_step()
        return loss

    def seen(self) -> list[Any]:
        state = self.optimizer.state_dict()["state"]
        entries = [(name, value) for _, entry in sorted(state.items()) for name, value in entry.items()]
        parameters = [parameter.detach() for parameter in self.model.parameters()]
        return [*parameters, *entries, self.scaler.state_dict()]


def cuts() -> list[str]:
    return [name for name in metrics.counter_names() if name.startswith(("GraphCut", "Fallback", "GradScalerRead"))]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("way", ["plain", "captured", "captured, clipped, accumulated"])
def test_skips_what_eager_skips(name: str, way: str) -> None:
    options: dict[str, Any] = {"clip": True, "accumulate": 2} if "clipped" in way else {}
    eager, lazy = Training("cpu", name, **options), Training("lazy", name, **options)
    if way != "plain":
        lazy_backend.capture(lazy.model)
        lazy_backend.capture(lazy.optimizer)
    losses = [lazy.step(number) for number in range(15)]
    assert not cuts()
    assert_same(losses, [eager.step(number) for number in range(15)])
    assert_same(lazy.seen(), eager.seen())


@pytest.mark.parametrize("captures", [False, True])
def test_a_hundred_steps(captures: bool) -> None:
    """Scales grow, overflow float16 by themselves and fall back; what is planted comes on top."""
    eager, lazy = Training("cpu"), Training("lazy")
    if captures:
        lazy_backend.capture(lazy.model)
        lazy_backend.capture(lazy.optimizer)
    outcomes = []
    for training in (lazy, eager):
        steps = [
            (training.step(number), training.scaler.scale(torch.ones((), device=training.device)))
            for number in range(100)
        ]
        outcomes.append([torch.stack(values) for values in zip(*steps, strict=True)])
        if training is lazy:
            assert not cuts()
    assert_same(*outcomes)
    assert_same(lazy.seen(), eager.seen())
    assert len(outcomes[1][1].unique()) > 4  # scales: they fell more often than by what was planted


def test_state_is_right_after_each_step() -> None:
    """`state_dict` settles a step count that went on although the step was skipped."""
    eager, lazy = Training("cpu"), Training("lazy")
    for number in range(8):
        eager.step(number)
        lazy.step(number)
        assert_same(lazy.seen(), eager.seen())


def host_counts(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [[name, value] for entry in optimizer.state.values() for name, value in entry.items() if name == "step"]


LOOKS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "state": host_counts,
    "state of a parameter": lambda one: dict(one.state.get(one.param_groups[0]["params"][0], {})).get("step"),
    "number of states": lambda one: len(one.state),
    "deepcopy": lambda one: host_counts(copy.deepcopy(one)),
    "pickle": lambda one: host_counts(pickle.loads(pickle.dumps(one))),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("capture", [False, True])
def test_a_skipped_step_is_not_seen(look: str, capture: bool) -> None:
    eager, lazy = Training("cpu"), Training("lazy")
    if capture:
        lazy_backend.capture(lazy.optimizer)
    for number in range(14):
        eager.step(number)
        lazy.step(number)
        assert_same(LOOKS[look](lazy.optimizer), LOOKS[look](eager.optimizer))
    assert_same(lazy.seen(), eager.seen())


@pytest.mark.filterwarnings("ignore::lazy_backend.CaptureWarning")  # the first steps, which make state, are skipped
@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("before", [0, 5])
def test_a_step_whose_run_fails_is_a_skipped_one(before: int, capture: bool) -> None:
    lazy, eager = Training("lazy"), Training("cpu")
    if capture:
        lazy_backend.capture(lazy.model)
        lazy_backend.capture(lazy.optimizer)
    table = torch.ones(3, 4, device="lazy")
    for number in range(before):
        lazy.step(number)
        eager.step(number)
    forward = lazy.model.forward
    lazy.model.forward = lambda x: forward(x) * table[torch.full((6,), 7, device="lazy")]  # no such row

    def fail() -> None:
        lazy.step(99)
        lazy_backend.wait_device_ops()

    with pytest.raises((IndexError, lazy_backend.LazyBackendError)):
        fail()
    del lazy.model.forward
    if before:
        assert_same(lazy.seen(), eager.seen())
    lazy.optimizer.zero_grad()
    lazy.scaler, eager.scaler = torch.amp.GradScaler("lazy"), torch.amp.GradScaler("cpu")
    for number in range(before, before + 5):
        lazy.step(number)
        eager.step(number)
    assert_same(lazy.seen(), eager.seen())


def test_hooks_registered_after_a_skipped_step() -> None:
    """PyTorch goes through an optimizer's hooks while a step is settled, and must not find them changed."""
    calls: list[str] = []
    eager, lazy = Training("cpu"), Training("lazy")
    for training in (eager, lazy):
        for number in (2, 5):
            training.step(number)
        optimizer = training.optimizer
        handles = [
            optimizer.register_state_dict_pre_hook(lambda *_: calls.append("state_dict")),
            optimizer.register_load_state_dict_pre_hook(lambda *_: calls.append("load")),
            optimizer.register_step_pre_hook(lambda *_: calls.append("step")),
        ]
        optimizer.load_state_dict(optimizer.state_dict())
        training.backward(3)
        optimizer.step()
        for handle in handles:
            handle.remove()
        training.step(6)
    assert calls == 2 * ["state_dict", "load", "step"]
    assert_same(lazy.seen(), eager.seen())
    assert not lazy.optimizer._optimizer_step_pre_hooks


def test_a_step_without_the_scaler_follows_a_skipped_one() -> None:
    eager, lazy = Training("cpu"), Training("lazy")
    for training in (eager, lazy):
        for number in (2, 5):
            training.step(number)
        training.backward(3)
        training.optimizer.step()
    assert_same(lazy.seen(), eager.seen())


def test_loading_forgets_the_step_before() -> None:
    eager, lazy = Training("cpu"), Training("lazy")
    for training in (eager, lazy):
        training.step(2)
        known = training.optimizer.state_dict()
        training.step(5)
        training.optimizer.load_state_dict(known)
        training.step(3)
    assert_same(lazy.seen(), eager.seen())


def test_hooks_are_not_called_for_a_skipped_step() -> None:
    calls: dict[str, list[int]] = {"cpu": [], "lazy": []}
    for device, called in calls.items():
        training = Training(device)
        for number in range(8):
            handle = training.optimizer.register_step_post_hook(lambda *_, c=called, n=number: c.append(n))
            training.step(number)
            handle.remove()
    assert calls["lazy"] == calls["cpu"] == [2, 3, 4, 6, 7]
    assert metrics.counter_value("GradScalerRead: the optimizer has hooks") == 8


def test_an_optimizer_of_ones_own_is_not_called_for_a_skipped_step() -> None:
    class Counting(torch.optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            self.steps += 1
            return super().step(closure)

    training = Training("lazy")
    training.optimizer = Counting(training.model.parameters(), lr=0.1)
    for number in range(8):
        training.step(number)
    assert training.optimizer.steps == 5
    assert metrics.counter_value("GradScalerRead: the optimizer is not one of torch.optim") == 8


@pytest.mark.parametrize("infinite", [(0,), (1,), (0, 1)], ids=["first", "second", "both"])
def test_an_optimizer_skips_its_own_steps_only(infinite: tuple[int, ...]) -> None:
    """`scaler.update` adds up the flags of all optimizers in the first one."""

    def run(device: str) -> list[Any]:
        torch.manual_seed(0)
        models = [nn.Linear(4, 4).to(device) for _ in range(2)]
        optimizers = [torch.optim.Adam(model.parameters(), lr=1e-2, foreach=True) for model in models]
        scaler = torch.amp.GradScaler(device, init_scale=256.0)
        for number in range(6):
            for place, model in enumerate(models):
                is_infinite = number in (1, 3) and place in infinite
                x = torch.full((2, 4), float("inf") if is_infinite else 1.0).to(device)
                scaler.scale(model(x).square().mean()).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            for optimizer in optimizers:
                optimizer.zero_grad()
            lazy_backend.mark_step()
        return [[list(one.state_dict()["state"].values()) for one in optimizers], [*models[0].parameters()]]

    assert_same(run("lazy"), run("cpu"))


def test_two_optimizers() -> None:
    def run(device: str) -> list[Any]:
        training = Training(device)
        first, second = training.model[0], training.model[3]
        optimizers = [torch.optim.Adam(part.parameters(), lr=1e-2, foreach=True) for part in (first, second)]
        for number in range(8):
            training.backward(number)
            for optimizer in optimizers:
                training.scaler.step(optimizer)
            training.scaler.update()
            for optimizer in optimizers:
                optimizer.zero_grad()
            lazy_backend.mark_step()
        return [*training.seen(), *(list(optimizer.state_dict()["state"].values()) for optimizer in optimizers)]

    assert_same(run("lazy"), run("cpu"))


def test_a_captured_step_without_a_count_on_the_host() -> None:
    """SGD keeps nothing on the host, so a whole captured step with a scaler is replayed."""
    eager, lazy = Training("cpu", "SGD"), Training("lazy", "SGD")
    for training in (eager, lazy):
        training.step(2)  # the first step makes state, the second settles whether it was skipped
        training.step(3)

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("lazy", torch.float16):
            loss: torch.Tensor = lazy.model(x).float().square().mean()
        lazy.scaler.scale(loss).backward()
        lazy.scaler.step(lazy.optimizer)
        lazy.scaler.update()
        lazy.optimizer.zero_grad()
        return loss.detach()

    captured = lazy_backend.capture(step)
    for number in range(12):
        eager.step(number)
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(number))
        if number in INFINITE:
            x[0, 0] = float("inf")
        captured(x.to("lazy"))
    assert_same(lazy.seen(), eager.seen())
    assert metrics.counter_value("CapturedCall") >= 6


# ----- whole steps as captured functions, of optimizers that count steps on the host


def captured_step(training: Training, clip: bool = False) -> Callable[[int], torch.Tensor]:
    """A captured function around a step of `training`, called with the number of the step."""

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(training.device, torch.float16):
            loss: torch.Tensor = training.model(x).float().square().mean()
        training.scaler.scale(loss).backward()
        if clip:
            training.scaler.unscale_(training.optimizer)
            torch.nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
        training.scaler.step(training.optimizer)
        training.scaler.update()
        training.optimizer.zero_grad()
        return loss.detach()

    called = lazy_backend.capture(step) if training.device == "lazy" else step
    return lambda number, size=6: called(batch(number, size).to(training.device))


def batch(number: int, size: int = 6) -> torch.Tensor:
    x = torch.randn(size, 8, generator=torch.Generator().manual_seed(number))
    if number in INFINITE:
        x[0, 0] = float("inf")
    return x


def both_captured(name: str = "AdamW") -> Iterator[tuple[Training, Callable[..., torch.Tensor]]]:
    """The same training on the lazy device, then in eager mode, each with its step."""
    for device in ("lazy", "cpu"):
        training = Training(device, name)
        yield training, captured_step(training)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_captured_step_skips_what_eager_skips(name: str, clip: bool) -> None:
    eager, lazy = Training("cpu", name), Training("lazy", name)
    expected, found = captured_step(eager, clip), captured_step(lazy, clip)
    losses = [found(number) for number in range(24)]
    assert_same(losses, [expected(number) for number in range(24)])
    assert_same(lazy.seen(), eager.seen())
    assert metrics.counter_value("CapturedCall") >= 14  # RAdam's branch flips on the way
    assert not cuts()


@pytest.mark.parametrize("look", LOOKS)
def test_a_captured_step_that_was_skipped_is_not_seen(look: str) -> None:
    eager, lazy = Training("cpu"), Training("lazy")
    expected, found = captured_step(eager), captured_step(lazy)
    for number in range(16):
        expected(number)
        found(number)
        assert_same(LOOKS[look](lazy.optimizer), LOOKS[look](eager.optimizer))
    assert_same(lazy.seen(), eager.seen())
    assert metrics.counter_value("CapturedCall") >= 10


def test_a_hundred_captured_steps() -> None:
    """Scales overflow by themselves, and some replays are compared with the body."""
    outcomes = []
    for training, step in both_captured():
        steps = [(step(number), training.scaler.scale(torch.ones((), device=training.device))) for number in range(150)]
        outcomes.append([[torch.stack(values).cpu() for values in zip(*steps, strict=True)], training.seen()])
    assert_same(*outcomes)
    assert len(outcomes[1][0][1].unique()) > 4
    assert metrics.counter_value("CapturedCall") >= 140


def test_captured_steps_of_several_shapes() -> None:
    outcomes = []
    for training, step in both_captured():
        losses = [step(number, 4 + number % 3) for number in range(30)]
        outcomes.append([lazy_backend.to_cpu(losses), training.seen()])
    assert_same(*outcomes)
    assert metrics.counter_value("CapturedCall") >= 18


def test_captured_steps_among_others() -> None:
    """Steps as written before and in between, which may be skipped as well."""
    outcomes = []
    for training, step in both_captured():
        losses = [training.step(number) for number in (2, 5)]
        losses += [training.step(number) if number % 7 == 5 else step(number) for number in range(30)]
        outcomes.append([lazy_backend.to_cpu(losses), training.seen()])
    assert_same(*outcomes)
    assert metrics.counter_value("CapturedCall") >= 18


def _set_counts(training: Training) -> None:
    for entry in training.optimizer.state.values():
        entry["step"].fill_(3)


def _new_scaler(training: Training) -> None:
    training.scaler = torch.amp.GradScaler(training.device, init_scale=2.0)


CHANGES: dict[str, Callable[[Training], object]] = {
    "counts": _set_counts,
    "loaded": lambda one: one.optimizer.load_state_dict(copy.deepcopy(one.optimizer.state_dict())),
    "cleared": lambda one: one.optimizer.state.clear(),
    "rate": lambda one: one.optimizer.param_groups[0].__setitem__("lr", 0.1),
    "scaler": _new_scaler,
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_between_captured_steps(change: str) -> None:
    outcomes = []
    for training, step in both_captured():
        losses = []
        for number in range(30):
            if number in (6, 12, 13, 20):  # after an infinite step, and after others
                CHANGES[change](training)
            losses.append(step(number))
        outcomes.append([lazy_backend.to_cpu(losses), training.seen()])
    assert_same(*outcomes)
    assert metrics.counter_value("CapturedCall") >= 14


def test_captured_steps_of_two_optimizers() -> None:
    """Of which one may skip its step while the other does not."""

    def run(device: str) -> list[Any]:
        torch.manual_seed(0)
        models = nn.ModuleList(nn.Linear(4, 4).to(device) for _ in range(2))
        optimizers = [torch.optim.Adam(model.parameters(), lr=1e-2, foreach=True) for model in models]
        scaler = torch.amp.GradScaler(device, init_scale=256.0)

        def step(*inputs: torch.Tensor) -> None:
            for model, x in zip(models, inputs, strict=True):
                scaler.scale(model(x).square().mean()).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            for optimizer in optimizers:
                optimizer.zero_grad()

        called = lazy_backend.capture(step) if device == "lazy" else step
        for number in range(16):
            infinite = {5: (0,), 7: (1,), 8: (0, 1), 9: (1,)}.get(number, ())
            called(*[torch.full((2, 4), float("inf") if one in infinite else 1.0).to(device) for one in range(2)])
        return [[list(one.state_dict()["state"].values()) for one in optimizers], [*models[0].parameters()]]

    assert_same(run("lazy"), run("cpu"))
    assert metrics.counter_value("CapturedCall") >= 11  # the counts are equal until the first step that one skips


def test_a_captured_step_whose_run_fails_is_a_skipped_one() -> None:
    eager, lazy = Training("cpu"), Training("lazy")
    table = torch.ones(3, 4, device="lazy")

    def step(x: torch.Tensor, rows: torch.Tensor) -> None:
        lazy.scaler.scale((lazy.model(x) * table[rows]).square().mean()).backward()
        lazy.scaler.step(lazy.optimizer)
        lazy.scaler.update()
        lazy.optimizer.zero_grad()

    captured = lazy_backend.capture(step)
    for number in range(10):
        captured(batch(number).to("lazy"), torch.ones(6, dtype=torch.int64).to("lazy"))
        eager.scaler.scale(eager.model(batch(number)).square().mean()).backward()
        eager.scaler.step(eager.optimizer)
        eager.scaler.update()
        eager.optimizer.zero_grad()
    replays = metrics.counter_value("CapturedCall")
    assert replays >= 4

    def fail() -> None:
        captured(batch(2).to("lazy"), torch.full((6,), 7).to("lazy"))  # no such row
        lazy_backend.wait_device_ops()

    with pytest.raises((IndexError, lazy_backend.LazyBackendError)):
        fail()
    assert metrics.counter_value("CapturedCall") == replays + 1
    assert_same(host_counts(lazy.optimizer), host_counts(eager.optimizer))


def test_two_steps_in_one_captured_call_are_refused() -> None:
    training = Training("lazy", "AdamW")

    def step() -> None:
        for number in (2, 3):
            training.backward(number)
            training.scaler.step(training.optimizer)
            training.scaler.update()

    message = r"GradScaler steps this AdamW twice.*\n.*test_grad_scaler.*\n  take one step"
    with pytest.raises(CaptureError, match=message):
        lazy_backend.capture(step)()


@pytest.mark.scenario
def test_compiled() -> None:
    with config.patch(backend="inductor", num_profiled_runs=0):
        eager, lazy = Training("cpu"), Training("lazy")
        for number in range(7):
            eager.step(number)
            lazy.step(number)
        assert metrics.counter_value("CompileFailed") == 0
        for found, expected in zip(lazy.seen()[:6], eager.seen()[:6], strict=True):
            torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-3)
        assert_same(lazy.seen()[6], eager.seen()[6])  # the first parameter's step count
