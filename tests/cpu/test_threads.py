"""Threads: recording is safe from any of them, on one device and on several."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import pytest
import torch
from harness import assert_same, count, grid, run_program
from torch import nn

import lazy_backend
from lazy_backend import LazyTensor


@pytest.fixture(autouse=True, params=["always", "never"])
def where_runs_happen(request: pytest.FixtureRequest) -> None:
    lazy_backend.config.run_in_background = request.param


def in_threads(*functions: Callable[[], object]) -> list[object]:
    """Run the functions at the same time, each on its own thread; returns their results, raises their first error."""
    results: list[object] = [None] * len(functions)
    errors: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    together = threading.Barrier(len(functions))

    def run(place: int) -> None:
        try:
            together.wait(timeout=30)
            results[place] = functions[place]()
        except BaseException as error:
            errors.put(error)

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    if not errors.empty():
        raise errors.get()
    return results


def arithmetic(device: str, start: int, steps: int, mark: Callable[[], None]) -> torch.Tensor:
    x = torch.full((8,), float(start)).to(device)
    view = x[2:5]
    for step in range(steps):
        x = x * 0.5 + step
        view.add_(x[:3])
        mark()
    return torch.cat([x, view])


def training(device: str, seed: int, steps: int) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=generator)
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for _ in range(steps):
        batch = torch.randn(16, 4, generator=generator).to(device)
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        if device != "cpu":
            lazy_backend.mark_step(device)
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("mark", [lambda: None, lazy_backend.mark_step], ids=["one trace", "mark_step"])
def test_two_threads_on_one_device(mark) -> None:
    expected = [arithmetic("cpu", start, 30, lambda: None) for start in (1, 2)]
    for _ in range(3):
        made = in_threads(*(lambda start=start: arithmetic("lazy", start, 30, mark) for start in (1, 2)))
        assert_same(made, expected)


def test_two_threads_train_on_one_device() -> None:
    expected = [training("cpu", seed, 15) for seed in (1, 2)]
    assert in_threads(*(lambda seed=seed: training("lazy", seed, 15) for seed in (1, 2))) == expected


def test_two_threads_on_two_devices(two_devices) -> None:
    expected = [training("cpu", seed, 15) for seed in (1, 2)]
    made = in_threads(*(lambda n=n: training(f"lazy:{n}", n + 1, 15) for n in (0, 1)))
    assert made == expected


def test_two_threads_mark_all_devices(two_devices) -> None:
    expected = [arithmetic("cpu", start, 20, lambda: None) for start in (1, 2)]
    made = in_threads(*(lambda n=n: arithmetic(f"lazy:{n}", n + 1, 20, lazy_backend.mark_step) for n in (0, 1)))
    assert_same(made, expected)


def test_two_threads_copy_between_devices(two_devices) -> None:
    def there_and_back(here: str, there: str) -> torch.Tensor:
        x = torch.zeros(4, device=here)
        for _ in range(20):
            x = (x + 1).to(there).mul_(2).to(here)
        return x.cpu()

    one, other = in_threads(lambda: there_and_back("lazy:0", "lazy:1"), lambda: there_and_back("lazy:1", "lazy:0"))
    assert_same(one, other)
    assert one[0].item() == sum(2.0**n for n in range(1, 21))


def test_a_tensor_crosses_threads() -> None:
    x = grid("lazy", 4)
    (y,) = in_threads(lambda: x * 2)
    assert_same(y + 1, torch.arange(4.0) * 2 + 1)


def test_one_thread_reads_while_the_other_records() -> None:
    def record() -> torch.Tensor:
        x = torch.zeros(4, device="lazy")
        for _ in range(200):
            x = x + 1
        return x

    def read() -> list[float]:
        return [torch.full((), float(n), device="lazy").item() for n in range(50)]

    recorded, values = in_threads(record, read)
    assert_same(recorded, torch.full((4,), 200.0))
    assert values == [float(n) for n in range(50)]


def test_a_shared_parameter_gets_both_updates() -> None:
    total = torch.zeros(4, device="lazy")

    def add() -> None:
        for _ in range(50):
            total.add_(1)

    in_threads(add, add)
    assert_same(total, torch.full((4,), 100.0))


def test_strict_is_per_thread() -> None:
    x = grid("lazy", 3)
    with lazy_backend.strict():
        (values,) = in_threads(lambda: x.tolist())
    assert values == [0.0, 1.0, 2.0]


def test_random_draws_of_threads_differ() -> None:
    one, other = in_threads(*[lambda: torch.rand(8, device="lazy")] * 2)
    assert isinstance(one, LazyTensor)
    assert not torch.equal(one, other)


def test_a_data_loader_feeds_the_device() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(16.0))
    loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=1)
    x = torch.ones((), device="lazy")
    sums = [(batch.to("lazy") * x).sum() for (batch,) in loader]
    assert [total.item() for total in sums] == [6.0, 22.0, 38.0, 54.0]


def test_mark_step_returns_before_the_run_is_done() -> None:
    lazy_backend.config.run_in_background = "always"
    release = threading.Event()
    device = lazy_backend.tensors.contexts.contexts.get_device_context(0)
    device.queue.add(lambda: release.wait(timeout=30))
    x = torch.ones(4, device="lazy") + 1
    lazy_backend.mark_step()
    assert x._data.tensor is None
    release.set()
    assert_same(x, torch.full((4,), 2.0))


def test_wait_device_ops_does_not_sync() -> None:
    x = torch.ones(4, device="lazy") + 1
    with count("UncachedCompile") as compiles:
        lazy_backend.wait_device_ops()
    assert compiles() == 0
    assert x._data.tensor is None


def test_a_forked_child_works(tmp_path) -> None:
    code = """
import os, torch, lazy_backend
lazy_backend.config.compile = "off"
x = torch.arange(3.0, device="lazy") + 1
lazy_backend.mark_step()
child = os.fork()
if child == 0:
    ok = (x * 2).tolist() == [2.0, 4.0, 6.0]
    os._exit(0 if ok else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), (x + 1).tolist())
"""
    assert run_program(code, tmp_path) == "0 [2.0, 3.0, 4.0]\n"


def test_the_interpreter_exits_with_a_run_under_way(tmp_path) -> None:
    code = """
import torch, lazy_backend
lazy_backend.config.compile = "off"
x = torch.randn(400, 400, device="lazy")
for _ in range(20):
    x = x @ x
lazy_backend.mark_step()
print("done")
"""
    assert run_program(code, tmp_path) == "done\n"
