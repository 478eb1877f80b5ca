"""Tensor classes of Python, and what tensors and storages say about their memory.

In: `torch._C`, private attributes of tensors and storages. Out: the same under public names. A name that is missing is
None: its port says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, methodcaller
from typing import Any

import torch

from lazy_backend.ports.port import optional, version

# ----- tensor classes

make_wrapper_subclass: Any = optional("torch.Tensor._make_wrapper_subclass")
make_subclass: Any = optional("torch.Tensor._make_subclass")
# `__torch_function__` of a class that has none
no_torch_function: Any = optional("torch._C._disabled_torch_function_impl")
# `tensor.data = other`, whatever the class says: (tensor, other)
set_data: Any = optional("torch._C.TensorBase.data.__set__")
WithoutTorchDispatch: Any = optional("torch._C._DisableTorchDispatch")
set_conj: Callable[[torch.Tensor, bool], None] = optional("torch._C._set_conj")
set_neg: Callable[[torch.Tensor, bool], None] = optional("torch._C._set_neg")
neg_view: Callable[[torch.Tensor], torch.Tensor] = optional("torch._neg_view", torch.ops.aten._neg_view)

# ----- attributes of tensors: getters of C, 60 ns

device_of: Callable[[torch.Tensor], torch.device] = torch.Tensor.device.__get__  # type: ignore[attr-defined]
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
base_of: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("_base")
IS_VIEW = "_is_view"  # as function modes see it
is_view: Callable[[torch.Tensor], bool] = methodcaller(IS_VIEW)
# What tells a tensor of a graph of autograd's from one with the same data that begins or ends a graph.
PLACE_IN_GRAPH = frozenset((
    "is_leaf", "grad_fn", "retains_grad", "output_nr", "get_gradient_edge", IS_VIEW, "_base", "_backward_hooks",
    "_version",
))  # fmt: skip
_is_leaf: Callable[[torch.Tensor], bool] = torch.Tensor.is_leaf.__get__  # type: ignore[attr-defined]
use_count: Callable[[torch.Tensor], int] = methodcaller("_use_count")  # references from C++
sparse_indices: Callable[[torch.Tensor], torch.Tensor] = methodcaller("_indices")
sparse_values: Callable[[torch.Tensor], torch.Tensor] = methodcaller("_values")
mark_uncoalesced: Callable[[torch.Tensor], torch.Tensor] = methodcaller("_coalesced_", False)


def is_leaf(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a leaf of autograd's graphs.

    PyTorch raises if it is asked that of a view that was made without gradients, of memory that wants them and was
    written since: a program that only computes with such a view never asks.
    """
    try:
        return _is_leaf(tensor)
    except RuntimeError:
        return False


def grad_fn_of(tensor: torch.Tensor) -> Any:
    """The node of autograd's that made a tensor; None for a view of which PyTorch cannot tell, as for `is_leaf`."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


# ----- storages and generators

# The address of the C++ object that a storage or a generator stands for: several Python objects may stand for one.
address_of: Callable[[Any], int] = attrgetter("_cdata")
untyped: Callable[[torch.storage.TypedStorage], torch.UntypedStorage] = attrgetter("_untyped_storage")
storage_use_count: Callable[[int], int] = optional("torch._C._storage_Use_Count")
# From the `cdata` of a `StorageWeakRef`.
storage_behind: Callable[[int], torch.UntypedStorage] = optional("torch.UntypedStorage._new_with_weak_ptr")


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return address_of(one.untyped_storage()) == address_of(other.untyped_storage())


# Whether two tensors have the same storage: 0.2 µs, where comparing the storages takes 3.
share_memory: Callable[[torch.Tensor, torch.Tensor], bool] = optional("torch._C._is_alias_of", _share_memory)

# Give back the memory in which cuBLAS works, of all streams: 32 MiB each on Hopper.
free_cublas_workspaces: Callable[[], None] = optional("torch._C._cuda_clearCublasWorkspaces", lambda: None)
# The address of the stream that this thread is on, by the device's index; 0 for the default stream.
raw_stream: Callable[[int], int] = optional(
    "torch._C._cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)


def register_generators(graph: torch.cuda.CUDAGraph, generators: Sequence[torch.Generator]) -> None:
    """Let a graph draw from `generators` at each launch. After 2.13 a capture sees which draw, and the call warns."""
    if version() == "2.13":
        for generator in generators:
            graph.register_generator_state(generator)


foreach_copy: Any = optional("torch._foreach_copy_", torch.ops.aten._foreach_copy_)
foreach_clone: Any = optional("torch._foreach_clone", torch.ops.aten._foreach_clone)


class StandInStorage(torch.UntypedStorage):
    """A storage without bytes of its own, as `torch.save`, `torch.load` and pickle use one."""

    @property
    def plain(self) -> torch.UntypedStorage:
        """The storage that has the bytes."""
        raise NotImplementedError

    def follow_plain(self) -> None:
        """Note that `plain` got its bytes from a file."""
        raise NotImplementedError

    def refuse(self, *args: Any, **kwargs: Any) -> Any:
        """Raise for a call that this storage does not support."""
        raise NotImplementedError

    @property
    def _cdata(self) -> int:
        # identity: torch.save uses it to find storages that it has written already
        return address_of(self.plain)

    def _write_file(self, *args: Any, **kwargs: Any) -> Any:
        return self.cpu()._write_file(*args, **kwargs)

    def _set_from_file(self, *args: Any, **kwargs: Any) -> Any:
        plain: Any = self.plain
        plain._set_from_file(*args, **kwargs)
        self.follow_plain()
        return self

    def _share_fd_cpu_(self, *args: Any, **kwargs: Any) -> Any:
        return self.refuse(*args, **kwargs)

    def _share_filename_cpu_(self, *args: Any, **kwargs: Any) -> Any:
        return self.refuse(*args, **kwargs)


# ----- printing

PRINT_OPTIONS: Any = optional("torch._tensor_str.PRINT_OPTS")
_print_values: Any = optional("torch._tensor_str._tensor_str")
_add_suffixes: Any = optional("torch._tensor_str._add_suffixes")


def print_with(tensor: torch.Tensor, prefix: str, suffixes: list[str]) -> str:
    """`prefix`, the values of a strided tensor, and `suffixes`, with PyTorch's own line breaks."""
    contents = _print_values(tensor, len(prefix))
    return str(_add_suffixes(prefix + contents, suffixes, len(prefix), force_newline=False))
