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
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch

# torch.optim deletes the attribute `optimizer` that importing the module set
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.hooks import RemovableHandle

from lazy_backend import metrics
from lazy_backend.errors import CaptureError, PoisonedTensorError
from lazy_backend.errors.sites import reading_for, user_site
from lazy_backend.errors.tracebacks import hide_internals
from lazy_backend.execution.step_ends import step_ends
from lazy_backend.execution.sync import executor
from lazy_backend.lowering.ir.optimizers import undo_if
from lazy_backend.tensors.tensor import LazyTensor

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
        for unsettled in _unsettled_steps(optimizer):
            if executor.rules.is_refusing():
                raise _not_replayable(optimizer)
            unsettled.forget(optimizer)
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


def _unsettled_steps(optimizer: Any) -> list[_Unsettled]:
    return [hook for hook in optimizer._optimizer_step_pre_hooks.values() if isinstance(hook, _Unsettled)]


def _why_read(optimizer: Any, flags: list[Any], arguments: Any) -> str | None:
    """Why the flag must be read before the step, or None."""
    if arguments:
        return "step is given arguments"
    if len(flags) > 1 or any(type(parameter) is not LazyTensor for parameter in _stepped(optimizer)):
        return "the parameters are not on one lazy device"
    # what this package registers only counts steps
    hooks = (*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values())
    own = (*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks)
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
    unsettled = _Unsettled(parameters, states, flag)
    with torch.no_grad():
        before = torch._foreach_clone([*parameters, *(state[name] for state, name in entries)])
    try:
        result = optimizer.step()
    finally:  # an interrupted step too must not leave infinite weights behind
        with torch.no_grad():
            undo_if([*parameters, *(state[name] for state, name in entries)], before, flag)
        unsettled.watch(optimizer)
    if executor.rules.is_refusing() and unsettled.is_watching():
        raise _not_replayable(optimizer)
    return result


def _not_replayable(optimizer: Any) -> CaptureError:
    return CaptureError(
        f"a GradScaler steps this {type(optimizer).__name__} in a captured function, and may skip the step: a replay "
        f"would not know whether to go on with what is kept on the host, as step counts are\n  at {user_site()}\n"
        "  capture the model and the optimizer instead of the function; or use fused=True; or take two steps before "
        "the capture, with capturable=True if the optimizer has it (SGD does not need it)"
    )


class _Unsettled:
    """What an optimizer keeps on the host, as it was before a step that may be undone.

    While it is unsettled, it is a hook of the optimizer, which settles it before its next step and before its state is
    asked for or loaded; and the optimizer's `state` is an `_UnsettledState`, for code that looks there, as copies and
    pickles of the optimizer do.
    """

    def __init__(self, parameters: list[Any], states: list[dict[str, Any]], flag: torch.Tensor) -> None:
        self._flag: torch.Tensor | None = flag  # None once settled
        self._new = [one for one, state in zip(parameters, states, strict=True) if not state]
        kept = [(state, name, value) for state in states for name, value in state.items()]
        self._numbers = [one for one in kept if not isinstance(one[2], torch.Tensor)]
        self._tensors = [
            value for _, _, value in kept if isinstance(value, torch.Tensor) and value.device.type != "lazy"
        ]
        self._values = torch._foreach_clone(self._tensors) if self._tensors else []
        self._state: Any = None  # the optimizer's own
        self._handles: list[RemovableHandle] = []

    def _concerns(self, optimizer: Any) -> bool:
        """Whether the optimizer has something on the host, or has state since the step."""
        return bool(self._numbers or self._tensors or any(optimizer.state.get(one) for one in self._new))

    def is_watching(self) -> bool:
        return bool(self._handles)

    def watch(self, optimizer: Any) -> None:
        if not self._concerns(optimizer):
            return
        assert self._flag is not None
        # scaler.update() adds the flags of other optimizers to that of the first
        self._flag = self._flag.clone()
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

    def forget(self, optimizer: Any) -> None:
        """Settle, and stop watching, where PyTorch goes through no hooks."""
        self(optimizer)
        for handle in self._handles:
            handle.remove()

    def settled_state(self) -> Any:
        """The optimizer's state, after the flag was read and the step undone on the host if it was on the device."""
        if self._flag is None:
            return self._state
        try:
            with reading_for("GradScaler.step"):
                is_undone = bool(self._flag.item())
        except PoisonedTensorError:
            is_undone = True  # the run failed, perhaps by Ctrl-C, and the device has what was before the step
        if is_undone:
            for state, name, value in self._numbers:
                state[name] = value
            with torch.no_grad():
                for tensor, value in zip(self._tensors, self._values, strict=True):
                    tensor.copy_(value)
            for parameter in self._new:
                self._state.pop(parameter, None)
        self._flag = None  # last: whatever interrupts the lines above, they are done again
        return self._state


class _UnsettledState(MutableMapping[Any, Any]):
    """Stands for the `state` of an optimizer, and settles it when it is looked at."""

    def __init__(self, unsettled: _Unsettled) -> None:
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
