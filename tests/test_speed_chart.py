"""The picture of speeds, its tables and sentences: made of the benchmark's figures, and of nothing else."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from benchmarks import speed_chart  # noqa: E402
from shared import contenders  # noqa: E402
from shared.tables import replace_block  # noqa: E402
from shared.workloads import WORKLOADS, make_training  # noqa: E402

from lazy_backend import config  # noqa: E402


def run(threads: int) -> speed_chart.Run:
    """Two workloads of 10 steps; torch.compile fails in one of them."""
    contenders: dict[str, Any] = {
        "eager": {"rounds": [0.02, 0.04]},
        "compile": {"rounds": [0.02, 0.02]},
        "lazy": {"rounds": [0.04, 0.04]},
        "captured": {"rounds": [0.01, 0.01]},
    }
    failing = {**contenders, "compile": {"rounds": [], "error": "RuntimeError: <no>"}}
    about = {"measured": "2026-11-27", "torch": "2.13.0+cpu", "cores": 2, "machine": "two cores of something"}
    workloads = [
        {"title": "A & B", "steps": 10, "contenders": contenders},
        {"title": "C", "steps": 10, "contenders": failing},
    ]
    return speed_chart.run_of({"workloads": workloads}, {**about, "threads": threads, "rounds": 2})


def test_a_speed_is_a_median_of_ratios_within_rounds() -> None:
    first, second = run(1)["workloads"]
    assert first["speeds"] == {"compile": [1.5, 1.0, 2.0], "lazy": [0.75, 0.5, 1.0], "captured": [3.0, 2.0, 4.0]}
    assert first["eager_ms"] == 3.0
    assert second["failed"] == {"compile": "RuntimeError: <no>"}


def test_the_table_has_every_workload_and_says_what_failed() -> None:
    lines = speed_chart.tables([run(1)]).splitlines()
    assert lines[0] == "2026-11-27, PyTorch 2.13.0, two cores of something, one thread per operator, 2 rounds:"
    assert lines[2] == "| workload | eager, ms | compile | lazy | captured |"
    assert lines[4] == "| A & B | 3.00 | 1.50 (1.00 to 2.00) | 0.75 (0.50 to 1.00) | 3.00 (2.00 to 4.00) |"
    assert lines[5].startswith("| C | 3.00 | fails | ")


def test_plain_loops_have_a_table_of_their_own() -> None:
    lines = speed_chart.plain_table([run(1), run(2)]).splitlines()
    assert lines[0].endswith("one thread per operator, 2 rounds; geometric mean 0.75:")
    assert lines[2:] == ["| workload | eager, ms | lazy |", "| --- | ---: | ---: |",
                         "| A & B | 3.00 | 0.75 (0.50 to 1.00) |", "| C | 3.00 | 0.75 (0.50 to 1.00) |"]  # fmt: skip


def test_plain_and_captured_loops_are_side_by_side() -> None:
    assert speed_chart.capture_table([run(1), run(2)]).splitlines()[2:] == [
        "| A & B, one | 1.50 | 0.75 | - | 3.00 |",
        "| C, one | - | 0.75 | - | 3.00 |",
        "| A & B, two | 1.50 | 0.75 | - | 3.00 |",
        "| C, two | - | 0.75 | - | 3.00 |",
    ]


def test_the_sentences_have_the_ranges() -> None:
    text = " ".join(speed_chart.sentences([run(1), run(2)]).split())
    assert text.startswith(
        "On two cores, captured loops of two small models ran at 3.0 to 3.0 times eager's speed with one thread per "
        "operator, and the same at 3.0 to 3.0 times with two. `torch.compile`, in its faster form, ran one of them at "
        "1.5 to 1.5 times with one thread"
    )
    assert text.endswith("of none of the two were faster than eager.")


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


# ----- what is measured


@pytest.mark.parametrize("workload", ["schedule", "cells", "branches"])
@pytest.mark.parametrize("name", ["captured", "captured-parts"])
def test_captured_contenders_are_replayed(name: str, workload: str) -> None:
    contender = contenders.CONTENDERS[name]()
    config.compile = "off"
    contenders.start(contender, make_training(WORKLOADS[workload], "lazy"), steps=60)
    with pytest.raises(RuntimeError, match="too little was replayed in 3000 steps"):
        contenders.check_replays(contender, steps=3000)
