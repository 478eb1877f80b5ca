"""Lines of the user's code.

In: the Python stack. Out: `file:line` of the innermost frame that is neither torch's nor ours. A look-up costs about
2 µs, so it is done only where something new happens: an unseen call, a cut, an error.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import threading
import warnings
from collections.abc import Iterator
from types import CodeType, FrameType

import cachetools
import torch
import typing_extensions

import lazy_backend_autoload
from lazy_backend.ports.cpython import frame_at
from lazy_backend.settings import config

# A trailing separator, so that a user's `lazy_backend_experiments/` is not taken for ours.
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LAYERS = [
    os.path.dirname(os.path.abspath(str(spec.origin)))
    for name in ("lazy_backend.lowering", "lazy_backend.cache")
    if (spec := importlib.util.find_spec(name)) is not None
]
_OURS = (
    *(path + os.sep for path in (_PACKAGE, *_LAYERS)),
    os.path.abspath(str(lazy_backend_autoload.__file__)),  # factories of the device are called from there
)
# torch calls deprecated functions of its own through typing_extensions
_INTERNAL = (
    *_OURS,
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    os.path.abspath(typing_extensions.__file__),
    os.path.dirname(os.path.abspath(cachetools.__file__)) + os.sep,  # we call it
)
# Generated code and `contextlib`, in which no line is the user's. `<stdin>`, `<string>` (python -c) and notebook cells
# are the user's.
_INTERNAL += ("<frozen ", "<eval_with_key", contextlib.__file__)


# Whether a file is internal, for all files seen so far: a look-up takes 40 ns, comparing path prefixes 150 ns.
_known: dict[str, bool] = {}


def _is_internal(file: str) -> bool:
    if len(_known) >= 10_000:  # each piece of generated code has its own file name
        _known.clear()
    found = _known[file] = file.startswith(_INTERNAL)
    return found


def is_internal(file: str) -> bool:
    """Whether a file is PyTorch's or ours, rather than the user's or another library's."""
    return _known[file] if file in _known else _is_internal(file)


def is_ours(file: str) -> bool:
    return file.startswith(_OURS)


def is_of_top_layer(file: str) -> bool:
    """Whether a file is ours, and not of the layers beneath, which know no devices."""
    return file.startswith(_OURS[0]) and not file.startswith(_OURS[1:])


def _user_frame() -> FrameType | None:
    frame: FrameType | None = frame_at(2)
    known = _known
    while frame is not None:
        file = frame.f_code.co_filename
        if not (known[file] if file in known else _is_internal(file)):
            break
        frame = frame.f_back
    return frame


def user_site() -> str:
    """`path/train.py:31` for the line of the user's code that is running, or "" if there is none."""
    frame = _user_frame()
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def user_place() -> tuple[CodeType, int] | None:
    """The instruction of the user's code that is running: two of one line are different places."""
    frame = _user_frame()
    return None if frame is None else (frame.f_code, frame.f_lasti)


def further_frames() -> tuple[str, ...]:
    """The lines of the user's code that led to `user_site`, innermost first: up to `config.source_frames - 1`."""
    left = config.source_frames - 1
    if not left:
        return ()
    found: list[str] = []
    frame = _user_frame()
    while frame is not None and len(found) < left:
        frame = frame.f_back
        if frame is not None and not frame.f_code.co_filename.startswith(_INTERNAL):
            found.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
    return tuple(found)


def packages_on_the_stack() -> frozenset[str]:
    """The top-level packages whose code is running, ours and PyTorch among them."""
    found: set[str] = set()
    frame: FrameType | None = frame_at(1)
    while frame is not None:
        found.add(str(frame.f_globals.get("__name__", "")).partition(".")[0])
        frame = frame.f_back
    return frozenset(found)


def warn_user(message: str, category: type[Warning]) -> None:
    """Issue a warning at the user's line, once per line and text, as Python does by default."""
    frame = _user_frame()
    if frame is None:
        warnings.warn(message, category, stacklevel=2)
        return
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, registry=registry)


_purpose = threading.local()


@contextlib.contextmanager
def reading_for(purpose: str) -> Iterator[None]:
    """Within the block, `purpose` is the cause of this thread's reads: "print" says more than "copy to cpu"."""
    _purpose.text = purpose
    try:
        yield
    finally:
        _purpose.text = None


def purpose_of_read(cause: str) -> str:
    """The purpose of a read, if `reading_for` has set one on this thread; else `cause`."""
    return getattr(_purpose, "text", None) or cause
