"""Functions of PyTorch that look at a device, or after which what was recorded must have run.

In: the class of lazy tensors, makers of generators, streams and events. Out: the same functions, which know the device.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.data
import torch.utils.dlpack

from lazy_backend.ports.port import replaced
from lazy_backend.ports.table import (
    COLLATING,
    DEFAULT_DTYPE,
    DLPACK,
    ENCODERS,
    GENERATORS,
    NORMS,
    PROFILER_STEPS,
    SCRIPTING,
    STREAMS,
)


def finish_before_default_dtype_changes(finish: Callable[[], None]) -> None:
    """Run what was recorded before the default dtype changes: kernels look up the default dtype when they run."""
    if not DEFAULT_DTYPE.fits():
        return
    original = torch.set_default_dtype

    @functools.wraps(original)
    def set_default_dtype(d: torch.dtype) -> None:
        if d is not torch.get_default_dtype():
            finish()
        original(d)

    DEFAULT_DTYPE.put(torch, "set_default_dtype", set_default_dtype)
    original_type = torch.set_default_tensor_type

    @functools.wraps(original_type)
    def set_default_tensor_type(t: Any) -> None:
        finish()
        original_type(t)

    DEFAULT_DTYPE.put(torch, "set_default_tensor_type", set_default_tensor_type)


def finish_before_profiled_steps_end(finish: Callable[[], None]) -> None:
    """Let what was recorded in a step of `torch.profiler.profile` run in it."""
    if not PROFILER_STEPS.fits():
        return

    def finishing(original: Callable[[Any], None]) -> Callable[[Any], None]:
        @functools.wraps(original)
        def call(self: Any) -> None:
            finish()
            original(self)

        return call

    for name in ("step", "stop"):
        PROFILER_STEPS.put(torch.profiler.profile, name, finishing(getattr(torch.profiler.profile, name)))


def support_generators(make: Callable[[torch.device], torch.Generator]) -> None:
    """Make `torch.Generator(device="lazy")` return what `make` returns.

    The constructor is C code that takes only PyTorch's own accelerators, and a C type's attributes cannot be replaced.
    But the type has a Python metaclass (torch/_opaque_base.py), whose `__call__` runs first.
    """
    if not GENERATORS.fits():
        return

    def call(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is torch.Generator and (device := _lazy_device(args, kwargs)) is not None:
            return make(device)
        return type.__call__(cls, *args, **kwargs)

    GENERATORS.put(type(torch.Generator), "__call__", call)


def _lazy_device(args: Any, kwargs: Any) -> torch.device | None:
    """The lazy device that a constructor is called for, if that is one."""
    device = args[0] if args else kwargs.get("device")
    is_device = isinstance(device, str | torch.device) and torch.device(device).type == "lazy"
    return torch.device(device) if is_device else None


def support_streams(**makers: Callable[..., Any]) -> None:
    """Make `torch.Event("lazy")` and `torch.Stream("lazy")` return what `makers` return: PyTorch's own do nothing.

    For other devices the classes make what they made before, which is of the class all the same.
    """
    if not STREAMS.fits():
        return
    for name, make in makers.items():
        STREAMS.put(torch, name, _also_for_lazy(getattr(torch, name), make))


def _also_for_lazy(original: Any, make: Callable[..., Any]) -> Any:
    class Kind(type(original)):  # type: ignore[misc]
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if cls is not known:
                return super().__call__(*args, **kwargs)
            device = _lazy_device(args, kwargs)
            return original(*args, **kwargs) if device is None else make(**{**kwargs, "device": device})

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original) if cls is known else super().__instancecheck__(instance)

    known = Kind(original.__name__, (original,), {"__module__": original.__module__, "__doc__": original.__doc__})
    return known


def export_to_dlpack(kind: type) -> None:
    """Let `torch.utils.dlpack.to_dlpack`, a C function that ignores `__dlpack__`, take lazy tensors."""
    if not DLPACK.fits():
        return
    module: Any = torch.utils.dlpack
    original = module.to_dlpack

    @functools.wraps(original)
    def to_dlpack(tensor: torch.Tensor) -> Any:
        return tensor.__dlpack__() if isinstance(tensor, kind) else original(tensor)

    DLPACK.put(module, "to_dlpack", to_dlpack)


def _scripted_as(original: Any) -> Callable[[Any], Any]:
    """Decorator like `functools.wraps`, of a function that TorchScript compiles as `original`.

    TorchScript takes the source of `__wrapped__`, and looks its names up in the globals of the function itself.
    """

    def wrap(function: Any) -> Any:
        names = {**function.__globals__, **original.__globals__}
        defaults, closure = function.__defaults__, function.__closure__
        own = types.FunctionType(function.__code__, names, function.__name__, defaults, closure)
        return functools.wraps(original)(own)

    return wrap


def norm_as_on_the_cpu(kind: type) -> None:
    """Make `torch.norm` call `linalg` as on the CPU: for unlisted devices it calls older kernels with other errors."""
    if not NORMS.fits():
        return
    original = torch.functional.norm

    @_scripted_as(original)
    def norm(
        input: torch.Tensor, p: Any = "fro", dim: Any = None, keepdim: bool = False, out: Any = None, dtype: Any = None
    ) -> torch.Tensor:
        if not isinstance(input, kind) or torch.overrides.has_torch_function_unary(input):
            return original(input, p, dim, keepdim, out, dtype)
        dims = [dim] if isinstance(dim, int) else dim
        options = {"dtype": dtype} if out is None else {"dtype": dtype, "out": out}
        if not isinstance(p, str) or (p == "fro" and (dims is None or len(dims) <= 2)):
            order = 2.0 if p is None or isinstance(p, str) else p
            return torch.linalg.vector_norm(input, order, dims, keepdim, **options)
        return torch.linalg.matrix_norm(input, p, [*range(input.ndim)] if dims is None else dims, keepdim, **options)

    for module in (torch.functional, torch):
        NORMS.put(module, "norm", norm)


def pad_encoded_as_on_the_cpu(kind: type) -> None:
    """Make `nn.TransformerEncoder` return the same values for padding as on the CPU.

    In evaluation, on the devices that it lists, the encoder removes padding from its input by the mask, so the padded
    positions become 0 before the last norm. On the lazy device its layers see the padding; those values are set here.
    """
    if not ENCODERS.fits():
        return
    original = torch.nn.TransformerEncoder.forward

    @_scripted_as(original)
    def forward(
        self: torch.nn.TransformerEncoder,
        src: torch.Tensor,
        mask: torch.Tensor | None = None,
        src_key_padding_mask: torch.Tensor | None = None,
        is_causal: bool | None = None,
    ) -> torch.Tensor:
        encoded = original(self, src, mask, src_key_padding_mask, is_causal)
        padding = src_key_padding_mask
        if not isinstance(src, kind) or padding is None or mask is not None:
            return encoded
        padding = padding if padding.dtype == torch.bool else padding.isneginf()
        if not _takes_padding_out(self, src, padding):
            return encoded
        nothing = encoded.new_zeros(encoded.shape[-1:])
        padded = nothing if self.norm is None else self.norm(nothing)
        return torch.where(padding.unsqueeze(-1), padded, encoded)

    ENCODERS.put(torch.nn.TransformerEncoder, "forward", forward)


def _takes_padding_out(encoder: torch.nn.TransformerEncoder, src: torch.Tensor, padding: torch.Tensor) -> bool:
    """Whether `TransformerEncoder.forward` would remove the padding: its conditions, except for the device."""
    layer: Any = encoder.layers[0]
    parameters = [
        tensor for part in (layer.self_attn, layer.norm1, layer.norm2, layer.linear1, layer.linear2)
        for tensor in part.parameters()
    ]  # fmt: skip
    return (
        torch.backends.mha.get_fastpath_enabled()
        and getattr(encoder, "use_nested_tensor", False)
        and not layer.training
        and src.dim() == 3
        and not torch.is_autocast_enabled()
        and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (src, *parameters)))
        # reads the mask, as in eager; padding that is not at the end is not removed
        and (not getattr(encoder, "mask_check", True) or _is_left_aligned(src, padding))
    )


def _is_left_aligned(src: torch.Tensor, padding: torch.Tensor) -> bool:
    return bool(torch._nested_tensor_from_mask_left_aligned(src, padding.logical_not()))


def collate_by_stacking(kind: type) -> None:
    """Let a DataLoader's worker stack lazy tensors: it collates others in shared memory, which lazy tensors lack."""

    def stack(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
        return torch.stack(batch)

    if COLLATING.fits():
        torch.utils.data._utils.collate.default_collate_fn_map[kind] = stack


def script_operators_as_before() -> None:
    """Let TorchScript compile replaced functions as the operators of their originals: it knows these by identity.

    For all that was replaced so far.
    """
    if not SCRIPTING.fits():
        return
    builtins: Any = torch.jit._builtins
    for one in replaced:
        if (operator := builtins._find_builtin(one.original)) is not None:
            builtins._register_builtin(one.value, operator)
