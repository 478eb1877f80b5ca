"""Modules that are changed once a program imports them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from lazy_backend.ports.replacements.when_imported import ChangingFinder, when_imported


@pytest.fixture
def finder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChangingFinder]:
    """A finder of its own, and a folder of modules named `changed_*`."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    yield ChangingFinder()
    for name in [name for name in sys.modules if name.startswith("changed_")]:
        del sys.modules[name]


def double(module: ModuleType) -> None:
    module.value *= 2


def test_a_module_is_changed_before_who_imports_it_goes_on(tmp_path: Path, finder: ChangingFinder) -> None:
    (tmp_path / "changed_inner.py").write_text("value = 1\n")
    (tmp_path / "changed_outer.py").write_text("from changed_inner import value\n")
    finder.add("changed_inner", double)
    assert importlib.import_module("changed_outer").value == 2
    assert importlib.import_module("changed_inner").value == 2, "changed once"
    assert importlib.reload(sys.modules["changed_inner"]).value == 2, "and again if it is loaded again"


def test_an_import_that_fails_may_be_tried_again(tmp_path: Path, finder: ChangingFinder) -> None:
    (tmp_path / "changed_late.py").write_text("import os\nvalue = int(os.environ['CHANGED_VALUE'])\n")
    finder.add("changed_late", double)
    with pytest.raises(KeyError, match="CHANGED_VALUE"):
        importlib.import_module("changed_late")
    with pytest.MonkeyPatch.context() as patches:
        patches.setenv("CHANGED_VALUE", "4")
        assert importlib.import_module("changed_late").value == 8


def test_a_module_that_is_not_there_is_missing_as_before(finder: ChangingFinder) -> None:
    finder.add("changed_nowhere", double)
    with pytest.raises(ModuleNotFoundError, match="changed_nowhere"):
        importlib.import_module("changed_nowhere")


def test_a_module_that_was_imported_is_changed_at_once() -> None:
    found: list[ModuleType] = []
    when_imported("json", found.append)
    assert found == [sys.modules["json"]]
