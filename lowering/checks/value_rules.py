"""What operators ask of the values of their operands.

In: a call of an operator for which compilers write code that does not check values as ATen's kernel does. Out: a
`Checked`: the operands that are looked at, and the condition that they fulfil, written as calls of aten.
See Note [Values are checked before writes].
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from lazy_backend.lowering.ir.graph import Arg, Node, Value
from lazy_backend.ports.dispatcher import base_name, function_schema

aten = torch.ops.aten

# Dtypes of masks, which an index may be, too.
_MASKS = (torch.bool, torch.uint8)


class ConditionArguments:
    """The arguments of a node by name, and what stands for them where a condition is written.

    `tensor`, `size`: give what stands for a value, and for its size in a dimension. `number`: what stands for an int.
    """

    def __init__(
        self,
        node: Node,
        tensor: Callable[[Value], Any],
        size: Callable[[Value, int], Any],
        number: Callable[[Arg], Any],
    ) -> None:
        self.args: dict[str, Arg] = arguments_of(node)
        self.tensor_of, self._size, self._number = tensor, size, number

    def __getitem__(self, name: str) -> Any:
        return self.tensor_of(self.args[name])

    def number(self, name: str) -> Any:
        return self._number(self.args[name])

    def rank(self, name: str) -> int:
        return len(self.args[name].meta.shape)

    def size(self, name: str, dim: int) -> Any:
        """A scalar counts as one element in one dimension."""
        rank = self.rank(name)
        return self._size(self.args[name], dim % rank) if rank else 1

    def numel(self, name: str) -> Any:
        return reduce(operator.mul, [self.size(name, dim) for dim in range(self.rank(name))], 1)

    def numbers(self, name: str) -> list[Any]:
        return list(map(self._number, self.args[name]))


def arguments_of(node: Node) -> dict[str, Arg]:
    """The arguments of a call by name, with those that it leaves out."""
    arguments = function_schema(node.op).arguments
    given = {one.name: one.default_value for one in arguments if one.has_default_value()}
    given |= {one.name: arg for one, arg in zip(arguments, node.args, strict=False)}
    return given | dict(node.kwargs)


@dataclass(frozen=True, slots=True)
class ValueRule:
    """What an operator asks. `operands`: names of the operands, or of lists of them, whose values it looks at.

    `holds`: writes the condition, of each element. `applies`: whether it asks that of a call. `computes`: whether the
    operator does more than to check.
    """

    operands: tuple[str, ...]
    holds: Callable[[ConditionArguments], Any]
    applies: Callable[[Node], bool] = lambda node: True
    computes: bool = True


@dataclass(frozen=True, slots=True)
class Checked:
    """The operands of a call whose values are checked, and by which rule."""

    values: tuple[Value, ...]
    rule: ValueRule


def checked(node: Node) -> Checked | None:
    """What is checked of the operands of `node`; None if nothing is."""
    rule = RULES.get(base_name(node.op).rstrip("_"))
    if rule is None or not rule.applies(node):
        return None
    args = arguments_of(node)
    given: list[Arg] = []
    for name in rule.operands:
        arg = args.get(name)
        given += arg if isinstance(arg, tuple) else [arg]
    values = tuple(arg for arg in given if isinstance(arg, Value) and arg.meta.numel)
    return Checked(values, rule) if values else None


# ----- the rules


def _between(values: Any, low: Any, high: Any) -> Any:
    return (values >= low) & (values < high)


def _in(source: str, index: str = "index", wraps: bool = False) -> ValueRule:
    """An index into the dimension `dim` of an operand, or the first one. `wraps`: may be negative."""

    def holds(call: ConditionArguments) -> Any:
        size = call.size(source, call.args.get("dim", 0))
        return _between(call[index], -size if wraps else 0, size)

    return ValueRule((index,), holds)


def _in_all(source: str) -> ValueRule:
    """An index into all elements."""
    return ValueRule(("index",), lambda call: _between(call["index"], -call.numel(source), call.numel(source)))


def _indices(call: ConditionArguments) -> Any:
    """Indices into one dimension each, some of which may be left out. A mask is one into as many as it has."""
    conditions = []
    dim = 0
    for index in call.args["indices"]:
        if isinstance(index, Value) and index.meta.dtype not in _MASKS:
            size = call.size("self", dim)
            conditions.append(aten.all.default(_between(call.tensor_of(index), -size, size)))
        dim += len(index.meta.shape) if isinstance(index, Value) and index.meta.dtype in _MASKS else 1
    return reduce(operator.and_, conditions)


def _has_indices(node: Node) -> bool:
    indices = arguments_of(node)["indices"]
    return any(isinstance(index, Value) and index.meta.dtype not in _MASKS for index in indices)


def _classes(call: ConditionArguments) -> Any:
    """Targets of a loss: classes, or the number that stands for none."""
    target = call["target"]
    num_classes = call.size("self", 1 if call.rank("self") > 1 else 0)
    return _between(target, 0, num_classes) | (target == call.number("ignore_index"))


def _probabilities(call: ConditionArguments) -> Any:
    found = [aten.all.default((call[name] >= 0) & (call[name] <= 1)) for name in ("self", "target")]
    return found[0] & found[1]


def _divides_ints(node: Node) -> bool:
    """Whether a division is one of integers whose divisor may be zero."""
    made = [value.meta.dtype for value in node.outputs if value is not None]
    divisor = arguments_of(node)["other"]
    return not any(dtype.is_floating_point or dtype.is_complex for dtype in made) and (
        isinstance(divisor, Value) or divisor == 0
    )


def _nonzero(call: ConditionArguments) -> Any:
    """The number zero as a divisor is refused for whatever it divides."""
    return call["other"] != 0 if isinstance(call.args["other"], Value) else call["self"] != call["self"]


def _unpooled() -> ValueRule:
    """Places in each channel of what is made."""
    size = lambda call: reduce(operator.mul, call.numbers("output_size"))
    return ValueRule(("indices",), lambda call: _between(call["indices"], 0, size(call)))


def _last_class(low: int) -> ValueRule:
    """Classes of the last dimension, or numbers below."""
    return ValueRule(("target",), lambda call: _between(call["target"], low, call.size("self", -1)))


def _divisor() -> ValueRule:
    return ValueRule(("self", "other"), _nonzero, _divides_ints)


def _several() -> ValueRule:
    return ValueRule(("indices",), _indices, _has_indices)


# By the operator's name without its overload, and without the `_` of the form in place.
RULES: dict[str, ValueRule] = {
    "embedding": _in("weight", "indices"),
    "index_select": _in("self"),
    "gather": _in("self"),
    "scatter": _in("self"),
    "scatter_add": _in("self"),
    "scatter_reduce": _in("self"),
    "index_add": _in("self"),
    "index_copy": _in("self"),
    "index_reduce": _in("self"),
    "index_fill": _in("self", wraps=True),
    "take": _in_all("self"),
    "put": _in_all("self"),
    "index": _several(),
    "index_put": _several(),
    "_index_put_impl": _several(),
    "nll_loss_forward": ValueRule(("target",), _classes),
    "nll_loss2d_forward": ValueRule(("target",), _classes),
    "multi_margin_loss": _last_class(0),
    "multilabel_margin_loss_forward": _last_class(-1),
    "binary_cross_entropy": ValueRule(("self", "target"), _probabilities),
    "max_unpool2d": _unpooled(),
    "max_unpool3d": _unpooled(),
    "floor_divide": _divisor(),
    "remainder": _divisor(),
    "fmod": _divisor(),
    "div": _divisor(),
    "_assert_async": ValueRule(("self",), lambda call: call["self"] != 0, computes=False),
    "_linalg_check_errors": ValueRule(("info",), lambda call: call["info"] == 0, computes=False),
}


def written_condition(found: Checked, call: ConditionArguments) -> Any:
    """Whether the condition holds for all elements: a bool of no dimensions."""
    return aten.all.default(found.rule.holds(call))
