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
