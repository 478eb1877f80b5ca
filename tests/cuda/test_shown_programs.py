"""The programs of the README and of examples/, for a few steps, on the device behind the lazy one."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from backing import BACKING, needs_gpu
from harness import run_python

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_quickstart(tmp_path: Path) -> None:
    """With the settings that a user has; the CPU is spared the compiler."""
    text = (ROOT / "README.md").read_text()
    found = re.search(r"## Quickstart\n\n```python\n(.*?)```", text, flags=re.S)
    assert found is not None
    (tmp_path / "cache").mkdir(mode=0o700)
    settings = {"LAZY_BACKEND_CACHE_DIR": str(tmp_path / "cache")}
    if BACKING == "cpu":
        settings["LAZY_BACKEND_COMPILE"] = "off"
    told = run_python(found[1], tmp_path, **settings)
    eager, lazy = (float(loss) for loss in re.findall(r"^\w+: loss ([\d.]+), ", told, flags=re.M))
    assert 0 < eager < 9, told
    if BACKING == "cpu":
        assert lazy == pytest.approx(eager, abs=1e-3), told


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=[needs_gpu, pytest.mark.slow])])
def test_the_gpt_learns_as_in_eager(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tqdm", reason="the examples show progress with tqdm")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setattr(sys, "argv", ["example"])
    import common
    import train_gpt

    import lazy_backend

    with lazy_backend.config.patch(backend=backend):
        run = train_gpt.train("lazy", steps=12)
    difference = common.compare(run, train_gpt.train(common.eager_device(), steps=12))
    assert difference.losses < common.TOLERANCE
    assert lazy_backend.metrics.counter_value("GraphCut") == 0
