"""Modules that move to the lazy device and back, and parameters that have no shape yet.

In: the classes of lazy tensors. Out: `module.to(...)`, which keeps the identity of parameters.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import (  # type: ignore[attr-defined]
    UninitializedBuffer,
    UninitializedParameter,
    UninitializedTensorMixin,
)

from lazy_backend.ports.table import MOVING, UNINITIALIZED

_SPARSE_LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


@dataclass(frozen=True, slots=True)
class LazyKinds:
    """This package's classes and functions that modules on the move need."""

    tensor: type
    sparse_tensor: type
    attributes: tuple[str, ...]  # those of a lazy tensor that are not the user's
    uninitialized_parameter: Callable[..., Any]
    uninitialized_buffer: Callable[..., Any]
    moved: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # an uninitialised tensor, made like an example
    quantized_error: Callable[[], Exception]

    @property
    def all(self) -> tuple[type, ...]:
        return self.tensor, self.sparse_tensor


def keep_parameters_when_moved(kinds: LazyKinds) -> None:
    """Make `module.cpu()` keep a lazy parameter's identity, as for CUDA, so optimizers and tied weights stay valid.

    `Module._apply` swaps parameters in place only under a global flag, which other modules should not see; so the flag
    is set only while a module with lazy parameters moves. The other direction needs no patch: see
    `LazyTensor.__tensor_flatten__`. Parameters that stay on their device take the new data instead, as on the CPU: a
    swap would take them out of the graphs of forward passes.
    """
    if not MOVING.fits():
        return
    original = torch.nn.Module._apply

    @functools.wraps(original)
    def _apply(self: torch.nn.Module, fn: Callable[..., Any], recurse: bool = True) -> torch.nn.Module:
        _refuse_quantized(self, fn, kinds)
        apart: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (place, _move_by_swapping(place, fn, kinds)) for place in (self._parameters, self._buffers)
        ]
        kept = [_KeptParameter(parameter, kinds) for parameter in self._parameters.values() if parameter is not None]
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        was_converting, _thread.converts = _thread.converts, True
        try:
            if swaps or not any(isinstance(parameter, kinds.tensor) for parameter in self.parameters(recurse)):
                original(self, fn, recurse)
            else:
                torch.__future__.set_swap_module_params_on_conversion(True)
                try:
                    original(self, fn, recurse)
                finally:
                    torch.__future__.set_swap_module_params_on_conversion(False)
        finally:
            _thread.converts = was_converting
        for parameter in kept:
            parameter.restore()
        for place, tensors in apart:
            place.update(tensors)
        return self

    MOVING.put(torch.nn.Module, "_apply", _apply)
    MOVING.put(torch.utils, "swap_tensors", _swap_tensors_or(torch.utils.swap_tensors, kinds))
    parametrize = torch.nn.utils.parametrize
    MOVING.put(parametrize, "_maybe_set", _set_in_place_or(parametrize._maybe_set, kinds))


class _KeptParameter:
    """The attributes and hooks of a parameter, which a swap of its data would take away, to be restored afterwards."""

    def __init__(self, parameter: torch.Tensor, kinds: LazyKinds) -> None:
        self.parameter = parameter
        self.kinds = kinds.all
        self.was_lazy = isinstance(parameter, kinds.all)
        self.attributes = {name: value for name, value in parameter.__dict__.items() if name not in kinds.attributes}
        self.hooks = parameter._backward_hooks
        self.grad_hooks = parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]

    def restore(self) -> None:
        parameter = self.parameter
        if self.was_lazy or isinstance(parameter, self.kinds):
            parameter.__dict__.update(self.attributes)
            # assigning the hooks registers them with the new data
            if self.hooks:
                parameter._backward_hooks = self.hooks
            if self.grad_hooks:
                parameter._post_accumulate_grad_hooks = self.grad_hooks  # type: ignore[attr-defined]


class _Thread(threading.local):
    converts = False  # whether the thread is in `Module._apply`


_thread = _Thread()


def _swap_tensors_or(original: Callable[..., None], kinds: LazyKinds) -> Callable[..., None]:
    """`torch.utils.swap_tensors` that also takes tensors with weak references or in an autograd graph, if one is lazy.

    PyTorch refuses both, but then modules that move to CUDA would not move to the lazy device: optimizers and averagers
    hold weak references to parameters, and the older `weight_norm` keeps a graph. A backward pass over such a graph
    raises `RuntimeError`.
    """

    @functools.wraps(original)
    def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
        if not isinstance(t1, kinds.all) and not isinstance(t2, kinds.all):
            original(t1, t2)
            return
        are_dense = isinstance(t1, kinds.tensor) and isinstance(t2, kinds.tensor)
        if _thread.converts and are_dense and t1.device == t2.device:
            t1.data = t2
            return
        for tensor in (t1, t2):
            # only if something else refers to the data, which is rare: asking for the edge records a view
            if tensor.is_leaf and tensor.requires_grad and tensor._use_count() > 1:  # type: ignore[attr-defined]
                torch.autograd.graph.get_gradient_edge(tensor).node.register_prehook(_refuse_backward)
        t1.__class__, t2.__class__ = t2.__class__, t1.__class__
        t1.__dict__, t2.__dict__ = t2.__dict__, t1.__dict__
        torch._C._swap_tensor_impl(t1, t2)

    return swap_tensors


def _refuse_backward(grad_outputs: Any) -> None:
    raise RuntimeError(
        "backward() through a parameter that was moved to another device, or swapped, since the forward pass\n"
        "  move modules before the forward pass, or after backward()"
    )


def _set_in_place_or(original: Callable[..., None], kinds: LazyKinds) -> Callable[..., None]:
    """How `torch.nn.utils.parametrize` gives a parameter another value: by `set_`, as on the CPU, if both are lazy.

    PyTorch swaps tensors of such classes, which takes the parameter out of the graphs of forward passes, and its
    gradient, hooks and attributes away.
    """

    @functools.wraps(original)
    def _maybe_set(dest: torch.Tensor, src: torch.Tensor) -> None:
        are_dense = isinstance(dest, kinds.tensor) and isinstance(src, kinds.tensor)
        if are_dense and dest.device == src.device and not torch.__future__.get_swap_module_params_on_conversion():
            dest.set_(src)  # type: ignore[call-overload]
        else:
            original(dest, src)

    return _maybe_set


def _refuse_quantized(module: torch.nn.Module, fn: Callable[..., Any], kinds: LazyKinds) -> None:
    """Raise if `fn` moves quantised tensors to the lazy device: PyTorch would silently leave them where they are."""
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None and tensor.is_quantized and isinstance(fn(torch.empty(0)), kinds.tensor):
            raise kinds.quantized_error()


def make_uninitialized_on_device(kinds: LazyKinds) -> None:
    """Support `nn.LazyLinear(2, device="lazy")`: PyTorch's classes for tensors without a shape do not dispatch."""
    if not UNINITIALIZED.fits():
        return
    for kind, lazy_kind in (
        (UninitializedParameter, kinds.uninitialized_parameter),
        (UninitializedBuffer, kinds.uninitialized_buffer),
    ):
        new = _new_uninitialized(kind.__new__, lazy_kind, kinds.tensor)
        UNINITIALIZED.put(kind, "__new__", staticmethod(new))


def _new_uninitialized(
    original: Callable[..., Any], lazy_kind: Callable[..., Any], tensor_kind: type
) -> Callable[..., Any]:
    @functools.wraps(original)
    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # without a device, the default device decides
        device = args[1] if len(args) > 1 else kwargs.get("device")
        is_lazy = isinstance(torch.empty(0, device=device), tensor_kind)
        return lazy_kind(*args, **kwargs) if is_lazy else original(cls, *args, **kwargs)

    return new


def _move_by_swapping(tensors: dict[str, Any], fn: Callable[..., Any], kinds: LazyKinds) -> dict[str, Any]:
    """Move, in place, the tensors that PyTorch cannot move to or from the lazy device, and take them out of `tensors`.

    PyTorch would ask tensors without a shape for one, and assign to sparse parameters, which would keep their device.
    Returns the moved tensors by name; their entries in `tensors` are None.
    """
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.nn.Parameter) and tensor.layout in _SPARSE_LAYOUTS:
            if _move_sparse(tensor, fn, kinds):
                found[name] = tensor
            continue
        if isinstance(tensor, UninitializedTensorMixin):
            with torch._C.DisableTorchFunctionSubclass():
                example = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
                if not isinstance(tensor, kinds.tensor) and not isinstance(example, kinds.tensor):
                    continue
                kept = _KeptParameter(tensor, kinds)
                torch.utils.swap_tensors(tensor, kinds.moved(tensor, example))
                kept.restore()
            found[name] = tensor
    for name in found:
        tensors[name] = None
    return found


def _move_sparse(parameter: torch.nn.Parameter, fn: Callable[..., Any], kinds: LazyKinds) -> bool:
    """Move a sparse parameter in place if `fn` moves it to or from the lazy device. Returns whether it was moved."""
    with torch.no_grad():
        applied = fn(parameter)
        if not isinstance(parameter, kinds.sparse_tensor) and not isinstance(applied, kinds.sparse_tensor):
            return False
        if applied is parameter:
            return True
        gradient = None if parameter.grad is None else fn(parameter.grad)
    parameter.grad = None
    kept = _KeptParameter(parameter, kinds)
    torch.utils.swap_tensors(parameter, torch.nn.Parameter(applied, parameter.requires_grad))
    kept.restore()
    parameter.grad = gradient
    return True
