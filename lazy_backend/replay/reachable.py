"""What the code of a function can name, and where each value is.

In: a function. Out: the modules, optimizers, tensors and sources of random numbers that it reaches, and guards over the
places that lead to them.

Note [Places]
State is followed by place, not by object: code reads `st["h"]`, whatever is there. A place is an entry of a dict or a
list, an attribute, a variable of an enclosing function or a global. `Reachable` walks from a function's closure,
defaults, bound object and the globals that its code names, through containers and objects, down to modules, optimizers
and tensors. What is within modules and optimizers is not walked: see Note [What a structure guard sees]. A guard over
the places of a tensor checks every step of every way that leads to it. Other values there are `values_read`, which
`ValueGuard` follows: what a global, a variable, an attribute or an entry is that code may read.

A container that the body makes anew at each call, such as the tuple in `self.state = (h, c)`, would change under
whoever has taken hold of it, since a replay leaves the same container and gives its tensors new values. So the
reference counts of young containers on the way are part of the guard.
"""

from __future__ import annotations

import enum
import functools
import gc
import sys
import sysconfig
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Container, Hashable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import chain, islice
from operator import attrgetter, is_, methodcaller
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
    names_read,
    namespace_of,
    slots_of,
    values_view,
)
from lazy_backend.ports.hooks import (
    CALL_HOOKS,
    HOOKS_OF_ALL,
    REGISTRIES,
    STEP_HOOKS,
    modules_within,
    registered_tensors,
)
from lazy_backend.replay.plain_values import FIELDS, has_plain_hash, is_array, is_plain, is_process_wide, plain_key
from lazy_backend.replay.structure import hooks_of
from lazy_backend.replay.unseen_reads import CodeThatRan, MethodsOf
from lazy_backend.tensors.tensor import LazyTensor, own_attributes

# More values than this are not walked, 1 µs each: what lies beyond is unknown.
_MOST_VALUES = 20_000
# Larger containers are not compared key by key.
MOST_KEYS = 1000
# Those whose objects hold values that others put there, and read them by names that no code of the user's has.
_OF_VALUES = frozenset(
    ("collections", "contextlib", "queue", "threading", "fractions", "string", "datetime", "pathlib", "uuid", "types")
)
# What no body goes by among these: the generator of a context manager, which runs once.
_RUNS_ONCE = "gen"
# Those whose objects hold nothing but attributes of the user's.
_NAMESPACES = ("argparse",)
# Modules of Python whose attributes are not state of the user.
_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "lazy_backend"}
# Lead to state, but are no state themselves, or have guards of their own.
_NO_CONTAINERS = (
    types.FunctionType | types.MethodType | types.ModuleType | type | torch.nn.Module | torch.optim.Optimizer
)
# Where packages are installed.
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})
# More values than this are not compared before each replay, 60 ns each.
_MOST_FOLLOWED = 1000
# Methods that nobody names.
_CALLED = ("__call__", "forward", *CALL_HOOKS, *STEP_HOOKS)
# Those of autograd functions.
_OF_FUNCTIONS = ("backward", "setup_context", "vjp", "jvp")
# What code that calls a class runs.
_CONSTRUCTORS = ("__new__", "__init__", "__post_init__")
# What code that uses an object does not run unless it names it.
_SELDOM = frozenset(
    (*_CONSTRUCTORS, "__del__", "__repr__", "__str__", "__reduce__", "__reduce_ex__", "__init_subclass__")
)
# Objects around functions, with the names of what is in them.
_PARTS: dict[type, tuple[str, ...]] = {
    functools.partial: ("func", "args", "keywords"),
    property: ("fget",),
    classmethod: ("__func__",),
    staticmethod: ("__func__",),
}
_FACTORY: Any = defaultdict.__dict__["default_factory"]
# Objects of C around others, which nothing but the garbage collector comes to.
_WRAPPERS: tuple[type, ...] = (
    types.MappingProxyType,
    functools._lru_cache_wrapper,
    type({}.keys()),  # type: ignore[var-annotated]
    type({}.values()),  # type: ignore[var-annotated]
    type({}.items()),  # type: ignore[var-annotated]
    type(functools.cmp_to_key(lambda one, other: 0)),
)
# Objects that read attributes by names which they hold.
_READERS = (attrgetter, methodcaller)
# Values whose attributes are at places of their own, or have guards of their own.
_SEEN_BY_OTHERS = types.ModuleType | type | torch.nn.Module | torch.optim.Optimizer | LazyTensor
# Objects whose attributes `StructureGuard` sees.
_WITH_STRUCTURE = torch.nn.Module | torch.optim.Optimizer
# Values of which at least the number of entries is compared.
_WITH_LENGTHS = (dict, list, deque, set)
# What `StructureGuard` sees of a module or an optimizer.
_REGISTRIES = frozenset((*REGISTRIES, "state", "param_groups", "defaults"))


# Of objects: their class, and the name.
Attribute = tuple[type, Hashable]


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
        except NOTHING_THERE:
            return None

    def holds(self) -> bool:
        return id(self.get()) == self.value


_entry = dict.get  # unlike `container[key]`, it does not fill a defaultdict


def _entry_of_key(container: Any, key: Any) -> Any:
    """As `_entry`, for a key whose class defines how it is found."""
    return next((value for own, value in dict.items(container) if own is key), None)


def _class_entry(kind: Any, key: Any) -> Any:
    return namespace_of(kind).get(key)


def _slot(value: Any, slot: Any) -> Any:
    return slot.__get__(value)


_ITEM_READERS: dict[type, Callable[[Any, int], Any]] = {list: list.__getitem__, deque: deque.__getitem__}
# Raised by readers. A dict may be changed by another thread meanwhile.
NOTHING_THERE = (LookupError, ValueError, AttributeError, RuntimeError)


def _contents(cell: types.CellType, key: Any) -> Any:
    return cell.cell_contents


def _codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """Code, and that of the functions defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes_of(constant)


class Reachable:
    """What `roots` reach: functions, or objects that are arguments. Keeps it alive.

    Runs no code of theirs (Note [No code of the user's]), and goes nowhere that grows with the process: not from a
    logger to all others, nor from a module or a class to more than functions name. `largest`: of containers, how many
    values are walked. `ran`: code that is not to be found by walking. `count`: of the values walked.
    """

    def __init__(self, roots: Iterable[Any], ran: CodeThatRan | None = None, largest: int = _MOST_VALUES) -> None:
        self.modules: list[torch.nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.tensors: dict[int, LazyTensor] = {}
        self.generators: list[torch.Generator] = []
        self.random_states: list[Callable[[], Any]] = []
        self.globals: dict[int, dict[str, Any]] = {}  # of the functions found, by id
        self.parts_read: list[torch.nn.Module | torch.optim.Optimizer] = []  # that `values_read` came to
        self.count = 0
        # by id of a value: who leads to it, and where; no place but a part's name if that cannot change, as in a tuple
        self._ways: dict[int, list[tuple[int, StatePlace | Hashable]]] = {}
        self._values: dict[int, Any] = {}
        self._not_walked: dict[int, Any] = {}  # values besides
        # modules and their tensors, each with the id of one that it is part of
        self._within: dict[int, tuple[torch.nn.Module | torch.Tensor, int]] = {}
        # plain values, and those of which `_ways` names another owner: the owner, where, and the value
        self._besides: list[tuple[Any, StatePlace, Any]] = []
        self._names = set(ran.names if ran is not None else ())  # that the functions found so far name
        self._attributes = set(ran.attributes if ran is not None else ())  # of those, read and not only called
        self._own_names: set[str] = set()  # as these, by functions that no package made
        self._own_attributes: set[str] = set()
        self._strings: set[str] = set()  # of those, given to `getattr` and `hasattr`
        self._left_out = frozenset() if ran is None else ran.left_out
        self._ran_names = frozenset() if ran is None else ran.names | ran.attributes
        self._reads_all = ran is not None and ran.reads_all  # whether attributes may be read that nobody names
        self._user_reads_all = ran is not None and ran.user_reads_all  # by code that no package has
        self._has_all = False  # whether those of classes and modules were found
        self.keys: set[str | int] = set()  # constants that may be keys of entries which code reads
        self._variables = {"__class__"}  # of enclosing functions, that they read; `super` reads that one unseen
        self._globals: set[tuple[int, str]] = set()  # that they read, each with the id of where it is
        self._new_names: set[str] = set()  # those that `_named` was not searched for
        self._named: list[tuple[Any, Any, Any]] = []  # attributes that are walked where a function names them
        self._walked: set[tuple[Any, Any, Any]] = set()
        self._walked_from: set[tuple[int, tuple[Any, Any, Any]]] = set()
        self._waiting: deque[Any] = deque()
        self._largest = largest
        for number, root in enumerate(roots):
            self._find(root, None, number)
        for number, hook in enumerate(chain.from_iterable(map(dict.values, HOOKS_OF_ALL))):
            self._find(hook, None, ("hook", number))
        self._walk()

    def _walk(self) -> None:
        while True:
            while self._waiting and self.count < _MOST_VALUES:
                self._expand(self._waiting.popleft())
            if self._new_names:
                names, self._new_names = self._new_names, set()
                for each in list(self._named):
                    self._find_named(names, *each)
            elif self._reads_all and not self._has_all:
                self._has_all = True
                for each in list(self._named):
                    self._find_all(*each)
            else:
                return

    def _find(self, value: Any, owner: Any, place: StatePlace | Hashable) -> None:
        self.count += 1
        if _is_leaf(value):
            return
        self._ways.setdefault(id(value), []).append((id(owner), place))
        if id(value) not in self._values:
            self._values[id(value)] = value
            self._waiting.append(value)

    def _expand(self, value: Any) -> None:
        if type(value) is LazyTensor:
            self.tensors[id(value)] = value
            self._find_hooks(value)
            for name, attribute in own_attributes(value).items():  # no places: they would keep what it stands for
                self._find(attribute, value, name)
        elif is_a(value, torch.nn.Module):
            self.modules.append(value)
            self._expand_class(value)
            for _, module in modules_within(value):
                self._within.setdefault(id(module), (module, id(value)))
                self._expand_attributes(module)
                if module is not value:
                    self._expand_class(module)
        elif is_a(value, torch.optim.Optimizer):
            self.optimizers.append(value)
            self._expand_class(value)
            self._expand_attributes(value)
        elif is_a(value, types.FunctionType):
            self._expand_function(value)
        elif type(value) is MethodsOf:
            self._not_walked[id(value)] = of_class = value.reference()  # the class may go at any time
            for base in mro_of(of_class) if of_class is not None else ():
                if not _is_of_library(module_of(base)):
                    self._add_named(_class_entry, base, value)
        elif is_a(value, types.BuiltinMethodType | types.MethodWrapperType):
            if not is_a(value.__self__, types.ModuleType | type):
                self._find(value.__self__, value, "__self__")
        elif is_a(value, types.MethodType):
            self._find(value.__self__, value, "__self__")
            self._find(value.__func__, value, "__func__")
        elif (kind := next((one for one in _PARTS if is_a(value, one)), None)) is not None:
            for name in _PARTS[kind]:
                self._read_at(_slot, value, namespace_of(kind)[name], value)
        elif is_a(value, types.ModuleType):
            self._add_named(_entry, attributes_of(value), value)
            self._read_at(_entry, attributes_of(value), "__getattr__", value)
        elif is_a(value, _WRAPPERS) or name_of(type(value)) == "_lru_list_elem":  # what is in there stays the same
            for number, part in enumerate(islice(gc.get_referents(value), self._largest)):
                self._find(part, value, number)
        elif is_a(value, torch.Generator):
            self.generators.append(value)
        elif is_a(value, _READERS):
            self._reads_all = self._user_reads_all = True
        elif not is_a(value, torch.Tensor) and not is_process_wide(type(value)):
            self._expand_object(value)

    def _expand_attributes(self, value: Any) -> None:
        """Walk the objects in a module or an optimizer that `StructureGuard` does not look into."""
        attributes = attributes_of(value)
        for name, attribute in list(dict.items(attributes)):
            if name not in _REGISTRIES and not (is_a(attribute, dict | set) and not length_of(attribute)):
                self._find_at(_entry, attributes, name, value, attribute)
        for tensor in registered_tensors(value):
            if type(tensor) is not LazyTensor:
                continue
            own, has_hooks = own_attributes(tensor), bool(hooks_of(tensor))
            if own or has_hooks:
                self._within.setdefault(id(tensor), (tensor, id(value)))
                self._find_hooks(tensor)
                for name, attribute in own.items():
                    self._find_at(_entry, attributes_of(tensor), name, tensor, attribute)

    def _find_hooks(self, tensor: torch.Tensor) -> None:
        for number, hook in enumerate(hooks_of(tensor)):
            self._find(hook, tensor, ("hook", number))

    def _expand_function(self, function: types.FunctionType) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            self._read_at(_contents, cell, name, function)
        if not _is_of_library(function.__module__):
            self._expand_code(function)
        for name in list(vars(function)):
            self._read_at(_entry, vars(function), name, function)
        self._find(function.__defaults__, function, "__defaults__")
        self._find(function.__kwdefaults__, function, "__kwdefaults__")

    def _expand_code(self, function: types.FunctionType) -> None:
        """Find the globals, the builtins and the modules that a function names, and note the attributes."""
        is_users = not is_installed(function.__module__)
        space = function.__globals__
        codes = list(_codes_of(function.__code__))
        names = set().union(*(code.co_names for code in codes))
        self._new_names |= names - self._names
        for code in codes:
            read = names_read(code)
            self._new_names |= read.attributes - self._attributes  # of modules of a library, names that are read count
            self._attributes |= read.attributes
            self._variables |= read.variables
            self._globals.update((id(space), name) for name in read.globals)
            for name in read.modules:
                self._find_imported(name, dict.get(space, "__package__"), function, is_users)
            if is_users:
                self._new_names |= (read.attributes - self._own_attributes) | (names - self._own_names)
                self._own_names |= names
                self._own_attributes |= read.attributes
                self._strings |= read.strings
                self.keys |= read.keys
                self._reads_all = self._reads_all or read.reads_all
                self._user_reads_all = self._user_reads_all or read.reads_all
                self._note_builtins(read.globals, function)
        self._names |= names
        self.globals[id(space)] = space
        for name in names & dict.keys(space):
            self._read_at(_entry, space, name, function)
            if is_users and any(space[name] is one and name != one.__name__ for one in (getattr, hasattr, vars)):
                self._reads_all = self._user_reads_all = True

    def _note_builtins(self, names: Iterable[str], function: types.FunctionType) -> None:
        """Find what names mean that are no globals, and note where globals of these names would be found first."""
        builtins: dict[str, Any] = function.__builtins__  # type: ignore[attr-defined]
        for name in names:
            if not dict.__contains__(function.__globals__, name):
                self._note_absent(_entry, function.__globals__, name, function)
                if dict.__contains__(builtins, name):
                    self._read_at(_entry, builtins, name, function)
                else:
                    self._note_absent(_entry, builtins, name, function)

    def _find_imported(self, name: str, package: Any, function: types.FunctionType, is_users: bool) -> None:
        """Find a module that code imports, itself or relative to its package, and those that it is within."""
        names = [name] if type(package) is not str or not package else [name, f"{package}.{name}".rstrip(".")]
        for full in names:
            parts = full.split(".")
            for number in range(1, len(parts) + 1):
                self._read_at(_entry, sys.modules, ".".join(parts[:number]), function)
        if is_users and name not in sys.modules:
            self._note_absent(_entry, sys.modules, name, function)

    def _note_absent(self, read: Callable[[Any, Any], Any], container: Any, key: Any, owner: Any) -> None:
        """Note a place where nothing is, and where code would find something first."""
        self._besides.append((owner, StatePlace(read, container, key, id(None)), None))

    def _add_named(self, read: Any, attributes: Any, owner: Any) -> None:
        """Walk those of `attributes` that some function names, found by now or later."""
        self._named.append((read, attributes, owner))
        self._find_named(self._names, read, attributes, owner)
        if self._has_all:
            self._find_all(read, attributes, owner)

    def _find_all(self, read: Any, attributes: Any, owner: Any) -> None:
        """Find the attributes of a class or a module of the user's, named or not."""
        keys = dict.keys(attributes) if is_a(attributes, dict) else namespace_of(attributes).keys()
        module = dict.get(attributes, "__name__") if is_a(attributes, dict) else module_of(attributes)
        if is_users(module):
            for name in [name for name in keys if not _is_special(name) or name == "__match_args__"]:
                self._read_at(read, attributes, name, owner)

    def _find_named(self, names: set[str], read: Any, attributes: Any, owner: Any) -> None:
        keys = dict.keys(attributes) if is_a(attributes, dict) else namespace_of(attributes).keys()
        found = names & keys
        if is_a(owner, types.ModuleType):
            for name in (names & self._strings) - keys:
                self._note_absent(_entry, attributes, name, owner)
            if _is_of_library(dict.get(attributes, "__name__")):
                self._find_in_library(found & (self._own_names | self._own_attributes), attributes, owner)
                return
        for name in found:
            self._read_at(read, attributes, name, owner)

    def _find_in_library(self, names: Iterable[str], attributes: dict[str, Any], owner: types.ModuleType) -> None:
        """Find what the user's code reads of a module of Python's library, PyTorch or numpy: what may be exchanged."""
        for name in names:
            value = attributes[name]
            if is_a(value, types.FunctionType | types.BuiltinFunctionType):
                self._not_walked[id(value)] = value
                self._besides.append((owner, StatePlace(_entry, attributes, name, id(value)), value))
            elif is_a(value, types.ModuleType) and _is_of_library(dict.get(attributes_of(value), "__name__")):
                self._read_at(_entry, attributes, name, owner)
            elif name in self._own_attributes and (is_plain(value) or is_a(value, _WITH_LENGTHS)):
                if not is_plain(value) and length_of(value) > MOST_KEYS:  # such as `sys.modules`
                    self._values[id(value)] = value  # code that names it runs as written: it need not be walked
                self._read_at(_entry, attributes, name, owner)

    def _expand_object(self, value: Any) -> None:
        kind = container_kind(value)
        if kind is dict:
            for number, (key, item) in enumerate(list(islice(dict.items(value), self._largest))):
                if not is_plain(key) and not is_a(key, torch.Tensor):
                    self._find(key, value, ("key", number))
                self._find_at(_entry if has_plain_hash(key) else _entry_of_key, value, key, value, item)
            if is_a(value, defaultdict):
                self._read_at(_slot, value, _FACTORY, value)
        elif kind in _ITEM_READERS:
            for number, item in enumerate(list(islice(items_of(value), self._largest))):
                self._find_at(_ITEM_READERS[kind], value, number, value, item)
        elif kind is not None:
            for number, item in enumerate(islice(items_of(value), self._largest)):  # a set's are in one place
                self._find(item, value, number if kind is tuple else "item")
        elif is_a(value, type):
            if not _is_of_library(module_of(value)):
                for base in mro_of(value):
                    if not _is_of_library(module_of(base)):
                        self._add_named(_class_entry, base, value)
                for name in (*_CONSTRUCTORS, *(_OF_FUNCTIONS if _is_function_class(value) else ())):
                    self._read_at(_class_entry, value, name, value)
                self._expand_class(value)  # that of a metaclass
        elif _is_of_library(module_of(type(value)), ("lazy_backend",)):  # a captured function: what it does
            self._find(attributes_of(value).get("__wrapped__"), value, "__wrapped__")
            return
        else:
            self._note_random_source(value)
        if not is_a(value, type) and kind is not type(value):  # the user's containers have attributes besides
            attributes = attributes_of(value)
            for name, attribute in list(dict.items(attributes)):
                self._find_at(_entry, attributes, name, value, attribute)
            self._expand_class(value)

    def _expand_class(self, value: Any) -> None:
        """The methods and attributes that code names, those that operators and calls use, and attributes in slots."""
        for kind in mro_of(type(value)):
            if _is_of_library(module_of(kind), _OF_VALUES):
                for slot in slots_of(kind):
                    self._read_at(_slot, value, slot, value)
            if _is_of_library(module_of(kind)):
                continue
            self._add_named(_class_entry, kind, value)
            is_foreign = is_installed(module_of(kind))
            for name, function in list(namespace_of(kind).items()):  # another thread may add one
                if _is_called(value, name) or (not is_foreign and _is_used_by_operators(kind, name, function)):
                    self._find_at(_class_entry, kind, name, value, function)
            for slot in slots_of(kind):
                self._read_at(_slot, value, slot, value)

    def _read_at(self, read: Callable[[Any, Any], Any], container: Any, key: Any, owner: Any) -> None:
        """As `_find_at`, if something is there."""
        try:
            value = read(container, key)
        except NOTHING_THERE:
            return
        self._find_at(read, container, key, owner, value)

    def _find_at(self, read: Callable[[Any, Any], Any], container: Any, key: Any, owner: Any, value: Any) -> None:
        """Find `value`, which is at a place."""
        of = (id(owner), id(container)) if read is _class_entry else id(container)  # each instance leads to its class's
        where = (read, of, name_of_key(key))
        place = StatePlace(read, container, key, id(value))
        if is_a(owner, types.FunctionType | types.ModuleType) and (id(owner), where) not in self._walked_from:
            self._walked_from.add((id(owner), where))  # several functions and their module lead to one global
            self._besides.append((owner, place, value))
        elif is_plain(value):
            self._besides.append((owner, place, value))
        if where not in self._walked:
            self._walked.add(where)
            self._find(value, owner, place)

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

    def values_read(self, state: bool = False) -> tuple[list[tuple[StatePlace, Any]], list[Any], list[Any]]:
        """The places that code may read, each with its value, but for lazy tensors; all values that it comes to, and
        those among them that have no other guard.

        Going by names: an attribute is one that some function found here reads, of whatever object. Of installed
        packages only plain values: else there would be thousands of functions. The nearest ones first, and no more than
        some. `state`: lazy tensors, and what holds them, too. A function has a guard of its own over these, and callers
        store results there.
        """
        of_state = {id(one) for one in self.ways_to(self.tensors)[1] if container_kind(one) is not None}
        of_state.update(self.tensors)
        if state:
            of_state.clear()
        steps = self._steps(self._names, self._attributes, self._reads_all)
        found: dict[Any, tuple[StatePlace, Any]] = {}
        values: list[Any] = []
        others: list[Any] = []
        seen, waiting = {id(None)}, deque((id(None),))
        while waiting and len(found) + len(values) < 2 * _MOST_FOLLOWED:
            number = waiting.popleft()
            owner = None if number == id(None) else self._owner(number)
            for place, value in steps.get(number, ()):
                may_change = (
                    place is None or _may_change(owner, place, value) or self._is_named_content(owner, place, value)
                )
                is_seen = place is None or (place.read is _entry and is_a(owner, _WITH_STRUCTURE))
                if place is not None and not is_seen and may_change and id(value) not in of_state:
                    found[place.where] = place, value
                if id(value) in seen or _is_leaf(value):
                    continue
                seen.add(id(value))
                waiting.append(id(value))
                if is_a(value, _WITH_STRUCTURE):
                    self.parts_read.append(value)
                if may_change or is_a(value, _WITH_LENGTHS):
                    values.append(value)
                    if id(value) not in of_state and not (may_change and is_a(value, _SEEN_BY_OTHERS)):
                        others.append(value)
        return list(found.values()), values, others

    def _is_named_content(self, owner: Any, place: StatePlace, value: Any) -> bool:
        """Whether a place is an attribute with a container or an array that the user's code names, of any object."""
        is_attribute = not is_a(owner, types.FunctionType | types.ModuleType | type) and owner is not place.container
        is_content = is_a(value, _WITH_LENGTHS) or is_array(value)
        return is_attribute and is_content and name_of_key(place.key) in self._own_attributes

    def read_by_what_ran(self) -> tuple[AbstractSet[int], AbstractSet[Any]] | None:
        """The ids of the values that the code which ran comes to, and where places are that it may read.

        That is less than what all the code may read that is at hand. None: all of it, as code reads more than it names,
        or none has run yet.
        """
        if self._reads_all or not self._ran_names:
            return None
        steps = self._steps(self._ran_names, self._ran_names, False)
        seen, places, waiting = {id(None)}, set(), [id(None)]
        while waiting:
            for place, value in steps.get(waiting.pop(), ()):
                if place is not None:
                    places.add(place.where)
                if id(value) not in seen:
                    seen.add(id(value))
                    waiting.append(id(value))
        return seen, places

    def left_unnamed(self) -> dict[Attribute, list[Hashable]]:
        """The attributes that other code names than the code which ran, each with all that it leads to."""
        named = self.read_by_what_ran()
        if named is None:
            return {}
        steps = self._steps(self._names, self._attributes, self._reads_all)
        found: dict[Attribute, list[Hashable]] = {}
        within: dict[int, Attribute | None] = {id(None): None}
        waiting = deque((id(None),))
        while waiting and len(within) < 2 * _MOST_FOLLOWED:
            number = waiting.popleft()
            owner = None if number == id(None) else self._owner(number)
            for place, value in steps.get(number, ()):
                attribute = within[number]
                if attribute is None and place is not None and place.where not in named[1]:
                    attribute = _attribute_at(owner, place)
                if attribute is not None:
                    found.setdefault(attribute, []).append(plain_key(value) if is_plain(value) else id(value))
                if id(value) not in within and not is_plain(value):
                    within[id(value)] = None if id(value) in named[0] else attribute
                    waiting.append(id(value))
        return found

    def reads(self, name: str) -> bool:
        """Whether code may read attributes of that name."""
        return self._reads_all or name in self._attributes

    def reads_or_calls(self, name: str) -> bool:
        """As `reads`, or whether code names something of that name otherwise."""
        return name in self._names

    def _steps(
        self, names: AbstractSet[str], attributes: AbstractSet[str], reads_all: bool
    ) -> dict[int, list[tuple[StatePlace | None, Any]]]:
        """What code can come to from each value, given by its id: where it is (None: fixed) and what it is.

        `names`, `attributes`: that code names, and those that it reads and does not only call. `reads_all`: whether it
        reads more than it names.
        """
        found: dict[int, list[tuple[StatePlace | None, Any]]] = {}
        named = names | attributes
        left_out = frozenset() if reads_all else self._left_out
        for owner, place, value in self._besides:
            if left_out and _attribute_at(owner, place) in left_out:
                continue
            # what is no plain value may be called, and so may what is not there yet
            is_called = value is None or not is_plain(value)
            if self._may_read(owner, place, named if is_called else attributes, reads_all, is_plain(value)):
                found.setdefault(id(owner), []).append((place, value))
        for inner, (module, outer) in self._within.items():
            if inner != outer:
                found.setdefault(outer, []).append((None, module))
        for number, ways in self._ways.items():
            for of, way in ways:
                if not isinstance(way, StatePlace):
                    found.setdefault(of, []).append((None, self._values[number]))
                elif left_out and _attribute_at(self._owner(of), way) in left_out:
                    continue
                elif self._may_read(self._owner(of), way, named, reads_all, False):
                    found.setdefault(of, []).append((way, self._values[number]))
        return found

    def _owner(self, number: int) -> Any:
        if number in self._values:
            return self._values[number]
        return self._not_walked[number] if number in self._not_walked else self._within[number][0]

    def _may_read(
        self, owner: Any, place: StatePlace, attributes: Container[Hashable], reads_all: bool, is_plain: bool
    ) -> bool:
        """Whether code that has `owner` may read what is at a place, if it reads these attributes of objects."""
        if place.read is _contents:
            return place.key in self._variables or _is_of_library(owner.__module__)
        if is_a(owner, types.FunctionType):
            return place.container is not owner.__globals__ or (id(place.container), place.key) in self._globals
        if owner is place.container and is_a(owner, dict | list | deque):  # an entry
            return length_of(owner) <= MOST_KEYS
        if is_a(owner, tuple(_PARTS)):
            return True
        name = name_of_key(place.key)
        if name in attributes or _is_called(owner, name) or _is_special(name):
            return True
        if is_a(owner, type | types.ModuleType):
            return reads_all
        module = module_of(type(owner))
        if reads_all and (is_users(module) or _is_of_library(module, _NAMESPACES)):
            return True
        # Python's library reads all that its objects hold, and PyTorch what its own are set to
        return (_is_of_library(module, _OF_VALUES) and name != _RUNS_ONCE) or (
            is_plain and (self._user_reads_all or _is_of_library(module, ("torch",)))
        )

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


def _attribute_at(owner: Any, place: StatePlace) -> Attribute | None:
    """The attribute of an object that a place is; None if it is an entry, a variable, or of a class or a module."""
    if is_a(owner, types.FunctionType | types.ModuleType | type) or owner is place.container:
        return None
    return (type(owner), name_of_key(place.key)) if place.read in (_entry, _slot) else None


def _is_called(owner: Any, name: Hashable) -> bool:
    if name in _OF_FUNCTIONS and is_a(owner, type) and _is_function_class(owner):
        return True
    return name in _CALLED or (name == "step" and is_a(owner, torch.optim.Optimizer))


def _is_function_class(kind: type) -> bool:
    return any(base is torch.autograd.Function for base in mro_of(kind))


def _is_leaf(value: Any) -> bool:
    """Whether a value is plain, and no member of an `Enum` of the user's, which has attributes besides."""
    return is_plain(value) and not (is_a(value, enum.Enum) and is_users(module_of(type(value))))


def _is_special(name: Hashable) -> bool:
    return type(name) is str and name.startswith("__") and name.endswith("__")


def _is_used_by_operators(kind: type, name: Any, function: Any) -> bool:
    """Whether an operator may run a method. Not those that `dataclasses` writes, which read every field."""
    if not is_a(function, types.FunctionType) or not _is_special(name) or name in _SELDOM:
        return False
    return function.__code__.co_filename != "<string>" or FIELDS not in namespace_of(kind)


def _may_change(owner: Any, place: StatePlace, value: Any) -> bool:
    """Whether a place is to be followed."""
    if place.read is _entry and is_a(owner, _WITH_STRUCTURE):
        return True
    if place.read is _class_entry:
        return not is_installed(module_of(place.container))
    if is_a(owner, types.FunctionType):
        # a wrapper that a package made says that it is of the module of the function that it wraps
        is_of_wrapper = place.container is owner.__globals__ or is_a(value, weakref.ReferenceType)
        module = owner.__globals__.get("__name__") if is_of_wrapper else owner.__module__
        return not is_installed(module) or (is_plain(value) and place.read is not _contents)
    return is_plain(value) or not is_installed(module_of(type(owner)))


@functools.lru_cache(maxsize=4096)
def is_installed(module: Any) -> bool:
    """Whether a module, given by name, is in a folder of installed packages."""
    file = getattr(sys.modules.get(module), "__file__", None) if type(module) is str else None
    return type(file) is str and file.startswith(_INSTALLED)


def is_users(module: Any) -> bool:
    """Whether a module, given by name, is neither a package's nor of Python's library."""
    return type(module) is str and not _is_of_library(module) and not is_installed(module)


def _is_large(value: Any) -> bool:
    return is_a(value, dict | list | deque) and length_of(value) > MOST_KEYS


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
