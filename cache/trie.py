"""The trie of recorded programs: level one of a program's identity.

In: one recorded call at a time, as a hashable key. Out: the node that follows.
A path from the root is an exact, collision-free name of a program, because every step compares its whole key.
Successor of LTC's TrieCache (torch/csrc/lazy/core/ir_util.h), which compared nodes; here no node is built on a hit.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class TrieNode(Generic[T]):
    """One recorded call. `call` says what was recorded, `followers` what came after it so far.

    The parent link and the links to followers make cycles; they are confined to the trie, which owns no tensors, so
    liveness never depends on the garbage collector. Nearly every node has one follower and no bindings, and a first
    step makes hundreds of nodes: there are dicts only where they are needed.
    """

    __slots__ = ("parent", "call", "depth", "next_key", "next", "shortcut", "_branches", "bindings", "jumps", "known")

    def __init__(self, parent: TrieNode[T] | None, call: T | None) -> None:
        self.parent = parent
        self.call = call
        self.depth: int = 0 if parent is None else parent.depth + 1
        # the follower taken last: a repeated step finds it by comparing one key, without hashing it
        self.next_key: Hashable = None
        self.next: TrieNode[T] | None = None
        # the part of `call` that the trie's owner needs on a hit, if it needs no more
        self.shortcut: Any = None
        self._branches: dict[Hashable, TrieNode[T]] | None = None  # all followers, if there are several
        self.bindings: Any = None  # results of earlier syncs at this node; only syncs use them, None before the first
        # stretches of known calls that begin here, by what their operands are; None before the first
        self.jumps: dict[Hashable, Any] | None = None
        self.known: Any = None  # what a recorder in C++ has read off this node; None before the first time

    def branch(self, key: Hashable) -> TrieNode[T] | None:
        """The follower with this key, which is not `next_key`."""
        return None if self._branches is None else self._branches.get(key)

    def follower(self, key: Hashable) -> TrieNode[T] | None:
        """The follower with this key."""
        return self.next if self.next_key == key else self.branch(key)

    def followers(self) -> list[TrieNode[T]]:
        if self._branches is not None:
            return list(self._branches.values())
        return [] if self.next is None else [self.next]

    def path(self) -> list[T]:
        """The calls from the root to this node, in program order."""
        calls: list[T] = []
        node: TrieNode[T] | None = self
        while node is not None and node.call is not None:
            calls.append(node.call)
            node = node.parent
        calls.reverse()
        return calls


class Trie(Generic[T]):
    """All programs recorded on one device. Its owner calls `reset` between two traces when `size` is too large.

    Paths under different settings have different roots: a path is known again once its settings are.
    """

    def __init__(self) -> None:
        self.roots: dict[Any, TrieNode[T]] = {}  # by the settings that what is stored with paths depends on
        self.size = 0

    def root_of(self, settings: Hashable = None) -> TrieNode[T]:
        """The root of the paths under `settings`."""
        return self.roots.get(settings) or self.roots.setdefault(settings, TrieNode(None, None))

    def add(self, parent: TrieNode[T], key: Hashable, call: T) -> TrieNode[T]:
        """A new follower of `parent`, which had none with this key. It counts as the one taken last."""
        node = TrieNode(parent, call)
        if parent.next is not None:
            if parent._branches is None:
                parent._branches = {parent.next_key: parent.next}
            parent._branches[key] = node
        parent.next_key, parent.next = key, node
        self.size += 1
        return node

    def reset(self) -> None:
        """Drop every path. Cursors into the old paths become invalid."""
        # the old nodes are a cycle (parent <-> followers): break it here rather than leave it to the collector
        for node in [*self.roots.values(), *self]:
            node._branches = node.bindings = node.jumps = node.known = node.next_key = node.next = None
        self.roots = {}
        self.size = 0

    def __iter__(self) -> Iterator[TrieNode[T]]:
        """Every node but the roots, parents before followers."""
        pending = [node for root in self.roots.values() for node in root.followers()]
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.followers())
