"""Whether the tensors that a call replaces stay where they are, from the start of the call to its end.

In: what a function reaches, before and after a recorded call. Out: which output of a call is at which place.

Note [Carried state keeps its place]
An input that the call before left is found again through the output that it was: a replay takes what now holds that
output. This is right only where code that reads one place gets the same output each time. If the user exchanges two
tensors between two calls, as in `a.h, b.h = b.h, a.h`, then the second call reads at `a.h` what the first left at
`b.h`, but the third will read at `a.h` what the second left there. So all places that lead to what the call before
left are noted before the body runs, and must lead to the same outputs once it has run; otherwise the call is not bound,
and the next one may be. Places are named by the way from what the function names, since a body may make anew the
containers on the way. Modules and optimizers that are found only within others are named by identity: a body that moves
those is refused anyway.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping

import torch

from lazy_backend.replay.plain_values import is_a
from lazy_backend.replay.reachable import Reachable, name_of_key
from lazy_backend.replay.structure import Structure
from lazy_backend.tensors.state import LazyStorage
from lazy_backend.tensors.tensor import LazyTensor


class PlaceNumbers:
    """A number for each place, the same for the same way in two walks."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, Hashable], int] = {}

    def _of(self, owner: int, step: Hashable) -> int:
        """The number of the place that `step` leads to from the place `owner`; 0 is where all ways begin."""
        return self._numbers.setdefault((owner, step), len(self._numbers) + 1)

    def outputs_at(
        self,
        outputs: Mapping[LazyStorage, int],
        reach: Reachable,
        structure: Structure,
        leaves: Iterable[LazyTensor],
    ) -> dict[int, set[int]]:
        """Which of `outputs`, given with their numbers, are where. Leaves that are found nowhere else have a place."""
        found: dict[int, set[int]] = {}
        anchors: dict[int, int] = {}
        everywhere = [*self._in_reach(reach, anchors), *self._in_structure(structure, anchors)]
        seen = {id(tensor) for tensor, _ in everywhere}
        everywhere += [(leaf, self._of(0, ("id", id(leaf)))) for leaf in leaves if id(leaf) not in seen]
        for tensor, place in everywhere:
            grad = tensor.grad if tensor.is_leaf else None
            for one, where in ((tensor, place), (grad, self._of(place, "grad"))):
                if isinstance(one, LazyTensor) and one._data.storage in outputs:
                    found.setdefault(where, set()).add(outputs[one._data.storage])
        return found

    def _in_reach(self, reach: Reachable, anchors: dict[int, int]) -> Iterator[tuple[LazyTensor, int]]:
        """The lazy tensors with their places. Adds the places of modules and optimizers to `anchors`, by id."""
        places = {id(None): 0}
        tensors: list[tuple[LazyTensor, list[tuple[int, Hashable]]]] = []
        for value, ways in reach.ways():
            places[id(value)] = self._after(places, *ways[0])
            if type(value) is LazyTensor:
                tensors.append((value, ways))
            elif is_a(value, torch.nn.Module | torch.optim.Optimizer):
                anchors[id(value)] = places[id(value)]
        for tensor, ways in tensors:
            for owner, step in ways:
                yield tensor, self._after(places, owner, step)

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


def outputs_that_stayed(before: Mapping[int, set[int]], after: Mapping[int, set[int]]) -> set[int]:
    """The outputs that some place led to before a call, and that all of these places lead to after it."""
    moved = {
        output
        for place, outputs in before.items()
        for output in outputs
        if len(outputs) > 1 or after.get(place) != outputs
    }
    return {output for outputs in before.values() for output in outputs} - moved
