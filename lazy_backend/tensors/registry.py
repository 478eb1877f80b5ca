"""Weak references to the objects that are alive."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """Weak references to everything that was registered and may be alive.

    Dead objects are unregistered only when the list has doubled, so that registering costs a constant.
    Source: torch/csrc/lazy/core/lazy_graph_executor.h, `RegisterTensor`, `UnregisterTensor`.
    """

    def __init__(self) -> None:
        self.references: list[weakref.ref[T]] = []
        self._bound = 1024
        self._watched: list[T] | None = None

    def register(self, one: T) -> None:
        """Note `one`, which was made outside a trace, from the host's data."""
        if self._watched is not None:
            self._watched.append(one)
        self.register_all((one,))

    def register_all(self, several: Iterable[T]) -> None:
        """Note objects that a trace or a replay made and that are still held."""
        self.references.extend(map(weakref.ref, several))
        if len(self.references) > self._bound:
            self._unregister_dead()

    def alive(self) -> list[T]:
        return [one for reference in self.references if (one := reference()) is not None]

    @contextlib.contextmanager
    def watching(self) -> Iterator[list[T]]:
        """A list that collects what `register` gets within the block."""
        watched: list[T] = []
        self._watched = watched
        try:
            yield watched
        finally:
            if self._watched is watched:  # this block may end late, after an interruption
                self._watched = None

    def _unregister_dead(self) -> None:
        alive = [reference for reference in self.references if reference() is not None]
        # each once: memory that is given back and taken again is registered at each step; and in the same list, as
        # the recorder in C++ adds to it
        self.references[:] = {id(reference): reference for reference in alive}.values()
        # doubling keeps the cost per registered tensor constant
        self._bound = max(1024, 2 * len(self.references))
