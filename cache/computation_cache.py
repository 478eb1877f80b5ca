"""The computation cache: level two of a program's identity.

In: a canonical key (a list of named parts). Out: the computation made for exactly that key, or None.
The hash is for lookup and display; a hit compares the whole key.
Source: torch/csrc/lazy/core/lazy_graph_executor.h, `ComputationCache`.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from cachetools import LRUCache

C = TypeVar("C")
H = TypeVar("H", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Key:
    """An exact cache key: ordered named parts, compared as a whole.

    `parts` is a tuple of (name, text). Two keys are equal if and only if all their parts are.
    """

    parts: tuple[tuple[str, str], ...]

    def hash_hex(self) -> str:
        """128 bits of BLAKE2b over all parts, as 32 hexadecimal digits. For display and file names only."""
        digest = hashlib.blake2b(digest_size=16)
        for name, text in self.parts:
            # lengths keep ("a", "bc") and ("ab", "c") apart
            digest.update(f"{len(name)}:{name}{len(text)}:{text}".encode())
        return digest.hexdigest()

    def part_hashes(self) -> dict[str, str]:
        """A hash of each part: when two processes' keys differ, these show in which part."""
        return {name: hashlib.blake2b(text.encode(), digest_size=8).hexdigest() for name, text in self.parts}


Capacity = Callable[[], int]  # called whenever an entry is added: the setting may have changed


def _of_size(entries: LRUCache[H, C], capacity: int) -> LRUCache[H, C]:
    """`entries`, or a copy with another capacity."""
    if entries.maxsize == capacity:
        return entries
    other: LRUCache[H, C] = LRUCache(maxsize=capacity)
    other.update(entries)
    return other


class BoundedTable(Generic[H, C]):
    """LRU table whose entries are made when they are first requested. Thread-safe."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._entries: LRUCache[H, C] = LRUCache(maxsize=capacity())
        self._lock = threading.RLock()

    def get_or_add(self, key: H, make: Callable[[], C]) -> C:
        with self._lock:
            found = self._entries.get(key)
            if found is None:
                self._entries = _of_size(self._entries, self._capacity())
                found = self._entries[key] = make()
            return found

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()


class ComputationCache(Generic[C]):
    """LRU cache from `Key` to a computation. Thread-safe."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._entries: LRUCache[Key, C] = LRUCache(maxsize=capacity())
        self._lock = threading.RLock()

    def get(self, key: Key) -> C | None:
        # dict lookup: the hash finds the bucket, `Key.__eq__` then compares every part
        with self._lock:
            return self._entries.get(key)

    def add(self, key: Key, computation: C) -> C:
        """Insert unless another thread was first; return the computation that is in the cache now."""
        with self._lock:
            self._entries = _of_size(self._entries, self._capacity())
            return self._entries.setdefault(key, computation)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[C]:
        with self._lock:
            return iter(list(self._entries.values()))
