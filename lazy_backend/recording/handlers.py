"""Operators that are not recorded as they arrive: aliases, copies between devices, reads, factories.

In: the same calls as `record`. Out: `install_handlers` and `install_factories`, called once by `installation`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

import lazy_backend_autoload as first_use
from lazy_backend.errors import DeviceError, LazyBackendError
from lazy_backend.errors.sites import user_site
from lazy_backend.errors.tracebacks import hide_internals
from lazy_backend.execution import reads
from lazy_backend.execution.step_ends import step_ends
from lazy_backend.lowering.device_graphs.run_order import with_runs
from lazy_backend.lowering.device_graphs.uploads import upload_to, uploaded
from lazy_backend.lowering.ir import rng
from lazy_backend.lowering.ir.graph import contiguous_stride, extent, intern_meta
from lazy_backend.ports.dispatcher import (
    BelowAutograd,
    DispatchKey,
    OpOverload,
    function_schema,
    kernel_caller,
    overload_name,
)
from lazy_backend.recording.at_once import run_at_once
from lazy_backend.recording.operators import learn
from lazy_backend.recording.record import add_handler, record, record_factory, records_alike
from lazy_backend.recording.storage import LazyUntypedStorage
from lazy_backend.tensors.contexts import contexts
from lazy_backend.tensors.generators import lazy_generator
from lazy_backend.tensors.outside import mixed_devices, new_data, new_unwritten, upload, without_value
from lazy_backend.tensors.state import UNWRITTEN, DeviceContext, LazyStorage, ViewData
from lazy_backend.tensors.tensor import LazyTensor, alias_of, assign, wrap
from lazy_backend.tensors.thread_state import run_clean, within_kernel
from lazy_backend.tensors.transfers import counted_download, counted_upload

aten = torch.ops.aten

Op = OpOverload
Args = Sequence[Any]
Kwargs = Mapping[str, Any]


# ----- aliases


def _share(op: Op, args: Args, kwargs: Kwargs) -> Any:
    """`detach`, `alias`: another tensor for the same data. Autograd detaches what it saves, so this is frequent."""
    return alias_of(args[0])


def _itself(op: Op, args: Args, kwargs: Kwargs) -> Any:
    return args[0]


def _metadata_in_place(view: Op) -> Callable[[Op, Args, Kwargs], Any]:
    """`t_` and similar ops: record the view, then make the tensor stand for it."""

    def handler(op: Op, args: Args, kwargs: Kwargs) -> Any:
        target = args[0]
        made = record(view, args, kwargs)
        assign(target, made._data)
        return target

    return handler


def _set_tensor(op: Op, args: Args, kwargs: Kwargs) -> Any:
    """`x.set_(y)`: x stands for y's data from now on, with its own geometry if one is given."""
    target, source = args[0], args[1]
    if not isinstance(source, LazyTensor) or not isinstance(target, LazyTensor):
        raise DeviceError(f"set_ takes tensors of one device\n  at {user_site()}\n  copy the source with .to() first")
    # the source's memory, with the target's own conjugate and negative bits
    bits, own = source._data.meta, target._data.meta
    source = record(aten._conj.default, (source,), {}) if bits.conj != own.conj else source
    source = record(aten._neg_view.default, (source,), {}) if bits.neg != own.neg else source
    assign(target, source._data)
    return target


def _set_storage(op: Op, args: Args, kwargs: Kwargs) -> Any:
    """`x.set_(storage, offset, size, stride)`, as `torch.load` calls it: the bytes are uploaded, once per storage."""
    target, storage, *geometry = args
    offset, size, *strides = geometry or (0, (storage.nbytes() // target.element_size(),))
    base = _uploaded_storage(target._data.context, storage, target.dtype)
    # the dispatcher drops an empty stride: the stride of a 0-d tensor, or the default, which means "contiguous"
    stride = tuple(strides[0]) if strides else contiguous_stride(tuple(size))
    if base.tensor is None:  # the base is recorded or scheduled, so the view has to be recorded too
        flat = wrap(base).as_strided((extent(base.meta),), (1,), 0)
        flat = flat if flat.dtype == target.dtype else flat.view(target.dtype)
        assign(target, cast("LazyTensor", flat.as_strided(size, stride, offset))._data)
    else:
        meta = intern_meta(tuple(size), stride, int(offset), target.dtype)
        assign(target, ViewData(base.context, None, None, meta, base))
    return target


def _uploaded_storage(context: DeviceContext, storage: torch.UntypedStorage, dtype: torch.dtype) -> LazyStorage:
    """The storage's bytes on the backing device, in a flat tensor of `dtype`."""
    # a file may hold several tensors that share a storage: they share it again after loading
    known = getattr(storage, "lazy_storage", None)
    if isinstance(known, LazyStorage) and known.context is context:
        return known
    plain = storage.plain if isinstance(storage, LazyUntypedStorage) else storage

    def upload_flat() -> torch.Tensor:
        flat = torch.empty(0, dtype=dtype).set_(plain)  # type: ignore[call-overload]
        return counted_upload(flat.nbytes, lambda: upload_to(context.backing, flat))

    made = new_data(context, run_clean(upload_flat))
    if isinstance(storage, LazyUntypedStorage):
        storage.lazy_storage = made
    return made


def _empty_set(op: Op, args: Args, kwargs: Kwargs) -> Any:
    target = args[0]
    made = new_unwritten(target._data.context, intern_meta((0,), (1,), 0, target.dtype))
    assign(target, made._data)
    return target


# ----- copies


@records_alike("layout", "device", "pin_memory", "non_blocking")
def _to_copy(op: Op, args: Args, kwargs: Kwargs) -> Any:
    """`to`, `cpu`, `float`: recorded within a device; a copy to another device needs the value."""
    source = args[0]
    device = kwargs.get("device")
    context = source._data.context
    if device is None or (device.type == "lazy" and device.index in (None, context.index)):
        options = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory", "layout", "non_blocking")}
        return record(op, args, options)
    if device.type == "meta":
        return op(torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta"), **kwargs)
    real = reads.read(source._data, f"copy to {device}")
    if device.type != "lazy":
        return run_clean(
            counted_download,
            real.nbytes,
            lambda: with_runs(context.backing, lambda: aten._to_copy.default(real, **kwargs)),
        )
    target = contexts.get_device_context(device.index)
    options = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")}
    copied = run_clean(aten._to_copy.default, real, **options, device=target.backing)
    return wrap(new_data(target, copied))


@records_alike()
def _copy(op: Op, args: Args, kwargs: Kwargs) -> Any:
    """`dst.copy_(src)`: recorded within a device; an upload if the source is real; a read if the target is."""
    target, source = args[0], args[1]
    if not isinstance(target, LazyTensor):
        real = reads.read(source._data, f"copy to {target.device}")
        with within_kernel():
            copied = functools.partial(target.copy_, real, *args[2:], **kwargs)
            return counted_download(real.nbytes, lambda: with_runs(source._data.context.backing, copied))
    context = target._data.context
    if isinstance(source, LazyTensor):
        if source._data.context is context:
            return record(op, args, kwargs)
        source = reads.read(source._data, f"copy to {context.device}")
    copy_from_outside(context, target, source)
    return target


def copy_from_outside(context: DeviceContext, target: LazyTensor, source: torch.Tensor) -> None:
    """Upload `source` into `target`. Unused memory takes the upload as its data, and nothing is recorded.

    Memory for no elements has no data: it stays unused and is recorded as an allocation. So a program that makes
    `torch.tensor([])`, as the caches of transformers do, takes nothing from outside.
    """
    data = target._data
    storage = data.storage
    if target.numel() > 1:
        step_ends.see_batch(context, target.nbytes)
    if storage.token is UNWRITTEN and storage.tensor is None and data is storage:
        nbytes = storage.meta.numel * storage.meta.dtype.itemsize
        filled = run_clean(counted_upload, nbytes, lambda: uploaded(context.backing, source.detach(), storage.meta))
        if storage.meta.numel:
            storage.tensor = filled
        return
    made = wrap(new_data(context, upload(context, source)))
    record(aten.copy_.default, (target, made), {})


def _lazy_copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """`aten::_copy_from` on the Lazy key: `torch.tensor(..., device="lazy")` comes here, below __torch_dispatch__."""
    if not isinstance(source, LazyTensor) and source.device.type == "lazy":
        raise without_value(aten._copy_from.default, source)
    return _copy(aten.copy_.default, (target, source), {})  # type: ignore[no-any-return]


# Operators with a composite kernel besides those for CPU and CUDA. PyTorch would use it for a device without a kernel;
# registering any kernel is enough to make calls arrive in __torch_dispatch__ undecomposed.
_KERNELS_BESIDE_COMPOSITES = ("silu_backward", "mish_backward", "native_channel_shuffle")


def _record_kernel(op: Op) -> Callable[..., Any]:
    return hide_internals(lambda *args, **kwargs: record(op, args, kwargs))


# ----- reads


def _local_scalar(op: Op, args: Args, kwargs: Kwargs) -> Any:
    real = reads.read(args[0]._data, "item()")
    return run_clean(counted_download, real.nbytes, lambda: aten._local_scalar_dense.default(real))


def _lazy_local_scalar(tensor: torch.Tensor) -> Any:
    if not isinstance(tensor, LazyTensor):
        raise without_value(aten._local_scalar_dense.default, tensor)
    return _local_scalar(aten._local_scalar_dense.default, (tensor,), {})


def _view_as_dtype(op: Op, args: Args, kwargs: Kwargs) -> Any:
    """Unlike other views, whether it is an inference tensor depends on the mode, and not on what it is a view of."""
    made = record(op, args, kwargs)
    return made if made.is_inference() is torch.is_inference_mode_enabled() else wrap(made._data)


def _equal(op: Op, args: Args, kwargs: Kwargs) -> bool:
    a, b = args
    if a.shape != b.shape:
        return False
    if not (isinstance(a, LazyTensor) and isinstance(b, LazyTensor)):
        lazy, other = (a, b) if isinstance(a, LazyTensor) else (b, a)
        raise mixed_devices(lazy._data.context, op, other)
    one, other = reads.read(a._data, "equal"), reads.read(b._data, "equal")
    return bool(run_clean(op, one, other))


def _resize(op: Op, args: Args, kwargs: Kwargs) -> Any:
    """`resize_` and `resize_as_`: the tensor stands for more or less of its memory, or for more memory with a copy."""
    target, size = args[0], args[1]
    shape = tuple(size.shape if isinstance(size, torch.Tensor) else size)
    is_plain = kwargs.get("memory_format") is None
    if shape == tuple(target.shape) and is_plain:
        return target
    meta = target._data.meta
    if not is_plain or len(args) > 2 or meta.conj or meta.neg:
        return run_at_once(target._data.context, op, args, kwargs, "it resizes an operand")
    # other tensors may share the memory, and stay as they are
    stride, count = contiguous_stride(shape), math.prod(shape)
    base = target._data.storage.meta
    room = extent(base) * base.dtype.itemsize // meta.dtype.itemsize - meta.storage_offset
    if count <= room:
        made = record(aten.as_strided.default, (target, shape, stride, meta.storage_offset), {})
    else:
        made = record(aten.new_empty.default, (target, shape), {})
        if room > 0:
            old = record(aten.as_strided.default, (target, (room,), (1,), meta.storage_offset), {})
            start = record(aten.as_strided.default, (made, (room,), (1,), 0), {})
            record(aten.copy_.default, (start, old), {})
    assign(target, made._data)
    return target


def _pack_padded_sequence(op: Op, args: Args, kwargs: Kwargs) -> Any:
    """The batch sizes that it returns are on the CPU, whatever the device of the data."""
    data, sizes = run_at_once(args[0]._data.context, op, args, kwargs, "it reads lengths on the CPU")
    return data, reads.read(sizes._data, "batch sizes").to("cpu", copy=True)


# ----- questions about geometry


def _is_same_size(op: Op, args: Args, kwargs: Kwargs) -> bool:
    return bool(args[0].shape == args[1].shape)


def _has_same_storage_numel(op: Op, args: Args, kwargs: Kwargs) -> bool:
    one, other = (_storage_numel(arg) for arg in args)
    return one == other


def _storage_numel(tensor: torch.Tensor) -> int:
    if isinstance(tensor, LazyTensor):
        base = tensor._data.storage.meta
        return extent(base) * base.dtype.itemsize // tensor.dtype.itemsize
    return tensor.untyped_storage().nbytes() // tensor.element_size()


# ----- ops rewritten before they are recorded


def _native_batch_norm(op: Op, args: Args, kwargs: Kwargs) -> Any:
    """`native_batch_norm` updates its statistics in training, but its schema does not say so; its `_legit` forms do."""
    input, weight, bias, mean, var, training, momentum, eps = args
    if not training and mean is not None and var is not None:
        return record(aten._native_batch_norm_legit_no_training.default, (*args[:5], momentum, eps), {})
    if mean is None or var is None:
        rest = (training, momentum, eps)
        return record(aten._native_batch_norm_legit.no_stats, (input, weight, bias, *rest), {})
    return record(aten._native_batch_norm_legit.default, args, {})


def _native_batch_norm_legit(op: Op, args: Args, kwargs: Kwargs) -> Any:
    """The form with statistics says that it writes them, which it does in training only."""
    names = [arg.name for arg in function_schema(op).arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return _native_batch_norm(op, [given[name] for name in names], {})


def _histc(op: Op, args: Args, kwargs: Kwargs) -> Any:
    """Count integers as floats on the CPU. CUDA's kernel takes integers, and libraries convert only for type `cpu`."""
    source = args[0]
    if source.dtype.is_floating_point or source._data.context.backing.type != "cpu":
        return record(op, args, kwargs)
    floats = record(aten._to_copy.default, (source,), {"dtype": torch.float64})
    counted = record(op, (floats, *args[1:]), kwargs)
    return record(aten._to_copy.default, (counted,), {"dtype": source.dtype})


@records_alike()
def _native_dropout(op: Op, args: Args, kwargs: Kwargs) -> Any:
    """`train=None` means True; PyTorch's decomposition, which fake tensors use, treats it as False."""
    input, p, train = args
    return record(op, (input, p, train is not False), {})


def _vdot(op: Op, args: Args, kwargs: Kwargs) -> Any:
    """Eager returns a conjugate view of the product if only the second operand is a conjugate view."""
    one, other = args
    if other.is_conj() and not one.is_conj():
        product = record(aten.dot.default, (one, record(aten._conj.default, (other,), {})), {})
        return record(aten._conj.default, (product,), {})
    return record(op, args, kwargs)


def _lu_solve(op: Op, args: Args, kwargs: Kwargs) -> Any:
    """With `left=False`, eager solves the adjoint system and returns a conjugate view of the solution."""
    found = record(op, args, kwargs)
    if kwargs.get("left", True) or not found.is_complex() or not found.numel():
        return found
    return record(aten._conj.default, (record(aten.conj_physical.default, (found,), {}),), {})


@records_alike()
def _other_device(op: Op, args: Args, kwargs: Kwargs) -> Any:
    """`zeros_like(x, device=...)` and similar ops: only the geometry of `x` counts."""
    device = kwargs.get("device")
    source = args[0]
    if not isinstance(source, LazyTensor) or device is None:
        return record(op, args, kwargs)
    context = source._data.context
    if device.type == "lazy" and device.index in (None, context.index):
        return record(op, args, {**kwargs, "device": context.device})
    if device.type == "lazy":
        made = record(op, args, {**kwargs, "device": context.device})
        return _to_copy(aten._to_copy.default, (made,), {"device": device})
    meta = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="meta")
    return op(meta, *args[1:], **kwargs)


_LIKE_OPS = (
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.randint_like.default,
    aten.randint_like.low_dtype,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
)


# In-place ops that change only sizes or strides, each with the equivalent view op.
_METADATA_OPS = {
    aten.t_.default: aten.t.default,
    aten.transpose_.default: aten.transpose.int,
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.unsqueeze_.default: aten.unsqueeze.default,
    aten.as_strided_.default: aten.as_strided.default,
}


def install_handlers() -> None:
    """Register every handler of this file."""
    for op in (aten.detach.default, aten.alias.default):
        add_handler(op, _share)
    for op in (aten.lift_fresh.default, aten.lift.default, aten.detach_.default):
        add_handler(op, _itself)
    for op, view in _METADATA_OPS.items():
        add_handler(op, _metadata_in_place(view))
    add_handler(aten.set_.source_Tensor, _set_tensor)
    add_handler(aten.set_.source_Storage, _set_storage)
    add_handler(aten.set_.source_Storage_storage_offset, _set_storage)
    add_handler(aten.set_.default, _empty_set)
    add_handler(aten._to_copy.default, _to_copy)
    add_handler(aten.copy_.default, _copy)
    add_handler(aten._local_scalar_dense.default, _local_scalar, runs_alike=True)
    add_handler(aten.is_same_size.default, _is_same_size)
    add_handler(aten._has_same_storage_numel.default, _has_same_storage_numel)
    add_handler(aten.equal.default, _equal, runs_alike=True)
    add_handler(aten.view.dtype, _view_as_dtype)
    add_handler(aten.resize_.default, _resize)
    add_handler(aten.resize_as_.default, _resize)
    add_handler(aten._pack_padded_sequence.default, _pack_padded_sequence)
    in_training = aten._native_batch_norm_legit.default
    add_handler(aten.native_batch_norm.default, _native_batch_norm, recorded_as=in_training, runs_alike=True)
    add_handler(in_training, _native_batch_norm_legit, runs_alike=True)
    add_handler(aten.native_dropout.default, _native_dropout)
    add_handler(aten.vdot.default, _vdot)
    add_handler(aten.linalg_lu_solve.default, _lu_solve)
    add_handler(aten.histc.default, _histc)
    # composite ops, which arrive undecomposed in inference mode
    add_handler(aten.group_norm.default, lambda op, args, kwargs: _group_norm(*args, **kwargs))
    add_handler(aten.one_hot.default, lambda op, args, kwargs: _one_hot(*args, **kwargs))
    for op in _LIKE_OPS:
        add_handler(op, _other_device)
    for name in _KERNELS_BESIDE_COMPOSITES:
        add_handler(getattr(aten, name).default, record)


# ----- factories: kernels on the Lazy dispatch key


def _context(device: torch.device | None) -> DeviceContext:
    return contexts.get_device_context(None if device is None else device.index)


def _empty_memory_format(
    size: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> LazyTensor:
    _check_layout(layout, pin_memory)
    shape = tuple(size)
    stride = contiguous_stride(shape)
    if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
        stride = tuple(torch.empty(shape, device="meta", memory_format=memory_format).stride())
    return _empty(shape, stride, dtype, device)


def _empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> LazyTensor:
    _check_layout(layout, pin_memory)
    return _empty(tuple(size), tuple(stride), dtype, device)


def _empty(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype | None, device: torch.device | None
) -> LazyTensor:
    if shape and min(shape) < 0:
        torch.empty(shape, device="meta")  # raises eager's error
    meta = intern_meta(shape, stride, 0, dtype or torch.get_default_dtype())
    return new_unwritten(_context(device), meta)


def _check_layout(layout: torch.layout | None, pin_memory: bool | None) -> None:
    if layout not in (None, torch.strided):
        raise LazyBackendError(
            f"a {str(layout).removeprefix('torch.')} tensor cannot be lazy\n  at {user_site()}\n"
            "  make it on the CPU, or use a strided tensor"
        )
    if pin_memory:
        raise RuntimeError("only dense CPU tensors can be pinned: make the tensor on the CPU with pin_memory=True")


def factory_operator(name: str) -> Op:
    """The operator of a factory, which is recorded."""
    # zeros that autograd fills in: a lazy tensor of zeros costs nothing until it is used
    packet, _, overload = name.replace("_efficientzerotensor", "zeros").partition(".")
    return getattr(getattr(aten, packet), overload or "default")  # type: ignore[no-any-return]


def _factory(op: Op) -> Callable[..., Any]:
    """A Lazy kernel that records `op` as one call, where torch would record `empty` and a fill."""
    learn(_without_generator(op))
    defaults = [arg.name for arg in function_schema(op).arguments if arg.kwarg_only]

    @hide_internals
    def kernel(*args: Any, **kwargs: Any) -> Any:
        _check_layout(kwargs.get("layout"), kwargs.get("pin_memory"))
        context = _context(kwargs.get("device"))
        generator = kwargs.pop("generator", None)
        options = {k: kwargs[k] for k in defaults if k in kwargs and k not in ("device", "pin_memory", "layout")}
        own = lazy_generator(generator)
        if generator is not None and own is None:
            # the numbers come from the user's generator: draw them now, on the calling thread
            real = run_clean(op, *args, **options, generator=generator, device=context.backing)
            return wrap(new_data(context, real))
        options = {k: v for k, v in options.items() if v is not None}
        if own is None:
            return record_factory(context, _without_generator(op), args, **options)
        return rng.call_drawing_from(own, record_factory, context, _without_generator(op), args, **options)

    return kernel


def _without_generator(op: Op) -> Op:
    """`aten.rand.default` for `aten.rand.generator`: the seed travels with the trace."""
    names = {"generator": "default", "low_generator": "low"}
    return getattr(op.overloadpacket, names[overload_name(op)]) if overload_name(op) in names else op


# Composite ops whose `out` forms check whether wrappers share memory, which they never do, or replace `out` in C++.
_OUT_BY_COPY = {
    "linalg_matrix_rank.out": aten.linalg_matrix_rank.default,
    "linalg_matrix_rank.out_tol_tensor": aten.linalg_matrix_rank.tol_tensor,
    "linalg_matrix_rank.atol_rtol_tensor_out": aten.linalg_matrix_rank.atol_rtol_tensor,
    "linalg_matrix_rank.atol_rtol_float_out": aten.linalg_matrix_rank.atol_rtol_float,
}


# `out` forms of composite ops whose rounding depends on the layout of `out`: recorded undecomposed.
_OUT_WHOLE = (aten.matmul.out, aten.linear.out)


def _check_no_gradients(op: Op, *operands: Any) -> None:
    tensors = [operand for operand in operands if isinstance(operand, torch.Tensor)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        name = function_schema(op).name.removeprefix("aten::")
        raise RuntimeError(
            f"{name}(): functions with out=... arguments don't support automatic "
            "differentiation, but one of the arguments requires grad."
        )


def _out_whole(op: Op) -> Callable[..., torch.Tensor]:
    """A kernel for the AutogradLazy key that records `op`, an `out` form, undecomposed."""

    def kernel(*args: Any, out: torch.Tensor) -> torch.Tensor:
        _check_no_gradients(op, *args, out)
        with BelowAutograd():
            record(op, args, {"out": out})
        if not out.is_inference():
            torch.autograd.graph.increment_version(out)
        return out

    return kernel


def _out_by_copy(op: Op) -> Callable[..., torch.Tensor]:
    """The `out` form of `op` as a kernel for the AutogradLazy key: runs `op` and copies its result into `out`."""

    @hide_internals
    def kernel(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        _check_no_gradients(op, *args, *kwargs.values(), out)
        result = op(*args, **kwargs)
        if not torch.can_cast(result.dtype, out.dtype):
            raise RuntimeError(f"result type {result.dtype} can't be cast to the desired output type {out.dtype}")
        if out.shape != result.shape:
            out.resize_(result.shape)
        return out.copy_(result)

    return kernel


def _max_pool1d(input: torch.Tensor, *window: Any, **options: Any) -> torch.Tensor:
    """`aten::max_pool1d` on the AutogradLazy key: the composite kernel returns a view, the CPU's own does not."""
    op = aten.max_pool1d.default
    pooled: torch.Tensor = kernel_caller(op)(DispatchKey.CompositeImplicitAutograd, input, *window, **options)
    if pooled.requires_grad:
        return pooled
    if _backing_of(input).type == "cpu":
        pooled = pooled.contiguous()
    return aten._unsafe_view.default(pooled, pooled.shape)  # type: ignore[no-any-return]


def _ormqr(*args: Any) -> torch.Tensor:
    """`aten::ormqr` on the AutogradLazy key: PyTorch's formula for subclasses forgets the strides of the gradient."""
    product: torch.Tensor = kernel_caller(aten.ormqr.default)(DispatchKey.Autograd, *args)
    if product.grad_fn is not None and args[0].requires_grad:
        like = torch.empty_like(args[0].detach())
        product.grad_fn.register_hook(lambda found, given: _with_strides_of(like, found))
    return product


def _masked_select(input: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`aten::masked_select` on the AutogradLazy key: for subclasses PyTorch's formula gives contiguous gradients."""
    chosen: torch.Tensor = kernel_caller(aten.masked_select.default)(DispatchKey.Autograd, input, mask)
    if chosen.grad_fn is None or input.is_contiguous():
        return chosen
    if torch.broadcast_shapes(input.shape, mask.shape) == input.shape:  # else its gradient is a sum
        like = torch.empty_like(input.detach())
        chosen.grad_fn.register_hook(lambda found, given: _with_strides_of(like, found))
    return chosen


def _with_strides_of(like: torch.Tensor, found: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
    gradient = found[0]
    if gradient is None or torch.is_grad_enabled():
        return found
    return (torch.empty_like(like).copy_(gradient), *found[1:])


def _group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> torch.Tensor:
    """`aten::group_norm` on the AutogradLazy key: the composite kernel keeps channels-last for CPU tensors only."""
    composite = kernel_caller(aten.group_norm.default)
    last = _suggested_format(input) if _backing_of(input).type == "cpu" else None
    if last is None or input.shape[1] % num_groups or not input.numel():
        key = DispatchKey.CompositeImplicitAutograd
        made: torch.Tensor = composite(key, input, num_groups, weight, bias, eps, cudnn_enabled)
        return made
    batch, channels, *window = input.shape
    size = torch.Size(window).numel()
    source = input.contiguous(memory_format=last)
    weight, bias = (None if given is None else given.contiguous() for given in (weight, bias))
    return torch.native_group_norm(source, weight, bias, batch, channels, size, num_groups, eps)[0]


# The dimensions of images and volumes in channels-last order, innermost first.
_CHANNELS_LAST = {4: (torch.channels_last, (1, 3, 2, 0)), 5: (torch.channels_last_3d, (1, 4, 3, 2, 0))}


def _suggested_format(x: torch.Tensor) -> torch.memory_format | None:
    """The channels-last format that the strides of `x` suggest to kernels for the CPU, even where they have gaps.

    The rule is `is_channels_last_strides_2d` of c10/core/MemoryFormat.h. It differs from `is_contiguous`, for which the
    strides of single-element dimensions do not count.
    """
    if x.dim() not in _CHANNELS_LAST or not x.numel() or x.stride(1) == 0:
        return None
    suggested, order = _CHANNELS_LAST[x.dim()]
    reached = 0
    for place in order:
        size, step = x.shape[place], x.stride(place)
        if step < reached or (place == 0 and reached == x.stride(1)):
            return None
        reached = step * size
    return suggested


def _backing_of(x: torch.Tensor) -> torch.device:
    return _context(x.device).backing


def _one_hot(input: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """`aten::one_hot` on the AutogradLazy key: the composite kernel checks class values for CPU tensors only."""
    is_inferred = num_classes == -1
    if input.dtype == torch.int64 and num_classes <= 0 and (not input.numel() or not is_inferred):
        inside = "Class values must be smaller than num_classes."
        raise RuntimeError(inside if input.numel() else "Can not infer total number of classes from empty tensor.")
    if input.dtype == torch.int64 and input.numel():
        # the run checks the values, so nothing has to be read now
        aten._assert_async.msg((input >= 0).all(), "Class values must be non-negative.")
        if not is_inferred:
            aten._assert_async.msg((input < num_classes).all(), "Class values must be smaller than num_classes.")
    made: torch.Tensor = kernel_caller(aten.one_hot.default)(DispatchKey.CompositeImplicitAutograd, input, num_classes)
    return made.contiguous()  # for tensors of subclasses it compares, and keeps the order of dimensions


def install_factories(library: torch.library.Library) -> None:
    """Register the factories, for which hooks stand on the Lazy key, and other kernels, which `library` keeps there."""
    own: dict[str, Callable[..., Any]] = {
        "empty.memory_format": hide_internals(_empty_memory_format),
        "empty_strided": hide_internals(_empty_strided),
    }
    for name in first_use.FACTORIES:
        first_use.offer(name, own.get(name) or _factory(factory_operator(name)))
    library.impl("_copy_from", hide_internals(_lazy_copy_from), "Lazy")
    # torch.tensor([loss, other_loss]) calls this below __torch_dispatch__
    library.impl("_local_scalar_dense", hide_internals(_lazy_local_scalar), "Lazy")
    library.impl("max_pool1d", hide_internals(_max_pool1d), "AutogradLazy")
    library.impl("ormqr", hide_internals(_ormqr), "AutogradLazy")
    library.impl("masked_select", hide_internals(_masked_select), "AutogradLazy")
    for op in _OUT_WHOLE:
        learn(op)
        library.impl(op.name(), hide_internals(_out_whole(op)), "AutogradLazy")
    library.impl("group_norm", hide_internals(_group_norm), "AutogradLazy")
    library.impl("one_hot", hide_internals(_one_hot), "AutogradLazy")
    for name, op in _OUT_BY_COPY.items():
        library.impl(name, _out_by_copy(op), "AutogradLazy")
    for name in _KERNELS_BESIDE_COMPOSITES:
        library.impl(name, _record_kernel(getattr(aten, name).default), "Lazy")
