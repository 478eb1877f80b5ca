"""The training process's side of the compiler's worker process.

In: compile requests. Out: jobs that are done some time later, with the bytes of an artefact or an error.

Note [Compiles happen elsewhere]
With a compile in a thread of the same process, training ran at half its speed and stalled for seconds at a time: the
compiler is Python and holds the GIL, and importing it next to a busy thread took 16 s instead of 1 s. So a separate
worker process compiles, at low priority, and its artefacts load in milliseconds. The training process polls for the
result, which costs nothing.

Note [One thread sees to the compiler]
One thread starts the worker process, writes to it, reads from it, restarts it and ends it; in between, the thread
sleeps. Ctrl-C, like any exception from a signal handler, is raised in the main thread, between any two instructions.
So in the main thread, a request is only one dict entry and a ring of the bell, and a wait is a polling loop: an
interrupt leaves nothing half done.

The worker process takes 375 MB of memory. So after a long idle time it is ended, and the thread with it; the next
compile starts both again.

Note [Started again]
A worker process that ends by itself (killed for lack of memory, killed by hand, crashed) is restarted and gets the
requests that it had not answered; so is one whose scratch folder was removed. A job that loses two processes fails, and
all jobs fail if the process ends three times in a row before it is ready.

Note [Priority of the compiler]
While no thread waits for a compile, the worker process's niceness is 5 above the program's. That gives it a third of a
core next to a busy thread; 10 above would give it a ninth, and importing the compiler takes seconds of a core. While a
thread waits, the worker process has the program's own priority, or other programs would take the machine. Only root can
lower niceness again, unless a limit (RLIMIT_NICE) allows it. The policies SCHED_BATCH, which can be left again, and
SCHED_IDLE, which has the same limit, give too little or nothing next to a busy program. So the worker process starts
with the niceness that it needs then. If that turns out too high, it is lowered where that is allowed. Otherwise the
process is restarted, between two graphs or early in one, once per graph: later, a restart would lose more than it
gains.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from lazy_backend.cache.computation_cache import Key
from lazy_backend.cache.disk import DiskCounts, Place
from lazy_backend.cache.scratch import ScratchFolder, make_scratch_folder
from lazy_backend.lowering.artefacts.environment import (
    CACHE_VARIABLES,
    compiler_settings,
    compiler_variables,
    is_compiler_variable,
    process_state,
    wants_compiler_caches,
)
from lazy_backend.lowering.compilation import lifeline
from lazy_backend.lowering.compilation.request import CompileRequest
from lazy_backend.lowering.ir.portable import to_bytes

# Seconds between two polls of a waiting thread.
_NAP = 0.005
# How far the worker process's niceness is above the program's while no thread waits.
_NICER = 5
# A wait with a shorter timeout is a mere check, for which the compiler need not hurry. Seconds.
_SHORTEST_WAIT = 1.0
# Only a compile that has run for less is restarted to raise its priority. Seconds.
_EARLY = 10.0
# See Note [Started again].
_MAX_DEATHS = 2
_MAX_FAILED_STARTS = 3


class WorkerDied(RuntimeError):
    """The worker process could not be started, or ended during a compile: killed for lack of memory, say."""


class RemoteCompileError(RuntimeError):
    """A compile failed in the worker process. The text is that of the exception there."""


class NotPortableThere(RemoteCompileError):
    """The worker process does not know an operator that the user's program has registered."""


@dataclass(slots=True, eq=False)
class Job:
    """One compile. Once `done`, either `result` (an artefact's bytes) or `error` is set; in a forked child, neither.

    `kept`: the counts and the last error of the worker process's disk cache, if that cache was to keep the artefact.
    `found`: whether another process had put the artefact there meanwhile.
    """

    id: int
    request: bytes
    done: bool = False
    result: bytes | None = None
    error: Exception | None = None
    seconds: float = 0.0
    kept: tuple[DiskCounts, str | None] | None = None
    found: bool = False
    sent: bool = False  # to the current process
    deaths: int = 0  # processes that ended while they compiled this job
    hurried: bool = False  # a process was restarted for this job, because its niceness was too high

    def finish(self, result: bytes | None = None, error: Exception | None = None) -> None:
        self.request = b""
        self.result, self.error = result, error
        self.done = True  # last: other threads poll it


class CompileWorker:
    """Compiles one graph after another in a worker process, started for the first and ended after a long idle time.

    Thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ids = itertools.count(1)
        self._jobs: dict[int, Job] = {}  # unfinished jobs, in the order of their requests
        self._waits: set[object] = set()  # one token for each thread that waits for a compile
        self._lock = threading.RLock()  # guards all fields below
        self._bell: _Bell | None = None  # of the thread that manages the process, while there is one
        self._process: _Process | None = None
        self._is_wanted = False  # set by `start`, ahead of a request
        self._failed_starts = 0  # in a row
        self._idle_seconds = math.inf
        self._idle_since = 0.0  # the time of the latest `start` or end of a job

    def start(self, idle_seconds: float = math.inf) -> None:
        """Start the process unless it runs, so that a request soon after need not wait for that. 0.1 ms."""
        self._idle_seconds = idle_seconds
        self._idle_since = self._clock()
        self._is_wanted = True
        self._ring()

    def submit(
        self,
        request: CompileRequest,
        idle_seconds: float = math.inf,
        keep: tuple[Place, Key] | None = None,
        tried_in: str | None = None,
    ) -> Job:
        """Submit a compile request. The job is done some time later, whatever happens. Raises `NotPortable`.

        `idle_seconds`: how long the process waits for the next request before it is ended. `keep`: where the worker
        process also writes the artefact to disk; the write may wait for locks and for the disk. `tried_in`: the file of
        a run in which the process compares what it compiled; the result is a text then, how the results differ.
        """
        number = next(self._ids)
        header = {
            "id": number,
            "state": process_state(),
            "settings": compiler_settings(),
            "caches": wants_compiler_caches(),
            "request": request.to_json(),
            "keep": None if keep is None else {**asdict(keep[0]), "key": keep[1].parts},
            "tried_in": tried_in,
        }
        job = Job(number, lifeline.encode(header, to_bytes(request.stored.get())))
        self._idle_seconds = idle_seconds
        self._jobs[number] = job
        self._ring()
        return job

    def judge(self, path: str, idle_seconds: float) -> Job:
        """Ask whether rounding explains how results differed in the run of a file; the result is JSON then."""
        number = next(self._ids)
        job = Job(number, lifeline.encode({"id": number, "state": process_state(), "tried_in": path}))
        self._idle_seconds = idle_seconds
        self._jobs[number] = job
        self._ring()
        return job

    def poll(self) -> None:
        """Called in each step while a compile is under way. Lowers the priority again once no thread waits."""
        if self._jobs:
            if not all(job.sent for job in self._unfinished()):
                self._ring()  # an interrupt may have kept `submit` from ringing
            process = self._process
            if process is not None and not process.is_nicer and not self._waits:
                with self._lock:
                    process.lower_priority()

    def wait(self, timeout: float | None = None, meanwhile: Callable[[], None] | None = None) -> bool:
        """Wait until no compile is under way; False if `timeout` seconds were not enough.

        `meanwhile` is called again and again until then.
        """
        with self.awaited(timeout):
            return self._wait(lambda: not self._jobs, timeout, meanwhile)

    def wait_for(self, job: Job) -> None:
        with self.awaited():
            self._wait(lambda: job.done, None)

    @contextlib.contextmanager
    def awaited(self, timeout: float | None = None) -> Iterator[None]:
        """Within this block, the calling thread waits for its jobs. See Note [Priority of the compiler]."""
        waits = object()
        try:
            if timeout is None or timeout >= _SHORTEST_WAIT:
                self._waits.add(waits)
            if self._jobs:
                self._ring()
            yield
        finally:
            self._waits.discard(waits)

    def close(self) -> None:
        """End the process at once; compiles under way fail."""
        with self._lock:
            status = self._end_process()
            self._fail_all(WorkerDied(f"the compiler's process ended with status {status}: it was closed"))
            if self._bell is not None:
                self._bell.ring()

    def reset_after_fork(self) -> None:
        """In a forked child: drop the worker process, which is the parent's.

        Pipe ends left open here would keep the worker process from noticing the parent's end.
        """
        self._lock = threading.RLock()
        process, self._process = self._process, None
        if process is not None:
            process.forget()
        bell, self._bell = self._bell, None
        if bell is not None:
            bell.close()
        self._is_wanted, self._failed_starts = False, 0
        self._waits.clear()
        jobs, self._jobs = self._jobs, {}
        for job in jobs.values():
            job.finish()  # with neither result nor error: the caller submits the request again

    def _wait(
        self, is_over: Callable[[], bool], timeout: float | None, meanwhile: Callable[[], None] | None = None
    ) -> bool:
        end = math.inf if timeout is None else time.monotonic() + timeout
        while not is_over():
            if time.monotonic() >= end:
                return False
            if self._bell is None:
                self._ring()
            if meanwhile is not None:
                meanwhile()
            time.sleep(_NAP)
        return True

    def _unfinished(self) -> list[Job]:
        return list(self._jobs.values())  # a copy: other threads add jobs meanwhile

    # ----- the thread that manages the process

    def _ring(self) -> None:
        """Wake the thread that manages the process; start one if there is none."""
        with self._lock:
            try:
                if self._bell is None:
                    self._start_thread()
                else:
                    self._bell.ring()
            except (OSError, RuntimeError) as error:  # out of descriptors or threads, or the interpreter is exiting
                self._fail_all(WorkerDied(f"the compiler's process could not be started: {error}"))

    def _start_thread(self) -> None:
        bell = _Bell()
        try:
            threading.Thread(target=self._see_to_it, args=(bell,), name="lazy_backend compiler", daemon=True).start()
        except RuntimeError:
            bell.close()
            raise

    def _see_to_it(self, bell: _Bell) -> None:
        # signals must go to the main thread, to end its sleep; for the worker process see `lifeline`
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        with self._lock:
            if self._bell is not None:  # `_start_thread` was interrupted, and another thread has been started since
                bell.close()
                return
            self._bell = bell
        while self._manage(bell):
            pass
        bell.close()

    def _manage(self, bell: _Bell) -> bool:
        """Do one turn and sleep until the next; False after the last turn."""
        with self._lock:
            try:
                left = self._turn()
            except Exception as error:
                self._end_process()
                self._fail_all(WorkerDied(f"the compiler's process cannot be reached: {error}"))
                left = None
            if left is None:
                self._bell = None
                return False
            process = self._process
        bell.sleep(left, process)
        return True

    def _turn(self) -> float | None:
        """Do all that is due. Returns the seconds until there is more to do; None if there is no process."""
        if self._process is not None:
            self._receive(self._process)
        if self._process is None and (self._jobs or self._is_wanted):
            self._start()
        self._is_wanted = False
        process = self._process
        if process is None:
            return 0.0 if self._jobs else None
        if self._jobs:
            self._set_priority(process)
            self._send(process)
            return math.inf if self._process is process else 0.0
        left = self._idle_seconds - (self._clock() - self._idle_since)
        if left > 0.0:
            return left
        self._end_process()
        return None

    def _start(self) -> None:
        """Start the process; if that is impossible, every job fails."""
        try:
            self._process = _Process(is_nicer=not self._waits, now=self._clock())
        except OSError as error:
            self._fail_all(WorkerDied(f"the compiler's process could not be started: {error}"))

    def _set_priority(self, process: _Process) -> None:
        """See Note [Priority of the compiler]."""
        if not self._waits:
            if not all(job.sent for job in self._unfinished()):
                process.lower_priority()
        elif process.is_nicer and not process.raise_priority():
            job = self._unfinished()[0]  # the one under way, or the next
            is_early = not job.sent or self._clock() - process.busy_since < _EARLY
            if is_early and not job.hurried:
                job.hurried = True
                self._end_process()
                self._start()

    def _send(self, process: _Process) -> None:
        if process is not self._process:  # another was started, or starting failed
            return
        unfinished = self._unfinished()
        if not unfinished[0].sent:  # the process was idle
            process.busy_since = self._clock()
        for job in unfinished:
            if not job.sent:
                job.sent = True
                process.put(job.request)
        process.flush()

    def _receive(self, process: _Process) -> None:
        messages, has_ended = process.receive()
        for header, payload in messages:
            process.busy_since = self._clock()
            if "ready" in header:
                self._failed_starts = 0
                process.is_ready = True
            else:
                self._take(process, header, payload)
        if has_ended and process is self._process:
            self._bury(process)

    def _take(self, process: _Process, reply: dict[str, Any], artefact: bytes) -> None:
        job = self._jobs.get(reply["id"])
        if job is None or self._process is not process:
            return
        if "error" in reply and process.folder.is_gone():
            self._bury(process)
            return
        self._idle_since = self._clock()
        job.seconds = reply["seconds"]
        if "kept" in reply:
            job.kept = DiskCounts(**reply["kept"]), reply["last_error"]
            job.found = reply.get("found", False)
        if "error" in reply:
            kind = NotPortableThere if reply["error"] == "NotPortable" else RemoteCompileError
            job.finish(error=kind(f"{reply['error']}: {reply['message']}"))
        else:
            job.finish(result=artefact)
        del self._jobs[job.id]  # last: `wait` polls `_jobs`

    def _bury(self, process: _Process) -> None:
        """Clean up after a process that has ended or lost its folder. See Note [Started again]."""
        text = process.last_words()
        was_robbed = process.folder.is_gone()
        status = self._end_process()
        what = "lost its folder for temporary files" if was_robbed else f"ended with status {status}"
        error = WorkerDied(f"the compiler's process {what}{text}")
        if not process.is_ready:
            self._failed_starts += 1
            if self._failed_starts >= _MAX_FAILED_STARTS:
                self._failed_starts = 0
                self._fail_all(error)
            return
        for job in self._unfinished()[:1]:  # jobs are compiled in order: this one was under way
            job.deaths += 1
            if job.deaths >= _MAX_DEATHS:
                job.finish(error=error)
                del self._jobs[job.id]

    def _fail_all(self, error: Exception) -> None:
        for job in self._unfinished():
            job.finish(error=error)
            self._jobs.pop(job.id, None)

    def _end_process(self) -> int | None:
        """End the process, if there is one. Returns its exit status."""
        process, self._process = self._process, None
        for job in self._unfinished():
            job.sent = False
        return None if process is None else process.end()


class _Bell:
    """Wakes a sleeping thread."""

    def __init__(self) -> None:
        self._from, self._to = os.pipe()
        os.set_blocking(self._from, False)
        os.set_blocking(self._to, False)

    def ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full of rings
            os.write(self._to, b"\0")

    def sleep(self, seconds: float, process: _Process | None) -> None:
        """Sleep until the bell rings, `process` can be read from or written to, or `seconds` have passed."""
        poll = select.poll()  # not select(), which takes no descriptors above 1,023
        poll.register(self._from, select.POLLIN)
        if process is not None:
            process.watch(poll)
        poll.poll(None if seconds == math.inf else math.ceil(seconds * 1000))
        with contextlib.suppress(BlockingIOError):
            os.read(self._from, 1 << 16)

    def close(self) -> None:
        os.close(self._from)
        os.close(self._to)


class _Process:
    """One worker process, with its pipes and its scratch folder. Raises OSError."""

    def __init__(self, is_nicer: bool, now: float) -> None:
        self.is_nicer = False
        self.is_ready = False
        self.busy_since = now  # the start of its current work
        self._decoder = lifeline.Decoder()
        self._unwritten = b""
        with contextlib.ExitStack() as undo:
            self.folder: ScratchFolder = make_scratch_folder()
            undo.callback(self.folder.remove)
            self._log = _open_log(self.folder.path)
            undo.callback(self._log.close)
            to_child, self._to = _pipe(undo)
            self._from, from_child = _pipe(undo)
            os.set_blocking(self._to, False)
            os.set_blocking(self._from, False)
            descriptors = to_child, from_child, self.folder.descriptor
            self._popen = subprocess.Popen(
                [sys.executable, "-Wignore", "-c", _program(*descriptors, self.folder.path)],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=descriptors,
                env=_environment(self.folder.path),
                process_group=0,
            )
            undo.pop_all()
        os.close(to_child)
        os.close(from_child)
        if is_nicer:
            self.lower_priority()

    def lower_priority(self) -> None:
        if not self.is_nicer:
            self.is_nicer = self._set_priority(_NICER)

    def raise_priority(self) -> bool:
        """Raise the priority to the program's own. Returns whether that was allowed."""
        if self._set_priority(0):
            self.is_nicer = False
        return not self.is_nicer

    def _set_priority(self, nicer: int) -> bool:
        own = os.getpriority(os.PRIO_PROCESS, os.getpid())
        try:
            os.setpriority(os.PRIO_PGRP, self._popen.pid, own + nicer)
        except OSError:  # not allowed, or the process has ended
            return False
        return True

    @property
    def pid(self) -> int:
        return self._popen.pid

    def poll(self) -> int | None:
        """The exit status, if the process has ended."""
        return self._popen.poll()

    def put(self, request: bytes) -> None:
        self._unwritten += request

    def flush(self) -> None:
        """Write as much as the pipe takes. If the process has ended, `receive` notices that."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(self._to, self._unwritten) :]

    def receive(self) -> tuple[list[tuple[dict[str, Any], bytes]], bool]:
        """The messages that have arrived, and whether the process has ended."""
        self.flush()
        messages = []
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._from, 1 << 20):
                messages += self._decoder.feed(data)
            return messages, True
        return messages, False

    def watch(self, poll: select.poll) -> None:
        poll.register(self._from, select.POLLIN)
        if self._unwritten:
            poll.register(self._to, select.POLLOUT)

    def last_words(self) -> str:
        """The end of the process's output, for an error's text."""
        with contextlib.suppress(OSError):
            self._log.seek(0)
            text = self._log.read().decode(errors="replace").strip()
            return f":\n{text[-2000:]}" if text else ""
        return ""

    def end(self) -> int:
        """Kill the process and the C++ compilers under it, and clean up. Returns the exit status."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        status = self._popen.wait()
        self._close()
        self.folder.remove()
        return status

    def forget(self) -> None:
        """In a forked child: release the pipes and the folder, and leave the process alone."""
        self._popen.returncode = 0  # not ours to wait for
        self._close()
        self.folder.release()

    def _close(self) -> None:
        os.close(self._to)
        os.close(self._from)
        self._log.close()


def _pipe(undo: contextlib.ExitStack) -> tuple[int, int]:
    ends = os.pipe()
    for end in ends:
        undo.callback(os.close, end)
    return ends


def _open_log(folder: Path) -> IO[bytes]:
    try:
        return tempfile.TemporaryFile(dir=folder)
    except OSError:
        return open(os.devnull, "r+b")


def _environment(folder: Path) -> dict[str, str]:
    """All temporary files, inductor's too, go into the process's own folder: others can write to the shared one."""
    left_out = {name for name in os.environ if name in CACHE_VARIABLES or is_compiler_variable(name)}
    environment = {name: value for name, value in os.environ.items() if name not in left_out} | compiler_variables()
    environment |= {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "LAZY_DEBUG": "0"}  # the parent prints the same
    environment |= {"TMPDIR": str(folder)}
    environment.pop(lifeline.OWN_INDUCTOR_FOLDER, None)
    if "TORCHINDUCTOR_CACHE_DIR" not in environment:
        own = str(folder / "inductor")
        environment |= {"TORCHINDUCTOR_CACHE_DIR": own, lifeline.OWN_INDUCTOR_FOLDER: own}
    environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, (os.cpu_count() or 1) - 1)))
    return environment


def _program(to_child: int, from_child: int, lock: int, folder: Path) -> str:
    """The program of the worker process, run with -c.

    With -m or a file, Python would put a folder first on sys.path, where a user's `random.py` may be.
    """
    file = lifeline.__file__
    return (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "space = {'__name__': 'lifeline'}\n"
        f"exec(compile(open({file!r}).read(), {file!r}, 'exec'), space)\n"
        f"line = space['Lifeline']({to_child}, {from_child}, {lock}, {os.getpid()}, {str(folder)!r})\n"
        "from lazy_backend.lowering.plans.worker import main\n"
        "main(line)"
    )


worker = CompileWorker()
