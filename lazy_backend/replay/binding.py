"""Bind two recorded calls to a program that replays later ones.

In: two consecutive calls of one function, and the holders of what the second made. Out: a `CapturedProgram`, or
`NotReplayable`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from lazy_backend.floats.formula_program import FormulaProgram, NotFollowed, follow
from lazy_backend.lowering.checks.rounding import are_equal
from lazy_backend.lowering.ir.graph import meta_of
from lazy_backend.lowering.ir.program import Call
from lazy_backend.ports.cpython import is_a
from lazy_backend.ports.tensor_types import is_leaf, version_of
from lazy_backend.precision.grad_scaler import UnsettledStep
from lazy_backend.replay.accounts import NotReplayable
from lazy_backend.replay.captured_state import ClearedGrad, GradsAtStart, Holder, TensorHolder
from lazy_backend.replay.plain_values import is_plain
from lazy_backend.replay.recorded_call import RecordedCall, ReturnedTensor, ReturnedValue, Start
from lazy_backend.replay.replayed_call import (
    Argument,
    ArgumentPlace,
    Arguments,
    CapturedProgram,
    Carried,
    Computed,
    HeldTensor,
    Leaf,
    Output,
    Returned,
    ReturnedInput,
    ReturnedLiteral,
    ReturnedOutput,
    Source,
    Uploaded,
    Writes,
)
from lazy_backend.replay.state_guard import Found, LeftAlone, StateGuard
from lazy_backend.replay.state_places import changed_place, outputs_that_stayed, value_of, values_that_moved
from lazy_backend.replay.value_guard import ValueGuard
from lazy_backend.tensors.outside import new_data
from lazy_backend.tensors.state import DeviceContext, TensorData
from lazy_backend.tensors.tensor import LazyTensor
from lazy_backend.tensors.thread_state import run_clean

_ADVICE = "  keep state in a module, or in an object or container that the function names"

_RETURNED_ELSE = "it returned something else than in the call before, which is no lazy tensor it computed"

Held = Sequence[Sequence[tuple[Any, Holder]]]


def check_same_program(last: RecordedCall, record: RecordedCall) -> None:
    """Raise `NotReplayable` with the first difference between two calls."""
    before, now = last.calls(), record.calls()
    if last.cursor is not record.cursor:
        for a, b in zip(before, now, strict=False):
            if a is not b and not _is_same_call(a, b):
                raise NotReplayable(f"it recorded {_line(a)} in one call and {_line(b)} in the next")
        if len(before) != len(now):
            longer = before if len(before) > len(now) else now
            extra = _line(longer[min(len(before), len(now))])
            raise NotReplayable(f"it recorded {len(before)} operators in one call and {len(now)} in the next: {extra}")
    if last.indices != record.indices:
        raise NotReplayable(
            "other tensors were alive after one call than after the next: keep a result of each call, or of none"
        )
    if any(before is not now for before, now in zip(last.generators, record.generators, strict=True)):
        raise NotReplayable(
            "it draws random numbers from another torch.Generator than in the call before\n"
            "  make the generator outside, once"
        )


def _is_same_call(a: Call, b: Call) -> bool:
    return (a.op, a.args, a.kwargs, a.mutates, a.seeded) == (b.op, b.args, b.kwargs, b.mutates, b.seeded) and [
        (e.meta, e.group, e.base) for e in a.entered
    ] == [(e.meta, e.group, e.base) for e in b.entered]


def _line(call: Call) -> str:
    return f"{call.op} at {call.site}"


def bind(
    name: str,
    start: Start,
    last: RecordedCall,
    record: RecordedCall,
    held: Held | None,
    floats: FormulaProgram,
    grads: GradsAtStart,
    arguments: Arguments,
    found: Found,
    left_alone: LeftAlone,
    unsettled: Sequence[UnsettledStep],
) -> CapturedProgram:
    """The program of `record`, bound to the state that the call left. Raises `NotReplayable`.

    The caller settles it when `found` is gone.
    """
    # a path that was forgotten since then runs while it is recorded, but its calls are those of `last`
    bound = record.bound or (last.bound if last.settings == record.settings else None)
    if bound is None:
        raise NotReplayable(
            "its calls were new, and ran while they were recorded" if record.calls() else "it records no operator"
        )
    record.bound = bound
    if held is None:
        raise NotReplayable("something other than tensors holds what it makes")
    _check_nothing_piles_up(start, record)
    _check_unsettled(start, record, unsettled)
    written = {bound.parameters[place].index for place in bound.computation.graph.mutated_inputs()}
    floats.use(bound.constants)
    inputs = [_source(last, record, place, place in written, floats) for place in range(len(record.inputs))]
    _check_arguments(arguments, record, inputs)
    returned = _returned(last, record, inputs)
    kept = {source.reference() for source in inputs if isinstance(source, HeldTensor)}
    used = {data for data in kept if data is not None}
    outputs = [Output(record.context, meta, holders) for meta, holders in zip(record.metas, held, strict=True)]
    for source in inputs:
        if isinstance(source, Carried) and not outputs[source.output].holders:
            raise NotReplayable("a tensor that it returned comes back otherwise than as an argument\n  pass it as one")
    state_guard = _state_guard(record.context, found, left_alone, start.values, used, held, inputs)
    cleared = tuple(ClearedGrad(p) for p, _ in start.grads if p.grad is None and p in grads.present)
    _check_places(start, record, inputs, cleared)
    return CapturedProgram(
        context=record.context,
        bound=bound,
        settings=record.settings,
        sources=tuple(inputs),
        parameters=tuple((parameter.index, parameter.base) for parameter in bound.parameters),
        outputs=tuple(outputs),
        returned=returned,
        floats=floats,
        generators=record.generators,
        state_guard=state_guard,
        optimizer_guards=record.guards,
        unsettled=tuple(unsettled),
        kept=frozenset(id(data.storage) for data in used),
        grads_at_start=tuple(_grads_that_matter(start, grads)),
        must_keep_grad=tuple(_kept_grads(start, used)),
        cleared_grads=cleared,
        argument_places=tuple(_argument_places(start, last, record, inputs, found)),
        writes=_writes([inputs[place] for place in written], used, found, start, arguments),
        site=name,
    )


def _writes(
    sources: Sequence[Source], used: set[TensorData], found: Found, start: Start, arguments: Arguments
) -> Writes:
    """What the call wrote in place, into `sources` among others, and autograd counted: not all, as of `batch_norm`."""
    versions = start.versions

    def is_written(tensor: torch.Tensor) -> bool:
        return id(tensor) in versions and version_of(tensor) != versions[id(tensor)]

    held = [source.reference() for source in sources if isinstance(source, HeldTensor)]
    memory = {id(data.storage) for data in held if data is not None}
    kept = [one for one in found.tensors.values() if one._data in used and id(one._data.storage) in memory]
    leaves = {id(one): one for one in (*found.tensors.values(), *(one for one, _ in start.grads)) if is_leaf(one)}
    return Writes(
        tuple(one for one in kept if is_written(one)),
        tuple(one for one in leaves.values() if one.grad is not None and is_written(one.grad)),
        tuple(place for place, one in enumerate(arguments.tensors) if is_written(one)),
    )


def _state_guard(
    context: DeviceContext,
    found: Found,
    left_alone: LeftAlone,
    values: ValueGuard,
    used: set[TensorData],
    held: Held,
    sources: Sequence[Source],
) -> StateGuard:
    """A guard over the state, and the places of what the call replaced. Raises `NotReplayable`."""
    holders = [holder for each in held for _, holder in each if isinstance(holder, TensorHolder)]
    tensors = [tensor for holder in holders if (tensor := holder.tensor()) is not None]
    if any(id(tensor) not in found.tensors for tensor in tensors):
        raise NotReplayable(f"it leaves a tensor where its code does not show it\n{_ADVICE}")
    seen = found.data()
    if context.order is not None:
        seen.add(context.order)  # held by the device itself
    unseen = next((source for source in sources if isinstance(source, HeldTensor) and not source.is_among(seen)), None)
    if unseen is not None:
        raise NotReplayable(
            f"it uses a tensor at {unseen.site} that is held where its code does not show it\n{_ADVICE}"
        )
    return found.guard(used, set(map(id, tensors)), left_alone, values)


def _grads_that_matter(start: Start, grads: GradsAtStart) -> Iterator[tuple[LazyTensor, bool]]:
    """The parameters whose `.grad` must be there, or missing as at the start: no call shows that it is no matter."""
    for parameter, grad in start.grads:
        if parameter not in grads.present or parameter not in grads.absent:
            yield parameter, grad is not None


def _kept_grads(start: Start, used: set[TensorData]) -> Iterator[tuple[LazyTensor, TensorData]]:
    """The gradients that a body uses and does not replace, with their parameters."""
    for parameter, grad in start.grads:
        data = None if grad is None else grad()
        if data is not None and data in used:
            yield parameter, data


def _check_nothing_piles_up(start: Start, record: RecordedCall) -> None:
    """What a body replaces must die. A replay could not leave a growing list as its state."""
    returned = record.returned_outputs()
    if any(storage() is not None for storage, number in start.left.items() if number not in returned):
        raise NotReplayable("tensors that the call before left are still held, as in a list that grows")


def _check_unsettled(start: Start, record: RecordedCall, unsettled: Sequence[UnsettledStep]) -> None:
    versions = {id(tensor): version for tensor, version in start.host_versions}
    for step in unsettled:
        reason = step.why_not_again(versions)
        if not reason and record.formulas.settings:
            reason = "a GradScaler may skip a step that changes entries of its groups"
        if reason:
            raise NotReplayable(f"{reason}\n  capture the model and the optimizer instead")


def _check_places(
    start: Start, record: RecordedCall, sources: Sequence[Source], cleared: Sequence[ClearedGrad]
) -> None:
    """Raise `NotReplayable` if the call changed what places lead to. See Note [State stays in its place]."""
    after = record.after
    made = {output: number for number, output in enumerate(record.outputs) if output() is not None}
    place = changed_place(start.state, after, made, {id(each.parameter) for each in cleared})
    if place is not None:
        raise NotReplayable(
            f"it changes which tensor is in {start.numbers.name(place)}, to none or to one that it did not make\n"
            "  copy what it keeps, as in self.last = x.clone()"
        )
    stayed = outputs_that_stayed(start.state, after, start.left, made)
    moved = values_that_moved(start.state, after)
    for source in sources:
        if isinstance(source, Carried) and source.output not in stayed:
            raise NotReplayable(f"a tensor that it uses at {source.site}, and replaces, was somewhere else before")
        if isinstance(source, HeldTensor) and (data := source.reference()) and value_of(data) in moved:
            raise NotReplayable(
                f"a tensor that it uses at {source.site} was replaced in one of the places that held it, and not in all"
            )


def _argument_places(
    start: Start, last: RecordedCall, record: RecordedCall, sources: Sequence[Source], found: Found
) -> Iterator[ArgumentPlace]:
    """The places that led to an argument in both calls. The body may read it there, or have put it there."""
    used = {source.place for source in sources if isinstance(source, Argument)}
    before, after = start.state.reached, record.after.reached
    places = [
        (place, number)
        for place, number in record.argument_places & last.argument_places
        if place in before and (number in used or after.get(place) == before[place])
    ]
    readers = record.numbers.readers(found.reach, found.structure.walk) if places else {}
    for place, number in places:
        if place not in readers or len(before[place]) > 1:
            raise NotReplayable(f"an argument is also in {record.numbers.name(place)}")
        ((_, meta),) = before[place]
        yield ArgumentPlace(number, readers[place], meta)


def _source(last: RecordedCall, record: RecordedCall, place: int, is_written: bool, floats: FormulaProgram) -> Source:
    """Where an input of a recorded call came from, going by the call before. Raises `NotReplayable`."""
    if place in record.arguments:
        if last.arguments.get(place) != record.arguments[place]:  # it is state too
            raise _another_tensor(record, place)
        return Argument(record.arguments[place])
    if place in record.carried:
        return Carried(record.carried[place], record.entered(place).meta, record.entered(place).site)
    data = record.inputs[place]()
    if data is not None and last.inputs[place]() is data:
        return HeldTensor(weakref.ref(data), record.entered(place).site)
    before, now = last.uploads.get(place), record.uploads.get(place)
    if now is not None and place in floats.uploads:
        number = list(floats.uploads).index(place)
        return Computed(number, record.context, meta_of(now), record.entered(place).meta, is_written)
    if before is not None and now is not None and _equal(before, now):
        return Uploaded(new_data(record.context, now), record.entered(place).meta, is_written)
    raise _another_tensor(record, place)


def _another_tensor(record: RecordedCall, place: int) -> NotReplayable:
    return NotReplayable(
        f"a tensor that it uses at {record.entered(place).site} was another one in the call before\n"
        "  pass what changes from call to call as an argument, on the lazy device"
    )


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or (a.dtype == b.dtype and a.stride() == b.stride() and run_clean(are_equal, a, b))


def _check_arguments(arguments: Arguments, record: RecordedCall, sources: Sequence[Source]) -> None:
    """Raise `NotReplayable` for an argument that is part of the state, or that the body made stand for other data."""
    given = {tensor._data.storage for tensor in arguments.tensors}
    grads: list[Any] = [tensor.grad for tensor in arguments.tensors if is_leaf(tensor)]
    of_grads = {grad._data.storage for grad in grads if is_a(grad, LazyTensor)}
    for place, source in enumerate(sources):
        data = record.inputs[place]()
        if not isinstance(source, Argument) and data is not None and data.storage in of_grads:
            raise NotReplayable("it uses the .grad of an argument\n  pass it as an argument, too")
        if not isinstance(source, Argument) and data is not None and data.storage in given:
            raise NotReplayable(f"an argument shares memory with a tensor that it uses at {record.entered(place).site}")
    for tensor, before in zip(arguments.tensors, record.argument_data, strict=True):
        if tensor._data is not before():
            raise NotReplayable("it gives an argument other data\n  return the new tensor instead")


# ----- floats


def follow_floats(seen: Sequence[RecordedCall]) -> FormulaProgram:
    """The formulas of one program's constants, as its recorded calls confirm them.

    Raises `NotReplayable` for a constant that changed as no formula predicts.
    """
    latest = seen[-1]
    alike = [record for record in seen[:-1] if record.returns_like(latest)]
    if not alike:
        raise NotReplayable(_RETURNED_ELSE)
    runs = [record.as_run() for record in (*alike, latest)]
    try:
        return follow(runs, [guard.optimizer for guard in latest.guards])
    except NotFollowed as error:
        if error.upload >= 0:
            raise _another_tensor(latest, error.upload) from None
        if error.earlier is None:
            raise NotReplayable(str(error)) from None
        call = latest.constant_call(error.constant)
        before, now = error.earlier.constants[error.constant], latest.constants[error.constant]
        raise NotReplayable(
            f"a float of {call.op} at {call.site} changed from {before!r} to {now!r}\n"
            "  a replay computes floats from arguments, hyperparameters and step counts, by Python's arithmetic: "
            "pass the float as\n  an argument"
        ) from None


# ----- what is returned


def _returned(last: RecordedCall, record: RecordedCall, sources: list[Source]) -> Returned:
    """What a call returns. Adds returned tensors that the call did not use to `sources`. Raises `NotReplayable`."""
    pairs = list(zip(last.returned, record.returned, strict=False))
    if not last.returns_like(record):
        raise NotReplayable(_RETURNED_ELSE)
    return Returned(tuple(_leaf(before, now, sources) for before, now in pairs), record.spec)


def _leaf(before: ReturnedTensor | ReturnedValue, leaf: ReturnedTensor | ReturnedValue, sources: list[Source]) -> Leaf:
    if isinstance(leaf, ReturnedValue):
        is_same = isinstance(before, ReturnedValue) and before.value is leaf.value
        return ReturnedLiteral(leaf.value if is_same else leaf.copy, is_same or is_plain(leaf.copy))
    if leaf.kind == "output":
        return ReturnedOutput(leaf.place, leaf.meta)
    if leaf.kind == "input":
        source = sources[leaf.place]
        if isinstance(source, Uploaded | Computed):  # the caller may write to it
            sources[leaf.place] = replace(source, is_written=True)
        return ReturnedInput(leaf.place, leaf.meta)
    sources.append(Argument(leaf.place) if leaf.kind == "argument" else HeldTensor(leaf.data, "its end"))
    return ReturnedInput(len(sources) - 1, leaf.meta)
