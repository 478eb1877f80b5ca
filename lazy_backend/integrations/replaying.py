"""What trainers' models and optimizers may have replayed without being asked for: what is known to be sound.

In: the objects that a trainer works with. Out: the same objects, captured where that cannot change what they do; those
that cannot be replayed run as written, without the warning that a `capture` of the user's gives.

Note [Captured without being asked]
A replay checks all that a module or an optimizer is made of, but not other Python values that its code reads, such as a
global number or Python's own random numbers (docs/limits.md). Optimizers of PyTorch read none; nor do the models of
transformers, which draw random numbers from PyTorch, or upload them, and both are seen. A class of the user's may.
"""

from __future__ import annotations

from typing import Any

import torch

from lazy_backend.regions.module import capture_module
from lazy_backend.regions.optimizer import capture_optimizer


def replay_steps(optimizer: torch.optim.Optimizer) -> None:
    """Capture `optimizer` if its class is PyTorch's."""
    if type(optimizer).__module__.startswith("torch.optim."):
        capture_optimizer(optimizer, warns=False)


def replay_calls(module: torch.nn.Module) -> None:
    """Capture a module whose class is known to read nothing but its own state and arguments."""
    if module._compiled_call_impl is None:
        capture_module(module, warns=False)


def unwrapped(optimizer: Any) -> Any:
    """The optimizer within the wrappers of accelerate and Lightning, which decide by other state whether it steps."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer
