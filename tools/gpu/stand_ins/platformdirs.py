"""Stands in for the package `platformdirs` where it is not installed, so that `gpu_check.py` runs on a bare machine.

In and out: the one function that this package uses. Not for production: install what pyproject.toml names.
"""

from __future__ import annotations

import os
from pathlib import Path


def user_cache_path(name: str, appauthor: object = None) -> Path:
    """The user's cache directory for a program, as on Linux."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / name
