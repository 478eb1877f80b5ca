"""Inductor: settings, the compile of a module, what it makes, its C++ builder and its instruction sets.

In: `torch._inductor`, `torch._functorch`, `torch._guards`, symbols of libtorch. Out: functions that use them. All of
them import what they need at their first call: PyTorch's compiler takes a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch

from lazy_backend.ports.dispatcher import OpOverload, can_decompose
from lazy_backend.ports.native_code import MESSAGE as MESSAGE
from lazy_backend.ports.native_code import OTHER_DEVICES as OTHER_DEVICES
from lazy_backend.ports.native_code import has_message as has_message
from lazy_backend.ports.native_code import parts_of
from lazy_backend.ports.native_code import shims as shims
from lazy_backend.ports.port import optional
from lazy_backend.ports.table import ARTEFACTS, INDUCTOR, INSTRUCTIONS, RUNNERS, SETTINGS
from lazy_backend.ports.thread_modes import TorchDispatchMode

# ----- settings


def settings() -> Any:
    """Inductor's."""
    return importlib.import_module("torch._inductor.config")


def autograd_settings() -> Any:
    """AOTAutograd's, among them the one for artefacts."""
    return importlib.import_module("torch._functorch.config")


def loaded_settings() -> dict[str, Any]:
    """Both, by what messages call them; None for those that nobody has imported."""
    modules = {"inductor": "torch._inductor.config", "functorch": "torch._functorch.config"}
    return {name: sys.modules.get(module) for name, module in modules.items()}


def changed_settings(module: Any) -> dict[str, Any]:
    """Those that this process changed, by name."""
    if not SETTINGS.fits():
        return {}
    # there is no public function for what was changed
    changed = [name for name in module._config if not module._is_default(name)]
    if not changed:  # almost always, and `save_config_portable` takes 1 ms
        return {}
    portable = module.save_config_portable(ignore_private_configs=True)
    # a setting at its default is unchanged, even if assigned: torch.use_deterministic_algorithms(False) assigns one
    found = {name: portable[name] for name in changed if name in portable}
    return {name: value for name, value in found.items() if value != module._config[name].default}


def fresh_cache() -> AbstractContextManager[Any]:
    """A block with caches of its own."""
    return importlib.import_module("torch._inductor.utils").fresh_cache()  # type: ignore[no-any-return]


def cpp_error() -> type[Exception]:
    """What the builder raises if the C++ compiler refuses a source."""
    return importlib.import_module("torch._inductor.exc").CppCompileError  # type: ignore[no-any-return]


# ----- switches of PyTorch that change results

# (backend, operator), and a value for the second: the functions behind `torch.backends.*.fp32_precision`, 0.1 µs
get_precision: Callable[[str, str], str] | None = optional("torch._C._get_fp32_precision_getter")
set_precision: Callable[[str, str, str], object] | None = optional("torch._C._set_fp32_precision_setter")
# behind `torch.backends.mkldnn.enabled` and its like, which take 0.6 µs
is_mkldnn_enabled: Callable[[], bool] = optional("torch._C._get_mkldnn_enabled", lambda: torch.backends.mkldnn.enabled)
is_cudnn_enabled: Callable[[], bool] = optional("torch._C._get_cudnn_enabled", lambda: torch.backends.cudnn.enabled)
benchmarks_cudnn: Callable[[], bool] = optional("torch._C._get_cudnn_benchmark", lambda: torch.backends.cudnn.benchmark)
is_cudnn_deterministic: Callable[[], bool] = optional(
    "torch._C._get_cudnn_deterministic", lambda: torch.backends.cudnn.deterministic
)


@functools.cache
def cuda_driver() -> int:
    """The version of CUDA that the driver is for; 0 without a driver. Initialises nothing."""
    found = ctypes.c_int(0)
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(found))
    return found.value


def has_precision(backend: str, operator: str) -> bool:
    """Whether this PyTorch has this switch."""
    try:
        return get_precision is not None and set_precision is not None and bool(get_precision(backend, operator))
    except RuntimeError:
        return False


# ----- the compile


def compile_ahead(module: torch.fx.GraphModule, arguments: Sequence[Any], has_symbols: bool) -> Any:
    """Inductor's artefact for a module that it may change. Raises whatever inductor raises."""
    if not INDUCTOR.fits():
        raise RuntimeError(str(INDUCTOR))
    compiler = importlib.import_module("torch._inductor.standalone_compile")
    shapes = "from_tracing_context" if has_symbols else "from_graph"
    return compiler.standalone_compile(
        module, arguments, dynamic_shapes=shapes, options={}, aot=True, donate_graph_module=True
    )


def call_of(compiled: Any) -> Callable[..., Any]:
    """What computes the artefact."""
    return compiled.inner_fn.compiled_fn  # type: ignore[no-any-return]


def to_bytes(compiled: Any) -> bytes:
    """The artefact as PyTorch keeps it."""
    return compiled.serialize()  # type: ignore[no-any-return]


def load_bundled(data: bytes) -> Callable[..., Any]:
    """What computes an artefact of `to_bytes`. Takes seconds."""
    if not ARTEFACTS.fits():
        raise RuntimeError(str(ARTEFACTS))
    kind = importlib.import_module("torch._inductor.standalone_compile").AOTCompiledArtifact
    return call_of(kind.deserialize(data))


@contextlib.contextmanager
def kernels_not_built() -> Iterator[None]:
    """A block in which inductor writes kernels, and builds none. See Note [One extension per graph]."""
    kind = importlib.import_module("torch._inductor.async_compile").AsyncCompile

    def refuse(*arguments: Any) -> NoReturn:
        raise AssertionError("a kernel that was not built was called")

    original = kind.cpp_pybinding
    kind.cpp_pybinding = lambda *arguments: refuse
    try:
        yield
    finally:
        kind.cpp_pybinding = original


def python_of(compiled: Any) -> tuple[str, list[str]]:
    """The module that inductor wrote for the CPU, and why it cannot be called as it is: names of AOTAutograd's parts.

    The text is empty if what inductor made is not known.
    """
    if not RUNNERS.fits():
        return "", [f"the port {RUNNERS.name!r} is off: {RUNNERS.obstacle()}"]
    try:
        entry = call_of(compiled).serialize()  # type: ignore[attr-defined]
        return entry.compiled_fw.result.source_code, parts_of(entry)
    except (AttributeError, TypeError) as missing:  # or the artefact cannot be kept
        return "", [f"an artefact that is not known: {missing}"]


def extern_kernel(name: str) -> Any:
    """What `extern_kernels.NAME` of inductor's modules is."""
    return getattr(importlib.import_module("torch._inductor.select_algorithm").extern_kernels, name)


class _Decomposing(TorchDispatchMode):
    """A block in which operators are decomposed as inductor has it."""

    def __init__(self) -> None:
        super().__init__()
        importlib.import_module("torch._inductor.lowering")  # which decompositions look up without importing it
        self.decompositions = importlib.import_module("torch._inductor.decomposition").select_decomp_table()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        decomposition = self.decompositions.get(op)
        made = NotImplemented
        with self:
            if decomposition is not None:
                made = decomposition(*args, **(kwargs or {}))
            if made is NotImplemented and op.namespace == "aten" and can_decompose(op):
                made = op.decompose(*args, **(kwargs or {}))
        return op(*args, **(kwargs or {})) if made is NotImplemented else made


def decomposed(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a call gives where inductor compiles it, of fake tensors."""
    if not INDUCTOR.fits():
        return op(*args, **kwargs)
    with _Decomposing():
        return op(*args, **kwargs)


def node_storage(node: torch.fx.Node) -> int | None:
    """The identity of the memory that a graph gives `node`; None if `node` is not one tensor."""
    return importlib.import_module("torch._inductor.fx_utils").get_node_storage(node)  # type: ignore[no-any-return]


# ----- symbols


def tracing(mode: Any) -> AbstractContextManager[Any]:
    """A block in which the compiler keeps the symbols of a fake mode symbolic."""
    guards = importlib.import_module("torch._guards")
    return guards.tracing(guards.TracingContext(mode))  # type: ignore[no-any-return]


def hint(number: Any) -> int:
    """What a number is in the graph that symbols were made for."""
    return number if isinstance(number, int) else int(number.node.hint)


def symbols_with(hints: Sequence[int]) -> tuple[Any, list[Any]]:
    """An environment of symbols, and a SymInt for each hint."""
    shapes = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    source_of = importlib.import_module("torch._dynamo.source").ConstantSource
    environment = shapes.ShapeEnv()
    made = []
    for place, number in enumerate(hints):
        source = source_of(f"s{place}")
        symbol = environment.create_symbol(
            number, source=source, dynamic_dim=shapes.DimDynamic.DYNAMIC, constraint_dim=None
        )
        made.append(environment.create_symintnode(symbol, hint=number, source=source))
    return environment, made


# ----- the C++ builder


def compile_threads() -> int:
    return int(settings().decide_compile_threads())


def cpp_options(flags: Sequence[str], precompiling: bool = False) -> Any:
    """The options with which inductor builds kernels for the CPU, and these flags."""
    builder = importlib.import_module("torch._inductor.cpp_builder")
    chosen = importlib.import_module("torch._inductor.cpu_vec_isa").pick_vec_isa()
    return builder.CppTorchDeviceOptions(
        vec_isa=chosen, device_type="cpu", extra_flags=flags, precompiling=precompiling
    )


def cpp_builder(name: str, source: str, options: Any, folder: str = "") -> Any:
    """A build of one source. `build()`, `get_target_file_path()`, `get_command_line()`."""
    builder = importlib.import_module("torch._inductor.cpp_builder")
    return builder.CppBuilder(name, source, options, folder) if folder else builder.CppBuilder(name, source, options)


# ----- what runners call

# The environment variable in which kernels find the function that gives a tensor's data pointer, and that function.
POINTER_VARIABLE = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"
pointer_function: int = optional("torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr", 0)
# Tensors as capsules of owned handles, and back. `CONVERSIONS`: their module, for C++.
CONVERSIONS = "torch._C._aoti"
to_handles: Any = optional(f"{CONVERSIONS}.unsafe_alloc_void_ptrs_from_tensors")
from_handles: Any = optional(f"{CONVERSIONS}.alloc_tensors_by_stealing_from_void_ptrs")
# ----- instruction sets


@contextlib.contextmanager
def untried_instructions() -> Iterator[str]:
    """A block in which inductor takes the processor's instructions without trying them. Gives macros that name them.

    Nothing if nothing was chosen.
    """
    instruction_sets = importlib.import_module("torch._inductor.cpu_vec_isa")
    kinds: Any = instruction_sets.VecISA
    check = kinds.check_build
    kinds.check_build = lambda self, code: True
    try:
        with settings().patch({"cpp.vec_isa_ok": True}):
            chosen = instruction_sets.pick_vec_isa()
            yield " ".join(chosen.build_macro()) if chosen else ""
    finally:
        kinds.check_build = check


def may_assume_instructions() -> bool:
    """Whether inductor need not try them: the user's settings say nothing about them."""
    return INSTRUCTIONS.fits() and settings().cpp.vec_isa_ok is None


def forget_instructions() -> None:
    """Have inductor ask for the instructions again."""
    instruction_sets = importlib.import_module("torch._inductor.cpu_vec_isa")
    kinds = instruction_sets.supported_vec_isa_list
    found_by: list[Any] = [instruction_sets.valid_vec_isa_list, *(type(one).__bool__ for one in kinds)]
    for one in kinds:
        for name in ("is_avx512_bf16_supported", "is_amx_fp16_supported"):
            vars(one).pop(f"_{name}", None)
            found_by.append(getattr(type(one), name, None))
    for cached in found_by:
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()


def tried_instructions() -> list[Any]:
    """Those that inductor tried, each by a library in its folder."""
    return list(importlib.import_module("torch._inductor.cpu_vec_isa").valid_vec_isa_list())
