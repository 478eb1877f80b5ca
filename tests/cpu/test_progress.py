"""What progress bars and notebooks show."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import grid

import lazy_backend
from lazy_backend import config
from lazy_backend.diagnostics import progress


def step(x: torch.Tensor) -> torch.Tensor:
    made = (x * 2).sum()
    lazy_backend.mark_step()
    return made


def test_what_a_bar_shows_follows_the_steps() -> None:
    config.backend = "aot_eager"
    x = grid("lazy", 3, 4)
    assert lazy_backend.progress() == {"compiling": 0, "cuts": 0}
    seen = []
    for _ in range(3):
        step(x)
        seen.append(lazy_backend.progress()["lazy"])
    assert seen == ["interpreted", "compiled", "compiled"]
    step(x).item()
    (x + 1).sum().item()
    assert lazy_backend.progress()["cuts"] == 1


def test_tqdm_takes_it() -> None:
    tqdm = pytest.importorskip("tqdm")
    with tqdm.tqdm(range(2), disable=False) as bar:
        for _ in bar:
            step(grid("lazy", 3, 4))
            bar.set_postfix(lazy_backend.progress())
        assert "lazy=" in bar.postfix
        assert "cuts=0" in bar.postfix


# ----- notebooks


class Line:
    """What IPython's `display` returns if it is given a `display_id`."""

    def __init__(self, shown: list[str]) -> None:
        self.shown = shown

    def update(self, bundle: dict[str, str], raw: bool) -> None:
        assert raw
        self.shown.append(bundle["text/plain"])


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What IPython is asked to show: it stands in for a kernel's, which needs a process and a client."""
    shown: list[str] = []

    def display(bundle: dict[str, str], raw: bool, display_id: bool) -> Line:
        assert raw
        assert display_id
        shown.append(bundle["text/plain"])
        return Line(shown)

    ipython: Any = types.ModuleType("IPython")
    ipython.get_ipython = lambda: types.SimpleNamespace(kernel=object())
    ipython.display = types.SimpleNamespace(display=display)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setattr(progress, "_PERIOD", 0.0)
    return shown


def test_a_notebook_and_a_bar_show_what_is_being_compiled(notebook: list[str]) -> None:
    config.backend, config.compile = "inductor", "background"
    x = grid("lazy", 3, 4)
    step(x)
    step(x)
    assert lazy_backend.progress()["compiling"] == 1
    assert lazy_backend.wait_for_compiles()
    assert lazy_backend.progress()["compiling"] == 0
    assert notebook[0] == "lazy_backend: compiling 1 graph, 0 s"
    assert notebook[-1].startswith("lazy_backend: waited ")
    shown = len(notebook)
    assert lazy_backend.wait_for_compiles()
    assert len(notebook) == shown  # nothing to wait for


@pytest.mark.parametrize("shell", [None, types.SimpleNamespace()], ids=["IPython not started", "a terminal"])
def test_outside_of_a_notebook_nothing_is_shown(
    shell: object, notebook: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: shell)
    with progress.line_while_compiling() as change:
        change()
    assert notebook == []


def test_a_notebook_shows_an_explanation_as_html_and_folds_what_differs() -> None:
    x, y = grid("lazy", 3, 4), grid("lazy", 5, 4)
    step(x)
    step(y)
    explanation = replace(lazy_backend.explain(), captured=())  # other tests' objects may be alive
    shown = explanation._repr_html_()
    assert shown.startswith("<b>2 syncs of 2 programs")
    assert shown.count("<li>") == 2
    assert "<details><summary>step 2, program 2" in shown
    assert "unlike program 1 in shape" in shown
    assert repr(explanation) == str(explanation)


def test_html_of_an_explanation_is_escaped() -> None:
    exec(compile("step(x)", "<p>.py", "exec"), {"step": step, "x": grid("lazy", 3, 4)})
    shown = lazy_backend.explain()._repr_html_()
    assert "<p>" not in shown
