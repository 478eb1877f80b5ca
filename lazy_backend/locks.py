"""Device locks, waiting, and the queue that runs graphs in the background.

In: tasks, in program order. Out: the same order on one thread per device; exceptions carried to whoever comes next.

Note [The device lock]
A run holds its device's lock from before it is scheduled until it has finished. Scheduling the next run waits for the
lock, so at most one run is under way per device while Python records the following step. Whatever the run raised stays
with the lock and is raised once, to the next caller that locks or waits. Several devices are locked in the order of
their indices. Seed: lazy_graph_executor, `DeviceLocker`, `DeviceLockerArena`, `MultiWait`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable


class DeviceLocker:
    """The lock of one device."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._condition = threading.Condition()
        self._locked = False
        self._error: BaseException | None = None

    def lock(self) -> None:
        """Wait for the run under way, raise what it raised, else take the lock. Waiting releases the GIL."""
        with self._condition:
            self._condition.wait_for(lambda: not self._locked)
            self._check_reset_exception()
            self._locked = True

    def unlock(self, error: BaseException | None = None) -> None:
        """Give the lock back, with the exception of the run that held it."""
        with self._condition:
            self._locked = False
            if self._error is None:  # the first one explains the others
                self._error = error
            self._condition.notify_all()

    def barrier(self) -> None:
        """Wait for the run under way and raise what it raised."""
        with self._condition:
            self._condition.wait_for(lambda: not self._locked)
            self._check_reset_exception()

    def wait_idle(self) -> None:
        """Wait for the run under way; what it raised stays for the next caller."""
        with self._condition:
            self._condition.wait_for(lambda: not self._locked)

    def restore(self, error: BaseException) -> None:
        """Leave an exception that was raised here for the next caller instead."""
        with self._condition:
            self._error = self._error or error

    def take_exception(self) -> BaseException | None:
        """The exception nobody was told of, if any; it is not raised afterwards."""
        with self._condition:
            error, self._error = self._error, None
            return error

    def _check_reset_exception(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error


class DeviceLockerArena:
    """One `DeviceLocker` per device."""

    def __init__(self) -> None:
        self._lockers: dict[int, DeviceLocker] = {}
        self._lock = threading.Lock()

    def get_locker(self, index: int) -> DeviceLocker:
        with self._lock:
            return self._lockers.setdefault(index, DeviceLocker(index))

    def lock_devices(self, indices: Iterable[int]) -> list[Callable[[BaseException | None], None]]:
        """Lock several devices, lowest index first, and return what unlocks each.

        If one of them carries an exception, those already locked are unlocked again and it is raised.
        """
        unlockers: list[Callable[[BaseException | None], None]] = []
        try:
            for index in sorted(set(indices)):
                locker = self.get_locker(index)
                locker.lock()
                unlockers.append(locker.unlock)
        except BaseException:
            for unlock in unlockers:
                unlock(None)
            raise
        return unlockers

    def reset_after_fork(self) -> None:
        """In a forked child no run is under way: its thread stayed with the parent."""
        self._lock = threading.Lock()
        self._lockers = {index: DeviceLocker(index) for index in self._lockers}


class MultiWait:
    """Waits until `done` was called `count` times. An exception passed to `done` is raised by `wait`."""

    def __init__(self, count: int) -> None:
        self._condition = threading.Condition()
        self._missing = count
        self._error: BaseException | None = None

    def done(self, error: BaseException | None = None) -> None:
        with self._condition:
            self._missing -= 1
            self._error = self._error or error
            if self._missing <= 0:
                self._condition.notify_all()

    def wait(self, timeout: float | None = None) -> None:
        """Raises `TimeoutError` after `timeout` seconds, or the first exception passed to `done`."""
        with self._condition:
            if not self._condition.wait_for(lambda: self._missing <= 0, timeout):
                raise TimeoutError(f"{self._missing} of the awaited runs did not finish within {timeout} s")
            if self._error is not None:
                raise self._error


class DeviceQueue:
    """Runs tasks one after the other on a thread of its own, started at the first task; `on_start` is called there."""

    def __init__(self, name: str, on_start: Callable[[], object] = lambda: None) -> None:
        self.name = name
        self._on_start = on_start
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, task: Callable[[], None]) -> None:
        if self._thread is None:
            # a daemon: a hanging kernel must not keep the interpreter from exiting
            self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            self._thread.start()
        self._tasks.put(task)

    def close(self, timeout: float) -> bool:
        """Finish what was added and end the thread; False if that took longer than `timeout` seconds."""
        thread, self._thread = self._thread, None
        if thread is None:
            return True
        self._tasks.put(None)
        thread.join(timeout)
        return not thread.is_alive()

    def _run(self) -> None:
        self._on_start()
        while (task := self._tasks.get()) is not None:
            task()
            del task  # or it would keep its tensors until the next one comes
