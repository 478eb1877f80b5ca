"""Detect the vector instruction sets that inductor may use once per machine, not once per process.

In: the directory of the disk cache. Out: nothing; inductor remembers the result itself.
To detect an instruction set, inductor builds a small library for it and loads that library, which takes 5 s of a core.
Inductor first looks for the libraries in its cache folder, but each worker process has a new folder. So a disk cache
next to the one for graphs keeps the libraries.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import zipfile
from pathlib import Path

import torch

from lazy_backend.caching.computation_cache import Key
from lazy_backend.caching.disk import DiskCache
from lazy_backend.caching.folder import CacheRefused
from lazy_backend.lowering.artefacts.environment import processor
from lazy_backend.lowering.compilation.lifeline import OWN_INDUCTOR_FOLDER

_MAX_BYTES = 1 << 24


@functools.cache
def try_instructions(directory: str) -> None:
    """Have inductor detect the instruction sets. Does nothing if the user chose inductor's folder, which persists."""
    # internal, checked on 2.13: the function caches its result, and finds libraries by a hash of their build inputs
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list

    own = os.environ.get(OWN_INDUCTOR_FOLDER)
    if own is None:
        return
    folder = Path(own)
    with contextlib.suppress(CacheRefused, OSError, zipfile.BadZipFile):
        cache = DiskCache(Path(directory) / "instructions", _MAX_BYTES)
        compiler = "\0".join(os.environ.get(name, "") for name in ("CXX", "PATH"))
        key = Key((("torch", torch.__version__), ("processor", processor()), ("compiler", compiler)))
        kept = cache.get(key)
        if kept is not None:
            _unpack(kept, folder)
        elif valid_vec_isa_list():
            cache.put(key, _packed(folder))


def _packed(folder: Path) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(folder.rglob("*.so")):
            archive.write(file, file.relative_to(folder))
    return made.getvalue()


def _unpack(data: bytes, folder: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        archive.extractall(folder)
