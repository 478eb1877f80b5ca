"""Requests of many shapes to one served function: each has the answer of eager, and they share what they can."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Versioned, assert_same, count
from interruption import Interrupted, interrupt, places_of, raise_interrupted
from torch import nn

import lazy_backend
from lazy_backend import CaptureError, config, serve
from lazy_backend.lowering.compilation.plan_kinds import PlanKind
from lazy_backend.lowering.serving.weights import InputError

SIZE = 8


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE), nn.ReLU(), nn.Linear(SIZE, 3)).eval()


@pytest.fixture(params=["interpreted", "eager", "aot_eager"])
def backend(request: pytest.FixtureRequest) -> None:
    config.compile = "off" if request.param == "interpreted" else "foreground"
    config.backend = "eager" if request.param == "interpreted" else request.param


def ask(served: lazy_backend.Served, module: Callable[..., Any], *inputs: torch.Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(served(*inputs), module(*inputs))


# ----- answers


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_any_batch_is_answered(device: str) -> None:
    served, network = serve(model().to(device), torch.zeros(4, SIZE)), model()
    for batch in (4, 7, 1, 3, 7, 2, 0, 5, 4, 1):
        ask(served, network, torch.randn(batch, SIZE))


class Branching(nn.Module):
    """Other operators, other weights and other results for each kind of size, and constants that follow it."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(SIZE, 3), nn.Linear(SIZE, 3)
        self.register_buffer("table", torch.randn(100, SIZE))

    def forward(self, x: torch.Tensor) -> Any:
        count = x.shape[0]
        x = x * count**0.5 + self.table[:count]
        if count % 2:
            return {"odd": self.small(x).tanh()}
        if count > 5:
            return self.large(x), torch.arange(count, device=x.device) + x.shape[0]
        return self.small(x)


@pytest.mark.usefixtures("backend")
def test_branches_on_sizes_are_followed() -> None:
    torch.manual_seed(0)
    module = Branching()
    served, state = serve(module, torch.zeros(2, SIZE)), module.state_dict()
    for batch in (4, 3, 6, 5, 8, 1, 2, 8, 10, 3):
        ask(served, module, torch.randn(batch, SIZE))
    with torch.no_grad():
        module.large.weight.mul_(2)
        module.small.weight.mul_(3)
    served.swap_weights(state)
    for batch in (2, 8, 3, 12):  # 12 is new
        ask(served, module, torch.randn(batch, SIZE))


@pytest.mark.usefixtures("backend")
def test_trees_of_several_inputs_of_unrelated_sizes() -> None:
    def function(batch: dict[str, torch.Tensor], unused: torch.Tensor) -> dict[str, Any]:
        return {"out": batch["x"] @ batch["y"].T, "rows": unused.shape[0] * batch["x"]}

    served = serve(function, ({"x": torch.zeros(2, 4), "y": torch.zeros(3, 4)}, torch.zeros(2)))
    for x, y, unused in ((2, 3, 2), (2, 3, 5), (5, 3, 2), (3, 7, 1), (1, 1, 1)):
        inputs = {"x": torch.randn(x, 4), "y": torch.randn(y, 4)}, torch.zeros(unused)
        torch.testing.assert_close(served(*inputs), function(*inputs))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("example", [torch.channels_last, torch.contiguous_format])
def test_requests_may_lie_otherwise_in_memory(example: torch.memory_format) -> None:
    torch.manual_seed(0)
    network = nn.Conv2d(3, 4, 3).eval()
    served = serve(network, torch.zeros(2, 3, 6, 6).contiguous(memory_format=example))
    for batch in (2, 5, 7):
        x = torch.randn(batch, 3, 6, 6)
        for given in (x, x.contiguous(memory_format=torch.channels_last), x.transpose(2, 3)):
            ask(served, network, given)
    assert len(served.shapes) == 3


def test_a_recording_draws_no_random_numbers() -> None:
    config.compile = "off"
    served = serve(lambda x: nn.functional.dropout(x, 0.5), torch.ones(10))
    for size in (10, 100, 30):
        torch.manual_seed(3)
        answers = [served(torch.ones(size)) for _ in range(2)]
        assert not torch.equal(*answers)
        torch.manual_seed(3)
        assert_same([served(torch.ones(size)) for _ in range(2)], answers)


class Stateful(nn.Module):
    """Statistics that each request writes, whatever its shape."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(SIZE)
        self.seen: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.norm(x)
        if self.seen is not None:
            made = made + self.seen.sum()
        self.seen = made
        return made


@pytest.mark.usefixtures("backend")
def test_what_one_shape_writes_the_others_see() -> None:
    network = nn.BatchNorm1d(SIZE)
    served, twin = serve(network, torch.randn(4, SIZE)), nn.BatchNorm1d(SIZE)
    for batch in (4, 6, 6, 4, 9, 2, 4):
        ask(served, twin, torch.randn(batch, SIZE))
    assert served.weights["num_batches_tracked"] == 7
    torch.testing.assert_close(served.weights["running_mean"], twin.running_mean)


def test_what_a_recording_leaves_in_an_attribute_is_not_seen_by_the_next() -> None:
    config.compile = "off"
    served = serve(Stateful().eval(), torch.randn(4, SIZE))
    for batch in (5, 6, 4, 7):
        ask(served, Stateful().eval(), torch.randn(batch, SIZE))


# ----- as it was when serving began


@pytest.mark.usefixtures("backend")
def test_a_new_shape_has_the_weights_and_the_mode_of_the_beginning() -> None:
    network = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Dropout(0.5)).eval().to("lazy")
    expected = lazy_backend.to_cpu(network.state_dict())
    served = serve(network, torch.zeros(4, SIZE))
    network.train()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(3)
    lazy_backend.mark_step(wait=True)
    reference = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Dropout(0.5)).eval()
    reference.load_state_dict(expected)
    for batch in (4, 6, 7):
        ask(served, reference, torch.randn(batch, SIZE))


def test_a_tensor_that_a_function_closes_over_stays_what_it_was() -> None:
    config.compile = "off"
    scale = torch.full((3,), 2.0).to("lazy")
    served = serve(lambda x: x * scale, torch.ones(2, 3))
    scale.mul_(5)
    lazy_backend.mark_step()
    for batch in (2, 4):
        assert_same(served(torch.ones(batch, 3)), torch.full((batch, 3), 2.0))


@pytest.mark.parametrize("begins", [True, False])
def test_autocast_counts_as_when_serving_began(begins: bool) -> None:
    config.compile = "off"
    with torch.autocast("lazy", dtype=torch.bfloat16, enabled=begins):
        served = serve(nn.Linear(SIZE, 3), torch.zeros(4, SIZE))
    dtype = torch.bfloat16 if begins else torch.float32
    for batch in (4, 6):
        assert served(torch.zeros(batch, SIZE)).dtype is dtype
    with torch.autocast("lazy", dtype=torch.float16), torch.inference_mode(), torch.device("meta"):
        answer = served(torch.zeros(9, SIZE, device="cpu"))
    assert (answer.dtype, answer.device.type) == (dtype, "cpu")


def test_another_default_dtype_is_refused() -> None:
    config.compile = "off"
    served = serve(nn.Linear(SIZE, 3), torch.zeros(4, SIZE))
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(InputError, match="float64, and was"):
            served(torch.zeros(5, SIZE, dtype=torch.float32))
    finally:
        torch.set_default_dtype(torch.float32)


# ----- refusals


def test_no_other_shapes_where_none_are_wanted() -> None:
    config.max_served_shapes = 0
    served = serve(model(), torch.zeros(4, SIZE))
    with pytest.raises(InputError, match=r"input 0.*expected torch.float32 \[4, 8\].*got torch.float32 \[5, 8\]"):
        served(torch.zeros(5, SIZE))


class Locked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(SIZE, 3)
        self.lock = threading.Lock()


def test_a_module_that_cannot_be_copied_serves_one_shape() -> None:
    served = serve(Locked().to("lazy"), torch.zeros(4, SIZE))
    assert served(torch.zeros(4, SIZE)).shape == (4, 3)
    with pytest.raises(InputError, match=r"shapes of the example(.|\n)*cannot pickle(.|\n)*lambda x: module"):
        served(torch.zeros(5, SIZE))


def test_a_shape_whose_branch_reads_says_so() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item() if x.shape[0] > 4 else x

    served = serve(function, torch.zeros(3))
    with pytest.raises(CaptureError, match=r"item\(\) inside test_a_shape.*function"):
        served(torch.zeros(5))
    assert_same(served(torch.ones(2)), torch.ones(2))


def test_a_shape_that_writes_what_the_example_does_not_is_refused() -> None:
    counter = torch.zeros(1).to("lazy")

    def function(x: torch.Tensor) -> torch.Tensor:
        return x + (counter.add_(1) if x.shape[0] > 4 else counter)

    served = serve(function, torch.zeros(3))
    with pytest.raises(InputError, match="it writes 'constant 0', which it does not for the example"):
        served(torch.zeros(5))
    assert_same(served(torch.zeros(3)), torch.zeros(3))


# ----- plans


def kinds(served: lazy_backend.Served) -> list[PlanKind]:
    return [region.plan_for_run().kind for region in served.delegates]


def test_many_shapes_take_two_compiles() -> None:
    config.compile, config.backend = "foreground", "aot_eager"
    network = model()
    with count("Compile") as compiles:
        served = serve(network, torch.zeros(4, SIZE))
        for batch in (4, *range(2, 40), 4):
            ask(served, network, torch.randn(batch, SIZE))
    assert compiles() == 2


def test_a_new_shape_is_answered_while_its_plan_is_compiled(tmp_path: Path) -> None:
    config.compile, config.backend = "background", "inductor"
    config.cache, config.cache_dir = True, str(tmp_path)
    network = model()
    for expected in ("Compile", "DiskCacheHit"):
        served = serve(network, torch.zeros(4, SIZE))
        assert lazy_backend.wait_for_compiles(300)
        with count(expected) as plans:
            for batch in (5, 6):
                ask(served, network, torch.randn(batch, SIZE))
            assert lazy_backend.wait_for_compiles(300)
            for batch in (5, 6, 7, 8):
                ask(served, network, torch.randn(batch, SIZE))
                shaped = served.kept_executor((torch.Size((batch, SIZE)),))
                assert shaped is not None
                assert [one.plan_for_run().kind for one in shaped.delegates] == [PlanKind.COMPILED_FOR_SHAPES]
        assert plans() == 1


# ----- bounds


def test_the_least_recently_used_shape_goes_first() -> None:
    config.compile, config.max_served_shapes = "off", 3
    served = serve(lambda x: x + 1, torch.zeros(1))
    with count("ServedShape") as recorded, count("ServedShapeDropped") as dropped:
        for size in (1, 2, 3, 4, 2, 5, 2, 1):
            assert_same(served(torch.zeros(size)), torch.ones(size))
        assert served.shapes == [((1,),), ((2,),), ((4,),), ((5,),)]
        assert (recorded(), dropped()) == (4, 1)
        assert_same(served(torch.zeros(3)), torch.ones(3))
    assert (recorded(), dropped()) == (5, 2)


class Scaled(nn.Module):
    """A weight from which a larger one is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(100, 100))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight * 2).tanh() + torch.ones(x.shape[0], 1, device=x.device).cumsum(0)


def folded_tensors(served: lazy_backend.Served) -> set[int]:
    templates = [served._template(), *(other._template() for other in served._others.values())]
    tensors = [value for template in templates for value in template.values if isinstance(value, torch.Tensor)]
    return {tensor.data_ptr() for tensor in tensors if tensor.numel() == 10_000}


def test_what_is_folded_alike_is_folded_once() -> None:
    config.compile = "off"
    torch.manual_seed(0)
    module = Scaled()
    served = serve(module, torch.zeros(4, 100))
    for _ in range(2):
        for batch in (4, 5, 6, 7):
            ask(served, module, torch.randn(batch, 100))
        assert len(folded_tensors(served)) == 2  # the weight, and what is computed from it
        with torch.no_grad():
            module.weight.mul_(0.5)
        served.swap_weights(module.state_dict())


def test_swapped_weights_and_dropped_shapes_are_freed() -> None:
    config.compile, config.max_served_shapes = "off", 2
    module = Scaled()
    gc.collect()
    gc.disable()
    try:
        served = serve(module, torch.zeros(4, 100))
        first = weakref.ref(served.weights["weight"])
        served(torch.zeros(5, 100))
        dropped = weakref.ref(served.kept_executor((torch.Size((5, 100)),)))
        served.swap_weights(module.state_dict())
        for batch in (5, 6, 7, 8):
            served(torch.zeros(batch, 100))
        assert (first(), dropped()) == (None, None)
        whole = weakref.ref(served)
        del served
        assert whole() is None
    finally:
        gc.enable()


# ----- threads and interruptions


class VersionedSums(Versioned):
    """The same, with a call before each layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x * 1).mean() for layer in self.layers])


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("kept", [64, 3])
def test_new_shapes_from_many_threads_while_weights_are_swapped(kept: int) -> None:
    threads, requests, swaps = 8, 200, 50
    config.max_served_shapes = kept
    served = serve(VersionedSums(0), torch.ones(2, 4))
    states = [VersionedSums(version).state_dict() for version in range(swaps + 1)]
    wrong: list[Any] = []
    over = threading.Event()

    def ask_often(seed: int) -> None:
        last, order = 0.0, random.Random(seed)
        for _ in range(requests):
            try:
                answer = served(torch.ones(order.randrange(1, 12), 4))
            except BaseException as error:
                wrong.append(error)
                raise
            version = answer[0].item()
            if not torch.equal(answer, torch.full((3,), version)) or version < last or version % 1:
                wrong.append(answer)
            last = version

    def swap() -> None:
        for state in states:
            served.swap_weights(state)
            over.wait(0.002)

    workers = [threading.Thread(target=ask_often, args=(seed,)) for seed in range(threads)]
    workers.append(threading.Thread(target=swap))
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []
    for batch in range(1, 12):
        assert_same(served(torch.ones(batch, 4)), torch.full((3,), float(swaps)))
    assert len(served.shapes) <= 1 + kept


def test_threads_that_ask_for_one_new_shape_at_once_record_it_once() -> None:
    config.compile = "off"
    served, start = serve(model(), torch.zeros(4, SIZE)), threading.Barrier(8)

    def ask_once() -> None:
        start.wait()
        served(torch.zeros(5, SIZE))

    with count("ServedShape") as recorded:
        workers = [threading.Thread(target=ask_once) for _ in range(8)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert recorded() == 1


def test_a_thread_trains_while_new_shapes_are_recorded() -> None:
    def train(device: str, steps: int) -> list[torch.Tensor]:
        network = nn.Linear(SIZE, SIZE)
        network.load_state_dict(state)
        network.to(device)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
        losses = []
        for step in range(steps):
            loss = network(torch.full((3, SIZE), float(step)).to(device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            lazy_backend.mark_step()
            losses.append(loss.detach())
        return [loss.cpu() for loss in losses]

    config.compile = "off"
    network, state = model(), nn.Linear(SIZE, SIZE).state_dict()
    served = serve(network, torch.zeros(1, SIZE))
    lazily: list[torch.Tensor] = []
    trainer = threading.Thread(target=lambda: lazily.extend(train("lazy", 40)))
    trainer.start()
    batch = 2
    while trainer.is_alive() or batch < 20:
        ask(served, network, torch.randn(batch, SIZE))
        batch += 1
    trainer.join()
    torch.testing.assert_close(lazily, train("cpu", 40))


def test_an_interrupted_new_shape_is_recorded_by_the_next_request() -> None:
    """At every line of ours: no effect stays, no answer is wrong, and nothing is left to run."""
    config.compile, config.first_sight = "off", "run"
    network = nn.BatchNorm1d(SIZE).train()
    served = serve(network, torch.randn(4, SIZE))
    sizes = iter(range(5, 10_000))

    def call() -> None:
        served(torch.randn(next(sizes), SIZE))

    call()
    places = list(places_of(call))
    names = ("serve.py", "servable.py", "many_shapes.py", "weights.py", "state.py")
    near = [place for place in places if Path(place[0]).name in names]
    for place in (*near, *places[:: max(1, len(places) // 100)]):
        before = served.weights["num_batches_tracked"].item()
        with contextlib.suppress(Interrupted):
            interrupt(call, place, 1, raise_interrupted)
        assert served.weights["num_batches_tracked"].item() <= before + 1
        twin = nn.BatchNorm1d(SIZE).train()
        ask(served, twin, torch.randn(next(sizes) if place in near else 5, SIZE))
        assert not lazy_backend.tensors.contexts.context_of(None).has_pending()
