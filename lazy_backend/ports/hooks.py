"""Modules and optimizers: the attributes they are made of, their hooks, and functions replaced while one is watched.

In: `torch.nn`, `torch.optim`. Out: the same under public names.
"""

from __future__ import annotations

import cmath
import math
import sys
from collections.abc import Callable
from operator import attrgetter
from types import FrameType
from typing import Any

import torch
import torch.optim.lr_scheduler
import torch.overrides
from torch.nn.modules import module as _modules

from lazy_backend.ports.cpython import attributes_of, import_uninterrupted, is_a

# torch.optim deletes the attribute `optimizer` that the import of its module sets
_optimizers: Any = sys.modules["torch.optim.optimizer"]

# ----- modules

# Attributes of a module that hold its registered tensors and submodules.
PARAMETERS, BUFFERS, MODULES = REGISTRIES = ("_parameters", "_buffers", "_modules")
# Attributes that hold the hooks of a module's calls.
CALL_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# Attributes of an optimizer that hold the hooks of its steps.
STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
# Attributes of modules and optimizers that neither forward nor backward nor a step reads by itself: those for
# `state_dict`, and the options of hooks, which change with the hooks.
UNREAD = frozenset(
    (
        "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
        "_non_persistent_buffers_set", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
        "_forward_pre_hooks_with_kwargs", "_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks",
        "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks",
    )
)  # fmt: skip

# The hooks of all modules.
HOOKS_OF_ALL_MODULES: tuple[dict[int, Any], ...] = tuple(
    getattr(_modules, name, {})
    for name in (
        "_global_forward_pre_hooks",
        "_global_forward_hooks",
        "_global_backward_pre_hooks",
        "_global_backward_hooks",
    )
)


def modules_within(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """`module` and all modules within, each once, with its path: as `named_modules`, which classes may override."""
    found: dict[int, tuple[str, torch.nn.Module]] = {}
    waiting = [("", module)]
    while waiting:
        path, one = waiting.pop()
        if id(one) in found:
            continue
        found[id(one)] = path, one
        children = dict.items(dict.get(attributes_of(one), MODULES, {}))
        prefix = f"{path}." if path else ""
        waiting += [(prefix + name, child) for name, child in children if is_a(child, torch.nn.Module)][::-1]
    return list(found.values())


def registered_tensors(part: torch.nn.Module | torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters and buffers of a module, without those of modules within, or the parameters of an optimizer."""
    attributes = attributes_of(part)
    if is_a(part, torch.nn.Module):
        found = [one for name in (PARAMETERS, BUFFERS) for one in dict.values(dict.get(attributes, name) or {})]
    else:
        found = [one for group in dict.get(attributes, "param_groups") or () for one in group.get("params", ())]
    return [one for one in found if is_a(one, torch.Tensor)]


# What `Module.__call__` calls in place of the module's code, as `Module.compile` sets it; None for most. Copies and
# pickles of a module leave it out.
entry_of: Callable[[torch.nn.Module], Any] = attrgetter("_compiled_call_impl")
# A module's call without that.
call_of: Callable[[torch.nn.Module], Callable[..., Any]] = attrgetter("_call_impl")


_CODE_OF_CALLS = torch.nn.Module.__call__.__code__


def called_from(frame: FrameType) -> torch.nn.Module | None:
    """The module whose call runs in `frame`; None for any other frame."""
    return frame.f_locals["self"] if frame.f_code is _CODE_OF_CALLS else None


def set_entry(module: torch.nn.Module, entry: Any) -> None:
    """Let `entry` be called in place of the module's code."""
    module._compiled_call_impl = entry


def has_known_attributes_of_modules() -> bool:
    """Whether a new module has the attributes that are named here."""
    module = torch.nn.ReLU()
    names = (*REGISTRIES, *CALL_HOOKS, "_compiled_call_impl")
    return all(hasattr(module, name) for name in names) and _CODE_OF_CALLS.co_varnames[:1] == ("self",)


# ----- optimizers

# The hooks of all optimizers, before and after a step.
HOOKS_BEFORE_ALL_STEPS: dict[int, Any] = getattr(_optimizers, "_global_optimizer_pre_hooks", {})
HOOKS_AFTER_ALL_STEPS: dict[int, Any] = getattr(_optimizers, "_global_optimizer_post_hooks", {})
# Those of one.
step_hooks_of: Callable[[torch.optim.Optimizer], tuple[Any, Any]] = attrgetter(*STEP_HOOKS)
# The hooks of all modules and of all optimizers.
HOOKS_OF_ALL = (*HOOKS_OF_ALL_MODULES, HOOKS_BEFORE_ALL_STEPS, HOOKS_AFTER_ALL_STEPS)


def has_known_attributes_of_optimizers() -> bool:
    """Whether a new optimizer has the attributes that are named here, and hooks can be had of all."""
    import_uninterrupted("torch._dynamo")  # as the first optimizer does
    optimizer = torch.optim.SGD([torch.zeros(())], lr=0.0)
    step_hooks_of(optimizer)
    names = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    return all(hasattr(_optimizers, name) for name in names)


# An attribute of the wrapper that a scheduler puts around `step`. It warns at its first step if it does not find it.
SCHEDULED = "_wrapped_by_lr_sched"


def pass_on_schedule(before: Any, step: Any) -> None:
    """Let `step`, which calls `before`, be taken for the wrapper of a scheduler if `before` is."""
    if hasattr(before, SCHEDULED):
        setattr(step, SCHEDULED, True)


# ----- functions that are replaced for a while


class Substitute:
    """A function of PyTorch that is another one between `put` and `restore`, each of which may be done twice."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner = owner
        self._name = name
        self.original: Any = getattr(owner, name, None)

    def put(self, function: Callable[..., Any]) -> None:
        setattr(self._owner, self._name, function)

    def restore(self) -> None:
        setattr(self._owner, self._name, self.original)


from_numpy = Substitute(torch, "from_numpy")
# Functions of floats, which C code reads without asking.
_MATH = (
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "copysign", "cos", "cosh", "degrees", "erf",
    "erfc", "exp", "exp2", "expm1", "fabs", "fmod", "hypot", "isfinite", "isinf", "isnan", "log", "log10", "log1p",
    "log2", "pow", "radians", "remainder", "sin", "sinh", "sqrt", "tan", "tanh",
)  # fmt: skip
functions_of_math = [Substitute(math, name) for name in _MATH if hasattr(math, name)]
# All others but those that ask: a replay must find again what they were given.
_ASK = ("ceil", "floor", "trunc")
other_functions_of_math = [
    Substitute(module, name)
    for module, names in ((math, (*_MATH, *_ASK)), (cmath, ()))
    for name, value in vars(module).items()
    if callable(value) and name not in names and not name.startswith("_")
]
has_torch_function = Substitute(torch.overrides, "has_torch_function")
run_backward = Substitute(torch.autograd, "_engine_run_backward")
# Every scheduler of PyTorch sets hyperparameters by this function.
set_hyperparameter = Substitute(torch.optim.lr_scheduler, "_update_param_group_val")


def eval_frame_setter() -> Substitute | None:
    """The function that turns Dynamo on and off. None until something has imported Dynamo, or if it has none."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return Substitute(dynamo, "_maybe_set_eval_frame") if hasattr(dynamo, "_maybe_set_eval_frame") else None
