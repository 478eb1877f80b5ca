"""Everything this package changes in PyTorch, in one place. Checked on 2.13.

Each function says what it changes and why no public way does. They are called once, by `device.install`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.optim.optimizer
import torch.optim.swa_utils
import torch.utils._foreach_utils as foreach_utils
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from lazy_backend.errors import DeviceError, LazyBackendError
from lazy_backend.tensor import LazyTensor


def refuse_second_backend() -> None:
    """The C++ Lazy Tensor Core registers kernels on the same dispatch key: refuse to stand beside it."""
    # an internal query; torch.library has no public one
    if torch._C._dispatch_has_kernel_for_dispatch_key("aten::empty.memory_format", "Lazy"):
        raise DeviceError(
            "torch._lazy.ts_backend.init() was called before: it and lazy_backend cannot share the lazy device\n"
            "  remove the call, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 and do not import lazy_backend"
        )

    def refuse() -> None:
        raise DeviceError(
            "torch._lazy.ts_backend.init() cannot be used with lazy_backend: both would own the lazy device\n"
            "  remove the call: device='lazy' works without it"
        )

    torch._C._lazy_ts_backend._init = refuse


def redirect_torch_lazy(mark_step: Callable[..., None], wait_device_ops: Callable[..., None]) -> None:
    """`torch._lazy.mark_step()` and `wait_device_ops()` reach this package: PyTorch's own test helpers call them."""
    torch._C._lazy._mark_step = lambda device, devices, wait: mark_step(device, wait=wait)
    torch._C._lazy._wait_device_ops = lambda devices: wait_device_ops(devices)
    torch._C._lazy._get_default_device_type = lambda: "lazy"


def support_foreach() -> None:
    """Let torch.optim and clip_grad_norm_ choose their foreach forms for lazy tensors: one call per list."""
    foreach_utils._foreach_supported_types.append(LazyTensor)
    # torch.optim deletes the attribute `optimizer` that importing the module set
    optimizer: Any = sys.modules["torch.optim.optimizer"]
    optimizer._foreach_supported_types.append(LazyTensor)
    original = foreach_utils._get_foreach_kernels_supported_devices

    def supported() -> list[str]:
        return [*original(), "lazy"]

    modules: tuple[Any, ...] = (foreach_utils, optimizer, torch.optim.swa_utils)
    for module in modules:
        module._get_foreach_kernels_supported_devices = supported


def finish_before_default_dtype_changes(finish: Callable[[], None]) -> None:
    """Run what was recorded under the old default dtype before it changes: kernels ask for it when they run."""
    original = torch.set_default_dtype

    @functools.wraps(original)
    def set_default_dtype(d: torch.dtype) -> None:
        if d is not torch.get_default_dtype():
            finish()
        original(d)

    torch.set_default_dtype = set_default_dtype


def keep_parameters_when_moved() -> None:
    """`module.cpu()` keeps a lazy parameter's identity, as it does a CUDA parameter's: optimizers and ties stay.

    `Module._apply` swaps parameters in place only under a global flag, which other modules should not see; so it is set
    while a module with lazy parameters moves. The other direction needs nothing: see `LazyTensor.__tensor_flatten__`.
    """
    original = torch.nn.Module._apply

    @functools.wraps(original)
    def _apply(self: torch.nn.Module, fn: Callable[..., Any], recurse: bool = True) -> torch.nn.Module:
        _refuse_uninitialized(self, fn, recurse)
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        if swaps or not any(isinstance(parameter, LazyTensor) for parameter in self.parameters(recurse)):
            return original(self, fn, recurse)
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return original(self, fn, recurse)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    torch.nn.Module._apply = _apply  # type: ignore[method-assign]


def _refuse_uninitialized(module: torch.nn.Module, fn: Callable[..., Any], recurse: bool) -> None:
    """`LazyLinear` and its like change the class of their parameters later, which a swapped parameter cannot."""
    if any(isinstance(p, UninitializedTensorMixin) for p in module.parameters(recurse)) and isinstance(
        fn(torch.empty(0)), LazyTensor
    ):
        raise LazyBackendError(
            f"{type(module).__name__} has parameters without a shape yet and cannot be moved to the lazy device\n"
            "  call it once on the CPU, with a batch of the right size, then move it"
        )
