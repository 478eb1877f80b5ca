"""Warn about a forgotten `mark_step`: at the second `optimizer.step()`, not when the trace is full minutes later.

In: PyTorch's hook after each optimizer step. Out: one warning, with both lines.
Only an optimizer that steps twice within one trace causes the warning, not several optimizers in one step, as in a GAN,
nor gradients accumulated over several batches. Costs 2 µs per `optimizer.step()` until the warning was given.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from lazy_backend.errors import GraphCutWarning
from lazy_backend.errors.sites import user_site, warn_user
from lazy_backend.errors.tracebacks import hide_internals
from lazy_backend.execution.sync import executor
from lazy_backend.tensors.state import Epoch
from lazy_backend.tensors.tensor import LazyTensor


class ForgottenSteps:
    """Which trace each optimizer stepped in last, and at which line."""

    def __init__(self) -> None:
        self._last: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[weakref.ref[Epoch], str]]
        self._last = weakref.WeakKeyDictionary()
        self._hook: Any = None
        self._is_done = False

    def watch(self) -> None:
        """Watch every optimizer's steps from now on, until a warning is given."""
        if self._hook is None and not self._is_done:
            self._hook = register_optimizer_step_post_hook(self._see_step)

    def reset(self) -> None:
        """Start over, as if no optimizer had stepped and no warning had been given."""
        self._last.clear()
        self._is_done = False
        self.watch()

    def stop(self) -> None:
        """Stop watching optimizer steps, as after a warning."""
        self._last.clear()
        self._is_done = True
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    @property
    def is_watching(self) -> bool:
        """Whether a hook of ours watches optimizer steps."""
        return self._hook is not None

    def see(self, optimizer: torch.optim.Optimizer) -> None:
        """See a step that ran no hooks."""
        if self._hook is not None:
            self._see_step(optimizer, (), {})

    @hide_internals
    def _see_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or executor.rules.is_refusing():  # a captured function is a step by itself
            return
        parameter = lazy_parameter(optimizer)
        if parameter is None:
            return
        trace = parameter._data.context.trace
        if trace.is_empty():  # in eager mode, or after a read in the step itself
            return
        site = user_site()
        epoch, before = self._last.get(optimizer, (None, ""))
        self._last[optimizer] = weakref.ref(trace.epoch), site
        if epoch is not None and epoch() is trace.epoch:
            self._warn(optimizer, before, site)

    def _warn(self, optimizer: torch.optim.Optimizer, before: str, site: str) -> None:
        self.stop()
        warn_user(
            f"{type(optimizer).__name__}.step() was called twice without a mark_step() between: both steps, and all "
            f"that follow, are recorded as one graph\n  first at {before}\n  then at {site}\n"
            "  call lazy_backend.mark_step() once per step, after optimizer.step(); ignore this if several updates are "
            "meant to be one graph",
            GraphCutWarning,
        )


def lazy_parameter(optimizer: torch.optim.Optimizer) -> LazyTensor | None:
    """A lazy parameter of the optimizer: the first of one of its groups. Checking all would cost more with each."""
    for group in optimizer.param_groups:
        first = next(iter(group["params"]), None)
        if isinstance(first, LazyTensor):
            return first
    return None


forgotten_steps = ForgottenSteps()
