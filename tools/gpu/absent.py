"""A GPU that is not there: PyTorch and Triton are answered from a table of targets, and no driver is asked.

In: the name of a target. Out: a process that compiles for it and loads machine code up to the driver (`install`), and
one that runs the kernels by Triton's interpreter, on the CPU (`interpret`). For `cuda_compile.py`. Both are called
before PyTorch's compiler is imported. What PyTorch would compute or time on the device while it compiles is left out:
constants stay on the CPU, products are not padded, and of a kernel's configurations all are compiled and none is timed.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import proxy_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from triton.backends import backends
from triton.backends.compiler import GPUTarget

# What `torch.cuda.get_device_properties` gives there: https://docs.nvidia.com/cuda/cuda-c-programming-guide
TARGETS: dict[str, dict[str, Any]] = {
    "sm_90": {
        "name": "NVIDIA H100 80GB HBM3", "major": 9, "minor": 0, "multi_processor_count": 132, "warp_size": 32,
        "total_memory": 80 << 30, "L2_cache_size": 50 << 20, "regs_per_multiprocessor": 65536,
        "max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024,
        "shared_memory_per_block": 48 << 10, "shared_memory_per_block_optin": 227 << 10,
        "shared_memory_per_multiprocessor": 228 << 10,
    },
}  # fmt: skip

DRIVER = 13020  # the version of CUDA that the driver would be for
_CPU = torch.device("cpu")
_HANDLES = (1, 1, 0, 0)  # of a module and a function; registers, spills

# Names of kernels that the interpreter ran.
interpreted: list[str] = []
# Names and machine code of kernels that a driver would have loaded.
loaded: list[tuple[str, bytes]] = []


def _load_file(file: str, name: str, shared: int, device: int) -> tuple[int, ...]:
    loaded.append((name, Path(file).read_bytes()))
    return _HANDLES


def _load_binary(name: str, code: bytes, shared: int, device: int) -> tuple[int, ...]:
    loaded.append((name, code))
    return (*_HANDLES, 1024)  # threads of a block


class AbsentDriver:
    """Triton's driver of the target."""

    target: GPUTarget
    shared_memory = 0  # bytes that a block may have
    launcher_cls = staticmethod(lambda source, metadata: None)  # of kernels that PyTorch's own launcher does not take

    def __init__(self) -> None:
        properties = {"max_shared_mem": self.shared_memory}
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: properties,
            load_binary=_load_binary,
            unload_module=lambda module: None,
        )

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


class _OnTheHost(TorchDispatchMode):
    """A block whose new tensors are on the CPU."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(torch.device, lambda device: _CPU, (args, kwargs or {}))
        return op(*args, **kwargs)


class _DriverLibrary:
    """CUDA's library, asked for its version alone."""

    @staticmethod
    def cuDriverGetVersion(place: Any) -> int:
        place._obj.value = DRIVER
        return 0


def install(name: str) -> None:
    """Answer for this target in this process."""
    found = SimpleNamespace(**TARGETS[name])
    AbsentDriver.target = GPUTarget("cuda", 10 * found.major + found.minor, found.warp_size)
    AbsentDriver.shared_memory = found.shared_memory_per_block_optin
    backends["nvidia"] = dataclasses.replace(backends["nvidia"], driver=AbsentDriver)
    torch._C._StaticCudaLauncher = SimpleNamespace(_load_kernel=_load_file)  # type: ignore[assignment, misc]
    cuda: Any = torch.cuda
    cuda.is_available, cuda.device_count, cuda.current_device = lambda: True, lambda: 1, lambda: 0
    cuda._lazy_init, cuda.is_initialized = lambda: None, lambda: False
    cuda.get_device_properties = cuda._get_device_properties = lambda device=None: found
    cuda._exchange_device = cuda._maybe_exchange_device = cuda.set_device = lambda index: 0
    cuda.get_rng_state, cuda.set_rng_state = torch.get_rng_state, lambda state: None
    ports: Any = importlib.import_module("lazy_backend.ports.replacements.inductor")
    with patch.object(ctypes, "CDLL", lambda name: _DriverLibrary):
        ports.cuda_driver()  # which keeps its answer
    _compute_nothing()


def _compute_nothing() -> None:
    """Have the compiler copy nothing to the device, and time nothing there."""
    FakeTensorMode.avoid_device_init, proxy_tensor.CONSTANT_NUMEL_LIMIT = True, 0  # type: ignore[assignment, method-assign]
    folder: Any = importlib.import_module("torch._inductor.fx_passes.joint_graph").UniformValueConstantFolder
    fold = folder.run

    def fold_on_the_host(self: Any) -> Any:
        with _OnTheHost():
            return fold(self)

    folder.run = fold_on_the_host
    importlib.import_module("torch._inductor.config").shape_padding = False  # type: ignore[attr-defined]
    wrapper: Any = importlib.import_module("torch._inductor.codegen.wrapper").PythonWrapperCodegen
    wrapper.generate_and_run_autotune_block = lambda self: None


# ----- the interpreter, for which TRITON_INTERPRET=1 is in the environment


def interpret() -> None:
    """Have loaded code allocate on the CPU, and its kernels call the CPU's libdevice."""
    guards: Any = torch._C._dynamo.guards
    guards._empty_strided_cuda = guards._empty_strided_cpu
    torch._C._cuda_getCurrentRawStream = lambda device: 0  # type: ignore[assignment]
    helpers: Any = importlib.import_module("torch._inductor.runtime.triton_helpers")
    helpers.libdevice = _Libdevice()
    kind: Any = importlib.import_module("triton.runtime.interpreter").InterpretedFunction
    run = kind.run

    def run_noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        interpreted.append(self.fn.__name__)
        return run(self, *args, **kwargs)

    kind.run = run_noted


def _fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return (a.double() * b + c).to(a.dtype)


class _Libdevice:
    """CUDA's library of functions, of which Triton's interpreter has none, as PyTorch's operators."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        name = name.removesuffix("_rn")  # rounded to nearest
        operator: Any = (
            _fma if name == "fma" else getattr(torch, {"rint": "round", "nearbyint": "round"}.get(name, name))
        )
        return lambda *operands: _call(operator, operands)


def _call(operator: Callable[..., torch.Tensor], operands: tuple[Any, ...]) -> Any:
    """An operator of PyTorch, of what kernels have in Triton's interpreter. Predicates give integers there."""
    language: Any = importlib.import_module("triton.language")
    handle: Any = importlib.import_module("triton.runtime.interpreter").TensorHandle
    tensors = [one for one in operands if isinstance(one, language.tensor)]
    result = operator(
        *[torch.as_tensor(one.handle.data) if isinstance(one, language.tensor) else one for one in operands]
    )
    kind = tensors[0].type.scalar
    if result.dtype == torch.bool:
        result, kind = result.int(), language.int32
    made = handle(result.numpy(), kind)
    return language.tensor(made, language.block_type(kind, list(result.shape)) if result.dim() else kind)
