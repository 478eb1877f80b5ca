"""Tracebacks that end at the user's line.

In: an exception on its way out of this package. Out: the same exception; its traceback has the frames of the user's
code and of other libraries, without ours and those of PyTorch below us. With `LAZY_DEBUG` set nothing is hidden.
The model is JAX's `traceback_util`.

Note [Where frames are hidden]
Wherever the user's code enters this package: `dispatch` for operators, the kernels registered with PyTorch, the public
functions and the methods of `LazyTensor`. Nothing happens there unless something is raised. A bare `raise` adds no
entry for its own frame (CPython 3.11 and later), so what it raises looks as if C code had raised it, as in eager.
What PyTorch's own Python adds between the user's line and an operator, as `nn.Module.__call__` does, stays as in
eager, except where nobody catches the exception and it is printed at last.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from lazy_backend.errors import LazyBackendError
from lazy_backend.errors.sites import is_internal, is_ours, user_site
from lazy_backend.settings import config

P = ParamSpec("P")
R = TypeVar("R")

# What no check of ours raises on purpose: raised by a line of ours it is a defect, and its report needs the frames.
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
    """Take internal frames out of the traceback of `error` and of its causes. For `except` blocks before a `raise`."""
    if config.debug:
        return
    _forget_what_we_handled(error)
    chained: BaseException | None = error
    while chained is not None:
        if not _is_defect(chained):
            chained.__traceback__ = _without_internals(chained.__traceback__)
        chained = chained.__cause__
    _mark(error)


def _forget_what_we_handled(error: BaseException) -> None:
    """Drop exceptions that we caught ourselves: "during handling of" them says nothing to the user."""
    while (handled := error.__context__) is not None and handled is not error.__cause__ and _was_caught_by_us(handled):
        error.__context__ = handled.__context__


def _was_caught_by_us(error: BaseException) -> bool:
    caught_in = error.__traceback__
    return caught_in is not None and is_ours(caught_in.tb_frame.f_code.co_filename)


def _is_defect(error: BaseException) -> bool:
    """Whether only a defect of this package raises such an exception from there."""
    if not isinstance(error, _DEFECTS) and "internal error" not in str(error):
        return False
    entry = error.__traceback__
    while entry is not None and entry.tb_next is not None:
        entry = entry.tb_next
    return entry is not None and is_ours(entry.tb_frame.f_code.co_filename)


def _without_internals(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """The entries of user code, in order."""
    entries = []
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    kept: types.TracebackType | None = None
    for entry in reversed(entries):
        if not is_internal(entry.tb_frame.f_code.co_filename):
            # None where an instruction has no line, as an interruption may come there; -1 says so to the constructor
            line = -1 if entry.tb_lineno is None else entry.tb_lineno
            kept = types.TracebackType(kept, entry.tb_frame, entry.tb_lasti, line)
    return kept


# ----- torch.compile


def refusal_to_trace(message: str) -> Exception:
    """The error for a compiler that asks for what it must not have.

    Dynamo, 200 lines away from the user's, passes errors of a class of its own on without its frames. Internal, checked
    on 2.13: `ShortenTraceback`, and where the translator of the function that is being traced stands.
    """
    errors, translators = (sys.modules.get(f"torch._dynamo.{name}") for name in ("exc", "symbolic_convert"))
    is_tracing = translators is not None and getattr(translators.tls, "current_tx", None) is not None
    if errors is None or not is_tracing or config.debug:
        error: Exception = NotImplementedError(message)
    else:
        error = _refusal_of(errors.ShortenTraceback)(f"{message}\n  at {user_site()}")
    _mark(error)
    return error


@functools.cache
def _refusal_of(passed_on: type[Exception]) -> type[Exception]:
    class TracingError(LazyBackendError, passed_on):  # type: ignore[valid-type, misc]
        """Something would trace lazy tensors."""

        def __init__(self, message: str) -> None:
            super().__init__(message, first_useful_frame=None)  # type: ignore[call-arg]
            self._message = message

        def __str__(self) -> str:
            return self._message  # without what Dynamo adds: how to see its frames

        def remove_dynamo_frames(self) -> Exception:
            return self.with_traceback(None)

    TracingError.__qualname__, TracingError.__module__ = "TracingError", LazyBackendError.__module__
    return TracingError


# ----- exceptions that nobody catches

# Set on the exceptions that passed through here.
_MARK = "_lazy_backend_hides_frames"


def _mark(error: BaseException) -> None:
    setattr(error, _MARK, True)
    _watch_the_end_of_the_program()


@functools.cache
def _watch_the_end_of_the_program() -> None:
    """From our first exception on, one of ours that ends the program is printed without PyTorch's frames above us.

    It is printed by whoever printed exceptions before, and so are all others.
    """
    print_error = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None) -> None:
        if hasattr(error, _MARK) and not config.debug:
            traceback = error.__traceback__ = _without_internals(traceback)
        print_error(kind, error, traceback)

    sys.excepthook = excepthook
