"""Check that the state of a captured function is what it was: its modules, its optimizers, its tensors, by place.

In: what the function reaches and used, as found after a recorded call. Out: `StateGuard`, which says what changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from operator import attrgetter, is_
from typing import Any

import torch

from lazy_backend.floats.hyperparameters import GROUPS, SettingsGuard
from lazy_backend.ports.cpython import young_ids
from lazy_backend.ports.tensor_types import is_leaf
from lazy_backend.replay.captured_state import GlobalHookGuard
from lazy_backend.replay.reachable import PlaceGuard, Reachable, StatePlace
from lazy_backend.replay.structure import Root, StructureGuard, hooks_of
from lazy_backend.replay.value_guard import ValueGuard
from lazy_backend.tensors.state import TensorData
from lazy_backend.tensors.tensor import LazyTensor

_data_of = attrgetter("_data")


def _facts_of(tensors: Iterable[LazyTensor]) -> list[Any]:
    """What autograd does with tensors. Holds their hooks, whose ids could come back otherwise."""
    return [fact for tensor in tensors for fact in (tensor.requires_grad, *hooks_of(tensor))]


class LeftAlone:
    """Places that the user changed between two calls, and that the body left so: it does not store there."""

    def __init__(self) -> None:
        self._places: dict[Hashable, StatePlace] = {}  # which hold their containers: keys name those by id

    def add(self, moved: Iterable[StatePlace]) -> None:
        """Add those of the places that `StateGuard.moved` gave before a body ran that are as then, after it ran."""
        self._places |= {place.where: place for place in moved if not place.holds()}

    def keep(self, places: Iterable[StatePlace]) -> None:
        """Forget all others."""
        self._places = {place.where: place for place in places if place.where in self._places}

    def __contains__(self, place: StatePlace) -> bool:
        return place.where in self._places


class Found:
    """The modules, optimizers and tensors that a function reaches or used, as they are after a call.

    Made before the garbage collector runs again.
    """

    def __init__(
        self,
        reach: Reachable,
        modules: Iterable[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        leaves: Iterable[LazyTensor],
    ) -> None:
        self.reach = reach
        self.leaves = [leaf for leaf in leaves if isinstance(leaf, LazyTensor)]
        # made during the call, as the garbage collector has not run since; by id
        self.young = young_ids()
        all_modules = {id(module): module for module in (*modules, *reach.modules)}.values()
        all_optimizers = {id(one): one for one in (*optimizers, *reach.optimizers)}.values()
        self.roots: tuple[Root, ...] = (*all_modules, *all_optimizers)
        self.structure = StructureGuard(all_modules, all_optimizers)
        stepped = set(map(id, optimizers))
        read = [one for one in reach.optimizers if id(one) not in stepped] if reach.reads(GROUPS) else ()
        self.settings = SettingsGuard(read)
        everywhere = (*self.structure.tensors, *reach.tensors.values(), *self.leaves)
        self.tensors = {id(tensor): tensor for tensor in everywhere if isinstance(tensor, LazyTensor)}

    def data(self) -> set[TensorData]:
        """What the tensors and their gradients stand for."""
        grads = [tensor.grad for tensor in self.tensors.values() if is_leaf(tensor)]
        return {tensor._data for tensor in (*self.tensors.values(), *grads) if isinstance(tensor, LazyTensor)}

    def _shared_places(self, replaced: set[int]) -> list[StatePlace]:
        """The places of what has several, some by the body perhaps. See Note [State stays in its place]."""
        counts = Counter(
            id(tensor._data.storage) for tensor in self.structure.tensors if isinstance(tensor, LazyTensor)
        )
        for number, tensor in self.reach.tensors.items():
            counts[id(tensor._data.storage)] += self.reach.num_ways(number)
        several = {number for number, tensor in self.reach.tensors.items() if counts[id(tensor._data.storage)] > 1}
        return self.reach.shared_places(several - replaced)

    def guard(self, used: set[TensorData], replaced: set[int], left_alone: LeftAlone, values: ValueGuard) -> StateGuard:
        """A guard over the tensors whose data is in `used`, and the places of those whose ids are `replaced`.

        `values`: what the code could read when the call began.
        """
        kept = {number for number, tensor in self.tensors.items() if tensor._data in used}
        roots = map(id, (*self.reach.modules, *self.reach.optimizers))
        places, on_the_way = self.reach.ways_to({*kept, *replaced, *roots})
        _, holding = self.reach.ways_to(replaced)
        new = [each for each in (*holding, *self.structure.containers_of(replaced)) if id(each) in self.young]
        unique = {id(each): each for each in new}
        guarded = {place.where for place in places}
        shared = [place for place in self._shared_places(replaced) if place.where not in guarded]
        left_alone.keep(shared)
        return StateGuard(
            self.structure,
            self.settings,
            PlaceGuard(places, on_the_way, unique.values()),
            [self.tensors[number] for number in kept],
            [place for place in shared if place not in left_alone],
            values,
        )


class StateGuard:
    """Whether modules, optimizers and tensors are what they were, and where they were."""

    def __init__(
        self,
        structure: StructureGuard,
        settings: SettingsGuard,
        places: PlaceGuard,
        tensors: Sequence[LazyTensor],
        shared: Sequence[StatePlace],
        values: ValueGuard,
    ) -> None:
        self._structure = structure
        self._settings = settings
        self._values = values
        self._shared = shared
        self._places = places
        self._tensors = tensors
        self._hooks = GlobalHookGuard()
        self._data: list[Any] = list(map(_data_of, tensors))
        seen = set(map(id, structure.tensors))
        self._others = [tensor for tensor in tensors if id(tensor) not in seen]
        self._facts = _facts_of(self._others)

    def settle(self) -> None:
        """Note reference counts, after the caller has dropped its own references."""
        self._places.settle()

    def moved(self) -> list[StatePlace]:
        """Those of several places of something that do not lead to it any more."""
        return [place for place in self._shared if not place.holds()]

    def change(self) -> str:
        """What has changed; empty if nothing has."""
        if not self._structure.holds():
            return self._structure.why()
        if settings_change := self._settings.change():
            return settings_change
        if not self._hooks.holds():
            return "a global hook of modules or optimizers was added or removed"
        if not all(map(is_, map(_data_of, self._tensors), self._data)):
            return "a tensor that it uses stands for other data"
        if not self._places.holds():
            return "a tensor, module or optimizer that it uses was replaced, moved, or is held elsewhere too"
        if not all(place.holds() for place in self._shared):
            return "one of several places of a tensor, or of what leads to one, leads to another now"
        facts = _facts_of(self._others)
        if len(facts) != len(self._facts) or not all(map(is_, facts, self._facts)):
            return "requires_grad or a hook of a tensor that it uses changed"
        return self._values.change()
