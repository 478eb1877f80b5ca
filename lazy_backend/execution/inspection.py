"""Inspect what a sync would compute, without computing it."""

from __future__ import annotations

from collections.abc import Sequence

from lazy_backend.execution.computations import current_environment
from lazy_backend.execution.sync import executor
from lazy_backend.lowering.ir.canonical import PostOrderData, post_order_for
from lazy_backend.lowering.ir.graph import Graph
from lazy_backend.lowering.ir.program import Call, Fresh, View
from lazy_backend.lowering.plans.cached_computation import make_key
from lazy_backend.tensors.state import DeviceContext
from lazy_backend.tensors.tensor import LazyTensor


def post_order_of(tensors: Sequence[LazyTensor]) -> PostOrderData:
    """The graph a sync of just these tensors would run; they must be on one device."""
    context = _common_context(tensors)
    with context.lock:
        wanted = {tensor._data.storage for tensor in tensors}
        indices = [place for place, storage in zip(*context.trace.live(), strict=True) if storage in wanted]
        return executor.computations.run_post_order(context, indices)


def graph_of(tensors: Sequence[LazyTensor]) -> Graph:
    """The graph that returns `tensors` themselves, whereas a sync computes the storages behind them.

    For inspection only: its outputs may share memory, as a view and its base do.
    """
    context = _common_context(tensors)
    with context.lock:
        trace = context.trace
        wanted = {tensor._data.token for tensor in tensors if tensor._data.epoch is trace.epoch}
        calls = [call for call in trace.cursor.path() if isinstance(call, Call)]
        made = [r.token for call in calls for r in call.results if isinstance(r, Fresh | View)]
        return post_order_for(calls, [token for token in made if token in wanted], context.backing).graph


def get_graph_hash(tensors: Sequence[LazyTensor]) -> str:
    """The hash of the graph that `post_order_of` returns, the same in every process."""
    data = post_order_of(tensors)
    return make_key(data.graph, current_environment()).hash_hex()


def _common_context(tensors: Sequence[LazyTensor]) -> DeviceContext:
    devices = {tensor._data.context for tensor in tensors}
    if len(devices) != 1:
        raise ValueError(f"expected tensors of one lazy device, got {len(devices)} devices")
    return devices.pop()
