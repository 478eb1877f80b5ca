"""`bench.py --serve`: executors take turns, and one that cannot begin is a note; its figures are those of the page."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))
from benchmarks import serving_speed  # noqa: E402
from shared.tables import replace_block  # noqa: E402


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


def test_the_page_has_no_figures_but_those_of_the_tool() -> None:
    text = replace_block((ROOT / "docs" / "serving.md").read_text(), "serving", "")
    prose = re.sub(r"```.*?```", "", text, flags=re.S)
    assert re.findall(r"\d[\d.,]* ?(?:times|x|ms|µs|s|seconds|%|[KMG]B)(?!\w)", prose) == []


def test_a_block_has_each_executor_and_the_reason_of_one_that_is_not_there() -> None:
    window = {"rate": 1000.0, "p50": 1e-3, "p99": 2e-3}
    found = {
        "serve": {"first": 0.5, "version": "1", "windows": {"1": [window]}},
        "nobody": {"error": "No. Why", "windows": {}},
    }
    about = {"torch": "2.13.0", "cores": 2, "rounds": 3, "seconds": 0.5}
    lines = serving_speed.block({"about": about, "models": {"mlp": found}}).splitlines()
    assert lines[0] == "Medians of 3 windows of 0.5 s; 2 cores, one thread per operator; PyTorch 2.13.0,"
    assert "| serve | 1,000 (1,000, 2,000) | 0.50 |" in lines
    assert lines[-1] == "nobody: No"
