"""Errors and warnings users see. Each says what happened, where in the user's code, and what to do."""

from __future__ import annotations


class LazyBackendError(RuntimeError):
    """Base class of this package's own errors."""


class DeviceError(LazyBackendError):
    """A device that does not exist, or operands on different devices."""


class ExecutionError(LazyBackendError):
    """A scheduled run failed. Raised once, at the next sync or wait; `__cause__` is the operator's error."""


class PoisonedTensorError(LazyBackendError):
    """A tensor was used that has no value, because its run failed."""


class StrictModeError(LazyBackendError):
    """A read or call would cut the graph in strict mode."""


class ExecutionNotAllowedError(LazyBackendError):
    """A sync, read or call would run while `lazy_backend.allow_execution(False)` is in effect."""


class TooManyGraphsError(LazyBackendError):
    """More different programs were recorded than `max_different_graphs` allows. The message explains the last one."""


class CacheError(LazyBackendError):
    """Compiled graphs cannot be exported, or a file of them not be trusted."""


class CaptureError(LazyBackendError):
    """A function cannot be captured or served, or no longer does what was captured."""


class LazyBackendWarning(UserWarning):
    """Base class of this package's warnings."""


class GraphCutWarning(LazyBackendWarning):
    """A graph was cut unintentionally, or grows because no sync cuts it."""


class CacheWarning(LazyBackendWarning):
    """The disk cache is not used, or not all of a file of compiled graphs."""


class CaptureWarning(LazyBackendWarning):
    """A captured function is recorded at every call instead of being replayed."""


class CompileWarning(LazyBackendWarning):
    """A graph could not be compiled and is interpreted instead."""
