"""The disk cache: what it keeps, what it refuses, and what it survives."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shlex
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import platformdirs
import pytest
from filelock import FileLock, Timeout

from lazy_backend.cache import disk, folder
from lazy_backend.cache.computation_cache import Key
from lazy_backend.cache.disk import DiskCache, Removed
from lazy_backend.cache.entry import FORMAT, encode_key, make_head
from lazy_backend.cache.folder import CacheRefused, default_directory

WORKER = Path(__file__).with_name("disk_worker.py")
LARGE = 1 << 30
DAY = 86400.0

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


class Clock:
    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


def key(graph: str, **parts: str) -> Key:
    return Key((("torch", "2.13"), *parts.items(), ("graph", graph)))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cache(place: Path, clock: Clock) -> DiskCache:
    return DiskCache(place, LARGE, clock=clock)


def file_of(place: Path) -> Path:
    (file,) = place.glob("*.entry")
    return file


def names(cache: DiskCache) -> list[str]:
    """The graphs of all entries, the most recently used first."""
    return [entry.key.parts[-1][1] for entry in cache]


def snapshot(place: Path) -> dict[str, tuple[Any, ...]]:
    """Everything that writing, touching or removing a file would change."""
    status = {path.name: path.lstat() for path in [place, *place.iterdir()]}
    return {name: (s.st_ino, s.st_size, s.st_mode, s.st_mtime_ns, s.st_ctime_ns) for name, s in status.items()}


# ----- what goes in comes out


@pytest.mark.parametrize("payload", [b"", b"x", bytes(range(256)) * 1000])
def test_what_was_put_is_found(cache: DiskCache, payload: bytes) -> None:
    assert cache.put(key("a"), payload)
    assert cache.get(key("a")) == payload


def test_another_process_finds_it(cache: DiskCache, place: Path) -> None:
    cache.put(key("ä\n🙂"), b"payload")
    assert DiskCache(place, LARGE).get(key("ä\n🙂")) == b"payload"


def test_a_second_put_replaces_the_first(cache: DiskCache) -> None:
    cache.put(key("a"), b"first")
    cache.put(key("a"), b"second")
    assert (cache.get(key("a")), len(list(cache))) == (b"second", 1)


@pytest.mark.parametrize(
    "other",
    [
        Key((("torch", "2.14"), ("graph", "a"))),
        Key((("graph", "a"), ("torch", "2.13"))),
        Key((("torch", "2.13"), ("graph", "a"), ("threads", "2"))),
        Key((("torch", "2.13g"), ("raph", "a"))),
    ],
)
def test_any_other_key_is_a_miss(cache: DiskCache, other: Key) -> None:
    cache.put(key("a"), b"payload")
    assert cache.get(other) is None


@pytest.mark.parametrize("different", [key("b"), key("a", threads="2"), key(""), key("a" * 10_000)])
def test_another_key_with_the_same_hash_is_a_miss(
    cache: DiskCache, different: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Key, "hash_hex", lambda self: "0" * 32)
    cache.put(key("a"), b"payload")
    assert cache.get(different) is None
    assert cache.get(key("a")) == b"payload"
    assert cache.put(different, b"other")
    assert (cache.get(key("a")), cache.get(different)) == (None, b"other")
    assert cache.counts().corrupt == 0


def test_every_get_is_a_hit_or_a_miss(cache: DiskCache) -> None:
    cache.get(key("a"))
    cache.put(key("a"), b"")
    cache.get(key("a"))
    assert (cache.counts().hits, cache.counts().misses, cache.counts().writes) == (1, 1, 1)


def test_an_entry_is_one_private_file(cache: DiskCache, place: Path) -> None:
    before = os.umask(0)
    try:
        cache.put(key("a"), b"payload")
    finally:
        os.umask(before)
    assert file_of(place).name == f"{key('a').hash_hex()}.entry"
    assert {path.name for path in place.iterdir()} == {file_of(place).name, disk.LOCK_FILE}
    assert [path.stat().st_mode & 0o777 for path in (place, file_of(place))] == [0o700, 0o600]


def test_entries_are_listed_with_sizes_and_times(cache: DiskCache, place: Path, clock: Clock) -> None:
    cache.put(key("a"), b"payload")
    created = clock.now
    clock.now += DAY
    cache.get(key("a"))
    (entry,) = cache
    assert (entry.hash, entry.key) == (key("a").hash_hex(), key("a"))
    assert (entry.size, entry.payload_size) == (file_of(place).stat().st_size, 7)
    assert (entry.created, entry.last_used) == (created, clock.now)


def test_listing_reads_no_payload(cache: DiskCache) -> None:
    cache.put(key("a"), bytes(30_000_000))
    assert peak_memory(lambda: list(cache)) < 100_000


def test_verifying_holds_a_piece_at_a_time(cache: DiskCache) -> None:
    cache.put(key("a"), bytes(30_000_000))
    assert peak_memory(cache.verify) < 4_000_000


def peak_memory(function: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_relative_directory_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cache = DiskCache("cache", LARGE)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    cache.put(key("a"), b"payload")
    assert (cache.get(key("a")), list(Path.cwd().iterdir())) == (b"payload", [])


def test_a_removed_directory_is_made_again(cache: DiskCache, place: Path) -> None:
    cache.put(key("a"), b"payload")
    (place / disk.LOCK_FILE).unlink()
    file_of(place).unlink()
    place.rmdir()
    assert cache.get(key("a")) is None
    assert cache.put(key("a"), b"payload")
    assert place.stat().st_mode & 0o777 == 0o700
    assert cache.get(key("a")) == b"payload"


# ----- broken entries


def expect_rebuilt(cache: DiskCache, place: Path, broken: bytes) -> None:
    """An entry of these bytes is a miss, is counted, goes, and can be written anew."""
    before = cache.counts().corrupt
    file = place / f"{key('a').hash_hex()}.entry"
    file.write_bytes(broken)
    file.chmod(0o600)
    assert cache.get(key("a")) is None
    assert cache.counts().corrupt == before + 1
    assert not file.exists()


def test_an_entry_cut_off_anywhere_is_a_miss(cache: DiskCache, place: Path) -> None:
    cache.put(key("a"), b"payload")
    whole = file_of(place).read_bytes()
    for length in range(len(whole)):
        expect_rebuilt(cache, place, whole[:length])
    assert cache.put(key("a"), b"payload")
    assert cache.get(key("a")) == b"payload"


def test_an_entry_with_bytes_added_is_a_miss(cache: DiskCache, place: Path) -> None:
    cache.put(key("a"), b"payload")
    expect_rebuilt(cache, place, file_of(place).read_bytes() + b"\0")


def test_an_entry_with_any_byte_changed_is_a_miss(cache: DiskCache, place: Path) -> None:
    cache.put(key("a"), b"payload")
    whole = file_of(place).read_bytes()
    for position in range(len(whole)):
        for bits in (1 << position % 8, 0xFF):
            changed = bytearray(whole)
            changed[position] ^= bits
            if 8 <= position < 12:
                # the format's number: see below
                (place / f"{key('a').hash_hex()}.entry").write_bytes(changed)
                assert cache.get(key("a")) is None
            else:
                expect_rebuilt(cache, place, bytes(changed))


def test_an_entry_of_another_format_is_a_miss_and_stays(cache: DiskCache, place: Path) -> None:
    cache.put(key("a"), b"payload")
    file = file_of(place)
    file.write_bytes(b"LAZYDISK" + (FORMAT + 1).to_bytes(4, "little") + b"whatever comes in the future")
    assert cache.get(key("a")) is None
    assert (cache.counts().corrupt, cache.verify(), list(cache), file.exists()) == (0, [], [], True)
    assert cache.put(key("a"), b"ours")
    assert cache.get(key("a")) == b"ours"


def test_a_broken_entry_written_anew_meanwhile_stays(cache: DiskCache, place: Path) -> None:
    cache.put(key("a"), b"payload")
    file = file_of(place)
    file.write_bytes(b"broken")
    with file.open("rb") as opened:
        DiskCache(place, LARGE).put(key("a"), b"payload")
        current = cache._current_folder()
        assert current is not None
        cache._discard(current, file.name, opened)
    assert cache.get(key("a")) == b"payload"


def test_an_error_while_reading_is_a_miss(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.put(key("a"), b"payload")
    monkeypatch.setattr(disk, "read_payload", raising(errno.EIO))
    assert cache.get(key("a")) is None
    assert (cache.counts().errors, cache.counts().corrupt) == (1, 0)
    monkeypatch.undo()
    assert cache.get(key("a")) == b"payload"


def raising(number: int) -> Callable[..., Any]:
    def fail(*args: object, **kwargs: object) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


# ----- verify


def test_verify_finds_what_is_broken(cache: DiskCache, place: Path) -> None:
    cache.put(key("good"), b"payload")
    cache.put(key("bad"), b"payload")
    bad = place / f"{key('bad').hash_hex()}.entry"
    bad.write_bytes(bad.read_bytes()[:-1] + b"?")
    (place / f"{'0' * 32}.entry").write_bytes((place / f"{key('good').hash_hex()}.entry").read_bytes())
    assert {broken.hash: broken.reason for broken in cache.verify()} == {
        key("bad").hash_hex(): "payload does not match its checksum",
        "0" * 32: "named by another hash than its key's",
    }
    assert bad.exists()
    assert len(cache.verify(remove=True)) == 2
    assert (cache.verify(), names(cache)) == ([], ["good"])


# ----- bounded, least recently used first out


def fill(cache: DiskCache, clock: Clock, *graphs: str, size: int = 1000) -> None:
    """One entry per graph, an hour apart."""
    for graph in graphs:
        clock.now += 3600
        assert cache.put(key(graph), bytes(size))


def room_for(entries: int, size: int = 1000) -> int:
    head = len(make_head(encode_key(key("a")), b"", 0.0))
    return entries * (head + size)


def test_the_least_recently_used_goes_first(place: Path, clock: Clock) -> None:
    cache = DiskCache(place, room_for(3), clock=clock)
    fill(cache, clock, *"abc")
    assert cache.counts().evictions == 0
    clock.now += 3600
    cache.get(key("a"))
    fill(cache, clock, *"d")
    assert (names(cache), cache.counts().evictions) == (["d", "a", "c"], 1)


def test_what_is_replaced_is_not_evicted(place: Path, clock: Clock) -> None:
    cache = DiskCache(place, room_for(2), clock=clock)
    fill(cache, clock, *"ab")
    fill(cache, clock, "b")
    assert (names(cache), cache.counts().evictions) == (["b", "a"], 0)
    fill(cache, clock, "c")
    assert (names(cache), cache.counts().evictions) == (["c", "b"], 1)


def test_the_bound_holds_to_the_byte(place: Path, clock: Clock) -> None:
    cache = DiskCache(place, room_for(3), clock=clock)
    fill(cache, clock, *"abc")
    assert cache.total_bytes() == room_for(3)
    cache.put(key("d"), b"")
    assert names(cache) == ["d", "c", "b"]


def test_a_hit_is_noted_once_a_minute(cache: DiskCache, place: Path, clock: Clock) -> None:
    cache.put(key("a"), b"payload")
    put_at = clock.now
    clock.now += disk.TOUCH_AFTER - 1
    cache.get(key("a"))
    assert file_of(place).stat().st_mtime == put_at
    clock.now += 1
    cache.get(key("a"))
    assert file_of(place).stat().st_mtime == clock.now


def test_a_time_of_use_in_the_future_is_mended_by_a_hit(cache: DiskCache, place: Path, clock: Clock) -> None:
    cache.put(key("a"), b"payload")
    os.utime(file_of(place), (clock.now + DAY, clock.now + DAY))
    cache.get(key("a"))
    assert file_of(place).stat().st_mtime == clock.now


def test_what_does_not_fit_is_refused_and_removes_nothing(place: Path, clock: Clock) -> None:
    cache = DiskCache(place, room_for(2), clock=clock)
    fill(cache, clock, *"ab")
    assert not cache.put(key("c"), bytes(3000))
    assert (names(cache), cache.counts().refused) == (["b", "a"], 1)
    assert "do not fit into a cache of" in str(cache.last_error)


def test_replacing_an_entry_costs_no_other(place: Path, clock: Clock) -> None:
    cache = DiskCache(place, room_for(3), clock=clock)
    fill(cache, clock, *"abcc")
    assert names(cache) == ["c", "b", "a"]


def test_an_open_entry_is_read_to_its_end_though_evicted(place: Path, clock: Clock) -> None:
    cache = DiskCache(place, room_for(1), clock=clock)
    fill(cache, clock, "a")
    with file_of(place).open("rb", buffering=0) as opened:
        start = opened.read(100)
        fill(cache, clock, "b")
        assert names(cache) == ["b"]
        assert len(start + opened.readall()) == room_for(1)


def test_an_entry_that_another_process_evicts_is_no_error(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    cache = DiskCache(place, room_for(2), clock=clock)
    fill(cache, clock, *"ab")
    current = cache._current_folder()
    assert current is not None
    files = current.files()
    monkeypatch.setattr(folder.Folder, "files", lambda self: files)
    (place / f"{key('a').hash_hex()}.entry").unlink()
    fill(cache, clock, "c")
    monkeypatch.undo()
    assert (names(cache), cache.counts().errors) == (["c", "b"], 0)


def test_old_temporary_files_are_swept_and_young_ones_count(place: Path, clock: Clock) -> None:
    cache = DiskCache(place, room_for(3), clock=clock)
    fill(cache, clock, *"ab")
    temporary = place / f"{'0' * 32}.{'1' * 32}.tmp"
    temporary.write_bytes(bytes(room_for(1)))
    os.utime(temporary, (clock.now, clock.now))
    clock.now += disk.STALE_AFTER - 10
    cache.put(key("c"), bytes(1000))
    assert (names(cache), temporary.exists()) == (["c", "b"], True)
    clock.now += 20
    cache.put(key("d"), bytes(1000))
    assert (names(cache), temporary.exists()) == (["d", "c", "b"], False)


def test_what_is_being_written_counts_in_full(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    real = os.write

    def write(descriptor: int, data: bytes) -> int:
        sizes.append(cache.total_bytes())
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    cache = DiskCache(place, room_for(1))
    cache.put(key("a"), bytes(1000))
    cache.put(key("b"), bytes(1000))
    assert set(sizes) == {room_for(1)}


def test_names_change_under_the_lock(cache: DiskCache, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.replace
    free: list[object] = []

    def replace(*args: Any, **kwargs: Any) -> None:
        free.append(in_thread(lambda: is_free(place / disk.LOCK_FILE)))
        real(*args, **kwargs)

    monkeypatch.setattr(os, "replace", replace)
    assert cache.put(key("a"), b"payload")
    assert free == [False]
    assert is_free(place / disk.LOCK_FILE)


def is_free(lock: Path) -> bool:
    try:
        with FileLock(lock, timeout=0):
            return True
    except Timeout:
        return False


def test_no_room_but_for_what_others_write(place: Path, clock: Clock) -> None:
    cache = DiskCache(place, room_for(2), clock=clock)
    temporary = place / f"{'0' * 32}.{'1' * 32}.tmp"
    temporary.write_bytes(bytes(room_for(2)))
    os.utime(temporary, (clock.now, clock.now))
    assert not cache.put(key("a"), bytes(1000))
    assert cache.counts().errors == 1


def test_files_of_others_are_left_alone(cache: DiskCache, place: Path) -> None:
    cache.put(key("a"), b"payload")
    (place / "notes.txt").write_text("mine")
    (place / "deadbeef.entry").write_text("mine too")
    cache.clear()
    assert {path.name for path in place.iterdir()} == {"notes.txt", "deadbeef.entry", disk.LOCK_FILE}


def test_prune_by_bytes(cache: DiskCache, clock: Clock) -> None:
    fill(cache, clock, *"abcd")
    assert cache.prune(room_for(2)) == Removed(2, room_for(2))
    assert names(cache) == ["d", "c"]


def test_prune_by_age(cache: DiskCache, clock: Clock) -> None:
    fill(cache, clock, *"abcd")
    assert cache.prune(max_age=5400).entries == 2
    assert names(cache) == ["d", "c"]


def test_clear_removes_all(cache: DiskCache, place: Path, clock: Clock) -> None:
    fill(cache, clock, *"abcd")
    (place / f"{'0' * 32}.{'1' * 32}.tmp").write_bytes(b"12345")
    assert cache.clear() == Removed(4, room_for(4) + 5)
    assert [path.name for path in place.iterdir()] == [disk.LOCK_FILE]


# ----- a disk that fails


@pytest.mark.parametrize("call", ["open", "write", "ftruncate", "fsync", "replace", "close", "scandir"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_failing_disk_is_counted_and_leaves_nothing(
    cache: DiskCache, place: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    cache.put(key("a"), b"old")
    before = snapshot(place)[file_of(place).name]
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(getattr(os, call), number))
        assert not cache.put(key("a"), b"new")
    assert (cache.counts().errors, cache.counts().writes) == (1, 1)
    assert snapshot(place)[file_of(place).name] == before
    assert not list(place.glob("*.tmp"))
    assert cache.get(key("a")) == b"old"
    assert cache.put(key("a"), b"new")


def failing(real: Callable[..., Any], number: int) -> Callable[..., Any]:
    """Fails as `real` would on the cache's own files; the lock's are filelock's business."""

    def call(*args: Any, **kwargs: Any) -> Any:
        caller = Path(sys._getframe(1).f_code.co_filename)
        if caller.parent != Path(disk.__file__).parent:
            return real(*args, **kwargs)
        if real is os.close:
            real(*args)
        raise OSError(number, os.strerror(number))

    return call


def test_a_disk_that_fills_up_within_a_write(cache: DiskCache, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = 0
    real = os.write

    def write(descriptor: int, data: memoryview) -> int:
        nonlocal written
        if written >= 200:
            raise OSError(errno.ENOSPC, "no space left on device")
        written += real(descriptor, data[:10])
        return 10

    monkeypatch.setattr(os, "write", write)
    assert not cache.put(key("a"), bytes(1000))
    assert (list(cache), list(place.glob("*.tmp"))) == ([], [])
    assert "no space left on device" in str(cache.last_error)


def test_short_writes_are_continued(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:7]))
    assert cache.put(key("a"), bytes(range(256)))
    assert cache.get(key("a")) == bytes(range(256))


def test_a_limit_on_file_sizes_is_a_failing_disk(place: Path) -> None:
    assert run_worker("limited", place, 2500) == {"kept": 3, "writes": 3, "errors": 1, "found": 3}


# ----- private to the user


def refusal(place: Path) -> str:
    with pytest.raises(CacheRefused) as raised:
        DiskCache(place, LARGE)
    return str(raised.value)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720, 0o702, 0o1777])
def test_a_directory_that_others_may_write_is_refused(place: Path, mode: int) -> None:
    place.mkdir()
    place.chmod(mode)
    assert refusal(place) == (
        f"disk cache not used: other users may write its directory, mode {mode:o}\n  at {place}\n"
        f"  to mend it: chmod 700 {place}"
    )


def test_the_remedy_mends_it(tmp_path: Path) -> None:
    place = tmp_path / "a name; with 'quotes'"
    place.mkdir()
    place.chmod(0o777)
    subprocess.run(refusal(place).rpartition("to mend it: ")[2], shell=True, check=True)
    assert DiskCache(place, LARGE).put(key("a"), b"payload")


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o755])
def test_a_directory_that_others_may_only_read_is_used(place: Path, mode: int) -> None:
    place.mkdir()
    place.chmod(mode)
    assert DiskCache(place, LARGE).put(key("a"), b"payload")


def test_a_directory_of_another_user_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.mkdir(mode=0o700)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert refusal(place) == (
        f"disk cache not used: its directory belongs to user {owner}, not to user {owner + 1}\n  at {place}\n"
        "  to mend it: set LAZY_BACKEND_CACHE_DIR to a directory of your own"
    )


@needs_root
def test_a_directory_given_away_is_refused(place: Path) -> None:
    place.mkdir(mode=0o700)
    os.chown(place, 12345, 12345)
    assert "belongs to user 12345, not to user 0" in refusal(place)


def test_a_directory_opened_to_others_later_is_not_read(cache: DiskCache, place: Path) -> None:
    cache.put(key("a"), b"payload")
    place.chmod(0o777)
    assert cache.get(key("a")) is None
    assert not cache.put(key("b"), b"payload")
    assert cache.counts().refused == 2
    assert "chmod 700" in str(cache.last_error)
    place.chmod(0o700)
    assert cache.get(key("a")) == b"payload"


def test_a_directory_swapped_for_another_is_not_entered(cache: DiskCache, place: Path) -> None:
    cache.put(key("a"), b"ours")
    place.rename(place.with_name("moved"))
    place.mkdir()
    place.chmod(0o777)
    (place / f"{key('a').hash_hex()}.entry").write_bytes(b"theirs")
    assert cache.get(key("a")) == b"ours"


def test_the_users_own_link_is_followed(tmp_path: Path, place: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    place.symlink_to("elsewhere")
    assert DiskCache(place / "deep", LARGE).put(key("a"), b"payload")
    assert file_of(tmp_path / "elsewhere" / "deep")


@needs_root
@pytest.mark.parametrize("below", [".", "deep"])
def test_a_link_of_another_user_is_refused(tmp_path: Path, place: Path, below: str) -> None:
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    os.lchown(tmp_path / "link", 12345, 12345)
    # reached through a link of our own
    place.symlink_to("link")
    message = refusal(place / below)
    assert "a symbolic link to its directory belongs to user 12345" in message
    assert f"at {tmp_path / 'link'}\n" in message


def test_a_file_in_place_of_the_directory_is_refused(place: Path) -> None:
    place.write_text("not a directory")
    assert "its directory is no directory" in refusal(place)
    assert "its directory is no directory" in refusal(place / "below")


def test_a_directory_that_cannot_be_made_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "mkdir", raising(errno.EROFS))
    assert refusal(place) == (
        f"disk cache not used: its directory cannot be opened: {os.strerror(errno.EROFS)}\n  at {place}\n"
        "  to mend it: set LAZY_BACKEND_CACHE_DIR to a directory of your own"
    )


def by_mode(file: Path) -> None:
    file.chmod(0o620)


def by_owner(file: Path) -> None:
    os.chown(file, 12345, 12345)


def by_link(file: Path) -> None:
    target = file.with_name("target")
    file.rename(target)
    file.symlink_to(target)


def by_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize("spoil", [by_mode, pytest.param(by_owner, marks=needs_root), by_link, by_pipe])
def test_an_entry_that_others_could_have_written_is_refused(
    cache: DiskCache, place: Path, spoil: Callable[[Path], None]
) -> None:
    cache.put(key("a"), b"payload")
    spoil(file_of(place))
    assert cache.get(key("a")) is None
    assert (cache.counts().refused, cache.counts().errors) == (1, 0)
    assert f"to mend it: rm -r {shlex.quote(str(file_of(place)))}" in str(cache.last_error)
    assert list(cache) == []
    assert cache.put(key("a"), b"anew")
    assert cache.get(key("a")) == b"anew"


def test_a_directory_in_place_of_an_entry_is_refused(cache: DiskCache, place: Path) -> None:
    (place / f"{key('a').hash_hex()}.entry").mkdir()
    assert cache.get(key("a")) is None
    assert not cache.put(key("a"), b"payload")
    assert (cache.counts().refused, cache.counts().errors) == (1, 1)
    assert not list(place.glob("*.tmp"))


def test_the_default_directory_is_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda name, appauthor: tmp_path / name)
    assert default_directory() == tmp_path / "lazy_backend"


@pytest.mark.skipif(sys.platform != "linux", reason="the variable is Linux's")
def test_the_default_directory_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_directory() == tmp_path / "lazy_backend"


def test_a_user_without_a_home_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda name, appauthor: Path("~/.cache") / name)
    with pytest.raises(CacheRefused, match="no home directory"):
        default_directory()


# ----- readonly


def test_a_readonly_cache_changes_nothing(cache: DiskCache, place: Path, clock: Clock) -> None:
    cache.put(key("a"), b"payload")
    cache.put(key("broken"), b"payload")
    broken = place / f"{key('broken').hash_hex()}.entry"
    broken.write_bytes(b"broken")
    (place / f"{'0' * 32}.{'1' * 32}.tmp").write_bytes(b"old")
    (place / disk.LOCK_FILE).unlink()
    before = snapshot(place)
    clock.now += 10 * DAY
    reader = DiskCache(place, 10, readonly=True, clock=clock)
    assert reader.get(key("a")) == b"payload"
    assert reader.get(key("broken")) is None
    assert not reader.put(key("b"), b"")
    assert reader.prune(0) == reader.clear() == Removed(0, 0)
    assert len(reader.verify(remove=True)) == 1
    assert names(reader) == ["a"]
    assert snapshot(place) == before
    assert (reader.counts().hits, reader.counts().corrupt, reader.counts().refused) == (1, 1, 1)


def test_a_readonly_cache_without_directory_is_empty(place: Path) -> None:
    reader = DiskCache(place, LARGE, readonly=True)
    assert (reader.get(key("a")), list(reader), reader.verify(), reader.total_bytes()) == (None, [], [], 0)
    assert not reader.put(key("a"), b"")
    assert not place.exists()
    DiskCache(place, LARGE).put(key("a"), b"payload")
    assert reader.get(key("a")) == b"payload"


def test_a_readonly_cache_is_checked_too(place: Path) -> None:
    place.mkdir()
    place.chmod(0o777)
    with pytest.raises(CacheRefused, match="other users may write"):
        DiskCache(place, LARGE, readonly=True)


# ----- threads, processes, locks


def test_threads_share_a_cache(place: Path) -> None:
    cache = DiskCache(place, 100_000)
    payloads = {key(str(number)): bytes([number]) * 4000 for number in range(50)}
    wrong: list[Key] = []

    def work(start: int) -> None:
        order = list(payloads)[start:] + list(payloads)[:start]
        for one in order:
            cache.put(one, payloads[one])
            wrong.extend(k for k in order[:5] if cache.get(k) not in (None, payloads[k]))

    in_threads(work, 4)
    counts = cache.counts()
    assert (wrong, counts.corrupt, counts.errors, counts.writes) == ([], 0, 0, 200)
    assert counts.hits + counts.misses == 1000
    assert cache.total_bytes() <= 100_000


def test_threads_that_list_at_once_see_every_file(cache: DiskCache) -> None:
    for number in range(200):
        cache.put(key(str(number)), b"")
    seen: list[int] = []
    in_threads(lambda _: seen.extend(len(list(cache)) for _ in range(5)), 4)
    assert seen == [200] * 20


def in_threads(work: Callable[[int], None], count: int) -> None:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_who_holds_the_lock_too_long_stops_no_one(
    cache: DiskCache, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.put(key("a"), b"payload")
    monkeypatch.setattr(disk, "LOCK_TIMEOUT", 0.05)
    with FileLock(place / disk.LOCK_FILE):
        assert in_thread(lambda: cache.get(key("a"))) == b"payload"
        started = time.monotonic()
        assert in_thread(lambda: cache.put(key("b"), b"payload")) is False
        assert time.monotonic() - started < 1
    assert cache.counts().errors == 1
    assert cache.put(key("b"), b"payload")


def in_thread(function: Callable[[], object]) -> object:
    # filelock calls it an error when one thread waits for a lock that it holds itself
    results: list[object] = []
    in_threads(lambda _: results.append(function()), 1)
    return results[0]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_used(place: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(fcntl, "flock", raising(number))
    clock = Clock()
    cache = DiskCache(place, room_for(2), clock=clock)
    fill(cache, clock, *"abc")
    assert (names(cache), cache.counts().errors) == (["c", "b"], 0)


def test_a_system_without_directory_descriptors_is_used(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # as on Windows
    place.mkdir()
    monkeypatch.setattr(folder, "_opened", lambda path, shared: folder.Folder(path, None))
    clock = Clock()
    cache = DiskCache(place, room_for(2), clock=clock)
    fill(cache, clock, *"abc")
    assert (cache.get(key("c")), names(cache), cache.verify()) == (bytes(1000), ["c", "b"], [])
    file_at = place / f"{key('b').hash_hex()}.entry"
    file_at.write_bytes(b"broken")
    assert (cache.get(key("b")), file_at.exists()) == (None, False)
    assert cache.clear().entries == 1
    (place / disk.LOCK_FILE).unlink()
    place.rmdir()
    assert (cache.get(key("c")), cache.put(key("c"), b"payload"), cache.get(key("c"))) == (None, True, b"payload")
    assert cache.counts().errors == 0


def test_put_killed_before_and_after_each_of_its_calls(place: Path) -> None:
    found = run_worker("calls", place, 0)
    assert found["calls"] > 50
    assert (found["wrong"], found["corrupt"]) == (0, 0)


@pytest.mark.slow
def test_put_killed_before_and_after_each_call_of_filelock_too(place: Path) -> None:
    found = run_worker("calls", place, 1)
    assert found["calls"] > 500
    assert (found["wrong"], found["corrupt"]) == (0, 0)


def test_processes_share_a_cache_while_others_are_killed(place: Path) -> None:
    stress(place, workers=2, milliseconds=3000, kills=50)


@pytest.mark.slow
def test_processes_share_a_cache_for_long(place: Path) -> None:
    stress(place, workers=6, milliseconds=60_000, kills=2000)


def stress(place: Path, workers: int, milliseconds: int, kills: int) -> None:
    bound = 300_000
    modes = [("work", place, bound, seed, milliseconds) for seed in range(workers)]
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(started_worker(*mode)) for mode in [*modes, ("victims", place, bound, 9, kills)]]
        results = [finished_worker(process) for process in running]
    assert results.pop() == {"killed": kills}
    for result in results:
        assert (result["wrong"], result["too_large"], result["corrupt"]) == (0, 0, 0)
    for count in ("rounds", "hits", "evictions"):
        assert sum(result[count] for result in results) > 20, f"the test tests nothing: {results}"
    cache = DiskCache(place, bound)
    assert cache.verify() == []
    assert cache.total_bytes() <= bound


def run_worker(*arguments: object) -> dict[str, int]:
    with started_worker(*arguments) as process:
        return finished_worker(process)


@contextlib.contextmanager
def started_worker(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(WORKER), *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def finished_worker(process: subprocess.Popen[str]) -> dict[str, int]:
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    result: dict[str, int] = json.loads(out)
    return result


# ----- one maker


def test_who_waits_for_a_maker_finds_what_it_made(place: Path) -> None:
    made, found, inside = [], [], threading.Barrier(4)

    def make() -> None:
        own = DiskCache(place, LARGE)
        inside.wait()
        with own.made_once(key("a"), 20.0) as entry:
            if entry is None:
                made.append(threading.get_ident())
                time.sleep(0.2)
                own.put(key("a"), b"made")
            else:
                found.append(entry)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert found == [b"made"] * 3


def test_a_maker_that_takes_too_long_or_fails_is_not_waited_for(place: Path) -> None:
    one, other = DiskCache(place, LARGE), DiskCache(place, LARGE)

    def make() -> None:
        with one.made_once(key("a"), 20.0):
            with other.made_once(key("a"), 0.05) as entry:
                assert entry is None
            raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        make()
    with other.made_once(key("a"), 20.0) as entry:
        assert entry is None


def test_a_maker_with_a_lock_of_its_own_is_waited_for_by_its_kind_alone(place: Path) -> None:
    one, other = DiskCache(place, LARGE), DiskCache(place, LARGE)
    with one.made_once(key("a"), 20.0, "slow"):
        begin = time.monotonic()
        with other.made_once(key("a"), 20.0) as entry:
            assert entry is None
        assert time.monotonic() - begin < 10
        begin = time.monotonic()
        with other.made_once(key("a"), 0.5, "slow"):
            assert time.monotonic() - begin >= 0.5


def test_a_maker_that_is_killed_holds_nothing(place: Path) -> None:
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from lazy_backend.cache.computation_cache import Key\n"
        "from lazy_backend.cache.disk import DiskCache\n"
        f"with DiskCache({str(place)!r}, 1 << 30).made_once(Key((('graph', 'a'),)), 9.0):\n"
        "    print('holds', flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        assert maker.stdout.readline() == "holds\n"
        threading.Timer(0.3, maker.kill).start()
        begin = time.monotonic()
        with DiskCache(place, LARGE).made_once(Key((("graph", "a"),)), 30.0) as entry:
            assert entry is None
        assert time.monotonic() - begin < 20


def test_nothing_is_locked_where_nothing_can_be_written(cache: DiskCache, place: Path) -> None:
    cache.put(key("a"), b"there")
    before = snapshot(place)
    with DiskCache(place, LARGE, readonly=True).made_once(key("b"), 9.0) as entry:
        assert entry is None
    with cache.made_once(key("a"), 9.0) as entry:
        assert entry is None  # whoever asks could not use what is there
    assert snapshot(place) == before
