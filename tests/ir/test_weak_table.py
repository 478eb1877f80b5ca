"""`WeakTable`: values that nothing else holds leave it, and no Python code runs when they do."""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType
from typing import Any

import torch

from lazy_backend.cache.weak_table import WeakTable
from lazy_backend.lowering.ir.graph import intern_meta


class Value:
    pass


def test_the_first_value_of_a_key_is_kept_while_it_lives() -> None:
    table: WeakTable[str, Value] = WeakTable()
    first, second = Value(), Value()
    assert table.setdefault("a", first) is first
    assert table.setdefault("a", second) is first
    assert table.get("a") is first
    assert list(table) == [first]
    del first
    assert table.get("a") is None
    assert list(table) == []
    assert table.setdefault("a", second) is second
    table.discard("a")
    table.discard("a")
    assert table.get("a") is None


def test_dead_entries_do_not_pile_up() -> None:
    table: WeakTable[int, Value] = WeakTable()
    living = [Value() for _ in range(3000)]
    for key, value in enumerate(living):
        table[key] = value
    for key in range(3000, 100_000):
        table[key] = Value()
    assert len(table) <= 2 * len(living) + 1
    assert list(table) == living


def test_threads_agree_on_one_value() -> None:
    table: WeakTable[int, Value] = WeakTable()
    kept: list[list[Value]] = []
    barrier = threading.Barrier(4)

    def add() -> None:
        barrier.wait()
        kept.append([table.setdefault(key, Value()) for key in range(5000)])

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len({id(value) for value in values}) == 1 for values in zip(*kept, strict=True))


def test_no_python_code_runs_when_a_meta_dies() -> None:
    """An interrupt that arrives in a weak reference's callback is printed and lost."""
    called: list[str] = []

    def profile(frame: FrameType, event: str, _argument: Any) -> None:
        called.append(f"{event} {frame.f_code.co_name}")

    metas = [intern_meta((size, 7919), (7919, 1), 3, torch.float32) for size in range(10)]
    gc.collect()
    gc.disable()
    sys.setprofile(profile)
    try:
        del metas
    finally:
        sys.setprofile(None)
        gc.enable()
    assert [line for line in called if line.startswith("call")] == []
