"""The examples, for a few steps: their losses are eager's, bit for bit."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from harness import run_ranks

import lazy_backend
from lazy_backend.diagnostics.findings import find
from lazy_backend.diagnostics.run_log import collect

EXAMPLES = str(Path(__file__).resolve().parent.parent / "examples")


@pytest.fixture(autouse=True)
def examples_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", ["example"])


def test_digits() -> None:
    import common
    import train_digits

    runs = [train_digits.train(device, epochs=1) for device in ("lazy", "cpu")]
    assert common.compare(*runs).equal
    assert lazy_backend.metrics.counter_value("Compile") <= 3


def test_gpt() -> None:
    import common
    import train_gpt

    runs = [train_gpt.train(device, steps=12) for device in ("lazy", "cpu")]
    assert common.compare(*runs).equal
    assert lazy_backend.metrics.counter_value("Compile") <= 3


@pytest.mark.filterwarnings("ignore::lazy_backend.errors.GraphCutWarning")
def test_slow_training(tmp_path: Path) -> None:
    import slow_training

    slow_training.main(["--steps", "8", "-o", str(tmp_path / "slow.html")])
    found = {(f.section, Path(f.site).name) for f in find(collect(lazy_backend.explain().lines()))}
    lines = Path(slow_training.__file__).read_text().splitlines()
    cut, grown = (
        next(f"slow_training.py:{number}" for number, line in enumerate(lines, 1) if text in line)
        for text in ("if not loss.isfinite()", "torch.stack(losses)")
    )
    assert {("cuts", cut), ("misses", grown)} <= found
    assert (tmp_path / "slow.html").exists()


def test_slow_training_without_its_faults() -> None:
    import slow_training

    fixed = slow_training.train_fixed(6)
    explanation = lazy_backend.explain()
    assert [record.outcome for record in explanation.records[2:]] == ["hit, level 1"] * 4
    assert lazy_backend.metrics.counter_value("GraphCut") == 0
    assert fixed == pytest.approx(slow_training.train(6))


def test_serve() -> None:
    import serve

    outcome = serve.run(threads=4, requests=50, swaps=10)
    assert outcome.wrong == 0
    assert outcome.frames <= 4


@pytest.mark.parametrize("option", [[], ["--fully-shard"]])
@pytest.mark.parametrize(("steps", "count"), [(8, 2), pytest.param(100, 4, marks=pytest.mark.slow)])
def test_gpt_in_several_processes(steps: int, count: int, option: list[str], tmp_path: Path) -> None:
    arguments = ["--backend", "eager", "--steps", str(steps), *option]
    first, *others = run_ranks(Path(EXAMPLES, "train_gpt_ddp.py"), tmp_path, count, arguments)
    assert [one.returncode for one in (first, *others)] == [0] * count, first.stderr + others[0].stderr
    assert "bit for bit equal to eager    yes" in first.stdout
    # in making the model, in the first two steps of DistributedDataParallel and for the evaluation, and none later
    cuts = re.search(r"graph cuts +(\d+)\n", first.stdout)
    assert cuts is not None
    assert int(cuts[1]) <= 5, first.stdout
    assert not any(one.stdout for one in others)


def test_gpt_in_several_processes_is_started_with_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import train_gpt_ddp

    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="start it as torchrun"):
        train_gpt_ddp.main()
