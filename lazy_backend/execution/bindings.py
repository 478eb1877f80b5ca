"""What a path was bound to before: by what was alive at its sync, and by settings.

Note [Live sets that differ]
What is alive at a sync becomes an output, so a path is bound once for each live set. A computation with a few outputs
more than are wanted is as good: it runs, and what nobody holds is dropped at once. Where live sets keep differing, as
in a loop that keeps another activation each time, the third is bound to a computation with all outputs that were ever
wanted there, which then serves whatever part of them is alive.
"""

from __future__ import annotations

from dataclasses import dataclass

from lazy_backend.cache.trie import TrieNode
from lazy_backend.lowering.compilation.environment import Environment
from lazy_backend.lowering.ir.program import Call, Cut
from lazy_backend.lowering.plans.cached_computation import CachedComputation

# Live sets remembered per path. They differ from step to step only in odd programs; without a bound those would grow.
_MAX_BINDINGS = 64

# Live sets of a path that get computations of their own, before one with all their outputs is made.
_MAX_LIVE_SETS = 2

# Outputs that nobody holds and that are computed all the same, rather than making another computation.
_MAX_UNWANTED = 2

Indices = tuple[int, ...]  # places of the live storages among the pending ones


@dataclass(frozen=True, slots=True)
class FirstRun:
    """What stands for the computation of a path that ran once, while it was recorded."""

    constants: tuple[float, ...]


class PathBindings:
    """The computations of one path, by live set and settings."""

    __slots__ = ("_found", "_unions")

    def __init__(self) -> None:
        self._found: dict[tuple[Indices, Environment], CachedComputation | FirstRun] = {}
        self._unions: dict[Environment, Indices] = {}  # the outputs of the computation that serves all live sets

    def __len__(self) -> int:
        return len(self._found)

    def known(self) -> list[tuple[Indices, Environment]]:
        """Every live set and settings that this path had, the latest last."""
        return list(self._found)

    def has(self, indices: Indices, settings: Environment) -> bool:
        """Whether this path was synced with this live set and settings."""
        return (indices, settings) in self._found

    def computation(self, indices: Indices, settings: Environment) -> CachedComputation | None:
        found = self._found.get((indices, settings))
        return found if isinstance(found, CachedComputation) else None

    def first_run(self, indices: Indices, settings: Environment) -> FirstRun | None:
        found = self._found.get((indices, settings))
        return found if isinstance(found, FirstRun) else None

    def bind(self, indices: Indices, settings: Environment, bound: CachedComputation | FirstRun) -> None:
        if len(self._found) >= _MAX_BINDINGS:
            self._found.clear()
            self._unions.clear()
        self._found[(indices, settings)] = bound

    def covering(self, wanted: Indices, settings: Environment) -> Indices | None:
        """A set of outputs bound here that holds all of `wanted`: the union if there is one, or one hardly larger."""
        needed = set(wanted)
        union = self._unions.get(settings)
        if union is not None:
            return union if needed.issubset(union) and self.has(union, settings) else None
        found = [
            indices
            for (indices, other), bound in self._found.items()
            if other == settings
            and isinstance(bound, CachedComputation)
            and bound.outputs is None
            and needed.issubset(indices)
            and len(indices) - len(wanted) <= _MAX_UNWANTED
        ]
        return min(found, key=len, default=None)

    def widen(self, wanted: Indices, settings: Environment) -> Indices:
        """The outputs that a new computation gets: `wanted`, or all that were ever wanted if live sets keep differing.

        In that case the others are to be served by this one from now on, and are forgotten.
        """
        seen = [indices for indices, other in self._found if other == settings]
        union = self._unions.get(settings)
        if union is None and len(seen) < _MAX_LIVE_SETS:
            return wanted
        widened = tuple(sorted({*wanted}.union(*seen)))
        self._found.clear()
        self._unions = {settings: widened}
        return widened


def bindings_of(cursor: TrieNode[Call | Cut]) -> PathBindings:
    """The bindings of the path that ends at `cursor`."""
    found = cursor.bindings
    if found is None:
        found = cursor.bindings = PathBindings()
    return found  # type: ignore[no-any-return]
