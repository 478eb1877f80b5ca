"""Record what ranks send to single other ranks, and receive from them.

In: the methods `send` and `recv` of process groups. Out: recorded calls, and work whose `wait` is recorded too.

Note [Exchanges begin and finish]
Two ranks that both send and then receive would wait for each other for ever if sending were one call. So an exchange is
begun where the program begins it, and finished where the program waits for it, in this step or a later one. What is
recorded thus waits where eager waits, and for nothing else; only a rank whose recorded calls do not run, since it
neither ends a step nor reads, makes others wait longer. What a rank receives is in its tensor from the recorded wait
on. Ranks do not have the same exchanges, so these have no part in what they compare, see Note [Ranks agree].
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lazy_backend.distributed.order import order_of
from lazy_backend.lowering.collectives.communication import collective
from lazy_backend.lowering.collectives.groups import group_numbers
from lazy_backend.lowering.ir.graph import is_contiguous
from lazy_backend.ports.process_groups import check_messages
from lazy_backend.recording.record import record
from lazy_backend.tensors.tensor import LazyTensor

aten = torch.ops.aten

_Work: Any = getattr(dist, "Work", object)  # absent where PyTorch was built without distributed


class ExchangeWork(_Work):  # type: ignore[misc]
    """A recorded send or receive. It is over once somebody has waited for it."""

    def __init__(self, tensor: LazyTensor, ticket: torch.Tensor, peer: int, receives: bool) -> None:
        super().__init__()
        self._tensor = tensor
        self._ticket: torch.Tensor | None = ticket
        self._peer = peer
        self._receives = receives

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Record that the program waits here. The group's timeout counts, not this one."""
        ticket = self._ticket
        if ticket is not None:
            tensor, order = self._tensor, order_of(self._tensor._data.context)
            if self._receives:
                meta = tensor._data.meta
                received = record(collective("finish"), (ticket, order, list(meta.shape), meta.dtype), {})
                record(aten.copy_.default, (tensor, received), {})
            else:
                record(collective("finish_send"), (ticket, order), {})
            self._ticket = None  # only now: whoever is interrupted may wait again
        return True

    def is_completed(self) -> bool:
        """Whether somebody has waited: gloo, too, knows no earlier."""
        return self._ticket is None

    def is_success(self) -> bool:
        return self.is_completed()

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return [self._tensor]

    def source_rank(self) -> int:
        """The rank within the group that is sent to, or received from."""
        return self._peer

    _source_rank = source_rank  # what PyTorch calls it

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """What the program waits for is recorded: here."""
        self.wait()
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result([self._tensor])
        return future


def exchanging(communicate: Callable[..., Any]) -> Callable[..., Any]:
    """The method `send` or `recv` of process groups, which records calls for lazy tensors."""
    begins = {"send": "begin_send", "recv": "begin_receive"}[communicate.__name__]

    @functools.wraps(communicate)
    def call(group: dist.ProcessGroup, tensors: Sequence[Any], peer: int, tag: int = 0) -> Any:
        if not _is_recorded(tensors, peer, tag):
            return communicate(group, tensors, peer, tag)
        (tensor,) = tensors
        numbers = peer, tag, group_numbers.number_of(group)
        ticket = record(collective(begins), (tensor, order_of(tensor._data.context), *numbers), {})
        return ExchangeWork(tensor, ticket, peer, receives=begins == "begin_receive")

    return call


def _is_recorded(tensors: Sequence[Any], peer: Any, tag: Any) -> bool:
    """Whether a call is recorded. Others run at once, or are eager's errors."""
    if len(tensors) != 1 or tensors[0].__class__ is not LazyTensor:
        return False
    data = tensors[0]._data
    is_plain = not data.meta.conj and not data.meta.neg and is_contiguous(data.meta)
    return is_plain and data.context.backing.type == "cpu" and peer.__class__ is int and tag.__class__ is int


def batching(original: Callable[..., list[dist.Work]]) -> Callable[..., list[dist.Work]]:
    """`batch_isend_irecv`, which asks PyTorch for the backend of the tensors' device: lazy devices have none."""

    @functools.wraps(original)
    def batch_isend_irecv(p2p_op_list: list[Any]) -> list[dist.Work]:
        if not any(_is_of_cpu(getattr(one, "tensor", None)) for one in p2p_op_list):
            return original(p2p_op_list)
        check_messages(p2p_op_list)
        works = [_begun(one) for one in p2p_op_list]
        return [work for work in works if work is not None]

    return batch_isend_irecv


def _is_of_cpu(tensor: object) -> bool:
    return isinstance(tensor, LazyTensor) and tensor._data.context.backing.type == "cpu"


def _begun(one: Any) -> dist.Work | None:
    side = "group_dst" if one.op is dist.isend else "group_src"
    return one.op(one.tensor, group=one.group, tag=one.tag, **{side: one.group_peer})  # type: ignore[no-any-return]
