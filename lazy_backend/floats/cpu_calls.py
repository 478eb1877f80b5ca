"""Operators on CPU tensors as functions of their operands, which a replay can call again.

In: the calls of a body. Out: functions that write none of their operands; the bits of CPU tensors.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lazy_backend.ports import trees
from lazy_backend.ports.cpython import is_a

_CONSTANT_TYPES = (
    bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_CONSTANT = frozenset(map(id, _CONSTANT_TYPES))  # a metaclass may define how classes are found


def content(tensor: torch.Tensor) -> bytes:
    """The bits of a CPU tensor."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and content(a) == content(b)


def as_upload(value: Any, dtype: torch.dtype) -> torch.Tensor:
    """A float or a CPU tensor, as an upload of this dtype."""
    return value.detach().to(dtype) if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=dtype)


@dataclass(frozen=True, slots=True, eq=False)
class CallOfOne:
    """An operator that makes one tensor, or writes its first operand, as a function that returns the new value."""

    function: Callable[..., Any]
    names: tuple[str, ...]  # of the last operands
    writes: bool

    @property
    def key(self) -> Hashable:
        """What is equal for two objects that do the same; so for all functions of this module."""
        return "one", self.function, self.names, self.writes

    def __call__(self, *operands: Any) -> torch.Tensor:
        count = len(operands) - len(self.names)
        args = list(operands[:count])
        if self.writes:
            args[0] = args[0].clone()
        made = self.function(*args, **dict(zip(self.names, operands[count:], strict=True)))
        return args[0] if self.writes else made  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, eq=False)
class CpuCall:
    """Any operator, as a function that returns its tensors, then the new values of the operands that it writes.

    `written`: for each of these, where it is among the operands, which may be several places.
    """

    function: Callable[..., Any]
    spec: trees.TreeSpec
    written: tuple[tuple[int, ...], ...]

    @property
    def key(self) -> Hashable:
        return "call", self.function, str(self.spec), self.written

    def __call__(self, *leaves: Any) -> tuple[torch.Tensor, ...]:
        operands = list(leaves)
        for places in self.written:  # by place: two operands that are equal now may be one object
            new = leaves[places[0]].clone()
            for place in places:
                operands[place] = new
        args, kwargs = trees.tree_unflatten(operands, self.spec)
        return (*tensors_in(self.function(*args, **kwargs)), *(operands[places[0]] for places in self.written))


def pick(results: tuple[torch.Tensor, ...], place: int) -> torch.Tensor:
    return results[place]


def element(value: Any, place: int) -> Any:
    """An operand of one of the operators that a call of a list is."""
    return value[place] if isinstance(value, list | tuple) else value


def item_of(tensor: torch.Tensor) -> float:
    return tensor.item()


def tensors_in(value: Any) -> list[torch.Tensor]:
    if is_a(value, torch.Tensor):
        return [value]
    return [one for one in trees.tree_leaves(value) if is_a(one, torch.Tensor)]


@dataclass(frozen=True, slots=True, eq=False)
class Reader:
    """Makes a CPU tensor again from what the body gave, such as an array or a list.

    The `number`-th one of a run stands for that of another run if both are made by one function, of the same arrays.
    """

    number: int
    function: Callable[..., torch.Tensor]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]

    def __call__(self) -> torch.Tensor:
        return self.function(*self.args, **dict(self.kwargs))

    def key(self) -> Hashable:
        """Equal for two readers of which one stands for the other."""
        values = (*self.args, *(value for _, value in self.kwargs))
        parts = [literal_key(value) if type(value) is not list else list for value in values]
        return (self.number, self.function, *parts)


def literal_key(value: Any) -> Hashable:
    """What is equal for two operands that are the same at each replay."""
    if type(value) is float:
        return float, struct.pack("d", value)
    if is_a(value, torch.Tensor):
        return value.dtype, tuple(value.shape), content(value)
    if type(value) is slice:
        return slice, value.start, value.stop, value.step
    return (type(value), value) if is_constant(value) else ("object", id(value))


def are_constant(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return all(map(is_constant, args)) and all(map(is_constant, kwargs.values()))


def is_constant(value: Any) -> bool:
    if type(value) is tuple or type(value) is torch.Size:
        return all(map(is_constant, value))
    return id(type(value)) in _CONSTANT


def constant(value: torch.Tensor) -> torch.Tensor:
    return value
