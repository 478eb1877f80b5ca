"""Reads that no guard can follow, seen as they happen: the environment, files, clocks, context variables, `eval`.

In: a body that is recorded, as it runs on this thread. Out: the name of the first such read, or "".

Note [Reads of a body]
A guard compares what code names. What a body gets otherwise, from the operating system or by a name that it computes,
may be another thing at the next call, and nothing would tell. So while a body is recorded, Python reports the functions
that it calls (`sys.setprofile`, 0.6 µs for each), and a body that called one of those below runs as written. Calls that
PyTorch's code or ours makes are left out, as are those of `logging` and `warnings`: a replay leaves messages out, as it
does what is printed. Random numbers of Python's and of numpy are compared by their states. If the program has a
profiler of its own on this thread, which `cProfile` is, nothing is seen.
"""

from __future__ import annotations

import logging
import os
import sys
import sysconfig
import types
import warnings
from collections.abc import Callable
from datetime import date
from typing import Any, TypeVar

from lazy_backend.errors.sites import is_internal

T = TypeVar("T")

# Modules of C whose functions tell of the world outside, and those of their functions that do not.
_OUTSIDE = {"time": "time", "posix": "os", "nt": "os", "io": "io", "_io": "io", "_socket": "socket", "select": "select"}
_PURE = frozenset(("fspath", "sleep", "_path_normpath", "text_encoding", "strerror", "gmtime", "mktime", "strftime"))
# Functions that come to values by names which they are given.
_BY_NAME = frozenset(("eval", "exec", "globals", "input"))
# Methods of objects of C.
_METHODS = frozenset(
    ("get", "read", "read1", "readall", "readinto", "readline", "readlines", "recv", "recv_into", "peek")
)
_OBJECTS = frozenset(("_io", "_contextvars", "_socket", "_queue", "mmap"))
_NOW = frozenset(("now", "today", "utcnow"))
# The environment is a mapping that is written in Python.
_OF_ENVIRONMENT = frozenset(
    code
    for name in ("__getitem__", "__iter__", "__len__", "copy")
    if isinstance(code := getattr(getattr(type(os.environ), name, None), "__code__", None), types.CodeType)
)

_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
_LIBRARY = (_STANDARD, "<frozen ")  # as `os`, whose code is part of the interpreter
_INSTALLED = os.sep + "site-packages" + os.sep
_TELLING = (os.path.dirname(logging.__file__) + os.sep, str(warnings.__file__), _STANDARD + "linecache.py")


class _Watch:
    """Sees what a body calls, on behalf of a captured object; bodies are within one another. `first`: what it found."""

    __slots__ = ("first", "outer")

    def __init__(self, outer: _Watch | None) -> None:
        self.first = ""
        self.outer = outer

    def __call__(self, frame: types.FrameType, event: str, function: Any) -> None:
        """What `sys.setprofile` asks for."""
        if event == "c_call":
            read = _name_of_c(function)
        elif event == "call" and frame.f_code in _OF_ENVIRONMENT:
            read = "os.environ"
        else:
            return
        if read and _is_of_body(frame):
            watch: _Watch | None = self
            while watch is not None:
                watch.first, watch = watch.first or read, watch.outer


def watching_reads(body: Callable[[], T]) -> tuple[T, str]:
    """What `body` returns, and the first of its reads that no guard can follow. See Note [Reads of a body]."""
    outer: Any = sys.getprofile()
    if outer is not None and type(outer) is not _Watch:
        return body(), ""
    watch = _Watch(outer)
    try:
        sys.setprofile(watch)
        return body(), watch.first
    finally:
        sys.setprofile(outer)


def why_unseen(read: str) -> str:
    """The reason why a body with this read is not replayed."""
    return f"it reads {read}, which a replay would not do\n  read it outside, and pass what it gave as an argument"


def _name_of_c(function: Any) -> str:
    """The name of a function of C that no guard can follow; "" for any other."""
    owner, name = getattr(function, "__self__", None), function.__name__
    if type(owner) is types.ModuleType:
        module = owner.__name__
        if module == "builtins":
            return f"{name}()" if name in _BY_NAME else ""
        return f"{_OUTSIDE[module]}.{name}()" if module in _OUTSIDE and name not in _PURE else ""
    kind = owner if type(owner) is type else type(owner)
    if kind.__module__ in _OBJECTS:
        return f"{kind.__name__}.{name}()" if name in _METHODS and kind.__name__ not in _IN_MEMORY else ""
    return f"{kind.__name__}.{name}()" if name in _NOW and issubclass(kind, date) else ""


_IN_MEMORY = frozenset(("BytesIO", "StringIO"))


def _is_of_body(frame: types.FrameType | None) -> bool:
    """Whether code of the body's own makes a call, itself or through Python's library, and not to tell something."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_LIBRARY) or _INSTALLED in file:
            return not is_internal(file)
        if file.startswith(_TELLING):
            return False
        frame = frame.f_back
    return False
