"""Process-wide locks that no other thread may hold at a fork, since that thread would not exist in the child.

In: nothing. Out: `process_lock`, for state that a process has once; `hold_all` and `release_all`, around a fork.
"""

from __future__ import annotations

import threading
from typing import Any

_locks: list[Any] = []
_held: list[Any] = []


def process_lock(outermost: bool = False) -> Any:
    """An `RLock` that is free in a forked child. For module-level state: the lock is never dropped.

    outermost: whether its holder takes other locks of this kind, so that a fork has to take it before them.
    """
    lock = threading.RLock()
    _locks.insert(0 if outermost else len(_locks), lock)
    return lock


def has(lock: Any) -> bool:
    """Whether `lock` is one of `process_lock`."""
    return any(one is lock for one in _locks)


def hold_all() -> None:
    """Before a fork: acquire all locks, the outermost first, so that no other thread holds one."""
    for lock in _locks:
        lock.acquire()
        _held.append(lock)


def release_all() -> None:
    """After a fork, in both the parent and the child: release the locks, which the forking thread holds in either."""
    while _held:
        _held.pop().release()
