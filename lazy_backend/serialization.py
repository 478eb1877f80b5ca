"""Saving and loading: a lazy tensor is written as a CUDA tensor is, and `map_location` works on it.

In: `torch.save`, `pickle`, `copy`. Out: plain tensor records with location `lazy:0`. A file loads on any machine with
`map_location="cpu"`, also where this package is not installed. Tensors that share a storage share it again.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

from lazy_backend.context import contexts
from lazy_backend.storage import LazyUntypedStorage, untyped_storage
from lazy_backend.sync import executor
from lazy_backend.tensor import LazyTensor


def reduce_lazy(tensor: LazyTensor, protocol: Any) -> Any:
    """`LazyTensor.__reduce_ex__`."""
    if isinstance(tensor, torch.nn.Parameter):
        plain = tensor.detach()
        return torch._utils._rebuild_parameter, (plain, tensor.requires_grad, OrderedDict())
    data = tensor._data
    executor.read(data.storage, "save")
    storage = LazyUntypedStorage.of(data.storage)
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=tensor.dtype, _internal=True)
    meta = data.meta
    arguments: tuple[Any, ...] = (
        typed,
        meta.storage_offset,
        meta.shape,
        meta.stride,
        tensor.requires_grad,
        OrderedDict(),
    )
    return torch._utils._rebuild_tensor_v2, arguments


def dlpack(tensor: LazyTensor, **options: Any) -> Any:
    """`LazyTensor.__dlpack__`: the backing tensor's memory, once it is computed. The consumer must not write to it."""
    if tensor.requires_grad:
        raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
    return executor.read(tensor._data, "dlpack").__dlpack__(**options)


def _location(storage: Any) -> str | None:
    return str(storage.device) if isinstance(storage, LazyUntypedStorage) else None


def _restore(storage: Any, location: str) -> Any:
    if not location.startswith("lazy"):
        return None
    index = torch.device(location).index
    context = contexts.get_device_context(index)  # raises for a device that does not exist
    return LazyUntypedStorage.loaded(storage, context.device)


def install_serialization() -> None:
    LazyTensor.untyped_storage = untyped_storage  # type: ignore[method-assign, assignment]
    LazyTensor.__dlpack__ = dlpack  # type: ignore[method-assign, assignment]
    LazyTensor.__reduce_ex__ = reduce_lazy  # type: ignore[method-assign, assignment]
    # before CPU (10) and CUDA (20): our storages look like CPU ones to the others
    torch.serialization.register_package(5, _location, _restore)
