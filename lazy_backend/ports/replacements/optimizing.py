"""Optimizers: the lists of devices and types that `torch.optim` keeps, and steps that a GradScaler skips.

In: the class of lazy tensors. Out: `foreach`, `fused` and `capturable` optimizers of lazy parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.optim.optimizer
import torch.optim.swa_utils
import torch.utils._foreach_utils as foreach_utils

from lazy_backend.ports.table import CAPTURABLE, FOREACH, FUSED, GRAD_SCALER


def _optimizer_module() -> Any:
    # torch.optim deletes the attribute `optimizer` that importing the module set
    return sys.modules["torch.optim.optimizer"]


def support_foreach(kind: type) -> None:
    """Let torch.optim and clip_grad_norm_ use foreach for tensors of `kind`: one call per list."""
    if not FOREACH.fits():
        return
    optimizer = _optimizer_module()
    for module in (foreach_utils, optimizer):
        module._foreach_supported_types.append(kind)
    original = foreach_utils._get_foreach_kernels_supported_devices

    def supported() -> list[str]:
        return [*original(), "lazy"]

    for module in (foreach_utils, optimizer, torch.optim.swa_utils):
        FOREACH.put(module, "_get_foreach_kernels_supported_devices", supported)


def support_fused() -> None:
    """Let torch.optim take `fused=True`: the backing device has the kernels, and the call is recorded as it is."""
    if FUSED.fits():
        optimizer = _optimizer_module()
        original = optimizer._get_fused_kernels_supported_devices
        # torch.optim.optimizer imports the function by name
        FUSED.put(optimizer, "_get_fused_kernels_supported_devices", lambda: [*original(), "lazy"])


def support_capturable() -> None:
    """Let torch.optim take `capturable=True`: step counts are then tensors on the device, which a replay advances."""
    if not CAPTURABLE.fits():
        return
    original = _optimizer_module()._get_capturable_supported_devices

    def supported(supports_xla: bool = True) -> list[str]:
        # torch.distributed.optim compiles this with TorchScript, which has no [*names, "lazy"]
        names = original(supports_xla)
        names.append("lazy")
        return names

    # every optimizer's module imports the function by name
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.optim.") and hasattr(module, "_get_capturable_supported_devices"):
            CAPTURABLE.put(module, "_get_capturable_supported_devices", supported)


def support_grad_scaler(maybe_step: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let `torch.amp.GradScaler` skip a step without reading whether it must: it has no extension point for that."""
    if GRAD_SCALER.fits():
        scaler: Any = torch.amp.GradScaler
        GRAD_SCALER.put(scaler, "_maybe_opt_step", maybe_step(scaler._maybe_opt_step))
