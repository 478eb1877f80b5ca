"""What the code of a function can name, and where each value is.

In: a function. Out: the modules, optimizers, tensors and sources of random numbers that it reaches, and guards over the
places that lead to them.

Note [Places]
State is followed by place, not by object: code reads `st["h"]`, whatever is there. A place is an entry of a dict or a
list, an attribute, a variable of an enclosing function or a global. `Reachable` walks from a function's closure,
defaults, bound object and the globals that its code names, through containers and objects, down to modules, optimizers
and tensors. What is within modules and optimizers is not walked: see Note [What a structure guard sees]. A guard over
the places of a tensor checks every step of every way that leads to it. It says nothing about other values there: a
number in a list or a global may change unseen.

A container that the body makes anew at each call, such as the tuple in `self.state = (h, c)`, would change under
whoever has taken hold of it, since a replay leaves the same container and gives its tensors new values. So the
reference counts of young containers on the way are part of the guard.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections import deque
from collections.abc import Callable, Container, Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from operator import is_
from random import Random, SystemRandom
from sys import getrefcount
from typing import Any

import torch

from lazy_backend.ports.cpython import (
    attributes_of,
    container_kind,
    is_a,
    items_of,
    length_of,
    module_of,
    mro_of,
    name_of,
    namespace_of,
    slots_of,
    values_view,
)
from lazy_backend.ports.hooks import REGISTRIES, modules_within
from lazy_backend.replay.plain_values import has_plain_hash, is_plain, is_process_wide
from lazy_backend.tensors.tensor import LazyTensor

# More values than this are not walked, 1 µs each: what lies beyond is unknown.
_MOST_VALUES = 20_000
# Larger containers are not compared key by key.
_MOST_KEYS = 1000
# Modules of Python whose attributes are not state of the user.
_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "lazy_backend"}
# Lead to state, but are no state themselves, or have guards of their own.
_NO_CONTAINERS = (
    types.FunctionType | types.MethodType | types.ModuleType | type | torch.nn.Module | torch.optim.Optimizer
)
# What a name of one of these stands for changes only where code is replaced.
_DEFINITIONS = types.FunctionType | types.BuiltinFunctionType | types.ModuleType | type
# What `StructureGuard` sees of a module or an optimizer.
_REGISTRIES = frozenset((*REGISTRIES, "state", "param_groups", "defaults"))


@dataclass(frozen=True, slots=True, eq=False)
class StatePlace:
    """Where a value is: `read(container, key)` returns it. The value itself is named by id: a guard keeps no tensor."""

    read: Callable[[Any, Any], Any]
    container: Any
    key: Any
    value: int

    @property
    def where(self) -> tuple[Any, int, Any]:
        return self.read, id(self.container), name_of_key(self.key)

    def get(self) -> Any:
        """What is there now; None if there is nothing."""
        try:
            return self.read(self.container, self.key)
        except _NOTHING_THERE:
            return None

    def holds(self) -> bool:
        return id(self.get()) == self.value


def _entry(container: Any, key: Any) -> Any:
    return dict.get(container, key)  # unlike `container[key]`, it does not fill a defaultdict


def _entry_of_key(container: Any, key: Any) -> Any:
    """As `_entry`, for a key whose class defines how it is found."""
    return next((value for own, value in dict.items(container) if own is key), None)


def _class_entry(attributes: Any, key: Any) -> Any:
    return attributes.get(key)


def _slot(value: Any, slot: Any) -> Any:
    return slot.__get__(value)


_ITEM_READERS: dict[type, Callable[[Any, int], Any]] = {list: list.__getitem__, deque: deque.__getitem__}
# Raised by readers. A dict may be changed by another thread meanwhile.
_NOTHING_THERE = (LookupError, ValueError, AttributeError, RuntimeError)


def _contents(cell: types.CellType, key: Any) -> Any:
    return cell.cell_contents


def _names_of(code: types.CodeType) -> set[str]:
    """The globals and attributes that code names, the functions defined in it included."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*map(_names_of, inner))


class Reachable:
    """What `roots` reach: functions, or objects that are arguments. Keeps it alive.

    Runs no code of theirs (Note [No code of the user's]), and goes nowhere that grows with the process: not from a
    logger to all others, nor from a module or a class to more than functions name. `largest`: of containers, how many
    values are walked. `count`: of the values walked.
    """

    def __init__(self, roots: Iterable[Any], largest: int = _MOST_VALUES) -> None:
        self.modules: list[torch.nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.tensors: dict[int, LazyTensor] = {}
        self.generators: list[torch.Generator] = []
        self.random_states: list[Callable[[], Any]] = []
        self.globals: dict[int, dict[str, Any]] = {}  # of the functions found, by id
        self.named: list[StatePlace] = []  # that code names: globals, variables, attributes of classes and modules
        self.count = 0
        # by id of a value: who leads to it, and where; no place but a part's name if that cannot change, as in a tuple
        self._ways: dict[int, list[tuple[int, StatePlace | Hashable]]] = {}
        self._values: dict[int, Any] = {}
        self._names: set[str] = set()  # that the functions found so far name
        self._new_names: set[str] = set()  # those that `_named` was not searched for
        self._named: list[tuple[Any, Any, Any]] = []  # attributes that are walked where a function names them
        self._walked: set[tuple[Any, int, Any]] = set()
        self._waiting: deque[Any] = deque()
        self._largest = largest
        for number, root in enumerate(roots):
            self._find(root, None, number)
        self._walk()

    def _walk(self) -> None:
        while True:
            while self._waiting and self.count < _MOST_VALUES:
                self._expand(self._waiting.popleft())
            if not self._new_names:
                return
            names, self._new_names = self._new_names, set()
            for each in list(self._named):
                self._find_named(names, *each)

    def _find(self, value: Any, owner: Any, place: StatePlace | Hashable) -> None:
        self.count += 1
        if is_plain(value):
            return
        self._ways.setdefault(id(value), []).append((id(owner), place))
        if id(value) not in self._values:
            self._values[id(value)] = value
            self._waiting.append(value)

    def _expand(self, value: Any) -> None:
        if type(value) is LazyTensor:
            self.tensors[id(value)] = value
        elif is_a(value, torch.nn.Module):
            self.modules.append(value)
            self._expand_class(value)
            for _, module in modules_within(value):
                self._expand_attributes(module)
        elif is_a(value, torch.optim.Optimizer):
            self.optimizers.append(value)
            self._expand_attributes(value)
        elif is_a(value, types.FunctionType):
            self._expand_function(value)
        elif is_a(value, types.MethodType):
            self._find(value.__self__, value, "__self__")
            self._find(value.__func__, value, "__func__")
        elif is_a(value, functools.partial):
            for name in ("func", "args", "keywords"):
                self._find(namespace_of(functools.partial)[name].__get__(value), value, name)
        elif is_a(value, types.ModuleType):
            attributes = attributes_of(value)
            if not _is_of_library(dict.get(attributes, "__name__")):
                self._add_named(_entry, attributes, value)
        elif name_of(type(value)) in ("_lru_cache_wrapper", "_lru_list_elem"):  # what is in there stays the same
            for number, part in enumerate(islice(gc.get_referents(value), self._largest)):
                self._find(part, value, number)
        elif is_a(value, torch.Generator):
            self.generators.append(value)
        elif not is_a(value, torch.Tensor) and not is_process_wide(type(value)):
            self._expand_object(value)

    def _expand_attributes(self, value: Any) -> None:
        """Walk the objects in a module or an optimizer that `StructureGuard` does not look into."""
        attributes = attributes_of(value)
        for name, attribute in list(dict.items(attributes)):
            if name not in _REGISTRIES and not (is_a(attribute, dict | set) and not length_of(attribute)):
                self._find_at(_entry, attributes, name, value, attribute)

    def _expand_function(self, function: types.FunctionType) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            self._read_at(_contents, cell, name, function)
        if not _is_of_library(function.__module__):
            names = _names_of(function.__code__)
            self._new_names |= names - self._names
            self._names |= names
            self.globals[id(function.__globals__)] = function.__globals__
            for name in names & dict.keys(function.__globals__):
                self._read_at(_entry, function.__globals__, name, function)
        for name in list(vars(function)):
            self._read_at(_entry, vars(function), name, function)
        self._find(function.__defaults__, function, "__defaults__")
        self._find(function.__kwdefaults__, function, "__kwdefaults__")

    def _add_named(self, read: Any, attributes: Any, owner: Any) -> None:
        """Walk those of `attributes` that some function names, found by now or later."""
        self._named.append((read, attributes, owner))
        self._find_named(self._names, read, attributes, owner)

    def _find_named(self, names: set[str], read: Any, attributes: Any, owner: Any) -> None:
        keys = dict.keys(attributes) if is_a(attributes, dict) else attributes.keys()
        for name in names & keys:
            self._read_at(read, attributes, name, owner)

    def _expand_object(self, value: Any) -> None:
        kind = container_kind(value)
        if kind is dict:
            for key, item in list(islice(dict.items(value), self._largest)):
                self._find_at(_entry if has_plain_hash(key) else _entry_of_key, value, key, value, item)
        elif kind in _ITEM_READERS:
            for number, item in enumerate(list(islice(items_of(value), self._largest))):
                self._find_at(_ITEM_READERS[kind], value, number, value, item)
        elif kind is not None:
            for number, item in enumerate(islice(items_of(value), self._largest)):  # a set's are in one place
                self._find(item, value, number if kind is tuple else "item")
        elif is_a(value, type):
            if not _is_of_library(module_of(value)):
                self._add_named(_class_entry, namespace_of(value), value)
        elif _is_of_library(module_of(type(value)), ("lazy_backend",)):  # a captured function: what it does
            self._find(attributes_of(value).get("__wrapped__"), value, "__wrapped__")
        else:
            self._note_random_source(value)
            attributes = attributes_of(value)
            for name, attribute in list(dict.items(attributes)):
                self._find_at(_entry, attributes, name, value, attribute)
            self._expand_class(value)

    def _expand_class(self, value: Any) -> None:
        """The methods and attributes that code names, how an object is called, and attributes in slots."""
        for kind in mro_of(type(value)):
            if _is_of_library(module_of(kind)):
                continue
            namespace = namespace_of(kind)
            self._add_named(_class_entry, namespace, value)
            for name in ("__call__", "forward"):
                self._read_at(_class_entry, namespace, name, value)
            for slot in slots_of(kind):
                self._read_at(_slot, value, slot, value)

    def _read_at(self, read: Callable[[Any, Any], Any], container: Any, key: Any, owner: Any) -> None:
        """As `_find_at`, if something is there."""
        try:
            value = read(container, key)
        except _NOTHING_THERE:
            return
        place = self._find_at(read, container, key, owner, value)
        if place is not None and not is_a(value, _DEFINITIONS) and read is not _slot:
            self.named.append(place)

    def _find_at(
        self, read: Callable[[Any, Any], Any], container: Any, key: Any, owner: Any, value: Any
    ) -> StatePlace | None:
        """Find `value`, which is at a place. Returns the place, if it is a new one."""
        # `namespace_of` a class makes a new proxy each time
        where = (read, id(owner) if read is _class_entry else id(container), name_of_key(key))
        if where in self._walked:
            return None
        self._walked.add(where)
        place = StatePlace(read, container, key, id(value))
        self._find(value, owner, place)
        return place

    def _note_random_source(self, value: Any) -> None:
        if is_a(value, SystemRandom):
            self.random_states.append(object)  # draws what cannot be seen: each time another state
        elif is_a(value, Random):
            self.random_states.append(functools.partial(Random.getstate, value))
        numpy = sys.modules.get("numpy")
        if numpy is not None and is_a(value, numpy.random.Generator):
            self.random_states.append(functools.partial(_state_of, numpy, value))
        if numpy is not None and is_a(value, numpy.random.RandomState):
            self.random_states.append(lambda: repr(numpy.random.RandomState.get_state(value, legacy=False)))

    # ----- places

    def ways_to(self, targets: Iterable[int]) -> tuple[list[StatePlace], list[Any]]:
        """All places that lead to the values with these ids, and the containers and objects on the way."""
        places: list[StatePlace] = []
        seen = set(targets)
        waiting = list(seen)
        while waiting:
            for owner, place in self._ways.get(waiting.pop(), ()):
                if isinstance(place, StatePlace):
                    places.append(place)
                if owner not in seen:
                    seen.add(owner)
                    waiting.append(owner)
        return places, [self._values[number] for number in seen.difference(targets) if number in self._values]

    def shared_places(self, tensors: Container[int]) -> list[StatePlace]:
        """The places that lead to `tensors`, given by id, or to a container of tensors that several places lead to."""
        found = dict.fromkeys(number for number in self.tensors if number in tensors)
        for value in self.ways_to(self.tensors)[1]:
            if len(self._ways[id(value)]) > 1 and not is_a(value, _NO_CONTAINERS):
                found[id(value)] = None
        return [place for place in self.ways_to(found)[0] if not _is_large(place.container)]

    def num_ways(self, number: int) -> int:
        """How many places lead to the value with this id."""
        return len(self._ways.get(number, ()))

    def ways(self) -> Iterator[tuple[Any, list[tuple[int, Hashable, StatePlace | None]]]]:
        """Each value, after the first of its owners, with its ways: the owner's id, the step from there, the place.

        The owner of roots is None. A step is the same in another walk, also where a container was made anew. It is the
        name of a part, or says whether it is an entry, how it is read, in which part of a function, and its key.
        """
        for number, value in self._values.items():
            yield (
                value,
                [
                    (owner, self._step(owner, place), place if isinstance(place, StatePlace) else None)
                    for owner, place in self._ways[number]
                ],
            )

    def _step(self, owner: int, place: StatePlace | Hashable) -> Hashable:
        if not isinstance(place, StatePlace):
            return place
        of = self._values.get(owner)
        # a function leads to what it closes over, to globals and to its attributes
        inside = id(place.container) if is_a(of, types.FunctionType) else None
        return is_a(of, dict | list | deque), place.read.__name__, inside, name_of_key(place.key)

    def __contains__(self, number: int) -> bool:
        return number in self._ways


def _state_of(numpy: Any, generator: Any) -> str | object:
    source = numpy.random.Generator.bit_generator.__get__(generator)
    # a class of the user's may have no state: then it may draw unseen
    return repr(source.state) if str(module_of(type(source))).startswith("numpy.") else object()


def name_of_key(key: Any) -> Hashable:
    """What stands for a key of a dict, for an index or for a slot."""
    if type(key) is types.MemberDescriptorType:
        return key.__name__
    return key if is_plain(key) and has_plain_hash(key) else ("id", id(key))


def _is_of_library(module: Any, libraries: Container[str] = _LIBRARIES) -> bool:
    return type(module) is str and module.partition(".")[0] in libraries


def _is_large(value: Any) -> bool:
    return is_a(value, dict | list | deque) and length_of(value) > _MOST_KEYS


class PlaceGuard:
    """Whether values are where they were. See Note [Places]."""

    def __init__(self, places: Iterable[StatePlace], on_the_way: Iterable[Any], young: Iterable[Any]) -> None:
        self._places = tuple(dict.fromkeys(places))
        self._on_the_way = list(on_the_way)  # kept alive: places name values by id
        self._containers = list(young)
        self._counts: list[int] = []
        # what a body may walk through
        walked = [one for one in self._on_the_way if is_a(one, dict | list | deque) and not _is_large(one)]
        self._walked = list(map(values_view, walked))
        self._lengths = list(map(len, self._walked))
        self._dicts = [dict.keys(one) for one in walked if is_a(one, dict)]  # the order of keys is that of values
        self._keys = list(chain.from_iterable(self._dicts))

    def settle(self) -> None:
        """Note the reference counts of the containers, after the caller has dropped its own references."""
        self._counts = self._count()

    def _count(self) -> list[int]:
        return list(map(getrefcount, self._containers))

    def holds(self) -> bool:
        for place in self._places:
            if not place.holds():
                return False
        if list(map(len, self._walked)) != self._lengths:
            return False
        if not all(map(is_, chain.from_iterable(self._dicts), self._keys)):
            return False
        return not self._containers or self._count() == self._counts
