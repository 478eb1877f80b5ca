"""The worker process's link to the training process: its messages, and when it ends.

In: a pipe. Out: messages, each a line of JSON that gives the length of the bytes after it.

The worker process executes this file's source before anything else, so this file must import neither torch nor any of
our modules. From its first millisecond, the worker process survives Ctrl-C and ends when its parent ends. Until this
file runs, signals are blocked: the thread that starts the worker process blocks them.

The worker process leads a process group of its own, so Ctrl-C in the terminal does not reach it, and the C++ compilers
that it started end with it. A thread watches the pipe for the parent's end, because prctl's PDEATHSIG is sent when the
*thread* that forked ends. The worker process has no session of its own: the kernel would schedule such a session as a
group with the same share of the cores as the parent's session, whatever its niceness (sched_autogroup).
"""

from __future__ import annotations

import json
import os
import queue
import select
import shutil
import signal
import threading
import time
from typing import Any

# The variable that names inductor's folder if it is the worker process's own, not one that the user chose.
OWN_INDUCTOR_FOLDER = "_LAZY_BACKEND_INDUCTOR_FOLDER"


def encode(header: dict[str, Any], payload: bytes = b"") -> bytes:
    """One message as bytes."""
    return json.dumps({**header, "bytes": len(payload)}).encode() + b"\n" + payload


class Decoder:
    """Assembles messages from the pieces in which they arrive."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[tuple[dict[str, Any], bytes]]:
        """The messages that `data` completes."""
        self._rest += data
        found = []
        while (end := self._rest.find(b"\n")) >= 0:
            header = json.loads(self._rest[:end])
            last = end + 1 + header.pop("bytes")
            if len(self._rest) < last:
                break
            found.append((header, bytes(self._rest[end + 1 : last])))
            del self._rest[:last]
        return found


class Lifeline:
    """The worker process's end of the pipes."""

    def __init__(self, read_fd: int, write_fd: int, lock_fd: int, parent: int, folder: str) -> None:
        self._from, self._to = read_fd, write_fd
        self._parent, self._folder = parent, folder
        self._messages: queue.SimpleQueue[tuple[dict[str, Any], bytes]] = queue.SimpleQueue()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _stay)  # not SIG_IGN, which the C++ compilers would inherit
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for descriptor in (read_fd, write_fd, lock_fd):
            os.set_inheritable(descriptor, False)
        threading.Thread(target=self._watch, daemon=True).start()

    def get(self) -> tuple[dict[str, Any], bytes]:
        """Wait for the next message and return it."""
        return self._messages.get()

    def put(self, header: dict[str, Any], payload: bytes = b"") -> None:
        left = memoryview(encode(header, payload))
        try:
            while left:
                left = left[os.write(self._to, left) :]
        except BrokenPipeError:  # the parent is gone: `_watch` ends this process
            threading.Event().wait()

    def _watch(self) -> None:
        decoder, poll = Decoder(), select.poll()
        poll.register(self._from, select.POLLIN)
        # the parent's pid is checked too, because another child of the parent may hold the pipe open
        while os.getppid() == self._parent:
            if not poll.poll(1000):
                continue
            data = os.read(self._from, 1 << 16)
            if not data:
                break
            for message in decoder.feed(data):
                self._messages.put(message)
        self._end()

    def _end(self) -> None:
        """Once the parent is gone: end the whole process group, and leave no file."""
        os.killpg(0, signal.SIGTERM)  # ends the C++ compilers; this process handles it and stays
        end = time.monotonic() + 1.0
        while os.path.lexists(self._folder) and time.monotonic() < end:
            shutil.rmtree(self._folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)


def _stay(number: int, frame: Any) -> None:
    pass
