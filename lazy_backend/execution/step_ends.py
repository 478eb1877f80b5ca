"""Steps that end by themselves: with each step of an optimizer.

Those of all optimizers under `config.mark_step_on_optimizer_step`, else those that an integration has named.

In: PyTorch's hook after each optimizer step. Out: the sync, the count and the step closures of a `mark_step()`.
Gradients that accumulate over several batches, and the closures of an optimizer such as LBFGS, belong to one step; of
several optimizers, each ends a step of its own. A step that `GradScaler` skips goes on to the next one. A `mark_step()`
that follows with nothing recorded in between is the same step, and is not counted again.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from lazy_backend import metrics
from lazy_backend.diagnostics.history import history
from lazy_backend.errors.tracebacks import hide_internals
from lazy_backend.execution import closures
from lazy_backend.execution.forgotten_steps import lazy_parameter
from lazy_backend.execution.sync import executor
from lazy_backend.settings import config
from lazy_backend.tensors.contexts import contexts
from lazy_backend.tensors.state import DeviceContext, Epoch


class StepEnds:
    """Ends steps, and knows which traces are empty because a step ended by itself."""

    def __init__(self) -> None:
        self.told: Callable[[], object] | None = None  # of each step that ended
        self._hook: Any = None
        self._followed: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._held = threading.local()
        # by device, the trace that began when a step ended by itself
        self._fresh: weakref.WeakKeyDictionary[DeviceContext, weakref.ref[Epoch]] = weakref.WeakKeyDictionary()

    def watch(self) -> None:
        """Have a hook if there is an optimizer whose steps end steps: after `config.mark_step_on_optimizer_step`."""
        is_needed = config.mark_step_on_optimizer_step or len(self._followed) > 0
        if is_needed and self._hook is None:
            self._hook = register_optimizer_step_post_hook(self._see_step)
        elif not is_needed and self._hook is not None:
            self._hook.remove()
            self._hook = None

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """From now on, the steps of `optimizer` end steps, whatever the setting is."""
        self._followed.add(optimizer)
        self.watch()

    def reset(self) -> None:
        """As after the import."""
        self._followed.clear()
        self._fresh.clear()
        self.watch()

    @property
    def is_watching(self) -> bool:
        """Whether a hook of ours ends steps."""
        return self._hook is not None

    def end(self, devices: Sequence[DeviceContext], wait: bool = False) -> None:
        """What `mark_step` does."""
        is_new = not self._fresh or not all(map(self._has_just_ended, devices)) or not devices
        if is_new:
            metrics.increment("MarkStep")
        executor.sync_live_tensors_graph(devices, wait, "mark_step")
        history.steps += is_new
        if self.told is not None:
            self.told()
        closures.runner.run()

    def end_by_itself(self) -> None:
        """End a step that nobody else may have ended: a `mark_step` right after it belongs to it."""
        devices = contexts.get_active_devices()
        self.end(devices)
        for context in devices:
            self._fresh[context] = weakref.ref(context.trace.epoch)

    def _has_just_ended(self, context: DeviceContext) -> bool:
        trace, fresh = context.trace, self._fresh.get(context)
        return fresh is not None and trace.is_empty() and fresh() is trace.epoch and not config.eager

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """A block in which this thread's optimizer steps end no step: who holds them calls `see` afterwards."""
        before = getattr(self._held, "is_held", False)
        self._held.is_held = True
        try:
            yield
        finally:
            self._held.is_held = before

    def see(self, optimizer: torch.optim.Optimizer) -> None:
        """See a step that ran no hooks."""
        if self._hook is not None:
            self._see_step(optimizer, (), {})

    @hide_internals
    def _see_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if getattr(self._held, "is_held", False) or torch.compiler.is_compiling() or executor.rules.is_refusing():
            return  # a captured function is a step by itself
        if not config.mark_step_on_optimizer_step and optimizer not in self._followed:
            return
        if lazy_parameter(optimizer) is not None:
            self.end_by_itself()


step_ends = StepEnds()
