"""Where steps end: at `mark_step()`, and by themselves in a thread that never calls it.

In: `mark_step()`, PyTorch's hook after each optimizer step, batches from the host, traces that grow long. Out: syncs,
counted steps, step closures.

Note [Steps that end by themselves]
Each count of steps between two reads would be a program of its own, and whatever nobody reads would stay in memory. So
with `config.mark_steps = "auto"` a step ends

- with each step of an optimizer. Gradients that accumulate over several batches, and the closures of an optimizer such
  as LBFGS, belong to one step; of several optimizers, each ends a step of its own. A step that `GradScaler` skips goes
  on to the next one.
- before a batch that comes from the host, where more have come since an optimizer's step than an optimizer takes (with
  gradients: 16 before that is known), and from the same place of the program as the one before: so each batch of an
  evaluation is a step.
- in a loop that has neither, once `LOOKED_AT` calls are recorded: if most of them are equal rounds, each further step
  is a number of such rounds. Calls are equal if operators and results are: indices may differ.

A thread that calls `mark_step()` gets no other ends. But in any thread a trace is cut before a batch, once more than
`config.max_pending_bytes` have come from the host since it began, as it keeps them all in memory; where steps end by
hand, with a warning. A `mark_step()` that follows an end with nothing recorded in between is the
same step, and is not counted again. Ranks end steps with optimizers alone, which step alike on all of them: what a rank
evaluates or logs alone must not move its collectives into another graph.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from lazy_backend import metrics
from lazy_backend.cache.trie import TrieNode
from lazy_backend.diagnostics.history import history
from lazy_backend.errors import GraphCutWarning
from lazy_backend.errors.sites import user_place, user_site, warn_user
from lazy_backend.errors.tracebacks import hide_internals
from lazy_backend.execution import closures
from lazy_backend.execution.bindings import bindings_of
from lazy_backend.execution.rules import is_one_of_several_ranks, per_thread
from lazy_backend.execution.sync import executor
from lazy_backend.lowering.ir.program import Call, Cut
from lazy_backend.settings import config
from lazy_backend.tensors.contexts import contexts
from lazy_backend.tensors.state import LOOKED_AT, DeviceContext, Loop, Pace
from lazy_backend.tensors.tensor import LazyTensor

# A loop's step is as many rounds as have so many calls: graphs of a few calls gain nothing.
_SHORTEST_STEP = 128
# Batches from other places of the program, after which such a place is taken for that where a round ends.
_MOST_OTHERS = 4
# Batches that an optimizer's step may take before it was seen to: gradients accumulate.
MOST_BATCHES = 16


class StepEnds:
    """Ends steps, where nobody marks them too."""

    def __init__(self) -> None:
        self._hook: Any = None
        self._followed: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._held = threading.local()
        self._warned = False

    def follow_settings(self) -> None:
        """Act on new settings."""
        self.watch()
        for context in contexts.get_active_devices():
            context.trace.longest, context.trace.room = context.pace.longest(), int(config.max_pending_bytes)

    def watch(self) -> None:
        """Have a hook if there is an optimizer whose steps end steps."""
        is_needed = config.mark_steps == "auto" or len(self._followed) > 0
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
        self._warned = per_thread.marks_by_hand = False
        for context in contexts.get_active_devices():
            context.pace = Pace()
        self.follow_settings()

    @property
    def is_watching(self) -> bool:
        """Whether a hook of ours ends steps."""
        return self._hook is not None

    # ----- ends

    def mark(self, devices: Sequence[DeviceContext], wait: bool = False) -> None:
        """What `mark_step` does: from now on, this thread's steps end here."""
        per_thread.marks_by_hand = True
        self._end(devices, "mark_step", wait)

    def end_by_itself(self, cause: str = "mark_step") -> None:
        """End a step that nobody else may have ended: a `mark_step` right after it belongs to it."""
        devices = contexts.get_active_devices()
        self._end(devices, cause)
        for context in devices:
            context.pace.fresh = weakref.ref(context.trace.epoch)

    def end_of_trainer(self) -> None:
        """End a step of a trainer that says where its steps end: this thread gets no other ends."""
        per_thread.marks_by_hand = True
        self.end_by_itself()

    def _end(self, devices: Sequence[DeviceContext], cause: str, wait: bool = False) -> None:
        is_new = not devices or not all(map(_has_just_ended, devices))
        if is_new:
            metrics.increment("MarkStep")
        for context in devices:
            context.pace.end(context.trace.cursor.depth, is_step=cause not in (_BATCH, _LOOP))
        executor.sync_live_tensors_graph(devices, wait, cause)
        history.steps += is_new
        for context in devices:
            executor.aside.end_stretch(context, cause, is_step=True)
        closures.runner.run()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """A block in which this thread's steps do not end by themselves: who holds them calls `see` afterwards."""
        before = getattr(self._held, "is_held", False)
        self._held.is_held = True
        try:
            yield
        finally:
            self._held.is_held = before

    def _is_held(self) -> bool:
        """Whether no step of this thread may end now. A captured function is a step by itself."""
        rules = executor.rules
        return getattr(self._held, "is_held", False) or rules.is_refusing() or not rules.may_run()

    # ----- optimizers

    def see(self, optimizer: torch.optim.Optimizer) -> None:
        """See a step that ran no hooks."""
        if self._hook is not None:
            self._see_step(optimizer, (), {})

    @hide_internals
    def _see_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_held() or torch.compiler.is_compiling():
            return
        if not _ends_by_itself() and optimizer not in self._followed:
            return
        if lazy_parameter(optimizer) is not None:
            self.end_by_itself(_OPTIMIZER)

    # ----- batches

    @hide_internals
    def see_batch(self, context: DeviceContext, num_bytes: int) -> None:
        """See a tensor that comes from the host while something is recorded. May end the step before."""
        pace, trace = context.pace, context.trace
        is_same = pace.latest is trace.cursor  # nothing was recorded since the one before
        usual = max(pace.most_batches, MOST_BATCHES if torch.is_grad_enabled() else 0)
        # so far, as `is_usual` in native_recorder.cpp
        trace.room -= num_bytes
        pace.latest = trace.cursor
        pace.batches += not is_same
        if self._is_held() or context.queue.is_here():
            return  # or within a run, where a finalizer came
        if trace.room < 0:
            self._make_room(context)
            return
        is_free = not is_same and pace.batches > usual and _ends_by_itself() and not is_one_of_several_ranks()
        if is_free and _comes_again(pace):
            self.end_by_itself(_BATCH)

    def _make_room(self, context: DeviceContext) -> None:
        """Cut a trace that keeps too much in memory; but no collectives, whose graph is that of other ranks."""
        order = context.order
        if executor.rules.is_strict() or (order is not None and order.epoch is context.trace.epoch):
            return
        if not _ends_by_itself():
            self._warn_of_bytes(context)
        self.end_by_itself(_BATCH)

    def _warn_of_bytes(self, context: DeviceContext) -> None:
        metrics.increment("TrimIrGraph")
        if not self._warned:
            self._warned = True
            warn_user(
                f"more than {config.max_pending_bytes:,} bytes came to {context.device} without a mark_step(), so the "
                f"trace was cut: nothing ran, and all stayed in memory\n  at {user_site()}\n"
                "  call lazy_backend.mark_step() once per batch, or set lazy_backend.config.max_pending_bytes",
                GraphCutWarning,
            )

    # ----- loops

    def look_at(self, context: DeviceContext) -> None:
        """See a trace that has grown to `Trace.longest`: end a step if it is rounds of a loop, or cut it if it must."""
        trace, pace = context.trace, context.pace
        cursor, bound = trace.cursor, int(config.max_trace_length)
        if context.queue.is_here():  # a finalizer within a run, which cannot end a step: the next call looks again
            trace.longest = cursor.depth + 1
            return
        is_free = _ends_by_itself() and not self._is_held() and not is_one_of_several_ranks()
        if is_free:
            bindings = bindings_of(cursor)
            if bindings.loop is None:
                bindings.loop = _loop_at(cursor, pace.loop)
            pace.loop = bindings.loop
            if pace.loop is not None:
                self.end_by_itself(_LOOP)
                return
        if cursor.depth >= bound:
            executor.reset_trim_counter(context)
        else:
            trace.longest = max(pace.longest(), min(2 * cursor.depth, bound)) if is_free else bound


_OPTIMIZER, _BATCH, _LOOP = "an optimizer's step", "the next batch", "a loop"


def _loop_at(cursor: TrieNode[Call | Cut], before: Loop | None) -> Loop | None:
    """The loop whose rounds a path ends with: `before`, if it goes on, or one that is found in many calls."""
    looks = [_look_of(call) for call in cursor.path()]
    if before is not None and len(looks) == before.length:
        return before if looks == list(before.round) * (len(looks) // len(before.round)) else None
    return loop_of(looks) if len(looks) >= LOOKED_AT else None


def loop_of(looks: Sequence[Hashable]) -> Loop | None:
    """The loop that `looks` end with, if half of them or more are rounds of it, at least three. Its rounds begin there.

    Half of them: at the end of an outer loop's round there may be a few rounds of an inner loop, or a layer's calls.
    """
    calls = looks[::-1]
    # Z-function: `shared[start]` says how many calls from `start` on are those from 0 on
    shared, left, right = [0] * len(calls), 0, 0
    for start in range(1, len(calls)):
        count = min(right - start, shared[start - left]) if start < right else 0
        while start + count < len(calls) and calls[count] == calls[start + count]:
            count += 1
        shared[start] = count
        if start + count > right:
            left, right = start, start + count
        if count >= max(2 * start, len(calls) // 2):
            return Loop(tuple(looks[-start:]), start * -(-_SHORTEST_STEP // start))
    return None


def _look_of(call: Call | Cut) -> Hashable:
    """A call without its operands: what makes rounds of a loop alike."""
    if not isinstance(call, Call):
        return call
    return id(call.op), tuple([getattr(result, "meta", None) for result in call.results])


def _comes_again(pace: Pace) -> bool:
    """Whether a batch comes from where that came which ended the step before, so that a round of a loop is over.

    A round may take several, such as labels after the model's call.
    """
    place = user_place()
    if pace.place is None or place == pace.place or pace.others >= _MOST_OTHERS:
        pace.place, pace.others = place, 0
        return True
    pace.others += 1
    return False


def _has_just_ended(context: DeviceContext) -> bool:
    """Whether nothing was recorded since a step ended by itself."""
    trace = context.trace
    return trace.cursor.depth == 0 and context.pace.fresh() is trace.epoch and trace.cursor is not context.eager_root


def _ends_by_itself() -> bool:
    """Whether this thread's steps do."""
    return config.mark_steps == "auto" and not per_thread.marks_by_hand


def lazy_parameter(optimizer: torch.optim.Optimizer) -> LazyTensor | None:
    """A lazy parameter of the optimizer: the first of one of its groups. Checking all would cost more with each."""
    for group in optimizer.param_groups:
        first = next(iter(group["params"]), None)
        if isinstance(first, LazyTensor):
            return first
    return None


step_ends = StepEnds()
