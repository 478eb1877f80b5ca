"""Warn about a forgotten `mark_step`: at the second `optimizer.step()`, not when the trace is full minutes later.

In: PyTorch's hook after each optimizer step. Out: one warning, with both lines.
Only an optimizer that steps twice within one trace causes the warning, not several optimizers in one step, as in a GAN,
nor gradients accumulated over several batches. Costs 2 µs per `optimizer.step()` until the warning was given.
Trainers of other packages read values in each step, which ends traces too: there, two steps without `mark_step` do.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from lazy_backend.diagnostics.history import history
from lazy_backend.errors import GraphCutWarning
from lazy_backend.errors.sites import packages_on_the_stack, user_site, warn_user
from lazy_backend.errors.tracebacks import hide_internals
from lazy_backend.execution.sync import executor
from lazy_backend.tensors.state import Epoch, Trace
from lazy_backend.tensors.tensor import LazyTensor

# What to do where another package owns the loop, by its name. A trainer calls accelerate, so trainers come first.
_ADVICE = {
    "transformers": "take lazy_backend.integrations.transformers.LazyTrainingArguments in place of TrainingArguments",
    "lightning": "import lazy_backend.integrations.lightning, and take Trainer(accelerator='lazy')",
    "ignite": "take create_supervised_trainer of lazy_backend.integrations.ignite, or attach its LazySteps",
    "accelerate": "take Accelerator of lazy_backend.integrations.accelerate",
}


@dataclass(slots=True)
class _LatestStep:
    """Of one optimizer. `epoch`: of the trace that it was in; `site`: its line.

    `steps_before`: of the device, before the first step of an optimizer in a loop of another package; None once the
    device's steps went on, and for other optimizers.
    """

    steps_before: int | None
    epoch: weakref.ref[Epoch] | None = None
    site: str = ""


class ForgottenSteps:
    """Which trace each optimizer stepped in last, and at which line."""

    def __init__(self) -> None:
        # one table, as each look-up takes 0.7 µs
        self._latest: weakref.WeakKeyDictionary[torch.optim.Optimizer, _LatestStep] = weakref.WeakKeyDictionary()
        self._hook: Any = None
        self._is_done = False

    def watch(self) -> None:
        """Watch every optimizer's steps from now on, until a warning is given."""
        if self._hook is None and not self._is_done:
            self._hook = register_optimizer_step_post_hook(self._see_step)

    def reset(self) -> None:
        """Start over, as if no optimizer had stepped and no warning had been given."""
        self._forget()
        self._is_done = False
        self.watch()

    def stop(self) -> None:
        """Stop watching optimizer steps, as after a warning."""
        self._forget()
        self._is_done = True
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _forget(self) -> None:
        self._latest.clear()

    @property
    def is_watching(self) -> bool:
        """Whether a hook of ours watches optimizer steps."""
        return self._hook is not None

    def see(self, optimizer: torch.optim.Optimizer, trace: Trace) -> None:
        """See a step in `trace` that ran no hooks, outside of a captured function."""
        if self._hook is not None:
            self._look_at(optimizer, trace)

    @hide_internals
    def _see_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or executor.rules.is_refusing():  # a captured function is a step by itself
            return
        parameter = lazy_parameter(optimizer)
        if parameter is not None:
            self._look_at(optimizer, parameter._data.context.trace)

    def _look_at(self, optimizer: torch.optim.Optimizer, trace: Trace) -> None:
        latest = self._latest.get(optimizer)
        if latest is None:
            latest = self._latest[optimizer] = _LatestStep(None if _package() is None else history.steps)
        elif latest.steps_before is not None:
            steps, latest.steps_before = latest.steps_before, None
            if steps == history.steps:  # the second step of this optimizer, and no step of the device ended between
                self._warn(optimizer, "", user_site())
                return
        if trace.is_empty():  # in eager mode, or after a read in the step itself
            return
        epoch, before = latest.epoch, latest.site
        latest.epoch, latest.site = weakref.ref(trace.epoch), user_site()
        if epoch is not None and epoch() is trace.epoch:
            self._warn(optimizer, before, latest.site)

    def _warn(self, optimizer: torch.optim.Optimizer, before: str, site: str) -> None:
        self.stop()
        what = (
            f"both steps, and all that follow, are recorded as one graph\n  first at {before}\n  then at {site}"
            if before
            else f"its values are read in the midst of steps\n  at {site}"
        )
        warn_user(
            f"{type(optimizer).__name__}.step() was called twice without a mark_step() between: {what}\n  {_advice()}",
            GraphCutWarning,
        )


def _package() -> str | None:
    """The package that owns the loop, if it is one that is known."""
    packages = packages_on_the_stack()
    return next((package for package in _ADVICE if package in packages), None)


def _advice() -> str:
    package = _package()
    if package is not None:
        return f"{_ADVICE[package]}; or set lazy_backend.config.mark_step_on_optimizer_step = True"
    return (
        "call lazy_backend.mark_step() once per step, after optimizer.step(); ignore this if several updates are meant "
        "to be one graph"
    )


def lazy_parameter(optimizer: torch.optim.Optimizer) -> LazyTensor | None:
    """A lazy parameter of the optimizer: the first of one of its groups. Checking all would cost more with each."""
    for group in optimizer.param_groups:
        first = next(iter(group["params"]), None)
        if isinstance(first, LazyTensor):
            return first
    return None


forgotten_steps = ForgottenSteps()
