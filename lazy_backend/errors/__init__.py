"""Errors and warnings users see. Each says what happened, where in the user's code, and what to do."""

from __future__ import annotations


class LazyBackendError(RuntimeError):
    """Base class of what this package raises on its own behalf."""


class DeviceError(LazyBackendError):
    """A device that does not exist, or operands on different devices."""


class ExecutionError(LazyBackendError):
    """A scheduled run failed. Raised once, at the next sync or wait; `__cause__` is what the operator raised."""


class PoisonedTensorError(LazyBackendError):
    """A tensor whose run failed was used. It has no value."""


class StrictModeError(LazyBackendError):
    """Something would cut the graph in strict mode."""


class ExecutionNotAllowedError(LazyBackendError):
    """Something was to run while `lazy_backend.allow_execution(False)` holds."""


class TooManyGraphsError(LazyBackendError):
    """More different programs were recorded than `max_different_graphs` allows. The text explains the last one."""


class CaptureError(LazyBackendError):
    """A function cannot be captured, or does something else than what was captured."""


class LazyBackendWarning(UserWarning):
    """Base class of this package's warnings."""


class GraphCutWarning(LazyBackendWarning):
    """A graph was cut where nobody asked for it, or grows because nobody cuts it."""


class CacheWarning(LazyBackendWarning):
    """The disk cache is not used."""


class CaptureWarning(LazyBackendWarning):
    """A captured function is recorded at every call."""


class CompileWarning(LazyBackendWarning):
    """A graph could not be compiled and is interpreted instead."""
