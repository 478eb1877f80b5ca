"""Locks of a whole process, which a fork must not find held by a thread that stays behind.

In: nothing. Out: `process_lock`, for state that a process has once; `hold_all` and `release_all`, around a fork.
"""

from __future__ import annotations

import threading
from typing import Any

_locks: list[Any] = []
_held: list[Any] = []


def process_lock() -> Any:
    """An `RLock` that is nobody's in a forked child. For module-level state: it is never forgotten."""
    lock = threading.RLock()
    _locks.append(lock)
    return lock


def hold_all() -> None:
    """Before a fork: wait until no other thread holds one of the locks, in the order in which they were made."""
    for lock in _locks:
        lock.acquire()
        _held.append(lock)


def release_all() -> None:
    """After a fork, in the parent as in the child, where the thread that forked is the one that holds them."""
    while _held:
        _held.pop().release()
