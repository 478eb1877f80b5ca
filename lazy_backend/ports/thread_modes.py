"""The state of a thread: modes, guards and dispatch keys that change how operators run on it.

In: `torch._C`, `torch.overrides`, `torch.utils._python_dispatch`, functorch. Out: the same under public names. A name
that is missing is None: its port says so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.backends.mha
import torch.backends.opt_einsum
import torch.nn.utils.parametrize
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from lazy_backend.ports.port import optional

# The mode of `torch.device` as a context, and of `torch.set_default_device`.
DeviceMode = DeviceContext

# Guards, objects of C++: `with InferenceMode(False):`
InferenceMode: Any = optional("torch._C._InferenceMode")
ForceDispatchKeys: Any = optional("torch._C._ForceDispatchKeyGuard")
WithoutAutocast: Any = optional("torch._C._DisableAutocast")
WithoutTorchFunction: Any = optional("torch._C.DisableTorchFunction")
# Within it an attribute of a tensor takes 70 ns instead of 150: a getter need not ask whether a subclass overrides it.
WithoutSubclasses: Any = optional("torch._C.DisableTorchFunctionSubclass")
without_dispatch_modes: Any = optional("torch.utils._python_dispatch._disable_current_modes")

set_grad_enabled: Callable[[bool], None] = optional("torch._C._set_grad_enabled")
is_any_autocast_enabled: Callable[[], bool] = optional("torch._C._is_any_autocast_enabled")
included_keys: Callable[[], Any] = optional("torch._C._dispatch_tls_local_include_set")
excluded_keys: Callable[[], Any] = optional("torch._C._dispatch_tls_local_exclude_set")

dispatch_depth: Callable[[], int] = optional("torch._C._len_torch_dispatch_stack")
function_depth: Callable[[], int] = optional("torch._C._len_torch_function_stack")
dispatch_modes: Callable[[], list[Any]] = optional("torch.utils._python_dispatch._get_current_dispatch_mode_stack")
function_modes: Callable[[], list[Any]] = optional("torch.overrides._get_current_function_mode_stack")
function_mode_at: Callable[[int], Any] = optional("torch._C._get_function_stack_at")
push_function_mode: Callable[[Any], None] = optional("torch._C._push_on_torch_function_stack")
pop_function_mode: Callable[[], Any] = optional("torch._C._pop_torch_function_stack")

# The innermost transform of `torch.func` that is active, or None; a block in which there is none.
active_transform: Callable[[], Any] = optional("torch._C._functorch.peek_interpreter_stack")
without_transforms: Any = optional("torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack")

# Where the switches of einsum are once a program has assigned to them, and where they are else. As attributes they take
# 4 µs.
_EINSUM: dict[str, Any] = torch.backends.opt_einsum.__dict__
_EINSUM_AT_FIRST: dict[str, Any] = optional("torch.backends.opt_einsum.m", torch.backends.opt_einsum).__dict__


def _paths_of_einsum() -> tuple[Any, ...]:
    own, first = _EINSUM.get, _EINSUM_AT_FIRST.get
    return own("enabled"), own("strategy"), first("enabled"), first("strategy")


# Whether parametrized tensors are computed once for a block: `torch.nn.utils.parametrize.cached`.
caches_parametrizations: Callable[[], int] = partial(getattr, torch.nn.utils.parametrize, "_cache_enabled", 0)

# Switches of the process by which Python code, PyTorch's or the user's, may choose what it calls: how each is read. The
# public functions call these, and take 0.1 µs more.
_SWITCHES: dict[str, Any] = {
    "flash attention": optional("torch._C._get_flash_sdp_enabled", torch.backends.cuda.flash_sdp_enabled),
    "memory-efficient attention": optional(
        "torch._C._get_mem_efficient_sdp_enabled", torch.backends.cuda.mem_efficient_sdp_enabled
    ),
    "attention in products": optional("torch._C._get_math_sdp_enabled", torch.backends.cuda.math_sdp_enabled),
    "attention of cuDNN": optional("torch._C._get_cudnn_sdp_enabled"),
    "deterministic algorithms warn only": optional(
        "torch._C._get_deterministic_algorithms_warn_only", torch.is_deterministic_algorithms_warn_only_enabled
    ),
    "fill uninitialized memory": optional("torch._C._get_deterministic_fill_uninitialized_memory"),
    "warn always": torch.is_warn_always_enabled,
    "cuDNN": optional("torch._C._get_cudnn_enabled"),
    "cuDNN benchmark": optional("torch._C._get_cudnn_benchmark"),
    "cuDNN deterministic": optional("torch._C._get_cudnn_deterministic"),
    "mkldnn deterministic": optional("torch._C._get_mkldnn_deterministic"),
    "NNPACK": optional("torch._C._get_nnpack_enabled"),
    "quantized engine": optional("torch._C._get_qengine"),
    "fast path of attention": torch.backends.mha.get_fastpath_enabled,
    "paths of einsum": _paths_of_einsum,
    "cached parametrizations": caches_parametrizations,
}
SWITCHES: dict[str, Callable[[], Any]] = {name: read for name, read in _SWITCHES.items() if read is not None}
