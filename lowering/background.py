"""The training process's side of the compiler's process.

In: graphs to compile. Out: jobs that are done some time later, with the bytes of an artefact or an error.

Note [Compiles happen elsewhere]
Beside a compile in a thread of the same process, training ran at half its speed and stood still for seconds at a time:
the compiler is Python and holds the GIL, and importing it beside a busy thread took 16 s instead of one. So a process
of its own compiles, at low priority, and what comes back loads in milliseconds. Nothing runs on this side: who wants a
plan asks whether it is there, which costs one system call per step and nothing when nothing is asked.

The process holds 375 MB. So a thread sleeps for as long as it may be idle, ends it then, and the next compile starts
another. It ends it under the lock that submits take: no request goes to a process that is about to end.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch

from lazy_backend.cache.computation import Key
from lazy_backend.cache.disk import DiskCounts, Place
from lazy_backend.lowering.ir import Graph
from lazy_backend.lowering.portable import to_bytes
from lazy_backend.lowering.shapes import Sizes

# Seconds between two looks at the process, however short it may be idle.
_SHORTEST_NAP = 0.05


class WorkerDied(RuntimeError):
    """The compiler's process ended in the midst of a compile: killed for its memory, say."""


class RemoteCompileError(RuntimeError):
    """A compile failed in the compiler's process. The text is that of the exception there."""


class NotPortableThere(RemoteCompileError):
    """The compiler's process does not know an operator: one that the user's program has registered."""


@dataclass(slots=True, eq=False)
class Job:
    """One compile. Once `done`, either `result` (an artefact's bytes) or `error` is there.

    `kept`: what the disk cache there counted and its last error, if it was to keep the artefact.
    """

    id: int
    folder: Path
    done: bool = False
    result: bytes | None = None
    error: Exception | None = None
    seconds: float = 0.0
    kept: tuple[DiskCounts, str | None] | None = None


class CompileWorker:
    """A process that compiles one graph after the other; started with the first, ended when idle for long.

    Safe from any thread.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._to = self._from = -1
        self._rest = b""
        self._log: IO[bytes] | None = None
        self._jobs: dict[int, Job] = {}
        self._count = 0
        self._idle_seconds = math.inf
        self._idle_since = 0.0  # when the latest job ended
        # for the thread that watches the process: it is gone, or may idle less
        self._news: threading.Event | None = None

    def start(self, idle_seconds: float = math.inf) -> None:
        """Start the process, if it does not run: who will submit soon need not do that as well. 1 ms."""
        with self._lock:
            if self._process is None:
                self._idle_since = self._clock()
                # first: to start a thread beside a process that is just starting takes milliseconds
                self._watch(idle_seconds)
                with contextlib.suppress(OSError):  # `submit` tries again, and has a job to fail
                    self._start()

    def submit(
        self,
        graph: Graph,
        constants: Sequence[float],
        promoted: frozenset[int],
        sizes: Sizes | None = None,
        idle_seconds: float = math.inf,
        keep: tuple[Place, Key] | None = None,
    ) -> Job:
        """Have `graph` compiled; a later `poll` or `wait` finishes the job. Raises `NotPortable`.

        `sizes`: compile it for all numbers that fit them, `graph` being one sample. `idle_seconds`: how long the
        process waits for the next request before it is ended. `keep`: where to put the artefact on disk as well, which
        waits for locks and for the disk.
        """
        request = {
            "state": process_state(),
            "settings": compiler_settings(),
            "caches": wants_compiler_caches(),
            "constants": [constant.hex() for constant in constants],
            "promoted": sorted(promoted),
            "sizes": None if sizes is None else sizes.to_json(),
            "keep": None if keep is None else {**asdict(keep[0]), "key": keep[1].parts},
        }
        data = json.dumps(request).encode() + b"\n" + to_bytes(graph)
        with self._lock:
            self._watch(idle_seconds)  # before the process, as in `start`
            self._count += 1
            job = Job(self._count, Path(tempfile.mkdtemp(prefix="lazy_backend_")))
            try:
                (job.folder / "request").write_bytes(data)
                if self._process is None:
                    self._start()
                line = {"id": job.id, "request": str(job.folder / "request"), "result": str(job.folder / "result")}
                self._jobs[job.id] = job
                os.write(self._to, json.dumps(line).encode() + b"\n")
            except BrokenPipeError:
                self._fail_all()
            except OSError as error:  # no memory for a process, no room for the request
                self._jobs.pop(job.id, None)
                job.error = WorkerDied(f"the compiler's process could not be started: {error}")
                self._end(job)
            return job

    def poll(self) -> None:
        """Take the answers that are there. 1 µs if there is none."""
        if self._jobs:
            with self._lock:
                self._receive(0.0)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until no compile is under way; False if `timeout` seconds were not enough."""
        end = None if timeout is None else time.monotonic() + timeout
        while self._jobs:
            if end is not None and time.monotonic() >= end:
                return False
            with self._lock:
                self._receive(0.05)
        return True

    def wait_for(self, job: Job) -> None:
        while not job.done:
            with self._lock:
                self._receive(0.05)

    def close(self) -> None:
        """End the process at once; compiles under way fail."""
        with self._lock:
            self._kill()
            self._fail_all()

    def reset_after_fork(self) -> None:
        """In a forked child: the process is the parent's. Our ends of its pipes would keep it from seeing that end."""
        process, self._process = self._process, None
        if process is not None:
            process.returncode = 0  # not ours to wait for
            os.close(self._to)
            os.close(self._from)
        self._rest, self._log, self._news = b"", None, None
        self._lock = threading.RLock()
        jobs, self._jobs = self._jobs, {}
        for job in jobs.values():
            job.done = True  # with neither result nor error: whoever wants the plan asks again

    def _start(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 closed with the process
        to_child, self._to = os.pipe()
        self._from, from_child = os.pipe()
        os.set_blocking(self._from, False)
        environment = {name: value for name, value in os.environ.items() if name not in _CACHE_VARIABLES}
        environment |= {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "LAZY_DEBUG": "0"}  # what it would print is told here too
        environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, (os.cpu_count() or 1) - 1)))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-Wignore", "-c", _program(to_child, from_child)],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(to_child, from_child),
                env=environment,
            )
        except OSError:
            os.close(self._to)
            os.close(self._from)
            self._log.close()
            self._log = None
            raise
        finally:
            os.close(to_child)
            os.close(from_child)

    def _watch(self, idle_seconds: float) -> None:
        """See that the process, which may be about to start, is ended when it has been idle for so long."""
        before, self._idle_seconds = self._idle_seconds, idle_seconds
        if self._news is not None:
            if idle_seconds < before:
                self._news.set()
            return
        if idle_seconds == math.inf:
            return
        self._news = threading.Event()
        arguments = (self._news,)
        watcher = threading.Thread(target=self._end_when_idle, args=arguments, name="lazy_backend idle", daemon=True)
        try:
            watcher.start()
        except RuntimeError:  # no more threads, or the interpreter is leaving: the process ends with this one
            self._news = None

    def _end_when_idle(self, news: threading.Event) -> None:
        """On a thread of its own, until the process is gone."""
        while True:
            news.clear()
            with self._lock:
                if self._news is news:
                    self._receive(0.0)  # whoever asked may never look again
                if self._news is not news:  # the process is gone, and another may have started
                    return
                if self._process is None:  # it could not be started
                    self._news = None
                    return
                left = self._idle_seconds - (0.0 if self._jobs else self._clock() - self._idle_since)
                if left <= 0.0 and not self._jobs:
                    self._kill()
                    return
                if left == math.inf:
                    self._news = None
                    return
            news.wait(max(left, _SHORTEST_NAP))

    def _receive(self, timeout: float) -> None:
        if self._process is None:
            return
        ready, _, _ = select.select([self._from], [], [], timeout)
        if not ready:
            return
        data = os.read(self._from, 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._finish(json.loads(line))
        if not data:
            self._fail_all()

    def _finish(self, reply: dict[str, Any]) -> None:
        job = self._jobs.pop(reply["id"])
        job.seconds = reply["seconds"]
        if "error" in reply:
            kind = NotPortableThere if reply["error"] == "NotPortable" else RemoteCompileError
            job.error = kind(f"{reply['error']}: {reply['message']}")
        else:
            job.result = (job.folder / "result").read_bytes()
            if "kept" in reply:
                job.kept = DiskCounts(**reply["kept"]), reply["last_error"]
        self._end(job)
        self._idle_since = self._clock()

    def _end(self, job: Job) -> None:
        for name in ("request", "partial", "result"):
            (job.folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            job.folder.rmdir()
        job.done = True

    def _fail_all(self) -> None:
        """The process is gone."""
        text = self._last_words()
        status = self._kill()
        jobs, self._jobs = self._jobs, {}
        for job in jobs.values():
            job.error = WorkerDied(f"the compiler's process ended with status {status}{text}")
            self._end(job)

    def _last_words(self) -> str:
        if self._log is None:
            return ""
        self._log.seek(0)
        text = self._log.read().decode(errors="replace").strip()
        return f":\n{text[-2000:]}" if text else ""

    def _kill(self) -> int | None:
        process, self._process = self._process, None
        news, self._news = self._news, None
        if news is not None:
            news.set()
        if process is None:
            return None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # with the C++ compilers under it
        process.kill()  # it may not have made its group yet
        status = process.wait()
        os.close(self._to)
        os.close(self._from)
        assert self._log is not None
        self._log.close()
        self._log, self._rest = None, b""
        return status


def _program(to_child: int, from_child: int) -> str:
    """What the process runs. With -c, as -m or a file puts a folder first on sys.path, with somebody's `random.py`.

    Its priority first: importing takes seconds of a core. 10 would be a ninth of one beside a busy thread.
    """
    return (
        f"import os, sys; os.nice(5); sys.path[:] = {sys.path!r}\n"
        "from lazy_backend.lowering.worker import main\n"
        f"main({to_child}, {from_child}, {os.getpid()})"
    )


worker = CompileWorker()
atexit.register(worker.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=worker.reset_after_fork)


def process_state() -> dict[str, Any]:
    """What code generation reads from the process."""
    return {
        "threads": torch.get_num_threads(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "mkldnn": torch.backends.mkldnn.enabled,
    }


# Variables that switch inductor's caches, with the value that switches them off. They beat every setting, and without
# caches there are no artefacts: so the process does not get them. Internal, checked on 2.13: `env_name_force` there.
_CACHE_VARIABLES = {
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
    "TORCH_COMPILE_FORCE_DISABLE_CACHES": "1",
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
}


def wants_compiler_caches() -> bool:
    """Whether the user left inductor's own caches switched on. Imports nothing."""
    if any(os.environ.get(name) == off for name, off in _CACHE_VARIABLES.items()):
        return False
    if torch.compiler.config.force_disable_caches:
        return False
    inductor: Any = sys.modules.get("torch._inductor.config")
    functorch: Any = sys.modules.get("torch._functorch.config")
    return (inductor is None or inductor.fx_graph_cache) and (functorch is None or functorch.enable_autograd_cache)


def compiler_settings() -> dict[str, dict[str, Any]]:
    """The settings of the compiler that this process changed. Imports nothing: who changed one has imported it."""
    return {
        "inductor": _changed_settings("torch._inductor.config"),
        "functorch": _changed_settings("torch._functorch.config"),
    }


def _changed_settings(module_name: str) -> dict[str, Any]:
    module: Any = sys.modules.get(module_name)
    if module is None:
        return {}
    # internal, checked on 2.13: torch.utils._config_module has no public way to ask what was changed
    changed = [name for name in module._config if not module._is_default(name)]
    if not changed:  # as nearly always, and `save_config_portable` takes 1 ms
        return {}
    portable = module.save_config_portable(ignore_private_configs=True)
    found = {name: portable[name] for name in changed if name in portable and _has_text(portable[name])}
    # set back is not changed: torch.use_deterministic_algorithms(False) assigns one of them
    return {name: value for name, value in found.items() if value != module._config[name].default}


def _has_text(value: Any) -> bool:
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True
