"""Ports: what a feature expects of PyTorch's and Python's internals, and whether it is so here.

In: names with signatures, sources, probes. Out: `Port.fits`, the replacements that fit, and a list of all. See Note
[Ports].
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from lazy_backend.ports.cpython import pass_on_interruption

# The versions of PyTorch on which all tests were run.
VERSIONS = ("2.13", "2.14", "2.15")

# Names of ports to leave off, separated by commas: for tests, and to find out whether a port is at fault.
VARIABLE = "LAZY_BACKEND_PORTS_OFF"


class PortWarning(UserWarning):
    """A port that does not fit this PyTorch, and what is lost without it."""


class DoesNotFit(Exception):
    """An expectation that is not met. The text says what was expected and what is there."""


@dataclass(frozen=True, slots=True)
class KnownSource:
    """A function whose source must be one that was read: what replaces it repeats or relies on its inside.

    `hashes` are those of `source_hash`, one for each source that is known.
    """

    path: str
    hashes: tuple[str, ...]

    def check(self) -> None:
        found = source_hash(reach(self.path))
        if found not in self.hashes:
            raise DoesNotFit(f"{self.path} has a source that is not known ({found})")


@dataclass(frozen=True, slots=True)
class Probe:
    """A call that takes microseconds, and must return True. `says` is what was expected."""

    says: str
    run: Callable[[], bool] = field(repr=False)

    def check(self) -> None:
        if not self.run():
            raise DoesNotFit(f"expected: {self.says}")


@dataclass(frozen=True, slots=True)
class Name:
    """A name that must be there; with parameters in parentheses, one that takes them, in this order, as in `f(a, b)`.

    The parameters of a function of C++, which has no signature, are not checked.
    """

    path: str

    def check(self) -> None:
        path, _, parameters = self.path.partition("(")
        found = reach(path)
        if not parameters:
            return
        try:
            taken = list(inspect.signature(found).parameters)
        except ValueError:
            return
        expected = [one.strip() for one in parameters.rstrip(")").split(",") if one.strip()]
        if taken[: len(expected)] != expected:
            raise DoesNotFit(f"{path} takes ({', '.join(taken)}), expected ({', '.join(expected)})")


Expectation = Name | KnownSource | Probe


class Port:
    """The internals that one feature needs. Made once each, in `table`.

    `expects`: expectations, or names as text. `without`: what users lose where one is not met, as a sentence.
    `essential`: there are no lazy tensors without it.
    """

    def __init__(self, name: str, *expects: Expectation | str, without: str, essential: bool = False) -> None:
        self.name = name
        self.expects = tuple(Name(one) if isinstance(one, str) else one for one in expects)
        self.without = without
        self.essential = essential
        self._obstacle: str | None = None
        self._is_checked = False
        self._is_said = False
        ports[name] = self

    def obstacle(self) -> str | None:
        """The expectation that is not met here; None if all are. Checked at the first call."""
        if not self._is_checked:
            self._obstacle, self._is_checked = self._find_obstacle(), True
        return self._obstacle

    def fits(self) -> bool:
        """Whether the feature can be had. If not, that is said once per process, by a `PortWarning`."""
        obstacle = self.obstacle()
        if obstacle is not None and not self._is_said:
            self._is_said = True
            say(str(self))
        return obstacle is None

    def turn_off(self, obstacle: str) -> None:
        """Have the port be off from now on, as it failed when it was used. Said once, like any other."""
        self._obstacle, self._is_checked = obstacle, True
        self.fits()

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute of a module or class of PyTorch, if the port fits. See `replaced`."""
        if self.fits() and not hasattr(owner, name):
            self.turn_off(f"there is no {getattr(owner, '__name__', owner)}.{name}")
        elif self.fits():
            replaced.append(Replaced(self, owner, name, getattr(owner, name, None), value))
            setattr(owner, name, value)

    @property
    def state(self) -> str:
        """For lists: "fits", "off" or, before the feature was used, "not used yet"."""
        return "not used yet" if not self._is_checked else "fits" if self._obstacle is None else "off"

    def __str__(self) -> str:
        if self.obstacle() is None:
            return f"{self.name}: fits PyTorch {torch.__version__}"
        return (
            f"lazy_backend: {self.name} is off with PyTorch {torch.__version__}: {self._obstacle}\n"
            f"  without it, {self.without}"
        )

    def _find_obstacle(self) -> str | None:
        if self.name in os.environ.get(VARIABLE, "").split(","):
            return f"it is turned off by {VARIABLE}"
        try:
            with torch.inference_mode(False):  # whatever the mode in which the package is imported
                for expectation in self.expects:
                    expectation.check()
        except DoesNotFit as misfit:
            return str(misfit)
        except Exception as error:  # an import or a probe that fails in ways of its own
            pass_on_interruption(error)
            return f"{type(error).__name__}: {error}"
        return None


@dataclass(frozen=True, slots=True)
class Replaced:
    """One attribute of PyTorch that a port replaced."""

    port: Port
    owner: Any
    name: str
    original: Any
    value: Any

    def __str__(self) -> str:
        owner = self.owner if isinstance(self.owner, type) else None
        module = self.owner.__module__ if owner else getattr(self.owner, "__name__", type(self.owner).__name__)
        return f"{module}.{owner.__qualname__}.{self.name}" if owner else f"{module}.{self.name}"


def say(text: str) -> None:
    """Warn. Where warnings are errors, write instead: what imports or uses a port is in the midst of something."""
    try:
        warnings.warn(text, PortWarning, stacklevel=3)
    except PortWarning:
        print(text, file=sys.stderr)


ports: dict[str, Port] = {}
replaced: list[Replaced] = []


def reach(path: str) -> Any:
    """The object at a dotted path, whose modules are imported. Raises `DoesNotFit` if there is none."""
    parts = path.split(".")
    found: Any = importlib.import_module(parts[0])
    for place, part in enumerate(parts[1:], 2):
        try:
            found = getattr(found, part)
        except AttributeError:
            if not isinstance(found, ModuleType):
                raise DoesNotFit(f"there is no {'.'.join(parts[:place])}") from None
            try:
                found = importlib.import_module(".".join(parts[:place]))
            except ImportError:
                raise DoesNotFit(f"there is no {'.'.join(parts[:place])}") from None
    return found


def optional(path: str, instead: Any = None) -> Any:
    """The object at a dotted path, for a module that binds it at import; `instead` if there is none."""
    try:
        return reach(path)
    except (DoesNotFit, ImportError):
        return instead


def source_hash(function: Any) -> str:
    """Eight hex digits of a function's source, without its comments' and lines' ends."""
    lines = (line.rstrip() for line in inspect.getsource(inspect.unwrap(function)).splitlines())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]


def renew_imported_names() -> None:
    """Give what was replaced to modules that had imported the original by name, as `from torch.amp import custom_fwd`.

    A program may import such names before it uses the device. Not to PyTorch's own modules, of which each port replaces
    the names that it means. Looks at every module once: 5 ms for 2,000 of them.
    """
    functions = {
        id(one.original): one for one in replaced if isinstance(one.owner, ModuleType) and callable(one.original)
    }
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if not isinstance(module, ModuleType) or names is None:
            continue
        for name, value in list(names.items()):
            one = functions.get(id(value))
            if one is not None and module.__name__.partition(".")[0] not in ("torch", "lazy_backend"):
                names[name] = one.value


@functools.cache
def version() -> str:
    """Major and minor version of PyTorch, as in "2.13"."""
    return ".".join(torch.__version__.split("+")[0].split(".")[:2])


def check_version() -> None:
    """Say once that the package was not run on this PyTorch, if so. The ports that fit are used all the same.

    And that `VARIABLE` names what is no port.
    """
    unknown = [name for name in os.environ.get(VARIABLE, "").split(",") if name and name not in ports]
    if unknown:
        say(f"{VARIABLE} names what is no port: {', '.join(unknown)}\n  `python -m lazy_backend` lists all ports")
    if version() not in VERSIONS:
        say(
            f"lazy_backend was not run on PyTorch {torch.__version__}, but on {VERSIONS[0]} to {VERSIONS[-1]}\n"
            "  `python -m lazy_backend` shows what of it fits this version"
        )


def ports_off() -> list[str]:
    """A text for each port that was asked for and is off."""
    return [str(port) for port in ports.values() if port.state == "off"]


def check_all() -> Iterator[Port]:
    """All ports, each checked now. Imports what they reach, among it PyTorch's compiler: seconds."""
    for port in ports.values():
        port.obstacle()
        yield port
