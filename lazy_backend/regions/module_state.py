"""What is known of a captured module, for each way that the module itself is.

In: a module. Out: `ModuleState`, which says whether the module is still as it was, and what its calls recorded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from lazy_backend.ports.hooks import REGISTRIES, modules_within
from lazy_backend.ports.tensor_types import version_of
from lazy_backend.regions.members import MemberPlace, members_of
from lazy_backend.regions.named_by_code import NamedByCode
from lazy_backend.regions.programs import Program
from lazy_backend.replay.accounts import Attempts
from lazy_backend.replay.structure import StructureGuard
from lazy_backend.tensors.tensor import LazyTensor

# How a guard names an attribute, a child, a parameter or a buffer of the module whose attributes it was given.
_IN_ATTRIBUTES = re.compile(rf"^dict(?:\['(?:{'|'.join(REGISTRIES)})'\])?\['(\w+)'\]")
# Argument signatures that one module remembers.
_MAX_SIGNATURES = 64


@dataclass(slots=True, eq=False)
class AlikeCalls(Attempts):
    """What is known about the calls with one kind of arguments."""

    program: Program | None = None
    replayed: bool = False
    waiting: int = 0  # calls without a backward
    is_alike: bool = True  # whether the latest call that ran as written did what was recorded before


class ModuleState:
    """What is known of a module while it is made of the same parts, with the same attributes."""

    __slots__ = ("signatures", "_type", "_guard", "_host", "_named")

    def __init__(self, module: torch.nn.Module) -> None:
        self.signatures: dict[Any, AlikeCalls] = {}
        self._type = type(module)
        self._named: NamedByCode | None = None  # once a call ran as written
        self._guard = StructureGuard([module.__dict__])
        # tensors on the CPU, whose values Python may read, with their versions
        self._host = [(one, version_of(one)) for one in self._guard.tensors if type(one) is not LazyTensor]

    def is_untouched(self, module: torch.nn.Module) -> bool:
        return type(module) is self._type and self._guard.is_untouched() and not self._other_change()

    def holds(self, module: torch.nn.Module) -> bool:
        """Whether the module is as it was, going by values. `why` says what is not."""
        return type(module) is self._type and self._guard.holds() and not self._other_change()

    def is_equal(self, module: torch.nn.Module) -> bool:
        """As `holds`. What was learned from containers that were replaced by equal ones is forgotten."""
        if not self.holds(module):
            return False
        current = {(id(place.container), place.key) for place, _ in members_of(module)}
        for signature in self.signatures.values():
            places = signature.program.places if signature.program is not None else ()
            if any(isinstance(one, MemberPlace) and (id(one.container), one.key) not in current for one in places):
                signature.program = None
        return True

    def _other_change(self) -> str:
        if self._host and not all(version_of(one) == version for one, version in self._host):
            return "a tensor on the CPU was written"
        return "" if self._named is None else self._named.values.change()

    def named_by_code(self, module: torch.nn.Module) -> NamedByCode:
        """What the code of the module, which is as this says, can name."""
        if self._named is None or not self._named.hold():
            self._named = NamedByCode([one for _, one in modules_within(module)])
        return self._named

    def why(self) -> str:
        text = self._guard.why() or self._other_change()
        # the guard was given the attributes, so as not to keep the module alive
        return _IN_ATTRIBUTES.sub(lambda found: f"{self._type.__name__}.{found[1]}", text)

    def refers_only_to(self, other: ModuleState) -> bool:
        """Whether all tensors of this state are in the other one too."""
        return set(map(id, self._guard.tensors)) <= set(map(id, other._guard.tensors))

    def signature(self, key: Any) -> AlikeCalls:
        found = self.signatures.get(key)
        if found is None:
            if len(self.signatures) >= _MAX_SIGNATURES:
                self.signatures.clear()
            found = self.signatures[key] = AlikeCalls()
        found.calls += 1
        return found
