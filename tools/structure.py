"""Rooms of the package: which there are, what imports what. `python tools/structure.py` draws docs/images/rooms.dot.

A room is a folder with its modules. Modules that lie directly in `lazy_backend/` are the public ones; each of them is a
room of its own here, since some are imported by everybody (`settings`) and some by nobody (`api`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("lazy_backend", "lowering", "cache")
PACKAGE = "lazy_backend"
PICTURE = ROOT / "docs" / "images" / "rooms.dot"

# Public modules that only import: one box stands for them in the picture.
_FRONT_DOOR = "public"


def modules() -> dict[str, Path]:
    """Every module by its dotted name; a package's own code is a module too."""
    found = {}
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            parts = [PACKAGE] if folder == PACKAGE else [PACKAGE, folder]
            inner = file.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([*parts, *(part for part in inner if part != "__init__")])] = file
    return found


def imports(file: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules of ours that `file` imports, wherever it does, also for annotations only."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                # a function may have its module's name: what follows `from lazy_backend import` is the function then
                is_module = name in known and not (node.module == PACKAGE and alias.name in ("report", "serve"))
                if is_module or node.module in known:
                    yield name if is_module else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)


def room_of(module: str) -> str:
    """`lazy_backend.tensors.locks` is in `tensors`, `lazy_backend.lowering.ir.graph` in `lowering.ir`.

    A command is above all rooms, wherever its file is.
    """
    parts = module.split(".")[1:]
    if not parts or parts[-1] == "__main__":
        return PACKAGE
    return ".".join(parts[:2]) if parts[0] == "lowering" else parts[0]


def rooms() -> dict[str, set[str]]:
    """Every room with the rooms that it imports."""
    known = modules()
    found: dict[str, set[str]] = {room_of(module): set() for module in known}
    for module, file in known.items():
        found[room_of(module)] |= {room_of(name) for name in imports(file, known)} - {room_of(module)}
    return found


def _without_shortcuts(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """Only the edges that no longer way stands for."""

    def below(room: str) -> set[str]:
        return edges[room].union(*(below(other) for other in edges[room]))

    return {room: {b for b in targets if not any(b in below(a) for a in targets)} for room, targets in edges.items()}


def drawn() -> str:
    """The picture, for Graphviz."""
    known, edges = modules(), rooms()
    public = {name for name in edges if not (ROOT / PACKAGE / name).is_dir() and name not in ("settings", "cache")}
    public = {name for name in public if not name.startswith("lowering")}
    joined: dict[str, set[str]] = {}
    for room, targets in edges.items():
        own = _FRONT_DOOR if room in public else room
        joined.setdefault(own, set()).update(_FRONT_DOOR if target in public else target for target in targets)
    joined = {room: targets - {room} for room, targets in joined.items() if room != "lowering"}
    # what a public module is imported by in turn (`compat` by `dynamo`, `api` by `compat`) is told in words
    joined["compat"].discard(_FRONT_DOOR)
    numbers = {room: sum(room_of(module) == room for module in known) for room in joined}
    lines = [
        "// The rooms and what they import; what follows from other arrows is left out. Made by tools/structure.py.",
        "digraph rooms {",
        '  graph [rankdir=TB, bgcolor="#fbfcfc", pad=0.25, nodesep=0.3, ranksep=0.35, fontname="Helvetica"]',
        '  node [shape=box, style="rounded,filled", fillcolor="#e3f2ef", color="#00897b", fontname="Helvetica", '
        'fontsize=12, margin="0.16,0.07"]',
        '  edge [color="#455a64", arrowsize=0.7]',
    ]
    for room in sorted(joined):
        label = "public modules" if room == _FRONT_DOOR else room.replace(".", "/")
        if numbers[room] > 1:
            label += f"\\n{numbers[room]} modules"
        color = ', fillcolor="#fff8e1", color="#f9a825"' if room == _FRONT_DOOR else ""
        lines.append(f'  "{room}" [label="{label}"{color}]')
    for room, targets in sorted(_without_shortcuts(joined).items()):
        lines += [f'  "{room}" -> "{target}"' for target in sorted(targets)]
    return "\n".join([*lines, "}", ""])


if __name__ == "__main__":
    PICTURE.write_text(drawn())
