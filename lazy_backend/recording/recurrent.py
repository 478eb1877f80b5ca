"""`nn.LSTM`, `nn.GRU` and `nn.RNN` with the inputs of all time steps multiplied at once.

PyTorch does this only for tensors on the CPU. For other devices without a kernel of their own, it multiplies the input
of each time step separately, forward and backward: for an LSTM of 12 steps, 62 products instead of 40.
Source: aten/src/ATen/native/RNN.cpp, the cells, `FullLayer` and `FullBidirectionalLayer`; operator by operator, so that
values are those that PyTorch's own composite kernels compute on the CPU. Packed sequences are left to these kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from lazy_backend.errors.tracebacks import hide_internals
from lazy_backend.ports.dispatcher import OpOverload
from lazy_backend.precision.autocast_state import autocast_state
from lazy_backend.precision.casts import cast_to_lower
from lazy_backend.recording.record import add_handler
from lazy_backend.tensors.contexts import contexts

aten = torch.ops.aten

# What a cell carries from step to step: hidden state, and for an LSTM the cell state.
State = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class _Weights:
    """The parameters of one layer in one direction."""

    w_ih: torch.Tensor
    w_hh: torch.Tensor
    b_ih: torch.Tensor | None
    b_hh: torch.Tensor | None
    w_hr: torch.Tensor | None  # an LSTM's projection

    def of_inputs(self, inputs: torch.Tensor) -> torch.Tensor:
        return functional.linear(inputs, self.w_ih, self.b_ih)

    def of_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.linear(hidden, self.w_hh, self.b_hh)


# (a step's input after `of_inputs`, state, weights) -> the next state, whose first part is the output
Cell = Callable[[torch.Tensor, State, _Weights], State]


def _lstm_cell(igates: torch.Tensor, state: State, weights: _Weights) -> State:
    hx, cx = state
    gates = weights.of_hidden(hx).add_(igates).unsafe_chunk(4, 1)
    ingate, forgetgate, outgate = gates[0].sigmoid_(), gates[1].sigmoid_(), gates[3].sigmoid_()
    cellgate = gates[2].tanh_()
    cy = (forgetgate * cx).add_(ingate * cellgate)
    hy = outgate * cy.tanh()
    return (hy if weights.w_hr is None else hy.matmul(weights.w_hr.t())), cy


def _gru_cell(igates: torch.Tensor, state: State, weights: _Weights) -> State:
    (hidden,) = state
    inputs = igates.unsafe_chunk(3, 1)
    hgates = weights.of_hidden(hidden).unsafe_chunk(3, 1)
    reset_gate = hgates[0].add_(inputs[0]).sigmoid_()
    input_gate = hgates[1].add_(inputs[1]).sigmoid_()
    new_gate = inputs[2].add(hgates[2].mul_(reset_gate)).tanh_()
    return ((hidden - new_gate).mul_(input_gate).add_(new_gate),)


def _tanh_cell(igates: torch.Tensor, state: State, weights: _Weights) -> State:
    return (weights.of_hidden(state[0]).add_(igates).tanh(),)


def _relu_cell(igates: torch.Tensor, state: State, weights: _Weights) -> State:
    return (weights.of_hidden(state[0]).add_(igates).relu(),)


def _split(params: Sequence[torch.Tensor], has_biases: bool, projected: bool) -> list[_Weights]:
    """The weights of each layer and direction, in the order of `nn.RNNBase._flat_weights`."""
    size = 2 + 2 * has_biases + projected
    if len(params) % size:
        raise RuntimeError("got an incorrect number of RNN parameters")
    layers = [list(params[start : start + size]) for start in range(0, len(params), size)]
    return [_weights(layer, has_biases, projected) for layer in layers]


def _weights(layer: list[torch.Tensor], has_biases: bool, projected: bool) -> _Weights:
    b_ih, b_hh = (layer[2], layer[3]) if has_biases else (None, None)
    return _Weights(layer[0], layer[1], b_ih, b_hh, layer[-1] if projected else None)


def _run(
    cell: Cell, inputs: torch.Tensor, state: State, weights: _Weights, is_reverse: bool = False
) -> tuple[torch.Tensor, State]:
    """Run one layer in one direction. Returns the outputs of all steps, and the last state."""
    steps = weights.of_inputs(inputs).unbind(0)
    if not steps:
        raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
    outputs = []
    for step in reversed(steps) if is_reverse else steps:
        state = cell(step, state, weights)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if is_reverse else outputs, 0), state


def _run_layers(
    cell: Cell,
    inputs: torch.Tensor,
    states: Sequence[State],
    weights: Sequence[_Weights],
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    """Run all layers. Returns the last layer's outputs, then each part of the last states, stacked."""
    outputs = inputs.transpose(0, 1) if batch_first else inputs
    directions = 2 if bidirectional else 1
    last: list[State] = []
    for place in range(0, len(weights), directions):
        if place and dropout and train:
            outputs = torch.dropout(outputs, dropout, True)
        made = [
            _run(cell, outputs, states[place + way], weights[place + way], is_reverse=way == 1)
            for way in range(directions)
        ]
        outputs = torch.cat([one[0] for one in made], -1) if bidirectional else made[0][0]
        last += [one[1] for one in made]
    if batch_first:
        outputs = outputs.transpose_(0, 1)
    return outputs, *(torch.stack(parts, 0) for parts in zip(*last, strict=True))


def _casts_all(projected: bool, is_lstm: bool) -> bool:
    """Whether autocast casts all operands of a call: PyTorch's fused kernels take one dtype."""
    if not autocast_state.is_casting():
        return False
    # on the CPU oneDNN has an LSTM without projection; the other kernels are composed of operators with rules
    return contexts.backing_type() == "cuda" or (is_lstm and not projected)


def _kernel(cell: Cell) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The kernel of `aten::lstm.input` or a similar op: returns what `_run_layers` returns."""

    def run(
        input: torch.Tensor,
        hx: torch.Tensor | Sequence[torch.Tensor],
        params: Sequence[torch.Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[torch.Tensor, ...]:
        parts = (hx,) if isinstance(hx, torch.Tensor) else tuple(hx)
        projected = parts[0].shape[2] != parts[-1].shape[2]
        if _casts_all(projected, is_lstm=cell is _lstm_cell):
            input, parts, params = cast_to_lower([input, parts, params])
        states = list(zip(*(part.unbind(0) for part in parts), strict=True))
        weights = _split(params, has_biases, projected)
        return _run_layers(cell, input, states, weights, dropout, train, bidirectional, batch_first)

    return run


_KERNELS: dict[OpOverload, Callable[..., tuple[torch.Tensor, ...]]] = {
    aten.lstm.input: _kernel(_lstm_cell),
    aten.gru.input: _kernel(_gru_cell),
    aten.rnn_tanh.input: _kernel(_tanh_cell),
    aten.rnn_relu.input: _kernel(_relu_cell),
}


def _handler(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return _KERNELS[op](*args, **kwargs)


def install_recurrent(library: torch.library.Library) -> None:
    for op, kernel in _KERNELS.items():
        library.impl(op.name().removeprefix("aten::"), hide_internals(kernel), "AutogradLazy")
        add_handler(op, _handler)  # for inference mode
