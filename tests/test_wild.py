"""`bench.py --wild`: a program of a package that the tests have, and the rows of those that give no figures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
from benchmarks import wild, wild_programs


@pytest.mark.scenario
def test_a_program_takes_turns_with_eager(tmp_path: Path) -> None:
    result = wild.measure("lightning_gan", "small", threads=1, rounds=2, cache=str(tmp_path))
    losses = [result["settled"][device]["losses"] for device in wild.DEVICES]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert [len(pair) for pair in result["pairs"]] == [2, 2]
    assert all(window["steps"] and window["seconds"] >= 0.5 for pair in result["pairs"] for window in pair)


@pytest.mark.scenario
def test_a_program_that_does_not_answer_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wild, "_PATIENCE", 0.5)
    result = wild.measure("lightning_gan", "small", threads=1, rounds=2, cache=str(tmp_path))
    assert result == {"failure": "cpu: no answer to `settle` within 0 s"}


def test_a_package_that_is_not_installed_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    program = wild_programs.Program(lambda steps: None, ("torch", "no_such_package"), {"small": {}}, draws=False)
    monkeypatch.setitem(wild_programs.PROGRAMS, "missing", program)
    about = {"program": "missing", "size": "small", "threads": 1}
    shown = wild.table([about | wild.measure("missing", "small", 1, rounds=2, cache="")]).aligned()
    assert "not installed: no_such_package" in shown


def settled(*losses: float) -> dict[str, Any]:
    return {"losses": losses, "counts": {"Compile": 4}}


def window(steps: int, seconds: float, **counts: int) -> dict[str, Any]:
    return {"steps": steps, "seconds": seconds, "cpu": 2 * seconds, "counts": counts}


def test_a_row_has_ratios_and_what_happened_within_the_windows() -> None:
    pairs = [[window(100, 0.5), window(50, 0.5, GraphCut=100, UncachedCompile=1, Compile=1)]] * 2
    result = {"settled": {"cpu": settled(1.0, 2.0), "lazy": settled(1.0, 2.5)}, "pairs": pairs}
    about = {"program": "skorch", "size": "small", "threads": 1}
    (row,) = wild.table([about | result]).rows
    assert row[3:] == ["5.00", "10.00", "0.50", "0.50", "2.0", "2", "4", "2", "2e-01"]
    same = {"settled": {"cpu": settled(1.0, 2.0), "lazy": settled(1.0)}, "pairs": pairs}
    assert wild.table([about | same]).rows[0][-1] == "equal"
