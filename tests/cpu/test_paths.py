"""What a path distinguishes, and what it does not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from harness import assert_same, count

import lazy_backend
from lazy_backend.lowering.artefacts.environment import follow_state, process_state


@torch.library.custom_op("lazy_test::repeat", mutates_args=())
def repeat(x: torch.Tensor, times: float) -> torch.Tensor:
    return x.repeat(int(times))


@repeat.register_fake
def _(x: torch.Tensor, times: float) -> torch.Tensor:
    return x.repeat(int(times))


def each_in_a_step(program, values: list) -> list[torch.Tensor]:
    """`program(device, value)` on the lazy device, one step per value, so that later ones meet the earlier paths."""
    found = []
    for value in values:
        result = program("lazy", value)
        lazy_backend.mark_step()
        found.append(result.cpu())
    return found


PROGRAMS = {
    "arange": (lambda device, end: torch.arange(0.0, end, 0.5, device=device), [1.0, 2.0, 1.0]),
    "arange_step": (lambda device, step: torch.arange(0.0, 2.0, step, device=device), [0.5, 0.25]),
    "custom_op": (lambda device, times: repeat(torch.ones(2).to(device), times), [1.0, 3.0]),
    "int_or_bool": (lambda device, number: torch.ones(2).to(device) + number, [1, True, 1.0]),
    "int_or_bool_times": (lambda device, number: torch.ones(2, dtype=torch.int64).to(device) * number, [1, True, 1.0]),
    "zero_or_minus_zero": (lambda device, number: torch.zeros(2).to(device) * number, [0.0, -0.0]),
    "nan": (lambda device, number: torch.ones(2).to(device) * number, [float("nan"), 1.0]),
    "scalar_tensor": (lambda device, number: torch.ones(2).to(device) * torch.tensor(number), [1.0, 2, True]),
    "interpolate": (
        lambda device, scale: torch.nn.functional.interpolate(torch.ones(1, 1, 4).to(device), scale_factor=scale),
        [2.0, 3.0],
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_value_that_changes_the_result_changes_it(name: str) -> None:
    program, values = PROGRAMS[name]
    for found, value in zip(each_in_a_step(program, values), values, strict=True):
        assert_same(found, program("cpu", value))


def test_the_default_dtype_changes_results() -> None:
    def made() -> torch.Tensor:
        return torch.ones(2, dtype=torch.int64, device="lazy") / 2

    assert made().dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert made().dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert made().dtype == torch.float32


def test_equal_constants_stay_two_inputs() -> None:
    def step(one: float, two: float) -> torch.Tensor:
        x = torch.ones(2).to("lazy")
        result = x * torch.tensor(one) + torch.tensor(two)
        lazy_backend.mark_step()
        return result

    step(2.0, 3.0)
    with count("UncachedCompile") as unseen:
        assert step(4.0, 4.0).tolist() == [8.0, 8.0]
    assert unseen() == 0


def test_floats_recompile_nothing() -> None:
    lazy_backend.config.backend = "aot_eager"

    def step(number: float) -> None:
        result = torch.ones(2).to("lazy") * number + number
        lazy_backend.mark_step()
        assert result.tolist() == [2 * number] * 2

    for number in (1.0, 2.0):
        step(number)
    with count("Compile") as compiles:
        for number in range(20):
            step(float(number))
    assert compiles() == 0


@pytest.fixture
def switches() -> Iterator[None]:
    before = process_state()
    yield
    follow_state(before)


@pytest.mark.usefixtures("switches")
def test_a_switch_in_mid_run_reaches_no_graph_made_before() -> None:
    lazy_backend.config.backend = "eager"
    x = torch.randn(4, 4, device="lazy")

    def steps(number: int) -> int:
        for _ in range(number):
            (x @ x).relu().sum()
            x.add_(1.0)
            lazy_backend.mark_step()
        return lazy_backend.metrics.counter_value("UncachedCompile") or 0

    known = steps(4)
    assert steps(2) == known
    # by PyTorch's newer interface, after which `torch.get_float32_matmul_precision` raises
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    assert steps(2) == known + 1
    assert "mkldnn matmul precision" in str(lazy_backend.explain())
    torch.backends.mkldnn.enabled = False
    assert steps(2) == known + 2


@contextmanager
def _switched(switch: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    switch(value)
    try:
        yield
    finally:
        switch(before)


# State of the process or of the thread that a program sets for a part of each step.
SWITCHED: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "default dtype": lambda: _switched(torch.set_default_dtype, torch.float64, torch.float32),
    "default tensor type": lambda: _switched(torch.set_default_tensor_type, torch.DoubleTensor, torch.FloatTensor),
    "default device": lambda: torch.device("lazy"),
    "deterministic algorithms": lambda: _switched(torch.use_deterministic_algorithms, True, False),
    "threads": lambda: _switched(torch.set_num_threads, torch.get_num_threads() + 1, torch.get_num_threads()),
    "matmul precision": lambda: _switched(torch.set_float32_matmul_precision, "medium", "highest"),
    "mkldnn": lambda: _switched(partial(setattr, torch.backends.mkldnn, "enabled"), False, True),
    "cudnn": lambda: torch.backends.cudnn.flags(enabled=False),
    "no gradients": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("lazy", dtype=torch.bfloat16),
    "autocast on the CPU": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
    "force_fallback": lambda: lazy_backend.config.patch(force_fallback="aten::frac"),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:torch.set_default_tensor_type")
@pytest.mark.parametrize("name", SWITCHED)
@pytest.mark.usefixtures("switches")
def test_state_that_is_set_for_a_part_of_each_step_forgets_nothing(name: str) -> None:
    lazy_backend.config.backend = "aot_eager"
    model = torch.nn.Linear(4, 4).to("lazy")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    inputs = torch.randn(2, 4, device="lazy")

    def step() -> torch.Tensor:
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with SWITCHED[name]():
            total = torch.zeros(3, device="lazy") + model(inputs).detach().square().sum() / 3
        lazy_backend.mark_step()
        return total

    dtype = [step().dtype for _ in range(3)][-1]
    with count("UncachedCompile") as misses, count("Compile") as compiles, count("CachedCompile") as hits:
        assert [step().dtype for _ in range(6)] == [dtype] * 6
    assert (misses(), compiles()) == (0, 0)
    assert hits() >= 6
    assert lazy_backend.metrics.counter_value("Compile")


def test_the_end_of_a_known_step_calls_few_functions() -> None:
    x = torch.ones(3, device="lazy")
    for _ in range(30):
        x = x * 0.5 + 1.0
        lazy_backend.mark_step()
    lazy_backend.wait_for_compiles()
    for _ in range(3):
        x = x * 0.5 + 1.0
        lazy_backend.mark_step()
    calls: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            calls.append(frame.f_code.co_name)

    x = x * 0.5 + 1.0
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        lazy_backend.mark_step()
    finally:
        sys.setprofile(before)
    assert len(calls) <= 105, calls
