"""The life of the compiler's process, with one that answers at once and imports no torch."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from builder import Program, aten

from lazy_backend.lowering import background
from lazy_backend.lowering.background import CompileWorker, Job, compiler_settings

# Answers each request with the request itself, after as many seconds as its constants say.
ECHO = """
import json, os, sys, time
for line in os.fdopen({to_child}, "rb", buffering=0):
    request = json.loads(line)
    data = open(request["request"], "rb").read()
    time.sleep(sum(map(float.fromhex, json.loads(data.partition(b"\\n")[0])["constants"])))
    open(request["result"], "wb").write(data)
    os.write({from_child}, json.dumps({{"id": request["id"], "seconds": 0.0}}).encode() + b"\\n")
"""


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileWorker]:
    monkeypatch.setattr(background, "_program", lambda *fds: ECHO.format(to_child=fds[0], from_child=fds[1]))
    background.worker.close()  # other tests' compiler, which is watched as well
    assert within(10, lambda: watchers() == 0)
    made = CompileWorker()
    yield made
    made.close()


def submit(worker: CompileWorker, idle_seconds: float = math.inf, takes: float = 0.0) -> Job:
    program = Program()
    graph = program.graph(program.call(aten.exp.default, program.input(torch.ones(2))))
    return worker.submit(graph, [takes], frozenset(), idle_seconds=idle_seconds)


def pid(worker: CompileWorker) -> int:
    assert worker._process is not None
    return worker._process.pid


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def watchers() -> int:
    return sum(thread.name == "lazy_backend idle" for thread in threading.enumerate())


def test_an_idle_process_is_ended_and_leaves_no_zombie(worker: CompileWorker) -> None:
    job = submit(worker, 0.2)
    process = pid(worker)
    worker.wait_for(job)
    assert job.result is not None
    assert within(10, lambda: not Path(f"/proc/{process}").exists())  # a zombie has one
    assert within(10, lambda: watchers() == 0)


def test_one_whose_answer_nobody_takes_is_ended_too(worker: CompileWorker) -> None:
    job = submit(worker, 0.2)
    assert within(10, lambda: worker._process is None)
    assert job.result is not None


def test_the_next_request_starts_another(worker: CompileWorker) -> None:
    worker.wait_for(submit(worker, 0.05))
    assert within(10, lambda: worker._process is None)
    job = submit(worker, 0.05)
    worker.wait_for(job)
    assert (job.result is not None, job.error) == (True, None)


def test_a_process_started_ahead_takes_the_next_request(worker: CompileWorker) -> None:
    worker.start(1000.0)
    process = pid(worker)
    worker.start(1000.0)
    job = submit(worker, 1000.0)
    worker.wait_for(job)
    assert (pid(worker), job.error, watchers()) == (process, None, 1)


def test_a_process_started_ahead_in_vain_is_ended(worker: CompileWorker) -> None:
    worker.start(0.2)
    assert worker._process is not None
    assert within(10, lambda: worker._process is None)


def test_a_process_that_cannot_be_started_ahead_is_tried_again(
    worker: CompileWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as context:
        context.setattr(background.sys, "executable", "/nonexistent/python")
        worker.start(1000.0)
        assert worker._process is None
        assert within(10, lambda: watchers() == 0)
        assert "could not be started" in str(submit(worker, 1000.0).error)
    job = submit(worker, 1000.0)
    worker.wait_for(job)
    assert job.error is None


def test_a_process_at_work_is_not_ended(worker: CompileWorker) -> None:
    job = submit(worker, 0.0, takes=0.5)
    assert within(10, lambda: job.done or worker._process is None)
    assert (job.result is not None, job.error) == (True, None)


def test_without_a_limit_nothing_watches(worker: CompileWorker) -> None:
    worker.wait_for(submit(worker))
    assert watchers() == 0


def test_a_limit_that_is_taken_back(worker: CompileWorker) -> None:
    worker.wait_for(submit(worker, 0.3))
    worker.wait_for(submit(worker, math.inf))
    assert within(10, lambda: watchers() == 0)
    assert worker._process is not None
    worker.wait_for(submit(worker, 0.05))
    assert within(10, lambda: worker._process is None)


def test_a_limit_that_is_lowered(worker: CompileWorker) -> None:
    worker.wait_for(submit(worker, 1000.0))
    worker.wait_for(submit(worker, 0.05))
    assert within(10, lambda: worker._process is None)


def test_closing_ends_the_watch(worker: CompileWorker) -> None:
    worker.wait_for(submit(worker, 1000.0))
    assert watchers() == 1
    worker.close()
    assert within(10, lambda: watchers() == 0)


def test_requests_at_the_moment_of_ending_lose_nothing(worker: CompileWorker) -> None:
    """The process may be idle for as long as the pause between requests takes, so many meet its end."""
    jobs, processes = [], []
    for number in range(60):
        jobs.append(submit(worker, 0.05))
        processes.append(pid(worker))
        worker.wait_for(jobs[-1])
        time.sleep(0.04 + 0.0005 * number)
    assert [job.error for job in jobs] == [None] * 60
    assert all(job.result is not None for job in jobs)
    assert 1 < len(set(processes)) < 60  # some met the process, some its end


def test_threads_that_submit_while_it_ends_lose_nothing(worker: CompileWorker) -> None:
    jobs: list[Job] = []

    def ask() -> None:
        for _ in range(15):
            job = submit(worker, 0.0)
            jobs.append(job)
            worker.wait_for(job)
            time.sleep(0.03)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [job.error for job in jobs] == [None] * 45
    assert all(job.result is not None for job in jobs)


@pytest.mark.parametrize(
    ("variable", "off"),
    [
        ("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1"),
        ("TORCH_COMPILE_FORCE_DISABLE_CACHES", "1"),
        ("TORCHINDUCTOR_FX_GRAPH_CACHE", "0"),
        ("TORCHINDUCTOR_AUTOGRAD_CACHE", "0"),
    ],
)
def test_a_variable_that_switches_caches_off_is_told_but_not_passed_on(
    variable: str, off: str, worker: CompileWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, off)
    job = submit(worker)
    worker.wait_for(job)
    variables = Path(f"/proc/{pid(worker)}/environ").read_text().split("\0")
    assert job.result is not None
    assert json.loads(job.result.partition(b"\n")[0])["caches"] is False
    assert not [text for text in variables if text.startswith(f"{variable}=")]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_watches_a_process_of_its_own(worker: CompileWorker) -> None:
    worker.wait_for(submit(worker, 1000.0))
    child = os.fork()
    if child == 0:
        worker.reset_after_fork()
        submit(worker, 0.05)
        os._exit(0 if within(10, lambda: worker._process is None) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert worker._process is not None
    assert worker._process.poll() is None


@pytest.fixture
def not_deterministic_afterwards() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("not_deterministic_afterwards")
def test_a_setting_set_back_is_not_changed() -> None:
    """Another process that never touched it finds what this one compiled."""
    torch.use_deterministic_algorithms(True)
    assert compiler_settings()["inductor"] == {"deterministic": True}
    torch.use_deterministic_algorithms(False)
    assert compiler_settings()["inductor"] == {}
