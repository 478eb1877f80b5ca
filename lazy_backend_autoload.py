"""The entry point of `torch.backends`: makes `import torch` know the device "lazy", at next to no cost.

In: `import torch`, in every program of an environment that has the package. Out: hooks that stand where nothing was
before: first kernels of the factories on the dispatcher's key Lazy, `torch.lazy`, and the location "lazy" in files. The
first of them that is used imports the package, which is when anything in PyTorch is replaced. `lazy_backend` uses the
same hooks when it is imported by hand.

A module beside the package, as no part of a package can be imported without it. It raises into no program: torch lets
no program go on whose entry point raises.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch

# Factories, which make tensors of the device from nothing: kernels on the key Lazy, by name.
FACTORIES = (
    "empty.memory_format", "empty_strided", "_efficientzerotensor", "zeros", "ones", "full", "scalar_tensor",
    "arange", "arange.start", "arange.start_step", "range", "range.step", "linspace", "logspace",
    "eye", "eye.m", "tril_indices", "triu_indices",
    "rand", "rand.generator", "randn", "randn.generator", "randperm", "randperm.generator",
    "randint", "randint.generator", "randint.low", "randint.low_generator",
)  # fmt: skip

# Variables that ask for the package with the import of torch: it replaces functions that no hook stands for.
_AT_ONCE = ("LAZY_BACKEND_TORCH_LAZY", "LAZY_BACKEND_LOAD")

# What the hooks call: a name of `FACTORIES` -> its kernel. Empty until the package is whole: another thread may use the
# device while this one imports it.
_kernels: dict[str, Callable[..., Any]] = {}
_offered: dict[str, Callable[..., Any]] = {}

# kept: a library's kernels end with it
_library: list[torch.library.Library] = []


# What `torch.lazy` has. No other name is a use of the device: some programs ask all modules, or all objects, for names.
DEVICE_MODULE_NAMES = frozenset((
    "Event", "Stream", "StreamContext", "can_device_access_peer", "current_device", "current_stream", "default_stream",
    "device", "device_count", "device_of", "empty_cache", "get_amp_supported_dtype", "get_device_capability",
    "get_device_name",
    "get_device_properties", "get_rng_state", "get_rng_state_all", "init", "initial_seed", "is_available",
    "is_bf16_supported", "is_current_stream_capturing", "is_in_bad_fork", "is_initialized", "is_tf32_supported",
    "manual_seed", "manual_seed_all", "max_memory_allocated", "max_memory_reserved", "mem_get_info", "memory_allocated",
    "memory_reserved", "memory_stats", "reset_peak_memory_stats", "seed", "seed_all", "set_device", "set_rng_state",
    "set_rng_state_all", "set_stream", "stream", "synchronize",
))  # fmt: skip


class DeviceModuleUntilUsed(types.ModuleType):
    """`torch.lazy` until the device is used. An attribute of it that is asked for is a use."""

    def __getattr__(self, name: str) -> Any:
        if name not in DEVICE_MODULE_NAMES:
            raise AttributeError(f"module 'torch.lazy' has no attribute {name!r}")
        load()
        return getattr(sys.modules["torch.lazy"], name)


def autoload() -> None:
    """Put the hooks in place, or warn why there is no device "lazy"."""
    try:
        put_hooks()
        is_asked_for = any(os.environ.get(name, "").lower() in ("1", "true", "yes", "on") for name in _AT_ONCE)
        is_asked_for |= os.environ.get("ACCELERATE_TORCH_DEVICE", "").startswith("lazy")  # see `compat.advice`
        if is_asked_for and "lazy_backend" not in sys.modules:  # or the package is being imported, and imports torch
            # not on another thread, which would wait for the import of torch to end
            importlib.import_module("lazy_backend")
    except Exception as error:
        warnings.warn(
            f'device="lazy" is not there: {type(error).__name__}: {error}\n'
            "  `import lazy_backend` shows where; TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from looking for it",
            RuntimeWarning,
            stacklevel=2,
        )


def put_hooks() -> None:
    """Put the hooks in place, unless they are."""
    if _library:
        return
    _library.append(torch.library.Library("aten", "IMPL"))
    for name in FACTORIES:
        _library[0].impl(name, _first_kernel(name), "Lazy")
    torch._register_device_module("lazy", DeviceModuleUntilUsed("torch.lazy"))  # type: ignore[no-untyped-call]
    # after all others, so that nobody else's storage comes here. A number that no other package gives, or PyTorch would
    # compare the functions of both
    torch.serialization.register_package(7259, _no_location, _restore)


def offer(name: str, kernel: Callable[..., Any]) -> None:
    """Have the hook `name` call `kernel`, from `take_offers` on."""
    _offered[name] = kernel


def take_offers(device_module: Any) -> None:
    """Have the hooks call what was offered, and `torch.lazy` be `device_module`: the package is installed."""
    torch.lazy = sys.modules["torch.lazy"] = device_module  # type: ignore[attr-defined]
    _kernels.update(_offered)


def load() -> None:
    """Import the package, on a thread of its own: the caller's may be in any mode, such as `torch.inference_mode`.

    Raises `RuntimeError` if it cannot be imported, as where this PyTorch cannot have the device.
    """
    failed: list[Exception] = []

    def run() -> None:
        try:
            import lazy_backend  # noqa: F401
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="import lazy_backend", daemon=True)
    thread.start()
    thread.join()
    if failed:
        raise RuntimeError(
            f'device="lazy" cannot be used: lazy_backend cannot be imported: {type(failed[0]).__name__}: {failed[0]}\n'
            "  `import lazy_backend` shows where"
        ) from failed[0]


def _first_kernel(name: str) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        found = _kernels.get(name)
        if found is None:
            load()
            _refuse_uninitialized()
            found = _kernels[name]
        try:
            return found(*args, **kwargs)
        except BaseException as error:
            error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # without this frame
            raise

    return kernel


def _refuse_uninitialized() -> None:
    """Raise if the first use is a parameter without a shape: PyTorch's constructor goes on, which is replaced since."""
    frame = sys._getframe(2)
    if frame.f_code.co_name == "__new__" and frame.f_globals.get("__name__") == "torch.nn.parameter":
        raise RuntimeError(
            'a parameter without a shape, as of nn.LazyLinear, cannot be what uses device="lazy" first\n'
            "  import lazy_backend before"
        )


def _no_location(storage: Any) -> None:
    """The location of a storage in a file: none, as there is none of this device before the package is loaded."""


def _restore(storage: Any, location: str) -> Any:
    """A storage that was read, on the lazy device if `location` says so; else None."""
    if _kernels or not location.startswith("lazy"):
        return None
    load()  # it registers before this function
    return torch.serialization.default_restore_location(storage, location)
