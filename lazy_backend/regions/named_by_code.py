"""Values, modules and generators that the code of a captured module or optimizer can name, besides its own parts.

In: modules, or an optimizer. Out: the random generators there, and a guard over values, other modules and optimizers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

import torch

from lazy_backend.floats.hyperparameters import GROUPS, SettingsGuard
from lazy_backend.ports.cpython import attributes_of, is_a, name_of
from lazy_backend.ports.hooks import CALL_HOOKS, modules_within, registered_tensors
from lazy_backend.ports.tensor_types import is_leaf
from lazy_backend.replay.reachable import Reachable
from lazy_backend.replay.structure import HostGuard, StructureGuard
from lazy_backend.replay.unseen_reads import (
    ASKS_FOR_GRADS,
    LEAVES_TENSOR,
    CodeThatRan,
    Ran,
    why_unseen,
    why_written,
)
from lazy_backend.replay.value_guard import Changed, ValueGuard
from lazy_backend.tensors.tensor import LazyTensor

# Of a container that code names, more values are not searched for sources of random numbers.
_LARGEST_CONTAINER = 100

Parts = Sequence[torch.nn.Module | torch.optim.Optimizer]


class NamedByCode:
    """Sources of random numbers, values and other modules that the code of modules, or of an optimizer, can name.

    Does not refer to `parts`, the modules or the optimizer. To find all takes long, as functions that the code calls
    are followed: it is done again only if there are more globals, or other values, or if code ran that names more.
    """

    def __init__(self, parts: Parts, ran: CodeThatRan, without: Collection[Hashable] = ()) -> None:
        reach = Reachable((*parts, *ran.roots()), ran, largest=_LARGEST_CONTAINER)
        self._ran, self._version = ran, ran.version
        # of the memory that a body left where only code which it ran shows it: the epoch and the token
        self.left: tuple[tuple[Any, Any], ...] = ()
        self.is_whole = not without
        self.generators = reach.generators
        self.states = reach.random_states
        self._guard = ValueGuard(reach, without, state=True)
        self._reached = set(reach.tensors)  # ids
        self._globals = [(known, len(known)) for known in reach.globals.values()]
        own = set(map(id, parts))
        others = [one for one in reach.parts_read if id(one) not in own]
        modules: list[Any] = [one for one in others if is_a(one, torch.nn.Module)]
        optimizers: list[Any] = [one for one in others if is_a(one, torch.optim.Optimizer)]
        self._others = StructureGuard(tuple(modules), optimizers) if others else None
        modules += [one for one in parts if is_a(one, torch.nn.Module)]
        self._grads = _GradGuard(modules if reach.reads("grad") or ASKS_FOR_GRADS in ran.about else ())
        of_others = () if self._others is None else self._others.tensors
        of_parts = chain.from_iterable(map(registered_tensors, parts))
        self._all = {id(one): weakref.ref(one) for one in (*reach.tensors.values(), *of_others, *of_parts)}
        self._host = HostGuard(() if self._others is None else self._others.tensors)
        self._settings = SettingsGuard(optimizers if reach.reads(GROUPS) else ())

    def is_current(self) -> bool:
        """Whether these are all, and are what they were."""
        are_all = all(len(known) == count for known, count in self._globals) and self._ran.version == self._version
        return are_all and not self.change()

    def change(self) -> str:
        """The first thing that has changed; empty if nothing has."""
        return self._guard.change() or self._grads.change() or self.change_of_others()

    def change_of_others(self) -> str:
        """The first change of other modules and optimizers; empty if nothing has changed."""
        if self._others is None:
            return ""
        if not self._others.holds():
            return self._others.why()
        return self._host.change() or self._settings.change()

    def hooked(self, knows_hook: Callable[[Any], bool]) -> str:
        """The class of another module that has hooks on its calls, besides those that `knows_hook`; or nothing."""
        for module in () if self._others is None else self._others.modules:
            registries = [dict.get(attributes_of(module), name) or {} for name in CALL_HOOKS]
            if not all(map(knows_hook, chain.from_iterable(map(dict.values, registries)))):
                return name_of(type(module))
        return ""

    def add(self, ran: Ran) -> bool:
        """Add code that ran. Returns whether it names more than these."""
        return self._ran.add(ran, self._guard.functions)

    def changed(self) -> Changed:
        """What has changed of what is compared by value."""
        return self._guard.changed() or Changed(frozenset(), "", False, False)

    def grads(self) -> list[int]:
        """Which `.grad` each parameter has, if code may ask for that."""
        return self._grads.ids()

    def watching(self) -> AbstractContextManager[None]:
        """See `ValueGuard.watching`."""
        return self._guard.watching()

    def after_body(
        self, parts: Parts, ran: Ran, read: str, given: Iterable[LazyTensor] = ()
    ) -> tuple[NamedByCode, str]:
        """These as the body, which just ran, left them, without what it changed.

        And why what it read keeps it from being replayed; "" if nothing does. `ran`, `read`: see `watching_reads`.
        `given`: the tensors among its arguments.
        """
        changed, reads_more, leaves_tensor = self._guard.changed(), self.add(ran), ran.leaves_tensor()
        made = self
        if changed is not None or reads_more:
            made = NamedByCode(parts, self._ran, () if changed is None else changed.parts)
        if reads_more and not leaves_tensor:
            memory = {id(one._data.storage) for one in given}
            besides = made._guard.memory_besides(self._guard)
            leaves_tensor = not memory.isdisjoint(map(id, besides))
            made.left = tuple((one.epoch, one.token) for one in besides)
        if changed is not None and changed.read:
            return made, why_written(changed.read)
        if leaves_tensor or (changed is not None and changed.stores_tensor):
            return made, LEAVES_TENSOR
        unseen = made._guard.unseen
        return made, read or (why_unseen(unseen) if unseen else "")

    def refers_only_to(self, other: NamedByCode) -> bool:
        """Whether the other one refers to all tensors that this one does."""
        return self._tensors() <= other._tensors()

    def _tensors(self) -> set[int]:
        return self._reached if self._others is None else self._reached | set(map(id, self._others.tensors))

    def those_of(self, tensors: Iterable[torch.Tensor]) -> tuple[tuple[int, int], ...]:
        """The tensors among these that code can name, too, and may compare by identity: the place and id of each."""
        found = [(place, one, self._all.get(id(one))) for place, one in enumerate(tensors)]
        return tuple([(place, id(one)) for place, one, known in found if known is not None and known() is one])


class _GradGuard:
    """Which parameters of modules have a `.grad`."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        within = {id(one): one for module in modules for _, one in modules_within(module)}
        tensors = chain.from_iterable(map(registered_tensors, within.values()))
        self._tensors = [(weakref.ref(one), one.grad is None) for one in tensors if is_leaf(one)]

    def ids(self) -> list[int]:
        return [id(tensor.grad) for reference, _ in self._tensors if (tensor := reference()) is not None]

    def change(self) -> str:
        """The first thing that has changed; empty if nothing has."""
        for reference, has_none in self._tensors:
            tensor = reference()
            if tensor is not None and (tensor.grad is None) is not has_none:
                return f"a parameter has {'a' if has_none else 'no'} .grad"
        return ""
