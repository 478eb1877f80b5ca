"""Compiled graphs on disk, so that the next process does not compile them again.

In: the settings `cache`, `cache_dir`, `cache_bytes`, `cache_readonly`. Out: the store that compiles use, or None.
A directory that cannot be trusted or used is refused with one warning, and everything works without a disk cache. A
full disk is handled in the same way.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lazy_backend.caching.disk import DiskCache
from lazy_backend.caching.folder import CacheRefused, default_directory
from lazy_backend.caching.process_locks import process_lock
from lazy_backend.errors import CacheWarning
from lazy_backend.errors.sites import warn_user
from lazy_backend.settings import config

Settings = tuple[bool, str | None, int, bool]

_lock = process_lock()
_opened: tuple[Settings, DiskCache | None] | None = None
_told_of: DiskCache | None = None  # the store whose failure the user was warned about


def current_store() -> DiskCache | None:
    """The disk cache that the settings ask for, opened at its first use."""
    global _opened
    settings = (config.cache, config.cache_dir, config.cache_bytes, config.cache_readonly)
    with _lock:
        if _opened is None or _opened[0] != settings:
            _earlier.update(_counts_of_store())
            _opened = (settings, _open(settings))
        store = _opened[1]
    if store is not None and store.first_failure is not None and store is not _told_of:
        _tell_of(store)
    return store


def _tell_of(store: DiskCache) -> None:
    """Warn once for each cache, since every step asks for the cache."""
    global _told_of
    _told_of = store
    warn_user(
        f"disk cache failed: {store.first_failure}\n  training goes on; what could not be kept is compiled again by "
        "the next process",
        CacheWarning,
    )


def _open(settings: Settings) -> DiskCache | None:
    wanted, directory, max_bytes, readonly = settings
    if not wanted:
        return None
    try:
        place = default_directory() if directory is None else Path(directory).expanduser()
        return DiskCache(place, max_bytes, readonly)
    except CacheRefused as refused:
        warn_user(f"{refused}\n  compiled graphs last as long as this process", CacheWarning)
        return None


# The counts of stores that were open before.
_earlier: Counter[str] = Counter()


def _counters() -> Counter[str]:
    return _earlier + _counts_of_store()


def _counts_of_store() -> Counter[str]:
    store = _opened[1] if _opened else None
    if store is None:
        return Counter()
    counts = store.counts()
    return Counter(
        DiskCacheHit=counts.hits,
        DiskCacheMiss=counts.misses,
        DiskCacheWrite=counts.writes,
        DiskCacheEviction=counts.evictions,
        DiskCacheCorrupt=counts.corrupt,
        DiskCacheError=counts.errors + counts.refused,
    )


_before: Counter[str] = Counter()


def read_counters() -> Counter[str]:
    counted = _counters()
    counted.subtract(_before)
    return counted


def reset_counters() -> None:
    _before.clear()
    _before.update(_counters())


def describe() -> dict[str, Any] | None:
    """The disk cache for a report: where it is, how full, and what this process did there; None if there is none."""
    store = _opened[1] if _opened else None
    if store is None:
        return None
    found: dict[str, Any] = {"place": str(store.directory), "limit": store.max_bytes, **asdict(store.counts())}
    try:
        return found | {"entries": sum(1 for _ in store), "bytes": store.total_bytes()}
    except (CacheRefused, OSError) as error:
        return found | {"error": str(error)}
