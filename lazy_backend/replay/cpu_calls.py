"""Operators on CPU tensors as functions of their operands, which a replay can call again.

In: the calls of a body. Out: functions that write none of their operands; the bits of CPU tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree


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
class CpuWrite:
    """An operator that writes its first operand, as a function that returns the new value."""

    function: Callable[..., Any]
    names: tuple[str, ...]  # of the last operands

    def __call__(self, target: torch.Tensor, *operands: Any) -> torch.Tensor:
        made = target.clone()
        if not self.names:
            self.function(made, *operands)
            return made
        count = len(operands) - len(self.names)
        self.function(made, *operands[:count], **dict(zip(self.names, operands[count:], strict=True)))
        return made


@dataclass(frozen=True, slots=True, eq=False)
class CpuCall:
    """Any operator, as a function that returns its tensors, then the new values of the operands that it writes."""

    function: Callable[..., Any]
    spec: pytree.TreeSpec
    written: tuple[int, ...]

    def __call__(self, *leaves: Any) -> tuple[torch.Tensor, ...]:
        operands = list(leaves)
        for place in self.written:
            operands[place] = operands[place].clone()
        args, kwargs = pytree.tree_unflatten(operands, self.spec)
        return (*tensors_in(self.function(*args, **kwargs)), *(operands[place] for place in self.written))


def pick(results: tuple[torch.Tensor, ...], place: int) -> torch.Tensor:
    return results[place]


def item_of(tensor: torch.Tensor) -> float:
    return tensor.item()


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [one for one in pytree.tree_leaves(value) if isinstance(one, torch.Tensor)]


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

    def agrees(self, other: Reader) -> bool:
        return (self.number, self.function, self._parts()) == (other.number, other.function, other._parts())

    def _parts(self) -> list[Any]:
        values = (*self.args, *(value for _, value in self.kwargs))
        return [value if is_constant(value) else list if type(value) is list else id(value) for value in values]


def are_constant(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return all(map(is_constant, args)) and all(map(is_constant, kwargs.values()))


def is_constant(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(is_constant, value))
    return value is None or isinstance(value, int | float | complex | str | torch.dtype | torch.device | torch.layout)


def constant(value: torch.Tensor) -> torch.Tensor:
    return value
