"""`DistributedDataParallel` with our part of its reducer: what it records, and what may come between backwards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import RANK_PROGRAM, run_ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without distributed")

_MODEL = (
    RANK_PROGRAM
    + """
from torch.nn.parallel import DistributedDataParallel

config.backend, config.compile = "eager", "foreground"


class Net(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        for number in range(layers):
            self.register_buffer(f"buffer{number}", torch.full((3, number + 1), rank + 1.0 + number))
            self.register_buffer(f"count{number}", torch.tensor(rank))
        self.layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)])
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.only_asked = nn.Linear(4, 4)

    def forward(self, x, asked=True, part=None):
        if part is not None:
            return self.layers[part](x)
        y = self.layers(x) * self.scale
        return y + self.only_asked(x) if asked else y


def model_on(device, layers=3, **options):
    torch.manual_seed(0)
    return DistributedDataParallel(Net(layers).to(device), bucket_cap_mb=0.0001, **options)


def data_on(device, count):
    source = torch.Generator().manual_seed(rank)
    return [torch.randn(2, 4, generator=source).to(device) for _ in range(count)]


def gradients(model):
    return [None if one.grad is None else one.grad.tolist() for one in model.parameters()]
"""
)

_STEPS = (
    _MODEL
    + """
for layers in (2, 12):
    model = model_on("lazy", layers)
    x = data_on("lazy", 1)[0]
    for number in range(6):
        model.zero_grad()
        if number == 5:
            metrics.reset()
        model(x).square().sum().backward()
        lazy_backend.mark_step()
    buckets = metrics.counter_value("lazy::all_reduce_")
    assert buckets >= 2
    assert metrics.counter_value("lazy::broadcast_") == 2  # of one dtype each
    assert metrics.counter_value("lazy::flatten_dense_tensors") == buckets + 2
    assert metrics.counter_value("lazy::unflatten_dense_tensors") == buckets + 2
    assert metrics.counter_value("lazy::_foreach_copy_") == buckets + 2
    assert metrics.counter_value("lazy::slice") == 0
    assert model.module.buffer1.tolist() == [[2.0] * 2] * 3  # those of rank 0
    assert model.module.count1.item() == 0
    assert metrics.counter_value("lazy::as_strided") == metrics.counter_value("lazy::copy_") == 0
    # what lives between steps: parameters, their gradients, the loss; no bucket
    values = sum(one.numel() for one in model.parameters())
    buffers = sum(one.nbytes for one in model.buffers())
    del x
    lazy_backend.wait_device_ops()
    alive = lazy_backend.tensors.contexts.context_of("lazy").alive().bytes
    assert alive < 4 * (2 * values + 100) + buffers, (alive, values)
    model.zero_grad()
    del model
dist.destroy_process_group()
"""
)

_SCENARIOS = (
    _MODEL
    + """
import contextlib


def forward_without_backward(model, data):
    for number, x in enumerate(data):
        model.zero_grad()
        loss = model(x).square().sum()
        if number % 2:
            loss.backward()
            yield gradients(model)


def backward_twice(model, data):
    for x in data:
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        yield gradients(model)


def two_losses(model, data):
    for x in data:
        y = model(x, asked=False)
        z = model.module.only_asked(x).sum()
        y.sum().backward()
        z.backward()
        yield gradients(model)


def gradients_kept(model, data):
    for x in data:
        model.zero_grad(set_to_none=False)
        model(x).square().sum().backward()
        yield gradients(model)


def accumulated(model, data):
    for number, x in enumerate(data):
        with model.no_sync() if number % 3 else contextlib.nullcontext():
            model(x).square().sum().backward()
        yield gradients(model)


def synced_within_no_sync(model, data):
    for number, x in enumerate(data):
        loss = model(x).square().sum()
        with model.no_sync():
            loss.backward()
        yield gradients(model)


def hooks(model, data):
    parameters = list(model.parameters())
    parameters[0].register_hook(lambda grad: grad * 2)
    parameters[1].register_post_accumulate_grad_hook(lambda one: setattr(one, 'grad', one.grad.clamp(-0.1, 0.1)))
    for number, x in enumerate(data):
        if number == 3:
            parameters[2].register_hook(lambda grad: grad * 3)
        model.zero_grad()
        model(x).square().sum().backward()
        yield gradients(model)


def no_gradient(model, data):
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad if ctx.gives else None

    module = model.module
    for number, x in enumerate(data):
        model.zero_grad()
        y = model(x, part=0)  # on rank 1, and at times on both, its other parameters get no numbers
        gives = rank == 0 and number % 2 == 0
        for one in (*module.layers[1:].parameters(), module.scale, *module.only_asked.parameters()):
            passed = Nothing.apply(one)
            passed.grad_fn.gives = gives
            y = y + passed.sum()
        y.square().sum().backward()
        yield gradients(model)


def only_gradients_asked_for(model, data):
    for x in data:
        found = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        yield [one.tolist() for one in found]
        model.zero_grad()
        model(x).sum().backward()
        yield gradients(model)


def unused(model, data):
    for number, x in enumerate(data):
        model.zero_grad()
        try:
            model(x, asked=number < 4).square().sum().backward()
        except RuntimeError as error:
            yield "finished reduction in the prior iteration" in str(error)
            assert not hasattr(model.reducer, "is_asked_for_more") or "only_asked.weight" in str(error), error
        else:
            yield gradients(model) if number < 4 else None


def marked_twice(model, data):
    for number, x in enumerate(data[:5]):
        model.zero_grad()
        first = model(x).square().sum()
        if number == 4:
            y = torch.utils.checkpoint.checkpoint(model.module.layers, model.module.layers(x), use_reentrant=True)
            try:
                (first + y.sum()).backward()
            except RuntimeError:
                yield "raised"
            else:
                yield "not raised"
            return
        first.backward()
        yield gradients(model)


def an_error_in_the_backward(model, data):
    fails = False

    def fail(grad):
        if fails:
            raise ZeroDivisionError

    model.module.scale.register_hook(fail)
    for number, x in enumerate(data):
        fails = number == 4
        model.zero_grad()
        try:
            model(x).square().sum().backward()
        except ZeroDivisionError:
            yield "raised"
        except RuntimeError as error:
            yield "finished reduction in the prior iteration" in str(error)
        else:
            yield gradients(model)


def wrapped_again(model, data):
    def fail(grad):
        raise ZeroDivisionError

    for number, x in enumerate(data):
        model.zero_grad()
        loss = model(x).square().sum()
        if number == 3:  # a forward without its backward
            model = DistributedDataParallel(model.module)
        elif number == 5:
            handle = model.module.scale.register_hook(fail)
            try:
                loss.backward()
            except ZeroDivisionError:
                yield "raised"
            handle.remove()
            model = DistributedDataParallel(model.module)
        else:
            loss.backward()
            yield gradients(model)


def in_evaluation(model, data):
    for number, x in enumerate(data):
        if number % 2:
            with torch.no_grad():
                yield model(x).tolist()
        else:
            model.zero_grad()
            model(x).sum().backward()
            yield gradients(model)


def a_hook_later(model, data):
    def double(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        work = dist.all_reduce(bucket.buffer().mul_(2), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    for number, x in enumerate(data):
        if number == 4:
            model.register_comm_hook(None, double)
        model.zero_grad()
        model(x).square().sum().backward()
        yield gradients(model)


def copied(model, data):
    import copy

    for number, x in enumerate(data):
        if number == 4:
            model = copy.deepcopy(model)
        model.zero_grad()
        model(x).square().sum().backward()
        yield gradients(model)


for scenario in [globals()[name] for name in sys.argv[2:]]:
    found = {}
    for device in ("cpu", "lazy"):
        steps = scenario(model_on(device), data_on(device, 8))
        found[device] = list(steps)
        lazy_backend.mark_step()
    assert found["lazy"] == found["cpu"], (scenario.__name__, rank, found)
    assert found["cpu"]
dist.destroy_process_group()
"""
)

_SCENARIO_NAMES = (
    "forward_without_backward", "backward_twice", "two_losses", "gradients_kept", "accumulated",
    "synced_within_no_sync", "hooks", "no_gradient", "only_gradients_asked_for", "in_evaluation", "a_hook_later",
    "copied", "unused", "an_error_in_the_backward", "wrapped_again", "marked_twice",
)  # fmt: skip

_CAPTURED = (
    _MODEL
    + """
import contextlib
import warnings

warnings.filterwarnings("error", category=lazy_backend.CaptureWarning)


def train(device):
    model = model_on(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    if device == "lazy":
        step = lazy_backend.capture(step)
    for number, x in enumerate(data_on(device, 30)):
        with model.no_sync() if number in (10, 11, 12, 13) else contextlib.nullcontext():
            yield step(x)
        if number == 20:
            model.module.scale.requires_grad_(False)
            model.module.only_asked.weight.data.mul_(2)
            model = DistributedDataParallel(model.module)
        if number == 25:
            optimizer.param_groups[0]["lr"] = 0.01
        lazy_backend.mark_step()


assert [one.item() for one in train("lazy")] == [one.item() for one in train("cpu")]
assert metrics.counter_value("CapturedCall") >= 12, metrics.counter_value("CapturedCall")
assert metrics.counter_value("CaptureRecorded") >= 8
dist.destroy_process_group()
"""
)


def check_ranks(code: str, folder: Path, *arguments: str) -> None:
    done = run_ranks(code, folder, arguments=["eager", *arguments])
    assert [one.returncode for one in done] == [0, 0], "\n".join(one.stderr[-3000:] for one in done)


def test_a_bucket_takes_four_calls_and_no_memory_between_steps(tmp_path: Path) -> None:
    check_ranks(_STEPS, tmp_path)


def test_what_happens_around_a_backward_does_what_it_does_in_eager(tmp_path: Path) -> None:
    check_ranks(_SCENARIOS, tmp_path, *_SCENARIO_NAMES)


def test_whole_steps_are_captured_from_the_first(tmp_path: Path) -> None:
    check_ranks(_CAPTURED, tmp_path)


_BESIDE_EAGER = """
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lazy_backend

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)))
for number in range(4):
    y = torch.full((7,), float(rank)).to("lazy")
    dist.all_reduce(y)
    if rank == 0:
        lazy_backend.mark_step()  # begins to communicate here; on the other rank this is only recorded
    if number == 2:
        model.eval()
    loss = model(torch.full((2, 3), rank + 1.0)).sum()
    if number < 3:
        loss.backward()
    assert y.tolist() == [1.0] * 7
dist.destroy_process_group()
"""


def test_eager_modules_communicate_after_what_was_recorded_before(tmp_path: Path) -> None:
    check_ranks(_BESIDE_EAGER, tmp_path)


_CONJUGATES = """
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lazy_backend

lazy_backend.config.backend, lazy_backend.config.compile = sys.argv[1], "foreground"
dist.init_process_group("gloo")
rank = dist.get_rank()


class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.full(shape, 1 + 2j)) for shape in ((3, 3), (3,)))
        self.register_buffer("conjugate", torch.tensor([1 + 2j * (rank + 1), 3.0]).conj())
        self.register_buffer("negative", torch.tensor([1 + 2j * (rank + 1), 3.0]).conj().imag)
        self.register_buffer("real", torch.tensor([1.0 + rank]))
        self.register_buffer("other", torch.tensor([2j, 4.0 + rank]))

    def forward(self, x):
        return (x @ self.weight.conj() + self.bias * self.other.sum() + self.conjugate.sum()).abs().square().sum()


def train(device):
    with torch.device(device):
        module = Waves()
    assert module.conjugate.is_conj()
    assert module.negative.is_neg()
    model = DistributedDataParallel(module)
    found = []
    for number in range(5):
        model.zero_grad()
        loss = model(torch.full((2, 3), number + 1j * rank, device=device))
        loss.backward()
        assert module.weight.grad.is_conj()
        found += [loss.item(), *(one.cpu().resolve_conj().tolist() for one in (module.weight.grad, module.bias.grad))]
        found += [one.cpu().resolve_conj().tolist() for one in module.buffers()]
    return found


assert train("lazy") == train("cpu")
dist.destroy_process_group()
"""


def test_conjugated_gradients_and_buffers(tmp_path: Path) -> None:
    check_ranks(_CONJUGATES, tmp_path)


_UNMARKED = (
    _MODEL
    + """
import io

def train(device):
    model = model_on(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    logged = []
    for number, x in enumerate(data_on(device, 12)):
        loss = model(x).square().mean()
        if rank == 0 and number % 3 == 0:
            logged.append(loss.item())  # within the step
        optimizer.zero_grad()
        loss.backward()
        if rank == 0 and number == 4:
            logged.append(model.module.scale.grad.item())
        optimizer.step()
        if rank == 0 and number % 5 == 0:
            with torch.no_grad():  # an evaluation and a checkpoint of rank 0 alone
                total = torch.zeros((), device=device)
                for value in range(4):
                    total += model.module(torch.full((2, 4), float(value)).to(device)).sum()
                torch.save(model.module.state_dict(), io.BytesIO())
            logged.append(total.item())
    return logged, [one.tolist() for one in model.parameters()]

expected = train("cpu")
before = metrics.counter_value("MarkStep")
assert train("lazy") == expected, (train("lazy"), expected)
assert metrics.counter_value("MarkStep") - before >= 12
"""
)


@pytest.mark.parametrize("ranks", [2, 4])
def test_loops_without_marks_end_their_steps_alike(tmp_path: Path, ranks: int) -> None:
    done = run_ranks(_UNMARKED, tmp_path, ranks, arguments=["eager"])
    assert [one.returncode for one in done] == [0] * ranks, "\n".join(one.stderr for one in done)
