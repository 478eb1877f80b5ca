"""Errors and warnings users see. Each says what happened, where in the user's code, and what to do.

Each class names the heading of docs/troubleshooting.md that says more: errors in a note below their text, warnings in
their last line.
"""

from __future__ import annotations

from typing import Self

_PAGE = "docs/troubleshooting.md"


class LazyBackendError(RuntimeError):
    """Base class of this package's own errors."""

    heading = "errors"

    def __new__(cls, *args: object, **kwargs: object) -> Self:  # also for a class that is another library's error, too
        error = super().__new__(cls, *args, **kwargs)
        error.add_note(f"See {_PAGE}#{cls.heading}")
        return error


class DeviceError(LazyBackendError):
    """A device that does not exist, or operands on different devices."""

    heading = "deviceerror-expected-all-tensors-to-be-on-the-same-device"


class ExecutionError(LazyBackendError):
    """A scheduled run failed. Raised once, at the next sync or wait; `__cause__` is the operator's error."""

    heading = "executionerror-and-a-tensor-has-no-value"


class PoisonedTensorError(LazyBackendError):
    """A tensor was used that has no value, because its run failed."""

    heading = "executionerror-and-a-tensor-has-no-value"


class StrictModeError(LazyBackendError):
    """A read or call would cut the graph in strict mode."""

    heading = "strictmodeerror"


class ExecutionNotAllowedError(LazyBackendError):
    """A sync, read or call would run while `lazy_backend.allow_execution(False)` is in effect."""

    heading = "executionnotallowederror"


class TooManyGraphsError(LazyBackendError):
    """More different programs were recorded than `max_different_graphs` allows. The message explains the last one."""

    heading = "compiles-again-and-again"


class CacheError(LazyBackendError):
    """Compiled graphs cannot be exported, or a file of them not be trusted."""

    heading = "cacheerror"


class CaptureError(LazyBackendError):
    """A function cannot be captured or served, or no longer does what was captured."""

    heading = "captureerror"


class TooManyRequestsError(LazyBackendError):
    """A served function runs as many requests as `max_requests` of `serve` allows, and got one more."""

    heading = "toomanyrequestserror"


class LazyBackendWarning(UserWarning):
    """Base class of this package's warnings."""

    heading = "warnings"

    def __str__(self) -> str:
        return f"{super().__str__()}\n  see {_PAGE}#{self.heading}"


class GraphCutWarning(LazyBackendWarning):
    """A graph was cut unintentionally, or grows because no sync cuts it."""

    heading = "cuts"


class CacheWarning(LazyBackendWarning):
    """The disk cache is not used, or not all of a file of compiled graphs."""

    heading = "cachewarning"


class CaptureWarning(LazyBackendWarning):
    """A captured function is recorded at every call instead of being replayed."""

    heading = "capturewarning"


class CompileWarning(LazyBackendWarning):
    """A graph could not be compiled and is interpreted instead."""

    heading = "compilewarning"
