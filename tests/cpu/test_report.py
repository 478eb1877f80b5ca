"""What the report's page holds, and how it comes from a run and from its log. Its looks: tests/browser."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_program
from torch import nn

import lazy_backend
from lazy_backend import config
from lazy_backend.diagnostics.history import CompileRecord, history
from lazy_backend.diagnostics.page import main
from lazy_backend.diagnostics.run_log import read_run, source_line
from lazy_backend.execution.sync import executor

HERE = Path(__file__).name
ASSETS = Path(lazy_backend.__file__).parent / "diagnostics" / "assets"


def data_of(page: Path) -> dict[str, Any]:
    """What is embedded in a page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text())
    assert found is not None
    return json.loads(found[1])  # type: ignore[no-any-return]


def steps(count: int) -> None:
    weight = torch.ones(3, 3).to("lazy")
    for _ in range(count):
        weight.mul_(0.5)
        (weight @ weight).relu_().sum()  # work
        lazy_backend.mark_step()
    lazy_backend.wait_device_ops()


# ----- from the history


def test_the_page_shows_the_run(tmp_path: Path) -> None:
    steps(5)
    data = data_of(lazy_backend.report(tmp_path / "report.html"))
    assert data["summary"]["steps"] == 5
    assert data["summary"]["hits"] == 4
    assert data["syncs"]["step"] == [1, 2, 3, 4, 5]
    assert all(seconds is not None for seconds in data["syncs"]["run"])
    assert data["state"]["computations"][0]["runs"] == 5


def test_a_wait_for_compiles_is_recorded_with_its_line(tmp_path: Path) -> None:
    config.log_file = str(tmp_path / "run.jsonl")
    steps(2)
    assert lazy_backend.wait_for_compiles(timeout=5)  # here
    steps(1)
    in_memory = data_of(lazy_backend.report(tmp_path / "report.html"))["waits"]
    history.reset()
    (wait,) = read_run(tmp_path / "run.jsonl").waits
    assert wait["call"] == "wait_for_compiles()"
    assert source_line(wait["site"]).endswith("# here")
    assert (wait["step"], wait["done"]) == (3, True)
    assert in_memory == [{name: value for name, value in wait.items() if name != "type"}]


def test_programs_that_differ_in_a_number_are_variants_of_one(tmp_path: Path) -> None:
    x = torch.ones(4, device="lazy", dtype=torch.int64)
    lazy_backend.mark_step()
    for number in range(3, 8):
        y = x * number  # an int is part of the program
        lazy_backend.mark_step()
    y = x + 3
    lazy_backend.mark_step()
    del y
    programs = data_of(lazy_backend.report(tmp_path / "report.html"))["programs"]
    multiplied = [program for program in programs if program["like"] == programs[-2]["like"]]
    assert len(multiplied) == 5
    assert multiplied[0]["differs"] == ""
    assert multiplied[-1]["differs"].startswith("aten.mul(")
    assert ", 7)" in multiplied[-1]["differs"]
    assert programs[-1]["like"] == programs[-1]["name"]


def test_lists_of_other_lengths_make_variants_too(tmp_path: Path) -> None:
    rows = [torch.ones(2).to("lazy") for _ in range(5)]
    for count in range(2, 6):
        stacked = torch.stack(rows[:count])
        lazy_backend.mark_step()
    del stacked
    programs = data_of(lazy_backend.report(tmp_path / "report.html"))["programs"]
    assert {program["like"] for program in programs} == {programs[0]["name"]}
    assert programs[-1]["differs"] == "aten.stack([5 tensors]) -> f32[5, 2]"


def test_a_picture_folds_neighbouring_calls_of_a_line(tmp_path: Path) -> None:
    steps(2)
    picture = data_of(lazy_backend.report(tmp_path / "report.html"))["programs"][0]["picture"]
    assert len(picture["op"]) == 4  # mul_, mm, relu_, sum
    assert picture["folded"]["places"] == [0, 1, 1, 3]
    assert picture["folded"]["edges"] == [0, 1]


def test_a_compile_that_is_not_over_is_counted(tmp_path: Path) -> None:
    steps(2)
    history.compile_began("graph", CompileRecord("#1", 3, "it recurred", history.now()))
    steps(1)
    data = data_of(lazy_backend.report(tmp_path / "report.html"))
    summary = data["summary"]
    assert (summary["compiles"], summary["compiles_running"]) == (len(data["compiles"]) - 1, 1)
    assert summary["compile_seconds"] >= data["compiles"][-1]["elapsed"] > 0


def test_the_page_needs_no_network(tmp_path: Path) -> None:
    page = lazy_backend.report(tmp_path / "report.html").read_text()
    page = page.replace((ASSETS / "echarts.min.js").read_text(), "")  # what it loads, a browser's test sees
    assert not re.search(r"<(script|link|img|iframe)[^>]*\b(src|href)=\"(?!data:)", page)
    assert "@import" not in page


def test_a_page_of_nothing(tmp_path: Path) -> None:
    data = data_of(lazy_backend.report(tmp_path / "report.html"))
    assert data["summary"]["syncs"] == 0
    assert data["findings"] == data["programs"] == []


def test_calls_have_shapes_lines_and_edges(tmp_path: Path) -> None:
    steps(2)
    data = data_of(lazy_backend.report(tmp_path / "report.html"))
    picture = data["programs"][0]["picture"]
    texts = data["texts"]
    assert [texts[op] for op in picture["op"]] == ["aten.mul_", "aten.mm", "aten.relu_", "aten.sum"]
    assert texts[picture["makes"][1]] == "slot0: f32[3, 3]"
    assert picture["enters"][0] == "input0: f32[3, 3]"
    assert picture["writes"] == {"0": ["input0"], "2": ["slot0"]}
    assert picture["edges"] == [0, 1, 1, 2, 2, 3]
    line = texts[picture["site"][1]]
    assert HERE in line
    assert data["sources"][line].endswith("# work")


def test_no_text_of_the_users_ends_the_script(tmp_path: Path) -> None:
    x = torch.ones(2).to("lazy")
    x.add(1)  # </script><script>document.title = "broken"</script>
    lazy_backend.mark_step()
    page = lazy_backend.report(tmp_path / "report.html")
    assert any("</script>" in source for source in data_of(page)["sources"].values())


def test_cuts_by_line(tmp_path: Path) -> None:
    x = torch.ones(3).to("lazy")
    for _ in range(4):
        x = x * 2
        x.sum().item()  # cut
        lazy_backend.mark_step()
    (row,) = data_of(lazy_backend.report(tmp_path / "report.html"))["cuts"]
    assert (row["cause"], row["count"], row["steps"]) == ("item()", 4, 4)
    assert HERE in row["site"]
    assert row["seconds"] > 0


def test_explanations_that_are_alike_are_one_row(tmp_path: Path) -> None:
    total: list[torch.Tensor] = []
    for _ in range(6):
        total.append(torch.ones(2).to("lazy") * 2)
        torch.stack(total).sum()  # grows
        lazy_backend.mark_step()
    rows = data_of(lazy_backend.report(tmp_path / "report.html"))["explained"]
    grown = next(row for row in rows if row["difference"] and "list of 6" in row["difference"]["now"])
    assert grown["count"] >= 4
    assert "running sum" in grown["advice"]


def test_a_page_has_room_for_the_programs_that_ran_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazy_backend.diagnostics.page_content._MAX_CALLS", 5)
    steps(3)
    (torch.ones(3).to("lazy") + 1).mul_(2)
    lazy_backend.mark_step()
    first, second = data_of(lazy_backend.report(tmp_path / "report.html"))["programs"]
    assert first["picture"] is not None
    assert (second["picture"], second["calls"]) == (None, 2)


def test_nodes_of_a_profile(tmp_path: Path) -> None:
    served = lazy_backend.serve(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), torch.ones(2, 4))
    profile = served.benchmark_nodes([torch.ones(2, 4)], warmup=1, runs=3)
    nodes = data_of(lazy_backend.report(tmp_path / "report.html", profile=profile))["nodes"]
    assert sorted(node["op"] for node in nodes) == sorted(profile.names)
    assert [node["seconds"] for node in nodes] == sorted(profile.seconds_per_node, reverse=True)


def test_captured_calls_are_steps(tmp_path: Path) -> None:
    weight = torch.ones(3).to("lazy")
    double = lazy_backend.capture(lambda x: (x * 2).sum())
    for _ in range(6):
        double(weight)
    lazy_backend.wait_device_ops()
    data = data_of(lazy_backend.report(tmp_path / "report.html"))
    outcomes = [data["texts"][number] for number in data["syncs"]["outcome"]]
    assert outcomes.count("replay") >= 3
    assert data["summary"]["cuts"] == 0


# ----- what is alive


def test_live_tensors_are_known_by_the_line_that_made_them() -> None:
    kept = []
    x = torch.ones(4).to("lazy")
    for _ in range(5):
        kept.append(x * 2)  # made
        lazy_backend.mark_step(wait=True)
    # other tests' tensors may be alive too
    (made,) = [row for row in history.alive_by_line("lazy:0") if row["how"] == "made at" and HERE in row["site"]]
    assert (made["tensors"], made["bytes"]) == (5, 80)


def test_samples_are_bounded_and_keep_the_beginning() -> None:
    steps(2)
    series, (first, *_) = history.memory, history.memory.samples
    interval = series._interval
    for _ in range(5000):
        series.add(first, 0.0)
    assert len(series.samples) < 2000
    assert series.samples[0] is first
    assert series._interval > interval


def test_a_dear_sample_makes_the_next_one_wait() -> None:
    steps(2)
    series = history.memory
    series.add(series.samples[0], 0.05)
    assert series.due == pytest.approx(series.samples[0].time + 5.0)


# ----- from a log


def test_a_log_tells_what_the_history_does(tmp_path: Path) -> None:
    config.log_file = str(tmp_path / "run.jsonl")
    steps(4)
    assert history.log is not None
    history.log.close()
    lines = [record.to_dict() for record in lazy_backend.explain().records]
    run = read_run(tmp_path / "run.jsonl")
    assert list(run.syncs.values()) == lines
    assert list(run.programs) == ["program 1"]
    assert run.programs["program 1"]["syncs"] == 4
    assert [compiled["outcome"] for compiled in run.compiles.values()] == ["compiled"]
    assert any(source.endswith("# work") for source in run.sources.values())


def test_a_reset_begins_another_run_in_the_log(tmp_path: Path) -> None:
    config.log_file = str(tmp_path / "run.jsonl")
    steps(4)
    lazy_backend.metrics.reset()
    steps(2)
    run = read_run(tmp_path / "run.jsonl")
    assert len(run.syncs) == 2
    assert len(run.programs) == 1
    assert any("2 runs" in note for note in run.notes)


def test_another_name_is_another_log(tmp_path: Path) -> None:
    for name in ("one.jsonl", "two.jsonl"):
        config.log_file = str(tmp_path / name)
        steps(2)
    one, two = (read_run(tmp_path / name) for name in ("one.jsonl", "two.jsonl"))
    assert (list(one.syncs), list(two.syncs)) == ([1, 2], [3, 4])
    assert one.notes == []  # it was closed, with the state at its end
    assert list(two.programs) == ["program 1"]


KILLED = """
import os, signal, torch, lazy_backend
x = torch.ones(3).to("lazy")
for step in range(7):
    x = x * 2
    lazy_backend.mark_step(wait=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_log_of_a_killed_process(tmp_path: Path) -> None:
    environment = {"LAZY_BACKEND_LOG": "run.jsonl", "LAZY_BACKEND_COMPILE": "off"}
    with pytest.raises(AssertionError):
        run_program(KILLED, tmp_path, **environment)
    assert main([str(tmp_path / "run.jsonl")]) == 0
    data = data_of(tmp_path / "run.html")
    assert data["summary"]["steps"] == 7
    assert any("killed" in note for note in data["notes"])


def test_the_command(tmp_path: Path) -> None:
    steps(3)
    lazy_backend.explain().save(tmp_path / "run.jsonl")
    command = [sys.executable, "-m", "lazy_backend.report", "run.jsonl", "-o", "page.html"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "page.html\n", "")
    assert data_of(tmp_path / "page.html")["summary"]["steps"] == 3


def test_the_command_is_no_module_to_import() -> None:
    with pytest.raises(ImportError, match="is a function and a command"):
        importlib.import_module("lazy_backend.report")
    assert callable(lazy_backend.report)


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "missing.jsonl")]) == 1
    assert "missing.jsonl" in capsys.readouterr().err


def test_a_report_makes_no_graph_again() -> None:
    x = torch.ones(4).to("lazy")
    for _ in range(3):
        x = x * 2
        lazy_backend.mark_step(wait=True)
    computations = list(executor.computations.cache)
    assert computations
    assert all(computation.executor.stored.set_aside() for computation in computations)
    (row, *_) = executor.computations.describe()
    assert (row["nodes"], row["inputs"], row["outputs"]) == (1, 1, 1)
    assert all(computation.executor.stored.is_set_aside() for computation in computations)
