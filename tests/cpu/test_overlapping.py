"""Collectives in the background of a step's computations: `config.overlap_collectives`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import LATE_RANK, RANK_PROGRAM, run_ranks
from test_collectives import check_ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without distributed")

_ALWAYS = """
import lazy_backend
from lazy_backend.lowering.ir.passes import check_passes, watch_passes
from lazy_backend.lowering.plans import overlapping

overlapping.MIN_WORK = 1  # however little there is to compute
lazy_backend.config.overlap_collectives = True
check_passes()
split = []
watched = ("overlap collectives", "after")
watch_passes(lambda name, when, graph: split.append(str(graph)) if (name, when) == watched else None)
"""

_STEPS = (
    RANK_PROGRAM
    + _ALWAYS
    + """
warnings.filterwarnings("ignore", category=FutureWarning)  # PyTorch renames some of these
from lazy_backend.lowering.collectives.under_way import under_way


def step(weight, x):
    gradient = x @ weight
    gradient.mul_(0.5)
    work = dist.all_reduce(gradient, async_op=True)
    z = torch.relu(x @ weight.t())
    gathered, scattered = x.new_empty(size * 8, 8), x.new_empty(8, 8)
    dist.all_gather_into_tensor(gathered, z)
    dist.reduce_scatter_tensor(scattered, torch.cat([z] * size))
    y = torch.tanh(z) @ x
    turned = y.view(4, 2, 8)[:, 0]  # has gaps
    dist.all_gather(list(scattered.view(size, -1).unbind()), gathered.view(-1)[: 64 // size])
    numbers = torch.complex(y, z)
    dist.all_reduce(numbers)
    dist.broadcast(y, 1)
    total = y * 2 + z
    work.wait()
    weight.add_(gradient, alpha=0.001)
    return gathered.sum(0) + scattered.sum() + y + total.sum() + numbers.real + numbers.imag + turned.sum()


captured = lazy_backend.capture(step)
for call in (step, captured):
    weights = torch.ones(8, 8), torch.ones(8, 8, device="lazy")
    for number in range(60):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(10 * number + rank))
        expected, found = step(weights[0], x), call(weights[1], x.to("lazy"))
        lazy_backend.mark_step()
        assert torch.equal(found.cpu(), expected), (number, found, expected)
        assert torch.equal(weights[1].cpu(), weights[0]), number
for name in ("all_reduce", "all_gather", "reduce_scatter"):
    assert any(f"begin_{name}" in text for text in split), split[-1]
assert metrics.counter_value("CompileFailed") == 0
assert len(under_way) == 0
dist.destroy_process_group()
"""
)


@pytest.mark.scenario
@pytest.mark.parametrize(("backend", "count"), [("eager", 2), ("aot_eager", 2), ("eager", 4)])
def test_steps_that_overlap_equal_eager(backend: str, count: int, tmp_path: Path) -> None:
    check_ranks(_STEPS, tmp_path, [backend], count)


_FAULT = (
    LATE_RANK
    + """
import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
"""
    + _ALWAYS
    + """
torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=timedelta(seconds=3))
rank, fault = dist.get_rank(), sys.argv[1]
lazy_backend.config.cache = False
lazy_backend.config.compile, lazy_backend.config.backend = "foreground", sys.argv[2]
library = torch.library.Library("planted", "DEF")
library.define("fault(Tensor x, Tensor(a!) y) -> Tensor")
armed = False


def planted(x, y):
    if armed and fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if armed and fault == "late":
        wait_until_rank_0_gave_up()
    if armed and fault == "interrupted":
        raise KeyboardInterrupt
    return x + 1


library.impl("fault", planted, "CompositeExplicitAutograd")
torch.library.register_fake("planted::fault", lambda x, y: torch.empty_like(x), lib=library)
effect = torch.zeros(1, device="lazy")


def step(number):
    x = torch.full((4, 4), 1.0 + rank, device="lazy")
    if fault == "branch" and rank == 1 and number == 5:
        dist.broadcast(x, 0)
    total = x * 2
    dist.all_reduce(total)  # here
    between = torch.ops.planted.fault(x, effect)
    other = between @ x
    dist.all_reduce(other)  # there
    return total + 1, other


for number in range(9):
    armed = number == 5 and rank == 1 or number in (5, 6, 7) and fault == "interrupted"
    try:
        found, other = step(number)
        lazy_backend.mark_step(wait=True)
        assert found.tolist() == [[7.0] * 4] * 4
    except KeyboardInterrupt:
        print("interrupted")
    armed = False
import gc
from lazy_backend.lowering.collectives.under_way import under_way
gc.collect()  # the frames of interruptions
assert len(under_way) == 0
assert any("begin_all_reduce" in text for text in split)
print("done")
"""
)


@pytest.mark.scenario
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("fault", ["killed", "late", "branch", "interrupted"])
def test_faults_between_beginning_and_end(fault: str, backend: str, tmp_path: Path) -> None:
    first, second = run_ranks(_FAULT, tmp_path, 2, [fault, backend], timeout=60)
    told = first.stderr + second.stderr
    if fault == "interrupted":
        assert [one.stdout for one in (first, second)] == ["interrupted\n" * 3 + "done\n"] * 2, told
        return
    assert first.returncode == 1, told
    assert second.returncode in ((-9,) if fault == "killed" else (0, 1)), told
    lines = [2 + n for n, line in enumerate(_FAULT.splitlines(), 1) if line.endswith(("# here", "# there"))]
    assert any(f"<string>:{line}" in first.stderr for line in lines), first.stderr
    assert fault == "branch" or "rank 1" in first.stderr
