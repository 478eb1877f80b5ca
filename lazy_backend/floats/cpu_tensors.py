"""The CPU tensors that a body meets, and the nodes of their values.

In: the calls of a body that read, write or make CPU tensors. Out: nodes of its tape; why one cannot be followed.
See Note [CPU tensors of a body].
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lazy_backend.floats.cpu_calls import (
    CallOfOne,
    CpuCall,
    Reader,
    are_constant,
    constant,
    content,
    element,
    item_of,
    pick,
    same_bits,
)
from lazy_backend.floats.formulas import Literal, Operand, Tape, TracedFloat, untraced
from lazy_backend.ports import trees
from lazy_backend.ports.cpython import UNHELD, counts_of, is_a
from lazy_backend.ports.tensor_types import address_of, base_of, is_view, use_count, version_of
from lazy_backend.tensors.tensor import LazyTensor

# Larger tensors are not compared after the body, only their version counters.
_SMALL = 4096


@dataclass(slots=True, eq=False)
class Held:
    """Values from outside that are one leaf, because they were equal: tensors, or one function that reads anew."""

    tensors: list[torch.Tensor]
    read: Reader | None = None


@dataclass(slots=True, eq=False)
class _Tracked:
    """A CPU tensor that the body met: its node, and the version counter at that value."""

    tensor: torch.Tensor
    node: int
    version: int
    is_made: bool
    leaf: int = -1


class CpuTensors:
    """Follows CPU tensors through a body."""

    def __init__(self, tape: Tape) -> None:
        self.held: dict[int, Held] = {}
        self.problem: str | None = None
        self._tape = tape
        self._num_readers = 0
        self._tracked: dict[int, _Tracked] = {}
        self._aliases: dict[int, set[int]] = {}
        self._calls: dict[Any, Any] = {}

    def refuse(self, reason: str) -> None:
        """Note why no replay can do what the body did; the first reason stays."""
        self.problem = self.problem or reason

    def note_call(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
        written: Sequence[torch.Tensor],
        made: Sequence[torch.Tensor],
    ) -> None:
        """A call that wrote or made CPU tensors."""
        name = getattr(func, "__name__", "")
        first = args[0] if args else None
        if name.startswith("_foreach_") and name.endswith("_") and isinstance(first, list | tuple):
            method = getattr(torch.Tensor, name.removeprefix("_foreach_"), None)
            same = len(written) == len(first) and all(one is other for one, other in zip(written, first, strict=True))
            if same and method is not None:
                for place, target in enumerate(first):
                    options = {key: element(one, place) for key, one in kwargs.items()}
                    self._note_in_place(method, target, [element(one, place) for one in args[1:]], options)
                return
        flat = all(not is_a(one, list | tuple | dict) for one in (*args, *kwargs.values()))
        if flat and len(written) == 1 and written[0] is first and result is first:
            self._note_in_place(func, first, args[1:], kwargs)
        else:
            self._note_any(func, (args, kwargs), written, made)

    def _note_in_place(self, func: Any, target: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        key = (func, len(args), tuple(kwargs))
        call = self._calls.setdefault(key, CallOfOne(func, tuple(kwargs), True))
        operands = [self.operand(target), *map(self.operand, args), *map(self.operand, kwargs.values())]
        self._write(target, self._tape.compute(call, operands, target.detach().clone()))

    def _note_any(self, func: Any, given: Any, written: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
        leaves, spec = trees.tree_flatten(given)
        places = tuple(tuple(place for place, leaf in enumerate(leaves) if leaf is one) for one in written)
        key = (func, str(spec), places)
        call = self._calls.setdefault(key, CpuCall(func, spec, places))
        values = tuple(one.detach().clone() for one in (*made, *written))
        node = self._tape.compute(call, [self.operand(leaf) for leaf in leaves], values)
        fresh = []
        for place, one in enumerate((*made, *written)):
            picked = self._tape.compute(pick, (node, Literal(place)), values[place])
            fresh.append((one, picked))
        for place, (one, picked) in enumerate(fresh):
            if place >= len(made):
                self._write(one, picked)
            elif not any(one is other for other in written):
                self._track(one, picked, True)

    def keep_content(self, tensors: Sequence[torch.Tensor]) -> None:
        """Python has read these tensors: a replay must find the same."""
        for tensor in tensors:
            self._tape.guard(content, (self._tracked[id(tensor)].node,), content(tensor))

    def read(self, tensor: torch.Tensor, node: int) -> Any:
        """The number in a scalar: traced if it is a float."""
        value = tensor.item()
        if value.__class__ is float:
            return self._tape.traced(self._tape.compute(item_of, (node,), value))
        self._tape.guard(content, (node,), content(tensor))
        return value

    def read_again(self, func: Any, args: Any, kwargs: Any, value: torch.Tensor) -> int:
        """The leaf of what `func` gives at each replay, for the same arguments."""
        node = self._tape.leaf(value)
        self.held[node] = Held([], Reader(self._num_readers, func, tuple(args), tuple(kwargs.items())))
        self._num_readers += 1
        return node

    def note_factory(self, func: Any, args: Any, kwargs: Any, made: torch.Tensor) -> None:
        value = made.detach().clone()
        if are_constant(args, kwargs):
            node = self._tape.compute(constant, (Literal(value),), value)
        else:
            node = self.read_again(func, args, kwargs, value)
        self._track(made, node, True)

    def operand(self, value: Any) -> Operand:
        if type(value) is TracedFloat and value.tape is self._tape:
            return value.number
        if is_a(value, torch.Tensor):
            return self._tracked[id(value)].node
        return Literal(untraced(value))

    def node_of(self, tensor: torch.Tensor) -> int:
        tracked = self._tracked.get(id(tensor))
        if tracked is not None:
            if tracked.version != version_of(tensor):
                self.refuse("it writes a tensor on the CPU where a replay cannot follow, as through a view")
            return tracked.node
        node = self.leaf(tensor, tensor.detach().clone())
        self._track(tensor, node, False)
        return node

    def leaf(self, tensor: torch.Tensor, value: torch.Tensor) -> int:
        """The leaf of a tensor from outside. Equal scalars of one device are one leaf."""
        kind = tensor.__class__ is LazyTensor
        key = ("held", kind, value.dtype, content(value)) if not value.dim() and not value.is_complex() else None
        node = self._tape.leaf(value, key)
        self.held.setdefault(node, Held([])).tensors.append(tensor)
        return node

    def _track(self, tensor: torch.Tensor, node: int, is_made: bool) -> None:
        known = self._tracked.get(id(tensor))
        if known is not None:
            known.node, known.version = node, version_of(tensor)
            return
        self._tracked[id(tensor)] = _Tracked(tensor, node, version_of(tensor), is_made, -1 if is_made else node)
        self._aliases.setdefault(address_of(tensor.untyped_storage()), set()).add(id(tensor))

    def _write(self, tensor: torch.Tensor, node: int) -> None:
        tracked = self._tracked[id(tensor)]
        if len(self._aliases[address_of(tensor.untyped_storage())]) > 1:
            self.refuse("it writes a tensor on the CPU that shares memory with another one")
        if not same_bits(self._tape.values[node], tensor):
            self.refuse("equal operators on the CPU gave it different values")
        tracked.node, tracked.version = node, version_of(tensor)

    def was_written(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has changed since its node was made."""
        return version_of(tensor) != self._tracked[id(tensor)].version

    def writes(self) -> list[tuple[torch.Tensor, int]]:
        """The tensors from outside that the body wrote, each with its new value."""
        return [(one.tensor, one.node) for one in self._tracked.values() if not one.is_made and one.node != one.leaf]

    def seen(self) -> set[int]:
        return set(self._tracked)

    def check_end(self) -> None:
        """Refuse what the body did unseen, and what it made and left somewhere."""
        if self.problem:  # perhaps as a tensor cannot be looked into: `torch.load` has some without a device
            return
        made = [tracked.tensor for tracked in self._tracked.values() if tracked.is_made]
        views = Counter(id(base_of(tensor)) for tensor in made if is_view(tensor))
        del made
        for tracked in self._tracked.values():
            small = tracked.tensor.numel() <= _SMALL
            value = self._tape.values[tracked.node]
            if self.was_written(tracked.tensor) or (small and not same_bits(value, tracked.tensor.detach())):
                self.refuse("it writes a tensor on the CPU where a replay cannot follow, as through a view or an array")
            # views that the body made refer to their base: all of them as one reference from Python, each from C++
            count = views[id(tracked.tensor)]
            (held,) = counts_of([tracked.tensor])  # by the list, and by `tracked`
            holders = held - UNHELD - (count > 0), use_count(tracked.tensor) - count
            if tracked.is_made and holders > (1, 1):
                self.refuse("it makes a tensor on the CPU, and something keeps it\n  write into one: old.copy_(new)")

    def clear(self) -> None:
        self._tracked.clear()
        self._calls.clear()
