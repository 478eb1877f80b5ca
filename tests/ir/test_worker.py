"""The life of the compiler's process, with one that answers at once and imports no torch."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import random
import resource
import shutil
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from builder import Program, aten

from lazy_backend.cache import scratch
from lazy_backend.cache.computation_cache import Key
from lazy_backend.cache.disk import DiskCache
from lazy_backend.lowering.artefacts.environment import compiler_settings
from lazy_backend.lowering.compilation import background
from lazy_backend.lowering.compilation.background import CompileWorker, Job
from lazy_backend.lowering.compilation.request import CompileRequest
from lazy_backend.lowering.ir.graph import Graph
from lazy_backend.lowering.ir.portable import StoredGraph
from lazy_backend.lowering.plans import pending_compile
from lazy_backend.lowering.plans.policy import CompilePolicy
from lazy_backend.lowering.plans.specialise import CompileReport, GraphCompiler

# Answers each request with its header, after as many seconds as its constants say.
ECHO = """
import json, os, time
line.put({"ready": True})
while True:
    request, graph = line.get()
    time.sleep(sum(map(float.fromhex, request["request"]["constants"])))
    line.put({"id": request["id"], "seconds": 0.0}, json.dumps({**request, "process": os.getpid()}).encode())
"""


def echoing(program: Callable[..., str], code: str = ECHO) -> Callable[..., str]:
    """The program of the compiler's process, but for the compiler."""

    @functools.wraps(program)
    def write(*arguments: Any) -> str:
        return program(*arguments).partition("from lazy_backend")[0] + code

    return write


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileWorker]:
    monkeypatch.setattr(background, "_program", echoing(background._program))
    background.worker.close()  # other tests' compiler, which is watched as well
    assert within(10, lambda: threads() == 0)
    made = CompileWorker()
    yield made
    made.close()


def some_graph() -> Graph:
    program = Program()
    return program.graph(program.call(aten.exp.default, program.input(torch.ones(2))))


def submit(worker: CompileWorker, idle_seconds: float = math.inf, takes: float = 0.0) -> Job:
    return worker.submit(CompileRequest.of(some_graph(), [takes], "inductor"), idle_seconds)


def pid(worker: CompileWorker) -> int:
    """The process's number, once it is started."""
    assert within(10, lambda: worker._process is not None)
    process = worker._process
    assert process is not None
    return process.pid


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def threads() -> int:
    return sum(thread.name == "lazy_backend compiler" for thread in threading.enumerate())


def test_an_idle_process_is_ended_and_leaves_no_zombie(worker: CompileWorker) -> None:
    job = submit(worker, 0.2)
    process = pid(worker)
    worker.wait_for(job)
    assert job.result is not None
    assert within(10, lambda: not Path(f"/proc/{process}").exists())  # a zombie has one
    assert within(10, lambda: threads() == 0)


def test_one_whose_answer_nobody_takes_is_ended_too(worker: CompileWorker) -> None:
    job = submit(worker, 0.2)
    assert within(10, lambda: job.done and worker._process is None)
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
    assert (pid(worker), job.error, threads()) == (process, None, 1)


def test_a_process_started_ahead_in_vain_is_ended(worker: CompileWorker) -> None:
    worker.start(0.5)
    process = pid(worker)
    assert within(10, lambda: not Path(f"/proc/{process}").exists())
    assert within(10, lambda: worker._process is None)


def test_a_process_that_cannot_be_started_ahead_is_tried_again(
    worker: CompileWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as context:
        context.setattr(background.sys, "executable", "/nonexistent/python")
        worker.start(1000.0)
        assert within(10, lambda: threads() == 0)
        assert worker._process is None
        job = submit(worker, 1000.0)
        worker.wait_for(job)
        assert "could not be started" in str(job.error)
    job = submit(worker, 1000.0)
    worker.wait_for(job)
    assert job.error is None


def test_a_process_at_work_is_not_ended(worker: CompileWorker) -> None:
    job = submit(worker, 0.0, takes=0.5)
    process = pid(worker)
    assert within(10, lambda: job.done or not Path(f"/proc/{process}").exists())
    assert (job.result is not None, job.error) == (True, None)


def test_a_limit_that_is_taken_back(worker: CompileWorker) -> None:
    worker.wait_for(submit(worker, 0.3))
    worker.wait_for(submit(worker, math.inf))
    process = pid(worker)
    time.sleep(0.6)
    assert pid(worker) == process
    worker.wait_for(submit(worker, 0.05))
    assert within(10, lambda: worker._process is None)


def test_a_limit_that_is_lowered(worker: CompileWorker) -> None:
    worker.wait_for(submit(worker, 1000.0))
    worker.wait_for(submit(worker, 0.05))
    assert within(10, lambda: worker._process is None)


def test_closing_ends_the_thread(worker: CompileWorker) -> None:
    worker.wait_for(submit(worker, 1000.0))
    assert threads() == 1
    worker.close()
    assert within(10, lambda: threads() == 0)


def test_requests_at_the_moment_of_ending_lose_nothing(worker: CompileWorker) -> None:
    """The process may be idle for as long as the pause between requests takes, so many meet its end."""
    jobs, processes = [], []
    for number in range(60):
        jobs.append(submit(worker, 0.05))
        worker.wait_for(jobs[-1])
        processes.append(json.loads(jobs[-1].result or b"{}")["process"])
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

    askers = [threading.Thread(target=ask) for _ in range(3)]
    for thread in askers:
        thread.start()
    for thread in askers:
        thread.join()
    assert [job.error for job in jobs] == [None] * 45
    assert all(job.result is not None for job in jobs)


# ----- whatever befalls the process


def kill(process: int, number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def lives(worker: CompileWorker, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of all processes that are started from now on."""
    found: list[int] = []
    init = background._Process.__init__

    def note(process: Any, *arguments: Any, **named: Any) -> None:
        init(process, *arguments, **named)
        found.append(process.pid)

    monkeypatch.setattr(background._Process, "__init__", note)
    return found


def folder_of(worker: CompileWorker) -> Path:
    process = worker._process
    assert process is not None
    return process.folder.path


def wait_until_ready(worker: CompileWorker) -> None:
    def is_ready() -> bool:
        process = worker._process
        return process is not None and process.is_ready

    assert within(10, is_ready)


def test_more_than_1024_open_files(worker: CompileWorker) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2000:
        pytest.skip("needs 2,000 descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2000, hard))
    with contextlib.ExitStack() as opened:
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while opened.enter_context(open(os.devnull)).fileno() < 1100:
            pass
        job = submit(worker)
        worker.poll()
        assert worker.wait(10)
        assert (job.result is not None, job.error) == (True, None)
        worker.close()


def test_no_descriptor_is_left(worker: CompileWorker) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    job = None
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
        job = submit(worker)
        assert worker.wait(10)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert job is not None
    assert "Too many open files" in str(job.error)
    again = submit(worker)
    worker.wait_for(again)
    assert again.error is None


@pytest.mark.parametrize("before", [True, False])
def test_a_folder_for_temporary_files_that_is_removed(
    before: bool, worker: CompileWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    job = None if before else submit(worker, takes=0.5)
    if not before:
        wait_until_ready(worker)
        assert folder_of(worker).is_relative_to(place)
    shutil.rmtree(place)
    job = job or submit(worker)
    worker.wait_for(job)
    assert (job.result is not None, job.error) == (True, None)
    assert submit(worker).error is None
    assert worker.wait(10)


def test_no_place_for_temporary_files_at_all(worker: CompileWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Iterator[str]:
        yield "/nonexistent"

    monkeypatch.setattr(scratch, "_places", nowhere)
    jobs = [submit(worker), submit(worker)]
    assert worker.wait(10)
    assert all("could not be started" in str(job.error) and "/nonexistent" in str(job.error) for job in jobs)
    assert within(10, lambda: threads() == 0)


FAILS_WITHOUT_FOLDER = """
import os, time
line.put({"ready": True})
while True:
    request, graph = line.get()
    time.sleep(sum(map(float.fromhex, request["request"]["constants"])))
    try:
        open(os.environ["TMPDIR"] + "/file", "w").close()
        line.put({"id": request["id"], "seconds": 0.0}, b"made")
    except OSError as error:
        line.put({"id": request["id"], "seconds": 0.0, "error": "OSError", "message": str(error)})
"""


def test_a_process_whose_folder_is_removed_is_started_again(
    worker: CompileWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = echoing(background._program.__wrapped__, FAILS_WITHOUT_FOLDER)
    monkeypatch.setattr(background, "_program", program)
    started = lives(worker, monkeypatch)
    job = submit(worker, takes=0.5)
    wait_until_ready(worker)
    shutil.rmtree(folder_of(worker))
    worker.wait_for(job)
    assert (job.result, job.error, len(started)) == (b"made", None, 2)


def test_a_killed_process_is_started_again(worker: CompileWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    started = lives(worker, monkeypatch)
    jobs = [submit(worker, takes=0.5), submit(worker)]
    wait_until_ready(worker)
    folder = folder_of(worker)
    kill(pid(worker))
    assert worker.wait(10)
    assert [job.error for job in jobs] == [None, None]
    assert len(started) == 2
    assert not folder.exists()


def test_a_job_that_loses_two_processes_fails_and_the_next_does_not(
    worker: CompileWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = lives(worker, monkeypatch)
    killer, other = submit(worker, takes=600.0), submit(worker)
    for count in (1, 2):
        assert within(10, lambda count=count: len(started) == count)
        wait_until_ready(worker)
        kill(started[-1])
    assert worker.wait(10)
    assert "ended with status -9" in str(killer.error)
    assert (other.error, other.result is not None) == (None, True)


def test_a_process_that_never_gets_ready_is_started_three_times(
    worker: CompileWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = echoing(background._program.__wrapped__, "raise ImportError('no torch')")
    monkeypatch.setattr(background, "_program", program)
    started = lives(worker, monkeypatch)
    jobs = [submit(worker) for _ in range(5)]
    assert worker.wait(30)
    assert len(started) == 3
    assert all("ended with status 1" in str(job.error) and "no torch" in str(job.error) for job in jobs)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_no_signal_but_kill_ends_the_process_at_any_moment(
    number: int, worker: CompileWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = lives(worker, monkeypatch)
    job = submit(worker, takes=0.5)
    process = pid(worker)
    while not job.done:
        kill(process, number)
        time.sleep(0.0005)
    assert (job.error, len(started)) == (None, 1)


def test_the_process_leads_a_group_of_its_own_in_this_session(worker: CompileWorker) -> None:
    process = (submit(worker), pid(worker))[1]
    assert (os.getpgid(process), os.getsid(process)) == (process, os.getsid(0))


def test_its_folder_is_private_and_holds_what_it_writes(worker: CompileWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    worker.wait_for(submit(worker))
    folder = folder_of(worker)
    texts = Path(f"/proc/{pid(worker)}/environ").read_text().split("\0")
    variables = dict(text.split("=", 1) for text in texts if text)
    assert (variables["TMPDIR"], variables["TORCHINDUCTOR_CACHE_DIR"]) == (str(folder), str(folder / "inductor"))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    worker.close()
    assert not folder.exists()


# a file that is opened in the very moment is closed by Python, with a warning
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupted_wait_loses_nothing(worker: CompileWorker) -> None:
    """As Ctrl-C, at a moment that nobody chose, again and again."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    graph = some_graph()
    random.seed(0)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(300):
            with contextlib.suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 3e-3))
                worker.start(1000.0)
                job = worker.submit(CompileRequest.of(graph, [0.0], "inductor"))
                worker.poll()
                worker.wait_for(job)
                worker.close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    assert worker.wait(10)
    job = submit(worker)
    worker.wait_for(job)
    assert job.error is None
    worker.close()
    assert within(10, lambda: threads() == 0)


# ----- its priority


def niceness(process: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, process) - os.getpriority(os.PRIO_PROCESS, 0)


def test_the_process_is_nicer_than_the_program_while_nobody_waits(worker: CompileWorker) -> None:
    job = submit(worker, takes=0.3)
    wait_until_ready(worker)
    assert niceness(pid(worker)) == 5
    while not job.done:
        worker.poll()


def test_what_is_awaited_is_compiled_at_the_programs_priority(
    worker: CompileWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = lives(worker, monkeypatch)
    with worker.awaited():
        worker.start()
        worker.wait_for(submit(worker))
        assert (niceness(pid(worker)), len(started)) == (0, 1)
    job = submit(worker, takes=0.3)
    assert within(10, lambda: niceness(pid(worker)) == 5)
    worker.wait_for(job)


@pytest.fixture(params=["allowed", "not allowed"])
def may_raise(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether this program may raise a priority, as root may."""
    allowed: bool = request.param == "allowed"
    if not allowed:
        monkeypatch.setattr(background._Process, "raise_priority", lambda process: False)
    elif os.geteuid() != 0:
        pytest.skip("needs root")
    return allowed


def test_who_begins_to_wait_hurries_the_process(
    may_raise: bool, worker: CompileWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = lives(worker, monkeypatch)
    jobs = [submit(worker, takes=0.5), submit(worker, takes=0.1)]
    wait_until_ready(worker)
    assert niceness(started[0]) == 5
    waiter = threading.Thread(target=worker.wait)
    waiter.start()
    assert within(10, lambda: niceness(pid(worker)) == 0)
    waiter.join()
    assert [job.error for job in jobs] == [None, None]
    assert len(started) == (1 if may_raise else 2)


def test_a_step_taken_meanwhile_makes_it_nicer_again(worker: CompileWorker) -> None:
    with worker.awaited():
        job = submit(worker, takes=0.5)
        wait_until_ready(worker)
        assert niceness(pid(worker)) == 0
    worker.poll()
    assert niceness(pid(worker)) == 5
    worker.wait_for(job)


def test_a_compile_under_way_for_long_is_not_started_again(
    worker: CompileWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background._Process, "raise_priority", lambda process: False)
    monkeypatch.setattr(background, "_EARLY", 0.1)
    started = lives(worker, monkeypatch)
    first, second = submit(worker, takes=0.8), submit(worker, takes=0.1)
    wait_until_ready(worker)
    time.sleep(0.3)
    assert worker.wait(20)
    assert (first.error, second.error) == (None, None)
    assert len(started) == 2  # between the two graphs


def test_an_idle_process_that_is_too_nice_is_not_used_while_somebody_waits(
    worker: CompileWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background._Process, "raise_priority", lambda process: False)
    monkeypatch.setattr(background, "_EARLY", 0.0)
    started = lives(worker, monkeypatch)
    submit(worker)
    assert within(10, lambda: not worker._jobs)
    with worker.awaited():
        worker.wait_for(submit(worker))
    assert len(started) == 2
    assert niceness(started[1]) == 0


@pytest.mark.parametrize(("in_background", "expected"), [(False, 0), (True, 5)])
def test_who_compiles_in_the_foreground_waits(
    in_background: bool, expected: int, worker: CompileWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
import os
line.put({"ready": True})
while True:  # a compile that fails is asked for more than once
    request, graph = line.get()
    found = os.getpriority(os.PRIO_PROCESS, 0)
    line.put({"id": request["id"], "seconds": 0.0, "error": "Niceness", "message": str(found)})
"""
    monkeypatch.setattr(background, "_program", echoing(background._program.__wrapped__, code))
    monkeypatch.setattr(pending_compile, "worker", worker)
    reports: list[CompileReport] = []
    compiler = GraphCompiler(StoredGraph(some_graph()), reports.append)
    policy = CompilePolicy("inductor", True, 0, 1, 100, background=in_background)

    def has_failed() -> bool:
        compiler.plan_for((), policy)  # a piece of the request each
        compiler.adopt()
        return bool(reports) and reports[-1].error is not None

    assert within(10, has_failed)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert str(reports[-1].error) == f"Niceness: {own + expected}"


def test_a_short_look_hurries_nobody(worker: CompileWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background._Process, "raise_priority", lambda process: False)
    started = lives(worker, monkeypatch)
    submit(worker, takes=0.3)
    while not worker.wait(0.01):
        pass
    assert len(started) == 1


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
    assert json.loads(job.result)["caches"] is False
    assert not [text for text in variables if text.startswith(f"{variable}=")]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_watches_a_process_of_its_own(worker: CompileWorker) -> None:
    worker.wait_for(submit(worker, 1000.0))
    child = os.fork()
    if child == 0:
        worker.reset_after_fork()
        worker.wait_for(submit(worker, 0.05))
        os._exit(0 if within(10, lambda: worker._process is None) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert worker._process is not None
    assert worker._process.poll() is None


def test_what_the_process_counted_stays_if_its_artefact_cannot_be_loaded(
    worker: CompileWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
line.put({"ready": True})
request, graph = line.get()
kept = {"writes": 1, "evictions": 2}
line.put({"id": request["id"], "seconds": 0.0, "kept": kept, "last_error": None}, b"no artefact")
line.get()
"""
    monkeypatch.setattr(background, "_program", echoing(background._program.__wrapped__, code))
    monkeypatch.setattr(pending_compile, "worker", worker)
    store = DiskCache(tmp_path / "cache", 1 << 20)
    reports: list[CompileReport] = []
    compiler = GraphCompiler(StoredGraph(some_graph()), reports.append, Key((("graph", "exp"),)))
    policy = CompilePolicy("inductor", True, 0, 1, 100, store=store)
    assert compiler.plan_for((), policy) is None
    assert [report.stage for report in reports] == ["started", "failed"]
    assert (store.counts().writes, store.counts().evictions) == (1, 2)


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
