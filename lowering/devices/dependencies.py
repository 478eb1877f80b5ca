"""Dependencies of compiled code: names, scopes, and functions that read and set the values.

In: a switch of PyTorch. Out: an entry for the table of `artefacts/environment.py`, Note [What a key depends on].
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lazy_backend.ports.replacements import inductor


class Scope(enum.Flag):
    """Where a dependency counts. See Note [What a key depends on]."""

    PROCESS = enum.auto()
    COMPILE = enum.auto()
    ARTEFACT = enum.auto()
    CODE = enum.auto()


@dataclass(frozen=True, slots=True)
class Dependency:
    """`name`: as explanations print it. `read`: gets the value, JSON or a dtype. `follow`: sets it, where possible."""

    name: str
    scope: Scope
    read: Callable[[], Any]
    follow: Callable[[Any], object] | None = None


SWITCHED = Scope.PROCESS | Scope.COMPILE


def _precision(backend: str, operator: str, scope: Scope) -> Dependency:
    """The precision of a library's float32 operators. `set_float32_matmul_precision` and `allow_tf32` set it too."""
    assert inductor.get_precision is not None
    read = functools.partial(inductor.get_precision, backend, operator)

    def follow(value: str) -> None:
        if read() != value and inductor.set_precision is not None:
            inductor.set_precision(backend, operator, value)

    return Dependency(f"{backend} {operator} precision", scope, read, follow)


def precisions(backend: str, scope: Scope) -> tuple[Dependency, ...]:
    """The precisions that this PyTorch has for a library."""
    return tuple(
        _precision(backend, operator, scope)
        for operator in ("matmul", "conv", "rnn")
        if inductor.has_precision(backend, operator)
    )


def attribute(name: str, of: Any, attribute: str, read: Callable[[], Any], scope: Scope) -> Dependency:
    """A switch of `torch.backends`, read by the function behind it: 0.1 µs instead of 0.6 µs."""
    return Dependency(name, scope, read, functools.partial(setattr, of, attribute))
