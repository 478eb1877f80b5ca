"""What a report says to do first, from runs whose times are known."""

from __future__ import annotations

from typing import Any

import pytest
from synthetic_runs import SITE, make_run

from lazy_backend.diagnostics.findings import Finding, find
from lazy_backend.diagnostics.run_log import Line, Run


def run_of(steps: int = 100, **further: Any) -> Run:
    """Known steps only, 19 ms each."""
    run = make_run(steps, 10)
    run.compiles.clear()
    run.memory.clear()
    for number, sync in run.syncs.items():
        sync |= {"begin": 0.02 * number, "trace_seconds": 0.006, "run_begin": 0.02 * number + 0.009}
        sync |= {"outcome": "hit, level 1", "difference": None, "cause": "mark_step", "site": f"{SITE}:40"}
        sync |= further
    return run


def titles(run: Run) -> list[str]:
    return [finding.title for finding in find(run)]


def named(run: Run, start: str) -> Finding:
    return next(finding for finding in find(run) if finding.title.startswith(start))


def test_nothing_stands_out() -> None:
    assert titles(run_of(wait_seconds=0.0)) == []


def test_a_cut_costs_until_its_value_is_there() -> None:
    run = run_of()
    for number in (10, 20, 30):
        run.syncs[number] |= {"cause": "item()", "site": f"{SITE}:9"}
    found = named(run, "item() cuts the step")
    assert found.seconds == pytest.approx(3 * 0.013)  # from the end of the recording to the end of the run
    assert (found.count, found.site) == (3, f"{SITE}:9")
    assert "mark_step()" in found.advice


def difference(kind: str) -> Line:
    return {
        "kind": kind, "before": "x", "now": "y", "advice": "pad", "place": 3, "before_site": "",
        "now_site": f"{SITE}:3",
    }  # fmt: skip


def test_a_new_program_costs_what_it_takes_beyond_a_known_one() -> None:
    run = run_of()
    for number in (50, 60):
        run.syncs[number] |= {"outcome": "miss", "difference": difference("shape"), "trace_seconds": 1.006}
    found = named(run, "2 syncs of new programs: another shape")
    assert found.seconds == pytest.approx(2.0)
    assert (found.site, found.place, found.program) == (f"{SITE}:3", 3, "program 1")


def test_programs_that_never_recur_are_called_so() -> None:
    run = run_of()
    for number in range(1, 51):
        name = f"program {100 + number}"
        run.syncs[number] |= {"outcome": "miss", "difference": difference("operand"), "program": name}
        run.syncs[number]["trace_seconds"] = 0.1
        run.programs[name] = run.programs["program 1"] | {"name": name, "syncs": 1}
    assert "never becomes one that is known" in named(run, "50 syncs of new programs").text


def compiled(**further: Any) -> Line:
    line = {"number": 1, "graph": "#1", "nodes": 3, "reason": "it recurred", "outcome": "compiled", "seconds": 0.9}
    return line | {"begin": 0.0, "end": 0.9, "difference": None, "error": None} | further


def test_a_compile_that_training_waited_for() -> None:
    run = run_of()
    run.compiles[1] = compiled(begin=1.0, end=1.9)
    run.syncs[50] |= {"compiles": [run.compiles[1]], "sync_seconds": 0.95, "begin": 0.99}
    assert named(run, "1 compile that training waited for").seconds == 0.9


def test_a_compile_in_the_background_holds_nothing_up() -> None:
    run = run_of()
    run.compiles[1] = compiled(begin=1.0, end=30.0)
    run.syncs[50] |= {"compiles": [run.compiles[1]]}
    assert not any("compile" in title for title in titles(run))


def test_graphs_that_were_interpreted_meanwhile() -> None:
    run = run_of(plan="interpreted")
    run.compiles[1] = compiled(outcome="started", begin=1.01, end=None)
    found = named(run, "Graphs were interpreted while the compiler worked")
    assert found.count == 50  # a step takes 20 ms, of 2 s
    assert found.seconds == pytest.approx(0.5)


def test_a_compiler_that_failed_is_told_though_it_cost_nothing() -> None:
    run = run_of()
    run.compiles[1] = compiled(outcome="failed", seconds=0.0, error="RuntimeError: no g++")
    assert "no g++" in named(run, "the compiler failed on graph #1").text


def test_python_that_takes_longer_than_the_runs() -> None:
    found = named(run_of(trace_seconds=0.03, wait_seconds=0.0), "Python's own time")
    assert "75% of the time" in found.text


def test_a_compiler_that_failed_in_the_background_does_not_stand_above_what_cost_more() -> None:
    run = run_of()
    run.compiles[1] = compiled(outcome="failed", seconds=900.0, begin=0.0, end=900.0, error="RuntimeError: no g++")
    run.syncs[10] |= {"cause": "item()", "site": f"{SITE}:9", "run_seconds": 5.0}
    found = find(run)
    assert found[0].title == "item() cuts the step"
    assert named(run, "the compiler failed").seconds == 0.0


def test_a_compiler_that_failed_while_training_waited_costs_its_time() -> None:
    run = run_of()
    run.compiles[1] = compiled(outcome="failed", begin=1.0, end=1.9, error="RuntimeError: no g++")
    run.syncs[50] |= {"compiles": [run.compiles[1]], "sync_seconds": 0.95, "begin": 0.99}
    assert find(run)[0].title == "the compiler failed on graph #1"
    assert find(run)[0].seconds == 0.9
    assert not any("training waited for" in title for title in titles(run))


def test_a_wait_that_was_asked_for_is_for_information() -> None:
    run = run_of()
    wait = {"call": "wait_for_compiles()", "site": f"{SITE}:3", "step": 5, "begin": 3.0, "seconds": 120.0}
    run.waits = [wait | {"done": False}, wait | {"done": True, "begin": 130.0, "seconds": 12.0}]
    found = named(run, "The program waited in wait_for_compiles()")
    assert (found.seconds, found.count, found.is_fault, found.site) == (132.0, 2, False, f"{SITE}:3")
    assert "twice, the last time until it was done" in found.text


def memory(tensors: list[int]) -> list[Line]:
    return [
        {"time": float(step), "step": step, "device": "lazy:0", "tensors": count} for step, count in enumerate(tensors)
    ]


def test_live_tensors_that_grow() -> None:
    run = run_of()
    run.memory = memory([10 + step for step in range(100)])
    line = {"device": "lazy:0", "how": "made at", "site": f"{SITE}:7", "tensors": 80, "bytes": 320}
    run.peaks["lazy:0"] = {"device": "lazy:0", "step": 90, "tensors": 100, "lines": [line]}
    found = named(run, "live tensors on lazy:0 grow by 1 per step")
    assert found.site == f"{SITE}:7"


def test_live_tensors_that_come_and_go_do_not_grow() -> None:
    run = run_of()
    run.memory = memory([10 + step % 7 for step in range(100)])
    assert not any("grow" in title for title in titles(run))


def test_the_most_expensive_comes_first() -> None:
    run = run_of()
    for number in (10, 20):
        run.syncs[number] |= {"cause": "item()", "site": f"{SITE}:9", "run_seconds": 5.0}
    for number in (50, 60):
        run.syncs[number] |= {"outcome": "miss", "difference": difference("op"), "trace_seconds": 2.0}
    found = find(run)
    seconds = [finding.seconds for finding in found if finding.is_fault]
    assert seconds == sorted(seconds, reverse=True)
    assert len(seconds) >= 2
    assert not found[-1].is_fault  # waiting for a device that limits the run
    assert [finding.is_fault for finding in found] == sorted([finding.is_fault for finding in found], reverse=True)
