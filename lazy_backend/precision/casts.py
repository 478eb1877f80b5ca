"""Casts before operators: a kernel for each operator that autocast has a rule for.

In: calls of a thread with autocast on. Out: the same calls on other operands. Autograd follows the casts, as in eager:
they are recorded above it. Source: aten/src/ATen/autocast_mode.h, `WrapFunction_`, and `cached_cast`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lazy_backend.errors.sites import user_site
from lazy_backend.errors.tracebacks import hide_internals
from lazy_backend.lowering.devices.cast_lists import CastRule
from lazy_backend.ports.dispatcher import OpOverload, function_schema
from lazy_backend.ports.replacements.mixed_precision import AUTOCAST_KEY, without_autocast_key
from lazy_backend.ports.tensor_types import is_leaf, is_view
from lazy_backend.precision.autocast_state import autocast_state
from lazy_backend.precision.cast_rules import rules_for
from lazy_backend.tensors.contexts import contexts
from lazy_backend.tensors.sparse_tensor import LazySparseTensor
from lazy_backend.tensors.tensor import LazyTensor

aten = torch.ops.aten

Kernel = Callable[..., Any]

_LAZY = (LazyTensor, LazySparseTensor)
_library: list[torch.library.Library] = []


def install_casts(backing: str) -> None:
    """Register the kernels for the rules of the backing device. 10 ms, so it is done when autocast is first used."""
    if _library:
        return
    _library.append(torch.library.Library("aten", "IMPL"))
    _library.append(torch.library.Library("_", "IMPL"))
    _library[1].fallback(torch.library.fallthrough_kernel, AUTOCAST_KEY.name)
    for name, rule in rules_for(backing).items():
        packet, _, overload = name.partition(".")
        op = getattr(getattr(aten, packet), overload or "default")
        _library[0].impl(name, hide_internals(_below_autocast(_MAKERS[rule](op))), AUTOCAST_KEY.name)


def _below_autocast(kernel: Kernel) -> Kernel:
    """`kernel`, whose own calls are not cast again."""

    def call(*args: Any, **kwargs: Any) -> Any:
        outer, autocast_state.is_in_kernel = autocast_state.is_in_kernel, True
        try:
            with without_autocast_key():
                return kernel(*args, **kwargs)
        finally:
            autocast_state.is_in_kernel = outer

    return call


class CustomCasts:
    """Custom operators that were given a rule by `torch.library.register_autocast`."""

    def __init__(self) -> None:
        self._libraries: list[torch.library.Library] = []  # without them the kernels are gone
        self._dtypes: dict[OpOverload, dict[str, torch.dtype]] = {}  # operator -> device type -> dtype

    def add(self, op: OpOverload, device_type: str, dtype: torch.dtype) -> None:
        """Cast the lazy operands of `op` to `dtype`, if `device_type` is "lazy" or that of the backing device."""
        if op not in self._dtypes:
            self._dtypes[op] = {}
            library = torch.library.Library(op.namespace, "IMPL")
            name = function_schema(op).name.partition("::")[2]
            library.impl(name, hide_internals(self._kernel(op)), AUTOCAST_KEY.name)
            self._libraries.append(library)
        self._dtypes[op][device_type] = dtype

    def _kernel(self, op: OpOverload) -> Kernel:
        dtypes = self._dtypes[op]
        cast = _below_autocast(lambda dtype, *args, **kwargs: _call(op, args, kwargs, dtype))

        def kernel(*args: Any, **kwargs: Any) -> Any:
            dtype = dtypes.get("lazy") or dtypes.get(contexts.backing_type())
            if dtype is not None:
                return cast(dtype, *args, **kwargs)
            with without_autocast_key():
                return op(*args, **kwargs)

        return kernel


custom_casts = CustomCasts()


# ----- operands


def _is_eligible(arg: Any) -> bool:
    return isinstance(arg, _LAZY) and arg.is_floating_point() and arg.dtype != torch.float64


def _cast(arg: Any, dtype: torch.dtype) -> Any:
    if isinstance(arg, list | tuple):
        return [_cast(one, dtype) for one in arg]
    if not _is_eligible(arg) or arg.dtype == dtype:
        return arg
    is_weight = (
        arg.dtype == torch.float32
        and arg.requires_grad
        and is_leaf(arg)
        and not is_view(arg)
        and torch.is_autocast_cache_enabled()
        and not torch.is_inference_mode_enabled()  # its tensors could not serve a later use that wants gradients
        and dtype == autocast_state.lower_dtype()
    )
    if not is_weight:
        return aten._to_copy.default(arg, dtype=dtype)
    casts = autocast_state.casts
    known = casts.get(id(arg))
    if known is None:
        with torch.enable_grad():  # within no_grad too: the next use may want gradients
            known = casts[id(arg)] = arg, aten._to_copy.default(arg, dtype=dtype)
    return known[1]


def cast_to_lower(operands: Any) -> Any:
    """The same operands in the dtype of the autocast block, for kernels that are not registered here."""
    return _cast(operands, autocast_state.lower_dtype())


def _widest(args: Any, widest: torch.dtype) -> torch.dtype:
    """The dtype that operands are promoted to: float32 if there is one of it, otherwise that of the block."""
    for arg in args:
        if isinstance(arg, list | tuple):
            widest = _widest(arg, widest)
        elif _is_eligible(arg) and arg.dtype != widest:
            if torch.float32 not in (arg.dtype, widest):
                raise RuntimeError(
                    f"autocast cannot promote {arg.dtype} and {widest} to one dtype\n  at {user_site()}\n"
                    f"  convert the operand, or use torch.autocast with dtype={arg.dtype}"
                )
            widest = torch.float32
    return widest


# ----- rules


def _call(op: OpOverload, args: Any, kwargs: dict[str, Any], dtype: torch.dtype) -> Any:
    return op(*[_cast(arg, dtype) for arg in args], **{name: _cast(arg, dtype) for name, arg in kwargs.items()})


def _lower(op: OpOverload) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        return _call(op, args, kwargs, autocast_state.lower_dtype())

    return kernel


def _float32(op: OpOverload) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        return _call(op, args, kwargs, torch.float32)

    return kernel


def _widest_of(op: OpOverload) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = _widest((*args, *kwargs.values()), autocast_state.lower_dtype())
        return _call(op, args, kwargs, dtype)

    return kernel


def _float32_result(op: OpOverload) -> Kernel:
    """The kernel of an operator with an argument `dtype`, which is set unless the call sets it."""
    names = [argument.name for argument in function_schema(op).arguments if not argument.kwarg_only]
    place = names.index("dtype") if "dtype" in names else len(names)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = args[place] if place < len(args) else kwargs.get("dtype")
        if given is not None or not _is_eligible(args[0]):
            return op(*args, **kwargs)
        return op(*args[:place], *args[place + 1 :], **{**kwargs, "dtype": torch.float32})

    return kernel


# norm's overloads without an argument `dtype` -> those with one, and the defaults of the arguments these require
_NORMS: dict[OpOverload, tuple[OpOverload, tuple[Any, ...]]] = {
    aten.norm.Scalar: (aten.norm.ScalarOpt_dtype, (None, 2)),
    aten.norm.ScalarOpt_dim: (aten.norm.ScalarOpt_dim_dtype, (None, None, None, False)),
}


def _float32_norm(op: OpOverload) -> Kernel:
    with_dtype, defaults = _NORMS[op]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.float32 if _is_eligible(args[0]) else args[0].dtype
        return with_dtype(*args, *defaults[len(args) :], **kwargs, dtype=dtype)

    return kernel


def _refused(op: OpOverload) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(arg, _LAZY) for arg in args):
            return op(*args, **kwargs)
        raise RuntimeError(
            "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
            "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
            "In this case, combine the two layers using torch.nn.functional.binary_cross_entropy_with_logits\n"
            "or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are\n"
            "safe to autocast."
        )

    return kernel


_MAKERS: dict[CastRule, Callable[[OpOverload], Kernel]] = {
    CastRule.LOWER: _lower,
    CastRule.FLOAT32: _float32,
    CastRule.FLOAT32_RESULT: _float32_result,
    CastRule.FLOAT32_NORM: _float32_norm,
    CastRule.WIDEST: _widest_of,
    CastRule.REFUSED: _refused,
}
