"""Tensors of a module, by the place where its code finds them.

In: a module. Out: places in dicts and lists; a replay reads them again at each call, so state is followed by place and
not by object.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lazy_backend.ports.cpython import attributes_of, container_kind, is_a, items_of, mro_of, namespace_of
from lazy_backend.ports.hooks import BUFFERS, PARAMETERS, REGISTRIES, modules_within
from lazy_backend.replay.plain_values import has_plain_hash, text_of
from lazy_backend.tensors.tensor import LazyTensor

# How deep lists and dicts in a module's attributes are searched for tensors.
_DEPTH = 3
_SEARCHED = (dict, list, tuple)


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
    found: list[tuple[MemberPlace, LazyTensor]] = []
    for path, owner in modules_within(module):
        prefix = f"{path}." if path else ""
        attributes = attributes_of(owner)
        for registry in (PARAMETERS, BUFFERS):
            registered = dict.get(attributes, registry, {})
            found += _lazy(MemberPlace(registered, name, prefix + name) for name in dict.keys(registered))
        for name, value in list(dict.items(attributes)):
            if name in REGISTRIES:
                continue
            if type(value) is LazyTensor:
                found.append((MemberPlace(attributes, name, prefix + name), value))
            else:
                found += _lazy(_inside(value, prefix + name, _DEPTH))
    return found


def _lazy(members: Iterable[MemberPlace]) -> Iterator[tuple[MemberPlace, LazyTensor]]:
    for member in members:
        tensor = member.tensor()
        if type(tensor) is LazyTensor:
            yield member, tensor


def _inside(container: Any, name: str, depth: int) -> Iterator[MemberPlace]:
    kind = container_kind(container)
    if kind not in _SEARCHED or not _is_read_as(kind, type(container)):
        return
    items = dict.items(container) if kind is dict else enumerate(items_of(container))
    for key, value in list(items):
        if is_a(value, torch.Tensor) and has_plain_hash(key):
            yield MemberPlace(container, key, f"{name}[{text_of(key)}]")
        elif depth and is_a(value, _SEARCHED):
            yield from _inside(value, f"{name}[{text_of(key)}]", depth - 1)


def _is_read_as(kind: type, own: type) -> bool:
    """Whether `container[key]` is that of the built-in type."""
    found = next(space["__getitem__"] for space in map(namespace_of, mro_of(own)) if "__getitem__" in space)
    return found is namespace_of(kind)["__getitem__"]
