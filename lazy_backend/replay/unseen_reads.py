"""Reads that no guard can follow, seen as they happen: the environment, files, clocks, states of generators, `eval`.

In: a body that is recorded, as it runs on this thread. Out: why its reads keep it from being replayed, or ""; the code
that ran, `Ran`, which `CodeThatRan` collects; and whether it left a tensor where its code writes and need not read.

Note [Reads of a body]
A guard compares what code names. What a body gets otherwise, from the operating system or by a name that it computes,
may be another thing at the next call, and nothing would tell. So while a body is recorded, Python reports the functions
that it calls (`sys.setprofile`, 0.3 µs for each), and a body that called one of those below runs as written. Within
operators of the device nothing is reported (`Watcher`). Calls that PyTorch's code or ours makes are left out, as are
those of `logging` and `warnings`: a replay leaves messages out, as it does what is printed. Code that ran names what it
reads even where nothing leads to it from the body, as to the `__eq__` that a dataclass wrote or to `copy.deepcopy`.
Random numbers of Python's and of numpy are compared by their states; code that asks for the seed or the state of one
runs as written.

A thread has one profiler. That of the program, if it is a function, is called beside ours; `cProfile` pauses while a
body is recorded, and counts the time as ours. Under another one, or if the body exchanges it, a body runs as written.

Note [Tensors left outside]
A replay stores nothing outside: an auxiliary loss that a module leaves in a global would be that of an earlier call,
without a way to the inputs. So a module that leaves a tensor runs as written, and so does a function that adds one to a
container. What is in the objects that code names, whether it reads or only writes them, is noted before a body runs and
compared when it has run (`Contents` of `ValueGuard`). `global loss; loss = ...` names no object, nor does
`ContextVar.set`: what is at such places is noted when code that writes them begins (`Written`). Whatever is new there
is looked through for lazy tensors, in any object that the garbage collector sees into.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
import random
import sys
import sysconfig
import types
import warnings
import weakref
from collections.abc import Callable, Container, Iterable
from contextvars import Context, copy_context
from datetime import date
from itertools import chain
from typing import Any, TypeVar

import torch

from lazy_backend.errors.sites import is_internal
from lazy_backend.ports.cpython import (
    attributes_of,
    function_of,
    is_a,
    mro_of,
    names_read,
    namespace_of,
    parts_of,
)
from lazy_backend.ports.hooks import REGISTRIES
from lazy_backend.replay.plain_values import is_plain
from lazy_backend.tensors.tensor import LazyTensor
from lazy_backend.tensors.thread_state import Watcher

T = TypeVar("T")

# Modules of C whose functions tell of the world outside, and those of their functions that do not.
_OUTSIDE = {"time": "time", "posix": "os", "nt": "os", "io": "io", "_io": "io", "_socket": "socket", "select": "select"}
_PURE = frozenset(("fspath", "sleep", "_path_normpath", "text_encoding", "strerror", "gmtime", "mktime", "strftime"))
# Functions that come to values by names which they are given.
_BY_NAME = frozenset(("eval", "exec", "globals", "input", "__import__"))
# Methods of objects of C.
_METHODS = frozenset((
    "get", "read", "read1", "readall", "readinto", "readline", "readlines", "recv", "recv_into", "peek", "tell",
    "get_nowait", "qsize", "empty", "locked", "put", "put_nowait",
))  # fmt: skip
_OBJECTS = frozenset(("_io", "_contextvars", "_socket", "_queue", "_thread", "mmap"))
_NOW = frozenset(("now", "today", "utcnow"))
_FROM_FILE = "from_file"
# Functions of Python that tell of the world outside: the environment is a mapping.
_IN_PYTHON = {importlib.import_module.__code__: "importlib.import_module()"} | {
    code: "os.environ"
    for name in ("__getitem__", "__iter__", "__len__", "copy")
    if isinstance(code := getattr(getattr(type(os.environ), name, None), "__code__", None), types.CodeType)
}
_IN_PYTHON |= {random.Random.getstate.__code__: "random.getstate()"}
# Those of PyTorch's functions that tell the state of a generator or read files, if the body's code calls them.
_IN_PYTORCH = {getattr(torch, name).__code__: f"torch.{name}()" for name in ("initial_seed", "get_rng_state", "load")}
# Both, by id: code is hashed anew each time, 0.5 µs.
_BY_CODE = {id(code): text for code, text in (_IN_PYTHON | _IN_PYTORCH).items()}
# What those of PyTorch's functions have to do with that look at gradients or make them, by the id of their code.
DIFFERENTIATES, ASKS_FOR_GRADS = "differentiates", "asks for gradients"
_ABOUT_GRADIENTS = {id(one.__code__): DIFFERENTIATES for one in (torch.autograd.grad, torch.autograd.backward)} | {
    id(inspect.unwrap(one).__code__): ASKS_FOR_GRADS
    for one in (
        torch.nn.Module.zero_grad, torch.optim.Optimizer.zero_grad, torch.amp.GradScaler.unscale_,
        torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_, torch.nn.utils.clip_grads_with_norm_,
    )
}  # fmt: skip
_ABOUT_GRADIENTS |= {id(torch.optim.SGD.step.__code__): ASKS_FOR_GRADS}  # what calls the steps of all optimizers
_OF_GENERATORS = frozenset(("get_state", "initial_seed", "graphsafe_get_state", "clone_state", "get_offset"))

_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
_LIBRARY = (_STANDARD, "<frozen ")  # as `os`, whose code is part of the interpreter
_INSTALLED = os.sep + "site-packages" + os.sep
# More functions and classes are not followed.
_MOST_ROOTS = 1000
_TELLING = (
    os.path.dirname(logging.__file__) + os.sep,
    str(warnings.__file__),
    _STANDARD + "linecache.py",
    "<frozen importlib",
)
# More objects are not looked into.
_MOST_PARTS = 10_000
_NOT_LOOKED_INTO = (
    torch.optim.Optimizer, type, types.ModuleType, types.FrameType, types.TracebackType, types.CodeType,
)  # fmt: skip


# Modules of Python's library whose code reads nothing but what they made themselves.
_OF_LANGUAGE = frozenset(_STANDARD + name for name in ("contextlib.py", "typing.py", "enum.py", "abc.py", "weakref.py"))


class CodeThatRan:
    """The code that the bodies of one captured object ran, without PyTorch's and ours: what it names. See `NamesRead`.

    `roots`: the functions of the user's that ran, and the classes whose methods they are: what they read is followed as
    what the captured object reads is, however the body came to them.

    `names`: all, with those of the functions themselves, which operators may have called. `attributes`: of those, the
    ones that are read. `reads_all`: whether some code may read attributes that it does not name; `user_reads_all`:
    whether code does that is no package's. `version`: how often more names came. `left_out`: attributes of objects that
    it does not name, and that have changed between two calls that recorded the same: they are not compared any more.
    `about`: see `Ran`.
    """

    def __init__(self) -> None:
        self.left_out: frozenset[Any] = frozenset()
        self.about: frozenset[str] = frozenset()
        self.names: frozenset[str] = frozenset()
        self.attributes: frozenset[str] = frozenset()
        self.reads_all = self.user_reads_all = False
        self.version = 0
        self._codes: set[types.CodeType] = set()
        self._roots: dict[int, _Root] = {}

    def roots(self) -> list[types.FunctionType | MethodsOf | None]:
        """Those that are alive, and None in the place of others: a place stands for what was there first."""
        return [None if one.reference() is None else one.root() for one in self._roots.values()]

    def add(self, ran: Ran, known: Container[int]) -> bool:
        """Add what ran. Returns whether more came than was known. `known`: ids of functions that a guard follows."""
        has_more = self._add_roots(ran, known) or not ran.about <= self.about
        self.about |= ran.about
        new = set(ran.codes.values()) - self._codes
        if not new:
            self.version += has_more
            return has_more
        self._codes |= new
        before = self.names, self.attributes, self.reads_all
        for code in new:
            file = code.co_filename
            if not is_internal(file) and not file.startswith(_TELLING) and file not in _OF_LANGUAGE:
                read = names_read(code)
                self.names = self.names.union(code.co_names, (code.co_name,), read.strings)
                self.attributes |= read.attributes
                self.reads_all = self.reads_all or read.reads_all
                if _is_of_user(file):
                    self.user_reads_all = self.user_reads_all or read.reads_all
        named = self.names | self.attributes
        self.left_out = frozenset(one for one in self.left_out if one[1] not in named and not self.reads_all)
        has_more = has_more or (self.names, self.attributes, self.reads_all) != before
        self.version += has_more
        return has_more

    def _add_roots(self, ran: Ran, known: Container[int]) -> bool:
        has_more = False
        if len(self._roots) >= _MOST_ROOTS:
            self._roots = {key: one for key, one in self._roots.items() if one.reference() is not None}
        codes = (*ran.codes.values(), *self._codes)  # a hook that a forward makes runs in the backward
        made_within = {inner for code in codes for inner in code.co_consts if type(inner) is types.CodeType}
        for one, owner in ran.functions.values():
            function = one.reference()
            if function is None or function.__code__ in made_within:
                continue  # made anew at each call: what it reads is what the code around it names
            for root in (one, owner):
                value = None if root is None else root.reference()
                if root is None or value is None:
                    continue
                before = self._roots.get(id(value))
                if id(value) not in known and (before is None or before.reference() is not value):
                    has_more = True
                    if len(self._roots) < _MOST_ROOTS:  # else such calls are not replayed
                        self._roots[id(value)] = root
        return has_more


class _Root:
    """A function that ran, which this does not keep."""

    __slots__ = ("reference",)

    def __init__(self, value: Any) -> None:
        self.reference = weakref.ref(value)

    def root(self) -> Any:
        return self.reference()


class MethodsOf(_Root):
    """A class of which methods ran: leads to what they name of it, not to what makes its objects."""

    def root(self) -> Any:
        return self


def holds_tensor(value: Any) -> bool:
    """Whether a value is a lazy tensor, or leads to one: not by what modules, classes and frames hold.

    So does one that leads to very many objects.
    """
    seen, waiting = {id(value)}, [value]
    while waiting:
        one = waiting.pop()
        if is_a(one, LazyTensor):
            return True
        if is_plain(one) or is_a(one, _NOT_LOOKED_INTO):
            continue
        for part in _parts_besides(one):
            if id(part) not in seen:
                seen.add(id(part))
                waiting.append(part)
        if len(seen) > _MOST_PARTS:
            return True
    return False


def _parts_besides(value: Any) -> Iterable[Any]:
    """The objects that a value refers to, besides what makes a module or a tensor."""
    if is_a(value, torch.nn.Module):
        return [one for name, one in dict.items(attributes_of(value)) if name not in REGISTRIES]
    return dict.values(attributes_of(value)) if is_a(value, torch.Tensor) else parts_of(value)


class Written:
    """The places that the code of a body writes by name, with what was there. See Note [Tensors left outside].

    Those of code within the body itself are left out: `codes`, all that ran, has the code around it.
    """

    __slots__ = ("_context", "_names", "_globals", "_cells")

    def __init__(self) -> None:
        self._names: dict[int, frozenset[str]] = {}  # by the id of code, which is alive: hashing it takes 0.5 µs
        self._context: Context = copy_context()
        self._globals: dict[tuple[int, str], tuple[dict[str, Any], Any]] = {}
        self._cells: dict[int, tuple[Any, types.CodeType, Any]] = {}

    def note(self, frame: types.FrameType) -> None:
        """Note a frame that begins."""
        code = frame.f_code
        names = self._names.get(id(code))
        if names is None:
            names = self._names[id(code)] = names_read(code).written
        for name in names:
            if name not in code.co_freevars:
                place = id(frame.f_globals), name
                if place not in self._globals:
                    self._globals[place] = frame.f_globals, dict.get(frame.f_globals, name)
            elif (function := function_of(frame)) is not None and function.__closure__ is not None:
                cell = function.__closure__[code.co_freevars.index(name)]
                if id(cell) not in self._cells:
                    self._cells[id(cell)] = cell, code, _contents(cell)

    def add(self, other: Written) -> None:
        """Add what a body within this one may have written."""
        self._globals = other._globals | self._globals
        self._cells = other._cells | self._cells

    def in_context(self) -> bool:
        """Whether a context variable has a value with a lazy tensor that it did not have before."""
        return any(
            holds_tensor(value)
            for variable, value in copy_context().items()
            if self._context.get(variable) is not value
        )

    def by_name(self, codes: dict[int, types.CodeType]) -> bool:
        """Whether a global or a variable has a value with a lazy tensor that it did not have before."""
        made_within = {id(one) for code in codes.values() for one in code.co_consts if type(one) is types.CodeType}
        cells = [(cell, before) for cell, code, before in self._cells.values() if id(code) not in made_within]
        now = chain(
            ((dict.get(namespace, name), before) for (_, name), (namespace, before) in self._globals.items()),
            ((_contents(cell), before) for cell, before in cells),
        )
        return any(value is not before and holds_tensor(value) for value, before in now)

    def forget(self) -> None:
        """Keep nothing of what was there."""
        self._context, self._globals, self._cells = Context(), {}, {}


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


class Ran:
    """What ran while a body was recorded. `codes`: all. `functions`: the user's, each with the class it is a method of.

    Both by id. It keeps neither functions nor classes: they would hold what they close over. `about`: what functions of
    PyTorch's did with gradients. `written`: what they write, until `leaves_tensor` or `leaves_in_context` is asked.
    """

    __slots__ = ("codes", "functions", "about", "written")

    def __init__(self) -> None:
        self.about: set[str] = set()
        self.codes: dict[int, types.CodeType] = {}
        self.functions: dict[tuple[int, int], tuple[_Root, MethodsOf | None]] = {}
        self.written = Written()

    def note(self, frame: types.FrameType) -> None:
        """Note a frame of the body's code that begins."""
        code = frame.f_code
        self.codes[id(code)] = code
        self.written.note(frame)
        function = function_of(frame) if _is_of_user(code.co_filename) else None
        if function is None:
            return
        owner: Any = None
        if code.co_argcount:
            first = frame.f_locals.get(code.co_varnames[0])
            owner = first if is_a(first, type) else type(first)
            if not any(code.co_name in namespace_of(kind) for kind in mro_of(owner)):
                owner = None  # no method
        key = id(function), id(owner)
        if key not in self.functions or self.functions[key][0].reference() is not function:
            self.functions[key] = _Root(function), None if owner is None else MethodsOf(owner)

    def add(self, other: Ran) -> None:
        self.codes.update(other.codes)
        self.functions.update(other.functions)
        self.about |= other.about
        self.written.add(other.written)

    def leaves_in_context(self) -> bool:
        """Whether the body, which just ran, left a lazy tensor in a context variable."""
        found = self.written.in_context()
        self.written.forget()
        return found

    def leaves_tensor(self) -> bool:
        """Whether it left one there, in a global or in a variable of another function, by writing that."""
        found = self.written.in_context() or self.written.by_name(self.codes)
        self.written.forget()
        return found


@functools.lru_cache(maxsize=4096)
def _is_file_of_library(file: str) -> bool:
    return file.startswith(_LIBRARY) and _INSTALLED not in file


def _is_of_user(file: str) -> bool:
    return not file.startswith(_LIBRARY) and _INSTALLED not in file


_PROFILED = (
    "a profiler of this thread hides what its code reads\n  calls are recorded once it is off; functions that "
    "sys.setprofile gets, and cProfile, hide nothing"
)


class _Watch(Watcher):
    """Sees what a body calls, on behalf of a captured object; bodies are within one another.

    `reason`: why the first read that no guard can follow keeps the body from being replayed.
    """

    __slots__ = ("reason", "ran", "outer")

    def __init__(self, outer: _Watch | None, profiler: Callable[..., Any] | None) -> None:
        super().__init__(profiler)
        self.reason = ""
        self.ran = Ran()
        self.outer = outer

    def __call__(self, frame: types.FrameType, event: str, function: Any) -> None:
        """What `sys.setprofile` asks for."""
        if self.profiler is not None:
            self.profiler(frame, event, function)
        if event == "c_call":
            read = _name_of_c(function)
        elif event == "call":
            code = frame.f_code
            if about := _ABOUT_GRADIENTS.get(id(code)):
                self.ran.about.add(about)
            if id(code) in self.ran.codes or (_is_of_body(frame) and not _is_importing(frame)):
                self.ran.note(frame)
            read = _BY_CODE.get(id(code), "")
            if read and code in _IN_PYTORCH:
                frame = frame.f_back or frame
        else:
            return
        if read and _is_of_body(frame):
            self.note(why_unseen(read))

    def note(self, reason: str) -> None:
        """Note why this body, and those around it, are not replayed."""
        watch: _Watch | None = self
        while watch is not None:
            watch.reason, watch = watch.reason or reason, watch.outer


def watching_reads(body: Callable[[], T]) -> tuple[T, str, Ran]:
    """What `body` returns, why its reads keep it from being replayed, or "", and what ran.

    See Note [Reads of a body].
    """
    before: Any = sys.getprofile()
    outer = before if type(before) is _Watch else None
    is_function = callable(before)
    resume = None if is_function else getattr(before, "enable", None)  # of cProfile
    if before is not None and not is_function and resume is None:
        return body(), _PROFILED, Ran()
    profiler = before if is_function else None
    watch = _Watch(outer, profiler if outer is None else outer.profiler)
    try:
        sys.setprofile(watch)
        result = body()
        if sys.getprofile() is not watch:
            watch.note(_PROFILED)
        return result, watch.reason, watch.ran
    finally:
        if resume is None:
            sys.setprofile(before)
        else:
            resume()
        if outer is not None:
            outer.ran.add(watch.ran)


def why_unseen(read: str) -> str:
    """The reason why a body with this read is not replayed, or with this call, which nobody can look into."""
    if read.endswith((".put()", ".put_nowait()")):
        return f"it calls {read}, which a replay would not do\n  return what it puts there"
    return f"it reads {read}, which a replay would not do\n  read it outside, and pass what it gave as an argument"


def why_written(name: str) -> str:
    """The reason why a body that writes what it reads is not replayed."""
    return f"it reads {name} and writes it, which a replay would not do\n  keep it outside, or in a lazy tensor"


LEAVES_TENSOR = (
    "it leaves a tensor outside of itself, where code can come to it, which a replay would not do\n  return it instead"
)


# Names of methods that tell something, of some classes of C.
_OF_OBJECTS = _METHODS | _OF_GENERATORS | _NOW | {_FROM_FILE}


def _name_of_c(function: Any) -> str:
    """The name of a function of C that no guard can follow; "" for any other."""
    owner, name = getattr(function, "__self__", None), function.__name__
    if type(owner) is types.ModuleType:
        module = owner.__name__
        if module == "builtins":
            return f"{name}()" if name in _BY_NAME else ""
        return f"{_OUTSIDE[module]}.{name}()" if module in _OUTSIDE and name not in _PURE else ""
    if name not in _OF_OBJECTS:
        return ""
    if name == _FROM_FILE:
        return "torch.from_file()" if function is torch.from_file else ""
    kind = owner if type(owner) is type else type(owner)
    if issubclass(kind, torch.Generator):
        return f"torch.Generator.{name}()" if name in _OF_GENERATORS else ""
    if kind.__module__ in _OBJECTS:
        return f"{kind.__name__}.{name}()" if name in _METHODS and kind.__name__ not in _IN_MEMORY else ""
    return f"{kind.__name__}.{name}()" if name in _NOW and issubclass(kind, date) else ""


# Code that is made of text: the user's (`python -c`), and methods of classes, which PyTorch and we have too.
_FROM_TEXT = "<string>"
_WRITTEN_BY_DATACLASSES = frozenset((
    "__init__", "__eq__", "__hash__", "__repr__", "__lt__", "__le__", "__gt__", "__ge__", "__new__", "__setattr__",
    "__delattr__", "__create_fn__",
))  # fmt: skip
_IN_MEMORY = frozenset(("BytesIO", "StringIO"))


def _is_of_body(frame: types.FrameType | None) -> bool:
    """Whether a frame is of the body's code, or that runs it, perhaps through Python's library, and not to tell."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not _is_of_library(frame):
            return not is_internal(file)
        if file.startswith(_TELLING):
            return False
        frame = frame.f_back
    return False


def _is_importing(frame: types.FrameType | None) -> bool:
    """Whether a frame is of an import that the body does: of the module, or of a hook. Neither runs a second time."""
    while frame is not None and frame.f_code is not watching_reads.__code__:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _is_of_library(frame: types.FrameType) -> bool:
    """Whether a frame is of Python's library, or of a method that `dataclasses` or `namedtuple` wrote for a class."""
    file = frame.f_code.co_filename
    if file != _FROM_TEXT:
        return _is_file_of_library(file)
    module = dict.get(frame.f_globals, "__name__")
    of_tuple = type(module) is str and module.startswith("namedtuple_")
    return of_tuple or frame.f_code.co_name in _WRITTEN_BY_DATACLASSES
