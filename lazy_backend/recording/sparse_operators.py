"""Operators on sparse tensors, which run at once.

In: calls with a `LazySparseTensor` among the operands, and factories. Out: lazy tensors, sparse or strided.
See Note [Sparse tensors are opaque].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lazy_backend.errors import DeviceError
from lazy_backend.errors.sites import user_site
from lazy_backend.errors.tracebacks import hide_frames, hide_internals
from lazy_backend.execution import reads
from lazy_backend.ports.autograd_engine import current_node
from lazy_backend.ports.dispatcher import BelowAutograd, OpOverload, no_kernel_text
from lazy_backend.ports.tensor_types import mark_uncoalesced
from lazy_backend.recording.arguments import flat
from lazy_backend.recording.at_once import EAGER, RealCall, count_fallback, run_at_once
from lazy_backend.recording.describe import GIVES_SPARSE
from lazy_backend.recording.record import Handler, add_handler
from lazy_backend.tensors.contexts import contexts
from lazy_backend.tensors.outside import mixed_devices, quantized_error
from lazy_backend.tensors.sparse_tensor import SPARSE_LAYOUTS, LazySparseTensor, wrap_sparse
from lazy_backend.tensors.state import DeviceContext
from lazy_backend.tensors.tensor import LazyTensor
from lazy_backend.tensors.thread_state import run_clean
from lazy_backend.tensors.transfers import counted_download

aten = torch.ops.aten

Op = OpOverload
Args = Sequence[Any]
Kwargs = Mapping[str, Any]

TAKES_SPARSE = "it takes a sparse tensor"

_handlers: dict[int, Handler] = {}


def dispatch(op: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
    """`LazySparseTensor.__torch_dispatch__`."""
    if not all(issubclass(kind, LazyTensor | LazySparseTensor) for kind in types):
        return NotImplemented
    try:
        return _handlers.get(id(op), _run)(op, args, kwargs or {})
    except BaseException as error:
        hide_frames(error)
        raise


def _run(op: Op, args: Args, kwargs: Kwargs) -> Any:
    """Run any operator at once, on the real tensors."""
    context = _context_of(op, args, kwargs)
    device = kwargs.get("device")
    if device is not None and (device.type != "lazy" or device.index not in (None, context.index)):
        return _run_elsewhere(op, args, kwargs, device)
    with context.lock:
        is_eager = context.trace.cursor is context.eager_root
        return run_at_once(context, op, args, kwargs, EAGER if is_eager else TAKES_SPARSE)


def _context_of(op: Op, args: Args, kwargs: Kwargs) -> DeviceContext:
    """The context that all operands belong to."""
    tensors = [arg for arg in (*flat(list(args)), *flat(list(kwargs.values()))) if isinstance(arg, torch.Tensor)]
    context = next(tensor._context for tensor in tensors if isinstance(tensor, LazySparseTensor))
    for tensor in tensors:
        if isinstance(tensor, LazyTensor | LazySparseTensor):
            if tensor.device != context.device:
                raise DeviceError(
                    f"expected all tensors to be on the same device, but found {context.device} and {tensor.device}\n"
                    f"  at {user_site()}\n  move one of them, as in tensor.to({str(context.device)!r})"
                )
        elif tensor.dim():
            raise mixed_devices(context, op, tensor)
    return context


def _run_elsewhere(op: Op, args: Args, kwargs: Kwargs, device: torch.device) -> Any:
    """A copy of the operand on another device, or a new tensor like it there."""
    source = args[0]
    real = read(source, f"copy to {device}")
    if device.type == "meta":
        return op(real, *args[1:], **kwargs)
    if device.type == "lazy":
        target = contexts.get_device_context(device.index)
        return run_clean(lambda: wrap_sparse(target, op(real, *args[1:], **{**kwargs, "device": target.backing})))
    return run_clean(counted_download, _num_bytes(source), lambda: op(real, *args[1:], **kwargs))


def read(tensor: LazySparseTensor, cause: str) -> torch.Tensor:
    """The real tensor, once pending writes to it have run. Not a copy: do not write to it."""
    for storage in tensor._parts.values():
        reads.read(storage, cause)
    return tensor._real


def _num_bytes(tensor: LazySparseTensor) -> int:
    return sum(storage.meta.nbytes for storage in tensor._parts.values())


# ----- what needs no value


def _answer(op: Op, args: Args, kwargs: Kwargs) -> Any:
    """Answer a question about the layout."""
    return op(args[0]._real, *args[1:], **kwargs)


def _device(op: Op, args: Args, kwargs: Kwargs) -> torch.device:
    return args[0]._context.device  # type: ignore[no-any-return]


def _part(op: Op, args: Args, kwargs: Kwargs) -> Any:
    """Indices or values, as a view."""
    call = RealCall(args[0]._context)
    return call.to_lazy(call.run(op, args, kwargs, None))


def _share(op: Op, args: Args, kwargs: Kwargs) -> LazySparseTensor:
    """`detach`, `alias`: another tensor for the same indices and values."""
    source = args[0]
    return run_clean(lambda: wrap_sparse(source._context, source._real.detach(), source._parts.values()))


def _itself(op: Op, args: Args, kwargs: Kwargs) -> Any:
    return args[0]


def _mark_coalesced(op: Op, args: Args, kwargs: Kwargs) -> Any:
    op(args[0]._real, *args[1:], **kwargs)
    return args[0]


# ----- operators with a peculiarity


def _mm_reduce(op: Op, args: Args, kwargs: Kwargs) -> Any:
    """`torch.sparse.mm(a, b, reduce)`: the kernel saves what gradients need only if an operand requires grad.

    And only in grad mode, which a run with autocast turns off; autocast has no rule for what the kernel calls.
    """
    real = args[0]._real
    if not (args[0].requires_grad or args[1].requires_grad):
        return _run(op, args, kwargs)
    real.requires_grad_()
    try:
        with torch.autocast("lazy", enabled=False):
            return _run(op, args, kwargs)
    finally:
        real.requires_grad_(False)


def _clone(op: Op, args: Args, kwargs: Kwargs) -> Any:
    """Clone; as in eager, a gradient that is accumulated for the first time is not marked as coalesced.

    In eager, autograd takes such a gradient over without a copy and loses the mark, but it copies a lazy gradient.
    """
    made = _run(op, args, kwargs)
    node = current_node()
    if made.layout is torch.sparse_coo and node is not None and "AccumulateGrad" in node.name():
        mark_uncoalesced(made._real)
    return made


# ----- copies


def _copy(op: Op, args: Args, kwargs: Kwargs) -> Any:
    """`dst.copy_(src)` between sparse tensors, one of which may be on another device."""
    target, source = args[0], args[1]
    if not isinstance(target, LazyTensor | LazySparseTensor):
        real = read(source, f"copy to {target.device}")
        return run_clean(counted_download, _num_bytes(source), lambda: target.copy_(real, *args[2:], **kwargs))
    if source.device != target.device:
        source = source.to(target.device)
    return _run(op, (target, source, *args[2:]), kwargs)


# ----- factories


def _assemble(op: Op, args: Args, kwargs: Kwargs) -> Any:
    """A sparse tensor that shares the memory of lazy indices and values."""
    return _run_on_parts(op, args, kwargs, GIVES_SPARSE)


def _validate(op: Op, args: Args, kwargs: Kwargs) -> Any:
    """Raise if indices and values make no sparse tensor. `torch.load` asks since 2.14 where it loads weights alone."""
    return _run_on_parts(op, args, kwargs, "it reads indices")


def _run_on_parts(op: Op, args: Args, kwargs: Kwargs, reason: str) -> Any:
    """Call `op` on what lazy indices and values stand for. Cuts only if those are pending."""
    tensors = [arg for arg in args if isinstance(arg, LazyTensor)]
    context = tensors[0]._data.context
    for tensor in args:
        if isinstance(tensor, torch.Tensor) and tensor.device != context.device:
            raise mixed_devices(context, op, tensor)
    trace = context.trace
    reads.compute(context, [tensor._data.storage for tensor in tensors], f"{op}: {reason}")
    if context.trace is not trace:
        count_fallback(op, reason)
    call = RealCall(context)
    return call.to_lazy(call.run(op, args, kwargs, None))


def _below_autograd(op: Op, handler: Callable[[Op, Args, Kwargs], Any]) -> Callable[..., Any]:
    """A kernel of `op` on the AutogradLazy key, for operators whose composite kernel takes no lazy device."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with BelowAutograd():
            return handler(op, args, kwargs)

    return kernel


def _empty(op: Op, args: Args, kwargs: Kwargs) -> Any:
    """A sparse tensor without elements."""
    context = contexts.get_device_context(kwargs["device"].index)
    return run_clean(lambda: wrap_sparse(context, op(*args, **{**kwargs, "device": context.backing})))


def _unclaimed(op: Op) -> Callable[..., Any]:
    """A kernel of `op` for devices without one of their own for a layout or dtype, among them `lazy`."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        device, layout = kwargs.get("device"), kwargs.get("layout")
        if device is None or device.type != "lazy":
            raise NotImplementedError(no_kernel_text(op, "cpu" if device is None else device.type))
        if layout not in SPARSE_LAYOUTS:
            raise quantized_error()
        return _empty(op, args, {name: value for name, value in kwargs.items() if name != "pin_memory"})

    return kernel


_ANSWERS = ("_nnz", "sparse_dim", "dense_dim", "_dimI", "_dimV", "is_coalesced")
_PARTS = (*("_indices", "_values", "indices", "values", "crow_indices", "col_indices", "ccol_indices", "row_indices"),)
# PyTorch has no dispatch key for the sparse or quantised tensors of the lazy device alone. But a kernel for all devices
# is called only for devices that have none of their own.
_UNCLAIMED = (
    aten.empty.memory_format,
    aten._sparse_coo_tensor_with_dims.default,
    aten._empty_affine_quantized.default,
    aten._empty_per_channel_affine_quantized.default,
)
_VALIDATIONS = tuple(
    (getattr(aten, f"_validate_sparse_{layout}_tensor_args").default, _validate)
    for layout in ("coo", "compressed", "csr", "csc", "bsr", "bsc")
)


def install_sparse(library: torch.library.Library) -> None:
    LazySparseTensor.__torch_dispatch__ = staticmethod(dispatch)  # type: ignore[method-assign, assignment]
    _handlers[id(torch.ops.prim.device.default)] = _device
    for name in _ANSWERS:
        _handlers[id(getattr(aten, name).default)] = _answer
    for name in _PARTS:
        _handlers[id(getattr(aten, name).default)] = _part
    for op in (aten.detach.default, aten.alias.default):
        _handlers[id(op)] = _share
    for op in (aten.lift_fresh.default, aten.lift.default, aten.detach_.default):
        _handlers[id(op)] = _itself
    _handlers[id(aten._coalesced_.default)] = _mark_coalesced
    _handlers[id(aten.copy_.default)] = _copy
    _handlers[id(aten.clone.default)] = _clone
    _handlers[id(aten._sparse_mm_reduce_impl.default)] = _mm_reduce
    for op in _UNCLAIMED:
        library.impl(op.name(), hide_internals(_unclaimed(op)), "CompositeExplicitAutograd")
    add_handler(aten._sparse_coo_tensor_with_dims_and_tensors.default, _assemble)
    for op, handler in ((aten._sparse_compressed_tensor_unsafe.default, _assemble), *_VALIDATIONS):
        add_handler(op, handler)  # it arrives undecomposed in inference mode
        library.impl(op.name(), hide_internals(_below_autograd(op, handler)), "AutogradLazy")
