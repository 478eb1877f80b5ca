"""The operators that compute recurrent layers: what graphs call for `nn.LSTM`, `nn.GRU` and `nn.RNN` on a CPU.

In: tensors of the backing device. Out: the numbers of eager, bit for bit.

Note [One operator per layer]
Eager has one operator for a layer of an LSTM, of oneDNN, and composes all others of a dozen operators per step: a
GRU of 32 steps and two layers has 800 forward and more backward. To record, compile and run each of these costs more
than to compute it. So a layer in one direction is one call, and its backward another.
Without gradients all layers are one call of eager's own kernel.
Each result has memory of its own; one that a cell does not have is empty.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from lazy_backend.lowering.recurrent.cell_operators import CELL_OPERATORS
from lazy_backend.lowering.recurrent.cells import CELLS, Asked, StateWeights, Steps, Walk
from lazy_backend.ports.dispatcher import OpOverload

aten = torch.ops.aten

Maybe = torch.Tensor | None
Tensors = tuple[torch.Tensor, ...]

# eager's kernels, by the names of their operators
_WHOLE: dict[str, Callable[..., Tensors]] = {
    "lstm": torch.lstm,
    "gru": torch.gru,
    "rnn_tanh": torch.rnn_tanh,
    "rnn_relu": torch.rnn_relu,
}

_SCHEMAS = {
    "recurrent_layers": "Tensor input, Tensor[] states, Tensor[] params, SymInt[] batch_sizes, str kind, "
    "bool has_biases, int num_layers, bool bidirectional, bool grad_enabled, bool onednn, bool are_trained",
    "recurrent_steps": "Tensor gates, Tensor hx, Tensor? cx, Tensor w_hh, Tensor? b_hh, Tensor? w_hr, "
    "SymInt[] batch_sizes, str kind, bool is_reverse",
    "recurrent_steps_backward": "Tensor? of_output, Tensor? of_hy, Tensor? of_cy, Tensor hx, Tensor? cx, Tensor w_hh, "
    "Tensor? w_hr, Tensor states, Tensor gates, Tensor inner, SymInt[] batch_sizes, str kind, bool is_reverse",
    "onednn_lstm": "Tensor input, Tensor hx, Tensor cx, Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh, "
    "bool is_reverse, SymInt workspace_size",
    "onednn_lstm_backward": "Tensor? of_output, Tensor? of_hy, Tensor? of_cy, Tensor input, Tensor hx, Tensor cx, "
    "Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh, Tensor output, Tensor hy, Tensor cy, Tensor workspace, "
    "bool is_reverse",
}


@functools.cache
def recurrent_operator(name: str) -> OpOverload:
    """The operator `lazy_backend::<name>`, one of `_SCHEMAS` or of `CELL_OPERATORS`."""
    define_recurrent()
    return getattr(torch.ops.lazy_backend, name).default  # type: ignore[no-any-return]


@functools.cache
def define_recurrent() -> torch.library.Library:
    """Define the operators. Returns what keeps them."""
    library = torch.library.Library("lazy_backend", "FRAGMENT")
    for name, (kernel, fake, num_results) in _KERNELS.items():
        library.define(f"{name}({_SCHEMAS[name]}) -> ({', '.join(['Tensor'] * num_results)})")
        library.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"lazy_backend::{name}", fake, lib=library)
    for name, (parameters, composed, num_results) in CELL_OPERATORS.items():
        library.define(f"{name}({parameters}) -> ({', '.join(['Tensor'] * num_results)})")
        library.impl(name, torch.no_grad()(composed), "CompositeExplicitAutograd")
        torch.library.register_fake(f"lazy_backend::{name}", composed, lib=library)
    return library


# ----- all layers, without gradients


def _recurrent_layers(
    input: torch.Tensor,
    states: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    batch_sizes: Sequence[int],
    kind: str,
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
    grad_enabled: bool,
    onednn: bool,
    are_trained: bool,
) -> Tensors:
    first = states if kind == "lstm" else states[0]
    given = (input, torch.tensor(batch_sizes, device="cpu"), first) if batch_sizes else (input, first)
    layout = () if batch_sizes else (False,)
    if are_trained:  # matmul chooses by that how it multiplies
        params = [param.detach().requires_grad_() for param in params]
    # oneDNN is another kernel while gradients are enabled
    with torch.set_grad_enabled(grad_enabled), _with_onednn(onednn):
        found = _WHOLE[kind](*given, params, has_biases, num_layers, 0.0, False, bidirectional, *layout)
    return found if kind == "lstm" else (*found, input.new_empty(0))


@contextlib.contextmanager
def _with_onednn(enabled: bool) -> Iterator[None]:
    mkldnn: Any = torch.backends.mkldnn
    before = mkldnn.enabled
    if before != enabled:
        mkldnn.enabled = enabled
    try:
        yield
    finally:
        if before != enabled:
            mkldnn.enabled = before


def _fake_layers(
    input: torch.Tensor,
    states: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    batch_sizes: Sequence[int],
    kind: str,
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
    grad_enabled: bool,
    onednn: bool,
    are_trained: bool,
) -> Tensors:
    hx = states[0]
    output = input.new_empty((*input.shape[:-1], hx.shape[2] * (2 if bidirectional else 1)))
    cy = input.new_empty(states[1].shape if kind == "lstm" else 0)
    return output, input.new_empty(hx.shape), cy


# ----- one layer in one direction, step by step


def _flat(rows: torch.Tensor) -> torch.Tensor:
    """`rows` of all steps, one after another."""
    return rows.contiguous().view(-1, rows.shape[-1])


def _recurrent_steps(
    gates: torch.Tensor,
    hx: torch.Tensor,
    cx: Maybe,
    w_hh: torch.Tensor,
    b_hh: Maybe,
    w_hr: Maybe,
    batch_sizes: Sequence[int],
    kind: str,
    is_reverse: bool,
) -> Tensors:
    run, _ = CELLS[kind]
    with torch.no_grad():
        state = hx.contiguous(), hx if cx is None else cx.contiguous()
        sizes = tuple(batch_sizes) or (gates.shape[1],) * gates.shape[0]
        steps = run(_flat(gates), *state, StateWeights(w_hh, b_hh, w_hr), Walk(sizes, is_reverse))
        output = steps.output.view(*gates.shape[:-1], steps.output.shape[1])
    return output, steps.hy, steps.cy, steps.states, steps.gates, steps.inner


def _fake_steps(
    gates: torch.Tensor,
    hx: torch.Tensor,
    cx: Maybe,
    w_hh: torch.Tensor,
    b_hh: Maybe,
    w_hr: Maybe,
    batch_sizes: Sequence[int],
    kind: str,
    is_reverse: bool,
) -> Tensors:
    rows, width, new = gates.shape[:-1].numel(), gates.shape[-1], gates.new_empty
    results = new((*gates.shape[:-1], hx.shape[1])), new(hx.shape), new(0 if cx is None else cx.shape)
    states = new((rows, hx.shape[1]))
    if cx is not None:
        return *results, states, new((rows, width)), new((2 * rows, cx.shape[1]))
    kept = ((rows, width), (rows, hx.shape[1])) if kind == "gru" else (0, 0)
    return *results, states, new(kept[0]), new(kept[1])


def _recurrent_steps_backward(
    of_output: Maybe,
    of_hy: Maybe,
    of_cy: Maybe,
    hx: torch.Tensor,
    cx: Maybe,
    w_hh: torch.Tensor,
    w_hr: Maybe,
    states: torch.Tensor,
    gates: torch.Tensor,
    inner: torch.Tensor,
    batch_sizes: Sequence[int],
    kind: str,
    is_reverse: bool,
) -> Tensors:
    _, backward = CELLS[kind]
    with torch.no_grad():
        asked = Asked(*(None if one is None else one.contiguous() for one in (of_output, of_hy, of_cy)))
        if asked.output is not None:
            asked = Asked(_flat(asked.output), asked.hy, asked.cy)
        nothing = hx.new_empty(0)
        steps = Steps(nothing, nothing, nothing, states, gates, inner)
        state = hx.contiguous(), hx if cx is None else cx.contiguous()
        sizes = tuple(batch_sizes) or (hx.shape[0],) * (states.shape[0] // hx.shape[0])
        found = backward(asked, steps, *state, StateWeights(w_hh, None, w_hr), Walk(sizes, is_reverse))
        of_gates = found.gates if batch_sizes else found.gates.view(len(sizes), hx.shape[0], -1)
    return of_gates, found.hx, found.cx, found.w_hh, found.b_hh, found.w_hr


def _fake_steps_backward(
    of_output: Maybe,
    of_hy: Maybe,
    of_cy: Maybe,
    hx: torch.Tensor,
    cx: Maybe,
    w_hh: torch.Tensor,
    w_hr: Maybe,
    states: torch.Tensor,
    gates: torch.Tensor,
    inner: torch.Tensor,
    batch_sizes: Sequence[int],
    kind: str,
    is_reverse: bool,
) -> Tensors:
    new, width = hx.new_empty, w_hh.shape[0]
    of_cx = new(0 if cx is None else cx.shape)
    of_w_hr = new(0 if w_hr is None else w_hr.shape)
    rows = (states.shape[0],) if batch_sizes else (states.shape[0] // hx.shape[0], hx.shape[0])
    return new((*rows, width)), new(hx.shape), of_cx, new(w_hh.shape), new(width), of_w_hr


# ----- one layer of an LSTM in one direction, by oneDNN

_LSTM = 2  # oneDNN's number for it


def _onednn_arguments(w_ih: torch.Tensor, w_hh: torch.Tensor, b_ih: Maybe, b_hh: Maybe) -> list[torch.Tensor]:
    return [w_ih, w_hh, w_ih if b_ih is None else b_ih, w_hh if b_hh is None else b_hh]  # ignored without biases


def _onednn_lstm(
    input: torch.Tensor,
    hx: torch.Tensor,
    cx: torch.Tensor,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: Maybe,
    b_hh: Maybe,
    is_reverse: bool,
    workspace_size: int,
) -> Tensors:
    weights = _onednn_arguments(w_ih, w_hh, b_ih, b_hh)
    state = hx.contiguous(), cx.contiguous()
    options: tuple[Any, ...] = (is_reverse, [], _LSTM, hx.shape[1], 1, b_ih is not None, False, False, True)
    # with gradients enabled it keeps what the backward needs
    with torch.set_grad_enabled(workspace_size != 0):
        given: tuple[Any, ...] = (input.contiguous(), *weights, *state, *options)
        *results, workspace = torch.mkldnn_rnn_layer(*given)
    return *results, input.new_empty(0, dtype=torch.uint8) if workspace is None else workspace


def _fake_onednn_lstm(
    input: torch.Tensor,
    hx: torch.Tensor,
    cx: torch.Tensor,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: Maybe,
    b_hh: Maybe,
    is_reverse: bool,
    workspace_size: int,
) -> Tensors:
    output = input.new_empty((*input.shape[:2], hx.shape[1]))
    workspace = input.new_empty(workspace_size, dtype=torch.uint8)
    return output, hx.new_empty(hx.shape), cx.new_empty(cx.shape), workspace


@functools.lru_cache(4096)
def workspace_size(input: tuple[int, ...], hidden: int, dtype: torch.dtype, is_reverse: bool) -> int:
    """How many bytes oneDNN keeps for the backward of a layer whose input has this shape: only a run tells."""
    _, batch, size = input
    zeros = functools.partial(torch.zeros, dtype=dtype, device="cpu")
    state, weights = (zeros(batch, hidden), zeros(batch, hidden)), (zeros(4 * hidden, size), zeros(4 * hidden, hidden))
    return _onednn_lstm(zeros(input), *state, *weights, None, None, is_reverse, 1)[3].numel()


def _onednn_lstm_backward(
    of_output: Maybe,
    of_hy: Maybe,
    of_cy: Maybe,
    input: torch.Tensor,
    hx: torch.Tensor,
    cx: torch.Tensor,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: Maybe,
    b_hh: Maybe,
    output: torch.Tensor,
    hy: torch.Tensor,
    cy: torch.Tensor,
    workspace: torch.Tensor,
    is_reverse: bool,
) -> Tensors:
    weights = _onednn_arguments(w_ih, w_hh, b_ih, b_hh)
    known = (hx.contiguous(), cx.contiguous(), output.contiguous(), hy.contiguous(), cy.contiguous())
    options: tuple[Any, ...] = (is_reverse, _LSTM, hx.shape[1], 1, b_ih is not None, True, False, [], False, workspace)
    backward = aten.mkldnn_rnn_layer_backward.default
    with torch.no_grad():
        return backward(input.contiguous(), *weights, *known, of_output, of_hy, of_cy, *options)  # type: ignore[no-any-return]


def _fake_onednn_lstm_backward(
    of_output: Maybe,
    of_hy: Maybe,
    of_cy: Maybe,
    input: torch.Tensor,
    hx: torch.Tensor,
    cx: torch.Tensor,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: Maybe,
    b_hh: Maybe,
    output: torch.Tensor,
    hy: torch.Tensor,
    cy: torch.Tensor,
    workspace: torch.Tensor,
    is_reverse: bool,
) -> Tensors:
    width = w_hh.shape[0]
    shapes = (input.shape, w_ih.shape, w_hh.shape, (width,), (width,), hx.shape, cx.shape)
    return tuple(input.new_empty(shape, dtype=torch.float32) for shape in shapes)


# name -> the kernel, the fake kernel, how many results
_KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Any], int]] = {
    "recurrent_layers": (_recurrent_layers, _fake_layers, 3),
    "recurrent_steps": (_recurrent_steps, _fake_steps, 6),
    "recurrent_steps_backward": (_recurrent_steps_backward, _fake_steps_backward, 6),
    "onednn_lstm": (_onednn_lstm, _fake_onednn_lstm, 4),
    "onednn_lstm_backward": (_onednn_lstm_backward, _fake_onednn_lstm_backward, 7),
}
