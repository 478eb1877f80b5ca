"""What the tests of this folder share: the device behind the lazy one, graphs of it, and trainings to compare.

Where there is a GPU, it is behind the lazy device. Where there is none, most tests run with the CPU in its place, so
that the tests themselves are known to work; those that need a GPU are skipped and say so. Graphs of a whole step are
captured by CUDA there, and by a fake of it here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lazy_backend
from lazy_backend import config, metrics
from lazy_backend.execution.sync import executor
from lazy_backend.lowering.device_graphs.fake import FakeDevice
from lazy_backend.lowering.devices.registration import use_device
from lazy_backend.settings import FLAGS

BACKING = "cuda" if torch.cuda.is_available() else "cpu"

needs_gpu = pytest.mark.skipif(BACKING == "cpu", reason="needs a CUDA device")
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def wait() -> None:
    """For all work, recorded or eager."""
    lazy_backend.wait_device_ops()
    if BACKING == "cuda":
        torch.cuda.synchronize()


# ----- graphs of the device


def can_capture() -> bool:
    """Whether this version of the package captures whole steps as graphs of the device."""
    return "device_graphs" in FLAGS


@contextlib.contextmanager
def graphs(mode: str) -> Iterator[None]:
    """Run with graphs of the device ("auto") or without them ("off")."""
    if not can_capture():
        yield
        return
    with contextlib.ExitStack() as stack:
        if BACKING == "cpu" and mode != "off":
            stack.enter_context(use_device(FakeDevice()))
        stack.enter_context(config.patch(device_graphs=mode))
        _forget_plans()
        yield
        lazy_backend.wait_device_ops()
    _forget_plans()


def _forget_plans() -> None:
    """Whether a plan is launched as a graph is decided when it is made."""
    lazy_backend.mark_step(wait=True)
    executor.clear_computations()
    lazy_backend.ir_cache.reset()


def counted(name: str) -> int:
    """A counter, with all the reasons that it has."""
    return sum(value for key, value in metrics.counters().items() if key == name or key.startswith(f"{name}: "))


def assert_launched() -> None:
    """Graphs were captured and launched, if this version can."""
    if can_capture():
        assert counted("DeviceGraphCaptured") > 0, metrics.counters()
        assert counted("DeviceGraphLaunched") > 0, metrics.counters()


# ----- trainings


class CharacterModel(nn.Module):
    """A transformer block with dropout over i64[b, t]; gives the loss of predicting the input shifted by one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.project_in, self.project_out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.norm, self.dropout, self.head = nn.LayerNorm(16), nn.Dropout(0.2), nn.Linear(16, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        q, k, v = self.project_in(self.norm(x)).chunk(3, dim=-1)
        x = x + self.dropout(self.project_out(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Cells(nn.Module):
    """An LSTM cell in a Python loop over f32[time, b, 8]; gives the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(8, 12), nn.Linear(12, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x.new_zeros(x.shape[1], 12)
        memory = torch.zeros_like(hidden)
        for one in x.unbind():
            hidden, memory = self.cell(one, (hidden, memory))
        return self.head(hidden).square().mean()


class Perceptron(nn.Module):
    """Three layers over f32[b, 8]; gives the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layers(x) - x[:, :4]).square().mean()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, torch.Generator], torch.Tensor]]] = {
    "mlp": (Perceptron, lambda batch, numbers: torch.randn(batch, 8, generator=numbers)),
    "gpt": (CharacterModel, lambda batch, numbers: torch.randint(32, (batch, 6), generator=numbers)),
    "lstm": (Cells, lambda batch, numbers: torch.randn(5, batch, 8, generator=numbers)),
}

Change = Callable[[int, torch.optim.Optimizer], None]


class DeviceLoop:
    """A model, AdamW and its data, from seed 0. `way`: "eager" (on the device behind), "plain", "parts", "captured"."""

    def __init__(self, name: str, way: str, rate: float = 1e-2) -> None:
        torch.manual_seed(0)
        make, self.batch = MODELS[name]
        self.way, self.device = way, BACKING if way == "eager" else "lazy"
        self.model = make().to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate)
        self.train: Callable[[torch.Tensor], torch.Tensor] = self._train
        if way == "parts":
            lazy_backend.capture(self.model)
            lazy_backend.capture(self.optimizer)
        if way == "captured":
            self.train = lazy_backend.capture(self._train)

    def _train(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(x)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def step(self, number: int, batch: int = 4) -> torch.Tensor:
        """One step on data that depend on its number alone."""
        x = self.batch(batch, torch.Generator().manual_seed(number)).to(self.device)
        loss = self.train(x)
        if self.way in ("plain", "parts"):
            lazy_backend.mark_step()
        return loss

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().cpu() for parameter in self.model.parameters()]


def losses_of(
    name: str, way: str, steps: int, sizes: tuple[int, ...] = (4,), change: Change | None = None
) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of a training, all read at its end, and its weights then."""
    loop = DeviceLoop(name, way)
    held = []
    for number in range(steps):
        if change is not None:
            change(number, loop.optimizer)
        held.append(loop.step(number, sizes[number % len(sizes)]))
    return [float(loss) for loss in held], loop.weights()


def same_run(one: tuple[list[float], list[Any]], other: tuple[list[float], list[Any]]) -> bool:
    """Whether losses and weights are equal bit for bit."""
    return one[0] == other[0] and all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))
