"""`nn.LSTMCell`, `nn.GRUCell` and `nn.RNNCell`: one call for a cell, and another for its backward.

In: calls of `aten::lstm_cell` and so on. Out: the operators of `lowering/recurrent/cell_operators`.

Where these cannot be taken, a cell is composed of the operators that PyTorch composes it of: for forward-mode
derivatives and transforms of torch.func, under autocast, for layouts that are seldom, and on devices that have kernels
of their own for a cell. For derivatives of gradients a cell is computed again, so composed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from lazy_backend.lowering.recurrent.layer_operators import recurrent_operator
from lazy_backend.ports.autograd_engine import plain_apply
from lazy_backend.ports.dispatcher import OpOverload, base_name
from lazy_backend.ports.tensor_types import version_of
from lazy_backend.precision.autocast_state import autocast_state
from lazy_backend.recording.recurrent import are_plain, computed_again, install_kernels, is_differentiated_again, tracks

aten = torch.ops.aten

# operator -> how many rows its weights have for each unit of the hidden state
_CELLS: dict[OpOverload, int] = {
    aten.lstm_cell.default: 4,
    aten.gru_cell.default: 3,
    aten.rnn_tanh_cell.default: 1,
    aten.rnn_relu_cell.default: 1,
}
_DTYPES = frozenset((torch.float32, torch.float64, torch.bfloat16, torch.float16))


class _CellFunction(torch.autograd.Function):
    """A cell: of the state that is kept, if any, and of two products, each of an operand, a weight and a bias."""

    @staticmethod
    def forward(ctx: Any, op: OpOverload, *operands: Any) -> Any:
        results, kept = _run(op, operands)
        *state, first, of_first, _, second, of_second, _ = ctx.needs_input_grad[1:]
        # an LSTM's cell state, and factors of gradients that are asked for: a program may write to others
        needed = (*(op is aten.lstm_cell.default for _ in state), of_first, first, False, of_second, second, False)
        ctx.op = op
        ctx.others = [
            None if keep or one is None else (one, version_of(one)) for one, keep in zip(operands, needed, strict=True)
        ]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(one if keep else None for one, keep in zip(operands, needed, strict=True)), *kept)
        return results if len(results) > 1 else results[0]

    @staticmethod
    def backward(ctx: Any, *asked: Any) -> Any:
        if all(one is None for one in asked):
            return (None,) * len(ctx.needs_input_grad)
        saved, count = ctx.saved_tensors, len(ctx.others)
        if is_differentiated_again():
            operands = [
                one if other is None else _unchanged(*other) for one, other in zip(saved, ctx.others, strict=False)
            ]
            return None, *computed_again(functools.partial(_composed, ctx.op), operands, asked)
        *state, first, of_first, _, second, of_second, _ = saved[:count]
        backward = recurrent_operator(f"{base_name(ctx.op)}_backward")
        needs = state if ctx.op is aten.lstm_cell.default else ()
        found = backward(*asked, *needs, first, of_first, second, of_second, *saved[count:])
        return None, *(one if asks else None for one, asks in zip(found, ctx.needs_input_grad[1:], strict=True))


def _unchanged(operand: torch.Tensor, version: int) -> torch.Tensor:
    if version_of(operand) != version:
        raise RuntimeError(
            "the gradients of a recurrent cell are differentiated again, but an operand of the cell, of shape "
            f"{tuple(operand.shape)}, has been modified by an inplace operation since: it is at version "
            f"{version_of(operand)}; expected version {version} instead. Modify it after the backward, or a clone."
        )
    return operand


def _run(op: OpOverload, operands: Sequence[Any]) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """The results of a cell, of an LSTM its cell state and output gate; and what else the backward needs."""
    found = recurrent_operator(base_name(op))(*operands)
    count = 2 if op is aten.lstm_cell.default else 1
    return tuple(found[:count]), tuple(found[count:])


def _composed(op: OpOverload, *operands: Any) -> tuple[torch.Tensor, ...]:
    if op is aten.gru_cell.default:
        _, hx, w_hh, b_hh, input, w_ih, b_ih = operands
        return (op.decompose(input, hx, w_ih, w_hh, b_ih, b_hh),)
    *cx, input, w_ih, b_ih, hx, w_hh, b_hh = operands
    if not cx:
        return (op.decompose(input, hx, w_ih, w_hh, b_ih, b_hh),)
    gates = functional.linear(hx, w_hh, b_hh).add_(functional.linear(input, w_ih, b_ih)).unsafe_chunk(4, 1)
    ingate, forgetgate, outgate = gates[0].sigmoid_(), gates[1].sigmoid_(), gates[3].sigmoid_()
    return (forgetgate * cx[0]).add_(ingate * gates[2].tanh_()), outgate


def _are_taken(input: Any, state: Sequence[Any], w_ih: Any, w_hh: Any, biases: Sequence[Any], count: int) -> bool:
    """Whether the operators of cells take these operands. PyTorch's own refuses what has other shapes."""
    shape, dtype, of_input = state[0].shape, input.dtype, input.shape
    if len(of_input) != 2 or len(shape) != 2 or not (input.numel() and shape.numel()) or dtype not in _DTYPES:
        return False
    size, hidden = shape
    rows = count * hidden
    if size != of_input[0] or w_ih.shape != (rows, of_input[1]) or w_hh.shape != (rows, hidden):
        return False
    for one in state:
        if one.dtype is not dtype or one.shape != shape or not one.is_contiguous():
            return False
    for one in biases:
        if one.dtype is not dtype or one.shape != (rows,):
            return False
    for one in (w_ih, w_hh):
        if one.dtype is not dtype or not one.is_contiguous():
            return False
    return input.stride(1) == 1 and state[0].stride(1) == 1 and of_input != (1, 1) and shape != (1, 1)


def _kernel(op: OpOverload) -> Callable[..., Any]:
    count = _CELLS[op]

    def run(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
        state = tuple(hx) if op is aten.lstm_cell.default else (hx,)
        biases = () if b_ih is None or b_hh is None else (b_ih, b_hh)
        given = (input, *state, w_ih, w_hh, *biases)
        if (
            autocast_state.is_casting()
            or (b_ih is None) != (b_hh is None)
            or not are_plain(given)
            or not _are_taken(input, state, w_ih, w_hh, biases, count)
        ):
            return op.decompose(input, hx, w_ih, w_hh, b_ih, b_hh)
        operands: tuple[Any, ...] = (*state[1:], input, w_ih, b_ih, state[0], w_hh, b_hh)
        if op is aten.gru_cell.default:
            operands = (hx, hx, w_hh, b_hh, input, w_ih, b_ih)
        found = plain_apply(_CellFunction)(op, *operands) if tracks(operands) else _run(op, operands)[0]
        if op is not aten.lstm_cell.default:
            return found if isinstance(found, torch.Tensor) else found[0]
        cy, outgate = found
        return outgate * torch.tanh(cy), cy

    return run


_KERNELS = {op: _kernel(op) for op in _CELLS}


def install_cells(library: torch.library.Library) -> None:
    install_kernels(library, _KERNELS)
