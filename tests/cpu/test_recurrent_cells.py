"""Cells of recurrent networks are what eager computes, bit for bit, by one call each, and one for each backward."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import assert_same
from torch import nn
from torch.autograd import forward_ad

import lazy_backend
from lazy_backend import config

Make = Callable[..., nn.Module]
Values = list[torch.Tensor | None]

KINDS: dict[str, Make] = {
    "lstm_cell": nn.LSTMCell,
    "gru_cell": nn.GRUCell,
    "rnn_tanh_cell": nn.RNNCell,
    "rnn_relu_cell": lambda *sizes, **options: nn.RNNCell(*sizes, nonlinearity="relu", **options),
}
SIZES = ((3, 5, 2), (33, 16, 4), (1, 1, 1), (1, 7, 1), (7, 1, 3))  # of an input, of the state, of a batch
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def made(kind: str, inputs: int, width: int, device: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return KINDS[kind](inputs, width, **options).to(device)


def hidden(state: Any) -> torch.Tensor:
    return state[0] if isinstance(state, tuple) else state


def calls_of(kind: str) -> dict[str, int]:
    counters = lazy_backend.metrics.counters()
    return {name: counters.get(f"lazy::{name}", 0) for name in (kind, f"{kind}_backward")}


def trained(kind: str, sizes: tuple[int, int, int], device: str, **options: Any) -> Values:
    """Two layers of cells over five inputs: losses, gradients and weights of three steps.

    SGD has no momentum, as fused optimizers round that otherwise.
    """
    inputs, width, batch = sizes
    first, second = made(kind, inputs, width, device, **options), made(kind, width, width, device, **options)
    params = [*first.parameters(), *second.parameters()]
    optimizer, found = torch.optim.SGD(params, lr=0.05), []
    for step in range(3):
        torch.manual_seed(step)
        xs = torch.randn(batch, 5, inputs, dtype=options.get("dtype")).to(device).requires_grad_()
        state = other = None
        total: Any = 0
        for x in xs.unbind(1):
            state = first(x, state)
            other = second(hidden(state), other)
            total = total + (other[1].sin() if kind == "lstm_cell" else other * 2).sum()
        loss = total + hidden(state).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if device == "lazy":
            torch._lazy.mark_step()
        found += [loss.detach(), xs.grad]
    return [*found, *params]


def assert_equal(found: Values, expected: Values) -> None:
    for lazy, eager in zip(found, expected, strict=True):
        assert (lazy is None) == (eager is None)
        if lazy is not None and eager is not None:
            assert_same(lazy.detach().cpu(), eager.detach())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("sizes", "bias", "dtype"), list(itertools.product(SIZES, (True, False), DTYPES)))
def test_cells_train_to_the_bits_of_eager(kind: str, sizes: Any, bias: bool, dtype: torch.dtype) -> None:
    expected = trained(kind, sizes, "cpu", bias=bias, dtype=dtype)
    assert_equal(trained(kind, sizes, "lazy", bias=bias, dtype=dtype), expected)
    layers = 1 if sizes[0] == sizes[2] == 1 else 2  # columns of one number are multiplied otherwise
    if sizes != (1, 1, 1):
        assert calls_of(kind) == {kind: 15 * layers, f"{kind}_backward": 15 * layers}


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiler_gets_the_operators_of_which_a_cell_is_composed(kind: str) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(module)
        return module

    expected = trained(kind, (3, 5, 2), "cpu")
    with config.patch(backend=backend, compile="foreground", compile_after_operators=0):
        assert_equal(trained(kind, (3, 5, 2), "lazy"), expected)
    assert graphs
    assert not any("lazy_backend" in str(node.target) for graph in graphs for node in graph.graph.nodes)


@pytest.mark.parametrize("kind", KINDS)
def test_cells_compiled_by_inductor(kind: str) -> None:
    expected = trained(kind, (8, 16, 4), "cpu")
    with config.patch(compile="foreground", compile_after_operators=0):
        found = trained(kind, (8, 16, 4), "lazy")
    for lazy, eager in zip(found, expected, strict=True):
        torch.testing.assert_close(lazy.detach().cpu(), eager.detach(), rtol=1e-4, atol=1e-5)
    counters = lazy_backend.metrics.counters()
    assert counters["Compile"]
    assert not counters.get("CompileFailed", 0)
    assert not counters.get("PlanRefused", 0)


def one_cell(kind: str, device: str, *, frozen: str = "", mode: Any = torch.enable_grad) -> Values:
    """One cell whose input, state and weights require gradients, unless their names begin with `frozen`."""
    cell = made(kind, 4, 4, device)
    torch.manual_seed(1)
    named = {"input": torch.randn(3, 4).to(device), "state": torch.randn(3, 4).to(device)}
    if kind == "lstm_cell":
        named["cell state"] = torch.randn(3, 4).to(device)
    for name, value in (*named.items(), *cell.named_parameters()):
        value.requires_grad_(not frozen or not name.startswith(frozen))
    with mode():
        state = tuple(value for name, value in named.items() if name != "input")
        found = cell(named["input"], state if len(state) > 1 else state[0])
        if not hidden(found).requires_grad:
            return [*found] if isinstance(found, tuple) else [found]
    hidden(found).square().sum().backward()
    return [hidden(found), *(value.grad for value in (*named.values(), *cell.parameters()))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("frozen", ["input", "state", "weight_ih", "weight_hh", "bias", "weight", "cell"])
def test_only_what_is_asked_for_has_a_gradient(kind: str, frozen: str) -> None:
    assert_equal(one_cell(kind, "lazy", frozen=frozen), one_cell(kind, "cpu", frozen=frozen))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(kind: str, mode: Any) -> None:
    assert_equal(one_cell(kind, "lazy", mode=mode), one_cell(kind, "cpu", mode=mode))
    assert calls_of(kind) == {kind: 1, f"{kind}_backward": 0}


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_may_be_input_and_state(kind: str) -> None:
    def run(device: str) -> Values:
        cell = made(kind, 4, 4, device)
        torch.manual_seed(1)
        x = torch.randn(3, 4).to(device).requires_grad_()
        state: Any = x
        for _ in range(3):
            state = cell(hidden(state), (hidden(state), hidden(state)) if kind == "lstm_cell" else state)
        hidden(state).sum().backward()
        return [hidden(state), x.grad, *(p.grad for p in cell.parameters())]

    assert_equal(run("lazy"), run("cpu"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_tied", [False, True])
def test_gradients_of_a_state_that_is_used_again_are_added_in_order(kind: str, is_tied: bool) -> None:
    def run(device: str) -> Values:
        cell = made(kind, 7, 7, device)
        torch.manual_seed(1)
        xs = torch.randn(6, 3, 7).to(device).requires_grad_()
        state: Any = (xs[0], xs[0]) if kind == "lstm_cell" else xs[0]
        states = []
        for x in xs.unbind(0):
            state = cell(hidden(state) if is_tied else x, state)
            states += state if isinstance(state, tuple) else [state]
        stacked = torch.stack(states)
        (stacked.sin().sum() + (stacked * torch.linspace(-1, 1, 7).to(device)).sum()).backward()
        return [stacked, xs.grad, *(p.grad for p in cell.parameters())]

    assert_equal(run("lazy"), run("cpu"))


def test_gradients_of_both_biases_have_memory_of_their_own_once_compiled() -> None:
    cell = made("lstm_cell", 4, 8, "lazy")
    with config.patch(compile="foreground", compile_after_operators=0):
        for _ in range(4):
            cell.zero_grad()
            cell(torch.ones(2, 4).to("lazy"))[0].sum().backward()
            torch._lazy.mark_step()
            before = cell.bias_hh.grad.cpu().clone()
            cell.bias_ih.grad.mul_(2)
            assert torch.equal(cell.bias_hh.grad.cpu(), before)
            assert torch.equal(cell.bias_ih.grad.cpu(), before * 2)


@pytest.mark.parametrize("used", [0, 1])
def test_the_cell_state_has_the_gradient_that_comes_through_the_hidden_state(used: int) -> None:
    def run(device: str) -> Values:
        cell = made("lstm_cell", 4, 4, device)
        hy, cy = cell(torch.ones(3, 4).to(device))
        cy.retain_grad()
        seen: Values = []
        cy.register_hook(seen.append)
        state = cell(torch.ones(3, 4).to(device), (hy, cy))
        state[used].square().sum().backward()
        return [cy.grad, *seen, *(p.grad for p in cell.parameters())]

    assert_equal(run("lazy"), run("cpu"))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_gradients(kind: str) -> None:
    def run(device: str) -> Values:
        cell = made(kind, 4, 4, device)
        torch.manual_seed(1)
        x = torch.randn(3, 4).to(device).requires_grad_()
        state = cell(x, cell(x))
        (gradient,) = torch.autograd.grad(hidden(state).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        return [gradient, x.grad, *(p.grad for p in cell.parameters())]

    for lazy, eager in zip(run("lazy"), run("cpu"), strict=True):
        torch.testing.assert_close(lazy.cpu(), eager)


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_backward_does_not_need_may_be_written_to(kind: str) -> None:
    def run(device: str, again: bool = False) -> Values:
        cell = made(kind, 4, 4, device)
        x = torch.ones(3, 4).to(device)  # its gradient would need the weight
        results = cell(x)
        with torch.no_grad():
            cell.weight_ih.zero_()
        loss = hidden(results).sum()
        gradients = torch.autograd.grad(loss, list(cell.parameters()), create_graph=again)
        return [loss, *gradients]

    assert_equal(run("lazy"), run("cpu"))
    with pytest.raises(RuntimeError, match="modified by an inplace operation since"):
        run("lazy", again=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_no_gradient_needs_may_be_written_to(kind: str) -> None:
    def run(device: str) -> Values:
        cell = made(kind, 4, 4, device)
        cell.weight_hh.requires_grad_(False)
        torch.manual_seed(1)
        state = torch.randn(3, 4).to(device)
        found = hidden(cell(torch.ones(3, 4).to(device), (state, state.clone()) if kind == "lstm_cell" else state))
        state.mul_(2)
        found.square().sum().backward()
        return [found, *(p.grad for p in cell.parameters())]

    assert_equal(run("lazy"), run("cpu"))


def test_a_program_may_write_to_a_result_before_the_backward() -> None:
    def run(device: str) -> Values:
        cell = made("lstm_cell", 4, 4, device)
        hy, cy = cell(torch.ones(3, 4).to(device))
        hy.mul_(2)
        (hy.sum() + cy.sum()).backward()
        return [hy, *(p.grad for p in cell.parameters())]

    assert_equal(run("lazy"), run("cpu"))


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_backward_needs_may_not(kind: str) -> None:
    for device in ("cpu", "lazy"):
        cell = made(kind, 4, 4, device)
        x = torch.ones(3, 4).to(device)
        results = cell(x)
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            hidden(results).sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_transforms_and_forward_derivatives(kind: str) -> None:
    def run(device: str) -> Values:
        cell = made(kind, 4, 4, device)
        torch.manual_seed(1)
        x, tangent = torch.randn(2, 3, 4).to(device)
        with forward_ad.dual_level():
            dual = hidden(cell(forward_ad.make_dual(x, tangent)))
            forward = forward_ad.unpack_dual(dual).tangent
        gradient = torch.func.grad(lambda one: hidden(cell(one)).sum())(x)
        return [forward, gradient]

    assert_equal(run("lazy"), run("cpu"))


@pytest.mark.parametrize("kind", KINDS)
def test_autocast(kind: str) -> None:
    def run(device: str) -> Values:
        cell = made(kind, 4, 4, device)
        torch.manual_seed(1)
        x = torch.randn(3, 4).to(device)
        with torch.autocast(device, dtype=torch.bfloat16):
            found = hidden(cell(x, cell(x)))
        found.sum().backward()
        return [found, *(p.grad for p in cell.parameters())]

    assert_equal(run("lazy"), run("cpu"))


@pytest.mark.parametrize("kind", KINDS)
def test_layouts(kind: str) -> None:
    def run(device: str) -> Values:
        cell = made(kind, 4, 4, device)
        torch.manual_seed(1)
        x, state = torch.randn(4, 3).to(device).t(), torch.randn(4, 3).to(device).t()
        found = hidden(cell(x, (state, state) if kind == "lstm_cell" else state))
        found.sum().backward()  # whose gradient has strides of 0
        return [found, *(p.grad for p in cell.parameters())]

    assert_equal(run("lazy"), run("cpu"))


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_that_do_not_fit_are_refused_as_in_eager(kind: str) -> None:
    messages = []
    for device in ("cpu", "lazy"):
        cell = made(kind, 4, 4, device)
        with pytest.raises(RuntimeError) as raised:
            cell(torch.ones(3, 5).to(device))
        messages.append(str(raised.value).splitlines()[0])
    assert messages[0] == messages[1]


def test_cells_of_any_batch_size_are_one_graph() -> None:
    cell = made("lstm_cell", 4, 8, "lazy")
    reference = made("lstm_cell", 4, 8, "cpu")
    with config.patch(compile="foreground", compile_after_operators=0):
        for batch in (2, 3, 5, 7, 9, 11):
            torch.manual_seed(batch)
            x = torch.randn(batch, 4)
            cell.zero_grad()
            reference.zero_grad()
            cell(x.to("lazy"))[0].square().sum().backward()
            reference(x)[0].square().sum().backward()
            torch._lazy.mark_step()
            for lazy, eager in zip(cell.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(lazy.grad.cpu(), eager.grad, rtol=1e-4, atol=1e-5)
    assert not lazy_backend.metrics.counters().get("CompileFailed", 0)
