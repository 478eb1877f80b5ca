"""`bench.py --serve`: executors take turns, and one that cannot begin is a note."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
import serving_speed


@pytest.mark.scenario
def test_a_served_module_takes_turns_with_eager() -> None:
    found = serving_speed.measure(["mlp"], ["eager", "serve", "nobody"], [1, 2], rounds=2, seconds=0.1)
    executors = found["models"]["mlp"]
    for name in ("eager", "serve"):
        windows = [window for of_count in executors[name]["windows"].values() for window in of_count]
        assert len(windows) == 4
        assert all(window["rate"] > 0 and window["p99"] >= window["p50"] > 0 for window in windows)
    (table,) = serving_speed.tables_of(found)
    assert [row[0] for row in table.rows] == ["eager", "serve"]
    assert "nobody" in table.note
