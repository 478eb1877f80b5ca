"""Build C++ sources as extension modules.

In: the sources of a graph's kernels and of its runner. Out: one shared object per source, as bytes. Runs in the worker
process.

Note [Precompiled headers]
A small unit's build is mostly the parsing of headers: 2.0 of 3.0 s of a core for kernels, 0.3 of 0.9 s for a runner. So
the headers with which sources begin are precompiled, which takes 7 s and 150 MB for kernels, and 1.6 s and 40 MB for
runners. That begins once this process has built so many units that it would have been worth it, in the background: no
compile waits for it. The result is kept in inductor's folder. That folder ends with this process, unless the user chose
one that stays; then later processes use the headers from the start. A compiler that finds a precompiled header made for
other options parses the header's text (GCC), or refuses, and the build is tried again without it (Clang).

Note [Linked to one library]
The linker reads the symbols of every library that it is given: 0.3 s of a core for those of PyTorch. A shared object
may leave its symbols open until it is loaded, when they are looked up in the libraries that it names and in those that
these name. So units name only `libtorch.so`, which is empty and names the others.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from lazy_backend.ports.replacements import inductor

RUNNER = "runner"  # the name of a runner's source

# A runner only calls: optimised as kernels are, it takes three times as long to build.
_RUNNER_FLAGS = ("-O1", "-g0")
# See Note [Linked to one library]. Some systems' compilers leave out libraries of which nothing is used.
_OF_TORCH = ("torch", "torch_cpu", "torch_python")
_LINK_TORCH = ("-Wl,--push-state,--no-as-needed", "-ltorch", "-Wl,--pop-state")

# See Note [Precompiled headers]. Units with the same headers, bytes of disk, seconds.
_WORTH = 4
_SPARE = 1 << 30
_LONGEST = 120.0

_parsed: Counter[Path] = Counter()  # units of this process that parsed their headers, by where these would be
_parsed_lock = threading.Lock()


def build_units(sources: Mapping[str, str]) -> list[bytes]:
    """One shared object per source. Raises whatever inductor raises if there is no C++ compiler."""
    folders = tempfile.TemporaryDirectory()  # in this process's scratch folder
    with folders as folder, ThreadPoolExecutor(inductor.compile_threads()) as pool:
        return list(pool.map(lambda name: _build_unit(Path(folder), name, sources[name]), sources))


def _build_unit(folder: Path, name: str, text: str) -> bytes:
    source = folder / f"{name}.cpp"
    source.write_text(text)
    flags = _RUNNER_FLAGS if name == RUNNER else ()
    header = _precompiled_header(text, flags)
    try:
        return _build(source, flags, header)
    except inductor.cpp_error():
        # retry: the compiler may have been killed for lack of memory; if its front end was, the message does not say so
        return _build(source, flags, None)


def _build(source: Path, flags: Sequence[str], header: Path | None) -> bytes:
    is_linux = sys.platform == "linux"
    options = inductor.cpp_options((*flags, *(_LINK_TORCH if is_linux else ())))
    options.precompiled_header = None if header is None else str(header)
    if is_linux:
        libraries = options.get_libraries()
        libraries[:] = [library for library in libraries if library not in _OF_TORCH]
    builder = inductor.cpp_builder(source.stem, str(source), options, str(source.parent))
    builder.build()
    return Path(builder.get_target_file_path()).read_bytes()


# ----- precompiled headers


def _precompiled_header(text: str, flags: Sequence[str]) -> Path | None:
    """The header with which `text` begins, if it is precompiled. See Note [Precompiled headers]."""
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if folder is None or sys.platform == "win32" or not inductor.settings().cpp_cache_precompile_headers:
        return None
    headers = _headers_of(text)
    path = _header_path(Path(folder), headers, flags)
    if any(path.with_name(path.name + suffix).exists() for suffix in (".gch", ".pch")):
        return path
    with _parsed_lock:
        _parsed[path] += 1
        is_worth_it = _parsed[path] == _WORTH
    if is_worth_it:
        threading.Thread(target=_precompile, args=(path, headers, flags), daemon=True).start()
    return None


def _headers_of(text: str) -> str:
    """The lines before the first that declares something."""
    lines = text.splitlines()
    return "\n".join(itertools.takewhile(lambda line: not line or line.startswith(("#include", "#define")), lines))


def _header_path(folder: Path, headers: str, flags: Sequence[str]) -> Path:
    """Where the text of `headers` is, and next to it the precompiled form. Its name is a hash of all it depends on.

    The C++ compiler itself checks that its own version is the same.
    """
    command = inductor.cpp_builder("", "", inductor.cpp_options(flags, precompiling=True)).get_command_line()
    depends_on = (headers, command, torch.__version__, torch.version.git_version)
    name = hashlib.blake2b("\0".join(depends_on).encode(), digest_size=16).hexdigest()
    return folder / "lazy_backend_headers" / f"{name}.h"


def _precompile(path: Path, headers: str, flags: Sequence[str]) -> None:
    with contextlib.suppress(OSError, inductor.cpp_error()):  # then units parse their headers as before
        path.parent.mkdir(parents=True, exist_ok=True)
        if not _claim(path, headers) or shutil.disk_usage(path.parent).free < _SPARE:
            return
        name = f"{path.name}.{os.getpid()}"
        builder = inductor.cpp_builder(
            name, str(path), inductor.cpp_options(flags, precompiling=True), str(path.parent)
        )
        made = Path(builder.get_target_file_path())
        try:
            builder.build()
            made.replace(path.with_name(path.name + made.suffix))
        finally:
            made.unlink(missing_ok=True)


def _claim(path: Path, headers: str) -> bool:
    """Write the text of the headers. False if another process has, and may still be at work."""
    try:
        with path.open("x") as file:
            file.write(headers)
    except FileExistsError:
        if time.time() - path.stat().st_mtime < _LONGEST:
            return False
        path.write_text(headers)
    return True
