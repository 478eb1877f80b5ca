"""CPython: reference counts, frames, the garbage collector's generations, the layout and the contents of objects.

In: `sys`, `gc`, `type`. Out: what holds on every version: counts less what the counting itself adds, as measured at
import.

Note [No code of the user's]
Whoever walks modules and their state meets objects of any class. The class decides what `len(x)`, `x == y`, `x in s`,
`for _ in x`, `x.name`, `isinstance(x, C)` and `hash(x)` run, and its metaclass what `C.__name__`, `C == D` and `C in
table` run. Such code may raise, have effects or be slow. So walks ask the built-in types that a class derives from, as
in `tuple.__len__(x)`; they compare classes by `is`, and look them up by id.
"""

from __future__ import annotations

import _thread
import abc
import contextlib
import ctypes
import dis
import functools
import gc
import importlib
import inspect
import re
import signal
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, starmap
from operator import methodcaller
from sys import getrefcount
from types import (
    CodeType,
    FrameType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    TracebackType,
)
from typing import Any, NamedTuple

# The frame of the caller at a depth; that of each thread, by the thread's number. Functions of C.
frame_at: Callable[[int], FrameType] = getattr(sys, "_getframe", None)  # type: ignore[assignment]
frames_of_threads: Callable[[], dict[int, FrameType]] = getattr(sys, "_current_frames", None)  # type: ignore[assignment]

# Bytes from a frame to the address of what the interpreter keeps of it, and from there to that of the function.
_AT_FRAME, _AT_FUNCTION = 3 * ctypes.sizeof(ctypes.c_void_p), {11: 0, 12: 16, 13: 16}.get(sys.version_info.minor)


def function_of(frame: FrameType) -> FunctionType | None:
    """The function that a frame runs; None if this version of Python does not tell."""
    if _AT_FUNCTION is None:
        return None
    inner = ctypes.c_void_p.from_address(id(frame) + _AT_FRAME).value
    place = ctypes.c_void_p.from_address(inner + _AT_FUNCTION).value if inner else None
    try:
        found = ctypes.cast(place, ctypes.py_object).value if place else None
    except ctypes.ArgumentError:  # made of what a call raises at the limit of recursion
        raise RecursionError("maximum recursion depth exceeded") from None
    return found if type(found) is FunctionType and found.__code__ is frame.f_code else None


_SIGNALS = frozenset(map(int, signal.valid_signals()))

# What exceptions say of themselves, whatever their classes define.
_traceback_of: Callable[[BaseException], TracebackType | None] = BaseException.__dict__["__traceback__"].__get__
_cause_of: Callable[[BaseException], BaseException | None] = BaseException.__dict__["__cause__"].__get__


def from_signal_handler(error: BaseException) -> BaseException | None:
    """The exception that a signal handler raised on this thread, if `error` is that, or is PyTorch's or ours about it.

    It is no error of the code that it came into. Python gives a handler the signal and the frame that it interrupts.
    """
    if threading.current_thread() is not threading.main_thread():
        return None
    chained: BaseException | None = error
    seen: set[int] = set()
    while chained is not None and id(chained) not in seen:  # causes may make a ring
        seen.add(id(chained))
        above, entry = None, _traceback_of(chained)
        while entry is not None:
            if above is not None and _is_handler(entry.tb_frame, above):
                return chained
            above, entry = entry.tb_frame, entry.tb_next
        module = module_of(type(chained))
        # else an error of an earlier run, or what the program's own code has made of it
        if type(module) is not str or not module.startswith(("lazy_backend.lowering.", "torch.")):
            return None
        chained = _cause_of(chained)
    return None


def _is_handler(frame: FrameType, interrupted: FrameType) -> bool:
    """Whether `frame` runs a signal handler: by its arguments, and by its code where it has let one of them go."""
    code = frame.f_code
    num_names = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    variables = frame.f_locals
    given: list[Any] = []
    for name in code.co_varnames[:num_names]:
        value: Any = variables.get(name)
        given += value if type(value) in (tuple, list) else (value,)
    if not any(one in _SIGNALS for one in given if type(one) in (int, signal.Signals)):
        return False
    if any(one is interrupted for one in given):
        return True
    handlers = [signal.getsignal(number) for number in _SIGNALS]
    return any(getattr(handler, "__code__", None) is code for handler in handlers if type(handler) is FunctionType)


def pass_on_interruption(error: Exception) -> None:
    """Raise what a signal handler of the program raised, if `error` is that or was made of it."""
    interruption = from_signal_handler(error)
    if interruption is not None:
        raise interruption


def import_uninterrupted(module: str) -> None:
    """Import a module that may be missing, on a thread, as signal handlers run on the main one.

    Interrupted, an import of PyTorch's leaves modules half imported, and whatever needs them fails from then on.
    """

    is_over, over = False, _thread.allocate_lock()

    def find() -> None:
        nonlocal is_over
        try:
            importlib.import_module(module)
        except ImportError:
            pass
        finally:
            is_over = True
            over.release()

    def wait() -> None:  # not by `Thread.join`, which takes a thread for ended once it was interrupted
        while not is_over:
            over.acquire(timeout=0.5)

    if module not in sys.modules:
        over.acquire()
        try:
            threading.Thread(target=find, name="lazy_backend imports").start()
        except RuntimeError:  # the interpreter shuts down
            find()
        try:
            wait()
        except BaseException:
            wait()  # two threads that import at once would see parts of each other's modules
            raise


# Where `contextlib` enters and leaves blocks: in Python, which a signal may interrupt. With what leaves such a block.
_AROUND_BLOCKS: dict[CodeType, Callable[[Any], object]] = {
    contextlib.ExitStack.__exit__.__code__: methodcaller("close"),
    **{
        method.__code__: lambda manager: manager.gen.close()
        for name in ("__enter__", "__exit__")
        if type(method := getattr(type(contextlib.contextmanager(iter)(())), name)) is FunctionType
    },
}


def leave_interrupted_blocks(error: BaseException) -> None:
    """Leave the blocks that `error` kept `contextlib` from entering or leaving, the innermost first.

    Those of generators would be left when the traceback is gone. PyTorch's guards in them, as in its fake kernels,
    would then give the thread the dispatch keys that it had within a kernel, without autograd, for ever.
    """
    frames: list[FrameType] = []
    entry = _traceback_of(error)
    while entry is not None:
        # a function that a profiler was told of, and was interrupted at that, has no entry
        caller = entry.tb_frame.f_back
        if frames and caller is not None and caller is not frames[-1]:
            frames.append(caller)
        frames.append(entry.tb_frame)
        entry = entry.tb_next
    for frame in reversed(frames):
        leave = _AROUND_BLOCKS.get(frame.f_code)
        if leave is not None:
            with contextlib.suppress(Exception):  # Python, too, drops what such a block raises
                leave(frame.f_locals["self"])


def frames_tell_functions() -> bool:
    """Whether `function_of` finds a function that calls it."""

    def calls() -> bool:
        return function_of(frame_at(0)) is calls

    return calls()


# The classes of `threading.Lock` and `threading.RLock`, which are functions before Python 3.13.
LOCK_TYPES: tuple[type, ...] = (_thread.LockType, _thread.RLock)

# Whether the calling thread holds a `threading.RLock`, as `threading.Condition` asks.
is_owned: Callable[[Any], bool] = methodcaller("_is_owned")


def counts_of(objects: Sequence[Any]) -> list[int]:
    """The reference counts of `objects`, with those of the list, of `map` and of the call: see `UNHELD`.

    Counted within a function of C: CPython may pass what a function of Python is given without counting it.
    """
    return list(map(getrefcount, objects))


# What `counts_of` gives for an object that only the list holds.
UNHELD = counts_of([object()])[0]


def held_among(objects: Sequence[Any], holders: int) -> tuple[tuple[int, ...], list[Any]]:
    """The places of `objects`, and these, that more than the sequence and `holders` others refer to; no None."""
    counts = counts_of(objects)
    places = [place for place, count in enumerate(counts) if count > UNHELD + holders]
    places = [place for place in places if objects[place] is not None]
    return tuple(places), [objects[place] for place in places]


def counts_holders() -> bool:
    """Whether a variable and a list count as one reference each."""
    value: list[Any] = []
    other = [value]
    return counts_of([value])[0] - UNHELD == 2 and counts_of(other)[0] - UNHELD == 1


def young_objects() -> list[Any]:
    """What was made since the garbage collector last ran: its youngest generation.

    May hold a tuple that another thread is filling from a generator. Growing such a tuple fails in that thread while
    the list refers to it, so where ids will do, take `young_ids`.
    """
    return gc.get_objects(generation=0)


def young_ids() -> set[int]:
    """The ids of `young_objects`. Taken within calls of C, so that no other thread runs while a list refers to them."""
    return set(map(id, chain.from_iterable(starmap(gc.get_objects, ((0,),)))))


def sees_young_objects() -> bool:
    """Whether `young_objects` and `young_ids` have an object that was just made."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        made: list[Any] = []
        return any(one is made for one in young_objects()) and id(made) in young_ids()
    finally:
        if enabled:
            gc.enable()


# ----- objects, see Note [No code of the user's]


def is_a(value: Any, kinds: Any) -> bool:
    """`isinstance` that does not ask the object: a proxy may answer anything for `__class__`, or raise."""
    return issubclass(type(value), kinds)


# What a class says of itself, whatever its metaclass says.
mro_of: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__
namespace_of: Callable[[type], MappingProxyType[str, Any]] = type.__dict__["__dict__"].__get__
name_of: Callable[[type], str] = type.__dict__["__name__"].__get__
_module_of: Callable[[type], Any] = type.__dict__["__module__"].__get__
_flags_of: Callable[[type], int] = type.__dict__["__flags__"].__get__
_offset_of_dict: Callable[[type], int] = type.__dict__["__dictoffset__"].__get__
_basic_size_of: Callable[[type], int] = type.__dict__["__basicsize__"].__get__

_HEAP_TYPE = 1 << 9  # of the flags of a class: it is not one of C that is built in


def module_of(kind: type) -> Any:
    """The name of the module of a class: no string if the class sets it so, "" if `exec` made it where none has one."""
    module = _module_of(kind)
    return "" if type(module) is str and module == "builtins" and _flags_of(kind) & _HEAP_TYPE else module


# An instance that has a `__dict__` and nothing else: larger ones have state in C, or slots.
_SIZE_OF_PLAIN_INSTANCE: int = type("_Plain", (), {}).__basicsize__


def has_only_a_dict(kind: type) -> bool:
    """Whether instances of a class have attributes in a `__dict__`, and nothing besides."""
    return _offset_of_dict(kind) != 0 and _basic_size_of(kind) <= _SIZE_OF_PLAIN_INSTANCE


NO_ATTRIBUTES: dict[str, Any] = {}


def attributes_of(value: Any) -> dict[str, Any]:
    """The `__dict__` of an object; `NO_ATTRIBUTES` if it has none, or shows none."""
    for kind in mro_of(type(value)):
        found = namespace_of(kind).get("__dict__")
        if type(found) is GetSetDescriptorType or type(found) is MemberDescriptorType:
            attributes = found.__get__(value)
            return attributes if is_a(attributes, dict) else NO_ATTRIBUTES
    return NO_ATTRIBUTES


def shows_attributes(kind: type) -> bool:
    """Whether `object.__getattribute__` gives the `__dict__` of an object of this class without running its code."""
    found = next((space["__dict__"] for space in map(namespace_of, mro_of(kind)) if "__dict__" in space), None)
    return type(found) is GetSetDescriptorType or type(found) is MemberDescriptorType


# Instructions that read a global or an attribute, with the bits of their argument below a name's number. Where there
# are any, the lowest one of an attribute's says that it is called.
_GLOBALS = {dis.opmap[name]: bits for name, bits in (("LOAD_GLOBAL", 1), ("LOAD_NAME", 0))}
_ATTRIBUTES = {
    dis.opmap[name]: bits
    for name, bits in (("LOAD_ATTR", int(sys.version_info >= (3, 12))), ("LOAD_SUPER_ATTR", 2), ("IMPORT_FROM", 0))
    if name in dis.opmap
}


_IMPORT = dis.opmap["IMPORT_NAME"]
# What reads or writes attributes by their names as strings.
_BY_STRING = frozenset((
    "getattr", "hasattr", "setattr", "vars", "attrgetter", "__dict__", "__getattribute__", "__setattr__",
))  # fmt: skip
_WITH_NAME = frozenset(("getattr", "hasattr"))
# What reads attributes that no code names; a pattern of a class names them elsewhere, or in none but `__match_args__`.
_ALL = frozenset(("vars", "dir", "attrgetter", "methodcaller", "__dict__", "__getattribute__", "asdict", "astuple"))
_MATCH = dis.opmap["MATCH_CLASS"]


class NamesRead(NamedTuple):
    """The names by which code reads. What it only counts, as in `self.calls += 1`, it does not read.

    `globals`: that it reads. `attributes`: that it reads without calling them. `modules`: that it imports. `strings`:
    of attributes, as it gives them to `getattr`, `hasattr` and `setattr`. `reads_all`: whether it may read attributes
    that it does not name. `variables`: of enclosing functions. `keys`: constants that may be keys of entries that it
    reads. `written`: globals, and variables of enclosing functions, that it or a function within it writes.
    """

    globals: frozenset[str]
    attributes: frozenset[str]
    modules: frozenset[str]
    strings: frozenset[str]
    reads_all: bool
    variables: frozenset[str]
    keys: frozenset[str | int]
    written: frozenset[str]


@functools.lru_cache(maxsize=4096)
def names_read(code: CodeType) -> NamesRead:
    """The names by which code reads. Of code that reads attributes by strings, all strings are taken for such names."""
    global_names, attributes, modules, variables, keys, written = set(), set(), set(), set(), set(), set()
    matches = False
    instructions = _instructions_of(code)
    for place, (op, argument) in enumerate(instructions):
        if op in _GLOBALS:
            if not _is_counted(instructions, place, argument >> _GLOBALS[op]):
                global_names.add(code.co_names[argument >> _GLOBALS[op]])
        elif op in _ATTRIBUTES and not (_ATTRIBUTES[op] and argument & 1):
            if not _is_counted(instructions, place, argument >> _ATTRIBUTES[op]):
                attributes.add(code.co_names[argument >> _ATTRIBUTES[op]])
        elif op in _VARIABLES:
            if not _is_counted(instructions, place, argument):
                variables.add(code._varname_from_oparg(argument))  # type: ignore[attr-defined]
        elif op == _CONSTANT:
            if type(key := code.co_consts[argument]) in (str, int) and instructions[place + 1 : place + 3] != _COUNTED:
                keys.add(key)
        elif op == _WRITE_GLOBAL:
            written.add(code.co_names[argument])
        elif op == _WRITE_VARIABLE:
            written.add(code._varname_from_oparg(argument))  # type: ignore[attr-defined]
        elif op == _IMPORT:
            modules.add(code.co_names[argument])
        elif op == _MATCH:
            matches = True
    strings: frozenset[str] = frozenset()
    reads_all = matches or not _ALL.isdisjoint(code.co_names)
    if not _BY_STRING.isdisjoint(code.co_names):
        strings = frozenset(constant for constant in code.co_consts if type(constant) is str)
        reads_all = reads_all or not _gives_names_as_constants(code)
    if not _FORMATS.isdisjoint(code.co_names):
        attributes |= {name for one in code.co_consts if type(one) is str for name in _OF_FIELD.findall(one)}
    return NamesRead(
        frozenset(global_names),
        frozenset(attributes | strings),
        frozenset(modules),
        strings,
        reads_all,
        frozenset(variables),
        frozenset(keys),
        frozenset(written.difference(code.co_cellvars) | _written_within(code)),
    )


def _written_within(code: CodeType) -> set[str]:
    """The variables of functions around `code` that functions defined in it write."""
    written = {name for one in code.co_consts if type(one) is CodeType for name in names_read(one).written}
    return written.intersection(code.co_freevars)


# Methods of strings that read attributes, and the attributes of such a string's fields: "{0.scale}".
_FORMATS = frozenset(("format", "format_map"))
_OF_FIELD = re.compile(r"(?<=\.)[^\W\d]\w*(?=[^{}]*\})")


def _instructions_of(code: CodeType) -> list[tuple[int, int]]:
    """The instructions of code, each with its argument."""
    found: list[tuple[int, int]] = []
    extended = 0
    for op, low in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        argument = extended | low
        extended = argument << 8 if op == dis.EXTENDED_ARG else 0
        if op not in _NO_INSTRUCTIONS:
            found.append((op, argument))
    return found


def _is_counted(instructions: Sequence[tuple[int, int]], place: int, number: int) -> bool:
    """Whether what an instruction loads, by this number, is changed in place by a constant or a local, and stored."""
    following = instructions[place + 1 : place + 5]
    if len(following) < 3 or following[0][0] not in _OPERANDS:
        return False
    op, argument = following[1]
    store = following[3:] if following[2][0] == _SWAP else following[2:3]
    is_in_place = op == _BINARY and argument >= _FIRST_IN_PLACE
    return is_in_place and any(op in _STORES and argument == number for op, argument in store)


def _opcodes(*names: str) -> Iterator[int]:
    """The instructions with these names that this Python has."""
    return (dis.opmap[name] for name in names if name in dis.opmap)


_NO_INSTRUCTIONS = frozenset(_opcodes("EXTENDED_ARG", "CACHE"))
_VARIABLES = frozenset(_opcodes("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"))
_OPERANDS = frozenset(_opcodes("LOAD_CONST", "LOAD_FAST", "LOAD_SMALL_INT", "LOAD_FAST_BORROW"))
_CONSTANT = dis.opmap["LOAD_CONST"]
_COUNTED = [(dis.opmap["COPY"], 2)] * 2  # the entry with this key is changed in place, as in `counts["a"] += 1`
_BINARY, _SWAP = dis.opmap["BINARY_OP"], dis.opmap["SWAP"]
_FIRST_IN_PLACE = 13  # of the arguments of BINARY_OP: +=
_WRITE_GLOBAL, _WRITE_VARIABLE = dis.opmap["STORE_GLOBAL"], dis.opmap["STORE_DEREF"]
_STORES = frozenset(_opcodes("STORE_GLOBAL", "STORE_NAME", "STORE_ATTR", "STORE_DEREF"))


def _gives_names_as_constants(code: CodeType) -> bool:
    """Whether code uses `getattr` and `hasattr` only in calls whose second argument is a constant."""
    instructions = [one for one in dis.get_instructions(code) if one.opname != "EXTENDED_ARG"]
    return all(
        _second_argument(instructions[place + 1 :]) == "LOAD_CONST"
        for place, one in enumerate(instructions)
        if one.argval in _WITH_NAME and one.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    )


def _second_argument(instructions: Sequence[dis.Instruction]) -> str:
    """The last instruction of a call's second argument, given those after that of its function; "" if unknown."""
    depth, last = 0, ""
    for one in instructions:
        if one.opcode in _JUMPS:
            return ""
        depth += dis.stack_effect(one.opcode, one.arg, jump=False)
        if depth < 0:
            return last if one.opname.startswith("CALL") else ""
        if depth == 2:
            last = one.opname
    return ""


_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))


def reads_names() -> bool:
    """Whether `names_read` understands this Python's instructions."""
    none: frozenset[str] = frozenset()
    named, literal = frozenset(("len", "sys", "getattr")), frozenset(("literal",))
    attributes = frozenset(("path", "flags", "literal"))
    variables, counted = frozenset(("read_too",)), frozenset(("counted",))
    read, more = names_read(_reader.__code__), names_read(_make_reader().__code__)
    return (
        read == NamesRead(named, attributes, frozenset(("math",)), literal, False, none, read.keys, none)
        and more == NamesRead(frozenset(("getattr",)), none, none, none, True, variables, more.keys, counted)
        and "literal" in read.keys
        and 7 not in more.keys
    )


def _reader(of: Any) -> Any:
    import math

    of.called(len(sys.path), math.cos(0), getattr(of.called(1), "literal", 0))
    return sys.flags


def _make_reader() -> Any:
    counted = read_too = 0

    def read(of: Any, name: str) -> Any:
        nonlocal counted
        of.count += 1
        of.called()[7] += 1
        counted += 1
        return getattr(of, name, read_too)

    return read


def slots_of(kind: type) -> Iterator[MemberDescriptorType]:
    """The slots that a class adds to those of its bases: `slot.__get__(instance)` raises where nothing is set."""
    namespace = namespace_of(kind)
    if "__slots__" in namespace:
        yield from (member for member in namespace.values() if type(member) is MemberDescriptorType)


CONTAINERS: tuple[type, ...] = (dict, list, tuple, deque, set, frozenset)


def container_kind(value: Any) -> Any:
    """The built-in type of containers that an object's class is or derives from, or None."""
    kind = type(value)
    for one in CONTAINERS:
        if kind is one:
            return one
    return next((one for one in CONTAINERS if issubclass(kind, one)), None)


def length_of(container: Any) -> int:
    """The number of values in a container."""
    return int(container_kind(container).__len__(container))


def parts_of(value: Any) -> list[Any]:
    """The objects that an object refers to, as its class tells the garbage collector; of a function no globals."""
    if type(value) is FunctionType:
        return gc.get_referents(value.__defaults__, value.__kwdefaults__, value.__dict__, *(value.__closure__ or ()))
    return gc.get_referents(value)


def items_of(container: Any) -> Iterator[Any]:
    """The values in a container, or the keys of a dict."""
    iterator: Iterator[Any] = container_kind(container).__iter__(container)
    return iterator


class _Contents:
    """What is in a container whose class may define how it is read."""

    __slots__ = ("_of",)

    def __init__(self, of: Any) -> None:
        self._of = of

    def __len__(self) -> int:
        return length_of(self._of)

    def __iter__(self) -> Iterator[Any]:
        return items_of(self._of)


def values_view(container: Any) -> Any:
    """What is in a container, as it changes: its length and its values, those of a dict."""
    kind = container_kind(container)
    if kind is dict:
        return dict.values(container)
    return container if kind is type(container) else _Contents(container)


def keys_view(container: Any) -> Any:
    """The keys of a dict, as they change, in its order."""
    if is_a(container, OrderedDict):
        # whose order is another one than that of the dict within. Looks keys up: strings and numbers
        return OrderedDict.keys(container)
    return dict.keys(container)


# ----- abstract classes

# How often a class was registered as of an abstract one.
num_registrations: Callable[[], Any] = abc.get_cache_token


def registered_with(kinds: Iterable[type]) -> list[tuple[type, type]]:
    """The classes that were registered as of abstract ones among `kinds`, or of classes that derive from these.

    Each with the abstract class. Runs no code of theirs.
    """
    found = []
    seen: set[int] = set()
    waiting = list(kinds)
    while waiting:
        kind = waiting.pop()
        if id(kind) in seen:
            continue
        seen.add(id(kind))
        waiting += type.__subclasses__(kind)
        for reference in _registry_of(kind) if is_a(kind, abc.ABCMeta) else ():
            registered = reference()
            if registered is not None:
                found.append((kind, registered))
                waiting.append(registered)
    return found


def _registry_of(kind: type) -> Iterable[Callable[[], type | None]]:
    dump: Any = getattr(abc, "_get_dump", None)
    return dump(kind)[0] if dump is not None else ()


def sees_registrations() -> bool:
    """Whether `registered_with` finds a class that was registered with one that derives from another."""
    base = abc.ABCMeta("Base", (), {})
    derived = abc.ABCMeta("Derived", (base,), {})
    derived.register(int)
    return registered_with((base,)) == [(derived, int)]
