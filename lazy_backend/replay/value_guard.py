"""Check that the values that code may read are what they were: globals, variables, attributes, entries.

In: what a captured function reaches. Out: `ValueGuard`, which says what changed.

Note [What code may read]
A replay runs no Python, so whatever the body could have read must be as it was when its program was recorded. The code
that a function reaches names globals, variables of enclosing functions and attributes; of containers it may read every
entry. Each such place must hold the same object, or an equal plain value; functions must have the same code and
defaults; small arrays the same contents; tensors on the CPU the same version. Names count, not where they are used: an
attribute that some function reads is looked at in all objects that the functions have at hand. Modules, optimizers and
lazy tensors have guards of their own.

An object may have a method that takes the next batch, counts steps or keeps the loss, and calls the captured one: what
changes then at each call is named, but not by code that ran. Whether it is read all the same, by PyTorch's code, by C
or on another thread, cannot be seen. So an attribute of an object is left out of the guard of a captured function if
the code that ran does not name it, and if it was another one in two calls that were recorded and computed alike.

What is not there may come: an attribute that hides another or that `hasattr` asks for, a method that an operator calls
first, a key of a dict, a global that hides a builtin. So the names that dicts, objects and classes of the user's have
are compared, too, and the bases of classes. Code that may read attributes which it does not name (`vars`, `asdict`,
`getattr` with a name that it computes, patterns of classes) has all attributes of the user's objects followed. Code is
found in two ways: by walking, and by what ran while the body was recorded (`CodeThatRan`). The user's functions that
ran, and the classes that they are methods of, are starting points like the captured function itself: hooks, functions
in a table, the `__eq__` of a dataclass. But functions that the body makes anew are not: what they read is what the
code around them names. A call that ran more than those before is not replayed; the next one is compared by that.

The body may change what it reads. Containers, and what it only counts (`self.calls += 1`), are then not what it goes
by. A plain value that it reads and writes is: such a body runs as written.

Some values cannot be followed: thread-local ones, weak references, iterators and generators, containers of more than
1000 entries, arrays of more than 16 KiB. Code that may read one is not replayed, and neither is a body that was seen
to read the environment, files or clocks (Note [Reads of a body]). Not seen is what other functions of C keep. Of
installed packages only plain values are followed, and containers and arrays in attributes that the user's code names,
not which functions, classes and objects they name; of modules of PyTorch's and of Python's library the containers
(`sys.path`), plain values and functions that the user's code names. Of all values, the 1000 nearest to the function
are followed.

The check compares by identity, in C: 60 ns for a value. Only if that fails are values compared.
"""

from __future__ import annotations

import abc
import functools
import gc
import logging
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Container, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from operator import attrgetter, is_
from typing import Any

import torch

from lazy_backend.ports.cpython import (
    attributes_of,
    is_a,
    items_of,
    keys_view,
    length_of,
    module_of,
    mro_of,
    name_of,
    namespace_of,
    num_registrations,
    parts_of,
    registered_with,
    shows_attributes,
)
from lazy_backend.ports.tensor_types import is_leaf, version_of
from lazy_backend.replay.plain_values import is_array, is_plain, plain_key, same_plain
from lazy_backend.replay.reachable import (
    MOST_KEYS,
    NOTHING_THERE,
    Reachable,
    StatePlace,
    is_installed,
    is_users,
    name_of_key,
)
from lazy_backend.replay.unseen_reads import holds_tensor
from lazy_backend.tensors.state import LazyStorage
from lazy_backend.tensors.tensor import LazyTensor, own_attributes

# Bytes of an array, above which its contents are not looked at.
_LARGEST_ARRAY = 1 << 14
# Of classes whose instances may become those of another class.
_OF_PYTHON = 1 << 9
_flags_of: Callable[[type], int] = type.__dict__["__flags__"].__get__
_CACHE = functools._lru_cache_wrapper
# Of caches with more results only the number is compared.
_LARGEST_CACHE = 100
# Not for `issubclass`: an abstract base class remembers each class that it is asked about.
_WEAK = (weakref.WeakSet, weakref.WeakValueDictionary, weakref.WeakKeyDictionary)
_BUILT_IN = (dict, list, set, deque)
_code_of = attrgetter("__code__", "__defaults__", "__kwdefaults__", "__name__", "__qualname__")


class ValueGuard:
    """Whether code would read what it read. See Note [What code may read].

    Made before the body runs. If the body changed something, the guard is made anew, of what it left, without what it
    changed: `changed`. `unseen`: a value that cannot be followed, such as a thread-local one; "" if there is none.
    `functions`: the ids of those that it follows.
    """

    def __init__(self, reach: Reachable, without: Container[Hashable] = (), state: bool = False) -> None:
        found, come_to, values = reach.values_read(state)
        named = None if state else reach.read_by_what_ran()
        self.unseen = _unseen_among(found, [one for one in values if named is None or id(one) in named[0]])
        self._groups: dict[Any, _Group] = {}  # by how they are read
        for place, value in found:
            if place.where not in without:
                self._groups.setdefault(place.read, _Group()).add(place, value)
        self.functions = {id(value) for value in come_to if is_a(value, types.FunctionType)}
        self._shapes = _Shapes(come_to, without)
        self._contents = Contents(come_to)
        self._containers = {id(value) for value in come_to if is_a(value, dict | list | deque)}
        self._keys = reach.keys
        facts = [*_facts_of(values), *_facts_besides(come_to, reach)]
        facts = [one for one in facts if (one[0], id(one[1])) not in without]
        self._reads = [(read, one) for read, one, _ in facts]
        self._facts = [fact for _, _, fact in facts]
        # which are named by id
        self._held = [type(one) if read is _class_of else _code_of(one) for read, one in self._reads if read in _BY_ID]

    def watching(self) -> AbstractContextManager[None]:
        """A block that runs a body: `changed` then tells of the tensors that it stores."""
        return self._contents.watching()

    def end(self) -> None:
        """Forget these objects, of which no other body needs to be compared: they may hold tensors."""
        self._contents = Contents(())

    def memory_besides(self, other: ValueGuard) -> list[LazyStorage]:
        """The memory of lazy tensors in the objects that the other one does not look at."""
        return self._contents.memory_besides(other._contents)

    def changed(self) -> Changed | None:
        """What the body, which just ran, has changed; None if nothing."""
        places = [place for group in self._groups.values() for place in group.all_changed()]
        facts = zip(self._reads, self._facts, strict=True)
        changed = [(read, one) for (read, one), fact in facts if read(one) != fact]
        parts: set[Hashable] = {(read, id(one)) for read, one in changed}
        held: list[Any] = [place.get() for place, _ in places]
        piles_up = self._contents.piles_up
        stores_tensor = self._contents.stores_tensor or any(map(holds_tensor, held))
        parts |= self._shapes.all_changed()
        read = [place for place, is_plain in places if is_plain and self._is_read(place)]
        parts |= {place.where for place, _ in places}.difference(place.where for place in read)
        name = next(map(_text_of, read), "")
        return Changed(frozenset(parts), name, stores_tensor, piles_up) if parts or read or stores_tensor else None

    def _is_read(self, place: StatePlace) -> bool:
        """Whether code reads what is at a place that it writes, and does not only count it."""
        if id(place.container) not in self._containers:
            return True  # what is only counted is not among the places
        return isinstance(place.key, str | int) and place.key in self._keys

    def change(self) -> str:
        """What has changed; empty if nothing has."""
        for group in self._groups.values():
            if not group.holds():
                changed = group.changed()
                if changed is not None:
                    return f"{_text_of(changed)}, which its code may read, is another one"
        if not self._shapes.holds():
            changed_shape = self._shapes.changed()
            if changed_shape:
                return changed_shape
        if [read(one) for read, one in self._reads] != self._facts:
            return "a container, a function, an array or a tensor on the CPU that its code may read changed"
        return ""


@dataclass(frozen=True, slots=True)
class Changed:
    """What a body changed of what a guard looks at, which is not what it goes by.

    `read`: the name of a plain value besides that code reads, too; "" if there is none. Entries of containers count if
    code has their keys as constants. `stores_tensor`: whether a lazy tensor is at one of the places, or in an object
    that code names; `piles_up`: whether in a container that has more entries now.
    """

    parts: frozenset[Hashable]
    read: str
    stores_tensor: bool
    piles_up: bool


_Fact = Callable[[Any], Any]


def _facts_of(values: Iterable[Any]) -> Iterator[tuple[_Fact, Any, Any]]:
    """What is in values, where that is not at places of its own: how it is read, the value, and what is read."""
    for value in values:
        if _flags_of(type(value)) & _OF_PYTHON:
            yield _fact(_class_of, value)
        if is_a(value, set):
            if length_of(value) <= MOST_KEYS:
                yield _fact(_keys_of, value)
        elif is_a(value, types.FunctionType):
            if not is_installed(value.__module__):
                yield _fact(_parts_of, value)
        elif is_a(value, _CACHE):
            yield _fact(_cached_in, value)
        elif (is_array(value) or _is_buffer(value)) and _size_of(value) <= _LARGEST_ARRAY:
            yield _fact(_contents_of, value)
        elif is_a(value, torch.Tensor) and not is_a(value, LazyTensor):
            yield _fact(version_of, value)


def _facts_besides(values: Iterable[Any], reach: Reachable) -> Iterator[tuple[_Fact, Any, Any]]:
    """What is in values that have guards of their own, and in the process, which those guards do not look at."""
    yield _fact(_registered, _Registered(one for one in values if is_a(one, abc.ABCMeta)))
    asks_tensors = any(map(reach.reads, ("requires_grad", "grad")))
    asks_for_levels = any(map(reach.reads_or_calls, ("level", "isEnabledFor", "getEffectiveLevel", "disabled")))
    decimals = getattr(sys.modules.get("decimal"), "Decimal", ())
    if decimals and (reach.reads_or_calls("Decimal") or any(is_a(value, decimals) for value in values)):
        yield _fact(_decimal_context, None)
    for value in values:
        if is_a(value, types.ModuleType):
            yield _fact(_class_of, value)
        elif is_a(value, LazyTensor):
            if asks_tensors or own_attributes(value):
                yield _fact(_answers_of, weakref.ref(value))
        elif is_a(value, list | deque):
            yield _fact(len if type(value) in _BUILT_IN else length_of, value)
        elif is_a(value, logging.Logger) and asks_for_levels:
            yield _fact(_levels_of, value)


class _Registered:
    """The classes that count as of abstract ones, by registration: those of the user's, or with a class of the user's.

    Packages register theirs when they are imported, which may be at any time. Besides `kinds`, Python's own are asked.
    """

    __slots__ = ("_kinds", "_at", "_found")

    def __init__(self, kinds: Iterable[type]) -> None:
        self._kinds = tuple(kinds)
        self._at: Any = None
        self._found: frozenset[tuple[int, weakref.ref[type]]] = frozenset()

    def now(self) -> frozenset[tuple[int, weakref.ref[type]]]:
        at = num_registrations()
        if at != self._at:
            found = (*_registered_with_pythons(at), *_registered_with(self._kinds))
            # by reference: the id of a class that is gone may be that of another one
            self._found = frozenset((kind, reference) for kind, reference in found if reference() is not None)
            self._at = at
        return self._found


@functools.lru_cache(maxsize=1)
def _registered_with_pythons(at: Any) -> list[tuple[int, weakref.ref[type]]]:
    """Registered classes, with the ids of the abstract ones of Python's library, after `at` registrations."""
    libraries = map(sys.modules.get, ("collections.abc", "numbers"))
    values = chain.from_iterable(vars(library).values() for library in libraries if library is not None)
    return _registered_with(one for one in values if is_a(one, abc.ABCMeta))


def _registered_with(kinds: Iterable[type]) -> list[tuple[int, weakref.ref[type]]]:
    return [
        (id(kind), weakref.ref(registered))
        for kind, registered in registered_with(kinds)
        if is_users(module_of(kind)) or is_users(module_of(registered))
    ]


_registered = _Registered.now


def _decimal_context(_: None) -> str:
    return repr(sys.modules["decimal"].getcontext())


def _answers_of(reference: weakref.ref[Any]) -> Any:
    """What a tensor, which the guard does not keep, says besides its value."""
    tensor = reference()
    if tensor is None:
        return None
    own = [
        (name, type(value), plain_key(value) if is_plain(value) else id(value))
        for name, value in own_attributes(tensor).items()
    ]
    return tensor.requires_grad, is_leaf(tensor) and tensor.grad is None, own


def _levels_of(logger: Any) -> list[Any]:
    found = [logger.manager.disable]
    while logger is not None:
        found += (logger.level, logger.disabled)
        logger = logger.parent if logger.propagate or not found[-2] else None
    return found


def _fact(read: _Fact, one: Any) -> tuple[_Fact, Any, Any]:
    return read, one, read(one)


def _keys_of(values: set[Any]) -> Any:
    return frozenset((type(one), plain_key(one)) if is_plain(one) else id(one) for one in items_of(values))


def _parts_of(function: Any) -> Any:
    return tuple(map(id, _code_of(function)))


def _cached_in(function: Any) -> list[int]:
    """The results that `functools.lru_cache` keeps, by id; of large caches, how many."""
    parts = gc.get_referents(function)
    found = list(map(id, parts))
    for part in parts:
        if type(part) is dict:
            found += [len(part), *(map(id, part.values()) if len(part) <= _LARGEST_CACHE else ())]
    return found


def _class_of(value: Any) -> int:
    return id(type(value))


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


class Contents:
    """What is in the objects that code names, whether it reads that or only writes it: `total.loss = loss`.

    Modules and optimizers are compared by `StructureGuard`. `stores_tensor`: whether the latest body stored a lazy
    tensor in one of the objects; `piles_up`: whether in a container that had more entries then.
    """

    __slots__ = ("_objects", "stores_tensor", "piles_up")

    def __init__(self, values: Iterable[Any]) -> None:
        others = torch.nn.Module | torch.optim.Optimizer | torch.Tensor
        self._objects = {id(value): value for value in values if not is_a(value, others)}
        self.stores_tensor = self.piles_up = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """See `ValueGuard.watching`."""
        self.stores_tensor = self.piles_up = False
        # kept meanwhile: what goes would leave its id to what comes
        before = list(map(_contents_named, self._objects.values()))
        yield
        for one, parts in zip(self._objects.values(), before, strict=True):
            known, now = set(map(id, parts)), _contents_named(one)
            if any(holds_tensor(part) for part in now if id(part) not in known):
                self.stores_tensor = True
                self.piles_up = self.piles_up or (len(now) > len(parts) and is_a(one, _BUILT_IN))

    def memory_besides(self, other: Contents) -> list[LazyStorage]:
        """See `ValueGuard.memory_besides`."""
        more = [one for number, one in self._objects.items() if number not in other._objects]
        parts = chain.from_iterable(map(_contents_named, more))
        return [part._data.storage for part in parts if is_a(part, LazyTensor)]


def _contents_named(value: Any) -> list[Any]:
    if is_a(value, type):
        return list(namespace_of(value).values()) if is_users(module_of(value)) else []
    attributes = attributes_of(value)
    if len(attributes) > MOST_KEYS or (is_a(value, _BUILT_IN) and length_of(value) > MOST_KEYS):
        return []
    own = [] if is_a(value, types.ModuleType) else parts_of(value)
    return [*own, *dict.values(attributes)]


class _Shapes:
    """The names there are, in order: keys of dicts, attributes of objects, and of classes with their bases.

    Of objects and classes of the user's: what is not there may come, and hide or replace what code found so far.
    """

    __slots__ = (
        "_ids",
        "_views",
        "_names",
        "_lengths",
        "_keys",
        "_classes",
        "_bases",
        "_called",
        "_objects",
        "_attributes",
    )

    def __init__(self, values: Iterable[Any], without: Container[Hashable]) -> None:
        views: dict[int, tuple[Any, str]] = {}
        classes: dict[int, type] = {}
        self._objects: list[Any] = []
        self._attributes: list[Any] = []
        for value in values:
            kind = type(value)
            if is_a(value, type):
                classes |= {id(one): one for one in (*mro_of(value), *mro_of(kind))}
                continue
            classes |= {id(one): one for one in mro_of(kind)}
            if is_a(value, dict) and length_of(value) <= MOST_KEYS:
                views[id(value)] = keys_view(value), f"the keys of a {name_of(kind)}"
            if _has_names_of_its_own(value):
                attributes = attributes_of(value)
                views[id(attributes)] = dict.keys(attributes), f"the attributes of a {name_of(kind)}"
                if not is_a(value, types.ModuleType) and shows_attributes(kind):
                    self._objects.append(value)
                    self._attributes.append(attributes)
        self._classes = [one for one in classes.values() if is_users(module_of(one))]
        self._bases = list(map(mro_of, self._classes))
        self._called = list(map(name_of, self._classes))
        for kind in self._classes:
            views[id(kind)] = namespace_of(kind), f"the attributes of the class {name_of(kind)}"
        views = {number: view for number, view in views.items() if ("names", number) not in without}
        self._ids = list(views)
        self._views = [view for view, _ in views.values()]
        self._names = [name for _, name in views.values()]
        self._note()

    def _note(self) -> None:
        self._lengths = list(map(len, self._views))
        self._keys = list(chain.from_iterable(self._views))

    def holds(self) -> bool:
        """Whether the same names are there."""
        try:
            return (
                list(map(len, self._views)) == self._lengths
                and all(map(is_, chain.from_iterable(self._views), self._keys))
                and all(map(is_, map(mro_of, self._classes), self._bases))
                and list(map(name_of, self._classes)) == self._called
                and all(map(is_, map(_attributes, self._objects), self._attributes))
            )
        except NOTHING_THERE:
            return False

    def changed(self) -> str:
        """What changed, as a reason; empty if there are equal names. They take the place of those that were there."""
        for view, name, keys in zip(self._views, self._names, self._keys_by_view(), strict=True):
            if not _are_same_keys(view, keys):
                return f"{name} that its code may read are others"
        for kind, bases, name in zip(self._classes, self._bases, self._called, strict=True):
            if mro_of(kind) is not bases or name_of(kind) != name:
                return f"the bases or the name of the class {name} changed"
        for value, attributes in zip(self._objects, self._attributes, strict=True):
            if attributes_of(value) is not attributes:
                return f"the attributes of a {name_of(type(value))} were exchanged"
        self._note()
        return ""

    def all_changed(self) -> set[Hashable]:
        """The views in which other names are."""
        if self.holds():
            return set()
        views = zip(self._ids, self._views, self._keys_by_view(), strict=True)
        return {("names", number) for number, view, keys in views if not _are_same_keys(view, keys)}

    def _keys_by_view(self) -> list[list[Any]]:
        keys = iter(self._keys)
        return [list(islice(keys, length)) for length in self._lengths]


def _are_same_keys(view: Any, keys: list[Any]) -> bool:
    try:
        now = list(view)
    except RuntimeError:  # another thread changes it right now
        return False
    return len(now) == len(keys) and all(
        one is other or same_plain(one, other) for one, other in zip(now, keys, strict=True)
    )


def _has_names_of_its_own(value: Any) -> bool:
    """Whether attributes may come to a value and replace what its class gives, and no other guard looks at them."""
    if is_a(value, types.ModuleType):
        return "__getattr__" in attributes_of(value) and is_users(dict.get(attributes_of(value), "__name__"))
    if is_a(value, types.FunctionType):
        return is_users(value.__module__)
    if is_a(value, types.SimpleNamespace):
        return True
    others = torch.nn.Module | torch.optim.Optimizer | torch.Tensor | type
    return bool(_flags_of(type(value)) & _OF_PYTHON) and not is_a(value, others)


def _attributes(value: Any) -> Any:
    return object.__getattribute__(value, "__dict__")


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

    def holds(self) -> bool:
        """Whether the same objects are there."""
        try:
            return not self.places or all(map(is_, map(self.places[0].read, self._containers, self._keys), self.values))
        except NOTHING_THERE:
            return False

    def all_changed(self) -> Iterator[tuple[StatePlace, bool]]:
        """The places where something else is, and whether plain values were and are there."""
        if not self.holds():
            for place, value in zip(self.places, self.values, strict=True):
                if not _is_same(now := place.get(), value):
                    yield place, is_plain(value) and is_plain(now)

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
        if any(base is one for base in mro_of(type(value)) for one in _WEAK):
            return f"the weak references in {name}"
        if _is_of_c_types(value):
            return f"the C data {name}"
        if _is_opaque_array(value):
            return f"the array {name}, which is of objects, or of another class than numpy's"
        if _is_iterator_of_c(type(value)):
            return f"the iterator {name}"
        if is_a(value, _BUILT_IN) and length_of(value) > MOST_KEYS:
            return f"{name}, which has more than {MOST_KEYS:,} entries"
        if (is_array(value) or _is_buffer(value)) and _size_of(value) > _LARGEST_ARRAY:
            return f"the array {name}, which has more than {_LARGEST_ARRAY:,} bytes"
    return ""


def _is_of_c_types(value: Any) -> bool:
    ctypes = sys.modules.get("ctypes")
    return ctypes is not None and is_a(value, (ctypes._SimpleCData, ctypes.Structure, ctypes.Union, ctypes.Array))


def _is_opaque_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    if numpy is not None and is_a(value, numpy.ndarray):
        return not is_array(value)
    if is_a(value, torch.Tensor) or not is_installed(module_of(type(value))):
        return False
    return any("__array__" in namespace_of(kind) for kind in mro_of(type(value)))  # such as the columns of a table


def _is_iterator_of_c(kind: type) -> bool:
    named = next((space["__next__"] for space in map(namespace_of, mro_of(kind)) if "__next__" in space), None)
    return type(named) is types.WrapperDescriptorType


def _text_of(place: StatePlace) -> str:
    """About how code names a place."""
    name = name_of_key(place.key)
    return str(name) if isinstance(name, str) else f"an entry [{name}]"
