"""Turn a recorded program into its canonical graph.

In: the calls on one path through the trie, and the fresh slots still wanted. Out: `PostOrderData`: the pruned, numbered
graph and, for each of its inputs, constants and seeds, the origin in the trace.
Programs that differ only in dead code give equal graphs.
Source: torch/csrc/lazy/core/lazy_graph_executor.h, `PostOrderData`, `RunPostOrder`.

Note [Inputs own their storage]
No two inputs of a graph share memory. Where a trace uses several views of one external storage, the graph takes the
storage's base once and makes the views itself. So no compiler has to be trusted with aliasing inputs, and a write
through one view is visible through the others. The graph also takes the base where `as_strided` of a view reaches
elements outside that view.

Note [as_strided means the base]
`as_strided` of any tensor selects a window of the tensor's storage, so the graph applies it to the storage's base. If
the storage is written, the graph uses slices and views of the base instead, where possible (`windows.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lazy_backend.lowering.ir.graph import (
    Arg,
    Constant,
    Graph,
    Node,
    TensorMeta,
    Value,
    extent,
    intern_meta,
    is_contiguous,
)
from lazy_backend.lowering.ir.passes import graph_pass
from lazy_backend.lowering.ir.program import Call, Entered, Fresh, Same, Token, View
from lazy_backend.lowering.ir.windows import chain_to
from lazy_backend.ports.dispatcher import OpOverload

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Parameter:
    """The origin of a graph input: the trace's input at `index`, or the base of that input's storage."""

    index: int
    base: bool


@dataclass(frozen=True, slots=True, eq=False)
class PostOrderData:
    """A canonical graph, and where in a trace its inputs, constants and seeds are found."""

    graph: Graph
    post_order: tuple[Call, ...]  # the calls that survive pruning
    emission_map: dict[Token, Value]  # each token of the trace -> its value in the graph
    parameters: tuple[Parameter, ...]  # per graph input, in the order of first use
    parameter_sequence: tuple[int, ...]  # per trace input, the index of its graph input, or -1 if pruned
    constants: tuple[int, ...]  # per graph constant, its index among the trace's constants
    seeds: tuple[int, ...]  # per graph seed, its index among the trace's seeds

    def graphs(self) -> tuple[Graph, ...]:
        return (self.graph,)


def fresh_slots(calls: Sequence[Call]) -> list[Fresh]:
    """The results that own their memory, in program order: a trace counts these as pending."""
    return [result for call in calls for result in call.results if isinstance(result, Fresh)]


@graph_pass("prune and number")
def run_post_order(calls: Sequence[Call], roots: Sequence[Token], device: torch.device) -> PostOrderData:
    """Prune `calls` to those that the `roots` and the inputs' storages need, and number the values that remain.

    `roots` are tokens of fresh results, in program order; they become the outputs.
    """
    return post_order_for(calls, roots, device)


def post_order_for(calls: Sequence[Call], roots: Sequence[Token], device: torch.device) -> PostOrderData:
    """`run_post_order` for any tokens, including views, which share memory: such a graph is only for inspection."""
    storages = storage_of_tokens(calls)
    kept = _live_calls(calls, roots, storages)
    builder = _GraphBuilder(calls, kept, storages)
    for one in kept:
        builder.add_call(one.call, one.seed_place)
    return builder.finish(roots, device)


def storage_of_tokens(calls: Sequence[Call]) -> dict[Token, int]:
    """Number the storages: inputs of one alias group share a storage, and a view has its operand's storage."""
    storages: dict[Token, int] = {}
    groups: dict[int, int] = {}
    count = 0
    for call in calls:
        for entered in call.entered:
            if entered.group not in groups:
                groups[entered.group] = count
                count += 1
            storages[entered.token] = groups[entered.group]
        for result in call.results:
            if isinstance(result, Fresh):
                storages[result.token] = count
                count += 1
            elif isinstance(result, View):
                storages[result.token] = storages[result.of]
    return storages


def _operands(call: Call) -> list[Token]:
    """The tokens among the arguments, once for each use."""
    found: list[Token] = []
    _add_operands(call.args, found)
    if call.kwargs:
        _add_operands(tuple([arg for _, arg in call.kwargs]), found)
    return found


def _add_operands(args: tuple[Any, ...], found: list[Token]) -> None:
    for arg in args:
        kind = arg.__class__
        if kind is Token:
            found.append(arg)
        elif isinstance(arg, tuple):
            _add_operands(arg, found)


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """A call that survives pruning, with its operands and the index of its seed among the trace's seeds."""

    call: Call
    operands: list[Token]
    seed_place: int


def _live_calls(calls: Sequence[Call], outputs: Sequence[Token], storages: dict[Token, int]) -> list[_Kept]:
    """The calls with an observable effect, in program order.

    Walks backwards. A call stays if one of its results is needed, if it writes a storage that is read later, is an
    output or comes from outside, or if it neither returns nor writes anything (an assertion, say, which is called for
    its effect).
    """
    seed_places: list[int] = []
    seeds = 0
    for call in calls:
        seed_places.append(seeds)
        seeds += call.seeded
    wanted_tokens = set(outputs)
    wanted_storages = {storages[token] for token in outputs}
    wanted_storages.update(storages[entered.token] for call in calls for entered in call.entered)
    kept: list[_Kept] = []
    for call, seed_place in zip(reversed(calls), reversed(seed_places), strict=True):
        effect_only = not call.results and not call.mutates
        if (
            effect_only
            or any(r.token in wanted_tokens for r in call.results if r.__class__ is Fresh or r.__class__ is View)
            or any(storages[token] in wanted_storages for token in call.mutates)
        ):
            operands = _operands(call)
            wanted_tokens.update(operands)
            wanted_storages.update([storages[token] for token in operands])
            kept.append(_Kept(call, operands, seed_place))
    kept.reverse()
    return kept


class _GraphBuilder:
    """Adds the kept calls in program order and numbers their values."""

    def __init__(self, calls: Sequence[Call], kept: Sequence[_Kept], storages: dict[Token, int]) -> None:
        self.storages = storages
        self.entered = {entered.token: entered for call in calls for entered in call.entered}
        self.constant_offset = _constant_offsets(calls)
        self.written = {storages[token] for one in kept for token in one.call.mutates}
        self.fresh = {storages[r.token]: r for one in kept for r in one.call.results if isinstance(r, Fresh)}
        self.shared_groups = self._groups_with_several_views(kept)
        self.values: dict[Token, Value] = {}
        self.bases: dict[int, Value] = {}  # group -> the base taken as an input
        self.inputs: list[Value] = []
        self.parameters: list[Parameter] = []
        self.nodes: list[Node] = []
        self.post_order: list[Call] = []
        self.constants: dict[int, int] = {}
        self.seeds: list[int] = []
        self.count = 0
        self.where: tuple[str, tuple[str, ...]] = ("", ())  # user lines for the views that the builder adds

    def _groups_with_several_views(self, kept: Sequence[_Kept]) -> set[int]:
        views: dict[int, set[Token]] = {}
        for one in kept:
            for token in one.operands:
                entered = self.entered.get(token)
                if entered is not None:
                    views.setdefault(entered.group, set()).add(token)
        # `as_strided` of one view may reach elements outside that view
        strided = {
            self.storages[token] for one in kept if one.call.op is aten.as_strided.default for token in one.operands
        }
        looked_past = {
            entered.group
            for token, entered in self.entered.items()
            if self.storages[token] in strided and entered.meta is not entered.base
        }
        return {group for group, tokens in views.items() if len(tokens) > 1} | looked_past

    def _new_value(self, meta: TensorMeta, storage: int) -> Value:
        value = Value(self.count, meta, storage)
        self.count += 1
        return value

    def _add_input(self, meta: TensorMeta, storage: int, parameter: Parameter) -> Value:
        value = self._new_value(meta, storage)
        self.inputs.append(value)
        self.parameters.append(parameter)
        return value

    def _value_of(self, token: Token) -> Value:
        value = self.values.get(token)
        if value is None:
            value = self.values[token] = self._enter(self.entered[token])
        return value

    def _enter(self, entered: Entered) -> Value:
        """The value of an input, added at the input's first use. See Note [Inputs own their storage]."""
        storage = self.storages[entered.token]
        index = entered.token.index
        if entered.group not in self.shared_groups and not (entered.meta.conj or entered.meta.neg):
            return self._add_input(entered.meta, storage, Parameter(index, base=False))
        base = self.bases.get(entered.group)
        if base is None:
            base = self._add_input(entered.base, storage, Parameter(index, base=True))
            self.bases[entered.group] = base
        return base if entered.meta is entered.base else self._view_of_base(base, entered.meta)

    def _view_of_base(self, base: Value, meta: TensorMeta) -> Value:
        value = base
        plain = intern_meta(meta.shape, meta.stride, meta.storage_offset, meta.dtype)
        if plain is not base.meta:
            # AOTAutograd rejects a mutation through `as_strided` of a view, and through a view of `as_strided`. A
            # contiguous piece, such as a slice of a flat parameter buffer, needs no `as_strided`: a slice and a view
            # are enough
            sliced = is_contiguous(plain) and is_contiguous(base.meta)
            flat = base if plain.dtype == base.meta.dtype and not sliced else self._flat(base, plain.dtype)
            sliced = sliced and plain.storage_offset + plain.numel <= flat.meta.numel
            value = self._slice(flat, plain) if sliced else self._window(flat, plain)
        if meta.conj:
            conj = intern_meta(meta.shape, meta.stride, meta.storage_offset, meta.dtype, conj=True)
            value = self._add_view(aten._conj.default, (value,), conj)
        if meta.neg:
            value = self._add_view(aten._neg_view.default, (value,), meta)
        return value

    def _flat(self, base: Value, dtype: torch.dtype) -> Value:
        """The whole storage of `base` as a 1-d tensor of `dtype`."""
        meta = base.meta
        whole = (extent(meta),)
        flat_meta = intern_meta(whole, (1,), 0, meta.dtype)
        flat = base
        if flat_meta is not meta and is_contiguous(meta) and not meta.storage_offset:
            flat = self._add_view(aten.view.default, (base, whole), flat_meta)
        elif flat_meta is not meta:
            flat = self._window(base, flat_meta)
        if dtype == meta.dtype:
            return flat
        spare = whole[0] * meta.dtype.itemsize % dtype.itemsize // meta.dtype.itemsize
        if spare:
            flat = self._slice(flat, intern_meta((whole[0] - spare,), (1,), 0, meta.dtype))
        cast = (whole[0] * meta.dtype.itemsize // dtype.itemsize,)
        return self._add_view(aten.view.dtype, (flat, dtype), intern_meta(cast, (1,), 0, dtype))

    def _window(self, base: Value, meta: TensorMeta) -> Value:
        """The tensor with geometry `meta` in the storage of `base`. See Note [as_strided means the base]."""
        chain = chain_to(base.meta, meta) if base.storage in self.written else None
        if chain is None:
            return self._as_strided(base, meta)
        for op, args, made in chain:
            base = self._add_view(op, (base, *args), made)
        return base

    def _as_strided(self, base: Value, meta: TensorMeta) -> Value:
        args = (base, meta.shape, meta.stride, meta.storage_offset)
        return self._add_view(aten.as_strided.default, args, meta)

    def _slice(self, flat: Value, meta: TensorMeta) -> Value:
        """A contiguous piece of the 1-d storage `flat`."""
        if meta is flat.meta:
            return flat
        start, end = meta.storage_offset, meta.storage_offset + meta.numel
        slice_meta = intern_meta((meta.numel,), (1,), start, meta.dtype)
        piece = self._add_view(aten.slice.Tensor, (flat, 0, start, end), slice_meta)
        return piece if slice_meta is meta else self._add_view(aten.view.default, (piece, meta.shape), meta)

    def _add_view(self, op: OpOverload, args: tuple[Arg, ...], meta: TensorMeta) -> Value:
        value = self._new_value(meta, args[0].storage)
        self.nodes.append(Node(op, args, (), (value,), (), False, None, *self.where))
        return value

    def add_call(self, call: Call, seed_place: int) -> None:
        if call.op is aten.as_strided.default:
            self._add_as_strided(call)
            return
        # operands first: entering an input may add nodes and take value numbers
        offset = self.constant_offset[call]
        args = tuple([self._convert(arg, offset) for arg in call.args])
        kwargs = tuple([(name, self._convert(arg, offset)) for name, arg in call.kwargs])
        mutates = tuple(dict.fromkeys([self._value_of(token) for token in call.mutates])) if call.mutates else ()
        outputs = tuple([self._result(result) for result in call.results])
        seed = None
        if call.seeded:
            seed = len(self.seeds)
            self.seeds.append(seed_place)
        self.nodes.append(
            Node(call.op, args, kwargs, outputs, mutates, call.returns_list, seed, call.site, call.frames)
        )
        self.post_order.append(call)

    def _add_as_strided(self, call: Call) -> None:
        """See Note [as_strided means the base]."""
        (view,) = call.results
        assert isinstance(view, View)
        self._value_of(view.of)  # enters the base unless it is already in the graph
        self.where = call.site, call.frames
        self.values[view.token] = self._view_of_base(self._base_of(self.storages[view.of]), view.meta)
        self.where = "", ()
        self.post_order.append(call)

    def _base_of(self, storage: int) -> Value:
        """The base of a storage, whether it was made in the trace or entered from outside."""
        made = self.fresh.get(storage)
        if made is not None:
            return self.values[made.token]
        found = (entered for token, entered in self.entered.items() if self.storages[token] == storage)
        return next(
            self.bases.get(entered.group) or self.values[entered.token]
            for entered in found
            if entered.group in self.bases or entered.token in self.values
        )

    def _convert(self, arg: Any, offset: int) -> Any:
        """An argument as a node holds it. `offset`: index of its call's first constant among the trace's constants."""
        kind = arg.__class__
        if kind is Token:
            return self._value_of(arg)
        if isinstance(arg, tuple):
            return tuple([self._convert(item, offset) for item in arg])
        if kind is Constant:
            return Constant(self.constants.setdefault(offset + arg.index, len(self.constants)))
        return arg

    def _result(self, result: Fresh | View | Same | None) -> Value | None:
        if result is None:
            return None
        if isinstance(result, Same):
            return self._value_of(result.token)
        value = self._new_value(result.meta, self.storages[result.token])
        self.values[result.token] = value
        return value

    def finish(self, outputs: Sequence[Token], device: torch.device) -> PostOrderData:
        graph = Graph(
            inputs=tuple(self.inputs),
            nodes=tuple(self.nodes),
            outputs=tuple(self.values[token] for token in outputs),
            num_constants=len(self.constants),
            num_seeds=len(self.seeds),
            device=device,
        )
        places = {value: place for place, value in enumerate(self.inputs)}
        sequence = [-1] * len(self.entered)
        for token, entered in self.entered.items():
            value = self.bases.get(entered.group) or self.values.get(token)
            sequence[token.index] = places.get(value, -1) if value is not None else -1
        return PostOrderData(
            graph=graph,
            post_order=tuple(self.post_order),
            emission_map=self.values,
            parameters=tuple(self.parameters),
            parameter_sequence=tuple(sequence),
            constants=tuple(self.constants),
            seeds=tuple(self.seeds),
        )


def _constant_offsets(calls: Sequence[Call]) -> dict[Call, int]:
    """The index of each call's first constant among the trace's constants: a `Call` numbers its own from zero."""
    offsets: dict[Call, int] = {}
    total = 0
    for call in calls:
        offsets[call] = total
        total += call.num_constants
    return offsets
