"""One cache over several: the user's own, behind it entries that were loaded into this process, then shared folders.

In: keys. Out: what the first of them has. Only the user's own cache is ever written.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

from lazy_backend.cache.computation_cache import Key
from lazy_backend.cache.disk import DiskCache, DiskCounts, Place
from lazy_backend.cache.entry import BrokenEntry, encode_key, split
from lazy_backend.cache.folder import CacheRefused

Read = Callable[[], bytes]  # the bytes of a whole entry. Raises `BrokenEntry` and OSError


class LoadedEntries:
    """Entries for this process alone, where the user's own cache could not keep them. Thread-safe."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[Key, Read]] = {}

    def add(self, key: Key, read: Read) -> None:
        self._entries[key.hash_hex()] = key, read

    def get(self, key: Key) -> bytes | None:
        """The payload for exactly this key. Never raises."""
        try:
            entry = self.whole(key.hash_hex())
            if entry is None:
                return None
            header, payload = split(entry)
        except (BrokenEntry, OSError):  # the file that it came from was changed since
            return None
        return payload if header.key == encode_key(key) else None

    def whole(self, hash: str) -> bytes | None:
        """All bytes of the entry with this hash, checked; None if there is none. Raises `BrokenEntry` and OSError."""
        found = self._entries.get(hash)
        return None if found is None else found[1]()

    def clear(self) -> None:
        self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[tuple[str, Key]]:
        """The hash and the key of each entry."""
        return iter([(hash, key) for hash, (key, _) in list(self._entries.items())])


class Layers:
    """The caches of a process in the order in which they are asked. `get` and `put` never raise. Thread-safe.

    `folders`: those on disk, the user's own first. `asked`: gets the hash of every key that is looked up; those of them
    that are there later were used or made by this process.
    """

    def __init__(
        self, own: DiskCache | None, loaded: LoadedEntries, shared: Sequence[DiskCache], asked: dict[str, None]
    ) -> None:
        self.own = own
        self.loaded = loaded
        self.shared = tuple(shared)
        self.first_rejection: str | None = None
        self.folders = self.shared if own is None else (own, *shared)
        self._behind: tuple[LoadedEntries | DiskCache, ...] = (loaded, *shared)
        self._asked = asked
        self._counts: Counter[str] = Counter()
        self._lock = threading.RLock()

    def is_empty(self) -> bool:
        """Whether nothing can be found or kept here."""
        return not self.folders and not self.loaded

    def get(self, key: Key) -> bytes | None:
        """The bytes last put for exactly this key, by whomever."""
        self._asked[key.hash_hex()] = None
        payload = None if self.own is None else self.own.get(key)
        if payload is not None:
            self._count("hits")
            return payload
        for layer in self._behind:
            payload = layer.get(key)
            if payload is not None:
                self._count("hits", "behind")
                return payload
        self._count("misses")
        return None

    def reject(self, reason: str) -> None:
        """Count a payload that `get` gave and that nothing can be made of."""
        self.first_rejection = self.first_rejection or reason
        self._count("rejected")

    def put(self, key: Key, payload: bytes) -> bool:
        """Keep `payload` in the user's own cache. Returns whether it was kept."""
        return self.own is not None and self.own.put(key, payload)

    def place(self) -> Place | None:
        """Where another process may `put`; None if nothing can be kept."""
        return None if self.own is None else self.own.place()

    def count_elsewhere(self, counts: DiskCounts, last_error: str | None) -> None:
        """Add the counts of another process that put something into the user's own cache for this one."""
        if self.own is not None:
            self.own.count_elsewhere(counts, last_error)

    def counts(self) -> Counter[str]:
        """Fields of `DiskCounts`, summed up; of the hits, those "behind" the own cache, and those "rejected"."""
        found: Counter[str] = Counter()
        for layer in self.folders:
            found.update(asdict(layer.counts()))
        with self._lock:
            for name in ("hits", "misses", "behind", "rejected"):
                found[name] = self._counts[name]
        return found

    def whole(self, hash: str) -> bytes | None:
        """All bytes of the entry with this hash, from the first that has it whole; None if none has.

        Raises what the last reading raised, if none has it but one should.
        """
        error: Exception | None = None
        layers: tuple[LoadedEntries | DiskCache, ...] = (*self.folders, self.loaded)
        for layer in layers:
            try:
                entry = layer.whole(hash)
            except (BrokenEntry, CacheRefused, OSError) as failed:
                error = failed
                continue
            if entry is not None:
                return entry
        if error is not None:
            raise error
        return None

    def _count(self, *names: str) -> None:
        with self._lock:
            self._counts.update(names)
