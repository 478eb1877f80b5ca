"""Functions that run after a step.

In: closures added while a step is recorded. Out: their calls, after the sync that computed what they read.
Seed: torch/_lazy/closure.py. Unlike there, an error of an asynchronous closure is never lost: it is raised at the next
`mark_step`, `add_step_closure` or `wait_device_ops`, and what is left at interpreter exit is printed.
"""

from __future__ import annotations

import queue
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from lazy_backend.settings import config

Closure = Callable[[], None]


class ClosureRunner:
    """Pending closures and the thread that runs the asynchronous ones, in order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: list[tuple[Closure, bool]] = []
        self._queue: queue.Queue[Closure] | None = None
        self._error: BaseException | None = None

    def add(self, function: Callable[..., Any], args: Sequence[Any], run_async: bool) -> None:
        self.raise_error()
        with self._lock:
            self._pending.append((lambda: function(*args), run_async))

    def run(self) -> None:
        """Run what is pending. A synchronous closure's error is raised here; the closures after it stay pending."""
        self.raise_error()
        while True:
            with self._lock:
                if not self._pending:
                    return
                closure, run_async = self._pending.pop(0)
            if run_async:
                self._enqueue(closure)
            else:
                closure()

    def wait(self) -> None:
        """Wait for the asynchronous closures and raise the first error among them."""
        if self._queue is not None:
            self._queue.join()
        self.raise_error()

    def raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _enqueue(self, closure: Closure) -> None:
        if self._queue is None:
            self._queue = queue.Queue(maxsize=config.max_async_closures)
            threading.Thread(target=self._work, args=(self._queue,), name="lazy-closures", daemon=True).start()
        self._queue.put(closure)  # blocks when the bound is reached: a slow logger slows the loop, it loses nothing

    def _work(self, tasks: queue.Queue[Closure]) -> None:
        while True:
            closure = tasks.get()
            try:
                # after an error the rest is dropped until somebody was told, as later closures may rely on earlier ones
                if self._error is None:
                    closure()
            except BaseException as error:
                self._error = error
            finally:
                tasks.task_done()

    def close(self) -> None:
        """At interpreter exit: finish what was queued and print an error nobody was told of."""
        if self._queue is not None:
            self._queue.join()
        error, self._error = self._error, None
        if error is not None:
            print("lazy_backend: an asynchronous step closure failed:", file=sys.stderr)
            traceback.print_exception(error)

    def reset_after_fork(self) -> None:
        self.__init__()  # type: ignore[misc]


runner = ClosureRunner()
