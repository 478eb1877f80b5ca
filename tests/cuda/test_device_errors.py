"""Errors of runs on the device: at the next sync, with the user's line, once. What failed is poisoned, no more."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from backing import BACKING, DeviceLoop, graphs, needs_gpu, wait
from harness import run_python

import lazy_backend
from lazy_backend import ExecutionError, PoisonedTensorError, config

fail = {"now": False}


@torch.library.custom_op("lazy_test::fragile_on_device", mutates_args=())
def fragile_on_device(x: torch.Tensor) -> torch.Tensor:
    if fail["now"]:
        raise ValueError("out of luck")
    return x + 1


@fragile_on_device.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def line_here() -> str:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return f"{Path(frame.f_back.f_code.co_filename).name}:{frame.f_back.f_lineno}"


def failed_step() -> tuple[torch.Tensor, str]:
    """A tensor whose run failed, and the line that recorded the operator at fault."""
    for is_failing in (False, False, True):
        fail["now"] = is_failing
        x = torch.ones(3, device="lazy")
        y, line = fragile_on_device(x), line_here()
        try:
            lazy_backend.mark_step()
            if not is_failing:
                wait()
        finally:
            if not is_failing:
                fail["now"] = False
    return y, line


def take_error() -> ExecutionError:
    with pytest.raises(ExecutionError) as caught:
        lazy_backend.wait_device_ops()
    fail["now"] = False
    return caught.value


def test_an_error_comes_at_the_next_sync_with_the_users_line() -> None:
    _, line = failed_step()
    error = take_error()
    assert "out of luck" in str(error)
    assert line in str(error)
    lazy_backend.wait_device_ops()  # once only


def test_what_failed_is_poisoned_and_the_rest_works() -> None:
    y, _ = failed_step()
    take_error()
    with pytest.raises(PoisonedTensorError):
        y.cpu()
    z = torch.ones(3, device="lazy") * 2
    lazy_backend.mark_step(wait=True)
    assert z.tolist() == [2.0, 2.0, 2.0]


# ----- memory

_TOO_MANY = 1 << 47  # float32: 2**49 bytes, more than any address space has


def allocate_too_much() -> str:
    """Record what no device can hold. Returns the line."""
    x = torch.zeros(8, device="lazy")
    y, line = x.new_zeros(_TOO_MANY), line_here()
    lazy_backend.mark_step()
    del y
    return line


def test_out_of_memory_names_the_line_and_training_goes_on() -> None:
    config.first_sight = "record"  # at first sight it would fail where it is called, as in eager
    loop = DeviceLoop("mlp", "plain")
    before = [float(loop.step(number)) for number in range(3)]
    line = allocate_too_much()
    with pytest.raises(ExecutionError) as caught:
        lazy_backend.wait_device_ops()
    assert line in str(caught.value)
    assert "memory" in str(caught.value)
    after = [float(loop.step(number)) for number in range(3, 6)]
    eager = DeviceLoop("mlp", "eager")
    assert before + after == pytest.approx([float(eager.step(number)) for number in range(6)], rel=1e-4)


def test_out_of_memory_at_first_sight_is_eagers_error() -> None:
    config.first_sight = "run"
    with pytest.raises(Exception, match="memory") as eagers:
        torch.zeros(_TOO_MANY, device=BACKING)
    with pytest.raises(eagers.type, match="memory"):
        torch.zeros(_TOO_MANY, device="lazy")
    assert torch.ones(2, device="lazy").sum().item() == 2


@needs_gpu
def test_a_full_gpu_fails_a_step_and_then_not() -> None:
    """What is taken by others comes back: the same program runs then."""

    def step() -> torch.Tensor:
        x = torch.ones(64 << 20, device="lazy")  # 256 MiB
        return ((x + 1) * (x + 2)).sum()

    with graphs("off"):  # a captured step has its memory already
        for _ in range(3):
            loss = step()
            lazy_backend.mark_step()
            assert loss.item() == pytest.approx(6.0 * (64 << 20))
        del loss
        wait()
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        ballast = torch.empty(free - (300 << 20), dtype=torch.uint8, device="cuda")
        loss = step()
        lazy_backend.mark_step()
        with pytest.raises(ExecutionError, match="memory"):
            lazy_backend.wait_device_ops()
        del ballast, loss
        torch.cuda.empty_cache()
        loss = step()
        lazy_backend.mark_step()
        assert loss.item() == pytest.approx(6.0 * (64 << 20))


@needs_gpu
def test_an_assert_on_the_device_ends_in_an_error(tmp_path: Path) -> None:
    """Nothing of CUDA works after it, in this process: it must say so and end, not hang."""
    program = """
import torch
import lazy_backend

lazy_backend.config.compile = "off"
table = torch.ones(4, 2, device="lazy")
for rows in ([0, 1], [2, 3], [1, 9]):
    picked = torch.nn.functional.embedding(torch.tensor(rows, device="lazy"), table)
    lazy_backend.mark_step()
    try:
        lazy_backend.wait_device_ops()
        torch.cuda.synchronize()
        picked.cpu()
    except Exception as error:
        print(rows, type(error).__name__, "device-side assert" in str(error) or "CUDA error" in str(error), flush=True)
import os
os._exit(0)
"""
    told = run_python(program, tmp_path).splitlines()
    assert len(told) == 1, told
    assert told[0].startswith("[1, 9]"), told
    assert told[0].endswith("True"), told
