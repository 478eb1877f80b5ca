"""Which graphs are compiled for one thread, whatever the program uses; and runs leave its threads as they are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from harness import count
from torch import nn

import lazy_backend
from lazy_backend.execution.inspection import graph_of
from lazy_backend.lowering.ir.graph import Graph
from lazy_backend.lowering.products.thread_choice import num_threads_for


def graph(make: Callable[[], torch.Tensor]) -> Graph:
    return graph_of([make()])  # type: ignore[list-item]


def lazy(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="lazy")


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: lazy(8, 8) + 1, 1),
        (lambda: lazy(64, 256) @ lazy(256, 256), 1),
        (lambda: torch.addmm(lazy(256), lazy(64, 256), lazy(256, 256)), 1),
        (lambda: lazy(1024, 1024) @ lazy(1024, 1024), None),
        (lambda: torch.bmm(lazy(64, 128, 128), lazy(64, 128, 128)), None),
        (lambda: nn.functional.conv2d(lazy(2, 3, 16, 16), lazy(8, 3, 3, 3)), 1),
        (lambda: nn.functional.conv2d(lazy(32, 64, 32, 32), lazy(64, 64, 3, 3)), None),
        (lambda: lazy(4096, 4096) + 1, None),
        (lambda: nn.functional.scaled_dot_product_attention(*[lazy(1, 2, 16, 8)] * 3), 1),
        (lambda: nn.functional.scaled_dot_product_attention(*[lazy(8, 8, 512, 64)] * 3), None),
    ],
)
def test_by_what_a_run_computes(make: Callable[[], torch.Tensor], expected: int | None) -> None:
    assert num_threads_for(graph(make)) == expected


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def _many_products(count: int, size: int) -> torch.Tensor:
    value = lazy(size, size)
    for _ in range(count):
        value = value @ value
    return value


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("count", "size", "cores", "expected"),
    [
        (100, 96, 2, 1),  # 1.2 ms in all: recording takes longer than a second thread saves
        (100, 96, 3, None),  # a core is left for recording in any case
        (100, 512, 2, None),
        (1, 512, 2, None),
    ],
)
def test_by_what_recording_takes(count: int, size: int, cores: int, expected: int | None) -> None:
    made = graph(lambda: _many_products(count, size))
    assert num_threads_for(made, cores) == expected
    assert num_threads_for(made) is None  # a served function, say


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("where", ["always", "never"])
def test_runs_leave_the_number_of_threads_as_it_is(where: str) -> None:
    lazy_backend.config.backend = "inductor"
    lazy_backend.config.run_in_background = where
    value = torch.ones(64, 64, device="lazy")
    weight = torch.full((64, 64), 1 / 64, device="lazy")
    with count("ExecuteBeside") as runs:
        for _ in range(5):
            value = (value @ weight).relu()
            lazy_backend.mark_step()
        lazy_backend.wait_device_ops()
    assert bool(runs()) is (where == "always")
    assert torch.get_num_threads() == 2
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert found == [2]
