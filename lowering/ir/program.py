"""The recorded program: the calls on one path through the trie.

In: nothing from this package but metas. Out: tokens and `Call`, read by `canonical`.
A token stands for a tensor in a recorded call. Tokens are objects compared by identity: an int in a key could be
confused with an int argument, since a Python number may be passed where the schema has a tensor.

Note [Written once]
A call and its results never change once they are made. Their classes are not frozen dataclasses, because those set each
field through `object.__setattr__`, which takes 1 µs for each call recorded for the first time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lazy_backend.lowering.ir.graph import TensorMeta, print_arg
from lazy_backend.ports.dispatcher import OpOverload


class Token:
    """A tensor of a trace: the `index`-th slot (made in the trace) or the `index`-th input (from outside)."""

    __slots__ = ("kind", "index")

    def __init__(self, kind: str, index: int) -> None:
        self.kind = kind
        self.index = index

    def __repr__(self) -> str:
        return f"{self.kind}{self.index}"


class TokenTable:
    """The tokens of one kind, made once and shared by all traces."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._tokens: list[Token] = []

    def __getitem__(self, index: int) -> Token:
        if index >= len(self._tokens):
            self.reserve(index + 1)
        return self._tokens[index]

    @property
    def made(self) -> list[Token]:
        """The tokens so far, by index. This very list grows."""
        return self._tokens

    def reserve(self, count: int) -> None:
        """Make tokens until the table has at least `count`."""
        while count > len(self._tokens):
            self._tokens.append(Token(self.kind, len(self._tokens)))


SLOTS = TokenTable("slot")
INPUTS = TokenTable("input")


@dataclass(frozen=True, slots=True, eq=False)
class Entered:
    """A tensor from outside, at its first use in a trace.

    Inputs of one `group` share a storage; `base` describes the base tensor of that storage.
    """

    token: Token
    meta: TensorMeta
    group: int
    base: TensorMeta


@dataclass(slots=True, eq=False)
class Fresh:
    """A result that owns its memory. `wrapper`: the arguments from which the recorder makes the user's tensor.

    See Note [Written once].
    """

    token: Token
    meta: TensorMeta
    wrapper: tuple[Any, ...] = ()


@dataclass(slots=True, eq=False)
class View:
    """A result that shares the memory of the operand `of`. `path` locates that operand among the arguments.

    See Note [Written once].
    """

    token: Token
    meta: TensorMeta
    of: Token
    path: tuple[int | str, ...]
    wrapper: tuple[Any, ...] = ()
    of_first: bool = field(init=False)  # whether the operand is the first argument, as it nearly always is

    def __post_init__(self) -> None:
        self.of_first = self.path == (0,)


@dataclass(slots=True, eq=False)
class Same:
    """A result that is the operand itself, as in an in-place op. `path` locates the operand among the arguments.

    See Note [Written once].
    """

    token: Token
    path: tuple[int | str, ...]


Result = Fresh | View | Same | None


@dataclass(slots=True, eq=False)
class Call:
    """One recorded call. Arguments hold tokens for tensors and `Constant`s (numbered within the call) for floats.

    See Note [Written once].
    """

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    results: tuple[Result, ...]
    returns_list: bool
    mutates: tuple[Token, ...]
    entered: tuple[Entered, ...]
    num_constants: int
    seeded: bool
    num_slots: int  # slots made on the path, including this call's: the index of the next call's first slot
    site: str
    frames: tuple[str, ...] = ()  # outer user lines, innermost first, if requested
    single: Fresh | View | Same | None = field(init=False)  # the result, if there is exactly one and not in a list

    def __post_init__(self) -> None:
        alone = len(self.results) == 1 and not self.returns_list
        self.single = self.results[0] if alone else None


def print_program(calls: Sequence[Call]) -> str:
    """The calls of a path as they were recorded, one per line, with user lines."""
    return "\n".join(map(_print_call, calls))


def _print_call(call: Call) -> str:
    results = ", ".join("_" if r is None else _print_result(r) for r in call.results)
    args = [print_arg(arg) for arg in call.args] + [f"{name}={print_arg(arg)}" for name, arg in call.kwargs]
    entered = "".join(f"\n      {e.token} is an input {e.meta}" for e in call.entered)
    where = f"  # {call.site}" if call.site else ""
    return f"  {results}{' = ' if results else ''}{call.op}({', '.join(args)}){where}{entered}"


def _print_result(result: Fresh | View | Same) -> str:
    if isinstance(result, Same):
        return repr(result.token)
    shared = f" in {result.of}" if isinstance(result, View) else ""
    return f"{result.token}: {result.meta}{shared}"


@dataclass(frozen=True, slots=True)
class Cut:
    """A call that is not recorded but runs at once on the backing device. Kept in the trie, to be recognised again."""

    reason: str
