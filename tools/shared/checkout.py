"""Which code was measured.

In: nothing. Out: the commit of this checkout, or a digest of the sources where git does not know.
"""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def commit() -> str:
    """The commit of this checkout, `+` if there are changes; empty where git does not know."""
    try:
        named = subprocess.run(
            ["git", "describe", "--always", "--exclude=*", "--abbrev=9", "--dirty=+"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return ""
    return named.stdout.strip()


def sources() -> str:
    """A digest of the package's sources: the same for the same code, with git or without."""
    digest = hashlib.blake2b(digest_size=6)
    for folder in ("lazy_backend", "lowering", "cache"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            digest.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
