"""Tensors that come from outside the lazy device: uploads, constants, operands on the CPU."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import torch
from torch.nn.parameter import is_lazy  # type: ignore[attr-defined]

from lazy_backend.cache.constants import ConstantKey, DataCacheArena
from lazy_backend.errors import DeviceError, LazyBackendError
from lazy_backend.errors.sites import user_site
from lazy_backend.lowering.device_graphs.uploads import upload_to
from lazy_backend.lowering.ir.graph import TensorMeta, meta_of
from lazy_backend.ports.dispatcher import function_schema
from lazy_backend.settings import config
from lazy_backend.tensors.state import UNWRITTEN, DeviceContext, LazyStorage, TensorData
from lazy_backend.tensors.tensor import LazyTensor, wrap
from lazy_backend.tensors.thread_state import run_clean
from lazy_backend.tensors.transfers import counted_upload


def unwritten_storage(context: DeviceContext, meta: TensorMeta) -> LazyStorage:
    """Memory whose allocation is recorded at its first use, so that an upload into it records nothing."""
    storage = LazyStorage(context, None, UNWRITTEN, meta)
    context.registry.register(storage)
    context.paths.create()
    return storage


def new_unwritten(context: DeviceContext, meta: TensorMeta) -> LazyTensor:
    """A tensor over memory that is not used yet."""
    return wrap(unwritten_storage(context, meta))


def new_data(context: DeviceContext, tensor: torch.Tensor) -> LazyStorage:
    """A storage that holds `tensor`, a real tensor on the backing device that nothing else writes to."""
    base = tensor
    if tensor.storage_offset():
        base = run_clean(tensor.clone)
    storage = LazyStorage(context, None, None, meta_of(base))
    storage.tensor = base
    context.registry.register(storage)
    context.paths.create()
    return storage


def whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """All the memory behind a real tensor, in one dimension."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return flat.set_(storage, 0, (storage.nbytes() // tensor.element_size(),))  # type: ignore[call-overload, no-any-return]


# Host constants that were uploaded once; read-only, shared by all inputs with the same value.
data_cache: DataCacheArena[torch.Tensor] = DataCacheArena(config.constants_cache_entries, config.constants_cache_bytes)
_counted_before: Counter[str] = Counter()


def read_counters() -> Counter[str]:
    hits, misses = data_cache.counts()
    counted = Counter(DeviceDataCacheHit=hits, DeviceDataCacheMiss=misses)
    counted.subtract(_counted_before)
    return counted


def reset_counters() -> None:
    _counted_before.update(read_counters())


def reset() -> None:
    """Forget the constants, and their counts."""
    data_cache.clear()
    _counted_before.clear()


def upload(context: DeviceContext, tensor: torch.Tensor) -> torch.Tensor:
    """A copy of `tensor` on the backing device; 0-d tensors come from the constants cache and must not be written."""
    return run_clean(_upload, context, tensor)


def _upload(context: DeviceContext, tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    copy = functools.partial(counted_upload, tensor.nbytes, lambda: upload_to(context.backing, tensor))
    if tensor.dim() or tensor.device.type != "cpu":
        return copy()
    key = ConstantKey(tensor.dtype, (), bytes(tensor.reshape(1).view(torch.uint8).tolist()))
    cache = data_cache.get_data_cache(context.index)
    return cache.get_device_data(key, copy)


def operand_from_outside(context: DeviceContext, op: Any, tensor: torch.Tensor, is_index: bool) -> TensorData:
    """Data for an operand that is not lazy: a 0-d CPU tensor, or an index. Anything else is a mistake."""
    known = context.outside.get(tensor)
    if known is not None:
        return known
    if tensor.device.type != "cpu" or (tensor.dim() and not is_index):
        raise mixed_devices(context, op, tensor)
    data = new_data(context, upload(context, tensor))
    context.outside[tensor] = data
    return data


def quantized_error() -> LazyBackendError:
    return LazyBackendError(
        f"a quantised tensor cannot be lazy\n  at {user_site()}\n"
        "  keep it on the CPU, move its floats, as in tensor.dequantize().to('lazy'), or imitate the rounding with "
        "torch.fake_quantize_per_tensor_affine"
    )


def without_value(op: Any, tensor: torch.Tensor) -> LazyBackendError:
    """The error for a tensor that says it is on the device, where it has no value."""
    what, advice = f"a {type(tensor).__name__}", "use the lazy tensor that it was made from"
    if is_lazy(tensor):
        what, advice = "a parameter or buffer without a shape", "call its module first, or materialize() it"
    return LazyBackendError(
        f"{what} on {tensor.device}, which {function_schema(op).name} takes, has no value there\n"
        f"  at {user_site()}\n  {advice}"
    )


def mixed_devices(context: DeviceContext, op: Any, tensor: torch.Tensor) -> LazyBackendError:
    if tensor.is_quantized:  # PyTorch moves no quantised tensor to this device, and does not ask us
        return quantized_error()
    if tensor.device.type == "lazy":
        return without_value(op, tensor)
    return DeviceError(
        f"expected all tensors to be on the same device, but found {context.device} and {tensor.device} in "
        f"{function_schema(op).name}\n  at {user_site()}\n  move one of them, as in tensor.to({str(context.device)!r})"
    )
