"""Where steps end: at `mark_step()`, and by themselves in a thread that never calls it.

In: `mark_step()`, PyTorch's hook after each optimizer step, batches from the host, traces that grow long. Out: syncs,
counted steps, step closures.

Note [Steps that end by themselves]
Each count of steps between two reads would be a program of its own, and whatever nobody reads would stay in memory. So
with `config.mark_steps = "auto"` a step ends

- with each step of an optimizer. Gradients that accumulate over several batches, and the closures of an optimizer such
  as LBFGS, belong to one step. Of several optimizers that step one after the other, with no batch in between, as those
  of a GAN may, the last ends the step, once the others were followed like that twice. A step that `GradScaler` skips
  goes on to the next one.
- before a batch that comes from the host where no gradients are recorded, if one has come from that place of the
  program since the last end: so each batch of an evaluation is a step. Where gradients are recorded, they may be added
  up: only from the 17th batch after an optimizer's step on, and before the first one after an evaluation.
- in a loop that has neither, once `LOOKED_AT` calls are recorded: if half of them or more are equal rounds, a step is a
  number of such rounds. It is counted from where the loop began, and so ends at the same calls whenever the program
  comes there. Calls are equal if operators and results are: indices may differ. Layers are no rounds, as each brings
  weights into the trace, at least at the first pass; only a long trace is taken for a loop over inputs.

A thread that calls `mark_step()` gets no other ends. But in any thread a trace is cut before a batch, once more than
`config.max_pending_bytes` have come from the host since it began, as it keeps them all in memory; where steps end by
hand, with a warning. A `mark_step()` that follows an end with nothing recorded in between is the same step, and is not
counted again. Ranks end a step with each optimizer's alone, which step alike on all of them: what a rank evaluates or
logs alone must not move its collectives into another graph.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
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
from lazy_backend.execution.rules import per_thread
from lazy_backend.execution.sync import executor
from lazy_backend.lowering.collectives.groups import is_one_of_several_ranks
from lazy_backend.lowering.ir.program import Call, Cut
from lazy_backend.ports.autograd_engine import current_node
from lazy_backend.settings import config
from lazy_backend.tensors.contexts import contexts
from lazy_backend.tensors.state import LOOKED_AT, DeviceContext, Loop, Pace
from lazy_backend.tensors.tensor import LazyTensor

# A loop's step is as many rounds as have so many calls: graphs of a few calls gain nothing.
_SHORTEST_STEP = 128
# Calls of a trace of which rounds may bring inputs: more than most steps have.
_LONG = 4096
# Batches that an optimizer's step may take: gradients accumulate.
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
            context.pace.end(context.trace.cursor.depth, is_step=cause != _LOOP)
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
        is_followed, parameter = optimizer in self._followed, lazy_parameter(optimizer)
        if parameter is None or not (is_followed or _ends_by_itself()):
            return
        context = parameter._data.context
        if context.pace.goes_on(optimizer) and not is_followed and not is_one_of_several_ranks():
            context.pace.over = context.trace.epoch
        else:
            self.end_by_itself(_OPTIMIZER)

    # ----- batches

    @hide_internals
    def see_batch(self, context: DeviceContext, num_bytes: int) -> None:
        """See a tensor that comes from the host. May end the step before."""
        pace, trace, has_gradients = context.pace, context.trace, torch.is_grad_enabled()
        is_same = pace.latest is trace.cursor  # nothing was recorded since the one before
        # so far, as `is_usual` in native_recorder.cpp
        pace.came = True
        if trace.is_empty():
            return
        trace.room -= num_bytes
        pace.latest = trace.cursor
        pace.batches += has_gradients and not is_same
        if self._is_held() or context.queue.is_here():
            return  # or within a run, where a finalizer came
        if trace.room < 0:
            self._make_room(context)
            return
        is_first = has_gradients and pace.over is trace.epoch
        is_usual = is_same or (has_gradients and not is_first and pace.batches < MOST_BATCHES)
        if is_usual or not _ends_by_itself() or is_one_of_several_ranks():
            return
        place, count = user_place(), min(pace.batches, MOST_BATCHES)
        if is_first or place in pace.places:
            self.end_by_itself(_BATCH)
            pace.batches, pace.over = count, None if has_gradients else context.trace.epoch
        pace.places.add(place)

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
        left = cursor.depth
        # not within a backward, whose layers bring no inputs
        is_free = _ends_by_itself() and not self._is_held() and not is_one_of_several_ranks()
        if is_free and current_node() is None:
            bindings = bindings_of(cursor)
            if bindings.loop is None:
                bindings.loop = _loop_at(cursor, pace.loop) or Loop((), 0, 0)
            pace.loop = bindings.loop if bindings.loop.round else None
            if pace.loop is not None:
                left = pace.loop.left
                if left == 0:
                    self.end_by_itself(_LOOP)
                    return
        if cursor.depth >= bound:
            executor.reset_trim_counter(context)
        else:
            trace.longest = min(cursor.depth + left, bound)


_OPTIMIZER, _BATCH, _LOOP = "an optimizer's step", "the next batch", "a loop"


def _loop_at(cursor: TrieNode[Call | Cut], before: Loop | None) -> Loop | None:
    """The loop whose rounds a path ends with: `before`, if a step of it ends here, or one found in many calls."""
    calls = list(cursor.path())
    looks = [_look_of(call) for call in calls]
    if before is not None:
        rounds = before.round * (before.length // len(before.round))
        return replace(before, left=0) if tuple(looks[-before.length :]) == rounds else None
    if len(looks) < LOOKED_AT:
        return None
    is_long = len(looks) >= _LONG
    return loop_of(looks, [not is_long and bool(getattr(call, "entered", ())) for call in calls])


def loop_of(looks: Sequence[Hashable], bring_inputs: Sequence[bool]) -> Loop | None:
    """The loop that `looks` end with, if half of them or more are rounds of it, at least three.

    Half of them: at the end of an outer loop's round there may be a few rounds of an inner loop. Of calls that bring
    inputs, only those of the first round are part of it.
    """
    calls = [object() if brings else look for look, brings in zip(reversed(looks), reversed(bring_inputs), strict=True)]
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
            begin = len(calls) - start - count
            while begin > 0 and looks[begin - 1] == looks[begin - 1 + start]:
                begin -= 1
            length = start * -(-_SHORTEST_STEP // start)
            return Loop(tuple(looks[begin : begin + start]), length, (begin - len(looks)) % length)
    return None


def _look_of(call: Call | Cut) -> Hashable:
    """A call without its operands: what makes rounds of a loop alike."""
    if not isinstance(call, Call):
        return call
    return id(call.op), tuple([getattr(result, "meta", None) for result in call.results])


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
