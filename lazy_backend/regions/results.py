"""What a captured module returns, as leaves and a structure, so that a replay can make it anew.

In: a result: tensors and plain values in lists, tuples, dicts, and what else PyTorch's pytrees know, and in records.
Out: its leaves and its structure; or the result again, around other leaves.

Note [Records in results]
A model of transformers returns its cache of keys and values with the logits, in training too unless it is told not to.
The cache is an object with two tensors for each layer, of which a replay must make new ones. Its class is no pytree,
and registering it as one would change what other libraries do with it, and make arguments of this class look like
values. So objects of the classes below are taken apart here, and only in results: they are records, made of what their
attributes say and of nothing else. One that a body is given as an argument is refused earlier, as it may be changed.
One that lives on after the result is gone, such as an attribute of the module, is no result of the call alone: it is
returned itself, and the call is not replayed.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from lazy_backend.ports import trees
from lazy_backend.ports.cpython import (
    UNHELD,
    attributes_of,
    container_kind,
    counts_of,
    is_a,
    items_of,
    length_of,
    module_of,
    name_of,
)
from lazy_backend.replay.plain_values import has_plain_hash, value_key

# Modules of libraries whose classes are records. Checked on transformers 5.23.
_RECORDS = ("transformers.cache_utils",)


@dataclass(frozen=True, slots=True)
class _Record:
    """The structure of a record: its class and that of its attributes. `original`: what was taken apart."""

    kind: type
    attributes: ResultStructure
    original: weakref.ref[Any] = field(compare=False)


@dataclass(frozen=True, slots=True)
class ResultStructure:
    """How leaves make up a result. `records`: for each leaf of `spec`, the record that stands there, if it is one."""

    spec: trees.TreeSpec
    records: tuple[_Record | None, ...] = ()  # empty if there is none

    def kept_record(self) -> str | None:
        """The class of a record that something holds, once the result itself is gone."""
        for record in self.records:
            if record is not None:
                kept = record.kind.__name__ if record.original() is not None else record.attributes.kept_record()
                if kept is not None:
                    return kept
        return None


def flatten_result(result: Any) -> tuple[list[Any], ResultStructure | None]:
    """The leaves of `result` and its structure, which is None for a tensor alone."""
    if is_a(result, torch.Tensor):
        return [result], None
    try:
        return _flatten(result, set())
    except _OccursTwice:
        leaves, spec = trees.tree_flatten(result)
        return leaves, ResultStructure(spec)


def unflatten_result(leaves: Iterable[Any], structure: ResultStructure | None) -> Any:
    """The result that `leaves` make up."""
    given = iter(leaves)
    return next(given) if structure is None else _unflatten(given, structure)


def opaque_in(leaves: Iterable[Any]) -> str | None:
    """The class of a leaf that may hold tensors of its own, if there is one."""
    for leaf in leaves:
        if not is_a(leaf, torch.Tensor | type) and (callable(leaf) or value_key(leaf) is None):
            return name_of(type(leaf))
    return None


def kept_container(held: list[Any]) -> str | None:
    """The class of a list or dict in the result `held[0]` that something else holds, too.

    A replay would return another one. An argument is held by the caller.
    """
    pending: list[tuple[Any, Any]] = [(held, 0)]
    while pending:
        parent, key = pending.pop()
        value = container_kind(parent).__getitem__(parent, key)
        kind = container_kind(value)
        if kind is list or kind is dict:
            # an ordered dict of transformers has its values as attributes, too
            is_attribute = type(key) is str and attributes_of(parent).get(key) is value
            if counts_of([value])[0] - UNHELD > _REFERENCES + is_attribute:
                return name_of(type(value))
        if kind is list or kind is tuple:
            pending += [(value, place) for place in range(length_of(value))]
        elif kind is dict:
            pending += [(value, name) for name in dict.keys(value) if has_plain_hash(name)]
    return None


def why_not_made_anew(leaves: Iterable[Any], structure: ResultStructure | None, kept: str | None) -> str | None:
    """Why a replay cannot make a result like this one; None if it can. `kept`: what `kept_container` found in it.

    The result itself is gone by now: a record that is not gone is held by something else.
    """
    record = None if structure is None else structure.kept_record()
    if record is not None:
        return f"something keeps the {record} that it returns"
    if kept is not None:
        return f"something else holds the {kept} that it returns"
    holder = opaque_in(leaves)
    if holder is not None:
        return f"it returns a {holder}, which may hold tensors\n  return tensors, in lists, tuples or dicts"
    return None


# What refers to a container in `kept_container` if nothing else does: its parent and a variable.
_REFERENCES = 2


class _OccursTwice(Exception):
    """A record, or a container in one, that occurs twice would become two: the record stays as it is."""


def _flatten(result: Any, seen: set[int]) -> tuple[list[Any], ResultStructure]:
    found, spec = trees.tree_flatten(result)
    leaves: list[Any] = []
    records: list[_Record | None] = []
    for leaf in found:
        if module_of(type(leaf)) in _RECORDS and hasattr(leaf, "__dict__"):
            if id(leaf) in seen:
                raise _OccursTwice
            seen.add(id(leaf))
            _see_containers(list(vars(leaf).values()), seen)
            attributes, inner = _flatten(vars(leaf), seen)
            leaves += attributes
            records.append(_Record(type(leaf), inner, weakref.ref(leaf)))
        else:
            leaves.append(leaf)
            records.append(None)
    return leaves, ResultStructure(spec, tuple(records) if any(records) else ())


def _see_containers(values: Iterable[Any], seen: set[int]) -> None:
    for value in values:
        kind = container_kind(value)
        if kind is list or kind is dict:
            if id(value) in seen:
                raise _OccursTwice
            seen.add(id(value))
        if kind is not None:
            _see_containers(dict.values(value) if kind is dict else items_of(value), seen)


def _unflatten(given: Any, structure: ResultStructure) -> Any:
    own: list[Any] = []
    if not structure.records:
        own = list(itertools.islice(given, structure.spec.num_leaves))
    for record in structure.records:
        if record is None:
            own.append(next(given))
        else:
            made = record.original()
            if made is None:
                made = object.__new__(record.kind)
            vars(made).update(_unflatten(given, record.attributes))
            own.append(made)
    return trees.tree_unflatten(own, structure.spec)
