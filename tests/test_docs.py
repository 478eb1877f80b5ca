"""The documentation: its code runs, its names exist."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forks import run_fork
from harness import run_ranks

import lazy_backend.settings

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# An optional comment, then a block; blocks in lists are indented. `<!-- not run: reason -->` says why a block is not
# run, `<!-- needs: libraries -->` that it runs by itself where they are, `<!-- torchrun: 2 -->` that it is a script for
# so many processes.
BLOCK = re.compile(
    r"^(?P<skip>[ ]*<!--\s*(?P<how>not run|needs|torchrun):[ ]*(?P<reason>.*?)\s*-->\n)?"
    r"(?P<indent>[ ]*)```python\n(?P<code>.*?)^(?P=indent)```",
    flags=re.M | re.S,
)

# Runs blocks of a page as a program of its own, in one namespace, each at its own line so that a traceback names it.
BLOCKS = """
def run(page, spans):
    source = open(page).read().split("\\n")
    for first, last, indent in (map(int, span.split(":")) for span in spans):
        block = [line[indent:] for line in source[first:last]]
        exec(compile("\\n" * first + "\\n".join(block), page, "exec"), names)

names = {{"__name__": "__main__"}}
run({page!r}, {spans})
"""


def run_blocks(page: Path, spans: list[str], folder: Path) -> None:
    code = BLOCKS.format(page=str(page), spans=spans)
    done = run_fork(code, folder, environment(), timeout=300, is_dismantled=False)
    assert done.returncode == 0, done.stdout + done.stderr


def environment() -> dict[str, str]:
    settings = {"LAZY_BACKEND_BACKEND": "eager", "LAZY_BACKEND_COMPILE": "foreground", "HF_HUB_OFFLINE": "1"}
    small = lazy_backend.settings.FLAGS["compile_after_operators"]
    return {**os.environ, **settings, str(small.env): str(small.default)}


def blocks(page: Path) -> list[str]:
    """The blocks of a page that are to run, as `first line:last line:indentation`, counted from 0."""
    text = page.read_text()
    found = []
    for match in BLOCK.finditer(text):
        if match["skip"] is None:
            first = text.count("\n", 0, match.start("code"))
            found.append(f"{first}:{first + match['code'].count(chr(10))}:{len(match['indent'])}")
    return found


@pytest.mark.parametrize("page", [page for page in PAGES[1:] if blocks(page)], ids=lambda page: page.name)
def test_the_blocks_of_a_page_run_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    run_blocks(page, blocks(page), tmp_path)


@pytest.mark.parametrize("span", blocks(PAGES[0]))
def test_a_block_of_the_readme_runs_by_itself(span: str, tmp_path: Path) -> None:
    run_blocks(PAGES[0], [span], tmp_path)


PAGE = """
```python
x = 1
```
<!-- not run: a reason -->
```python
x = 2
```
- in a list:
  ```python
  1 / x
  x = 0
  1 / x
  ```
"""


def test_a_block_that_fails_is_told_by_its_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    with pytest.raises(AssertionError, match=r'page.md", line 13(?s:.*)ZeroDivisionError'):
        run_blocks(page, blocks(page), tmp_path)


RECIPES = [
    (page, match)
    for page in PAGES
    for match in BLOCK.finditer(page.read_text())
    if match["how"] in ("needs", "torchrun")
]

# One script is started by torchrun itself, 8 s of a core; others in forks, as torchrun starts them.
LAUNCHED = next(match for _, match in RECIPES if match["how"] == "torchrun")


@pytest.mark.scenario
@pytest.mark.parametrize(
    ("page", "match"), RECIPES, ids=[f"{page.name}: {match['how']} {match['reason']}" for page, match in RECIPES]
)
def test_a_recipe_runs_by_itself(page: Path, match: re.Match[str], tmp_path: Path) -> None:
    if match["how"] == "torchrun":
        script = tmp_path / "script.py"
        script.write_text(match["code"])
        if match is not LAUNCHED:
            done = run_ranks(script, tmp_path, int(match["reason"]), **environment())
            assert [one.returncode for one in done] == [0] * len(done), "".join(one.stderr for one in done)
            return
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={match['reason']}"]
        command = [sys.executable, *launcher, str(script)]
        done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return
    for library in match["reason"].split(", "):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    first = page.read_text().count("\n", 0, match.start("code"))
    run_blocks(page, [f"{first}:{first + match['code'].count(chr(10))}:{len(match['indent'])}"], tmp_path)


# Pages with tables of times, each with the command that measures it; the others link to them.
MEASURED = ["benchmarks", "compatibility", "op_support", "reliability", "scaling", "serving", "settings"]


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem not in MEASURED], ids=lambda page: page.name)
def test_times_stand_in_the_pages_that_say_how_they_were_measured(page: Path) -> None:
    prose = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.M | re.S)
    assert re.findall(r".*[0-9] ?(?:ns|[µu]s|ms)\b.*", prose) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_is_not_run_says_why(page: Path) -> None:
    assert all(match["reason"] for match in BLOCK.finditer(page.read_text()) if match["skip"])


EXAMPLES = [
    (page, example)
    for page in PAGES
    for example in re.findall(r"<!-- not run: it is (\S+), which the tests run -->", page.read_text())
]


@pytest.mark.parametrize(("page", "example"), EXAMPLES, ids=[example for _, example in EXAMPLES])
def test_an_example_is_shown_as_it_is_and_is_short(page: Path, example: str) -> None:
    code = (ROOT / example).read_text()
    assert f"{example}, which the tests run -->\n```python\n{code}```" in page.read_text()
    assert len(code.splitlines()) <= 40


NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"


def test_the_notebook_prints_what_it_shows_but_for_its_figures(tmp_path: Path) -> None:
    code = f"""
import json, sys
sys.path.insert(0, {str(ROOT / "tools")!r})
from pages.notebook import code_cells, printed, run
notebook = json.load(open({str(NOTEBOOK)!r}))
shown = "".join(map(printed, code_cells(notebook)))
run(notebook)
print(json.dumps([shown, "".join(map(printed, code_cells(notebook)))]))
"""
    done = run_fork(code, tmp_path, environment(), timeout=300, is_dismantled=False)
    assert done.returncode == 0, done.stdout + done.stderr
    shown, now = (re.sub(r"PyTorch .*|[0-9.]+", "0", text) for text in json.loads(done.stdout))
    assert shown
    assert now == shown


# ----- docs/migrating.md


def rows() -> list[tuple[str, str, str]]:
    """The rows of its tables: theirs, ours, remark."""
    lines = (ROOT / "docs" / "migrating.md").read_text().splitlines()
    cells = [line.strip("|").split("|") for line in lines if line.startswith("|") and not line.startswith("|---")]
    return [(theirs.strip(), ours.strip(), remark.strip()) for theirs, ours, remark in cells]


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([\w.]+)", cell)


def resolve(name: str) -> Any:
    """What a dotted name stands for; a module of torch's may have to be imported first."""
    parts = name.split(".")
    for place in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:place]))
        except ImportError:
            continue
        return functools.reduce(getattr, parts[place:], module)
    raise ImportError(name)


@pytest.mark.parametrize("name", sorted({name for _, ours, _ in rows() for name in names_in(ours)} - {"lazy_backend"}))
def test_a_name_of_ours_in_the_tables_exists(name: str) -> None:
    if name.startswith("LAZY_"):
        assert name in {flag.env for flag in lazy_backend.settings.FLAGS.values()}
    else:
        resolve(name)


@pytest.mark.parametrize(
    "name", sorted(name for theirs, _, _ in rows() for name in names_in(theirs) if name.startswith("torch._lazy."))
)
def test_a_name_of_torch_lazy_in_the_tables_exists(name: str) -> None:
    resolve(name)


def test_every_function_of_torch_lazy_is_in_the_tables() -> None:
    modules = "closure computation config debug device_context extract_compiled_graph ir_cache metrics ts_backend"
    listed = {resolve(name) for theirs, _, _ in rows() for name in names_in(theirs) if name.startswith("torch._lazy.")}
    helpers = {"force_lazy_device", "get_fallback_ops"}  # of extract_compiled_graph
    for place in ["torch._lazy", *(f"torch._lazy.{name}" for name in modules.split())]:
        own = inspect.getmembers(importlib.import_module(place), inspect.isfunction)
        missing = [
            name
            for name, function in own
            if function.__module__ == place and not name.startswith("_") and function not in listed
        ]
        assert set(missing) <= helpers, place


def test_a_remark_names_settings_that_exist() -> None:
    text = (ROOT / "docs" / "migrating.md").read_text()
    named = set(re.findall(r"`(?:lazy_backend\.)?config\.(\w+)", text))
    assert named <= set(lazy_backend.settings.FLAGS)


def test_pages_list_the_settings_ports_and_figures_that_there_are() -> None:
    code = """
from listed_pages import pages
for page, found in pages().items():
    assert page.read_text() == found, f"{page.name} is out of date: run `python tools/listed_pages.py`"
"""
    # a process of its own: tests declare ports, too
    subprocess.run([sys.executable, "-c", code], cwd=ROOT / "tools", check=True)
