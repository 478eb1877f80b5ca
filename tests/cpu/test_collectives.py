"""Collectives on lazy tensors, recorded and compiled, in groups of several processes."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest
import torch
from harness import LATE_RANK, RANK_PROGRAM, run_ranks

from lazy_backend.diagnostics import page
from lazy_backend.diagnostics.findings import find
from lazy_backend.diagnostics.run_log import merged, read_run

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without distributed")

_COLLECTIVES = """
import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import lazy_backend
from lazy_backend import config, metrics

warnings.filterwarnings("ignore", category=FutureWarning)  # PyTorch renames some of these
dist.init_process_group("gloo")
torch.set_num_threads(1)
rank, group = dist.get_rank(), dist.group.WORLD
config.first_sight, config.cache, backend = sys.argv[1], False, sys.argv[2]
if backend == "interpreted":
    config.compile = "off"
else:
    config.compile, config.backend = "foreground", backend
half = dist.new_group([rank], use_local_synchronization=True)


def in_place(function):
    def call(x):
        y = x * 1
        function(y)
        return y + 1

    return call


def all_gather(x):
    parts = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(parts, x)
    return parts[0] + 2 * parts[1]


def all_gather_into_tensor(x):
    gathered = x.new_empty(2, *x.shape)
    dist.all_gather_into_tensor(gathered.view(-1), x)
    return gathered * 2


def reduce_scatter(x):
    scattered = x.new_empty(2)
    dist.reduce_scatter(scattered, [x[:2] * 1, x[2:] * 2])
    return scattered


def reduce_scatter_tensor(x):
    scattered = x.new_empty(2)
    dist.reduce_scatter_tensor(scattered, x)
    return scattered * 2


def gather(x):
    parts = [torch.empty_like(x) for _ in range(2)] if rank == 1 else None
    dist.gather(x.view(2, 2).t(), [part.view(2, 2) for part in parts] if parts else None, dst=1)
    return parts[0] + 2 * parts[1] if parts else x


def scatter(x):
    part = x.new_empty(2, 2)
    dist.scatter(part, [x.view(2, 2), x.view(2, 2) * 2] if rank == 1 else None, src=1)
    return part * 3


def in_their_place(x):
    whole = x.new_zeros(8)
    whole[4 * rank : 4 * rank + 4] = x
    dist.all_gather_into_tensor(whole, whole[4 * rank : 4 * rank + 4])
    parts = whole * 2
    dist.reduce_scatter_tensor(parts[4 * rank : 4 * rank + 4], parts)
    return whole + parts


def all_to_all_single(x):
    received = x.new_empty(2 if rank else 6)
    dist.all_to_all_single(received, x, [1, 1] if rank else [3, 3], [3, 1])
    return received * 2


def all_to_all(x):
    received = [x.new_empty(2, 1) for _ in range(2)]
    dist.all_to_all(received, [x[:2].view(2, 1) * 2, x[2:].view(2, 1)])
    return torch.cat([part.view(2) for part in received])


def asynchronous(x):
    one, other = x * 1, x * 2
    works = [dist.all_reduce(one, async_op=True), dist.all_reduce(other, async_op=True)]
    for work in works:
        work.wait()
        assert work.is_completed()
    return one + other


def through_views(x):
    y = x * 1
    dist.all_reduce(y[1:3])
    z = y.view(2, 2).t()
    dist.broadcast(z, 1) if z.is_contiguous() else None
    return y


def unused(x):
    y = x * 1
    if rank == 0:  # nobody reads it on rank 1
        dist.all_reduce(y)
        return y
    dist.all_reduce(y)
    return x * 0


def not_lazy_between(x):
    y = x * 1
    dist.all_reduce(y)
    dist.barrier()
    found = [None, None]
    dist.all_gather_object(found, rank)
    assert found == [0, 1]
    z = torch.ones(1)
    dist.all_reduce(z)
    assert z.item() == 2.0
    return y


def to_the_next(x):
    received = torch.empty_like(x)
    if rank:
        dist.recv(received, 0)
        dist.send(x, 0)
    else:
        dist.send(x, 1)
        dist.recv(received, 1)
    return received


def complex_numbers(x):
    z = torch.complex(x, -x) * (1 + 2j)
    gathered = functional.all_gather_tensor(z.conj(), 0, group)
    scattered = functional.reduce_scatter_tensor(z.view(2, 2).t().reshape(4), "sum", 0, group)
    return torch.cat([gathered, scattered, functional.all_reduce(z, "sum", group)])


def complex_numbers_in_place(x):
    z, whole = torch.complex(x, x + 1), torch.zeros(8, dtype=torch.complex64, device=x.device)
    dist.all_gather_into_tensor(whole, z)
    dist.all_reduce(z)
    dist.broadcast(whole, 1)
    return torch.cat([z, whole])


recorded = {
    "complex numbers": complex_numbers,
    "complex numbers in place": complex_numbers_in_place,
    "functional.all_reduce": lambda x: functional.all_reduce(x, "sum", group) * 2,
    "functional.all_reduce avg": lambda x: functional.all_reduce(x, "max", group) * 2,
    "functional.all_gather_tensor": lambda x: functional.all_gather_tensor(x, 0, group) + 1,
    "functional.reduce_scatter_tensor": lambda x: functional.reduce_scatter_tensor(x, "sum", 0, group) + 1,
    "functional.broadcast": lambda x: functional.broadcast(x, 0, group) + 1,
    "functional.all_to_all_single": lambda x: functional.all_to_all_single(x, None, None, group) + 1,
    "functional.all_reduce_coalesced": lambda x: sum(functional.all_reduce_coalesced([x, x * 2], "sum", group)),
    "functional.wait_tensor": lambda x: functional.wait_tensor(functional.all_reduce(x, "sum", group)) + 1,
    "all_reduce": in_place(dist.all_reduce),
    "all_reduce max": in_place(lambda y: dist.all_reduce(y, dist.ReduceOp.MAX)),
    "all_reduce of a group": in_place(lambda y: dist.all_reduce(y, group=half)),
    "broadcast": in_place(lambda y: dist.broadcast(y, 1)),
    "reduce": in_place(lambda y: (dist.reduce(y, 0), y.mul_(1 - rank))),
    "all_gather": all_gather,
    "all_gather_into_tensor": all_gather_into_tensor,
    "reduce_scatter": reduce_scatter,
    "reduce_scatter_tensor": reduce_scatter_tensor,
    "gather": gather,
    "scatter": scatter,
    "in their place": in_their_place,
    "all_to_all_single": all_to_all_single,
    "all_to_all": all_to_all,
    "asynchronous": asynchronous,
    "through views": through_views,
    "unused": unused,
}
at_once = {"not lazy between": not_lazy_between, "to the next": to_the_next}


def check(calls):
    for name, call in calls.items():
        for start in range(4):
            x = torch.arange(4.0) + start + 10 * rank
            found = call(x.to("lazy") * 1)
            lazy_backend.mark_step()
            expected = call(x) + 0
            assert torch.equal(found.cpu(), expected), (name, found, expected)
        if "functional" in name:
            leaf, real = (torch.arange(4.0).to(device).requires_grad_() for device in ("lazy", "cpu"))
            follows = call(leaf).requires_grad
            lazy_backend.mark_step()
            assert follows == call(real).requires_grad, name


metrics.reset()
check(recorded)
assert metrics.counter_value("GraphCut") == 0, metrics.counter_names()
assert not [name for name in metrics.counter_names() if name.startswith("Fallback")], metrics.counter_names()
check(at_once)
assert metrics.counter_value("CompileFailed") == 0
pending = torch.ones(1, device="lazy") * (rank + 1)
dist.all_reduce(pending)
dist.destroy_process_group()
assert pending.item() == 3.0
"""

_DATA_PARALLEL = (
    RANK_PROGRAM
    + """
import copy

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

steps = int(sys.argv[2])


class Net(nn.Module):
    def __init__(self, unused):
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.norm = nn.BatchNorm1d(32)
        self.second = nn.Linear(32, 16)
        self.last = nn.Linear(16, 1)
        self.unused = nn.Linear(3, 3) if unused else None

    def forward(self, x):
        return self.last(torch.relu(self.second(torch.relu(self.norm(self.first(x))))))


def train(device, way):
    torch.manual_seed(0)
    net = Net(unused="unused" in way)
    if "moved later" not in way:
        net = net.to(device)
    if "captured" in way and device == "lazy":
        lazy_backend.capture(net)
    options = {"bucket_cap_mb": 0.001}  # a bucket per layer
    options["find_unused_parameters"] = "unused" in way
    options["static_graph"] = "static" in way
    options["gradient_as_bucket_view"] = "views" in way
    if "moved later" in way:
        net = net.to(device)
    model = DistributedDataParallel(net, **options)
    if "hook" in way:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if "captured" in way and device == "lazy":
        lazy_backend.capture(optimizer)
    losses = []

    def loss_of(x):
        with torch.autocast(device, dtype=torch.bfloat16, enabled="autocast" in way):
            return nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))

    def step(x):
        optimizer.zero_grad()
        if "no_sync" in way:
            with model.no_sync():
                loss_of(x * 2).backward()
        loss = loss_of(x)
        loss.backward()
        if "clip" in way:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
        lazy_backend.mark_step()

    count = steps + (rank if "join" in way else 0)
    data = torch.Generator().manual_seed(rank)
    with model.join(enable="join" in way):
        for number in range(count):
            step(torch.randn(8, 16, generator=data).to(device))
            if number == 3 and device == "lazy":
                lazy_backend.wait_device_ops()
                metrics.reset()
    return [float(loss) for loss in losses]


for way in sys.argv[3:]:
    expected, found = train("cpu", way), train("lazy", way)
    compiles = metrics.counter_value("Compile")
    if backend == "inductor":
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))
    else:
        assert found == expected, (way, found, expected)
    # which parameters nobody used is asked for by DistributedDataParallel, on the host; and `join` asks who is left
    asks = "unused" in way or "join" in way
    assert asks or metrics.counter_value("GraphCut") == 0, (way, metrics.counter_names())
    assert metrics.counter_value("CompileFailed") == 0
    assert compiles <= 3, (way, compiles)
    print(compiles)
dist.destroy_process_group()
"""
)

_WAYS = ("plain", "unused", "static", "views", "no_sync clip", "autocast", "captured", "moved later", "hook", "join")

# Those whose steps are other graphs: "plain" is the graph of "captured", and what the others ask, count or move on the
# host the backend knows nothing of.
_COMPILED_WAYS = ("views", "no_sync clip", "autocast", "captured", "hook")


def check_ranks(
    code: str, folder: Path, arguments: list[str], count: int = 2, **environment: str
) -> list[subprocess.CompletedProcess[str]]:
    done = run_ranks(code, folder, count, arguments, **environment)
    assert [one.returncode for one in done] == [0] * count, "\n".join(one.stderr[-3000:] for one in done)
    return done


# Each way of a first call and each kind of plan once: both ways record the same calls, of which plans are made.
@pytest.mark.parametrize(
    ("first_sight", "backend"),
    [
        ("run", "interpreted"),
        ("record", "aot_eager"),
        *(pytest.param(*both, marks=pytest.mark.slow) for both in (("record", "interpreted"), ("run", "aot_eager"))),
    ],
)
def test_collectives_equal_eager(first_sight: str, backend: str, tmp_path: Path) -> None:
    check_ranks(_COLLECTIVES, tmp_path, [first_sight, backend])


@pytest.mark.slow
def test_collectives_equal_eager_in_inductor(tmp_path: Path) -> None:
    check_ranks(_COLLECTIVES, tmp_path, ["run", "inductor"])


@pytest.mark.scenario
@pytest.mark.parametrize(
    ("backend", "ways"),
    [("eager", _WAYS), ("aot_eager", _COMPILED_WAYS), pytest.param("aot_eager", _WAYS, marks=pytest.mark.slow)],
    ids=["eager", "aot_eager", "aot_eager-all"],
)
def test_data_parallel_steps_have_eagers_losses_and_no_cut(backend: str, ways: tuple[str, ...], tmp_path: Path) -> None:
    check_ranks(_DATA_PARALLEL, tmp_path, [backend, "10", *ways])


def test_data_parallel_steps_on_four_processes(tmp_path: Path) -> None:
    check_ranks(_DATA_PARALLEL, tmp_path, ["eager", "30", "plain"], count=4)


@pytest.mark.scenario
def test_ranks_compile_a_step_once(tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    done = check_ranks(_DATA_PARALLEL, tmp_path, ["inductor", "6", "captured"], LAZY_BACKEND_CACHE_DIR=cache)
    assert sum(int(one.stdout) for one in done) <= 3


_TENSOR_PARALLEL = (
    RANK_PROGRAM
    + """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow, self.norm = nn.Linear(8, 32), nn.Linear(32, 8), nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(x + self.narrow(torch.relu(self.wide(x))))


def train(device, shape, names):
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).to(device)
    mesh = init_device_mesh(device, shape, mesh_dim_names=names)
    for block in model:
        parallelize_module(block, mesh["rows"], {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})
    # foreach kernels, which devices other than the CPU use by default, refuse tensors beside DTensors
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    losses = []
    for number in range(8):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number)).to(device)
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        lazy_backend.mark_step()
        if number == 3 and device == "lazy":
            lazy_backend.wait_device_ops()
            metrics.reset()
    return [float(loss) for loss in losses]


for shape, names in (((size,), ("rows",)), ((2, size // 2), ("copies", "rows"))):
    expected, found = train("cpu", shape, names), train("lazy", shape, names)
    assert found == expected, (shape, found, expected)
    assert metrics.counter_value("GraphCut") == 0, metrics.counter_names()
    assert metrics.counter_value("CompileFailed") == 0
# the rows of a mesh have names of their own, and one number
hashes = [None] * size
dist.all_gather_object(hashes, sorted(lazy_backend.computation.get_debug_states()))
assert hashes == [hashes[0]] * size, hashes
dist.destroy_process_group()
"""
)


@pytest.mark.parametrize(("backend", "count"), [("aot_eager", 2), ("eager", 4)])
def test_tensor_parallel_steps_have_eagers_losses_and_no_cut(backend: str, count: int, tmp_path: Path) -> None:
    check_ranks(_TENSOR_PARALLEL, tmp_path, [backend], count)


_RANDOM = (
    RANK_PROGRAM
    + """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, randn
from torch.distributed.tensor.debug import CommDebugMode

mesh = init_device_mesh("lazy", (size,))
torch.manual_seed(7)
own = torch.Generator().manual_seed(8)


class Inside(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(DTensor.from_local(x, mesh, [Shard(0)]), 0.5).to_local()


captured = lazy_backend.capture(Inside())
ones = torch.ones(4, 8, device="lazy")
drawn = []
for number in range(6):
    if number == 3:
        lazy_backend.wait_device_ops()
        metrics.reset()
    shards, copies = DTensor.from_local(ones, mesh, [Shard(0)]), DTensor.from_local(ones, mesh, [Replicate()])
    with CommDebugMode() as communication:
        given = shards.clone().uniform_(generator=own)
        made = [nn.functional.dropout(shards, 0.5), randn(4 * size, 8, device_mesh=mesh, placements=[Shard(0)]), given]
        same = nn.functional.dropout(copies, 0.5)
    assert communication.get_total_counts() == (number == 0)  # once, the ranks' states of random numbers
    numbers = [captured(ones), *(part.to_local() * 1 for part in (*made, same))]
    lazy_backend.mark_step()
    drawn.append([*numbers, torch.get_rng_state(), own.get_state()])
lazy_backend.wait_device_ops()
assert metrics.counter_value("Compile") == 0, "a seed is in a key"
assert metrics.counter_value("GraphCut") == 0
everywhere = [None] * size
dist.all_gather_object(everywhere, [[one.cpu() for one in step] for step in drawn])
for step in zip(*everywhere, strict=True):
    *of_shards, of_copies, of_state, of_own = zip(*step, strict=True)
    for one in of_shards:
        assert not any(torch.equal(one[0], other) for other in one[1:]), "two shards have the same numbers"
    for one in (of_copies, of_state, of_own):
        assert all(torch.equal(one[0], other) for other in one[1:]), "copies differ"
for one in zip(*everywhere[0], strict=True):
    assert not torch.equal(one[0], one[1]), "two steps have the same numbers"
assert dist.get_default_backend_for_device("lazy") == dist.get_default_backend_for_device("cpu")
"""
)


def test_random_dtensors_have_numbers_of_their_own_in_each_shard(tmp_path: Path) -> None:
    check_ranks(_RANDOM, tmp_path, ["aot_eager"], 2)


_STRAGGLER = """
import sys
import time

import torch
import torch.distributed as dist

import lazy_backend

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
lazy_backend.config.cache, lazy_backend.config.compile = False, "off"
weight = torch.ones(64, 64, device="lazy")
for number in range(20):
    gradient = weight @ weight
    dist.all_reduce(gradient)
    weight = weight - gradient / 1e4
    lazy_backend.mark_step(wait=True)
    time.sleep(0.03 * rank)
dist.destroy_process_group()
"""


def test_logs_of_ranks_make_one_report_that_names_who_is_waited_for(tmp_path: Path) -> None:
    check_ranks(_STRAGGLER, tmp_path, [], LAZY_BACKEND_LOG=str(tmp_path / "run.jsonl"))
    logs = [tmp_path / f"run-rank{rank}.jsonl" for rank in range(2)]
    found = {finding.title: finding for finding in find(merged([read_run(log) for log in logs]))}
    assert 0.3 < found["Other ranks waited for rank 1"].seconds < 5.0
    assert page.main([*map(str, logs), "-o", str(tmp_path / "ranks.html")]) == 0
    assert "rank 1" in (tmp_path / "ranks.html").read_text()
    alone = {finding.title: finding for finding in find(read_run(logs[0]))}
    assert alone["Collectives took part of the runs"].seconds > 0.3


# ----- ranks that differ, are late, or end

_FAULT = (
    LATE_RANK
    + """
import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import lazy_backend

torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=timedelta(seconds=3))
rank, fault, first_sight = dist.get_rank(), sys.argv[1], sys.argv[2]
when = int(sys.argv[3])
lazy_backend.config.cache, lazy_backend.config.compile = False, "off"
lazy_backend.config.first_sight = first_sight
weight = torch.ones(4, device="lazy")


def step(number):
    planted = rank == 1 and number == when
    gradient = weight * 2
    if planted and fault == "branch":
        dist.broadcast(gradient, 0)  # only here
    if planted and fault == "length":
        gradient = torch.cat([gradient, gradient])
    if planted and fault == "dtype":
        gradient = gradient.double()
    if planted and fault == "killed":
        lazy_backend.mark_step(wait=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if planted and fault == "raises":
        raise ValueError("a planted error")
    if planted and fault == "late":
        wait_until_rank_0_gave_up()
    dist.all_reduce(gradient)  # everywhere
    weight.add_(gradient[:4], alpha=0.1)
    lazy_backend.mark_step()


for number in range(8):
    step(number)
lazy_backend.wait_device_ops()
"""
)


@pytest.mark.scenario
@pytest.mark.parametrize(
    ("fault", "first_sight", "when"),
    [
        *((fault, "run", 5) for fault in ("branch", "length", "dtype", "killed", "raises", "late")),
        *((fault, way, 0) for fault in ("branch", "length") for way in ("run", "record")),
        ("late", "run", 0),
        ("dtype", "run", 1),
    ],
)
def test_ranks_that_differ_are_told_where(fault: str, first_sight: str, when: int, tmp_path: Path) -> None:
    first, second = run_ranks(_FAULT, tmp_path, 2, [fault, first_sight, str(when)], timeout=60)
    told = first.stderr + second.stderr
    assert first.returncode == 1, told
    assert second.returncode == (-9 if fault == "killed" else 1), told
    everywhere = 2 + next(n for n, line in enumerate(_FAULT.splitlines(), 1) if line.endswith("# everywhere"))
    only_here = 2 + next(n for n, line in enumerate(_FAULT.splitlines(), 1) if line.endswith("# only here"))
    assert f"<string>:{everywhere}" in first.stderr, first.stderr
    if fault in ("branch", "length", "dtype"):
        assert "ranks do not communicate alike" in told
        line = only_here if fault == "branch" else everywhere
        for stderr in (first.stderr, second.stderr):
            if "ranks do not communicate alike" in stderr:
                assert f"<string>:{line}" in stderr, stderr
    if fault in ("killed", "raises", "late"):
        assert "rank 1" in first.stderr, first.stderr


_AFTER_A_FAILURE = """
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import lazy_backend

torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=timedelta(seconds=4))
rank, case = dist.get_rank(), sys.argv[1]
lazy_backend.config.cache, lazy_backend.config.compile = False, "off"


def total(op=dist.ReduceOp.SUM):
    x = torch.full((4,), rank + 1.0, device="lazy")
    dist.all_reduce(x, op)
    return x


def fails_on_one_rank_and_goes_on():
    for number in range(8):
        place = 99 if rank == 1 and number == 4 else 3
        try:
            x = total()
            z = x.index_select(0, torch.tensor([0, 1, 2, place]).to("lazy")) + rank
            dist.all_reduce(z, dist.ReduceOp.MAX)
            lazy_backend.mark_step(wait=True)
        except lazy_backend.ExecutionError as error:
            if "communicate alike" in str(error) or "Connection" in str(error):
                raise
        else:
            assert x.tolist() == [3.0] * 4, x
            assert z.tolist() == [4.0] * 4, z
    raise AssertionError("nobody was told")


def refused_on_all_ranks():
    for _ in range(3):
        try:
            total(dist.ReduceOp.BAND).tolist()
        except RuntimeError:
            pass
        assert total().tolist() == [3.0] * 4


def fails_before_the_first_and_begins_again():
    try:
        if rank:
            raise ValueError
        total().tolist()
    except (RuntimeError, ValueError):
        pass
    dist.destroy_process_group()
    sys.stdout.flush()
    store = dist.TCPStore("127.0.0.1", int(sys.argv[2]), 2, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=10))
    for _ in range(3):
        assert total().tolist() == [3.0] * 4


def a_known_step_with_one_more():
    def step(more):
        x = total()
        if more:
            y = total(dist.ReduceOp.MAX)
            lazy_backend.mark_step(wait=True)
            assert y.tolist() == [2.0] * 4
        lazy_backend.mark_step(wait=True)
        assert x.tolist() == [3.0] * 4

    for more in [True] * 4 + [False] * 4:
        step(more)
    for _ in range(4):
        step(rank == 1)
    raise AssertionError("nobody was told")


def reads_between_on_one_rank():
    for _ in range(6):
        x = total()
        if rank == 0:
            assert x.sum().item() == 12.0
        y = total(dist.ReduceOp.MAX)
        lazy_backend.mark_step()
    assert (x.tolist(), y.tolist()) == ([3.0] * 4, [2.0] * 4)


globals()[case]()
print("done")
"""


@pytest.mark.scenario
@pytest.mark.parametrize(
    ("case", "is_told"),
    [
        ("fails_on_one_rank_and_goes_on", True),
        ("a_known_step_with_one_more", True),
        ("refused_on_all_ranks", False),
        ("fails_before_the_first_and_begins_again", False),
        ("reads_between_on_one_rank", False),
    ],
)
def test_ranks_after_a_failure(case: str, is_told: bool, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    done = run_ranks(_AFTER_A_FAILURE, tmp_path, 2, [case, port], timeout=60)
    told = "".join(one.stderr for one in done)
    if is_told:
        assert [one.returncode for one in done] == [1, 1], told
        assert "ranks do not communicate alike" in told
        assert "AssertionError" not in told
    else:
        assert [one.stdout for one in done] == ["done\n"] * 2, told


# ----- many ranks, simulated


@pytest.mark.scenario
@pytest.mark.parametrize("count", [2, 100])
def test_the_rank_that_goes_astray_finds_it_out(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "tools"))
    from benchmarks.rank_scaling import simulate

    result = simulate(count)
    ((rank, error),) = result["found"].items()
    assert rank == result["astray"]
    assert f"rank {rank} is about to call collective 29 of group simulated, broadcast of float32[1000]" in error
    assert f"rank {(rank + 1) % count} is about to call all_reduce of float32[1000] (sum) at train.py:28" in error
