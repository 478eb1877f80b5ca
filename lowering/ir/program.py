"""What the recorder writes: the calls of one path through the trie.

In: nothing of ours but metas. Out: tokens and `Call`, read by `canonical`.
A token stands for a tensor in a recorded call. Tokens are objects compared by identity: an int in a key would collide
with an int argument, since a Python number may stand where the schema has a tensor.

Note [Written once]
A call and its results are never changed. They are not declared frozen, because a frozen dataclass sets each field
through `object.__setattr__`: 1 µs of each call seen for the first time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lazy_backend.lowering.ir.graph import TensorMeta, print_arg


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

    def reserve(self, count: int) -> None:
        """See that there are so many."""
        while count > len(self._tokens):
            self._tokens.append(Token(self.kind, len(self._tokens)))


SLOTS = TokenTable("slot")
INPUTS = TokenTable("input")


@dataclass(frozen=True, slots=True, eq=False)
class Entered:
    """A tensor from outside, at its first use in a trace.

    Inputs of one `group` share a storage whose first tensor looks like `base`.
    """

    token: Token
    meta: TensorMeta
    group: int
    base: TensorMeta


@dataclass(slots=True, eq=False)
class Fresh:
    """A result with memory of its own. `wrapper`: what the recorder makes the user's tensor from.

    See Note [Written once].
    """

    token: Token
    meta: TensorMeta
    wrapper: tuple[Any, ...] = ()


@dataclass(slots=True, eq=False)
class View:
    """A result that shares the memory of the operand `of`. `path` leads to that operand among the arguments.

    See Note [Written once].
    """

    token: Token
    meta: TensorMeta
    of: Token
    path: tuple[int | str, ...]
    wrapper: tuple[Any, ...] = ()
    of_first: bool = field(init=False)  # whether the operand is the first argument, as nearly always

    def __post_init__(self) -> None:
        self.of_first = self.path == (0,)


@dataclass(slots=True, eq=False)
class Same:
    """A result that is the operand itself, as of an in-place op. `path` leads to it among the arguments.

    See Note [Written once].
    """

    token: Token
    path: tuple[int | str, ...]


Result = Fresh | View | Same | None


@dataclass(slots=True, eq=False)
class Call:
    """One recorded call. Arguments hold tokens for tensors and `Constant`s (numbered in the trace) for floats.

    See Note [Written once].
    """

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    results: tuple[Result, ...]
    returns_list: bool
    mutates: tuple[Token, ...]
    entered: tuple[Entered, ...]
    num_constants: int
    seeded: bool
    num_slots: int  # made on the path, this call's among them: where the next call's slots start
    site: str
    frames: tuple[str, ...] = ()  # further lines of the user's, outwards, if they were asked for
    single: Fresh | View | Same | None = field(init=False)  # the result, if there is just one

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
    """A call that is not recorded: it runs at once on the backing device. Stands in the trie so that it is known."""

    reason: str
