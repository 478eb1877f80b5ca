"""What ranks send to single other ranks, and receive from them: recorded, and begun and finished where eager does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import LATE_RANK, RANK_PROGRAM, run_ranks
from test_collectives import check_ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without distributed")

_HEAD = (
    RANK_PROGRAM
    + """
import random

from lazy_backend.lowering.collectives.under_way import under_way

if backend == "interpreted":
    config.compile = "off"
following, before = (rank + 1) % size, (rank - 1) % size
"""
)

_EXCHANGES = (
    _HEAD
    + """
config.first_sight = sys.argv[2]


def blocking(x):
    y = torch.empty_like(x)
    if rank == 0:
        dist.send(x, following)
        assert dist.recv(y, before) == before
    else:
        dist.recv(y, before)
        dist.send(x, following)
    return y * 2


def begun(x):
    y = torch.zeros_like(x)
    sent, received = dist.isend(x * 3, following), dist.irecv(y, before)
    z = x + 1
    assert not received.is_completed()
    sent.wait()
    received.wait()
    if x.device.type == "lazy":
        received.wait()  # does nothing; gloo would wait for another message
    assert received.is_completed()
    return y * 2 + z


def batch(x):
    y, z = torch.zeros_like(x), torch.zeros_like(x)
    operations = [(dist.isend, x * 3, following, 0), (dist.irecv, y, before, 0)]
    operations += [(dist.isend, x * 5, before, 3), (dist.irecv, z, following, 3)]
    works = dist.batch_isend_irecv([dist.P2POp(op, one, peer, tag=tag) for op, one, peer, tag in operations])
    for work in works:
        work.wait()
    return y * 2 + z


def into_a_view(x):
    y = torch.zeros(2, *x.shape, device=x.device)
    works = [dist.isend(x, following), dist.irecv(y[1], before)]
    for work in works:
        work.wait()
    return y + 1


def complex_numbers(x):
    y = torch.zeros(x.shape, dtype=torch.complex64, device=x.device)
    works = [dist.isend(torch.complex(x, -x), following), dist.irecv(y, before)]
    for work in works:
        work.wait()
    return y + 1


def large(x):
    x = x[:1].expand(1 << 22) + 0  # more than a socket holds, from all ranks at once
    y = torch.zeros_like(x)
    sent, received = dist.isend(x, following), dist.irecv(y, before)
    sent.wait()
    received.wait()
    return y


def written_after_it_was_sent(x):
    y, z = torch.zeros_like(x), x * 2
    sent = dist.isend(z, following)
    if x.device.type == "cpu":
        z = z.clone()  # eager may send what is written later
    z.add_(100)
    dist.recv(y, before)
    sent.wait()
    return y + z


def beside_a_collective(x):
    y, z = torch.zeros_like(x), x * 1
    sent, received = dist.isend(x, following), dist.irecv(y, before)
    dist.all_reduce(z)
    received.wait()
    sent.wait()
    return y + z


def across_steps(x):
    y = torch.zeros_like(x)
    sent, received = dist.isend(x, following), dist.irecv(y, before)
    lazy_backend.mark_step()
    z = x * 2
    received.wait()
    sent.wait()
    return y + z


def of_a_group(x):
    y = torch.zeros_like(x)
    works = [dist.isend(x, following, group=other), dist.irecv(y, before, group=other)]
    for work in works:
        work.wait()
    return y


other = dist.new_group()
metrics.reset()
for call in (blocking, begun, batch, into_a_view, complex_numbers, large, beside_a_collective, across_steps, of_a_group,
             written_after_it_was_sent):  # fmt: skip
    for start in range(4):
        x = torch.arange(4.0) + start + 10 * rank
        found = call(x.to("lazy") * 1)
        lazy_backend.mark_step()
        expected = call(x) + 0
        assert torch.equal(found.cpu(), expected), (call, start, found, expected)
assert metrics.counter_value("GraphCut") == 0, metrics.counter_names()
assert not [name for name in metrics.counter_names() if name.startswith("Fallback")], metrics.counter_names()
assert metrics.counter_value("CompileFailed") == 0

# what is not recorded: lists of several, any source, tensors with gaps, which eager refuses
y = torch.zeros(4, device="lazy")
sent = dist.isend(torch.full((4,), float(rank), device="lazy"), following)
if size == 2:
    assert dist.recv(y) == before
    assert y.tolist() == [float(before)] * 4
sent.wait()
try:
    dist.send(torch.ones(2, 3, device="lazy").t(), following)
except RuntimeError as error:
    assert "contiguous" in str(error)
else:
    raise AssertionError("sent")

# sends that nobody waits for arrive; in eager they may be lost
for number in range(100):
    received = torch.zeros(4, device="lazy")
    dist.isend(torch.full((4,), rank + number * 10.0, device="lazy"), following)
    dist.irecv(received, before).wait()
    lazy_backend.mark_step()
    assert received.tolist() == [before + number * 10.0] * 4
lazy_backend.wait_device_ops()
del sent, received
assert len(under_way) == 0
dist.destroy_process_group()
"""
)


@pytest.mark.parametrize(
    ("backend", "first_sight"), [("interpreted", "run"), ("eager", "run"), ("aot_eager", "record")]
)
def test_exchanges_equal_eager_and_cut_nothing(backend: str, first_sight: str, tmp_path: Path) -> None:
    check_ranks(_EXCHANGES, tmp_path, [backend, first_sight])


@pytest.mark.slow
def test_exchanges_equal_eager_in_inductor(tmp_path: Path) -> None:
    check_ranks(_EXCHANGES, tmp_path, ["inductor", "run"])


_RANDOM = (
    _HEAD
    + """


def step(numbers, x):
    \"\"\"A random program, the same on all ranks up to their numbers, of which each wait is somewhere.\"\"\"
    kept, works = [x], []
    for number in range(12):
        kind, source = numbers.randrange(5), numbers.choice(kept)
        if kind == 0:
            kept.append(torch.tanh(source @ kept[-1]) + number)
        elif kind == 1:
            whole = source * 0.5
            dist.all_reduce(whole)
            kept.append(whole)
        elif kind == 2:
            other, distance = torch.zeros_like(source), numbers.randrange(1, size)
            peers = (rank + distance) % size, (rank - distance) % size
            tag = numbers.randrange(3)
            works.append((dist.isend(source + 1, peers[0], tag=tag), None))
            works.append((dist.irecv(other, peers[1], tag=tag), other))
        elif kind == 3 and works:
            work, other = works.pop(0)
            work.wait()
            kept += [] if other is None else [other]
        else:
            source.mul_(1.25) if source is not x else None
            kept.append(source.sum(0, keepdim=True).expand(4, 4) * 0.25)
    for work, other in works:
        work.wait()
        kept += [] if other is None else [other]
    return torch.stack(kept[-4:]).clone()


for seed in map(int, sys.argv[2:]):
    for call in range(3):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(100 * call + rank))
        found = step(random.Random(seed), x.to("lazy"))
        lazy_backend.mark_step()
        expected = step(random.Random(seed), x.clone())
        assert torch.equal(found.cpu(), expected), (seed, call, found, expected)
assert len(under_way) == 0
dist.destroy_process_group()
"""
)


@pytest.mark.scenario
@pytest.mark.parametrize("count", [2, 3])
def test_random_exchanges_equal_eager(count: int, tmp_path: Path) -> None:
    check_ranks(_RANDOM, tmp_path, ["eager", *map(str, range(40))], count)


_PIPELINE = (
    _HEAD
    + """
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe


def train(device, schedule):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(size)]
    own = layers[rank].to(device)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    pipeline = schedule(PipelineStage(own, rank, size, torch.device(device)), 4, loss_fn=nn.functional.mse_loss)
    kept = []
    for number in range(8):
        x, target = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(number)).to(device)
        optimizer.zero_grad()
        losses = []
        pipeline.step(*([] if rank else [x]), **({"target": target, "losses": losses} if rank == size - 1 else {}))
        optimizer.step()
        lazy_backend.mark_step()
        kept += [loss.detach() for loss in losses]
        if number == 3:
            lazy_backend.wait_device_ops()
            metrics.reset()
    compiles, cuts = metrics.counter_value("Compile"), metrics.counter_value("GraphCut")
    assert device == "cpu" or (compiles, cuts) == (0, 0), (compiles, cuts)
    return [*(float(loss) for loss in kept), *(float(one.detach().sum()) for one in own.parameters())]


# inductor is given one of them: they differ in the order of the same exchanges, which interpreted plans keep as well
for schedule in (ScheduleGPipe, Schedule1F1B)[backend == "inductor" :]:
    expected, found = train("cpu", schedule), train("lazy", schedule)
    if backend == "eager":
        assert found == expected, (found, expected)
    else:
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))
assert len(under_way) == 0
dist.destroy_process_group()
"""
)


@pytest.mark.scenario
@pytest.mark.parametrize(("backend", "count"), [("eager", 2), ("eager", 4), ("inductor", 2)])
def test_pipelines_have_eagers_losses_and_no_cut(backend: str, count: int, tmp_path: Path) -> None:
    check_ranks(_PIPELINE, tmp_path, [backend], count, LAZY_BACKEND_CACHE_DIR=str(tmp_path / "cache"))


_CAPTURED = (
    _HEAD
    + """


def step(weight, x):
    y = torch.empty_like(x)
    operations = [dist.P2POp(dist.isend, x * weight, following), dist.P2POp(dist.irecv, y, before)]
    works = dist.batch_isend_irecv(operations)
    z = x @ x
    for work in works:
        work.wait()
    weight.add_(y + z, alpha=0.001)
    return (y + z).sum()


for wrap in (lazy_backend.capture, lazy_backend.step()):
    expected, found = [], []
    weights = torch.ones(8, 8), torch.ones(8, 8, device="lazy")
    captured = wrap(step)
    for number in range(100):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(10 * number + rank))
        expected.append(step(weights[0], x))
        found.append(captured(weights[1], x.to("lazy")))
    assert torch.equal(torch.stack(found).cpu(), torch.stack(expected))
assert metrics.counter_value("CapturedCall") > 90
assert len(under_way) == 0
dist.destroy_process_group()
"""
)


def test_captured_exchanges_equal_eager(tmp_path: Path) -> None:
    check_ranks(_CAPTURED, tmp_path, ["eager"])


_FAULT = (
    LATE_RANK
    + """
import os
import signal
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import lazy_backend
from lazy_backend.lowering.collectives.under_way import under_way

torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=timedelta(seconds=3))
rank, fault, backend = dist.get_rank(), sys.argv[1], sys.argv[2]
lazy_backend.config.cache = False
lazy_backend.config.compile, lazy_backend.config.backend = "foreground", backend
peer = 1 - rank


def exchange(number):
    x = torch.full((64, 64), number + rank / 2, device="lazy")
    y = torch.zeros_like(x)
    sent = dist.isend(x * 2, peer)  # there
    received = dist.irecv(y, peer)  # here
    if rank == 1 and number == 5:
        lazy_backend.mark_step(wait=True)
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "late":
            wait_until_rank_0_gave_up()
        if fault == "raises":
            raise ValueError("a planted error")
    z = x @ x
    received.wait()
    sent.wait()
    return x, y, z


def interrupted(number):
    if rank:
        time.sleep(0.4)
        dist.send(torch.full((3,), float(number)), 0, tag=9)
        return
    y = torch.zeros(3, device="lazy")
    received = dist.irecv(y, peer, tag=9)
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        received.wait()
        lazy_backend.mark_step(wait=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    else:
        raise AssertionError("not interrupted")
    if not received.is_completed():
        received.wait()
        assert y.tolist() == [float(number)] * 3


for number in range(10):
    if fault == "interrupted" and number > 4:
        interrupted(number)
    x, y, z = exchange(number)
    if fault != "interrupted" and rank == 0 and number == 5:
        dist.recv(torch.zeros(1, device="lazy"), peer)  # what never comes
    lazy_backend.mark_step()
    assert y[0, 0].item() == 2 * number + peer
    assert torch.equal(z, x @ x)
    del x, y, z
assert len(under_way) == 0
print("done")
"""
)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("fault", ["killed", "late", "raises"])
def test_errors_name_the_exchange_its_peer_and_line(fault: str, backend: str, tmp_path: Path) -> None:
    first, second = run_ranks(_FAULT, tmp_path, 2, [fault, backend], timeout=60)
    told = first.stderr + second.stderr
    assert first.returncode == 1, told
    assert second.returncode in ((-9,) if fault == "killed" else (0, 1)), told
    marks = ("# there", "# here", "# what never comes")
    there, here, never = (
        2 + next(n for n, line in enumerate(_FAULT.splitlines(), 1) if line.endswith(mark)) for mark in marks
    )
    named = [f"from rank 1 (tag 0) of group 0 at <string>:{line}, on rank 0" for line in (here, never)]
    if fault == "killed":  # before it has taken what rank 0 sends
        named.append(f"send of float32[64, 64] to rank 1 (tag 0) of group 0 at <string>:{there}, on rank 0")
    assert any(one in first.stderr for one in named), first.stderr


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_an_interrupted_exchange_leaves_nothing_behind(backend: str, tmp_path: Path) -> None:
    done = check_ranks(_FAULT, tmp_path, ["interrupted", backend])
    assert done[0].stdout == "interrupted\n" * 5 + "done\n"
