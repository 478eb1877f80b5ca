"""Interrupt a call anywhere in this package, as Ctrl-C, a signal handler or a finalizer does.

An exception may come at any line: not only from a signal, but also where memory runs out. Code that runs in the middle
of ours comes only after an instruction at which CPython looks for signals or may collect garbage; places of that kind
are instructions, not lines.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

import lazy_backend
import lazy_backend.cache
import lazy_backend.lowering

_PACKAGES = (lazy_backend, lazy_backend.lowering, lazy_backend.cache)
_FOLDERS = tuple(str(Path(package.__file__).parent) for package in _PACKAGES)

Place = tuple[str, int, int]  # file, line, and the instruction's offset in its function; -1: the line as such

# Instructions after which nothing can come in between, by how their names begin: CPython looks for signals where a
# function is entered, after calls and at jumps back, and collects garbage where it makes an object.
_UNDISTURBED = (
    *("LOAD_", "STORE_", "DELETE_", "POP_", "PUSH_", "COPY", "SWAP", "NOP", "CACHE", "PRECALL", "KW_NAMES", "IS_OP"),
    *("CONTAINS_OP", "COMPARE_OP", "UNARY_NOT", "JUMP_FORWARD", "UNPACK_", "BEFORE_WITH", "RERAISE", "RETURN_"),
    *("BINARY_SUBSCR", "CHECK_EXC_MATCH", "EXTENDED_ARG", "MAKE_CELL", "TO_BOOL", "NOT_TAKEN", "END_"),
)


class Interrupted(BaseException):
    """What is raised at a line."""


def places_of(call: Callable[[], Any], instructions: bool = False) -> dict[Place, int]:
    """The places in this package that `call` comes to on this thread, each with how often: lines or instructions."""
    found: dict[Place, int] = {}

    def see(place: Place) -> None:
        found[place] = found.get(place, 0) + 1

    with _traced(see, instructions):
        call()
    return found


def interrupt(call: Callable[[], Any], place: Place, time: int, action: Callable[[], Any], again: int = 0) -> bool:
    """Call `call`, and `action` before it comes to `place` for the `time`-th time. Returns whether it came there.

    An action that raises interrupts `call`; what it raises passes through. With `again`, it comes once more, so many
    places later, if `call` comes to as many.
    """
    left = time
    later = again
    reached = False

    def act() -> None:
        tracer = sys.gettrace()
        sys.settrace(None)
        action()
        if later:
            sys.settrace(tracer)

    def see(current: Place) -> None:
        nonlocal left, later, reached
        if reached and later:
            later -= 1
            if not later:
                act()
        elif current == place and left:
            left -= 1
            if not left:
                reached = True
                act()

    with _traced(see, instructions=place[2] >= 0, only=None if again else place):
        call()
    return reached


def raise_interrupted() -> None:
    raise Interrupted


@contextmanager
def _traced(see: Callable[[Place], None], instructions: bool, only: Place | None = None) -> Iterator[None]:
    """Within this block, `see` is called at every place; with `only`, at least at that one, which takes a third."""

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(_FOLDERS) or (only is not None and not _has(code, only)):
            return None
        if instructions:
            return trace_instructions(frame)
        if event == "line" and not _takes_no_signal(code, frame.f_lasti):
            see((code.co_filename, frame.f_lineno, -1))
        return trace

    def trace_instructions(frame: FrameType) -> Any:
        code, disturbed = frame.f_code, _disturbed(frame.f_code)
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        last = 0  # it looks for signals when it is entered

        def trace_one(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal last
            if event == "opcode":
                before, last = last, frame.f_lasti
                if before in disturbed:
                    see((code.co_filename, frame.f_lineno, frame.f_lasti))
            return trace_one

        return trace_one

    before = sys.gettrace()
    sys.settrace(trace)
    FakeTensorMode.__torch_dispatch__ = _untraced  # type: ignore[method-assign]
    try:
        yield
    finally:
        sys.settrace(before)
        FakeTensorMode.__torch_dispatch__ = _infer  # type: ignore[method-assign]


_infer = FakeTensorMode.__torch_dispatch__


def _untraced(*arguments: Any, **named: Any) -> Any:
    """PyTorch's inference of an operator's results, which never comes back to this package.

    While a trace function is set, CPython 3.11 runs all Python slower, and half of an unseen step is this.
    """
    tracing = sys.gettrace()
    if tracing is None:
        return _infer(*arguments, **named)
    sys.settrace(None)
    try:
        return _infer(*arguments, **named)
    finally:
        sys.settrace(tracing)


def _has(code: CodeType, place: Place) -> bool:
    return code.co_filename == place[0] and place[1] in _lines_of(code)


@functools.cache
def _lines_of(code: CodeType) -> frozenset[int]:
    return frozenset(line for _, _, line in code.co_lines() if line is not None)


@functools.cache
def _disturbed(code: CodeType) -> frozenset[int]:
    """The offsets of the instructions of `code` after which other code may run."""
    found = {i.offset for i in dis.get_instructions(code) if not i.opname.startswith(_UNDISTURBED)}
    backward = {i.offset for i in dis.get_instructions(code) if "BACKWARD" in i.opname}
    return frozenset({0} | found | backward)


@functools.cache
def _takes_no_signal(code: CodeType, offset: int) -> bool:
    """Whether CPython raises nothing at a line, while a trace function may.

    It looks for signals at calls and jumps back, so nothing comes between a block and a C function that leaves it: at
    the end of a `with` block without an exception. A `try:` is no instruction at all.
    """
    following = [i for i in dis.get_instructions(code) if i.offset >= offset]
    rest = [i for i in following if i.opname not in ("NOP", "SWAP")][:3]
    leaves_block = len(rest) == 3 and all(i.opname == "LOAD_CONST" and i.argval is None for i in rest)
    return following[0].opname == "NOP" or leaves_block
