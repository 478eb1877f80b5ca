"""The computations that a path was bound to before, by the live set at its sync and by settings.

Note [Live sets that differ]
Every storage that is alive at a sync becomes an output, so a path is bound once for each live set. A computation with a
few more outputs than are wanted works as well: it runs, and outputs that nothing holds are dropped at once. If live
sets keep differing, as in a loop that keeps another activation each time, the third live set is bound to a computation
with all outputs that were ever wanted there, which then serves any subset of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from lazy_backend.cache.trie import TrieNode
from lazy_backend.lowering.artefacts.environment import Environment
from lazy_backend.lowering.ir.program import Call, Cut
from lazy_backend.lowering.plans.cached_computation import CachedComputation
from lazy_backend.tensors.state import Loop

# Live sets remembered per path. They differ from step to step only in odd programs; without a bound these would grow.
_MAX_BINDINGS = 64

# Live sets of a path that get computations of their own, before one with all their outputs is made.
_MAX_LIVE_SETS = 2

# Unwanted outputs that a computation may have and still be used, rather than making another computation.
_MAX_UNWANTED = 2

Indices = tuple[int, ...]  # places of the live storages among the pending ones


@dataclass(frozen=True, slots=True)
class FirstRun:
    """Takes the place of the computation of a path that ran once, while it was recorded."""

    constants: tuple[float, ...]


class PathBindings:
    """The computations of one path, by live set and settings."""

    __slots__ = ("_found", "_unions", "loop")

    def __init__(self) -> None:
        # whose rounds the path ends with, if one was looked for here; without rounds if none was found
        self.loop: Loop | None = None
        self._found: dict[tuple[Indices, Environment], CachedComputation | FirstRun] = {}
        self._unions: dict[Environment, Indices] = {}  # the outputs of the computation that serves all live sets

    def __len__(self) -> int:
        return len(self._found)

    def known(self) -> list[tuple[Indices, Environment]]:
        """Every pair of live set and settings that this path had, latest last."""
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
        """A bound set of outputs that contains all of `wanted`: the union if there is one, or a slightly larger set."""
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

        In the latter case it serves the earlier live sets too from now on, and their bindings are forgotten.
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
