"""Tracebacks that end at the user's line.

In: an exception on its way out of this package. Out: the same exception; its traceback keeps the frames of the user's
code and of other libraries, and drops ours and those of PyTorch below us. With `LAZY_DEBUG` set nothing is hidden.
Modelled on JAX's `traceback_util`.

Note [Where frames are hidden]
Frames are hidden wherever the user's code enters this package: in `dispatch` for operators, the kernels registered with
PyTorch, the public functions and the methods of `LazyTensor`. Nothing extra happens there unless an exception is
raised. A bare `raise` adds no entry for its own frame (CPython 3.11 and later), so the exception looks as if C code had
raised it, as in eager. Frames of PyTorch's own Python between the user's line and an operator, such as
`nn.Module.__call__`, stay, as in eager; only when an uncaught exception is printed are they hidden too.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from lazy_backend.errors import LazyBackendError
from lazy_backend.errors.sites import is_internal, is_ours, user_site
from lazy_backend.ports.compilers import shortened_error
from lazy_backend.ports.cpython import leave_interrupted_blocks
from lazy_backend.settings import config

P = ParamSpec("P")
R = TypeVar("R")

# Errors that none of our checks raises on purpose: one from a line of ours is a bug, and its report needs the frames.
_DEFECTS = (AssertionError, AttributeError, KeyError, NameError)


def hide_internals(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, whose exceptions have tracebacks without frames of this package."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            hide_frames(error)
            raise

    return call


def hide_frames(error: BaseException) -> None:
    """Remove internal frames from the traceback of `error` and of its causes. For `except` blocks, before a `raise`."""
    leave_interrupted_blocks(error)
    if config.debug:
        return
    _forget_what_we_handled(error)
    chained: BaseException | None = error
    seen: set[int] = set()
    while chained is not None and id(chained) not in seen:  # `raise error from error` makes a ring
        seen.add(id(chained))
        if not _is_defect(chained):
            chained.__traceback__ = _without_internals(chained.__traceback__)
        chained = chained.__cause__
    _mark(error)


def _forget_what_we_handled(error: BaseException) -> None:
    """Drop exceptions that this package caught itself: "During handling of" them would mean nothing to the user."""
    while (handled := error.__context__) is not None and handled is not error.__cause__ and _was_caught_by_us(handled):
        error.__context__ = handled.__context__


def _was_caught_by_us(error: BaseException) -> bool:
    caught_in = error.__traceback__
    return caught_in is not None and is_ours(caught_in.tb_frame.f_code.co_filename)


def _is_defect(error: BaseException) -> bool:
    """Whether `error` shows a bug of ours: its kind is never raised on purpose, and a line of ours raised it."""
    if not isinstance(error, _DEFECTS) and "internal error" not in str(error):
        return False
    entry = error.__traceback__
    while entry is not None and entry.tb_next is not None:
        entry = entry.tb_next
    return entry is not None and is_ours(entry.tb_frame.f_code.co_filename)


def _without_internals(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """The entries of the user's code and other libraries, in order."""
    entries = []
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    kept: types.TracebackType | None = None
    for entry in reversed(entries):
        if not is_internal(entry.tb_frame.f_code.co_filename):
            # None if the instruction has no line, which an interruption can hit; the constructor takes -1 for that
            line = -1 if entry.tb_lineno is None else entry.tb_lineno
            kept = types.TracebackType(kept, entry.tb_frame, entry.tb_lasti, line)
    return kept


# ----- torch.compile


def refusal_to_trace(message: str) -> Exception:
    """The error for a compiler that must not trace lazy tensors.

    Dynamo puts 200 lines of frames below the user's line, and drops them only from errors of its own class.
    """
    passed_on = None if config.debug else shortened_error()
    if passed_on is None:
        error: Exception = NotImplementedError(message)
    else:
        error = _refusal_of(passed_on)(f"{message}\n  at {user_site()}")
    _mark(error)
    return error


@functools.cache
def _refusal_of(passed_on: type[Exception]) -> type[Exception]:
    class TracingError(LazyBackendError, passed_on):  # type: ignore[valid-type, misc]
        """A compiler would trace lazy tensors."""

        def __init__(self, message: str) -> None:
            super().__init__(message, first_useful_frame=None)  # type: ignore[call-arg]
            self._message = message

        def __str__(self) -> str:
            return self._message  # without Dynamo's advice on how to see its frames

        def remove_dynamo_frames(self) -> Exception:
            return self.with_traceback(None)

    TracingError.__qualname__, TracingError.__module__ = "TracingError", LazyBackendError.__module__
    return TracingError


# ----- uncaught exceptions

# An attribute set on the exceptions that passed through here.
_MARK = "_lazy_backend_hides_frames"


def _mark(error: BaseException) -> None:
    setattr(error, _MARK, True)
    _watch_the_end_of_the_program()


@functools.cache
def _watch_the_end_of_the_program() -> None:
    """Install an excepthook, at our first exception, that prints ours without PyTorch's frames above us.

    The previous hook does the printing, of ours and of all other exceptions.
    """
    print_error = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None) -> None:
        if hasattr(error, _MARK) and not config.debug:
            traceback = error.__traceback__ = _without_internals(traceback)
        print_error(kind, error, traceback)

    sys.excepthook = excepthook
