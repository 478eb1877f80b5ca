"""PyTorch's own Lazy Tensor Core, `torch._lazy`, whose device this package takes.

In: this package's `mark_step` and the like. Out: functions of `torch._lazy` that call them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._lazy  # PyTorch's test helpers use torch._lazy without importing it; the import takes 0.3 ms

from lazy_backend.ports.table import LAZY_TENSOR_CORE

_core: Any = getattr(torch._C, "_lazy", None)
# the original, kept before `redirect_torch_lazy` replaces the function
_default_device_type: Callable[[], str] | None = getattr(_core, "_get_default_device_type", None)


def is_core_active() -> bool:
    """Whether `torch._lazy.ts_backend.init()` was called, which registers kernels on the same dispatch key."""
    if _default_device_type is None:
        return False
    try:
        _default_device_type()
    except RuntimeError:  # "Lazy tensor backend not registered": there is no other way to ask
        return False
    return True


def replace_core_init(init: Callable[[], None]) -> None:
    """Have `torch._lazy.ts_backend.init()` call `init`."""
    if LAZY_TENSOR_CORE.fits():
        LAZY_TENSOR_CORE.put(torch._C._lazy_ts_backend, "_init", init)


def redirect_torch_lazy(mark_step: Callable[..., None], wait_device_ops: Callable[..., None]) -> None:
    """Redirect `torch._lazy.mark_step()` and `wait_device_ops()`, which PyTorch's test helpers call, to ours."""
    if LAZY_TENSOR_CORE.fits():
        LAZY_TENSOR_CORE.put(_core, "_mark_step", mark_step)
        LAZY_TENSOR_CORE.put(_core, "_wait_device_ops", wait_device_ops)
        LAZY_TENSOR_CORE.put(_core, "_get_default_device_type", lambda: "lazy")
