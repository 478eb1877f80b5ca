"""The arguments of a call of a region.

In: args and kwargs. Out: what a program depends on among them, as a key, and the tensors that it takes from them; or
why the call runs as written.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from lazy_backend.lowering.artefacts.environment import switches
from lazy_backend.ports import trees
from lazy_backend.ports.cpython import container_kind, is_a, items_of, name_of
from lazy_backend.ports.tensor_types import device_of, is_leaf
from lazy_backend.replay.plain_values import class_key, has_plain_hash, is_plain, plain_key, value_key
from lazy_backend.replay.structure import marks_of, same_containers
from lazy_backend.tensors.contexts import contexts
from lazy_backend.tensors.state import DeviceContext
from lazy_backend.tensors.tensor import LazyTensor, is_parameter, own_attributes
from lazy_backend.tensors.thread_state import describe_autocast


@dataclass(slots=True, eq=False)
class CallArguments:
    """The arguments of one call. `key`: everything that must be the same for the same program."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: Sequence[Any]
    spec: trees.TreeSpec | None  # None: the leaves are the positional arguments, and there are no others
    tensors: list[LazyTensor]
    context: DeviceContext
    key: tuple[Any, ...]
    autocast: tuple[Any, ...] | None  # as `describe_autocast` returns it

    def has_changed(self) -> bool:
        """Whether a list or dict among the arguments holds other values now."""
        if self.spec is None:
            return False
        leaves, spec = trees.tree_flatten((self.args, self.kwargs))
        return spec != self.spec or not all(map(operator.is_, leaves, self.leaves))

    def detached(self, copies: bool = False) -> CallArguments:
        """The same arguments; tensors that require gradients are leaves over the same data.

        `copies`: in lists and dicts of their own, as the user's may have changed since the call.
        """
        return self.replaced({id(one): _detached(one) for one in self.tensors if one.requires_grad}, copies)

    def marks(self) -> list[Any]:
        """What a body may do to tensors that it is given, besides writing them."""
        return list(map(marks_of, self.tensors))

    def replaced(self, inner: Mapping[int, torch.Tensor], copies: bool = False) -> CallArguments:
        """The same arguments with other tensors, by the id of those in their place."""
        if not inner and not copies:
            return self
        leaves = tuple(inner.get(id(leaf), leaf) for leaf in self.leaves)
        args, kwargs = (leaves, {}) if self.spec is None else trees.tree_unflatten(leaves, self.spec)
        tensors: list[Any] = [inner.get(id(tensor), tensor) for tensor in self.tensors]
        return CallArguments(args, kwargs, leaves, self.spec, tensors, self.context, self.key, self.autocast)


def describe(args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments | str:
    """The arguments of a call, or why it runs as written."""
    leaves: Sequence[Any] = args
    spec = None
    shared: tuple[int, ...] = ()
    if kwargs or not all(type(arg) is LazyTensor or _is_leaf(arg) for arg in args):
        if any(map(_has_odd_key, chain(args, kwargs.values()))):
            return "it got a dict whose keys define how they are found"
        try:
            leaves, spec = trees.tree_flatten((args, kwargs))
        except Exception as error:  # the user's, of classes that cannot be hashed or taken apart
            return f"it got an argument that cannot be looked into: {name_of(type(error))}"
        if any(type(arg) is dict and not all(map(_is_string, arg)) for arg in args):
            return "it got a dict whose keys are not strings"
        shared = same_containers(args, kwargs)
        if shared and any(is_a(leaf, LazyTensor) and leaf.requires_grad for leaf in leaves):
            return "it got one list or dict as several arguments"
    key: list[Any] = [spec, shared, switches(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
    tensors: list[LazyTensor] = []
    context: DeviceContext | None = None
    first: dict[int, int] = {}
    for leaf in leaves:
        if type(leaf) is LazyTensor:
            data = leaf._data
            if context is None:
                context = data.context
            elif context is not data.context:
                return "its arguments are on several devices"
            # the same tensor twice is one operand; views of one memory have alias groups in the jump's key
            place = first.setdefault(id(data), len(tensors))
            if place == len(tensors):
                key.append((data.meta, *_place_of(leaf), place))
            else:  # for autograd, another tensor for the same data has a gradient of its own
                same = next((number for number, one in enumerate(tensors) if one is leaf), -1)
                key.append((data.meta, *_place_of(leaf), place, same))
            tensors.append(leaf)
            if given := own_attributes(leaf):
                key.append(value_key(given))
                if key[-1] is None:
                    return "it got a tensor with attributes that cannot be compared"
        elif is_a(leaf, torch.Tensor):
            return f"it got a tensor on {device_of(leaf)}"
        elif is_plain(leaf):
            key.append((class_key(type(leaf)), plain_key(leaf)))
        else:
            return f"it got a {name_of(type(leaf))}, which may change without being noticed"
    autocast = describe_autocast()
    key.append(autocast)
    context = context or contexts.get_device_context(None)
    return CallArguments(args, kwargs, leaves, spec, tensors, context, tuple(key), autocast)


def _place_of(tensor: LazyTensor) -> tuple[bool, ...]:
    """What decides how autograd takes a tensor."""
    return tensor.requires_grad, is_leaf(tensor), is_parameter(tensor), tensor.is_inference()


def _detached(tensor: LazyTensor) -> torch.Tensor:
    inner = tensor.detach().requires_grad_()
    for name, value in tensor.__dict__.items():
        if name != "_data":  # the user's, and that it is a parameter
            setattr(inner, name, value)
    return inner


def _is_string(key: Any) -> bool:
    return type(key) is str


def _has_odd_key(value: Any) -> bool:
    """Whether a dict has a key whose class defines how it is found, at any depth in lists, tuples and dicts."""
    kind = container_kind(value)
    if kind is dict:
        return not all(map(has_plain_hash, dict.keys(value))) or any(map(_has_odd_key, dict.values(value)))
    return (kind is list or kind is tuple) and any(map(_has_odd_key, items_of(value)))


def _is_leaf(arg: Any) -> bool:
    kind = type(arg)
    return not issubclass(kind, list | tuple | dict) and (type(kind) is type and kind not in trees.SUPPORTED_NODES)
