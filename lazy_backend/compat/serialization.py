"""Saving and loading: lazy tensors are saved like CUDA tensors, and `map_location` applies to them.

In: calls of `torch.save`, `pickle`, `copy`. Out: plain tensor records with location `lazy:0`. A file loads on any
machine with `map_location="cpu"`, even without this package. Tensors that shared a storage share one again when loaded.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch.utils.hooks import warn_if_has_hooks

from lazy_backend.errors.tracebacks import hide_internals
from lazy_backend.execution import reads
from lazy_backend.recording.storage import LazyUntypedStorage, data_ptr, untyped_storage
from lazy_backend.tensors.contexts import contexts
from lazy_backend.tensors.sparse_tensor import LazySparseTensor, attributes_of
from lazy_backend.tensors.tensor import LazyTensor


@hide_internals
def reduce_lazy(tensor: LazyTensor, protocol: Any) -> Any:
    """`LazyTensor.__reduce_ex__`."""
    warn_if_has_hooks(tensor)  # type: ignore[no-untyped-call]
    attributes = {name: value for name, value in tensor.__dict__.items() if name != "_data"}
    if isinstance(tensor, torch.nn.Parameter):
        arguments: tuple[Any, ...] = (tensor.detach(), tensor.requires_grad, OrderedDict())
        if not attributes:
            return torch._utils._rebuild_parameter, arguments
        return torch._utils._rebuild_parameter_with_state, (*arguments, attributes)
    rebuild, arguments = _reduce_plain(tensor)
    if not attributes:
        return rebuild, arguments
    # torch.Tensor rather than LazyTensor, so that the file loads without this package
    return torch._tensor._rebuild_from_type_v2, (rebuild, torch.Tensor, arguments, attributes)


def _reduce_plain(tensor: LazyTensor) -> tuple[Any, tuple[Any, ...]]:
    data = tensor._data
    if data.meta.conj or data.meta.neg:
        data = tensor.detach().clone()._data  # type: ignore[attr-defined]
    reads.read(data.storage, "save")
    storage = LazyUntypedStorage.of(data.storage)
    meta = data.meta
    hooks: OrderedDict[str, Any] = OrderedDict()
    geometry = (meta.storage_offset, meta.shape, meta.stride, tensor.requires_grad, hooks)
    if tensor.dtype in torch.storage._new_dtypes():
        # uint16, float8 have no typed storage; torch.save takes no subclass of UntypedStorage: mark a plain one instead
        plain: Any = storage.plain
        plain.lazy_device = storage.device
        return torch._utils._rebuild_tensor_v3, (plain, *geometry, tensor.dtype)
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=tensor.dtype, _internal=True)
    return torch._utils._rebuild_tensor_v2, (typed, *geometry)


def reduce_sparse(tensor: LazySparseTensor, protocol: Any) -> Any:
    """`LazySparseTensor.__reduce_ex__`: pickle the indices and values as lazy tensors."""
    warn_if_has_hooks(tensor)  # type: ignore[no-untyped-call]
    attributes = attributes_of(tensor)
    if isinstance(tensor, torch.nn.Parameter):
        arguments: tuple[Any, ...] = (tensor.detach(), tensor.requires_grad, OrderedDict())
        if not attributes:
            return torch._utils._rebuild_parameter, arguments
        return torch._utils._rebuild_parameter_with_state, (*arguments, attributes)
    rebuild, arguments = tensor._reduce_ex_internal(protocol)  # type: ignore[attr-defined]
    if not attributes:
        return rebuild, arguments
    return torch._tensor._rebuild_from_type_v2, (rebuild, torch.Tensor, arguments, attributes)


@hide_internals
def dlpack(tensor: LazyTensor, **options: Any) -> Any:
    """`LazyTensor.__dlpack__`: export the backing tensor's memory, computed first; consumers must not write to it.

    Raises `BufferError` for a tensor that requires grad.
    """
    if tensor.requires_grad:
        raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
    return reads.read(tensor._data, "dlpack").__dlpack__(**options)


def _read_backing_tensor(tensor: LazyTensor) -> torch.Tensor:
    """`LazyTensor._backing_tensor`: the inner tensor that `__tensor_flatten__` names. A read, which cuts the graph."""
    return reads.read(tensor._data, "inner tensor")


def _location(storage: Any) -> str | None:
    device = getattr(storage, "lazy_device", None)
    return None if device is None else str(device)


@hide_internals
def _restore(storage: Any, location: str) -> Any:
    if not location.startswith("lazy"):
        return None
    index = torch.device(location).index
    context = contexts.get_device_context(index)  # raises for a device that does not exist
    return LazyUntypedStorage.loaded(storage, context.device)


def install_serialization() -> None:
    LazyTensor.untyped_storage = untyped_storage  # type: ignore[method-assign, assignment]
    LazyTensor.data_ptr = LazyTensor.const_data_ptr = data_ptr  # type: ignore[method-assign, attr-defined, assignment]
    LazyTensor.__dlpack__ = dlpack  # type: ignore[method-assign, assignment]
    LazyTensor.__reduce_ex__ = reduce_lazy  # type: ignore[method-assign, assignment]
    LazyTensor._backing_tensor = property(_read_backing_tensor)  # type: ignore[assignment]
    LazySparseTensor.__reduce_ex__ = reduce_sparse  # type: ignore[method-assign, assignment]
    # before CPU (10) and CUDA (20), whose functions would take our storages for CPU storages
    torch.serialization.register_package(5, _location, _restore)
