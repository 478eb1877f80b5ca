"""Processes that measure: each holds one thing to measure and answers commands, a JSON object per line each way.

In: the command line of a process and its environment. Out: answers, or `WorkerFailed`, which says what went wrong.
Every process has compiler caches of its own, empty at its start, so that nothing profits from what ran before. It leads
a process group of its own: a compiler that it started ends with it, and Ctrl-C reaches only who asked.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

Reply = dict[str, Any]

TOOLS = Path(__file__).resolve().parent.parent
_ROOM = 1 << 30  # bytes of a cache that gets a recorder


class WorkerFailed(Exception):
    """A worker answered with an error, did not answer in time, or died."""


class Worker:
    """A process that answers commands."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        patience: float = 60.0,
        finds_recorder: bool = False,
    ) -> None:
        """`environment`: changes to this process's own; they win over those that give the process its caches.

        `patience`: seconds until a process that was asked to end is killed. `finds_recorder`: see `give_recorder`.
        """
        self.name = name
        self._patience = patience
        self._folder = tempfile.mkdtemp(prefix="bench-")
        if finds_recorder:
            give_recorder(Path(self._folders()["LAZY_BACKEND_CACHE_DIR"]))
        self._log = (Path(self._folder) / "log").open("w+")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=finding_tools({**os.environ, **self._folders(), **environment}),
            start_new_session=True,
        )
        self._replies: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._receiver = threading.Thread(target=self._receive, daemon=True)
        self._receiver.start()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close(0.0 if error is not None else self._patience)

    def _folders(self) -> dict[str, str]:
        names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "LAZY_BACKEND_CACHE_DIR")
        caches = {name: str(Path(self._folder) / name.lower()) for name in names}
        return {"TMPDIR": self._folder, **caches}  # what packages leave there is removed, too

    def _receive(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._replies.put(line)
        self._replies.put(None)

    def ask(self, command: str, within: float | None = None, **arguments: Any) -> Reply:
        """Send a command and wait for its answer, at most `within` seconds. Raises `WorkerFailed`.

        A worker that did not answer in time is killed: its answer would be taken for that of the next command.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
            self._process.stdin.flush()
        try:
            line = self._replies.get(timeout=within)
        except queue.Empty:
            self.kill()
            raise WorkerFailed(f"no answer to `{command}` within {within:.0f} s") from None
        if line is None:
            raise WorkerFailed(f"the process ended with status {self._process.wait()}: {self._last_words()}")
        reply: Reply = json.loads(line)
        if "error" in reply:
            raise WorkerFailed(" ".join(reply["error"].split())[:300])
        return reply

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        return lines[-1][:300] if lines else "it printed nothing"

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """End the process and all that it started, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self, patience: float) -> None:
        """End the process, by force after `patience` seconds, and remove its caches."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        self.kill()
        self._receiver.join(5.0)  # reads to the end, which came with that of the process
        assert self._process.stdout is not None
        if not self._receiver.is_alive():  # else somebody who left the process group holds the other end
            self._process.stdout.close()
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)


# ----- within the process


def answer_commands(answer: Callable[..., Reply]) -> None:
    """Answer commands until stdin ends, each by a call of `answer`. An error is an answer too: `{"error": ...}`."""
    replies = private_stdout()
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        try:
            reply = answer(command.pop("command"), **command)
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies, flush=True)


def private_stdout() -> TextIO:
    """The real stdout for replies; whatever else prints goes to stderr."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return replies


@contextlib.contextmanager
def limited(command: Sequence[str], log: Path, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process that prints into a file, and ends with the block, together with all that it started."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, **options)
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def give_recorder(cache: Path) -> None:
    """Put the recorder of known calls into a new cache, as a program's second process finds it there.

    Otherwise it is built in the midst of the figures.
    """
    recorder = _recorder()
    cache.mkdir(mode=0o700)
    if recorder is not None:
        disk, native = (importlib.import_module(f"lazy_backend.{name}") for name in ("cache.disk", "recording.native"))
        disk.DiskCache(cache, _ROOM).put(native.recorder_key(), recorder)


def finding_tools(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment in which a process imports the rooms of the tools."""
    path = filter(None, [str(TOOLS), environment.get("PYTHONPATH")])
    return {**environment, "PYTHONPATH": os.pathsep.join(path)}


def module_of(call: str) -> str:
    """The module in the text of a call, `room.module.function(...)`."""
    return call.partition("(")[0].rpartition(".")[0]


@functools.cache
def _recorder() -> Any:
    native = importlib.import_module("lazy_backend.recording.native")  # here: processes of eager import this module
    try:
        return native.obtain(may_build=True)
    except native.CannotBeBuilt:
        return None


def returned_by(call: str, environment: Mapping[str, str], threads: int) -> Any:
    """What `room.module.function(...)` of the tools returns in a process of its own. Raises `WorkerFailed`.

    `environment`: changes to this process's own. `threads`: of each operator; 0 for as many as PyTorch chooses.
    """
    changed = {**os.environ, **environment}
    if threads:
        changed |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    code = f"import json, {module_of(call)}; print(json.dumps({call}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=TOOLS, env=changed, capture_output=True, text=True)
    if done.returncode:
        raise WorkerFailed(f"{call} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])
