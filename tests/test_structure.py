"""The house: rooms, their sizes, what imports what. `tools/structure.py` reads it from the files."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import structure  # noqa: E402

MODULES = structure.modules()
LAYERS = {"ports": 0, "cache": 0, "lowering": 1}  # lazy_backend's own rooms are above both

# Packages that users import: their docstrings are for users.
PUBLIC_PACKAGES = {"lazy_backend", "lazy_backend.cache", "lazy_backend.errors", "lazy_backend.metrics"}

# Longer than a function may be: the hot loop of the recorder, where a call per part would cost a tenth of a step.
LONG_FUNCTIONS = {"record.py:record"}


def each(kind: type[ast.AST]) -> Iterator[tuple[Path, ast.AST]]:
    for file in MODULES.values():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, kind):
                yield file, node


def code_lines(file: Path, node: ast.FunctionDef) -> int:
    """Lines of code: without the docstring, comments and empty lines."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    if not body:
        return 0
    lines = file.read_text().splitlines()[body[0].lineno - 1 : node.end_lineno]
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in lines)


def test_imports_make_no_cycle() -> None:
    """Between modules, also where an import is for annotations only."""
    known = MODULES
    edges = {name: {to for to in structure.imports(file, known) if to != name} for name, file in known.items()}
    list(TopologicalSorter(edges).static_order())  # raises CycleError, which names the cycle


def test_rooms_make_no_cycle() -> None:
    list(TopologicalSorter(structure.rooms()).static_order())


@pytest.mark.parametrize("module", MODULES)
def test_a_layer_imports_only_those_below(module: str) -> None:
    if module.endswith(".__main__"):
        return  # a command, which nothing imports
    layer = LAYERS.get(module.split(".")[1] if "." in module else "", 2)
    for name in structure.imports(MODULES[module], MODULES):
        assert LAYERS.get(name.split(".")[1] if "." in name else "", 2) <= layer, f"{module} imports {name}"


@pytest.mark.parametrize("module", MODULES)
def test_no_import_of_ours_inside_a_function(module: str) -> None:
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.FunctionDef):
            inner = [n for n in ast.walk(node) if isinstance(n, ast.ImportFrom)]
            assert not [n.module for n in inner if (n.module or "").startswith("lazy_backend")], module


def test_an_import_registers_nothing() -> None:
    """What is told to whom is decided in compat/installation.py, not by who happens to be imported."""
    found = []
    for name, file in MODULES.items():
        if name.startswith("lazy_backend.integrations.") or name.endswith(".__main__"):
            continue  # users import the first for what they register elsewhere, and run the second
        for node in ast.parse(file.read_text()).body:
            call = node.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
            if call is not None and name not in ("lazy_backend", "lazy_backend.report", "lazy_backend.dynamo"):
                found.append(f"{name}: {ast.unparse(call)}")
            targets = node.targets if isinstance(node, ast.Assign) else []
            found += [f"{name}: {ast.unparse(t)}" for t in targets if isinstance(t, ast.Attribute | ast.Subscript)]
    assert found == []


# Beside it, names of other packages: of PyTorch's that are private, and of a trainer's that makes autocast for CUDA.
ROOMS_THAT_NAME_CUDA = ("lazy_backend.lowering.devices.", "lazy_backend.ports.", "lazy_backend.integrations.")
TABLE_OF_STATE = "lazy_backend.compat.runtime"  # the name of a variable


def test_one_room_names_cuda() -> None:
    """What differs between devices is in the protocol, which accelerators implement as CUDA does."""
    found = set()
    for name, file in MODULES.items():
        if name.startswith(ROOMS_THAT_NAME_CUDA) or name == TABLE_OF_STATE:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            named = (getattr(node, "value", None), getattr(node, "attr", None), getattr(node, "id", None))
            if {"cuda", "CUDA"}.intersection(one for one in named if isinstance(one, str)):
                found.add(f"{name}:{getattr(node, 'lineno', 0)}")
    assert found == set()


def test_no_folder_has_more_than_15_modules() -> None:
    tools = [file for file in (ROOT / "tools").rglob("*.py") if file.name != "__init__.py"]
    counts = Counter(file.parent for file in [*MODULES.values(), *tools])
    assert {folder.name: count for folder, count in counts.items() if count > 15} == {}


def test_no_module_name_twice() -> None:
    counts = Counter(file.stem for file in MODULES.values() if file.stem not in ("__init__", "__main__"))
    assert [name for name, count in counts.items() if count > 1] == []


def test_no_class_name_twice() -> None:
    counts = Counter(node.name for _, node in each(ast.ClassDef) if isinstance(node, ast.ClassDef))
    assert [name for name, count in counts.items() if count > 1] == []


def test_no_class_has_more_than_20_public_methods() -> None:
    found = {}
    for _, node in each(ast.ClassDef):
        assert isinstance(node, ast.ClassDef)
        methods = [one for one in node.body if isinstance(one, ast.FunctionDef) and not one.name.startswith("_")]
        if len({method.name for method in methods}) > 20:
            found[node.name] = len(methods)
    assert found == {}


def test_no_function_has_more_than_60_lines_of_code() -> None:
    found = {}
    for file, node in each(ast.FunctionDef):
        assert isinstance(node, ast.FunctionDef)
        if code_lines(file, node) > 60:
            found[f"{file.name}:{node.name}"] = code_lines(file, node)
    assert found.keys() <= LONG_FUNCTIONS, found


def test_every_room_says_what_comes_in_and_what_goes_out() -> None:
    for name, file in MODULES.items():
        if file.name == "__init__.py" and name not in PUBLIC_PACKAGES:
            text = ast.get_docstring(ast.parse(file.read_text())) or ""
            assert [word for word in ("In: ", "Out: ", "Imports ") if word not in text] == [], name


def test_the_design_page_says_where_each_promise_stands() -> None:
    """Rows of the table of Notes: a Note that is there, and the file that has it."""
    rows = re.findall(r"^\| ([^|`]+?) \| `([\w/]+\.py)` \|", (ROOT / "docs" / "design.md").read_text(), flags=re.M)
    assert len(rows) > 40
    places = [
        (ROOT / place if (ROOT / place).exists() else ROOT / "lazy_backend" / place, name) for name, place in rows
    ]
    assert [name for file, name in places if f"Note [{name}]\n" not in file.read_text()] == []


def test_the_page_names_every_room() -> None:
    page = (ROOT / "docs" / "layout.md").read_text()
    folders = {file.parent.relative_to(ROOT).as_posix() for file in MODULES.values()}
    assert [folder for folder in sorted(folders) if f"`{folder}/`" not in page] == []


def test_the_package_holds_every_room() -> None:
    """Else a checkout works, and what users install does not."""
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    rooms = {".".join(file.parent.relative_to(ROOT).parts) for file in MODULES.values()}
    assert sorted(packages) == sorted(room if room.startswith("lazy_") else f"lazy_backend.{room}" for room in rooms)


def test_the_picture_shows_the_rooms_as_they_are() -> None:
    assert structure.PICTURE.read_text() == structure.drawn(), "run python tools/structure.py && make pictures"
    assert structure.PICTURE.with_suffix(".svg").exists()
