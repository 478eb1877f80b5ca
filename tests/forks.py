"""Programs that tests run, without the 3 s of a core in which each would import PyTorch.

In: a program and its environment. Out: what a Python process that runs it prints, and its exit status.
One process imports PyTorch and forks one more for each program. It has imported nothing of this package, which each
program imports by itself, with its own settings. A fork is the leader of a session of its own, and ends as any Python
process: threads are joined, `atexit`'s functions are called, what was printed is flushed. For a test of imports, of the
start or of an installation this is not the right place, see `harness.run_python`.
"""

from __future__ import annotations

import functools
import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

# What is imported before the forks. torch._dynamo: the first use of a lazy tensor imports it, and with it most of the
# compiler, so a program that looks at the compiler's imports or settings takes only torch.
TORCH, COMPILER = "torch", "torch, torch._dynamo"
# Variables that nothing reads while these are imported without backends. Any other is the same from the start.
_RANKS = ("RANK", "WORLD_SIZE", "MASTER_")
_LATE = {COMPILER: ("LAZY_", "PYTEST_", "TORCH_DEVICE_BACKEND_AUTOLOAD", *_RANKS)}
_LATE[TORCH] = (*_LATE[COMPILER], "TORCHINDUCTOR_", "CXX", "PATH", "TMPDIR")

# What the process does. A program is its grandchild: the process between them waits for it and says how it ended.
_SERVE = """
def serve():
    import atexit, gc, json, os, socket, sys, threading, warnings
    import {imports}

    gc.collect()
    gc.freeze()  # a fork that searches torch for garbage at its end copies most of its memory, 0.8 s
    requests = socket.socket(fileno=int(sys.argv[1]))
    while True:
        message, descriptors, *_ = socket.recv_fds(requests, 1 << 20, 3)
        if not message:
            return
        with warnings.catch_warnings(action="ignore"):  # numpy's threads do not mind a fork
            waiter = os.fork()
        if not waiter:
            break
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(waiter, 0)
    if os.fork():
        os._exit(0)  # nobody waits for whoever waits for the program
    requests.close()
    *outputs, status = descriptors
    if program := os.fork():
        for descriptor in outputs:
            os.close(descriptor)
        os.write(status, b"%d\\n" % program)
        os.write(status, b"%d\\n" % os.waitstatus_to_exitcode(os.waitpid(program, 0)[1]))
        os._exit(0)
    os.close(status)
    os.setsid()
    for number, file in enumerate(outputs, 1):
        os.dup2(file, number)
        os.close(file)
    request = json.loads(message)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    if "tempfile" in sys.modules:  # the program's environment says where temporary files go
        sys.modules["tempfile"].tempdir = None
    torch.default_generator.seed()  # each process has a seed of its own
    if "numpy" in sys.modules:
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
        if request["is_dismantled"]:
            return
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    sys.excepthook(sys.last_type, sys.last_value, sys.last_traceback)
    sys.exit(1)

serve()
"""


class Fork:
    """A program that runs, with its output in pipes. As `subprocess.Popen` in text mode, as far as tests use that.

    It runs as `python -c code` would, or as `python file arguments...` if `code` is the text of a file. One that need
    not be dismantled skips, at its end, how Python clears modules and C++ takes the operators from PyTorch's table:
    0.3 s of a core.
    """

    def __init__(
        self,
        code: str,
        cwd: Path,
        environment: dict[str, str],
        file: Path | None = None,
        arguments: Sequence[str] = (),
        imports: str = COMPILER,
        is_dismantled: bool = True,
    ) -> None:
        self.returncode: int | None = None
        request = {"code": code, "cwd": str(cwd), "environment": environment, "arguments": list(arguments)}
        request["is_dismantled"] = is_dismantled
        request["file"] = None if file is None else str(file)
        early = {name: value for name, value in environment.items() if not name.startswith(_LATE[imports])}
        (out, to_out), (errors, to_errors), (status, to_status) = os.pipe(), os.pipe(), os.pipe()
        with _starting:
            forking, _ = _forking(imports, frozenset(early.items()))
        socket.send_fds(forking, [json.dumps(request).encode()], [to_out, to_errors, to_status])
        for descriptor in (to_out, to_errors, to_status):
            os.close(descriptor)
        self.stdout, self.stderr = os.fdopen(out), os.fdopen(errors)
        # unbuffered: a program that ends at once has written its exit status when the first line is read
        self._status = os.fdopen(status, "rb", buffering=0)
        self.pid = int(self._status.readline())

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """The output that was not read yet, once the program has ended. Raises `subprocess.TimeoutExpired`."""
        end = None if timeout is None else time.monotonic() + timeout
        read = {stream: bytearray() for stream in (self.stdout, self.stderr, self._status) if not stream.closed}
        with selectors.DefaultSelector() as selector:
            for stream in read:
                selector.register(stream, selectors.EVENT_READ)
            while selector.get_map():
                ready = selector.select(None if end is None else max(0.0, end - time.monotonic()))
                if not ready:
                    raise subprocess.TimeoutExpired(f"program {self.pid}", timeout or 0.0)
                for key, _ in ready:
                    data = os.read(key.fd, 1 << 16)
                    read[key.fileobj] += data  # type: ignore[index]
                    if not data:
                        selector.unregister(key.fileobj)
        texts = [bytes(text).decode() for text in read.values()]
        for stream in read:
            stream.close()
        if len(texts) == 3:
            self.returncode = int(texts.pop())
        return (texts[0], _REMARKS.sub("", texts[1])) if texts else ("", "")


# Of Triton (with torch 2.15), which is imported before the fork: what Python's end leaves of its own objects.
_REMARKS = re.compile(r"nanobind: leaked .*?/refleaks\.html\n?", re.S)


def run_fork(
    code: str,
    cwd: Path,
    environment: dict[str, str],
    file: Path | None = None,
    arguments: Sequence[str] = (),
    timeout: float = 120,
    imports: str = COMPILER,
    is_dismantled: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end. One that takes longer than `timeout` seconds is killed."""
    program = Fork(code, cwd, environment, file, arguments, imports, is_dismantled)
    try:
        out, errors = program.communicate(timeout)
    except subprocess.TimeoutExpired:
        program.send_signal(signal.SIGKILL)
        out, errors = program.communicate()
    assert program.returncode is not None
    return subprocess.CompletedProcess([str(file or "-c")], program.returncode, out, errors)


_starting = threading.Lock()  # a test may run programs from several threads


@functools.cache
def _forking(imports: str, environment: frozenset[tuple[str, str]]) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """The process that forks, which ends with the last holder of this socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", _SERVE.replace("{imports}", imports), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**dict(environment), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            start_new_session=True,
        )
    return ours, process
