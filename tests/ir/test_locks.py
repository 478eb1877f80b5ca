"""Device locks, work that is done once, and the queue: order, and exceptions that are raised exactly once."""

from __future__ import annotations

import threading

import pytest

from lazy_backend.tensors.contexts import DeviceContextArena
from lazy_backend.tensors.locks import DeviceLocker, DeviceQueue, DeviceRun, Work


class Task(Work):
    """A run that calls `function`, and gives its lock back."""

    def __init__(self, locker: DeviceLocker, function=lambda: None) -> None:
        super().__init__()
        self.below: DeviceRun | None = None
        self.finished = 0
        self.made: list[object] = []
        self._locker, self._function = locker, function

    def makes(self, storage: object) -> bool:
        return storage in self.made

    def perform(self) -> None:
        self.error: BaseException | None = None
        try:
            self._function()
        except ValueError as error:
            self.error = error

    def finish(self) -> None:
        self.finished += 1
        self._locker.unlock(self, getattr(self, "error", None))


def fail(text: str) -> None:
    raise ValueError(text)


def failed_locker(*texts: str) -> DeviceLocker:
    locker = DeviceLocker(0)
    for text in texts:
        task = Task(locker, lambda text=text: fail(text))
        locker.lock(task)
        task.do()
    return locker


def test_a_carried_exception_is_raised_once() -> None:
    locker = failed_locker("first")
    with pytest.raises(ValueError, match="first"):
        locker.barrier()
    locker.barrier()


def test_the_first_of_two_exceptions_is_kept() -> None:
    locker = failed_locker("first", "second")
    with pytest.raises(ValueError, match="first"):
        locker.barrier()
    locker.barrier()


def test_waiting_idle_raises_nothing() -> None:
    locker = failed_locker("first")
    locker.wait_idle()
    assert str(locker.untold) == "first"
    assert str(locker.take_exception()) == "first"
    assert locker.take_exception() is None


def test_a_restored_exception_is_raised_by_the_next_barrier() -> None:
    locker = failed_locker("first")
    with pytest.raises(ValueError, match="first") as raised:
        locker.barrier()
    locker.restore(raised.value)
    with pytest.raises(ValueError, match="first"):
        locker.barrier()


def test_a_barrier_waits_for_the_run_on_another_thread() -> None:
    locker, order = DeviceLocker(0), []
    began, release = threading.Event(), threading.Event()
    task = Task(locker, lambda: (began.set(), release.wait(timeout=30), order.append("run")))
    locker.lock(task)
    thread = threading.Thread(target=task.do)
    thread.start()
    began.wait(timeout=30)
    assert not locker.is_idle()
    threading.Timer(0.05, release.set).start()
    locker.barrier()
    order.append("after")
    thread.join(timeout=30)
    assert order == ["run", "after"]
    assert locker.is_idle()


def test_a_run_that_nobody_began_is_done_by_who_waits_for_it() -> None:
    locker, done = DeviceLocker(0), []
    locker.lock(Task(locker, lambda: done.append(threading.current_thread())))
    locker.barrier()
    assert done == [threading.current_thread()]


def test_a_run_that_is_queued_is_left_to_its_thread() -> None:
    locker, done = DeviceLocker(0), []
    task = Task(locker, lambda: done.append(threading.current_thread()))
    locker.lock(task)
    queue = DeviceQueue("runs")
    task.leave_to(queue)
    threading.Timer(0.05, queue.add, [task.do]).start()
    locker.barrier()
    assert [thread.name for thread in done] == ["runs"]
    assert queue.close(30)


def test_a_run_that_is_queued_is_done_by_its_own_thread_if_that_waits_for_it() -> None:
    locker, done, queue = DeviceLocker(0), [], DeviceQueue("runs")
    later = Task(locker, lambda: done.append("later"))
    first = Task(locker, lambda: (later.join(), done.append("first")))  # as a finalizer within the run may
    for task in (first, later):
        task.leave_to(queue)
        queue.add(task.do)
    assert queue.close(30)
    assert done == ["later", "first"]


def test_work_is_done_once() -> None:
    locker, done = DeviceLocker(0), []
    task = Task(locker, lambda: done.append(1))
    threads = [threading.Thread(target=task.do) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert done == [1]


def test_work_that_is_interrupted_is_finished_and_not_begun_again() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    locker = DeviceLocker(0)
    task = Task(locker, interrupt)
    locker.lock(task)
    with pytest.raises(KeyboardInterrupt):
        task.do()
    assert task.done
    assert task.finished
    locker.barrier()


def test_a_finish_that_is_interrupted_is_tried_again() -> None:
    class Interrupted(Task):
        def finish(self) -> None:
            super().finish()
            if self.finished == 1:
                raise KeyboardInterrupt

    locker = DeviceLocker(0)
    task = Interrupted(locker)
    locker.lock(task)
    with pytest.raises(KeyboardInterrupt):
        task.do()
    assert task.done
    assert task.finished == 2


def test_what_interrupts_a_run_does_not_wait_for_it() -> None:
    locker, seen, made = DeviceLocker(0), [], object()

    def handler() -> None:  # as a signal handler, in the middle of the run
        locker.barrier()
        seen.append(locker.has_interrupted_maker_of(made))
        inner = Task(locker, lambda: seen.append(locker.has_interrupted_maker_of(made)))
        locker.lock(inner)
        inner.do()
        seen.append(locker.has_interrupted_maker_of(object()))

    outer = Task(locker, handler)
    outer.made.append(made)
    locker.lock(outer)
    outer.do()
    assert seen == [True, True, False]
    assert locker.is_idle()


@pytest.mark.timeout(60)
def test_a_run_that_is_under_way_beneath_another_does_not_take_the_lock_again() -> None:
    """The start of a run that was interrupted is called again, by whoever finds it unfinished."""
    locker, made = DeviceLocker(0), object()
    outer, inner = Task(locker), Task(locker)
    outer.made.append(made)

    def work() -> None:
        locker.lock(outer)
        assert locker.has_interrupted_maker_of(made)
        assert not locker.has_interrupted_maker_of(object())  # and comes to an end

    inner._function = work
    outer._function = lambda: (locker.lock(inner), inner.do())
    locker.lock(outer)
    outer.do()
    assert locker.is_idle()
    assert locker.count == 2


def test_a_run_that_is_done_does_not_take_the_lock_again() -> None:
    locker = DeviceLocker(0)
    first, second = Task(locker), Task(locker)
    locker.lock(first)
    first.do()
    locker.lock(second)
    locker.lock(first)
    assert not locker.is_idle()
    second.do()
    assert locker.is_idle()


def test_after_a_fork_no_run_is_under_way() -> None:
    arena = DeviceContextArena()
    context = arena.get_device_context(0)
    context.locker.lock(Task(context.locker))
    assert not context.locker.is_idle()
    arena.reset_after_fork()
    assert context.locker.is_idle()
    context.locker.barrier()


def test_a_queue_keeps_the_order() -> None:
    queue, order = DeviceQueue("test"), []
    for n in range(20):
        queue.add(lambda n=n: order.append(n))
    assert queue.close(timeout=30)
    assert order == list(range(20))


def test_a_queue_runs_on_a_thread_of_its_own() -> None:
    queue, names = DeviceQueue("lazy:test"), []
    queue.add(lambda: names.append(threading.current_thread().name))
    queue.close(timeout=30)
    assert names == ["lazy:test"]


def test_a_queue_starts_again_after_closing() -> None:
    queue, order = DeviceQueue("test"), []
    queue.add(lambda: order.append(1))
    queue.close(timeout=30)
    queue.add(lambda: order.append(2))
    queue.close(timeout=30)
    assert order == [1, 2]


def test_closing_reports_a_task_that_hangs() -> None:
    queue, release = DeviceQueue("test"), threading.Event()
    queue.add(lambda: release.wait(timeout=30))
    assert not queue.close(timeout=0.01)
    release.set()


def test_an_unused_queue_closes() -> None:
    assert DeviceQueue("test").close(timeout=0)
