"""Python floats as inputs of a compiled graph.

In: a node with floats that change from run to run. Out: the same computation with those floats as 0-d tensors.

Note [Promoted scalars]
A Python float takes no part in type promotion and is rounded only once, to the type the kernel computes in (float32
for float16 and bfloat16). A 0-d tensor would be rounded to the tensor's type first. So a rule computes in the kernel's
type: tensors are cast up, the float64 scalar is cast once, and the result is cast to the dtype that was recorded.
Operators without a rule keep their floats as literals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lazy_backend.lowering.ir import Arg, Constant, Node, Value

aten = torch.ops.aten


def _scaled(tensor: Any, alpha: Any) -> Any:
    return tensor if isinstance(alpha, int) and alpha == 1 else tensor * alpha


def _lerp(start: Any, end: Any, weight: Any) -> Any:
    """aten/src/ATen/native/Lerp.h: two forms, so that weight 1 gives exactly `end`."""
    near_start = start + weight * (end - start)
    near_end = end - (end - start) * (1 - weight)
    return aten.where.self(abs(weight) < 0.5, near_start, near_end)


# Formulas in schema order. The foreach forms have the same order, element by element.
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": lambda x, other, alpha=1: x + _scaled(other, alpha),
    "sub": lambda x, other, alpha=1: x - _scaled(other, alpha),
    "rsub": lambda x, other, alpha=1: other - _scaled(x, alpha),
    "mul": lambda x, other: x * other,
    "div": lambda x, other: x / other,
    "lerp": _lerp,
    "addcmul": lambda x, a, b, value=1: x + _scaled(a, value) * b,
    "addcdiv": lambda x, a, b, value=1: x + _scaled(a, value) / b,
    "pow": lambda x, exponent: x**exponent,
    "fill": lambda x, value: aten.fill.Tensor(x, value),
    "masked_fill": lambda x, mask, value: aten.where.self(mask, value, x),
    # not maximum: clamp keeps x where it equals the bound, so -0.0 stays; a NaN on either side wins
    "clamp_min": lambda x, low: aten.where.self((x < low) | (low != low), low, x),
    "clamp_max": lambda x, high: aten.where.self((x > high) | (high != high), high, x),
}
_COMPARISONS: dict[str, Callable[..., Any]] = {
    "gt": lambda x, other: x > other,
    "ge": lambda x, other: x >= other,
    "lt": lambda x, other: x < other,
    "le": lambda x, other: x <= other,
    "eq": lambda x, other: aten.eq.Tensor(x, other),
    "ne": lambda x, other: aten.ne.Tensor(x, other),
}
_FORMULAS = {**_ARITHMETIC, **_COMPARISONS}


def _base_name(node: Node) -> str:
    """`add` for `add.Tensor`, `add_.Tensor`, `_foreach_add_.Scalar`."""
    name = node.op._schema.name.removeprefix("aten::")
    return name.removeprefix("_foreach_").removesuffix("_")


def can_promote(node: Node) -> bool:
    """Whether the node's floats can become inputs of a compiled graph."""
    if not node.op._schema.name.startswith("aten::") or _base_name(node) not in _FORMULAS:
        return False
    if any(name not in ("alpha", "value") for name, _ in node.kwargs):
        return False  # `out`, `rounding_mode`
    return all(v is None or v.meta.dtype.is_floating_point or _is_comparison(node) for v in _targets(node))


def _is_comparison(node: Node) -> bool:
    return _base_name(node) in _COMPARISONS


def _targets(node: Node) -> tuple[Value | None, ...]:
    """The values a rule gives: an in-place foreach returns nothing and writes its first list."""
    return node.mutates if node.mutates else node.outputs


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What CPU and CUDA kernels compute in (at::opmath_type)."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def emit_promoted(
    node: Node, read: Callable[[Arg], Any], scalar: Callable[[int], Any], cast: Callable[[Any, torch.dtype], Any]
) -> list[Any]:
    """Write the node's formula and return one result per target, in the target's dtype.

    `read` gives an operand, `scalar` a promoted constant as a 0-d float64 tensor, `cast` changes a dtype. All of them
    deal in `torch.fx.Proxy` objects, so that a formula reads as arithmetic.
    """
    formula = _FORMULAS[_base_name(node)]
    results = []
    for place, target in enumerate(_targets(node)):
        assert target is not None
        dtype = _compute_dtype(target.meta.dtype)
        if _is_comparison(node):
            operand = node.inputs()[0].meta.dtype
            dtype = operand if operand.is_floating_point else torch.get_default_dtype()

        def operand_of(arg: Arg, place: int = place, dtype: torch.dtype = dtype) -> Any:
            if isinstance(arg, tuple):
                arg = arg[place]
            if isinstance(arg, Constant):
                return cast(scalar(arg.index), dtype)
            if isinstance(arg, Value):
                keep = arg.meta.dtype in (dtype, torch.bool)
                return read(arg) if keep else cast(read(arg), dtype)
            return arg

        args = [operand_of(arg) for arg in node.args]
        kwargs = {name: operand_of(arg) for name, arg in node.kwargs}
        result = formula(*args, **kwargs)
        final = target.meta.dtype
        results.append(result if final in (dtype, torch.bool) else cast(result, final))
    return results
