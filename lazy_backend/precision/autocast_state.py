"""What autocast is for lazy tensors, per thread: whether it is on, its dtype, and the casts of weights that it keeps.

In: what blocks of `torch.autocast` set. Out: whether operators pass the kernels of `casts`, and what these ask. See
Note [Which autocast counts].
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lazy_backend.ports.replacements.mixed_precision import dtype_on, is_enabled_on, lead_operators
from lazy_backend.precision.cast_rules import default_dtype
from lazy_backend.tensors.contexts import contexts


class AutocastState(threading.local):
    """The state of one thread."""

    # whether there is a lazy device: before, nobody pays for blocks that are meant for other tensors
    has_device = False

    def __init__(self) -> None:
        self.enabled: bool | None = None  # as the innermost block for "lazy" says; None without one
        self.dtype: torch.dtype | None = None
        self.is_in_kernel = False  # the dispatcher knows, but not where a call has reached this package
        # id of a weight -> the weight, so that the id stays its own, and its cast
        self.casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def is_enabled(self) -> bool:
        return self._follows_backing() if self.enabled is None else self.enabled

    def is_casting(self) -> bool:
        """Whether an operator called now is cast: not one that is called by the kernel of another that was."""
        return self.is_enabled() and not self.is_in_kernel

    def _follows_backing(self) -> bool:
        """Whether a block for the backing device is active, and may be meant for lazy tensors."""
        return AutocastState.has_device and is_enabled_on(contexts.backing_type())

    def lower_dtype(self) -> torch.dtype:
        """The dtype of the block that counts, or that of a next block that names none."""
        if self.enabled is None and self._follows_backing():
            return dtype_on(contexts.backing_type())
        return default_dtype(contexts.backing_type()) if self.dtype is None else self.dtype

    def lead_operators(self) -> bool:
        """Lead this thread's operators through the kernels, or past them. Returns whether through."""
        enabled = self.is_enabled()
        lead_operators(enabled)
        return enabled

    @contextmanager
    def own_casts(self) -> Iterator[None]:
        """Within the block, the casts of weights are its own: what it records does not depend on calls before it."""
        outer, self.casts = self.casts, {}
        try:
            yield
        finally:
            self.casts = outer


autocast_state = AutocastState()
