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
from itertools import chain
from operator import is_
from random import Random
from sys import getrefcount
from typing import Any

import torch

from lazy_backend.ports.hooks import REGISTRIES
from lazy_backend.replay.plain_values import is_a, is_plain
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
        return self.read, id(self.container), self.key

    def get(self) -> Any:
        """What is there now; None if there is nothing."""
        try:
            return self.read(self.container, self.key)
        except (LookupError, ValueError, AttributeError):
            return None

    def holds(self) -> bool:
        return id(self.get()) == self.value


def _entry(container: Any, key: Any) -> Any:
    return dict.get(container, key)  # unlike `container[key]`, it does not fill a defaultdict


def _class_entry(attributes: Any, key: Any) -> Any:
    return attributes.get(key)


def _item(container: Any, key: Any) -> Any:
    return container[key]


def _contents(cell: types.CellType, key: Any) -> Any:
    return cell.cell_contents


def _names_of(code: types.CodeType) -> set[str]:
    """The globals and attributes that code names, the functions defined in it included."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*map(_names_of, inner))


class Reachable:
    """What `roots` reach: functions, or objects that are arguments. Keeps it alive."""

    def __init__(self, roots: Iterable[Any]) -> None:
        self.modules: list[torch.nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.tensors: dict[int, LazyTensor] = {}
        self.generators: list[torch.Generator] = []
        self.random_states: list[Callable[[], Any]] = []
        # by id of a value: who leads to it, and where; no place but a part's name if that cannot change, as in a tuple
        self._ways: dict[int, list[tuple[int, StatePlace | Hashable]]] = {}
        self._values: dict[int, Any] = {}
        self._names: set[str] = set()  # that the functions found so far name
        self._named: list[tuple[Any, Any, Any]] = []  # attributes that are walked where a function names them
        self._walked: set[tuple[Any, int, Any]] = set()
        self._count = 0
        self._waiting: deque[Any] = deque()
        for number, root in enumerate(roots):
            self._find(root, None, number)
        known = -1
        while known != len(self._names):  # again if functions were found that name more
            known = len(self._names)
            for each in list(self._named):
                self._find_named(*each)
            while self._waiting and self._count < _MOST_VALUES:
                self._expand(self._waiting.popleft())

    def _find(self, value: Any, owner: Any, place: StatePlace | Hashable) -> None:
        self._count += 1
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
            for module in value.modules():
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
                self._find(getattr(value, name), value, name)
        elif is_a(value, types.ModuleType):
            if value.__name__.partition(".")[0] not in _LIBRARIES:
                self._add_named(_entry, vars(value), value)
        elif type(value).__name__ in ("_lru_cache_wrapper", "_lru_list_elem"):  # what is in there stays the same
            for number, part in enumerate(gc.get_referents(value)):
                self._find(part, value, number)
        elif is_a(value, torch.Generator):
            self.generators.append(value)
        elif not is_a(value, torch.Tensor):
            self._expand_object(value)

    def _expand_attributes(self, value: Any) -> None:
        """Walk the objects in a module or an optimizer that `StructureGuard` does not look into."""
        attributes = _attributes_of(value)
        for name, attribute in list(attributes.items()):
            if name not in _REGISTRIES and not (is_a(attribute, dict | set) and not len(attribute)):
                self._find_at(_entry, attributes, name, value)

    def _expand_function(self, function: types.FunctionType) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            self._find_at(_contents, cell, name, function)
        if not _is_of_library(function):
            names = _names_of(function.__code__)
            self._names |= names
            for name in names & function.__globals__.keys():
                self._find_at(_entry, function.__globals__, name, function)
        for name in list(vars(function)):
            self._find_at(_entry, vars(function), name, function)
        self._find(function.__defaults__, function, "__defaults__")
        self._find(function.__kwdefaults__, function, "__kwdefaults__")

    def _add_named(self, read: Any, attributes: Any, owner: Any) -> None:
        """Walk those of `attributes` that some function names, found by now or later."""
        self._named.append((read, attributes, owner))
        self._find_named(read, attributes, owner)

    def _find_named(self, read: Any, attributes: Any, owner: Any) -> None:
        for name in self._names & attributes.keys():
            self._find_at(read, attributes, name, owner)

    def _expand_object(self, value: Any) -> None:
        if is_a(value, dict):
            for key in list(dict.keys(value)):
                self._find_at(_entry, value, key, value)
        elif is_a(value, list | deque):
            for number in range(min(len(value), _MOST_VALUES)):
                self._find_at(_item, value, number, value)
        elif is_a(value, tuple | set | frozenset):
            for number, item in enumerate(value):  # all items of a set are in one place
                self._find(item, value, number if is_a(value, tuple) else "item")
        elif is_a(value, type):
            if not _is_of_library(value):
                self._add_named(_class_entry, vars(value), value)
        elif _is_of_library(type(value), ("lazy_backend",)):  # a captured function: what it does
            self._find(_attributes_of(value).get("__wrapped__"), value, "__wrapped__")
        else:
            self._note_random_source(value)
            attributes = _attributes_of(value)
            for name in list(attributes):
                self._find_at(_entry, attributes, name, value)
            self._expand_class(value)

    def _expand_class(self, value: Any) -> None:
        """The methods and attributes that code names, how an object is called, and attributes in slots."""
        for kind in type(value).__mro__:
            if _is_of_library(kind):
                continue
            self._add_named(_class_entry, vars(kind), value)
            for name in ("__call__", "forward"):
                self._find_at(_class_entry, vars(kind), name, value)
            for name in _slots_of(kind):
                self._find_at(getattr, value, name, value)

    def _find_at(self, read: Callable[[Any, Any], Any], container: Any, key: Any, owner: Any) -> None:
        # `vars` of a class makes a new proxy each time
        where = (read, id(owner) if read is _class_entry else id(container), key)
        if where in self._walked:
            return
        self._walked.add(where)
        try:
            value = read(container, key)
        except (LookupError, ValueError, AttributeError):
            return
        self._find(value, owner, StatePlace(read, container, key, id(value)))

    def _note_random_source(self, value: Any) -> None:
        if is_a(value, Random):
            self.random_states.append(value.getstate)
        numpy = sys.modules.get("numpy")
        if numpy is not None and is_a(value, numpy.random.Generator):
            self.random_states.append(lambda: repr(value.bit_generator.state))
        if numpy is not None and is_a(value, numpy.random.RandomState):
            self.random_states.append(lambda: repr(value.get_state(legacy=False)))

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


def name_of_key(key: Any) -> Hashable:
    """What stands for a key of a dict, or for an index."""
    return key if is_plain(key) else ("id", id(key))


def _attributes_of(value: Any) -> dict[str, Any]:
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def _is_of_library(kind: type | types.FunctionType, libraries: Container[str] = _LIBRARIES) -> bool:
    module = kind.__module__
    return type(module) is str and module.partition(".")[0] in libraries


def _slots_of(kind: type) -> Iterator[str]:
    slots = kind.__dict__.get("__slots__", ())
    for name in (slots,) if isinstance(slots, str) else tuple(slots):
        if name not in ("__dict__", "__weakref__"):
            yield name


def _is_large(value: Any) -> bool:
    return is_a(value, dict | list | deque) and len(value) > _MOST_KEYS


class PlaceGuard:
    """Whether values are where they were. See Note [Places]."""

    def __init__(self, places: Iterable[StatePlace], on_the_way: Iterable[Any], young: Iterable[Any]) -> None:
        self._places = tuple(dict.fromkeys(places))
        self._on_the_way = list(on_the_way)  # kept alive: places name values by id
        self._containers = list(young)
        self._counts: list[int] = []
        # what a body may walk through
        self._walked = [one for one in self._on_the_way if is_a(one, dict | list | deque) and not _is_large(one)]
        self._lengths = list(map(len, self._walked))
        self._dicts = [one for one in self._walked if is_a(one, dict)]  # the order of keys is that of values
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
