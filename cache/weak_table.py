"""A table of values that it does not keep alive, without code that runs when a value dies."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

# A table this small is not searched for dead entries.
_SMALL = 1024


class WeakTable(Generic[Key, Value]):
    """What `weakref.WeakValueDictionary` is for, without its callbacks; safe to use from several threads.

    A callback written in Python runs at whichever line drops the last reference to a value. If Ctrl-C or a signal
    handler's exception arrives there, CPython prints it and drops it: the user's interrupt is lost. Here dead entries
    stay until the table has doubled since they were last searched for, so they never outnumber the living by much.
    """

    def __init__(self) -> None:
        self._references: dict[Key, weakref.ref[Value]] = {}
        # reentrant: a signal handler or a finalizer may add while this thread adds
        self._lock = threading.RLock()
        self._sweep_at = _SMALL

    def get(self, key: Key) -> Value | None:
        """The living value under `key`."""
        reference = self._references.get(key)
        return None if reference is None else reference()

    def setdefault(self, key: Key, value: Value) -> Value:
        """The living value under `key`, which is `value` if there was none. Atomic between threads."""
        reference = weakref.ref(value)
        with self._lock:
            found = self.get(key)
            if found is not None:
                return found
            self._references[key] = reference
            if len(self._references) > self._sweep_at:
                self._sweep()
        return value

    def __setitem__(self, key: Key, value: Value) -> None:
        with self._lock:
            self._references[key] = weakref.ref(value)
            if len(self._references) > self._sweep_at:
                self._sweep()

    def discard(self, key: Key) -> None:
        """Forget the value under `key`, if there is one."""
        self._references.pop(key, None)

    def __iter__(self) -> Iterator[Value]:
        """The living values at the time of the call."""
        # list(dict.values()) runs no Python code, so no other thread's entry comes in between
        living = [reference() for reference in list(self._references.values())]
        return iter([value for value in living if value is not None])

    def __len__(self) -> int:
        """Entries in the table, dead ones that were not yet removed among them."""
        return len(self._references)

    def _sweep(self) -> None:
        for key, reference in list(self._references.items()):
            if reference() is None:
                self._references.pop(key, None)
        self._sweep_at = max(_SMALL, 2 * len(self._references))
