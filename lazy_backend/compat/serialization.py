"""Saving and loading: lazy tensors are saved like CUDA tensors, and `map_location` applies to them.

In: calls of `torch.save`, `pickle`, `copy`. Out: plain tensor records with location `lazy:0`. A file loads on any
machine with `map_location="cpu"`, even without this package. Tensors that shared a storage share one again when loaded.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch.utils.hooks import warn_if_has_hooks

from lazy_backend.errors import LazyBackendError
from lazy_backend.errors.tracebacks import hide_internals
from lazy_backend.execution import reads
from lazy_backend.ports import pickling
from lazy_backend.ports.table import PICKLING
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
            return pickling.rebuild_parameter, arguments
        return pickling.rebuild_parameter_with_state, (*arguments, attributes)
    rebuild, arguments = _reduce_plain(tensor)
    if not attributes:
        return rebuild, arguments
    # torch.Tensor rather than LazyTensor, so that the file loads without this package
    return pickling.rebuild_with_attributes, (rebuild, torch.Tensor, arguments, attributes)


def _reduce_plain(tensor: LazyTensor) -> tuple[Any, tuple[Any, ...]]:
    data = tensor._data
    if data.meta.conj or data.meta.neg:
        data = tensor.detach().clone()._data  # type: ignore[attr-defined]
    reads.read(data.storage, "save")
    storage = LazyUntypedStorage.of(data.storage)
    meta = data.meta
    hooks: OrderedDict[str, Any] = OrderedDict()
    geometry = (meta.storage_offset, meta.shape, meta.stride, tensor.requires_grad, hooks)
    if not pickling.has_typed_storage(tensor.dtype):
        # uint16, float8 have no typed storage; torch.save takes no subclass of UntypedStorage: mark a plain one instead
        plain: Any = storage.plain
        plain.lazy_device = storage.device
        return pickling.rebuild_untyped, (plain, *geometry, tensor.dtype)
    return pickling.rebuild_typed, (pickling.typed_storage(storage, tensor.dtype), *geometry)


def reduce_sparse(tensor: LazySparseTensor, protocol: Any) -> Any:
    """`LazySparseTensor.__reduce_ex__`: pickle the indices and values as lazy tensors."""
    warn_if_has_hooks(tensor)  # type: ignore[no-untyped-call]
    attributes = attributes_of(tensor)
    if isinstance(tensor, torch.nn.Parameter):
        arguments: tuple[Any, ...] = (tensor.detach(), tensor.requires_grad, OrderedDict())
        if not attributes:
            return pickling.rebuild_parameter, arguments
        return pickling.rebuild_parameter_with_state, (*arguments, attributes)
    rebuild, arguments = pickling.reduce_sparse_parts(tensor, protocol)
    if not attributes:
        return rebuild, arguments
    return pickling.rebuild_with_attributes, (rebuild, torch.Tensor, arguments, attributes)


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


@hide_internals
def _refuse(tensor: torch.Tensor, protocol: Any) -> Any:
    raise LazyBackendError(
        f"a lazy tensor cannot be saved with this PyTorch: {PICKLING.obstacle()}\n  save a copy, as tensor.cpu()"
    )


def install_serialization() -> None:
    LazyTensor.untyped_storage = untyped_storage  # type: ignore[method-assign, assignment]
    LazyTensor.data_ptr = LazyTensor.const_data_ptr = data_ptr  # type: ignore[method-assign, attr-defined, assignment]
    LazyTensor.__dlpack__ = dlpack  # type: ignore[method-assign, assignment]
    fits = PICKLING.fits()
    LazyTensor.__reduce_ex__ = reduce_lazy if fits else _refuse  # type: ignore[method-assign, assignment]
    LazyTensor._backing_tensor = property(_read_backing_tensor)  # type: ignore[assignment]
    LazySparseTensor.__reduce_ex__ = reduce_sparse if fits else _refuse  # type: ignore[method-assign, assignment]
    # before CPU (10) and CUDA (20), whose functions would take our storages for CPU storages
    torch.serialization.register_package(-7259, _location, _restore)
