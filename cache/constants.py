"""Host constants that were uploaded already.

In: a host value as bytes with its type, and a function that uploads it. Out: the uploaded buffer.
Entries are read-only and never donated; keys compare bit by bit, so NaNs match themselves and 0.0 is not -0.0.
Which slot of a program a constant fills is decided elsewhere: this cache cannot change a program's key.
Source: torch/csrc/lazy/core/lazy_graph_executor.h, `DataCacheArena` (TensorHasher, TensorComparer, max_cache_size).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from cachetools import LRUCache

B = TypeVar("B")


@dataclass(frozen=True, slots=True)
class ConstantKey:
    """A host constant, compared bit by bit."""

    dtype: Hashable
    shape: tuple[int, ...]
    data: bytes


class DataCache(Generic[B]):
    """One device's constants, bounded in entries and in bytes. Thread-safe."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self.max_entries = max_entries
        # the value carries its size, because LRUCache asks for the size of a value, not of a key
        self._entries: LRUCache[ConstantKey, tuple[B, int]] = LRUCache(maxsize=max_bytes, getsizeof=lambda v: v[1])
        self._lock = threading.RLock()
        self.hits = 0
        self.misses = 0

    def get_device_data(self, key: ConstantKey, upload: Callable[[], B]) -> B:
        """The buffer for `key`, uploaded on a miss. A constant above the byte limit is uploaded but not kept."""
        with self._lock:
            found = self._entries.get(key)
            if found is not None:
                self.hits += 1
                return found[0]
            self.misses += 1
        buffer = upload()
        with self._lock:
            if len(key.data) <= self._entries.maxsize:
                self._entries[key] = (buffer, len(key.data))
                while len(self._entries) > self.max_entries:
                    self._entries.popitem()
        return buffer

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)


class DataCacheArena(Generic[B]):
    """One `DataCache` per device."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._limits = (max_entries, max_bytes)
        self._caches: dict[Hashable, DataCache[B]] = {}
        self._lock = threading.RLock()

    def get_data_cache(self, device: Hashable) -> DataCache[B]:
        with self._lock:
            cache = self._caches.get(device)
            if cache is None:
                cache = self._caches[device] = DataCache(*self._limits)
            return cache

    def counts(self) -> tuple[int, int]:
        """Hits and misses of all devices since the start."""
        with self._lock:
            caches = list(self._caches.values())
        return sum(cache.hits for cache in caches), sum(cache.misses for cache in caches)

    def clear(self) -> None:
        """Forget the constants of all devices, and the counts."""
        with self._lock:
            self._caches.clear()
