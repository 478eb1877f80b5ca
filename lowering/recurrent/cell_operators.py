"""The operators of one cell of a recurrent network, and of its gradients: what programs record for `nn.LSTMCell`.

In: tensors of the backing device, or values of a graph that is written for a compiler. Out: the numbers of eager, bit
for bit.

Note [Cells are recorded whole]
Eager composes a cell of 15 operators, and its backward of 25. To record each of them costs more than to compute it, so
a program records one call for a cell and another for its gradients. A compiler gets the operators of which eager
composes both, as if these had been recorded: it may fuse them with whatever is around them. An interpreter runs them
one after the other.
The hidden state of an LSTM is computed by calls of its own from the cell state, whose gradient contains that of the
hidden state: a program may ask for it.
A cell keeps little but the sums of its gates. The backward computes the activations again, by the operators of the
forward: a compiler sees that they are equal, and computes them once.
Operands are in the order in which eager's backward reaches them, and the state of a GRU, which it reaches twice, is
two: gradients that a tensor gets from several places are added in that order.
Activations take operands of the geometry that eager's have: kernels round the last elements of a row differently.
Source: aten/src/ATen/native/RNN.cpp, the cells; torch/csrc/autograd/FunctionsManual.cpp.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear

aten = torch.ops.aten

# A tensor, or what stands for one in a graph that is being written.
T = Any


# ----- forward


def _lstm_activations(gates: T) -> tuple[T, T, T, T]:
    ingate, forgetgate, cellgate, outgate = _parts(gates, 4)
    return torch.sigmoid(ingate), torch.sigmoid(forgetgate), torch.tanh(cellgate), torch.sigmoid(outgate)


def _parts(gates: T, count: int) -> list[T]:
    parts = aten.unsafe_chunk.default(gates, count, 1)
    return [parts[place] for place in range(count)]  # what stands for a list cannot be iterated over


def _lstm_cell(cx: T, input: T, w_ih: T, b_ih: T, hx: T, w_hh: T, b_hh: T) -> tuple[T, ...]:
    gates = linear(hx, w_hh, b_hh) + linear(input, w_ih, b_ih)
    ingate, forgetgate, cellgate, outgate = _lstm_activations(gates)
    return forgetgate * cx + ingate * cellgate, outgate, gates


def _gru_activations(of_input: T, of_hidden: T) -> tuple[T, T, T]:
    reset_gate, input_gate, _ = _parts(of_hidden + of_input, 3)
    reset_gate, input_gate = torch.sigmoid(reset_gate), torch.sigmoid(input_gate)
    new_gate = torch.tanh(_parts(of_input, 3)[2] + _parts(of_hidden, 3)[2] * reset_gate)
    return reset_gate, input_gate, new_gate


def _gru_cell(state: T, hx: T, w_hh: T, b_hh: T, input: T, w_ih: T, b_ih: T) -> tuple[T, ...]:
    of_input, of_hidden = linear(input, w_ih, b_ih), linear(hx, w_hh, b_hh)
    _, input_gate, new_gate = _gru_activations(of_input, of_hidden)
    difference = state - new_gate
    return difference * input_gate + new_gate, of_input, of_hidden, difference


def _simple_cell(activate: Callable[[T], T]) -> Callable[..., tuple[T, ...]]:
    def cell(input: T, w_ih: T, b_ih: T, hx: T, w_hh: T, b_hh: T) -> tuple[T, ...]:
        hy = activate(linear(hx, w_hh, b_hh) + linear(input, w_ih, b_ih))
        return hy, torch.clone(hy)  # a program may write to the result

    return cell


# ----- backward: the gradients of a cell's operands, in their order


def _nothing(like: T) -> T:
    return aten.new_empty.default(like, [0])


def _of_linear(of_sum: T, operand: T | None, weight: T | None) -> tuple[T, T, T]:
    """The gradients of the operand, the weight and the bias. A gradient whose factor is not given is not asked for."""
    of_operand = _nothing(of_sum) if weight is None else torch.mm(of_sum, weight)
    of_weight = _nothing(of_sum) if operand is None else torch.mm(torch.t(of_sum), operand)
    return of_operand, of_weight, torch.sum(of_sum, 0)


def _lstm_backward(
    of_cy: T | None,
    of_outgate: T | None,
    cx: T,
    input: T | None,
    w_ih: T | None,
    hx: T | None,
    w_hh: T | None,
    gates: T,
) -> tuple[T, ...]:
    ingate, forgetgate, cellgate, outgate = _lstm_activations(gates)
    of_cy = torch.zeros_like(cx) if of_cy is None else of_cy
    of_ingate = aten.sigmoid_backward.default(of_cy * cellgate, ingate)
    of_forgetgate = aten.sigmoid_backward.default(of_cy * cx, forgetgate)
    of_cellgate = aten.tanh_backward.default(of_cy * ingate, cellgate)
    given = torch.zeros_like(outgate) if of_outgate is None else aten.sigmoid_backward.default(of_outgate, outgate)
    of_gates = torch.cat((of_ingate, of_forgetgate, of_cellgate, given), 1)
    return of_cy * forgetgate, *_of_linear(of_gates, input, w_ih), *_of_linear(of_gates, hx, w_hh)


def _gru_backward(
    of_hy: T,
    hx: T | None,
    w_hh: T | None,
    input: T | None,
    w_ih: T | None,
    of_input: T,
    of_hidden: T,
    difference: T,
) -> tuple[T, ...]:
    reset_gate, input_gate, new_gate = _gru_activations(of_input, of_hidden)
    of_difference = of_hy * input_gate
    of_input_gate = aten.sigmoid_backward.default(of_hy * difference, input_gate)
    of_sum = aten.tanh_backward.default(of_hy - of_difference, new_gate)
    of_reset_gate = aten.sigmoid_backward.default(of_sum * _parts(of_hidden, 3)[2], reset_gate)
    of_inputs = torch.cat((of_reset_gate, of_input_gate, of_sum), 1)
    of_hiddens = torch.cat((of_reset_gate, of_input_gate, of_sum * reset_gate), 1)
    return of_difference, *_of_linear(of_hiddens, hx, w_hh), *_of_linear(of_inputs, input, w_ih)


def _simple_backward(deactivate: Callable[[T, T], T]) -> Callable[..., tuple[T, ...]]:
    def backward(of_hy: T, input: T | None, w_ih: T | None, hx: T | None, w_hh: T | None, hy: T) -> tuple[T, ...]:
        of_sum = deactivate(of_hy, hy)
        return *_of_linear(of_sum, input, w_ih), *_of_linear(of_sum, hx, w_hh)

    return backward


_OPERANDS = "Tensor input, Tensor w_ih, Tensor? b_ih, Tensor hx, Tensor w_hh, Tensor? b_hh"
_OF_LSTM = "Tensor? of_cy, Tensor? of_outgate, Tensor cx"
_OPERANDS_OF_GRU = "Tensor state, Tensor hx, Tensor w_hh, Tensor? b_hh, Tensor input, Tensor w_ih, Tensor? b_ih"
_FACTORS_OF_GRU = "Tensor? hx, Tensor? w_hh, Tensor? input, Tensor? w_ih"
_FACTORS = "Tensor? input, Tensor? w_ih, Tensor? hx, Tensor? w_hh"

_of_tanh = aten.tanh_backward.default
_of_relu = functools.partial(aten.threshold_backward.default, threshold=0)

# name -> its parameters, what it is composed of, how many results it has
CELL_OPERATORS: dict[str, tuple[str, Callable[..., tuple[T, ...]], int]] = {
    "lstm_cell": (f"Tensor cx, {_OPERANDS}", _lstm_cell, 3),
    "lstm_cell_backward": (f"{_OF_LSTM}, {_FACTORS}, Tensor gates", _lstm_backward, 7),
    "gru_cell": (_OPERANDS_OF_GRU, _gru_cell, 4),
    "gru_cell_backward": (
        f"Tensor of_hy, {_FACTORS_OF_GRU}, Tensor of_input, Tensor of_hidden, Tensor difference",
        _gru_backward,
        7,
    ),
    "rnn_tanh_cell": (_OPERANDS, _simple_cell(torch.tanh), 2),
    "rnn_tanh_cell_backward": (f"Tensor of_hy, {_FACTORS}, Tensor hy", _simple_backward(_of_tanh), 6),
    "rnn_relu_cell": (_OPERANDS, _simple_cell(torch.relu), 2),
    "rnn_relu_cell_backward": (f"Tensor of_hy, {_FACTORS}, Tensor hy", _simple_backward(_of_relu), 6),
}
