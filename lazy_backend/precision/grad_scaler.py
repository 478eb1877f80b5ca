"""`torch.amp.GradScaler("lazy")`: steps are skipped without reading whether they must be.

In: an optimizer, and a tensor that is not zero if a gradient is infinite or NaN. Out: a step that leaves everything as
it was in that case.

Note [Skipped steps]
In eager mode GradScaler reads the flag and calls `step` or does not. The read would cut the graph in the middle of each
step. So here `step` is always recorded, and one more call, `undo_if`, gives parameters and state their old values back
if the flag is set. What an optimizer keeps on the host, as Adam does its step counts, cannot wait for the flag: it goes
on as if the step was taken, and is settled before it is used again, at the next step or when the optimizer's state is
looked at. By then the step has been run, so that read cuts nothing. Python code that a skipped step must not run, as
hooks or an optimizer of the user's own, makes us read the flag as in eager mode.

Note [Skipped steps of a captured function]
Such a step is settled before the function's next call, which waits for the last run anyway. While the call that was
recorded is compared with others, the step is set aside: the optimizer is then as it was before the call but for its
values. A replay of the call arms the step anew (`UnsettledStep.arm`), with the values that it finds on the host and
with the flag that it computes, which is an output of the program like any other. The order matters, as each delivery
may be interrupted: first the flag, then the step is armed, and only then do values on the host go on.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from lazy_backend import metrics
from lazy_backend.errors import CaptureError, PoisonedTensorError
from lazy_backend.errors.sites import reading_for, user_site
from lazy_backend.errors.tracebacks import hide_internals
from lazy_backend.execution.step_ends import step_ends
from lazy_backend.execution.sync import executor
from lazy_backend.lowering.ir.optimizers import undo_if
from lazy_backend.ports.hooks import HOOKS_AFTER_ALL_STEPS, HOOKS_BEFORE_ALL_STEPS, step_hooks_of
from lazy_backend.ports.tensor_types import foreach_clone, version_of
from lazy_backend.tensors.bodies import note_read_once, running
from lazy_backend.tensors.tensor import LazyTensor
from lazy_backend.tensors.thread_state import run_clean

_MaybeStep = Callable[..., Any]


def maybe_step(original: _MaybeStep) -> _MaybeStep:
    """`GradScaler._maybe_opt_step`, which takes a step unless the flags say otherwise."""

    @functools.wraps(original)
    @hide_internals
    def _maybe_opt_step(
        self: torch.amp.GradScaler, optimizer: Any, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        flags = list(optimizer_state["found_inf_per_device"].values())
        if not any(isinstance(flag, LazyTensor) for flag in flags):
            return original(self, optimizer, optimizer_state, *args, **kwargs)
        for unsettled in unsettled_steps(optimizer):
            if unsettled.is_of_this_body():
                raise _steps_twice(optimizer)
            unsettled.forget()
        reason = _why_read(optimizer, flags, args or kwargs)
        if reason is None:
            with step_ends.held():  # a step that ends by itself must not end before it is undone
                result = _step_or_undo(optimizer, flags[0])
            step_ends.see(optimizer)
            return result
        metrics.increment(f"GradScalerRead: {reason}")
        with reading_for("GradScaler.step"):
            return original(self, optimizer, optimizer_state, *args, **kwargs)

    return _maybe_opt_step


def unsettled_steps(optimizer: Any) -> list[UnsettledStep]:
    """The step of `optimizer` that is to be settled before its next one, if any."""
    return [hook for hook in step_hooks_of(optimizer)[0].values() if isinstance(hook, UnsettledStep)]


def _why_read(optimizer: Any, flags: list[Any], arguments: Any) -> str | None:
    """Why the flag must be read before the step, or None."""
    if arguments:
        return "step is given arguments"
    if len(flags) > 1 or any(type(parameter) is not LazyTensor for parameter in _stepped(optimizer)):
        return "the parameters are not on one lazy device"
    # what this package registers only counts steps
    hooks = (*HOOKS_BEFORE_ALL_STEPS.values(), *HOOKS_AFTER_ALL_STEPS.values())
    before, after = step_hooks_of(optimizer)
    own = (*before, *after)
    if own or not all(getattr(hook, "__module__", "").startswith("lazy_backend.") for hook in hooks):
        return "the optimizer has hooks"
    if not type(optimizer).__module__.startswith("torch.optim."):
        return "the optimizer is not one of torch.optim"
    if any(parameter.grad.is_sparse for parameter in _stepped(optimizer)):
        return "a gradient is sparse"
    return None


def _stepped(optimizer: Any) -> Iterator[Any]:
    """The parameters that a step updates."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield parameter


def _step_or_undo(optimizer: Any, flag: torch.Tensor) -> Any:
    parameters = list(_stepped(optimizer))
    if not parameters:
        return optimizer.step()
    states = [optimizer.state.get(one, {}) for one in parameters]
    entries = [(state, name) for state in states for name, value in state.items() if isinstance(value, LazyTensor)]
    unsettled = UnsettledStep(optimizer, parameters, states, flag)
    with torch.no_grad():
        before = foreach_clone([*parameters, *(state[name] for state, name in entries)])
    try:
        result = optimizer.step()
    finally:  # an interrupted step too must not leave infinite weights behind
        with torch.no_grad():
            undo_if([*parameters, *(state[name] for state, name in entries)], before, flag)
        unsettled.watch()
    return result


def _steps_twice(optimizer: Any) -> CaptureError:
    return CaptureError(
        f"a GradScaler steps this {type(optimizer).__name__} twice in a call of a captured function. It counts steps "
        "on the host, and whether the first one is skipped is known only after the call"
        f"\n  at {user_site()}\n  take one step per call; or capture the model and the optimizer instead of the "
        "function; or use fused=True"
    )


class UnsettledStep:
    """What an optimizer keeps on the host, as it was before a step that may be undone.

    While it is unsettled, it is a hook of the optimizer, which settles it before its next step and before its state is
    asked for or loaded; and the optimizer's `state` is an `_UnsettledState`, for code that looks there, as copies and
    pickles of the optimizer do.
    """

    def __init__(self, optimizer: Any, parameters: list[Any], states: list[dict[str, Any]], flag: torch.Tensor) -> None:
        self.flag: Any = flag
        self._reference = weakref.ref(optimizer)
        self._body = running.get(threading.get_ident())
        self._is_settled = False
        self._new = [one for one, state in zip(parameters, states, strict=True) if not state]
        kept = [(state, name, value) for state in states for name, value in state.items()]
        self._numbers = [one for one in kept if not isinstance(one[2], torch.Tensor)]
        self._tensors = [
            value for _, _, value in kept if isinstance(value, torch.Tensor) and value.device.type != "lazy"
        ]
        self._versions = [version_of(tensor) for tensor in self._tensors]
        self._values = self.values()
        self._state: Any = None  # the optimizer's own
        self._handles: list[RemovableHandle] = []

    def values(self) -> list[torch.Tensor]:
        """Copies of the tensors on the host, as they are now. No recorder sees them made."""
        return list(run_clean(foreach_clone, self._tensors)) if self._tensors else []

    def _concerns(self, optimizer: Any) -> bool:
        """Whether the optimizer has something on the host, or has state since the step."""
        return bool(self._numbers or self._tensors or any(optimizer.state.get(one) for one in self._new))

    def watch(self) -> None:
        """Begin to be unsettled, if the optimizer keeps something on the host."""
        optimizer = self._reference()
        if self._concerns(optimizer):
            # scaler.update() adds the flags of other optimizers to that of the first
            self.flag = self.flag.clone()
            self._stand_in(optimizer)

    def _stand_in(self, optimizer: Any) -> None:
        self._state = optimizer.state
        optimizer.state = _UnsettledState(self)
        self._handles = [
            optimizer.register_step_pre_hook(self),
            optimizer.register_state_dict_pre_hook(self),
            # what is loaded may be a state_dict that shares these tensors
            optimizer.register_load_state_dict_pre_hook(self),
        ]

    def __call__(self, optimizer: Any, *arguments: Any) -> None:
        """Settle, and stop watching."""
        state = self.settled_state()
        if isinstance(optimizer.state, _UnsettledState) and optimizer.state.unsettled is self:
            optimizer.state = state
        for handle in self._handles:
            # PyTorch may be going through these hooks, of which only the last can be removed meanwhile
            if next(reversed(handle.hooks_dict_ref() or {}), None) == handle.id:
                handle.remove()

    def forget(self) -> None:
        """Settle, and stop watching, where PyTorch goes through no hooks."""
        self(self._reference())
        for handle in self._handles:
            handle.remove()

    def settled_state(self) -> Any:
        """The optimizer's state, after the flag was read and the step undone on the host if it was on the device."""
        if self._is_settled:
            return self._state
        if self._is_undone():
            for state, name, value in self._numbers:
                state[name] = value
            with torch.no_grad():
                for tensor, value in zip(self._tensors, self._values, strict=True):
                    tensor.copy_(value)
            for parameter in self._new:
                self._state.pop(parameter, None)
        self._is_settled = True  # last: whatever interrupts the lines above, they are done again
        return self._state

    def _is_undone(self) -> bool:
        is_once = executor.rules.is_refusing() and not self.is_of_this_body()
        if is_once:  # a step before the captured function: later calls do not find it
            note_read_once()
        try:
            with reading_for("GradScaler.step"), executor.rules.reading_once() if is_once else contextlib.nullcontext():
                return bool(self.flag.item())
        except PoisonedTensorError:
            return True  # the run failed, perhaps by Ctrl-C, and the device has what was before the step

    # ----- in captured functions, see Note [Skipped steps of a captured function]

    def is_of_this_body(self) -> bool:
        """Whether the body that this thread runs took the step."""
        return executor.rules.is_refusing() and self._body is running.get(threading.get_ident())

    def set_aside(self) -> None:
        """Leave the optimizer as it is without this step, which stays unsettled."""
        optimizer: Any = self._reference()
        optimizer.state = self._state
        for handle in self._handles:
            handle.remove()

    def resume(self) -> None:
        """End `set_aside`."""
        self._stand_in(self._reference())

    def makes_state(self) -> bool:
        """Whether some of the optimizer's state was made in this step, and is gone if it is skipped."""
        return bool(self._new)

    def why_not_again(self, versions: dict[int, int]) -> str:
        """Why replays cannot take this step again, or "". `versions`: of tensors on the host before the body, by id."""
        if self.makes_state():
            return "it makes an optimizer's state in a step that a GradScaler may skip"
        if [versions.get(id(tensor)) for tensor in self._tensors] != self._versions:
            return "it changes an optimizer's state on the CPU before a step that a GradScaler may skip"
        return ""

    def arm(self, values: list[torch.Tensor], run: Any) -> None:
        """Be unsettled again, as a replay takes the step: a delivery, see `Holder.put`. `values`: before the step."""
        optimizer: Any = self._reference()
        if run.delivered or optimizer is None or isinstance(optimizer.state, _UnsettledState):
            return
        self._values, self._is_settled = values, False
        self._stand_in(optimizer)


class _UnsettledState(MutableMapping[Any, Any]):
    """Stands for the `state` of an optimizer, and settles it when it is looked at."""

    def __init__(self, unsettled: UnsettledStep) -> None:
        self.unsettled = unsettled

    @property
    def settled(self) -> Any:
        return self.unsettled.settled_state()

    def __getitem__(self, key: Any) -> Any:
        return self.settled[key]  # which makes what is missing

    def __contains__(self, key: object) -> bool:
        return key in self.settled

    def get(self, key: Any, default: Any = None) -> Any:
        return self.settled.get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        return self.settled.pop(key, *default)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.settled[key] = value

    def __delitem__(self, key: Any) -> None:
        del self.settled[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.settled)

    def __len__(self) -> int:
        return len(self.settled)

    def __repr__(self) -> str:
        return repr(self.settled)

    def __copy__(self) -> Any:
        return copy.copy(self.settled)

    def __deepcopy__(self, known: dict[int, Any]) -> Any:
        return copy.deepcopy(self.settled, known)

    def __reduce__(self) -> Any:
        return self.settled.__reduce__()
