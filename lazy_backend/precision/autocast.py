"""Autocast's functions for the lazy device: what `torch.set_autocast_enabled("lazy", ...)` and others like it do.

In: calls of PyTorch's functions, which `compat` leads here. Out: the thread's state, and whether its calls are cast.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from lazy_backend.lowering.devices.registration import backing_devices
from lazy_backend.ports.replacements.mixed_precision import (
    clear_cache,
    dtype_on,
    is_enabled_on,
    operator_of,
    overload_of,
    set_dtype_on,
    set_enabled_on,
)
from lazy_backend.ports.table import AUTOCAST
from lazy_backend.ports.thread_modes import is_any_autocast_enabled
from lazy_backend.precision.autocast_state import AutocastState, autocast_state
from lazy_backend.precision.casts import custom_casts, install_casts
from lazy_backend.tensors.contexts import contexts

LAZY = "lazy"


def follow_blocks() -> None:
    """Let this thread's blocks take effect after one was entered or left."""
    if autocast_state.lead_operators():
        install_casts(contexts.backing_type())


def follow_backing_device() -> None:
    """Let blocks for the backing device count from now on: there will be lazy tensors."""
    AutocastState.has_device = AUTOCAST.fits()
    if AutocastState.has_device:
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
        set_enabled_on(*[bool(arg) if isinstance(arg, _Restored) else arg for arg in args], **kwargs)
    follow_blocks()


def get_autocast_dtype(device_type: str) -> torch.dtype:
    """As `torch.get_autocast_dtype`."""
    return autocast_state.lower_dtype() if device_type == LAZY else dtype_on(device_type)


def set_autocast_dtype(*args: Any, **kwargs: Any) -> None:
    """As `torch.set_autocast_dtype`."""
    if _device_type(args, kwargs) == LAZY:
        autocast_state.dtype = kwargs["dtype"] if "dtype" in kwargs else args[-1]
    else:
        set_dtype_on(*args, **kwargs)


def clear_autocast_cache() -> None:
    """As `torch.clear_autocast_cache`, which the outermost block calls when it ends."""
    autocast_state.casts.clear()
    clear_cache()


# What stands for PyTorch's functions of these names.
FUNCTIONS: tuple[Callable[..., Any], ...] = (
    is_autocast_enabled,
    set_autocast_enabled,
    get_autocast_dtype,
    set_autocast_dtype,
    clear_autocast_cache,
)


def entering(enter: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`torch.autocast.__enter__`, which remembers what was for lazy tensors. See Note [Which autocast counts]."""

    @functools.wraps(enter)
    def __enter__(self: Any) -> Any:
        before = autocast_state.enabled, autocast_state.dtype
        counts = before[0] is not None and self.device != LAZY and _changes_backing(self)
        entered = enter(self)
        if self.device == LAZY:
            self.prev, self.prev_fastdtype = before  # there may have been no block for "lazy"
            return entered
        if counts:
            autocast_state.enabled = autocast_state.dtype = None
            follow_blocks()
        # one for each time it is entered: the same block may be entered again within itself
        self._lazy_blocks_outside = [*getattr(self, "_lazy_blocks_outside", ()), before if counts else None]
        return entered

    return __enter__


def leaving(leave: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.autocast.__exit__`, which restores what was for lazy tensors."""

    @functools.wraps(leave)
    def __exit__(self: Any, *error: Any) -> Any:
        try:
            return leave(self, *error)
        finally:
            if self.device != LAZY and getattr(self, "_lazy_blocks_outside", None):
                outside = self._lazy_blocks_outside.pop()
                if outside is not None:
                    autocast_state.enabled, autocast_state.dtype = outside
                    follow_blocks()

    return __exit__


class _Restored:
    """Whether a block is on that restores what there was for the CPU, beside one that restores it for lazy tensors."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled

    def __bool__(self) -> bool:
        return self._enabled


def restored_by_checkpoint(original: Callable[[str], Any]) -> Callable[[str], Any]:
    """What `torch.utils.checkpoint` keeps of the blocks around it, to enter them again."""

    @functools.wraps(original)
    def _get_autocast_kwargs(*args: Any, **kwargs: Any) -> Any:
        of_device, of_cpu = original(*args, **kwargs)
        if _device_type(args, kwargs) == LAZY:
            of_cpu["enabled"] = _Restored(of_cpu["enabled"])
        return of_device, of_cpu

    return _get_autocast_kwargs


def _changes_backing(block: Any) -> bool:
    """Whether a block that is about to be entered is for the backing device, and changes what counts for it."""
    backing = contexts.backing_type()
    if block.device != backing or isinstance(block._enabled, _Restored):
        return False
    is_on = is_enabled_on(backing)
    return bool(block._enabled) != is_on or (is_on and block.fast_dtype != dtype_on(backing))


def _counts_as_lazy(value: Any, device_type: str) -> bool:
    """Whether a tensor is lazy, and code that names `device_type` means it too."""
    is_lazy = isinstance(value, torch.Tensor) and value.device.type == LAZY
    return is_lazy and device_type == contexts.backing_type()


def cast_as_backing(cast: Callable[..., Any]) -> Callable[..., Any]:
    """What casts the operands of a kernel from `register_autocast` for a device type. It calls itself."""

    @functools.wraps(cast)
    def _cast(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        return cast(value, LAZY if _counts_as_lazy(value, device_type) else device_type, dtype)

    return _cast


def also_for_lazy(decorator: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.amp.custom_fwd` and `custom_bwd`: for the backing device, they count for lazy tensors."""

    @functools.wraps(decorator)
    def decorate(function: Any = None, *, device_type: str, **options: Any) -> Any:
        if function is None:
            return functools.partial(decorate, device_type=device_type, **options)
        plain = decorator(function, device_type=device_type, **options)
        of_lazy = decorator(function, device_type=LAZY, **options) if isinstance(device_type, str) else plain

        @functools.wraps(plain)
        def call(ctx: Any, *args: Any, **kwargs: Any) -> Any:
            is_lazy = any(_counts_as_lazy(one, device_type) for one in (*args, *kwargs.values()))
            return (of_lazy if is_lazy else plain)(ctx, *args, **kwargs)

        return call

    return decorate


@contextmanager
def autocast_as(described: tuple[Any, ...] | None) -> Iterator[None]:
    """Within the block, autocast is as `thread_state.describe_autocast` described it, and keeps its own casts."""
    if described is None and not is_any_autocast_enabled():
        yield
        return
    cache_enabled, *kinds = (True,) if described is None else described
    dtypes = dict(kinds)
    with ExitStack() as stack:
        for kind in (*backing_devices, LAZY):  # the last block counts for lazy tensors
            if kind not in dtypes and kind != LAZY and not is_enabled_on(kind):
                continue
            block = torch.autocast(kind, dtypes.get(kind), enabled=kind in dtypes, cache_enabled=cache_enabled)
            stack.enter_context(block)
        stack.enter_context(autocast_state.own_casts())
        yield


def registered_by_name(original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.library.register_autocast`, which also takes "lazy", and tells us of rules for the backing device."""

    @functools.wraps(original)
    def register_autocast(op: Any, device_type: str, cast_inputs: torch.dtype, /, **options: Any) -> Any:
        operator = operator_of(op)
        if operator is None:
            return op.register_autocast(device_type, cast_inputs)
        custom_casts.add(operator, device_type, cast_inputs)
        return None if device_type == LAZY else original(op, device_type, cast_inputs, **options)

    return register_autocast


def registered_by_method(original: Callable[..., Any]) -> Callable[..., Any]:
    """The same for the method of what `torch.library.custom_op` returns."""

    @functools.wraps(original)
    def register_autocast(self: Any, device_type: str, cast_inputs: torch.dtype) -> Any:
        custom_casts.add(overload_of(self), device_type, cast_inputs)
        return None if device_type == LAZY else original(self, device_type, cast_inputs)

    return register_autocast


def _device_type(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return kwargs.get("device_type", args[0] if args else None)
