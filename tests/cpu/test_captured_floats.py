"""Captured functions with floats and CPU tensors: followed, guarded or refused with a reason, never frozen silently."""

from __future__ import annotations

import cmath
import copy
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import assert_same, count
from torch import nn

import lazy_backend
from lazy_backend import CaptureWarning, capture
from lazy_backend.floats.formulas import TracedFloat
from lazy_backend.lowering.ir.program import Call
from lazy_backend.tensors.contexts import contexts


@pytest.fixture(autouse=True)
def interpreted() -> None:
    lazy_backend.config.compile = "off"


def ones(device: str, *shape: int) -> torch.Tensor:
    return torch.ones(shape or (3,), device=device)


def call_often(captured: Callable[..., Any], number: int, *floats: float) -> list[Any]:
    return [captured(ones("lazy"), *floats) for _ in range(number)]


def train_alike(captured: Callable[..., Any], plain: Callable[..., Any], calls: int = 12) -> None:
    for _ in range(calls):
        assert_same(captured(0), plain(0))


def beside_eager(make: Callable[[str], Callable[[int], Any]], calls: int = 10) -> int:
    """Run what `make` gives for a device, in eager and lazily; the results must be the same. Returns the replays."""
    plain, captured = make("cpu"), make("lazy")
    with count("CapturedCall") as replayed:
        for number in range(calls):
            expected = plain(number)
            assert_same(lazy_backend.to_cpu(captured(number)), expected)
    return replayed()


# ----- floats


@pytest.mark.filterwarnings("ignore::lazy_backend.CaptureWarning")  # where each value is a branch of its own
@pytest.mark.parametrize(
    "function",
    [
        lambda s: min(s, 0.5),
        lambda s: max(s, 0.5),
        lambda s: abs(s),
        lambda s: int(s * 10) / 10,
        lambda s: round(s),
        lambda s: round(s, 1),
        lambda s: 1 - s * 0.1,
        lambda s: s**2 + 2**s,
        lambda s: math.sqrt(abs(s)),
        lambda s: math.floor(s),
        lambda s: s if s > 0 else -s,
        lambda s: float(s),
        lambda s: float(f"{s:.1f}"),
        lambda s: {0.1: 5.0}.get(s, 7.0),
        lambda s: copy.deepcopy(s),
        lambda s: divmod(s, 0.3)[1],
        lambda s: sum([s, s, 0.25]),
        lambda s: -s // 0.3 % 0.2,
    ],
)
def test_functions_of_a_float_argument(function: Callable[[float], Any]) -> None:
    values = [0.1, 0.2, 0.3, 0.4, 0.9, -0.7, 0.1, 2.5, 2.5, 2.5, 3.5, -0.0, 0.0, 1e-9]
    captured = capture(lambda x, s: torch.copysign(x, x * function(s)) + x * function(s))
    for value in values:
        x = ones("cpu")
        expected = torch.copysign(x, x * function(value)) + x * function(value)
        assert_same(captured(ones("lazy"), value), expected)


def test_weight_decay_times_a_scheduled_rate_is_followed() -> None:
    model = nn.Linear(3, 1).to("lazy")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1, fused=False)
    step = capture(lambda x: (model(x).sum().backward(), optimizer.step(), optimizer.zero_grad())[1])
    with count("CapturedCall") as replayed:
        for number in range(12):
            optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
            step(ones("lazy", 2, 3))
    assert replayed() >= 8


def test_hyperparameters_are_plain_floats_after_a_call() -> None:
    model = nn.Linear(3, 1).to("lazy")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def body(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        if x.shape[0] == 5:
            raise ValueError("five")

    step = capture(body)
    before = optimizer.param_groups[0]["lr"]
    for rows in (2, 2, 2, 5, 5, 2):
        try:
            step(ones("lazy", rows, 3))
        except ValueError:
            assert rows == 5
        assert optimizer.param_groups[0]["lr"] is before
        assert all(type(beta) is float for beta in optimizer.param_groups[0]["betas"])
        state = [value for entry in optimizer.state.values() for value in entry.values()]
        assert not any(isinstance(value, TracedFloat) for value in state)


def test_a_returned_float_is_that_of_the_call() -> None:
    captured = capture(lambda x, s: (x * s, s * 2))
    for value in (0.5, 0.5, 0.25, 0.75, 0.75, 1.5):
        _, returned = captured(ones("lazy"), value)
        assert type(returned) is float
        assert returned == value * 2


def test_a_float_that_the_body_keeps_is_refused() -> None:
    kept: list[float] = []
    captured = capture(lambda x, s: (kept.append(s), x * s)[1])
    with pytest.warns(CaptureWarning, match="keeps a float"):
        call_often(captured, 6, 0.25)
    assert kept == [0.25] * 6
    assert type(kept[0] + 1) is float


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 4),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0 if epoch < 6 else 0.0),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
        lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [7]),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
        lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 5),
                torch.optim.lr_scheduler.StepLR(optimizer, 4),
            ],
            [6],
        ),
    ],
)
@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)])
def test_a_schedule_inside_the_body_is_refused(schedule: Callable[[torch.optim.Optimizer], Any], rate: Any) -> None:
    def make(device: str) -> Callable[[int], Any]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=copy.deepcopy(rate), foreach=False)
        scheduler = schedule(optimizer)

        def body(number: int) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(ones(device, 2, 3)).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            return loss.detach()

        return body

    plain, captured = make("cpu"), capture(make("lazy"))
    with pytest.warns(CaptureWarning, match="schedules outside"):
        train_alike(captured, plain)


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)])
def test_a_schedule_that_the_body_computes_itself_is_refused(rate: Any) -> None:
    """As `torch.optim`'s schedules, but by hand: a float that comes from a count in Python."""

    def make(device: str) -> Callable[[int], Any]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=copy.deepcopy(rate), foreach=False)
        calls = [0]

        def body(number: int) -> torch.Tensor:
            calls[0] += 1
            if isinstance(rate, float):
                optimizer.param_groups[0]["lr"] = 0.1 / calls[0]
            else:
                optimizer.param_groups[0]["lr"].fill_(0.1 / calls[0])
            optimizer.zero_grad()
            loss = model(ones(device, 2, 3)).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return body

    plain, captured = make("cpu"), capture(make("lazy"))
    with pytest.warns(CaptureWarning, match="schedules outside|no formula follows|a float of"):
        train_alike(captured, plain)


class CountsInPython(torch.optim.Optimizer):
    """An optimizer whose step count is an int in its state."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "beta": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                parameter.add_(parameter.grad, alpha=-group["lr"] / (1 - group["beta"] ** state["step"]))


@pytest.mark.filterwarnings("ignore::lazy_backend.CaptureWarning")
def test_a_count_that_is_an_int_is_not_frozen() -> None:
    same_training(lambda parameters: CountsInPython(parameters, lr=0.1), lambda optimizer, number: None, 20)


# ----- tensors on the CPU


def training(
    device: str, make: Callable[[Any], torch.optim.Optimizer], change: Callable[[Any, int], None]
) -> Callable[[int], Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1).to(device)
    optimizer = make(model.parameters())

    def body(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = capture(body) if device == "lazy" else body

    def call(number: int) -> Any:
        change(optimizer, number)
        return [step(ones(device, 2, 3)), *[parameter.detach() for parameter in model.parameters()]]

    return call


def same_training(make: Callable[[Any], torch.optim.Optimizer], change: Callable[[Any, int], None], calls: int) -> int:
    plain, captured = training("cpu", make, change), training("lazy", make, change)
    with count("CapturedCall") as replayed:
        for number in range(calls):
            assert_same(lazy_backend.to_cpu(captured(number)), plain(number))
    return replayed()


def set_rate(optimizer: torch.optim.Optimizer, number: int) -> None:
    if number > 3:
        optimizer.param_groups[0]["lr"].fill_(0.1 / number if number != 7 else 0.0)


def test_a_rate_in_a_cpu_tensor_is_followed() -> None:
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=torch.tensor(0.1), foreach=False)
    assert same_training(sgd, set_rate, 14) >= 9
    adam = lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.1), foreach=False)
    assert same_training(adam, set_rate, 14) >= 8


def test_a_rate_in_a_cpu_tensor_of_a_capturable_optimizer() -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        parameters = list(parameters)
        capturable = parameters[0].device.type == "lazy"
        return torch.optim.AdamW(parameters, lr=torch.tensor(0.1), capturable=capturable, foreach=False)

    plain, captured = training("cpu", make, set_rate), training("lazy", make, set_rate)
    for number in range(12):
        for found, expected in zip(lazy_backend.to_cpu(captured(number)), plain(number), strict=True):
            torch.testing.assert_close(found, expected)


def test_load_state_dict_exchanges_the_counts() -> None:
    saved: dict[int, Any] = {}

    def change(optimizer: torch.optim.Optimizer, number: int) -> None:
        if number == 5:
            saved[id(optimizer)] = copy.deepcopy(optimizer.state_dict())
        elif number == 9:
            optimizer.load_state_dict(saved[id(optimizer)])
        elif number == 12:
            for entry in optimizer.state.values():
                entry["step"].fill_(2.0)
        elif number == 14:
            next(iter(optimizer.state.values()))["step"].fill_(90.0)

    assert same_training(lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True), change, 20) >= 11


def test_a_number_on_the_cpu_as_operand() -> None:
    def make(device: str) -> Callable[[int], Any]:
        scale = torch.tensor(0.5)

        def body(x: torch.Tensor) -> torch.Tensor:
            return x * scale + torch.where(x > scale, scale, x)

        step = capture(body) if device == "lazy" else body

        def call(number: int) -> Any:
            if number in (5, 7, 8):
                scale.fill_(float(number))
            if number == 9:
                scale.data.fill_(-0.0)
            return step(ones(device))

        return call

    assert beside_eager(make, 12) >= 6


@pytest.mark.parametrize("how", ["to", "copy_", "tensor", "stack", "numpy", "list", "index"])
def test_an_upload_in_the_body_is_followed(how: str) -> None:
    def make(device: str) -> Callable[[int], Any]:
        source = torch.arange(3.0)
        array = source.numpy()
        values = [0.0, 1.0, 2.0]

        def body(x: torch.Tensor) -> torch.Tensor:
            if how == "to":
                return x + source.to(x.device)
            if how == "copy_":
                return x + torch.empty(3, device=x.device).copy_(source)
            if how == "tensor":
                return x + torch.as_tensor(source, device=x.device, dtype=torch.float64)
            if how == "stack":
                return x + torch.stack([source, source * 2]).sum(0).to(x.device)
            if how == "numpy":
                return x + torch.from_numpy(array).to(x.device)
            if how == "list":
                return x + torch.tensor(values, device=x.device)
            return x + source[torch.tensor([2, 1, 0])].to(x.device)

        step = capture(body) if device == "lazy" else body

        def call(number: int) -> Any:
            if number in (5, 7, 8, 9):
                source[1] = number
                values[1] = float(number)
            return step(ones(device))

        return call

    assert beside_eager(make, 14) >= 6


def test_a_count_on_the_cpu_is_advanced() -> None:
    def make(device: str) -> Callable[[int], Any]:
        seen, total = torch.zeros((), dtype=torch.int64), torch.zeros(4, dtype=torch.float64)

        def body(x: torch.Tensor) -> torch.Tensor:
            seen.add_(1)
            total[1:3] += 0.1
            total.mul_(1.5)
            return x * 2

        step = capture(body) if device == "lazy" else body
        return lambda number: [step(ones(device)), seen.clone(), total.clone()]

    with pytest.warns(CaptureWarning, match="on the CPU that shares memory"):
        beside_eager(make, 8)

    def make_followed(device: str) -> Callable[[int], Any]:
        seen, total = torch.zeros((), dtype=torch.int64), torch.zeros(4, dtype=torch.float64)

        def body(x: torch.Tensor) -> torch.Tensor:
            seen.add_(1)
            total.add_(0.1).mul_(1.5)
            total[1] = 7.0
            return x * 2

        step = capture(body) if device == "lazy" else body
        return lambda number: [step(ones(device)), seen.clone(), total.clone()]

    assert beside_eager(make_followed, 8) == 6


def test_a_value_of_a_cpu_tensor_that_the_body_branches_on() -> None:
    def make(device: str) -> Callable[[int], Any]:
        warm, flag = torch.tensor(0.0), torch.tensor(False)

        def body(x: torch.Tensor) -> torch.Tensor:
            warm.add_(1.0)
            x = x * 3 if warm.item() > 6 else x / warm.item()
            return x + 1 if flag else x - 1

        step = capture(body) if device == "lazy" else body

        def call(number: int) -> Any:
            if number == 10:
                flag.fill_(True)
            return step(ones(device))

        return call

    assert beside_eager(make, 14) >= 8


def test_a_tensor_on_the_cpu_that_the_body_makes_and_keeps_is_refused() -> None:
    kept = {"count": torch.tensor(0.0)}

    def body(x: torch.Tensor) -> torch.Tensor:
        kept["count"] = kept["count"] + 1
        return x * 2

    captured = capture(body)
    with pytest.warns(CaptureWarning, match="something keeps it"):
        call_often(captured, 6)
    assert kept["count"] == 6


def test_a_tensor_on_the_cpu_that_the_body_writes_unseen_is_refused() -> None:
    target = torch.zeros(3)
    array = target.numpy()

    def body(x: torch.Tensor) -> torch.Tensor:
        made = x + target.to("lazy")
        array[0] += 1
        return made

    captured = capture(body)
    with pytest.warns(CaptureWarning, match="where a replay cannot follow|another one in the call before"):
        results = call_often(captured, 6)
    assert [result[0].item() for result in results] == [1, 2, 3, 4, 5, 6]


def test_an_optimizer_that_steps_in_backward() -> None:
    def make(device: str) -> Callable[[int], Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).to(device)
        optimizers = {p: torch.optim.AdamW([p], lr=0.01, foreach=True) for p in model.parameters()}

        def update(parameter: torch.Tensor) -> None:
            optimizers[parameter].step()  # type: ignore[index]
            optimizers[parameter].zero_grad()  # type: ignore[index]

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)

        def body(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            return loss.detach()

        step = capture(body) if device == "lazy" else body
        return lambda number: [step(ones(device, 2, 3)), *[p.detach() for p in model.parameters()]]

    assert beside_eager(make, 10) >= 6


def test_a_failed_replay_does_not_advance_a_count() -> None:
    """A guard that fails after the formulas were computed leaves the CPU tensors as they were."""
    seen = torch.zeros(())

    def body(x: torch.Tensor) -> torch.Tensor:
        seen.add_(1)
        return x * seen.item()

    captured = capture(body)
    for number in range(4):
        assert_same(captured(ones("lazy")), torch.full((3,), number + 1.0))
    program = next(iter(captured._signatures.values())).program
    assert program is not None
    for _ in range(3):
        program.check(lazy_backend.replay.replayed_call.Arguments((ones("lazy"),), ()))
    assert seen == 4


# ----- random programs


class World:
    """State on the CPU and on a device, which a random body reads and writes."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.number, self.other = torch.tensor(1.5), torch.tensor(2.0, dtype=torch.float64)
        self.count, self.row = torch.tensor(3), torch.tensor([0.5, 1.0, 1.5])
        self.lazy = torch.ones(3, device=device)

    def state(self) -> list[torch.Tensor]:
        return [self.number, self.other, self.count, self.row, self.lazy]


def upload(world: World, value: Any) -> torch.Tensor:
    return torch.as_tensor(value, device=world.device)


# each takes the world, a tensor, and two floats; returns a tensor and a float
STATEMENTS: list[Callable[[World, torch.Tensor, float, float], tuple[torch.Tensor, float]]] = [
    lambda w, x, s, t: (x * s + t, s * t),
    lambda w, x, s, t: (x.add(1.0, alpha=s) if s > t else x.sub(2.0, alpha=t), s - t),
    lambda w, x, s, t: (x * w.number, w.number.item()),
    lambda w, x, s, t: (x + w.row.to(w.device), w.row.sum().item() / 7),
    lambda w, x, s, t: (x * w.number.add_(0.25).item(), s),
    lambda w, x, s, t: (x + upload(w, w.number * s), t),
    lambda w, x, s, t: (x - w.other.mul_(0.5).item(), t + 0.1),
    lambda w, x, s, t: (x, w.row.mul_(0.5).add_(s).max().item()),
    lambda w, x, s, t: (x * (1 + int(s)), s % 0.3),
    lambda w, x, s, t: (x, min(s, t)),
    lambda w, x, s, t: (x * math.sqrt(abs(s)), abs(t)),
    lambda w, x, s, t: (w.lazy.mul_(0.5).add_(x, alpha=s).clone(), t),
    lambda w, x, s, t: (x + w.count.add_(1).item() % 2, s),
    lambda w, x, s, t: (x + torch.stack([w.number, w.number * 2, w.other.float()]).to(w.device), s),
    lambda w, x, s, t: (x + (w.number * s).item(), round(t, 2)),
    lambda w, x, s, t: (x.copy_(torch.where(w.row > s, w.row, w.number)) if s < 9 else x, s),
    lambda w, x, s, t: (x * float(w.number > 2), t / 3),
    lambda w, x, s, t: (x + upload(w, [s, t, 1.0]), s),
    lambda w, x, s, t: (x + torch.full((3,), t, device=w.device), -s),
    lambda w, x, s, t: (x.clamp(min=s - 1, max=s + t * t), t * 1.5),
]


@pytest.mark.filterwarnings("ignore::lazy_backend.CaptureWarning")
@pytest.mark.parametrize("seed", range(60))
def test_random_programs_do_what_eager_does(seed: int) -> None:
    draw = random.Random(seed)
    chosen = [draw.choice(STATEMENTS) for _ in range(draw.randrange(1, 6))]
    often = draw.choice([0.1, 0.5, 1.0])  # how often something changes outside

    def body(world: World, x: torch.Tensor, s: float, t: float) -> tuple[torch.Tensor, torch.Tensor]:
        x = x * 1.0
        for statement in chosen:
            x, s = statement(world, x, s, t)
        return x, x * s

    worlds = [World("cpu"), World("lazy")]
    captured = capture(lambda x, s, t: body(worlds[1], x, s, t))
    s, t = draw.uniform(-1, 1), draw.uniform(0, 2)
    for _ in range(24):
        if draw.random() < often:
            s = draw.choice([s, s / 2, draw.uniform(-2, 2), 0.0, -0.0])
            t = draw.choice([t, t + 0.1])
        if draw.random() < often / 4:
            value = draw.uniform(0, 3)
            for world in worlds:
                world.number.fill_(value)
                world.row[1] = value
        expected = body(worlds[0], ones("cpu"), s, t)
        found = captured(ones("lazy"), s, t)
        assert_same(lazy_backend.to_cpu([*found, *worlds[1].state()]), [*expected, *worlds[0].state()])


# ----- the recording itself


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def recorded_calls(calls: list[Any]) -> list[tuple[str, Any]]:
    return [(str(call.op), call.args) for call in calls]


@pytest.mark.parametrize("train", [False, True])
def test_a_captured_body_records_what_the_body_records(train: bool) -> None:
    """The mode that sees floats changes no choice that PyTorch makes, such as the fast path of attention."""
    torch.manual_seed(0)
    model = Attention().to("lazy").train(train)
    x = ones("lazy", 2, 3, 8)
    body = torch.no_grad()(lambda x: model(x))
    captured = capture(body)
    for _ in range(3):
        captured(x)
    lazy_backend.mark_step()
    held = body(x)
    calls = [call for call in contexts.get_device_context(None).trace.cursor.path() if isinstance(call, Call)]
    (signature,) = captured._signatures.values()
    assert recorded_calls(signature.records[-1].calls()) == recorded_calls(calls)
    assert signature.program is not None
    del held


def test_nothing_of_pytorch_stays_replaced() -> None:
    before = (torch.overrides.has_torch_function, torch.from_numpy, torch.autograd._engine_run_backward)
    captured = capture(lambda x: x.square().sum().backward())
    weight = ones("lazy").requires_grad_()
    for _ in range(3):
        captured(weight * 1)
    assert (torch.overrides.has_torch_function, torch.from_numpy, torch.autograd._engine_run_backward) == before


# ----- optimizers that change from outside


def change_settings(optimizer: torch.optim.Optimizer, number: int) -> None:
    group = optimizer.param_groups[0]
    changes: dict[int, dict[str, Any]] = {
        4: {"lr": 0.0}, 6: {"lr": -0.0}, 7: {"lr": 0.1}, 9: {"weight_decay": 0.1}, 12: {"weight_decay": 0.0},
        14: {"betas": (0.8, 0.99)}, 16: {"betas": (0.7, 0.9)}, 18: {"lr": 1}, 20: {"lr": 0.05}, 22: {"maximize": True},
        24: {"eps": 1e-3}, 26: {"eps": 1e-4}, 28: {"lr": float("inf")}, 30: {"lr": float("nan")},
    }  # fmt: skip
    group.update(changes.get(number, {}))


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "NAdam", "Adamax"])
def test_settings_that_change_from_outside(name: str, foreach: bool) -> None:
    optimizer = getattr(torch.optim, name)
    assert same_training(lambda p: optimizer(p, lr=0.1, foreach=foreach), change_settings, 34) >= 10


def test_an_optimizer_that_starts_afresh() -> None:
    def change(optimizer: torch.optim.Optimizer, number: int) -> None:
        if number in (5, 6):
            optimizer.state.clear()
        if number == 12:
            del optimizer.state[optimizer.param_groups[0]["params"][0]]

    assert same_training(lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False), change, 20) >= 8


def test_two_captured_functions_and_a_plain_loop_share_an_optimizer() -> None:
    def make(device: str) -> Callable[[int], Any]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)

        def body(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        steps = [capture(body), capture(lambda x: body(x) * 2)] if device == "lazy" else [body, lambda x: body(x) * 2]

        def call(number: int) -> Any:
            if number % 5 == 4:
                loss = body(ones(device, 2, 3))
                lazy_backend.mark_step()
            else:
                loss = steps[number % 2](ones(device, 2, 3))
            return [loss, *[p.detach() for p in model.parameters()]]

        return call

    assert beside_eager(make, 40) >= 24


def test_parameters_whose_counts_part() -> None:
    """One parameter is used in every third call only: its count is its own."""

    def make(device: str) -> Callable[[int], Any]:
        torch.manual_seed(0)
        first, second = nn.Linear(3, 1).to(device), nn.Linear(3, 1).to(device)
        optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()], lr=0.1, foreach=True)

        def body(x: torch.Tensor, both: bool) -> torch.Tensor:
            optimizer.zero_grad()
            loss = first(x).square().mean()
            if both:
                loss = loss + second(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = capture(body) if device == "lazy" else body
        parameters = [*first.parameters(), *second.parameters()]

        def call(number: int) -> Any:
            return [step(ones(device, 2, 3), number % 3 == 2), *[p.detach() for p in parameters]]

        return call

    assert beside_eager(make, 30) >= 18


def test_floats_in_containers_and_keywords() -> None:
    def make(device: str) -> Callable[[int], Any]:
        def body(x: torch.Tensor, scales: Any, *, shift: float, more: Any) -> torch.Tensor:
            return x * scales["a"][0] + shift * more[1] - scales["b"]

        step = capture(body) if device == "lazy" else body
        return lambda number: step(
            ones(device), {"a": [0.5 + number], "b": 0.25 * number}, shift=0.125 * number, more=(1, 2.0 - number)
        )

    assert beside_eager(make, 12) >= 9


def test_a_body_that_changes_the_containers_it_is_given() -> None:
    def body(x: torch.Tensor, scales: dict[str, Any]) -> torch.Tensor:
        made = x * scales.pop("a") + scales["b"][0]
        scales["b"].append(2.0)
        return made

    captured = capture(body)
    for number in range(6):
        rest = [0.25]
        scales = {"a": 0.5 * number, "b": rest}
        assert_same(captured(ones("lazy"), scales), torch.full((3,), 0.5 * number + 0.25))
        assert type(rest[0]) is float
        assert "a" not in scales or type(scales["a"]) is float


@pytest.mark.filterwarnings("ignore::lazy_backend.CaptureWarning")
def test_a_float_that_python_changes_is_not_frozen_by_a_coincidence() -> None:
    factors = [2.0, 1.0, 4.0, 3.0, 5.0, 7.0, 1.0, 1.0, 2.0]

    def make(device: str) -> Callable[[int], Any]:
        left = list(factors)
        body = lambda x, s: x * (s * left.pop(0))
        step = capture(body) if device == "lazy" else body
        return lambda number: step(ones(device), [0.125, 0.25, 0.0625, 0.0, 0.0, 0.5, 1.0, 2.0, 1.0][number])

    plain, captured = make("cpu"), make("lazy")
    for number in range(3):  # the product is the same in all of them
        assert_same(captured(number), plain(number))
    assert_same(captured(5), torch.full((3,), 1.5))


@pytest.mark.filterwarnings("ignore::lazy_backend.CaptureWarning")
@pytest.mark.parametrize(
    "is_large",
    [
        lambda s: math.modf(s)[1] > 2,
        lambda s: math.frexp(s)[1] > 2,
        lambda s: math.ldexp(s, 1) > 6,
        lambda s: math.fsum([s, 0.0]) > 3,
        lambda s: math.dist((s,), (0.0,)) > 3,
        lambda s: not math.isclose(s, 2.0, abs_tol=1.0),
        lambda s: math.gamma(s + 1) > 6,
        lambda s: math.nextafter(s, 0.0) > 3,
        lambda s: abs(cmath.sqrt(s)) > 1.75,
        lambda s: math.ulp(s) > 5e-16,
    ],
)
def test_a_branch_on_a_function_of_math(is_large: Any) -> None:
    def make(device: str) -> Callable[[int], Any]:
        body = lambda x, s: x * 2.0 + s if is_large(s) else x * 0.5 + s
        step = capture(body) if device == "lazy" else body
        return lambda number: step(ones(device), 1.5 + 0.125 * number)

    beside_eager(make, 30)


@pytest.mark.parametrize("is_in_backward", [False, True])
@pytest.mark.parametrize("is_attribute", [False, True])
def test_a_float_from_elsewhere_that_changes_with_an_argument(is_attribute: bool, is_in_backward: bool) -> None:
    settings = {"gain": 0.0}
    net = nn.Identity()
    weight = nn.Parameter(ones("lazy"))

    def step(x: torch.Tensor, value: float) -> torch.Tensor:
        gain: Any = net.gain if is_attribute else settings["gain"]
        if is_in_backward:
            return torch.autograd.grad((x * weight * gain).sum(), weight)[0] + value
        return x * gain + value

    captured = capture(step)
    with count("CapturedCall") as replayed:
        for number in range(12):
            value = 0.25 * number
            if number < 3:  # equal in all calls that are recorded so far
                net.gain = settings["gain"] = value
            assert captured(ones("lazy"), value).tolist() == [value + min(value, 0.5)] * 3
    assert replayed() >= 4


def test_floats_in_containers_that_go_to_operators() -> None:
    def make(device: str) -> Callable[[int], Any]:
        def body(x: torch.Tensor, scales: Any) -> torch.Tensor:
            return (x * scales["a"][0]).add(x, alpha=scales["b"])

        step = capture(body) if device == "lazy" else body
        return lambda number: step(ones(device), {"a": [0.5 + number], "b": 0.25 * number})

    assert beside_eager(make, 8) == 6


@pytest.mark.parametrize("options", [{"fused": True}, {"capturable": True}])
def test_counts_that_stay_on_the_device_are_not_read(options: dict[str, bool]) -> None:
    model = nn.Linear(3, 1).to("lazy")
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    captured = capture(lambda x: (model(x).sum().backward(), optimizer.step(), optimizer.zero_grad())[1])
    for _ in range(5):
        captured(ones("lazy", 2, 3))
    (signature,) = captured._signatures.values()
    assert signature.program is not None
    assert not signature.program.floats._held


def test_views_of_tensors_that_the_body_makes_on_the_cpu() -> None:
    def made() -> torch.Tensor:
        return torch.arange(6.0).reshape(2, 3)[0].clone().to("lazy")

    captured = capture(lambda x: x + made())
    with count("CapturedCall") as replays:
        for _ in range(6):
            assert captured(torch.ones(3).to("lazy")).tolist() == [1.0, 2.0, 3.0]
    assert replays() >= 3


def test_a_view_of_such_a_tensor_that_is_kept() -> None:
    kept: list[torch.Tensor] = []

    def body(x: torch.Tensor) -> torch.Tensor:
        kept[:] = [torch.arange(6.0).reshape(2, 3)]
        return x * 2

    captured = capture(body)
    with pytest.warns(CaptureWarning, match="something keeps it"):
        [captured(torch.ones(3).to("lazy")) for _ in range(6)]
