"""Python floats as inputs of a compiled graph.

In: a node with floats that change from run to run. Out: the same computation with those floats as 0-d tensors.

Note [Promoted scalars]
A Python float takes no part in type promotion and is rounded only once, to the type the kernel computes in (float32
for float16 and bfloat16). A 0-d tensor would be rounded to the tensor's type first. So a rule computes in the kernel's
type: tensors are cast up, the float64 scalar is cast once, and the result is cast to the dtype that was recorded.
Operators without a rule keep their floats as literals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lazy_backend.lowering.ir.graph import Arg, Constant, Node, Value
from lazy_backend.lowering.ir.optimizers import can_write_out, is_fused_optimizer, write_out
from lazy_backend.ports.dispatcher import function_schema

aten = torch.ops.aten


def _scaled(tensor: Any, alpha: Any) -> Any:
    return tensor if isinstance(alpha, int) and alpha == 1 else tensor * alpha


def _lerp(start: Any, end: Any, weight: Any) -> Any:
    """aten/src/ATen/native/cpu/LerpKernel.cpp: two forms, so that weight 1 gives exactly `end`."""
    near_start = start + weight * (end - start)
    near_end = end + (end - start) * (weight - 1)
    return aten.where.self(abs(weight) < 0.5, near_start, near_end)


def _lerp_reduced(start: Any, end: Any, weight: Any) -> Any:
    """aten/src/ATen/native/Lerp.h, for float16 and bfloat16: the same but for the sign of zeros."""
    near_start = start + weight * (end - start)
    near_end = end - (end - start) * (1 - weight)
    return aten.where.self(abs(weight) < 0.5, near_start, near_end)


def _clamp_min(x: Any, low: Any) -> Any:
    if isinstance(low, int | float):  # an int next to the promoted float
        return aten.clamp_min.default(x, low)
    # not maximum: clamp keeps x where it equals the bound, so -0.0 stays; a NaN on either side wins
    return aten.where.self((x < low) | (low != low), low, x)


def _clamp_max(x: Any, high: Any) -> Any:
    if isinstance(high, int | float):
        return aten.clamp_max.default(x, high)
    return aten.where.self((x > high) | (high != high), high, x)


def _clamp(x: Any, low: Any = None, high: Any = None) -> Any:
    x = x if low is None else _clamp_min(x, low)
    return x if high is None else _clamp_max(x, high)


def _threshold(x: Any, threshold: Any, value: Any) -> Any:
    if isinstance(value, int | float):
        return aten.masked_fill.Scalar(x, x <= threshold, value)
    return aten.where.self(x <= threshold, value, x)


def _full(size: Sequence[int], value: Any) -> Any:
    return aten.clone.default(aten.expand.default(value, list(size)), memory_format=torch.contiguous_format)


def _power(x: Any, exponent: Any) -> Any:
    """aten/src/ATen/native/cpu/PowKernel.cpp: kernels for two exponents differ from pow on -inf and -0.0."""
    root = aten.where.self(aten.eq.Scalar(exponent, -0.5), aten.rsqrt.default(x), x**exponent)
    return aten.where.self(aten.eq.Scalar(exponent, 0.5), aten.sqrt.default(x), root)


# Formulas with their arguments in schema order. The foreach forms have the same order, element by element.
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": lambda x, other, alpha=1: x + _scaled(other, alpha),
    "sub": lambda x, other, alpha=1: x - _scaled(other, alpha),
    "rsub": lambda x, other, alpha=1: other - _scaled(x, alpha),
    "mul": lambda x, other: x * other,
    "div": lambda x, other: x / other,
    "lerp": _lerp,
    "addcmul": lambda x, a, b, value=1: x + _scaled(a, value) * b,
    "addcdiv": lambda x, a, b, value=1: x + _scaled(a, value) / b,
    "remainder": lambda x, other: aten.remainder.Tensor(x, other),
    "fmod": lambda x, other: aten.fmod.Tensor(x, other),
    "leaky_relu": lambda x, slope=0.01: aten.where.self(x > 0, x, x * slope),
    "leaky_relu_backward": lambda grad, x, slope, _: aten.where.self(x > 0, grad, grad * slope),
    "threshold": _threshold,
    "full": _full,
    "scalar_tensor": lambda value: value,
    "pow": lambda x, exponent: x**exponent,
    "fill": lambda x, value: aten.fill.Tensor(x, value),
    "masked_fill": lambda x, mask, value: aten.where.self(mask, value, x),
    "full_like": lambda x, value: aten.fill.Tensor(x, value),
    "clamp": _clamp,
    "hardtanh": lambda x, low=-1, high=1: _clamp(x, low, high),
    "clamp_min": _clamp_min,
    "clamp_max": _clamp_max,
    "maximum": _clamp_min,
    "minimum": _clamp_max,
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


# Operators whose kernels for complex tensors treat a float simply as a complex number.
_COMPLEX = frozenset(("add", "sub", "rsub", "mul", "div", "fill", "full", "full_like", "scalar_tensor"))

# Options that the target's meta already determines.
_GEOMETRY_OPTIONS = frozenset(("dtype", "layout", "device", "pin_memory", "memory_format"))


def _formula(node: Node) -> Callable[..., Any]:
    name = _base_name(node)
    target = _targets(node)[0]
    if name == "lerp" and target is not None and _compute_dtype(target.meta.dtype) is not target.meta.dtype:
        return _lerp_reduced
    # in a power, either the base or the exponent is the tensor
    return _power if name == "pow" and isinstance(node.args[0], Value | tuple) else _FORMULAS[name]


def _base_name(node: Node) -> str:
    """`add` for `add.Tensor`, `add_.Tensor`, `_foreach_add_.Scalar`."""
    name = function_schema(node.op).name.removeprefix("aten::")
    return name.removeprefix("_foreach_").removesuffix("_")


def can_promote(node: Node) -> bool:
    """Whether the node's floats can become inputs of a compiled graph."""
    if is_fused_optimizer(node.op):
        return can_write_out(node)
    if not function_schema(node.op).name.startswith("aten::") or _base_name(node) not in _FORMULAS:
        return False
    if any(name not in ("alpha", "value") and name not in _GEOMETRY_OPTIONS for name, _ in node.kwargs):
        return False  # `out`, `rounding_mode`
    return all(v is None or _takes(node, v.meta.dtype) for v in _targets(node))


def _takes(node: Node, dtype: torch.dtype) -> bool:
    """Whether the node's formula is right for a result of `dtype`."""
    return dtype.is_floating_point or _is_comparison(node) or (dtype.is_complex and _base_name(node) in _COMPLEX)


def _is_comparison(node: Node) -> bool:
    return _base_name(node) in _COMPARISONS


def _targets(node: Node) -> tuple[Value | None, ...]:
    """The values that a rule computes: an in-place foreach returns nothing and writes to its first list."""
    return node.mutates if node.mutates else node.outputs


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which CPU and CUDA kernels compute (at::opmath_type)."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def emit_promoted(
    node: Node, read: Callable[[Arg], Any], scalar: Callable[[int], Any], cast: Callable[[Any, torch.dtype], Any]
) -> list[Any]:
    """Emit the node's formula. Returns one result per target, in the target's dtype; None for an unchanged target.

    `read` gives an operand, `scalar` a promoted constant as a 0-d float64 tensor, `cast` changes a dtype. All three
    work on `torch.fx.Proxy` objects, so that a formula reads as arithmetic.
    """
    if is_fused_optimizer(node.op):
        return write_out(node, read, scalar, cast)
    formula = _formula(node)
    foreach = function_schema(node.op).name.startswith("aten::_foreach_")
    results = []
    for place, target in enumerate(_targets(node)):
        assert target is not None
        dtype = _compute_dtype(target.meta.dtype)
        if _is_comparison(node):
            operand = node.inputs()[0].meta.dtype
            exact = operand.is_floating_point or operand.is_complex
            dtype = operand if exact else torch.get_default_dtype()

        def operand_of(arg: Arg, place: int = place, dtype: torch.dtype = dtype) -> Any:
            if foreach and isinstance(arg, tuple):
                arg = arg[place]
            if isinstance(arg, Constant):
                return cast(scalar(arg.index), dtype)
            if isinstance(arg, Value):
                keep = arg.meta.dtype in (dtype, torch.bool)
                return read(arg) if keep else cast(read(arg), dtype)
            return arg

        args = [operand_of(arg) for arg in node.args]
        kwargs = {name: operand_of(arg) for name, arg in node.kwargs if name not in _GEOMETRY_OPTIONS}
        result = formula(*args, **kwargs)
        final = target.meta.dtype
        results.append(result if final in (dtype, torch.bool) else cast(result, final))
    return results
