"""Every figure of speed in README and docs comes from a file that a tool writes: speed.json or serving.json."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from shared import figures  # noqa: E402
from shared.tables import Table  # noqa: E402

PAGES = ["README.md", "CHANGELOG.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")))]

# Times of at most a second, and ratios to something's speed or time. A word for a number is none: "twice", "a tenth".
FIGURE = re.compile(
    r"[\d.,]*\d(?: (?:to|or|and) [\d.,]*\d)? ?(?:(?:µs|ms|ns)\b"
    r"|times (?:as (?:fast|slow|long)|faster|slower|eager|`)"
    r"|(?:times |of )(?:\w+'s |the )?(?:speed|time)\b)"
)

# Figures that stand in prose: page and heading, how many, and why.
REMARKS = {
    ("docs/benchmarks.md", "On a GPU"): (5, "remarks on the runs of the table, which need a GPU, and the goals"),
    ("docs/settings.md", "run_in_background"): (1, "a threshold, not a measurement"),
}


def figures_of(page: str) -> Counter[str]:
    """The headings of a page under which figures of speed stand outside of generated blocks and of code."""
    text = re.sub(r"<!-- ([\w .-]+): begin -->.*?<!-- \1: end -->", "", (ROOT / page).read_text(), flags=re.S)
    text = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.S | re.M)
    found: Counter[str] = Counter()
    for part in re.split(r"^(?=#+ )", text, flags=re.M):
        heading = part.partition("\n")[0].lstrip("# ")
        found[heading] += len(FIGURE.findall(" ".join(part.split())))
    return +found


@pytest.mark.parametrize("page", PAGES)
def test_figures_of_speed_are_those_of_a_tool(page: str) -> None:
    known = {heading: count for (where, heading), (count, _) in REMARKS.items() if where == page}
    assert figures_of(page) == known, "put them into a block that tools/listed_pages.py makes, or leave them out"


@pytest.mark.parametrize(
    "text",
    ["12 µs a call", "it takes 1.5 ms", "1.1 to 3.1 times eager's speed", "2 times as fast", "0.85 of eager's speed",
     "1.2 times `reduce-overhead`", "3 to 4 ms", "1.3 times slower"],
)  # fmt: skip
def test_a_figure_of_speed_is_found(text: str) -> None:
    assert len(FIGURE.findall(text)) == 1


def test_a_section_is_replaced_and_the_others_stay(tmp_path: Path) -> None:
    file = tmp_path / "speed.json"
    for name in ("one", "other", "one"):
        table = Table(name, ["", "µs"], [["a call", str(len(figures.read(file)))]])
        figures.write(file, name, figures.section_of([table], "python tools/bench.py --one"))
    found = json.loads(file.read_text())
    assert list(found) == ["one", "other"]
    assert (found["one"]["rows"], found["other"]["rows"]) == ([["a call", "2"]], [["a call", "1"]])
    lines = figures.block(found["one"]).splitlines()
    assert lines[:3] == ["|  | µs |", "| --- | ---: |", "| a call | 2 |"]
    assert lines[-1].startswith("`python tools/bench.py --one`, PyTorch 2.")


def test_the_file_has_every_section_of_the_pages() -> None:
    assert set(figures.read()) == {"speed", *figures.TABLES}
