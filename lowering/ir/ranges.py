"""Our own ranges in PyTorch's profiler.

In: names. Out: context managers that `torch.profiler` shows as ranges while active, and that do nothing otherwise.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.autograd.profiler as _profiler

# Internal, checked on 2.13: the public `torch.profiler.record_function` takes 10 µs per range.
_Range: Any = torch._C._profiler._RecordFunctionFast

_NOTHING = contextlib.nullcontext()


def is_profiling() -> bool:
    """Whether `torch.profiler` or `torch.autograd.profiler` is active."""
    # internal, checked on 2.13: this check takes 40 ns; opening a range while no profiler is active takes 200 ns
    return _profiler._is_profiler_enabled


def profiled(name: str) -> AbstractContextManager[Any]:
    """A range called `lazy_backend: <name>` around a block, if a profiler is active."""
    return _Range(f"lazy_backend: {name}") if _profiler._is_profiler_enabled else _NOTHING  # type: ignore[no-any-return]
