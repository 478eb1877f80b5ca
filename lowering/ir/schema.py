"""What an operator's schema says: which operands it writes, which its results alias, and the types of its arguments."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lazy_backend.ports.dispatcher import OpOverload, function_schema


@dataclass(frozen=True, slots=True)
class Operand:
    """An argument, by position and by name."""

    place: int
    name: str


@dataclass(frozen=True, slots=True)
class ReturnAlias:
    """How one return aliases an operand: it is the `same` written operand, a `view` of one, or neither (`fresh`)."""

    kind: str
    operand: Operand | None


@dataclass(frozen=True, slots=True)
class OpSchema:
    mutates: tuple[Operand, ...]
    returns: tuple[ReturnAlias, ...]
    returns_list: bool


@functools.cache
def schema_of(op: OpOverload) -> OpSchema:
    schema = function_schema(op)
    operands = [(Operand(place, arg.name), arg.alias_info) for place, arg in enumerate(schema.arguments)]
    returns = []
    for result in schema.returns:
        alias = result.alias_info
        source = None
        if alias is not None:
            # a list of views has no alias set of its own: its operand is the one whose set becomes the wildcard
            source = next(
                (
                    operand
                    for operand, info in operands
                    if info is not None and (info.before_set & alias.before_set or "*" in info.after_set)
                ),
                None,
            )
        kind = "fresh" if source is None else "same" if alias is not None and alias.is_write else "view"
        returns.append(ReturnAlias(kind, source))
    return OpSchema(
        mutates=tuple(operand for operand, info in operands if info is not None and info.is_write),
        returns=tuple(returns),
        returns_list=len(schema.returns) == 1 and str(schema.returns[0].type).startswith("List"),
    )


class Positional:
    """The arguments of an operator by position, as an operator of ours is declared that stands for it.

    `skips`: the name of an argument that is left out. `numbers`: places of tensors for which numbers are given.
    """

    def __init__(self, op: OpOverload, skips: str = "", numbers: Collection[int] = ()) -> None:
        schema = function_schema(op)
        self.arguments = [argument for argument in schema.arguments if argument.name != skips]
        types = _argument_types(str(schema)) | {self.arguments[place].name: "Scalar" for place in numbers}
        # arguments are renamed: `from` cannot be a keyword argument in Python, and custom operators may not use `self`
        self.declared = ", ".join(f"{types[argument.name]} a{place}" for place, argument in enumerate(self.arguments))
        # a custom operator may not return an operand it writes; the caller has that operand anyway
        self.returns_nothing = all(result.kind == "same" for result in schema_of(op).returns)
        self.returned = "()" if self.returns_nothing else str(schema).rsplit(" -> ", 1)[1]

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The arguments of a call, by position."""
        positional = enumerate(self.arguments)
        return tuple(
            args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
            for place, argument in positional
        )

    def bind(self, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Arguments by position as those of the operator."""
        pairs = list(zip(self.arguments, values, strict=True))
        by_name = {argument.name: value for argument, value in pairs if argument.kwarg_only}
        return [value for argument, value in pairs if not argument.kwarg_only], by_name


def _argument_types(schema: str) -> dict[str, str]:
    """`{"self": "Tensor(a!)", "p": "float"}`, from the schema's text: its parsed form does not print as a schema."""
    inside = schema.split("(", 1)[1].rsplit(") -> ", 1)[0]
    inside = re.sub(r"=\[[^\]]*\]", "", inside)
    declared = [part.split("=")[0].rsplit(" ", 1) for part in inside.split(", ") if part != "*"]
    return {name: kind for kind, name in declared}
