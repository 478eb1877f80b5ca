"""Sparse tensors on the lazy device.

In: a sparse tensor on the backing device (COO, CSR, CSC, BSR, BSC). Out: a `LazySparseTensor` that stands for it.

Note [Sparse tensors are opaque]
The number of elements of a sparse tensor depends on values, so nothing about it can be recorded: a sparse tensor always
has its value, and operators on it run at once. PyTorch sees a sparse tensor on the device "lazy" with the layout and
properties of the real one, so optimizers and autograd take their sparse paths. A `LazySparseTensor` is not a
`LazyTensor`, which has a geometry, and the recorder never meets one as an operand: a call with operands of both classes
is dispatched to `LazySparseTensor`. Indices and values taken from a sparse tensor are lazy tensors that share its
memory. They are recorded like any other; what is pending on them runs before an operator reads the sparse tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, NoReturn, cast

import torch

from lazy_backend.errors import LazyBackendError
from lazy_backend.errors.sites import user_site
from lazy_backend.lowering.ir.graph import meta_of
from lazy_backend.ports.table import SPARSE
from lazy_backend.ports.tensor_types import (
    WithoutTorchDispatch,
    address_of,
    make_subclass,
    no_torch_function,
    set_data,
    sparse_indices,
    sparse_values,
)
from lazy_backend.tensors.contexts import contexts
from lazy_backend.tensors.outside import new_data, whole_storage
from lazy_backend.tensors.state import DeviceContext, LazyStorage, ViewData
from lazy_backend.tensors.tensor import LazyTensor, wrap

SPARSE_LAYOUTS = frozenset((torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc))


class LazySparseTensor(torch.Tensor):
    """A sparse tensor on device `lazy`. Made by operators and factories, not by calling the class."""

    _real: torch.Tensor  # on the backing device
    _context: DeviceContext
    # the lazy storages behind the indices and values, by the address of the real storage
    _parts: dict[int, LazyStorage]

    __torch_function__ = no_torch_function

    @staticmethod
    def __new__(cls, *args: Any, **kwargs: Any) -> LazySparseTensor:
        raise TypeError('LazySparseTensor is not called: make one with device="lazy" or .to("lazy")')

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `wrap_sparse` makes instances."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(
            "the dispatcher of the lazy device is not in place: import lazy_backend"
        )  # installation puts the dispatcher here

    @property
    def is_lazy(self) -> bool:
        return True

    @property  # type: ignore[override]
    def data(self) -> LazySparseTensor:
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, LazySparseTensor):
            raise RuntimeError(
                "a sparse lazy tensor's data can be set to another sparse lazy tensor only\n"
                f"  at {user_site()}\n  move it first, as in tensor.to({str(self.device)!r})"
            )
        self._real, self._context, self._parts = value._real, value._context, value._parts
        follow(self)

    def to(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        # torch compares device indices as well: without an index, `x.to("lazy")` would copy
        default = contexts.default_device()
        places = [default if _is_lazy_without_index(arg) else arg for arg in args]
        named = {name: default if _is_lazy_without_index(arg) else arg for name, arg in kwargs.items()}
        return super().to(*places, **named)  # type: ignore[arg-type]

    def new(self, *args: Any, device: Any = None) -> torch.Tensor:  # type: ignore[override]
        """The old constructor, which optimizers call. Torch has none for sparse tensors on this device."""
        options: dict[str, Any] = {"dtype": self.dtype, "device": self.device if device is None else device}
        if args and isinstance(args[0], torch.Tensor):
            return torch.sparse_coo_tensor(*args, **options)
        size = args[0] if len(args) == 1 and not isinstance(args[0], int) else args
        return torch.sparse_coo_tensor(size=tuple(size) or (0,), **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        known = memo.get(id(self))
        if known is not None:
            return known
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment"
            )
        with torch.no_grad():
            copied = memo[id(self)] = self.clone()
        copied.requires_grad_(self.requires_grad)
        if self.grad is not None:
            copied.grad = copy.deepcopy(self.grad, memo)
        copied.__dict__.update(copy.deepcopy(attributes_of(self), memo))
        return copied

    def __copy__(self) -> LazySparseTensor:
        copied = wrap_sparse(self._context, self._real, self._parts.values())
        copied.requires_grad_(self.requires_grad)
        copied.__dict__.update(attributes_of(self))
        return copied

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        printed = super().__repr__(tensor_contents=tensor_contents)  # type: ignore[call-arg]
        # torch indents by the length of the class name
        surplus = "\n" + " " * (len(type(self).__name__) - len("tensor"))
        return printed.replace(f"{type(self).__name__}(", "tensor(", 1).replace(surplus, "\n")

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.detach().cpu().numpy(force=force)

    def is_shared(self) -> bool:
        return False

    def share_memory_(self) -> NoReturn:
        raise RuntimeError(
            "a lazy tensor cannot be shared between processes\n  share a copy, as in tensor.cpu().share_memory_()"
        )

    def is_pinned(self, device: Any = None) -> bool:
        return False


def attributes_of(tensor: LazySparseTensor) -> dict[str, Any]:
    """The attributes that users have set on `tensor`."""
    return {name: value for name, value in tensor.__dict__.items() if name not in ("_real", "_context", "_parts")}


def wrap_sparse(context: DeviceContext, real: torch.Tensor, storages: Iterable[LazyStorage] = ()) -> LazySparseTensor:
    """A tensor that stands for `real`, whose indices and values may share memory with `storages`."""
    if not SPARSE.fits():
        raise LazyBackendError(
            f"there are no sparse tensors on {context.device}: {SPARSE.obstacle()}\n"
            f"  at {user_site()}\n  compute with them on the CPU"
        )
    tensor = _shell(context, real)
    tensor._real = real
    tensor._parts = _storages_behind(context, real, storages)
    return tensor


def follow(tensor: LazySparseTensor) -> None:
    """Update `tensor` after an operator has changed the real tensor in place: its size, and its memory."""
    real = tensor._real
    if real.shape == tensor.shape and all(_place(part) in tensor._parts for part in _real_parts(real)):
        return
    tensor._parts = _storages_behind(tensor._context, real, tensor._parts.values())
    with WithoutTorchDispatch():
        set_data(tensor, _shell(tensor._context, real))


def part_of(tensor: LazySparseTensor, real: torch.Tensor) -> LazyTensor | None:
    """Indices or values of `tensor`, as a lazy tensor that shares their memory, so that writes reach `tensor`."""
    storage = tensor._parts.get(_place(real))
    if storage is None:
        return None
    meta = meta_of(real)
    return wrap(storage if meta is storage.meta else ViewData(tensor._context, None, None, meta, storage))


def _storages_behind(
    context: DeviceContext, real: torch.Tensor, storages: Iterable[LazyStorage]
) -> dict[int, LazyStorage]:
    """Lazy storages for the memory of indices and values: the known ones, and new ones for the rest."""
    known = {_place(storage.tensor): storage for storage in storages if storage.tensor is not None}
    found: dict[int, LazyStorage] = {}
    for part in _real_parts(real):
        place = _place(part)
        if place not in found:
            found[place] = known.get(place) or new_data(context, _base_of(part))
    return found


def _real_parts(real: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if real.layout is torch.sparse_coo:
        return sparse_indices(real), sparse_values(real)
    if real.layout in (torch.sparse_csr, torch.sparse_bsr):
        return real.crow_indices(), real.col_indices(), real.values()
    return real.ccol_indices(), real.row_indices(), real.values()


def _place(real: torch.Tensor) -> int:
    return address_of(real.untyped_storage())


def _base_of(part: torch.Tensor) -> torch.Tensor:
    """A tensor over the whole storage of `part`: `part` itself, if it has neither gaps nor an offset."""
    if not part.storage_offset() and torch.ops.aten.is_non_overlapping_and_dense(part):
        return part.detach()
    return whole_storage(part)


def _shell(context: DeviceContext, real: torch.Tensor) -> LazySparseTensor:
    """The tensor that PyTorch sees: one of its own sparse tensors that says it is on the lazy device."""
    with WithoutTorchDispatch():
        # FakeTensor makes its sparse tensors this way
        made = make_subclass(
            LazySparseTensor, real, False, dispatch_device=True, device_for_backend_keys=context.device
        )
    shell = cast("LazySparseTensor", made)
    shell._context = context  # PyTorch asks for the device at once
    return shell


def _is_lazy_without_index(arg: Any) -> bool:
    if isinstance(arg, str):
        return arg == "lazy"
    return isinstance(arg, torch.device) and arg.type == "lazy" and arg.index is None
