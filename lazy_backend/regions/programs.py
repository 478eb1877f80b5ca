"""What is known about the calls of a region: where their operands come from, and what they return.

In: a recorded stretch, the arguments and results of the call that recorded it. Out: a `Program`, or `NotReplayable`
with the reason.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lazy_backend.lowering.ir.program import Call, Same, Token
from lazy_backend.ports.cpython import is_a, name_of
from lazy_backend.ports.tensor_types import device_of
from lazy_backend.regions.members import MemberPlace
from lazy_backend.regions.results import ResultStructure
from lazy_backend.regions.stretch import Stretch, tokens_of
from lazy_backend.replay.accounts import NotReplayable
from lazy_backend.replay.plain_values import same_plain
from lazy_backend.tensors.state import TensorData
from lazy_backend.tensors.tensor import LazyTensor
from lazy_backend.tensors.thread_state import describe_autocast

# What batch norm is recorded as, and where it is told whether it trains: then it updates its statistics only.
_BATCH_NORM = torch.ops.aten._native_batch_norm_legit.default
_TRAINING = 5


@dataclass(frozen=True, slots=True)
class MadeLeaf:
    """A returned tensor that the call made: the `place`-th of the tensors that its jump makes."""

    place: int
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class ArgumentLeaf:
    """A returned tensor that is the `place`-th tensor among the arguments."""

    place: int


@dataclass(frozen=True, slots=True)
class PlainLeaf:
    """A returned value that is not a tensor."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlainLeaf) and (self.value is other.value or same_plain(self.value, other.value))

    __hash__ = None  # type: ignore[assignment]


Leaf = MadeLeaf | ArgumentLeaf | PlainLeaf


@dataclass(slots=True, eq=False)
class Program:
    """How to replay the calls of one signature.

    `places`: for each operand, in the order of first use, the number of a tensor argument or a member. `flags`: which
    operands require gradients. `written`: the operands that a call writes; `versioned`: those of them whose version
    counters it raises. `reached`: which operands the graph of the results leads to; None until it is known.
    `name`: identifies the program's jumps.
    """

    places: tuple[int | MemberPlace, ...]
    flags: list[bool]
    written: tuple[int, ...]
    versioned: tuple[int, ...]
    leaves: tuple[Leaf, ...]
    structure: ResultStructure | None
    reached: list[bool] | None
    can_run_again: bool = True  # whether what it writes is only written: then it gives the same once more
    name: object = field(default_factory=object)
    inputs: list[int] = field(init=False)  # the operands whose gradients a backward may compute
    differentiable: list[int] = field(init=False)  # the places of differentiable results among what a jump makes

    def __post_init__(self) -> None:
        self.reach(self.reached)
        made = [leaf for leaf in self.leaves if isinstance(leaf, MadeLeaf)]
        self.differentiable = [leaf.place for leaf in made if leaf.requires_grad]

    def reach(self, reached: list[bool] | None) -> None:
        """Note which operands the graph of the results leads to: those alone are inputs of a call's node."""
        self.reached = reached
        self.inputs = [place for place, flag in enumerate(self.flags if reached is None else reached) if flag]

    def fits(self, other: Program) -> bool:
        return (
            len(self.places) == len(other.places)
            and (self.reached == other.reached or self.reached is None or other.reached is None)
            and all(map(_same_place, self.places, other.places))
            and (self.flags, self.written, self.leaves, self.structure)
            == (other.flags, other.written, other.leaves, other.structure)
        )

    def operands(self, arguments: Sequence[LazyTensor]) -> list[LazyTensor] | None:
        """The operands of a call now; None if something else than a lazy tensor is in the place of one."""
        found = [arguments[p] if p.__class__ is int else p.container[p.key] for p in self.places]  # type: ignore
        return found if all(type(tensor) is LazyTensor for tensor in found) else None

    @property
    def is_differentiable(self) -> bool:
        return bool(self.differentiable)


def _same_place(one: int | MemberPlace, other: int | MemberPlace) -> bool:
    if isinstance(one, MemberPlace) and isinstance(other, MemberPlace):
        return one.container is other.container and one.key == other.key
    return one == other


# Of a lazy tensor.
_OWN_ATTRIBUTES = frozenset(("_data",))


def learn_program(
    stretch: Stretch,
    arguments: Sequence[LazyTensor],
    argument_data: Sequence[TensorData],
    members: Sequence[tuple[MemberPlace, LazyTensor]],
    result: Sequence[Any],
    structure: ResultStructure | None,
    ends: Container[int] | None = None,
) -> tuple[Program, list[Token]]:
    """The program of one call, and the tokens of the tensors that its jump makes. Raises `NotReplayable`.

    `ends`: the ids of tensors where the graph of the results ends, if that is known.
    """
    places, flags = _places(stretch, arguments, argument_data, members)
    written = [number for number, token in enumerate(stretch.operands) if token in stretch.mutates]
    for number in written:
        place = places[number]
        if flags[number]:
            name = "an argument" if isinstance(place, int) else place.name
            where = stretch.site_of_write(stretch.operands[number])
            raise NotReplayable(f"it writes to {name} at {where}, which autograd follows")
    tokens: list[Token] = []
    leaves = [_leaf(leaf, stretch, arguments, argument_data, tokens) for leaf in result]
    _check_separate(stretch, result, tokens)
    again, raised = _only_updates(stretch), _raised_versions(stretch)
    versioned = [number for number in written if stretch.operands[number] in raised]
    operands = [arguments[place] if isinstance(place, int) else place.container[place.key] for place in places]
    reached = None if ends is None else [id(tensor) in ends for tensor in operands]
    made = Program(tuple(places), flags, tuple(written), tuple(versioned), tuple(leaves), structure, reached, again)
    return made, tokens


def _raised_versions(stretch: Stretch) -> set[Token]:
    """What the calls write openly: a batch norm updates its statistics unseen by autograd, which may keep them."""
    return {stretch.root(token) for call in stretch.calls if call.op is not _BATCH_NORM for token in call.mutates}


def _only_updates(stretch: Stretch) -> bool:
    """Whether no result depends on the operands that the calls write, such as the statistics of a batch norm."""
    written = stretch.mutates & frozenset(stretch.operands)
    for call in stretch.calls:
        used = {root for token in tokens_of(call) if (root := stretch.root(token)) in written}
        if not used or (call.op is _BATCH_NORM and call.args[_TRAINING] is True):
            continue
        in_place = all(result is None or isinstance(result, Same) for result in call.results)
        if not in_place or set(map(stretch.root, call.mutates)) != used:
            return False
    return True


def _places(
    stretch: Stretch,
    arguments: Sequence[LazyTensor],
    argument_data: Sequence[TensorData],
    members: Sequence[tuple[MemberPlace, LazyTensor]],
) -> tuple[list[int | MemberPlace], list[bool]]:
    epoch, used = stretch.epoch, frozenset(stretch.operands)
    known: dict[Token, tuple[int | MemberPlace, bool]] = {}
    owners: dict[Token, LazyTensor] = {}
    for member, tensor in members:
        data = tensor._data
        if data.epoch is epoch and data.token is not None:
            known.setdefault(data.token, (member, tensor.requires_grad))
            if owners.setdefault(data.token, tensor) is not tensor and data.token in used:
                raise NotReplayable(f"two of its tensors are one, {member.name} and another")
    for number, data in enumerate(argument_data):
        if data.epoch is epoch and data.token is not None:
            place, _ = known.setdefault(data.token, (number, arguments[number].requires_grad))
            if isinstance(place, MemberPlace):
                raise NotReplayable(f"an argument is also its member {place.name}")
    for token in stretch.made:
        if token in known:
            raise NotReplayable("it is the first to use memory that torch.empty made")
    for token in stretch.operands:
        if token not in known:
            raise NotReplayable(
                f"it uses a tensor at {stretch.site_of(token)} that is neither an argument nor part of the module\n"
                "  pass it as an argument, on the lazy device, or register it as a buffer"
            )
    return [known[token][0] for token in stretch.operands], [known[token][1] for token in stretch.operands]


def _leaf(
    leaf: Any,
    stretch: Stretch,
    arguments: Sequence[LazyTensor],
    argument_data: Sequence[TensorData],
    tokens: list[Token],
) -> Leaf:
    if not is_a(leaf, torch.Tensor):
        return PlainLeaf(leaf)
    for number, argument in enumerate(arguments):
        if leaf is argument:
            return ArgumentLeaf(number)
    if type(leaf) is not LazyTensor:
        raise NotReplayable(f"it returns a {name_of(type(leaf))} on {device_of(leaf)}")
    if vars(leaf).keys() - _OWN_ATTRIBUTES:
        raise NotReplayable("it sets an attribute of a tensor that it returns")
    data = leaf._data
    if data.epoch is not stretch.epoch or data.token not in stretch.made:
        raise NotReplayable("it returns a tensor that it did not make, and that is no argument")
    assert data.token is not None
    if stretch.root(data.token) not in stretch.places and not leaf.is_inference():
        raise NotReplayable("it returns a view of an argument or of a member, whose writes autograd counts as one")
    tokens.append(data.token)
    return MadeLeaf(len(tokens) - 1, leaf.requires_grad)


def _check_separate(stretch: Stretch, result: Sequence[Any], tokens: Sequence[Token]) -> None:
    """Two returned tensors must not share memory: autograd counts writes to both as one, and a replay's apart."""
    roots = [stretch.root(token) for token in tokens]
    counted = [leaf for leaf in result if is_a(leaf, torch.Tensor) and not leaf.is_inference()]
    if len(set(roots)) < len(roots) and counted:
        raise NotReplayable("it returns two tensors that share memory")


# ----- backward


@dataclass(frozen=True, slots=True)
class FromGradient:
    """The gradient of the `place`-th differentiable result."""

    place: int


@dataclass(frozen=True, slots=True)
class FromForward:
    """What the forward stretch made: `token` there."""

    token: Token


@dataclass(frozen=True, slots=True)
class FromOperand:
    """The `place`-th operand of the forward stretch."""

    place: int


Source = FromGradient | FromForward | FromOperand


@dataclass(slots=True, eq=False)
class BackwardProgram:
    """The backward of one forward jump, for gradients that are given in one pattern.

    `calls`: as recorded once, to record them again elsewhere; `tokens` are their operands, which come from `sources`.
    `results`: by the number of a forward operand, where its gradient is among what the calls make, `made`, or the
    source of a tensor that is passed on as the gradient. `shape`: of the calls and of `made`, at any place.
    """

    calls: tuple[Call, ...]
    tokens: tuple[Token, ...]
    sources: tuple[Source, ...]
    made: tuple[Token, ...]
    results: dict[int, int | Source]
    constants: tuple[float, ...]
    folds: bool  # whether the calls make all of `made` themselves: no view of what enters is among them
    given: frozenset[int]  # the results that got gradients, by their places
    shape: Hashable
    is_confirmed: bool = False
    saved: tuple[Token, ...] = field(init=False)  # the sources that the forward made
    outer: tuple[Source, ...] = field(init=False)  # the other ones
    # forward operands that the calls use, themselves or as views: nothing may have written to them since
    uses: frozenset[int] = frozenset()
    # operands that are leaves to whose .grad nothing else added: see Note [Gradients written directly]
    sole: frozenset[int] = frozenset()
    name: object = field(default_factory=object)

    def __post_init__(self) -> None:
        self.saved = tuple(source.token for source in self.sources if isinstance(source, FromForward))
        self.outer = tuple(source for source in self.sources if not isinstance(source, FromForward))

    def fits(self, other: BackwardProgram) -> bool:
        """Whether both do the same, be it at different places of the trace: several calls may wait for one backward."""
        return (
            self.shape == other.shape
            and repr(self.constants) == repr(other.constants)
            and (self.sources, self.results) == (other.sources, other.results)
        )

    def confirm(self, before: BackwardProgram) -> None:
        """Take the place of `before`, which does the same, and whose jumps stay."""
        self.name, self.sole, self.is_confirmed = before.name, before.sole, True


Pattern = tuple[Any, ...]


def pattern_of(grads: Sequence[torch.Tensor | None]) -> Pattern:
    """Which gradients are given, with which geometry, which of them are the same tensor, and what autocast does."""
    pattern: list[Any] = [describe_autocast()]
    first: dict[int, int] = {}
    for place, grad in enumerate(grads):
        if grad is None:
            pattern.append(None)
        else:
            data = grad._data  # type: ignore[attr-defined]
            pattern += (first.setdefault(id(data), place), data.meta)
    return tuple(pattern)
