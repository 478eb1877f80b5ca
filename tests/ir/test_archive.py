"""A file of many entries, the folders that are shared, and caches in a row: what they keep, refuse and survive."""

from __future__ import annotations

import errno
import os
import random
import shutil
import struct
import subprocess
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from lazy_backend.cache import archive as archive_module
from lazy_backend.cache.archive import Archive, BrokenArchive, new_archive
from lazy_backend.cache.computation_cache import Key
from lazy_backend.cache.disk import DiskCache
from lazy_backend.cache.entry import BrokenEntry, encode_key, make_head, split
from lazy_backend.cache.folder import CacheRefused
from lazy_backend.cache.layers import Layers, LoadedEntries

LARGE = 1 << 30
NAMES = ("a", "b", "c")

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def key(name: str) -> Key:
    return Key((("graph", name),))


def entry_of(name: str, payload: bytes | None = None) -> bytes:
    payload = f"payload of {name}".encode() if payload is None else payload
    return make_head(encode_key(key(name)), payload, 0.0) + payload


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write(tmp_path / "file")
    return tmp_path / "file"


def write(path: Path, *entries: bytes) -> None:
    with new_archive(path, {"machine": "this"}) as writer:
        for entry in entries or map(entry_of, NAMES):
            writer.add(entry)


def readable(path: Path) -> tuple[list[str], list[str]]:
    """The payloads that can be read, and what is said about the rest."""
    found, faults = [], []
    try:
        archive = Archive(path)
        for packed in archive:
            try:
                found.append(split(archive.read(packed))[1].decode())
            except BrokenEntry as error:
                faults.append(str(error))
    except BrokenArchive as error:
        faults.append(str(error))
    return found, faults


WHOLE = [f"payload of {name}" for name in NAMES]


# ----- what goes in comes out


def test_what_was_added_is_read(file: Path) -> None:
    archive = Archive(file)
    assert [packed.key for packed in archive] == [key(name) for name in NAMES]
    assert [archive.read(packed) for packed in archive] == [entry_of(name) for name in NAMES]
    assert archive.description == {"machine": "this"}
    assert readable(file) == (WHOLE, [])


def test_an_archive_may_be_empty(tmp_path: Path) -> None:
    with new_archive(tmp_path / "empty", {}) as writer:
        pass
    assert (writer.num_entries, writer.num_bytes) == (0, (tmp_path / "empty").stat().st_size)
    assert readable(tmp_path / "empty") == ([], [])


def test_an_open_archive_outlives_its_name(file: Path) -> None:
    archive = Archive(file)
    first, *_ = archive
    write(file, entry_of("another"))
    file.unlink()
    assert archive.read(first) == entry_of("a")


def test_listing_an_archive_reads_no_payload(tmp_path: Path) -> None:
    write(tmp_path / "large", entry_of("a", bytes(1 << 24)), entry_of("b", bytes(1 << 24)))
    archive = Archive(tmp_path / "large")
    tracemalloc.start()
    assert len(list(archive)) == 2
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


# ----- what is damaged


def test_a_file_cut_off_anywhere_gives_what_is_whole(file: Path) -> None:
    whole = file.read_bytes()
    ends = [packed.place + packed.size for packed in Archive(file)]
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        found, faults = readable(file)
        assert found == WHOLE[: sum(end <= length for end in ends)]
        assert len(faults) == 1, length


def test_a_byte_changed_anywhere_is_found(file: Path) -> None:
    whole = bytearray(file.read_bytes())
    for place in range(len(whole)):
        changed = whole.copy()
        changed[place] ^= 1 << place % 8
        file.write_bytes(changed)
        found, faults = readable(file)
        assert faults, place
        assert set(found) <= set(WHOLE)


def test_a_damaged_payload_costs_one_entry(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"payload of b", b"payload of B"))
    assert readable(file) == ([WHOLE[0], WHOLE[2]], ["payload does not match its checksum"])


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "no file of compiled graphs"),
        (b"PK\3\4" + bytes(100), "no file of compiled graphs"),
        (b"LAZYPACK", "cut off"),
        (b"LAZYPACK" + struct.pack("<IQ", 9, 0) + bytes(100), "of format 9, from another version"),
        # a length of exabytes must not be asked for
        (b"LAZYPACK" + struct.pack("<IQ", 1, 1 << 60) + bytes(100), "damaged in its first lines"),
    ],
)
def test_what_is_no_archive_says_so(tmp_path: Path, content: bytes, fault: str) -> None:
    (tmp_path / "file").write_bytes(content)
    found, (said,) = readable(tmp_path / "file")
    assert found == []
    assert fault in said


@pytest.mark.parametrize("text", [b"[" * 100_000, b"\xff", b"[1, 2]", b'[["a", 1]]', b"{}x", b"[[]]"])
def test_a_key_that_is_none_stops_the_reading(tmp_path: Path, text: bytes) -> None:
    """With checksums that are right: somebody made it by hand."""
    write(tmp_path / "file", entry_of("a"), make_head(text, b"payload", 0.0) + b"payload", entry_of("b"))
    assert readable(tmp_path / "file") == (["payload of a"], ["its key cannot be read"])


def test_random_bytes_are_never_taken(tmp_path: Path) -> None:
    chance = random.Random(0)
    for start in (b"", b"LAZYPACK\1\0\0\0"):
        for _ in range(50):
            (tmp_path / "file").write_bytes(start + chance.randbytes(chance.randrange(300)))
            assert readable(tmp_path / "file")[0] == []


# ----- written at once or not at all


def raising(number: int) -> Callable[..., NoReturn]:
    def call(*arguments: Any, **names: Any) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return call


def names_in(path: Path) -> list[str]:
    return sorted(one.name for one in path.iterdir())


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, SystemExit])
def test_an_interrupted_write_leaves_the_earlier_file(file: Path, error: type[BaseException]) -> None:
    def interrupted() -> None:
        with new_archive(file, {}) as writer:
            writer.add(entry_of("x"))
            raise error

    with pytest.raises(error):
        interrupted()
    assert readable(file) == (WHOLE, [])
    assert names_in(file.parent) == ["file"]


@pytest.mark.parametrize(("module", "name"), [(archive_module, "write_all"), (os, "fsync"), (os, "replace")])
def test_a_full_disk_leaves_the_earlier_file(
    file: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> None:
    monkeypatch.setattr(module, name, raising(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left on device") as raised:
        write(file)
    assert raised.value.filename == str(file)
    monkeypatch.undo()
    assert readable(file) == (WHOLE, [])
    assert names_in(file.parent) == ["file"]


def test_the_file_can_be_read_by_others_and_written_by_none(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        write(tmp_path / "file")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644


def test_a_link_is_followed(file: Path) -> None:
    link = file.with_name("link")
    link.symlink_to(file)
    write(link, entry_of("x"))
    assert link.is_symlink()
    assert readable(file) == (["payload of x"], [])


def test_only_plain_files_are_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(OSError, match="no plain file"):
            write(place)
    assert names_in(tmp_path) == ["pipe"]


# ----- whom the user trusts


def test_a_file_that_others_may_write_is_refused(file: Path) -> None:
    file.chmod(0o664)
    with pytest.raises(CacheRefused, match=r"not loaded: other users may write it, mode 664\n.*\n.*chmod go-w"):
        Archive(file)


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CacheRefused, match="no plain file"):
        Archive(tmp_path / "pipe")


@pytest.fixture
def safe_folder() -> Iterator[Path]:
    """A folder where only its owner could have put something: what lies in /tmp, anybody could."""
    made = Path(tempfile.mkdtemp(dir=Path.home()))
    made.chmod(0o755)
    if any(parent.stat().st_mode & 0o022 for parent in made.parents):
        pytest.skip("others may write above the home directory")
    yield made
    shutil.rmtree(made)


@needs_root
def test_a_file_of_another_user_is_read_where_nobody_else_could_have_put_it(file: Path, safe_folder: Path) -> None:
    os.chown(file, 12345, 12345)
    with pytest.raises(CacheRefused, match=r"belongs to user 12345, and .* can be written by others"):
        Archive(file)
    safe = safe_folder / "file"
    shutil.copy(file, safe)
    os.chown(safe, 12345, 12345)
    assert readable(safe) == (WHOLE, [])
    safe_folder.chmod(0o777)
    with pytest.raises(CacheRefused, match="can be written by others"):
        Archive(safe)


@needs_root
def test_a_shared_folder_may_be_another_users(safe_folder: Path) -> None:
    place = safe_folder / "cache"
    DiskCache(place, LARGE).put(key("a"), b"payload")
    (entry,) = place.glob("*.entry")
    for path in (place, entry):
        os.chown(path, 12345, 12345)
    with pytest.raises(CacheRefused, match="belongs to user 12345"):
        DiskCache(place, LARGE, readonly=True)
    shared = DiskCache(place, 0, readonly=True, shared=True)
    assert shared.get(key("a")) == b"payload"
    os.chown(entry, 54321, 54321)
    assert shared.get(key("a")) is None
    assert shared.counts().refused == 1
    os.chown(entry, 12345, 12345)
    place.chmod(0o775)
    assert shared.get(key("a")) is None


@needs_root
def test_a_shared_folder_of_another_user_in_a_public_place_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "cache"
    place.mkdir()
    os.chown(place, 12345, 12345)
    with pytest.raises(CacheRefused, match="who could have put it there"):
        DiskCache(place, 0, readonly=True, shared=True)


def test_a_shared_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    with pytest.raises(CacheRefused, match="other users may write its directory"):
        DiskCache(tmp_path, 0, readonly=True, shared=True)


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A cache with the entry "a" on a read-only file system."""
    place = tmp_path / "mounted"
    place.mkdir(mode=0o700)
    if (
        os.geteuid() != 0
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", place]).returncode
    ):
        pytest.skip("needs to mount a file system")
    try:
        DiskCache(place / "cache", LARGE).put(key("a"), b"payload")
        (place / "cache" / ".lock").unlink()
        subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        yield place / "cache"
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def test_a_shared_folder_may_be_on_a_read_only_file_system(read_only: Path) -> None:
    shared = DiskCache(read_only, 0, readonly=True, shared=True)
    assert (shared.get(key("a")), shared.get(key("b"))) == (b"payload", None)
    assert (shared.counts().errors, shared.counts().refused) == (0, 0)
    assert shared.verify(remove=True) == []


# ----- caches in a row


def test_the_first_cache_that_has_it_is_taken(tmp_path: Path) -> None:
    own, first, second = (DiskCache(tmp_path / name, LARGE) for name in ("own", "first", "second"))
    loaded, asked = LoadedEntries(), dict[str, None]()
    layers = Layers(own, loaded, (first, second), asked)
    assert layers.get(key("a")) is None
    second.put(key("a"), b"second")
    assert layers.get(key("a")) == b"second"
    first.put(key("a"), b"first")
    assert layers.get(key("a")) == b"first"
    loaded.add(key("a"), lambda: entry_of("a", b"loaded"))
    assert layers.get(key("a")) == b"loaded"
    assert layers.put(key("a"), b"own")
    assert layers.get(key("a")) == b"own"
    assert (layers.counts()["hits"], layers.counts()["behind"], layers.counts()["misses"]) == (4, 3, 1)
    assert list(asked) == [key("a").hash_hex()]
    assert first.get(key("a")) == b"first"


def test_what_is_damaged_in_one_cache_is_taken_from_the_next(tmp_path: Path) -> None:
    own, shared = DiskCache(tmp_path / "own", LARGE), DiskCache(tmp_path / "shared", LARGE)
    for cache in (own, shared):
        cache.put(key("a"), b"payload")
    (broken,) = (tmp_path / "own").glob("*.entry")
    broken.write_bytes(broken.read_bytes()[:-1])
    layers = Layers(own, LoadedEntries(), (shared,), {})
    assert layers.whole(key("a").hash_hex()) == shared.whole(key("a").hash_hex())
    assert layers.get(key("a")) == b"payload"
    assert (layers.counts()["corrupt"], layers.counts()["misses"]) == (1, 0)


def test_without_a_cache_of_ones_own_nothing_is_kept(tmp_path: Path) -> None:
    layers = Layers(None, LoadedEntries(), (), {})
    assert layers.is_empty()
    assert (layers.put(key("a"), b""), layers.place(), layers.get(key("a"))) == (False, None, None)
    layers.loaded.add(key("a"), lambda: entry_of("a"))
    assert not layers.is_empty()
    assert layers.get(key("a")) == b"payload of a"


def raise_broken() -> bytes:
    raise BrokenEntry("cut off")


@pytest.mark.parametrize("read", [raise_broken, raising(errno.ESTALE), lambda: entry_of("b"), lambda: b"no entry"])
def test_a_loaded_entry_that_changed_is_a_miss(read: Callable[[], bytes]) -> None:
    loaded = LoadedEntries()
    loaded.add(key("a"), read)
    assert Layers(None, loaded, (), {}).get(key("a")) is None


def test_has_reads_no_payload_and_counts_nothing(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache", LARGE)
    assert not cache.has(key("a"))
    cache.put(key("a"), b"payload")
    before = cache.counts()
    assert cache.has(key("a"))
    (file,) = (tmp_path / "cache").glob("*.entry")
    file.write_bytes(file.read_bytes()[:-1])
    assert not cache.has(key("a"))
    assert (cache.counts(), file.exists()) == (before, True)


def test_whole_is_the_file_or_nothing(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache", LARGE)
    hash = key("a").hash_hex()
    assert (cache.whole(hash), cache.start_of_payload(hash, 3)) == (None, b"")
    cache.put(key("a"), b"payload")
    (file,) = (tmp_path / "cache").glob("*.entry")
    assert (cache.whole(hash), cache.start_of_payload(hash, 3)) == (file.read_bytes(), b"pay")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(BrokenEntry):
        cache.whole(hash)
