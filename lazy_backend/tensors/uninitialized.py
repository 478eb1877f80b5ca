"""Parameters and buffers on the lazy device that have no shape yet: those of `nn.LazyLinear` and similar modules.

In: PyTorch's uninitialised tensors, made on or moved to the device. Out: ones whose `materialize` makes lazy tensors.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter  # type: ignore[attr-defined]

from lazy_backend.ports.thread_modes import WithoutSubclasses
from lazy_backend.tensors.state import TensorData
from lazy_backend.tensors.tensor import LazyTensor, assign, make, wrap, wrapper_arguments


class _NoShape:
    """Methods of both kinds that replace PyTorch's own, which ask for a shape."""

    _data: TensorData

    @property
    def data(self) -> LazyTensor:
        return wrap(self._data)

    @data.setter
    def data(self, value: LazyTensor) -> None:
        with WithoutSubclasses():
            assign(self, value._data)  # type: ignore[arg-type]

    def to(self, *args: Any, **kwargs: Any) -> Any:
        return moved(self, self.data.to(*args, **kwargs))  # type: ignore[arg-type]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = moved(self, self.data)  # type: ignore[arg-type]
        return memo[id(self)]


class UninitializedLazyParameter(_NoShape, UninitializedParameter, LazyTensor):  # type: ignore[misc]
    """`UninitializedParameter(device="lazy")`."""

    cls_to_become = LazyTensor

    def __new__(cls, requires_grad: bool = True, device: Any = None, dtype: Any = None) -> UninitializedLazyParameter:
        made = _shell(cls, device, dtype)
        made._is_param = True  # how PyTorch recognises parameters of other classes
        made.requires_grad = requires_grad
        return made  # type: ignore[no-any-return]

    def __repr__(self) -> str:  # type: ignore[override]
        return "<UninitializedParameter>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return UninitializedParameter, (self.requires_grad,)


class UninitializedLazyBuffer(_NoShape, UninitializedBuffer, LazyTensor):  # type: ignore[misc]
    """`UninitializedBuffer(device="lazy")`."""

    cls_to_become = LazyTensor
    persistent: bool

    def __new__(
        cls, requires_grad: bool = False, device: Any = None, dtype: Any = None, persistent: bool = True
    ) -> UninitializedLazyBuffer:
        made = _shell(cls, device, dtype)
        made.persistent = persistent
        made._is_buffer = True
        made.requires_grad = requires_grad
        return made  # type: ignore[no-any-return]

    def __repr__(self) -> str:  # type: ignore[override]
        return "<UninitializedBuffer>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return UninitializedBuffer, (self.requires_grad,)


def _shell(cls: Any, device: Any, dtype: Any) -> Any:
    data = cast("LazyTensor", torch.empty(0, device=device, dtype=dtype))._data
    made = make(cls, *wrapper_arguments(data.context, data.meta))
    made._data = data
    return made


def moved(tensor: torch.Tensor, example: torch.Tensor) -> torch.Tensor:
    """An uninitialised tensor like `tensor`, with the device and dtype of `example`."""
    is_parameter = isinstance(tensor, UninitializedParameter)
    if isinstance(example, LazyTensor):
        kind: Any = UninitializedLazyParameter if is_parameter else UninitializedLazyBuffer
    else:
        kind = UninitializedParameter if is_parameter else UninitializedBuffer
    rest = () if is_parameter else (tensor.persistent,)  # type: ignore[attr-defined]
    return kind(tensor.requires_grad, example.device, example.dtype, *rest)  # type: ignore[no-any-return]
