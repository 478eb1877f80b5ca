"""Device locks, work that is done once, and the queue that runs graphs in the background.

In: runs, in program order. Out: the same order on each device; exceptions carried to the next caller that waits.

Note [The device lock]
At most one run is under way per device, while Python records the next step. A run holds its device's lock from when it
is scheduled until it has finished; scheduling the next run waits for that. An exception of the run stays with the lock
and is raised once, to the next caller that waits. Source: torch/csrc/lazy/core/lazy_graph_executor.h, `DeviceLocker`.
Its `LockDevices` and `MultiWait` are not needed here: a sync concerns one device, and waiting for a run means doing the
run, or waiting until the thread that does it has finished.

Note [Interruption]
An exception can arrive at any line: Ctrl-C, a signal handler that raises, MemoryError, a timeout that another thread
sends. So can a call: a signal handler or a finalizer that computes or reads tensors, on the same thread. State that
several statements change is therefore changed as follows:

- The trace's `unfinished` marks what is only being prepared: the key of the call that is being recorded, or the run
  that is being scheduled. One store of an attribute commits it: `trace.cursor`, `context.trace`, `trace.unfinished`.
- Code that finds `unfinished` set rolls back what was not committed, and completes what was; both can be done twice.
  The rollback of a call is counted (`Trace.changes`), since that call may still be in progress further down the stack.
- Code that prepares something compares that count in the statement before the commit. If the count differs, something
  was recorded or run in between, and the preparation starts again.
- A run is done once, by the first thread that gets to it (`Work`). So a run that was scheduled and then forgotten is
  done by the next caller that waits for it; and so are results of a run beside recording, if handing them out is
  interrupted: the step that made them had ended.

Locks are taken by `with`, and only those whose `__enter__` and `__exit__` are C functions (`Lock`, `RLock`): CPython
checks for signals when a Python function is entered, so a `Condition` may lose the lock that it just took. For the same
reason, state is restored by plain stores or C functions in a `finally`, not by an `__exit__` in Python. Locks that a
signal handler or a finalizer may need are reentrant. No thread waits for a run while it holds a context's lock, since a
finalizer on the run's thread may need that lock. The only exception is code that interrupts a call, as it cannot
release the lock that the call holds.

Note [Lock order]
A thread that holds a lock takes only locks of later lines, or the same lock again; so threads never wait in a circle.
Every lock of this package is listed, as class or module and attribute (tests/test_lock_order.py searches for others,
and checks the order while programs train, replay, compile and serve):

1. `NativeRecorder._loading`: who loads the recorder in C++. Finalizers that run meanwhile may record.
2. `DeviceContext.lock`: what a device records.
3. `Work.turn`: which thread does a run. Kernels run while it is held, and a finalizer that runs there may need the lock
   of line 2, so no thread waits for a run while it holds that lock.
4. `Executor._turn`, `RequestState._turn`: runs of a served graph that write the same tensors, one at a time.
5. `ProfilingGraphExecutor._lock`: the plans of one graph.
6. `Family._lock`: the plans that graphs of one form share.
7. `CompileWorker._lock`: the compiler's process.
8. `DataCacheArena._lock`, `disk_cache._lock`: which cache a device or the process has.
9. `Archive._lock`, `BoundedTable._lock`, `ComputationCache._lock`, `DataCache._lock`, `DiskCache._counting`,
   `FramePool._lock`, `GraphTask.lock`, `Layers._lock`, `ClosureRunner._lock`, `_Watches._lock`,
   `DeviceContextArena._lock`, `History._lock`, `Agreements._lock`: one table each.
10. `RunLog._lock`, `metrics._lock`, `debug_log._lock`, `rng._lock`, `WeakTable._lock`, `communication._lock`,
   `GroupNumbers._lock`, `Launches._lock`, `UnderWay._lock`, `_RunThread._lock`, `kernel_calls._lock`,
   `cpp_units._parsed_lock`: no code that runs while they are held takes a lock.

All are reentrant except two. `GraphTask.lock`: threads of one run take it for a few stores, during which no user code
runs and no finalizer can need the same run. `cpp_units._parsed_lock`: only threads that build take it, to count.
`Work.ended` and `ClosureRunner.done` are not locks in this sense: they are created held, and released when something
ends.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

# Seconds after which a waiting thread checks `done` again.
_LONGEST_WAIT = 0.5


class Work:
    """Work that is done once, by the first thread that gets to it, while others wait. See Note [Interruption].

    A subclass does the work in `perform`, which may raise only what interrupted it, and cleans up in `finish`, which is
    also called after an interruption, possibly twice; unless `is_repeatable`, which leaves the work to the next caller.
    """

    __slots__ = ("turn", "ended", "done", "thread", "queued")

    def __init__(self) -> None:
        self.turn = threading.RLock()
        self.ended = threading.Lock()  # held until the work is done
        self.ended.acquire()
        self.done = False
        self.thread: int | None = None  # the one that does the work
        self.queued: DeviceQueue | None = None  # the queue whose thread is about to do the work

    def perform(self) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        raise NotImplementedError

    def is_repeatable(self) -> bool:
        """Whether `perform` can be done again after an interruption, and nothing is lost by it."""
        return False

    def leave_to(self, queue: DeviceQueue) -> None:
        """Note that a queue's thread is about to do the work: `join` then leaves it to that thread."""
        self.queued = queue

    def is_beneath(self) -> bool:
        """Whether this very thread is doing the work: the caller, a signal handler or a finalizer, interrupted it.

        Work that can be repeated is not beneath its interruption, which may do it.
        """
        return not self.done and self.thread == threading.get_ident() and not self.is_repeatable()

    def do(self) -> None:
        """Do the work unless it is done; wait if another thread does it. Returns at once on the thread that does it.

        What interrupts work that can be repeated does it all, and what was interrupted finds it done.
        """
        thread = threading.get_ident()
        with self.turn:
            if self.done or (self.thread is not None and not self.is_repeatable()):
                return
            is_left = False
            try:
                try:
                    self.thread = thread  # no call since the check: an interrupting call may do all the work
                    self.perform()
                except BaseException:
                    is_left = self.is_repeatable()
                    raise
                finally:
                    if not is_left:
                        self.finish()
                        self.done = True
            finally:  # once more, if the interruption came within the block above
                if is_left:
                    self.thread = None
                else:
                    if not self.done:
                        self.finish()
                        self.done = True
                    if self.ended.locked():  # what interrupted this may have released it
                        self.ended.release()

    def join(self) -> None:
        """Wait until the work is done; do it if no thread is about to. Returns at once on the thread that does it.

        A finalizer may wait on the very thread that is about to: then that is where the work is done.
        """
        if self.queued is None or self.queued.is_here():
            self.do()
        while not self.done and not self.is_beneath():
            # a timeout, as an interruption may have kept the lock from being released
            if self.ended.acquire(timeout=_LONGEST_WAIT):
                self.ended.release()


class DeviceRun(Protocol):
    """A run, as the holder of a device's lock."""

    done: bool
    below: DeviceRun | None  # the run that this one interrupted

    def join(self) -> None: ...

    def is_beneath(self) -> bool: ...

    def is_over(self) -> bool: ...

    def makes(self, storage: object) -> bool: ...


class DeviceLocker:
    """The lock of one device. See Note [The device lock]."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.count = 0  # number of runs that have held the lock
        self._run: DeviceRun | None = None
        self.untold: BaseException | None = None  # the exception that no caller has seen yet

    def is_idle(self) -> bool:
        """Whether no run is under way, except one that the caller interrupted."""
        run = self._run
        return run is None or run.done or run.is_beneath()

    def lock(self, run: DeviceRun) -> None:
        """Mark `run` as under way, unless it already is. The device must be idle."""
        while True:
            current = one = self._run
            while one is not None and one is not run:  # perhaps beneath another run, which interrupted this call
                one = one.below
            if one is run:
                return
            # no call between these checks and the store, see Note [Interruption]: `run` may be done already
            if run.done:
                return
            if self._run is current:
                run.below = current
                self._run = run
                self.count += 1
                return

    def _under_way(self) -> Iterator[DeviceRun]:
        """The run that holds the lock, and the interrupted runs beneath it, latest first."""
        run = self._run
        while run is not None:
            yield run
            run = run.below

    def has_interrupted_maker_of(self, storage: object) -> bool:
        """Whether the caller interrupted the run that makes `storage`, on that run's thread."""
        return any(run.is_beneath() and run.makes(storage) for run in self._under_way())

    def unlock(self, run: DeviceRun, error: BaseException | None = None) -> None:
        """Release the lock: `run` has finished, with `error` if it failed."""
        if self.untold is None:  # the first one explains the others
            self.untold = error
        if self._run is run:
            self._run, run.below = run.below, None

    def wait_idle(self) -> None:
        """Wait for the run under way, or do it if no thread has begun. Its exception stays for the next caller."""
        run = self._run
        if run is not None and not run.done:  # done: 0.1 µs instead of 0.4
            run.join()

    def finish_if_over(self) -> bool:
        """Hand out the results of the run under way if that takes no waiting; False if it would.

        The run's exception stays for the next caller.
        """
        run = self._run
        if run is not None:
            if not run.is_over():
                return False
            run.join()
        return True

    def barrier(self) -> None:
        """Wait for the run under way and raise what it raised."""
        self.wait_idle()
        self.check_reset_exception()

    def check_reset_exception(self) -> None:
        """Raise the exception that no caller has seen yet, once."""
        error = self.untold
        if error is not None:
            try:
                raise error
            finally:
                self.untold = None  # only now: if the line above is interrupted, the next caller gets the exception

    def restore(self, error: BaseException) -> None:
        """Put an exception that was raised here back, for the next caller."""
        self.untold = self.untold or error

    def take_exception(self) -> BaseException | None:
        """Remove and return the exception that no caller has seen yet, if any."""
        error, self.untold = self.untold, None
        return error


class DeviceQueue:
    """Runs tasks one after the other on a thread of its own, started at the first task; `on_start` runs there first."""

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

    def is_here(self) -> bool:
        """Whether the calling thread is the one that runs the tasks."""
        return self._thread is not None and self._thread.ident == threading.get_ident()

    def close(self, timeout: float) -> bool:
        """Finish the tasks that were added, and end the thread; False if that took longer than `timeout` seconds."""
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
            del task  # otherwise the task would keep its tensors alive until the next one comes
