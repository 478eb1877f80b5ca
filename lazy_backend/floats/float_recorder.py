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

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from sys import getprofile
from typing import Any

import torch

from lazy_backend.floats.cpu_calls import are_constant, as_upload, item_of, same_bits, tensors_in
from lazy_backend.floats.cpu_tensors import CpuTensors, Held
from lazy_backend.floats.formulas import (
    Literal,
    Tape,
    TracedFloat,
    bits,
    is_traceable,
    is_traced,
    plain,
    traced_integer,
    untraced,
)
from lazy_backend.floats.hyperparameters import float_places, states_of
from lazy_backend.floats.mirrors import Mirrors
from lazy_backend.floats.torch_hooks import FloatSeer
from lazy_backend.ports import trees
from lazy_backend.ports.cpython import is_a
from lazy_backend.ports.tensor_types import IS_VIEW, device_of
from lazy_backend.ports.thread_modes import WithoutSubclasses, WithoutTorchFunction
from lazy_backend.tensors.state import DeviceContext, LazyStorage
from lazy_backend.tensors.tensor import LazyTensor
from lazy_backend.tensors.thread_state import unwatched

# What tells nothing about the values of a tensor.
_METADATA = frozenset((
    "size", "dim", "numel", "nelement", "ndimension", "stride", "storage_offset", "element_size", "is_floating_point",
    "is_complex", "is_contiguous", "is_signed", "is_same_size", "is_pinned", "is_conj", "is_neg", "is_inference",
    "get_device", "__len__", "__hash__", "has_names", "is_tensor", "result_type", "can_cast", IS_VIEW,
    "is_set_to", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "requires_grad_",
))  # fmt: skip
_TENSOR_PROPERTIES = frozenset(("data", "T", "mT", "H", "mH", "real", "imag", "grad"))
# Calls that run what others recorded, with the floats that these were given.
_BACKWARDS = frozenset(("backward", "grad"))
# What makes a tensor of Python's values.
_FROM_VALUES = frozenset((torch.tensor, torch.as_tensor, torch.asarray))
SCHEDULED_INSIDE = (
    "it changes an optimizer's hyperparameters\n  step learning-rate schedules outside the captured function"
)

# A node that a value may come from, and whether it is negated.
Choice = tuple[int, bool]


# ----- what was recorded


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
    settings: list[tuple[dict[str, Any], str, int]]  # entries of groups, by name, each with its new value
    seen: set[int]  # ids of the CPU tensors that the body met, which are alive
    problem: str | None

    def leaf_value(self, held: Held) -> Any:
        """What this run found where another one read `held`; None if it did not look there."""
        for number, own in self.held.items():
            if held.read is not None:
                if own.read is not None and own.read.key() == held.read.key():
                    return self.tape.values[number]
            elif any(tensor is held.tensors[0] for tensor in own.tensors):
                return self.tape.values[number]
        return None


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
    """Sees each call of PyTorch by a function, and puts traced floats in place of hyperparameters.

    Use: `install` the optimizers that are known, `show` it the body, then `restore` in any case, and `finish`.
    """

    def __init__(
        self,
        context: DeviceContext,
        uploads: list[LazyStorage],
        floats: Sequence[float],
        counts: Collection[str],
    ) -> None:
        """`counts`: the names of entries of groups that steps change, as a replay will: integers are traced too."""
        super().__init__()
        self.tape = Tape()
        self._context = context
        self._uploaded = uploads
        self._num_uploaded = 0
        self._unfilled: list[LazyStorage] = []
        self._given: dict[tuple[int, int], int] = {}  # by optimizer's id (0 for arguments) and place
        for place, value in enumerate(floats):
            self._given[0, place] = self.tape.leaf(value)
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._replaced: list[tuple[Any, Any, Any, Any, bool]] = []
        self.cpu = CpuTensors(self.tape)
        self._mirrors = Mirrors(self.tape, self.cpu.leaf)
        self._counts = counts
        self._settings: list[tuple[dict[str, Any], str, int]] = []
        self._constants: dict[int, list[Choice]] = {}
        self._unsure: set[int] = set()
        self._plain: set[int] = set()  # places of constants that calls were given as floats which are not traced
        self._shown: set[int] = set()  # the leaves that the body was given as traced floats
        self._uploads: dict[LazyStorage, list[int]] = {}

    # ----- floats from outside

    def argument(self, place: int) -> TracedFloat:
        """The `place`-th float argument, traced."""
        node = self._given[0, place]
        self._shown.add(node)
        return self.tape.traced(node)

    def install(self, optimizer: torch.optim.Optimizer) -> None:
        """Put traced floats in place of the optimizer's hyperparameters."""
        if id(optimizer) in self._optimizers:
            return
        self._optimizers[id(optimizer)] = optimizer
        self._mirrors.expect(optimizer)
        count = 0
        for group, name, length in float_places(optimizer, self._counts):
            original = group[name]
            values = (original,) if length is None else original
            traced = []
            for value in values:
                if is_a(value, float):
                    node = self._given[id(optimizer), count] = self.tape.leaf(plain(value))
                    traced.append(self.tape.traced(node))
                    count += 1
                elif length is None:
                    traced.append(value)
                    if is_traceable(value):
                        node = self._given[id(optimizer), count] = self.tape.leaf(value)
                        traced[-1] = self.tape.traced(node)
                    count += 1
                else:
                    traced.append(value)
            new = traced[0] if length is None else tuple(traced)
            self.replace(group, name, new, is_setting=True)
            traced.clear()

    def replace(self, container: Any, key: Any, new: Any, is_setting: bool = False) -> None:
        """Put `new` into a container, until the body has ended."""
        self._replaced.append((container, key, container[key], new, is_setting))
        container[key] = new

    def restore(self) -> None:
        """Put the hyperparameters back. What the body has set itself stays, as plain floats."""
        self._mirrors.clear()  # before anybody asks which lazy tensors are alive
        self._unfilled.clear()
        while self._replaced:
            container, key, original, new, is_setting = self._replaced[-1]
            try:
                now = container[key]
            except LookupError:  # the body has removed it
                now = None
            if now is new:
                container[key] = original
            elif is_setting:
                self._see_setting(container, key, now)
            if now is not new and is_traced(now):
                container[key] = now.plain()
            self._replaced.pop()

    def restore_states(self) -> None:
        """Put plain floats in place of traced ones that a step has put into the state, where none was known to be.

        Not part of `restore`: in a captured function a step may wait for its GradScaler, and a look at the state of the
        optimizer would settle it.
        """
        for optimizer in self._optimizers.values():
            for state in states_of(optimizer):
                for name, value in [(name, value) for name, value in dict.items(state) if is_traced(value)]:
                    state[name] = value.plain()

    def _see_setting(self, group: dict[str, Any], name: str, value: Any) -> None:
        """Note what the body put in place of a hyperparameter."""
        if name not in self._counts:
            self.see_schedule()
        elif is_traced(value) and value.tape is self.tape:
            self._settings.append((group, name, value.number))
        else:
            where = "a group" if "params" in group else "the state"
            self.refuse(
                f"it changes the entry {name!r} of {where} as no formula predicts\n"
                "  step schedules outside, and compute what steps change by arithmetic"
            )

    def see_schedule(self) -> None:
        self.refuse(SCHEDULED_INSIDE)

    def refuse(self, reason: str) -> None:
        self.cpu.refuse(reason)

    # ----- calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._counts:
            args, kwargs = _with_kept_integers(args), _with_kept_integers(kwargs)
        name = getattr(func, "__name__", "")
        if name in _METADATA or (name == "__get__" and _property_of(func) not in _TENSOR_PROPERTIES):
            return func(*args, **kwargs)
        operands: list[Any] = []
        is_lazy = _scan((*args, *kwargs.values()), operands)
        if name == "item" and is_lazy:
            node = self._mirrors.node_of(args[0])
            if node is not None:
                return self.cpu.read(self.tape.values[node], node)
        call = _SeenCall(func, name, args, kwargs, operands, is_lazy)
        if not self._try(self._before, call):
            return func(*_untraced(args), **_untraced(kwargs))
        if any(type(one) is TracedFloat for one in operands):
            result = func(*_untraced(args), **_untraced(kwargs))
        else:
            result = func(*args, **kwargs)
        if name == "item" and len(call.cpu) == 1:
            return self.cpu.read(call.cpu[0], self.cpu.node_of(call.cpu[0]))
        self._try(self._after, call, result)
        return result

    def _try(self, note: Callable[..., None], call: _SeenCall, *further: Any) -> bool:
        """Whether a call could be noted. Tensors of rare kinds, as in transforms, have no storage or no version."""
        try:
            # the guard within: where what watches this thread is interrupted, the next function of C is not called
            unwatched(getprofile(), _without_subclasses, note, call, *further)
        except (RuntimeError, TypeError) as error:
            why, _, _ = str(error).partition(". ")  # PyTorch tells of all kernels that it has
            self.refuse(f"{call.name} takes a tensor on the CPU that cannot be followed: {why}")
            return False
        return True

    def _before(self, call: _SeenCall) -> None:
        call.cpu = list({id(one): one for one in call.operands if isinstance(one, torch.Tensor)}.values())
        if call.cpu and call.name == "__set__" and _property_of(call.func) == "data":
            self.refuse("it gives a tensor on the CPU other data")
        for one in call.cpu:
            self.cpu.node_of(one)
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

    def _note_untraced(self, call: _SeenCall, result: Any) -> None:
        """A call with neither traced floats nor CPU tensors. What it computes with is not what the body was given."""
        if call.name not in _BACKWARDS:
            self._plain.update(range(call.num_constants, len(self._context.trace.constants)))
        if type(result) is LazyTensor:
            if call.func in _FROM_VALUES and not call.is_lazy and not are_constant(call.args, call.kwargs):
                self._link_values(call.func, call.args, call.kwargs)
        elif is_a(result, torch.Tensor | tuple | list):
            for made in tensors_in(result):
                if made.device.type != "cpu":
                    continue
                if call.is_lazy:
                    self.refuse(f"{call.name} computes a tensor on the CPU from lazy tensors")
                self.cpu.note_factory(call.func, call.args, call.kwargs, made)

    def _link_values(self, func: Any, args: Any, kwargs: Any) -> None:
        """A lazy tensor was made of an array or a list: the node of the same tensor on the CPU."""
        uploads = self._fresh_uploads()
        kwargs = {**kwargs, "device": "cpu"}
        made = func(*args, **kwargs)
        node = self.cpu.read_again(func, args, kwargs, made.detach().clone())
        for storage in uploads:
            assert storage.tensor is not None
            value = as_upload(made, storage.tensor.dtype)
            if same_bits(value, storage.tensor.cpu()):
                choice = self.tape.compute(as_upload, (node, Literal(value.dtype)), value.clone())
                self._uploads[storage] = [choice]

    def see_made(self, function: Callable[..., torch.Tensor], args: tuple[Any, ...], made: torch.Tensor) -> None:
        with WithoutTorchFunction():  # its own calls are not the body's
            self.cpu.note_factory(function, args, {}, made)

    def _note_traced(self, call: _SeenCall, result: Any) -> None:
        self._link_constants(call.num_constants, call.operands)
        self._link_uploads(call.operands)
        written = [one for one in call.cpu if self.cpu.was_written(one)]
        tensors = tensors_in(result) if result is not None else []
        made = [one for one in tensors if one.device.type == "cpu"]
        if not written and not made:
            if call.cpu and not call.is_lazy and not tensors:
                self.cpu.keep_content(call.cpu)
        elif call.is_lazy:
            self.refuse(f"{call.name} computes a tensor on the CPU from lazy tensors")
        else:
            self.cpu.note_call(call.func, call.args, call.kwargs, result, written, made)

    # ----- where values went

    def _link_constants(self, start: int, operands: Sequence[Any]) -> None:
        constants = self._context.trace.constants
        if len(constants) == start:
            return
        nodes = []
        for one in operands:
            if isinstance(one, TracedFloat):
                nodes.append(self.cpu.operand(one))
            elif not one.dim() and one.is_floating_point():  # an alpha that is a tensor
                value = one.item()
                nodes.append(self.tape.compute(item_of, (self.cpu.node_of(one),), value))
        by_bits = _choices([node for node in dict.fromkeys(nodes) if isinstance(node, int)], self.tape.values)
        for place in range(start, len(constants)):
            choices = by_bits.get(bits(constants[place]))
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
                    operand = self.cpu.operand(one)
                    if isinstance(operand, int):
                        choices.append(self.tape.compute(as_upload, (operand, Literal(real.dtype)), made.clone()))
            if choices:
                self._uploads[storage] = list(dict.fromkeys(choices))

    # ----- the end

    def given_to(self, optimizer: torch.optim.Optimizer, now: Sequence[float]) -> list[float]:
        """The floats that the body found in an optimizer which has the floats `now`."""
        nodes = [self._given.get((id(optimizer), place)) for place in range(len(now))]
        return [value if node is None else self.tape.values[node] for node, value in zip(nodes, now, strict=True)]

    def plain_results(self, leaves: list[Any]) -> list[Any]:
        """The results of the body without traced floats. A replay returns the same floats, or does not take place."""
        return [leaf.keep_value() if type(leaf) is TracedFloat else leaf for leaf in leaves]

    def close(self) -> None:
        """Forget everything, as after an exception."""
        self.tape.close()
        self.cpu.clear()

    def finish(self, optimizers: Sequence[torch.optim.Optimizer], counts: Sequence[int]) -> RecordedFloats:
        """What was recorded. `counts`: the number of arguments that are floats, then of each optimizer's floats."""
        self._check_kept()
        given = [
            self._given.get((key, place))
            for key, count in zip([0, *map(id, optimizers)], counts, strict=True)
            for place in range(count)
        ]
        self._match_the_rest()
        recorded = RecordedFloats(
            self.tape,
            given,
            self.cpu.held,
            self._constants,
            self._unsure,
            self._uploads,
            self.cpu.writes(),
            self._settings,
            self.cpu.seen(),
            self.cpu.problem,
        )
        self.close()
        return recorded

    def _check_kept(self) -> None:
        """Refuse what the body left in Python's state or did to CPU tensors unseen."""
        if self.tape.kept():
            self.refuse(
                "something keeps a float that it was given or computed, as a learning-rate schedule does\n"
                "  step schedules outside the captured function"
            )
        self.cpu.check_end()

    def _match_the_rest(self) -> None:
        """Constants of calls that had no traced float may follow one all the same: backward, floats in containers.

        Of calls that were seen, only one that was not traced, as it came in a container of a class of the user's. If
        any other is equal, that is by chance: whatever such a call takes was read elsewhere. So may be what a backward
        takes, if a call that was seen took the same.
        """
        by_bits: dict[Hashable, list[int]] = {}
        for number, value in enumerate(self.tape.values):
            if value.__class__ is float:
                by_bits.setdefault(bits(value), []).append(number)
        untraced = {node for (of, _), node in self._given.items() if of == 0} - self._shown
        constants = self._context.trace.constants
        kept = [place for place in self._plain if place < len(constants)]  # a call that failed was rolled back
        read = {bits(sign * constants[place]) for place in kept for sign in (1.0, -1.0)}
        for place, constant in enumerate(constants):
            if place not in self._constants:
                near = by_bits.get(bits(constant), []) + by_bits.get(bits(-constant), [])
                if place in self._plain or bits(constant) in read:
                    near = [number for number in near if number in untraced]
                choices = _choices(near, self.tape.values).get(bits(constant))
                if choices:
                    self._constants[place] = choices
                    self._unsure.add(place)


def _choices(numbers: Sequence[int], values: Sequence[Any]) -> dict[Hashable, list[Choice]]:
    """What constants may follow, by their bits: nodes with that value first, then those with its negative."""
    found: dict[Hashable, list[Choice]] = {}
    for number in numbers:
        found.setdefault(bits(values[number]), []).append((number, False))
    for number in numbers:
        found.setdefault(bits(-values[number]), []).append((number, True))
    return found


def _without_subclasses(note: Callable[..., None], *args: Any) -> None:
    with WithoutSubclasses():
        note(*args)


def _property_of(func: Any) -> str:
    return getattr(func.__self__, "__name__", "")


def _scan(values: Any, operands: list[Any]) -> bool:
    """Add the traced floats and CPU tensors among arguments to `operands`. Returns whether there is a lazy tensor."""
    is_lazy = False
    for value in values:
        kind = type(value)
        if kind is LazyTensor:
            is_lazy = True
        elif kind is TracedFloat:
            operands.append(value)
        elif kind is list or kind is tuple:
            is_lazy |= _scan(value, operands)
        elif kind is dict:
            is_lazy |= _scan(value.values(), operands)
        elif issubclass(kind, torch.Tensor):
            if device_of(value).type == "cpu":
                operands.append(value)
            else:
                is_lazy = True
    return is_lazy


def _untraced(value: Any) -> Any:
    """`value` with plain floats in place of traced ones, in new containers where there are any."""
    kind = type(value)
    if kind is TracedFloat:
        return plain(value)
    if kind is tuple:
        return tuple([_untraced(one) for one in value])
    if kind is list and any(type(one) is TracedFloat for one in trees.tree_leaves(value)):
        return [_untraced(one) for one in value]
    if kind is dict and any(type(one) is TracedFloat for one in trees.tree_leaves(value)):
        return {key: _untraced(one) for key, one in value.items()}
    return value


def _with_kept_integers(value: Any) -> Any:
    """`value` with plain integers, of which PyTorch's calls depend on the value."""
    kind = type(value)
    if kind is traced_integer():
        return value.keep_value()
    if kind is tuple:
        return tuple([_with_kept_integers(one) for one in value])
    if kind is list and any(type(one) is traced_integer() for one in trees.tree_leaves(value)):
        return [_with_kept_integers(one) for one in value]
    if kind is dict:
        return {key: _with_kept_integers(one) for key, one in value.items()}
    return value


def call_traced(function: Callable[..., Any], recorder: FloatRecorder, args: Any, kwargs: Any) -> Any:
    """Call `function` with traced floats in place of its arguments that are floats, in lists and dicts as well."""
    count = 0

    def trace(value: Any) -> Any:
        nonlocal count
        kind = type(value)
        if kind is float:
            count += 1
            return recorder.argument(count - 1)
        if kind is tuple:
            return tuple([trace(one) for one in value])
        if kind is list or kind is dict:  # the caller's own: the body may keep or change it
            for key in list(value) if kind is dict else range(len(value)):
                new = trace(value[key])
                if new is not value[key]:
                    recorder.replace(value, key, new)
        elif issubclass(kind, list | tuple | dict):  # `_match_the_rest` finds where these go
            count += sum(type(leaf) is float for leaf in trees.tree_leaves(value))
        return value

    return function(*[trace(arg) for arg in args], **{name: trace(value) for name, value in kwargs.items()})
