"""Note [Lock order]: every lock is in it, and programs keep to it."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from forks import run_fork
from lock_order import FOLDERS, SIGNALS, module_name

from lazy_backend.tensors import locks

MAKERS = {"threading.Lock", "threading.RLock", "process_lock"}


def order() -> dict[str, int]:
    """The line of each lock in the Note."""
    note = (locks.__doc__ or "").split("Note [Lock order]")[1]
    lines = re.findall(r"^(\d+)\. ((?:.|\n(?!\d+\. |\n))*)", note, flags=re.M)
    return {name: int(number) for number, text in lines for name in re.findall(r"`(\w+\.\w+)`", text)}


def locks_made() -> Iterator[str]:
    """Every lock that the package makes, as class or module and attribute."""
    for folder in FOLDERS:
        for file in Path(folder).rglob("*.py"):
            if file.name != "process_locks.py":  # it makes them for others
                yield from _made_in(ast.parse(file.read_text()), module_name(file))


def _made_in(node: ast.AST, owner: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Assign | ast.AnnAssign) and child.value is not None:
            target = child.targets[0] if isinstance(child, ast.Assign) else child.target
            made = [call for call in ast.walk(child.value) if isinstance(call, ast.Call)]
            if any(ast.unparse(call.func) in MAKERS for call in made):
                yield f"{owner}.{ast.unparse(target).split('.')[-1]}"
        yield from _made_in(child, child.name if isinstance(child, ast.ClassDef) else owner)


def test_every_lock_is_in_the_note() -> None:
    known = {name.split(".")[-1] for name in SIGNALS}
    made = {name for name in locks_made() if name.split(".")[-1] not in known}
    # a fork makes contexts' locks anew, in the arena
    assert made - {"DeviceContextArena.lock"} == order().keys()


@pytest.mark.scenario
def test_programs_keep_to_the_order(tmp_path: Path) -> None:
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "LAZY_BACKEND_CACHE_DIR": str(tmp_path)}
    program = Path(__file__).with_name("lock_order.py")
    done = run_fork(program.read_text(), tmp_path, environment, program, timeout=300)
    assert done.returncode == 0, done.stderr
    edges = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("edge ")]
    assert len(edges) > 10
    lines = order()
    assert [f"{taken} while {held} is held" for held, taken in edges if lines[held] >= lines[taken]] == []
