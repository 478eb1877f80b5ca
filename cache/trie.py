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
    """One recorded call. `call` says what was recorded, `children` what followed it so far.

    The parent link and the children link make cycles; they are confined to the trie, which owns no tensors, so
    liveness never depends on the garbage collector.
    """

    __slots__ = ("parent", "children", "call", "depth", "bindings", "next_key", "next", "shortcut")

    def __init__(self, parent: TrieNode[T] | None, call: T | None) -> None:
        self.parent = parent
        self.call = call
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[Hashable, TrieNode[T]] = {}
        # the child taken last: a repeated step finds it by comparing one key, without hashing it
        self.next_key: Hashable = None
        self.next: TrieNode[T] | None = None
        # the part of `call` that its owner needs on a hit, if that is all it needs
        self.shortcut: Any = None
        # what a sync at this node found before: live outputs -> bound computation
        self.bindings: dict[Hashable, Any] = {}

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
    """All programs recorded on one device. Its owner calls `reset` between two traces when `size` is too large."""

    def __init__(self) -> None:
        self.root: TrieNode[T] = TrieNode(None, None)
        self.size = 0

    def add(self, parent: TrieNode[T], key: Hashable, call: T) -> TrieNode[T]:
        node = TrieNode(parent, call)
        parent.children[key] = node
        self.size += 1
        return node

    def reset(self) -> None:
        """Drop every path. A cursor into the old paths is lost."""
        # the old nodes are a cycle (parent <-> children): break it here rather than leave it to the collector
        for node in [self.root, *self]:
            node.children.clear()
            node.bindings.clear()
            node.next = None
        self.root = TrieNode(None, None)
        self.size = 0

    def __iter__(self) -> Iterator[TrieNode[T]]:
        """Every node but the root, parents before children."""
        pending = list(self.root.children.values())
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())
