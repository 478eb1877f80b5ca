"""Tensors that a body leaves outside of its result, where a replay would leave none, or another call's.

In: a body and the tensors that it is given. Out: what is still held, once it ran, by something besides its result.

Note [What a body keeps]
An auxiliary loss in a global dict, an argument as an attribute of a class, a mask in a context variable: code names
few of them, and a graph holds others without any code. So references are counted. While a body runs, the garbage
collector does not: what it makes is the youngest generation. A tensor there, or an argument, that has more references
than those from young objects and from the graph is kept. So is one that a young object leads to which is held itself,
but for the graph's own: the contexts of autograd's functions, the hooks of checkpointing, and what other hooks pack.
Those are told from the user's by a search of the whole heap for an object that is not young and refers to them. Where
objects were frozen (`gc.freeze`), none finds these, and what other hooks pack counts as kept. All this is done only
where a body runs as written in order to be learned.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextvars import Context
from types import FunctionType
from typing import Any, NamedTuple

import torch.utils.checkpoint
from torch.autograd.function import FunctionCtx

from lazy_backend.ports.cpython import (
    UNHELD,
    counts_of,
    has_frozen,
    is_a,
    make_old,
    referents_of,
    referrers_of,
    young_objects,
)
from lazy_backend.ports.tensor_types import use_count
from lazy_backend.regions.stretch import Stretch
from lazy_backend.replay.captured_state import young_objects_stay_young
from lazy_backend.replay.unseen_reads import Ran
from lazy_backend.tensors.tensor import LazyTensor


class Kept(NamedTuple):
    """A tensor that something keeps, or a view: the memory, whether an argument has it, and whether autograd follows.

    `epoch`, `token`: of the memory. Refers to no tensor.
    """

    epoch: Any
    token: Any
    is_argument: bool
    requires_grad: bool

    def why(self, stretch: Stretch) -> str:
        """The reason why the body is not replayed; "" if it has nothing to do with what the body recorded."""
        if self.is_argument:
            return "something keeps an argument of it, or a view of one\n  keep it outside"
        if self.epoch is stretch.epoch and self.token in stretch.made:
            return f"something keeps a tensor that it makes at {stretch.site_of_made(self.token)}\n  return it instead"
        return ""


class _Bodies(threading.local):
    """The bodies that are watched, one within another: the ids of what each made before one within it began."""

    def __init__(self) -> None:
        self.made: list[set[int]] = []


_bodies = _Bodies()


def watching_kept(
    given: Sequence[LazyTensor], body: Callable[[], tuple[Any, str, Ran]]
) -> tuple[list[Any], str, Ran, list[Kept]]:
    """The three results of `body`, the first in a list, and which tensors are kept. See Note [What a body keeps].

    `given`: the tensors among its arguments.
    """
    with young_objects_stay_young():
        if _bodies.made:
            young = set(map(id, young_objects()))
            for made in _bodies.made:
                made |= young
        make_old()
        earlier = set(map(id, young_objects()))  # none, unless the collector is running already
        before = _python_counts(given)
        _bodies.made.append(set())
        try:
            result, read, ran = body()
        finally:
            made = _bodies.made.pop()
        held = [result]
        del result
        return held, read, ran, _kept(held, given, before, young_objects(made), earlier)


def _python_counts(objects: Sequence[Any]) -> list[int]:
    """The references to each object besides the sequence's. All that the graph has to a tensor are one, left out."""
    counts = counts_of(objects)
    of_graphs = [type(one) is LazyTensor and use_count(one) > 1 for one in objects]
    return [count - UNHELD - of_graph for count, of_graph in zip(counts, of_graphs, strict=True)]


def _kept(
    held: list[Any], given: Sequence[LazyTensor], before: Sequence[int], young: list[Any], earlier: set[int]
) -> list[Kept]:
    counts = dict(zip(map(id, given), map(int.__sub__, _python_counts(given), before), strict=True))
    new = {number for number, count in counts.items() if count > 0}
    objects = [one for one in young if id(one) not in counts and id(one) not in earlier]
    young.clear()
    counts |= zip(map(id, objects), _python_counts(objects), strict=True)
    parents = _parents(objects, counts.keys())
    memory = {id(one._data.storage) for one in given}
    tensors = [one for one in objects if type(one) is LazyTensor]
    targets = [one for one in given if id(one) in new]
    targets += [one for one in tensors if id(one._data.storage) in memory or one._data.storage.epoch is not None]
    ours = {id(held)}
    ours.update(id(one) for one in objects if _is_of_graph(one))
    unexplained = {number for number, count in counts.items() if count > len(parents[number])} - ours
    direct = {id(one) for one in targets} & unexplained
    above = {id(one): _above(id(one), parents, ours) & unexplained for one in targets if id(one) not in direct}
    suspects = set().union(*above.values())
    bad = _held_by_old([one for one in objects if id(one) in suspects], objects, counts.keys())
    return [
        Kept(storage.epoch, storage.token, id(storage) in memory, one.requires_grad)
        for one in targets
        if (id(one) in direct or not above[id(one)].isdisjoint(bad)) and (storage := one._data.storage)
    ]


def _is_of_graph(one: Any) -> bool:
    """Whether an object is a context of a function of autograd's, or a hook of checkpointing."""
    is_hook = type(one) is FunctionType and one.__globals__ is torch.utils.checkpoint.__dict__
    return is_hook or is_a(one, FunctionCtx)


def _parents(objects: Sequence[Any], known: Iterable[int]) -> dict[int, list[int]]:
    """The objects that refer to each of those `known`, once for each reference. All by id."""
    parents: dict[int, list[int]] = defaultdict(list)
    for one in objects:
        for number in map(id, referents_of(one)):
            if number in known:
                parents[number].append(id(one))
    return parents


def _above(number: int, parents: dict[int, list[int]], ends: set[int]) -> set[int]:
    """The objects that lead to one, without those that lead to it by `ends` alone."""
    found: set[int] = set()
    pending = [number]
    while pending:
        for parent in parents[pending.pop()]:
            if parent not in found and parent not in ends:
                found.add(parent)
                pending.append(parent)
    return found


def _held_by_old(suspects: list[Any], objects: list[Any], young: Iterable[int]) -> set[int]:
    """The ids of those among `suspects` that something may refer to which was there before the body ran."""
    if not suspects or has_frozen():
        return set(map(id, suspects))
    found = {id(one) for one in suspects if type(one) is Context}  # a thread has one, where nothing shows it
    ours = {id(suspects), id(objects), *young}
    old = [one for one in referrers_of(suspects) if id(one) not in ours]
    numbers = set(map(id, suspects))
    found.update(number for one in old for number in map(id, referents_of(one)) if number in numbers)
    return found
