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
import threading
import time
from types import FrameType

from lazy_backend.errors import CaptureError
from lazy_backend.errors.sites import is_internal, is_of_top_layer
from lazy_backend.ports.cpython import frames_of_threads

# Seconds that a body may stay in one place while another thread waits: where Python waits for threads, and elsewhere.
_PATIENCE_IN_WAIT, _PATIENCE = 1.0, 30.0
# Seconds between two looks at the body.
_INTERVAL = 0.005
_WAITING_FILES = frozenset(
    ("threading.py", "queue.py", "selectors.py", "_base.py", "pool.py", os.path.basename(__file__))
)
# How often a body lets others take the lock first, and for how many seconds each time: a thread that is on its way even
# then computes all the time.
MAX_TIMES_LET_THROUGH = 20
_INTERVAL_TO_PASS = 0.0005
# Where threads of this package wait for work, for a run, or for their turn.
_BENIGN_FILES = frozenset(("bodies.py", "locks.py", "closures.py"))


# By thread: what it runs. Only the thread itself changes its entry.
running: dict[int, Body] = {}


def are_others_on_their_way() -> bool:
    """Whether another thread may be about to take a device's lock: it runs code of the layer that does."""
    this = threading.get_ident()
    return any(_may_take_lock(frame) for thread, frame in frames_of_threads().items() if thread != this)


def _may_take_lock(frame: FrameType | None) -> bool:
    while frame is not None:
        file = frame.f_code.co_filename
        if is_of_top_layer(file):
            return os.path.basename(file) not in _BENIGN_FILES
        if not is_internal(file):
            return False  # the user's code, which may have been called from ours
        frame = frame.f_back
    return False


def let_others_through() -> None:
    """Give threads that are on their way the time to take the locks that this thread does not hold."""
    time.sleep(_INTERVAL_TO_PASS)


def note_device(name: str) -> None:
    """Note that this thread makes a tensor on a device, if it runs a body."""
    body = running.get(threading.get_ident())
    if body is not None:
        body.devices.add(name)


def note_read_once() -> None:
    """Note that this thread has read something that later runs of the same code do not, if it runs a body."""
    body = running.get(threading.get_ident())
    if body is not None:
        body.has_read_once = True


class Body:
    """One run of a captured function's code, on one thread."""

    __slots__ = ("name", "device", "thread", "devices", "ended", "refused", "has_read_once")

    def __init__(self, name: str, device: str) -> None:
        self.name = name
        self.device = device
        self.thread = threading.get_ident()
        self.devices: set[str] = set()  # that it named, as in `torch.ones(3, device="lazy:1")`
        self.ended = False
        self.refused: CaptureError | None = None  # what a thread was told that waited for this body
        self.has_read_once = False  # so that its program is in several pieces

    def wait(self) -> None:
        """Wait, on another thread, until the body has ended. Raises `CaptureError` if it stands still."""
        place: tuple[int, int] | None = None
        since = time.monotonic()
        while not self.ended:
            frame = frames_of_threads().get(self.thread)
            if frame is None:
                self.ended = True  # with its thread
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
