"""Many entries in one file, which travels from machine to machine.

In: entries as bytes, as `entry` makes them. Out: a file; and from a file the same entries, or why they cannot be read.
Every byte is covered by a checksum. An entry that is damaged, or a file that is cut off, costs only what it hits.

| field | type | |
|---|---|---|
| magic, format | 8 bytes, u32 | |
| description | u64, 32 bytes | its length in bytes, and BLAKE2b of all above and of the text |
| description | | JSON: who made the file, where, when |
| entries | | one after the other; the header of each says how long it is |
| end | 8 bytes, u64, 32 bytes | magic, number of entries, BLAKE2b of both |
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import threading
import uuid
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from lazy_backend.cache.computation_cache import Key
from lazy_backend.cache.entry import BrokenEntry, decode_key, read_header, split
from lazy_backend.cache.folder import open_named_file, write_all

FORMAT = 1

_MAGIC, _END_MAGIC = b"LAZYPACK", b"LAZYDONE"
_PREFIX = struct.Struct("<8sI")  # the same in every format
_START = struct.Struct("<8sIQ")
_END = struct.Struct("<8sQ")
_DIGEST_BYTES = 32
_MAX_DESCRIPTION = 1 << 20  # bytes


class BrokenArchive(Exception):
    """From here on, the file cannot be read: it is no archive, of another format, cut off, or changed."""


# ----- writing


class ArchiveWriter:
    """A file being written. Made by `new_archive`."""

    def __init__(self, descriptor: int, description: dict[str, Any]) -> None:
        self._descriptor = descriptor
        self.num_entries = 0
        text = json.dumps(description).encode()
        start = _START.pack(_MAGIC, FORMAT, len(text))
        self.num_bytes = self._write(start, _digest(start, text), text)

    def add(self, entry: bytes) -> None:
        """Append a whole entry."""
        self.num_bytes += self._write(entry)
        self.num_entries += 1

    def finish(self) -> None:
        end = _END.pack(_END_MAGIC, self.num_entries)
        self.num_bytes += self._write(end, _digest(end))
        os.fsync(self._descriptor)

    def _write(self, *parts: bytes) -> int:
        write_all(self._descriptor, parts)
        return sum(map(len, parts))


@contextlib.contextmanager
def new_archive(path: Path, description: dict[str, Any]) -> Iterator[ArchiveWriter]:
    """A new file that takes the place of `path` when the block ends, at once. If the block raises, nothing is left.

    Raises OSError, which names `path`.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        if target.exists() and not target.is_file():
            raise OSError(f"{path} is there, and no plain file\n  name a file that may be written")
        # readable by all, as far as the umask allows, and never writable by others: such a file would not be loaded
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o644)
        try:
            writer = ArchiveWriter(descriptor, description)
            yield writer
            writer.finish()
        finally:
            os.close(descriptor)
        os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename in (None, str(temporary)):
            error.filename, error.filename2 = str(path), None
        raise


# ----- reading


@dataclass(frozen=True, slots=True)
class Packed:
    """One entry in an archive."""

    key: Key
    place: int  # of its first byte in the file
    size: int  # bytes


class Archive:
    """An open file. Its entries can be read from any thread, in any order. Raises `BrokenArchive`.

    Made from a path: see `open_named_file` for what else is raised.
    """

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = open_named_file(path)
        weakref.finalize(self, self._file.close)
        self._lock = threading.RLock()  # over the file's position
        self.num_bytes = os.fstat(self._file.fileno()).st_size
        self.description, self._start = self._read_start()

    def _read_start(self) -> tuple[dict[str, Any], int]:
        start = self._file.read(_START.size)
        if not start.startswith(_MAGIC):
            raise BrokenArchive("no file of compiled graphs")
        if len(start) < _START.size:
            raise BrokenArchive("cut off")
        found = _PREFIX.unpack_from(start)[1]
        if found != FORMAT:
            raise BrokenArchive(f"of format {found}, from another version of lazy_backend: this one reads {FORMAT}")
        size = _START.unpack(start)[2]
        digest = self._file.read(_DIGEST_BYTES)
        text = self._file.read(min(size, _MAX_DESCRIPTION))
        if _digest(start, text) != digest:
            raise BrokenArchive("damaged in its first lines, or cut off there")
        try:
            description = json.loads(text)
        except (ValueError, RecursionError):
            description = {}
        return description if isinstance(description, dict) else {}, self._file.tell()

    def __iter__(self) -> Iterator[Packed]:
        """The entries in their order. Raises `BrokenArchive` where the rest cannot be read."""
        place = self._start
        count = 0
        while not self._ends_at(place, count):
            with self._lock:
                self._file.seek(place)
                try:
                    header = read_header(self._file, self.num_bytes - place, is_alone=False)
                except BrokenEntry as error:
                    raise BrokenArchive(f"damaged or cut off: {error}") from error
            if header is None:
                raise BrokenArchive("an entry is of another format, from another version of lazy_backend")
            try:
                key = decode_key(header.key)
            except BrokenEntry as error:
                raise BrokenArchive(str(error)) from error
            yield Packed(key, place, header.entry_bytes)
            place += header.entry_bytes
            count += 1

    def _ends_at(self, place: int, count: int) -> bool:
        with self._lock:
            self._file.seek(place)
            end = self._file.read(_END.size + _DIGEST_BYTES)
        if not end:
            raise BrokenArchive("cut off")
        expected = _END.pack(_END_MAGIC, count)
        return end == expected + _digest(expected)

    def read(self, packed: Packed) -> bytes:
        """The bytes of an entry, checked. Raises `BrokenEntry` and OSError."""
        with self._lock:
            self._file.seek(packed.place)
            entry = self._file.read(packed.size)
        split(entry)
        return entry


def _digest(*texts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(texts), digest_size=_DIGEST_BYTES).digest()
