"""What compiled graphs are made of: Inductor's artefacts, PyTorch's interface in C, functions that only C++ knows.

In: `torch._functorch`, PyTorch's headers, libtorch_cpu. Out: the parts of an artefact; the functions of the interface;
symbols, by the names that a C++ compiler gives them, and whether they are there. Such functions are called by the
convention of x86-64.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import platform
import re
from pathlib import Path
from typing import Any

import torch

# at::native::mkldnn_matmul(left, right, out, beta, alpha)
PRODUCT = "_ZN2at6native13mkldnn_matmulERKNS_6TensorES3_S3_ff"
# at::detail::createCPUGenerator(seed), CPUGeneratorImpl::set_current_seed(seed), at::Tensor::bernoulli_(p, generator)
MAKE_GENERATOR = "_ZN2at6detail18createCPUGeneratorEm"
SET_SEED = "_ZN2at16CPUGeneratorImpl16set_current_seedEm"
BERNOULLI = "_ZN2at4_ops16bernoulli__float4callERNS_6TensorEdSt8optionalINS_9GeneratorEE"
# at::linalg_vector_norm(tensor, order, dimensions, keepdim, dtype)
VECTOR_NORM = (
    "_ZN2at4_ops18linalg_vector_norm4callERKNS_6TensorERKN3c106ScalarENS5_16OptionalArrayRefIlEEb"
    "St8optionalINS5_10ScalarTypeEE"
)

# PyTorch's stable interface in C: calls an operator by name, with a stack of numbers; makes an empty list for one
DISPATCHER, NEW_LIST = "torch_call_dispatcher", "torch_new_list_reserve_size"


@functools.cache
def library() -> Any:
    """PyTorch's library for the CPU; None if it cannot be opened."""
    try:
        return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except OSError:
        return None


def has_symbols(*symbols: str) -> bool:
    """Whether this PyTorch has these functions, where they are called as on x86-64."""
    if platform.machine() not in ("x86_64", "AMD64") or library() is None:
        return False
    return all(hasattr(library(), symbol) for symbol in symbols)


def has_masks() -> bool:
    return has_symbols(MAKE_GENERATOR, SET_SEED, BERNOULLI)


def has_lstm() -> bool:
    """Whether C++ can call oneDNN's LSTM by name, and it takes the arguments that are written there."""
    names = DISPATCHER, NEW_LIST, "aoti_torch_abi_version", "aoti_torch_grad_mode_set_enabled"
    layer, backward = torch.ops.aten.mkldnn_rnn_layer.default, torch.ops.aten.mkldnn_rnn_layer_backward.default
    counts = len(layer._schema.arguments), len(backward._schema.arguments)
    return library() is not None and all(hasattr(library(), name) for name in names) and counts == (16, 23)


@functools.cache
def _thread_setters() -> list[Any]:
    """OpenMP's and MKL's functions for it, called with the GIL: to get it back takes longer."""
    own = library() and ctypes.PyDLL(None, handle=library()._handle)
    found = [getattr(own, name, None) for name in ("omp_set_num_threads", "MKL_Set_Num_Threads_Local")]
    return [setter for setter in found if setter is not None]


def set_own_threads(count: int) -> None:
    """Let operators of this thread use so many threads. `torch.set_num_threads` means later threads, too. 0.6 us."""
    for setter in _thread_setters():
        setter(count)


# ----- artefacts

OTHER_DEVICES = "devices beside the CPU"


def parts_of(entry: Any) -> list[str]:
    """What AOTAutograd adds to inductor's function."""
    meta, result = entry.runtime_metadata, entry.compiled_fw.result
    aliases = meta.aliased_out_indices or meta.num_intermediate_bases or meta.unsafe_view_out_indices
    reasons = {
        "a backward": entry.compiled_bw is not None,
        "tensor subclasses": entry.maybe_subclass_meta is not None,
        "wrappers": any(wrapper.needs_post_compile for wrapper in entry.dispatch_wrappers),
        "detached inputs": entry.indices_of_inps_to_detach,
        "mutations outside the graph": meta.mutated_inp_runtime_indices,
        "outputs that alias": aliases,
        "effect tokens": meta.tokens,
        "functionalised random numbers": meta.is_rng_op_functionalized,
        "constants": result.constants or result.torchbind_constants or result.frozen_param_names,
        "inputs to align": result.inputs_to_check,
        OTHER_DEVICES: not set(result.device_types) <= {"cpu"},
        "partitions": result.partition_maps,
        "wrapped regions": result._wrap_compiled_regions,
    }
    return [reason for reason, holds in reasons.items() if holds]


def has_known_artefacts() -> bool:
    """Whether an artefact can be written and read."""
    kind: Any = importlib.import_module("torch._inductor.standalone_compile").AOTCompiledArtifact
    return all(hasattr(kind, name) for name in ("serialize", "deserialize"))


def has_known_entries() -> bool:
    """Whether artefacts have the parts that `parts_of` looks at, as far as their classes say."""
    entries = importlib.import_module("torch._functorch._aot_autograd.aot_autograd_result")
    wanted = {"compiled_fw", "compiled_bw", "runtime_metadata", "dispatch_wrappers", "maybe_subclass_meta"}
    return wanted <= set(entries.GenericAOTAutogradResult.__dataclass_fields__)


# The text of the latest exception.
MESSAGE = "torch_exception_get_what_without_backtrace"

_INCLUDED = Path(torch.__file__).parent / "include/torch/csrc"


@functools.cache
def has_message() -> bool:
    header = _INCLUDED / "stable/c/shim.h"
    return header.exists() and MESSAGE in header.read_text()


@functools.cache
def shims() -> dict[str, list[tuple[str, str]]]:
    """PyTorch's interface in C to its operators on the CPU: type and name of the parameters of each, by its name."""
    try:
        text = (_INCLUDED / "inductor/aoti_torch/generated/c_shim_cpu.h").read_text()
    except OSError:
        return {}
    found = {}
    for name, parameters in re.findall(r"AOTITorchError (aoti_torch_cpu_\w+)\(([^)]*)\);", text):
        found[name] = [(kind.strip(), of) for kind, of in (p.strip().rsplit(" ", 1) for p in parameters.split(", "))]
    return found
