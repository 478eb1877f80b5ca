"""The conformance tool: a subset of PyTorch's databases agrees with eager, and differences do not go unnoticed."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import run_fork
from harness import run_program

pytestmark = pytest.mark.scenario  # what they share takes half a minute

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "tools"
PAGE = ROOT / "docs" / "op_support.md"
# unary, binary, reduction, view, random, linear algebra, list, index, data-dependent shape, factory, module, optimizer
NAMES = ("exp", "add", "sum", "transpose", "nn.functional.dropout", "linalg.solve", "_foreach_mul", "gather", "nonzero",
         "zeros", "nn.Linear", "SGD: default")  # fmt: skip
SUBSET_MODES = "interpreted,twice,autocast to bfloat16,autocast to float16"
SUBSET = ("--ops", f"^({'|'.join(NAMES)})$", "--modes", SUBSET_MODES)


def conformance(*arguments: str) -> subprocess.CompletedProcess[str]:
    tool = TOOLS / "conformance.py"
    return run_fork(tool.read_text(), Path.cwd(), dict(os.environ), tool, arguments, timeout=300)


def records(path: Path) -> dict[str, dict[str, Any]]:
    return {record["case"]: record for record in map(json.loads, path.read_text().splitlines())}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that a run over the subset leaves."""
    path = tmp_path_factory.mktemp("conformance") / "results.jsonl"
    done = conformance(*SUBSET, "--results", str(path))
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="module")
def resumed(results: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """What the finished run prints when it is resumed, and the page that it writes. Its results stay as they are."""
    before, page = results.read_text(), tmp_path_factory.mktemp("page") / "support.md"
    done = conformance(*SUBSET, "--results", str(results), "--resume", "--write", str(page))
    assert results.read_text() == before
    return done, page


def test_the_subset_agrees_with_eager(results: Path) -> None:
    found = records(results)
    assert len(found) > 50
    assert not [record for record in found.values() if record["status"] not in ("pass", "skip")]


def test_data_dependent_shapes_are_told(results: Path) -> None:
    cuts = records(results)["op/nonzero/forward/float32/interpreted"]["cuts"]
    assert any("its output depends on values" in cause for cause in cuts)


def test_a_finished_run_is_not_repeated(resumed: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    done, _ = resumed
    assert done.returncode == 0, done.stderr
    assert "op_db, gradients" in done.stdout


def test_the_document_has_a_line_per_entry(resumed: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    _, page = resumed
    assert page.read_text().startswith("<!-- Generated")
    assert "| `nn.functional.dropout` | ✓ |" in page.read_text()


def symbols(page: Path) -> dict[str, dict[str, str]]:
    """Entry -> column -> symbol, of the tables with a line per entry."""
    found: dict[str, dict[str, str]] = {}
    columns: list[str] = []
    for line in page.read_text().partition("## Every entry")[2].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if cells[0] in ("op_db", "module_db", "optim_db"):
            columns = cells[1:]
        elif line.startswith("| `"):
            found[cells[0].strip("`")] = dict(zip(columns, cells[1:], strict=True))
    return found


def test_a_sample_of_the_published_page_is_as_measured_now(
    resumed: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    _, page = resumed
    published = symbols(PAGE)
    for name, measured in symbols(page).items():
        not_tried = {"aot", "inductor"}
        expected = {column: symbol for column, symbol in published[name].items() if column not in not_tried}
        assert {column: symbol for column, symbol in measured.items() if column not in not_tried} == expected, name


def test_the_published_page_says_of_which_commit_and_databases_it_is() -> None:
    assert re.search(r"Measured at commit `[0-9a-f]{7,}", PAGE.read_text())
    assert databases_of_page()


def test_the_published_page_has_what_the_tool_says_of_values_that_operators_refuse() -> None:
    section = PAGE.read_text().partition("### Values that operators refuse")[2].partition("## Every entry")[0]
    assert section.strip() in (TOOLS / "conformance_suite" / "tables.py").read_text()


def databases_of_page() -> str:
    """The version of PyTorch whose databases the page lists."""
    said = re.search(r"PyTorch (\d+\.\d+\.\d+) brings databases", PAGE.read_text())
    return said[1] if said else ""


def test_the_published_page_has_every_entry() -> None:
    here = torch.__version__.partition("+")[0]
    if here != databases_of_page():
        pytest.skip(f"the page lists the databases of PyTorch {databases_of_page()}: {here} lacks entries of them")
    listed = conformance("--list").stdout.splitlines()
    assert set(symbols(PAGE)) == {case.split("/")[1] for case in listed}


def test_every_dtype_is_tried_if_asked_for() -> None:
    listed = conformance("--list", "--ops", "^add$", "--databases", "op", "--every-dtype").stdout.splitlines()
    assert "op/add/forward/complex128/interpreted" in listed
    assert {case.split("/")[3] for case in listed if "/forward/" in case} >= {"bool", "int8", "uint8", "bfloat16"}


def test_results_name_the_commit(results: Path) -> None:
    commits = {record["commit"] for record in records(results).values()}
    assert len(commits) == 1
    assert re.fullmatch(r"([0-9a-f]{7,}\+?)?", commits.pop())


def test_a_misspelt_case_is_explained() -> None:
    done = conformance("--show", "op/add")
    assert done.returncode == 2
    assert "expected database/name/variant/dtype/mode" in done.stderr


def test_differences_are_noticed() -> None:
    run_program(
        """
import torch
from conformance_suite.checks import same_bits
nan, zero = float("nan"), 0.0
assert same_bits(torch.tensor([nan, 1.0]), torch.tensor([-nan, 1.0]))
assert not same_bits(torch.tensor([nan, 1.0]), torch.tensor([1.0, nan]))
assert not same_bits(torch.tensor([zero]), torch.tensor([-zero]))
assert not same_bits(torch.tensor([1.0]), torch.tensor([1.0 + 2**-23]))
""",
        cwd=TOOLS,
    )


def test_a_program_that_does_something_else_is_noticed() -> None:
    run_program(
        """
import torch
from conformance_suite.checks import Mismatch, Tolerance, _check_program
from conformance_suite.cases import parse_case
from conformance_suite.programs import Program
from conformance_suite.targets import TARGETS
from collections import Counter

case, lazy = parse_case("op/add/forward/float32/interpreted"), TARGETS["lazy"]()
wrong = {
    "values": lambda t: t.move(torch.ones(3)) + (t.device == "lazy"),
    "strides": lambda t: torch.empty_strided((2, 2), (1, 2) if t.device == "lazy" else (2, 1), device=t.device).zero_(),
    "requires_grad": lambda t: t.move(torch.ones(3)).requires_grad_(t.device == "lazy"),
    "memory": lambda t: (lambda x: [x, x[:] if t.device == "lazy" else x + 0])(t.move(torch.ones(3))),
    "no error": lambda t: t.move(torch.ones(3)).reshape(3 if t.device == "lazy" else 2),
}
for text, run in wrong.items():
    try:
        _check_program(case, Program("", run), lazy, Counter())
    except Mismatch as mismatch:
        assert text in str(mismatch), mismatch
    else:
        raise AssertionError(f"{text} not noticed")
""",
        cwd=TOOLS,
    )
