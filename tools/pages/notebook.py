"""A notebook that is run without Jupyter: its code cells, one after the other in this process, with what they print.

    python tools/pages/notebook.py examples/quickstart.ipynb

In: a notebook whose cells print their results. Out: the same file, with the outputs of this run.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def printed(cell: dict[str, Any]) -> str:
    return "".join(line for output in cell["outputs"] for line in output["text"])


def run(notebook: dict[str, Any]) -> None:
    """Run the cells as a program, and put what they print, and their numbers, in their place."""
    names = {"__name__": "__main__"}
    for number, cell in enumerate(code_cells(notebook), 1):
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
        text = shown.getvalue().splitlines(keepends=True)
        cell["execution_count"] = number
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": text}] if text else []


def main(path: Path) -> None:
    notebook = json.loads(path.read_text())
    run(notebook)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
