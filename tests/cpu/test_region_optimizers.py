"""Captured optimizers in ordinary loops: every optimizer as users make it, with and without schedules."""

from __future__ import annotations

import copy
import gc
import inspect
import math
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from harness import assert_same, count
from torch import nn, optim
from torch.optim import lr_scheduler

import lazy_backend
from lazy_backend import CaptureWarning, capture, mark_step

# Foreach forms on both sides: the CPU's default is one tensor after the other, which rounds otherwise in some of them.
OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD": lambda p: optim.SGD(p, 0.1, foreach=True),
    "momentum": lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=True),
    "Adam": lambda p: optim.Adam(p, foreach=True),
    "amsgrad": lambda p: optim.Adam(p, amsgrad=True, weight_decay=0.1, foreach=True),
    "AdamW": lambda p: optim.AdamW(p, foreach=True),
    "one by one": lambda p: optim.AdamW(p, foreach=False),
    "NAdam": lambda p: optim.NAdam(p, foreach=True),
    "RAdam": lambda p: optim.RAdam(p, foreach=True),
    "Adamax": lambda p: optim.Adamax(p, foreach=True),
    "Adagrad": lambda p: optim.Adagrad(p, lr_decay=0.1, foreach=True),
    "RMSprop": lambda p: optim.RMSprop(p, momentum=0.5, centered=True, foreach=True),
    "Rprop": lambda p: optim.Rprop(p, foreach=True),
    "Adadelta": lambda p: optim.Adadelta(p, foreach=True),
}
SCHEDULES: dict[str, Callable[[optim.Optimizer], Any]] = {
    "constant": lambda o: None,
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=60, cycle_momentum="momentum" in o.defaults),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=2),
}
NUM_STEPS = 40


@pytest.fixture(autouse=True)
def interpreted() -> None:
    lazy_backend.config.compile = "off"


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))


def train(
    device: str,
    make: Callable[[Any], optim.Optimizer],
    schedule: Callable[[optim.Optimizer], Any] = SCHEDULES["constant"],
    manner: str = "plain",
    captured: bool = False,
    num_steps: int = NUM_STEPS,
    change: Callable[[Any, optim.Optimizer, int], object] = lambda model, optimizer, step: None,
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = make_model().to(device)
    optimizer = make(model.parameters())
    if captured:
        capture(model)
        capture(optimizer)
    scheduler = schedule(optimizer)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**16, growth_interval=10, enabled="scale" in manner)
    losses = []
    for step in range(num_steps):
        change(model, optimizer, step)
        for _ in range(4 if manner == "accumulate" else 1):
            loss = model(torch.randn(4, 3).to(device)).square().mean()
            if step in (0, 1, 13) and scaler.is_enabled():  # steps that are skipped
                loss = loss * torch.inf
            scaler.scale(loss).backward()
        if "clip" in manner:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(float(step % 7))
        elif scheduler is not None:
            scheduler.step()
        if device == "lazy":
            mark_step()
        losses.append(loss)
    return [value.detach().cpu().clone() for value in (*losses, *model.parameters())]


def assert_replayed(*args: Any, num_jumps: int = 0, **options: Any) -> None:
    """Train on the CPU and captured: the same bits, with `num_jumps` forwards, backwards and steps replayed."""
    expected = train("cpu", *args, **options)
    with count("RegionJump") as jumps:
        found = train("lazy", *args, captured=True, **options)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)  # a failure names the place
    assert jumps() >= num_jumps, jumps()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_replay_with_schedules(name: str, schedule: str) -> None:
    # two of the three stretches of a step are those of the model; after ten steps 95 % of all are replayed
    assert_replayed(OPTIMIZERS[name], SCHEDULES[schedule], num_jumps=int(0.95 * 3 * (NUM_STEPS - 10)))


@pytest.mark.parametrize("manner", ["clip", "accumulate"])
@pytest.mark.parametrize("name", ["SGD", "AdamW", "one by one", "RMSprop"])
def test_clipped_and_accumulated_gradients(name: str, manner: str) -> None:
    assert_replayed(OPTIMIZERS[name], SCHEDULES["cosine"], manner, num_jumps=int(0.95 * 3 * (NUM_STEPS - 10)))


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler:UserWarning")  # eager skips the first steps too
@pytest.mark.parametrize("manner", ["scale", "scale and clip"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_grad_scaler_skips_steps(name: str, manner: str) -> None:
    assert_replayed(OPTIMIZERS[name], SCHEDULES["one cycle"], manner, num_jumps=int(0.95 * 3 * (NUM_STEPS - 10)))


def _groups(parameters: Any) -> optim.Optimizer:
    found = list(parameters)
    return optim.AdamW(
        [{"params": found[:2], "lr": 0.1}, {"params": found[2:], "weight_decay": 0.0, "betas": (0.5, 0.9)}],
        foreach=True,
    )


def test_groups_with_hyperparameters_of_their_own() -> None:
    assert_replayed(_groups, SCHEDULES["cosine"], num_jumps=80)


def _changes() -> dict[str, Callable[[Any, Any, int], object]]:
    def at(change: Callable[[Any, Any], object]) -> Callable[[Any, Any, int], object]:
        return lambda model, optimizer, step: change(model, optimizer) if step in (12, 25) else None

    def reload(model: Any, optimizer: Any) -> None:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    def replace_momentum(model: Any, optimizer: Any) -> None:
        for state in optimizer.state.values():
            state["exp_avg"] = state["exp_avg"] * 2

    def set_counts(model: Any, optimizer: Any) -> None:
        for state in optimizer.state.values():
            state["step"].fill_(3)

    def set_one_count(model: Any, optimizer: Any) -> None:
        next(iter(optimizer.state.values()))["step"].fill_(3)

    def add_group(model: Any, optimizer: Any) -> None:
        if len(optimizer.param_groups) == 1:
            model.append(nn.Linear(2, 2).to(model[0].weight.device))
            optimizer.add_param_group({"params": list(model[-1].parameters()), "lr": 0.5})

    def set_group(name: str, value: Any) -> Callable[[Any, Any], object]:
        return lambda model, optimizer: optimizer.param_groups[0].__setitem__(name, value)

    return {
        "lr": at(set_group("lr", 0.5)),
        "lr zero": at(set_group("lr", 0.0)),
        "betas": at(set_group("betas", (0.5, 0.7))),
        "weight decay off": at(set_group("weight_decay", 0.0)),
        "weight decay every step": lambda m, o, n: o.param_groups[0].__setitem__("weight_decay", 0.1 / (n + 1)),
        "maximize": at(set_group("maximize", True)),
        "amsgrad off": at(set_group("eps", 0.1)),
        "state cleared": at(lambda m, o: o.state.clear()),
        "state loaded": at(reload),
        "momentum replaced": at(replace_momentum),
        "momentum in place": at(lambda m, o: [s["exp_avg"].mul_(2) for s in o.state.values()]),
        "counts set": at(set_counts),
        "one count set": at(set_one_count),
        "a group added": at(add_group),
        "a layer frozen": at(lambda m, o: m[0].requires_grad_(False)),
        "weights replaced": at(lambda m, o: setattr(m[0].weight, "data", m[0].weight.data * 2)),
        "parameters exchanged": at(lambda m, o: o.param_groups[0]["params"].reverse()),
        "a hook": at(lambda m, o: o.register_step_pre_hook(lambda o, a, k: o.param_groups[0].__setitem__("lr", 0.01))),
    }


@pytest.mark.parametrize("name", _changes())
def test_a_change_between_two_steps_is_noticed(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        assert_replayed(lambda p: optim.AdamW(p, 0.01, foreach=True), change=_changes()[name], num_jumps=60)


def test_steps_without_the_model() -> None:
    """An optimizer alone, at several places of a step, with gradients that the user made."""

    def run(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(3).to(device)) for _ in range(3)]
        optimizer = optim.Adam(parameters, foreach=True)
        if device == "lazy":
            capture(optimizer)
        for step in range(30):
            for number, parameter in enumerate(parameters):
                parameter.grad = None if (step + number) % 3 == 0 else torch.randn(3).to(device)
            optimizer.step()
            if step % 2 and device == "lazy":
                mark_step()
        return [p.detach().cpu() for p in parameters]

    for one, other in zip(run("cpu"), run("lazy"), strict=True):
        assert torch.equal(one, other)


def test_a_scheduler_made_before_or_after() -> None:
    model = make_model().to("lazy")
    optimizer = optim.SGD(model.parameters(), 0.1)
    before = lr_scheduler.StepLR(optimizer, 1)
    capture(optimizer)
    after = lr_scheduler.StepLR(optimizer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(8):
            model(torch.randn(4, 3).to("lazy")).sum().backward()
            optimizer.step()
            before.step()
            after.step()
            mark_step()


def test_a_schedule_made_before_the_capture_does_not_warn() -> None:
    model = make_model().to("lazy")
    optimizer = optim.AdamW(model.parameters())
    schedule = lr_scheduler.StepLR(optimizer, 1)
    capture(optimizer)
    for _ in range(3):  # warnings are errors in the tests
        model(torch.randn(4, 3).to("lazy")).sum().backward()
        optimizer.step()
        schedule.step()
        mark_step()


@pytest.mark.parametrize("as_keyword", [False, True])
def test_a_closure_that_is_called_once_does_not_keep_a_step_from_being_replayed(as_keyword: bool) -> None:
    def train(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = make_model().to(device)
        optimizer = optim.AdamW(model.parameters(), lr=0.1)
        if device == "lazy":
            capture(optimizer)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(4, 3).to(device)).square().mean()
            loss.backward()
            return loss

        losses = []
        for _ in range(8):
            with torch.no_grad():  # a closure runs with gradients all the same
                loss = optimizer.step(closure=closure) if as_keyword else optimizer.step(closure)
            losses.append(loss.detach())
            mark_step()
        return [loss.cpu() for loss in losses]

    with count("RegionJump") as jumps:
        losses = train("lazy")
    assert jumps() >= 5
    assert_same(losses, train("cpu"))


def test_a_closure_is_called() -> None:
    model = make_model().to("lazy")
    optimizer = capture(optim.LBFGS(model.parameters(), max_iter=2))
    calls = []

    def closure() -> torch.Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = model(torch.ones(4, 3).to("lazy")).square().mean()
        loss.backward()
        return loss

    for _ in range(6):
        assert optimizer.step(closure) is not None
        mark_step()
    assert len(calls) >= 6


def test_a_captured_optimizer_is_the_optimizer() -> None:
    model = make_model().to("lazy")
    optimizer = optim.AdamW(model.parameters())
    names = list(optimizer.state_dict())
    assert capture(optimizer) is optimizer
    assert capture(optimizer) is optimizer
    assert list(optimizer.state_dict()) == names
    assert isinstance(optimizer.param_groups[0]["lr"], float)
    for _ in range(4):
        model(torch.ones(4, 3).to("lazy")).sum().backward()
        optimizer.step()
        mark_step()
    assert type(optimizer.param_groups[0]["lr"]) is float
    assert all(type(value) is float for value in optimizer.param_groups[0]["betas"])
    pickle.loads(pickle.dumps(optimizer.state_dict()))
    reference = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert reference() is None
    finally:
        gc.enable()


# ----- numbers in groups that steps change


class Counted(optim.Optimizer):
    """Steps by `rate(group, count)`, counting in the group."""

    def __init__(self, parameters: Any, rate: Callable[[Any, Any], float], first: int | None) -> None:
        self.rate = rate
        super().__init__(parameters, {"lr": 0.01, "betas": (0.9, 0.99)} | ({} if first is None else {"step": first}))

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            rate = self.rate(group, group["step"])
            for p in group["params"]:
                p.add_(p.grad.sign(), alpha=-rate)


def _debiased(group: Any, count: Any) -> float:
    beta1, beta2 = group["betas"]
    return group["lr"] * math.sqrt(1 - beta2**count) / (1 - math.pow(beta1, count))


def _schedule_free(group: Any, count: Any) -> float:
    lr = group["lr"] * min(1.0, count / 10)
    lr_max = group["lr_max"] = max(lr, group.get("lr_max", 0.0))
    weight = count**0.5 * lr_max**2
    total = group["weight_sum"] = group.get("weight_sum", 0.0) + weight
    share: float = weight / total
    return share


TABLE = [0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2] + [0.3] * 40


def _by_turns(group: Any, count: Any) -> float:
    return 0.1 if count % 7 else 0.2


def _summed(group: Any, count: Any) -> float:
    return sum((0.001 for _ in range(count)), 0.01)


def _first_of(group: Any, count: Any) -> float:
    return len(TABLE[: count // 20]) * 0.1 + 0.1


def _by_an_array(group: Any, count: Any) -> float:
    return 0.1 * float(np.searchsorted([12, 25], count) + 1)


# whether a replay can follow it
RATES: dict[str, tuple[Callable[[Any, Any], float], bool]] = {
    "the count alone": (lambda group, count: group["lr"], True),
    "Adam's": (_debiased, True),
    "by a division": (lambda group, count: group["lr"] / count, True),
    "schedule-free": (_schedule_free, True),
    "a warm-up": (lambda group, count: group["lr"] * (count / 10 if count < 10 else 1.0), True),
    "every seventh": (_by_turns, False),
    "a table": (lambda group, count: TABLE[count], False),
    "a slice": (_first_of, False),
    "a loop": (_summed, False),
    "a dict": (lambda group, count: {count: 0.1}[count] if count < 20 else 0.2, False),
    "a set": (lambda group, count: 0.1 if count in {20, 21} else 0.2, False),
    "an array": (_by_an_array, False),
    "text": (lambda group, count: 0.1 * len(f"{count}"), False),
    "an integer": (lambda group, count: 0.1 if isinstance(count, int) and count.bit_length() > 4 else 0.2, False),
    "bits": (lambda group, count: 0.1 if count & 16 else 0.2, False),
    "a tensor": (lambda group, count: float(torch.tensor(count) > 15) + 0.1, False),
}


@pytest.mark.filterwarnings("ignore::lazy_backend.CaptureWarning")
@pytest.mark.parametrize("first", [None, 0])
@pytest.mark.parametrize("name", RATES)
def test_a_count_in_a_group(name: str, first: int | None) -> None:
    rate, is_followed = RATES[name]
    groups = []

    def make(parameters: Any) -> optim.Optimizer:
        optimizer = Counted(parameters, rate, first)
        groups.append(optimizer.param_groups[0])
        return optimizer

    # two of the three stretches of a step are those of the model
    assert_replayed(make, num_jumps=int(0.95 * 3 * (NUM_STEPS - 12)) if is_followed else 0)
    for key, value in groups[0].items():
        assert type(groups[1][key]) is type(value), key
        if key != "params":
            assert groups[1][key] == value, key
    assert groups[1]["step"] == NUM_STEPS + (first or 0)


class CountsInState(optim.Optimizer):
    """As older optimizers: each parameter's state has its count, and here the product of its decays."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, product=1.0, average=torch.zeros_like(p), name="a parameter")
                state["step"] += 1
                state["product"] *= beta2
                state["average"].mul_(beta1).add_(p.grad, alpha=1 - beta1)
                if state["step"] % 5 == 0:
                    p.mul_(1 - group["lr"] * 0.1)
                rate = group["lr"] * math.sqrt(1 - state["product"]) / (1 - beta1 ** state["step"])
                p.add_(state["average"], alpha=-rate)


def _freeze(model: Any, optimizer: Any, step: int) -> None:
    first = optimizer.param_groups[0]["params"][0]
    if step in (20, 24):  # its count stands still meanwhile
        first.requires_grad_(step == 24)


def _count_anew(model: Any, optimizer: Any, step: int) -> None:
    if step == 20:
        for state in optimizer.state.values():
            state["step"] = 3


def _count_in_floats(model: Any, optimizer: Any, step: int) -> None:
    if step == 20:
        for state in optimizer.state.values():
            state["step"] = float(state["step"])


def _another_state(model: Any, optimizer: Any, step: int) -> None:
    if step == 20:
        first = next(iter(optimizer.state))
        optimizer.state[first] = dict(optimizer.state[first], step=1)


def _load_state(model: Any, optimizer: Any, step: int) -> None:
    if step == 20:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@pytest.mark.parametrize("change", [None, _freeze, _count_anew, _count_in_floats, _another_state, _load_state])
def test_counts_in_the_state(change: Any) -> None:
    optimizers = []

    def make(parameters: Any) -> optim.Optimizer:
        optimizers.append(CountsInState(parameters))
        return optimizers[-1]

    assert_replayed(make, SCHEDULES["cosine"], num_steps=60, **({} if change is None else {"change": change}))
    steps = next(row for row in lazy_backend.captures() if row["kind"] == "optimizer")
    assert steps["replays"] >= (45 if change is None else 25), steps
    for one, other in zip(optimizers[0].state.values(), optimizers[1].state.values(), strict=True):
        for name in ("step", "product"):
            assert type(one[name]) is type(other[name])
            assert one[name] == other[name]


class ComesAndGoes(optim.Optimizer):
    """Has a count in the state of a parameter at some steps only."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if state.get("step", 0) > 2:
                    del state["step"]
                    p.mul_(0.5)
                else:
                    state["step"] = state.get("step", 0) + 1
                    p.mul_(1 - group["lr"] * state["step"])


@pytest.mark.filterwarnings("ignore::lazy_backend.CaptureWarning")
@pytest.mark.parametrize("every", [0, 1, 2, 5])
def test_counts_that_come_and_go(every: int) -> None:
    optimizers = []

    def make(parameters: Any) -> optim.Optimizer:
        optimizers.append(ComesAndGoes(parameters, {"lr": 0.01}))
        return optimizers[-1]

    def begin_again(model: Any, optimizer: Any, step: int) -> None:
        if every and step % every == 0:
            for state in optimizer.state.values():
                state.clear()

    assert_replayed(make, num_steps=70, change=begin_again)
    first, second = ([dict(state) for state in one.state.values()] for one in optimizers)
    assert first == second


class Branching(optim.Optimizer):
    """Counts in its groups. Makes other calls, or the same ones with other floats, as the count and the rate say."""

    def __init__(self, parameters: Any, period: int) -> None:
        self.period = period
        super().__init__(parameters, {"lr": 0.01, "step": 0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] += 1
            for p in group["params"]:
                if group["step"] % self.period == 0:
                    p.mul_(1 - group["lr"] / group["step"])
                if group["step"] % 3:
                    p.add_(p.grad.sign(), alpha=-group["lr"])
                elif group["lr"] > 0.0097:
                    p.add_(p.grad.sign(), alpha=-0.5 * group["lr"])
                else:
                    p.add_(p.grad.sign(), alpha=group["lr"] / group["step"])


@pytest.mark.parametrize("decay", [1.0, 0.9995])
@pytest.mark.parametrize("period", [2, 4])
def test_steps_that_take_turns_are_replayed(period: int, decay: float) -> None:
    optimizers = []

    def make(parameters: Any) -> optim.Optimizer:
        optimizers.append(Branching(parameters, period))
        return optimizers[-1]

    assert_replayed(make, lambda optimizer: lr_scheduler.ExponentialLR(optimizer, decay), num_steps=100)
    steps = next(row for row in lazy_backend.captures() if row["kind"] == "optimizer")
    assert steps["replays"] >= 80, steps  # each of up to six programs is learned from two or three steps
    assert optimizers[1].param_groups[0]["step"] == 100


@pytest.mark.filterwarnings("ignore::lazy_backend.CaptureWarning")
@pytest.mark.parametrize("name", RATES)
def test_a_count_in_a_group_of_a_captured_function(name: str) -> None:
    rate, is_followed = RATES[name]
    found = []
    with count("CapturedCall") as replayed:
        for device in ("cpu", "lazy"):
            parameter = nn.Parameter(torch.ones(3).to(device))
            optimizer = Counted([parameter], rate, 0)

            def step(x: torch.Tensor, parameter: Any = parameter, optimizer: Any = optimizer) -> torch.Tensor:
                parameter.grad = x * 1
                optimizer.step()
                return x * 1

            run = step if device == "cpu" else capture(step)
            for number in range(NUM_STEPS):
                run(torch.full((3,), 1.0 - number % 3).to(device))
            entries = {key: (type(one), one) for key, one in optimizer.param_groups[0].items() if key != "params"}
            found.append((parameter.detach().cpu().tolist(), entries))
    assert found[1] == found[0]
    assert not is_followed or replayed() >= 0.9 * (NUM_STEPS - 12)


class WithRate(optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})


class Nested(WithRate):
    """Keeps momenta in a dict and in a list in its state."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if not self.state[p]:
                self.state[p]["momenta"] = {0.5: torch.zeros_like(p), 0.9: torch.zeros_like(p)}
                self.state[p]["sums"] = [torch.zeros_like(p)]
            for beta, momentum in self.state[p]["momenta"].items():
                p.sub_(momentum.mul_(beta).add_(p.grad), alpha=self.param_groups[0]["lr"])
            self.state[p]["sums"][0].add_(p)


class Scratch(WithRate):
    """Computes in memory of its own, as Muon's iterations do."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            scratch = torch.empty(tuple(p.shape), device=p.device)
            torch.mul(p.grad, 0.5, out=scratch)
            p.sub_(scratch, alpha=self.param_groups[0]["lr"])


class Uploading(WithRate):
    """Uploads a constant, and its learning rate."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            factor = torch.tensor([0.5]).to(p.device) * torch.tensor(self.param_groups[0]["lr"]).to(p.device)
            p.sub_(p.grad * factor)


@pytest.mark.parametrize("kind", [Nested, Scratch, Uploading])
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_optimizers_of_other_kinds(kind: Any, schedule: str) -> None:
    assert_replayed(kind, SCHEDULES[schedule], num_jumps=int(0.95 * 3 * (NUM_STEPS - 12)))


@pytest.mark.parametrize("kind", [Nested, Scratch, Uploading])
def test_optimizers_of_other_kinds_in_a_captured_function(kind: Any) -> None:
    found = []
    with count("CapturedCall") as replayed:
        for device in ("cpu", "lazy"):
            parameter = nn.Parameter(torch.ones(3).to(device))
            optimizer = kind([parameter])

            def step(x: torch.Tensor, parameter: Any = parameter, optimizer: Any = optimizer) -> torch.Tensor:
                parameter.grad = x * 1
                optimizer.step()
                return x * 1

            run = step if device == "cpu" else capture(step)
            for number in range(NUM_STEPS):
                optimizer.param_groups[0]["lr"] = 0.01 * (number % 4 + 1)
                run(torch.full((3,), 1.0 - number % 3).to(device))
            found.append(parameter.detach().cpu().tolist())
    assert found[1] == found[0]
    assert replayed() >= 0.8 * NUM_STEPS


def test_an_entry_that_no_formula_follows_is_named() -> None:
    def rate(group: Any, count: Any) -> float:
        group["size"] = float(len(TABLE) + int(count))
        return 0.1

    parameter = nn.Parameter(torch.ones(3).to("lazy"))
    optimizer = capture(Counted([parameter], rate, 0))

    def run() -> None:
        for _ in range(10):
            parameter.grad = torch.ones(3).to("lazy")
            optimizer.step()
            mark_step()

    with pytest.warns(CaptureWarning, match="changes the entry 'size' of a group as no formula predicts"):
        run()


# ----- zero_grad


def test_zero_grad_does_what_it_did() -> None:
    model = make_model().to("lazy")
    optimizer = capture(optim.SGD(model.parameters(), 0.1))
    assert list(inspect.signature(optimizer.zero_grad).parameters) == ["set_to_none"]  # as accelerate asks
    for parameters in ({}, {"set_to_none": True}):
        model(torch.ones(2, 3, device="lazy")).sum().backward()
        optimizer.zero_grad(**parameters)
        assert all(parameter.grad is None for parameter in model.parameters())
    model(torch.ones(2, 3, device="lazy")).sum().backward()
    optimizer.zero_grad(False)
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()


def test_zero_grad_is_shown_by_the_profiler() -> None:
    model = make_model().to("lazy")
    optimizer = capture(optim.SGD(model.parameters(), 0.1))
    model(torch.ones(2, 3, device="lazy")).sum().backward()
    with torch.profiler.profile() as profile:
        optimizer.zero_grad()
    assert "Optimizer.zero_grad#SGD.zero_grad" in {event.name for event in profile.events()}
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_zero_grad_of_the_users_own_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(optim.SGD):
        calls = 0

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.calls += 1
            super().zero_grad(set_to_none)

    model = make_model().to("lazy")
    optimizer = capture(Counting(model.parameters(), 0.1))
    optimizer.zero_grad()
    assert optimizer.calls == 1
    optimizer = capture(optim.Adam(model.parameters()))
    with monkeypatch.context() as patch:  # after the capture
        patch.setattr(optim.Optimizer, "zero_grad", lambda self, set_to_none=True: called.append(self))
        called: list[object] = []
        optimizer.zero_grad()
        assert called == [optimizer]
    for captures_first in (True, False):
        plain, called = optim.SGD(model.parameters(), 0.1), []
        if captures_first:
            capture(plain)
        plain.zero_grad = lambda set_to_none=True, called=called: called.append(set_to_none)  # type: ignore
        capture(plain).zero_grad()
        assert called == [True]
