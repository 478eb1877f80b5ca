"""What a log tells of a run, however its process ended."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from synthetic_runs import make_run

from lazy_backend.diagnostics.run_log import Run, RunLog, RunLogError, collect, file_of_process, merged, read_run

SYNC = make_run(1, 3).syncs[1]
PROGRAM = make_run(1, 3).programs["program 1"]


def open_log(folder: Path, name: str = "run.jsonl", state: Callable[[], dict[str, Any]] = dict) -> RunLog:
    return RunLog(str(folder / name), state, began=time.time())


def test_what_is_written_is_read(tmp_path: Path) -> None:
    log = open_log(tmp_path, state=lambda: {"computations": [{"graph": "#1"}]})
    log.add_program(PROGRAM)
    log.add_sync(SYNC)
    log.close()
    run = read_run(tmp_path / "run.jsonl")
    assert run.header["process"] == os.getpid()
    assert run.programs == {"program 1": PROGRAM}
    assert run.syncs == {1: SYNC}
    assert run.state["computations"] == [{"graph": "#1"}]
    assert run.notes == []


def test_a_line_is_in_the_file_at_once(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.add_sync(SYNC)
    run = read_run(tmp_path / "run.jsonl")
    assert list(run.syncs) == [1]
    assert "without the state at exit" in run.notes[0]
    log.close()


def test_a_last_line_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.add_sync(SYNC)
    log.close()
    path = tmp_path / "run.jsonl"
    with open(path, "a") as file:
        file.write('{"type": "sync", "number": 2, "st')
    run = read_run(path)
    assert list(run.syncs) == [1]
    assert "1 unreadable line(s) left out" in run.notes[0]


def test_a_run_that_ends_after_its_sync_was_written(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.add_sync(SYNC | {"run_begin": None, "run_seconds": None})
    log.add_run(1, 2.0, 0.5, 0.25)
    log.close()
    sync = read_run(tmp_path / "run.jsonl").syncs[1]
    assert (sync["run_begin"], sync["run_seconds"], sync["collective_seconds"]) == (2.0, 0.5, 0.25)


def test_a_run_that_was_over_is_not_written_twice(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.add_sync(SYNC)
    log.add_run(1, 2.0, 0.5, 0.0)
    log.close()
    assert '"ran"' not in (tmp_path / "run.jsonl").read_text()


def test_a_compile_is_known_from_its_begin_its_sync_and_its_end() -> None:
    began = {"type": "compile", "number": 1, "graph": "", "outcome": "started", "end": None}
    ended = {"type": "compile", "number": 1, "graph": "", "outcome": "compiled", "end": 2.0}
    run = collect([began, SYNC | {"compiles": [began | {"graph": "#4"}]}, ended])
    assert run.compiles == {1: ended | {"graph": "#4"}}


def test_the_last_of_several_runs_counts(tmp_path: Path) -> None:
    for number in (1, 2):
        log = open_log(tmp_path)
        log.add_sync(SYNC | {"number": number})
        log.close()
    run = read_run(tmp_path / "run.jsonl")
    assert list(run.syncs) == [2]
    assert run.notes == ["The file holds 2 runs; this is the last one."]


def test_the_process_in_the_name(tmp_path: Path) -> None:
    open_log(tmp_path, "run.{pid}.jsonl").close()
    assert (tmp_path / f"run.{os.getpid()}.jsonl").exists()


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log._process += 1  # as it looks in a child
    log.add_sync(SYNC)
    assert (tmp_path / "run.jsonl").read_text().count("\n") == 1
    log._process -= 1
    log.close()


def test_a_file_that_cannot_be_written_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = open_log(tmp_path / "missing")
    log.add_sync(SYNC)
    log.close()
    assert capsys.readouterr().err.count("no run log any more") == 1


@pytest.mark.parametrize("text", ["", "no json at all\n", json.dumps([1, 2]) + "\n"])
def test_a_file_without_a_run(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.jsonl").write_text(text)
    with pytest.raises(RunLogError, match=r"holds no run\n  lazy_backend\.config\.log_file"):
        read_run(tmp_path / "run.jsonl")


def test_lines_of_a_later_version_are_passed_over() -> None:
    assert collect([{"type": "something new"}, SYNC]).syncs == {1: SYNC}
    assert isinstance(collect([]), Run)


# ----- several ranks


def of_rank(rank: int | None, began: float) -> Run:
    run = make_run(4, 3)
    run.header |= {"rank": rank, "began": began}
    return run


def test_runs_of_ranks_are_put_on_one_clock() -> None:
    one, two = of_rank(0, 100.0), of_rank(1, 102.5)
    for run in (one, two):
        run.state["computations"] = [{"graph": "#1", "nodes": 7, "compiles": 1}]
    both = merged([two, one])
    assert {sync["device"] for sync in both.syncs.values()} == {"rank 0", "rank 1"}
    assert len(both.syncs) == len(one.syncs) + len(two.syncs)
    assert len(both.compiles) == len(one.compiles) + len(two.compiles)
    begins = {sync["device"]: sync["begin"] for sync in both.syncs.values() if sync["step"] == 4}
    assert begins["rank 1"] - begins["rank 0"] == pytest.approx(2.5)
    for sync in both.syncs.values():
        assert both.programs[sync["program"]]["device"] == sync["device"]
    assert {line["graph"] for line in both.state["computations"]} == {"#1 of rank 0", "#1 of rank 1"}
    assert (one.syncs[1]["device"], len(one.state["computations"])) == ("lazy:0", 1), "the runs are left as they were"


@pytest.mark.parametrize("ranks", [(None, None), (0, 0), (0, None)])
def test_other_logs_are_not_merged(ranks: tuple[int | None, ...]) -> None:
    with pytest.raises(RunLogError, match="not the logs of several ranks"):
        merged([of_rank(rank, 100.0) for rank in ranks])


@pytest.mark.parametrize(
    ("name", "rank", "size", "file"),
    [
        ("run.jsonl", None, None, "run.jsonl"),
        ("run.jsonl", "1", "2", "run-rank1.jsonl"),
        ("run.jsonl", "0", "1", "run.jsonl"),
        ("logs/{rank}.jsonl", "1", "2", "logs/1.jsonl"),
        ("logs/{rank}.jsonl", None, None, "logs/0.jsonl"),
        ("run-{pid}.jsonl", "1", "2", "run-{own}.jsonl"),
    ],
)
def test_ranks_have_files_of_their_own(
    monkeypatch: pytest.MonkeyPatch, name: str, rank: str | None, size: str | None, file: str
) -> None:
    for variable, value in (("RANK", rank), ("WORLD_SIZE", size)):
        monkeypatch.delenv(variable, raising=False)
        if value is not None:
            monkeypatch.setenv(variable, value)
    assert file_of_process(name) == file.replace("{own}", str(os.getpid()))
