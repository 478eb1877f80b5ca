"""The picture of how fast training runs beside eager, and the table and the sentence that go with it.

    mkdir -p build
    python tools/bench.py --threads 1 $CHOICE --json build/speed-1.json
    python tools/bench.py --threads 2 $CHOICE --json build/speed-2.json
    python tools/speed_chart.py build/speed-1.json build/speed-2.json --write

with CHOICE="--rounds 4 --workloads mlp,cells,cnn,gpt-adamw,branches,schedule,lengths,lstm --growth 0 --contenders
eager,compile,compile-all,lazy,captured-parts,captured". In: raw figures of bench.py, a file for each number of threads.
Out: the tables on stdout; with `--write`, docs/images/speed.svg, and what stands between `<!-- speed: begin -->` and
`<!-- speed: end -->` in README.md and docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from shared.tables import replace_block

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "images" / "speed.svg"

# The bars of each workload beside eager's line at 1: name, colour, and the contenders of which the fastest counts.
SERIES = (
    ("torch.compile, the faster of model alone and with optimizer", "#8c96a3", ("compile", "compile-all")),
    ("lazy, plain loop", "#7fc4bb", ("lazy",)),
    ("lazy, model and optimizer captured", "#17877b", ("captured-parts",)),
    ("lazy, whole step captured", "#0b4f49", ("captured",)),
)
CAPTURED = ("captured-parts", "captured")

_BAR, _GAP, _LEFT, _RIGHT, _HEAD = 9, 12, 270, 60, 96  # pixels
_PANEL = 470  # width of the bars of one number of threads

Figures = dict[str, Any]
Spread = tuple[float, float, float]  # median, least, greatest


def speeds(workload: Figures) -> dict[str, Spread]:
    """Of each contender that ran: how many times as fast as eager, taken within rounds."""
    eager = workload["contenders"]["eager"]["rounds"]
    found = {}
    for name, own in workload["contenders"].items():
        if name != "eager" and "error" not in own and own["rounds"]:
            ratios = [base / seconds for base, seconds in zip(eager, own["rounds"], strict=True)]
            found[name] = (statistics.median(ratios), min(ratios), max(ratios))
    return found


def fastest(found: dict[str, Spread], names: Sequence[str]) -> Spread | None:
    return max((found[name] for name in names if name in found), default=None)


# ----- the table and the sentence


def table(results: Figures) -> str:
    """Markdown: a row for each workload, a column for each contender but eager."""
    names = [name for name in results["workloads"][0]["contenders"] if name != "eager"]
    lines = [f"| workload | eager, ms | {' | '.join(names)} |", f"| --- | {' | '.join(['---:'] * (len(names) + 1))} |"]
    for workload in results["workloads"]:
        step = statistics.median(workload["contenders"]["eager"]["rounds"]) / workload["steps"]
        found = speeds(workload)
        cells = [_cell(found.get(name)) for name in names]
        lines.append(f"| {workload['title']} | {step * 1e3:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(spread: Spread | None) -> str:
    return "fails" if spread is None else "{:.2f} ({:.2f} to {:.2f})".format(*spread)


def heading(results: Figures) -> str:
    about = results["about"]
    return (
        f"PyTorch {about['torch']}, {about['cores']} cores, {_threads(results)} per operator, {about['rounds']} rounds"
    )


def _threads(results: Figures) -> str:
    number = results["about"]["threads"]
    return "one thread" if number == 1 else f"{number} threads"


def sentence(results: Figures) -> str:
    """The range of captured loops beside eager, and their mean beside torch.compile, with the machine."""
    found = [speeds(workload) for workload in results["workloads"]]
    captured = [own[0] for each in found if (own := fastest(each, CAPTURED))]
    plain = [each["lazy"][0] for each in found if "lazy" in each]
    ratios = [
        own[0] / other[0]
        for each in found
        if (own := fastest(each, CAPTURED)) and (other := fastest(each, ("compile", "compile-all")))
    ]
    text = f"{heading(results)}: captured loops run at {min(captured):.1f} to {max(captured):.1f} times eager's speed"
    if plain:
        text += f", plain loops at {min(plain):.1f} to {max(plain):.1f} times"
    if ratios:
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        text += f"; the geometric mean of captured beside `torch.compile` is {mean:.2f}"
    return f"{text}."


# ----- the picture


def picture(runs: Sequence[Figures]) -> str:
    """SVG: a panel for each number of threads, a group of bars for each workload, a line where eager is."""
    titles = [workload["title"] for workload in runs[0]["workloads"]]
    group = len(SERIES) * _BAR + _GAP
    width, height = _LEFT + len(runs) * (_PANEL + _RIGHT), _HEAD + len(titles) * group + 30
    longest = max(spread[0] for run in runs for one in run["workloads"] for spread in speeds(one).values())
    scale = _PANEL / max(longest, 1.5)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        *_legend(),
        *(_text(_LEFT - 10, _HEAD + place * group + group / 2, title, "end") for place, title in enumerate(titles)),
    ]
    for number, run in enumerate(runs):
        lines += _panel(run, _LEFT + number * (_PANEL + _RIGHT), scale, height)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _legend() -> Iterator[str]:
    for place, (name, colour, _) in enumerate(SERIES):
        x, y = _LEFT + place % 2 * 440, 14 + place // 2 * 20
        yield f'<rect x="{x}" y="{y}" width="14" height="10" fill="{colour}"/>'
        yield _text(x + 20, y + 10, name)


def _panel(run: Figures, left: float, scale: float, height: float) -> Iterator[str]:
    yield _text(left, _HEAD - 16, f"speed / eager's, {_threads(run)} per operator")
    for place, workload in enumerate(run["workloads"]):
        found = speeds(workload)
        top = _HEAD + place * (len(SERIES) * _BAR + _GAP)
        for row, (_, colour, names) in enumerate(SERIES):
            spread = fastest(found, names)
            if spread is None:
                continue
            y = top + row * _BAR
            yield f'<rect x="{left}" y="{y}" width="{spread[0] * scale:.1f}" height="{_BAR - 1}" fill="{colour}"/>'
            yield _text(left + spread[0] * scale + 4, y + _BAR - 1, f"{spread[0]:.2f}", size=9)
    one = f"{left + scale:.1f}"
    yield f'<line x1="{one}" x2="{one}" y1="{_HEAD - 8}" y2="{height - 22}" stroke="#c0392b"/>'
    yield _text(left + scale, height - 8, "eager", "middle")


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 13) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'


# ----- the pages


def write(runs: Sequence[Figures]) -> None:
    """The picture, and the blocks of README.md and docs/benchmarks.md."""
    PICTURE.write_text(picture(runs))
    facts = "\n".join(f"- {sentence(run)}" for run in runs)
    tables = "\n\n".join(f"{heading(run)}:\n\n{table(run)}" for run in runs)
    alt = "Speed beside eager: torch.compile, plain and captured loops"
    blocks = {
        ROOT / "README.md": f"![{alt}](docs/images/speed.svg)\n\n{facts}",
        ROOT / "docs" / "benchmarks.md": f"![{alt}](images/speed.svg)\n\n{tables}",
    }
    for page, block in blocks.items():
        page.write_text(replace_block(page.read_text(), "speed", block))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, help="JSON files of bench.py, one for each number of threads")
    parser.add_argument("--write", action="store_true", help="write the picture and the blocks of the pages")
    arguments = parser.parse_args()
    runs = [json.loads(file.read_text()) for file in arguments.results]
    for run in runs:
        print(f"{heading(run)}\n\n{table(run)}\n\n{sentence(run)}\n")
    if arguments.write:
        write(runs)


if __name__ == "__main__":
    main()
