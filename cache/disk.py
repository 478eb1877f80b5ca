"""The disk cache: what one process compiled is there for the next.

In: a canonical key and the bytes made for it. Out: the same bytes for exactly that key, or None.
One entry is one file, named by the key's hash; a hit compares the whole key (see `entry`). `get` and `put` never
raise, and `get` never returns a broken entry: failures are counted, and `last_error` describes the latest.

Note [Bound in bytes]
All files together are never larger than `max_bytes`. A writer takes the lock to make room, by evicting the least
recently used entries, and to create its temporary file at full length; then it writes without the lock. So files still
being written count, and so do files that a killed writer left, until they are old enough to be swept. Files are renamed
under the lock too, or another process that counts at that moment could miss a renamed file.
On a file system without locks, processes that write at the same moment can exceed the bound until the next `put`.

Note [Killed at any moment]
An entry gets its name, by `os.replace`, once all its bytes are on the disk. The kernel holds the lock and releases it
when the process ends. Readers take no lock: a file that is removed or replaced stays as it was for a reader that has
the file open.

Note [One maker]
Ranks of one program need the same entry at the same moment, and making one takes a core for half a minute. So whoever
is to make an entry holds a lock meanwhile, which the kernel releases when it dies; the others wait for it, within
bounds, and then find the entry. Without locks, or after too long, each makes its own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

from lazy_backend.cache.computation_cache import Key
from lazy_backend.cache.entry import (
    BrokenEntry,
    Header,
    check_payload,
    decode_key,
    encode_key,
    make_head,
    read_header,
    read_payload,
    split,
)
from lazy_backend.cache.folder import CacheRefused, Folder, Stored, open_folder, write_all

if TYPE_CHECKING:
    from filelock import FileLock

# A hit updates an entry's time of use only if that is older than this, so a loop over hits writes nothing. Seconds.
TOUCH_AFTER = 60.0
# A temporary file not written to for this long belongs to a dead process. Seconds; a write takes a few at most.
STALE_AFTER = 600.0
# The lock is held for milliseconds. A process that holds it for this long was stopped, and `put` gives up. Seconds.
LOCK_TIMEOUT = 2.0
LOCK_FILE = ".lock"
# Lock files for makers, of which each serves many keys: one for each key would have to be removed, by whoever is last.
_MAKERS = 1024

_ENTRY = re.compile(r"[0-9a-f]{32}\.entry")
_TEMPORARY = re.compile(r"[0-9a-f]{32}\.[0-9a-f]{32}\.tmp")
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


@dataclass(slots=True)
class DiskCounts:
    """Counts of one process. Every `get` is a hit or a miss; `corrupt`, `errors` and `refused` also count reasons."""

    hits: int = 0
    misses: int = 0
    writes: int = 0
    evictions: int = 0  # entries removed to keep the bound
    corrupt: int = 0  # broken entries met by `get`
    errors: int = 0  # calls that failed in the operating system
    refused: int = 0  # not private to the user, too large, or readonly


@dataclass(frozen=True, slots=True)
class Place:
    """What another process needs to write to the same cache."""

    directory: str
    max_bytes: int


Count = Literal["hits", "misses", "writes", "evictions", "corrupt", "errors", "refused"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry without its payload."""

    hash: str  # 32 hexadecimal digits, the name of its file
    key: Key
    size: int  # bytes of the file
    payload_size: int  # bytes
    created: float  # seconds since the epoch
    last_used: float  # likewise, at most `TOUCH_AFTER` too early


@dataclass(frozen=True, slots=True)
class Broken:
    """An entry that `verify` found broken."""

    hash: str
    reason: str


@dataclass(frozen=True, slots=True)
class Removed:
    """What `prune` or `clear` removed."""

    entries: int = 0
    bytes: int = 0  # temporary files included


class DiskCache:
    """Bytes by `Key` in one directory, with LRU eviction, shared by any number of threads and processes.

    Raises CacheRefused if the directory is not private to the user (see Note [Private folder]) or cannot be made.
    With `readonly` nothing is ever written, touched, locked or removed, and a missing directory is an empty cache.
    A readonly cache may be `shared`: it may belong to another user (see Note [Named folders]).
    `clock` gives seconds since the epoch. `on_failure` is called once, with the first thing that is counted as errors.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        max_bytes: int,
        readonly: bool = False,
        clock: Callable[[], float] = time.time,
        shared: bool = False,
        on_failure: Callable[[str], object] = lambda message: None,
    ) -> None:
        # absolute: the process may change its working directory
        self.directory = Path(directory).absolute()
        self.max_bytes = max_bytes
        self.readonly = readonly
        self.last_error: str | None = None  # the latest thing counted as corrupt, errors or refused
        self._on_failure: Callable[[str], object] | None = on_failure  # None once it was called
        self._clock = clock
        self._counts = DiskCounts()
        self._counting = threading.RLock()
        self._shared = shared
        self._folder = open_folder(self.directory, create=not readonly, shared=shared)

    def counts(self) -> DiskCounts:
        """A copy of the counters."""
        with self._counting:
            return replace(self._counts)

    def place(self) -> Place | None:
        """Where another process may `put`; None if the cache is readonly."""
        return None if self.readonly else Place(str(self.directory), self.max_bytes)

    def count_elsewhere(self, counts: DiskCounts, last_error: str | None) -> None:
        """Add the counts of another process that worked for this one."""
        with self._counting:
            for field in fields(DiskCounts):
                setattr(self._counts, field.name, getattr(self._counts, field.name) + getattr(counts, field.name))
        self.last_error = last_error or self.last_error
        if counts.errors:
            self._tell_of_failure(last_error or "")

    # ----- reading

    def get(self, key: Key) -> bytes | None:
        """The bytes last put for exactly this key. Never raises."""
        payload = None
        with self._counted_failures():
            folder = self._current_folder()
            if folder is not None:
                payload = self._get(folder, key)
        self._count("misses" if payload is None else "hits")
        return payload

    def _get(self, folder: Folder, key: Key) -> bytes | None:
        name = _entry_name(key)
        try:
            file = folder.open(name)
        except FileNotFoundError:
            return None
        with file:
            try:
                payload = _read(file, key)
            except BrokenEntry as error:
                self._fail("corrupt", f"{folder.path / name}: {error}")
                self._discard(folder, name, file)
                return None
            if payload is not None:
                self._touch(folder, name, file)
            return payload

    def has(self, key: Key) -> bool:
        """Whether there is an entry for exactly this key. Its payload is not read, and no hit is counted."""
        with self._counted_failures(), contextlib.suppress(FileNotFoundError, BrokenEntry):
            folder = self._current_folder()
            if folder is not None:
                with folder.open(_entry_name(key)) as file:
                    header = read_header(file, os.fstat(file.fileno()).st_size)
                return header is not None and header.key == encode_key(key)
        return False

    def _discard(self, folder: Folder, name: str, file: BinaryIO) -> None:
        # another process may have replaced the entry by now
        if not self.readonly and folder.holds(name, os.fstat(file.fileno())):
            folder.remove(name)

    def _touch(self, folder: Folder, name: str, file: BinaryIO) -> None:
        now = self._clock()
        # abs(): a time in the future, from before the clock was corrected, would keep the entry forever
        if self.readonly or abs(now - os.fstat(file.fileno()).st_mtime) < TOUCH_AFTER:
            return
        folder.set_time(name, file.fileno(), now)

    # ----- writing

    def put(self, key: Key, payload: bytes) -> bool:
        """Keep `payload` for `key`, replacing any earlier entry. Returns whether the payload was kept; never raises."""
        if self.readonly:
            self._fail("refused", f"{self.directory}: the cache is readonly")
            return False
        kept = False
        with self._counted_failures():
            folder = self._current_folder()
            assert folder is not None, "a writable cache makes its directory"
            head = make_head(encode_key(key), payload, self._clock())
            if len(head) + len(payload) > self.max_bytes:
                size = len(head) + len(payload)
                self._fail("refused", f"{_entry_name(key)}: {size} bytes do not fit into a cache of {self.max_bytes}")
            else:
                self._put(folder, _entry_name(key), (head, payload))
                kept = True
        if kept:
            self._count("writes")
        return kept

    def _put(self, folder: Folder, name: str, content: tuple[bytes, ...]) -> None:
        temporary = f"{name.partition('.')[0]}.{uuid.uuid4().hex}.tmp"
        try:
            descriptor = self._create(folder, name, temporary, sum(map(len, content)))
            try:
                _write(descriptor, content)
                folder.set_time(temporary, descriptor, self._clock())
            finally:
                os.close(descriptor)
            with self._locked(folder):
                folder.replace(name, by=temporary)
        except BaseException:
            folder.remove(temporary)
            raise

    def _create(self, folder: Folder, name: str, temporary: str, size: int) -> int:
        """The descriptor of a new file of `size` bytes. See Note [Bound in bytes]."""
        with self._locked(folder):
            self._make_room(folder, name, size)
            descriptor = folder.create(temporary)
            try:
                os.ftruncate(descriptor, size)
            except BaseException:
                os.close(descriptor)
                raise
            return descriptor

    def _make_room(self, folder: Folder, name: str, size: int) -> None:
        files = self._swept(folder)
        excess = sum(file.size for file in files) + size - self.max_bytes
        if excess <= 0:
            return
        # the entry that is about to be replaced is removed first
        for file in sorted(_entries(files), key=lambda file: (file.name != name, file.modified)):
            if folder.remove(file.name):
                if file.name != name:
                    self._count("evictions")
                excess -= file.size
            if excess <= 0:
                return
        raise OSError(errno.ENOSPC, "other writers' temporary files take all of the cache", str(folder.path))

    def _swept(self, folder: Folder) -> list[Stored]:
        """The cache's files, after removing those of dead writers."""
        now = self._clock()
        files = [file for file in folder.files() if _is_ours(file)]
        stale = {f for f in files if _TEMPORARY.fullmatch(f.name) and abs(now - f.modified) > STALE_AFTER}
        return [file for file in files if file not in stale or not folder.remove(file.name)]

    @contextlib.contextmanager
    def _locked(self, folder: Folder) -> Iterator[None]:
        lock = _acquired(folder, LOCK_FILE, LOCK_TIMEOUT, 0.002)
        try:
            yield
        finally:
            lock.release()

    @contextlib.contextmanager
    def made_once(self, key: Key, patience: float, lock_name: str = "") -> Iterator[bytes | None]:
        """Within the block no other process makes the entry for `key`; gives the entry if one did so meanwhile.

        See Note [One maker]. Waits at most `patience` seconds, and never raises. An entry that is there already is one
        that the caller cannot use. `lock_name`: of entries that take so long that none of another kind may wait.
        """
        from filelock import Timeout

        found, lock = None, None
        was_there = self.has(key)
        if not self.readonly and not was_there:
            with self._counted_failures(), contextlib.suppress(Timeout):
                folder = self._current_folder()
                if folder is not None:
                    name = lock_name or f"{int(key.hash_hex()[:8], 16) % _MAKERS:04}"
                    lock = _acquired(folder, f".making-{name}", patience, 0.02)
        try:
            if not was_there and self.has(key):
                found = self.get(key)
            yield found
        finally:
            if lock is not None:
                lock.release()

    # ----- for people and tools: these raise CacheRefused and OSError

    def __iter__(self) -> Iterator[Entry]:
        """Every entry that can be read, the most recently used first. Reads keys but no payloads."""
        folder = self._current_folder()
        if folder is None:
            return
        for file in sorted(_entries(folder.files()), key=lambda file: -file.modified):
            with contextlib.suppress(OSError, BrokenEntry, CacheRefused), folder.open(file.name) as opened:
                header = read_header(opened, os.fstat(opened.fileno()).st_size)
                if header is not None:
                    yield _entry(file, header)

    def whole(self, hash: str) -> bytes | None:
        """All bytes of the entry with this hash, checked; None if it is gone. Raises `BrokenEntry` too."""
        folder = self._current_folder()
        if folder is None:
            return None
        try:
            with folder.open(f"{hash}.entry") as file:
                entry = file.read()
        except FileNotFoundError:
            return None
        split(entry)
        return entry

    def start_of_payload(self, hash: str, max_bytes: int) -> bytes:
        """The first bytes of the payload of an entry, which are not checked; none if it is gone."""
        folder = self._current_folder()
        with contextlib.suppress(FileNotFoundError, BrokenEntry):
            if folder is not None:
                with folder.open(f"{hash}.entry") as file:
                    header = read_header(file, os.fstat(file.fileno()).st_size)
                    return b"" if header is None else file.read(min(max_bytes, header.payload_bytes))
        return b""

    def total_bytes(self) -> int:
        """The size of all files, temporary ones included."""
        folder = self._current_folder()
        return sum(file.size for file in folder.files() if _is_ours(file)) if folder is not None else 0

    def prune(self, max_bytes: int | None = None, max_age: float | None = None) -> Removed:
        """Remove entries unused for more than `max_age` seconds, then the least recently used beyond `max_bytes`."""
        now = self._clock()

        def is_victim(file: Stored, total: int) -> bool:
            too_old = max_age is not None and now - file.modified > max_age
            return too_old or (max_bytes is not None and total > max_bytes)

        return self._remove(is_victim)

    def clear(self) -> Removed:
        """Remove everything, including files being written: their writers fail and count an error."""
        return self._remove(lambda file, total: True, temporaries=True)

    def _remove(self, is_victim: Callable[[Stored, int], bool], temporaries: bool = False) -> Removed:
        """Remove the entries for which `is_victim` is true, oldest first. Its second argument: the bytes still left."""
        folder = self._current_folder()
        if folder is None or self.readonly:
            return Removed()
        entries, freed = 0, 0
        with self._locked(folder):
            before = sum(file.size for file in folder.files() if _is_ours(file))
            files = self._swept(folder)
            freed = before - sum(file.size for file in files)
            candidates = files if temporaries else _entries(files)
            for file in sorted(candidates, key=lambda file: file.modified):
                if is_victim(file, before - freed) and folder.remove(file.name):
                    entries += bool(_ENTRY.fullmatch(file.name))
                    freed += file.size
        return Removed(entries, freed)

    def verify(self, remove: bool = False) -> list[Broken]:
        """Read every entry from end to end, a megabyte at a time. Returns the broken ones; removes them if `remove`."""
        folder = self._current_folder()
        if folder is None:
            return []
        broken = []
        for file in _entries(folder.files()):
            fault = _fault(folder, file.name)
            if fault is not None:
                broken.append(Broken(_hash(file.name), fault))
                if remove and not self.readonly:
                    folder.remove(file.name)
        return broken

    # ----- internals

    def _current_folder(self) -> Folder | None:
        """The open directory, checked; made anew if it was removed. None if it is missing and the cache is readonly."""
        folder = self._folder
        if folder is None or folder.is_gone():
            # reads and writes under way keep the old directory open until they are done
            folder = self._folder = open_folder(self.directory, create=not self.readonly, shared=self._shared)
        else:
            folder.check()
        return folder

    @contextlib.contextmanager
    def _counted_failures(self) -> Iterator[None]:
        try:
            yield
        except CacheRefused as error:
            self._fail("refused", str(error))
        except (OSError, MemoryError) as error:
            self._fail("errors", f"{self.directory}: {error}")

    def _fail(self, count: Count, message: str) -> None:
        self.last_error = message
        if count == "errors":
            self._tell_of_failure(message)
        self._count(count)

    def _tell_of_failure(self, message: str) -> None:
        tell, self._on_failure = self._on_failure, None
        if tell is not None:
            tell(message)

    def _count(self, name: Count) -> None:
        with self._counting:
            setattr(self._counts, name, getattr(self._counts, name) + 1)


def _acquired(folder: Folder, name: str, timeout: float, interval: float) -> FileLock:
    """A lock file of `folder`, held; on a file system without locks it is not. Raises `Timeout` after `timeout` s."""
    from filelock import FileLock  # takes 30 ms, and reading does not need it

    # a new lock object each time, 30 µs, since one does not survive a fork.
    # No soft lock, which is a file that a dead process leaves behind; see Note [Bound in bytes] for the effect
    lock = FileLock(folder.path / name, timeout, 0o600, poll_interval=interval, fallback_to_soft=False)
    try:
        lock.acquire()
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return lock


def _read(file: BinaryIO, key: Key) -> bytes | None:
    """The payload; None if the entry belongs to another key with the same hash, or has another format."""
    header = read_header(file, os.fstat(file.fileno()).st_size)
    if header is None or header.key != encode_key(key):
        return None
    return read_payload(file, header)


def _write(descriptor: int, content: tuple[bytes, ...]) -> None:
    """Write all of `content` to the disk itself: after a power cut, no name leads to bytes that were never written."""
    write_all(descriptor, content)
    os.fsync(descriptor)


def _fault(folder: Folder, name: str) -> str | None:
    """What is wrong with an entry. None if nothing is, or if another process removed it."""
    try:
        with folder.open(name) as file:
            header = read_header(file, os.fstat(file.fileno()).st_size)
            if header is None:
                return None
            check_payload(file, header)
            key = decode_key(header.key)
    except FileNotFoundError:
        return None
    except (BrokenEntry, CacheRefused, OSError) as error:
        return str(error)
    return None if key.hash_hex() == _hash(name) else "named by another hash than its key's"


def _entry(file: Stored, header: Header) -> Entry:
    key = decode_key(header.key)
    return Entry(_hash(file.name), key, file.size, header.payload_bytes, header.created, file.modified)


def _entry_name(key: Key) -> str:
    return f"{key.hash_hex()}.entry"


def _hash(name: str) -> str:
    return name.partition(".")[0]


def _entries(files: list[Stored]) -> list[Stored]:
    return [file for file in files if _ENTRY.fullmatch(file.name)]


def _is_ours(file: Stored) -> bool:
    return bool(_ENTRY.fullmatch(file.name) or _TEMPORARY.fullmatch(file.name))
