"""Thread-local state that changes how operators run, and how to run without it.

Note [Runs are clean]
A run computes what was recorded. The modes of the thread that does the run (inference mode, autocast, the user's
dispatch and function modes, functorch levels) already acted on the operators when they were recorded, above this
package; they must not act a second time. The device's own thread has no such modes. But a run within `mark_step`, a
read and an upload happen on the user's thread, so they step out of its modes. Within `__torch_dispatch__`, the thread
also skips the dispatch keys above it, including those that resolve conjugated and negated tensors: a kernel that takes
the conjugate of a product, as that of `pinv`, would compute with the product. So operators that run there, on complex
or negated operands, run as within a kernel of PyTorch's, which skips autograd alone.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from lazy_backend.lowering.artefacts.environment import switches
from lazy_backend.lowering.devices.registration import backing_devices
from lazy_backend.ports.cpython import is_a, leave_interrupted_blocks
from lazy_backend.ports.dispatcher import BelowViewTracking
from lazy_backend.ports.thread_modes import (
    DeviceMode,
    ForceDispatchKeys,
    InferenceMode,
    WithoutAutocast,
    WithoutTorchFunction,
    active_transform,
    dispatch_depth,
    dispatch_modes,
    excluded_keys,
    function_depth,
    function_modes,
    included_keys,
    is_any_autocast_enabled,
    set_grad_enabled,
    without_dispatch_modes,
    without_transforms,
)

P = ParamSpec("P")
R = TypeVar("R")

# The dispatch keys of a thread that is not within a dispatch, and those that a kernel of PyTorch's skips.
_INCLUDED = included_keys()
_EXCLUDED = excluded_keys()
with BelowViewTracking():
    _EXCLUDED_IN_KERNELS = excluded_keys()


def has_modes() -> bool:
    """Whether the thread carries a mode that changes how operators run. 0.3 µs."""
    return torch.is_inference_mode_enabled() or has_further_modes()


def has_further_modes() -> bool:
    """Whether the thread carries such a mode besides inference mode."""
    return is_any_autocast_enabled() or has_python_modes()


def has_python_modes() -> bool:
    """Whether the thread carries a dispatch or function mode, or a transform of `torch.func`."""
    return bool(dispatch_depth() or function_depth() or active_transform() is not None)


def describe_modes() -> tuple[Any, ...]:
    """A key for all modes of the thread that Python code may ask about or that change what it records. 0.4 µs.

    Function and dispatch modes stand for themselves, but for `torch.device` and `torch.set_default_device`, which are
    new objects each time.
    """
    plain = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()
    if not has_further_modes():
        return plain
    modes = (*function_modes(), *dispatch_modes())
    return *plain, describe_autocast(), *((mode.device if type(mode) is DeviceMode else mode) for mode in modes)


def describe_autocast() -> tuple[Any, ...] | None:
    """A key for what autocast does on the thread, or None where it is off."""
    if not is_any_autocast_enabled():
        return None
    kinds = [kind for kind in ("lazy", *backing_devices) if torch.is_autocast_enabled(kind)]
    return torch.is_autocast_cache_enabled(), *((kind, torch.get_autocast_dtype(kind)) for kind in kinds)


def _anomalies() -> tuple[bool, bool]:
    """Which anomalies autograd detects."""
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


class ModesBefore:
    """The modes of the thread and the switches of the process before a body runs. 4 µs.

    A body may set them for whoever called it, as `torch.set_grad_enabled` does outside of `with`.
    """

    __slots__ = ("_modes", "_switches", "_anomalies")

    def __init__(self) -> None:
        self._modes, self._switches, self._anomalies = describe_modes(), switches(), _anomalies()

    def change(self) -> str:
        """Why a replay would leave them otherwise than the body did; empty if they are as before."""
        modes = describe_modes()
        if (modes, switches(), _anomalies()) == (self._modes, self._switches, self._anomalies):
            return ""
        names = ("the grad mode", "inference mode", "the default dtype")
        changed = [name for name, now, before in zip(names, modes, self._modes, strict=False) if now is not before]
        return (
            f"it changes {(*changed, 'autocast, another mode or a switch of PyTorch')[0]} for the code after it, "
            "which a replay would not do\n  set it outside, or in a `with` block"
        )


def run_clean(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call `function` with no gradients, no skipped dispatch keys and none of the thread's modes. 1.3 µs.

    For runs, reads and unseen calls, not for recorded ones. See Note [Runs are clean]. Not a context manager: one in
    Python can be interrupted before it restores anything, and the thread would continue without gradients (Note
    [Interruption]). The guards here are C++ objects; the first one restores the gradient mode too.
    """
    # what `torch.inference_mode(False)` and `torch.no_grad()` call
    with InferenceMode(False), ForceDispatchKeys(_INCLUDED, _EXCLUDED):
        set_grad_enabled(False)
        try:
            return _run_without_modes(function, args, kwargs) if has_further_modes() else function(*args, **kwargs)
        except BaseException as error:
            leave_interrupted_blocks(error)
            raise


class Watcher:
    """A profiler of a thread that sees what the program's code calls: what it does with tensors, not how.

    `profiler`: the program's own, which sees all that this one sees.
    """

    __slots__ = ("profiler",)

    def __init__(self, profiler: Callable[..., Any] | None = None) -> None:
        self.profiler = profiler


def unwatched(watcher: Any, function: Callable[..., R], *args: Any) -> R:
    """Call `function` while `watcher`, the profiler of this thread, sees nothing. Other profilers see all.

    What operators do is done again at each run, and of their first description alone the watcher would see hundreds of
    calls. If this is interrupted before it can look again, the watcher's owner finds that it is gone.
    """
    if not is_a(watcher, Watcher) or watcher.profiler is not None:
        return function(*args)
    sys.setprofile(None)
    try:
        return function(*args)
    finally:
        if sys.getprofile() is None:
            sys.setprofile(watcher)


def within_kernel() -> Any:
    """A guard: operators within it are dispatched as in a kernel of PyTorch's. 0.2 µs. See Note [Runs are clean]."""
    return ForceDispatchKeys(_INCLUDED, _EXCLUDED_IN_KERNELS)


def _run_without_modes(function: Callable[..., R], args: Any, kwargs: Any) -> R:
    with WithoutAutocast(), WithoutTorchFunction(), contextlib.ExitStack() as stack:
        if dispatch_depth():
            stack.enter_context(without_dispatch_modes())
        if active_transform() is not None:
            stack.enter_context(without_transforms())
        return function(*args, **kwargs)
