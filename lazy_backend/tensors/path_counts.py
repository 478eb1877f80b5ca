"""How often each path of a trie was taken, and how many calls and tensors that makes."""

from __future__ import annotations

from collections import Counter

from lazy_backend.cache.trie import TrieNode
from lazy_backend.lowering.ir.program import Call, Cut, Fresh
from lazy_backend.ports.dispatcher import function_schema


class PathCounts:
    """Paths, each with how often it was taken. A sync costs one count; calls are counted when they are asked for."""

    def __init__(self) -> None:
        self._uses: Counter[TrieNode[Call | Cut]] = Counter()
        self._created = 0  # tensors made outside a path, or on a forgotten one

    def take(self, cursor: TrieNode[Call | Cut]) -> None:
        """Count one more use of the path that ends at `cursor`."""
        self._uses[cursor] += 1

    def create(self, number: int = 1) -> None:
        """Count tensors that were made outside any path."""
        self._created += number

    def calls(self) -> Counter[str]:
        """The calls of all paths taken, as `lazy::name`."""
        total: Counter[str] = Counter()
        for cursor, uses in self._uses.items():
            for name, count in calls_of(cursor.path()).items():
                total[name] += count * uses
        return total

    def created(self) -> int:
        """All tensors ever made."""
        return self._created + sum(uses * _created_in(cursor.path()) for cursor, uses in self._uses.items())

    def forget(self) -> Counter[str]:
        """Drop the paths. Returns their calls; the tensors that they created stay counted."""
        calls, self._created = self.calls(), self.created()
        self._uses.clear()
        return calls


def calls_of(path: list[Call | Cut]) -> Counter[str]:
    """The calls of one path, as `lazy::name`."""
    counts: Counter[str] = Counter()
    for call in path:
        if isinstance(call, Call):
            counts["lazy::" + function_schema(call.op).name.split("::")[1]] += 1
    return counts


def _created_in(path: list[Call | Cut]) -> int:
    return sum(isinstance(result, Fresh) for call in path if isinstance(call, Call) for result in call.results)
