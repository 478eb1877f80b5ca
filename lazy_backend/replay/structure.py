"""Check that modules and optimizers are made of what they were made of.

In: modules and optimizers. Out: `StructureGuard`: whether anything that Python code reads from them has changed since,
and what.

Note [What a structure guard sees]
It sees, of every module and of all modules within: its class, its whole `__dict__`, and with that its children,
parameters, buffers, hooks and plain attributes, `training` among them; lists, dicts, sets and tuples in there, at any
depth; the attributes of objects that hold nothing but such values, as configurations do. Of parameters and buffers:
`requires_grad`, hooks and how many attributes they were given. Of an optimizer: its `__dict__`, the lists of
parameters, and its state by entry. Numbers, strings and the like are compared by value, signed zeros told apart;
tensors and all other objects by identity. It never compares tensors with `==`, which would call an operator.

It does not see what is inside other objects (a trainer with its modules, a loader with its iterator, an array),
attributes of classes, and the hyperparameters in param groups, which `OptimizerGuard` follows. Of containers with more
than 1000 values it sees the length.

The check compares one flat list of values by identity, in C: 25 ns for a value, 10 ns for a key, 250 ns for a
parameter: 1.5 µs for a small module. Only if that fails, everything is walked again and compared by value. No code of
the user's runs (Note [No code of the user's]).
"""

from __future__ import annotations

import enum
import types
from collections import OrderedDict, deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any
from weakref import ref

import torch

from lazy_backend.ports.autograd_engine import TENSOR_HOOKS, accumulate_hooks_of, backward_hooks_of
from lazy_backend.ports.cpython import (
    CONTAINERS,
    LOCK_TYPES,
    NO_ATTRIBUTES,
    attributes_of,
    container_kind,
    has_only_a_dict,
    is_a,
    items_of,
    keys_view,
    length_of,
    name_of,
    values_view,
)
from lazy_backend.ports.hooks import REGISTRIES, UNREAD
from lazy_backend.ports.tensor_types import is_leaf, version_of
from lazy_backend.ports.thread_modes import WithoutSubclasses
from lazy_backend.replay.plain_values import is_plain, is_process_wide, plain_key, same_plain, text_of, value_key
from lazy_backend.tensors.tensor import LazyTensor, own_attributes

# What is looked at: a dict stands for the module whose attributes it holds, which is not kept alive then.
Root = torch.nn.Module | torch.optim.Optimizer | dict[str, Any]

# Of a container with more values, such as a vocabulary, only the length is seen: else each check would take 40 µs.
_LARGEST_CONTAINER = 1000
# An object that refers to more than this is no configuration.
_LARGEST_CONFIGURATION = 5000
_OPAQUE = (torch.nn.Module, torch.optim.Optimizer, types.ModuleType)
_IDENTITIES = (torch.Tensor, type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, enum.Enum)
_REQUIRES_GRAD = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_HOOKS = {name: getattr(torch.Tensor, name).__get__ for name in TENSOR_HOOKS}
_FACTS = (_REQUIRES_GRAD, *_HOOKS.values())


def _facts(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """What a tensor says about itself besides its value: all answers to the first question, then those to the next."""
    # 70 ns for each attribute instead of 150: a getter need not ask whether a subclass overrides it
    with WithoutSubclasses():
        return [answer for ask in _FACTS for answer in map(ask, tensors)]


def hooks_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The hooks that are called when a tensor gets its gradient."""
    found: list[Any] = []
    for hooks in (backward_hooks_of(tensor), accumulate_hooks_of(tensor)):
        if hooks:
            found += hooks.values()
    return tuple(found)


def same_containers(args: Iterable[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """For each list and dict among arguments, which one it is; empty if each is another one."""
    given = [id(one) for one in chain(args, kwargs.values()) if is_a(one, list | dict)]
    first: dict[int, int] = {}
    places = tuple([first.setdefault(number, place) for place, number in enumerate(given)])
    return places if len(first) < len(given) else ()


def marks_of(tensor: LazyTensor) -> tuple[Any, ...]:
    """What code may do to a tensor that it is given, besides writing to it. Keeps no tensor alive."""
    hooks = hooks_of(tensor) if tensor.requires_grad else ()
    own = [(name, _mark_of(value)) for name, value in own_attributes(tensor).items()]
    grad = tensor.grad if is_leaf(tensor) else None
    return tensor.requires_grad, tensor.retains_grad, own, list(map(id, hooks)), None if grad is None else ref(grad)


def _mark_of(value: Any) -> Any:
    """What a value is told by: a reference if another one may have its id, once it is gone."""
    key = value_key(value)
    if key is not None:
        return key
    try:
        return ref(value)
    except TypeError:
        return id(value), str(type(value))


class _Tensor:
    """Stands for a tensor where a guard is not to keep it alive."""

    def __repr__(self) -> str:
        return "a tensor"


_TENSOR = _Tensor()

# A value: the place of the value that it belongs to, its key there, and itself. Roots belong to -1.
_Entry = tuple[int, Any, Any]


class Structure:
    """All that modules and optimizers are made of, at one moment. See Note [What a structure guard sees].

    Keeps alive what it refers to; with `hold_tensors=False` no tensor, and any tensor is then like any other. So it
    shows what a call changes besides tensors.
    """

    def __init__(self, roots: Iterable[Root], hold_tensors: bool = True) -> None:
        self.entries: list[_Entry] = []
        self.modules: list[torch.nn.Module] = []
        self.types: list[type] = []  # of the modules: a parametrization changes them
        self.tensors: list[torch.Tensor] = []  # of modules
        self.attributes: list[dict[str, Any]] = []  # of the lazy ones
        self.state_tensors: list[torch.Tensor] = []  # of optimizers, which need no gradients
        self.dicts: list[dict[Any, Any]] = []  # that have only strings and numbers as keys
        self.odd_dicts: list[dict[Any, Any]] = []
        self.sequences: list[Any] = []  # lists, deques and sets
        self.large: list[Any] = []  # containers of which only the length is seen
        self.empty: list[Any] = []  # containers that are empty: most modules have 7
        self._hold_tensors = hold_tensors
        self._seen: set[int] = set()
        self._of_optimizers: set[int] = set()  # ids of the tensors in the state of optimizers
        for place, root in enumerate(roots):
            self._add(-1, place, root)
        for place, (_, _, value) in enumerate(self.entries):  # which grows meanwhile: no recursion
            self._expand(place, value)

    def _add(self, owner: int, key: Any, value: Any) -> None:
        if is_a(value, torch.Tensor):
            self._add_tensor(owner, key, value)
        elif is_a(value, set) and length_of(value) <= _LARGEST_CONTAINER and id(value) not in self._seen:
            self._seen.add(id(value))
            self.entries.append((owner, key, value))
            self.entries.append((len(self.entries) - 1, "set", frozenset(value)))  # takes the hashes of the set
            self._note(value, self.sequences)
        else:
            self.entries.append((owner, key, value))

    def _add_tensor(self, owner: int, key: Any, tensor: torch.Tensor) -> None:
        self.entries.append((owner, key, tensor if self._hold_tensors else _TENSOR))
        if id(tensor) in self._seen or not self._hold_tensors:
            return
        self._seen.add(id(tensor))
        if id(tensor) in self._of_optimizers:
            self.state_tensors.append(tensor)
            return
        place = len(self.entries) - 1
        self.tensors.append(tensor)
        if type(tensor) is LazyTensor:
            self.attributes.append(attributes_of(tensor))
            self.entries.append((place, "number of attributes", len(self.attributes[-1])))
        with WithoutSubclasses():
            if is_leaf(tensor):
                self.entries.append((place, "requires_grad", _REQUIRES_GRAD(tensor)))
            hooks = [(name, read(tensor)) for name, read in _HOOKS.items()]
        for name, found in hooks:
            self._add(place, name, found)

    def _note(self, container: Any, among: list[Any]) -> None:
        (among if length_of(container) else self.empty).append(container)

    def _expand(self, place: int, value: Any) -> None:
        """Add what belongs to a value."""
        if id(value) in self._seen or is_plain(value) or is_a(value, _Tensor | torch.Tensor):
            return
        self._seen.add(id(value))
        kind = container_kind(value)
        if kind is not None and length_of(value) > _LARGEST_CONTAINER:
            self.entries.append((place, "length", length_of(value)))
            self.large.append(value)
        elif kind is dict:
            self._expand_dict(place, value)
        elif kind is list or kind is tuple or kind is deque:
            if kind is not tuple:
                self._note(value, self.sequences)
            for number, item in enumerate(items_of(value)):
                self._add(place, number, item)
        elif kind is not None:
            pass  # a set, whose contents were added with it
        elif is_a(value, torch.optim.Optimizer):
            self._expand_optimizer(place, value)
        elif is_a(value, torch.nn.Module):
            self.modules.append(value)
            self.types.append(type(value))
            self._skip_unread(attributes_of(value))
            self._expand_dict(place, attributes_of(value))
        elif _is_configuration(value):
            self._expand_dict(place, attributes_of(value))

    def _skip_unread(self, attributes: dict[str, Any]) -> None:
        self._seen.update(id(attributes[name]) for name in UNREAD & dict.keys(attributes))

    def _expand_dict(self, place: int, values: dict[Any, Any]) -> None:
        has_plain_keys = all(type(key) is str or type(key) is int for key in dict.keys(values))
        self._note(values, self.dicts if has_plain_keys else self.odd_dicts)
        for key, value in list(dict.items(values)):
            self._add(place, key, value)

    def _expand_optimizer(self, place: int, optimizer: torch.optim.Optimizer) -> None:
        """The attributes, the state and the lists of parameters."""
        self._seen.add(id(optimizer.param_groups))
        states = [dict.values(state) for state in optimizer.state.values() if is_a(state, dict)]
        self._of_optimizers.update(map(id, chain.from_iterable(states)))
        self._skip_unread(attributes_of(optimizer))
        self._expand_dict(place, attributes_of(optimizer))
        for number, group in enumerate(optimizer.param_groups):
            self._add(place, f"param_groups[{number}]['params']", group["params"])

    def containers_of(self, tensors: Container[int]) -> list[Any]:
        """See `StructureGuard.containers_of`."""
        owners = {owner for owner, _, value in self.entries if id(value) in tensors}
        for place in range(len(self.entries) - 1, -1, -1):  # a value comes after its owner
            if place in owners:
                owners.add(self.entries[place][0])
        return [self.entries[place][2] for place in owners if place >= 0]

    # ----- comparing

    def path(self, place: int) -> str:
        """How the user would write the place of a value."""
        steps: list[str] = []
        while place >= 0:
            place, step = self._step(place)
            steps.append(step)
        return "".join(reversed(steps)).removeprefix(".")

    def _step(self, place: int) -> tuple[int, str]:
        owner, key, value = self.entries[place]
        if owner < 0:
            return owner, name_of(type(value))
        of = self.entries[owner][2]
        if key in REGISTRIES and is_a(of, torch.nn.Module):
            return owner, ""  # m._modules["0"] is written m.0
        if self._is_registry(owner) or not is_a(of, dict | list | tuple | deque):
            return owner, f".{key}"
        return owner, f"[{text_of(key)}]"

    def _is_registry(self, place: int) -> bool:
        owner, key, _ = self.entries[place]
        is_of_module = owner >= 0 and is_a(self.entries[owner][2], torch.nn.Module)
        return is_of_module and key in REGISTRIES

    def difference(self, now: Structure) -> str:
        """What first changed from this walk to the walk `now`; empty if nothing did."""
        for place, (before, after) in enumerate(zip(self.entries, now.entries, strict=False)):
            if before[0] != after[0] or not _same_key(before[1], after[1]):
                return self._regrouped(now, place)
            if not _same(before[2], after[2]):
                return f"{self.path(place)} {_change(before[2], after[2])}"
        if len(self.entries) != len(now.entries):
            return self._regrouped(now, min(len(self.entries), len(now.entries)))
        changed = [pair for pair in zip(self.types, now.types, strict=True) if pair[0] is not pair[1]]
        return f"a {name_of(changed[0][0])} became a {name_of(changed[0][1])}" if changed else ""

    def _regrouped(self, now: Structure, place: int) -> str:
        """The walks differ in structure from `place` on: one of them has a value that the other lacks there."""
        if place == len(self.entries) or (place < len(now.entries) and now.entries[place][0] < self.entries[place][0]):
            return f"{now.path(place)} was added"
        if place == len(now.entries) or self.entries[place][0] < now.entries[place][0]:
            return f"{self.path(place)} was removed"
        return f"{self.path(place)} was replaced by {now.path(place)}"


def _same_key(a: Any, b: Any) -> bool:
    return a is b or same_plain(a, b)


def _same(a: Any, b: Any) -> bool:
    """Whether a value is what it was, apart from what belongs to it, which the walk compares by itself."""
    if a is b or same_plain(a, b):
        return True
    if type(a) is not type(b):
        # `del modules[1]` makes an OrderedDict of a module list's dict
        return all(type(one) is dict or type(one) is OrderedDict for one in (a, b))
    if is_a(a, frozenset):
        return all(map(is_plain, chain(items_of(a), items_of(b)))) and _plain_keys(a) == _plain_keys(b)
    if container_kind(a) is not None:
        return True
    if is_a(a, types.MethodType):
        return a.__func__ is b.__func__ and a.__self__ is b.__self__
    return _is_configuration(a) and _is_configuration(b)


def _plain_keys(values: Any) -> set[tuple[int, Any]]:
    return {(id(type(value)), plain_key(value)) for value in items_of(values)}


def _change(before: Any, after: Any) -> str:
    if is_plain(before) and is_plain(after):
        return f"changed from {text_of(before)} to {text_of(after)}"
    if type(before) is type(after):
        return f"is another {name_of(type(after))}"
    return f"was {text_of(before)} and is {text_of(after)}"


# ----- configurations


def _is_configuration(value: Any) -> bool:
    """Whether an object holds plain values, functions and tensors only, itself or in containers and objects."""
    waiting, seen = deque([value]), {id(value)}
    if not _has_only_attributes(value):
        return False
    while waiting:
        for item in _parts_of(waiting.popleft()):
            # a lock says nothing of the attributes beside it, unlike an iterator
            if id(item) in seen or is_plain(item) or is_a(item, _IDENTITIES + LOCK_TYPES):
                continue
            if not is_a(item, CONTAINERS) and not _has_only_attributes(item):
                return False
            seen.add(id(item))
            waiting.append(item)
            if len(seen) > _LARGEST_CONFIGURATION:
                return False
    return True


def _has_only_attributes(value: Any) -> bool:
    return (
        not is_a(value, _OPAQUE + _IDENTITIES)
        and has_only_a_dict(type(value))
        and attributes_of(value) is not NO_ATTRIBUTES
        and not is_process_wide(type(value))
    )


def _parts_of(value: Any) -> Iterator[Any]:
    kind = container_kind(value)
    if kind is dict:
        return chain(dict.keys(value), dict.values(value))
    return iter(dict.values(attributes_of(value))) if kind is None else items_of(value)


# ----- the guard


class StructureGuard:
    """Whether modules and optimizers are made of what they were made of. See Note [What a structure guard sees].

    Keeps everything alive that it sees.
    """

    def __init__(
        self, modules: Iterable[torch.nn.Module | dict[str, Any]], optimizers: Iterable[torch.optim.Optimizer] = ()
    ) -> None:
        self._roots: tuple[Root, ...] = (*modules, *optimizers)
        self._why = ""
        self._take(Structure(self._roots))

    def _take(self, walk: Structure) -> None:
        self._walk = walk
        self._views: list[Any] = list(map(values_view, (*walk.dicts, *walk.odd_dicts, *walk.sequences)))
        self._large, self._empty = list(map(values_view, walk.large)), list(map(values_view, walk.empty))
        self._views_of_keys = list(map(keys_view, walk.dicts))
        self._views_of_odd_keys: list[Any] = list(map(dict.keys, walk.odd_dicts))
        self._lengths = list(map(len, self._views))
        self._large_lengths = list(map(len, self._large))
        self._values = list(chain.from_iterable(self._views))
        self._keys = list(chain.from_iterable(self._views_of_keys))
        self._odd_keys = list(chain.from_iterable(self._views_of_odd_keys))
        self._facts = _facts(walk.tensors)
        self._num_attributes = list(map(len, walk.attributes))

    @property
    def walk(self) -> Structure:
        """What everything was when it was last seen to change."""
        return self._walk

    @property
    def modules(self) -> Sequence[torch.nn.Module]:
        """All modules that the guard sees, those within others too, each once."""
        return self._walk.modules

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """All tensors that the guard sees: parameters, buffers, other attributes, the state of optimizers."""
        return [*self._walk.tensors, *self._walk.state_tensors]

    def containers_of(self, tensors: Container[int]) -> list[Any]:
        """The containers in modules and optimizers that hold, at any depth, one of the tensors with these ids."""
        return self._walk.containers_of(tensors)

    def holds(self) -> bool:
        """Whether nothing has changed. If something has, `why` says what."""
        try:
            if self.is_untouched():
                self._why = ""
                return True
            return self._is_equal()
        except RuntimeError:  # another thread changes it right now: "dictionary changed size during iteration"
            self._why = "it was changed by another thread meanwhile"
            return False

    def why(self) -> str:
        """The first change that the latest call of `holds` found, as in "Net.layers.0.bias was added"."""
        return self._why

    def is_untouched(self) -> bool:
        """Whether every value is the same object as before. May be False although values are equal."""
        walk = self._walk
        return (
            not any(self._empty)
            and list(map(len, self._views)) == self._lengths
            and list(map(len, self._large)) == self._large_lengths
            and all(map(is_, chain.from_iterable(self._views), self._values))
            and list(chain.from_iterable(self._views_of_keys)) == self._keys
            and all(map(is_, chain.from_iterable(self._views_of_odd_keys), self._odd_keys))
            and all(map(is_, map(type, walk.modules), walk.types))
            # the hooks themselves are among the values
            and all(map(is_, _facts(walk.tensors), self._facts))
            and list(map(len, walk.attributes)) == self._num_attributes
        )

    def _is_equal(self) -> bool:
        """Compare by value. If all is equal, from now on expect the objects that are there now."""
        now = Structure(self._roots)
        self._why = self._walk.difference(now)
        if not self._why:
            self._take(now)
        return not self._why


class HostGuard:
    """Whether tensors on the CPU, whose values Python may read, were written."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        host = [one for one in tensors if not is_a(one, LazyTensor)]
        self._tensors = [one for one in host if not one.is_inference()]  # which count no writes
        self._versions = list(map(version_of, self._tensors))

    def change(self) -> str:
        """What has changed; empty if nothing has."""
        if list(map(version_of, self._tensors)) != self._versions:
            return "a tensor on the CPU was written"
        return ""
