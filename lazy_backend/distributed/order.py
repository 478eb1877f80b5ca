"""The order of collectives: among those that are recorded, and between these and others.

In: a device that is to record a collective; a call of a process group with tensors that are not lazy. Out: the device's
order tensor; what was recorded before such a call has run by then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from lazy_backend.execution.sync import executor
from lazy_backend.lowering.collectives.agreement import agreements
from lazy_backend.lowering.collectives.communication import communicating
from lazy_backend.recording.arguments import flat
from lazy_backend.tensors.contexts import contexts
from lazy_backend.tensors.outside import new_data
from lazy_backend.tensors.state import DeviceContext
from lazy_backend.tensors.tensor import LazyTensor, wrap
from lazy_backend.tensors.thread_state import run_clean

_orders: WeakKeyDictionary[DeviceContext, LazyTensor] = WeakKeyDictionary()


def order_of(context: DeviceContext) -> LazyTensor:
    """The device's order tensor. See Note [Collectives have an order]."""
    found = _orders.get(context)
    if found is None:
        made = run_clean(lambda: torch.zeros(1, dtype=torch.int64, device=context.backing))
        found = _orders.setdefault(context, wrap(new_data(context, made)))
        context.order = found._data
    return found


def reset() -> None:
    """Have each device begin with another order tensor."""
    for context in list(_orders):
        context.order = None
    _orders.clear()


def finish_collectives() -> None:
    """Run the collectives that were recorded on any device, and wait for them."""
    for context in contexts.get_active_devices():
        order = _orders.get(context)
        if order is not None:
            if order._data.epoch is context.trace.epoch:
                executor.cut(context, "a collective of tensors that are not lazy")
            context.locker.wait_idle()


def finish_group(group: dist.ProcessGroup | None) -> None:
    """What comes before a group is destroyed, or all of them."""
    finish_collectives()
    if group is None or group is dist.group.WORLD:
        agreements.begin_generation()


def in_order(communicate: Callable[..., Any]) -> Callable[..., Any]:
    """A method of process groups that first runs the collectives that were recorded before it is called.

    Before a barrier, everything that was recorded runs.
    """
    is_barrier = getattr(communicate, "__name__", "") in ("barrier", "monitored_barrier")

    @functools.wraps(communicate)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_barrier and not communicating.now:
            executor.sync_live_tensors_graph(contexts.get_active_devices(), wait=True, cause="a barrier")
        elif _orders and not communicating.now and not _takes_lazy(args):
            finish_collectives()
        return communicate(*args, **kwargs)

    return call


def _takes_lazy(args: Any) -> bool:
    """Whether a lazy tensor is among the arguments: such a call is recorded, or cuts by itself."""
    return any(isinstance(arg, LazyTensor) for arg in flat(list(args)))
