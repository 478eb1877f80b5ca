"""The hyperparameters of an optimizer, and what it counts: where its floats are, and whether anything else changed.

In: an optimizer. Out: `OptimizerGuard`.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from lazy_backend.floats.formulas import bits
from lazy_backend.ports.cpython import is_a, items_of

# The attribute of an optimizer that has them.
GROUPS = "param_groups"
_PLAIN = frozenset(map(id, (type(None), bool, int, float, str)))


class OptimizerGuard:
    """The hyperparameters of one optimizer. Floats may change: `floats` returns their current values.

    So may the integers among the entries named `counts`, which steps change; they are among the floats, too. So are the
    numbers of these names in the state of each parameter, of which nothing else is seen here.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, counts: Container[str] = ()) -> None:
        self._reference = weakref.ref(optimizer)
        self._counts = counts
        self._state = optimizer.state
        self._groups = list(optimizer.param_groups)
        self._values = [tuple(group.values()) for group in self._groups]
        # lists and dicts may be written to without being replaced
        self._contents = [
            (value, _contents_of(value))
            for group in self._groups
            for name, value in group.items()
            if name != "params" and is_a(value, list | dict)
        ]
        self._states = list(self._state.values())
        self._num_entries = list(map(len, states_of(optimizer)))
        self._entries = list(_entries_of(optimizer, counts))
        self._numbers = [state[name] for state, name in self._entries]
        self._floats = self._read_floats()
        self.names = self._find_names()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        optimizer = self._reference()
        assert optimizer is not None  # its step is what is replayed
        return optimizer

    def _find_names(self) -> list[str]:
        """The names of the floats, as in `AdamW.param_groups[0]['lr']`."""
        found = []
        for group, name, length in _places_in_groups(self.optimizer, self._counts):
            place = next(place for place, one in enumerate(self._groups) if one is group)
            count = 1 if length is None else sum(type(value) is float for value in group[name])
            found += [f"{type(self.optimizer).__name__}.param_groups[{place}][{name!r}]"] * count
        return found + [f"the entry {name!r} of {type(self.optimizer).__name__}.state" for _, name in self._entries]

    def _read_floats(self) -> tuple[float, ...]:
        found: list[float] = []
        for group in self._groups:
            for name, value in group.items():
                if type(value) is float or (type(value) is int and name in self._counts):
                    found.append(value)
                elif type(value) is tuple:
                    found += [one for one in value if type(one) is float]
        return (*found, *[state[name] for state, name in self._entries])

    def floats(self) -> tuple[float, ...] | None:
        """The floats among the hyperparameters; None if anything else changed."""
        optimizer = self._reference()
        if optimizer is None:
            return None
        groups = optimizer.param_groups
        if optimizer.state is not self._state or len(groups) != len(self._groups):
            return None
        unchanged = True
        for group, known, values in zip(groups, self._groups, self._values, strict=True):
            if group is not known or len(group) != len(values):
                return None
            unchanged = unchanged and all(map(operator.is_, group.values(), values))
        if self._counts:
            states = optimizer.state.values()
            if len(states) != len(self._states) or not all(map(operator.is_, states, self._states)):
                return None
            if list(map(len, states_of(optimizer))) != self._num_entries:  # a count came, or is gone
                return None
            now = [dict.get(state, name) for state, name in self._entries]
            if list(map(type, now)) != list(map(type, self._numbers)):
                return None
            unchanged = unchanged and all(map(operator.is_, now, self._numbers))
        if self._contents and any(not _same_contents(value, before) for value, before in self._contents):
            return None
        return self._floats if unchanged else self._compare()

    def _compare(self) -> tuple[float, ...] | None:
        for group, values in zip(self._groups, self._values, strict=True):
            for (name, value), before in zip(group.items(), values, strict=True):
                is_count = type(value) is type(before) is int and name in self._counts
                if not is_count and not _same_but_for_floats(value, before):
                    return None
        return self._read_floats()


class SettingsGuard:
    """The hyperparameters of optimizers that code reads, and does not step: none may change."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._guards = list(map(OptimizerGuard, optimizers))
        self._floats = list(map(_bits_of, self._guards))

    def change(self) -> str:
        """What has changed; empty if nothing has."""
        for guard, before in zip(self._guards, self._floats, strict=True):
            if before is None or _bits_of(guard) != before:
                return "the settings of an optimizer that its code may read changed"
        return ""


def _bits_of(guard: OptimizerGuard) -> list[Any] | None:
    floats = guard.floats()
    return None if floats is None else list(map(bits, floats))


def is_number(value: Any) -> bool:
    """Whether a value may be followed as a count, or as what is computed from one."""
    return type(value) is int or type(value) is float


def numbers_in(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The numbers among the entries of each group, and of the state of each parameter, by name."""
    return [
        {name: value for name, value in dict.items(entries) if is_number(value)}
        for entries in (*optimizer.param_groups, *states_of(optimizer))
    ]


def changed_numbers(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> set[str]:
    """The names of entries that are other numbers than `numbers_in` found before."""
    return {
        name
        for old, new in zip(before, now, strict=False)
        for name, value in new.items()
        if name not in old or type(old[name]) is not type(value) or bits(old[name]) != bits(value)
    }


def float_places(
    optimizer: torch.optim.Optimizer, counts: Container[str] = ()
) -> Iterator[tuple[dict[str, Any], str, int | None]]:
    """Where the floats among the hyperparameters are, and the numbers named `counts`, also those in the state: group or
    state, name, and the length if they are in a tuple."""
    yield from _places_in_groups(optimizer, counts)
    yield from ((state, name, None) for state, name in _entries_of(optimizer, counts))


def _places_in_groups(
    optimizer: torch.optim.Optimizer, counts: Container[str]
) -> Iterator[tuple[dict[str, Any], str, int | None]]:
    for group in optimizer.param_groups:
        for name, value in group.items():
            if is_a(value, float) or (type(value) is int and name in counts):
                yield group, name, None
            elif type(value) is tuple and any(is_a(one, float) for one in value):
                yield group, name, len(value)


def states_of(optimizer: torch.optim.Optimizer) -> Iterator[dict[Any, Any]]:
    """The state of each parameter, where it is a dict as usual."""
    return (state for state in optimizer.state.values() if is_a(state, dict))


def _entries_of(optimizer: torch.optim.Optimizer, counts: Container[str]) -> Iterator[tuple[dict[str, Any], str]]:
    """The numbers named `counts` in the state: where each is, and its name."""
    for state in states_of(optimizer) if counts else ():
        for name, value in dict.items(state):
            if name in counts and is_number(value):
                yield state, name


def _contents_of(value: Any) -> list[Any]:
    """The values in a list or a dict."""
    return list(dict.values(value) if is_a(value, dict) else items_of(value))


def _same_contents(value: Any, before: list[Any]) -> bool:
    now = _contents_of(value)
    return len(now) == len(before) and all(
        a is b or (type(a) is type(b) and _is_plain(a) and bool(a == b)) for a, b in zip(now, before, strict=True)
    )


def _same_but_for_floats(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) is tuple:
        return len(a) == len(b) and all(map(_same_but_for_floats, a, b))
    return type(a) is float or (_is_plain(a) and bool(a == b))


def _is_plain(value: Any) -> bool:
    """Whether comparing `value` runs no tensor code."""
    return id(type(value)) in _PLAIN
