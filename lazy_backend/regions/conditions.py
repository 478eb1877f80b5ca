"""Conditions under which a region is recorded as written, whatever is known about it.

In: the state of the thread. Out: why a jump would not do what running the body does, or None. 1 µs.
"""

from __future__ import annotations

import torch
from torch.nn.modules import module as torch_module

from lazy_backend.execution.sync import executor
from lazy_backend.settings import config
from lazy_backend.tensors.thread_state import has_python_modes

# internal, checked on 2.13: the hooks that `saved_tensors_hooks` installs, which act on what a body saves for backward
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks  # type: ignore[attr-defined]

_GLOBAL_HOOKS = (
    torch_module._global_forward_pre_hooks,
    torch_module._global_forward_hooks,
    torch_module._global_backward_pre_hooks,
    torch_module._global_backward_hooks,
)


def why_as_written() -> str | None:
    """Why a captured module or optimizer runs as written in the current state of the thread, or None."""
    if executor.rules.is_refusing():
        return "it is called in a captured function, whose program it is part of"
    if config.eager:
        return "config.eager is on"
    if has_python_modes():
        return "a mode is active: a dispatch or function mode, or a transform of torch.func"
    if _top_hooks(False) is not None:
        return "saved tensors have hooks, as in checkpointing"
    if torch.is_anomaly_enabled():
        return "autograd's anomaly detection is on"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode differentiation is on"
    if any(_GLOBAL_HOOKS):
        return "hooks of all modules are registered"
    return None
