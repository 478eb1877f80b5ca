"""Pickled tensors: the functions that `torch.load` calls to make them.

In: `torch._utils`, `torch._tensor`. Out: the same under public names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lazy_backend.ports.port import optional

rebuild_parameter: Callable[..., Any] = optional("torch._utils._rebuild_parameter")
rebuild_parameter_with_state: Callable[..., Any] = optional("torch._utils._rebuild_parameter_with_state")
rebuild_typed: Callable[..., Any] = optional("torch._utils._rebuild_tensor_v2")
rebuild_untyped: Callable[..., Any] = optional("torch._utils._rebuild_tensor_v3")
rebuild_with_attributes: Callable[..., Any] = optional("torch._tensor._rebuild_from_type_v2")


def has_typed_storage(dtype: torch.dtype) -> bool:
    """Whether there is a typed storage of `dtype`: not of uint16 or float8."""
    return dtype not in torch.storage._new_dtypes()


def typed_storage(storage: Any, dtype: torch.dtype) -> torch.storage.TypedStorage:
    """`storage` as a typed one, without the warning that typed storages are deprecated."""
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def reduce_sparse_parts(tensor: torch.Tensor, protocol: Any) -> tuple[Any, Any]:
    """PyTorch's function and arguments that make a sparse tensor of its indices and values."""
    return tensor._reduce_ex_internal(protocol)  # type: ignore[attr-defined, no-any-return]
