"""The tensor users hold, and the data behind it.

`LazyTensor` is a wrapper subclass on device `lazy` that holds one `TensorData`. Its value may not have been computed
yet.

Note [Liveness is deterministic]
The recorder refers to the `LazyStorage` of each result, never to tensors: `torch.utils.swap_tensors` refuses weakly
referenced tensors. No object here is part of a reference cycle, so what the user drops is freed at once and the outputs
of a step do not depend on the garbage collector. See also Note [Who holds a pending storage].
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch

from lazy_backend.errors import LazyBackendError, PoisonedTensorError
from lazy_backend.errors.sites import reading_for, user_site
from lazy_backend.errors.tracebacks import hide_frames, hide_internals, refusal_to_trace
from lazy_backend.lowering.ir.graph import TensorMeta, contiguous_stride, empty_of
from lazy_backend.ports.compilers import MARKS_DIMENSIONS, compiler_at, only_looks_for_fakes
from lazy_backend.ports.cpython import frame_at
from lazy_backend.ports.tensor_types import (
    WithoutTorchDispatch,
    make_wrapper_subclass,
    neg_view,
    no_torch_function,
    set_conj,
    set_data,
    set_neg,
    untyped,
)
from lazy_backend.ports.thread_modes import without_dispatch_modes
from lazy_backend.tensors.contexts import contexts
from lazy_backend.tensors.printing import print_tensor
from lazy_backend.tensors.state import UNWRITTEN, DeviceContext, LazyStorage, TensorData

NOT_TRACED = (
    "tracing (torch.compile, torch.export, make_fx, linearize) does not take lazy tensors: the lazy device compiles "
    "whole steps by itself\n"
    "  call the function as it is, trace it with CPU tensors, or use torch.compile(function, backend='lazy')"
)


def backing_tensor(data: TensorData) -> torch.Tensor:
    """The real tensor of `data`, which must have been computed: the base itself, or a view made again from the base.

    Raises `PoisonedTensorError` if the run that should have computed it failed.
    """
    storage = data.storage
    base = storage.tensor
    if base is None:
        if storage.token is not UNWRITTEN:
            raise poisoned(storage)
        base = storage.tensor = empty_of(storage.meta, storage.context.backing)
    meta = data.meta
    if meta is storage.meta:
        return base
    if meta.dtype == base.dtype:
        view = base.as_strided(meta.shape, meta.stride, meta.storage_offset)
    else:
        view = torch.empty(0, dtype=meta.dtype, device=base.device)
        view.set_(base.untyped_storage(), meta.storage_offset, meta.shape, meta.stride)
    view = view.conj() if meta.conj else view
    return neg_view(view) if meta.neg else view


def poisoned(storage: LazyStorage) -> PoisonedTensorError:
    if storage.error is None and storage.context.locker.has_interrupted_maker_of(storage):
        return PoisonedTensorError(
            "this tensor has no value yet: this code, a signal handler or a finalizer, interrupted the run that makes "
            "it\n  read it when the interrupted call has returned; what existed before the step can be read here"
        )
    cause = storage.error or "the run was lost when this process was forked"
    error = PoisonedTensorError(
        "this tensor has no value, because the run that should have computed it failed:\n"
        f"  {cause}\n  fix that error and run the step again; what existed before the failed step is still there"
    )
    error.__cause__ = storage.error
    return error


def without_memory() -> LazyBackendError:
    """What using memory that was given back raises. See Note [Memory given back]."""
    return LazyBackendError(
        f"this tensor has no memory: it was given back by untyped_storage().resize_(0)\n  at {user_site()}\n"
        "  a parameter that fully_shard gathers has a value only from its module's forward to its backward"
    )


class LazyTensor(torch.Tensor):
    """A tensor on device `lazy`. Made by operators and factories, not by calling the class."""

    _data: TensorData

    # Operators arrive in __torch_dispatch__, below autograd; the function protocol would only add its cost.
    __torch_function__ = no_torch_function

    @staticmethod
    def __new__(cls, *args: Any, **kwargs: Any) -> LazyTensor:
        raise TypeError('LazyTensor is not called: make one with device="lazy" or .to("lazy")')

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `make` and `wrap` make instances."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError("lazy_backend was not installed")  # installation puts the recorder here

    # `Module.to` swaps a parameter in place, instead of replacing it, for tensor classes that have these two methods
    # (torch.nn.modules.module). So tied parameters and optimizers survive `.to("lazy")`.
    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """The name of the attribute that holds the real tensor: code that writes files finds shared memory this way.

        This call runs nothing; reading the attribute does. Compilers call it too and must not see the attribute: those
        that may trace lazy tensors get tensors without inner ones.
        """
        caller = frame_at(1)
        compiler = compiler_at(caller)
        if compiler is None:
            return ["_backing_tensor"], self.device
        if compiler == MARKS_DIMENSIONS or self._may_be_traced_by(compiler) or only_looks_for_fakes(caller):
            return [], None
        raise refusal_to_trace(NOT_TRACED)

    @staticmethod
    def _may_be_traced_by(compiler: str) -> bool:
        """Whether code of the module `compiler` traces for us. `let_dynamo_trace` replaces this method."""
        return False

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> torch.Tensor:
        """A copy of the real tensor, on the device."""
        return cast("torch.Tensor", inner["_backing_tensor"].to(meta))

    _backing_tensor: torch.Tensor  # computed first if need be; do not write to it. `install_serialization` puts it here

    @property
    def is_lazy(self) -> bool:
        return True

    @property  # type: ignore[override]
    def data(self) -> LazyTensor:
        # not detach(), which shares the version counter: writing through `data` is invisible to autograd
        return alias_of(self)

    @data.setter
    @hide_internals
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"Variable data has to be a tensor, but got {type(value).__name__}")
        if not isinstance(value, LazyTensor):
            raise RuntimeError(
                f"a lazy tensor's data cannot be set to a tensor on {value.device}\n"
                f"  move it first, as in tensor.to({str(self.device)!r})"
            )
        assign(self, value._data)

    @hide_internals
    def set_(self, source: Any = None, *geometry: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        geometry = (*geometry, *kwargs.values())
        if len(geometry) == 2:  # offset and size: the stride is optional
            geometry = (*geometry, contiguous_stride(tuple(geometry[1])))
        if isinstance(source, LazyTensor) and geometry:
            # in C++ this form takes the source's storage, and a lazy tensor's storage does not lead back to it
            offset, size, stride = geometry
            source = source.as_strided(size, stride, offset)
            return super().set_(source)
        if isinstance(source, torch.storage.TypedStorage):
            source = untyped(source)
        sources = () if source is None else (source,)
        return super().set_(*sources, *geometry)  # type: ignore[call-overload]

    def to(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        # torch compares devices with their index: without one, `x.to("lazy")` would copy
        default = contexts.default_device()
        places = [default if _is_lazy_without_index(arg) else arg for arg in args]
        named = {name: default if _is_lazy_without_index(arg) else arg for name, arg in kwargs.items()}
        try:
            return super().to(*places, **named)  # type: ignore[arg-type]
        except BaseException as error:
            hide_frames(error)
            raise

    def __copy__(self) -> LazyTensor:
        """Another tensor for the same memory. Torch's `__copy__` goes through pickle, which would read."""
        copied = wrap(self._data)
        if isinstance(self, torch.nn.Parameter):
            copied = cast("LazyTensor", torch.nn.Parameter(copied, self.requires_grad))
        copied.requires_grad_(self.requires_grad)
        copied.__dict__.update({name: value for name, value in self.__dict__.items() if name != "_data"})
        return copied

    @hide_internals
    def __deepcopy__(self, memo: dict[int, Any]) -> LazyTensor:
        """Copy as for a strided tensor: tensors that are copied together still share storages. Runs nothing."""
        known = memo.get(id(self))
        if known is not None:
            return cast("LazyTensor", known)
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the "
                "moment. If you were attempting to deepcopy a module, this may be because of a torch.nn.utils."
                "weight_norm usage, see https://github.com/pytorch/pytorch/pull/103001"
            )
        with torch.no_grad():
            copied = _copy_view(self._data, _copy_storage(self._data.storage, memo))
        copied.requires_grad_(self.requires_grad)
        memo[id(self)] = copied
        if isinstance(self, torch.nn.Parameter):  # which PyTorch copies without its gradient and attributes
            copied._is_param = True  # type: ignore[attr-defined]
            return copied
        if self.grad is not None:
            copied.grad = copy.deepcopy(self.grad, memo)
        others = {name: value for name, value in self.__dict__.items() if name != "_data"}
        copied.__dict__.update(copy.deepcopy(others, memo))
        return copied

    @hide_internals  # type: ignore[arg-type]
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        # without modes, as PyTorch prints; but not under the guard that PyTorch turns functorch off with: an
        # exception's traceback would keep the guard alive, and functorch would stay off for the thread
        with torch.no_grad(), without_dispatch_modes(), reading_for("print"):
            primal, tangent = torch.autograd.forward_ad.unpack_dual(self)
            printed = print_tensor(self, primal.detach().cpu(), tangent)
        return f"Parameter containing:\n{printed}" if isinstance(self, torch.nn.Parameter) else printed

    @hide_internals
    def __format__(self, spec: str) -> str:
        # torch formats 0-d tensors as numbers only if they are of its own class
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    @hide_internals
    def as_subclass(self, cls: type) -> Any:  # type: ignore[override]
        if issubclass(LazyTensor, cls):
            return self
        raise RuntimeError(
            f"a lazy tensor cannot become a {cls.__name__}: a tensor has one Python class\n"
            f"  use it as a plain tensor, as in tensor.as_subclass(torch.Tensor).to({str(self.device)!r})"
        )

    @hide_internals
    def type(self, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:  # type: ignore[override]
        # torch prints "torch.lazy.FloatTensor" but does not parse it
        if isinstance(dtype, str) and dtype.startswith("torch.lazy."):
            dtype = getattr(torch, dtype.removeprefix("torch.lazy.")).dtype
        return super().type(dtype, non_blocking, **kwargs)

    def is_shared(self) -> bool:
        return False

    @hide_internals
    def share_memory_(self) -> Any:
        raise RuntimeError(
            "a lazy tensor cannot be shared between processes\n  share a copy, as in tensor.cpu().share_memory_()"
        )

    def is_pinned(self, device: Any = None) -> bool:
        return False

    def __dlpack_device__(self) -> Any:
        return torch.empty(0, device=self._data.context.backing).__dlpack_device__()

    @hide_internals
    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    @hide_internals
    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError(
                f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to "
                "host memory first."
            )
        return self.detach().cpu().numpy()

    @hide_internals
    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy().__array__(dtype)


# make(), not the class: 0.9 µs against 1.6 µs through a Python __new__
make: Any = make_wrapper_subclass


# Attributes that are not the user's: what a tensor stands for, and whether it is a parameter.
_NOT_OF_USERS = frozenset(("_data", "_is_param"))


def own_attributes(tensor: LazyTensor) -> dict[str, Any]:
    """The attributes that somebody gave a tensor, as in `tensor.scale = 2.0`."""
    attributes = tensor.__dict__
    if len(attributes) == 1:
        return {}
    return {name: value for name, value in dict.items(attributes) if name not in _NOT_OF_USERS}


def is_parameter(tensor: LazyTensor) -> bool:
    """As `isinstance(tensor, torch.nn.Parameter)`, in a tenth of the time."""
    return "_is_param" in tensor.__dict__


def wrapper_arguments(context: DeviceContext, meta: TensorMeta) -> tuple[Any, ...]:
    """The positional arguments of `make` after the class: parsing keywords would cost 0.1 µs per tensor."""
    return (meta.shape, meta.stride, meta.storage_offset, None, meta.dtype, torch.strided, context.device)


def wrap(data: TensorData, view_of: LazyTensor | None = None) -> LazyTensor:
    """A new tensor that stands for `data`."""
    arguments = wrapper_arguments(data.context, data.meta)
    tensor: LazyTensor = make(LazyTensor, *arguments) if view_of is None else make_view(view_of, arguments)
    set_bits(tensor, data.meta)
    tensor._data = data
    return tensor


def wrap_with(arguments: tuple[Any, ...], data: TensorData) -> LazyTensor:
    """`wrap` where the arguments of `make` are known."""
    tensor: LazyTensor = make(LazyTensor, *arguments)
    meta = data.meta
    if meta.conj or meta.neg:
        set_bits(tensor, meta)
    tensor._data = data
    return tensor


def set_bits(tensor: LazyTensor, meta: TensorMeta) -> None:
    """Set the conjugate and negative bits of a view: operators that do not support them then get resolved operands."""
    if meta.conj:
        set_conj(tensor, True)
    if meta.neg:
        set_neg(tensor, True)


def make_view(source: LazyTensor, arguments: tuple[Any, ...]) -> LazyTensor:
    """A wrapper for a view of `source`: an inference tensor if `source` is one, whatever the current mode.

    Autograd's kernel, above us, gives views of normal tensors their version counter, which an inference tensor refuses.
    """
    if torch.is_inference_mode_enabled() is not source.is_inference():
        with torch.inference_mode(source.is_inference()):
            return cast("LazyTensor", make(LazyTensor, *arguments))
    return cast("LazyTensor", make(LazyTensor, *arguments))


def alias_of(source: LazyTensor) -> LazyTensor:
    """Another tensor for the same data, as `detach` makes it.

    Outside of inference mode also that of an inference tensor may be written. In eager it counts versions and still is
    an inference tensor, which no function of PyTorch makes; ours is a normal one.
    """
    return wrap(source._data, view_of=source if torch.is_inference_mode_enabled() else None)


def _is_lazy_without_index(arg: Any) -> bool:
    if isinstance(arg, str):
        return arg == "lazy"
    return isinstance(arg, torch.device) and arg.type == "lazy" and arg.index is None


def _copy_storage(storage: LazyStorage, memo: dict[int, Any]) -> LazyTensor:
    """A copy of the base, once per `memo`."""
    copied = memo.get(id(storage))
    if copied is None:
        meta = storage.meta
        empty = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=storage.context.device)
        copied = memo[id(storage)] = empty.copy_(wrap(storage))
    return cast("LazyTensor", copied)


def _copy_view(data: TensorData, base: LazyTensor) -> LazyTensor:
    """The view of `base` that `data` is of its own base."""
    meta, base_meta = data.meta, base._data.meta
    if meta is base_meta:
        return wrap(base._data)
    if meta.dtype != base_meta.dtype or meta.conj or meta.neg:
        return cast("LazyTensor", wrap(data).clone())
    window = cast("LazyTensor", base.as_strided(meta.shape, meta.stride, meta.storage_offset))
    return wrap(window._data)  # which autograd does not take for a view


def assign(tensor: LazyTensor, data: TensorData) -> None:
    """Make `tensor` stand for `data`, as `tensor.data = ...`, `set_` and `t_` do; sizes, strides and dtype follow."""
    # shallow_copy_from keeps the object, its autograd history and its version counter
    with WithoutTorchDispatch():
        if data.meta.conj and not tensor.is_complex():  # only a complex tensor can take the bit: it becomes one first
            set_neg(tensor, False)
            set_data(tensor, make_view(tensor, wrapper_arguments(data.context, data.meta)))
        # `set_data` refuses tensors whose bits differ; the conjugate bit counts for complex tensors only
        if tensor.is_conj() != data.meta.conj:
            set_conj(tensor, data.meta.conj)
        if tensor.is_neg() != data.meta.neg:
            set_neg(tensor, data.meta.neg)
        set_data(tensor, wrap(data, view_of=tensor))
    trace = data.context.trace
    tensor._data = data
    trace.changes += 1  # no call since the line above: a call that this one interrupts may use both, so it starts again
