"""The values of lazy scalars, while a body only records.

In: the calls of a body on lazy tensors of no dimensions. Out: a node for each value that a CPU can compute along.

Note [Mirrors]
Some optimizers keep scalars on the device and read them in Python: ASGD its step counts and rates. Such a read would
need the run of what is only recorded. But these scalars come from outside, where they have values, or from Python, and
only exact operators change them: additions, products, copies. So the recorder does the same on the CPU, as nodes of the
tape, and `item` gives a traced float. At a replay the leaves are read from the device, which is idle then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lazy_backend.floats.cpu_calls import CallOfOne, element
from lazy_backend.floats.formulas import Literal, Operand, Tape, TracedFloat, untraced
from lazy_backend.ports.cpython import is_a
from lazy_backend.ports.tensor_types import version_of
from lazy_backend.tensors.state import TensorData
from lazy_backend.tensors.tensor import LazyTensor, backing_tensor
from lazy_backend.tensors.thread_state import run_clean

# Exact in every kernel, compiled or not.
_FACTORIES = frozenset(("zeros", "ones", "full", "tensor", "as_tensor", "zeros_like", "ones_like"))
_COPIES = frozenset(("clone", "detach"))
_WRITES = frozenset(("add_", "sub_", "mul_", "copy_", "fill_", "zero_", "__iadd__", "__isub__", "__imul__"))
_LIST_WRITES = frozenset(("_foreach_add_", "_foreach_mul_", "_foreach_copy_"))


def value_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The value of a tensor from outside a body, on the CPU; None if a lazy tensor has none yet."""
    if not isinstance(tensor, LazyTensor):
        return tensor
    if tensor._data.storage.tensor is None:
        return None
    return run_clean(lambda: backing_tensor(tensor._data).cpu())


@dataclass(slots=True, eq=False)
class _Mirror:
    """A lazy scalar, and the node of its value as of this version of its data."""

    tensor: LazyTensor
    data: TensorData
    version: int
    node: int


class Mirrors:
    """Follows lazy scalars through the calls of a body. `leaf` gives the node of a value from outside."""

    def __init__(self, tape: Tape, leaf: Callable[[LazyTensor, torch.Tensor], int]) -> None:
        self._tape = tape
        self._leaf = leaf
        self._mirrors: dict[int, _Mirror] = {}
        self._outside: set[int] = set()  # ids of scalars that optimizers keep
        self._calls: dict[Any, CallOfOne] = {}

    def expect(self, optimizer: torch.optim.Optimizer) -> None:
        """Follow the scalars in the optimizer's state."""
        for entry in optimizer.state.values():
            for value in dict.values(entry) if is_a(entry, dict) else ():
                if type(value) is LazyTensor and not value.dim():
                    self._outside.add(id(value))

    def node_of(self, tensor: Any) -> int | None:
        """The node of a scalar's current value, if it is known."""
        known = self._mirrors.get(id(tensor))
        if known is None:
            if id(tensor) not in self._outside:
                return None
            self._outside.discard(id(tensor))
            value = value_of(tensor)
            if value is None:
                return None
            self._set(tensor, self._leaf(tensor, value.clone()))
            return self._mirrors[id(tensor)].node
        return known.node if (known.data, known.version) == (tensor._data, version_of(tensor)) else None

    def _set(self, tensor: LazyTensor, node: int) -> None:
        self._mirrors[id(tensor)] = _Mirror(tensor, tensor._data, version_of(tensor), node)

    def prepare(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[list[Operand]] | None:
        """Before a call: its operands, once for each scalar that it computes; None if it cannot be followed."""
        if name in _LIST_WRITES and args and isinstance(args[0], list | tuple) and "alpha" not in kwargs:
            count = len(args[0])
            each = [[element(one, place) for one in args] for place in range(count)]
        elif name in _FACTORIES or name in _COPIES or (name in _WRITES and "alpha" not in kwargs):
            each = [[*args, *kwargs.values()]]
        else:
            for one in args:
                self.node_of(one)  # from outside, before anything writes to it
            return None
        found = []
        for values in each:
            operands = [self._operand(value) for value in values]
            if any(operand is None for operand in operands):
                return None
            found.append([operand for operand in operands if operand is not None])
        return found

    def _operand(self, value: Any) -> Operand | None:
        if type(value) is TracedFloat and value.tape is self._tape:
            return value.number
        if type(value) is LazyTensor:
            return self.node_of(value)
        if is_a(value, torch.Tensor):
            return None if value.dim() or value.device.type != "cpu" else Literal(value.detach().clone())
        if type(value) is torch.device or (type(value) is str and value.startswith("lazy")):
            return Literal("cpu")
        return Literal(untraced(value))

    def follow(self, func: Any, name: str, args: Sequence[Any], kwargs: Any, each: Any, result: Any) -> None:
        """After a call: note the values of the scalars that it made or wrote."""
        writes = name in _WRITES or name in _LIST_WRITES
        targets = list(args[0]) if name in _LIST_WRITES else [args[0] if writes else result]
        function = getattr(torch.Tensor, name.removeprefix("_foreach_")) if name in _LIST_WRITES else func
        if len(targets) != len(each):
            return
        for target, operands in zip(targets, each, strict=True):
            if target.__class__ is not LazyTensor or target.dim() or (not writes and id(target) in self._mirrors):
                continue
            key = (function, len(operands), tuple(kwargs), writes)
            call = self._calls.setdefault(key, CallOfOne(function, tuple(kwargs), writes))
            values = [self._tape.values[one] if isinstance(one, int) else one.value for one in operands]
            value = run_clean(call, *values)
            if value.dim() or value.device.type != "cpu" or value.dtype != target.dtype:
                continue
            self._set(target, self._tape.compute(call, operands, value))

    def clear(self) -> None:
        self._mirrors.clear()
        self._calls.clear()
