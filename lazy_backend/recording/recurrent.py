"""`nn.LSTM`, `nn.GRU` and `nn.RNN`: one call for a layer in one direction, and another for its backward.

In: calls of `aten::lstm.input`, `aten::gru.data` and so on. Out: the calls that eager makes around layers (dropout
between them, both directions joined), and the operators of `lowering/recurrent`. Without gradients, and without
dropout, all layers are one call.

PyTorch has these operators for CUDA alone (cuDNN), and for CPU tensors an LSTM of oneDNN: here the kernel is chosen
for the backing device. Where an operator cannot be taken, layers are composed of the operators that eager composes
them of for CPU tensors: for derivatives of gradients, forward-mode derivatives and transforms of torch.func, under
autocast, and on other backing devices.
Source: aten/src/ATen/native/RNN.cpp and mkldnn/RNN.cpp.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from lazy_backend.errors.tracebacks import hide_internals
from lazy_backend.lowering.recurrent.layer_operators import recurrent_operator, workspace_size
from lazy_backend.ports.autograd_engine import forward_level, plain_apply
from lazy_backend.ports.dispatcher import OpOverload, has_kernel
from lazy_backend.ports.thread_modes import active_transform
from lazy_backend.precision.autocast_state import autocast_state
from lazy_backend.precision.casts import cast_to_lower
from lazy_backend.recording.record import add_handler
from lazy_backend.tensors.contexts import contexts
from lazy_backend.tensors.tensor import LazyTensor
from lazy_backend.tensors.thread_state import run_clean

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


@dataclass(frozen=True, slots=True)
class _Way:
    """How a layer goes through its input. `batch_sizes`: of a packed sequence, else empty."""

    kind: str
    batch_sizes: tuple[int, ...]
    is_reverse: bool = False


# ----- a layer composed of the operators of each step


def _lstm_cell(igates: torch.Tensor, state: State, weights: _Weights) -> State:
    hx, cx = state
    gates = functional.linear(hx, weights.w_hh, weights.b_hh).add_(igates).unsafe_chunk(4, 1)
    ingate, forgetgate, outgate = gates[0].sigmoid_(), gates[1].sigmoid_(), gates[3].sigmoid_()
    cellgate = gates[2].tanh_()
    cy = (forgetgate * cx).add_(ingate * cellgate)
    hy = outgate * cy.tanh()
    return (hy if weights.w_hr is None else hy.matmul(weights.w_hr.t())), cy


def _gru_cell(igates: torch.Tensor, state: State, weights: _Weights) -> State:
    (hidden,) = state
    inputs = igates.unsafe_chunk(3, 1)
    hgates = functional.linear(hidden, weights.w_hh, weights.b_hh).unsafe_chunk(3, 1)
    reset_gate = hgates[0].add_(inputs[0]).sigmoid_()
    input_gate = hgates[1].add_(inputs[1]).sigmoid_()
    new_gate = inputs[2].add(hgates[2].mul_(reset_gate)).tanh_()
    return ((hidden - new_gate).mul_(input_gate).add_(new_gate),)


def _tanh_cell(igates: torch.Tensor, state: State, weights: _Weights) -> State:
    return (functional.linear(state[0], weights.w_hh, weights.b_hh).add_(igates).tanh(),)


def _relu_cell(igates: torch.Tensor, state: State, weights: _Weights) -> State:
    return (functional.linear(state[0], weights.w_hh, weights.b_hh).add_(igates).relu(),)


# (the gates of a step's input, state, weights) -> the next state, whose first part is the output
_CELLS: dict[str, Callable[[torch.Tensor, State, _Weights], State]] = {
    "lstm": _lstm_cell,
    "gru": _gru_cell,
    "rnn_tanh": _tanh_cell,
    "rnn_relu": _relu_cell,
}


def _composed(gates: torch.Tensor, first: State, weights: _Weights, way: _Way) -> tuple[torch.Tensor, ...]:
    """All steps of one layer, composed. `gates`: of all inputs. Returns the outputs, and the last state."""
    cell, sizes = _CELLS[way.kind], way.batch_sizes
    steps = list(gates.split_with_sizes(sizes) if sizes else gates.unbind(0))
    if way.is_reverse:
        steps.reverse()
    state = tuple(part[: steps[0].shape[0]] for part in first) if sizes and way.is_reverse else first
    outputs, ended = [], []
    for step in steps:
        size, known = step.shape[0], state[0].shape[0]
        if size < known:
            ended.append([part[size:] for part in state])
            state = tuple(part[:size] for part in state)
        elif size > known:
            state = tuple(torch.cat((part, begun[known:size])) for part, begun in zip(state, first, strict=True))
        state = cell(step, state, weights)
        outputs.append(state[0])
    if way.is_reverse:
        outputs.reverse()
    if ended:
        state = tuple(torch.cat(parts[::-1]) for parts in zip(*ended, state, strict=True))
    return torch.cat(outputs) if sizes else torch.stack(outputs), *state


# ----- a layer in one call


class _StepsFunction(torch.autograd.Function):
    """A layer in one direction: `gates`, of its inputs, first state and weights -> outputs, last state."""

    @staticmethod
    def forward(ctx: Any, way: _Way, gates: Any, hx: Any, cx: Any, w_hh: Any, b_hh: Any, w_hr: Any) -> Any:
        operands = (gates, hx, cx, w_hh, b_hh, w_hr)
        output, hy, cy, *kept = recurrent_operator("recurrent_steps")(*operands, *_options(way))
        ctx.way = way
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands, *kept)
        return (output, hy) if cx is None else (output, hy, cy)

    @staticmethod
    def backward(ctx: Any, *asked: Any) -> Any:
        *operands, states, gates, inner = ctx.saved_tensors
        if all(one is None for one in asked):
            return (None,) * 7
        if is_differentiated_again():
            return None, *computed_again(functools.partial(_steps_again, ctx.way), operands, asked)
        _, hx, cx, w_hh, _, w_hr = operands
        given = (*asked, *(None,) * (3 - len(asked)), hx, cx, w_hh, w_hr, states, gates, inner)
        found = recurrent_operator("recurrent_steps_backward")(*given, *_options(ctx.way))
        return None, *(None if one is None else gradient for one, gradient in zip(operands, found, strict=True))


def _options(way: _Way) -> tuple[list[int], str, bool]:
    return list(way.batch_sizes), way.kind, way.is_reverse


def _steps_again(way: _Way, gates: Any, hx: Any, cx: Any, w_hh: Any, b_hh: Any, w_hr: Any) -> tuple[torch.Tensor, ...]:
    state = (hx,) if cx is None else (hx, cx)
    return _composed(gates, state, _Weights(w_hh, w_hh, None, b_hh, w_hr), way)


class _OneDnnFunction(torch.autograd.Function):
    """A layer of an LSTM in one direction, by oneDNN: input, first state, weights -> outputs, last state."""

    @staticmethod
    def forward(ctx: Any, way: _Way, *operands: Any) -> Any:
        *results, workspace = _onednn(way, operands, keeps=True)
        ctx.way = way
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands, *results, workspace)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *asked: Any) -> Any:
        saved = ctx.saved_tensors
        operands = saved[:7]
        if all(one is None for one in asked):
            return (None,) * 8
        if is_differentiated_again():
            return None, *computed_again(functools.partial(_onednn_again, ctx.way), operands, asked)
        found = recurrent_operator("onednn_lstm_backward")(*asked, *saved, ctx.way.is_reverse)
        of_input, of_w_ih, of_w_hh, of_b_ih, of_b_hh, of_hx, of_cx = found
        of_biases = (of_b_ih, of_b_hh) if operands[5] is not None else (None, None)
        return None, of_input, of_hx, of_cx, of_w_ih, of_w_hh, *of_biases


def _onednn(way: _Way, operands: Sequence[Any], keeps: bool) -> Any:
    input, hx = operands[0], operands[1]
    size = 0
    if keeps:
        size = run_clean(workspace_size, tuple(input.shape), hx.shape[1], input.dtype, way.is_reverse)
    return recurrent_operator("onednn_lstm")(*operands, way.is_reverse, size)


def _onednn_again(
    way: _Way, input: Any, hx: Any, cx: Any, w_ih: Any, w_hh: Any, b_ih: Any, b_hh: Any
) -> tuple[torch.Tensor, ...]:
    if active_transform() is not None:
        return _composed_layer(input, (hx, cx), _Weights(w_ih, w_hh, b_ih, b_hh, None), way)
    # PyTorch's own operator, whose gradients PyTorch composes where they are differentiated again
    lstm = 2  # oneDNN's number for it
    biases = (w_ih, w_hh) if b_ih is None else (b_ih, b_hh)
    options: tuple[Any, ...] = (way.is_reverse, [], lstm, hx.shape[1], 1, b_ih is not None, False, False, True)
    given: tuple[Any, ...] = (input, w_ih, w_hh, *biases, hx, cx, *options)
    return torch.mkldnn_rnn_layer(*given)[:3]


def is_differentiated_again() -> bool:
    """Whether the gradients are differentiated again, or a batch of gradients is computed at once."""
    return torch.is_grad_enabled() or active_transform() is not None


def computed_again(
    run: Callable[..., tuple[torch.Tensor, ...]], operands: Sequence[Any], asked: Sequence[Any]
) -> list[torch.Tensor | None]:
    """The gradients of all operands, of results that `run` computes again from operators with all derivatives."""
    is_differentiated = torch.is_grad_enabled()
    with torch.enable_grad():
        own = [None if one is None else one.view_as(one) for one in operands]  # one may be computed from another
        results = run(*own)
    pairs = [(result, gradient) for result, gradient in zip(results, asked, strict=True) if gradient is not None]
    wanted = [one for one in own if one is not None and one.requires_grad]
    chosen, gradients = zip(*pairs, strict=True)
    found = torch.autograd.grad(chosen, wanted, gradients, create_graph=is_differentiated, allow_unused=True)
    remaining = iter(found)
    return [next(remaining) if one is not None and one.requires_grad else None for one in own]


# ----- all layers


@dataclass(frozen=True, slots=True)
class _Stack:
    """A call of `aten::lstm` or a similar operator, without its tensors."""

    kind: str
    batch_sizes: tuple[int, ...]
    has_biases: bool
    num_layers: int
    dropout: float  # 0 unless in training
    bidirectional: bool


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


def _run_layers(
    stack: _Stack, run: Callable[..., tuple[torch.Tensor, ...]], input: torch.Tensor, states: Any, params: Any
) -> tuple[torch.Tensor, ...]:
    """Run all layers. Returns the last layer's outputs, then each part of the last states, stacked."""
    projected = states[0].shape[2] != states[-1].shape[2]
    weights = _split(params, stack.has_biases, projected)
    first = list(zip(*(part.unbind(0) for part in states), strict=True))
    outputs, last = input, []
    directions = 2 if stack.bidirectional else 1
    for place in range(0, len(weights), directions):
        if place and stack.dropout:
            outputs = torch.dropout(outputs, stack.dropout, True)
        ways = [_Way(stack.kind, stack.batch_sizes, is_reverse) for is_reverse in (False, True)[:directions]]
        made = [run(outputs, first[place + i], weights[place + i], way) for i, way in enumerate(ways)]
        outputs = torch.cat([one[0] for one in made], -1) if stack.bidirectional else made[0][0]
        last += [one[1:] for one in made]
    return outputs, *(torch.stack(parts, 0) for parts in zip(*last, strict=True))


def _composed_layer(input: torch.Tensor, state: State, weights: _Weights, way: _Way) -> tuple[torch.Tensor, ...]:
    return _composed(functional.linear(input, weights.w_ih, weights.b_ih), state, weights, way)


def _steps_layer(input: torch.Tensor, state: State, weights: _Weights, way: _Way) -> tuple[torch.Tensor, ...]:
    gates = functional.linear(input, weights.w_ih, weights.b_ih)
    hx, cx = state if len(state) == 2 else (*state, None)
    given = (gates, hx, cx, weights.w_hh, weights.b_hh, weights.w_hr)
    if tracks(given):
        return plain_apply(_StepsFunction)(way, *given)  # type: ignore[no-any-return]
    found = recurrent_operator("recurrent_steps")(*given, *_options(way))
    return tuple(found[: 1 + len(state)])


def _onednn_layer(input: torch.Tensor, state: State, weights: _Weights, way: _Way) -> tuple[torch.Tensor, ...]:
    given = (input, *state, weights.w_ih, weights.w_hh, weights.b_ih, weights.b_hh)
    if autocast_state.is_casting():
        given = tuple(cast_to_lower(given))
    if tracks(given):
        return plain_apply(_OneDnnFunction)(way, *given)  # type: ignore[no-any-return]
    return tuple(_onednn(way, given, keeps=torch.is_grad_enabled())[:3])


def tracks(operands: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in operands)


def _onednn_takes(kind: str, input: torch.Tensor, states: Sequence[torch.Tensor]) -> bool:
    """Whether eager takes oneDNN's kernel for an input that is not packed. Source: `use_mkldnn`."""
    mkldnn = torch.backends.mkldnn
    if kind != "lstm" or states[0].shape[2] != states[1].shape[2] or not input.numel():
        return False
    if not (mkldnn.is_available() and mkldnn.enabled):
        return False
    if input.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return input.dtype == torch.float32


def _call(stack: _Stack, input: torch.Tensor, states: Sequence[Any], params: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    operands = (input, *states, *params)
    onednn = not stack.batch_sizes and _onednn_takes(stack.kind, input, states)
    casts = autocast_state.is_casting()
    if not (input.numel() and are_plain(operands)):
        if casts and (onednn or has_kernel("aten::_cudnn_rnn", contexts.backing().key)):  # fused kernels take one dtype
            input, states, params = cast_to_lower([input, states, params])
        return _run_layers(stack, _composed_layer, input, states, params)
    if onednn and (stack.dropout or casts or tracks(operands)):
        states = [state.contiguous() for state in states]
        return _run_layers(stack, _onednn_layer, input.contiguous(), states, params)
    if casts:
        return _run_layers(stack, _composed_layer, input, states, params)
    are_trained = params[0].requires_grad
    if stack.dropout or tracks(operands) or any(one.requires_grad != are_trained for one in params):
        return _run_layers(stack, _steps_layer, input, states, params)
    options = (stack.kind, stack.has_biases, stack.num_layers, stack.bidirectional, torch.is_grad_enabled())
    given = (input, list(states), list(params), list(stack.batch_sizes))
    found = recurrent_operator("recurrent_layers")(*given, *options, torch.backends.mkldnn.enabled, are_trained)
    return tuple(found[: 1 + len(states)])


def are_plain(operands: Sequence[Any]) -> bool:
    """Whether the operators on layers take these operands, and have all derivatives that are asked for."""
    if contexts.backing_type() != "cpu":  # that of another device would be PyTorch's, as `_cudnn_rnn`
        return False
    return active_transform() is None and forward_level() < 0 and all(isinstance(one, LazyTensor) for one in operands)


def _parts(hx: torch.Tensor | Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return (hx,) if isinstance(hx, torch.Tensor) else tuple(hx)


def _kernel(kind: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The kernel of `aten::lstm.input` or a similar operator: returns the outputs, and the last state."""

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
        if not input.shape[1 if batch_first else 0]:
            raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
        inputs = input.transpose(0, 1) if batch_first else input
        stack = _Stack(kind, (), has_biases, num_layers, dropout * train if num_layers > 1 else 0, bidirectional)
        outputs, *state = _call(stack, inputs, _parts(hx), params)
        if batch_first:  # eager returns a view for an LSTM alone
            outputs = outputs.transpose(0, 1) if kind == "lstm" else outputs.transpose_(0, 1)
        return outputs, *state

    return run


def _packed_kernel(kind: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The same for `aten::lstm.data` or a similar operator."""

    def run(
        data: torch.Tensor,
        batch_sizes: torch.Tensor,
        hx: torch.Tensor | Sequence[torch.Tensor],
        params: Sequence[torch.Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
    ) -> tuple[torch.Tensor, ...]:
        sizes, states = tuple(batch_sizes.tolist()), _parts(hx)
        dropped = dropout * train if num_layers > 1 else 0
        if not (sizes[0] == sizes[-1] and _onednn_takes(kind, data, states)):
            return _call(_Stack(kind, sizes, has_biases, num_layers, dropped, bidirectional), data, states, params)
        # eager takes oneDNN's kernel for sequences of one length
        stack = _Stack(kind, (), has_biases, num_layers, dropped, bidirectional)
        outputs, *state = _call(stack, data.reshape(len(sizes), sizes[0], -1), states, params)
        return outputs.reshape(data.shape[0], -1), *state

    return run


_KERNELS: dict[OpOverload, Callable[..., tuple[torch.Tensor, ...]]] = {
    getattr(getattr(aten, kind), overload): make(kind)
    for kind in _CELLS
    for overload, make in (("input", _kernel), ("data", _packed_kernel))
}


def install_recurrent(library: torch.library.Library) -> None:
    install_kernels(library, _KERNELS)


def install_kernels(library: torch.library.Library, kernels: Mapping[OpOverload, Callable[..., Any]]) -> None:
    """Have `kernels` take the calls of their operators, which PyTorch composes of others."""

    def handler(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return kernels[op](*args, **kwargs)

    for op, kernel in kernels.items():
        library.impl(op.name().removeprefix("aten::"), hide_internals(kernel), "AutogradLazy")
        add_handler(op, handler)  # for inference mode
