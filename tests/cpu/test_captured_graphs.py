"""What captured code does with graphs, gradients and state that are there besides it: each call equals the plain one's.

Backwards that leave a function through an argument, or change what they read; gradients that a body clears; results
that are cached beside modules; one argument given twice, or differentiated by another.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import lazy_backend
from lazy_backend import capture, captures

pytestmark = pytest.mark.filterwarnings("ignore::lazy_backend.CaptureWarning")

CALLS, CHANGES_AT = 12, 6

Capture = Callable[[Any], Any]
Program = Callable[[str, Capture], list[Any]]


@pytest.fixture(autouse=True)
def interpreted() -> None:
    lazy_backend.config.compile = "off"


def _as_written(one: Any) -> Any:
    return one


def compare(program: Program, tolerance: float = 0.0) -> None:
    found = []
    for device, captured in (("cpu", _as_written), ("lazy", capture)):
        torch.manual_seed(0)
        found.append(program(device, captured))
    assert found[1] == (pytest.approx(found[0], rel=tolerance) if tolerance else found[0])


# ----- writes in place: autograd refuses graphs that saved what was written


def _writes(device: str, captured: Capture) -> list[Any]:
    state = {name: torch.ones(2, 3).to(device) for name in ("whole", "average", "counted", "untouched")}
    row, weight = state["whole"][1], nn.Parameter(torch.ones(3).to(device))
    norm = nn.BatchNorm1d(3).to(device)
    optimizer = torch.optim.Adam([weight])

    @captured
    def update(x: Tensor) -> Tensor:
        weight.grad = x.sum(0)
        optimizer.step()
        with torch.no_grad():
            state["whole"][0].copy_(x[0])
            state["average"].lerp_(x, 0.5)
            state["counted"] += 1
            x.mul_(2)
            return norm(x + state["untouched"])

    found: list[Any] = []
    for number in range(CALLS):
        x = torch.full((2, 3), float(number)).to(device)
        held = {**state, "row": row, "weight": weight, "x": x, "mean": norm.running_mean}
        graphs = {name: torch.ones_like(one).requires_grad_() * one.detach() for name, one in held.items()}
        versions = {name: one._version for name, one in held.items()}
        found.append(update(x).tolist())
        for name, graph in graphs.items():
            try:
                graph.sum().backward()
                refused = False
            except RuntimeError as error:
                refused = "modified by an inplace operation" in str(error)
            found.append((name, refused, held[name]._version > versions[name]))
    return found


def test_autograd_counts_what_replays_write() -> None:
    before = lazy_backend.metrics.counter_value("CapturedCall")
    compare(_writes)
    assert lazy_backend.metrics.counter_value("CapturedCall") - before > 4


def _accumulates(device: str, captured: Capture, clears: bool) -> list[Any]:
    weight = nn.Parameter(torch.ones(3).to(device))
    weight.grad = torch.ones(3).to(device)

    @captured
    def accumulate(x: Tensor) -> None:
        if clears:
            weight.grad.zero_()
        else:
            (weight * x).sum().backward()

    found: list[Any] = []
    for _ in range(CALLS):
        graph = (torch.ones(3).to(device).requires_grad_() * weight.grad).sum()
        accumulate(torch.ones(3).to(device))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            graph.backward()
        found.append(weight.grad.tolist())
    return found


@pytest.mark.parametrize("clears", [False, True])
def test_autograd_counts_gradients_that_replays_write(clears: bool) -> None:
    before = lazy_backend.metrics.counter_value("CapturedCall")
    compare(lambda device, captured: _accumulates(device, captured, clears))
    assert lazy_backend.metrics.counter_value("CapturedCall") - before > 4


def _collects(device: str, captured: Capture, collected: Any) -> list[Any]:
    weight = nn.Parameter(torch.ones(3).to(device))

    @captured
    def step(x: Tensor) -> Tensor:
        loss = (weight * x).sum().detach()
        collected.append(loss.detach())
        return loss

    for number in range(CALLS):
        step(torch.full((3,), float(number)).to(device))
    return [float(one) for one in collected]


@pytest.mark.parametrize("make", [list, lambda: collections.deque(maxlen=5)], ids=["list", "deque"])
def test_results_that_a_body_collects(make: Callable[[], Any]) -> None:
    compare(lambda device, captured: _collects(device, captured, make()))


# ----- functions


def _penalized(device: str, captured: Capture) -> list[Any]:
    weight = nn.Parameter(torch.ones(2).to(device))
    optimizer = torch.optim.SGD([weight], lr=0.125)

    @captured
    def train(x: Tensor, penalty: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (weight * x).sum() + penalty
        loss.backward()
        optimizer.step()
        return loss.detach()

    found = []
    for number in range(CALLS):
        factor = 0.5 if number < CHANGES_AT else 1.5
        train(torch.zeros(2).to(device), factor * weight.square().sum())
        found.append(weight.tolist())
    return found


def _differentiated(device: str, captured: Capture) -> list[Any]:
    weight = nn.Parameter(torch.ones(2).to(device))
    slope = captured(lambda hidden: torch.autograd.grad(hidden.sum(), weight)[0])
    return [slope(weight * (2.0 if number < CHANGES_AT else 10.0)).tolist() for number in range(CALLS)]


def _called(
    body: Callable[..., Tensor], make: Callable[[int, str], tuple[Any, ...]], device: str, captured: Capture
) -> list[Any]:
    function = captured(body)
    found = []
    for number in range(CALLS):
        given = make(number, device)
        result = function(*given).tolist()
        found.append((result, *[(one.requires_grad, hasattr(one, "tag")) for one in given if isinstance(one, Tensor)]))
    return found


def _scaled(asks: Callable[..., bool]) -> Callable[..., Tensor]:
    def body(x: Any, *others: Any) -> Tensor:
        data: Tensor = (x if isinstance(x, Tensor) else x[0]).detach()
        return data * (2 if asks(x, *others) else 3)

    return body


def _ones(number: int, device: str) -> tuple[Tensor]:
    return (torch.ones(2).to(device),)


def _with_grad_later(number: int, device: str) -> tuple[Tensor]:
    x = torch.ones(2).to(device).requires_grad_()
    if number >= CHANGES_AT:
        x.grad = torch.ones(2).to(device)
    return (x,)


def _parameter_later(number: int, device: str) -> tuple[Tensor]:
    (x,) = _ones(number, device)
    return (x if number < CHANGES_AT else nn.Parameter(x, requires_grad=False),)


def _view_later(number: int, device: str) -> tuple[Tensor]:
    (x,) = _ones(number, device)
    return (x if number < CHANGES_AT else x[:],)


def _computed_later(number: int, device: str) -> tuple[Tensor]:
    x = torch.ones(2).to(device).requires_grad_()
    return (x if number < CHANGES_AT else x * 1,)


def _same_list_at_first(number: int, device: str) -> tuple[Any, ...]:
    given = [*_ones(number, device)]
    return given, given if number < CHANGES_AT else list(given)


def _marked(x: Tensor) -> Tensor:
    x.tag = 1  # type: ignore[attr-defined]
    return x * 2


CALLED: dict[str, tuple[Callable[..., Tensor], Callable[[int, str], tuple[Any, ...]]]] = {
    "a gradient": (_scaled(lambda x: x.grad is None), _with_grad_later),
    "a parameter": (_scaled(lambda x: isinstance(x, nn.Parameter)), _parameter_later),
    "a view": (_scaled(lambda x: x._base is None), _view_later),
    "a leaf": (_scaled(lambda x: x.is_leaf), _computed_later),
    "one list twice": (_scaled(lambda x, y: x is y), _same_list_at_first),
    "requires_grad_": (lambda x: (x.requires_grad_() * 2).detach(), _ones),
    "an attribute": (_marked, _ones),
}


def _led_to_later(device: str, captured: Capture) -> list[Any]:
    weight, other = (nn.Parameter(torch.ones(2).to(device)) for _ in range(2))
    slope = captured(lambda hidden: torch.autograd.grad((weight * 3 + hidden).sum(), weight)[0])
    return [slope((other if number < CHANGES_AT else weight) * 2.0).tolist() for number in range(CALLS)]


def _limited(device: str, captured: Capture) -> list[Any]:
    weight, other = (nn.Parameter(torch.ones(2).to(device)) for _ in range(2))

    @captured
    def train(target: Tensor) -> None:
        weight.grad = None
        (weight - target).square().sum().backward(inputs=[weight])
        with torch.no_grad():
            weight.sub_(weight.grad, alpha=0.125)

    found = []
    for number in range(CALLS):
        train((other if number < CHANGES_AT else weight) * 2.0)
        found.append(weight.tolist())
    return found


@pytest.mark.parametrize("program", [_penalized, _differentiated, _led_to_later, _limited])
def test_a_backward_that_leaves_a_function_through_an_argument(program: Program) -> None:
    compare(program)


@pytest.mark.parametrize("name", CALLED)
def test_a_function_is_given_more_than_values(name: str) -> None:
    body, make = CALLED[name]
    compare(lambda device, captured: _called(body, make, device, captured))


def test_a_function_replays_if_an_argument_has_a_gradient_at_times() -> None:
    @capture
    def slope_of(x: Tensor, weight: Tensor) -> Tensor:
        return torch.autograd.grad((x * weight).sum(), weight)[0]

    weight = nn.Parameter(torch.ones(2, device="lazy"))
    for number in range(2 * CALLS):
        weight.grad = None if number % 2 else torch.ones_like(weight)
        assert slope_of(torch.full((2,), number + 1.0, device="lazy"), weight).tolist() == [number + 1.0] * 2
    (row,) = (row for row in captures() if row["name"].endswith("slope_of"))
    assert row["replays"] >= 2 * CALLS - 6, row


def test_a_function_that_uses_the_gradient_of_an_argument() -> None:
    def program(device: str, captured: Capture) -> list[Any]:
        @captured
        def add(weight: Tensor) -> Tensor:
            (weight * weight).sum().backward()
            assert weight.grad is not None
            return weight.grad * 2

        weight, found = nn.Parameter(torch.ones(2).to(device)), []
        for number in range(CALLS):
            if number % 3 == 0:
                weight.grad = torch.full((2,), float(number)).to(device)
            found.append((add(weight).tolist(), weight.grad.tolist()))
        return found

    compare(program)


def test_a_function_replays_if_its_backward_ends_at_an_argument_with_a_graph() -> None:
    @capture
    def slope_at(hidden: Tensor) -> Tensor:
        return torch.autograd.grad(hidden.square().sum(), hidden)[0]

    weight = nn.Parameter(torch.ones(2, device="lazy"))
    for number in range(CALLS):
        assert slope_at(weight * number).tolist() == [2.0 * number] * 2
    (row,) = (row for row in captures() if row["name"].endswith("slope_at"))
    assert row["replays"] >= CALLS - 4, row


def _add_to_a_row(h: Tensor, scale: Tensor) -> None:
    h[0] += scale


def _double_the_rest(h: Tensor, scale: Tensor) -> None:
    h[1:].mul_(2)


def _add_to_a_flat_view(h: Tensor, scale: Tensor) -> None:
    h.view(-1)[:3].add_(scale)


def _add_at_an_index(h: Tensor, scale: Tensor) -> None:
    h.index_add_(0, torch.tensor([0], device=h.device), scale[None])


@pytest.mark.parametrize("write", [_add_to_a_row, _double_the_rest, _add_to_a_flat_view, _add_at_an_index])
@pytest.mark.parametrize("is_view", [False, True])
def test_a_function_writes_to_an_argument_that_is_differentiated_later(
    write: Callable[[Tensor, Tensor], None], is_view: bool
) -> None:
    def program(device: str, captured: Capture) -> list[Any]:
        scale, encode = nn.Parameter(torch.full((3,), 2.0).to(device)), nn.Linear(3, 3).to(device)
        step = captured(lambda h: write(h, scale))
        found = []
        for number in range(CALLS):
            encode.zero_grad()
            scale.grad = None
            h = encode((torch.ones(4, 3) * number).to(device))
            step(h.view(4, 3) if is_view else h)
            h.square().sum().backward()
            found.append([None if one.grad is None else one.grad.tolist() for one in (scale, encode.bias)])
        return found

    compare(program)


def _regularize(model: nn.Module, x: Tensor, factor: float) -> Tensor:
    model.reg = factor * model.weight.square().sum()
    return model(x)


def _keep_results(model: nn.Module, x: Tensor, factor: float) -> Tensor:
    y: Tensor = model(x)
    model.kept = {"reg": (y * factor).square().mean()}
    return y.detach()


def _write_to_a_buffer(model: nn.Module, x: Tensor, factor: float) -> None:
    model.reg = torch.zeros(3, device=x.device)
    model.reg += model.weight.square().sum(0) * factor


def _keep_beside_a_backward(model: nn.Module, x: Tensor, factor: float) -> None:
    model.reg = factor * model.weight.square().sum()
    model(x).square().sum().backward()


def _keep_a_graph_with_the_gradient(model: nn.Module, x: Tensor, factor: float) -> None:
    (slope,) = torch.autograd.grad(model(x).square().sum(), model.weight, create_graph=True)
    model.reg = slope.square().sum() * factor


LEAVES = [_regularize, _keep_results, _write_to_a_buffer, _keep_beside_a_backward, _keep_a_graph_with_the_gradient]


@pytest.mark.parametrize("body", LEAVES)
@pytest.mark.parametrize("keeps", [False, True])
def test_a_function_leaves_a_graph_in_its_state(body: Callable[..., Any], keeps: bool) -> None:
    def program(device: str, captured: Capture) -> list[Any]:
        model, found = nn.Linear(3, 3).to(device), []
        step = captured(lambda x, factor: body(model, x, factor))
        for number in range(CALLS):
            model.zero_grad()
            step((torch.ones(4, 3) * number / CALLS).to(device), number / CALLS)
            left: Any = model.kept["reg"] if hasattr(model, "kept") else model.reg
            left.sum().backward(retain_graph=keeps)
            assert model.weight.grad is not None
            found.append(model.weight.grad.tolist())
            with torch.no_grad():
                model.weight.sub_(model.weight.grad, alpha=0.0625)
        return found

    compare(program)


def test_a_function_replays_that_leaves_a_graph_which_its_backward_used_up() -> None:
    """And a view of a weight, which autograd makes a new node for once the weight was written."""

    def program(device: str, captured: Capture) -> list[Any]:
        model = nn.Linear(3, 3).to(device)
        turned = model.weight.t()

        @captured
        def train(x: Tensor) -> None:
            model.zero_grad()
            model.hidden = torch.tanh(model(x))  # type: ignore[assignment]
            (model.hidden @ turned).square().sum().backward()
            with torch.no_grad():
                assert model.weight.grad is not None
                model.weight.sub_(model.weight.grad, alpha=0.125)

        found = []
        for number in range(CALLS):
            train((torch.ones(4, 3) * number).to(device))
            found.append([model.hidden.tolist(), turned.tolist()])
        rows.extend(row for row in captures() if row["name"].endswith("train"))
        return found

    rows: list[Any] = []
    compare(program)
    assert rows[-1]["replays"] >= CALLS - 4, rows


def _without_gradients() -> None:
    torch.set_grad_enabled(False)


def _with_gradients() -> None:
    torch.set_grad_enabled(True)


def _in_autocast() -> None:
    torch.set_autocast_enabled("cpu", True)


def _warning_always() -> None:
    torch.set_warn_always(True)


SWITCHED: dict[Callable[[], None], tuple[Callable[[], Any], Callable[[], None]]] = {
    _without_gradients: (torch.is_grad_enabled, _with_gradients),
    _in_autocast: (lambda: torch.is_autocast_enabled("cpu"), lambda: torch.set_autocast_enabled("cpu", False)),
    _warning_always: (torch.is_warn_always_enabled, lambda: torch.set_warn_always(False)),
}


@pytest.mark.parametrize("switch", SWITCHED)
def test_a_function_switches_a_mode_for_the_code_after_it(switch: Callable[[], None]) -> None:
    def program(device: str, captured: Capture) -> list[Any]:
        read, restore = SWITCHED[switch]

        @captured
        def double(x: Tensor) -> Tensor:
            made = x * 2
            switch()
            return made

        found = []
        for number in range(CALLS):
            try:
                result = double(torch.full((2,), float(number)).to(device))
                found.append((read(), result.tolist()))
            finally:
                restore()
        return found

    compare(program)


# ----- modules


class Scaling(nn.Module):
    """Multiplies by its weight. `before` is called with it at each call, `after` with its result."""

    def __init__(
        self,
        before: Callable[[Scaling], object] = lambda _: None,
        after: Callable[[Scaling, Tensor], Tensor] = lambda _, y: y,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.before, self.after, self.flag = before, after, False
        self.inner = torch.optim.SGD([self.weight], lr=0.5)

    def forward(self, x: Tensor) -> Tensor:
        self.before(self)
        return self.after(self, self.weight * x)


class State:
    flag = False
    values = [1.0, 2.0, 4.0]
    cached: Any = None


def _flip() -> float:
    State.flag = not State.flag
    return 1.0 if State.flag else -1.0


def _flip_own(module: Scaling) -> float:
    module.flag = not module.flag
    return 1.0 if module.flag else -1.0


def _rotate() -> float:
    State.values.append(State.values.pop(0))
    return State.values[0]


def _hooked(by: Callable[[Scaling], float]) -> Callable[[Scaling, Tensor], Tensor]:
    def after(module: Scaling, y: Tensor) -> Tensor:
        y.register_hook(lambda grad: grad * by(module))
        return y * 1

    return after


def _clearing(module: Scaling, y: Tensor) -> Tensor:
    y.register_hook(lambda _: module.zero_grad())
    return y * 1


def _trained(make: Callable[[], Scaling]) -> Program:
    """Trains a module that has gradients from before in the later calls."""

    def program(device: str, captured: Capture) -> list[Any]:
        State.flag, State.values = False, [1.0, 2.0, 4.0]
        module = captured(make().to(device))
        found = []
        for number in range(CALLS):
            if number < CHANGES_AT:
                module.weight.grad = None
            module(torch.ones(2).to(device)).sum().backward()
            found += [module.weight.tolist(), module.weight.grad.tolist()]
        return found

    return program


def _stepped(module: Scaling) -> None:
    for function in (module.inner.step,):
        function()


TRAINED: dict[str, Callable[[], Scaling]] = {
    "a backward that flips what it reads": lambda: Scaling(after=_hooked(lambda _: _flip())),
    "a backward that flips an attribute": lambda: Scaling(after=_hooked(_flip_own)),
    "a backward that rotates a list": lambda: Scaling(after=_hooked(lambda _: _rotate())),
    "a backward that clears gradients": lambda: Scaling(after=_clearing),
    "zero_grad": lambda: Scaling(lambda module: module.zero_grad()),
    "zero_grad by another name": lambda: Scaling(nn.Module.zero_grad),
    "a step by another name": lambda: Scaling(_stepped),
    "a step": lambda: Scaling(lambda module: module.inner.step()),
    "clipping": lambda: Scaling(
        lambda module: module.weight.grad is not None and nn.utils.clip_grad_value_(module.parameters(), 0.25)
    ),
}


@pytest.mark.parametrize("name", TRAINED)
def test_a_module_that_changes_gradients_or_what_its_backward_reads(name: str) -> None:
    compare(_trained(TRAINED[name]))


class Physics(nn.Module):
    """A loss of a field and of its derivative by what an argument is made from."""

    def __init__(self, options: dict[str, bool]) -> None:
        super().__init__()
        self.field = nn.Linear(2, 1)
        self.options = options

    def forward(self, places: Tensor, x: Tensor) -> Tensor:
        field = self.field(places).tanh()
        (slope,) = torch.autograd.grad(field.sum(), x, create_graph=True, **self.options)
        return ((0 if slope is None else slope) - field).square().mean()


@pytest.mark.parametrize("related_from", [0, CHANGES_AT])
def test_one_argument_is_differentiated_by_another(related_from: int) -> None:
    def program(device: str, captured: Capture) -> list[Any]:
        module = captured(Physics({"allow_unused": True}).to(device))
        found = []
        for number in range(CALLS):
            x = torch.ones(3, 1).to(device).requires_grad_()
            of = x if number >= related_from else x.detach()
            places = torch.cat([of, x.detach()], 1)
            loss = module(places if places.requires_grad else places.requires_grad_(), x)
            loss.backward()
            found.append(loss.item())
        return found

    compare(program, 1e-6)


@pytest.mark.parametrize("kind", [parametrizations.spectral_norm, parametrizations.weight_norm])
@pytest.mark.parametrize("whole", [True, False], ids=["function", "module"])
def test_parametrizations_are_cached_for_a_block(kind: Callable[..., nn.Module], whole: bool) -> None:
    def program(device: str, captured: Capture) -> list[Any]:
        module = kind(nn.Linear(4, 4)).to(device)
        if not whole:
            captured(module)

        def loss(x: Tensor) -> Tensor:
            return (module(x) * module(x + 1)).sum()

        step = captured(loss) if whole else loss
        found = []
        for number in range(CALLS):
            module.zero_grad()
            with parametrize.cached() if number >= CHANGES_AT else contextlib.nullcontext():
                result = step(torch.ones(1, 4).to(device))
            if not whole:
                result.backward()
            found.append(result.item())
        return found

    compare(program, 1e-6)


def test_two_calls_share_a_graph_that_the_first_made() -> None:
    class Cached(Scaling):
        def forward(self, x: Tensor) -> Tensor:
            if State.cached is None:
                State.cached = self.weight * self.weight
            return x * State.cached

    def program(device: str, captured: Capture) -> list[Any]:
        module = captured(Cached().to(device))
        x, found = torch.ones(2).to(device), []
        for _ in range(CALLS):
            State.cached = None
            module.zero_grad()
            (module(x) * module(x)).sum().backward()
            found.append(module.weight.grad.tolist())
        State.cached = None
        return found

    compare(program)


def test_an_argument_is_compared_with_a_tensor_that_code_can_name() -> None:
    def program(device: str, captured: Capture) -> list[Any]:
        constant = torch.ones(2).to(device)
        module = captured(Scaling().to(device))
        module.forward = lambda x: module.weight * x * (2 if x is constant else 3)
        given = [constant if number < CHANGES_AT else constant * 1 for number in range(CALLS)]
        return [module(x).tolist() for x in given]

    compare(program)


def test_a_gradient_is_added_to_a_sparse_one() -> None:
    def program(device: str, captured: Capture) -> list[Any]:
        table = nn.Embedding(3, 2, sparse=True).to(device)
        module = captured(Scaling().to(device))
        module.weight = table.weight
        found = []
        for number in range(CALLS):
            table.weight.grad = None
            if number >= CHANGES_AT:
                table(torch.tensor([1]).to(device)).sum().backward()
            module(torch.ones(2).to(device)).sum().backward()
            assert table.weight.grad is not None
            found.append(table.weight.grad.tolist())
        return found

    compare(program)


class Auxiliary(Scaling):
    """Leaves a loss of its own where the loop finds it."""

    def forward(self, x: Tensor) -> Tensor:
        State.cached = (x + self.weight).sum()
        return self.weight * x


def test_a_module_leaves_a_loss_in_a_global() -> None:
    def program(device: str, captured: Capture) -> list[Any]:
        first, module = nn.Linear(2, 2).to(device), captured(Auxiliary().to(device))
        found = []
        for _ in range(CALLS):
            first.zero_grad()
            loss = module(first(torch.ones(2).to(device))).sum()
            (loss + State.cached).backward()
            found.append(first.bias.grad.tolist())
        State.cached = None
        return found

    compare(program)


def test_a_module_asks_whether_an_argument_is_a_parameter() -> None:
    def program(device: str, captured: Capture) -> list[Any]:
        module = captured(Scaling().to(device))
        module.forward = lambda x: module.weight * x * (2 if isinstance(x, nn.Parameter) else 3)
        given = [torch.ones(2).to(device).requires_grad_() for _ in range(CALLS)]
        return [module(x if number < CHANGES_AT else nn.Parameter(x)).tolist() for number, x in enumerate(given)]

    compare(program)


def test_a_module_in_a_block_of_cached_parametrizations_is_replayed() -> None:
    class Unparametrized(Scaling):
        pass

    module = capture(Unparametrized().to("lazy"))
    for _ in range(CALLS):
        with parametrize.cached():
            module(torch.ones(2, device="lazy")).sum().backward()
        lazy_backend.mark_step()
    (row,) = (row for row in captures() if row["name"] == "Unparametrized")
    assert row["replays"] >= CALLS - 4, row


def test_a_step_keeps_gradients_as_state() -> None:
    class Remembering(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["before"] = parameter.grad

    def program(device: str, captured: Capture) -> list[Any]:
        weight = nn.Parameter(torch.ones(2).to(device))
        optimizer = captured(Remembering([weight], lr=0.125))
        for _ in range(CALLS):
            optimizer.zero_grad(set_to_none=False)
            weight.square().sum().backward()
            optimizer.step()
        return weight.tolist()

    compare(program)
