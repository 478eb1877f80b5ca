"""Process-wide locks that no other thread may hold at a fork, since that thread would not exist in the child.

In: nothing. Out: `process_lock`, for state that a process has once; `hold_outermost`, `hold_others` and `release_all`,
around a fork.
"""

from __future__ import annotations

import threading
from typing import Any

_outermost: list[Any] = []
_others: list[Any] = []
_held: list[Any] = []


def process_lock(outermost: bool = False) -> Any:
    """An `RLock` that is free in a forked child. For module-level state: the lock is never dropped.

    outermost: whether a thread that holds it takes locks of devices.
    """
    lock = threading.RLock()
    if outermost:
        _outermost.append(lock)
    else:
        _others.append(lock)
    return lock


def has(lock: Any) -> bool:
    """Whether `lock` is one of `process_lock`."""
    return any(one is lock for one in (*_outermost, *_others))


def hold_outermost() -> None:
    """Before a fork, and before locks of devices are held: acquire the locks that come before those.

    No other thread holds one of them then.
    """
    _hold(_outermost)


def hold_others() -> None:
    """Before a fork: acquire the other locks, in the order in which they were made."""
    _hold(_others)


def _hold(locks: list[Any]) -> None:
    for lock in locks:
        lock.acquire()
        _held.append(lock)


def release_all() -> None:
    """After a fork, in both the parent and the child: release the locks, which the forking thread holds in either."""
    while _held:
        _held.pop().release()
