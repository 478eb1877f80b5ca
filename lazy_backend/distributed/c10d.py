"""Record collectives: `torch.distributed`'s functions, the functional ones, and what DistributedDataParallel calls.

In: the calls of two operator libraries. `c10d` writes into tensors and returns work to wait for; `_c10d_functional`
returns new tensors, for which `wait_tensor` is called later. Out: calls of the operators in `lowering/collectives`, by
name, which write into tensors.

What is recorded runs in the order of the program, so the work that is returned is done already: waiting for it cuts
nothing. What cannot be recorded (receiving from any process, barriers, lists of tensors of several shapes) runs at
once, after everything recorded before it. What goes from process to process is recorded in `exchange.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lazy_backend.distributed.order import order_of
from lazy_backend.execution import reads
from lazy_backend.lowering.collectives.communication import collective, reduction_name
from lazy_backend.lowering.collectives.groups import group_named, group_numbers
from lazy_backend.ports.dispatcher import OpOverload, base_name, function_schema
from lazy_backend.ports.process_groups import wait_tensor, work_of_future
from lazy_backend.recording import record as recorder
from lazy_backend.recording.arguments import flat
from lazy_backend.recording.at_once import run_at_once
from lazy_backend.recording.record import Handler, add_handlers_of
from lazy_backend.tensors.state import DeviceContext
from lazy_backend.tensors.tensor import LazyTensor, wrap
from lazy_backend.tensors.thread_state import run_clean

aten = torch.ops.aten

Op = OpOverload
Args = Sequence[Any]
Kwargs = Mapping[str, Any]

_AT_ONCE = "it communicates"


def install() -> None:
    """Record the collectives of both libraries from now on."""
    add_handlers_of("c10d", lambda op: _C10D.get(base_name(op), _run_at_once))
    add_handlers_of("_c10d_functional", lambda op: _FUNCTIONAL.get(base_name(op), _run_functional_at_once))


# ----- what is recorded


def _write(name: str, written: LazyTensor, *args: Any) -> None:
    """Record the collective `name`, which writes `written`. `args`: its other arguments, without the order tensor.

    Operands in the memory that is written are copied first: compilers refuse calls that read what they write.
    """
    operands: list[Any] = [arg for arg in args if isinstance(arg, torch.Tensor)]
    apart = [_copied(one) if one._data.storage is written._data.storage else one for one in operands]
    rest = [arg for arg in args if not isinstance(arg, torch.Tensor)]
    recorder.record(collective(name), (written, *apart, order_of(written._data.context), *rest), {})


def _copied(tensor: LazyTensor) -> LazyTensor:
    options = {"memory_format": torch.contiguous_format}
    return recorder.record(aten.clone.default, (tensor,), options)  # type: ignore[no-any-return]


def _made(like: LazyTensor, rows: int, per: int = 1) -> LazyTensor:
    """Memory for `rows` times what `like` has along its first dimension, divided by `per`."""
    first, *rest = like.shape or (1,)
    return recorder.record(aten.new_empty.default, (like, [first * rows // per, *rest]), {})  # type: ignore[no-any-return]


# ----- c10d


class _NotRecorded(Exception):
    """The call has to run at once."""


def _c10d(record: Callable[..., Any]) -> Handler:
    """A handler that calls `record` with the operator's arguments by name, or runs the call at once.

    `record` returns the tensors that the operator returns, or None for those that return only work.
    """

    def handle(op: Op, args: Args, kwargs: Kwargs) -> Any:
        named = {argument.name: argument.default_value for argument in function_schema(op).arguments}
        named |= dict(zip(named, args, strict=False)) | dict(kwargs)
        tensors = [one for one in flat(list(args)) if isinstance(one, torch.Tensor)]
        contexts = {one._data.context if isinstance(one, LazyTensor) else None for one in tensors}
        try:
            if len(contexts) != 1 or None in contexts:
                raise _NotRecorded
            results = record(**named)
        except _NotRecorded:
            return _run_at_once(op, args, kwargs)
        work = _done(tensors if results is None else flat(results)).boxed()
        return work if results is None else (results, work)

    return handle


def _done(tensors: list[torch.Tensor]) -> dist.Work:
    """Work that is done. Its result is `tensors`, which DistributedDataParallel takes from it."""
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result(tensors)
    return work_of_future(future)


def _number(process_group: Any) -> int:
    """A group's number; `process_group` is the group, a script object that holds it, or its name."""
    if isinstance(process_group, str):
        process_group = group_named(process_group)
    elif isinstance(process_group, torch.ScriptObject):
        process_group = dist.ProcessGroup.unbox(process_group)
    return group_numbers.number_of(process_group)


def _reduction(reduce_op: Any) -> str:
    name = reduction_name(reduce_op.op())
    if name is None:
        raise _NotRecorded
    return name


def _all_reduce(
    tensors: list[LazyTensor], process_group: Any, reduce_op: Any, sparse_indices: Any = None, **options: Any
) -> list[LazyTensor]:
    if sparse_indices is not None:
        raise _NotRecorded
    reduction, group = _reduction(reduce_op), _number(process_group)
    for tensor in tensors:
        _write("all_reduce_", tensor, reduction, group)
    return tensors


def _all_reduce_coalesced(**named: Any) -> None:
    _all_reduce(**named)


def _broadcast(
    tensors: list[LazyTensor], process_group: Any, root_rank: int, root_tensor: int, **options: Any
) -> list[LazyTensor]:
    _check_single(tensors)
    _write("broadcast_", tensors[0], root_rank, _number(process_group))
    return tensors


def _reduce(
    tensors: list[LazyTensor], process_group: Any, reduce_op: Any, root_rank: int, root_tensor: int, **options: Any
) -> None:
    _check_single(tensors)
    _write("reduce_", tensors[0], _reduction(reduce_op), root_rank, _number(process_group))


def _all_gather(
    output_tensors: list[list[LazyTensor]], input_tensors: list[LazyTensor], process_group: Any, **options: Any
) -> list[list[LazyTensor]]:
    _check_single(input_tensors)
    (tensor,), (parts,) = input_tensors, output_tensors
    _check_like(parts, tensor)
    gathered = recorder.record(aten.new_empty.default, (tensor, [len(parts), *tensor.shape]), {})
    _write("all_gather_", gathered, tensor, _number(process_group))
    for place, part in enumerate(parts):
        part.copy_(gathered[place])
    return output_tensors


def _all_gather_into(
    output_tensor: LazyTensor, input_tensor: LazyTensor, process_group: Any, **options: Any
) -> LazyTensor:
    _write("all_gather_", output_tensor, input_tensor, _number(process_group))
    return output_tensor


def _all_gather_into_coalesced(
    outputs: list[LazyTensor], inputs: list[LazyTensor], process_group: Any, **options: Any
) -> None:
    for output, tensor in zip(outputs, inputs, strict=True):
        _write("all_gather_", output, tensor, _number(process_group))


def _reduce_scatter_into(
    output_tensor: LazyTensor, input_tensor: LazyTensor, process_group: Any, reduce_op: Any, **options: Any
) -> LazyTensor:
    _write("reduce_scatter_", output_tensor, input_tensor, _reduction(reduce_op), _number(process_group))
    return output_tensor


def _reduce_scatter_into_coalesced(
    outputs: list[LazyTensor], inputs: list[LazyTensor], process_group: Any, reduce_op: Any, **options: Any
) -> None:
    for output, tensor in zip(outputs, inputs, strict=True):
        _write("reduce_scatter_", output, tensor, _reduction(reduce_op), _number(process_group))


def _reduce_scatter(
    output_tensors: list[LazyTensor],
    input_tensors: list[list[LazyTensor]],
    process_group: Any,
    reduce_op: Any,
    **options: Any,
) -> list[LazyTensor]:
    _check_single(output_tensors)
    (output,), (parts,) = output_tensors, input_tensors
    _check_like(parts, output)
    stacked = recorder.record(aten.stack.default, (parts,), {})
    _write("reduce_scatter_", output, stacked, _reduction(reduce_op), _number(process_group))
    return output_tensors


def _gather(
    output_tensors: list[list[LazyTensor]],
    input_tensors: list[LazyTensor],
    process_group: Any,
    root_rank: int,
    **options: Any,
) -> None:
    _check_single(input_tensors)
    (tensor,), (parts,) = input_tensors, output_tensors or [[]]
    _check_like(parts, tensor)
    gathered = recorder.record(aten.new_empty.default, (tensor, [len(parts), *tensor.shape]), {})
    _write("gather_", gathered, tensor, root_rank, _number(process_group))
    for place, part in enumerate(parts):
        part.copy_(gathered[place])


def _scatter(
    output_tensors: list[LazyTensor],
    input_tensors: list[list[LazyTensor]],
    process_group: Any,
    root_rank: int,
    **options: Any,
) -> list[LazyTensor]:
    _check_single(output_tensors)
    (output,), (parts,) = output_tensors, input_tensors or [[]]
    _check_like(parts, output)
    if parts:
        stacked = recorder.record(aten.stack.default, (parts,), {})
    else:
        stacked = recorder.record(aten.new_empty.default, (output, [0, *output.shape]), {})
    _write("scatter_", output, stacked, root_rank, _number(process_group))
    return output_tensors


def _all_to_all_single(
    output: LazyTensor,
    input: LazyTensor,
    process_group: Any,
    output_split_sizes: list[int],
    input_split_sizes: list[int],
    **options: Any,
) -> None:
    _write("all_to_all_", output, input, output_split_sizes, input_split_sizes, _number(process_group))


def _all_to_all(
    output_tensors: list[LazyTensor], input_tensors: list[LazyTensor], process_group: Any, **options: Any
) -> list[LazyTensor]:
    if len({one.dtype for one in (*output_tensors, *input_tensors)}) != 1:
        raise _NotRecorded
    sizes, sent_sizes = ([one.numel() for one in side] for side in (output_tensors, input_tensors))
    sent = torch.cat([one.reshape(-1) for one in input_tensors])
    received = recorder.record(aten.new_empty.default, (sent, [sum(sizes)]), {})
    _write("all_to_all_", received, sent, sizes, sent_sizes, _number(process_group))
    for output, part in zip(output_tensors, received.split(sizes), strict=True):
        output.copy_(part.view(output.shape))
    return output_tensors


def _check_single(tensors: Sequence[Any]) -> None:
    """The lists of c10d hold one tensor; they come from a time when a process had several GPUs."""
    if len(tensors) != 1:
        raise _NotRecorded


def _check_like(parts: Sequence[LazyTensor], tensor: LazyTensor) -> None:
    if any(part.shape != tensor.shape or part.dtype is not tensor.dtype for part in parts):
        raise _NotRecorded


_C10D: dict[str, Handler] = {
    "allreduce_": _c10d(_all_reduce),
    "allreduce_coalesced_": _c10d(_all_reduce_coalesced),
    "broadcast_": _c10d(_broadcast),
    "reduce_": _c10d(_reduce),
    "allgather_": _c10d(_all_gather),
    "_allgather_base_": _c10d(_all_gather_into),
    "allgather_into_tensor_coalesced_": _c10d(_all_gather_into_coalesced),
    "reduce_scatter_": _c10d(_reduce_scatter),
    "_reduce_scatter_base_": _c10d(_reduce_scatter_into),
    "reduce_scatter_tensor_coalesced_": _c10d(_reduce_scatter_into_coalesced),
    "gather_": _c10d(_gather),
    "scatter_": _c10d(_scatter),
    "alltoall_": _c10d(_all_to_all),
    "alltoall_base_": _c10d(_all_to_all_single),
}


def _run_at_once(op: Op, args: Args, kwargs: Kwargs) -> Any:
    return run_at_once(_context_of(args), op, args, kwargs, _AT_ONCE)


def _context_of(args: Args) -> DeviceContext:
    return next(one._data.context for one in flat(list(args)) if isinstance(one, LazyTensor))


# ----- functional collectives: (op, arguments in the schema's order) -> tensors


def _functional_all_reduce(tensor: LazyTensor, reduction: str, group: Any) -> LazyTensor:
    return _functional_all_reduce_in_place(_copied(tensor), reduction, group)


def _check_complex(tensor: LazyTensor, reduction: str) -> None:
    """Complex numbers are communicated as pairs, as in eager."""
    if tensor.dtype.is_complex and reduction not in ("sum", "avg"):
        raise RuntimeError(f"all_reduce and reduce_scatter do not support {reduction} of complex tensors")


def _functional_all_reduce_in_place(tensor: LazyTensor, reduction: str, group: Any) -> LazyTensor:
    _check_complex(tensor, reduction)
    _write("all_reduce_", tensor, reduction, _number(group))
    return tensor


def _functional_broadcast(tensor: LazyTensor, root: int, group: Any) -> LazyTensor:
    return _functional_broadcast_in_place(_copied(tensor), root, group)


def _functional_broadcast_in_place(tensor: LazyTensor, root: int, group: Any) -> LazyTensor:
    _write("broadcast_", tensor, root, _number(group))
    return tensor


def _functional_all_gather(tensor: LazyTensor, size: int, group: Any, *, out: LazyTensor | None = None) -> LazyTensor:
    gathered = _made(tensor, size) if out is None else out
    _write("all_gather_", gathered, tensor, _number(group))
    return gathered


def _functional_reduce_scatter(
    tensor: LazyTensor, reduction: str, size: int, group: Any, *, out: LazyTensor | None = None
) -> LazyTensor:
    _check_complex(tensor, reduction)
    scattered = _made(tensor, 1, size) if out is None else out
    _write("reduce_scatter_", scattered, tensor, reduction, _number(group))
    return scattered


def _functional_all_to_all(
    tensor: LazyTensor, received_sizes: list[int], sent_sizes: list[int], group: Any
) -> LazyTensor:
    rows = sum(received_sizes) if received_sizes else tensor.shape[0]
    received = recorder.record(aten.new_empty.default, (tensor, [rows, *tensor.shape[1:]]), {})
    _write("all_to_all_", received, tensor, list(received_sizes), list(sent_sizes), _number(group))
    return received  # type: ignore[no-any-return]


def _functional(record: Callable[..., Any], of_each: bool = False) -> Handler:
    def handle(op: Op, args: Args, kwargs: Kwargs) -> Any:
        if of_each:
            return [record(tensor, *args[1:], **kwargs) for tensor in args[0]]
        return record(*args, **kwargs)

    return handle


def _waited(op: Op, args: Args, kwargs: Kwargs) -> Any:
    """What follows a functional collective: what it returned, as another tensor."""
    return wrap(args[0]._data, view_of=args[0])


_FUNCTIONAL: dict[str, Handler] = {
    "all_reduce": _functional(_functional_all_reduce),
    "all_reduce_": _functional(_functional_all_reduce_in_place),
    "all_reduce_coalesced": _functional(_functional_all_reduce, of_each=True),
    "all_reduce_coalesced_": _functional(_functional_all_reduce_in_place, of_each=True),
    "broadcast": _functional(_functional_broadcast),
    "broadcast_": _functional(_functional_broadcast_in_place),
    "all_gather_into_tensor": _functional(_functional_all_gather),
    "all_gather_into_tensor_out": _functional(_functional_all_gather),
    "all_gather_into_tensor_coalesced": _functional(_functional_all_gather, of_each=True),
    "reduce_scatter_tensor": _functional(_functional_reduce_scatter),
    "reduce_scatter_tensor_out": _functional(_functional_reduce_scatter),
    "reduce_scatter_tensor_coalesced": _functional(_functional_reduce_scatter, of_each=True),
    "all_to_all_single": _functional(_functional_all_to_all),
    "wait_tensor": _waited,
    "_wrap_tensor_autograd": _waited,
}


def _run_functional_at_once(op: Op, args: Args, kwargs: Kwargs) -> Any:
    """Run another functional collective at once, and wait for it."""
    results = _run_at_once(op, args, kwargs)
    for result in flat(results):
        run_clean(wait_tensor, reads.read(result._data, "a collective"))
    return results
