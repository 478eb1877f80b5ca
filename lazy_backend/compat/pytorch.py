"""Everything this package changes in PyTorch but for `torch.distributed`, in one place. Checked on 2.13.

Each function says what it changes and why no public API will do. `installation.install` calls each function once, but
for `redirect_torch_lazy` (called by `import lazy_backend`) and `let_dynamo_trace` (called by `dynamo`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch._lazy  # PyTorch's test helpers use torch._lazy without importing it; the import takes 0.3 ms
import torch.amp.autocast_mode
import torch.optim.optimizer
import torch.optim.swa_utils
import torch.utils._foreach_utils as foreach_utils
import torch.utils.data
import torch.utils.dlpack
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorConverter,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.nn.parameter import (  # type: ignore[attr-defined]
    UninitializedBuffer,
    UninitializedParameter,
    UninitializedTensorMixin,
)
from torch.utils._python_dispatch import _disable_current_modes

from lazy_backend.errors import DeviceError
from lazy_backend.errors.tracebacks import hide_internals
from lazy_backend.precision import autocast
from lazy_backend.precision.grad_scaler import maybe_step
from lazy_backend.tensors.outside import quantized_error
from lazy_backend.tensors.sparse_tensor import SPARSE_LAYOUTS, LazySparseTensor
from lazy_backend.tensors.tensor import NOT_TRACED, LazyTensor
from lazy_backend.tensors.uninitialized import UninitializedLazyBuffer, UninitializedLazyParameter, moved

_LAZY = (LazyTensor, LazySparseTensor)

# the original, kept before `redirect_torch_lazy` replaces the function
_default_device_type_of_ltc = torch._C._lazy._get_default_device_type


def check_no_second_backend() -> None:
    """Raise `DeviceError` if the C++ Lazy Tensor Core is active: it registers kernels on the same dispatch key."""
    try:
        _default_device_type_of_ltc()
    except RuntimeError:  # "Lazy tensor backend not registered": there is no other way to ask
        return
    raise DeviceError(
        "torch._lazy.ts_backend.init() was called before: it and lazy_backend cannot share the lazy device\n"
        "  remove the call, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 and do not import lazy_backend"
    )


def refuse_second_backend() -> None:
    """Make `torch._lazy.ts_backend.init()` raise `DeviceError`, unless `compat.torch_lazy.install` replaces it."""
    check_no_second_backend()

    def refuse() -> None:
        raise DeviceError(
            "torch._lazy.ts_backend.init() cannot be used with lazy_backend: both would own the lazy device\n"
            "  remove the call: device='lazy' works without it; or, for a program written for torch._lazy, call\n"
            "  lazy_backend.compat.torch_lazy.install() first"
        )

    torch._C._lazy_ts_backend._init = refuse


def redirect_torch_lazy(mark_step: Callable[..., None], wait_device_ops: Callable[..., None]) -> None:
    """Redirect `torch._lazy.mark_step()` and `wait_device_ops()`, which PyTorch's test helpers call, to ours."""
    torch._C._lazy._mark_step = hide_internals(lambda device, devices, wait: mark_step(device, wait=wait))
    torch._C._lazy._wait_device_ops = hide_internals(lambda devices: wait_device_ops(devices))
    torch._C._lazy._get_default_device_type = lambda: "lazy"


def support_foreach() -> None:
    """Let torch.optim and clip_grad_norm_ use foreach for lazy tensors: one call per list."""
    foreach_utils._foreach_supported_types.append(LazyTensor)
    # torch.optim deletes the attribute `optimizer` that importing the module set
    optimizer: Any = sys.modules["torch.optim.optimizer"]
    optimizer._foreach_supported_types.append(LazyTensor)
    original = foreach_utils._get_foreach_kernels_supported_devices

    def supported() -> list[str]:
        return [*original(), "lazy"]

    modules: tuple[Any, ...] = (foreach_utils, optimizer, torch.optim.swa_utils)
    for module in modules:
        module._get_foreach_kernels_supported_devices = supported


def finish_before_default_dtype_changes(finish: Callable[[], None]) -> None:
    """Run what was recorded before the default dtype changes: kernels look up the default dtype when they run."""
    original = torch.set_default_dtype

    @functools.wraps(original)
    def set_default_dtype(d: torch.dtype) -> None:
        if d is not torch.get_default_dtype():
            finish()
        original(d)

    torch.set_default_dtype = set_default_dtype
    original_type = torch.set_default_tensor_type

    @functools.wraps(original_type)
    def set_default_tensor_type(t: Any) -> None:
        finish()
        original_type(t)

    torch.set_default_tensor_type = set_default_tensor_type


def support_generators(make: Callable[[torch.device], torch.Generator]) -> None:
    """Make `torch.Generator(device="lazy")` return what `make` returns.

    The constructor is C code that takes only PyTorch's own accelerators, and a C type's attributes cannot be replaced.
    But the type has a Python metaclass (torch/_opaque_base.py, checked on 2.13), whose `__call__` runs first.
    """
    metaclass: Any = type(torch.Generator)
    if metaclass is type:
        return

    def call(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is torch.Generator:
            device = args[0] if args else kwargs.get("device")
            if isinstance(device, str | torch.device) and torch.device(device).type == "lazy":
                return make(torch.device(device))
        return type.__call__(cls, *args, **kwargs)

    metaclass.__call__ = call


def support_autocast() -> None:
    """Let `torch.autocast` and the functions beside it take the lazy device: PyTorch's list of devices is compiled in.

    What they do for it is in `precision.autocast`. Without a key of the dispatcher there is no public way.
    """
    for replaced in (
        autocast.is_autocast_enabled,
        autocast.set_autocast_enabled,
        autocast.get_autocast_dtype,
        autocast.set_autocast_dtype,
        autocast.clear_autocast_cache,
    ):
        setattr(torch, replaced.__name__, replaced)
    for asked in (autocast.is_autocast_enabled, autocast.get_autocast_dtype):
        # as `torch._dynamo.assume_constant_result` does: Dynamo guards autocast, and takes these answers as constant
        asked._dynamo_marked_constant = True  # type: ignore[union-attr]
    internals: Any = torch._C
    internals._is_autocast_available = autocast.is_available(internals._is_autocast_available)
    block: Any = torch.amp.autocast_mode.autocast
    block.__enter__, block.__exit__ = autocast.entering(block.__enter__), autocast.leaving(block.__exit__)
    checkpoint: Any = torch.utils.checkpoint
    checkpoint._get_autocast_kwargs = autocast.restored_by_checkpoint(checkpoint._get_autocast_kwargs)
    modes: Any = torch.amp.autocast_mode
    for name in ("custom_fwd", "custom_bwd"):
        made = autocast.also_for_lazy(getattr(modes, name))
        setattr(modes, name, made)
        setattr(torch.amp, name, made)
    library: Any = torch.library
    library.register_autocast = autocast.registered_by_name(library.register_autocast)
    casters: tuple[Any, Any] = library, torch._library.custom_ops
    for caster in casters:  # internal, checked on 2.13
        caster._cast = autocast.cast_as_backing(caster._cast)
    library.CustomOpDef.register_autocast = autocast.registered_by_method(library.CustomOpDef.register_autocast)


def support_grad_scaler() -> None:
    """Let `torch.amp.GradScaler` skip a step without reading whether it must: it has no extension point for that."""
    scaler: Any = torch.amp.GradScaler
    scaler._maybe_opt_step = maybe_step(scaler._maybe_opt_step)


def support_fused_optimizers() -> None:
    """Let torch.optim take `fused=True`: the backing device has the kernels, and the call is recorded as it is."""
    optimizer: Any = sys.modules["torch.optim.optimizer"]
    original = optimizer._get_fused_kernels_supported_devices
    # torch.optim.optimizer imports the function by name
    optimizer._get_fused_kernels_supported_devices = lambda: [*original(), "lazy"]


def support_capturable_optimizers() -> None:
    """Let torch.optim take `capturable=True`: step counts are then tensors on the device, which a replay advances."""
    optimizer: Any = sys.modules["torch.optim.optimizer"]
    original = optimizer._get_capturable_supported_devices

    def supported(supports_xla: bool = True) -> list[str]:
        # torch.distributed.optim compiles this with TorchScript, which has no [*names, "lazy"]
        names = original(supports_xla)
        names.append("lazy")
        return names

    # every optimizer's module imports the function by name
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.optim.") and hasattr(module, "_get_capturable_supported_devices"):
            module._get_capturable_supported_devices = supported  # type: ignore[attr-defined]


def export_to_dlpack() -> None:
    """Let `torch.utils.dlpack.to_dlpack`, a C function that ignores `__dlpack__`, take lazy tensors."""
    module: Any = torch.utils.dlpack
    original = module.to_dlpack

    @functools.wraps(original)
    def to_dlpack(tensor: torch.Tensor) -> Any:
        return tensor.__dlpack__() if isinstance(tensor, LazyTensor) else original(tensor)

    module.to_dlpack = to_dlpack


def norm_as_on_the_cpu() -> None:
    """Make `torch.norm` call `linalg` as on the CPU: for unlisted devices it calls older kernels with other errors."""
    original = torch.functional.norm

    @functools.wraps(original)
    def norm(
        input: torch.Tensor, p: Any = "fro", dim: Any = None, keepdim: bool = False, out: Any = None, dtype: Any = None
    ) -> torch.Tensor:
        if not isinstance(input, LazyTensor) or torch.overrides.has_torch_function_unary(input):
            return original(input, p, dim, keepdim, out, dtype)
        dims = [dim] if isinstance(dim, int) else dim
        options = {"dtype": dtype} if out is None else {"dtype": dtype, "out": out}
        if not isinstance(p, str) or (p == "fro" and (dims is None or len(dims) <= 2)):
            order = 2.0 if p is None or isinstance(p, str) else p
            return torch.linalg.vector_norm(input, order, dims, keepdim, **options)
        return torch.linalg.matrix_norm(input, p, [*range(input.ndim)] if dims is None else dims, keepdim, **options)

    torch.functional.norm = torch.norm = norm


def pad_encoded_as_on_the_cpu() -> None:
    """Make `nn.TransformerEncoder` return the same values for padding as on the CPU.

    In evaluation, on the devices that it lists, the encoder removes padding from its input by the mask, so the padded
    positions become 0 before the last norm. On the lazy device its layers see the padding; those values are set here.
    """
    original = torch.nn.TransformerEncoder.forward

    @functools.wraps(original)
    def forward(
        self: torch.nn.TransformerEncoder,
        src: torch.Tensor,
        mask: torch.Tensor | None = None,
        src_key_padding_mask: torch.Tensor | None = None,
        is_causal: bool | None = None,
    ) -> torch.Tensor:
        encoded = original(self, src, mask, src_key_padding_mask, is_causal)
        padding = src_key_padding_mask
        if not isinstance(src, LazyTensor) or padding is None or mask is not None:
            return encoded
        padding = padding if padding.dtype == torch.bool else padding.isneginf()
        if not _takes_padding_out(self, src, padding):
            return encoded
        nothing = encoded.new_zeros(encoded.shape[-1:])
        padded = nothing if self.norm is None else self.norm(nothing)
        return torch.where(padding.unsqueeze(-1), padded, encoded)

    torch.nn.TransformerEncoder.forward = forward  # type: ignore[method-assign]


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


def collate_by_stacking() -> None:
    """Let a DataLoader's worker stack lazy tensors: it collates others in shared memory, which lazy tensors lack."""

    def stack(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
        return torch.stack(batch)

    torch.utils.data._utils.collate.default_collate_fn_map[LazyTensor] = stack


def keep_parameters_when_moved() -> None:
    """Make `module.cpu()` keep a lazy parameter's identity, as for CUDA, so optimizers and tied weights stay valid.

    `Module._apply` swaps parameters in place only under a global flag, which other modules should not see; so the flag
    is set only while a module with lazy parameters moves. The other direction needs no patch: see
    `LazyTensor.__tensor_flatten__`.
    """
    original = torch.nn.Module._apply

    @functools.wraps(original)
    def _apply(self: torch.nn.Module, fn: Callable[..., Any], recurse: bool = True) -> torch.nn.Module:
        _refuse_quantized(self, fn)
        apart: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (place, _move_by_swapping(place, fn)) for place in (self._parameters, self._buffers)
        ]
        kept = [_KeptParameter(parameter) for parameter in self._parameters.values() if parameter is not None]
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        if swaps or not any(isinstance(parameter, LazyTensor) for parameter in self.parameters(recurse)):
            original(self, fn, recurse)
        else:
            torch.__future__.set_swap_module_params_on_conversion(True)
            try:
                original(self, fn, recurse)
            finally:
                torch.__future__.set_swap_module_params_on_conversion(False)
        for parameter in kept:
            parameter.restore()
        for place, tensors in apart:
            place.update(tensors)
        return self

    torch.nn.Module._apply = _apply  # type: ignore[method-assign]
    torch.utils.swap_tensors = _swap_tensors_or(torch.utils.swap_tensors)  # type: ignore[assignment]


class _KeptParameter:
    """The attributes and hooks of a parameter, which a swap of its data would take away, to be restored afterwards."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameter = parameter
        self.was_lazy = isinstance(parameter, _LAZY)
        ours = ("_data", "_real", "_context", "_parts")
        self.attributes = {name: value for name, value in parameter.__dict__.items() if name not in ours}
        self.hooks = parameter._backward_hooks
        self.grad_hooks = parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]

    def restore(self) -> None:
        parameter = self.parameter
        if self.was_lazy or isinstance(parameter, _LAZY):
            parameter.__dict__.update(self.attributes)
            # assigning the hooks registers them with the new data
            if self.hooks:
                parameter._backward_hooks = self.hooks
            if self.grad_hooks:
                parameter._post_accumulate_grad_hooks = self.grad_hooks  # type: ignore[attr-defined]


def _swap_tensors_or(original: Callable[..., None]) -> Callable[..., None]:
    """`torch.utils.swap_tensors` that also takes tensors with weak references or in an autograd graph, if one is lazy.

    PyTorch refuses both, but then modules that move to CUDA would not move to the lazy device: optimizers and averagers
    hold weak references to parameters, and the older `weight_norm` keeps a graph. A backward pass over such a graph
    raises `RuntimeError`.
    """

    @functools.wraps(original)
    def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
        if not isinstance(t1, _LAZY) and not isinstance(t2, _LAZY):
            original(t1, t2)
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
        "backward() through a parameter that was moved to another device since the forward pass\n"
        "  move modules before the forward pass, or after backward()"
    )


def _refuse_quantized(module: torch.nn.Module, fn: Callable[..., Any]) -> None:
    """Raise if `fn` moves quantised tensors to the lazy device: PyTorch would silently leave them where they are."""
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None and tensor.is_quantized and isinstance(fn(torch.empty(0)), LazyTensor):
            raise quantized_error()


def make_uninitialized_on_device() -> None:
    """Support `nn.LazyLinear(2, device="lazy")`: PyTorch's classes for tensors without a shape do not dispatch."""
    for kind, lazy_kind in (
        (UninitializedParameter, UninitializedLazyParameter),
        (UninitializedBuffer, UninitializedLazyBuffer),
    ):
        kind.__new__ = staticmethod(_new_uninitialized(kind.__new__, lazy_kind))  # type: ignore[method-assign]


def _new_uninitialized(original: Callable[..., Any], lazy_kind: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # without a device, the default device decides
        device = args[1] if len(args) > 1 else kwargs.get("device")
        is_lazy = isinstance(torch.empty(0, device=device), LazyTensor)
        return lazy_kind(*args, **kwargs) if is_lazy else original(cls, *args, **kwargs)

    return new


def _move_by_swapping(tensors: dict[str, Any], fn: Callable[..., Any]) -> dict[str, Any]:
    """Move, in place, the tensors that PyTorch cannot move to or from the lazy device, and take them out of `tensors`.

    PyTorch would ask tensors without a shape for one, and assign to sparse parameters, which would keep their device.
    Returns the moved tensors by name; their entries in `tensors` are None.
    """
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.nn.Parameter) and tensor.layout in SPARSE_LAYOUTS:
            if _move_sparse(tensor, fn):
                found[name] = tensor
            continue
        if isinstance(tensor, UninitializedTensorMixin):
            with torch._C.DisableTorchFunctionSubclass():
                example = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
                if not isinstance(tensor, LazyTensor) and not isinstance(example, LazyTensor):
                    continue
                kept = _KeptParameter(tensor)
                torch.utils.swap_tensors(tensor, moved(tensor, example))
                kept.restore()
            found[name] = tensor
    for name in found:
        tensors[name] = None
    return found


def _move_sparse(parameter: torch.nn.Parameter, fn: Callable[..., Any]) -> bool:
    """Move a sparse parameter in place if `fn` moves it to or from the lazy device. Returns whether it was moved."""
    with torch.no_grad():
        applied = fn(parameter)
        if not isinstance(parameter, LazySparseTensor) and not isinstance(applied, LazySparseTensor):
            return False
        gradient = None if parameter.grad is None else fn(parameter.grad)
    parameter.grad = None
    kept = _KeptParameter(parameter)
    torch.utils.swap_tensors(parameter, torch.nn.Parameter(applied, parameter.requires_grad))
    kept.restore()
    parameter.grad = gradient
    return True


def let_dynamo_trace(traces_for_us: Callable[[], bool], guards: frozenset[str]) -> None:
    """Let Dynamo trace lazy tensors where `traces_for_us`: it refuses the device "lazy" by name, meaning LTC's tensors.

    Lazy tensors become fake tensors on device lazy, like real tensors on any other device. Dynamo asks every class that
    has `__tensor_flatten__` for its inner tensors, and gets none here. Its guards ask again outside of tracing, and are
    recognised by their modules, `guards`. Other compilers get an error that says what to do.
    """
    LazyTensor._may_be_traced_by = staticmethod(  # type: ignore[method-assign]
        lambda compiler: compiler in guards or traces_for_us()
    )
    original = FakeTensorConverter.from_real_tensor

    @functools.wraps(original)
    def from_real_tensor(
        self: FakeTensorConverter, fake_mode: FakeTensorMode, t: torch.Tensor, *args: Any, **kwargs: Any
    ) -> FakeTensor:
        if not isinstance(t, LazyTensor):
            return original(self, fake_mode, t, *args, **kwargs)
        if not traces_for_us():
            raise UnsupportedFakeTensorException(NOT_TRACED)
        fake = self._get_memo(t)
        if fake is None:
            fake = original(self, fake_mode, _on_meta(t), *args, **kwargs)
            fake.fake_device = t.device
            self.set_tensor_memo(t, fake)
        return fake

    FakeTensorConverter.from_real_tensor = from_real_tensor  # type: ignore[method-assign]
    has_index = fake_tensor._is_indexed_device_type
    # or fake tensors on "lazy" and on "lazy:0" would count as on different devices
    fake_tensor._is_indexed_device_type = functools.cache(lambda kind: kind == "lazy" or has_index(kind))


def _on_meta(tensor: LazyTensor) -> torch.Tensor:
    """A meta tensor with the shape, strides and dtype of `tensor`."""
    meta = tensor._data.meta
    with _disable_current_modes():
        return torch.empty_strided(
            meta.shape, meta.stride, dtype=meta.dtype, device="meta", requires_grad=tensor.requires_grad
        )
