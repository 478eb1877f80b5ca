"""A run as one page for the browser.

In: the history, or a run log. Out: an HTML file that holds everything it needs and asks no network. What the page shows
is made in `page_content`; how, in `assets/`: its own script and style, and Apache ECharts. `main` is the command
`python -m lazy_backend.report`.
"""

from __future__ import annotations

import argparse
import html
import json
import sys
from pathlib import Path
from string import Template
from typing import Any

from lazy_backend.diagnostics.explanation import explain
from lazy_backend.diagnostics.page_content import page_data
from lazy_backend.diagnostics.run_log import Run, RunLogError, collect, read_run
from lazy_backend.errors.tracebacks import hide_internals
from lazy_backend.lowering.serving.executor import ProfileMetrics

_ASSETS = Path(__file__).parent / "assets"
SCRIPTS = ("base.js", "tables.js", "steps.js", "graph.js", "report.js")  # in the order in which they need each other


@hide_internals
def report(path: str | Path = "report.html", *, profile: ProfileMetrics | None = None) -> Path:
    """Write what happened since the start, or the last `metrics.reset()`, as one HTML page; returns its path.

    Findings ranked by the seconds they cost, a timeline, hits and misses with their explanations, cuts by line,
    compiles, the graph of each program with your lines, memory and caches. The page needs no network. `profile`: node
    times of `Executor.benchmark_nodes`, to be shown too. `python -m lazy_backend.report run.jsonl` does the same for
    what `config.log_file` or `explain().save(path)` wrote.
    """
    path = Path(path)
    path.write_text(render(collect(explain().lines()), profile), encoding="utf-8")
    return path


def render(run: Run, profile: ProfileMetrics | None = None) -> str:
    """The page of a run."""
    parts = {
        "title": html.escape(_title(run)),
        "style": _asset("report.css"),
        "charts": _asset("echarts.min.js"),
        "scripts": "\n".join(map(_asset, SCRIPTS)),
        "data": _embedded(page_data(run, profile)),
    }
    return Template(_asset("report.html")).substitute(parts)


def _title(run: Run) -> str:
    command = str(run.header.get("command", "")).split(" ")[0]
    return f"{Path(command).name or 'Python'} on lazy_backend"


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _embedded(data: dict[str, Any]) -> str:
    """JSON that can stand in a script element: nothing in it ends the element or starts a comment there."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def main(arguments: list[str] | None = None) -> int:
    """Write the page of a log, also of a run that was killed. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m lazy_backend.report", description="Show a run as a web page.")
    parser.add_argument("log", type=Path, help="JSON lines from LAZY_BACKEND_LOG or lazy_backend.explain().save()")
    parser.add_argument("-o", "--output", type=Path, help="the page (default: the log's name with .html)")
    given = parser.parse_args(arguments)
    output = given.output or given.log.with_suffix(".html")
    try:
        output.write_text(render(read_run(given.log)), encoding="utf-8")
    except (RunLogError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    print(output)
    return 0
