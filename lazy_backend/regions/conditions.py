"""Conditions under which a region is recorded as written, whatever is known about it.

In: the state of the thread. Out: why a jump would not do what running the body does, or None. 1 µs.
"""

from __future__ import annotations

import torch

from lazy_backend.execution.sync import executor
from lazy_backend.ports.autograd_engine import forward_level, hooks_of_saved
from lazy_backend.ports.hooks import HOOKS_OF_ALL_MODULES
from lazy_backend.settings import config
from lazy_backend.tensors.thread_state import has_python_modes


def why_as_written(is_asked: bool) -> str | None:
    """Why a captured module or optimizer runs as written in the current state of the thread, or None.

    `is_asked`: whether the user captured it. A trainer's may run at once. See Note [Stepping aside].
    """
    if is_asked:
        executor.aside.record_always()
    elif executor.aside.is_on():
        return "calls run at once, as recording them takes longer"
    if executor.rules.is_refusing():
        return "it is called in a captured function, whose program it is part of"
    if config.eager:
        return "config.eager is on"
    if has_python_modes():
        return "a mode is active: a dispatch or function mode, or a transform of torch.func"
    if hooks_of_saved(False) is not None:
        return "saved tensors have hooks, as in checkpointing"
    if torch.is_anomaly_enabled():
        return "autograd's anomaly detection is on"
    if forward_level() >= 0:
        return "forward-mode differentiation is on"
    if any(HOOKS_OF_ALL_MODULES):
        return "hooks of all modules are registered"
    return None
