"""Let other threads wait for the body of a captured function, or refuse what would wait for ever.

In: a thread that is about to use a device on which another thread runs such a body. Out: its turn, or `CaptureError`.

Note [Threads and bodies]
A captured function that runs as written holds its device's lock, so that nothing else gets into its program. A thread
of the body's own, or of a pool that it uses, would then wait for the lock while the body waits for that thread. Locks
tell nothing about who waits for whom, but the body's stack does: if it has been in one place of a module that waits, or
in one place at all for much longer, the waiting thread raises, and so does the body when it returns. Waiting threads
therefore ask for their turn before they take the lock; the thread of the body never waits here.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from types import FrameType

from lazy_backend.errors import CaptureError

# Seconds that a body may stay in one place while another thread waits: where Python waits for threads, and elsewhere.
_PATIENCE_IN_WAIT, _PATIENCE = 1.0, 30.0
# Seconds between two looks at the body.
_INTERVAL = 0.005
_WAITING_FILES = frozenset(
    ("threading.py", "queue.py", "selectors.py", "_base.py", "pool.py", os.path.basename(__file__))
)


# By thread: what it runs. Only the thread itself changes its entry.
running: dict[int, Body] = {}


def note_device(name: str) -> None:
    """Note that this thread makes a tensor on a device, if it runs a body."""
    body = running.get(threading.get_ident())
    if body is not None:
        body.devices.add(name)


class Body:
    """One run of a captured function's code, on one thread."""

    __slots__ = ("name", "device", "thread", "devices", "ended", "refused")

    def __init__(self, name: str, device: str) -> None:
        self.name = name
        self.device = device
        self.thread = threading.get_ident()
        self.devices: set[str] = set()  # that it named, as in `torch.ones(3, device="lazy:1")`
        self.ended = False
        self.refused: CaptureError | None = None  # what a thread was told that waited for this body

    def wait(self) -> None:
        """Wait until the body has ended; not at all on its own thread. Raises `CaptureError` if it stands still."""
        if self.thread == threading.get_ident():
            return
        place: tuple[int, int] | None = None
        since = time.monotonic()
        while not self.ended:
            frame = sys._current_frames().get(self.thread)
            if frame is None:
                return
            now = id(frame), frame.f_lasti
            if now != place:
                place, since = now, time.monotonic()
            elif time.monotonic() - since > _patience_with(frame):
                self.refused = self._refusal()
                raise self.refused
            del frame  # otherwise its variables would outlive it
            time.sleep(_INTERVAL)

    def _refusal(self) -> CaptureError:
        return CaptureError(
            f"a thread uses {self.device} while the captured function {self.name} runs on another thread, and that one "
            "seems to wait for it\n  compute on the thread that calls the captured function, or do not capture it"
        )

    def check(self) -> None:
        """Raise what a thread was told that the body may have waited for."""
        if self.refused is not None:
            raise self.refused


def _patience_with(frame: FrameType) -> float:
    return _PATIENCE_IN_WAIT if os.path.basename(frame.f_code.co_filename) in _WAITING_FILES else _PATIENCE
