"""The C++ Lazy Tensor Core beside this package: refused, as both would own the device "lazy".

In: calls of `torch._lazy`. Out: `DeviceError`, or this package's own functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lazy_backend.errors import DeviceError
from lazy_backend.errors.tracebacks import hide_internals
from lazy_backend.ports.replacements import lazy_tensor_core


def check_no_second_backend() -> None:
    """Raise `DeviceError` if the C++ Lazy Tensor Core is active: it registers kernels on the same dispatch key."""
    if lazy_tensor_core.is_core_active():
        raise DeviceError(
            "torch._lazy.ts_backend.init() was called before: it and lazy_backend cannot share the lazy device\n"
            "  remove the call, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 and do not import lazy_backend"
        )


def refuse_second_backend() -> None:
    """Make `torch._lazy.ts_backend.init()` raise `DeviceError`, unless `compat.torch_lazy.install` replaces it."""
    check_no_second_backend()

    def refuse() -> None:
        raise DeviceError(
            "torch._lazy.ts_backend.init() cannot be used with lazy_backend: both would own the lazy device\n"
            "  remove the call: device='lazy' works without it; or, for a program written for torch._lazy, call\n"
            "  lazy_backend.compat.torch_lazy.install() first"
        )

    lazy_tensor_core.replace_core_init(refuse)


def redirect_torch_lazy(mark_step: Callable[..., None], wait_device_ops: Callable[..., None]) -> None:
    """Redirect `torch._lazy.mark_step()` and `wait_device_ops()`, which PyTorch's test helpers call, to ours."""

    def mark(device: str, devices: Sequence[str], wait: bool) -> None:
        mark_step(device, wait=wait)

    lazy_tensor_core.redirect_torch_lazy(hide_internals(mark), hide_internals(wait_device_ops))
