"""Fused optimizers written as arithmetic, and an operator that undoes a step.

In: a call of one of the kernels behind `torch.optim`'s `fused=True`. Out: the new values of the tensors it writes.
Written as arithmetic, a call needs no fake kernel (half of these kernels have none), its floats can be inputs, and a
compiler fuses the update with the computation of the gradients. The formulas and their order of operations are those of
Fused{Adam,SGD,Adagrad}Kernel.cpp in aten/src/ATen/native/cpu. As in those kernels, numbers are computed in float64 and
rounded once to the type the kernel computes in.

`undo_if` is for GradScaler, which skips the steps of an optimizer whose gradients are infinite or NaN: whether they are
is known only when the graph runs. It is one call for all tensors of an optimizer: recorded one by one, two operators
for each would cost more than the read that they avoid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lazy_backend.lowering.ir.graph import Constant, Node, Value
from lazy_backend.ports.dispatcher import OpOverload, function_schema

aten = torch.ops.aten


def _undo_if(tensors: Sequence[torch.Tensor], before: Sequence[torch.Tensor], flag: torch.Tensor) -> None:
    undone = flag != 0
    for tensor, value in zip(tensors, before, strict=True):
        tensor.copy_(torch.where(undone, value, tensor))


def _define_undo() -> tuple[torch.library.Library, OpOverload]:
    library = torch.library.Library("lazy_backend", "FRAGMENT")
    library.define("undo_if_(Tensor(a!)[] tensors, Tensor[] before, Tensor flag) -> ()")
    library.impl("undo_if_", _undo_if, "CompositeExplicitAutograd")
    return library, torch.ops.lazy_backend.undo_if_.default


# Each of `tensors` gets its value `before` if `flag` is not zero. The library is kept: without it the operator is gone.
_library, undo_if = _define_undo()


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The scalar arguments of one call, by name: Python floats or 0-d float64 tensors."""

    of: Callable[[str], Any]
    cast: Callable[[Any, torch.dtype], Any]
    dtype: torch.dtype  # the type the kernel computes in

    def low(self, number: Any) -> Any:
        """`number` in the type the kernel computes in."""
        return self.cast(number, self.dtype)


def _decayed(numbers: _Numbers, grad: Any, param: Any) -> Any:
    """The gradient plus weight decay. A decay of zero adds nothing, even for an infinite weight."""
    decay = numbers.of("weight_decay")
    if isinstance(decay, float):
        return grad + param * decay if decay else grad
    return aten.where.self(decay != 0, grad + param * numbers.low(decay), grad)


def _lerp(start: Any, end: Any, weight: Any) -> Any:
    near_start = start + weight * (end - start)
    near_end = end - (end - start) * (1 - weight)
    if isinstance(weight, float):
        return near_start if abs(weight) < 0.5 else near_end
    return aten.where.self(abs(weight) < 0.5, near_start, near_end)


def _adam(numbers: _Numbers, flags: Mapping[str, Any], values: Sequence[Any], decoupled: bool = False) -> list[Any]:
    param, grad, mean, square, *rest, step = values
    lr, beta1, beta2 = (numbers.of(name) for name in ("lr", "beta1", "beta2"))
    if decoupled:
        param = param * numbers.low(1 - lr * numbers.of("weight_decay"))
    else:
        grad = _decayed(numbers, grad, param)
    mean = _lerp(mean, grad, numbers.low(1 - beta1))
    square = square * numbers.low(beta2) + numbers.low(1 - beta2) * grad * grad
    largest = [aten.maximum.default(rest[0], square)] if flags["amsgrad"] else rest
    root = aten.sqrt.default(largest[0] if flags["amsgrad"] else square)
    correction = numbers.low(aten.sqrt.default(1 - beta2**step))
    step_size = numbers.low(lr / (1 - beta1**step))
    param = param - step_size * mean / (root / correction + numbers.low(numbers.of("eps")))
    return [param, None, mean, square, *largest, None]


def _adamw(numbers: _Numbers, flags: Mapping[str, Any], values: Sequence[Any]) -> list[Any]:
    return _adam(numbers, flags, values, decoupled=True)


def _sgd(numbers: _Numbers, flags: Mapping[str, Any], values: Sequence[Any]) -> list[Any]:
    param, grad, *buffers = values
    grad = _decayed(numbers, grad, param)
    if buffers:
        momentum, fresh = numbers.low(numbers.of("momentum")), 1 - numbers.of("dampening")
        buffer = grad if flags["is_first_step"] else buffers[0] * momentum + grad * numbers.low(fresh)
        grad = grad + buffer * momentum if flags["nesterov"] else buffer
        buffers = [buffer]
    return [param - grad * numbers.low(numbers.of("lr")), None, *buffers]


def _adagrad(numbers: _Numbers, flags: Mapping[str, Any], values: Sequence[Any]) -> list[Any]:
    param, grad, total, step = values
    grad = _decayed(numbers, grad, param)
    rate = numbers.of("lr") / (1 + (step - 1) * numbers.of("lr_decay"))
    total = total + grad * grad
    root = aten.sqrt.default(total) + numbers.low(numbers.of("eps"))
    return [param - numbers.low(rate) * grad / root, None, total, None]


_RULES: dict[str, Callable[[_Numbers, Mapping[str, Any], Sequence[Any]], list[Any]]] = {
    "aten::_fused_adam_": _adam,
    "aten::_fused_adamw_": _adamw,
    "aten::_fused_sgd_": _sgd,
    "aten::_fused_adagrad_": _adagrad,
}


def is_fused_optimizer(op: OpOverload) -> bool:
    """Whether `op` updates lists of parameters in place, with their state, and returns nothing."""
    return function_schema(op).name in _RULES or op is undo_if


def _lists(node: Node) -> dict[str, tuple[Value, ...]]:
    """The non-empty tensor lists among the operands, by argument name."""
    names = [argument.name for argument in function_schema(node.op).arguments]
    return {name: arg for name, arg in zip(names, node.args, strict=False) if arg}


def can_write_out(node: Node) -> bool:
    """Whether the node is a fused optimizer on operands that its kernel accepts. Other calls are left to the kernel."""
    if node.op is undo_if or not is_fused_optimizer(node.op):
        return node.op is undo_if
    lists = _lists(node)
    steps = lists.pop("state_steps", ())
    params = lists["self"]
    return (
        all(value.meta.dtype.is_floating_point for value in params)
        and all(len(values) == len(params) for values in (*lists.values(), *([steps] if steps else [])))
        and all(v.meta.shape == p.meta.shape for values in lists.values() for p, v in zip(params, values, strict=True))
        and all(v.meta.dtype == p.meta.dtype for values in lists.values() for p, v in zip(params, values, strict=True))
        and all(step.meta.numel == 1 for step in steps)
    )


def write_out(
    node: Node, read: Callable[[Value], Any], scalar: Callable[[int], Any], cast: Callable[[Any, torch.dtype], Any]
) -> list[Any]:
    """One result per value that the node mutates, in the value's dtype; None for a value that stays as it is.

    `read`, `scalar` and `cast` are as in `scalars.emit_promoted`.
    """
    if node.op is undo_if:
        return _undone(node, read)
    kwargs = dict(node.kwargs)

    def number(name: str) -> Any:
        arg = kwargs[name]
        if isinstance(arg, Constant):
            return scalar(arg.index)
        return _single(arg, read, cast) if isinstance(arg, Value) else arg

    lists = _lists(node)
    results: dict[Value, Any] = {}
    for values in zip(*lists.values(), strict=True):
        own = values[0].meta.dtype
        dtype = torch.float32 if own in (torch.float16, torch.bfloat16) else own
        numbers = _Numbers(number, cast, dtype)
        before = [
            _single(value, read, cast) if name == "state_steps" else _cast(read(value), value.meta.dtype, dtype, cast)
            for name, value in zip(lists, values, strict=True)
        ]
        grad = unscaled = before[1]
        if kwargs.get("grad_scale") is not None:
            grad = unscaled = grad / numbers.low(number("grad_scale"))
        if kwargs["maximize"]:
            grad = -grad
        after = _RULES[function_schema(node.op).name](numbers, kwargs, [before[0], grad, *before[2:]])
        if unscaled is not before[1]:
            after[1] = unscaled
        for value, old, new in zip(values, before, after, strict=True):
            if new is not None:
                if kwargs.get("found_inf") is not None:  # if `found_inf` is 1, nothing is written
                    new = aten.where.self(number("found_inf") == 1, old, new)
                results[value] = _cast(new, dtype, own, cast)
    return [results.get(value) for value in node.mutates]


def _undone(node: Node, read: Callable[[Value], Any]) -> list[Any]:
    tensors, before, flag = node.args
    assert isinstance(tensors, tuple)
    assert isinstance(before, tuple)
    assert isinstance(flag, Value)
    undone = aten.ne.Scalar(read(flag), 0)
    results = {
        tensor: aten.where.self(undone, read(value), read(tensor))  # type: ignore[arg-type]
        for tensor, value in zip(tensors, before, strict=True)
    }
    return [results[value] for value in node.mutates]


def _single(value: Value, read: Callable[[Value], Any], cast: Callable[[Any, torch.dtype], Any]) -> Any:
    """A one-element tensor as a 0-d float64 tensor."""
    number = cast(read(value), torch.float64)
    return aten.reshape.default(number, []) if value.meta.shape else number


def _cast(value: Any, dtype: torch.dtype, to: torch.dtype, cast: Callable[[Any, torch.dtype], Any]) -> Any:
    return value if dtype == to else cast(value, to)
