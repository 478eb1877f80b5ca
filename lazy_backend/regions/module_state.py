"""What is known of a captured module, for each way that the module itself is.

In: a module. Out: `ModuleState`, which says whether the module is still as it was, and what its calls recorded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from lazy_backend.ports.hooks import REGISTRIES, modules_within
from lazy_backend.regions.members import MemberPlace, members_of
from lazy_backend.regions.named_by_code import NamedByCode
from lazy_backend.regions.programs import Program
from lazy_backend.replay.accounts import PATIENCE, Attempts
from lazy_backend.replay.structure import HostGuard, StructureGuard
from lazy_backend.replay.unseen_reads import CodeThatRan, Ran
from lazy_backend.tensors.tensor import LazyTensor

# How a guard names an attribute, a child, a parameter or a buffer of the module whose attributes it was given.
_IN_ATTRIBUTES = re.compile(rf"^dict(?:\['(?:{'|'.join(REGISTRIES)})'\])?\['(\w+)'\]")
# Kinds of arguments that one module remembers.
_MAX_KINDS = 64
# Of one kind of arguments, the calls that are remembered that read other values.
_MAX_VALUES = 8


@dataclass(slots=True, eq=False)
class AlikeCalls(Attempts):
    """What is known about the calls with one kind of arguments, in which the code reads the same values."""

    program: Program | None = None
    named: NamedByCode | None = None  # what the code could name at the latest call that ran as written
    replayed: bool = False
    waiting: int = 0  # traces with such calls and without a backward
    waits_in: object = None  # the epoch of the latest of them
    is_alike: bool = True  # whether the latest call that ran as written did what was recorded before

    def change(self) -> str:
        """What has changed among the values that the code reads; empty if nothing has."""
        return "" if self.named is None else self.named.change()


class ModuleState:
    """What is known of a module while it is made of the same parts, with the same attributes."""

    __slots__ = ("_signatures", "_type", "_guard", "_host", "_named")

    def __init__(self, module: torch.nn.Module) -> None:
        self._signatures: dict[Any, list[AlikeCalls]] = {}  # by kind of arguments, the latest first
        self._type = type(module)
        self._named: NamedByCode | None = None  # as before the latest call that ran as written
        self._guard = StructureGuard([module.__dict__])
        self._host = HostGuard(self._guard.tensors)

    def is_untouched(self, module: torch.nn.Module) -> bool:
        return type(module) is self._type and self._guard.is_untouched() and not self._host.change()

    def holds(self, module: torch.nn.Module) -> bool:
        """Whether the module is as it was, going by values. `why` says what is not."""
        return type(module) is self._type and self._guard.holds() and not self._host.change()

    def is_equal(self, module: torch.nn.Module) -> bool:
        """As `holds`. What was learned from containers that were replaced by equal ones is forgotten."""
        if not self.holds(module):
            return False
        current = {(id(place.container), place.key) for place, _ in members_of(module)}
        for signature in self.signatures():
            places = signature.program.places if signature.program is not None else ()
            if any(isinstance(one, MemberPlace) and (id(one.container), one.key) not in current for one in places):
                signature.program = None
        return True

    def why(self) -> str:
        text = self._guard.why() or self._host.change()
        # the guard was given the attributes, so as not to keep the module alive
        return _IN_ATTRIBUTES.sub(lambda found: f"{self._type.__name__}.{found[1]}", text)

    def named_by_code(self, module: torch.nn.Module, ran: CodeThatRan) -> NamedByCode:
        """What the code of the module, which is as this says, can name now. `ran`: by its calls so far."""
        if self._named is None or not self._named.is_current():
            self._named = NamedByCode([one for _, one in modules_within(module)], ran)
        return self._named

    def named_among(self, tensors: list[LazyTensor]) -> tuple[tuple[int, int], ...]:
        """See `NamedByCode.those_of`."""
        return () if self._named is None else self._named.those_of(tensors)

    def named_after(
        self, module: torch.nn.Module, named: NamedByCode, ran: Ran, read: str, given: Iterable[LazyTensor]
    ) -> tuple[NamedByCode, str]:
        """See `NamedByCode.after_body`."""
        made, unfit = named.after_body([one for _, one in modules_within(module)], ran, read, given)
        if made.is_whole:
            self._named = made
        return made, unfit

    def keep(self, named: NamedByCode, signature: AlikeCalls) -> None:
        """Forget calls that read tensors which the code can name no longer, and would keep them alive.

        But for `signature`, whose call is about to run as written.
        """
        for kind, known in list(self._signatures.items()):
            self._signatures[kind] = [
                one for one in known if one is signature or one.named is None or one.named.refers_only_to(named)
            ]
        if self._named is not None and not self._named.refers_only_to(named):
            self._named = None

    def refers_only_to(self, other: ModuleState) -> bool:
        """Whether all tensors of this state are in the other one too."""
        return set(map(id, self._guard.tensors)) <= set(map(id, other._guard.tensors))

    def signatures(self) -> list[AlikeCalls]:
        """All that is known about calls."""
        return list(chain.from_iterable(self._signatures.values()))

    def forget(self) -> None:
        """Forget all that is known about calls."""
        self._signatures.clear()

    def signature(self, kind: Any) -> tuple[AlikeCalls, str]:
        """What is known about calls with this kind of arguments and the values that the code would read now.

        And what changed since the call before, if nothing is known; empty if something is, or if there was none.
        """
        known = self._signatures.get(kind)
        if known is None:
            if len(self._signatures) >= _MAX_KINDS:
                self._signatures.clear()
            known = self._signatures[kind] = []
        change = ""
        for place, found in enumerate(known):
            changed = found.change()
            if not changed:
                if place:
                    known.insert(0, known.pop(place))
                found.calls += 1
                return found, ""
            change = change or changed
        made = AlikeCalls(calls=1)
        if known:  # patience does not start again, but one call may be learned from
            made.failures = min(known[0].failures, PATIENCE - 1)
        known.insert(0, made)
        del known[_MAX_VALUES:]
        return made, change
