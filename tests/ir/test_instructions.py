"""What inductor builds to find out about the processor is kept for the next process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from lazy_backend.lowering.compilation.instructions import try_instructions
from lazy_backend.lowering.compilation.lifeline import OWN_INDUCTOR_FOLDER

Find = Callable[[str], list[str]]


@pytest.fixture
def find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Find]:
    """Has the instructions found by a process with this folder. Returns what was built for it in all processes."""
    built: list[str] = []

    def find_in(folder: str) -> list[str]:
        file = tmp_path / folder / "ab" / "library.so"

        def list_instructions() -> list[str]:
            if not file.exists():
                file.parent.mkdir(parents=True)
                file.write_bytes(b"\x7fELF")
                built.append(folder)
            return ["avx2"]

        module = ModuleType("torch._inductor.cpu_vec_isa")
        module.valid_vec_isa_list = list_instructions  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "torch._inductor.cpu_vec_isa", module)
        monkeypatch.setenv(OWN_INDUCTOR_FOLDER, str(tmp_path / folder))
        try_instructions.cache_clear()
        try_instructions(str(tmp_path / "cache"))
        list_instructions()  # inductor asks again when it compiles
        return built

    yield find_in
    try_instructions.cache_clear()


def test_the_second_process_builds_nothing(find: Find, tmp_path: Path) -> None:
    assert find("first") == ["first"]
    assert find("second") == ["first"]
    assert (tmp_path / "second" / "ab" / "library.so").read_bytes() == b"\x7fELF"


def test_what_was_kept_and_is_broken_is_built_again(find: Find, tmp_path: Path) -> None:
    find("first")
    (entry,) = tmp_path.glob("cache/**/*.entry")
    entry.write_bytes(entry.read_bytes()[:-5])
    assert find("second") == ["first", "second"]


def test_a_cache_that_cannot_be_used_costs_only_time(find: Find, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no directory")
    assert find("first") == ["first"]
    assert find("second") == ["first", "second"]


def test_in_a_folder_that_the_user_chose_nothing_is_kept(
    find: Find, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find("first")
    monkeypatch.delenv(OWN_INDUCTOR_FOLDER)
    try_instructions.cache_clear()
    try_instructions(str(tmp_path / "other"))
    assert not (tmp_path / "other").exists()
