"""Device locks, waiting and the queue: order, and exceptions that are raised exactly once."""

from __future__ import annotations

import threading

import pytest

from lazy_backend.locks import DeviceLocker, DeviceLockerArena, DeviceQueue, MultiWait


def failed_locker(*texts: str) -> DeviceLocker:
    locker = DeviceLocker(0)
    locker.lock()
    for text in texts:
        locker.unlock(ValueError(text))
    return locker


def test_a_carried_exception_is_raised_once() -> None:
    locker = failed_locker("first")
    with pytest.raises(ValueError, match="first"):
        locker.barrier()
    locker.barrier()


def test_locking_raises_it_and_leaves_the_lock_free() -> None:
    locker = failed_locker("first")
    with pytest.raises(ValueError, match="first"):
        locker.lock()
    locker.lock()
    locker.unlock()


def test_the_first_of_two_exceptions_is_kept() -> None:
    locker = failed_locker("first", "second")
    with pytest.raises(ValueError, match="first"):
        locker.barrier()
    locker.barrier()


def test_waiting_idle_raises_nothing() -> None:
    locker = failed_locker("first")
    locker.wait_idle()
    assert str(locker.take_exception()) == "first"
    assert locker.take_exception() is None


def test_a_second_lock_waits_for_the_first() -> None:
    locker, order = DeviceLocker(0), []
    locker.lock()
    thread = threading.Thread(target=lambda: (locker.lock(), order.append("second")))
    thread.start()
    order.append("first")
    locker.unlock()
    thread.join(timeout=30)
    assert order == ["first", "second"]


def test_an_arena_gives_one_locker_per_device() -> None:
    arena = DeviceLockerArena()
    assert arena.get_locker(1) is arena.get_locker(1)
    assert arena.get_locker(1) is not arena.get_locker(2)


def test_locking_devices_gives_what_unlocks_them() -> None:
    arena = DeviceLockerArena()
    unlockers = arena.lock_devices([2, 1, 2])
    assert len(unlockers) == 2
    for unlock in unlockers:
        unlock(None)
    arena.get_locker(1).barrier()
    arena.get_locker(2).barrier()


def test_a_failed_device_unlocks_the_others() -> None:
    arena = DeviceLockerArena()
    arena.get_locker(2).lock()
    arena.get_locker(2).unlock(ValueError("two"))
    with pytest.raises(ValueError, match="two"):
        arena.lock_devices([1, 2])
    arena.get_locker(1).barrier()
    arena.get_locker(2).barrier()


def test_after_a_fork_locks_are_free() -> None:
    arena = DeviceLockerArena()
    arena.get_locker(1).lock()
    arena.reset_after_fork()
    arena.get_locker(1).barrier()


def test_multi_wait_waits_for_all() -> None:
    wait = MultiWait(2)
    wait.done()
    with pytest.raises(TimeoutError, match=r"1 of the awaited runs did not finish within 0\.01 s"):
        wait.wait(timeout=0.01)
    wait.done()
    wait.wait(timeout=1)


def test_multi_wait_raises_the_first_error_each_time() -> None:
    wait = MultiWait(2)
    wait.done(ValueError("first"))
    wait.done(ValueError("second"))
    for _ in range(2):
        with pytest.raises(ValueError, match="first"):
            wait.wait()


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
