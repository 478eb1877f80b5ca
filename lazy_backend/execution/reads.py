"""Read the values of lazy tensors.

Note [A read cuts the graph]
Code that needs a value runs everything pending on the device, once, and waits. Nothing is ever computed twice: unlike
in LTC and torch_xla, a read is not a separate graph whose operators stay pending. Every cut is counted with its cause.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from lazy_backend.execution.sync import executor
from lazy_backend.lowering.device_graphs.run_order import wait_for_runs
from lazy_backend.tensors.state import DeviceContext, LazyStorage, TensorData
from lazy_backend.tensors.tensor import LazyTensor, backing_tensor, poisoned, without_memory
from lazy_backend.tensors.thread_state import run_clean
from lazy_backend.tensors.transfers import counted_download


def read(data: TensorData, cause: str) -> torch.Tensor:
    """The real tensor of `data`, computed first if need be. Not a copy: do not write to it."""
    context = data.context
    storage = data.storage
    if storage.error is not None:
        raise poisoned(storage)
    if storage in context.given_back:
        raise without_memory()
    compute(context, [storage], cause)
    if context.backing.type != "cpu":
        wait_for_runs(context.backing)
    return run_clean(backing_tensor, data)


def compute(context: DeviceContext, storages: Sequence[LazyStorage], cause: str) -> None:
    """Make sure that `storages` have their values. Cuts only if the trace makes or writes one of them.

    So a thread that logs what earlier steps computed does not disturb the step that is being recorded.
    """
    executor.rules.check_allowed(cause)
    context.latest_read = object()
    context.wait_for_body()
    with context.lock:
        trace = context.trace
        # an input may lack its value too, while the run that makes it is under way: that needs no cut
        made_here = [s for s in storages if s.epoch is trace.epoch and s not in trace.groups]
        # a trace whose calls run as they are recorded ends where a deferred one would: both name the same program
        needs_cut = any(trace.computed or executor.should_sync_tensor(storage) for storage in made_here)
        used = {trace.groups[s] for s in storages if s in trace.groups}
        if used and not needs_cut:
            needs_cut = not used.isdisjoint(trace.written_groups())
    if needs_cut:
        executor.cut(context, cause)
    else:
        executor.barrier(context)


def get_tensors_fused(tensors: Sequence[LazyTensor], cause: str) -> list[torch.Tensor]:
    """CPU copies of `tensors`, after one sync of each device among them."""
    for context in dict.fromkeys(tensor._data.context for tensor in tensors):
        storages = [tensor._data.storage for tensor in tensors if tensor._data.context is context]
        compute(context, storages, cause)
        if context.backing.type != "cpu":
            wait_for_runs(context.backing)
    return fetch_tensors(gather_tensors_data(tensors))


def gather_tensors_data(tensors: Sequence[LazyTensor]) -> list[torch.Tensor]:
    """The real tensors of `tensors`, which must have been computed."""
    return [backing_tensor(tensor._data) for tensor in tensors]


def fetch_tensors(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies on the CPU."""
    return run_clean(
        lambda: [counted_download(t.nbytes, functools.partial(t.detach().to, "cpu", copy=True)) for t in tensors]
    )
