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
_ts_backend: Any = getattr(torch._C, "_lazy_ts_backend", None)
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
        LAZY_TENSOR_CORE.put(_ts_backend, "_init", init)


class CoreReplacement:
    """Functions of the two C modules of `torch._lazy`, replaced until `uninstall`, or to the end of a `with` block."""

    def __init__(self, core: dict[str, Callable[..., Any]], ts_backend: dict[str, Callable[..., Any]]) -> None:
        places = [(_core, core), (_ts_backend, ts_backend)] if LAZY_TENSOR_CORE.fits() else []
        functions = {(module, name): function for module, named in places for name, function in named.items()}
        self._before = {(module, name): getattr(module, name) for module, name in functions if hasattr(module, name)}
        for module, name in self._before:
            setattr(module, name, functions[module, name])

    def uninstall(self) -> None:
        """Restore the original functions of `torch._lazy`. A second call does nothing."""
        before, self._before = self._before, {}
        for (module, name), function in before.items():
            setattr(module, name, function)

    def is_installed(self) -> bool:
        return bool(self._before)

    def __enter__(self) -> CoreReplacement:
        return self

    def __exit__(self, *error: object) -> None:
        self.uninstall()


def redirect_torch_lazy(mark_step: Callable[..., None], wait_device_ops: Callable[..., None]) -> None:
    """Redirect `torch._lazy.mark_step()` and `wait_device_ops()`, which PyTorch's test helpers call, to ours."""
    if LAZY_TENSOR_CORE.fits():
        LAZY_TENSOR_CORE.put(_core, "_mark_step", mark_step)
        LAZY_TENSOR_CORE.put(_core, "_wait_device_ops", wait_device_ops)
        LAZY_TENSOR_CORE.put(_core, "_get_default_device_type", lambda: "lazy")
