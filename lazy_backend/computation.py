"""What would be computed, and what was. Names of `torch._lazy.computation`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lazy_backend.lowering.computation import Computation
from lazy_backend.lowering.profiling import GraphExecutorState
from lazy_backend.sync import executor
from lazy_backend.tensor import LazyTensor


def get_graph_hash(tensors: Sequence[torch.Tensor]) -> str:
    """32 hexadecimal digits of the key of the graph that computes `tensors`, which stay pending.

    Equal for equal programs in every process with the same PyTorch, backend and device.
    """
    return executor.get_graph_hash(check_lazy(tensors))


def check_lazy(tensors: Sequence[torch.Tensor]) -> list[LazyTensor]:
    for tensor in tensors:
        if not isinstance(tensor, LazyTensor):
            raise TypeError(f"expected lazy tensors, got one on {tensor.device}\n  as from tensor.to('lazy')")
    return list(tensors)  # type: ignore[arg-type]


def get_cached_computations() -> list[Computation]:
    """The computations in the cache, in no particular order. Their `executor.get_debug_state()` shows their plans."""
    return list(executor.get_computation_cache())


def get_debug_states() -> dict[str, GraphExecutorState]:
    """Per cached computation, by hash: runs, plan, compiles, promoted scalars, error."""
    return {c.key.hash_hex(): c.executor.get_debug_state() for c in get_cached_computations()}
