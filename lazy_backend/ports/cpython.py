"""CPython: reference counts, frames, the garbage collector's generations, the layout of instances.

In: `sys`, `gc`. Out: what holds on every version: counts less what the counting itself adds, measured at import.
"""

from __future__ import annotations

import _thread
import gc
import sys
from collections.abc import Callable, Sequence
from operator import methodcaller
from sys import getrefcount
from types import FrameType
from typing import Any

# The frame of the caller at a depth; that of each thread, by the thread's number. Functions of C.
frame_at: Callable[[int], FrameType] = getattr(sys, "_getframe", None)  # type: ignore[assignment]
frames_of_threads: Callable[[], dict[int, FrameType]] = getattr(sys, "_current_frames", None)  # type: ignore[assignment]

# The classes of `threading.Lock` and `threading.RLock`, which are functions before Python 3.13.
LOCK_TYPES: tuple[type, ...] = (_thread.LockType, _thread.RLock)

# Whether the calling thread holds a `threading.RLock`, as `threading.Condition` asks.
is_owned: Callable[[Any], bool] = methodcaller("_is_owned")


def counts_of(objects: Sequence[Any]) -> list[int]:
    """The reference counts of `objects`, with those of the list, of `map` and of the call: see `UNHELD`.

    Counted within a function of C: CPython may pass what a function of Python is given without counting it.
    """
    return list(map(getrefcount, objects))


# What `counts_of` gives for an object that only the list holds.
UNHELD = counts_of([object()])[0]


def counts_holders() -> bool:
    """Whether a variable and a list count as one reference each."""
    value: list[Any] = []
    other = [value]
    return counts_of([value])[0] - UNHELD == 2 and counts_of(other)[0] - UNHELD == 1


def young_objects() -> list[Any]:
    """What was made since the garbage collector last ran: its youngest generation."""
    return gc.get_objects(generation=0)


def sees_young_objects() -> bool:
    """Whether `young_objects` has an object that was just made."""
    made: list[Any] = []
    return any(one is made for one in young_objects())


# An instance that has a `__dict__` and nothing else: larger ones have state in C, or slots.
_SIZE_OF_PLAIN_INSTANCE: int = type("_Plain", (), {}).__basicsize__


def has_only_a_dict(kind: type) -> bool:
    """Whether instances of a class have attributes in a `__dict__`, and nothing besides."""
    return kind.__dictoffset__ != 0 and kind.__basicsize__ <= _SIZE_OF_PLAIN_INSTANCE
