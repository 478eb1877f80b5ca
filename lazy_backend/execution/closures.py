"""Functions that run after a step.

In: closures added while a step is recorded. Out: their calls, after the sync that computed what they read.
Source: torch/_lazy/closure.py. Unlike there, an error of an asynchronous closure is never lost: it is raised at the
next `mark_step`, `add_step_closure` or `wait_device_ops`, and one that is left at interpreter exit is printed.
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
    """Pending closures and the thread that runs the asynchronous ones, in order.

    Locks and queues are C objects, see Note [Interruption]; `queue.Queue` is not.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._pending: list[tuple[Closure, bool]] = []
        self._tasks: queue.SimpleQueue[Closure | None] = queue.SimpleQueue()
        self._places: queue.SimpleQueue[None] = queue.SimpleQueue()  # one for each closure that may wait
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def add(self, function: Callable[..., Any], args: Sequence[Any], run_async: bool) -> None:
        self.raise_error()
        with self._lock:
            self._pending.append((lambda: function(*args), run_async))

    def run(self) -> None:
        """Run the closures that are pending now; those that a closure adds run after the next step.

        A synchronous closure's error is raised here; the closures after it stay pending.
        """
        if self._error is not None:
            self.raise_error()
        for _ in range(len(self._pending)):
            with self._lock:
                if not self._pending:  # a closure that calls mark_step ran them
                    return
                closure, run_async = self._pending.pop(0)
            if run_async:
                self._enqueue(closure)
            else:
                closure()

    def wait(self) -> None:
        """Wait for the asynchronous closures and raise the first error among them. Does not wait within one of them."""
        if self._thread is not None and not self._is_own_thread():
            done = threading.Lock()
            done.acquire()
            self._tasks.put(done.release)  # runs in its turn, after the closures queued before
            with done:
                pass
        self.raise_error()

    def raise_error(self) -> None:
        error = self._error
        if error is not None:
            try:
                raise error
            finally:
                self._error = None

    def _is_own_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def _enqueue(self, closure: Closure) -> None:
        if self._thread is None:
            for _ in range(config.max_async_closures):
                self._places.put(None)
            self._thread = threading.Thread(target=self._work, name="lazy-closures", daemon=True)
            self._thread.start()
        if self._is_own_thread() and self._places.empty():
            closure()  # no other thread would make room
            return
        self._places.get()  # blocks when the bound is reached: a slow logger slows the loop but loses nothing
        try:
            self._tasks.put(lambda: self._run(closure))
        except BaseException:
            self._places.put(None)
            raise

    def _run(self, closure: Closure) -> None:
        try:
            # after an error, closures are dropped until it is raised, as later ones may rely on earlier ones
            if self._error is None:
                closure()
        except BaseException as error:
            self._error = error
        finally:
            self._places.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task  # otherwise the task would keep its tensors alive until the next one comes

    def close(self, timeout: float) -> None:
        """At interpreter exit: finish queued closures within `timeout` seconds, and print an error not raised yet."""
        thread = self._thread
        if thread is not None:
            self._tasks.put(None)
            thread.join(timeout)
            if thread.is_alive():
                print(
                    f"lazy_backend: an asynchronous step closure did not finish within {timeout:.0f} s and was "
                    "abandoned",
                    file=sys.stderr,
                )
        error, self._error = self._error, None
        if error is not None:
            print("lazy_backend: an asynchronous step closure failed:", file=sys.stderr)
            traceback.print_exception(error)

    def forget(self) -> None:
        """Drop the closures that wait for the next step."""
        with self._lock:
            self._pending.clear()

    def reset_after_fork(self) -> None:
        self.__init__()  # type: ignore[misc]


runner = ClosureRunner()
