"""The report: a run as one HTML page.

In: the history, or a run log. Out: a self-contained HTML file, which needs no network. `page_content` makes the data of
the page; `assets/` holds its scripts and style sheet, and Apache ECharts. `main` is the command
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
from lazy_backend.diagnostics.run_log import Run, RunLogError, collect, merged, read_run
from lazy_backend.errors.tracebacks import hide_internals
from lazy_backend.lowering.serving.executor import ProfileMetrics

_ASSETS = Path(__file__).parent / "assets"
SCRIPTS = ("base.js", "tables.js", "steps.js", "graph.js", "report.js")  # in order of dependency


@hide_internals
def report(path: str | Path = "report.html", *, profile: ProfileMetrics | None = None) -> Path:
    """Write a page on everything since process start, or since the last `metrics.reset()`. Returns the page's path.

    The page shows findings ranked by the seconds they cost, a timeline, hits and misses with their explanations, cuts
    by line, compiles, the graph of each program with your source lines, memory and caches. It is one HTML file and
    needs no network. `profile`: node times from `Executor.benchmark_nodes`, to show as well.
    `python -m lazy_backend.report run.jsonl` writes the same page for a log from `config.log_file` or
    `explain().save(path)`.
    """
    path = Path(path)
    path.write_text(render(collect(explain().lines()), profile), encoding="utf-8")
    return path


def render(run: Run, profile: ProfileMetrics | None = None) -> str:
    """The page of a run, as HTML."""
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
    """`data` as JSON that is safe in a script element: nothing in it closes the element or opens a comment."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def main(arguments: list[str] | None = None) -> int:
    """Write the page for a run log, even if the run was killed, or for those of several ranks. Returns the status."""
    parser = argparse.ArgumentParser(prog="python -m lazy_backend.report", description="Show a run as a web page.")
    parser.add_argument(
        "logs", type=Path, nargs="+", help="JSON lines from LAZY_BACKEND_LOG or explain().save(); one for each rank"
    )
    parser.add_argument("-o", "--output", type=Path, help="the page (default: the first log's name with .html)")
    given = parser.parse_args(arguments)
    output = given.output or given.logs[0].with_suffix(".html")
    try:
        runs = [read_run(log) for log in given.logs]
        output.write_text(render(merged(runs) if len(runs) > 1 else runs[0]), encoding="utf-8")
    except (RunLogError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    print(output)
    return 0
