"""Compiled graphs into a file and out of it.

In: a path, and the caches that the settings ask for. Out: a file; or graphs in the user's own cache, or in this
process where that cannot keep them.

Note [What is loaded]
A graph gets into the cache only if its bytes match their checksums and its key says that it was made for this
installation and this processor. A lookup then compares the whole key once more, and the loader what the artefact itself
says. What does not fit is skipped, whatever else is in the file; what is in the cache already stays as it is.
Checksums find damage, not malice: an artefact is code, so to load a file is to trust who made it (see Note [Named
folders]).
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from lazy_backend import metrics
from lazy_backend.cache.archive import Archive, BrokenArchive, new_archive
from lazy_backend.cache.computation_cache import Key
from lazy_backend.cache.disk import DiskCache
from lazy_backend.cache.entry import BrokenEntry, decode_key, split
from lazy_backend.cache.folder import CacheRefused
from lazy_backend.cache.layers import Layers, Read
from lazy_backend.cache.reports import ExportReport, LoadReport
from lazy_backend.errors import CacheError, CacheWarning
from lazy_backend.errors.sites import warn_user
from lazy_backend.execution.disk_cache import artefact_layers, asked, expect_hits, loaded_entries
from lazy_backend.lowering.artefacts.artefact import kind_of
from lazy_backend.lowering.artefacts.environment import misfit, other_settings
from lazy_backend.lowering.plans.profiling import pending_compiles

Which = Literal["fitting", "used", "all"]

SERVED = "served function"  # names the entries of an archive that are no plans, see `served_file`
_DAMAGED = "damaged"
_REMOVED = "removed by another process meanwhile"


def export(path: str | os.PathLike[str], which: Which = "fitting") -> ExportReport:
    """Write compiled graphs to one file, for `load` on other machines.

    Args:
        path: The file. It gets its name once it is complete; an earlier file stays whole until then, and stays
            altogether if the export fails or is interrupted.
        which: "fitting": all in the cache that this installation can use, from earlier programs too. "used": of these,
            those that this process loaded or made. "all": also what was made for other versions or processors, as in a
            home directory that many machines share.

    Returns:
        How many graphs there are in the file, and how many were left out and why. Print it.

    Raises:
        CacheError: There is no disk cache to export.
        OSError: The file cannot be written, as on a full disk.
    """
    if which not in ("fitting", "used", "all"):
        raise ValueError(f"which={which!r}: expected 'fitting', 'used' or 'all'")
    layers = artefact_layers()
    if layers.is_empty():
        raise CacheError(
            "there is no disk cache to export\n  set config.cache, and config.cache_dir to a folder of your own"
        )
    skipped: Counter[str] = Counter()
    with _errors_of_user(), new_archive(Path(path).expanduser(), description()) as file:
        for hash, key in _found(layers, which):
            reason = None if which == "all" else misfit(key)
            if reason is None:
                reason = _add(hash, layers, file.add)
            if reason is not None:
                skipped[reason] += 1
    return ExportReport(os.fspath(path), file.num_entries, file.num_bytes, dict(skipped), pending_compiles())


def _found(layers: Layers, which: Which) -> Iterator[tuple[str, Key]]:
    """Hash and key of each graph, once."""
    seen: set[str] = set()
    wanted = asked if which == "used" else None
    for folder in layers.folders:
        for entry in folder:
            if entry.hash not in seen and (wanted is None or entry.hash in wanted):
                seen.add(entry.hash)
                yield entry.hash, entry.key
    for hash, key in layers.loaded:
        if hash not in seen and (wanted is None or hash in wanted):
            yield hash, key


def _add(hash: str, layers: Layers, add: Callable[[bytes], object]) -> str | None:
    """Give the whole entry to `add`. Returns why that cannot be done."""
    try:
        entry = layers.whole(hash)
    except (BrokenEntry, CacheRefused):
        return _DAMAGED
    except OSError as error:
        return f"not readable: {error.strerror}"
    if entry is None:
        return _REMOVED
    add(entry)
    return None


def load(path: str | os.PathLike[str]) -> LoadReport:
    """Take the graphs of a file that `export` wrote into the cache, so that nothing need be compiled.

    They go to the user's own cache; where that cannot keep them (a read-only home, a full disk, `config.cache` off),
    they are read from the file for as long as this process lives. Call it before the first step: graphs are then looked
    for as soon as they recur, and those that are found need no C++ compiler. To load a file again costs little.

    What cannot be used is skipped and counted with its reason: what was made for another PyTorch, Python, processor or
    version of this package, what is damaged, all after the place where a file is cut off. Nothing of that raises; if
    the file is damaged, or none of its graphs can be used, there is a `CacheWarning`.

    A compiled graph is code that will run in this process. Load only files from people whose code you would run: the
    checksums find damage, not malice.

    Raises:
        CacheError: Somebody else than the file's owner could have written it.
        OSError: The file is not there, or cannot be read.
    """
    loading = _Loading(artefact_layers())
    made_on = ""
    try:
        with _errors_of_user():
            archive = Archive(Path(path).expanduser())
        made_on = str(archive.description.get("machine", ""))
        for packed in archive:
            if SERVED not in dict(packed.key.parts):
                loading.take(packed.key, partial(archive.read, packed))
    except BrokenArchive as broken:
        loading.skip(f"{_DAMAGED} file: {broken}")
    report = loading.finish(os.fspath(path), made_on)
    is_damaged = any(reason.startswith(_DAMAGED) for reason in report.skipped)
    if is_damaged or (report.skipped and not report.graphs):
        warn_user(f"compiled graphs not loaded, or not all of them: {report}", CacheWarning)
    return report


def take_entry(entry: bytes) -> None:
    """Take one whole entry into the cache, as `load` does. Never raises; what is skipped is counted."""
    loading = _Loading(artefact_layers())
    try:
        key = decode_key(split(entry)[0].key)
    except BrokenEntry:
        loading.skip(_DAMAGED)
    else:
        loading.take(key, lambda: entry)
    loading.finish()


def used_entries() -> Iterator[tuple[str, bytes]]:
    """Hash and bytes of the entries that this process used or made, as far as they are there."""
    layers = artefact_layers()
    for hash in list(asked):
        found: list[bytes] = []
        if _add(hash, layers, found.append) is None:
            yield hash, found[0]


class _Loading:
    """Graphs on their way into the cache. See Note [What is loaded]."""

    def __init__(self, layers: Layers) -> None:
        self._own: DiskCache | None = layers.own
        self._known = 0
        self._kept: list[tuple[Key, Read]] = []
        self._held = 0
        self._why_held: str | None = None
        self._skipped: Counter[str] = Counter()
        self._other_settings: Counter[str] = Counter()

    def skip(self, reason: str) -> None:
        self._skipped[reason] += 1

    def take(self, key: Key, read: Read) -> None:
        """Take one graph. `read` gives the whole entry, now and later."""
        reason = misfit(key)
        if reason is not None:
            self.skip(reason)
            return
        is_known = self._own is not None and self._own.has(key)
        try:
            payload = b"" if is_known else split(read())[1]
        except (BrokenEntry, OSError):
            self.skip(_DAMAGED)
            return
        if not is_known and kind_of(payload) is None:
            self.skip("no compiled graph")
            return
        self._other_settings.update(other_settings(key))
        if is_known:
            self._known += 1
        elif self._own is not None and not self._own.readonly and self._own.put(key, payload):
            self._kept.append((key, read))
        else:
            why = None if self._own is None else self._own.last_error
            is_readonly = self._own is not None and self._own.readonly
            self._hold(key, read, "config.cache_readonly is set" if is_readonly else why)

    def _hold(self, key: Key, read: Read, why: str | None) -> None:
        loaded_entries.add(key, read)
        self._held += 1
        self._why_held = why

    def finish(self, path: str = "", made_on: str = "") -> LoadReport:
        """Count, and hold what had to make room in the cache for the rest."""
        if self._own is not None:
            evicted = [(key, read) for key, read in self._kept if not self._own.has(key)]
            for key, read in evicted:
                self._hold(key, read, f"config.cache_bytes = {self._own.max_bytes} leaves no room")
            self._kept = [one for one in self._kept if one not in evicted]
        graphs = self._known + len(self._kept) + self._held
        metrics.increment("CacheLoaded", graphs)
        for reason, number in self._skipped.items():
            metrics.increment(f"CacheSkipped: {reason}", number)
        if graphs:
            expect_hits()
        return LoadReport(
            path=path,
            graphs=graphs,
            known=self._known,
            held=self._held,
            skipped=dict(self._skipped),
            kept_in=None if self._own is None else str(self._own.directory),
            why_held=self._why_held,
            other_settings=dict(self._other_settings),
            made_on=made_on,
        )


@contextlib.contextmanager
def _errors_of_user() -> Iterator[None]:
    try:
        yield
    except CacheRefused as refused:
        raise CacheError(str(refused)) from None


def description() -> dict[str, Any]:
    """Who made a file, for people. What decides is in the key of each graph."""
    return {
        "machine": f"{_processor_name()}, PyTorch {torch.__version__}, Python {platform.python_version()}",
        "created": time.time(),
    }


def _processor_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
