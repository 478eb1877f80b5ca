"""The arguments of a call, taken apart as those of the example were.

In: the tree of the example's arguments, and a call's. Out: the call's leaves, or an error that says where it differs.
Tuples, lists and dicts, of which nearly all calls consist, are walked here: this takes a tenth of the time of PyTorch's
functions, which know every other kind, and see to the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lazy_backend.lowering.serving.weights import InputError
from lazy_backend.ports import trees


class ArgumentTree:
    """A tree of (args, kwargs). `spec`: as PyTorch describes it."""

    __slots__ = ("spec", "_form", "_num_flat")

    def __init__(self, spec: trees.TreeSpec) -> None:
        self.spec = spec
        self._form = _form_of(spec)
        # how many arguments there are, if these are positional and tensors
        flat = self._form is not None and self._form[2] == [(tuple, None, [None] * spec.num_leaves), (dict, [], [])]
        self._num_flat = spec.num_leaves if flat else None

    def leaves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """The leaves of a call, whose keywords come in any order. Raises `InputError` for another tree."""
        if len(args) == self._num_flat and not kwargs:
            for one in args:
                if not isinstance(one, torch.Tensor):
                    break
            else:
                return list(args)
        leaves: list[Any] = []
        if self._form is not None and _collect(self._form, (args, kwargs), leaves):
            return leaves
        names: list[str] = self.spec.children()[1].context
        ordered = {name: kwargs[name] for name in names} if kwargs.keys() == set(names) else dict(kwargs)
        leaves, given = trees.tree_flatten((args, ordered))
        if given != self.spec:
            raise InputError(
                f"arguments do not fit: {_first_misfit(self.spec, given)}\n  expected {self.spec}\n  got      {given}"
            )
        return leaves


# A container: its class, the keys of a dict, and what is in it; None for a leaf.
_Form = tuple[Any, list[Any] | None, list[Any]]


def _form_of(spec: trees.TreeSpec) -> _Form | None:
    """The form of a tree that is no leaf; None if it has containers of other kinds."""
    if spec.type not in (tuple, list, dict):
        return None
    children = [None if child.is_leaf() else _form_of(child) or () for child in spec.children()]
    return None if () in children else (spec.type, spec.context if spec.type is dict else None, children)


def _collect(form: _Form, tree: Any, leaves: list[Any]) -> bool:
    """Whether a tree has this form, and tensors for leaves, which are added to `leaves`."""
    kind, keys, children = form
    if tree.__class__ is not kind or len(tree) != len(children):
        return False
    if keys is not None:
        if not all(key in tree for key in keys):
            return False
        tree = [tree[key] for key in keys]
    for part, child in zip(tree, children, strict=True):
        if child is not None:
            if not _collect(child, part, leaves):
                return False
        elif isinstance(part, torch.Tensor):
            leaves.append(part)
        else:
            return False
    return True


def _first_misfit(expected: trees.TreeSpec, given: trees.TreeSpec) -> str:
    """How the arguments of a call differ from those of the example inputs, at the first place where they do."""
    (positional, named), (given_positional, given_named) = expected.children(), given.children()
    wanted, got = positional.children(), given_positional.children()
    if len(wanted) != len(got):
        return f"{len(wanted)} of them are positional, not {len(got)}"
    for number, (one, other) in enumerate(zip(wanted, got, strict=True)):
        if one != other:
            return f"argument {number} is put together in another way"
    if set(named.context) != set(given_named.context):
        return f"the keyword arguments are {sorted(named.context)}, not {sorted(given_named.context)}"
    return "a keyword argument is put together in another way"
