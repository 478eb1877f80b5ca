"""Captured methods: what `@capture` in a class gives for each instance.

In: a captured function of a class, and an instance. Out: the captured method of that instance, made at first use. It is
kept in the instance's `__dict__`, as `functools.cached_property` keeps values, so it goes when the instance goes.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

_NAME = "_lazy_backend_captured"


class Bindable(Protocol):
    def bind(self, instance: Any) -> Any: ...


class CapturedMethods:
    """The captured methods of one instance. A copy of the instance, or one that was pickled, starts without any."""

    __slots__ = ("methods",)

    def __init__(self) -> None:
        self.methods: dict[Bindable, Any] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> CapturedMethods:
        return CapturedMethods()

    def __copy__(self) -> CapturedMethods:
        return CapturedMethods()

    def __reduce__(self) -> tuple[Any, ...]:
        return CapturedMethods, ()


def bound_to(captured: Any, instance: Any) -> Any:
    """The captured method of `instance`; for an object without a `__dict__`, the function with its first argument."""
    attributes = getattr(instance, "__dict__", None)
    if type(attributes) is not dict:
        return functools.partial(captured, instance)
    found = attributes.get(_NAME)
    if found is None:
        found = attributes.setdefault(_NAME, CapturedMethods())
    method = found.methods.get(captured)
    return found.methods.setdefault(captured, captured.bind(instance)) if method is None else method
