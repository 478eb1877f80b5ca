"""Autocast: `torch.autocast` and the functions beside it, which know a list of devices that is compiled in.

In: what they do for the lazy device, from `precision.autocast`. Out: the same functions, which take "lazy".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.amp.autocast_mode
import torch.utils.checkpoint

from lazy_backend.ports.table import AUTOCAST, CASTS_OF_CUSTOM_FUNCTIONS, CASTS_OF_CUSTOM_OPERATORS, CHECKPOINTS

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]

# A key that no kernel of PyTorch uses, and the device it was meant for: see Note [How autocast reaches lazy tensors]
AUTOCAST_KEY: Any = getattr(torch._C.DispatchKey, "AutocastIPU", None)
_DEVICE_OF_KEY = "ipu"

# PyTorch's own functions, which know its own devices: the public ones of these names ask us about the lazy device
is_enabled_on = torch._C.is_autocast_enabled
set_enabled_on = torch._C.set_autocast_enabled
dtype_on = torch._C.get_autocast_dtype
set_dtype_on = torch._C.set_autocast_dtype
clear_cache = torch._C.clear_autocast_cache


def lead_operators(through: bool) -> None:
    """Lead this thread's operators through the kernels on `AUTOCAST_KEY`, or past them."""
    torch._C._dispatch_tls_set_dispatch_key_included(AUTOCAST_KEY, through)
    set_enabled_on(_DEVICE_OF_KEY, through)


def without_autocast_key() -> Any:
    """A block in which operators pass the kernels on `AUTOCAST_KEY`, as PyTorch's own kernels of autocast enter."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(AUTOCAST_KEY))


def support_autocast(
    functions: tuple[Callable[..., Any], ...], is_available: Wrap, entering: Wrap, leaving: Wrap
) -> None:
    """Let `torch.autocast` take the lazy device. Without a key of the dispatcher there is no public way.

    `functions`: what stands for those of the same names in `torch`.
    """
    if not AUTOCAST.fits():
        return
    for function in functions:
        if not function.__name__.startswith(("set_", "clear_")):
            # as `torch._dynamo.assume_constant_result` does: Dynamo guards autocast, and takes its answers as constant
            function._dynamo_marked_constant = True  # type: ignore[attr-defined]
        AUTOCAST.put(torch, function.__name__, function)
    AUTOCAST.put(torch._C, "_is_autocast_available", is_available(torch._C._is_autocast_available))
    block: Any = torch.amp.autocast_mode.autocast
    AUTOCAST.put(block, "__enter__", entering(block.__enter__))
    AUTOCAST.put(block, "__exit__", leaving(block.__exit__))


def support_checkpoints(restored: Wrap) -> None:
    """Have `torch.utils.checkpoint` tell blocks that it restores from those that the user enters."""
    if CHECKPOINTS.fits():
        checkpoint: Any = torch.utils.checkpoint
        CHECKPOINTS.put(checkpoint, "_get_autocast_kwargs", restored(checkpoint._get_autocast_kwargs))


def support_custom_functions(also_for_lazy: Wrap, cast_as_backing: Wrap) -> None:
    """Have `custom_fwd` and `custom_bwd` cast lazy tensors where they cast those of the backing device."""
    if not CASTS_OF_CUSTOM_FUNCTIONS.fits():
        return
    modes: Any = torch.amp.autocast_mode
    for name in ("custom_fwd", "custom_bwd"):
        made = also_for_lazy(getattr(modes, name))
        for module in (modes, torch.amp):
            CASTS_OF_CUSTOM_FUNCTIONS.put(module, name, made)
    # functions that were decorated before this package was loaded
    CASTS_OF_CUSTOM_FUNCTIONS.put(modes, "_cast", cast_as_backing(modes._cast))


def support_custom_operators(
    add: Callable[[Any, str, torch.dtype], None], by_name: Wrap, by_method: Wrap, cast_as_backing: Wrap
) -> None:
    """Have rules from `register_autocast` count for lazy tensors, too; `add` takes those that were made before.

    A rule that was registered by the name of an operator before this package was loaded leaves no trace.
    """
    if not CASTS_OF_CUSTOM_OPERATORS.fits():
        return
    library: Any = torch.library
    put = CASTS_OF_CUSTOM_OPERATORS.put
    put(library, "register_autocast", by_name(library.register_autocast))
    put(library.CustomOpDef, "register_autocast", by_method(library.CustomOpDef.register_autocast))
    for caster in (library, torch._library.custom_ops):
        put(caster, "_cast", cast_as_backing(caster._cast))
    for definition in list(torch._library.custom_ops.OPDEFS.values()):
        for kind, dtype in definition._autocast_dtype.items():
            if dtype is not None:
                add(definition._opoverload, kind, dtype)


def operator_of(op: Any) -> Any:
    """The operator that a name such as "ns::f" or an overload stands for; None for what has a method of its own."""
    if not isinstance(op, str | torch._ops.OpOverload):
        return None
    return torch._library.utils.lookup_op(op) if isinstance(op, str) else op


def overload_of(definition: Any) -> Any:
    """The overload of what `torch.library.custom_op` returns."""
    return definition._opoverload


def cast_kernels(key: str) -> set[str]:
    """The operators, as "add.Tensor", that PyTorch or a device's package casts on a key, as "AutocastCPU". 0.4 ms."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}
