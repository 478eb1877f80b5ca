"""Tensors of a module, by the place where its code finds them.

In: a module. Out: places in dicts and lists; a replay reads them again at each call, so state is followed by place and
not by object.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lazy_backend.ports.hooks import REGISTRIES, registered_tensors
from lazy_backend.tensors.tensor import LazyTensor

# How deep lists and dicts in a module's attributes are searched for tensors.
_DEPTH = 3


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
    """The lazy tensors among the parameters, buffers and attributes of `module` and its submodules."""
    found: list[tuple[MemberPlace, LazyTensor]] = []
    for path, owner in module.named_modules():
        prefix = f"{path}." if path else ""
        for registered in registered_tensors(owner):
            found += _lazy(MemberPlace(registered, name, prefix + name) for name in registered)
        for name, value in owner.__dict__.items():
            if name in REGISTRIES:
                continue
            if type(value) is LazyTensor:
                found.append((MemberPlace(owner.__dict__, name, prefix + name), value))
            elif isinstance(value, list | tuple | dict) and value:
                found += _lazy(_inside(value, prefix + name, _DEPTH))
    return found


def _lazy(members: Iterable[MemberPlace]) -> Iterator[tuple[MemberPlace, LazyTensor]]:
    for member in members:
        tensor = member.tensor()
        if type(tensor) is LazyTensor:
            yield member, tensor


def _inside(container: Any, name: str, depth: int) -> Iterator[MemberPlace]:
    items = container.items() if isinstance(container, dict) else enumerate(container)
    for key, value in list(items):
        if isinstance(value, torch.Tensor):
            yield MemberPlace(container, key, f"{name}[{key!r}]")
        elif depth and isinstance(value, list | tuple | dict):
            yield from _inside(value, f"{name}[{key!r}]", depth - 1)
