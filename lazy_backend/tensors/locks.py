"""Device locks, work that is done once, and the queue that runs graphs in the background.

In: runs, in program order. Out: the same order on each device; exceptions carried to whoever comes next.

Note [The device lock]
At most one run is under way per device, while Python records the following step. A run holds its device's lock from
when it is scheduled until it has finished; scheduling the next one waits for that. Whatever the run raised stays with
the lock and is raised once, to the next caller that waits. Seed: lazy_graph_executor, `DeviceLocker`,
`DeviceLockerArena`. The seed's `LockDevices` and `MultiWait` have no part here: a sync is of one device, and waiting
for a run means doing it, or waiting until whoever does it has finished.

Note [Interruption]
An exception can come from anywhere into any line: Ctrl-C, a signal handler that raises, MemoryError, a timeout that
another thread sends. So can a call: a signal handler or a finalizer that computes or reads tensors, on the same thread.
Whatever state several statements change is therefore changed in this way:

- What is only being prepared is known by the trace's `unfinished`: the key of the call that is being recorded, or the
  run that is being scheduled. One store of an attribute commits it: `trace.cursor`, `context.trace`,
  `trace.unfinished`.
- Whoever finds `unfinished` set takes back what was not committed, and completes what was: both can be done twice. That
  a call was taken back is counted (`Trace.changes`), since it may be going on beneath whoever did it.
- Whoever prepares something compares that count in the statement before the commit. If it differs, something was
  recorded or run in between, and the preparation starts anew.
- A run is done by whoever comes first, once (`Work`). So one that was scheduled and then forgotten is done by whoever
  waits for it.

Locks are taken by `with`, and only those whose `__enter__` and `__exit__` are C functions (`Lock`, `RLock`): CPython
looks for signals when a Python function is entered, so a `Condition` may lose the lock that it just took. For the same
reason what must be put back is put back by plain stores or C functions in a `finally`, not by an `__exit__` in Python.
Locks that a signal handler or a finalizer may need are reentrant. Nobody waits for a run while holding a context's
lock, since a finalizer may need that lock on the thread of the run; only what interrupts a call does, as it cannot
release what that call holds.

Note [Lock order]
Whoever holds a lock takes only locks of later lines, or the same one again; so nobody waits in a circle. Every lock of
this package is here, as class or module and attribute (tests/test_lock_order.py looks for others, and watches the order
while programs train, replay, compile and serve):

1. `DeviceContext.lock`: what a device records.
2. `Work.turn`: who does a run. Kernels run beneath it; a finalizer that runs there may want line 1, which is why nobody
   waits for a run while holding that line.
3. `Executor._turn`: runs of a served graph that writes its weights, one at a time.
4. `ProfilingGraphExecutor._lock`: the plans of one graph.
5. `Family._lock`: the plans that graphs of one form share.
6. `CompileWorker._lock`: the compiler's process.
7. `DataCacheArena._lock`, `disk_cache._lock`: which cache a device or the process has.
8. `BoundedTable._lock`, `ComputationCache._lock`, `DataCache._lock`, `DiskCache._counting`, `FramePool._lock`,
   `GraphTask.lock`, `ClosureRunner._lock`, `_Watches._lock`, `DeviceContextArena._lock`, `History._lock`: one table
   each.
9. `RunLog._lock`, `metrics._lock`, `debug_log._lock`, `rng._lock`: nothing is called beneath them that takes a lock.

All are reentrant but `GraphTask.lock`, which threads of one run take for a few stores, where no code of users runs and
no finalizer can want the same run. `Work.ended` and `ClosureRunner.done` are no locks in this sense: they are made
held, and released when something ends.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

# Seconds after which a waiting thread looks for itself.
_LONGEST_WAIT = 0.5


class Work:
    """Something that is done once, by whoever comes first, while others wait. See Note [Interruption].

    A subclass says what in `perform`, which must not raise but for what interrupted it, and ends it in `finish`, which
    is called also after an interruption, perhaps twice.
    """

    __slots__ = ("turn", "ended", "done", "thread", "queued")

    def __init__(self) -> None:
        self.turn = threading.RLock()
        self.ended = threading.Lock()  # held until it is done
        self.ended.acquire()
        self.done = False
        self.thread: int | None = None  # that does it
        self.queued = False  # whether a thread is known to be about to do it

    def perform(self) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        raise NotImplementedError

    def leave_to_queue(self) -> None:
        """A thread is about to do it: who waits leaves it to that."""
        self.queued = True

    def is_beneath(self) -> bool:
        """Whether this very thread is doing it: the caller interrupted it, as a signal handler or a finalizer does."""
        return not self.done and self.thread == threading.get_ident()

    def do(self) -> None:
        """Do it, unless somebody did; wait for who is doing it. Returns at once on the thread that is doing it."""
        thread = threading.get_ident()
        with self.turn:
            if self.done or self.thread is not None:
                return
            try:
                try:
                    self.thread = thread  # no call since the question: who interrupts this one may do it all
                    self.perform()
                finally:
                    self.finish()
                    self.done = True
            finally:  # once more, if the interruption came within the block above
                if not self.done:
                    self.finish()
                    self.done = True
                self.ended.release()

    def join(self) -> None:
        """Wait until it is done; do it if nobody is about to. Returns at once on the thread that is doing it."""
        if not self.queued:
            self.do()
        while not self.done and not self.is_beneath():
            # a bound, as an interruption may have kept the lock from being released
            if self.ended.acquire(timeout=_LONGEST_WAIT):
                self.ended.release()


class DeviceRun(Protocol):
    """What a device's lock is held by."""

    done: bool
    below: DeviceRun | None  # what this run interrupted

    def join(self) -> None: ...

    def is_beneath(self) -> bool: ...

    def makes(self, storage: object) -> bool: ...


class DeviceLocker:
    """The lock of one device. See Note [The device lock]."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.count = 0  # of the runs that held it
        self._run: DeviceRun | None = None
        self._error: BaseException | None = None

    def is_idle(self) -> bool:
        """Whether no run is under way but one that the caller interrupted."""
        run = self._run
        return run is None or run.done or run.is_beneath()

    def lock(self, run: DeviceRun) -> None:
        """`run` is under way from here on, if it was not. The device must be idle."""
        while True:
            current = self._run
            if any(one is run for one in self._under_way()):  # perhaps beneath another one, which interrupted this call
                return
            # no call between these questions and the store, see Note [Interruption]: it may be done already
            if run.done:
                return
            if self._run is current:
                run.below = current
                self._run = run
                self.count += 1
                return

    def _under_way(self) -> Iterator[DeviceRun]:
        """The run that holds the lock, and those beneath that were interrupted, the latest first."""
        run = self._run
        while run is not None:
            yield run
            run = run.below

    def has_interrupted_maker_of(self, storage: object) -> bool:
        """Whether the caller interrupted the run that makes `storage`, on whose thread it is."""
        return any(run.is_beneath() and run.makes(storage) for run in self._under_way())

    def unlock(self, run: DeviceRun, error: BaseException | None = None) -> None:
        """`run` has finished, with this exception."""
        if self._error is None:  # the first one explains the others
            self._error = error
        if self._run is run:
            self._run, run.below = run.below, None

    def wait_idle(self) -> None:
        """Wait for the run under way, or do it if nobody began; what it raised stays for the next caller."""
        run = self._run
        if run is not None and not run.done:  # done: 0.1 µs instead of 0.4
            run.join()

    def barrier(self) -> None:
        """Wait for the run under way and raise what it raised."""
        self.wait_idle()
        self.check_reset_exception()

    def check_reset_exception(self) -> None:
        """Raise the exception that nobody was told of, once."""
        error = self._error
        if error is not None:
            try:
                raise error
            finally:
                self._error = None  # only now: what interrupts the line above leaves it for the next caller

    def restore(self, error: BaseException) -> None:
        """Leave an exception that was raised here for the next caller instead."""
        self._error = self._error or error

    def untold_exception(self) -> BaseException | None:
        """The exception that nobody was told of, if any."""
        return self._error

    def take_exception(self) -> BaseException | None:
        """The exception that nobody was told of, if any; it is not raised afterwards."""
        error, self._error = self._error, None
        return error


class DeviceLockerArena:
    """One `DeviceLocker` per device."""

    def __init__(self) -> None:
        self._lockers: dict[int, DeviceLocker] = {}

    def get_locker(self, index: int) -> DeviceLocker:
        found = self._lockers.get(index)
        return self._lockers.setdefault(index, DeviceLocker(index)) if found is None else found

    def reset_after_fork(self) -> None:
        """In a forked child no run is under way: its thread stayed with the parent."""
        self._lockers = {index: DeviceLocker(index) for index in self._lockers}


class DeviceQueue:
    """Runs tasks one after the other on a thread of its own, started at the first task; `on_start` is called there."""

    def __init__(self, name: str, on_start: Callable[[], object] = lambda: None) -> None:
        self.name = name
        self._on_start = on_start
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)  # before the thread, so that an interruption of its start does not lose the task
        if self._thread is None:
            # a daemon: a hanging kernel must not keep the interpreter from exiting
            thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            thread.start()
            self._thread = thread

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


lockers = DeviceLockerArena()
