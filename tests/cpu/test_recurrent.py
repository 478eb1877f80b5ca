"""Recurrent layers are, bit for bit, what PyTorch's own composite kernels compute on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness import assert_same
from torch import nn

import lazy_backend

Make = Callable[..., nn.Module]

KINDS: dict[str, Make] = {
    "lstm": nn.LSTM,
    "projected_lstm": lambda *sizes, **options: nn.LSTM(*sizes, proj_size=3, **options),
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}
OPTIONS = [
    dict(zip(("num_layers", "bidirectional", "batch_first", "bias"), values, strict=True))
    for values in itertools.product((1, 2), (False, True), (False, True), (False, True))
]


@pytest.fixture(autouse=True)
def no_onednn() -> Iterator[None]:
    """For an LSTM on the CPU alone PyTorch would take oneDNN's kernel, which rounds in another way."""
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    yield
    torch.backends.mkldnn.enabled = before


def train(make: Make, options: dict[str, Any], device: str, size: tuple[int, ...] = (3, 4, 5)) -> list[Any]:
    torch.manual_seed(0)
    model = make(5, 7, **options).to(device)
    x = torch.randn(size).to(device).requires_grad_()
    outputs, state = model(x)
    loss = outputs.square().sum() + sum(part.sum() for part in (state if isinstance(state, tuple) else (state,)))
    loss.backward()
    lazy_backend.mark_step()
    return [outputs, *(state if isinstance(state, tuple) else (state,)), x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, map(int, options.values()))))
@pytest.mark.parametrize("kind", KINDS)
def test_as_on_the_cpu(kind: str, options: dict[str, Any]) -> None:
    assert_same(train(KINDS[kind], options, "lazy"), train(KINDS[kind], options, "cpu"))


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_batch(kind: str) -> None:
    assert_same(train(KINDS[kind], {}, "lazy", (3, 5)), train(KINDS[kind], {}, "cpu", (3, 5)))


@pytest.mark.parametrize("kind", KINDS)
def test_all_steps_inputs_are_multiplied_at_once(kind: str) -> None:
    model = KINDS[kind](5, 7, bias=False).to("lazy")
    x = torch.ones(12, 4, 5).to("lazy")
    lazy_backend.metrics.reset()
    model(x)[0].sum().backward()
    lazy_backend.mark_step()
    products = sum(lazy_backend.metrics.counter_value(f"lazy::{name}") for name in ("mm", "addmm", "bmm"))
    per_step = 6 if kind == "projected_lstm" else 3  # forward, and for its input and its weight
    assert products <= per_step * 12 + 2


def test_no_steps_at_all() -> None:
    with pytest.raises(RuntimeError, match="sequence length to be larger than 0"):
        nn.GRU(5, 7).to("lazy")(torch.ones(0, 4, 5).to("lazy"))


def test_packed_sequences_go_their_own_way() -> None:
    def run(device: str) -> Any:
        torch.manual_seed(0)
        model = nn.GRU(5, 7).to(device)
        packed = nn.utils.rnn.pack_padded_sequence(torch.ones(3, 2, 5).to(device), torch.tensor([3, 2]))
        return model(packed)[0].data

    torch.testing.assert_close(run("lazy").cpu(), run("cpu"))
