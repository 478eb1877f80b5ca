"""Record what a body does with floats and CPU tensors while it runs as written.

In: a device's context, the float arguments, and the optimizers that the body steps. Out: `RecordedFloats`: the tape,
where its nodes went (constants of the trace, uploads, CPU tensors), and what cannot be followed, as a reason.

Note [CPU tensors of a body]
Operators on CPU tensors run as the body calls them, and are nodes of the tape: step counts that optimizers keep on the
CPU, learning rates in tensors, buffers that are uploaded. A tensor from outside is a leaf, read again at each replay.
Writing to one is a node for its new value, and the replay stores that value into the tensor once it is committed. A
tensor that the body makes and leaves somewhere, or writes through an alias, cannot be followed: then there is a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from sys import getrefcount
from typing import Any

import torch
from torch.utils import _pytree as pytree

from lazy_backend.replay.captured_state import float_places
from lazy_backend.replay.formulas import Literal, Operand, Tape, TracedFloat, bits, plain, untraced
from lazy_backend.replay.mirrors import Mirrors
from lazy_backend.replay.torch_hooks import FloatSeer
from lazy_backend.tensors.state import DeviceContext, LazyStorage
from lazy_backend.tensors.tensor import LazyTensor

# What tells nothing about the values of a tensor.
_METADATA = frozenset((
    "size", "dim", "numel", "nelement", "ndimension", "stride", "storage_offset", "element_size", "is_floating_point",
    "is_complex", "is_contiguous", "is_signed", "is_same_size", "is_pinned", "is_conj", "is_neg", "is_inference",
    "get_device", "type", "__len__", "__hash__", "has_names", "is_tensor", "result_type", "can_cast", "_is_view",
    "is_set_to", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "requires_grad_",
))  # fmt: skip
_TENSOR_PROPERTIES = frozenset(("data", "T", "mT", "H", "mH", "real", "imag", "grad"))
# Larger CPU tensors are not compared after the body, only their version counters.
_SMALL = 4096

# What makes a tensor of Python's values.
_FROM_VALUES = frozenset((torch.tensor, torch.as_tensor, torch.asarray))

# A node that a value may come from, and whether it is negated.
Choice = tuple[int, bool]


def content(tensor: torch.Tensor) -> bytes:
    """The bits of a CPU tensor."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and content(a) == content(b)


def as_upload(value: Any, dtype: torch.dtype) -> torch.Tensor:
    """A float or a CPU tensor, as an upload of this dtype."""
    return value.detach().to(dtype) if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=dtype)


# ----- operators on CPU tensors, as functions of their operands


@dataclass(frozen=True, slots=True, eq=False)
class InPlace:
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
class Call:
    """Any operator, as a function that returns its tensors, then the new values of the operands that it writes."""

    function: Callable[..., Any]
    spec: pytree.TreeSpec
    written: tuple[int, ...]

    def __call__(self, *leaves: Any) -> tuple[torch.Tensor, ...]:
        operands = list(leaves)
        for place in self.written:
            operands[place] = operands[place].clone()
        args, kwargs = pytree.tree_unflatten(operands, self.spec)
        return (*_tensors_in(self.function(*args, **kwargs)), *(operands[place] for place in self.written))


def _pick(results: tuple[torch.Tensor, ...], place: int) -> torch.Tensor:
    return results[place]


def _item(tensor: torch.Tensor) -> float:
    return tensor.item()


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [one for one in pytree.tree_leaves(value) if isinstance(one, torch.Tensor)]


# ----- what was recorded


@dataclass(slots=True, eq=False)
class Held:
    """Values from outside that are one leaf, because they were equal: tensors, or one function that reads anew."""

    tensors: list[torch.Tensor]
    read: _Reader | None = None


@dataclass(slots=True, eq=False)
class RecordedFloats:
    """What one run of a body did with floats and CPU tensors. See `float_recorder`'s docstring."""

    tape: Tape
    given: list[int | None]  # the leaf of each float of the arguments, then of the guarded optimizers
    held: dict[int, Held]
    constants: dict[int, list[Choice]]  # by place among the trace's constants
    unsure: set[int]  # places whose constants may be other floats that are equal by chance
    uploads: dict[LazyStorage, list[int]]
    writes: list[tuple[torch.Tensor, int]]  # CPU tensors from outside, each with its new value
    seen: set[int]  # ids of the CPU tensors that the body met, which are alive
    problem: str | None

    def leaf_value(self, held: Held) -> Any:
        """What this run found where another one read `held`; None if it did not look there."""
        for number, own in self.held.items():
            if held.read is not None:
                if own.read is not None and own.read.agrees(held.read):
                    return self.tape.values[number]
            elif any(tensor is held.tensors[0] for tensor in own.tensors):
                return self.tape.values[number]
        return None


@dataclass(slots=True, eq=False)
class _Tracked:
    """A CPU tensor that the body met: its node, and the version counter at that value."""

    tensor: torch.Tensor
    node: int
    version: int
    is_made: bool
    leaf: int = -1


@dataclass(frozen=True, slots=True, eq=False)
class _Reader:
    """Makes a CPU tensor again from what the body gave, such as an array or a list.

    The `number`-th one of a run stands for that of another run if both are made by one function, of the same arrays.
    """

    number: int
    function: Callable[..., torch.Tensor]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]

    def __call__(self) -> torch.Tensor:
        return self.function(*self.args, **dict(self.kwargs))

    def agrees(self, other: _Reader) -> bool:
        return (self.number, self.function, self._parts()) == (other.number, other.function, other._parts())

    def _parts(self) -> list[Any]:
        values = (*self.args, *(value for _, value in self.kwargs))
        return [value if _is_constant(value) else list if type(value) is list else id(value) for value in values]


def _are_constant(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return all(map(_is_constant, args)) and all(map(_is_constant, kwargs.values()))


def _is_constant(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return value is None or isinstance(value, int | float | complex | str | torch.dtype | torch.device | torch.layout)


@dataclass(slots=True, eq=False)
class _SeenCall:
    """One call of PyTorch, with its traced floats and CPU tensors, in order."""

    func: Any
    name: str
    args: Any
    kwargs: Any
    operands: list[Any]
    is_lazy: bool  # whether a lazy tensor is among the arguments
    cpu: list[torch.Tensor] = field(default_factory=list)  # each CPU tensor once
    mirrored: Any = None
    num_constants: int = 0


# ----- the recorder


class FloatRecorder(FloatSeer):
    """Sees each call of PyTorch within its block, and puts traced floats in place of hyperparameters.

    Use: `install` the optimizers that are known, run the body in the block, then `restore` in any case, and `finish`.
    """

    def __init__(self, context: DeviceContext, uploads: list[LazyStorage], floats: Sequence[float]) -> None:
        super().__init__()
        self.tape = Tape()
        self._context = context
        self._uploaded = uploads
        self._num_uploaded = 0
        self._unfilled: list[LazyStorage] = []
        self._num_readers = 0
        self._given: dict[tuple[int, int], int] = {}  # by optimizer's id (0 for arguments) and place
        for place, value in enumerate(floats):
            self._given[0, place] = self.tape.leaf(value)
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._replaced: list[tuple[dict[str, Any], str, Any, Any]] = []
        self._cpu: dict[int, _Tracked] = {}
        self._mirrors = Mirrors(self.tape, self._leaf)
        self._aliases: dict[int, set[int]] = {}
        self._held: dict[int, Held] = {}
        self._calls: dict[Any, Any] = {}
        self._constants: dict[int, list[Choice]] = {}
        self._unsure: set[int] = set()
        self._uploads: dict[LazyStorage, list[int]] = {}
        self._problem: str | None = None

    # ----- floats from outside

    def argument(self, place: int) -> TracedFloat:
        """The `place`-th float argument, traced."""
        return self.tape.traced(self._given[0, place])

    def install(self, optimizer: torch.optim.Optimizer) -> None:
        """Put traced floats in place of the optimizer's hyperparameters."""
        if id(optimizer) in self._optimizers:
            return
        self._optimizers[id(optimizer)] = optimizer
        self._mirrors.expect(optimizer)
        count = 0
        for group, name, length in float_places(optimizer):
            original = group[name]
            values = (original,) if length is None else original
            traced = []
            for value in values:
                if isinstance(value, float):
                    node = self._given[id(optimizer), count] = self.tape.leaf(plain(value))
                    traced.append(self.tape.traced(node))
                    count += 1
                else:
                    traced.append(value)
            new = traced[0] if length is None else tuple(traced)
            self._replaced.append((group, name, original, new))
            group[name] = new
            traced.clear()

    def restore(self) -> None:
        """Put the hyperparameters back. What the body has set itself stays, as plain floats."""
        self._mirrors.clear()  # before anybody asks which lazy tensors are alive
        while self._replaced:
            group, name, original, new = self._replaced[-1]
            if group.get(name) is new:
                group[name] = original
            else:
                self.see_schedule()
                if isinstance(group.get(name), TracedFloat):
                    group[name] = plain(group[name])
            self._replaced.pop()

    def see_schedule(self) -> None:
        self.refuse(
            "it changes an optimizer's hyperparameters\n  step learning-rate schedules outside the captured function"
        )

    def refuse(self, reason: str) -> None:
        self._problem = self._problem or reason

    # ----- calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _METADATA or (name == "__get__" and _property_of(func) not in _TENSOR_PROPERTIES):
            return func(*args, **kwargs)
        operands: list[Any] = []
        is_lazy = _scan((*args, *kwargs.values()), operands)
        if name == "item" and is_lazy:
            node = self._mirrors.node_of(args[0])
            if node is not None:
                return self._read(self.tape.values[node], node)
        call = _SeenCall(func, name, args, kwargs, operands, is_lazy)
        if not self._try(self._before, call):
            return func(*_untraced(args), **_untraced(kwargs))
        if any(one.__class__ is TracedFloat for one in operands):
            result = func(*_untraced(args), **_untraced(kwargs))
        else:
            result = func(*args, **kwargs)
        if name == "item" and len(call.cpu) == 1:
            return self._read(call.cpu[0], self._cpu[id(call.cpu[0])].node)
        self._try(self._after, call, result)
        return result

    def _try(self, note: Callable[..., None], call: _SeenCall, *further: Any) -> bool:
        """Whether a call could be noted. Tensors of rare kinds, as in transforms, have no storage or no version."""
        try:
            note(call, *further)
        except (RuntimeError, NotImplementedError, TypeError, AttributeError, KeyError) as error:
            self.refuse(f"{call.name} takes a tensor on the CPU that cannot be followed: {error}")
            return False
        return True

    def _before(self, call: _SeenCall) -> None:
        call.cpu = list({id(one): one for one in call.operands if isinstance(one, torch.Tensor)}.values())
        if call.cpu and call.name == "__set__" and _property_of(call.func) == "data":
            self.refuse("it gives a tensor on the CPU other data")
        for one in call.cpu:
            self._node_of(one)
            if one.requires_grad and torch.is_grad_enabled():
                self.refuse("it computes gradients of a tensor on the CPU")
        call.mirrored = self._mirrors.prepare(call.name, call.args, call.kwargs)
        call.num_constants = len(self._context.trace.constants)
        self._fresh_uploads()

    def _after(self, call: _SeenCall, result: Any) -> None:
        if call.operands:
            self._note_traced(call, result)
        else:
            self._note_untraced(call, result)
        if call.mirrored is not None:
            self._mirrors.follow(call.func, call.name, call.args, call.kwargs, call.mirrored, result)

    def _read(self, tensor: torch.Tensor, node: int) -> Any:
        """The number in a scalar: traced if it is a float."""
        value = tensor.item()
        if value.__class__ is float:
            return self.tape.traced(self.tape.compute(_item, (node,), value))
        self.tape.guard(content, (node,), content(tensor))
        return value

    def _note_untraced(self, call: _SeenCall, result: Any) -> None:
        """A call with neither traced floats nor CPU tensors."""
        if result.__class__ is LazyTensor:
            if call.func in _FROM_VALUES and not call.is_lazy and not _are_constant(call.args, call.kwargs):
                self._link_values(call.func, call.args, call.kwargs)
        elif isinstance(result, torch.Tensor | tuple | list):
            for made in _tensors_in(result):
                if made.device.type != "cpu":
                    continue
                if call.is_lazy:
                    self.refuse(f"{call.name} computes a tensor on the CPU from lazy tensors")
                self._note_factory(call.func, call.args, call.kwargs, made)

    def _link_values(self, func: Any, args: Any, kwargs: Any) -> None:
        """A lazy tensor was made of an array or a list: the node of the same tensor on the CPU."""
        uploads = self._fresh_uploads()
        kwargs = {**kwargs, "device": "cpu"}
        made = func(*args, **kwargs)
        node = self._read_again(func, args, kwargs, made.detach().clone())
        for storage in uploads:
            assert storage.tensor is not None
            value = as_upload(made, storage.tensor.dtype)
            if same_bits(value, storage.tensor.cpu()):
                choice = self.tape.compute(as_upload, (node, Literal(value.dtype)), value.clone())
                self._uploads[storage] = [choice]

    def see_made(self, function: Callable[..., torch.Tensor], args: tuple[Any, ...], made: torch.Tensor) -> None:
        with torch._C.DisableTorchFunction():  # its own calls are not the body's; no public form in 2.13
            self._note_factory(function, args, {}, made)

    def _read_again(self, func: Any, args: Any, kwargs: Any, value: torch.Tensor) -> int:
        """The leaf of what `func` gives at each replay, for the same arguments."""
        node = self.tape.leaf(value)
        self._held[node] = Held([], _Reader(self._num_readers, func, tuple(args), tuple(kwargs.items())))
        self._num_readers += 1
        return node

    def _note_factory(self, func: Any, args: Any, kwargs: Any, made: torch.Tensor) -> None:
        value = made.detach().clone()
        if _are_constant(args, kwargs):
            node = self.tape.compute(_constant, (Literal(value),), value)
        else:
            node = self._read_again(func, args, kwargs, value)
        self._track(made, node, True)

    def _note_traced(self, call: _SeenCall, result: Any) -> None:
        self._link_constants(call.num_constants, call.operands)
        self._link_uploads(call.operands)
        written = [one for one in call.cpu if one._version != self._cpu[id(one)].version]
        tensors = _tensors_in(result) if result is not None else []
        made = [one for one in tensors if one.device.type == "cpu"]
        if not written and not made:
            if call.cpu and not call.is_lazy and not tensors:
                self._keep_content(call.cpu)
        elif call.is_lazy:
            self.refuse(f"{call.name} computes a tensor on the CPU from lazy tensors")
        else:
            self._note_call(call, result, written, made)

    def _keep_content(self, tensors: Sequence[torch.Tensor]) -> None:
        """Python has read these tensors: a replay must find the same."""
        for tensor in tensors:
            self.tape.guard(content, (self._cpu[id(tensor)].node,), content(tensor))

    def _note_call(
        self, call: _SeenCall, result: Any, written: Sequence[torch.Tensor], made: Sequence[torch.Tensor]
    ) -> None:
        name, args, kwargs = call.name, call.args, call.kwargs
        first = args[0] if args else None
        if name.startswith("_foreach_") and name.endswith("_") and isinstance(first, list | tuple):
            method = getattr(torch.Tensor, name.removeprefix("_foreach_"), None)
            same = len(written) == len(first) and all(one is other for one, other in zip(written, first, strict=True))
            if same and method is not None:
                for place, target in enumerate(first):
                    options = {key: _element(one, place) for key, one in kwargs.items()}
                    self._note_in_place(method, target, [_element(one, place) for one in args[1:]], options)
                return
        flat = all(not isinstance(one, list | tuple | dict) for one in (*args, *kwargs.values()))
        if flat and len(written) == 1 and written[0] is first and result is first:
            self._note_in_place(call.func, first, args[1:], kwargs)
        else:
            self._note_any(call.func, (args, kwargs), written, made)

    def _note_in_place(self, func: Any, target: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        key = (func, len(args), tuple(kwargs))
        call = self._calls.setdefault(key, InPlace(func, tuple(kwargs)))
        operands = [self._operand(target), *map(self._operand, args), *map(self._operand, kwargs.values())]
        self._write(target, self.tape.compute(call, operands, target.detach().clone()))

    def _note_any(self, func: Any, given: Any, written: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
        leaves, spec = pytree.tree_flatten(given)
        places = tuple(next(place for place, leaf in enumerate(leaves) if leaf is one) for one in written)
        key = (func, str(spec), places)
        call = self._calls.setdefault(key, Call(func, spec, places))
        values = tuple(one.detach().clone() for one in (*made, *written))
        node = self.tape.compute(call, [self._operand(leaf) for leaf in leaves], values)
        fresh = []
        for place, one in enumerate((*made, *written)):
            picked = self.tape.compute(_pick, (node, Literal(place)), values[place])
            fresh.append((one, picked))
        for place, (one, picked) in enumerate(fresh):
            if place >= len(made):
                self._write(one, picked)
            elif not any(one is other for other in written):
                self._track(one, picked, True)

    def _operand(self, value: Any) -> Operand:
        if isinstance(value, TracedFloat) and value.tape is self.tape:
            return value.number
        if isinstance(value, torch.Tensor):
            return self._cpu[id(value)].node
        return Literal(untraced(value))

    # ----- CPU tensors

    def _node_of(self, tensor: torch.Tensor) -> int:
        tracked = self._cpu.get(id(tensor))
        if tracked is not None:
            if tracked.version != tensor._version:
                self.refuse("it writes a tensor on the CPU where a replay cannot follow, as through a view")
            return tracked.node
        node = self._leaf(tensor, tensor.detach().clone())
        self._track(tensor, node, False)
        return node

    def _leaf(self, tensor: torch.Tensor, value: torch.Tensor) -> int:
        """The leaf of a tensor from outside. Equal scalars of one device are one leaf."""
        kind = tensor.__class__ is LazyTensor
        key = ("held", kind, value.dtype, content(value)) if not value.dim() and not value.is_complex() else None
        node = self.tape.leaf(value, key)
        self._held.setdefault(node, Held([])).tensors.append(tensor)
        return node

    def _track(self, tensor: torch.Tensor, node: int, is_made: bool) -> None:
        known = self._cpu.get(id(tensor))
        if known is not None:
            known.node, known.version = node, tensor._version
            return
        self._cpu[id(tensor)] = _Tracked(tensor, node, tensor._version, is_made, -1 if is_made else node)
        self._aliases.setdefault(tensor.untyped_storage()._cdata, set()).add(id(tensor))

    def _write(self, tensor: torch.Tensor, node: int) -> None:
        tracked = self._cpu[id(tensor)]
        if len(self._aliases[tensor.untyped_storage()._cdata]) > 1:
            self.refuse("it writes a tensor on the CPU that shares memory with another one")
        if not same_bits(self.tape.values[node], tensor):
            self.refuse("equal operators on the CPU gave it different values")
        tracked.node, tracked.version = node, tensor._version

    # ----- where values went

    def _link_constants(self, start: int, operands: Sequence[Any]) -> None:
        constants = self._context.trace.constants
        if len(constants) == start:
            return
        nodes = []
        for one in operands:
            if isinstance(one, TracedFloat):
                nodes.append(self._operand(one))
            elif not one.dim() and one.is_floating_point():  # an alpha that is a tensor
                value = one.item()
                nodes.append(self.tape.compute(_item, (self._cpu[id(one)].node,), value))
        numbers = [node for node in dict.fromkeys(nodes) if isinstance(node, int)]
        for place in range(start, len(constants)):
            choices = _choices(numbers, self.tape.values, constants[place])
            if choices:
                self._constants[place] = choices
        # more equal constants than traced floats: another float of the call is equal by chance
        linked = [place for place in range(start, len(constants)) if place in self._constants]
        if len(linked) > len(nodes):
            self._unsure.update(linked)

    def _fresh_uploads(self) -> list[LazyStorage]:
        """The storages that were given values since the last time. One may be made first, and filled later."""
        self._unfilled += self._uploaded[self._num_uploaded :]
        self._num_uploaded = len(self._uploaded)
        fresh = [storage for storage in self._unfilled if storage.tensor is not None]
        self._unfilled = [storage for storage in self._unfilled if storage.tensor is None]
        return fresh

    def _link_uploads(self, operands: Sequence[Any]) -> None:
        for storage in self._fresh_uploads():
            assert storage.tensor is not None
            real = storage.tensor.cpu()
            choices = []
            for one in operands:
                value = untraced(one)
                if isinstance(value, torch.Tensor) and value.shape != real.shape:
                    continue
                if not isinstance(value, torch.Tensor) and real.dim():
                    continue
                made = as_upload(value, real.dtype)
                if same_bits(made, real):
                    operand = self._operand(one)
                    if isinstance(operand, int):
                        choices.append(self.tape.compute(as_upload, (operand, Literal(real.dtype)), made.clone()))
            if choices:
                self._uploads[storage] = list(dict.fromkeys(choices))

    # ----- the end

    def plain_results(self, leaves: list[Any]) -> list[Any]:
        """The results of the body without traced floats. A replay returns the same floats, or does not take place."""
        return [leaf.keep_value() if isinstance(leaf, TracedFloat) else leaf for leaf in leaves]

    def close(self) -> None:
        """Forget everything, as after an exception."""
        self.tape.close()
        self._cpu.clear()

    def finish(self, optimizers: Sequence[torch.optim.Optimizer], counts: Sequence[int]) -> RecordedFloats:
        """What was recorded. `counts`: the number of arguments that are floats, then of each optimizer's floats."""
        self._check_kept()
        given = [
            self._given.get((key, place))
            for key, count in zip([0, *map(id, optimizers)], counts, strict=True)
            for place in range(count)
        ]
        self._match_the_rest()
        writes = [(one.tensor, one.node) for one in self._cpu.values() if not one.is_made and one.node != one.leaf]
        recorded = RecordedFloats(
            self.tape,
            given,
            self._held,
            self._constants,
            self._unsure,
            self._uploads,
            writes,
            set(self._cpu),
            self._problem,
        )
        self.tape.close()
        self._cpu.clear()
        self._calls.clear()
        return recorded

    def _check_kept(self) -> None:
        """Refuse what the body left in Python's state or did to CPU tensors unseen."""
        if self.tape.kept():
            self.refuse(
                "something keeps a float that it was given or computed, as a learning-rate schedule does\n"
                "  step schedules outside the captured function"
            )
        for tracked in self._cpu.values():
            small = tracked.tensor.numel() <= _SMALL
            value = self.tape.values[tracked.node]
            if tracked.version != tracked.tensor._version or (small and not same_bits(value, tracked.tensor.detach())):
                self.refuse("it writes a tensor on the CPU where a replay cannot follow, as through a view or an array")
            if tracked.is_made and getrefcount(tracked.tensor) > 2:
                self.refuse("it makes a tensor on the CPU, and something keeps it\n  write into one: old.copy_(new)")

    def _match_the_rest(self) -> None:
        """Constants of calls that had no traced float may follow one all the same: backward, floats in containers."""
        by_bits: dict[bytes, list[int]] = {}
        for number, value in enumerate(self.tape.values):
            if value.__class__ is float:
                by_bits.setdefault(bits(value), []).append(number)
        for place, constant in enumerate(self._context.trace.constants):
            if place not in self._constants:
                near = by_bits.get(bits(constant), []) + by_bits.get(bits(-constant), [])
                choices = _choices(near, self.tape.values, constant)
                if choices:
                    self._constants[place] = choices
                    self._unsure.add(place)


def _constant(value: torch.Tensor) -> torch.Tensor:
    return value


def _choices(numbers: Sequence[int], values: Sequence[Any], constant: float) -> list[Choice]:
    found = [(number, False) for number in numbers if bits(values[number]) == bits(constant)]
    return found + [(number, True) for number in numbers if bits(-values[number]) == bits(constant)]


def _property_of(func: Any) -> str:
    return getattr(func.__self__, "__name__", "")


def _scan(values: Any, operands: list[Any]) -> bool:
    """Add the traced floats and CPU tensors among arguments to `operands`. Returns whether there is a lazy tensor."""
    is_lazy = False
    for value in values:
        kind = value.__class__
        if kind is LazyTensor:
            is_lazy = True
        elif kind is TracedFloat:
            operands.append(value)
        elif kind is list or kind is tuple:
            is_lazy |= _scan(value, operands)
        elif kind is dict:
            is_lazy |= _scan(value.values(), operands)
        elif isinstance(value, torch.Tensor):
            if value.device.type == "cpu":
                operands.append(value)
            else:
                is_lazy = True
    return is_lazy


def _untraced(value: Any) -> Any:
    """`value` with plain floats in place of traced ones, in new containers where there are any."""
    kind = value.__class__
    if kind is TracedFloat:
        return plain(value)
    if kind is tuple:
        return tuple([_untraced(one) for one in value])
    if kind is list and any(one.__class__ is TracedFloat for one in pytree.tree_leaves(value)):
        return [_untraced(one) for one in value]
    if kind is dict and any(one.__class__ is TracedFloat for one in pytree.tree_leaves(value)):
        return {key: _untraced(one) for key, one in value.items()}
    return value


def _element(value: Any, place: int) -> Any:
    return value[place] if isinstance(value, list | tuple) else value


def call_traced(function: Callable[..., Any], recorder: FloatRecorder, args: Any, kwargs: Any) -> Any:
    """Call `function` with traced floats in place of its arguments that are floats.

    Floats in containers stay plain, since the body might change the container: `_match_the_rest` finds where they go.
    """
    count = 0

    def trace(value: Any) -> Any:
        nonlocal count
        leaves = pytree.tree_leaves(value) if isinstance(value, list | tuple | dict) else (value,)
        place = count
        count += sum(leaf.__class__ is float for leaf in leaves)
        return recorder.argument(place) if value.__class__ is float else value

    return function(*[trace(arg) for arg in args], **{name: trace(value) for name, value in kwargs.items()})
