"""Threads of operators, which follow the number of requests under way."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from harness import run_python

from lazy_backend import config, serve, wait_for_compiles
from lazy_backend.lowering.serving import executor
from lazy_backend.ports.native_code import set_own_threads


@pytest.fixture(autouse=True)
def _four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def noting(threads: list[int], wait: Callable[[], object] = lambda: None) -> Callable[..., Any]:
    """A backend whose code notes how many threads operators use."""

    def compile_module(module: torch.fx.GraphModule, examples: Any) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            threads.append(torch.get_num_threads())
            wait()
            return module(*inputs)

        return run

    return compile_module


def product(x: torch.Tensor) -> torch.Tensor:
    return x @ x


LARGE, SMALL = torch.randn(512, 512), torch.randn(8, 8)


def test_a_request_alone_takes_all_threads_and_several_share_them() -> None:
    threads: list[int] = []
    barrier = threading.Barrier(1)
    config.compile, config.backend = "foreground", noting(threads, lambda: barrier.wait())
    served = serve(product, LARGE)
    served(LARGE)
    served(LARGE)  # the first one may be another run
    for count, shares in ((1, {4}), (2, {4, 2}), (6, {4, 2, 1})):
        threads.clear()
        barrier = threading.Barrier(count)
        with ThreadPoolExecutor(count) as pool:
            for answer in pool.map(lambda _: served(LARGE), range(count)):
                torch.testing.assert_close(answer, product(LARGE))
        assert set(threads) == shares
        assert len(threads) == count
    assert torch.get_num_threads() == 4


def test_an_error_gives_threads_back() -> None:
    threads: list[int] = []

    def fail() -> None:
        if len(threads) > 2:
            raise RuntimeError("broken")

    config.compile, config.backend = "foreground", noting(threads, fail)
    served = serve(product, LARGE)
    served(LARGE)
    served(LARGE)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="broken"):
            served(LARGE)
    assert set(threads) == {4}
    assert torch.get_num_threads() == 4


@pytest.mark.parametrize("why", ["small", "deterministic", "one thread"])
def test_nothing_is_shared(why: str) -> None:
    threads: list[int] = []
    barrier = threading.Barrier(1)
    config.compile, config.backend = "foreground", noting(threads, lambda: barrier.wait())
    x = SMALL if why == "small" else LARGE
    usual = 1 if why == "one thread" else 4
    torch.set_num_threads(usual)
    torch.use_deterministic_algorithms(why == "deterministic")
    try:
        served = serve(product, x)
    finally:
        torch.use_deterministic_algorithms(False)
    served(x)
    threads.clear()
    barrier = threading.Barrier(3)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: served(x), range(3)))
    assert threads == [usual] * 3


def reduction(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = (x.sin() + x.cos()).sum(0)
    return y, y.square().sum()


@pytest.mark.scenario
def test_compiled_code_takes_any_number_of_threads() -> None:
    config.backend = "inductor"
    x = torch.randn(4096, 1024, dtype=torch.float64)
    served = serve(reduction, x)
    wait_for_compiles()
    served(x)  # what is compiled answers from the second request on
    for count in (4, 1, 3, 8, 2):
        set_own_threads(count)
        for one, other in zip(served(x), reduction(x), strict=True):
            torch.testing.assert_close(one, other)
        assert torch.get_num_threads() == count


def chain(written: torch.Tensor, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    for other in others:
        x = x @ other
    written.copy_(x)
    return x


@pytest.mark.scenario
def test_a_run_beside_a_thread_that_keeps_the_gil_lets_go_of_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a run takes place while another thread has the GIL: its arguments end on the way."""
    config.compile, config.backend = "foreground", "inductor"
    torch.set_num_threads(1)  # else the request goes another way
    written, *others = (torch.full((256, 256), 1 / 256) for _ in range(5))
    served = serve(chain, (written, *others))
    for _ in range(3):
        served(written, *others)
    plan: Any = served.delegates[0].plan_for_run()
    call, numbers = plan._call, written.numpy()
    begins, seen = threading.Event(), threading.Event()

    def call_beside(arguments: list[Any]) -> Any:
        written.zero_()
        begins.set()  # the other thread gets the GIL when the run gives it up
        return call(arguments)

    def spin() -> None:
        begins.wait()
        end = time.monotonic() + 20
        while time.monotonic() < end:
            if numbers[-1, -1]:
                seen.set()
                return

    monkeypatch.setattr(plan, "_call", call_beside)
    spinning = threading.Thread(target=spin)
    spinning.start()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        answer = served(written, *others)
    finally:
        sys.setswitchinterval(before)
        spinning.join()
    assert seen.is_set(), "the run waited for the GIL before its last operator"
    torch.testing.assert_close(answer, written)


def test_a_forked_child_counts_its_own_requests(tmp_path: Path) -> None:
    code = """
        import os
        import lazy_backend
        import torch
        from lazy_backend.lowering.serving.request_threads import request_threads

        def share_in_child():
            child = os.fork()
            if child == 0:
                os._exit(request_threads.run(torch.get_num_threads))
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

        torch.set_num_threads(4)
        print(request_threads.run(lambda: request_threads.run(torch.get_num_threads)))
        print(request_threads.run(share_in_child))
    """
    assert run_python(dedent(code), tmp_path).split() == ["2", "4"]


def test_answers_to_several_threads_are_held_only_if_they_are_small_and_few() -> None:
    served = serve(product, SMALL)
    answers: list[weakref.ref[torch.Tensor]] = []

    def ask(x: torch.Tensor, count: int = 1) -> None:
        for _ in range(count):
            answers.append(weakref.ref(served(x)))

    ask(SMALL, 3)
    assert not any(answer() is not None for answer in answers), "this thread asks alone"
    with ThreadPoolExecutor(1) as pool:
        pool.submit(ask, LARGE).result()
        assert answers[-1]() is None
        pool.submit(ask, SMALL, 10_000).result()
    assert sum(answer() is not None for answer in answers) <= executor._MAX_HELD
