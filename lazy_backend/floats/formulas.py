"""Floats that remember how they were computed, and functions that compute them again.

In: floats and CPU tensors that a body reads from outside, and what Python does with them. Out: a `Tape` of nodes, and
`compile_formulas`, which makes one function of the nodes that the followed leaves reach.

Note [Floats by formula]
While a body runs as written, a hyperparameter, a step count or a float argument is a `TracedFloat`. Arithmetic on it
is plain float arithmetic, and adds a node to the tape. A replay does the same arithmetic in the same order, so its
floats are those of the body bit for bit. What leaves float arithmetic is a guard: an outcome (of a comparison, `int`,
`round`, formatting) that a replay must find again, or else the body runs as written. C code such as `math.sqrt` reads
the value of a float without asking it. So a leaf is followed only if it was seen to vary while the formulas predicted
every constant of the program (`formula_program`); until then it is guarded by its value.

Equal nodes on equal operands are one node, and step counts that start equal are one leaf: 150 parameters cost one
formula. That they are still equal is checked at each replay.
"""

from __future__ import annotations

import functools
import importlib
import math
import operator
import struct
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lazy_backend.ports.cpython import UNHELD, counts_of

plain = float.__float__  # an exact float, also of a subclass

_pack = struct.Struct("d").pack


def bits(value: float) -> Hashable:
    """What tells two floats apart: -0.0 from 0.0, but no NaN from itself. Of an integer, itself."""
    return value if type(value) is int else _pack(value)


@dataclass(frozen=True, slots=True, eq=False)
class Literal:
    """An operand that is the same at each replay."""

    value: Any


# the number of a node, or a value
Operand = int | Literal


@dataclass(frozen=True, slots=True, eq=False)
class TapeNode:
    """One value of a tape. A leaf has no function: it is read from outside."""

    function: Callable[..., Any] | None
    operands: tuple[Operand, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Guard:
    """What a body learned of its values: a replay must find the same."""

    function: Callable[..., Any]
    operands: tuple[Operand, ...]
    outcome: Any


_BY_VALUE = frozenset(map(id, (int, bool, str)))


def _key_of(operand: Operand) -> Hashable:
    if isinstance(operand, int):
        return operand
    value = operand.value
    kind = type(value)
    if kind is float:
        return kind, bits(value)
    return (kind, value) if id(kind) in _BY_VALUE else (id(kind), id(value))  # alive as long as its node


class Tape:
    """The nodes that one run of a body computed, with the values they had. Closed when the body has ended."""

    def __init__(self) -> None:
        self.nodes: list[TapeNode] = []
        self.values: list[Any] = []
        self.guards: list[Guard] = []
        self.is_open = True
        self._known: dict[Hashable, int] = {}
        self._made: list[TracedFloat] = []

    def leaf(self, value: Any, key: Hashable = None) -> int:
        """A value from outside. Leaves of one key are one leaf."""
        if key is not None and key in self._known:
            return self._known[key]
        number = self._add(TapeNode(None, ()), value)
        if key is not None:
            self._known[key] = number
        return number

    def compute(self, function: Callable[..., Any], operands: Sequence[Operand], value: Any) -> int:
        """The node of `function` of `operands`, which gave `value`."""
        key = (id(function), *map(_key_of, operands))
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._add(TapeNode(function, tuple(operands)), value)
        return known

    def _add(self, node: TapeNode, value: Any) -> int:
        self.nodes.append(node)
        self.values.append(value)
        return len(self.nodes) - 1

    def guard(self, function: Callable[..., Any], operands: Sequence[Operand], outcome: Any) -> None:
        key = ("guard", id(function), *map(_key_of, operands))
        if self.is_open and key not in self._known:
            self._known[key] = -1
            self.guards.append(Guard(function, tuple(operands), outcome))

    def traced(self, number: int) -> TracedFloat:
        """The number of a node, for Python to compute with."""
        value = self.values[number]
        made: Any = (TracedFloat if type(value) is float else traced_integer()).made_of(value)
        made.tape, made.number = self, number
        self._made.append(made)
        return made

    def kept(self) -> list[TracedFloat]:
        """The traced floats that something besides the caller and this tape still holds, such as a scheduler."""
        counts = counts_of(self._made)
        return [one for one, count in zip(self._made, counts, strict=True) if count > UNHELD]

    def close(self) -> None:
        """From here on, what is left of the traced floats behaves as plain floats do."""
        self.is_open = False
        self._made.clear()
        self._known.clear()


# ----- the float


_PLAIN_NUMBERS = frozenset(map(id, (int, float, bool)))


def is_traced(value: Any) -> bool:
    """Whether a number remembers how it was computed."""
    return issubclass(type(value), Traced)


def _operand(value: Any, tape: Tape) -> Operand:
    if is_traced(value):
        return value.number if value.tape is tape else Literal(value.plain())  # type: ignore[no-any-return]
    return Literal(value)


def untraced(value: Any) -> Any:
    return value.plain() if is_traced(value) else value


def _apply(function: Callable[..., Any], *operands: Any) -> Any:
    """`function` of numbers, one of them traced: traced if a replay can compute it."""
    tape = next(one.tape for one in operands if is_traced(one))
    for one in operands:
        if issubclass(type(one), torch.Tensor):
            return NotImplemented  # the tensor's turn, with the traced float as its argument
        if is_traced(one):
            tape = one.tape if one.tape.is_open else tape
        elif id(type(one)) not in _PLAIN_NUMBERS:
            return function(*_values_kept(operands))
    values = [untraced(one) for one in operands]
    if not tape.is_open:
        return function(*values)
    try:
        value = function(*values)
    except ArithmeticError:
        _values_kept(operands)
        raise
    if type(value) is not float and not is_traceable(value):  # a power that is complex
        _values_kept(operands)
        return value
    return tape.traced(tape.compute(function, [_operand(one, tape) for one in operands], value))


def _values_kept(operands: Sequence[Any]) -> list[Any]:
    return [one.keep_value() if is_traced(one) else one for one in operands]


def _compare(function: Callable[[Any, Any], Any], self: Traced, other: Any) -> Any:
    if issubclass(type(other), torch.Tensor):
        return NotImplemented
    if id(type(other)) not in _PLAIN_NUMBERS and not is_traced(other):
        return function(self.keep_value(), other)
    outcome = function(self.plain(), untraced(other))
    tape = self.tape if self.tape.is_open or not is_traced(other) else other.tape
    tape.guard(function, (_operand(self, tape), _operand(other, tape)), outcome)
    return outcome


def of_traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of `math` that a replay can compute: C code reads a float without asking it."""

    def call(*args: Any) -> Any:
        return _apply(function, *args) if any(map(is_traced, args)) else function(*args)

    return call


def of_kept(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of `math` whose results no formula gives: a replay must find the numbers again that it took."""

    def kept(value: Any) -> Any:
        if is_traced(value):
            return value.keep_value()
        return type(value)(map(kept, value)) if type(value) in (list, tuple) else value

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*map(kept, args), **{name: kept(value) for name, value in kwargs.items()})

    return call


def _binary(function: Callable[..., Any]) -> Any:
    return lambda self, other: _apply(function, self, other)


def _reflected(function: Callable[..., Any]) -> Any:
    return lambda self, other: _apply(function, other, self)


def _unary(function: Callable[..., Any]) -> Any:
    return lambda self: _apply(function, self)


def _comparison(function: Callable[..., Any]) -> Any:
    return lambda self, other: _compare(function, self, other)


class Traced:
    """A number that remembers the node of the tape that it is. See Note [Floats by formula]."""

    __slots__ = ()

    tape: Tape
    number: int

    def plain(self) -> Any:
        """The number, as if it were not traced."""
        raise NotImplementedError

    def keep_value(self) -> Any:
        """The plain value, for a use that no formula follows: a replay must find it again."""
        value = self.plain()
        self.tape.guard(bits, (self.number,), bits(value))
        return value

    def ask(self, function: Callable[..., Any], *further: Any) -> Any:
        """What `function` makes of the value, as a guard."""
        value = function(self.plain(), *further)
        self.tape.guard(function, (self.number, *map(Literal, further)), value)
        return value

    def __float__(self) -> float:
        return float(self.keep_value())

    def __bool__(self) -> bool:
        return bool(self.ask(bool))

    def __int__(self) -> int:
        return int(self.ask(int))

    def __trunc__(self) -> int:
        return int(self.ask(int))

    def __floor__(self) -> int:
        return int(self.ask(math.floor))

    def __ceil__(self) -> int:
        return int(self.ask(math.ceil))

    def __round__(self, digits: Any = None) -> Any:
        if digits is None:
            return self.ask(round)
        return _apply(round, self, digits) if type(digits) is int else round(self.keep_value(), digits)

    def __hash__(self) -> int:
        return hash(self.keep_value())

    def __repr__(self) -> str:
        return repr(self.keep_value())

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return str(self.ask(format, spec))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        value = self.keep_value()
        return type(value), (value,)

    def __copy__(self) -> Any:
        return self.keep_value()

    def __deepcopy__(self, memo: Any) -> Any:
        return self.keep_value()

    __add__, __radd__ = _binary(operator.add), _reflected(operator.add)
    __sub__, __rsub__ = _binary(operator.sub), _reflected(operator.sub)
    __mul__, __rmul__ = _binary(operator.mul), _reflected(operator.mul)
    __truediv__, __rtruediv__ = _binary(operator.truediv), _reflected(operator.truediv)
    __floordiv__, __rfloordiv__ = _binary(operator.floordiv), _reflected(operator.floordiv)
    __mod__, __rmod__ = _binary(operator.mod), _reflected(operator.mod)
    __pow__, __rpow__ = _binary(operator.pow), _reflected(operator.pow)
    __neg__, __pos__, __abs__ = _unary(operator.neg), _unary(operator.pos), _unary(operator.abs)
    __lt__, __le__ = _comparison(operator.lt), _comparison(operator.le)
    __gt__, __ge__ = _comparison(operator.gt), _comparison(operator.ge)
    __eq__, __ne__ = _comparison(operator.eq), _comparison(operator.ne)

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple[Any, Any]:
        return other // self, other % self

    # NumPy asks before it reads the value
    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return sys.modules["numpy"].asarray(self.keep_value(), dtype=dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        return getattr(ufunc, method)(*_values_kept(inputs), **options)


class TracedFloat(Traced, float):
    """A float that remembers how it was computed."""

    __slots__ = ("tape", "number")

    def __new__(cls, value: Any = 0.0) -> float:  # type: ignore[misc]
        """What the user's code makes, as in `type(number)(value)`: a plain float."""
        return float(value)

    @classmethod
    def made_of(cls, value: float) -> TracedFloat:
        return float.__new__(cls, value)

    def plain(self) -> float:
        return plain(self)

    def is_integer(self) -> bool:
        return bool(self.ask(float.is_integer))

    def as_integer_ratio(self) -> tuple[int, int]:
        return plain(self.keep_value()).as_integer_ratio()

    def hex(self) -> str:
        return str(self.keep_value().hex())

    def conjugate(self) -> float:
        return self

    @property
    def real(self) -> float:  # type: ignore[override]
        return self


def _kept(function: Callable[..., Any]) -> Any:
    return lambda self, *others: function(self.keep_value(), *others)


def _kept_reflected(function: Callable[..., Any]) -> Any:
    return lambda self, other: function(other, self.keep_value())


@functools.cache
def traced_integer() -> Any:
    """The class of integers that remember how they were computed; None without NumPy.

    No subclass of `int`: C code reads the value of one without asking it, so a table that is looked up by a count would
    be taken for constant. Where PyTorch takes an `int`, it takes an integer of NumPy too, and asks it by `__index__`.
    """
    try:
        numpy = importlib.import_module("numpy")
    except ImportError:
        return None
    return _integer_over(numpy.int64)


def _integer_over(base: Any) -> type:
    class TracedInteger(Traced, base):  # type: ignore[misc]
        __slots__ = ("tape", "number", "value")

        def __new__(cls, value: Any = 0) -> int:  # type: ignore[misc]
            return int(value)  # see TracedFloat

        @classmethod
        def made_of(cls, value: int) -> Any:
            made = base.__new__(cls, value)
            made.value = value
            return made

        def plain(self) -> int:
            return self.value  # type: ignore[no-any-return]

        def __getattribute__(self, name: str) -> Any:
            if name == "__class__":
                return int  # for `isinstance`
            if name in _OF_TRACED:
                return object.__getattribute__(self, name)
            return getattr(self.keep_value(), name)

        def __index__(self) -> int:
            return int(self.ask(int))

        def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
            return function(*_values_kept(args), **kwargs)

        __and__, __rand__ = _kept(operator.and_), _kept_reflected(operator.and_)
        __or__, __ror__ = _kept(operator.or_), _kept_reflected(operator.or_)
        __xor__, __rxor__ = _kept(operator.xor), _kept_reflected(operator.xor)
        __lshift__, __rlshift__ = _kept(operator.lshift), _kept_reflected(operator.lshift)
        __rshift__, __rrshift__ = _kept(operator.rshift), _kept_reflected(operator.rshift)
        __invert__ = _kept(operator.invert)

    return TracedInteger


# Attributes that a traced integer has itself. All others are those of its value.
_OF_TRACED = frozenset(("tape", "number", "value", *vars(Traced)))


def is_traceable(value: Any) -> bool:
    """Whether an integer can be traced."""
    return type(value) is int and -(2**63) <= value < 2**63 and traced_integer() is not None


# ----- computing again


def reached(nodes: Sequence[TapeNode], followed: Iterable[int]) -> set[int]:
    """The nodes that depend on the `followed` leaves."""
    found = set(followed)
    for number, node in enumerate(nodes):
        if any(one in found for one in node.operands if one.__class__ is int):
            found.add(number)
    return found


def needed(nodes: Sequence[TapeNode], wanted: Iterable[int]) -> set[int]:
    """The nodes that the `wanted` ones are computed from, and those themselves."""
    found = set(wanted)
    for number in reversed(range(len(nodes))):
        if number in found:
            found.update(one for one in nodes[number].operands if isinstance(one, int))
    return found


class OtherOutcome(Exception):
    """A replay finds another outcome of a guard than the body did, or cannot compute a value."""


_INFIX = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/", operator.floordiv: "//",
    operator.mod: "%", operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=", operator.eq: "==",
    operator.ne: "!=",
}  # fmt: skip


class _SourceWriter:
    """Writes the source of one function of the leaves."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"OtherOutcome": OtherOutcome}
        self.lines: list[str] = []

    def constant(self, value: Any) -> str:
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name

    def call(self, function: Callable[..., Any], operands: Sequence[str]) -> str:
        sign = _INFIX.get(function)
        if sign is not None:
            return f"{operands[0]} {sign} {operands[1]}"
        return f"{self.constant(function)}({', '.join(operands)})"

    def finish(self, parameters: Sequence[str], results: str) -> Callable[..., Any]:
        body = "\n    ".join([*self.lines, f"return {results}"])
        source = f"def compute({', '.join(parameters)}):\n    {body}\n"
        exec(compile(source, "<formulas of a captured function>", "exec"), self.names)
        return self.names["compute"]  # type: ignore[no-any-return]


def compile_formulas(
    tape_nodes: Sequence[TapeNode],
    values: Sequence[Any],
    guards: Sequence[Guard],
    followed: Sequence[int],
    wanted: Sequence[Sequence[tuple[int, bool]]],
) -> Callable[..., tuple[Any, ...]]:
    """One function of the followed leaves, in their order, that returns the values wanted.

    Each wanted value is given by nodes that must agree, each with whether it is negated; a node that no followed leaf
    reaches has the value in `values`. Raises `OtherOutcome` if a guard does not hold.
    """
    moving = reached(tape_nodes, followed)
    checked = [guard for guard in guards if any(one in moving for one in guard.operands if isinstance(one, int))]
    roots = [number for choices in wanted for number, _ in choices]
    roots += [one for guard in checked for one in guard.operands if isinstance(one, int)]
    used = needed(tape_nodes, roots) & moving
    writer = _SourceWriter()

    def name(operand: Operand) -> str:
        if isinstance(operand, Literal):
            return writer.constant(operand.value)
        return f"v{operand}" if operand in moving else writer.constant(values[operand])

    for number in sorted(used - set(followed)):
        node = tape_nodes[number]
        assert node.function is not None
        writer.lines.append(f"v{number} = {writer.call(node.function, [name(one) for one in node.operands])}")
        if node.function is operator.pow:
            kind = writer.constant(type(values[number]))  # an integer, a float or a complex number
            writer.lines.append(f"if v{number}.__class__ is not {kind}: raise OtherOutcome")
    for guard in checked:
        outcome, kind = writer.constant(guard.outcome), writer.constant(type(guard.outcome))
        found = f"g{len(writer.lines)}"
        writer.lines.append(f"{found} = {writer.call(guard.function, [name(one) for one in guard.operands])}")
        writer.lines.append(f"if {found} != {outcome} or {found}.__class__ is not {kind}: raise OtherOutcome")
    results = []
    for (first, negated), *others in wanted:
        result = f"-{name(first)}" if negated else name(first)
        for other, is_other_negated in others:
            sign = "-" if is_other_negated else ""
            packed = writer.constant(_pack)
            writer.lines.append(f"if {packed}({result}) != {packed}({sign}{name(other)}): raise OtherOutcome")
        results.append(result)
    return writer.finish([f"v{number}" for number in followed], f"({''.join(f'{one}, ' for one in results)})")
