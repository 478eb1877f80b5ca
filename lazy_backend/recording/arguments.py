"""Walk the arguments of a call, and keep the tensors that stand in for its operands.

An argument is a leaf, or a list or tuple of leaves, as in operator schemas. In: the arguments of one call. Out: their
leaves, the paths to them, the same arguments with other leaves; and `StandIns`, which maps a result back to the operand
whose memory it shares. The recorder's hot loop walks its arguments itself, see `record`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch

from lazy_backend.errors import LazyBackendError
from lazy_backend.lowering.ir.schema import Operand, schema_of
from lazy_backend.ports.dispatcher import OpOverload
from lazy_backend.ports.tensor_types import address_of, share_memory
from lazy_backend.tensors.state import TensorData
from lazy_backend.tensors.tensor import LazyTensor

K = TypeVar("K")

# Up to this many operands, each result is compared with each operand.
_FEW = 8

# Types of arguments other than floats that are the same whatever tensors stand for, and at each replay.
LITERALS = frozenset((int, bool, type(None), str, torch.dtype, torch.layout, torch.memory_format))


def mutated_arguments(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that a call writes."""
    written: list[Any] = []
    for operand in schema_of(op).mutates:
        arg = args[operand.place] if operand.place < len(args) else kwargs.get(operand.name)
        written += arg if arg.__class__ is list else flat(arg)
    return written


def flat(arg: Any) -> list[Any]:
    """The leaves of an argument: its elements if it is a list, otherwise the argument itself."""
    if isinstance(arg, list | tuple):
        return [leaf for item in arg for leaf in flat(item)]
    return [arg]


def with_leaves(convert: Callable[[Any], Any], arg: Any) -> Any:
    """The argument with each leaf converted. Its tuples become lists, as schemas expect."""
    return [with_leaves(convert, item) for item in arg] if isinstance(arg, list | tuple) else convert(arg)


def path_of(operand: Operand, args: Sequence[Any]) -> tuple[int | str, ...]:
    """The path to an operand of the schema among the arguments of a call, as `operand_at` takes it."""
    return (operand.place,) if operand.place < len(args) else (operand.name,)


def path_to(data: TensorData, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int | str, ...]:
    """The path to `data` among the arguments of a call, as `operand_at` takes it."""
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for head, arg in places:
        if isinstance(arg, LazyTensor) and arg._data is data:
            return (head,)
        if isinstance(arg, list | tuple):
            for place, item in enumerate(arg):
                if isinstance(item, LazyTensor) and item._data is data:
                    return (head, place)
    raise LazyBackendError(
        "internal error: a result shares memory with no operand\n"
        "  please report the program and what `python -m lazy_backend` prints"
    )


def operand_at(path: Sequence[int | str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The argument at `path`: a position or a name, then a position in a list."""
    head = path[0]
    found = args[head] if head.__class__ is int else kwargs[head]  # type: ignore[index]
    for place in path[1:]:
        found = found[place]
    return found


class StandIns(Generic[K]):
    """The tensors that stand in for the operands of one call, in the order of first use."""

    __slots__ = ("_pairs", "_places")

    def __init__(self) -> None:
        self._pairs: list[tuple[K, torch.Tensor]] = []
        self._places: dict[int, K] | None = None

    def __iter__(self) -> Iterator[tuple[K, torch.Tensor]]:
        return iter(self._pairs)

    def add(self, operand: K, tensor: torch.Tensor) -> None:
        """Let `tensor` stand in for `operand`."""
        self._pairs.append((operand, tensor))
        self._places = None

    def of(self, operand: K) -> torch.Tensor | None:
        """The tensor that stands in for `operand`, if there is one already."""
        return next((tensor for known, tensor in self._pairs if known is operand), None)

    def is_used(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` already stands in for some operand."""
        return any(tensor is used for _, used in self._pairs)

    def source_of(self, result: torch.Tensor) -> K | None:
        """The first operand whose memory `result` shares, if any."""
        if len(self._pairs) > _FEW:
            return self._by_storage().get(address_of(result.untyped_storage()))
        for operand, tensor in self._pairs:
            if share_memory(result, tensor):  # 0.2 µs
                return operand
        return None

    def _by_storage(self) -> dict[int, K]:
        """The first operand in each storage, so that a result is looked up instead of compared with every operand."""
        if self._places is None:
            self._places = {}
            for operand, tensor in self._pairs:
                self._places.setdefault(address_of(tensor.untyped_storage()), operand)
        return self._places
