"""Run the kernels of a graph on several threads, each kernel as soon as its dependencies have run.

In: the kernels of a checked graph. Out: a plan with the same results as the serial plan, bit for bit.
Source: torch/nativert/executor/ParallelGraphExecutor.h. Its concurrent queue is a `SimpleQueue` here, its atomic counts
are lists under a lock.

Note [Order of a parallel run]
A kernel runs once the makers of its operands and its predecessors by effect edges (Note [Program order and effects])
have run. A thread that finishes a kernel continues with one of the kernels that became ready and leaves the others to
the next free thread, so a chain stays on one thread. A value is freed when every kernel that touches it has run.
Operators release the GIL while they compute, and that is when other threads run.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lazy_backend.lowering.interpreter.graph_executor import GraphExecutor
from lazy_backend.lowering.interpreter.kernels import Kernel, KernelGraph
from lazy_backend.lowering.interpreter.task import ExecInfo, GraphTask
from lazy_backend.lowering.ir.graph import Graph, Value, dependencies


@dataclass(slots=True, eq=False, repr=False)
class WorkUnit:
    """A kernel (with the `node` of its work unit), and the units that wait for it. Shared by all runs."""

    place: int
    kernel: Kernel
    users: list[WorkUnit]
    dependencies: int  # number of units this one waits for
    touches: tuple[int, ...]  # slots whose uses are counted down; a slot is emptied after its last use
    captures: tuple[int, ...]

    def run(self, task: GraphTask) -> list[WorkUnit]:
        """Compute, and return the units that are now ready. An error is stored in the task; then no unit starts."""
        if task.has_error:
            return self._finish(task)
        try:
            self.kernel.compute(task.frame)
            if self.captures:
                task.capture(self.captures)
            if task.leaf_streams is not None and not self.users:
                task.leaf_streams.note_leaf()
        except BaseException as error:
            self._fail(task, error)
            return []
        return self._finish(task)

    def _finish(self, task: GraphTask) -> list[WorkUnit]:
        ready: list[WorkUnit] = []
        values, not_ready, uses = task.frame.values, task.not_ready, task.uses
        with task.lock:
            for user in () if task.has_error else self.users:
                missing = not_ready.pop(user.place, user.dependencies) - 1
                if missing:
                    not_ready[user.place] = missing
                else:
                    ready.append(user)
            for slot in self.touches:
                uses[slot] -= 1
                if not uses[slot]:
                    values[slot] = None
            task.outstanding_tasks += len(ready) - 1
            if not task.outstanding_tasks:
                task.changed.notify()
        return ready

    def _fail(self, task: GraphTask, error: BaseException) -> None:
        if isinstance(error, Exception):
            described = self.kernel.describe(error)
            if described is not error:
                described.__cause__ = error
            error = described
        with task.lock:
            task.set_exception_without_signal(error)
            task.outstanding_tasks -= 1 + len(task.ready)
            task.ready.clear()
            task.changed.notify()


class ThreadPoolExecutor:
    """Threads that work on units of any run. The thread that starts a run works on that run, too.

    See Note [Reentrant runs]. The threads end when the pool is stopped or garbage-collected.
    """

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def start(self, num_threads: int) -> None:
        """Start `num_threads` threads, in addition to those that start runs."""
        self._process = os.getpid()
        # a thread references the queue, not the pool, so that an unused pool can be freed
        self._work: _Work = queue.SimpleQueue()
        self._end = weakref.finalize(self, _put_ends, self._work, num_threads)
        # daemons: a hanging kernel must not keep the interpreter from exiting
        self._threads = [
            threading.Thread(target=_loop, args=(self._work,), name=f"graph worker {place}", daemon=True)
            for place in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the threads, each after its current work. Runs in flight continue on the threads that started them."""
        threads, self._threads = self._threads, []
        if threads:
            self._end()
        for thread in threads:
            thread.join()

    def run(self, task: GraphTask, roots: Sequence[WorkUnit]) -> None:
        """Run `task` to completion, beginning with `roots`. Raises the first error."""
        if self._threads and self._process != os.getpid():
            self.start(len(self._threads))  # a forked process has none of the threads
        task.outstanding_tasks = len(roots)
        self.execute_inline(task, roots)
        while (unit := self._next(task)) is not None:
            self.execute_inline(task, [unit])
        task.raise_noted()

    def _next(self, task: GraphTask) -> WorkUnit | None:
        """Wait for a ready unit and return it; None at the end of the run."""
        with task.lock:
            while not task.ready:
                if task.completed():
                    return None
                task.changed.wait()
            return task.ready.popleft()  # type: ignore[no-any-return]

    def add(self, task: GraphTask, units: Sequence[WorkUnit]) -> None:
        """Leave ready units to the next free thread."""
        with task.lock:
            task.ready.extend(units)
            task.changed.notify()
        ticket = (self, weakref.ref(task))  # weak: the run may be over before a thread takes the ticket
        for _ in range(min(len(units), len(self._threads))):
            self._work.put(ticket)

    def execute_inline(self, task: GraphTask, ready: Sequence[WorkUnit]) -> None:
        """Run one of the `ready` units on this thread, then one that it made ready, and so on. Queue the others."""
        while ready:
            unit, *others = ready
            if others:
                self.add(task, others)
            ready = unit.run(task)

    def assist(self, task: GraphTask) -> None:
        """Work on `task` as long as it has ready units. Called by the pool's threads."""
        if not task.ready:
            return  # other threads have taken them all
        with task.taken_over():
            while (unit := self._next_if_ready(task)) is not None:
                self.execute_inline(task, [unit])

    def _next_if_ready(self, task: GraphTask) -> WorkUnit | None:
        with task.lock:
            return task.ready.popleft() if task.ready and not task.has_error else None


# A pool, and a run with ready units; None ends a thread.
_Work: TypeAlias = "queue.SimpleQueue[tuple[ThreadPoolExecutor, weakref.ref[GraphTask]] | None]"


def _put_ends(work: _Work, count: int) -> None:
    for _ in range(count):
        work.put(None)


def _loop(work: _Work) -> None:
    while (ticket := work.get()) is not None:
        pool, task = ticket[0], ticket[1]()
        if task is not None:
            pool.assist(task)
        del ticket, pool, task  # otherwise they would stay alive until the next ticket


class ParallelGraphExecutor(GraphExecutor):
    """Runs independent kernels concurrently, on `num_threads` threads, including the caller's.

    See Note [Order of a parallel run].
    """

    def __init__(
        self, graph: Graph, kernels: KernelGraph | None = None, info: ExecInfo | None = None, num_threads: int = 2
    ) -> None:
        super().__init__(graph, kernels, info)
        self._units = self._make_units()
        self._input_units = [unit for unit in self._units if not unit.dependencies]
        self._uses = [0] * len(self.kernels.template.values)
        for unit in self._units:
            for slot in unit.touches:
                self._uses[slot] += 1
        self._pool = ThreadPoolExecutor()
        self._pool.start(num_threads - 1)

    def _make_units(self) -> list[WorkUnit]:
        info = self.exec_info
        kernels = [self.kernels.kernels[place] for place in info.needed]
        producers = dependencies(kernels)
        units = [
            WorkUnit(
                place=place,
                kernel=kernel,
                users=[],
                dependencies=len(producers[place]),
                touches=tuple({value.number for value in _touched(kernel) if value not in info.outputs}),
                captures=info.captured_at.get(info.needed[place], ()),
            )
            for place, kernel in enumerate(kernels)
        ]
        for unit, before in zip(units, producers, strict=True):
            for place in before:
                units[place].users.append(unit)
        return units

    def run_kernels(self, task: GraphTask) -> None:
        task.init_to_execute(self._uses)
        self._pool.run(task, self._input_units)


def _touched(kernel: Kernel) -> list[Value]:
    return [*kernel.inputs(), *(value for value in kernel.outputs if value is not None)]
