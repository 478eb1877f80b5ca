"""What trainers' models and optimizers may have replayed without being asked for: what is known to be sound.

In: the objects that a trainer works with. Out: the same objects, captured where that cannot change what they do; those
that cannot be replayed run as written, without the warning that a `capture` of the user's gives.

Note [Captured without being asked]
A replay checks all that a module or an optimizer is made of, but not other Python values that its code reads, such as a
global number or Python's own random numbers (docs/limits.md). Optimizers of PyTorch read none; nor do its modules and
the models of transformers and torchvision, which draw random numbers from PyTorch, or upload them, and both are seen. A
class of the user's may, and so may an activation or a `forward` that the user gave to a known one. So of a user's
model the largest parts are captured that are made of known code alone, such as a `Sequential`. A part of few layers is
left as it is: to record some calls costs less than to replay them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from lazy_backend.ports.hooks import entry_of
from lazy_backend.regions.module import capture_module
from lazy_backend.regions.optimizer import capture_optimizer

# Packages of modules whose calls read nothing but their own state and their arguments.
_KNOWN = ("torch.nn.modules.", "transformers.", "torchvision.models.", "torchvision.ops.")

# Where functions that they keep as attributes come from, such as an activation, or the head that trl gives to models.
_KNOWN_FUNCTIONS = ("torch.", "transformers.", "torchvision.", "trl.", "builtins.")

# Where hooks come from that do nothing besides what is recorded, such as having an embedding require gradients.
_KNOWN_HOOKS = ("transformers.",)

# Layers, each of one to three calls of operators, from which on replaying costs less than recording.
_MIN_LAYERS = 4
_LARGE_LAYERS = (torch.nn.RNNBase, torch.nn.MultiheadAttention)  # a dozen calls each, and more

_LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict)  # which are not called


def replay_steps(optimizer: torch.optim.Optimizer) -> None:
    """Capture `optimizer` if its class is PyTorch's."""
    if type(optimizer).__module__.startswith("torch.optim."):
        capture_optimizer(optimizer, is_asked=False)


def replay_known_parts(module: torch.nn.Module) -> None:
    """Capture `module` if its class is known, or else its largest parts that are known and worth it."""
    _KnownParts().visit(module)


class _KnownParts:
    """Captures parts of one model, each only once."""

    def __init__(self) -> None:
        self._is_known: dict[torch.nn.Module, bool] = {}

    def visit(self, module: torch.nn.Module) -> None:
        if entry_of(module) is not None:
            return
        if self._knows(module) and not isinstance(module, _LISTS):
            if _num_layers(module) >= _MIN_LAYERS:
                capture_module(module, is_asked=False, knows_hook=_is_known_hook)
            return
        for part in module.children():
            self.visit(part)

    def _knows(self, module: torch.nn.Module) -> bool:
        """Whether all that `module` calls is of known classes, and nothing within was compiled or captured."""
        known = self._is_known.get(module)
        if known is None:
            self._is_known[module] = False  # for a module that contains itself
            is_alone = _comes_from_known(type(module)) and entry_of(module) is None
            is_alone = is_alone and all(map(_is_inert, vars(module).values()))
            known = self._is_known[module] = is_alone and all(map(self._knows, module.children()))
        return known


def _comes_from_known(definition: Any) -> bool:
    return f"{definition.__module__}.".startswith(_KNOWN)


def _is_inert(value: Any) -> bool:
    """Whether an attribute's calls, if it can be called, are known: not those of a user's activation or `forward`."""
    if not callable(value) or isinstance(value, torch.nn.Module | torch.Tensor):
        return True
    return _place_of(value).startswith(_KNOWN_FUNCTIONS)


def _is_known_hook(hook: Any) -> bool:
    return _place_of(hook).startswith(_KNOWN_HOOKS)


def _place_of(function: Any) -> str:
    """The module that a function's code is in, with a dot: a wrapper has the `__module__` of what it stands for."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    place = getattr(function, "__globals__", {}).get("__name__")
    if place is None:
        named = function if hasattr(function, "__module__") else type(function)
        place = named.__module__ or "builtins"
    return f"{place}."


def _num_layers(module: torch.nn.Module) -> int:
    is_layer = [next(part.children(), None) is None for part in module.modules()]
    is_large = [isinstance(part, _LARGE_LAYERS) for part in module.modules()]
    return sum(is_layer) + _MIN_LAYERS * sum(is_large)


def unwrapped(optimizer: Any) -> Any:
    """The optimizer within the wrappers of accelerate and Lightning, which decide by other state whether it steps."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer
