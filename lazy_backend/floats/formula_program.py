"""Which floats and CPU tensors the program of a body follows, and their values at a replay.

In: what several runs of one program recorded. Out: a `FormulaProgram`, or `NotFollowed` with the constant that changed
as no formula predicts. A leaf is followed if it varied in those runs; the others are guarded by value (Note [Floats by
formula]).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch

from lazy_backend.floats.cpu_calls import literal_key, same_bits
from lazy_backend.floats.cpu_tensors import Held
from lazy_backend.floats.float_recorder import Choice, RecordedFloats
from lazy_backend.floats.formulas import Guard, OtherOutcome, bits, compile_formulas, needed, reached
from lazy_backend.floats.mirrors import value_of
from lazy_backend.ports.cpython import is_a
from lazy_backend.ports.tensor_types import foreach_copy
from lazy_backend.tensors.tensor import LazyTensor
from lazy_backend.tensors.thread_state import run_clean


class Stale(Exception):
    """A program no longer fits the current state. The text says what changed; the body runs again."""


class NotFollowed(Exception):
    """Two runs differ as no formula predicts, as `reason` says.

    `constant` and `upload`: the place of the constant that changed since `earlier`, or of the input.
    """

    def __init__(self, reason: str, constant: int = -1, upload: int = -1, earlier: ProgramRun | None = None) -> None:
        super().__init__(reason)
        self.constant = constant
        self.upload = upload
        self.earlier = earlier


@dataclass(slots=True, eq=False)
class ProgramRun:
    """One run of the program: the floats it was given, its trace's constants, and its uploads by input."""

    floats: RecordedFloats
    given: tuple[float, ...]
    constants: tuple[float, ...]
    uploads: dict[int, list[int]]  # by input: the nodes that gave that value
    uploaded: dict[int, torch.Tensor]  # by input: that value
    names: Sequence[str]  # of the floats given, for reasons


@dataclass(slots=True, eq=False)
class Evaluated:
    """What a replay computes before it is committed."""

    constants: tuple[float, ...]
    uploads: Sequence[torch.Tensor]
    commit: Commit | None


class Commit:
    """The new values of CPU tensors, and of entries of groups by name, stored once the replay is committed: one of its
    deliveries."""

    __slots__ = ("tensors", "values", "settings")

    def __init__(
        self, tensors: list[torch.Tensor], values: list[torch.Tensor], settings: list[tuple[dict[str, Any], str, Any]]
    ) -> None:
        self.tensors = tensors
        self.values = values
        self.settings = settings

    def put(self, data: Any, run: Any) -> None:
        """Store the values, unless `run.delivered`: see `Holder.put`."""
        run_clean(self._put, run)

    def _put(self, run: Any) -> None:
        store, tensors, values = foreach_copy, self.tensors, self.values
        # no Python call between the check and the store: an interrupting call may have delivered, and gone on since
        if not run.delivered and tensors:
            store(tensors, values)
        for group, name, value in self.settings:
            if not run.delivered:
                group[name] = value


# ----- leaves on the CPU


class _LeafOnCpu:
    """A leaf read from CPU tensors, which must still be equal to each other."""

    def __init__(self, held: Held, value: Any, is_followed: bool) -> None:
        self.tensors = held.tensors
        self.read = held.read
        self.value = value
        self.is_followed = is_followed
        self._is_lazy = bool(self.tensors) and self.tensors[0].__class__ is LazyTensor
        self._is_scalar = not value.dim() and held.read is None
        self._number = value.item() if self._is_scalar else None
        self.reads_state = self._is_lazy or held.read is not None

    def current(self) -> torch.Tensor:
        """The value now. Raises `Stale` if it is not followed and changed, or if equal tensors differ."""
        if self._is_lazy:
            return self._current_of_lazy()
        if not self._is_scalar:
            value = self.tensors[0] if self.read is None else self.read()
            if not self.is_followed and not same_bits(value, self.value):
                raise Stale("a tensor on the CPU changed")
            return value
        numbers = [tensor.item() for tensor in self.tensors]
        first = numbers[0]
        if numbers.count(first) != len(numbers) or (not first and not all(map(self._is_alike, self.tensors))):
            raise Stale("tensors on the CPU that were equal differ")
        if not self.is_followed and (first != self._number or (not first and not self._is_alike(self.tensors[0]))):
            raise Stale("a tensor on the CPU changed")
        return self.tensors[0]

    def _current_of_lazy(self) -> torch.Tensor:
        """As `current`, for scalars on the device, which is idle."""
        values = [value_of(tensor) for tensor in self.tensors]
        first = values[0]
        if first is None or not all(value is not None and same_bits(value, first) for value in values):
            raise Stale("scalars of an optimizer that were equal differ")
        if not self.is_followed and not same_bits(first, self.value):
            raise Stale("a scalar of an optimizer changed")
        return first

    def _is_alike(self, tensor: torch.Tensor) -> bool:
        return same_bits(tensor, self.tensors[0] if self.is_followed else self.value)


class _Places:
    """That the CPU tensors which a body found in an optimizer's state are still there."""

    def __init__(self, optimizer: torch.optim.Optimizer, tensors: Iterable[torch.Tensor]) -> None:
        wanted = set(map(id, tensors))
        self._state = optimizer.state
        self._dicts = list(self._state.values())
        self._tensors = [
            (entry, name, value)
            for entry in self._dicts
            if is_a(entry, dict)
            for name, value in dict.items(entry)
            if id(value) in wanted
        ]

    def check(self) -> None:
        dicts = self._state.values()
        if len(dicts) != len(self._dicts) or not all(map(is_, dicts, self._dicts)):
            raise Stale("an optimizer's state was replaced")
        for entry, name, tensor in self._tensors:
            if dict.get(entry, name) is not tensor:
                raise Stale("an optimizer's state was replaced")


# ----- what is followed


class _Keys:
    """A number for each formula, the same in all runs: equal numbers are equal operations on the same leaves.

    Values are no evidence that two formulas are one: a body may multiply by a number that Python changes, and 0 * 2 is
    0 * 3.
    """

    def __init__(self) -> None:
        self._table: dict[Hashable, int] = {}

    def of(self, run: ProgramRun) -> list[int]:
        """The numbers of the nodes of a run."""
        floats = run.floats
        leaves: dict[int, Hashable] = {}
        for place, given in enumerate(floats.given):
            if given is not None:
                leaves[given] = "given", place
        for number, held in floats.held.items():
            leaves[number] = held.read.key() if held.read is not None else ("held", id(held.tensors[0]))
        found: list[int] = []
        for number, node in enumerate(floats.tape.nodes):
            key: Hashable
            if node.function is None:
                key = leaves.get(number, ("leaf", id(node)))
            else:
                operands = [found[one] if isinstance(one, int) else literal_key(one.value) for one in node.operands]
                key = (getattr(node.function, "key", node.function), *operands)
            found.append(self._table.setdefault(key, len(self._table)))
        return found


class _FollowedLeaves:
    """What the latest of several runs follows, as the earlier ones confirm."""

    def __init__(self, runs: Sequence[ProgramRun]) -> None:
        self.latest = runs[-1]
        self.recorded = self.latest.floats
        self.tape = self.recorded.tape
        if any(run.names != self.latest.names for run in runs):
            raise NotFollowed("an optimizer has other settings")
        keys = _Keys()
        self.keys = keys.of(self.latest)
        self.earlier = [(run, keys.of(run)) for run in runs[:-1]]
        self.followed = self._varied_leaves()
        self.moving = reached(self.tape.nodes, self.followed)
        self.guards = list(self.tape.guards)
        self.formulas = self._formulas()
        self.uploads = self._uploads()
        self._check_writes()

    def _varied_leaves(self) -> set[int]:
        found = set()
        for place, node in enumerate(self.recorded.given):
            now = self.latest.given[place]
            if node is not None and any(bits(run.given[place]) != bits(now) for run, _ in self.earlier):
                found.add(node)
        for node, held in self.recorded.held.items():
            values = [run.floats.leaf_value(held) for run, _ in self.earlier]
            if any(value is not None and not same_bits(value, self.tape.values[node]) for value in values):
                found.add(node)
        return found

    def _formulas(self) -> dict[int, list[Choice]]:
        """The formulas of the constants that a followed leaf reaches. Raises `NotFollowed`."""
        found: dict[int, list[Choice]] = {}
        for place, constant in enumerate(self.latest.constants):
            choices = self.recorded.constants.get(place, [])
            for run, keys in self.earlier:
                known = {(keys[number], negated) for number, negated in run.floats.constants.get(place, ())}
                choices = [one for one in choices if (self.keys[one[0]], one[1]) in known]
                # a formula that is another one in each run says nothing, even if it gave the same value
                is_lost = place in self.recorded.constants and place not in self.recorded.unsure
                if not choices and (is_lost or bits(run.constants[place]) != bits(constant)):
                    raise NotFollowed("a float changed", constant=place, earlier=run)
            if choices:
                found[place] = choices
        self._pin({number for place in self.recorded.unsure for number, _ in found.get(place, ())})
        moving = {place: [one for one in choices if one[0] in self.moving] for place, choices in found.items()}
        return {place: choices for place, choices in moving.items() if choices}

    def _pin(self, unsure: set[int]) -> None:
        """Guard values that may equal a constant by chance, as both have been the same in all runs.

        Not the leaves behind them: a rate times a decay of zero is zero, whatever the rate is.
        """
        for number in sorted(unsure & self.moving):
            if not self._has_varied(number):
                self.guards.append(Guard(bits, (number,), bits(self.tape.values[number])))

    def _has_varied(self, number: int) -> bool:
        """Whether a float was another one in some earlier run."""
        now, key = self.tape.values[number], self.keys[number]
        return any(
            bits(run.floats.tape.values[other]) != bits(now)
            for run, keys in self.earlier
            for other, one in enumerate(keys)
            if one == key
        )

    def _uploads(self) -> dict[int, list[int]]:
        """By input, the nodes whose values a replay uploads. Raises `NotFollowed`."""
        found = {}
        for place, now in self.latest.uploaded.items():
            choices = self.latest.uploads.get(place, [])
            for run, keys in self.earlier:
                known = {keys[number] for number in run.uploads.get(place, ())}
                choices = [number for number in choices if self.keys[number] in known]
                before = run.uploaded.get(place)
                is_lost = place in self.latest.uploads
                if not choices and (is_lost or before is None or not same_bits(now.cpu(), before.cpu())):
                    raise NotFollowed("a tensor that it uploads changed", upload=place)
            choices = [number for number in choices if number in self.moving]
            if choices:
                found[place] = choices
        return found

    def leaves_read(self) -> dict[int, Held]:
        """The leaves that a replay reads: not the scalars on the device that Python did not ask for."""
        recorded = self.recorded
        wanted = [number for choices in recorded.constants.values() for number, _ in choices]
        wanted += [number for numbers in self.latest.uploads.values() for number in numbers]
        wanted += [number for _, number in recorded.writes]
        wanted += [number for *_, number in recorded.settings]
        wanted += [one for guard in self.guards for one in guard.operands if isinstance(one, int)]
        used = needed(self.tape.nodes, wanted)
        return {
            node: held
            for node, held in recorded.held.items()
            if node in used or held.read is not None or held.tensors[0].__class__ is not LazyTensor
        }

    def _check_writes(self) -> None:
        """Raise `NotFollowed` if an earlier run wrote something else to CPU tensors."""
        now = {id(tensor): self.keys[node] for tensor, node in self.recorded.writes}
        settings = {(id(group), name): self.keys[node] for group, name, node in self.recorded.settings}
        for run, keys in self.earlier:
            if {id(tensor): keys[node] for tensor, node in run.floats.writes} != now:
                raise NotFollowed("it writes a value to a tensor on the CPU that no formula follows")
            before = {(id(group), name): keys[node] for group, name, node in run.floats.settings}
            changed = next(
                (
                    name
                    for group, name in {**before, **settings}
                    if before.get((group, name)) != settings.get((group, name))
                ),
                None,
            )
            if changed is not None:
                raise NotFollowed(f"it changes the entry {changed!r} of a group as no formula predicts")


# ----- the program


def follow(runs: Sequence[ProgramRun], optimizers: Sequence[torch.optim.Optimizer]) -> FormulaProgram:
    """The formulas of the latest of `runs`, as earlier ones confirm them, at least one.

    Runs before one that contradicts do not count: leaves that have not varied since are guarded by value. Raises
    `NotFollowed`.
    """
    *earlier, latest = runs
    like: list[ProgramRun] = []
    for run in reversed(earlier):
        try:
            _FollowedLeaves([run, *like, latest])
            like.insert(0, run)
        except NotFollowed:  # not kept: with its frames it would be a cycle, which holds what the callers hold
            if not like:
                raise
            break
    if not like:
        raise NotFollowed("it ran once")
    return FormulaProgram([*like, latest], optimizers)


class FormulaProgram:
    """The floats and CPU tensors of a program: `evaluate` gives those of a replay."""

    def __init__(self, runs: Sequence[ProgramRun], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """The program of the latest of `runs`. Raises `NotFollowed`."""
        choices = _FollowedLeaves(runs)
        latest, recorded = choices.latest, choices.recorded
        self._names = latest.names
        self._given = latest.given
        self._has_zero = not all(latest.given)
        self._constants = latest.constants
        self._tape = recorded.tape
        self._guards = choices.guards
        self._formulas = choices.formulas
        self.uploads = choices.uploads
        self._followed_given = [place for place, node in enumerate(recorded.given) if node in choices.followed]
        read = choices.leaves_read()
        self._held = [
            _LeafOnCpu(held, recorded.tape.values[node], node in choices.followed) for node, held in read.items()
        ]
        # on the device, or read by a call of the body's own
        self.reads_state = any(held.reads_state for held in self._held)
        tensors = [tensor for held in read.values() for tensor in held.tensors]
        self._places = [_Places(optimizer, tensors) for optimizer in optimizers] if tensors else []
        self._written = [tensor for tensor, _ in recorded.writes]
        nodes = list(dict.fromkeys([*(node for _, node in recorded.writes), *(node for *_, node in recorded.settings)]))
        self._write_places = [nodes.index(node) for _, node in recorded.writes]
        self._settings = [(group, name, nodes.index(node)) for group, name, node in recorded.settings]
        self._write_nodes = nodes
        self._leaves = [recorded.given[place] for place in self._followed_given]
        self._leaves += [node for node in read if node in choices.followed]
        self.use(range(len(latest.constants)))

    def use(self, used: Sequence[int]) -> None:
        """Compute only these constants, in this order."""
        self._unchanged = tuple(self._constants[place] for place in used)
        self._moving = [number for number, place in enumerate(used) if place in self._formulas]
        wanted = [self._formulas[used[number]] for number in self._moving]
        self._num_uploads = [len(numbers) for numbers in self.uploads.values()]
        wanted += [[(number, False)] for numbers in self.uploads.values() for number in numbers]
        wanted += [[(number, False)] for number in self._write_nodes]
        tape = self._tape
        leaves = [leaf for leaf in self._leaves if leaf is not None]
        self._compute = compile_formulas(tape.nodes, tape.values, self._guards, leaves, wanted)

    def evaluate(self, given: tuple[float, ...]) -> Evaluated:
        """The constants, uploads and new CPU values for these floats. Nothing is stored yet. Raises `Stale`."""
        unchanged = given == self._given and (
            not self._has_zero or list(map(bits, given)) == list(map(bits, self._given))
        )
        if not unchanged:
            self._check_given(given)
        elif not self._held and not self._written and not self._settings:
            return Evaluated(self._unchanged, (), None)
        if self._held or self._written:
            return run_clean(self._evaluate, given)
        return self._evaluate(given)

    def _check_given(self, given: tuple[float, ...]) -> None:
        if len(given) != len(self._given):
            raise Stale("other floats")
        for place, (new, old) in enumerate(zip(given, self._given, strict=True)):
            if bits(new) != bits(old) and place not in self._followed_given:
                raise Stale(f"{self._names[place]} changed")

    def _evaluate(self, given: tuple[float, ...]) -> Evaluated:
        for places in self._places:
            places.check()
        leaves: list[Any] = [given[place] for place in self._followed_given]
        for held in self._held:
            value = held.current()
            if held.is_followed:
                leaves.append(value)
        try:
            values = self._compute(*leaves)
        except (OtherOutcome, ArithmeticError, RuntimeError, ValueError, TypeError):
            raise Stale("a float or a tensor on the CPU changed so that the body may branch otherwise") from None
        return self._sort(values)

    def _sort(self, values: Sequence[Any]) -> Evaluated:
        constants = list(self._unchanged)
        for number, value in zip(self._moving, values, strict=False):
            constants[number] = value
        start = len(self._moving)
        uploads = []
        for count in self._num_uploads:
            first, *others = values[start : start + count]
            if not all(same_bits(first, other) for other in others):
                raise Stale("tensors on the CPU that were equal differ")
            uploads.append(first)
            start += count
        if not self._written and not self._settings:
            return Evaluated(tuple(constants), uploads, None)
        written = [values[start + place] for place in self._write_places]
        settings = [(group, name, values[start + place]) for group, name, place in self._settings]
        return Evaluated(tuple(constants), uploads, Commit(self._written, written, settings))
