"""The bytes of one entry of the disk cache.

In: a key and a payload. Out: a file's bytes; and from a file the same key and payload, or `BrokenEntry`.
Every byte is covered by a checksum, and the key can be read without the payload.

| field          | type | |
|---|---|---|
| magic, format  | 8 bytes, u32 | an entry of another format is not an error: `read_header` returns None |
| created        | f64  | seconds since the epoch |
| key, payload   | u64, u64 | their lengths in bytes |
| payload digest | 32 bytes | BLAKE2b |
| header digest  | 32 bytes | BLAKE2b of all above and the key |
| key            | | JSON, a list of (name, text) |
| payload        | | |
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
from dataclasses import dataclass
from typing import BinaryIO

from lazy_backend.cache.computation_cache import Key

FORMAT = 1

_MAGIC = b"LAZYDISK"
_PREFIX = struct.Struct("<8sI")  # the same in every format
_FIXED = struct.Struct("<8sIdQQ32s")
_DIGEST_BYTES = 32
_CHUNK = 1 << 20


class BrokenEntry(Exception):
    """The file is not what was written: cut off, or changed."""


@dataclass(frozen=True, slots=True)
class Header:
    """All of an entry but its payload."""

    created: float  # seconds since the epoch
    key: bytes  # as `encode_key` made it
    payload_bytes: int
    payload_digest: bytes

    @property
    def entry_bytes(self) -> int:
        """The length of the whole entry."""
        return _FIXED.size + _DIGEST_BYTES + len(self.key) + self.payload_bytes


def encode_key(key: Key) -> bytes:
    """The key as bytes: one encoding per key and one key per encoding, so that comparing bytes compares keys."""
    return json.dumps(key.parts, ensure_ascii=False, separators=(",", ":")).encode()


def decode_key(encoded: bytes) -> Key:
    """The key of an entry. Raises `BrokenEntry`: a checksum only says that the bytes are those that somebody wrote."""
    try:
        parts = tuple((name, text) for name, text in json.loads(encoded))
    except (ValueError, TypeError, RecursionError):
        raise BrokenEntry("its key cannot be read") from None
    _check(all(isinstance(part, str) for both in parts for part in both), "its key cannot be read")
    return Key(parts)


def make_head(encoded_key: bytes, payload: bytes, created: float) -> bytes:
    """All bytes before the payload."""
    fixed = _FIXED.pack(_MAGIC, FORMAT, created, len(encoded_key), len(payload), _digest(payload))
    return fixed + _digest(fixed, encoded_key) + encoded_key


def read_header(file: BinaryIO, file_bytes: int, is_alone: bool = True) -> Header | None:
    """The header of a file of `file_bytes` bytes, read up to its payload. None if the file has another format.

    Not `is_alone`: the entry may end before the file does.
    """
    fixed = file.read(_FIXED.size)
    _check_magic(fixed)
    if _PREFIX.unpack_from(fixed)[1] != FORMAT:
        return None
    digest = file.read(_DIGEST_BYTES)
    _check(len(digest) == _DIGEST_BYTES, "cut off within its header")
    _, _, created, key_bytes, payload_bytes, payload_digest = _FIXED.unpack(fixed)
    expected = len(fixed) + len(digest) + key_bytes + payload_bytes
    # checked before any length from the file is used for a read: a flipped bit must not ask for terabytes
    fits = file_bytes == expected if is_alone else file_bytes >= expected
    _check(fits, f"{file_bytes} bytes long, {expected} by its header")
    key = file.read(key_bytes)
    _check(_digest(fixed, key) == digest, "header and key do not match their checksum")
    return Header(created, key, payload_bytes, payload_digest)


def read_payload(file: BinaryIO, header: Header) -> bytes:
    """The payload, from a file that `read_header` has just read."""
    payload = file.read(header.payload_bytes)
    _check(_digest(payload) == header.payload_digest, "payload does not match its checksum")
    return payload


def split(entry: bytes) -> tuple[Header, bytes]:
    """Header and payload of a whole entry. Raises `BrokenEntry`, for another format too."""
    file = io.BytesIO(entry)
    header = read_header(file, len(entry))
    if header is None:
        raise BrokenEntry("of another format")
    return header, read_payload(file, header)


def check_payload(file: BinaryIO, header: Header) -> None:
    """Check the payload as `read_payload` does, with only a megabyte in memory at a time."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    _check(digest.digest() == header.payload_digest, "payload does not match its checksum")


def _check_magic(fixed: bytes) -> None:
    _check(len(fixed) >= _PREFIX.size, "cut off within its header")
    _check(fixed.startswith(_MAGIC), "not an entry of this cache")


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise BrokenEntry(otherwise)


def _digest(*texts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for text in texts:
        digest.update(text)
    return digest.digest()
