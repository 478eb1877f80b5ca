"""`python -m lazy_backend.report run.jsonl`: the page of a run that was logged.

In: what `config.log_file` or `lazy_backend.explain().save` wrote, also of a run that was killed. Out: an HTML file.
`lazy_backend.report` itself is the function of `reporting`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lazy_backend.reporting import render
from lazy_backend.run_log import RunLogError, read_run


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lazy_backend.report", description="Show a logged run as a web page."
    )
    parser.add_argument("log", type=Path, help="JSON lines from LAZY_BACKEND_LOG or lazy_backend.explain().save()")
    parser.add_argument("-o", "--output", type=Path, help="the page (default: the log's name with .html)")
    given = parser.parse_args(arguments)
    output = given.output or given.log.with_suffix(".html")
    try:
        page = render(read_run(given.log))
    except (RunLogError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    output.write_text(page, encoding="utf-8")
    print(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
