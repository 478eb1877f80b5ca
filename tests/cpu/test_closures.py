"""Step closures: each in its step, in order; none waits for itself, and none keeps the interpreter from exiting."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from harness import run_program

import lazy_backend


def test_a_closure_that_adds_itself_runs_once_per_step() -> None:
    calls: list[int] = []

    def log() -> None:
        calls.append(len(calls))
        lazy_backend.add_step_closure(log)

    lazy_backend.add_step_closure(log)
    for step in range(3):
        lazy_backend.mark_step()
        assert len(calls) == step + 1


def test_a_closure_may_end_a_step_of_its_own() -> None:
    calls: list[str] = []

    def outer() -> None:
        calls.append("outer")
        lazy_backend.mark_step()

    lazy_backend.add_step_closure(outer)
    lazy_backend.add_step_closure(calls.append, ("second",))
    lazy_backend.mark_step()
    assert calls == ["outer", "second"]


def test_closures_behind_one_that_raises_run_in_the_next_step() -> None:
    calls: list[str] = []

    def fail() -> None:
        raise ValueError("no")

    lazy_backend.add_step_closure(fail)
    lazy_backend.add_step_closure(calls.append, ("later",))
    with pytest.raises(ValueError, match="no"):
        lazy_backend.mark_step()
    assert calls == []
    lazy_backend.mark_step()
    assert calls == ["later"]


@pytest.mark.timeout(60)
def test_an_asynchronous_closure_does_not_wait_for_itself() -> None:
    seen: list[float] = []

    def read(value: torch.Tensor) -> None:
        lazy_backend.wait_device_ops()
        seen.append(value.item())

    lazy_backend.add_step_closure(read, (torch.ones(3, device="lazy").sum(),), run_async=True)
    lazy_backend.mark_step()
    lazy_backend.wait_device_ops()
    assert seen == [3.0]


@pytest.mark.timeout(60)
def test_asynchronous_closures_that_end_steps_do_not_wait_for_room() -> None:
    lazy_backend.config.max_async_closures = 2
    seen: list[int] = []

    def chain(left: int) -> None:
        seen.append(left)
        for _ in range(3 if left else 0):
            lazy_backend.add_step_closure(chain, (left - 1,), run_async=True)
        lazy_backend.mark_step()

    lazy_backend.add_step_closure(chain, (2,), run_async=True)
    lazy_backend.mark_step()
    while len(seen) < 13:
        time.sleep(0.01)
    lazy_backend.wait_device_ops()
    assert sorted(seen) == [0] * 9 + [1] * 3 + [2]


def test_a_slow_closure_holds_up_only_who_waits() -> None:
    release = threading.Event()
    done: list[bool] = []
    lazy_backend.add_step_closure(lambda: done.append(release.wait(timeout=30)), run_async=True)
    lazy_backend.mark_step()
    assert done == []
    release.set()
    lazy_backend.wait_device_ops()
    assert done == [True]


def test_a_stuck_closure_does_not_keep_the_interpreter_from_exiting(tmp_path: Path) -> None:
    code = """
import sys, threading
import torch, lazy_backend
lazy_backend.compat.installation._EXIT_TIMEOUT = 1.0
sys.stderr = sys.stdout
lazy_backend.add_step_closure(threading.Event().wait, run_async=True)
lazy_backend.mark_step()
print("done")
"""
    assert run_program(code, tmp_path) == (
        "done\nlazy_backend: an asynchronous step closure did not finish within 1 s and was abandoned\n"
    )
