"""What an operator's schema says about aliasing: which operands it writes, and which its results alias."""

from __future__ import annotations

import functools
from dataclasses import dataclass

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
