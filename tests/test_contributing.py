"""The worked changes of docs/contributing.md, each applied to a copy of the package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from forks import run_fork

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "contributing.md").read_text()
CHANGES = re.findall(r"^## (.+?)\n.*?```diff\n(.*?)```.*?```python\n(.*?)```.*?```text\n(.*?)```", PAGE, re.M | re.S)


def test_the_page_has_four_changes() -> None:
    assert [name for name, *_ in CHANGES] == ["A counter", "An operator's rule", "A graph pass", "A kind of plan"]


@pytest.mark.skipif(shutil.which("git") is None, reason="git applies the changes")
@pytest.mark.parametrize(("diff", "program", "printed"), [c[1:] for c in CHANGES], ids=[c[0] for c in CHANGES])
def test_a_worked_change_works(diff: str, program: str, printed: str, tmp_path: Path) -> None:
    assert diff.count("+++ ") <= 5
    copied = tmp_path / "checkout"
    for folder in ("lazy_backend", "lowering", "cache", "docs"):
        ignored = shutil.ignore_patterns("__pycache__", "images")
        shutil.copytree(ROOT / folder, copied / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", copied)
    # beyond the folder of the tests' own repository, if git looks for one
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path)}
    subprocess.run(["git", "apply", "-"], input=diff, text=True, cwd=copied, env=environment, check=True)
    environment = {**os.environ, "LAZY_BACKEND_CACHE": "0", "LAZY_BACKEND_COMPILE": "off"}
    done = run_fork(program, copied, environment)  # which looks for modules there first
    assert (done.stdout, done.returncode) == (printed, 0), done.stderr
