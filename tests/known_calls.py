"""Calls of each kind of result, which tests make until the recorder in C++ knows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# name -> a call of a tensor, a tensor to write and a list of both
CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor, list[torch.Tensor]], Any]] = {
    "result": lambda given, out, both: given.mul(2),
    "results": lambda given, out, both: given.unbind(0),
    "view": lambda given, out, both: given.t(),
    "in place": lambda given, out, both: given.add_(1),
    "list": lambda given, out, both: torch._foreach_mul(both, 2.0),
    "list in place": lambda given, out, both: torch._foreach_add_(both, 1.0),
    "out": lambda given, out, both: torch.add(given, 1, out=out),
    "values and places": lambda given, out, both: given.sort(1),
}

# Factories by the arguments that they get. Each makes one tensor on a device.
FACTORIES: dict[str, Callable[[str], torch.Tensor]] = {
    "ones": lambda device: torch.ones(2, 3, device=device),
    "ones of a dtype": lambda device: torch.ones((2, 3), dtype=torch.int32, device=device),
    "zeros of no size": lambda device: torch.zeros((), dtype=torch.bool, device=device),
    "full": lambda device: torch.full((2,), 1.5, device=device),
    "full of an integer": lambda device: torch.full((2,), 3, device=device),
    "full of a bool": lambda device: torch.full((2,), True, device=device),
    "full of a complex number": lambda device: torch.full((2,), 1j, device=device),
    "arange": lambda device: torch.arange(5, device=device),
    "arange of floats": lambda device: torch.arange(0.5, 3.0, 0.25, device=device),
    "arange in steps": lambda device: torch.arange(1, 9, 3, dtype=torch.float64, device=device),
    "linspace": lambda device: torch.linspace(0, 1, 7, device=device),
    "eye": lambda device: torch.eye(3, 2, device=device),
    "triangle": lambda device: torch.tril_indices(3, 3, 1, device=device),
    "scalar": lambda device: torch.scalar_tensor(2.5, device=device),
    "layout": lambda device: torch.ones(2, layout=torch.strided, pin_memory=False, device=device),
    "requires_grad": lambda device: torch.ones(2, requires_grad=True, device=device),
    "tensor": lambda device: torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device),
    "random numbers": lambda device: torch.rand(3, device=device),
    "random integers": lambda device: torch.randint(9, (3,), device=device),
    "random permutation": lambda device: torch.randperm(5, device=device),
}


def draws(factory: str) -> bool:
    """Whether a factory draws random numbers, which are others than in eager."""
    return factory.startswith("random")
