"""Processes that share a disk cache, some of them to be killed. Started by test_disk, each a mode of its own.

In: a mode and numbers on the command line. Out: one line of JSON. Loads no torch, so that it starts in 0.1 s.
"""

from __future__ import annotations

import functools
import json
import os
import random
import resource
import signal
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

# `lazy_backend.cache` without the package around it, which would load torch
_package = types.ModuleType("lazy_backend")
_package.__path__ = [str(Path(__file__).resolve().parents[2])]
sys.modules["lazy_backend"] = _package

from filelock import FileLock  # noqa: E402

from lazy_backend.cache import disk  # noqa: E402
from lazy_backend.cache.computation_cache import Key  # noqa: E402
from lazy_backend.cache.disk import DiskCache  # noqa: E402

OURS = Path(disk.__file__).parent
KEYS = [Key((("graph", f"graph {number}"),)) for number in range(40)]
PAYLOADS = [random.Random(number).randbytes(random.Random(number).randrange(40_000)) for number in range(40)]


def main(mode: str, directory: str, *numbers: str) -> None:
    modes: dict[str, Callable[..., dict[str, int]]] = {
        "work": work,
        "victims": victims,
        "calls": killed_at_every_call,
        "limited": limited,
    }
    print(json.dumps(modes[mode](Path(directory), *map(int, numbers))))


def work(directory: Path, max_bytes: int, seed: int, milliseconds: int) -> dict[str, int]:
    """Read, write, prune and list at random; look for whatever should not be."""
    # soon, so that what killed writers leave is swept within the test
    disk.STALE_AFTER = 0.5
    cache, chance = DiskCache(directory, max_bytes), random.Random(seed)
    until = time.monotonic() + milliseconds / 1000
    wrong = too_large = rounds = 0
    while time.monotonic() < until:
        rounds += 1
        wrong += not one_round(cache, chance)
        if rounds % 10 == 0:
            too_large += size_under_lock(cache) > max_bytes
    counts = cache.counts()
    return {
        "rounds": rounds,
        "wrong": wrong,
        "too_large": too_large,
        "hits": counts.hits,
        "evictions": counts.evictions,
        "corrupt": counts.corrupt,
    }


def one_round(cache: DiskCache, chance: random.Random) -> bool:
    """Whether what came back was right."""
    number, kind = chance.randrange(len(KEYS)), chance.random()
    if kind < 0.02:
        cache.prune(cache.max_bytes // 2)
    elif kind < 0.05:
        return all(entry.key in KEYS for entry in cache)
    elif kind < 0.4:
        cache.put(KEYS[number], PAYLOADS[number])
    else:
        return cache.get(KEYS[number]) in (None, PAYLOADS[number])
    return True


def size_under_lock(cache: DiskCache) -> int:
    # without the lock, one process could count a file that goes and another that comes in its place
    with FileLock(cache.directory / disk.LOCK_FILE):
        return cache.total_bytes()


def victims(directory: Path, max_bytes: int, seed: int, kills: int) -> dict[str, int]:
    """Processes that write all the time, killed one after the other at random moments."""
    chance = random.Random(seed)
    killed = 0
    for number in range(kills):
        child = forked(functools.partial(write_for_ever, directory, max_bytes, number))
        time.sleep(chance.uniform(0.001, 0.04))
        killed += kill(child)
    return {"killed": killed}


def write_for_ever(directory: Path, max_bytes: int, seed: int) -> None:
    cache, chance = DiskCache(directory, max_bytes), random.Random(seed)
    if seed % 2:
        # most kills hit the wait for the disk otherwise
        os.fsync = lambda fd: None
    while True:
        number = chance.randrange(len(KEYS))
        cache.put(KEYS[number], PAYLOADS[number])


def killed_at_every_call(directory: Path, everywhere: int) -> dict[str, int]:
    """`put` killed before and after its first call into C, its second, and so on, until one gets through.

    Counts calls made by cache/, or `everywhere`: there are ten times as many in filelock.
    """
    os.fsync = lambda fd: None
    old, new, other = b"old" * 100, b"new" * 100, b"other" * 60
    cache = DiskCache(directory, max_bytes=1100)
    wrong = call = 0
    status = -1
    while status != 0:
        call += 1
        assert cache.put(KEYS[0], old)
        assert cache.put(KEYS[1], other)
        status = wait(forked(functools.partial(put_killed_at, call, bool(everywhere), cache, new)))
        # None is right too: the entry may have been evicted to make room
        wrong += cache.get(KEYS[0]) not in (None, old, new)
        wrong += cache.get(KEYS[1]) not in (None, other)
        wrong += bool(cache.verify())
        # the lock is free, and what the dead process left is swept in its time
        disk.STALE_AFTER = 0.0
        wrong += not cache.put(KEYS[2], other)
        wrong += any(path.suffix == ".tmp" for path in directory.iterdir())
        disk.STALE_AFTER = 600.0
        cache.clear()
    return {"calls": call, "wrong": wrong, "corrupt": cache.counts().corrupt}


def put_killed_at(call: int, everywhere: bool, cache: DiskCache, payload: bytes) -> None:
    calls = 0

    def count(frame: types.FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("c_call", "c_return") and (everywhere or Path(frame.f_code.co_filename).parent == OURS)
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)
    cache.put(KEYS[0], payload)
    sys.setprofile(None)


def limited(directory: Path, max_file_bytes: int) -> dict[str, int]:
    """Writes when no file may be larger than `max_file_bytes`."""
    cache = DiskCache(directory, 1 << 20)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))
    kept = [cache.put(KEYS[number], b"x" * 1000 * number) for number in range(4)]
    counts = cache.counts()
    return {"kept": sum(kept), "writes": counts.writes, "errors": counts.errors, "found": len(list(cache))}


def forked(job: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            job()
        finally:
            os._exit(0 if sys.exc_info()[0] is None else 1)
    return child


def kill(child: int) -> bool:
    """Whether it was us who ended it."""
    os.kill(child, signal.SIGKILL)
    return wait(child) == -signal.SIGKILL


def wait(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    main(*sys.argv[1:])
