"""How fast training runs beside eager: what the pages and their picture show of it.

In: raw figures of bench.py. Out: `run_of`, a run as docs/speed.json keeps it, and what is made of such runs: the
tables, the sentences of README.md, and docs/images/speed.svg. `python tools/bench.py --speed` measures and stores all
runs, `python tools/listed_pages.py` writes the pages.
"""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

# The bars of each workload beside eager's line at 1: name, colour, and the contenders of which the fastest counts.
SERIES = (
    ("torch.compile, the faster of model alone and with optimizer", "#8c96a3", ("compile", "compile-all")),
    ("lazy, plain loop", "#7fc4bb", ("lazy",)),
    ("lazy, model and optimizer captured", "#17877b", ("captured-parts",)),
    ("lazy, whole step captured", "#0b4f49", ("captured",)),
)
CAPTURED = ("captured-parts", "captured")

_BAR, _GAP, _LEFT, _RIGHT, _HEAD = 13, 12, 305, 48, 100  # pixels
_PANEL = 320  # width of the bars of one number of threads

Figures = dict[str, Any]
Run = dict[str, Any]  # a file of docs/speed.json has several: see `run_of`
Spread = Sequence[float]  # median, least, greatest; the median alone where no more is known

_COUNTS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def run_of(results: Figures, about: dict[str, Any]) -> Run:
    """What `bench.measure` found: milliseconds of eager's step, and of each contender how many times as fast it is."""
    workloads = []
    for workload in results["workloads"]:
        step = statistics.median(workload["contenders"]["eager"]["rounds"]) / workload["steps"]
        speeds = {name: [round(ratio, 3) for ratio in spread] for name, spread in _speeds(workload).items()}
        failed = {name: one["error"] for name, one in workload["contenders"].items() if "error" in one}
        workloads.append(
            {"title": workload["title"], "eager_ms": round(step * 1e3, 3), "speeds": speeds}
            | ({"failed": failed} if failed else {})
        )
    return {"about": about, "workloads": workloads}


def _speeds(workload: Figures) -> dict[str, Spread]:
    """Of each contender that ran, how many times as fast as eager, taken within rounds."""
    eager = workload["contenders"]["eager"]["rounds"]
    found = {}
    for name, own in workload["contenders"].items():
        if name != "eager" and "error" not in own and own["rounds"]:
            ratios = [base / seconds for base, seconds in zip(eager, own["rounds"], strict=True)]
            found[name] = (statistics.median(ratios), min(ratios), max(ratios))
    return found


def fastest(speeds: dict[str, Spread], names: Sequence[str]) -> float | None:
    return max((speeds[name][0] for name in names if name in speeds), default=None)


def _fastest_of(runs: Sequence[Run], threads: int, names: Sequence[str]) -> dict[str, float]:
    """Of each workload, by title, how many times as fast as eager the fastest of these contenders is."""
    found: dict[str, float] = {}
    for run in runs:
        for workload in run["workloads"] if run["about"]["threads"] == threads else []:
            own = fastest(workload["speeds"], names)
            if own is not None:
                found[workload["title"]] = own
    return found


# ----- tables and sentences


def table(run: Run, chosen: Sequence[str] = ()) -> str:
    """Markdown: a row for each workload, a column for each contender, or for those that are chosen."""
    names = list(dict.fromkeys(name for workload in run["workloads"] for name in workload["speeds"]))
    names = [name for name in names if not chosen or name in chosen]
    lines = [f"| workload | eager, ms | {' | '.join(names)} |", f"| --- | {' | '.join(['---:'] * (len(names) + 1))} |"]
    for workload in run["workloads"]:
        cells = [_cell(workload["speeds"].get(name), name in workload.get("failed", ())) for name in names]
        step = workload["eager_ms"]
        lines.append(f"| {workload['title']} | {'-' if step is None else format(step, '.2f')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(spread: Spread | None, has_failed: bool) -> str:
    if spread is None:
        return "fails" if has_failed else "-"
    median, *ends = spread
    return f"{median:.2f}" + (" ({:.2f} to {:.2f})".format(*ends) if ends else "")


def heading(run: Run) -> str:
    about = run["about"]
    version = about["torch"].partition("+")[0]
    return f"{about['measured']}, PyTorch {version}, {about['machine']}, {_threads(about['threads'])} per operator"


def _threads(number: int) -> str:
    return "one thread" if number == 1 else f"{_counted(number)} threads"


def tables(runs: Sequence[Run]) -> str:
    """All runs but those of plain loops alone, for docs/benchmarks.md."""
    parts = []
    for run in runs:
        if any(set(workload["speeds"]) - {"lazy"} for workload in run["workloads"]):
            has_times = any(workload["eager_ms"] is not None for workload in run["workloads"])
            kept = "" if has_times else "; eager's own times were not kept"
            parts.append(f"{heading(run)}, {run['about']['rounds']} rounds{kept}:\n\n{table(run)}")
    return "\n\n".join(parts)


def plain_table(runs: Sequence[Run]) -> str:
    """Plain loops with one thread, for docs/benchmarks.md."""
    (run,) = [run for run in runs if run["about"]["threads"] == 1 and _fastest_of([run], 1, ["lazy"])]
    mean = math.exp(statistics.fmean(map(math.log, _fastest_of([run], 1, ["lazy"]).values())))
    return f"{heading(run)}, {run['about']['rounds']} rounds; geometric mean {mean:.2f}:\n\n{table(run, ['lazy'])}"


def capture_table(runs: Sequence[Run]) -> str:
    """What `capture` adds to plain loops, for docs/performance.md: all speeds beside eager's."""
    lines = [
        "| workload, threads per operator | the better `torch.compile` | plain loop | captured parts | captured step |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for threads in sorted({run["about"]["threads"] for run in runs}):
        columns = [_fastest_of(runs, threads, names) for *_, names in SERIES]
        for title in dict.fromkeys(title for column in columns for title in column):
            cells = [f"{column[title]:.2f}" if title in column else "-" for column in columns]
            lines.append(f"| {title}, {_counted(threads)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def sentences(runs: Sequence[Run]) -> str:
    """The ranges of captured loops, of `torch.compile` and of plain loops beside eager, for README.md."""
    captured, both = _fastest_of(runs, 1, CAPTURED), _fastest_of(runs, 2, CAPTURED)
    compiled, plain = _fastest_of(runs, 1, ("compile", "compile-all")), _fastest_of(runs, 1, ("lazy",))
    number = _counted(len(captured))
    others = "the same" if len(both) == len(captured) else f"{_counted(len(both))} of them"
    table, plain_loops = "docs/benchmarks.md#speed-beside-eagers", "docs/benchmarks.md#plain-loops"
    cores = _counted(runs[0]["about"]["cores"])
    compiled_ones = f"the {number}" if len(compiled) == len(captured) else f"{_counted(len(compiled))} of them"
    faster, every = sum(speed > 1 for speed in plain.values()), _counted(len(plain))
    faster_ones = f"all {every}" if faster == len(plain) else f"{_counted(faster)} of the {every}"
    text = (
        f"On {cores} cores, captured loops of {number} small models ran at {_range(captured)} times eager's speed with "
        f"one thread per operator, and {others} at {_range(both)} times with two. `torch.compile`, in its faster form, "
        f"ran {compiled_ones} at {_range(compiled)} times with one thread ([table]({table})). Without "
        f"`capture`, [plain loops]({plain_loops}) of {faster_ones} were faster than eager."
    )
    return textwrap.fill(text, 127, break_long_words=False, break_on_hyphens=False)


def _counted(number: int) -> str:
    return _COUNTS[number] if number < len(_COUNTS) else str(number)


def _range(found: dict[str, float]) -> str:
    return f"{min(found.values()):.1f} to {max(found.values()):.1f}"


# ----- the picture


def picture(runs: Sequence[Run]) -> str:
    """SVG: a panel for each number of threads, a group of bars for each workload, a line where eager is."""
    counts = sorted({run["about"]["threads"] for run in runs})
    bars = {threads: [_fastest_of(runs, threads, names) for *_, names in SERIES] for threads in counts}
    titles = list(dict.fromkeys(workload["title"] for run in runs for workload in run["workloads"]))
    group = len(SERIES) * _BAR + _GAP
    width, height = _LEFT + len(counts) * (_PANEL + _RIGHT), _HEAD + len(titles) * group + 30
    longest = max(speed for series in bars.values() for found in series for speed in found.values())
    scale = _PANEL / max(longest, 1.5)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        *_legend(),
        *(_text(_LEFT - 10, _HEAD + place * group + group / 2, title, "end") for place, title in enumerate(titles)),
    ]
    for number, threads in enumerate(counts):
        lines += _panel(threads, bars[threads], titles, _LEFT + number * (_PANEL + _RIGHT), scale, height)
    if any(len(found) < len(titles) for series in bars.values() for found in series):
        lines.append(_text(10, height - 8, "no bar: not measured", size=12))
    return "\n".join([*lines, "</svg>"]) + "\n"


def _legend() -> Iterator[str]:
    for place, (name, colour, _) in enumerate(SERIES):
        x, y = 10 + place % 2 * 520, 14 + place // 2 * 20
        yield f'<rect x="{x}" y="{y}" width="14" height="10" fill="{colour}"/>'
        yield _text(x + 20, y + 10, name)


def _panel(
    threads: int, series: Sequence[dict[str, float]], titles: Sequence[str], left: float, scale: float, height: float
) -> Iterator[str]:
    yield _text(left, _HEAD - 16, f"speed / eager's, {_threads(threads)} per operator")
    labels = []
    for place, title in enumerate(titles):
        top = _HEAD + place * (len(SERIES) * _BAR + _GAP)
        for row, ((_, colour, _), found) in enumerate(zip(SERIES, series, strict=True)):
            speed = found.get(title)
            if speed is None:
                continue
            y = top + row * _BAR
            yield f'<rect x="{left}" y="{y}" width="{speed * scale:.1f}" height="{_BAR - 1}" fill="{colour}"/>'
            labels.append(_text(left + speed * scale + 4, y + _BAR - 2, f"{speed:.2f}", size=12, halo=True))
    one = f"{left + scale:.1f}"
    yield f'<line x1="{one}" x2="{one}" y1="{_HEAD - 8}" y2="{height - 22}" stroke="#c0392b"/>'
    yield from labels
    yield _text(left + scale, height - 8, "eager", "middle")


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 14, halo: bool = False) -> str:
    around = ' stroke="white" stroke-width="3" paint-order="stroke"' if halo else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"{around}>{escape(text)}</text>'
