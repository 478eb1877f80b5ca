"""C++ sources become shared objects, with headers that are parsed once they are worth it."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch._inductor.config
from torch._inductor.cpu_vec_isa import pick_vec_isa

from lazy_backend.lowering.compilation import cpp_units

SOURCE = """
#include <cstdint>
#define ANSWER 42

extern "C" int64_t answer() { return ANSWER; }
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Inductor's folder."""
    monkeypatch.setattr(cpp_units, "_WORTH", 2)
    # else inductor builds more programs that find out what the processor can do; some it builds in any case
    with torch._inductor.config.patch({"cpp.vec_isa_ok": True}):
        pick_vec_isa()
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        yield tmp_path


def build(source: str = SOURCE) -> bytes:
    (built,) = cpp_units.build_units({"kernels0": source})
    return built


def precompiled(folder: Path) -> list[Path]:
    return list(folder.glob("lazy_backend_headers/*.h.?ch"))


def build_until_precompiled(folder: Path) -> Path:
    build()
    assert not list(folder.iterdir())
    build()
    end = time.monotonic() + 60.0
    while not precompiled(folder) and time.monotonic() < end:
        time.sleep(0.01)
    (found,) = precompiled(folder)
    return found


def answer(built: bytes, folder: Path) -> int:
    file = folder / "built.so"
    file.write_bytes(built)
    return int(ctypes.CDLL(str(file)).answer())


def test_headers_are_precompiled_once_that_is_worth_it(folder: Path) -> None:
    found = build_until_precompiled(folder)
    text = found.with_suffix("")
    assert text.read_text() == "\n#include <cstdint>\n#define ANSWER 42\n"
    # the compiler prefers the precompiled form to the text
    text.write_text("#error this was to be precompiled\n")
    assert answer(build(), folder) == 42


def test_a_damaged_precompiled_header_is_done_without(folder: Path) -> None:
    found = build_until_precompiled(folder)
    found.write_bytes(found.read_bytes()[: found.stat().st_size // 2])
    assert answer(build(), folder) == 42


def test_other_headers_have_their_own(folder: Path) -> None:
    build_until_precompiled(folder)
    assert answer(build(SOURCE.replace("42", "43")), folder) == 43
    assert len(precompiled(folder)) == 1


def test_what_another_process_precompiles_is_left_to_it(folder: Path) -> None:
    headers = cpp_units._headers_of(SOURCE)
    path = cpp_units._header_path(folder, headers, ())
    path.parent.mkdir()
    path.write_text(headers)
    cpp_units._precompile(path, headers, ())
    assert not precompiled(folder)
    os.utime(path, (0, 0))  # that process has ended long ago
    cpp_units._precompile(path, headers, ())
    assert len(precompiled(folder)) == 1


def test_a_full_disk_gets_no_precompiled_headers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp_units, "_SPARE", 1 << 62)
    headers = cpp_units._headers_of(SOURCE)
    cpp_units._precompile(cpp_units._header_path(folder, headers, ()), headers, ())
    assert not precompiled(folder)


def test_units_name_one_library_of_pytorch() -> None:
    built = build()
    assert b"libtorch.so" in built
    assert b"libtorch_cpu" not in built
