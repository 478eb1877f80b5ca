"""What a captured function finds at each place before a recorded call, and leaves there.

In: what a function reaches, before and after the call. Out: which tensor is where, and why a replay could not leave it
there.

Note [State stays in its place]
A replay gives new values to the tensors that hold a call's outputs, and changes no place: no attribute, no entry, no
`.grad`. So each tensor that is anywhere after a recorded call must be an output of it, or must have been there before;
and none may be gone, but for the `.grad` of a parameter, which a replay sets to None if the body does. A body that
keeps an argument (`self.last = x`), or lets a place stand for another tensor (`self.old = self.new`), is not bound.

A body may also store what is there already, as `self.now = self.state` does at its second call. So where several places
lead to one tensor or to one container of tensors, all of them are guarded, even if the body uses none of them; but not
those that the user once changed and the body did not change back, as in `self.loss = self.step(x)`. And where a place
led to an argument in two calls, as after `self.batch = x`, it must lead to the argument of each replay.

An input that the call before left is found again through the output that it was: a replay takes what now holds that
output. This is right only where code that reads one place gets the same output each time. If the user exchanges two
tensors between two calls, as in `a.h, b.h = b.h, a.h`, then the second call reads at `a.h` what the first left at
`b.h`, but the third will read at `a.h` what the second left there. So each place that led to an output of the call
before must lead to the same output after the call; otherwise the call is not bound, and the next one may be. The same
holds for tensors that stay: if `self.h = self.h0` precedes a call that replaces `self.h`, it may have read either.

Places are named by the way from what the function names, since a body may make anew the containers on the way. Modules
and optimizers that are found only within others are named by identity: a body that moves those is refused anyway.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch

from lazy_backend.lowering.ir.graph import TensorMeta
from lazy_backend.ports.cpython import is_a, length_of
from lazy_backend.ports.hooks import REGISTRIES
from lazy_backend.ports.tensor_types import is_leaf
from lazy_backend.replay.plain_values import text_of
from lazy_backend.replay.reachable import Reachable, name_of_key
from lazy_backend.replay.structure import Structure
from lazy_backend.tensors.state import LazyStorage, TensorData
from lazy_backend.tensors.tensor import LazyTensor

# What a tensor at a place stands for.
_Value = tuple[ref[LazyStorage], TensorMeta]
_Values = dict[int, set[_Value]]  # by place: several only in a set


@dataclass(slots=True)
class PlacedState:
    """The lazy tensors that are at each place. Refers to them weakly."""

    reached: _Values = field(default_factory=dict)
    owners: dict[int, int] = field(default_factory=dict)  # by the place of a `.grad`: the id of its tensor
    leaves: _Values = field(default_factory=dict)  # that the body used, and that are found nowhere else


class PlaceNumbers:
    """A number for each place, the same for the same way in two walks."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, Hashable], int] = {}

    def state(self, reach: Reachable, structure: Structure, leaves: Iterable[LazyTensor]) -> PlacedState:
        """What is where now."""
        found = PlacedState()
        seen: set[int] = set()
        for tensor, place in self.tensors(reach, structure):
            seen.add(id(tensor))
            self._note(found, found.reached, place, tensor)
        for leaf in leaves:
            if id(leaf) not in seen:
                self._note(found, found.leaves, self._of(0, ("id", id(leaf))), leaf)
        return found

    def _note(self, found: PlacedState, values: _Values, place: int, tensor: LazyTensor) -> None:
        values.setdefault(place, set()).add(value_of(tensor._data))
        grad = tensor.grad if is_leaf(tensor) else None
        if isinstance(grad, LazyTensor):
            of_grad = self._of(place, ".grad")
            values.setdefault(of_grad, set()).add(value_of(grad._data))
            found.owners[of_grad] = id(tensor)

    def readers(self, reach: Reachable, structure: Structure) -> dict[int, Callable[[], Any]]:
        """By the number of a place of tensors: what reads it. Without places that cannot be read, as in a set."""
        places, anchors = self._reached(reach)
        found: dict[int, Callable[[], Any]] = {}
        values: dict[int, Any] = {}
        for value, ways in reach.ways():
            values[id(value)] = value
            for owner, step, place in ways:
                number = self._after(places, owner, step)
                of = values.get(owner)
                if place is not None:
                    found[number] = place.get
                elif is_a(of, tuple) and isinstance(step, int):
                    found[number] = functools.partial(
                        _item, found.get(places[owner], functools.partial(_itself, of)), step
                    )
                elif not is_a(of, set | frozenset):
                    found[number] = functools.partial(_itself, value)
        for tensor, place_number in self._in_structure(structure, anchors):
            found[place_number] = functools.partial(_itself, tensor)
        of_grads = {number: self._numbers.get((number, ".grad")) for number in found}
        return found | {
            number: functools.partial(_grad_of, found[owner])
            for owner, number in of_grads.items()
            if number is not None
        }

    def name(self, place: int) -> str:
        """How the user would write a place, about."""
        ways = {number: way for way, number in self._numbers.items()}
        steps: list[str] = []
        while place:
            place, step = ways[place]
            steps.append(_text(step) if place else "")  # users do not see where ways begin
        return "".join(reversed(steps)).removeprefix(".")

    def _of(self, owner: int, step: Hashable) -> int:
        """The number of the place that `step` leads to from the place `owner`; 0 is where all ways begin."""
        return self._numbers.setdefault((owner, step), len(self._numbers) + 1)

    def tensors(self, reach: Reachable, structure: Structure) -> Iterator[tuple[LazyTensor, int]]:
        """The lazy tensors with their places."""
        places, anchors = self._reached(reach)
        for value, ways in reach.ways():
            if type(value) is LazyTensor:
                for owner, step, _ in ways:
                    yield value, self._after(places, owner, step)
        yield from self._in_structure(structure, anchors)

    def _reached(self, reach: Reachable) -> tuple[dict[int, int], dict[int, int]]:
        """The first place of each value, by id; and those of modules and optimizers alone."""
        places = {id(None): 0}
        anchors: dict[int, int] = {}
        for value, ways in reach.ways():
            owner, step, _ = ways[0]
            places[id(value)] = self._after(places, owner, step)
            if is_a(value, torch.nn.Module | torch.optim.Optimizer):
                anchors[id(value)] = places[id(value)]
        return places, anchors

    def _after(self, places: Mapping[int, int], owner: int, step: Hashable) -> int:
        place = places.get(owner)
        if place is None:  # a module within another, which is not walked
            place = self._of(0, ("id", owner))
        return self._of(place, step)

    def _in_structure(self, structure: Structure, anchors: Mapping[int, int]) -> Iterator[tuple[LazyTensor, int]]:
        places: list[int] = []
        for owner, key, value in structure.entries:
            if is_a(value, torch.nn.Module | torch.optim.Optimizer):
                place = anchors.get(id(value)) or self._of(0, ("id", id(value)))
            else:
                place = self._of(places[owner], name_of_key(key))
            places.append(place)
            if type(value) is LazyTensor:
                yield value, place


def value_of(data: TensorData) -> _Value:
    return ref(data.storage), data.meta


def _itself(value: Any) -> Any:
    return value


def _item(read: Callable[[], Any], number: int) -> Any:
    container = read()
    return tuple.__getitem__(container, number) if is_a(container, tuple) and number < length_of(container) else None


def _grad_of(read: Callable[[], Any]) -> Any:
    tensor = read()
    return tensor.grad if type(tensor) is LazyTensor else None


def _text(step: Hashable) -> str:
    """A step of a way as part of an expression; empty if users do not write it."""
    if isinstance(step, str):  # within a module or an optimizer
        return "" if step in REGISTRIES else step if step == ".grad" else f".{step}"
    if isinstance(step, tuple) and len(step) == 4:
        is_entry, _, _, key = step
        return f"[{text_of(key)}]" if is_entry else f".{key}"
    return f"[{step}]" if isinstance(step, int) else ""


def changed_place(
    before: PlacedState, after: PlacedState, made: Collection[ref[LazyStorage]], cleared: Collection[int]
) -> int | None:
    """A place where a call left another tensor than was there, and that it did not make; or left none.

    `cleared`: ids of tensors whose `.grad` may be gone.
    """
    for place, values in after.reached.items():
        known = before.reached.get(place, ())
        if not all(value[0] in made or value in known for value in values):
            return place
    gone = (place for place in before.reached if place not in after.reached)
    return next((place for place in gone if before.owners.get(place) not in cleared), None)


def argument_places(
    before: PlacedState, after: PlacedState, arguments: Sequence[LazyTensor]
) -> frozenset[tuple[int, int]]:
    """The places that led to an argument before or after a call, each with the argument's number."""
    given = {ref(tensor._data.storage): number for number, tensor in enumerate(arguments)}
    return frozenset(
        (place, given[storage])
        for state in (before, after)
        for place, values in state.reached.items()
        for storage, _ in values
        if storage in given
    )


def values_that_moved(before: PlacedState, after: PlacedState) -> set[_Value]:
    """What some place led to before a call, and does not lead to after it."""
    return {value for place, values in before.reached.items() for value in values - after.reached.get(place, set())}


def outputs_that_stayed(
    before: PlacedState,
    after: PlacedState,
    left: Mapping[ref[LazyStorage], int],
    made: Mapping[ref[LazyStorage], int],
) -> set[int]:
    """The outputs that some place led to before a call, and that all of these places lead to after it.

    `left` and `made`: the numbers of what the call before left, and of what the call made.
    """
    stayed: set[int] = set()
    moved: set[int] = set()
    for was, now in ((before.reached, after.reached), (before.leaves, after.leaves)):
        for place, values in was.items():
            numbers = {left[storage] for storage, _ in values if storage in left}
            same = len(numbers) == 1 and numbers == {made.get(storage) for storage, _ in now.get(place, ())}
            (stayed if same else moved).update(numbers)
    return stayed - moved
