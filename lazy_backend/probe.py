"""Errors that eager would raise, at the line that makes them.

In: a call seen for the first time. Out: eager's own exception, with eager's text, or nothing.
Fake kernels check shapes but not everything else, and word their errors in their own way. So what fails there is tried
on ones (zero divides badly), and operators whose checks do not depend on values are tried on tiny operands of the same
dtypes and layout. Costs 10 µs per unseen call and nothing afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lazy_backend.lowering.ir import TensorMeta, empty_of
from lazy_backend.thread_state import clean_thread_state

# Elements of all operands together, up to which a failed call is tried on ones of full size.
_MAX_NUMEL = 1 << 22

# Beside the pointwise operators, those that check dtypes or emptiness in their kernels, never values.
_CHECKING = frozenset(
    f"aten::{name}"
    for name in (
        "mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "addr",
        "rsub", "max", "min", "amax", "amin", "aminmax", "argmax", "argmin", "linear",
    )
)  # fmt: skip


def checks_more_than_its_fake(op: torch._ops.OpOverload) -> bool:
    return torch.Tag.pointwise in op.tags or op._schema.name in _CHECKING


def try_tiny(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], read: Reader) -> Any:
    """Call `op` on operands with every size above 2 made 2. Returns what eager returns, raises what eager raises."""
    return _call(op, args, kwargs, lambda leaf: _operand(read(leaf), _tiny))


def try_ones(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], read: Reader) -> bool:
    """Call `op` on ones of the operands' geometry, unless they are large: then False. Raises what eager raises."""
    metas = [item for leaf in _leaves((*args, *kwargs.values())) if isinstance(item := read(leaf), tuple)]
    small = sum(meta.numel for meta, _ in metas) <= _MAX_NUMEL
    if small:
        _call(op, args, kwargs, lambda leaf: _operand(read(leaf), lambda meta, device: empty_of(meta, device).fill_(1)))
    return small


# Gives (meta, backing device) for a tensor, the argument itself otherwise.
Reader = Callable[[Any], Any]


def _operand(item: Any, make: Callable[[TensorMeta, torch.device], torch.Tensor]) -> Any:
    return make(*item) if isinstance(item, tuple) else item


def _tiny(meta: TensorMeta, device: torch.device) -> torch.Tensor:
    shape = [min(size, 2) for size in meta.shape]
    tiny = torch.ones([1 if step == 0 else n for n, step in zip(shape, meta.stride, strict=True)], dtype=meta.dtype)
    # dimensions of stride 0 keep it: writing through an expanded tensor is an error
    return tiny.to(device).expand(shape)


def _call(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], convert: Callable[[Any], Any]
) -> Any:
    with clean_thread_state():
        return op(*(_map(convert, arg) for arg in args), **{name: _map(convert, arg) for name, arg in kwargs.items()})


def _map(convert: Callable[[Any], Any], arg: Any) -> Any:
    return [_map(convert, item) for item in arg] if isinstance(arg, list | tuple) else convert(arg)


def _leaves(arg: Any) -> list[Any]:
    return [leaf for item in arg for leaf in _leaves(item)] if isinstance(arg, list | tuple) else [arg]
