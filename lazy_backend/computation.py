"""Pending graphs and cached computations. Names follow `torch._lazy.computation`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lazy_backend.errors.tracebacks import hide_internals
from lazy_backend.execution import inspection
from lazy_backend.execution.sync import executor
from lazy_backend.lowering.plans.cached_computation import Computation
from lazy_backend.lowering.plans.profiling import GraphExecutorState
from lazy_backend.tensors.sparse_tensor import LazySparseTensor
from lazy_backend.tensors.tensor import LazyTensor


@hide_internals
def get_graph_hash(tensors: Sequence[torch.Tensor]) -> str:
    """32 hexadecimal digits of the key of the graph that computes `tensors`, which stay pending.

    Equal for equal programs in every process with the same PyTorch, backend and device. Raises `TypeError` for a tensor
    that is not lazy.
    """
    return inspection.get_graph_hash(check_lazy(tensors))


def check_lazy(tensors: Sequence[torch.Tensor]) -> list[LazyTensor]:
    for tensor in tensors:
        if not isinstance(tensor, LazyTensor):
            raise TypeError(f"expected lazy tensors, got {what_it_is(tensor)}")
    return list(tensors)  # type: ignore[arg-type]


def what_it_is(tensor: torch.Tensor) -> str:
    """A description of a tensor that is not a `LazyTensor`, for an error message, with what to do."""
    if isinstance(tensor, LazySparseTensor):
        return "a sparse one, which always has its value\n  ask about its parts, as in tensor.values()"
    return f"one on {tensor.device}\n  as from tensor.to('lazy')"


@hide_internals
def get_computation(graph_hash: str) -> Computation:
    """The cached computation with a hash from `get_graph_hash`. Raises `LookupError` if there is none."""
    found = next((c for c in executor.computations.cache if c.hash == graph_hash), None)
    if found is None:
        raise LookupError(
            f"no cached computation has the hash {graph_hash!r}\n  get_debug_states() has those there are"
        )
    return found


def get_cached_computations() -> list[Computation]:
    """The computations in the cache, in no particular order. Their `executor.get_debug_state()` shows their plans."""
    return list(executor.computations.cache)


def get_debug_states() -> dict[str, GraphExecutorState]:
    """The state of each cached computation, by hash: runs, plan, compiles, promoted scalars, error."""
    return {c.hash: c.executor.get_debug_state() for c in get_cached_computations()}


@hide_internals
def get_debug_state(graph_hash: str) -> GraphExecutorState:
    """The state of one computation. Raises `LookupError` if it is not cached."""
    return get_computation(graph_hash).executor.get_debug_state()


@hide_internals
def is_optimized(graph_hash: str) -> bool:
    """Whether a computation's latest run was compiled, or it has a compiled plan of its own."""
    return get_computation(graph_hash).executor.is_optimized()


@hide_internals
def debug_flush_compilation_cache(graph_hash: str | None = None) -> None:
    """Forget the plans and errors of one computation, or of all: the next runs profile and compile again.

    The disk cache is kept.
    """
    chosen = get_cached_computations() if graph_hash is None else [get_computation(graph_hash)]
    for computation in chosen:
        computation.executor.debug_flush_compilation_cache()
