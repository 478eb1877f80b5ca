"""Captured modules in ordinary loops: the results are those of the loop as written, and Python does not run."""

from __future__ import annotations

import copy
import gc
import io
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from harness import count
from torch import nn
from torch.nn import functional as F

import lazy_backend
from lazy_backend import CaptureWarning, capture, mark_step

Loop = Callable[[str, Callable[[nn.Module], nn.Module]], list[torch.Tensor]]


@pytest.fixture(autouse=True)
def interpreted() -> None:
    lazy_backend.config.compile = "off"


@pytest.fixture(params=["run", "record"])
def first_sight(request: pytest.FixtureRequest) -> None:
    lazy_backend.config.first_sight = request.param


def same_as_eager(loop: Loop, num_jumps: int = 1, rounds: bool = False, close: bool = False) -> None:
    """Run `loop` on the CPU, on the lazy device, and there with a captured module: the bits must be the same.

    `rounds`: not those of the CPU, because random numbers are drawn on the device. `close`: but for rounding, because
    gradients of gradients are added in another order at the first call that asks for them.
    """
    torch.manual_seed(0)
    expected = [value.detach().clone() for value in loop("cpu", lambda module: module)]
    torch.manual_seed(0)
    written = [value.detach().cpu() for value in loop("lazy", lambda module: module)]
    with count("RegionJump") as jumps:
        torch.manual_seed(0)
        found = [value.detach().cpu() for value in loop("lazy", capture)]
    for place, values in enumerate(zip(expected, written, found, strict=True)):
        if close:
            torch.testing.assert_close(values[2], values[0], rtol=1e-6, atol=1e-6)
            continue
        assert torch.equal(values[1], values[2]), (place, values)
        assert rounds or torch.equal(values[0], values[2]), (place, values)
    assert jumps() >= num_jumps, jumps()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def step(device: str) -> None:
    if device == "lazy":
        mark_step()


def train(
    make: Callable[[], nn.Module],
    steps: int = 8,
    change: Callable[[nn.Module, torch.optim.Optimizer, int], None] = lambda model, optimizer, step: None,
    shape: tuple[int, ...] = (4, 3),
) -> Loop:
    def loop(device: str, captured: Callable[[nn.Module], nn.Module]) -> list[torch.Tensor]:
        model = captured(make().to(device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for number in range(steps):
            change(model, optimizer, number)
            x = torch.randn(shape).to(device)
            optimizer.zero_grad()
            loss = model(x).square().mean()
            if loss.requires_grad:
                loss.backward()
                optimizer.step()
            losses.append(loss)
            step(device)
        return [*losses, *model.state_dict().values()]

    return loop


# ----- models


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, src_mask=self.mask)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(3, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = c = x.new_zeros(x.shape[0], 8)
        for _ in range(3):
            h, c = self.cell(x, (h, c))
        return self.out(h)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(F.gelu(self.one(x))) + x


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (4, 3)),
    "batch norm": (lambda: nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)), (4, 3)),
    "dropout": (lambda: nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.5), nn.Linear(6, 2)), (4, 3)),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        (2, 1, 8, 8),
    ),
    "attention": (Attention, (2, 5, 8)),
    "recurrent": (Recurrent, (4, 3)),
    "tied": (Tied, (4, 3)),
    "layer norm": (lambda: nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 3), nn.Softmax(-1)), (4, 3)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_captured_model_trains_as_it_does_without(name: str, first_sight: None) -> None:
    make, shape = MODELS[name]
    same_as_eager(train(make, shape=shape), num_jumps=8, rounds=name == "dropout")


@pytest.mark.parametrize("name", ["mlp", "batch norm", "dropout"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_training_steps(name: str, mode: Any) -> None:
    make, shape = MODELS[name]

    def loop(device: str, captured: Callable[[nn.Module], nn.Module]) -> list[torch.Tensor]:
        model = captured(make().to(device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        values = []
        for _ in range(7):
            model.train()
            loss = model(torch.randn(shape).to(device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            model.eval()
            with mode():
                values += [loss, model(torch.randn(shape).to(device)).clone()]
            step(device)
        return values

    same_as_eager(loop, rounds=name == "dropout")


# ----- loops


def test_accumulated_gradients() -> None:
    def loop(device: str, captured: Callable[[nn.Module], nn.Module]) -> list[torch.Tensor]:
        model = captured(mlp().to(device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        values = []
        for number in range(40):
            loss = model(torch.randn(4, 3).to(device)).square().mean() / 4
            loss.backward()
            values.append(loss)
            if number % 4 == 3:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad(set_to_none=number % 8 == 3)
                step(device)
        return [*values, *model.parameters()]

    same_as_eager(loop, num_jumps=20)


def test_a_gan() -> None:
    def loop(device: str, captured: Callable[[nn.Module], nn.Module]) -> list[torch.Tensor]:
        g, d = captured(nn.Linear(3, 3).to(device)), captured(mlp().to(device))
        of_g, of_d = torch.optim.SGD(g.parameters(), lr=0.1), torch.optim.SGD(d.parameters(), lr=0.1)
        values = []
        for _ in range(8):
            real, noise = torch.randn(4, 3).to(device), torch.randn(4, 3).to(device)
            fake = g(noise)
            of_d.zero_grad()
            loss_d = d(real).mean() - d(fake.detach()).mean()
            loss_d.backward()
            of_d.step()
            of_g.zero_grad()
            loss_g = d(fake).mean()
            loss_g.backward()
            of_g.step()
            values += [loss_d, loss_g]
            step(device)
        return values

    same_as_eager(loop, num_jumps=20)


def test_a_read_between_forward_and_backward() -> None:
    def loop(device: str, captured: Callable[[nn.Module], nn.Module]) -> list[torch.Tensor]:
        model = captured(mlp().to(device))
        values = []
        for number in range(9):
            model.zero_grad()
            loss = model(torch.randn(4, 3).to(device)).square().mean()
            if number > 5:
                values.append(torch.tensor(loss.item()))
            loss.backward()
            values += [loss, *[p.grad.clone() for p in model.parameters()]]
            step(device)
        return values

    same_as_eager(loop, num_jumps=6)


@pytest.mark.parametrize("place", [4, 5, 6, 7])
def test_what_is_asked_of_autograd_may_change(place: int) -> None:
    """Other gradients, a retained graph, double backward, hooks: at a call after others were replayed."""

    def loop(device: str, captured: Callable[[nn.Module], nn.Module]) -> list[torch.Tensor]:
        model = captured(mlp().to(device))
        values = []
        for number in range(12):
            model.zero_grad()
            x = torch.randn(4, 3).to(device).requires_grad_(number % 2 == 0)
            loss = model(x).square().mean()
            if number == place:
                values += torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
                values += torch.autograd.grad(loss, [model[0].weight], retain_graph=True)
                loss.backward(retain_graph=True, inputs=[model[2].weight])
                values.append(model[2].weight.grad.clone())
            if number == place + 1:
                loss.backward(retain_graph=True)
            loss.backward()
            if number == place + 2:
                (norm,) = torch.autograd.grad(model(x).sum(), [model[4].weight], create_graph=True)
                norm.square().sum().backward()
            values += [loss, *[p.grad.clone() for p in model.parameters()]]
            if x.requires_grad:
                values.append(x.grad.clone())
            step(device)
        return values

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        same_as_eager(loop, num_jumps=place - 4)


def test_gradient_penalty() -> None:
    def loop(device: str, captured: Callable[[nn.Module], nn.Module]) -> list[torch.Tensor]:
        model = captured(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).to(device))
        values = []
        for number in range(10):
            model.zero_grad()
            x = torch.randn(4, 3).to(device).requires_grad_()
            out = model(x).sum()
            if number > 5:
                (grad,) = torch.autograd.grad(out, [x], create_graph=True)
                out = out + grad.square().sum()
            out.backward()
            values += [out, *[p.grad.clone() for p in model.parameters() if p.grad is not None]]
            step(device)
        return values

    with pytest.warns(CaptureWarning, match="differentiated again"):
        same_as_eager(loop, close=True)


def test_two_results_of_which_one_gets_a_gradient_at_times() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {"one": self.one(x), "two": (self.two(x).tanh(), None, 3), "x": x}

    def loop(device: str, captured: Callable[[nn.Module], nn.Module]) -> list[torch.Tensor]:
        model = captured(Two().to(device))
        values = []
        for number in range(12):
            model.zero_grad()
            x = torch.randn(4, 3).to(device)
            out = model(x)
            assert out["x"] is x
            assert out["two"][1:] == (None, 3)
            loss = out["one"].mean() + (out["two"][0].mean() if number % 5 else 0)
            loss.backward()
            values += [loss, *[p.grad.clone() for p in model.parameters() if p.grad is not None]]
            step(device)
        return values

    same_as_eager(loop)


def test_results_may_be_written_to() -> None:
    def loop(device: str, captured: Callable[[nn.Module], nn.Module]) -> list[torch.Tensor]:
        model = captured(nn.Linear(3, 3).to(device))
        values = []
        for _ in range(6):
            model.zero_grad()
            out = model(torch.randn(4, 3).to(device))
            out += 1
            out.relu_()
            out.mean().backward()
            values += [out, *[p.grad.clone() for p in model.parameters()]]
            step(device)
        return values

    same_as_eager(loop)


@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize("what", ["result", "weight", "argument"])
def test_writing_to_what_the_backward_uses_is_an_error(device: str, what: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).to(device)
    if device == "lazy":
        capture(model)
    for number in range(6):
        x = torch.randn(4, 3).to(device).requires_grad_()
        y = x * 1
        out = model(y)
        if number == 5:
            with torch.no_grad():
                {"result": out, "weight": model[0].weight, "argument": y}[what].add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()
        else:
            out.sum().backward()
        step(device)


def test_backward_twice_is_an_error() -> None:
    model = capture(mlp().to("lazy"))
    for _ in range(6):
        loss = model(torch.randn(4, 3).to("lazy")).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        mark_step()


# ----- changes between calls


def _double(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


def _changes() -> dict[str, Callable[[Any, torch.optim.Optimizer, int], None]]:
    def at(place: int, change: Callable[[Any], object]) -> Callable[[Any, torch.optim.Optimizer, int], None]:
        return lambda model, optimizer, number: change(model) if number == place else None  # type: ignore[func-returns-value, return-value]

    def device(model: Any) -> torch.device:
        return model[0].weight.device

    return {
        "a layer replaced": at(5, lambda m: m.__setitem__(0, nn.Linear(3, 8).to(device(m)))),
        "a layer appended": at(5, lambda m: m.append(nn.Linear(2, 2).to(device(m)))),
        "an activation replaced": at(5, lambda m: m.__setitem__(1, nn.GELU())),
        "frozen": at(5, lambda m: m[0].requires_grad_(False)),
        "thawed": lambda m, o, n: m[0].requires_grad_(n not in (4, 5, 6)),
        "all frozen": at(5, lambda m: m.requires_grad_(False)),
        "weights in place": at(5, lambda m: m[0].weight.data.mul_(2)),
        "weights replaced": at(5, lambda m: setattr(m[0].weight, "data", m[0].weight.data * 2)),
        "a parameter replaced": at(5, lambda m: setattr(m[0], "bias", nn.Parameter(torch.ones(8, device=device(m))))),
        "a bias removed": at(5, lambda m: setattr(m[0], "bias", None)),
        "loaded": at(5, lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()})),
        "assigned": at(5, lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}, assign=True)),
        "a forward replaced": at(5, lambda m: setattr(m[1], "forward", torch.sin)),
        "a hook": at(5, lambda m: m[1].register_forward_hook(lambda module, args, out: out * 2)),
        "a parameter's hook": at(5, lambda m: m[0].weight.register_hook(lambda grad: grad * 2)),
        "a post-accumulate hook": at(5, lambda m: m[0].weight.register_post_accumulate_grad_hook(_double)),
        "a plain attribute": at(5, lambda m: setattr(m[1], "inplace", True)),
        "gradients kept": at(5, lambda m: setattr(m[0].weight, "grad", torch.ones(8, 3, device=device(m)))),
    }


@pytest.mark.parametrize("name", _changes())
def test_a_change_between_two_calls_is_noticed(name: str, first_sight: None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        same_as_eager(train(mlp, steps=12, change=_changes()[name]), num_jumps=4)


def test_shapes_and_dtypes_alternate() -> None:
    def loop(device: str, captured: Callable[[nn.Module], nn.Module]) -> list[torch.Tensor]:
        model = captured(mlp().to(device))
        values = []
        for number in range(48):
            model.zero_grad()
            x = torch.randn(2 + number % 3, 3).to(device)
            loss = model(x if number % 2 else x.t().contiguous().t()).mean()
            loss.backward()
            values += [loss, *[p.grad.clone() for p in model.parameters()]]
            step(device)
        return values

    same_as_eager(loop)


def test_arguments_that_are_one_tensor_or_share_memory() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return (a * 2 + b * 3) * self.weight

    def loop(device: str, captured: Callable[[nn.Module], nn.Module]) -> list[torch.Tensor]:
        model = captured(Sum().to(device))
        values = []
        for number in range(20):
            both = torch.randn(2, 3).to(device)
            a = both[0]
            b = (a, both[1], both[0], torch.randn(3).to(device))[number % 4]
            values.append(model(a, b))
            values[-1].sum().backward()
            step(device)
        return [*values, model.weight.grad]

    same_as_eager(loop)


def test_plain_arguments_are_part_of_the_signature() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor, by: float, *, flip: bool = False) -> torch.Tensor:
            y = x * self.weight * by
            return torch.copysign(y, torch.ones_like(y) * by) if flip else y

    def loop(device: str, captured: Callable[[nn.Module], nn.Module]) -> list[torch.Tensor]:
        model = captured(Scale().to(device))
        values = []
        for number in range(60):
            by: Any = (0.0, -0.0, 2.0, 2, True)[number % 5]
            values.append(model(torch.randn(3).to(device), by, flip=number % 2 == 0))
            values[-1].sum().backward()
            step(device)
        return values

    same_as_eager(loop)


# ----- bodies that a replay would not repeat


class SideEffects:
    """Modules whose calls do something that a jump would leave out."""

    class Counts(nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x) * self.calls

    class Keeps(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = super().forward(x)
            return self.last * 2

    class KeepsElsewhere(nn.Linear):
        kept: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            self.kept[:] = [y.detach()]
            return y * 2

    class Reads(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (1 if x.sum().item() > 0 else 2)

    class DrawsOnTheHost(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * float(torch.rand(()))

    class Uploads(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + torch.ones(3).to(x.device)

    class WritesToItsArgument(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.mul_(2)
            return super().forward(x)

    class DrawsAFloat(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * random.random()

    class DrawsWithNumpy(nn.Linear):
        numbers = np.random.default_rng(0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y * 2 if self.numbers.random() > 0.5 else y + 1

    class ClearsGradients(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.zero_grad()
            return super().forward(x)

    class CountsOutside(nn.Linear):
        calls = [0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls[0] += 1
            return super().forward(x) * float(self.calls[0])

    class ReturnsAView(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[0]

    class Hooks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            if y.requires_grad:
                y.register_hook(lambda grad: grad * 2)
            return y * 1

    class Checkpoints(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(
                lambda x: F.dropout(torch.sin(super(SideEffects.Checkpoints, self).forward(x)), 0.5),
                x,
                use_reentrant=False,
            )


_KINDS = [name for name in vars(SideEffects) if not name.startswith("_")]


@pytest.mark.parametrize("name", _KINDS)
def test_side_effects_happen_at_each_call(name: str) -> None:
    kind = getattr(SideEffects, name)

    def loop(device: str, captured: Callable[[nn.Module], nn.Module]) -> list[torch.Tensor]:
        random.seed(0)
        SideEffects.DrawsWithNumpy.numbers = np.random.default_rng(0)
        SideEffects.CountsOutside.calls = [0]
        made = kind(3, 3) if issubclass(kind, nn.Linear) else kind()
        model = captured(nn.Sequential(made).to(device))
        values = []
        for _ in range(10):
            x = torch.randn(4, 3).to(device).requires_grad_()
            y = x * 1
            out = model(y)
            out.mean().backward()
            values += [out, x.grad, y]
            values += [getattr(model[0], "last", out), *getattr(model[0], "kept", ())]
            step(device)
        return [*values, *[p.grad for p in model.parameters()]]

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        same_as_eager(loop, num_jumps=0, rounds=name == "Checkpoints")
    assert name in ("Checkpoints", "Hooks") or any(issubclass(one.category, CaptureWarning) for one in told)


def test_a_hidden_input_is_refused() -> None:
    scale = torch.full((3,), 2.0)

    def loop(device: str, captured: Callable[[nn.Module], nn.Module]) -> list[torch.Tensor]:
        hidden = [scale.clone().to(device).requires_grad_()]

        class Uses(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x) * hidden[0]

        model = captured(Uses(3, 3).to(device))
        values = []
        for _ in range(8):
            model.zero_grad()
            out = model(torch.randn(4, 3).to(device))
            out.sum().backward()
            values += [out, hidden[0].grad.clone()]
            hidden[0] = hidden[0].detach().mul(2).requires_grad_()
            step(device)
        return values

    with pytest.warns(CaptureWarning, match="neither an argument nor part of the module"):
        same_as_eager(loop, num_jumps=0)


def test_writing_to_an_argument_that_autograd_does_not_follow() -> None:
    class Counts(nn.Linear):
        def forward(self, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
            count.add_(1)
            return super().forward(x) * count

    def loop(device: str, captured: Callable[[nn.Module], nn.Module]) -> list[torch.Tensor]:
        model = captured(Counts(3, 3).to(device))
        values, counted = [], torch.zeros(()).to(device)
        for _ in range(8):
            version = counted._version
            out = model(torch.randn(4, 3).to(device), counted)
            assert counted._version > version
            out.sum().backward()
            values += [out, counted.clone()]
            step(device)
        return [*values, *[p.grad for p in model.parameters()]]

    same_as_eager(loop)


# ----- the object itself


def test_a_captured_module_is_the_module() -> None:
    model = mlp().to("lazy")
    names = list(model.state_dict())
    assert capture(model) is model
    assert list(model.state_dict()) == names
    for _ in range(5):
        model(torch.randn(4, 3).to("lazy")).sum().backward()
        mark_step()
    copied = copy.deepcopy(model)
    x = torch.randn(4, 3).to("lazy")
    assert torch.equal(copied(x).cpu(), model(x).cpu())
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert torch.equal(loaded(x).cpu(), model(x).cpu())


def test_a_captured_module_dies_with_its_last_reference() -> None:
    gc.collect()
    gc.disable()
    try:
        model = capture(mlp().to("lazy"))
        for _ in range(6):
            model(torch.randn(4, 3).to("lazy")).sum().backward()
            mark_step()
        weight = model[0].weight._data
        import weakref

        died = weakref.ref(weight)
        del weight, model
        lazy_backend.wait_device_ops()
        assert died() is None
    finally:
        gc.enable()


def test_nested_captures() -> None:
    def loop(device: str, captured: Callable[[nn.Module], nn.Module]) -> list[torch.Tensor]:
        inner = captured(mlp().to(device))
        model = captured(nn.Sequential(inner, nn.Linear(2, 2)).to(device))
        values = []
        for number in range(12):
            model.zero_grad()
            out = (inner if number % 3 == 2 else model)(torch.randn(4, 3).to(device))
            out.sum().backward()
            values += [out, *[p.grad.clone() for p in inner.parameters()]]
            step(device)
        return values

    same_as_eager(loop)


# ----- what users are told


def test_explain_says_how_often_and_why_not() -> None:
    replayed, written = capture(mlp().to("lazy")), capture(SideEffects.Keeps(3, 3).to("lazy"))
    optimizer = capture(torch.optim.AdamW(replayed.parameters()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        for _ in range(10):
            optimizer.zero_grad()
            (replayed(torch.randn(4, 3).to("lazy")).sum() + written(torch.randn(4, 3).to("lazy")).sum()).backward()
            optimizer.step()
            mark_step()
    text = str(lazy_backend.explain())
    assert "captured module Sequential at" in text
    assert "7 of 10 calls replayed, " in text
    assert "captured optimizer AdamW at" in text
    assert "captured module Keeps at" in text
    assert "0 of 10 calls replayed\n" in text
    assert "calls as written: a call changes what it is made of: " in text
    rows = {row["name"]: row for row in lazy_backend.explain().to_dict()["captured"]}
    assert rows["Keeps"]["replays"] == 0
    assert rows["AdamW"]["replays"] >= 6


def test_a_module_on_another_device_and_no_tensor_argument(two_devices: tuple[torch.device, torch.device]) -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("state", torch.zeros(3))

        def forward(self) -> None:
            self.state.add_(1)

    module = capture(Steps().to("lazy:1"))
    with count("RegionJump") as jumps:
        for _ in range(6):
            module()
            mark_step()
    assert module.state.tolist() == [6.0] * 3
    assert jumps() >= 3


def test_a_module_on_two_devices_runs_as_written(two_devices: tuple[torch.device, torch.device]) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("one", torch.zeros(3, device="lazy:0"))
            self.register_buffer("two", torch.zeros(3, device="lazy:1"))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.two.add_(1)
            return x + self.one

    module = capture(Two())

    def run() -> None:
        for _ in range(8):
            module(torch.ones(3, device="lazy:0"))
            mark_step()

    with pytest.warns(CaptureWarning, match="it computes on lazy:1 too"):
        run()
    assert module.two.tolist() == [8.0] * 3
