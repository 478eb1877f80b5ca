"""The search for the operators that a compiler gets wrong.

In: the request of a plan that was refused, or that the compiler failed to make. Out: the forms of the graph to be
tried, one after the other, and in the end the nodes to be left to their kernels.

Note [A refused plan is repaired]
The inputs of the run in which a plan was refused are kept (`evidence.py`), and the graph is compiled in other forms,
which are tried with these inputs: in the compiler's process, at its low priority, one form after the other, with other
compiles in between. A compiler of the program's own is asked in this process, at each step for one form. In each form
some nodes are left to ATen's kernels (Note [Left to kernels]), of which others keep results and order. With all of them
left the form agrees, with none it does not; so of the forms that leave all nodes from some place on, two follow each
other of which the one agrees and the other does not, and halving finds them. The node that makes the difference is
left from then on, and the search goes on behind it until a form agrees that leaves only what was found. So a fault of
one operator is found, several of them one by one, and also one that only fused code has: then it is the last operator
of those that have to be compiled together to show it.

If the compiler gets the operator wrong also where all others are left, the operator itself is to blame: it is left with
all calls of its pattern (the operator, its arguments but for tensors, dtypes and ranks), in this graph and from then on
in all others, before they are compiled. Otherwise nothing is concluded for other graphs.

Where the compiler fails, in its process, it is asked once more: something may have killed its C++ compiler. If it fails
again, the same search asks which forms it compiles, without a run.

The repaired form is compiled and tried like any other plan. The refused artefact, or one without a plan, says on disk
what was found, so that the next process looks for the repaired one at once. What cannot be found, or is not repaired by
this, is interpreted.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable

from lazy_backend.lowering.checks.kernel_calls import can_be_left, pattern_of
from lazy_backend.lowering.compilation.compiler import backend_name
from lazy_backend.lowering.compilation.request import Backend, CompileRequest
from lazy_backend.lowering.ir.graph import Node
from lazy_backend.lowering.ir.portable import StoredGraph

# Operators that are looked for in one graph.
_MAX_FOUND = 8

Left = tuple[int, ...]


class _Known:
    """Patterns of operators that a compiler gets wrong by themselves, with the compiler's name."""

    def __init__(self) -> None:
        self._patterns: dict[str, frozenset[str]] = {}

    def add(self, backend: Backend, patterns: Iterable[str]) -> None:
        name = backend_name(backend)
        self._patterns[name] = self._patterns.get(name, frozenset()).union(patterns)

    def left(self, backend: Backend, stored: StoredGraph, promoted: Collection[int]) -> Left:
        """The places of the nodes that are not given to the compiler."""
        patterns = self._patterns.get(backend_name(backend)) if self._patterns else None
        if not patterns:
            return ()
        return tuple(
            place
            for place, node in enumerate(stored.get().nodes)
            if pattern_of(node) in patterns and can_be_left(node, promoted)
        )

    def forget(self) -> None:
        self._patterns = {}


known = _Known()


class Repair:
    """One search. `asked`: the nodes left in the form to be tried next; None once it is over.

    `left`: those that were found, if the form that leaves only them agrees. `found`: their descriptions. `patterns`:
    of operators that are wrong by themselves, of which `alone` is the first one's place.
    """

    def __init__(self, request: CompileRequest, refusal: Exception) -> None:
        """`refusal`: `PlanRefused`, or the compiler's error."""
        self.refusal = refusal
        self.left: Left = ()
        self.found: list[str] = []
        self.patterns: set[str] = set()
        self.alone: int | None = None
        self._nodes = request.stored.get().nodes
        self._before = request.left
        self._places = [
            place
            for place, node in enumerate(self._nodes)
            if place not in request.left and can_be_left(node, request.promoted)
        ]
        self._steps = self._search()
        self.asked: Left | None = _sorted(next(self._steps))

    def answer(self, wrong: str) -> None:
        """Go on. `wrong`: how the form that was asked for differs from the interpreter; empty if it does not."""
        try:
            self.asked = _sorted(self._steps.send(wrong))
        except StopIteration:
            self.asked = None
        except BaseException:  # an interrupt: there is no telling how far it came
            self.asked, self.left = None, ()
            raise

    def _search(self) -> Generator[Collection[int], str, None]:
        left, places, low = set(self._before), self._places, 0
        if not (yield left) or (yield left.union(places)):
            return
        while low < len(places) and len(self.found) < _MAX_FOUND:
            high = len(places)
            while high - low > 1:
                middle = (low + high) // 2
                if (yield left.union(places[middle:])):
                    high = middle
                else:
                    low = middle
            found = places[low]
            alone = yield left.union(places).difference((found,))
            left.update(self._like(found) if alone else (found,))
            low += 1
            self._note(self._nodes[found], alone)
            if not (yield left):
                self.left = _sorted(left)
                return

    def _like(self, found: int) -> list[int]:
        pattern = pattern_of(self._nodes[found])
        self.patterns.add(pattern)
        self.alone = found if self.alone is None else self.alone
        return [place for place in self._places if pattern_of(self._nodes[place]) == pattern]

    def _note(self, node: Node, alone: str) -> None:
        where = f"{node.name} recorded at {node.site or 'an unknown line'}"
        results = ", ".join(str(value.meta) for value in (*node.outputs, *node.mutates)[:1] if value is not None)
        how = "compiled alone, too" if alone else "where it is compiled together with others"
        self.found.append(f"{where}, {results}: {how}")


def _sorted(places: Iterable[int]) -> Left:
    return tuple(sorted(places))
