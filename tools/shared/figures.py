"""The file of the figures that pages show, docs/speed.json: one section for each way of `bench.py` to measure.

In: tables, as the tools print them, or runs of `benchmarks.speed_chart`. Out: the file with this section replaced, and
what stands between the marks of a page.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from shared.tables import Table

DOCS = Path(__file__).resolve().parents[2] / "docs"
FIGURES = DOCS / "speed.json"

# The sections that are one table of a page each, by bench.py's flag; the last are of other tools.
TABLES = {
    **dict.fromkeys(
        ("recording", "overlap", "cold", "compile-time", "blocks", "trainers", "unmarked", "ranks", "wild"),
        "benchmarks.md",
    ),
    **dict.fromkeys(("diagnostics", "cuda-compile", "gpu-check"), "benchmarks.md"),
    "simulated-ranks": "scaling.md",
    "ground": "compatibility.md",
}

Section = dict[str, Any]


def read(path: Path = FIGURES) -> dict[str, Any]:
    """All sections of the file; none if there is no file."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def write(path: Path, name: str, section: Any) -> None:
    """Replace one section of the file, and leave the others."""
    path.write_text(json.dumps({**read(path), name: section}, indent=1, ensure_ascii=False) + "\n")


def about(command: str, **more: Any) -> Section:
    """Facts about a measurement that ends now."""
    day = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return {"command": command, "measured": day, "torch": torch.__version__, "cores": os.cpu_count(), **more}


def section_of(tables: Sequence[Table], command: str) -> Section:
    """The section of a mode that printed one table."""
    (table,) = tables
    rows = [list(row) for row in table.rows]
    return {"about": about(command), "head": list(table.head), "rows": rows}


def block(section: Section) -> str:
    """A table in markdown, and what was measured when."""
    facts = section["about"]
    table = Table("", section["head"], section["rows"]).markdown().removeprefix("### \n\n")
    where = f"PyTorch {facts['torch'].partition('+')[0]}" + (f", {facts['cores']} cores" if facts.get("cores") else "")
    return f"{table}\n\n`{facts['command']}`, {where}, {facts['measured']}."
