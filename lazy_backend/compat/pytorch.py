"""Everything this package changes in PyTorch, in one place. Checked on 2.13.

Each function says what it changes and why no public way does. They are called once, by `device.install`.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
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
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.utils._python_dispatch import _disable_current_modes

from lazy_backend.errors import DeviceError, LazyBackendError
from lazy_backend.tensor import NOT_TRACED, LazyTensor

# kept from before it is redirected
_default_device_type_of_ltc = torch._C._lazy._get_default_device_type


def check_no_second_backend() -> None:
    """The C++ Lazy Tensor Core registers kernels on the same dispatch key: refuse to stand beside it."""
    try:
        _default_device_type_of_ltc()
    except RuntimeError:  # "Lazy tensor backend not registered": there is no other way to ask
        return
    raise DeviceError(
        "torch._lazy.ts_backend.init() was called before: it and lazy_backend cannot share the lazy device\n"
        "  remove the call, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 and do not import lazy_backend"
    )


def refuse_second_backend() -> None:
    """From here on `torch._lazy.ts_backend.init()` raises. `compat.torch_lazy.install` lets it pass, as ours."""
    check_no_second_backend()

    def refuse() -> None:
        raise DeviceError(
            "torch._lazy.ts_backend.init() cannot be used with lazy_backend: both would own the lazy device\n"
            "  remove the call: device='lazy' works without it; or, for a program written for torch._lazy, call\n"
            "  lazy_backend.compat.torch_lazy.install() first"
        )

    torch._C._lazy_ts_backend._init = refuse


def redirect_torch_lazy(mark_step: Callable[..., None], wait_device_ops: Callable[..., None]) -> None:
    """`torch._lazy.mark_step()` and `wait_device_ops()` reach this package: PyTorch's own test helpers call them."""
    torch._C._lazy._mark_step = lambda device, devices, wait: mark_step(device, wait=wait)
    torch._C._lazy._wait_device_ops = lambda devices: wait_device_ops(devices)
    torch._C._lazy._get_default_device_type = lambda: "lazy"


def support_foreach() -> None:
    """Let torch.optim and clip_grad_norm_ choose their foreach forms for lazy tensors: one call per list."""
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
    """Run what was recorded under the old default dtype before it changes: kernels ask for it when they run."""
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


def support_fused_optimizers() -> None:
    """Let torch.optim take `fused=True`: the backing device has the kernels, and a call is recorded as it is."""
    optimizer: Any = sys.modules["torch.optim.optimizer"]
    original = optimizer._get_fused_kernels_supported_devices
    # imported there by name
    optimizer._get_fused_kernels_supported_devices = lambda: [*original(), "lazy"]


def support_capturable_optimizers() -> None:
    """Let torch.optim take `capturable=True`: step counts are then tensors of the device, which a replay advances."""
    optimizer: Any = sys.modules["torch.optim.optimizer"]
    original = optimizer._get_capturable_supported_devices

    def supported(supports_xla: bool = True) -> list[str]:
        return [*original(supports_xla), "lazy"]

    # every optimizer's module imports the function by name
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.optim.") and hasattr(module, "_get_capturable_supported_devices"):
            module._get_capturable_supported_devices = supported  # type: ignore[attr-defined]


def export_to_dlpack() -> None:
    """`torch.utils.dlpack.to_dlpack` is a C function that does not ask the tensor's `__dlpack__`."""
    module: Any = torch.utils.dlpack
    original = module.to_dlpack

    @functools.wraps(original)
    def to_dlpack(tensor: torch.Tensor) -> Any:
        return tensor.__dlpack__() if isinstance(tensor, LazyTensor) else original(tensor)

    module.to_dlpack = to_dlpack


def collate_by_stacking() -> None:
    """A DataLoader's worker collates tensors in shared memory, which lazy ones have none of."""

    def stack(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
        return torch.stack(batch)

    torch.utils.data._utils.collate.default_collate_fn_map[LazyTensor] = stack


def keep_parameters_when_moved() -> None:
    """`module.cpu()` keeps a lazy parameter's identity, as it does a CUDA parameter's: optimizers and ties stay.

    `Module._apply` swaps parameters in place only under a global flag, which other modules should not see; so it is set
    while a module with lazy parameters moves. The other direction needs nothing: see `LazyTensor.__tensor_flatten__`.
    """
    original = torch.nn.Module._apply

    @functools.wraps(original)
    def _apply(self: torch.nn.Module, fn: Callable[..., Any], recurse: bool = True) -> torch.nn.Module:
        _refuse_uninitialized(self, fn, recurse)
        kept = [_Kept(parameter) for parameter in self._parameters.values() if parameter is not None]
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        if swaps or not any(isinstance(parameter, LazyTensor) for parameter in self.parameters(recurse)):
            moved = original(self, fn, recurse)
        else:
            torch.__future__.set_swap_module_params_on_conversion(True)
            try:
                moved = original(self, fn, recurse)
            finally:
                torch.__future__.set_swap_module_params_on_conversion(False)
        for parameter in kept:
            parameter.restore()
        return moved

    torch.nn.Module._apply = _apply  # type: ignore[method-assign]
    torch.utils.swap_tensors = _swap_tensors_or(torch.utils.swap_tensors)  # type: ignore[assignment]


class _Kept:
    """What belongs to a parameter rather than to its data: attributes and hooks. Swapping would take them along."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameter = parameter
        self.was_lazy = isinstance(parameter, LazyTensor)
        self.attributes = {name: value for name, value in parameter.__dict__.items() if name != "_data"}
        self.hooks = parameter._backward_hooks
        self.grad_hooks = parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]

    def restore(self) -> None:
        parameter = self.parameter
        if self.was_lazy or isinstance(parameter, LazyTensor):
            parameter.__dict__.update(self.attributes)
            # assigning them is what arms the new data's
            if self.hooks:
                parameter._backward_hooks = self.hooks
            if self.grad_hooks:
                parameter._post_accumulate_grad_hooks = self.grad_hooks  # type: ignore[attr-defined]


def _swap_tensors_or(original: Callable[..., None]) -> Callable[..., None]:
    """`torch.utils.swap_tensors` that takes tensors with weak references and ones a graph refers to, if one is lazy.

    PyTorch refuses both, but then modules that move to CUDA would not move to the lazy device: optimizers and averagers
    refer to parameters weakly, the older `weight_norm` keeps a graph. A backward pass over such a graph raises.
    """

    @functools.wraps(original)
    def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
        if not isinstance(t1, LazyTensor) and not isinstance(t2, LazyTensor):
            original(t1, t2)
            return
        for tensor in (t1, t2):
            # asking for the edge records a view; nobody else refers to the data of most parameters
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


def _refuse_uninitialized(module: torch.nn.Module, fn: Callable[..., Any], recurse: bool) -> None:
    """`LazyLinear` and its like change the class of their parameters later, which a swapped parameter cannot."""
    if any(isinstance(p, UninitializedTensorMixin) for p in module.parameters(recurse)) and isinstance(
        fn(torch.empty(0)), LazyTensor
    ):
        raise LazyBackendError(
            f"{type(module).__name__} has parameters without a shape yet and cannot be moved to the lazy device\n"
            "  call it once on the CPU, with a batch of the right size, then move it"
        )


def let_dynamo_trace(traces_for_us: Callable[[], bool], guards: frozenset[str]) -> None:
    """Let Dynamo trace lazy tensors where `traces_for_us`: it refuses the device "lazy" by name, LTC's tensors.

    They become fake tensors of device lazy, as real ones of any other device. Dynamo asks for the inner tensors of
    every class that has `__tensor_flatten__`, which ours has for `Module.to`: there are none. Its guards ask again when
    nobody traces: they are known by their files, `guards`. Whoever else asks gets the error that says what to do.
    """
    refuse = LazyTensor.__tensor_flatten__

    def flatten(self: LazyTensor) -> tuple[list[str], Any]:
        caller: types.FrameType | None = sys._getframe(1)
        if caller is not None and caller.f_code.co_filename == "<string>":  # an expression that guards evaluate
            caller = caller.f_back
        if (caller is not None and caller.f_code.co_filename in guards) or traces_for_us():
            return [], None
        return refuse(self)

    LazyTensor.__tensor_flatten__ = flatten  # type: ignore[method-assign]
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
    # else a fake tensor on "lazy" and one on "lazy:0" would be on two devices
    fake_tensor._is_indexed_device_type = functools.cache(lambda kind: kind == "lazy" or has_index(kind))


def _on_meta(tensor: LazyTensor) -> torch.Tensor:
    """A tensor without memory that lies like `tensor`."""
    meta = tensor._data.meta
    with _disable_current_modes():
        return torch.empty_strided(
            meta.shape, meta.stride, dtype=meta.dtype, device="meta", requires_grad=tensor.requires_grad
        )
