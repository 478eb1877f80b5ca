"""The dispatcher: operators, what their schemas say, their kernels and keys.

In: `torch._ops`, `torch._C`. Out: the same under public names. A name that is missing is None: its port says so.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch._C import DispatchKey as DispatchKey
from torch._C import DispatchKeySet as DispatchKeySet
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload

from lazy_backend.ports.cpython import import_uninterrupted
from lazy_backend.ports.port import optional

# Of an operator such as `aten.add.Tensor`.
function_schema: Callable[[OpOverload], torch._C.FunctionSchema] = attrgetter("_schema")
base_name: Callable[[OpOverload], str] = attrgetter("_opname")  # "add"
overload_name: Callable[[OpOverload], str] = attrgetter("_overloadname")  # "Tensor", or "default"
can_decompose: Callable[[OpOverload], bool] = methodcaller("_can_decompose")
# Calls the kernel of one key: (key, *args, **kwargs). `redispatch` is public, but takes a set of keys.
kernel_caller: Callable[[OpOverload], Callable[..., Any]] = attrgetter("_op_dk")

# (name of an operator, name of a key): whether the operator has a kernel of its own there. Raises for unknown names.
has_kernel: Callable[[str, str], bool] = optional("torch._C._dispatch_has_kernel_for_dispatch_key")
dispatch_keys: Callable[[torch.Tensor], Any] = optional("torch._C._dispatch_keys")
# A guard: calls within it go below autograd.
BelowAutograd: Any = optional("torch._C._AutoDispatchBelowAutograd")
# A guard: calls within it go below autograd and the kernels that keep versions and views, as those of a kernel do.
BelowViewTracking: Any = optional("torch._C._AutoDispatchBelowADInplaceOrView")

# By operator, functions that compute it by others.
decompositions: dict[OpOverload, Callable[..., Any]] | None = optional("torch._decomp.decomposition_table")

# The number of the attention kernel that a device takes for its operands.
attention_choice: Any = optional("torch._fused_sdp_choice")

# The key of the kernels of a type of device: "PrivateUse1" for one that another package added.
key_of_device: Any = optional("torch._C._dispatch_key_for_device")
_registered: Any = optional("torch.library._impls")  # where `Library.impl` notes what it registered


def import_what_dispatch_imports() -> None:
    """Import what PyTorch imports when it first asks Python for a call. It takes up to 0.8 s."""
    import_uninterrupted("torch.distributed.tensor")


def runs_python(op: OpOverload, device_type: str) -> bool:
    """Whether a kernel of `op` was registered from Python, as `torch.library.custom_op` does."""
    schema = function_schema(op)
    name = schema.name.replace("::", "/") + (f".{schema.overload_name}" if schema.overload_name else "")
    keys = (key_of_device(device_type), "CompositeExplicitAutograd", "CompositeImplicitAutograd", "BackendSelect")
    return any(f"{name}/{key}" in _registered for key in keys)


def no_kernel_text(op: OpOverload, device_type: str) -> str:
    """The error of PyTorch's dispatcher for an operator that has no kernel for a device, as far as it is the same."""
    return (
        f"Could not run '{op.name()}' with arguments from the '{key_of_device(device_type)}' backend. This could be "
        "because the operator doesn't exist for this backend, or was omitted during the selective/custom build process "
        "(if using custom build). If you are a Facebook employee using PyTorch on mobile, please visit "
        "https://fburl.com/ptmfixes for possible resolutions."
    )
