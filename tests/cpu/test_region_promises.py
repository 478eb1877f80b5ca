"""What captured modules and optimizers promise in odd but legal programs: the results of the loop as written."""

from __future__ import annotations

import contextvars
import copy
import functools
import gc
import queue
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness import Unseen, count, unseen_number
from torch import nn
from torch.utils.checkpoint import checkpoint

import lazy_backend
from lazy_backend import CaptureWarning, capture, mark_step

Wrap = Callable[[Any], Any]
Program = Callable[[str, Wrap], list[Any]]

pytestmark = pytest.mark.filterwarnings("ignore::lazy_backend.CaptureWarning")


@pytest.fixture(autouse=True)
def interpreted() -> None:
    lazy_backend.config.compile = "off"


def check(program: Program, num_jumps: int = 0) -> None:
    """The program gives the same on the CPU, on the lazy device, and there with captured parts."""
    runs: list[list[Any]] = []
    for device, wrap in (("cpu", lambda part: part), ("lazy", lambda part: part), ("lazy", capture)):
        torch.manual_seed(0)
        with count("RegionJump") as jumps:
            runs.append([v.detach().cpu() if isinstance(v, torch.Tensor) else v for v in program(device, wrap)])
    for place, values in enumerate(zip(*runs, strict=True)):
        for value in values[1:]:
            same = torch.equal(value, values[0]) if isinstance(value, torch.Tensor) else value == values[0]
            assert same, (place, values)
    assert jumps() >= num_jumps


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.a + self.b


def test_one_tensor_that_is_the_gradient_of_several() -> None:
    def program(device: str, wrap: Wrap) -> list[Any]:
        model, values = wrap(Adds().to(device)), []
        for _ in range(7):
            model.zero_grad()
            x = torch.ones(2, 3).to(device).requires_grad_()
            model(x).square().sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            assert x.grad is not None
            x.grad.zero_()
            values += [model.a.grad.clone(), model.b.grad.clone()]
            mark_step()
        return values

    check(program, num_jumps=6)


def test_the_users_gradient_is_not_written() -> None:
    def program(device: str, wrap: Wrap) -> list[Any]:
        model, values = wrap(Adds().to(device)), []
        for _ in range(7):
            model.zero_grad()
            given = torch.ones(2, 3).to(device)
            model(torch.ones(2, 3).to(device)).backward(given)
            model.a.grad.mul_(3)
            values += [given, model.b.grad.clone()]
            mark_step()
        return values

    check(program)


@pytest.mark.parametrize("at_first", ["argument", "result"])
def test_gradients_that_are_tensors_of_the_forward(at_first: str) -> None:
    def program(device: str, wrap: Wrap) -> list[Any]:
        model, values = wrap(nn.Linear(2, 2, bias=False).to(device)), []
        for number in range(9):
            model.zero_grad()
            x = torch.ones(1, 2).to(device)
            y = model(x)
            own = x if at_first == "argument" else y.detach()
            y.backward(own if number < 5 else 3 * x)
            values.append(model.weight.grad.clone())
            mark_step()
        return values

    check(program)


@pytest.mark.parametrize("when", ["from", "until"])
@pytest.mark.parametrize("what", ["hook", "freeze"])
def test_a_change_between_forward_and_backward(what: str, when: str) -> None:
    """The change is made from one step on, or up to one step: also while the backward is learned."""

    def program(device: str, wrap: Wrap) -> list[Any]:
        values: list[Any] = []
        for first in range(8):
            model = wrap(nn.Linear(2, 2, bias=False).to(device))
            for number in range(9):
                model.zero_grad()
                y = model(torch.ones(1, 2).to(device))
                is_changed = number >= first if when == "from" else number < first
                if is_changed:
                    if what == "hook":
                        handle = model.weight.register_hook(lambda grad: grad * 2)
                    else:
                        model.weight.requires_grad_(False)
                y.sum().backward()
                values.append(None if model.weight.grad is None else model.weight.grad.clone())
                if is_changed and what == "hook":
                    handle.remove()
                model.weight.requires_grad_(True)
                mark_step()
        return values

    check(program)


def test_lists_and_dicts_among_the_arguments_are_written() -> None:
    class Notes(nn.Linear):
        def forward(self, x: torch.Tensor, seen: list[Any], info: dict[str, int]) -> torch.Tensor:
            seen.append(x.shape)
            info["calls"] = info.get("calls", 0) + 1
            return super().forward(x)

    def program(device: str, wrap: Wrap) -> list[Any]:
        model, values, info = wrap(Notes(3, 3).to(device)), [], {}
        for _ in range(7):
            seen: list[Any] = []
            model(torch.ones(2, 3).to(device), seen, info).sum().backward()
            values += [len(seen), info["calls"]]
            mark_step()
        return values

    check(program)


def test_parameters_that_got_one_gradient() -> None:
    def program(device: str, wrap: Wrap) -> list[Any]:
        p, q = (nn.Parameter(torch.zeros(2).to(device)) for _ in range(2))
        optimizer = wrap(torch.optim.SGD([p, q], lr=1.0))
        for number in range(9):
            p.grad = torch.ones(2).to(device)
            q.grad = p.grad if number < 6 else torch.full((2,), 100.0).to(device)
            optimizer.step()
            mark_step()
        return [p, q]

    check(program)


def test_buffers_that_were_one() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("a", torch.ones(2))
            self.register_buffer("b", torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.a + self.b

    def program(device: str, wrap: Wrap) -> list[Any]:
        model, values = wrap(Two().to(device)), []
        model.b.data = model.a.data
        for number in range(9):
            if number == 6:
                model.b.data = torch.full((2,), 100.0).to(device)
            values.append(model(torch.ones(2).to(device)))
            mark_step()
        return values

    check(program)


def test_a_container_that_is_replaced_by_an_equal_one() -> None:
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = {"w": torch.ones(2)}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.held["w"]

    def program(device: str, wrap: Wrap) -> list[Any]:
        model, values = wrap(Holds()), []
        model.held["w"] = torch.ones(2).to(device)
        for number in range(12):
            if number == 6:
                old = model.held
                model.held = dict(old)
            values.append(model(torch.ones(2).to(device)))
            if number == 8:
                old["w"] = torch.zeros(2).to(device)
            mark_step()
        return values

    check(program)


def test_tensors_on_the_cpu_that_the_forward_reads_and_writes() -> None:
    class Counts(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            return super().forward(x) * (2 if self.count.item() > 4 else 1)

    def program(device: str, wrap: Wrap) -> list[Any]:
        model, values = wrap(Counts(3, 3).to(device)), []
        model.count = torch.zeros(())
        for _ in range(9):
            values.append(model(torch.ones(2, 3).to(device)))
            mark_step()
        return [*values, model.count]

    check(program)


def test_a_tensor_on_the_cpu_that_is_changed_outside() -> None:
    class Reads(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (2 if self.switch.item() else 1)

    def program(device: str, wrap: Wrap) -> list[Any]:
        model, values = wrap(Reads(3, 3).to(device)), []
        model.switch = torch.zeros(())
        for number in range(12):
            if number == 7:
                model.switch.fill_(1)
            values.append(model(torch.ones(2, 3).to(device)))
            values[-1].sum().backward()
            mark_step()
        return values

    check(program, num_jumps=4)


def test_hyperparameters_in_a_list_and_attributes_of_an_optimizer() -> None:
    class Scaled(torch.optim.SGD):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.1)
            self.options = {"scale": 1.0}
            self.param_groups[0]["scales"] = [1.0, 2.0]

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(parameter.grad * self.options["scale"] * self.param_groups[0]["scales"][1])

    def program(device: str, wrap: Wrap) -> list[Any]:
        weight = nn.Parameter(torch.ones(2).to(device))
        optimizer = wrap(Scaled([weight]))
        for number in range(16):
            if number == 7:
                optimizer.options["scale"] = 0.5
            if number == 12:
                optimizer.param_groups[0]["scales"][1] = 3.0
            weight.grad = torch.ones(2).to(device)
            optimizer.step()
            mark_step()
        return [weight]

    check(program, num_jumps=3)


@pytest.mark.parametrize("draws", [False, True])
def test_a_loss_over_one_of_two_heads_at_times(draws: bool) -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
            self.one, self.two = nn.Linear(4, 2), nn.Linear(4, 2)
            self.drop = nn.Dropout(0.5 if draws else 0.0)

        def forward(self, x: torch.Tensor) -> Any:
            h = self.drop(self.norm(self.body(x)))
            return self.one(h), self.two(h)

    def run(wrap: Wrap) -> list[Any]:
        torch.manual_seed(0)
        model, values = wrap(Heads().to("lazy")), []
        for number in range(14):
            model.zero_grad()
            one, two = model(torch.randn(4, 3).to("lazy"))
            (one.mean() if number in (8, 11) else one.mean() + two.mean()).backward()
            values += [p.grad if p.grad is None else p.grad.clone().cpu() for p in model.parameters()]
            values += [b.clone().cpu() for b in model.buffers()]
            mark_step()
        return values

    with count("RegionJump") as jumps:
        found = run(capture)
    for one, other in zip(run(lambda part: part), found, strict=True):
        assert one is other is None or torch.equal(one, other)
    assert jumps() >= 8


@pytest.mark.parametrize("retain", [False, True])
def test_batch_norm_that_is_called_twice_before_a_backward(retain: bool) -> None:
    def program(device: str, wrap: Wrap) -> list[Any]:
        torch.manual_seed(0)
        layers = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)
        critic, values = wrap(nn.Sequential(*layers).to(device)), []
        for number in range(12):
            critic.zero_grad()
            real, made = (torch.full((5, 3), number + x).to(device).cumsum(0) for x in (0.5, 1.5))
            loss = critic(real).sum() - critic(made).square().sum()
            loss.backward(retain_graph=retain)
            if retain:
                loss.backward()
            values += [loss, *(p.grad.clone() for p in critic.parameters() if p.grad is not None)]
            values += [b.clone() for b in critic.buffers()]
            mark_step()
        return values

    check(program, num_jumps=0 if retain else 30)  # what a retained graph kept is not learned


def test_nested_captures_over_many_steps() -> None:
    def program(device: str, wrap: Wrap) -> list[Any]:
        inner = wrap(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).to(device))
        model, values = wrap(nn.Sequential(inner, nn.Tanh()).to(device)), []
        for _ in range(80):
            values.append(model(torch.ones(2, 3).to(device)))
            values[-1].sum().backward()
            mark_step()
        return [*values, *[p.grad for p in inner.parameters()]]

    check(program, num_jumps=60)


def test_several_gradients_at_once() -> None:
    def program(device: str, wrap: Wrap) -> list[Any]:
        model, values = wrap(nn.Sequential(nn.Linear(3, 3), nn.Tanh()).to(device)), []
        for number in range(9):
            x = torch.ones(3).to(device).requires_grad_()
            y = model(x)
            if number == 6:
                values += torch.autograd.grad(y, [x], torch.eye(3).to(device), is_grads_batched=True)
            else:
                y.sum().backward()
                assert x.grad is not None
                values.append(x.grad.clone())
            mark_step()
        return values

    check(program)


def test_reentrant_checkpoints() -> None:
    class Checkpoints(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(super().forward, x.sin(), use_reentrant=True)

    def program(device: str, wrap: Wrap) -> list[Any]:
        model, values = wrap(Checkpoints(3, 3).to(device)), []
        for _ in range(6):
            model.zero_grad()
            x = torch.ones(2, 3).to(device).requires_grad_()
            model(x).sum().backward()
            values += [x.grad, model.weight.grad.clone()]
            mark_step()
        return values

    check(program)


def test_a_result_that_is_another_object_each_time_is_no_error_at_the_64th_call() -> None:
    class Marks(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), object()

    model = capture(Marks(3, 3).to("lazy"))
    for _ in range(70):
        model(torch.ones(2, 3).to("lazy"))[0].sum().backward()
        mark_step()


def test_a_difference_is_told_at_the_64th_call_and_learned_from(unseen: Unseen) -> None:
    unseen(1.0)

    class Hidden(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * unseen_number()

    model = capture(Hidden(3, 3).to("lazy"))
    for _ in range(20):
        model(torch.ones(2, 3).to("lazy")).sum().backward()
        mark_step()
    unseen(3.0)

    def run() -> None:
        for _ in range(60):
            model(torch.ones(2, 3).to("lazy")).sum().backward()
            mark_step()

    with pytest.raises(lazy_backend.CaptureError, match=r"no longer does what was captured: it recorded 3\.0 in"):
        run()
    x = torch.ones(2, 3).to("lazy")
    for _ in range(6):
        assert torch.equal(model(x).cpu(), 3.0 * nn.functional.linear(x, model.weight, model.bias).cpu())
        mark_step()


@pytest.mark.parametrize("refers", ["bound method", "list"])
def test_a_module_that_refers_to_itself_is_collected(refers: str) -> None:
    class Refers(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    model = Refers(3, 3).to("lazy")
    model.other = model.extra_repr if refers == "bound method" else [model]
    capture(model)
    for _ in range(5):
        model(torch.ones(2, 3).to("lazy")).sum().backward()
        mark_step()
    died = weakref.ref(model)
    del model
    gc.collect()
    assert died() is None


def test_layers_that_were_replaced_are_freed() -> None:
    model = capture(nn.Sequential(nn.Linear(3, 3), nn.Tanh()).to("lazy"))
    layers = []
    for _ in range(5):
        model[0] = nn.Linear(3, 3).to("lazy")
        layers.append(weakref.ref(model[0]))
        for _ in range(4):
            model(torch.ones(2, 3).to("lazy")).sum().backward()
            mark_step()
    gc.collect()
    assert sum(layer() is not None for layer in layers) == 1


def test_copies_are_not_captured() -> None:
    model = capture(nn.Linear(3, 3).to("lazy"))
    x = torch.ones(2, 3).to("lazy")
    for copied in (copy.copy(model), copy.deepcopy(model)):
        assert copied._compiled_call_impl is None
        assert torch.equal(copied(x).cpu(), model(x).cpu())


def test_an_optimizers_step_is_still_a_method() -> None:
    weight = nn.Parameter(torch.ones(2).to("lazy"))
    optimizer = capture(torch.optim.SGD([weight], lr=0.1))
    assert optimizer.step.__self__ is optimizer
    assert optimizer.step.__name__ == "step"
    with warnings.catch_warnings():
        warnings.simplefilter("error", CaptureWarning)
        optimizer.step()


@pytest.mark.parametrize("change", ["eval", "layer"])
def test_a_body_that_was_changed_since_does_not_run_again(change: str) -> None:
    model = capture(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Tanh()).to("lazy"))
    for number in range(7):
        x = torch.ones(2, 3).to("lazy").requires_grad_()
        y = model(x).sum()
        if number < 6:
            y.backward()
        elif change == "eval":
            model.eval()
        else:
            model[0] = nn.Linear(3, 3).to("lazy")
        mark_step()
    with pytest.raises(lazy_backend.CaptureError, match="which was changed since"):
        torch.autograd.grad(y, [x], create_graph=True)


# ----- tensors that a body keeps outside of its result

LATEST: Any = None
BY_NAME: dict[str, Any] = {}
IN_CONTEXT: contextvars.ContextVar[Any] = contextvars.ContextVar("kept")
QUEUE: queue.SimpleQueue[Any] = queue.SimpleQueue()


class Tracker:
    of_class: Any = None

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def add(self, name: str, value: Any) -> None:
        self.values[name] = value


TRACKER = Tracker()


def keep_in_global(value: Any) -> None:
    global LATEST
    LATEST = value


def keep_in_dict(value: Any) -> None:
    BY_NAME["kept"] = value


def keep_in_class(value: Any) -> None:
    Tracker.of_class = value


def _enclosing() -> tuple[Callable[[Any], None], Callable[[], Any]]:
    kept = None

    def keep(value: Any) -> None:
        nonlocal kept
        kept = value

    return keep, lambda: kept


def _local_helper() -> tuple[Callable[[Any], None], Callable[[], Any]]:
    kept = None

    def keep(value: Any) -> None:
        def note() -> None:
            nonlocal kept
            kept = value

        note()

    return keep, lambda: kept


KEEPS: dict[str, tuple[Callable[[Any], Any], Callable[[], Any]]] = {
    "a global": (keep_in_global, lambda: LATEST),
    "a dict": (keep_in_dict, lambda: BY_NAME["kept"]),
    "a class": (keep_in_class, lambda: Tracker.of_class),
    "a class, by setattr": (lambda value: setattr(Tracker, "of_class", value), lambda: Tracker.of_class),
    "a tracker": (lambda value: TRACKER.add("kept", value), lambda: TRACKER.values["kept"]),
    "a variable of a function": _enclosing(),
    "a variable, by a function within the body": _local_helper(),
    "a context variable": (IN_CONTEXT.set, IN_CONTEXT.get),
    "a queue": (QUEUE.put, QUEUE.get_nowait),
}


class Keeps(nn.Module):
    def __init__(self, keep: Callable[[Any], Any], of: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.gate, self.layer = nn.Linear(3, 3), nn.Linear(3, 3)
        self.keep, self.of = keep, of

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        self.keep(self.of(x, weights))
        return self.layer(x) * weights


@pytest.mark.parametrize("place", KEEPS)
@pytest.mark.parametrize(
    "of",
    [
        lambda x, weights: weights.mean(0).square().sum(),
        lambda x, weights: x.sum(),
        lambda x, weights: weights,
    ],
    ids=["of what it makes", "of the argument", "what the graph has, too"],
)
def test_an_auxiliary_loss_that_is_kept_with_its_graph(place: str, of: Callable[..., Any]) -> None:
    keep, kept = KEEPS[place]

    def program(device: str, wrap: Wrap) -> Iterator[Any]:
        before, model = nn.Linear(3, 3).to(device), wrap(Keeps(keep, of).to(device))
        for number in range(9):
            before.zero_grad()
            model.zero_grad()
            (model(before(torch.full((4, 3), float(number)).to(device))).mean() + kept().sum()).backward()
            mark_step()
            yield from (before.weight.grad, model.gate.weight.grad)

    check(lambda device, wrap: list(program(device, wrap)))


@pytest.mark.parametrize("place", KEEPS)
@pytest.mark.parametrize(
    "of",
    [
        lambda x, weights: (x,),
        lambda x, weights: (x[0], x.detach()),
        lambda x, weights: [types.SimpleNamespace(x=x.detach()), weights.detach()],
    ],
    ids=["itself", "views", "in new objects"],
)
@pytest.mark.parametrize("follows", [False, True])
def test_an_argument_that_is_kept(place: str, of: Callable[..., Any], follows: bool) -> None:
    keep, kept = KEEPS[place]

    def program(device: str, wrap: Wrap) -> Iterator[Any]:
        model = wrap(Keeps(keep, of).to(device))
        for number in range(9):
            with torch.set_grad_enabled(follows):
                result = model(torch.full((4, 3), float(number)).to(device))
            if follows:
                result.mean().backward()
            mark_step()
            yield result
            yield from (getattr(one, "x", one).clone() for one in kept())

    check(lambda device, wrap: list(program(device, wrap)))


class Scales(torch.autograd.Function):
    """Has its argument as an attribute of the context."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.again = lambda: x
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad, (grad * ctx.again()).sum(0)


class KeepsNothing(nn.Module):
    """Holds on to tensors in its graph, in garbage and in its result."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.weight = nn.Linear(3, 3), nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        garbage: list[Any] = [x]
        garbage.append(garbage)
        hidden = checkpoint(self.layer, x + 1, use_reentrant=False)
        return {"y": Scales.apply(x, self.weight) * hidden.tanh(), "x": x, "more": [hidden]}


def test_tensors_that_only_graphs_and_garbage_hold_are_not_kept() -> None:
    def program(device: str, wrap: Wrap) -> Iterator[Any]:
        before, model = nn.Linear(3, 3).to(device), wrap(KeepsNothing().to(device))
        for number in range(9):
            before.zero_grad()
            model.zero_grad()
            found = model(before(torch.full((4, 3), float(number)).to(device)))
            (found["y"].mean() + found["more"][0].sum()).backward()
            mark_step()
            yield from (before.weight.grad, model.weight.grad, found["x"])

    check(lambda device, wrap: list(program(device, wrap)), num_jumps=4)


class Slots:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


HOLDERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "slots": (Slots, lambda holder: holder.value),
    "a closure": (lambda value: lambda: value, lambda holder: holder()),
    "a partial": (lambda value: functools.partial(torch.neg, value), lambda holder: -holder()),
    "a bound method": (lambda value: value.clone, lambda holder: holder()),
    "a key": (lambda value: {value: 1}, lambda holder: next(iter(holder))),
    "many lists": (lambda value: [[[[[[value]]]]]], lambda holder: holder[0][0][0][0][0][0]),
    "a long list": (lambda value: [None] * 200 + [value], lambda holder: holder[-1]),
    "an exception": (ValueError, lambda holder: holder.args[0]),
}


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("place", ["a global", "a dict", "a context variable"])
def test_an_argument_that_is_kept_within_something(holder: str, place: str) -> None:
    (hold, held), (keep, kept) = HOLDERS[holder], KEEPS[place]

    def program(device: str, wrap: Wrap) -> Iterator[Any]:
        model = wrap(Keeps(keep, lambda x, weights: hold(x)).to(device))
        for number in range(9):
            yield model(torch.full((4, 3), float(number)).to(device))
            mark_step()
            yield held(kept()).clone()

    check(lambda device, wrap: list(program(device, wrap)))


class Totals:
    loss: Any = 0.0
    by_name: dict[str, Any] = {}


class Observes(torch.autograd.Function):
    """Keeps how large its argument is in forward, and its gradient in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Totals.by_name["largest"] = x.detach().abs().max()
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        keep_in_global(Slots(grad))
        return grad * 2


class Tallies(nn.Module):
    """Keeps a loss where a number was, and a mean by a function within it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer, self.way = nn.Linear(3, 3), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "after it was cleared":  # what comes may have the id of what goes
            Totals.loss = None
        found = self.layer(x)
        if self.way in ("where a number was", "after it was cleared"):
            Totals.loss = found.square().mean()
        elif self.way == "by object.__setattr__":
            object.__setattr__(TRACKER, "loss", found.square().mean())
        elif self.way == "in an autograd function":
            found = Observes.apply(found)
        elif self.way == "in the middle of a long list":
            MANY[150] = found.detach()
        return found


MANY: list[Any] = [None] * 300
TALLIES: dict[str, Callable[[], list[Any]]] = {
    "where a number was": lambda: [Totals.loss],
    "after it was cleared": lambda: [Totals.loss],
    "by object.__setattr__": lambda: [TRACKER.loss],  # type: ignore[attr-defined]
    "in an autograd function": lambda: [Totals.by_name["largest"], LATEST.value],
    "in the middle of a long list": lambda: [MANY[150]],
}


@pytest.mark.parametrize("way", TALLIES)
def test_a_tensor_that_is_kept(way: str) -> None:
    def program(device: str, wrap: Wrap) -> Iterator[Any]:
        Totals.loss, Totals.by_name = 0.0, {}
        MANY[150] = None
        vars(TRACKER).pop("loss", None)
        model = wrap(Tallies(way).to(device))
        for number in range(9):
            model.zero_grad()
            loss = model(torch.full((4, 3), float(number)).to(device)).mean()
            loss.backward(retain_graph=True)
            mark_step()
            for kept in TALLIES[way]():
                if kept.requires_grad:
                    kept.backward()
                yield kept.detach().clone()
            yield model.layer.weight.grad.clone()

    check(lambda device, wrap: list(program(device, wrap)))


class KeepsLate(nn.Module):
    """Keeps a loss in a global from the call on in which a global says so."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.layer(x)
        if BY_NAME.get("keeps"):
            keep_in_global([found.square().mean()])
        return found


def test_a_module_that_begins_to_keep_a_loss() -> None:
    def program(device: str, wrap: Wrap) -> Iterator[Any]:
        BY_NAME.clear()
        before, model = nn.Linear(3, 3).to(device), wrap(KeepsLate().to(device))
        for number in range(9):
            before.zero_grad()
            BY_NAME["keeps"] = number >= 6
            loss = model(before(torch.full((4, 3), float(number)).to(device))).mean()
            (loss + LATEST[0] if number >= 6 else loss).backward()
            mark_step()
            yield before.weight.grad

    check(lambda device, wrap: list(program(device, wrap)))


class KeepsUnseen(KeepsLate):
    """As that, but goes by what nothing tells: how often something is referred to."""

    token = object()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.layer(x)
        if sys.getrefcount(self.token) > 9:
            keep_in_global(found.square().mean())
        return found


def test_a_module_that_begins_to_keep_a_loss_unseen_says_so() -> None:
    model, before = KeepsUnseen().to("lazy"), nn.Linear(3, 3).to("lazy")
    capture(model)
    x = before(torch.ones(4, 3).to("lazy"))
    model(x).mean().backward(retain_graph=True)
    references = [KeepsUnseen.token] * 9
    with pytest.raises(lazy_backend.CaptureError, match="left a tensor outside of itself"):
        model(x)
    del references


def test_a_function_that_keeps_an_argument_in_a_context_variable() -> None:
    def program(device: str, wrap: Wrap) -> Iterator[Any]:
        layer = nn.Linear(3, 3).to(device)

        def step(x: torch.Tensor) -> torch.Tensor:
            IN_CONTEXT.set((x,))
            return layer(x).detach()

        called = wrap(step)
        for number in range(9):
            yield called(torch.full((4, 3), float(number)).to(device))
            yield IN_CONTEXT.get()[0].clone()

    check(lambda device, wrap: list(program(device, wrap)))
