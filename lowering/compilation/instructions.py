"""Which vector instructions inductor may use, found out once per machine and not once per process.

In: the directory of the disk cache. Out: nothing; inductor knows. It builds a small library for each set of
instructions and loads it, which takes 5 s of a core, and looks for the libraries in its own folder first. That folder
is new with each of our processes, so the libraries are kept in a disk cache beside the one of graphs.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import zipfile
from pathlib import Path

import torch

from lazy_backend.cache.computation_cache import Key
from lazy_backend.cache.disk import DiskCache
from lazy_backend.cache.folder import CacheRefused
from lazy_backend.lowering.compilation.environment import processor
from lazy_backend.lowering.compilation.lifeline import OWN_INDUCTOR_FOLDER

_MAX_BYTES = 1 << 24


@functools.cache
def try_instructions(directory: str) -> None:
    """Have inductor find out. Does nothing where the user chose inductor's folder: there they stay anyway."""
    # internal, checked on 2.13: remembers its result, and looks for files by the hash of what they are made from
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
