"""The collectives that graphs call: each writes its result into tensors that it is given, as those of c10d do.

In: tensors on the backing device. Out: `torch.distributed`'s results in them, once the call returns.

Note [Collectives have an order]
All processes of a group must communicate in the same order, whichever plan runs the graph, and none may leave out a
collective whose result it does not need: the others would wait for it. So every collective also takes the device's
order tensor and says that it writes to it. No pass drops, doubles or reorders writes to memory from outside a graph,
nor does a compiler. Nothing is stored there.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from lazy_backend.caching.process_locks import process_lock
from lazy_backend.lowering.collectives.agreement import agreements, describe_collective

# By name: the operator's arguments, and which of them it writes besides the order tensor.
_SCHEMAS = {
    "all_reduce_": "Tensor(a!) tensor, Tensor(b!) order, str reduction, int group",
    "broadcast_": "Tensor(a!) tensor, Tensor(b!) order, int root, int group",
    "reduce_": "Tensor(a!) tensor, Tensor(b!) order, str reduction, int root, int group",
    "all_gather_": "Tensor(a!) gathered, Tensor tensor, Tensor(b!) order, int group",
    "reduce_scatter_": "Tensor(a!) scattered, Tensor tensor, Tensor(b!) order, str reduction, int group",
    "gather_": "Tensor(a!) gathered, Tensor tensor, Tensor(b!) order, int root, int group",
    "scatter_": "Tensor(a!) scattered, Tensor parts, Tensor(b!) order, int root, int group",
    "all_to_all_": (
        "Tensor(a!) received, Tensor sent, Tensor(b!) order, int[] received_sizes, int[] sent_sizes, int group"
    ),
}


def place_of_common(name: str) -> int:
    """Which operand of the collective `name` has the same dtype and shape on all ranks: what they compare."""
    return 1 if name == "gather_" else 0


@functools.cache
def _reductions() -> dict[str, Any]:
    """Each `ReduceOp` that has no parameters of its own, by name. Not in every build of PyTorch."""
    names = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
    return {name: getattr(dist.ReduceOp, name.upper()) for name in names}


def reduction_name(reduction: Any) -> str | None:
    """The name of a `ReduceOp`; None if it has parameters, which graphs do not hold."""
    return next((name for name, one in _reductions().items() if one == reduction), None)


class _Communicating(threading.local):
    """Whether this thread runs one of our collectives, rather than the user's own."""

    now = False


communicating = _Communicating()


def _as_ours(kernel: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(kernel)
    def run(*args: Any) -> None:
        before = communicating.now
        try:
            communicating.now = True
            kernel(*args)
        finally:
            communicating.now = before  # a plain store, which nothing interrupts

    return run


@contextmanager
def _dense(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Contiguous memory whose content `tensor` has after the block: backends communicate nothing else."""
    if tensor.is_contiguous():
        yield _real(tensor)
        return
    dense = tensor.contiguous()
    yield _real(dense)
    tensor.copy_(dense)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs, of which backends know the dtype."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _all_reduce(tensor: torch.Tensor, order: torch.Tensor, reduction: str, group: int) -> None:
    options = dist.AllreduceOptions()
    options.reduceOp = _reductions()[reduction]
    with _calling("all_reduce_", tensor, group, reduction) as called, _dense(tensor) as dense:
        called.allreduce([dense], options).wait()


def _broadcast(tensor: torch.Tensor, order: torch.Tensor, root: int, group: int) -> None:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    with _calling("broadcast_", tensor, group) as called, _dense(tensor) as dense:
        called.broadcast([dense], options).wait()


def _reduce(tensor: torch.Tensor, order: torch.Tensor, reduction: str, root: int, group: int) -> None:
    options = dist.ReduceOptions()
    options.reduceOp = _reductions()[reduction]
    options.rootRank = root
    with _calling("reduce_", tensor, group, reduction) as called, _dense(tensor) as dense:
        called.reduce([dense], options).wait()


def _all_gather(gathered: torch.Tensor, tensor: torch.Tensor, order: torch.Tensor, group: int) -> None:
    with _calling("all_gather_", gathered, group) as called, _dense(gathered) as dense:
        # flat, as backends compare shapes
        called._allgather_base(dense.view(-1), _real(tensor).reshape(-1)).wait()


def _reduce_scatter(
    scattered: torch.Tensor, tensor: torch.Tensor, order: torch.Tensor, reduction: str, group: int
) -> None:
    options = dist.ReduceScatterOptions()
    options.reduceOp = _reductions()[reduction]
    with _calling("reduce_scatter_", scattered, group, reduction) as called, _dense(scattered) as dense:
        called._reduce_scatter_base(dense.view(-1), _real(tensor).reshape(-1), options).wait()


def _gather(gathered: torch.Tensor, tensor: torch.Tensor, order: torch.Tensor, root: int, group: int) -> None:
    """`gathered` has a row for each rank on the root, and is empty on the others."""
    options = dist.GatherOptions()
    options.rootRank = root
    with _calling("gather_", tensor, group) as called, _dense(gathered) as dense:
        rows = [list(dense.unbind())] if called.rank() == root else []
        called.gather(rows, [_real(tensor.contiguous())], options).wait()


def _scatter(scattered: torch.Tensor, parts: torch.Tensor, order: torch.Tensor, root: int, group: int) -> None:
    """`parts` has a row for each rank on the root, and is empty on the others."""
    options = dist.ScatterOptions()
    options.rootRank = root
    with _calling("scatter_", scattered, group) as called, _dense(scattered) as dense:
        rows = [list(_real(parts.contiguous()).unbind())] if called.rank() == root else []
        called.scatter([dense], rows, options).wait()


def _all_to_all(
    received: torch.Tensor,
    sent: torch.Tensor,
    order: torch.Tensor,
    received_sizes: Sequence[int],
    sent_sizes: Sequence[int],
    group: int,
) -> None:
    with _calling("all_to_all_", received, group) as called, _dense(received) as dense:
        called.alltoall_base(dense, _real(sent.contiguous()), list(received_sizes), list(sent_sizes)).wait()


def _calling(
    name: str, tensor: torch.Tensor, group: int, reduction: str | None = None
) -> AbstractContextManager[dist.ProcessGroup]:
    """`tensor`: the operand that `place_of_common` names."""
    dtype, shape = tensor.dtype, tensor.shape
    return agreements.calling(group, lambda: describe_collective(name, dtype, shape, reduction))


_KERNELS: dict[str, Callable[..., None]] = {
    "all_reduce_": _all_reduce,
    "broadcast_": _broadcast,
    "reduce_": _reduce,
    "all_gather_": _all_gather,
    "reduce_scatter_": _reduce_scatter,
    "gather_": _gather,
    "scatter_": _scatter,
    "all_to_all_": _all_to_all,
}

_lock = process_lock()
_libraries: list[torch.library.Library] = []  # kept: a library unregisters its operators when it is destroyed


@functools.cache
def collective(name: str) -> torch._ops.OpOverload:
    """The operator `lazy_backend::<name>`, defined by the first call."""
    with _lock:
        if not _libraries:
            library = torch.library.Library("lazy_backend", "FRAGMENT")
            for each, schema in _SCHEMAS.items():
                library.define(f"{each}({schema}) -> ()")
                library.impl(each, _as_ours(_KERNELS[each]), "CompositeExplicitAutograd")
                torch.library.register_fake(f"lazy_backend::{each}", lambda *args: None, lib=library)
            _libraries.append(library)
    return getattr(torch.ops.lazy_backend, name).default  # type: ignore[no-any-return]


def define_collectives() -> None:
    """Define the operators for a graph that calls them by name."""
    collective("all_reduce_")


def is_collective(op: torch._ops.OpOverload) -> bool:
    return op.namespace == "lazy_backend" and op._opname in _KERNELS
