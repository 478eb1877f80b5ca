"""What of this process a package could have replaced, as text: two processes can be compared.

In: nothing but the state of the process. Out: a flat dict from names to descriptions that hold no address, so that
equal states have equal descriptions. A function is described by its file and line, a list by how often it has each
entry.
"""

from __future__ import annotations

import atexit
import builtins
import copyreg
import functools
import gc
import io
import logging
import os
import re
import signal
import sys
import threading
import traceback
import types
import warnings
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

Fingerprint = dict[str, str]

# How many containers and objects within each other are looked into.
DEPTH = 3
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.layout)
_COMPARED = {"torch", *sys.stdlib_module_names}
# this program; what differs from process to process
_SELF = ("__main__", "sys", "tokenize", "torch.testing._internal.common_dtype")
_MACHINERY = ("__all__", "__builtins__", "__cached__", "__file__", "__loader__", "__spec__", "__path__")
_CHANGING = re.compile(
    r"0x[0-9a-f]{6,}|[0-9a-f]{8}([_-])[0-9a-f]{4}\1[0-9a-f]{4}\1[0-9a-f]{4}\1[0-9a-f]{12}|-?\b\d{9,}\b|/tmp/[^ '\"]*"
)
# how often warnings' filters had changed when a module warned: more often in the first process, which compiles bytecode
_COUNT_OF_FILTERS = ".__warningregistry__['version']"
_LIBRARIES = Path(torch.__file__).resolve().parent.parent


def place(file: str) -> str:
    """A file's name that is the same in all processes."""
    path = Path(file)
    if path.is_relative_to(_LIBRARIES):
        return str(path.relative_to(_LIBRARIES))
    return path.name


def steady(text: str) -> str:
    """The text without addresses, identifiers and temporary files."""
    return _CHANGING.sub("...", text)


# ----- one value


def _function(value: types.FunctionType) -> str:
    code = value.__code__
    found = f"function {value.__module__}.{value.__qualname__} {place(code.co_filename)}:{code.co_firstlineno}"
    found += f" {zlib.crc32(code.co_code):x}"
    wrapped = vars(value).get("__wrapped__")
    return found if wrapped is None else f"{found} of {label(wrapped)}"


def label(value: Any) -> str:
    """The value in one line, without what it contains."""
    match value:
        case types.FunctionType():
            return _function(value)
        case type():
            return f"class {value.__module__}.{value.__qualname__}"
        case types.ModuleType():
            return f"module {value.__name__}"
        case types.MethodType():
            return f"method of {type(value.__self__).__qualname__}: {label(value.__func__)}"
        case staticmethod() | classmethod():
            return f"{type(value).__name__} {label(value.__func__)}"
        case property():
            return f"property {label(value.fget)}, {label(value.fset)}, {label(value.fdel)}"
        case functools.partial():
            return f"partial of {label(value.func)}"
        case types.BuiltinFunctionType() | types.MethodDescriptorType() | types.WrapperDescriptorType():
            return f"{type(value).__name__} {getattr(value, '__module__', '')}.{value.__qualname__}"
        case float():
            return "float"  # most are times
        case _ if isinstance(value, _PLAIN):
            return steady(repr(value)[:200])
        case _ if type(value).__name__ in ("OpOverload", "OpOverloadPacket", "HigherOrderOperator", "DispatchKey"):
            return f"{type(value).__name__} {value}"
    wrapped = getattr(value, "__wrapped__", None) if type(value).__name__ == "_lru_cache_wrapper" else None
    return f"{type(value).__module__}.{type(value).__qualname__}" + (f" of {label(wrapped)}" if wrapped else "")


class _Describer:
    """A walk over values that describes each container and object once, where it is met first."""

    def __init__(self) -> None:
        self.found: Fingerprint = {}
        self._names: dict[int, str] = {}
        self._kept: list[Any] = []  # an address is not used again while its object is

    def add(self, name: str, value: Any, depth: int = DEPTH) -> None:
        entries = self._entries(value)
        if entries is None:
            self.found[name] = label(value)
            return
        if id(value) in self._names:
            self.found[name] = f"the same as {self._names[id(value)]}"
            return
        self._names[id(value)] = name
        self._kept.append(value)
        self.found[name] = label(value)
        if depth:
            for entry, inner in entries:
                if not f"{name}{entry}".endswith(_COUNT_OF_FILTERS):
                    self.add(f"{name}{entry}", inner, depth - 1)

    def _entries(self, value: Any) -> list[tuple[str, Any]] | None:
        match value:
            case dict() | types.MappingProxyType():
                return [(f"[{label(key)}]", inner) for key, inner in list(value.items()) if not _is_address(key)]
            case tuple():
                return [(f"[{index}]", inner) for index, inner in enumerate(value)]
            case list() | set() | frozenset():
                counts = Counter(self._short(inner) for inner in list(value))
                return [(f"[{inner}]", count) for inner, count in counts.items()]
        module = str(type(value).__module__)
        if module.split(".")[0] == "torch" and not isinstance(value, type | types.ModuleType | torch.Tensor):
            return [(f".{key}", inner) for key, inner in list(getattr(value, "__dict__", {}).items())]
        return None

    def _short(self, value: Any) -> str:
        if isinstance(value, tuple | list):
            return f"({', '.join(self._short(inner) for inner in value)})"
        return label(value)


def _is_address(key: Any) -> bool:
    return isinstance(key, int) and key > 1 << 30


# ----- the process


def of_modules(describer: _Describer) -> None:
    """Every name of every module of PyTorch, and of every class where it is defined; of Python's own the functions."""
    for name, module in sorted(sys.modules.items()):
        root = name.partition(".")[0]
        depth = DEPTH if root == "torch" else 0
        if not isinstance(module, types.ModuleType) or name in _SELF or root not in _COMPARED:
            continue
        for key, value in sorted(vars(module).items(), key=lambda item: str(item[0])):
            if key in _MACHINERY or (not depth and isinstance(value, int | str)):
                continue
            describer.add(f"{name}.{key}", value, depth)
            if isinstance(value, type) and value.__module__ == name:
                _of_class(describer, value, min(depth, 2))


def _of_class(describer: _Describer, owner: type, depth: int) -> None:
    name = f"{owner.__module__}.{owner.__qualname__}"
    metaclass = type(owner)
    describer.found[f"{name} metaclass"] = f"{label(metaclass)}, bases {[label(base) for base in owner.__bases__]}"
    for key, value in sorted(vars(owner).items()):
        if not isinstance(value, types.GetSetDescriptorType | types.MemberDescriptorType | weakref.ReferenceType):
            describer.add(f"{name}.{key}", value, depth)


def of_interpreter(describer: _Describer) -> None:
    """What Python calls by itself: hooks, filters, finders, handlers, threads."""
    hooks: dict[str, Any] = {
        name: getattr(sys, name)
        for name in ("meta_path", "path_hooks", "path", "excepthook", "displayhook", "unraisablehook", "breakpointhook")
    }
    hooks |= {"argv": sys.argv[0], "switch interval": sys.getswitchinterval(), "recursion": sys.getrecursionlimit()}
    hooks |= {
        "trace": sys.gettrace(),
        "profile": sys.getprofile(),
        "stdout": type(sys.stdout),
        "stderr": type(sys.stderr),
    }
    hooks |= {"threads": sorted(thread.name for thread in threading.enumerate()), "gc": gc.get_threshold()}
    hooks |= {"thread hook": threading.excepthook, "gc callbacks": gc.callbacks, "collects": gc.isenabled()}
    hooks |= {"thread trace": threading.gettrace(), "thread profile": threading.getprofile()}
    hooks |= {"warnings": [str(one) for one in warnings.filters], "shows": warnings.showwarning}
    hooks |= {"reductions": {label(key): label(value) for key, value in copyreg.dispatch_table.items()}}
    hooks |= {"signals": {str(one): label(signal.getsignal(one)) for one in signal.valid_signals()}}
    hooks |= {"builtins": vars(builtins), "handlers": logging.getLogger().handlers, "levels": logging.getLogger().level}
    hooks |= {"atexit": atexit._ncallbacks(), "variables": _variables()}
    hooks |= {"modules": {name: type(module) for name, module in sorted(sys.modules.items())}}
    for name, value in hooks.items():
        describer.add(f"interpreter {name}", value)


def _variables() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if "AUTOLOAD" not in key and "CACHE_DIR" not in key}


def of_dispatcher(found: Fingerprint) -> None:
    """Every kernel of every operator and every fallback, but for those of keys of `Lazy`."""
    for name in torch._C._dispatch_get_all_op_names():
        lines = torch._C._dispatch_dump(name).splitlines()
        own = [line for line in lines if not line.startswith(("Lazy", "AutogradLazy"))]
        found[f"kernels of {name}"] = own[0] if len(own) < 2 else f"{zlib.crc32(repr(own).encode()):x}"
    for name in sorted(_dispatch_keys()):
        if name not in ("Lazy", "AutogradLazy"):
            found[f"fallback of {name}"] = str(
                torch._C._dispatch_has_backend_fallback(getattr(torch._C.DispatchKey, name))
            )
    for name in ("aten::mm", "aten::add.Tensor", "aten::conv2d", "aten::sum", "aten::empty.memory_format"):
        lines = torch._C._dispatch_dump_table(name).splitlines()
        found[f"table of {name}"] = "\n".join(one for one in lines if not one.startswith(("Lazy", "AutogradLazy")))


def _dispatch_keys() -> Iterable[str]:
    return [name for name in torch._C.DispatchKey.__members__ if "EndOf" not in name and "StartOf" not in name]


# ----- what calls pass through


def _calls() -> Mapping[str, Callable[[], Any]]:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, lazy_module = torch.ones(2, 2), torch.nn.LazyLinear

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    def autocast() -> None:
        with torch.autocast("cpu"):
            torch.mm(x, x)

    def saved() -> None:
        file = io.BytesIO()
        torch.save({"x": x}, file)
        file.seek(0)
        torch.load(file, map_location="cpu")

    return {
        "an operator": lambda: x + x,
        "a step": step,
        "an autocast block": autocast,
        "torch.norm": lambda: torch.norm(x),
        "save and load": saved,
        "a generator": lambda: torch.Generator("cpu").manual_seed(1),
        "a module that moves": lambda: torch.nn.Linear(2, 2).to(torch.float64).float(),
        "a lazy module": lambda: lazy_module(2)(x),
        "a batch": lambda: list(torch.utils.data.DataLoader([x, x], batch_size=2)),
        "dlpack": lambda: torch.from_dlpack(x),
        "default dtype": lambda: torch.set_default_dtype(torch.float32),
        "seed": lambda: torch.manual_seed(1),
        "attention": lambda: torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),
        "an optimizer": lambda: torch.optim.Adam(model.parameters()),
        "a factory": lambda: torch.ones(2, device="cpu"),
        "a vmap": lambda: torch.func.vmap(torch.sum)(x),
        "a copy": lambda: __import__("copy").deepcopy(model),
    }


def of_calls(found: Fingerprint) -> None:
    """The functions of Python and C that each of some calls enters, in order: one more is time that is taken."""
    for name, call in _calls().items():
        call()
        call()  # what is made at first use is there
        entered: list[str] = []

        def note(frame: types.FrameType, event: str, argument: Any, entered: list[str] = entered) -> None:
            if event == "call":
                entered.append(f"{place(frame.f_code.co_filename)}:{frame.f_code.co_name}")
            elif event == "c_call":
                entered.append(argument.__qualname__)

        collects = gc.isenabled()
        gc.disable()  # finalizers that it calls would be counted
        sys.setprofile(note)
        try:
            call()
        finally:
            sys.setprofile(None)
        if collects:
            gc.enable()
        found[f"entered by {name}"] = "\n".join(entered)


def of_tracebacks(found: Fingerprint) -> None:
    """The frames of errors that PyTorch raises."""

    def bad_autocast() -> None:
        with torch.autocast("cpu"):
            torch.mm(torch.ones(2), torch.ones(3))

    failing: dict[str, Callable[[], Any]] = {
        "autocast": bad_autocast,
        "norm": lambda: torch.norm(torch.ones(2, dtype=torch.int64)),
        "module": lambda: torch.nn.Linear(2, 2)(torch.ones(3)),
        "generator": lambda: torch.Generator("nonsense"),
        "load": lambda: torch.load(io.BytesIO(b"nonsense")),
        "collate": lambda: torch.utils.data.default_collate([torch.ones(1), torch.ones(2)]),
        "optimizer": lambda: torch.optim.Adam([torch.ones(2)], fused=True, foreach=True),
    }
    for name, call in failing.items():
        try:
            call()
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            found[f"frames of {name}"] = "\n".join(f"{place(one.filename)}:{one.lineno} {one.name}" for one in frames)


def of_values(values: Mapping[str, Any]) -> Fingerprint:
    describer = _Describer()
    for name, value in values.items():
        describer.add(name, value)
    return describer.found


def of_hooks() -> Fingerprint:
    """What Python calls by itself, and all kernels."""
    describer = _Describer()
    of_interpreter(describer)
    of_dispatcher(describer.found)
    return describer.found


def of_everything() -> Fingerprint:
    """All names of all modules, and hooks."""
    describer = _Describer()
    of_modules(describer)
    of_interpreter(describer)
    of_dispatcher(describer.found)
    return describer.found


def calls_and_tracebacks() -> Fingerprint:
    found: Fingerprint = {}
    of_calls(found)
    of_tracebacks(found)
    return found
