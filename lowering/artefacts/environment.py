"""What compiled code depends on besides its graph: one table, from which every key is derived.

In: the state of this process. Out: the parts of a computation's key, of an artefact's key on disk and of an artefact's
header, and the state that the worker process takes over before it compiles.

Note [What a key depends on]
Each dependency is one entry of the table, which gives its scope and how to read it. A newly found dependency is one
more entry; a backing device that is registered brings its own. The scopes are:

- `PROCESS`: a program may change it mid-run and must then not get code from before the change. Every sync reads these.
- `COMPILE`: code generation reads it, so the worker process takes it over, and artefacts on disk are specific to it.
- `ARTEFACT`: it must be the same in the process that makes an artefact and in one that loads it.
- `CODE`: Python asks for it, that of PyTorch or of the user, and calls other operators. So what a captured function,
  module or optimizer recorded is not replayed under another value, nor under one of the first scope.

The key on disk contains all of the second and third scope, a hash of the code that lowers graphs, the compiler settings
that the program changed, and the compiler's environment variables. Which C++ compiler built an artefact is not in it:
any compiler's code is right, and what was compiled is also for machines that have no compiler, or name another.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lazy_backend.cache.computation_cache import Key
from lazy_backend.lowering.devices.dependencies import SWITCHED, Dependency, Scope, attribute, precisions
from lazy_backend.lowering.devices.interface import BackingDevice
from lazy_backend.lowering.devices.registration import backing_devices
from lazy_backend.ports.port import VARIABLE
from lazy_backend.ports.replacements import inductor
from lazy_backend.ports.thread_modes import SWITCHES

# Raise it when the contents of artefacts change.
FORMAT = 7


def _deterministic() -> list[bool]:
    return [torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()]


def _follow_deterministic(value: list[bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _default_dtype() -> str:
    return str(torch.get_default_dtype()).removeprefix("torch.")


def _follow_default_dtype(value: str) -> None:
    torch.set_default_dtype(getattr(torch, value))


def _legacy_precision() -> str | None:
    """None if the program uses `torch.backends.*.fp32_precision`: PyTorch then refuses to report this setting."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _follow_legacy_precision(value: str | None) -> None:
    if value is not None:
        torch.set_float32_matmul_precision(value)


@functools.cache
def processor() -> str:
    """Identifies the CPU. Kernels are built with -march=native, which uses more than `get_cpu_capability` reports."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()} {torch.backends.cpu.get_cpu_capability()}"
    wanted = sorted(line for line in lines if line.startswith(("vendor_id", "model", "flags", "Features", "CPU ")))
    return hashlib.blake2b("\n".join(wanted).encode(), digest_size=8).hexdigest()


_GENERAL = (
    Dependency("deterministic algorithms", Scope.PROCESS, torch.are_deterministic_algorithms_enabled),
    Dependency("deterministic algorithms, or a warning", Scope.COMPILE, _deterministic, _follow_deterministic),
    Dependency("default dtype", Scope.PROCESS, torch.get_default_dtype),
    Dependency("default dtype by name", Scope.COMPILE, _default_dtype, _follow_default_dtype),
    # compiled kernels have arrays with one element per thread
    Dependency("threads", SWITCHED | Scope.ARTEFACT, torch.get_num_threads, torch.set_num_threads),
    attribute("mkldnn", torch.backends.mkldnn, "enabled", inductor.is_mkldnn_enabled, SWITCHED),
    Dependency("float32 matmul precision", Scope.COMPILE | Scope.CODE, _legacy_precision, _follow_legacy_precision),
    *precisions("mkldnn", SWITCHED),
    Dependency("format", Scope.ARTEFACT, lambda: FORMAT),
    Dependency("torch", Scope.ARTEFACT, lambda: torch.__version__),
    Dependency("python", Scope.ARTEFACT, importlib.util.MAGIC_NUMBER.hex),
    Dependency("abi", Scope.ARTEFACT, lambda: importlib.machinery.EXTENSION_SUFFIXES[0]),
    Dependency("processor", Scope.ARTEFACT, processor),
    *(Dependency(name, Scope.CODE, read) for name, read in SWITCHES.items()),
)


@functools.cache
def table() -> tuple[Dependency, ...]:
    """All dependencies, with those of every backing device that there is."""
    return (
        *_GENERAL,
        *(one for device in backing_devices.values() for one in device.dependencies),
        *(_versions_of(device) for device in backing_devices.values() if device.versions),
    )


def _versions_of(device: BackingDevice) -> Dependency:
    return Dependency(f"{device.name} versions", Scope.ARTEFACT, lambda: device.versions)


def see_devices() -> None:
    """Take over the dependencies of a backing device that was registered."""
    for found in (table, _switched, _reads, _asked):
        found.cache_clear()


# ----- in the process: what a computation's key depends on

Environment = tuple[Any, ...]  # the backend, then the values that a program may change


@functools.cache
def _switched() -> tuple[Dependency, ...]:
    return tuple(one for one in table() if Scope.PROCESS in one.scope)


@functools.cache
def _reads() -> tuple[Callable[[], Any], ...]:
    return tuple(one.read for one in _switched())


@functools.cache
def _asked() -> tuple[Callable[[], Any], ...]:
    return tuple(one.read for one in table() if (Scope.PROCESS | Scope.CODE) & one.scope)


def switches() -> tuple[Any, ...]:
    """The current values of the process's settings that Python code may ask for, or that a key depends on.

    Every call of something captured calls this function: 3 µs.
    """
    return tuple([read() for read in _asked()])


def environment_names() -> tuple[str, ...]:
    """The names of the parts of an `Environment`."""
    return ("backend", *(one.name for one in _switched()))


def environment(backend: Any) -> Environment:
    """The current values of the process's settings that a key depends on. Without a backend, graphs are interpreted.

    Every sync calls this function: 1 µs.
    """
    found = [backend]
    for read in _reads():  # a comprehension is a function of its own before Python 3.12
        found.append(read())
    return tuple(found)


def key_parts(settings: Environment) -> tuple[tuple[str, str], ...]:
    """The parts of a key for all of `settings` but the backend."""
    return tuple((name, str(value)) for name, value in zip(environment_names()[1:], settings[1:], strict=True))


# ----- between processes


def process_state() -> dict[str, Any]:
    """What code generation reads from the process."""
    return {one.name: one.read() for one in table() if Scope.COMPILE in one.scope}


def follow_state(state: dict[str, Any]) -> None:
    """Set this process's settings so that its `process_state` is `state`."""
    for one in table():
        if Scope.COMPILE in one.scope and one.follow is not None:
            one.follow(state[one.name])


def made_for() -> dict[str, Any]:
    """What must be the same in the process that makes an artefact and in one that loads it."""
    return {one.name: one.read() for one in table() if Scope.ARTEFACT in one.scope}


def disk_key_parts() -> tuple[tuple[str, str], ...]:
    """The parts of an artefact's key on disk that do not come from its graph."""
    parts = {
        "artefact": made_for(),
        "state": process_state(),
        "settings": compiler_settings(),
        "variables": {name: value for name, value in compiler_variables().items() if name != "CXX"},
        "lowering": lowering_code(),
    }
    return tuple((name, json.dumps(value, sort_keys=True)) for name, value in parts.items())


# How a part of an artefact's environment that only another machine or another installation can satisfy is told.
_INSTALLED = {
    "torch": "PyTorch {theirs}, this is {ours}",
    "python": "another version of Python",
    "abi": "Python's interface {theirs}, this has {ours}",
    "processor": "another processor or other instructions",
    "format": "another version of lazy_backend",
}


def misfit(key: Key) -> str | None:
    """Why no process with this installation on this machine can use the artefact with this key; None if one can."""
    parts = _parts_of(key)
    if parts is None:
        return "no compiled graph"
    theirs, ours = parts["artefact"], made_for()
    for name in dict.fromkeys((*_INSTALLED, *ours, *theirs)):
        if name != "threads" and theirs.get(name) != ours.get(name):  # threads are a setting
            text = _INSTALLED.get(name, f"{name} {{theirs}}, this has {{ours}}")
            return "made for " + text.format(theirs=theirs.get(name), ours=ours.get(name))
    return "made for another version of lazy_backend" if parts["lowering"] != lowering_code() else None


def other_settings(key: Key) -> list[str]:
    """The settings with which the artefact with this key was made, and which this process must have to use it."""
    parts = _parts_of(key)
    if parts is None:
        return []
    ours = {name: json.loads(text) for name, text in disk_key_parts()}
    found = []
    for part in ("state", "settings", "variables"):
        for name in sorted({*parts[part], *ours[part]}):
            there, here = (values[part].get(name, "unset") for values in (parts, ours))
            if there != here:
                found.append(f"{name} {there}, here {here}")
    return found


def _parts_of(key: Key) -> dict[str, Any] | None:
    """The parts of `disk_key_parts` in the key of an artefact; None if it is not such a key."""
    names = [name for name, _ in disk_key_parts()]
    texts = {name: text for name, text in key.parts if name in names}
    try:
        found = {name: json.loads(texts[name]) for name in names}
    except (KeyError, ValueError, RecursionError):
        return None
    are_tables = all(isinstance(value, dict) for name, value in found.items() if name != "lowering")
    return found if are_tables else None


@functools.cache
def lowering_code() -> str:
    """A hash of the code that lowers graphs, since other code may lower them differently. 5 ms."""
    digest = hashlib.blake2b(os.environ.get(VARIABLE, "").encode(), digest_size=8)
    for folder in (Path(__file__).parent.parent, Path(inductor.__file__).parent.parent):
        for file in sorted(folder.rglob("*.py")):
            digest.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


# ----- settings of the compiler

# Compiler variables that affect where the compiler works, how fast, and what it reports, but not its output.
_HARMLESS_VARIABLES = {
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCHINDUCTOR_COMPILE_THREADS",
    "TORCHINDUCTOR_WORKER_START",
    "TORCHINDUCTOR_WRITE_MISSING_OPS",
    "TORCHINDUCTOR_PROFILE",
    "TORCHINDUCTOR_PROFILE_OUTPUT",
}

# Variables that switch inductor's caches, each with the value that switches its cache off. They override every setting,
# and without caches there are no artefacts, so the worker process does not get these variables.
CACHE_VARIABLES = {
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
    "TORCH_COMPILE_FORCE_DISABLE_CACHES": "1",
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
}


@functools.cache
def compiler_variables() -> dict[str, str]:
    """The environment variables that change the compiler's output. Read once, as the compiler does."""
    return {name: value for name, value in os.environ.items() if is_compiler_variable(name)}


def is_compiler_variable(name: str) -> bool:
    """Whether the value of this environment variable affects the compiler's output."""
    if name in _HARMLESS_VARIABLES or name in CACHE_VARIABLES:
        return False
    return name.startswith(("TORCHINDUCTOR_", "TORCH_COMPILE_")) or name == "CXX"


def wants_compiler_caches() -> bool:
    """Whether the user left inductor's own caches switched on. Imports nothing."""
    if any(os.environ.get(name) == off for name, off in CACHE_VARIABLES.items()):
        return False
    if torch.compiler.config.force_disable_caches:
        return False
    compiler, autograd = inductor.loaded_settings().values()
    return (compiler is None or compiler.fx_graph_cache) and (autograd is None or autograd.enable_autograd_cache)


def compiler_settings() -> dict[str, dict[str, Any]]:
    """The compiler settings that this process changed. Imports nothing: whatever changed one imported its module."""
    return {name: _changed_settings(module) for name, module in inductor.loaded_settings().items()}


def _changed_settings(module: Any) -> dict[str, Any]:
    changed = {} if module is None else inductor.changed_settings(module)
    return {name: value for name, value in changed.items() if _has_text(value)}


def _has_text(value: Any) -> bool:
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True
