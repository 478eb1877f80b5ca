"""Lines of the user's code.

Out: `file:line` of the innermost frame that is neither torch's nor ours. Costs about 2 µs, so it is asked for only
where something new happens: an unseen call, a cut, an error.
"""

from __future__ import annotations

import os
import sys
from types import FrameType

import torch

# A trailing separator, so that a user's `lazy_backend_experiments/` is not taken for ours.
_PACKAGE = os.path.dirname(os.path.abspath(__file__))
_LAYERS = [
    os.path.dirname(os.path.abspath(sys.modules[name].__file__ or ""))
    for name in ("lazy_backend.lowering", "lazy_backend.cache")
]
_INTERNAL = tuple(path + os.sep for path in (_PACKAGE, *_LAYERS, os.path.dirname(os.path.abspath(torch.__file__))))
# Generated code that is nobody's line. `<stdin>`, `<string>` (python -c) and notebook cells are the user's.
_INTERNAL += ("<frozen ", "<eval_with_key")


def user_site() -> str:
    """`path/train.py:31` for the line of the user's code that is running, or "" if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_INTERNAL):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
