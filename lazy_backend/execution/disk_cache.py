"""Compiled graphs on disk, so that the next process does not compile them again.

In: the settings `cache`, `cache_dir`, `cache_dirs`, `cache_bytes`, `cache_readonly`. Out: the store that compiles use,
or None. A directory that cannot be trusted or used is refused with one warning, and everything works without it. A full
disk is handled in the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lazy_backend.cache.disk import DiskCache
from lazy_backend.cache.folder import CacheRefused, default_directory
from lazy_backend.cache.layers import Layers, LoadedEntries
from lazy_backend.cache.process_locks import process_lock
from lazy_backend.errors import CacheWarning
from lazy_backend.errors.sites import warn_user
from lazy_backend.settings import config

Settings = tuple[bool, str | None, tuple[str, ...], int, bool]

_lock = process_lock()
_opened: tuple[Settings, Layers] | None = None
untold_failures: list[str] = []  # of the caches in use, each one's first; every sync looks whether there are any

# What was loaded into this process and no folder could keep.
loaded_entries = LoadedEntries()
# The hashes of all keys that were looked up: what is there of them was used by this process, or made.
asked: dict[str, None] = {}

_expects_hits = False
_was_told_of_rejection = False


def artefact_layers() -> Layers:
    """The caches that the settings ask for, opened at their first use."""
    global _opened
    settings = (config.cache, config.cache_dir, config.cache_dirs, config.cache_bytes, config.cache_readonly)
    with _lock:
        if _opened is None or _opened[0] != settings:
            _earlier.update(_counts_of_layers())
            untold_failures.clear()
            _opened = (settings, _open(settings))
        layers = _opened[1]
    tell_of_failures()
    if layers.first_rejection is not None and _expects_hits:
        _tell_of_rejection(layers.first_rejection)
    return layers


def artefact_store() -> Layers | None:
    """The caches that the settings ask for; None if nothing can be found or kept."""
    layers = artefact_layers()
    return layers if layers.folders or loaded_entries else None


def current_store() -> DiskCache | None:
    """The user's own disk cache, if the settings ask for one."""
    return artefact_layers().own


def expects_hits() -> bool:
    """Whether somebody said that graphs were compiled already: by a folder to share, or by loading them."""
    return _expects_hits or bool(config.cache_dirs)


def expect_hits() -> None:
    """Graphs were loaded: from now on each is looked for at once, see Note [No step pays twice]."""
    global _expects_hits
    _expects_hits = True


def forget_loaded() -> None:
    """Forget what was loaded into this process and what was looked up."""
    global _expects_hits, _was_told_of_rejection
    _expects_hits = _was_told_of_rejection = False
    loaded_entries.clear()
    asked.clear()


def reset() -> None:
    """As after the import: no cache is open, and nothing was loaded, looked up or counted."""
    global _opened
    with _lock:
        _opened = None
        untold_failures.clear()
        _earlier.clear()
        _before.clear()
    forget_loaded()


def tell_of_failures() -> None:
    """Warn once for each cache that has failed."""
    while untold_failures:
        warn_user(
            f"disk cache failed: {untold_failures.pop(0)}\n  training goes on; what could not be kept is compiled "
            "again by the next process",
            CacheWarning,
        )


def _tell_of_rejection(reason: str) -> None:
    """Warn once: who loaded graphs would wonder why they are compiled, or interpreted, all the same."""
    global _was_told_of_rejection
    if not _was_told_of_rejection:
        _was_told_of_rejection = True
        warn_user(
            f"a compiled graph was found and cannot be used here: {reason}\n  it is compiled again; where it was made, "
            "the C library or the compiler's may be newer than here",
            CacheWarning,
        )


def _open(settings: Settings) -> Layers:
    wanted, directory, shared, max_bytes, readonly = settings
    if not wanted:
        return Layers(None, loaded_entries, (), asked)
    own = None
    try:
        place = default_directory() if directory is None else Path(directory).expanduser()
        own = DiskCache(place, max_bytes, readonly, on_failure=untold_failures.append)
    except CacheRefused as refused:
        warn_user(f"{refused}\n  compiled graphs last as long as this process", CacheWarning)
    return Layers(own, loaded_entries, tuple(_open_shared(shared)), asked)


def _open_shared(folders: tuple[str, ...]) -> Iterator[DiskCache]:
    for name in folders:
        place = Path(name).expanduser()
        try:
            if not place.exists():
                raise CacheRefused(
                    "there is no such folder", place, "correct LAZY_BACKEND_CACHE_DIRS or config.cache_dirs"
                )
            yield DiskCache(place, 0, readonly=True, shared=True, on_failure=untold_failures.append)
        except (CacheRefused, OSError) as refused:
            warn_user(f"{refused}\n  what it has is compiled again", CacheWarning)


# The counts of caches that were open before.
_earlier: Counter[str] = Counter()


def _counters() -> Counter[str]:
    return _earlier + _counts_of_layers()


def _counts_of_layers() -> Counter[str]:
    if _opened is None:
        return Counter()
    counts = _opened[1].counts()
    return Counter(
        DiskCacheHit=counts["hits"],
        DiskCacheHitBehind=counts["behind"],
        DiskCacheRejected=counts["rejected"],
        DiskCacheMiss=counts["misses"],
        DiskCacheWrite=counts["writes"],
        DiskCacheEviction=counts["evictions"],
        DiskCacheCorrupt=counts["corrupt"],
        DiskCacheError=counts["errors"] + counts["refused"],
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
    layers = _opened[1] if _opened else None
    store = layers.own if layers else None
    if layers is None or store is None:
        return None
    found: dict[str, Any] = {"place": str(store.directory), "limit": store.max_bytes, **asdict(store.counts())}
    counts = layers.counts()
    found |= {name: counts[name] for name in ("hits", "misses", "corrupt", "errors", "refused")}
    found |= {"behind": [str(folder.directory) for folder in layers.shared], "hits_behind": counts["behind"]}
    try:
        return found | {"entries": sum(1 for _ in store), "bytes": store.total_bytes()}
    except (CacheRefused, OSError) as error:
        return found | {"error": str(error)}
