"""Captured modules whose graph does not lead to all arguments, or falls apart: each call equals the plain one's.

Hidden states that a body detaches, critics beside actors, backwards that draw, and lists that change before a body runs
again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import lazy_backend
from lazy_backend import capture, captures

pytestmark = pytest.mark.filterwarnings("ignore::lazy_backend.CaptureWarning")

CALLS = 12

Program = Callable[[str, Callable[[Any], Any]], list[Any]]


@pytest.fixture(autouse=True)
def interpreted() -> None:
    lazy_backend.config.compile = "off"


def compare(program: Program, tolerance: float = 0.0) -> int:
    """Bit for bit, or of floats. Returns how many calls of modules were replayed."""
    found, kept = [], []

    def captured(module: nn.Module) -> nn.Module:
        kept.append(module)  # or its row would be gone
        return capture(module)  # type: ignore[no-any-return, call-overload]

    for device, call in (("cpu", lambda module: module), ("lazy", captured)):
        torch.manual_seed(0)
        found.append(program(device, call))
    assert found[1] == (pytest.approx(found[0], rel=tolerance) if tolerance else found[0])
    return sum(row["replays"] for row in captures() if row["kind"] == "module")


def batch(number: int, device: str) -> Tensor:
    return (torch.linspace(-1, 1, 12).view(4, 3) * (number + 1)).to(device)


# ----- arguments that the graph does not lead to


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.hidden, self.outputs = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.inputs(x) + self.hidden(hidden.detach()))
        return self.outputs(hidden), hidden


def stateful(device: str, captured: Any) -> list[Any]:
    cell = captured(Cell().to(device))
    optimizer = torch.optim.SGD(cell.parameters(), 0.1)
    hidden, losses = torch.zeros(4, 4).to(device), []
    for number in range(CALLS):
        made, hidden = cell(batch(number, device), hidden)
        loss = made.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Twice(torch.autograd.Function):
    """A function that gives zeros where it gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Gap(nn.Module):
    """A student's distance to a teacher's results, used in one of several ways that no gradient goes through."""

    def __init__(self, use: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.use = nn.Linear(3, 3), use

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        return (self.layer(student) - self.use(teacher)).square().mean()


def _without_gradients(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x * 2


USES: dict[str, Callable[[Tensor], Tensor]] = {
    "detached": lambda x: x.detach(),
    "data": lambda x: x.data,
    "no_grad": _without_gradients,
    "compared": lambda x: (x > 0).float(),
    "shape": lambda x: torch.ones_like(x),
}


@pytest.mark.parametrize("use", USES)
def test_a_teacher_trains_beside_a_student(use: str) -> None:
    def program(device: str, captured: Any) -> list[Any]:
        student, teacher = nn.Linear(3, 3).to(device), nn.Linear(3, 3).to(device)
        gap = captured(Gap(USES[use]).to(device))
        models = nn.ModuleList([student, teacher, gap])
        optimizer = torch.optim.AdamW(models.parameters(), 0.125, weight_decay=0.5, foreach=True)
        found: list[Any] = []
        for number in range(CALLS):
            x = batch(number, device)
            optimizer.zero_grad()
            made = Twice.apply(teacher(x))
            made.register_hook(lambda grad: grad.clamp(-1, 1))  # it must not get None
            if number % 2:  # frees the teacher's graph
                (made - 1).square().mean().backward()
            gap(student(x), made).backward()
            found.append([grad if grad is None else grad.tolist() for p in teacher.parameters() for grad in [p.grad]])
            optimizer.step()
            found.append([p.tolist() for p in models.parameters()])
        return found

    assert compare(program) > CALLS // 2


def test_a_hidden_state_is_detached_within() -> None:
    assert compare(stateful) >= CALLS // 2


# ----- results whose graphs share nothing


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.critic = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(x), self.critic(x)


@pytest.mark.parametrize("makes", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("order", ["actor first", "critic first", "one step", "gradients", "both at first"])
def test_an_actor_and_a_critic_have_backwards_of_their_own(makes: Any, order: str) -> None:
    def program(device: str, captured: Any) -> list[Any]:
        model = captured(ActorCritic().to(device))
        optimizers = [makes(part.parameters(), 0.1) for part in (model.actor, model.critic)]
        found = []
        for number in range(CALLS):
            actions, values = model(batch(number, device))
            advantage = (1 - values).detach()
            losses = [(actions.log_softmax(1)[:, :1] * advantage).mean().neg(), (values - 1).square().mean()]
            pairs = list(zip(losses, optimizers, strict=True))
            model.zero_grad()
            if order == "gradients":
                for part, loss in zip((model.actor, model.critic), losses, strict=True):
                    for p, grad in zip(part.parameters(), torch.autograd.grad(loss, part.parameters()), strict=True):
                        p.grad = grad
            elif order == "both at first" and number < CALLS // 2:
                (losses[0] + losses[1]).backward()
            elif order in ("one step", "both at first"):
                for loss in losses:
                    loss.backward()
            else:
                for loss, optimizer in reversed(pairs) if order == "critic first" else pairs:
                    loss.backward()
                    optimizer.step()
            if order in ("one step", "gradients", "both at first"):
                for optimizer in optimizers:
                    optimizer.step()
            found.append([p.tolist() for p in model.parameters()])
        return found

    assert compare(program) >= CALLS // 2


class Shared(nn.Module):
    """An actor and a critic, over what both are computed from."""

    def __init__(self, shares: str) -> None:
        super().__init__()
        self.trunk, self.norm, self.shares = nn.Linear(3, 4), nn.BatchNorm1d(3), shares
        self.actor, self.critic = nn.Linear(4, 2), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.trunk(x / 2).tanh()
        if self.shares == "a trunk for one":
            return self.actor(features), self.critic(features.detach()).tanh()
        with torch.no_grad():
            features = self.trunk(self.norm(x)).tanh()
        return self.actor(features + 1).tanh(), self.critic(features + 1)


@pytest.mark.parametrize("shares", ["a trunk for one", "frozen features"])
@pytest.mark.parametrize("wanted", [(0, 1), (1, 0), (0,), (1,)])
def test_parts_are_computed_from_the_same_tensors(shares: str, wanted: tuple[int, ...]) -> None:
    def program(device: str, captured: Any) -> list[Any]:
        model = captured(Shared(shares).to(device))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        found = []
        for number in range(CALLS):
            results = model(batch(number, device))
            optimizer.zero_grad()
            for place in wanted:
                results[place].square().mean().backward()
                with torch.no_grad():
                    results[place].clamp_(-0.1, 0.1)  # of no concern to the other part
            optimizer.step()
            found.append([p.tolist() for p in model.parameters()])
        return found

    assert compare(program) >= CALLS // 2


def test_backwards_that_do_not_concern_a_module_free_nothing() -> None:
    def program(device: str, captured: Any) -> list[Any]:
        blocks = [captured(ActorCritic().to(device)) for _ in range(2)]
        found = []
        for number in range(CALLS):
            actions, values = blocks[0](batch(number, device))
            other, _ = blocks[1](torch.cat([actions, values], 1).detach() + values)
            values.square().mean().backward(retain_graph=True)
            other.square().mean().backward()
            actions.sum().backward()
            found.append([None if p.grad is None else p.grad.tolist() for b in blocks for p in b.parameters()])
        return found

    assert compare(program) > 0


def test_a_second_backward_of_the_same_result_is_refused_as_in_eager() -> None:
    def program(device: str, captured: Any) -> list[Any]:
        model = captured(ActorCritic().to(device))
        found = []
        for number in range(CALLS):
            actions, values = model(batch(number, device))
            actions.sum().backward()
            values.sum().backward()
            for result in (actions, values):
                with pytest.raises(RuntimeError, match="a second time"):
                    result.sum().backward()
            found.append([p.grad.tolist() for p in model.parameters()])
        return found

    assert compare(program) > 0


def test_a_result_that_is_written_between_two_backwards_is_noticed() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.one(x).tanh(), self.other(x).tanh()  # each is saved for its own backward

    def program(device: str, captured: Any) -> list[Any]:
        heads = captured(Heads().to(device))
        found = []
        for number in range(CALLS):
            one, other = heads(batch(number, device))
            loss = other.sum()
            one.sum().backward()
            if number >= CALLS // 2:
                with torch.no_grad():
                    other.mul_(2)
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    loss.backward()
            else:
                loss.backward()
            found.append([p.grad.tolist() for p in heads.one.parameters()])
        return found

    assert compare(program) > 0


def test_results_that_share_a_trunk_are_refused_as_in_eager() -> None:
    class Trunk(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.one, self.other = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            features = self.trunk(x).tanh()
            return self.one(features), self.other(features)

    model = capture(Trunk().to("lazy"))
    for number in range(CALLS):
        one, other = model(batch(number, "lazy"))
        one.sum().backward()
        with pytest.raises(RuntimeError, match="a second time"):
            other.sum().backward()


# ----- backwards that draw, lists that change


def _torch_draw() -> Callable[[], float]:
    generator = torch.Generator().manual_seed(0)
    return lambda: torch.rand((), generator=generator).item()


DRAWS: dict[str, Callable[[], Callable[[], float]]] = {
    "numpy.Generator": lambda: numpy.random.default_rng(0).random,
    "numpy.RandomState": lambda: numpy.random.RandomState(0).rand,
    "random.Random": lambda: random.Random(0).random,
    "torch.Generator": _torch_draw,
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_backward_draws_from_a_generator_of_the_users(name: str) -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other, self.draw = nn.Linear(3, 3), nn.Linear(3, 3), DRAWS[name]()

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.one(x)
            hidden.register_hook(lambda grad: grad * 0 if self.draw() < 0.3 else grad)
            return self.other(hidden.tanh())  # type: ignore[no-any-return]

    def program(device: str, captured: Any) -> list[Any]:
        model = captured(Dropping().to(device))
        found = []
        for number in range(3 * CALLS):
            model.zero_grad()
            model(batch(number, device)).sum().backward()
            found.append(model.one.bias.grad.tolist())
        return found

    compare(program)


@pytest.mark.parametrize("sets", [torch.set_grad_enabled, lambda trains: torch.set_default_dtype(torch.float64)])
def test_a_body_sets_a_mode_for_the_code_after_it(sets: Callable[[bool], Any]) -> None:
    class Setting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            sets(self.training)
            return self.layer(x)  # type: ignore[no-any-return]

    def program(device: str, captured: Any) -> list[Any]:
        model, found = captured(Setting().to(device)), []
        for number in range(2 * CALLS):
            model.train(number % 12 < 8)
            try:
                made = model(batch(number, device))
                found.append((made.tolist(), torch.is_grad_enabled(), torch.get_default_dtype()))
            finally:
                torch.set_grad_enabled(True)
                torch.set_default_dtype(torch.float32)
        return found

    compare(program)


def test_a_list_changes_before_the_body_runs_again() -> None:
    class Frames(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, frames: list[Tensor]) -> Tensor:
            return self.layer(frames[0]).square() + self.layer(frames[1]).square()  # type: ignore[no-any-return]

    def program(device: str, captured: Any) -> list[Any]:
        model = captured(Frames().to(device))
        parameters, frames = list(model.parameters()), [batch(number, device) for number in range(2)]
        found = []
        for number in range(CALLS):
            loss = model(frames).sum()
            frames.append(batch(number, device) / 8)
            del frames[0]
            model.zero_grad()
            if number == CALLS // 2:
                grads = torch.autograd.grad(loss, parameters, create_graph=True)
                loss = loss + sum(grad.square().sum() for grad in grads)
            loss.backward()
            found += [number for p in parameters for number in p.grad.flatten().tolist()]
        return found

    compare(program, 1e-5)
