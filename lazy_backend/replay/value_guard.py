"""Check that the values that code may read are what they were: globals, variables, attributes, entries.

In: what a captured function reaches. Out: `ValueGuard`, which says what changed.

Note [What code may read]
A replay runs no Python, so whatever the body could have read must be as it was when its program was recorded. The code
that a function reaches names globals, variables of enclosing functions and attributes; of containers it may read every
entry. Each such place must hold the same object, or an equal plain value; functions must have the same code and
defaults; small arrays the same contents; tensors on the CPU the same version. Names count, not where they are used: an
attribute that some function reads is looked at in all objects that the functions have at hand. Modules, optimizers and
lazy tensors have guards of their own.

Some values cannot be followed: thread-local ones, weak references, iterators and generators, containers of more than
1000 entries, arrays of more than 16 KiB. Code that may read one is not replayed, and neither is a body that was seen to
read the environment, files or clocks (Note [Reads of a body]). Not seen is what other functions of C keep. Of installed
packages only plain values are followed, not which functions, classes and objects they name; of the modules of Python's
library only containers that code names, such as `sys.path`. Of all values, the 1000 nearest to the function
are followed.

The check compares by identity, in C: 60 ns for a value. Only if that fails are values compared.
"""

from __future__ import annotations

import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter, is_
from typing import Any

import torch

from lazy_backend.ports.cpython import attributes_of, is_a, items_of, length_of, mro_of, name_of, namespace_of
from lazy_backend.ports.tensor_types import version_of
from lazy_backend.replay.plain_values import is_array, is_plain, plain_key, same_plain
from lazy_backend.replay.reachable import MOST_KEYS, NOTHING_THERE, Reachable, StatePlace, is_installed, name_of_key
from lazy_backend.tensors.tensor import LazyTensor

# Bytes of an array, above which its contents are not looked at.
_LARGEST_ARRAY = 1 << 14
# Of classes whose instances may become those of another class.
_OF_PYTHON = 1 << 9
_flags_of: Callable[[type], int] = type.__dict__["__flags__"].__get__
_BUILT_IN = (dict, list, set, deque)
_code_of = attrgetter("__code__", "__defaults__", "__kwdefaults__")


class ValueGuard:
    """Whether code would read what it read. See Note [What code may read].

    Made before the body runs; then `leave_out_written`. `unseen`: a value that cannot be followed, such as a
    thread-local one; "" if there is none.
    """

    def __init__(self, reach: Reachable, state: bool = False) -> None:
        found, values = reach.values_read(state)
        self.unseen = _unseen_among(found, values)
        self._groups: dict[Any, _Group] = {}  # by how they are read
        for place, value in found:
            self._groups.setdefault(place.read, _Group()).add(place, value)
        facts = list(_facts_of(values))
        self._reads = [(read, one) for read, one, _ in facts]
        self._facts = [fact for _, _, fact in facts]
        # which are named by id
        self._held = [type(one) if read is _class_of else _code_of(one) for read, one in self._reads if read in _BY_ID]

    def without_written(self) -> ValueGuard:
        """A guard without what has changed: the body, which just ran, writes it. This one if nothing has."""
        if not self.change():
            return self
        made: ValueGuard = object.__new__(type(self))
        vars(made).update(vars(self))
        made._groups = {read: group.copied() for read, group in self._groups.items()}
        made.leave_out_written()
        return made

    def leave_out_written(self) -> None:
        """Follow no longer what has changed: the body, which just ran, writes it."""
        for group in self._groups.values():
            group.leave_out_changed()
        kept = [place for place, (read, one) in enumerate(self._reads) if read(one) == self._facts[place]]
        self._reads = [self._reads[place] for place in kept]
        self._facts = [self._facts[place] for place in kept]

    def change(self) -> str:
        """What has changed; empty if nothing has."""
        for group in self._groups.values():
            if not group.holds():
                changed = group.changed()
                if changed is not None:
                    return f"{_text_of(changed)}, which its code may read, is another one"
        if [read(one) for read, one in self._reads] != self._facts:
            return "a container, a function, an array or a tensor on the CPU that its code may read changed"
        return ""


_Fact = Callable[[Any], Any]


def _facts_of(values: Iterable[Any]) -> Iterator[tuple[_Fact, Any, Any]]:
    """What is in values, where that is not at places of its own: how it is read, the value, and what is read."""
    for value in values:
        if _flags_of(type(value)) & _OF_PYTHON:
            yield _fact(_class_of, value)
            if any("__getattr__" in namespace_of(kind) for kind in mro_of(type(value))):
                yield _fact(_num_attributes, value)  # which come before what that method gives
        if is_a(value, dict | list | deque | set):
            is_plain_set = is_a(value, set) and all(map(is_plain, items_of(value)))
            if length_of(value) <= MOST_KEYS:
                yield _fact(_keys_of if is_plain_set else len if type(value) in _BUILT_IN else length_of, value)
        elif is_a(value, types.FunctionType):
            if not is_installed(value.__module__):
                yield _fact(_parts_of, value)
        elif (is_array(value) or _is_buffer(value)) and _size_of(value) <= _LARGEST_ARRAY:
            yield _fact(_contents_of, value)
        elif is_a(value, torch.Tensor) and not is_a(value, LazyTensor):
            yield _fact(version_of, value)


def _fact(read: _Fact, one: Any) -> tuple[_Fact, Any, Any]:
    return read, one, read(one)


def _keys_of(values: set[Any]) -> Any:
    return frozenset((type(one), plain_key(one)) for one in items_of(values))


def _parts_of(function: Any) -> Any:
    return tuple(map(id, _code_of(function)))


def _class_of(value: Any) -> int:
    return id(type(value))


def _num_attributes(value: Any) -> int:
    return len(attributes_of(value))


_BY_ID = (_parts_of, _class_of)


def _contents_of(array: Any) -> Any:
    if is_array(array):
        return array.shape, array.dtype, array.tobytes()
    view = memoryview(array)
    return view.format, view.tobytes()


def _size_of(array: Any) -> int:
    """In bytes."""
    return int(array.nbytes if is_array(array) else memoryview(array).nbytes)


def _is_buffer(value: Any) -> bool:
    """Whether `value` holds bytes or numbers that Python code may write, as `bytearray` and `array.array` do."""
    arrays = sys.modules.get("array")
    return is_a(value, bytearray | memoryview) or (arrays is not None and is_a(value, arrays.array))


class _Group:
    """Places that are read in one way, and what was there."""

    __slots__ = ("places", "values", "_containers", "_keys")

    def __init__(self) -> None:
        self.places: list[StatePlace] = []
        self.values: list[Any] = []
        self._containers: list[Any] = []
        self._keys: list[Any] = []

    def add(self, place: StatePlace, value: Any) -> None:
        self.places.append(place)
        self.values.append(value)
        self._containers.append(place.container)
        self._keys.append(place.key)

    def copied(self) -> _Group:
        made = _Group()
        made.places, made.values = [*self.places], [*self.values]
        made._containers, made._keys = [*self._containers], [*self._keys]
        return made

    def holds(self) -> bool:
        """Whether the same objects are there."""
        try:
            return not self.places or all(map(is_, map(self.places[0].read, self._containers, self._keys), self.values))
        except NOTHING_THERE:
            return False

    def leave_out_changed(self) -> None:
        if not self.holds():
            kept = [
                (place, value)
                for place, value in zip(self.places, self.values, strict=True)
                if _is_same(place.get(), value)
            ]
            self.__init__()  # type: ignore[misc]
            for place, value in kept:
                self.add(place, value)

    def changed(self) -> StatePlace | None:
        """A place where something else is. Equal values take the place of those that were there."""
        for number, place in enumerate(self.places):
            value = place.get()
            if not _is_same(value, self.values[number]):
                return place
            self.values[number] = value
        return None


def _is_same(value: Any, other: Any) -> bool:
    if value is other:
        return True
    if type(value) is tuple and type(other) is tuple:
        return len(value) == len(other) and all(map(_is_same, value, other))
    return same_plain(value, other)


def _unseen_among(found: Iterable[tuple[StatePlace, Any]], values: Iterable[Any]) -> str:
    """The first of these values that has contents which nothing here compares; "" if there is none."""
    names = {id(value): _text_of(place) for place, value in found}
    for value in values:
        name = names.get(id(value), f"a {name_of(type(value))}")
        if is_a(value, threading.local):
            return f"the thread-local values of {name}"
        if id(value) in names and is_a(value, weakref.ReferenceType | weakref.ProxyType | weakref.CallableProxyType):
            return f"the weak reference {name}"  # to follow what it refers to would keep that alive
        if _is_iterator_of_c(type(value)):
            return f"the iterator {name}"
        if is_a(value, _BUILT_IN) and length_of(value) > MOST_KEYS:
            return f"{name}, which has more than {MOST_KEYS:,} entries"
        if (is_array(value) or _is_buffer(value)) and _size_of(value) > _LARGEST_ARRAY:
            return f"the array {name}, which has more than {_LARGEST_ARRAY:,} bytes"
    return ""


def _is_iterator_of_c(kind: type) -> bool:
    named = next((space["__next__"] for space in map(namespace_of, mro_of(kind)) if "__next__" in space), None)
    return type(named) is types.WrapperDescriptorType


def _text_of(place: StatePlace) -> str:
    """About how code names a place."""
    name = name_of_key(place.key)
    return str(name) if isinstance(name, str) else f"an entry [{name}]"
