"""Which vector instructions inductor uses: those of the processor, as long as the C++ compiler takes them.

In: a block that compiles; after a refusal, the directory of the disk cache. Out: nothing; inductor remembers the result
itself.

Note [Instructions are not tried]
To detect an instruction set, inductor builds a small library for it and loads that library in a new process: up to five
of them before the first compile, 2 to 6 s of a core. But the processor says what it knows, and so does PyTorch, whose
own kernels use the same functions. Only the C++ compiler may not know an option; then the first compile fails, and
inductor detects after all. It first looks for the libraries in its cache folder, but each worker process has a new
folder. So a disk cache next to the one for graphs keeps the libraries.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch

from lazy_backend.cache.computation_cache import Key
from lazy_backend.cache.disk import DiskCache
from lazy_backend.cache.folder import CacheRefused
from lazy_backend.lowering.artefacts.environment import processor
from lazy_backend.lowering.compilation.lifeline import OWN_INDUCTOR_FOLDER
from lazy_backend.ports.replacements import inductor

_MAX_BYTES = 1 << 24


class NotAssumed(Exception):
    """Why the processor's instructions are not used untried."""


# Why instructions were refused: from then on, inductor detects what the C++ compiler knows.
_refused: list[str] = []


@contextlib.contextmanager
def assumed_instructions() -> Iterator[None]:
    """Within this block inductor uses the processor's instructions. See Note [Instructions are not tried].

    Raises `NotAssumed` if they were refused before, if the user's settings say something about them, or if PyTorch was
    built without them. If the C++ compiler raises within the block, they are refused from then on.
    """
    if _refused or not inductor.may_assume_instructions():
        raise NotAssumed
    try:
        with inductor.untried_instructions() as macros:
            # the same capability, which ATEN_CPU_CAPABILITY limits for both
            if macros and f"CPU_CAPABILITY_{torch.backends.cpu.get_cpu_capability()}" not in macros:
                raise NotAssumed
            yield
    except (inductor.cpp_error(), NotAssumed) as error:
        _refused.append(type(error).__name__)
        inductor.forget_instructions()
        raise


@functools.cache
def try_instructions(directory: str) -> None:
    """Have inductor detect the instruction sets, or take what it built for another process of this machine.

    Does nothing if the user chose inductor's folder, which persists.
    """
    # inductor keeps what it found, and finds libraries by a hash of their build inputs
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
        elif inductor.tried_instructions():
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
