"""Autocast's functions for the lazy device: what `torch.set_autocast_enabled("lazy", ...)` and others like it do.

In: calls of PyTorch's functions, which `compat` leads here. Out: the thread's state, and whether its calls are cast.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from lazy_backend.precision.autocast_state import AutocastState, autocast_state, dtype_on, is_enabled_on, set_enabled_on
from lazy_backend.precision.casts import custom_casts, install_casts
from lazy_backend.tensors.contexts import contexts

LAZY = "lazy"


def follow_blocks() -> None:
    """Let this thread's blocks take effect after one was entered or left."""
    if autocast_state.lead_operators():
        install_casts(contexts.backing_type())


def follow_backing_device() -> None:
    """Let blocks for the backing device count from now on: there will be lazy tensors."""
    AutocastState.has_device = True
    follow_blocks()


def is_available(original: Callable[[str], bool]) -> Callable[[str], bool]:
    return lambda device_type: device_type == LAZY or original(device_type)


def is_autocast_enabled(device_type: str | None = None) -> bool:
    """As `torch.is_autocast_enabled`; without a device type, for CUDA."""
    if device_type == LAZY:
        return autocast_state.is_enabled()
    return is_enabled_on() if device_type is None else is_enabled_on(device_type)


def set_autocast_enabled(*args: Any, **kwargs: Any) -> None:
    """As `torch.set_autocast_enabled`: of a device type, or with one argument, of CUDA."""
    if _device_type(args, kwargs) == LAZY:
        autocast_state.enabled = kwargs["enabled"] if "enabled" in kwargs else args[-1]
    else:
        set_enabled_on(*args, **kwargs)
    follow_blocks()


def get_autocast_dtype(device_type: str) -> torch.dtype:
    """As `torch.get_autocast_dtype`."""
    return autocast_state.lower_dtype() if device_type == LAZY else dtype_on(device_type)


def set_autocast_dtype(*args: Any, **kwargs: Any) -> None:
    """As `torch.set_autocast_dtype`."""
    if _device_type(args, kwargs) == LAZY:
        autocast_state.dtype = kwargs["dtype"] if "dtype" in kwargs else args[-1]
    else:
        torch._C.set_autocast_dtype(*args, **kwargs)


def clear_autocast_cache() -> None:
    """As `torch.clear_autocast_cache`, which the outermost block calls when it ends."""
    autocast_state.casts.clear()
    torch._C.clear_autocast_cache()


def remember_no_block(enter: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`torch.autocast.__enter__`, which remembers for `__exit__` that there was no block for "lazy", or which."""

    @functools.wraps(enter)
    def __enter__(self: torch.autocast) -> Any:
        before = autocast_state.enabled, autocast_state.dtype
        entered = enter(self)
        if self.device == LAZY:
            self.prev, self.prev_fastdtype = before  # type: ignore[assignment]
        return entered

    return __enter__


@contextmanager
def autocast_as(described: tuple[Any, ...] | None) -> Iterator[None]:
    """Within the block, autocast is as `thread_state.describe_autocast` described it, and keeps its own casts."""
    if described is None and not torch._C._is_any_autocast_enabled():
        yield
        return
    cache_enabled, *kinds = (True,) if described is None else described
    dtypes = dict(kinds)
    with ExitStack() as stack:
        for kind in ("cpu", "cuda", LAZY):  # the last block counts for lazy tensors
            block = torch.autocast(kind, dtypes.get(kind), enabled=kind in dtypes, cache_enabled=cache_enabled)
            stack.enter_context(block)
        stack.enter_context(autocast_state.own_casts())
        yield


def registered_by_name(original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.library.register_autocast`, which also takes "lazy", and tells us of rules for the backing device."""

    @functools.wraps(original)
    def register_autocast(op: Any, device_type: str, cast_inputs: torch.dtype, /, **options: Any) -> Any:
        if not isinstance(op, str | torch._ops.OpOverload):  # what `custom_op` returns has a method for it
            return op.register_autocast(device_type, cast_inputs)
        # internal, checked on 2.13
        custom_casts.add(torch._library.utils.lookup_op(op) if isinstance(op, str) else op, device_type, cast_inputs)
        return None if device_type == LAZY else original(op, device_type, cast_inputs, **options)

    return register_autocast


def registered_by_method(original: Callable[..., Any]) -> Callable[..., Any]:
    """The same for the method of what `torch.library.custom_op` returns."""

    @functools.wraps(original)
    def register_autocast(self: Any, device_type: str, cast_inputs: torch.dtype) -> Any:
        custom_casts.add(self._opoverload, device_type, cast_inputs)
        return None if device_type == LAZY else original(self, device_type, cast_inputs)

    return register_autocast


def _device_type(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return kwargs.get("device_type", args[0] if args else None)
