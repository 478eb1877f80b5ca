"""`capture`: replay what was recorded before, without running its Python.

In: a module, an optimizer or a function. Out: the same module or optimizer, whose calls within ordinary steps are
replayed (`regions`); or a function that replays whole steps (`replay`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

import torch

from lazy_backend.errors import CaptureError
from lazy_backend.errors.sites import user_site
from lazy_backend.errors.tracebacks import hide_internals
from lazy_backend.regions.module import capture_module, uncapture_module
from lazy_backend.regions.optimizer import capture_optimizer, uncapture_optimizer
from lazy_backend.replay import accounts
from lazy_backend.replay.capture import Captured, capture_function

P = ParamSpec("P")
R = TypeVar("R")
Part = TypeVar("Part", torch.nn.Module, torch.optim.Optimizer)


@overload
def capture(step: Part, *, verify_every: int | None = None) -> Part: ...  # type: ignore[overload-overlap]


@overload
def capture(
    step: Callable[P, R], *, verify_every: int | None = None, max_different_graphs: int | None = None
) -> Captured[P, R]: ...


@overload
def capture(
    step: None = None, *, verify_every: int | None = None, max_different_graphs: int | None = None
) -> Callable[[Callable[P, R]], Captured[P, R]]: ...


@hide_internals
def capture(step: Any = None, *, verify_every: int | None = None, max_different_graphs: int | None = None) -> Any:
    """Replay the calls of a module, an optimizer or a function, once two calls recorded the same.

    **A module or an optimizer** is returned as it is, and used as before: its forwards, their backwards, and optimizer
    steps are then replayed within the step that they belong to, and `mark_step` ends steps as before. Results,
    gradients, statistics and random numbers are those of the loop as written, with few exceptions (docs/semantics.md).
    A call runs as written if parts, parameters, flags, hooks or plain attributes of the module changed, or arguments,
    modes, the optimizer's state, or a value that the code reads by name, such as a global, an entry or an attribute of
    a class; hyperparameters and step counts are followed. `verify_every=0`: do not compare replays with the Python code
    (otherwise at the 64th call, and then each time after twice as many).

    **A function**, such as a training step, is returned as another function, each call of which is a step of its own,
    without `mark_step`. Pass tensors that change from call to call as arguments, on the lazy device; results are
    detached, and are new tensors at each call. What the body updates or replaces (parameters, `.grad`, optimizer state,
    statistics, tensors in your objects) ends up as if the body had run. Random operators keep drawing new numbers.

    Optimizers may be those of `torch.optim`, but `SparseAdam` and `LBFGS`, their schedules stepped outside: a replay
    computes the body's floats from hyperparameters, step counts and float arguments as the body does, and advances step
    counts on the CPU.

    A call of a captured function runs as written if the structure, shapes, dtypes or devices of its arguments, other
    Python values among them, grad mode, autocast, the state itself, the answer to a question about a float
    (`if lr > 0.1`), or anything in a module or optimizer changed from outside: children, parameters, hooks, plain
    attributes, `training`, `requires_grad`; or a value that the code reads by name: globals, variables of closures,
    attributes of objects and classes, entries, defaults, small arrays. So does the first call after a hyperparameter
    has changed for the first time. What no name leads to, such as the environment, a file or a clock, is not seen.
    Instead the body runs as written now and then (at the 64th call, then each time after twice as many), and a
    difference raises `CaptureError` with the first operator that differs and its line. `verify_every=n` does so at
    every n-th call, `verify_every=0` never. A read within the body raises `CaptureError` with its line.
    `max_different_graphs`: the first call that records one more program than this raises `TooManyGraphsError`.

    What cannot be replayed for another reason keeps running as written, with a `CaptureWarning` that says why.
    `uncapture` undoes it, and `captures()` tells what became of the calls.
    """
    if step is not None and not isinstance(step, torch.optim.Optimizer) and not callable(step):
        raise CaptureError(
            f"capture takes a function, a module or an optimizer, and got a {type(step).__name__}\n  at {user_site()}\n"
            "  capture the function that computes it: captured = lazy_backend.capture(function)"
        )
    if not isinstance(step, torch.nn.Module | torch.optim.Optimizer):
        return capture_function(step, verify_every=verify_every, max_different_graphs=max_different_graphs)
    if max_different_graphs is not None or verify_every:
        raise CaptureError(
            f"capture({type(step).__name__}): verify_every must be None or 0; max_different_graphs is for functions\n"
            f"  at {user_site()}\n  limit the graphs of steps with lazy_backend.step(max_different_graphs=n)"
        )
    if isinstance(step, torch.nn.Module):
        return capture_module(step, verify_every is None)
    return capture_optimizer(step, verify_every is None)


@overload
def uncapture(step: Part) -> Part: ...  # type: ignore[overload-overlap]


@overload
def uncapture(step: Callable[P, R]) -> Callable[P, R]: ...


def uncapture(step: Any) -> Any:
    """Undo `capture`: return the function that was captured, or the module or optimizer itself, uncaptured.

    Its calls run as written from the next one on; a backward of a call that was replayed is what it would have been.
    What is not captured is returned as it is. Parts of a captured module that were captured by themselves stay so.
    """
    if isinstance(step, torch.nn.Module):
        uncapture_module(step)
    elif isinstance(step, torch.optim.Optimizer):
        uncapture_optimizer(step)
    while isinstance(step, Captured):  # once more, if it was captured twice
        step = step.written()
    return step


def captures() -> list[dict[str, Any]]:
    """A row for each captured module, optimizer and function that is alive: what became of its calls.

    `name`; `kind`: "module", "optimizer" or "function"; `site`: the line of `capture`; `calls`, and of these `replays`;
    `microseconds_per_replay`: of a forward or a step, None for functions; `as_written`: reasons why calls ran as
    written, with their numbers, the most frequent first.
    """
    return accounts.describe()
