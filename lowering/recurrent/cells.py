"""The steps of one recurrent layer in one direction, forward and backward, on tensors of the backing device.

In: the gates of all inputs, already multiplied, and the first state. Out: all outputs, the last state, what the
backward needs; from gradients of these, the gradients of the former.

Note [Steps as in eager]
Eager composes a layer of a few operators per step, which autograd follows. Here the same operators are called on
operands of the same geometry, and gradients are added in the order of autograd's engine, so that all bits are eager's.
Only exact operators (sums, products) may be called on more at once. No graph is made: a step costs half of eager's.
Source: aten/src/ATen/native/RNN.cpp, the cells, `FullLayer`, `PackedLayer` and `ReversedPackedLayer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

aten = torch.ops.aten

# Of aten: 0.4 µs less than to look them up in a step.
_sigmoid_backward = aten.sigmoid_backward.grad_input
_tanh_backward = aten.tanh_backward.grad_input
_relu_backward = aten.threshold_backward.grad_input

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class StateWeights:
    """What a layer multiplies its state with. `w_hr`: the projection of an LSTM."""

    w_hh: torch.Tensor
    b_hh: torch.Tensor | None
    w_hr: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Walk:
    """Where the rows of each step are. `sizes`: how many rows each step has, by time; they never increase."""

    sizes: tuple[int, ...]
    is_reverse: bool

    def times(self) -> list[int]:
        """The steps, in the order in which they are computed."""
        order = list(range(len(self.sizes)))
        return order[::-1] if self.is_reverse else order

    def rows(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The rows of each step, by time."""
        if self.sizes[0] == self.sizes[-1]:
            return list(flat.view(len(self.sizes), self.sizes[0], -1).unbind(0))
        return list(flat.split_with_sizes(self.sizes))

    def columns(self, flat: torch.Tensor, count: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """Of each step, by time: `count` equal parts of its columns."""
        if self.sizes[0] == self.sizes[-1]:
            parts = flat.view(len(self.sizes), self.sizes[0], -1).chunk(count, 2)
            return zip(*(part.unbind(0) for part in parts), strict=True)
        return zip(*(part.split_with_sizes(self.sizes) for part in flat.chunk(count, 1)), strict=True)

    def before(self, first: torch.Tensor, states: Tensors) -> list[torch.Tensor]:
        """The state that each step takes, by time. `states`: those that the steps leave."""
        found = list(states)
        state = first[: self.sizes[self.times()[0]]]
        for time in self.times():
            found[time] = state = self.fitting(state, first, self.sizes[time])
            state = states[time]
        return found

    @staticmethod
    def fitting(state: torch.Tensor, first: torch.Tensor, size: int) -> torch.Tensor:
        """`state` for a step of so many rows: sequences have ended, or begin, in reverse."""
        known = state.shape[0]
        if size == known:
            return state
        return state[:size] if size < known else torch.cat((state, first[known:size]))

    def last(self, states: Tensors) -> torch.Tensor:
        """The state of each sequence after its last step."""
        if self.is_reverse or self.sizes[0] == self.sizes[-1]:
            return states[self.times()[-1]]
        ends = [*self.sizes[1:], 0]
        ended = [state[end:] for state, end in zip(states, ends, strict=True) if end < state.shape[0]]
        return torch.cat(ended[::-1])


@dataclass(frozen=True, slots=True)
class Steps:
    """The results of all steps, by time, one row after another.

    `states`: the outputs again, as a program may write to `output`. `gates`, `inner`: what else the backward needs.
    """

    output: torch.Tensor
    hy: torch.Tensor
    cy: torch.Tensor
    states: torch.Tensor
    gates: torch.Tensor
    inner: torch.Tensor


def _nothing(like: torch.Tensor) -> torch.Tensor:
    """A result that a cell does not have: results of an operator have memory of their own."""
    return like.new_empty(0)


# ----- forward


def run_lstm(gates: torch.Tensor, hx: torch.Tensor, cx: torch.Tensor, weights: StateWeights, walk: Walk) -> Steps:
    inputs = walk.rows(gates)
    outputs, cells, tanhs, kept = ([*inputs] for _ in range(4))
    start = walk.sizes[walk.times()[0]]
    hidden, cell = hx[:start], cx[:start]
    w_hh, b_hh = weights.w_hh, weights.b_hh
    projection = None if weights.w_hr is None else weights.w_hr.t()
    for time in walk.times():
        hidden = walk.fitting(hidden, hx, walk.sizes[time])
        cell = walk.fitting(cell, cx, walk.sizes[time])
        kept[time] = all_gates = linear(hidden, w_hh, b_hh).add_(inputs[time])
        ingate, forgetgate, cellgate, outgate = all_gates.unsafe_chunk(4, 1)
        ingate.sigmoid_()
        forgetgate.sigmoid_()
        cellgate.tanh_()
        outgate.sigmoid_()
        cells[time] = cell = (forgetgate * cell).add_(ingate * cellgate)
        tanhs[time] = tanh = cell.tanh()
        hidden = outgate * tanh
        outputs[time] = hidden = hidden if projection is None else hidden.matmul(projection)
    inner = torch.cat((*cells, *tanhs))
    states = torch.cat(outputs)
    return Steps(states.clone(), walk.last(outputs), walk.last(cells), states, torch.cat(kept), inner)


def run_gru(gates: torch.Tensor, hx: torch.Tensor, cx: torch.Tensor, weights: StateWeights, walk: Walk) -> Steps:
    inputs = list(walk.columns(gates, 3))
    outputs, kept, news = ([hx] * len(inputs) for _ in range(3))
    hidden = hx[: walk.sizes[walk.times()[0]]]
    w_hh, b_hh = weights.w_hh, weights.b_hh
    for time in walk.times():
        hidden = walk.fitting(hidden, hx, walk.sizes[time])
        kept[time] = all_gates = linear(hidden, w_hh, b_hh)
        reset_gate, input_gate, new_of_hidden = all_gates.unsafe_chunk(3, 1)
        of_reset, of_input, of_new = inputs[time]
        reset_gate.add_(of_reset).sigmoid_()
        input_gate.add_(of_input).sigmoid_()
        news[time] = new_gate = (new_of_hidden * reset_gate).add_(of_new).tanh_()
        outputs[time] = hidden = (hidden - new_gate).mul_(input_gate).add_(new_gate)
    states = torch.cat(outputs)
    gates, inner = torch.cat(kept), torch.cat(news)
    return Steps(states.clone(), walk.last(outputs), _nothing(hx), states, gates, inner)


def _run_simple(activate: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Steps]:
    def run(gates: torch.Tensor, hx: torch.Tensor, cx: torch.Tensor, weights: StateWeights, walk: Walk) -> Steps:
        inputs = walk.rows(gates)
        outputs = [*inputs]
        hidden = hx[: walk.sizes[walk.times()[0]]]
        w_hh, b_hh = weights.w_hh, weights.b_hh
        for time in walk.times():
            hidden = walk.fitting(hidden, hx, walk.sizes[time])
            outputs[time] = hidden = activate(linear(hidden, w_hh, b_hh).add_(inputs[time]))
        states = torch.cat(outputs)
        return Steps(states.clone(), walk.last(outputs), _nothing(hx), states, _nothing(hx), _nothing(hx))

    return run


# ----- backward


@dataclass(frozen=True, slots=True)
class Asked:
    """The gradients of the results, flat as `Steps`; None where there is none."""

    output: torch.Tensor | None
    hy: torch.Tensor | None
    cy: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class OperandGradients:
    """The gradients of the operands."""

    gates: torch.Tensor
    hx: torch.Tensor
    cx: torch.Tensor
    w_hh: torch.Tensor
    b_hh: torch.Tensor
    w_hr: torch.Tensor


class _Flow:
    """A gradient that goes back from step to step."""

    def __init__(self, walk: Walk, first: torch.Tensor, of_last: torch.Tensor | None) -> None:
        """`first`: the state before the first step. `of_last`: the gradient of the state after the last steps."""
        self._sizes = walk.sizes
        self._first = first
        self._of_last = of_last
        self._of_first: list[torch.Tensor] = []
        self.parts: list[torch.Tensor] = []  # of the state that the latest step took

    def into(self, time: int, of_output: torch.Tensor | None) -> torch.Tensor:
        """The gradient of the state that a step leaves. `of_output`: its part that does not come from later steps."""
        size, parts = self._sizes[time], self.parts
        if not parts:
            parts = [] if self._of_last is None else [self._of_last[:size]]
        elif size != parts[0].shape[0]:
            parts = [self._fitting(_added(parts), size)]
        if of_output is not None:
            parts = [of_output, *parts]
        return _added(parts) if parts else self._zeros(0, size)

    def _fitting(self, whole: torch.Tensor, size: int) -> torch.Tensor:
        known = whole.shape[0]
        if size < known:  # sequences begin before, in reverse
            self._of_first.append(whole[size:])
            return whole[:size]
        # sequences end here
        ended = self._zeros(known, size) if self._of_last is None else self._of_last[known:size]
        return torch.cat((whole, ended))

    def _zeros(self, begin: int, end: int) -> torch.Tensor:
        return torch.zeros_like(self._first[begin:end])

    def into_first(self) -> torch.Tensor:
        """The gradient of the state before the first step."""
        whole = _added(self.parts)
        return torch.cat((whole, *self._of_first[::-1])) if self._of_first else whole


def _added(parts: Tensors) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0]
    total = parts[0].add(parts[1])
    for part in parts[2:]:
        total.add_(part)
    return total


class _OfWeight:
    """The gradient of a weight, added from the last step to the first."""

    def __init__(self, weight: torch.Tensor) -> None:
        # as `mm_mat2_backward` in torch/csrc/autograd/FunctionsManual.cpp
        self._is_transposed = weight.is_contiguous()
        self._total: torch.Tensor | None = None

    def add(self, of_product: torch.Tensor, state: torch.Tensor) -> None:
        part = of_product.t().mm(state) if self._is_transposed else state.t().mm(of_product).t()
        self._total = part if self._total is None else self._total.add_(part)

    def total(self) -> torch.Tensor:
        assert self._total is not None
        return self._total.contiguous()


def _of_bias(of_products: torch.Tensor, walk: Walk) -> torch.Tensor:
    if walk.sizes[0] == walk.sizes[-1]:
        sums = list(of_products.view(len(walk.sizes), walk.sizes[0], -1).sum(1).unbind(0))
    else:
        sums = [rows.sum(0) for rows in walk.rows(of_products)]
    order = walk.times()[::-1]
    total = sums[order[0]].clone()
    for time in order[1:]:
        total.add_(sums[time])
    return total


def _parts_of(asked: torch.Tensor | None, walk: Walk) -> Sequence[torch.Tensor | None]:
    return [None] * len(walk.sizes) if asked is None else walk.rows(asked)


def lstm_backward(
    asked: Asked, steps: Steps, hx: torch.Tensor, cx: torch.Tensor, weights: StateWeights, walk: Walk
) -> OperandGradients:
    w_hh, w_hr = weights.w_hh, weights.w_hr
    cells, tanhs = map(walk.rows, steps.inner.chunk(2))
    cells_before, states_before = walk.before(cx, cells), walk.before(hx, walk.rows(steps.states))
    gates, pairs = list(walk.columns(steps.gates, 4)), list(walk.columns(steps.gates, 2))
    of_all = torch.empty_like(steps.gates)
    of_gates, of_pairs, of_products = list(walk.columns(of_all, 4)), list(walk.columns(of_all, 2)), walk.rows(of_all)
    flow, cell_flow = _Flow(walk, hx, asked.hy), _Flow(walk, cx, asked.cy)
    of_w_hh, of_w_hr = _OfWeight(w_hh), None if w_hr is None else _OfWeight(w_hr)
    of_outputs = _parts_of(asked.output, walk)
    for time in walk.times()[::-1]:
        ingate, forgetgate, cellgate, outgate = gates[time]
        of_in, of_forget, of_cell, of_out = of_gates[time]
        tanh = tanhs[time]
        of_hidden = flow.into(time, of_outputs[time])
        if w_hr is not None and of_w_hr is not None:
            of_w_hr.add(of_hidden, outgate * tanh)
            of_hidden = of_hidden.mm(w_hr)
        torch.mul(of_hidden, tanh, out=of_out)
        _sigmoid_backward(of_out, outgate, grad_input=of_out)
        of_tanh = of_hidden * outgate
        of_state = cell_flow.into(time, _tanh_backward(of_tanh, tanh, grad_input=of_tanh))
        torch.mul(of_state, cellgate, out=of_in)
        torch.mul(of_state, cells_before[time], out=of_forget)
        _sigmoid_backward(of_pairs[time][0], pairs[time][0], grad_input=of_pairs[time][0])
        torch.mul(of_state, ingate, out=of_cell)
        _tanh_backward(of_cell, cellgate, grad_input=of_cell)
        cell_flow.parts = [of_state * forgetgate]
        of_product = of_products[time]
        flow.parts = [of_product.mm(w_hh)]
        of_w_hh.add(of_product, states_before[time])
    return OperandGradients(
        of_all,
        flow.into_first(),
        cell_flow.into_first(),
        of_w_hh.total(),
        _of_bias(of_all, walk),
        _nothing(hx) if of_w_hr is None else of_w_hr.total(),
    )


def gru_backward(
    asked: Asked, steps: Steps, hx: torch.Tensor, cx: torch.Tensor, weights: StateWeights, walk: Walk
) -> OperandGradients:
    w_hh = weights.w_hh
    states_before = walk.before(hx, walk.rows(steps.states))
    news = walk.rows(steps.inner)
    differences = walk.rows(torch.cat(states_before).sub_(steps.inner))
    gates = list(walk.columns(steps.gates, 3))
    both = [rows[:, : 2 * hx.shape[1]] for rows in walk.rows(steps.gates)]
    of_all, of_new = torch.empty_like(steps.gates), torch.empty_like(steps.inner)
    of_gates, of_products, of_news = list(walk.columns(of_all, 3)), walk.rows(of_all), walk.rows(of_new)
    of_both = [rows[:, : 2 * hx.shape[1]] for rows in of_products]
    flow, of_w_hh = _Flow(walk, hx, asked.hy), _OfWeight(w_hh)
    of_outputs = _parts_of(asked.output, walk)
    for time in walk.times()[::-1]:
        reset_gate, input_gate, new_of_hidden = gates[time]
        of_reset, of_input, of_new_of_hidden = of_gates[time]
        of_hidden = flow.into(time, of_outputs[time])
        of_difference = of_hidden * input_gate
        torch.mul(of_hidden, differences[time], out=of_input)
        part = _tanh_backward(of_hidden - of_difference, news[time], grad_input=of_news[time])
        torch.mul(part, reset_gate, out=of_new_of_hidden)
        torch.mul(part, new_of_hidden, out=of_reset)
        _sigmoid_backward(of_both[time], both[time], grad_input=of_both[time])
        of_product = of_products[time]
        flow.parts = [of_difference, of_product.mm(w_hh)]
        of_w_hh.add(of_product, states_before[time])
    of_inputs = torch.cat((of_all[:, : 2 * hx.shape[1]], of_new), 1)
    of_weights = of_w_hh.total(), _of_bias(of_all, walk), _nothing(hx)
    return OperandGradients(of_inputs, flow.into_first(), _nothing(hx), *of_weights)


def _simple_backward(deactivate: Callable[..., torch.Tensor], *numbers: float) -> Callable[..., OperandGradients]:
    def backward(
        asked: Asked, steps: Steps, hx: torch.Tensor, cx: torch.Tensor, weights: StateWeights, walk: Walk
    ) -> OperandGradients:
        w_hh = weights.w_hh
        states = walk.rows(steps.states)
        states_before = walk.before(hx, states)
        of_all = torch.empty_like(steps.states)
        of_products = walk.rows(of_all)
        flow, of_w_hh = _Flow(walk, hx, asked.hy), _OfWeight(w_hh)
        of_outputs = _parts_of(asked.output, walk)
        for time in walk.times()[::-1]:
            of_product = of_products[time]
            deactivate(flow.into(time, of_outputs[time]), states[time], *numbers, grad_input=of_product)
            flow.parts = [of_product.mm(w_hh)]
            of_w_hh.add(of_product, states_before[time])
        of_weights = of_w_hh.total(), _of_bias(of_all, walk), _nothing(hx)
        return OperandGradients(of_all, flow.into_first(), _nothing(hx), *of_weights)

    return backward


Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, StateWeights, Walk], Steps]
Backward = Callable[[Asked, Steps, torch.Tensor, torch.Tensor, StateWeights, Walk], OperandGradients]

CELLS: dict[str, tuple[Run, Backward]] = {
    "lstm": (run_lstm, lstm_backward),
    "gru": (run_gru, gru_backward),
    "rnn_tanh": (_run_simple(torch.tanh), _simple_backward(_tanh_backward)),
    "rnn_relu": (_run_simple(torch.relu), _simple_backward(_relu_backward, 0)),
}
