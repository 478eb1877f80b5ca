"""Compile a graph with inductor, for another process to load.

In: a `CompileRequest`. Out: the bytes that `artefact` loads. Runs in the worker process.

Note [One extension per graph]
Inductor builds every kernel as a separate extension and spends nearly all of the build on its header: 1.8 s a kernel,
of which the kernel itself takes 0.1 s. A GPT's step has 28 kernels. So inductor is kept from building kernels: their
sources are taken from the module that inductor wrote and built as one extension with one function per kernel. That
takes 4 s instead of 28 s. The kernels of all blocks of a graph are built together, too, and so are their runners.
"""

from __future__ import annotations

import ast
import contextlib
import marshal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lazy_backend.lowering.artefacts.artefact import pack
from lazy_backend.lowering.artefacts.inductor_module import (
    InductorModule,
    Kernel,
    NotExpressible,
    NotLight,
    extern_names,
    inductor_module,
)
from lazy_backend.lowering.artefacts.run_thread import available_cores
from lazy_backend.lowering.artefacts.runner_source import Runner, Wrapper, runner_of, runner_source
from lazy_backend.lowering.blocks.block_program import MIN_SAVED, BlockProgram, in_blocks
from lazy_backend.lowering.compilation.cpp_units import RUNNER, build_units
from lazy_backend.lowering.compilation.examples import Examples
from lazy_backend.lowering.compilation.inductor_defects import without_defects
from lazy_backend.lowering.compilation.request import CompileRequest
from lazy_backend.lowering.products.product_timing import prefers_onednn
from lazy_backend.lowering.products.thread_choice import num_threads_for
from lazy_backend.ports.dispatcher import OpOverload
from lazy_backend.ports.replacements import inductor


@dataclass(frozen=True, slots=True)
class _Lowered:
    """What inductor made of a module, for the CPU."""

    module: InductorModule
    examples: Examples
    num_threads: int | None  # if not as many as operators use

    def runner(self) -> Runner:
        types = {name: kinds for name, (kinds, _) in self.module.kernels.items()}
        symbols, layouts = self.examples.sizes(), self.examples.layouts()
        return runner_of(Wrapper(self.module.call, types, symbols, layouts, prefers_onednn, self.num_threads))


def compile_request(request: CompileRequest) -> bytes:
    """Compile what is requested, equal blocks once if that is worth it. Raises whatever inductor raises."""
    blocks = _blocks_of(request)
    # cpp.threads is set because otherwise, if the thread count equals the number of cores, a parallel region gets as
    # many threads as the process that *runs* it has, but its array of partial sums has one element for each thread of
    # this process, which compiles it
    own = num_threads_for(request.stored.get(), None if request.shares_threads else available_cores())
    settings: dict[str, Any] = {"cpp.threads": own or torch.get_num_threads()}
    if own is None and request.shares_threads:
        settings["cpp.dynamic_threads"] = True
    if request.stored.device.type == "cpu":
        # inductor would have convolutions compute channels last, whatever the tensors are: without weights that are
        # packed for it once, as only frozen ones are, the copies to and fro take a fifth of a ResNet's step
        settings["layout_optimization"] = False
    with inductor.settings().patch(settings):
        if blocks is not None:
            with contextlib.suppress(inductor.cpp_error()):  # then the whole graph may do without such C++
                return _compile_blocks(request, blocks)
        return compile_to_bytes(request.module, request.examples())


def _blocks_of(request: CompileRequest) -> BlockProgram | None:
    """Symbolic graphs are compiled whole."""
    if not request.shares_blocks or request.sizes is not None:
        return None
    return in_blocks(request.graph, request.constants, request.promoted, MIN_SAVED)


def _compile_blocks(request: CompileRequest, program: BlockProgram) -> bytes:
    """See Note [Blocks compiled once]. A block that cannot be built together with the others is an artefact itself."""
    first_calls = {call.block: call for call in reversed(program.sequence.calls)}
    kernels: dict[str, Kernel] = {}
    runners: list[Runner] = []
    artefacts: list[bytes] = []
    parts: list[dict[str, Any]] = []
    for place, block in enumerate(program.blocks):
        own = first_calls[place].constants
        promoted = [place for place, index in enumerate(own) if index in request.promoted]
        part = CompileRequest.of(block, [request.constants[index] for index in own], request.backend, promoted)
        try:
            lowered = _lower(part.module(), part.examples(), prefix=f"block{place}_")
            runner = lowered.runner()
        except (NotLight, NotExpressible):
            parts.append({"artefact": len(artefacts)})
            artefacts.append(compile_to_bytes(part.module, part.examples()))
        else:
            parts.append(_described(len(runners), runner))
            runners.append(runner)
            kernels |= lowered.module.kernels
    header = {"kind": "blocks", "guards": None, "sequence": program.sequence.to_json(), "blocks": parts}
    units, built = _build_native(kernels, runners)
    return pack({**header, "kernels": units, "artefacts": len(artefacts)}, [*artefacts, *built])


def _described(place: int, runner: Runner) -> dict[str, Any]:
    """What a loader must know of the `place`-th runner of an extension."""
    return {
        "runner": place,
        "kernels": runner.kernels,
        "functions": runner.functions,
        "num_threads": runner.num_threads,
        "left_out": runner.left_out,
    }


def compile_to_bytes(make_module: Callable[[], fx.GraphModule], examples: Examples) -> bytes:
    """Compile the module that `make_module` makes. Raises whatever inductor raises."""
    try:
        lowered = _lower(make_module(), examples)
        header: dict[str, Any] = {"guards": examples.guards()}
        try:
            runner = lowered.runner()
        except NotExpressible as reason:
            return _light(lowered.module, header, str(reason))
        header["kernels"], built = _build_native(lowered.module.kernels, [runner])
        block = _described(0, runner)
        return pack({**header, "kind": "native", "block": block}, built)
    except (NotLight, inductor.cpp_error()) as error:
        why = str(error) if isinstance(error, NotLight) else "C++ that the compiler refuses"
        try:
            bundled = inductor.to_bytes(_compile(make_module(), examples))
        except Exception:
            if isinstance(error, NotLight):
                raise
            raise error from None  # it refuses what inductor writes, too: for instructions that it does not know?
        return pack({"kind": "bundled", "guards": examples.guards(), "reason": why}, [bundled])


def _light(module: InductorModule, header: dict[str, Any], reason: str) -> bytes:
    """A light artefact. Raises `NotLight`."""
    try:
        statements = module.light()
        externs = {name: _path_of_extern(name) for name in extern_names(statements)}
    except NotLight as too:
        raise NotLight(f"{reason}; {too}") from None
    units = _units(module.kernels)
    code = compile(ast.fix_missing_locations(ast.Module(statements, [])), "<compiled graph>", "exec", dont_inherit=True)
    header |= {"kind": "light", "externs": externs, "reason": reason, "kernels": list(map(list, units))}
    return pack(header, [marshal.dumps(code), *build_units(_sources(units))])


def _lower(module: fx.GraphModule, examples: Examples, prefix: str = "") -> _Lowered:
    """Have inductor compile the module, but build nothing. `prefix`: of the kernels' names. Raises `NotLight`."""
    if not _is_for_cpu(examples):  # kernels are Triton's, which PyTorch's own artefacts have in them
        raise NotLight(inductor.OTHER_DEVICES)
    with inductor.kernels_not_built():
        compiled = _compile(module, examples)
    text, parts = inductor.python_of(compiled)
    if parts:
        raise NotLight(", ".join(parts))
    try:
        found = inductor_module(text)
    except NotExpressible as reason:
        raise NotLight(str(reason)) from None
    threads = inductor.settings().cpp.threads
    num_threads = threads if 0 < threads != torch.get_num_threads() else None
    return _Lowered(found.with_prefix(prefix) if prefix else found, examples, num_threads)


def _build_native(kernels: dict[str, Kernel], runners: Sequence[Runner]) -> tuple[list[list[str]], list[bytes]]:
    """The names of the kernels in each unit, and shared objects: one with the runners, if there are any, and units."""
    units = _units(kernels)
    sources = _sources(units)
    if runners:
        sources = {RUNNER: runner_source(runners, "".join(sources.values())), **sources}
    return list(map(list, units)), build_units(sources)


def _is_for_cpu(examples: Examples) -> bool:
    tensors = [one for one in examples.arguments if isinstance(one, torch.Tensor)]
    return all(one.device.type == "cpu" for one in tensors)


def _compile(module: fx.GraphModule, examples: Examples) -> Any:
    with torch.no_grad(), examples.tracing(), without_defects():
        return inductor.compile_ahead(module, examples.arguments, bool(examples.symbols))


def _path_of_extern(name: str) -> str:
    kernel = inductor.extern_kernel(name)
    if getattr(torch, name, None) is kernel:
        return f"torch.{name}"
    if isinstance(kernel, OpOverload):
        return str(kernel)
    raise NotLight(f"extern kernel {name}")


# ----- the kernels as extension modules

# Kernels per translation unit: a limit bounds the C++ compiler's memory, and units are built in parallel.
_MAX_UNIT = 64

_PROLOGUE = """
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cstdlib>
#include <stdexcept>
static void* (*data_of)(PyObject*);
"""

# Each kernel gets a macro and a namespace: inductor names every kernel `kernel`, and their helpers may share names.
_KERNEL = """
#define kernel {name}
namespace in_{name} {{
{body}
}}
using in_{name}::{name};
#undef kernel
static PyObject* py_{name}(PyObject*, PyObject* const* args, Py_ssize_t count) {{
    try {{
        if (count != {count}) throw std::runtime_error("requires {count} args");
        {name}({arguments});
    }} catch (std::exception const& e) {{
        PyErr_SetString(PyExc_RuntimeError, e.what());
        return nullptr;
    }}
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NONE;
}}
"""

# Runners call kernels by address, Python calls them by name.
_MODULE = """
static void* const kernels[] = {{{pointers}}};
static PyObject* addresses(PyObject*, PyObject*) {{
    PyObject* made = PyTuple_New({count});
    for (Py_ssize_t i = 0; made && i < {count}; i++) PyTuple_SET_ITEM(made, i, PyLong_FromVoidPtr(kernels[i]));
    return made;
}}
static PyMethodDef methods[] = {{
{methods}
    {{"addresses", addresses, METH_NOARGS, ""}},
    {{NULL, NULL, 0, NULL}}}};
static struct PyModuleDef definition = {{PyModuleDef_HEAD_INIT, "compiled", NULL, -1, methods}};
PyMODINIT_FUNC PyInit_compiled(void) {{
    const char* address = std::getenv("{pointer_variable}");
    if (!address) {{ PyErr_SetString(PyExc_RuntimeError, "no address of tensors' data"); return nullptr; }}
    data_of = reinterpret_cast<decltype(data_of)>(std::strtoull(address, nullptr, 10));
    return PyModule_Create(&definition);
}}
"""

# How a Python number is converted to each C++ type.
_NUMBERS = {
    "int64_t": "PyLong_AsLongLong({})",
    "uintptr_t": "(uintptr_t)PyLong_AsVoidPtr({})",
    "float": "(float)PyFloat_AsDouble({})",
    "double": "PyFloat_AsDouble({})",
}


def _sources(units: Sequence[dict[str, Kernel]]) -> dict[str, str]:
    return {f"kernels{place}": _source_of(unit) for place, unit in enumerate(units)}


def _units(kernels: dict[str, Kernel]) -> list[dict[str, Kernel]]:
    names = sorted(kernels)
    count = -(-len(names) // _MAX_UNIT)
    return [{name: kernels[name] for name in names[start::count]} for start in range(count)]


def _source_of(unit: dict[str, Kernel]) -> str:
    """One extension module with one function per kernel."""
    includes: dict[str, None] = {}
    functions, methods = [], []
    for name, (types, source) in unit.items():
        lines = source.splitlines()
        includes.update((line, None) for line in lines if line.startswith("#include"))
        body = "\n".join(line for line in lines if not line.startswith("#include"))
        arguments = ", ".join(_argument(kind, place) for place, kind in enumerate(types))
        functions.append(_KERNEL.format(name=name, body=body, count=len(types), arguments=arguments))
        methods.append(f'    {{"{name}", (PyCFunction)(void(*)(void))py_{name}, METH_FASTCALL, ""}},')
    pointers = ", ".join(f"reinterpret_cast<void*>({name})" for name in unit)
    variable = inductor.POINTER_VARIABLE
    module = _MODULE.format(pointers=pointers, count=len(unit), methods="\n".join(methods), pointer_variable=variable)
    return "\n".join([*includes, _PROLOGUE, *functions, module])


def _argument(kind: str, place: int) -> str:
    kind = kind.replace("const ", "")
    if kind.endswith("*"):
        return f"static_cast<{kind}>(data_of(args[{place}]))"
    if kind not in _NUMBERS:
        raise NotLight(f"a kernel's argument of type {kind}")
    return _NUMBERS[kind].format(f"args[{place}]")
