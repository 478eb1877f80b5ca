"""Interrupt a call at any line of this package, as Ctrl-C, a signal handler or a finalizer does."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import lazy_backend
from lazy_backend.cache import trie
from lazy_backend.lowering import ir

_FOLDERS = tuple(str(Path(module.__file__).parent) for module in (lazy_backend, ir, trie))

Place = tuple[str, int]


class Interrupted(BaseException):
    """What is raised at a line."""


def places_of(call: Callable[[], Any]) -> dict[Place, int]:
    """The lines of this package that `call` comes to on this thread, each with how often."""
    found: dict[Place, int] = {}

    def see(place: Place) -> None:
        found[place] = found.get(place, 0) + 1

    with _traced(see):
        call()
    return found


def interrupt(call: Callable[[], Any], place: Place, time: int, action: Callable[[], Any]) -> bool:
    """Call `call`, and `action` before it comes to `place` for the `time`-th time. Returns whether it came there.

    An action that raises interrupts `call`; what it raises passes through.
    """
    left = time
    reached = False

    def see(current: Place) -> None:
        nonlocal left, reached
        if current == place and left:
            left -= 1
            if not left:
                reached = True
                action()

    with _traced(see):
        call()
    return reached


def raise_interrupted() -> None:
    raise Interrupted


@contextmanager
def _traced(see: Callable[[Place], None]) -> Iterator[None]:
    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(_FOLDERS):
            return None
        if event == "line" and not _takes_no_signal(code, frame.f_lasti):
            see((code.co_filename, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


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
