"""Programs that tests run, without the 3 s of a core in which each would import PyTorch.

In: a program and its environment. Out: what a Python process that runs it prints, and its exit status.
One process imports PyTorch and forks one more for each program. It has imported nothing of this package, which each
program imports by itself, with its own settings. A fork ends as any Python process: threads are joined, `atexit`'s
functions are called, what was printed is flushed. For a test of imports, of the start or of an installation this is
not the right place, see `harness.run_python`.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

# Variables that nothing reads while PyTorch is imported without backends. Any other is the same from the start.
_LATE = ("LAZY_", "PYTEST_", "TORCH_DEVICE_BACKEND_AUTOLOAD")

# What the process does. torch._dynamo: the first use of a lazy tensor imports it, and with it most of the compiler.
_SERVE = """
def serve():
    import gc, json, os, sys, warnings
    import torch, torch._dynamo

    gc.collect()
    gc.freeze()  # a fork that searches torch for garbage at its end copies most of its memory, 0.8 s
    for line in sys.stdin:
        request = json.loads(line)
        with warnings.catch_warnings(action="ignore"):  # numpy's threads do not mind a fork
            child = os.fork()
        if not child:
            break
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    else:
        return
    files = [os.open(request[name], os.O_RDWR | os.O_APPEND) for name in ("stdin", "stdout", "stderr")]
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    torch.default_generator.seed()  # each process has a seed of its own
    sys.modules["numpy"].random.seed()
    if torch._is_device_backend_autoload_enabled():
        torch._import_device_backends()
    main = vars(sys.modules["__main__"])
    main.pop("serve")
    if request["file"] is None:
        sys.argv = ["-c"]
    else:
        main["__file__"], main["__cached__"], sys.argv = request["file"], None, [request["file"], *request["arguments"]]
        sys.path[0] = os.path.dirname(request["file"])
    try:
        exec(compile(request["code"], request["file"] or "<string>", "exec"), main)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        error.__traceback__ = error.__traceback__.tb_next  # without this function's entry
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    else:
        return
    sys.excepthook(sys.last_type, sys.last_value, sys.last_traceback)
    sys.exit(1)

serve()
"""


class _Forks:
    """A process that imported PyTorch in `environment` and forks for each program."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE],
            env={**environment, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self.close)

    def run(self, request: dict[str, object], timeout: float) -> int:
        """The exit status of the program; it is killed after `timeout` seconds."""
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None
        assert answers is not None
        print(json.dumps(request), file=requests, flush=True)
        pid = int(answers.readline())
        timer = threading.Timer(timeout, os.kill, (pid, signal.SIGKILL))
        timer.start()
        status = int(answers.readline())
        timer.cancel()
        return status

    def close(self) -> None:
        self._process.communicate()


@functools.cache
def _forks_in(environment: frozenset[tuple[str, str]]) -> _Forks:
    return _Forks(dict(environment))


def run_fork(
    code: str,
    cwd: Path,
    environment: dict[str, str],
    file: Path | None = None,
    arguments: Sequence[str] = (),
    timeout: float = 120,
) -> subprocess.CompletedProcess[str]:
    """Run `code` as `python -c code` would, or as `python file arguments...` if it is the text of a file."""
    early = frozenset((name, value) for name, value in environment.items() if not name.startswith(_LATE))
    with tempfile.TemporaryDirectory() as folder:
        out, error = Path(folder, "out"), Path(folder, "error")
        out.touch()
        error.touch()
        request = {
            "code": code,
            "file": None if file is None else str(file),
            "arguments": list(arguments),
            "cwd": str(cwd),
            "environment": environment,
            "stdin": os.devnull,
            "stdout": str(out),
            "stderr": str(error),
        }
        status = _forks_in(early).run(request, timeout)
        return subprocess.CompletedProcess([str(file or "-c")], status, out.read_text(), error.read_text())
