"""The picture of speeds, its table and its sentence: made of the benchmark's figures, and of nothing else."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import speed_chart  # noqa: E402
from shared.tables import replace_block  # noqa: E402


def run(threads: int) -> dict[str, Any]:
    """Two workloads of 10 steps; the second contender fails in one of them."""
    contenders = {
        "eager": {"rounds": [0.02, 0.04]},
        "compile": {"rounds": [0.02, 0.02]},
        "lazy": {"rounds": [0.04, 0.04]},
        "captured": {"rounds": [0.01, 0.01]},
    }
    failing = {**contenders, "compile": {"rounds": [], "error": "RuntimeError: <no>"}}
    about = {"torch": "2.13.0", "cores": 2, "threads": threads, "rounds": 2}
    workloads = [
        {"title": "A & B", "steps": 10, "contenders": contenders},
        {"title": "C", "steps": 10, "contenders": failing},
    ]
    return {"about": about, "workloads": workloads}


def test_a_speed_is_a_median_of_ratios_within_rounds() -> None:
    speeds = speed_chart.speeds(run(1)["workloads"][0])
    assert speeds == {"compile": (1.5, 1.0, 2.0), "lazy": (0.75, 0.5, 1.0), "captured": (3.0, 2.0, 4.0)}


def test_the_table_has_every_workload_and_says_what_failed() -> None:
    lines = speed_chart.table(run(1)).splitlines()
    assert lines[0] == "| workload | eager, ms | compile | lazy | captured |"
    assert lines[2] == "| A & B | 3.00 | 1.50 (1.00 to 2.00) | 0.75 (0.50 to 1.00) | 3.00 (2.00 to 4.00) |"
    assert lines[3].startswith("| C | 3.00 | fails | ")


def test_the_sentence_has_the_range_and_the_machine() -> None:
    assert speed_chart.sentence(run(2)) == (
        "PyTorch 2.13.0, 2 cores, 2 threads per operator, 2 rounds: captured loops run at 3.0 to 3.0 times eager's "
        "speed, plain loops at 0.8 to 0.8 times; the geometric mean of captured beside `torch.compile` is 2.00."
    )


def test_the_picture_has_a_bar_for_each_figure() -> None:
    drawn = ElementTree.fromstring(speed_chart.picture([run(1), run(2)]))
    texts = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert [texts.count(figure) for figure in ("0.75", "1.50", "3.00")] == [4, 2, 4]
    assert "A & B" in texts


def test_the_block_of_a_page_is_replaced() -> None:
    page = "before\n<!-- speed: begin -->\nold\n<!-- speed: end -->\nafter\n"
    assert replace_block(page, "speed", r"new \1") == page.replace("old", r"new \1")
    with pytest.raises(ValueError, match="found 0"):
        replace_block("before\nafter\n", "speed", "new")


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks.md"])
def test_a_page_has_the_block(page: str) -> None:
    text = (ROOT / page).read_text()
    assert replace_block(text, "speed", "new") != text


def test_the_readme_has_no_figures_of_speed_but_those_of_the_block() -> None:
    text = replace_block((ROOT / "README.md").read_text(), "speed", "")
    prose = re.sub(r"```.*?```", "", text, flags=re.S)
    assert re.findall(r"\d[\d.,]* ?(?:times|x|ms|µs|s|%)\b", prose) == []
