"""What ties the compiler's process to the training process: messages, and its life.

In: a pipe. Out: messages, each a line of JSON with the length of the bytes that follow it.

The compiler's process runs this file before anything else, as plain code: it must import neither torch nor anything of
ours. From its first millisecond on, no Ctrl-C ends it, and the end of its parent does. Until here, signals are blocked:
whoever starts the process blocks them in the thread that does.

It leads a process group, so Ctrl-C in the terminal is not for it, and takes along the C++ compilers it started. A
thread watches the pipe, as prctl's PDEATHSIG comes when the *thread* that forked ends. It is not a session of its own:
the kernel would schedule it as a group with the same share of the cores as the parent's session, however nice it is
(sched_autogroup).
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

# Names inductor's folder if it is the process's own, and not one that the user chose.
OWN_INDUCTOR_FOLDER = "_LAZY_BACKEND_INDUCTOR_FOLDER"


def encode(header: dict[str, Any], payload: bytes = b"") -> bytes:
    """One message."""
    return json.dumps({**header, "bytes": len(payload)}).encode() + b"\n" + payload


class Decoder:
    """Messages out of the pieces in which they arrive."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[tuple[dict[str, Any], bytes]]:
        """The messages that are complete with `data`."""
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
    """The compiler's end of the pipes."""

    def __init__(self, read_fd: int, write_fd: int, lock_fd: int, parent: int, folder: str) -> None:
        self._from, self._to = read_fd, write_fd
        self._parent, self._folder = parent, folder
        self._messages: queue.SimpleQueue[tuple[dict[str, Any], bytes]] = queue.SimpleQueue()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _stay)  # no SIG_IGN, which the C++ compilers would inherit
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for descriptor in (read_fd, write_fd, lock_fd):
            os.set_inheritable(descriptor, False)
        threading.Thread(target=self._watch, daemon=True).start()

    def get(self) -> tuple[dict[str, Any], bytes]:
        """The next message; waits for it."""
        return self._messages.get()

    def put(self, header: dict[str, Any], payload: bytes = b"") -> None:
        left = memoryview(encode(header, payload))
        try:
            while left:
                left = left[os.write(self._to, left) :]
        except BrokenPipeError:  # the parent is gone: `_watch` sees to the rest
            threading.Event().wait()

    def _watch(self) -> None:
        decoder, poll = Decoder(), select.poll()
        poll.register(self._from, select.POLLIN)
        # a process forked from the parent may hold the pipe open: hence the look at who the parent is
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
        """The parent is gone: end everything, and leave no file."""
        os.killpg(0, signal.SIGTERM)  # the C++ compilers; this process stays
        end = time.monotonic() + 1.0
        while os.path.lexists(self._folder) and time.monotonic() < end:
            shutil.rmtree(self._folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)


def _stay(number: int, frame: Any) -> None:
    pass
