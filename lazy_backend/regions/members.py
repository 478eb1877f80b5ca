"""Tensors of a module, by the place where its code finds them.

In: a module. Out: places in dicts and lists; a replay reads them again at each call, so state is followed by place and
not by object.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lazy_backend.ports.cpython import attributes_of, container_kind, mro_of, namespace_of
from lazy_backend.replay.plain_values import has_plain_hash
from lazy_backend.replay.structure import Structure
from lazy_backend.tensors.tensor import LazyTensor


@dataclass(frozen=True, slots=True, eq=False)
class MemberPlace:
    """A tensor at `container[key]`; `name` is for messages."""

    container: Any
    key: Any
    name: str

    def tensor(self) -> Any:
        """What is there now."""
        return self.container[self.key]


def members_of(module: torch.nn.Module) -> list[tuple[MemberPlace, LazyTensor]]:
    """The lazy tensors among the parameters, buffers and attributes of `module` and its submodules.

    Without those in containers whose class defines how they are read.
    """
    walk = Structure([module])
    found: list[tuple[MemberPlace, LazyTensor]] = []
    for place, (owner, key, value) in enumerate(walk.entries):
        if type(value) is LazyTensor and has_plain_hash(key):
            of = walk.entries[owner][2]
            kind = container_kind(of)
            if kind is None or _is_read_as(kind, type(of)):
                container = attributes_of(of) if kind is None else of
                found.append((MemberPlace(container, key, walk.path(place).partition(".")[2]), value))
    return found


def _is_read_as(kind: type, own: type) -> bool:
    """Whether `container[key]` is that of the built-in type."""
    found = next(space["__getitem__"] for space in map(namespace_of, mro_of(own)) if "__getitem__" in space)
    return found is namespace_of(kind)["__getitem__"]
