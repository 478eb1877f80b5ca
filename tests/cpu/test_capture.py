"""Captured functions: what they leave and return is what their bodies would have, and their Python does not run."""

from __future__ import annotations

import gc
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness import Counted, Unseen, assert_same, count, live_tensors, unseen_number
from torch import nn
from torch.nn import functional as F

import lazy_backend
from lazy_backend import CaptureError, CaptureWarning, capture

Batch = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(params=["always", "never"])
def background(request: pytest.FixtureRequest) -> None:
    lazy_backend.config.run_in_background = request.param


@pytest.fixture(params=["run", "record"])
def first_sight(request: pytest.FixtureRequest) -> None:
    lazy_backend.config.first_sight = request.param


def full(value: float, *shape: int) -> torch.Tensor:
    """A tensor from outside."""
    return torch.full(shape or (3,), value).to("lazy")


def repeat(function: Callable[[int], Any], times: int = 6) -> None:
    for number in range(times):
        function(number)


# ----- training


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


OPTIMIZERS: dict[str, Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, capturable=True, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, capturable=True, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, capturable=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01, capturable=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


class Training:
    """A model, its optimizer and five batches on the lazy device, from a fixed seed."""

    def __init__(self, optimizer: str = "momentum", model: Callable[[], nn.Module] = Net) -> None:
        torch.manual_seed(0)
        self.model = model().to("lazy")
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        generator = torch.Generator().manual_seed(1)
        self.batches = [
            (torch.randn(6, 8, generator=generator).to("lazy"), torch.randint(4, (6,), generator=generator).to("lazy"))
            for _ in range(5)
        ]
        self.runs = 0
        torch.manual_seed(2)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        loss = F.cross_entropy(self.model(inputs), targets)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss

    def weights(self) -> list[torch.Tensor]:
        return lazy_backend.to_cpu(list(self.model.parameters()))

    def run(self, step: Callable[..., torch.Tensor], steps: int = 12) -> list[Any]:
        """Losses, parameters, statistics, gradients and optimizer state after some steps."""
        losses = [step(*self.batches[number % 5]).detach() for number in range(steps)]
        lazy_backend.mark_step()
        state = [value for state in self.optimizer.state.values() for value in state.values()]
        grads = [parameter.grad for parameter in self.model.parameters()]
        return lazy_backend.to_cpu([losses, dict(self.model.state_dict()), grads, state])


@pytest.mark.usefixtures("background", "first_sight")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_captured_step_trains_as_its_body_does(name: str) -> None:
    plain, captured = Training(name), Training(name)
    expected = plain.run(plain.step)
    captured.runs = 0
    torch.manual_seed(2)
    assert_same(captured.run(capture(captured.step)), expected)
    assert captured.runs <= 4


def test_the_first_step_may_differ_from_the_rest() -> None:
    training = Training("momentum")  # its first step makes the momenta
    with count("CaptureRecorded") as recorded, count("CapturedCall") as replayed:
        training.run(capture(training.step))
    assert (recorded(), replayed()) == (3, 9)


@pytest.mark.parametrize("make", [list, tuple])
@pytest.mark.parametrize("collects", [False, True])
def test_state_in_containers_made_anew_replays_from_the_third_call_on(make: Any, collects: bool) -> None:
    class State:
        both: Any = None

    gc.collect()
    gc.disable()  # the function is as young as what its body makes
    try:
        state = State()
        state.both = make((torch.zeros(3, device="lazy"), torch.zeros(3, device="lazy")))

        @capture
        def step(x: torch.Tensor) -> torch.Tensor:
            first, second = state.both
            state.both = make((first + x, second - x))
            return state.both[0].sum()

        with count("CapturedCall") as replayed:
            for number in range(8):
                assert step(torch.full((3,), float(number)).to("lazy")).item() == 3 * sum(range(number + 1))
                if collects:
                    gc.collect()
        assert replayed() == 6
    finally:
        gc.enable()


def test_evaluation() -> None:
    training = Training()
    training.model.eval()
    evaluate = Counted(torch.no_grad()(lambda inputs: training.model(inputs).argmax(1)))
    captured = capture(evaluate)
    for inputs, _ in training.batches:
        assert_same(captured(inputs), training.model(inputs).argmax(1).cpu())
    assert evaluate.runs == 2


def test_generation_hands_its_cache_from_call_to_call() -> None:
    torch.manual_seed(0)
    weight = torch.randn(4, 4).to("lazy")

    def body(token: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cache = torch.roll(cache, -1, 0)
        cache[-1] = token
        return torch.tanh(cache @ weight).sum(0), cache

    def generate(step: Callable[..., Any]) -> list[torch.Tensor]:
        token, cache, tokens = torch.ones(4, device="lazy"), torch.zeros(5, 4, device="lazy"), []
        for _ in range(10):
            token, cache = step(token, cache)
            tokens.append(token)
        return lazy_backend.to_cpu([*tokens, cache])

    counted = Counted(body)
    assert_same(generate(capture(counted)), generate(body))
    assert counted.runs == 2


def test_gradients_that_pile_up() -> None:
    weight = full(1.0).requires_grad_()
    body = Counted(lambda x: (weight * x).sum().backward())
    captured = capture(body)
    for _ in range(6):
        captured(full(2.0))
    assert weight.grad is not None
    assert_same(weight.grad, torch.full((3,), 12.0))
    assert body.runs == 3


def test_a_leaf_that_the_body_makes_is_no_state() -> None:
    weight = full(3.0).requires_grad_()

    def penalize(x: torch.Tensor) -> torch.Tensor:
        """As where a critic's gradient by mixed samples is kept small."""
        mixed = (x * 0.5).detach().requires_grad_()
        (slope,) = torch.autograd.grad((weight * mixed**2).sum(), mixed, create_graph=True)
        penalty = (slope.norm() - 1) ** 2
        penalty.backward()
        return penalty

    body = Counted(penalize)
    captured = capture(body)
    found = []
    for number in range(6):
        weight.grad = None
        captured(full(float(number + 1)))
        assert weight.grad is not None
        found.append(weight.grad.cpu())
    assert body.runs == 2
    weight = torch.full((3,), 3.0).requires_grad_()
    for number, grad in enumerate(found):
        weight.grad = None
        penalize(torch.full((3,), float(number + 1)))
        assert weight.grad is not None
        assert_same(grad, weight.grad)


def test_gradients_that_are_dropped_outside() -> None:
    weight = full(1.0).requires_grad_()
    body = Counted(lambda x: (weight * x).sum().backward())
    captured = capture(body)
    for number in range(6):
        weight.grad = None
        captured(full(float(number)))
        assert weight.grad is not None
        assert_same(weight.grad, torch.full((3,), float(number)))
    assert body.runs == 2


def test_a_gradient_that_was_not_dropped_is_added_to() -> None:
    weight = full(1.0).requires_grad_()
    captured = capture(lambda x: (weight * x).sum().backward())
    for _ in range(4):
        weight.grad = None
        captured(full(1.0))
    captured(full(1.0))
    assert weight.grad is not None
    assert_same(weight.grad, torch.full((3,), 2.0))


@pytest.mark.scenario
def test_ten_thousand_steps_end_where_eager_does() -> None:
    def train(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        batches = [(torch.randn(4, 4).to(device), torch.randn(4, 2).to(device)) for _ in range(8)]

        def step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()

        captured = capture(step) if device == "lazy" else step
        for number in range(10_000):
            captured(*batches[number % 8])
        return [parameter.detach().cpu() for parameter in model.parameters()]

    for actual, expected in zip(train("lazy"), train("cpu"), strict=True):
        torch.testing.assert_close(actual, expected)


# ----- state


class Recurrent:
    """State that each call replaces: an attribute, an entry of a list, a view."""

    def __init__(self) -> None:
        self.hidden = torch.zeros(3, device="lazy")
        self.layers = [torch.zeros(3, device="lazy"), torch.zeros(3, device="lazy")]
        self.corner = torch.zeros(2, device="lazy")

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = torch.tanh(self.hidden + x)
        self.layers[1] = self.layers[0] * 0.5 + self.layers[1]
        self.layers[0] = self.hidden + 1
        self.corner = (self.hidden * 3)[1:] + self.corner
        return self.hidden * 2

    def state(self) -> list[torch.Tensor]:
        return lazy_backend.to_cpu([self.hidden, *self.layers, self.corner])


@pytest.mark.usefixtures("background")
def test_replaced_state_is_found_where_it_was() -> None:
    plain, replayed = Recurrent(), Recurrent()
    body = Counted(replayed.step)
    captured = capture(body)
    for number in range(8):
        x = full(number / 10)
        assert_same(captured(x), plain.step(x).cpu())
        assert_same(replayed.state(), plain.state())
    assert body.runs == 2


def test_returned_tensors_do_not_change_later() -> None:
    recurrent = Recurrent()

    def step(x: torch.Tensor) -> torch.Tensor:
        recurrent.step(x)
        return recurrent.hidden

    captured = capture(step)
    results = [captured(full(1.0)) for _ in range(6)]
    plain = Recurrent()
    expected = []
    for _ in range(6):
        plain.step(full(1.0))
        expected.append(plain.hidden.cpu())
    assert_same(results, expected)


def test_state_that_somebody_took_hold_of_does_not_change_under_him() -> None:
    recurrent, plain = Recurrent(), Recurrent()
    captured = capture(recurrent.step)
    kept, expected = [], []
    for number in range(8):
        captured(full(1.0))
        plain.step(full(1.0))
        if number in (3, 5):
            kept.append(recurrent.hidden)
            expected.append(plain.hidden.cpu())
    assert_same(kept, expected)
    assert_same(recurrent.state(), plain.state())


def test_a_view_of_replaced_state_keeps_its_value() -> None:
    recurrent = Recurrent()
    captured = capture(recurrent.step)
    for _ in range(3):
        captured(full(1.0))
    view, copy = recurrent.hidden[:2], recurrent.hidden.cpu()
    captured(full(1.0))
    assert_same(view, copy[:2].clone())


def test_state_that_is_replaced_outside_is_seen() -> None:
    recurrent, plain = Recurrent(), Recurrent()
    captured = capture(recurrent.step)
    for number in range(9):
        if number % 4 == 3:
            recurrent.hidden = full(5.0)
            plain.hidden = full(5.0)
        assert_same(captured(full(1.0)), plain.step(full(1.0)).cpu())


def test_state_that_is_updated_in_place_and_replaced_outside_is_seen() -> None:
    state = [full(0.0), full(0.0)]
    body = Counted(lambda x: state[0].add_(x) + state[1].mul_(2).add_(x))
    captured = capture(body)
    expected = [torch.zeros(3), torch.zeros(3)]
    for number in range(9):
        if number == 4:
            state[0], expected[0] = full(7.0), torch.full((3,), 7.0)
        assert_same(captured(full(1.0)), expected[0].add_(1) + expected[1].mul_(2).add_(1))
    assert body.runs == 4


def test_state_that_is_written_outside_is_seen() -> None:
    training, plain = Training("momentum"), Training("momentum")
    captured = capture(training.step)
    for number in range(8):
        for each, step in ((training, captured), (plain, plain.step)):
            torch.manual_seed(number)
            step(*each.batches[0])
            if number == 5:
                with torch.no_grad():
                    for parameter in each.model.parameters():
                        parameter.mul_(0.5)
    assert_same(
        lazy_backend.to_cpu(list(training.model.parameters())), lazy_backend.to_cpu(list(plain.model.parameters()))
    )


@pytest.mark.parametrize("how", ["data", "attribute", "load", "optimizer"])
def test_tensors_that_are_exchanged_outside_are_seen(how: str) -> None:
    training, plain = Training("momentum", lambda: nn.Linear(8, 4)), Training("momentum", lambda: nn.Linear(8, 4))
    captured = capture(training.step)
    kept = []
    for number in range(9):
        for each, step in ((training, captured), (plain, plain.step)):
            step(*each.batches[number % 5])
            weight = each.model.weight
            kept.append(weight.detach())
            if number == 5 and how == "data":
                weight.data = weight.detach() * 0.5
            if number == 5 and how == "attribute":
                each.model.weight = nn.Parameter(weight.detach() * 0.5)
                each.optimizer.param_groups[0]["params"] = list(each.model.parameters())
            if number == 5 and how == "load":
                each.model.load_state_dict({k: v * 0.5 for k, v in each.model.state_dict().items()}, assign=True)
                each.optimizer.param_groups[0]["params"] = list(each.model.parameters())
            if number == 5 and how == "optimizer":
                each.optimizer.load_state_dict(each.optimizer.state_dict())
    assert_same(
        lazy_backend.to_cpu(list(training.model.parameters())), lazy_backend.to_cpu(list(plain.model.parameters()))
    )


def test_a_list_that_grows_is_not_replayed() -> None:
    kept: list[torch.Tensor] = []

    def body(x: torch.Tensor) -> None:
        kept.append(x * 2)

    captured = capture(body)
    with pytest.warns(CaptureWarning, match="a list that grows"):
        repeat(lambda number: captured(full(float(number))))
    assert_same(kept, [torch.full((3,), 2.0 * number) for number in range(6)])


def test_memory_stays_flat() -> None:
    training = Training("momentum")
    captured = capture(training.step)
    gc.disable()
    try:
        for _ in range(5):
            captured(*training.batches[0])
        lazy_backend.wait_device_ops()
        before = live_tensors()
        for _ in range(20):
            captured(*training.batches[0])
        lazy_backend.wait_device_ops()
        assert live_tensors() == before
    finally:
        gc.enable()


# ----- arguments and floats


def test_other_shapes_dtypes_and_values_are_recorded_anew() -> None:
    body = Counted(lambda x, n: x * n)
    captured = capture(body)
    for arguments in ((full(1.0), 2), (full(1.0, 4), 2), (full(1.0).double(), 2), (full(1.0), 3), (full(1.0), True)):
        for _ in range(4):
            assert_same(captured(*arguments), (arguments[0] * arguments[1]).cpu())
    assert body.runs == 10


def test_arguments_in_containers_and_keywords() -> None:
    body = Counted(lambda batch, *, scale: {"sum": batch["a"] + batch["b"][0] * scale, "n": 3})
    captured = capture(body)
    for number in range(5):
        made = captured({"a": full(1.0), "b": [full(float(number))]}, scale=2)
        assert_same(made["sum"], torch.full((3,), 1.0 + 2 * number))
        assert made["n"] == 3
    assert body.runs == 2


def test_a_float_argument_is_bound_once_it_was_seen_to_change() -> None:
    body = Counted(lambda x, scale: x * scale - 0.5)
    captured = capture(body)
    for scale in (2.0, 2.0, 2.0, 3.0, 4.0, 5.0):
        assert_same(captured(full(1.0), scale), torch.full((3,), scale) - 0.5)
    assert body.runs == 3


def test_floats_that_were_equal_and_part_are_told_apart() -> None:
    body = Counted(lambda x, a, b: x * a + b)
    captured = capture(body)
    for a, b in ((1.0, 1.0), (2.0, 2.0), (3.0, 3.0), (3.0, 4.0), (5.0, 6.0)):
        assert_same(captured(full(1.0), a, b), torch.full((3,), a + b))


def test_a_learning_rate_schedule() -> None:
    training, plain = Training("sgd"), Training("sgd")
    captured = capture(training.step)
    for number in range(10):
        for each, step in ((training, captured), (plain, plain.step)):
            torch.manual_seed(number)
            each.optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
            step(*each.batches[0])
    assert_same(
        lazy_backend.to_cpu(list(training.model.parameters())), lazy_backend.to_cpu(list(plain.model.parameters()))
    )
    assert training.runs == 2


def test_a_float_that_changes_by_itself_is_named() -> None:
    factor = [1.0]

    def body(x: torch.Tensor) -> torch.Tensor:
        factor[0] *= 0.5
        return x * factor[0]

    captured = capture(body)
    with pytest.warns(CaptureWarning, match=r"aten.mul.Tensor at .*test_capture.py:\d+ changed from 0.125 to 0.0625"):
        repeat(lambda number: assert_same(captured(full(1.0)), torch.full((3,), 0.5 ** (number + 1))))


COUNT_ON_THE_CPU = {
    "Adam": "fused", "AdamW": "fused", "Adagrad": "fused", "RMSprop": "capturable", "NAdam": "capturable",
    "RAdam": "capturable", "Adamax": "capturable", "Adadelta": "capturable", "Rprop": "capturable",
}  # fmt: skip


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(("name", "option"), COUNT_ON_THE_CPU.items())
def test_an_optimizer_with_a_schedule_is_replayed_wherever_it_counts(name: str, option: str, on_device: bool) -> None:
    training = Training()
    options = {option: True} if on_device else {}
    training.optimizer = getattr(torch.optim, name)(training.model.parameters(), lr=0.01, **options)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(training.optimizer, 20)
    step = capture(training.step)

    def scheduled(*batch: torch.Tensor) -> torch.Tensor:
        loss = step(*batch)
        schedule.step()
        return loss

    training.run(scheduled)
    assert training.runs <= 6


def test_random_operators_go_on_drawing() -> None:
    body = Counted(lambda x: F.dropout(x + torch.rand(3, device="lazy"), 0.5))

    def draw(function: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        torch.manual_seed(5)
        return lazy_backend.to_cpu([function(full(1.0)) for _ in range(6)])

    captured = capture(body)
    assert_same(draw(captured), draw(body.function))
    assert body.runs == 2


def test_random_numbers_of_the_cpu_are_noticed() -> None:
    captured = capture(lambda x: x * 2 if torch.rand(()) < 2 else x)
    with pytest.warns(CaptureWarning, match="draws random numbers on the CPU"):
        repeat(lambda _: captured(full(1.0)))
    captured = capture(lambda x: x * 2 if random.random() < 2 else x)
    with pytest.warns(CaptureWarning, match="draws random numbers on the CPU"):
        repeat(lambda _: captured(full(1.0)))


def test_training_flags_are_guarded() -> None:
    training, plain = Training(), Training()
    captured = capture(lambda inputs: training.model(inputs))
    for number in range(8):
        made = []
        for each, function in ((training, captured), (plain, plain.model)):
            each.model.train(number % 4 > 1)
            torch.manual_seed(number)
            made.append(function(each.batches[0][0]).detach())
        assert_same(*lazy_backend.to_cpu(made))


def test_a_constant_that_the_body_uploads() -> None:
    body = Counted(lambda x: x * torch.tensor([1.0, 2.0, 3.0]).to("lazy") + torch.tensor(4.0))
    captured = capture(body)
    for number in range(5):
        assert_same(captured(full(float(number))), number * torch.tensor([1.0, 2.0, 3.0]) + 4)
    assert body.runs == 2


def test_an_uploaded_constant_that_is_written_and_returned_stays_constant() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return torch.tensor([1.0, 2.0, 3.0]).to("lazy").add_(x)

    captured = capture(body)
    for number in range(5):
        assert_same(captured(full(float(number))), number + torch.tensor([1.0, 2.0, 3.0]))


def test_data_that_changes_and_is_no_argument_is_named() -> None:
    batches = iter(range(10))
    captured = capture(lambda: torch.full((2,), float(next(batches))).to("lazy") * 2)
    with pytest.warns(CaptureWarning, match=r"test_capture.py:\d+ was another one(.|\n)*as an argument"):
        repeat(lambda number: assert_same(captured(), torch.full((2,), 2.0 * number)))


def test_arguments_that_share_memory() -> None:
    body = Counted(lambda a, b: a.add_(1) + b)
    captured = capture(body)
    for shares in (False, False, False, True, True, True):
        a = full(1.0)
        assert_same(captured(a, a if shares else full(1.0)), torch.full((3,), 4.0 if shares else 3.0))
    assert body.runs == 4


def test_an_argument_that_is_part_of_the_state() -> None:
    weight = full(1.0)
    captured = capture(lambda x: weight.add_(1) + x)
    results = [captured(full(1.0)) for _ in range(3)]
    results.append(captured(weight))
    assert_same(results, [torch.full((3,), value) for value in (3.0, 4.0, 5.0, 10.0)])


def test_views_as_arguments() -> None:
    table = torch.arange(12.0).reshape(6, 2).to("lazy")
    body = Counted(lambda x: x * 2)
    captured = capture(body)
    for row in range(6):
        assert_same(captured(table[row]), torch.arange(12.0).reshape(6, 2)[row] * 2)


def test_arguments_that_are_only_recorded() -> None:
    captured = capture(lambda x: x + 1)
    for number in range(5):
        assert_same(captured(full(1.0) * number), torch.full((3,), 1.0 + number))


def test_what_is_returned_without_being_made() -> None:
    weight = full(1.0)
    body = Counted(lambda x: (x, weight, x[1:], None, weight * x))
    captured = capture(body)
    for number in range(4):
        x = full(float(number))
        same, kept, view, nothing, product = captured(x)
        assert_same([same, kept, product], [x.cpu(), torch.ones(3), x.cpu()])
        assert nothing is None
        view.add_(1)
        assert_same(x, torch.tensor([number, number + 1.0, number + 1.0]))
    assert body.runs == 2


def test_results_are_detached_from_the_first_call_on() -> None:
    weight = full(1.0).requires_grad_()
    captured = capture(lambda x: weight * x)
    for _ in range(3):
        assert not captured(full(1.0)).requires_grad


# ----- what cannot be captured


def read_item(x: torch.Tensor) -> Any:
    return x.sum().item()


def branch(x: torch.Tensor) -> Any:
    return x if x.sum() > 0 else -x


def mark(x: torch.Tensor) -> Any:
    lazy_backend.mark_step()


def copy_out(x: torch.Tensor) -> Any:
    return lazy_backend.to_cpu([x])


def close(x: torch.Tensor) -> Any:
    lazy_backend.add_step_closure(print, (x,))


def shape_of_values(x: torch.Tensor) -> Any:
    return x.nonzero()


@pytest.mark.usefixtures("first_sight")
@pytest.mark.parametrize("body", [read_item, branch, mark, copy_out, close, shape_of_values])
def test_a_read_in_the_body_raises_with_its_line(body: Callable[..., Any]) -> None:
    with pytest.raises(CaptureError, match=rf"(?s){body.__name__}, which a replay.*test_capture.py:\d+.*return the"):
        capture(body)(full(1.0))
    assert_same(full(1.0) + 1, torch.full((3,), 2.0))


def test_a_tensor_on_the_cpu_raises() -> None:
    with pytest.raises(CaptureError, match=r"a tensor on cpu.*(?s:.)*move it before the call"):
        capture(lambda x: x)(torch.ones(2))


def test_an_error_of_the_body_is_its_own() -> None:
    captured = capture(lambda x: x @ x)
    with pytest.raises(RuntimeError, match=r"size mismatch|1D tensors|mat1"):
        captured(full(1.0, 2, 3))
    assert_same(captured(full(1.0, 2, 2)), torch.full((2, 2), 2.0))


def test_an_error_of_a_replay_is_raised_at_the_next_sync() -> None:
    captured = capture(lambda x, places: x[places])
    good = torch.tensor([0, 1]).to("lazy")
    for _ in range(3):
        captured(full(1.0), good)
    captured(full(1.0), torch.tensor([0, 7]).to("lazy"))
    with pytest.raises(lazy_backend.ExecutionError, match="captured call"):
        lazy_backend.wait_device_ops()
    assert_same(captured(full(1.0), good), torch.ones(2))


def test_programs_that_differ_say_where() -> None:
    turn = [0]

    def body(x: torch.Tensor) -> torch.Tensor:
        turn[0] += 1
        return x + 1 if turn[0] % 2 else x * 2

    captured = capture(body)
    with pytest.warns(CaptureWarning, match=r"it recorded aten\.\w+\.Tensor at .*test_capture.py:\d+ in one call and"):
        repeat(lambda _: assert_same(captured(full(1.0)), torch.full((3,), 2.0)))


# ----- verification


def test_verification_finds_a_body_that_changed(unseen: Unseen) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if unseen_number() else x + 1

    captured = capture(body, verify_every=5)
    for _ in range(6):
        assert_same(captured(full(3.0)), torch.full((3,), 4.0))
    unseen(1.0)
    for _ in range(3):
        assert_same(captured(full(3.0)), torch.full((3,), 4.0))  # what was captured
    with pytest.raises(CaptureError, match=r"aten.add.Tensor at .*test_capture.py:\d+ in one call and aten.mul.Tensor"):
        captured(full(3.0))


def test_verification_finds_a_float_that_changed(unseen: Unseen) -> None:
    unseen(2.0)
    captured = capture(lambda x: x * unseen_number(), verify_every=4)
    for _ in range(4):
        captured(full(1.0))
    unseen(3.0)
    with pytest.raises(CaptureError, match=r"changed from 2\.0 to 3\.0"):
        repeat(lambda _: captured(full(1.0)), 4)


def test_verification_of_a_body_that_is_what_it_was() -> None:
    plain, training = Training("momentum"), Training("momentum")
    expected = plain.run(plain.step)
    torch.manual_seed(2)
    assert_same(training.run(capture(training.step, verify_every=3)), expected)
    assert training.runs == 6


def test_verification_survives_a_trie_that_starts_afresh() -> None:
    lazy_backend.config.first_sight = "run"
    lazy_backend.config.trie_limit = 3
    captured = capture(lambda x: (x + 1) * 2 - 3, verify_every=3)
    for number in range(12):
        assert_same(captured(full(float(number))), torch.full((3,), (number + 1.0) * 2 - 3))


# ----- manners


def test_as_a_decorator() -> None:
    @capture
    def one(x: torch.Tensor) -> torch.Tensor:
        """Adds one."""
        return x + 1

    class Model:
        @capture(verify_every=2)
        def two(self, x: torch.Tensor) -> torch.Tensor:
            return x + 2

    model = Model()
    for _ in range(4):
        assert_same(one(full(1.0)), torch.full((3,), 2.0))
        assert_same(model.two(full(1.0)), torch.full((3,), 3.0))
    assert one.__doc__ == "Adds one."


def test_a_captured_function_within_another() -> None:
    inner = capture(lambda x: x + 1)
    outer = capture(lambda x: inner(x) * 2)
    for _ in range(4):
        assert_same(outer(full(1.0)), torch.full((3,), 4.0))


def test_nothing_is_counted_as_recorded_in_a_replay() -> None:
    training = Training()
    captured = capture(training.step)
    for _ in range(4):
        captured(*training.batches[0])
    with count("lazy::mm") as recorded, count("SyncTensorsGraph") as syncs:
        for _ in range(5):
            captured(*training.batches[0])
    assert (recorded(), syncs()) == (0, 0)


def test_threads_may_call_at_once() -> None:
    weight = full(2.0)
    captured = capture(lambda x: x * weight)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(30):
            if captured(full(float(number))).cpu()[0] != 2.0 * number:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_no_warning_in_a_usual_training() -> None:
    training = Training("adamw")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training.run(capture(training.step))


@pytest.mark.parametrize("with_bmm", [False, True])
def test_what_backward_transposes_is_no_state(with_bmm: bool) -> None:
    """The view that the backward of a product takes of a saved operand looks like a leaf."""
    weight = nn.Parameter(full(0.5, 2, 3, 3))

    def body(x: torch.Tensor) -> torch.Tensor:
        weight.grad = None
        inner = weight * x
        (torch.bmm(inner, inner) if with_bmm else inner @ inner.transpose(1, 2)).sum().backward()
        with torch.no_grad():
            weight.sub_(0.01 * weight.grad)
        return weight.sum()

    captured = capture(body)
    totals = [captured(full(1.0, 2, 3, 3)) for _ in range(6)]
    assert lazy_backend.metrics.counter_value("CapturedCall") == 4
    expected = torch.tensor(0.5)
    for total in totals:
        expected = expected - 0.01 * 6 * expected
        torch.testing.assert_close(total.cpu(), 18 * expected)


def test_what_cannot_be_replayed_is_seldom_recorded() -> None:
    """Looking for all holders of all state costs more than the step; but a body may be replayed later on."""
    weight = torch.ones(3).to("lazy")
    grows: list[torch.Tensor] = []

    @capture
    def step(count: int) -> torch.Tensor:
        if len(grows) < 70:
            grows.append(weight * 2.0)
        weight.add_(1.0)
        return weight.sum()

    with pytest.warns(CaptureWarning):
        totals = [step(1) for _ in range(60)]
    assert totals[-1].item() == 3.0 * 61
    assert lazy_backend.metrics.counter_value("CaptureRecorded") < 10
    totals = [step(1) for _ in range(140)]
    assert totals[-1].item() == 3.0 * 201
    assert lazy_backend.metrics.counter_value("CapturedCall") > 40


@pytest.mark.parametrize("value", [3, [len], torch.ones(2)])
def test_what_cannot_be_called_cannot_be_captured(value: Any) -> None:
    with pytest.raises(CaptureError, match=f"got a {type(value).__name__}\n  at .*test_capture.py"):
        lazy_backend.capture(value)
