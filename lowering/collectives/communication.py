"""The collectives that graphs call: each writes its result into tensors that it is given, as those of c10d do.

In: tensors on the backing device. Out: `torch.distributed`'s results in them, once the call returns; or a ticket, if
the call only begins, with which a later one finishes.

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

from lazy_backend.cache.process_locks import process_lock
from lazy_backend.lowering.collectives.agreement import (
    Collective,
    CollectiveError,
    agreements,
    describe_collective,
    describe_exchange,
)
from lazy_backend.lowering.collectives.conversation import joined
from lazy_backend.lowering.collectives.groups import group_numbers
from lazy_backend.lowering.collectives.under_way import Flight, under_way
from lazy_backend.ports.dispatcher import OpOverload, base_name
from lazy_backend.ports.process_groups import all_gather_of, reduce_scatter_of
from lazy_backend.ports.table import PROCESS_GROUPS

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

# Those of point-to-point communication, and of what finishes communication: see Note [Memory under way].
_EXCHANGES = {
    "begin_send": "(Tensor tensor, Tensor(b!) order, int peer, int tag, int group) -> Tensor",
    "begin_receive": "(Tensor like, Tensor(b!) order, int peer, int tag, int group) -> Tensor",
    "finish_send": "(Tensor ticket, Tensor(b!) order) -> ()",
    "finish": "(Tensor ticket, Tensor(b!) order, SymInt[] size, ScalarType dtype) -> Tensor",
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


def _as_ours(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        before, conversation = communicating.now, joined.now
        try:
            communicating.now = True
            if conversation is None:
                return kernel(*args)
            return conversation(name, functools.partial(_sends, name, args), kernel, args)
        finally:
            communicating.now = before  # a plain store, which nothing interrupts

    return run


def _sends(name: str, args: Sequence[Any]) -> bool:
    """Whether others hear of an operand of this call."""
    if name in ("broadcast_", "begin_broadcast"):
        *_, root, group = args
        return bool(group_numbers.group_at(group).rank() == root)
    return name not in ("begin_receive", "finish", "finish_send")


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


# ----- what each asks of a group: (group, contiguous memory that is written, other operand, numbers) -> work


def _all_reduce(called: Any, memory: torch.Tensor, _: None, reduction: str) -> dist.Work:
    options = dist.AllreduceOptions()
    options.reduceOp = _reductions()[reduction]
    return called.allreduce([memory], options)  # type: ignore[no-any-return]


def _broadcast(called: Any, memory: torch.Tensor, _: None, root: int) -> dist.Work:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    return called.broadcast([memory], options)  # type: ignore[no-any-return]


def _reduce(called: Any, memory: torch.Tensor, _: None, reduction: str, root: int) -> dist.Work:
    options = dist.ReduceOptions()
    options.reduceOp = _reductions()[reduction]
    options.rootRank = root
    return called.reduce([memory], options)  # type: ignore[no-any-return]


def _all_gather(called: Any, gathered: torch.Tensor, tensor: torch.Tensor) -> dist.Work:
    # flat, as backends compare shapes
    return all_gather_of(called)(gathered.view(-1), tensor.reshape(-1))


def _reduce_scatter(called: Any, scattered: torch.Tensor, tensor: torch.Tensor, reduction: str) -> dist.Work:
    options = dist.ReduceScatterOptions()
    options.reduceOp = _reductions()[reduction]
    return reduce_scatter_of(called)(scattered.view(-1), tensor.reshape(-1), options)


def _gather(called: Any, gathered: torch.Tensor, tensor: torch.Tensor, root: int) -> dist.Work:
    """`gathered` has a row for each rank on the root, and is empty on the others."""
    options = dist.GatherOptions()
    options.rootRank = root
    rows = [list(gathered.unbind())] if called.rank() == root else []
    return called.gather(rows, [tensor], options)  # type: ignore[no-any-return]


def _scatter(called: Any, scattered: torch.Tensor, parts: torch.Tensor, root: int) -> dist.Work:
    """`parts` has a row for each rank on the root, and is empty on the others."""
    options = dist.ScatterOptions()
    options.rootRank = root
    rows = [list(parts.unbind())] if called.rank() == root else []
    return called.scatter([scattered], rows, options)  # type: ignore[no-any-return]


def _all_to_all(
    called: Any, received: torch.Tensor, sent: torch.Tensor, received_sizes: Sequence[int], sent_sizes: Sequence[int]
) -> dist.Work:
    return called.alltoall_base(received, sent, list(received_sizes), list(sent_sizes))  # type: ignore[no-any-return]


_ASK: dict[str, Callable[..., dist.Work]] = {
    "all_reduce_": _all_reduce,
    "broadcast_": _broadcast,
    "reduce_": _reduce,
    "all_gather_": _all_gather,
    "reduce_scatter_": _reduce_scatter,
    "gather_": _gather,
    "scatter_": _scatter,
    "all_to_all_": _all_to_all,
}


# ----- the operators


def _split(args: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor | None, list[Any], int]:
    """What is written, the other operand if there is one, the collective's numbers without the group, the group."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    *numbers, group = (arg for arg in args if not isinstance(arg, torch.Tensor))
    return tensors[0], tensors[1] if len(tensors) > 2 else None, numbers, group


def _calling(
    name: str, target: torch.Tensor, operand: torch.Tensor | None, numbers: Sequence[Any], group: int
) -> AbstractContextManager[dist.ProcessGroup]:
    common = operand if place_of_common(name) and operand is not None else target
    dtype, shape = common.dtype, common.shape
    reduction = next((number for number in numbers if isinstance(number, str)), None)
    return agreements.calling(group, lambda: describe_collective(name, dtype, shape, reduction))


def _call(name: str, *args: Any) -> None:
    """Do the collective `name`."""
    target, operand, numbers, group = _split(args)
    with _calling(name, target, operand, numbers, group) as called, _dense(target) as dense:
        other = None if operand is None else _real(operand.contiguous())
        _ASK[name](called, dense, other, *numbers).wait()


def _begin(name: str, *args: Any) -> torch.Tensor:
    """Begin the collective `name`, and return its ticket. Reads what the collective would write, and writes nothing."""
    target, operand, numbers, group = _split(args)
    layout = torch.contiguous_format
    if operand is None:
        memory, other = target.clone(memory_format=layout), None
    else:
        memory = torch.empty_like(target, memory_format=layout)
        other = _real(operand.clone(memory_format=layout))
    with _calling(name, target, operand, numbers, group) as called:
        work = _ASK[name](called, _real(memory), other, *numbers)
    return under_way.ticket_for(Flight(work, memory, agreements.blame(called)))


def _finish(ticket: torch.Tensor, order: torch.Tensor, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    with agreements.waiting():
        memory = under_way.finish(ticket)
    assert memory is not None
    assert memory.shape == tuple(size)
    assert memory.dtype is dtype
    return memory


def _finish_send(ticket: torch.Tensor, order: torch.Tensor) -> None:
    with agreements.waiting():
        under_way.finish(ticket)


def _begin_send(tensor: torch.Tensor, order: torch.Tensor, peer: int, tag: int, group: int) -> torch.Tensor:
    memory = tensor.clone(memory_format=torch.contiguous_format)
    call, called = _exchange("begin_send", memory, peer, tag, group)
    with _blamed(call, called):
        work = called.send([_real(memory)], peer, tag)
    return under_way.ticket_for(Flight(work, None, functools.partial(_explained, call, called)))


def _begin_receive(like: torch.Tensor, order: torch.Tensor, peer: int, tag: int, group: int) -> torch.Tensor:
    memory = torch.empty_like(like, memory_format=torch.contiguous_format)
    call, called = _exchange("begin_receive", memory, peer, tag, group)
    with _blamed(call, called):
        work = called.recv([_real(memory)], peer, tag)
    return under_way.ticket_for(Flight(work, memory, functools.partial(_explained, call, called)))


def _exchange(name: str, tensor: torch.Tensor, peer: int, tag: int, group: int) -> tuple[Collective, Any]:
    dtype, shape = tensor.dtype, tensor.shape
    call = agreements.next_exchange(group, lambda: describe_exchange(name, dtype, shape, peer, tag))
    return call, group_numbers.group_at(group)


def _explained(call: Collective, called: dist.ProcessGroup, error: Exception) -> Exception:
    """`error` of an exchange, with its line."""
    site = call.site or "an unknown line"
    return CollectiveError(f"{error}\n  in {call.what} of group {called.group_name} at {site}, on rank {called.rank()}")


@contextmanager
def _blamed(call: Collective, called: dist.ProcessGroup) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise _explained(call, called, error) from error


_lock = process_lock()
_libraries: list[torch.library.Library] = []  # kept: a library unregisters its operators when it is destroyed


def _schemas() -> dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]]:
    """By name: the operator's arguments and results, its kernel, its fake kernel."""
    found: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {}
    nothing: Callable[..., Any] = lambda *args: None
    for name, arguments in _SCHEMAS.items():
        found[name] = f"({arguments}) -> ()", functools.partial(_call, name), nothing
        begin = f"({arguments.replace('(a!)', '')}) -> Tensor"
        found[beginning_of(name)] = begin, functools.partial(_begin, name), _fake_ticket
    kernels: list[Callable[..., Any]] = [_begin_send, _begin_receive, _finish_send, _finish]
    fakes: list[Callable[..., Any]] = [_fake_ticket, _fake_ticket, nothing, _fake_result]
    for (name, schema), kernel, fake in zip(_EXCHANGES.items(), kernels, fakes, strict=True):
        found[name] = schema, kernel, fake
    return found


def beginning_of(name: str) -> str:
    """The operator that begins what the collective `name` does."""
    return f"begin_{name.strip('_')}"


def _fake_ticket(*args: Any) -> torch.Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


def _fake_result(ticket: torch.Tensor, order: torch.Tensor, size: Any, dtype: torch.dtype) -> torch.Tensor:
    return order.new_empty(size, dtype=dtype)


@functools.cache
def collective(name: str) -> OpOverload:
    """The operator `lazy_backend::<name>`, defined by the first call. Raises `RuntimeError` if there are none here."""
    if not PROCESS_GROUPS.fits():
        raise RuntimeError(f"collectives of lazy tensors cannot be recorded: {PROCESS_GROUPS.obstacle()}")
    with _lock:
        if not _libraries:
            library = torch.library.Library("lazy_backend", "FRAGMENT")
            for each, (schema, kernel, fake) in _schemas().items():
                library.define(f"{each}{schema}")
                library.impl(each, _as_ours(each, kernel), "CompositeExplicitAutograd")
                torch.library.register_fake(f"lazy_backend::{each}", fake, lib=library)
            _libraries.append(library)
    return getattr(torch.ops.lazy_backend, name).default  # type: ignore[no-any-return]


def define_collectives() -> None:
    """Define the operators for a graph that calls them by name."""
    collective("all_reduce_")


def collective_of(op: OpOverload) -> str | None:
    """The name of the collective that `op` does or begins; None for other operators."""
    if op.namespace != "lazy_backend":
        return None
    return _names().get(base_name(op))


@functools.cache
def _names() -> dict[str, str]:
    return {spelled: name for name in _SCHEMAS for spelled in (name, beginning_of(name))}


def is_collective(op: OpOverload) -> bool:
    """Whether `op` communicates in any way, or waits for what does."""
    return collective_of(op) is not None or (op.namespace == "lazy_backend" and base_name(op) in _EXCHANGES)


def is_exchange(op: OpOverload) -> bool:
    """Whether `op` begins to send to a single rank, or to receive from one."""
    return op.namespace == "lazy_backend" and base_name(op) in ("begin_send", "begin_receive")
