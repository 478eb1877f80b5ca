"""Runs launched as one graph of the device, on a fake that has CUDA's rules. See `lowering/device_graphs/fake.py`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from interruption import Interrupted, interrupt, places_of, raise_interrupted

import lazy_backend
from lazy_backend import metrics
from lazy_backend.compat.runtime import reset
from lazy_backend.computation import get_debug_states
from lazy_backend.lowering.device_graphs import launcher
from lazy_backend.lowering.device_graphs.fake import FakeDevice, FakeGraph, RuleBroken
from lazy_backend.lowering.device_graphs.launcher import GraphLauncher
from lazy_backend.lowering.device_graphs.run_order import wait_for_runs, with_runs
from lazy_backend.lowering.device_graphs.uploads import upload_to
from lazy_backend.lowering.devices.registration import use_device
from lazy_backend.lowering.ir.graph import Graph

CPU = torch.device("cpu")

# compiled, each write a call of PyTorch that the fake sees; and interpreted
PLANS = {"aot_eager": {"backend": "aot_eager", "compile": "foreground"}, "interpreted": {"compile": "off"}}


@pytest.fixture
def fake() -> Iterator[FakeDevice]:
    with lazy_backend.config.patch(**PLANS["aot_eager"]), use_device(FakeDevice()) as device:
        assert isinstance(device, FakeDevice)
        yield device


def captured() -> int:
    return metrics.counter_value("DeviceGraphCaptured")


def refusals() -> list[str]:
    return [name.split(": ")[1] for name in metrics.counter_names() if name.startswith("DeviceGraphRefused: ")]


def network(dropout: float = 0.3) -> torch.nn.Module:
    layers = torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(dropout), torch.nn.Linear(16, 1)
    return torch.nn.Sequential(*layers)


def train(
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    sizes: Callable[[int], int] = lambda step: 12,
    steps: int = 20,
    dropout: float = 0.3,
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = network(dropout).to("lazy")
    optimizer = make_optimizer(model.parameters())
    losses = []
    for step in range(steps):
        inputs = torch.randn(sizes(step), 8, generator=torch.Generator().manual_seed(step)).to("lazy")
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        lazy_backend.mark_step()
        losses.append(loss.detach())
    return [*(loss.cpu() for loss in losses), *(parameter.detach().cpu() for parameter in model.parameters())]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "AdamW-capturable": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, capturable=True),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_losses_are_those_without_graphs(plan: str, name: str) -> None:
    """Dropout, losses that are kept, gradients that die, floats that change, batches that move."""
    with lazy_backend.config.patch(**PLANS[plan]):
        expected = train(OPTIMIZERS[name])
        reset()  # plans that are there have no launcher
        with use_device(FakeDevice()) as fake:
            found = train(OPTIMIZERS[name])
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    # floats of an interpreted plan are no memory: default AdamW has others in each step
    assert isinstance(fake, FakeDevice)
    assert (fake.num_launches >= 12) == (plan == "aot_eager" or name != "AdamW")
    assert fake.num_captures <= 2
    assert metrics.counter_value("DeviceGraphLaunched") == fake.num_launches


def test_a_captured_step_is_launched(fake: FakeDevice) -> None:
    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = network().to("lazy")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        @lazy_backend.capture
        def step(inputs: torch.Tensor) -> torch.Tensor:
            loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        batches = [torch.randn(12, 8, generator=torch.Generator().manual_seed(n)).to("lazy") for n in range(20)]
        return [step(batch).cpu() for batch in batches]

    found = run()
    assert fake.num_launches >= 10
    with lazy_backend.config.patch(device_graphs="off"):
        assert all(torch.equal(a, b) for a, b in zip(run(), found, strict=True))


def test_one_graph_for_each_size(fake: FakeDevice) -> None:
    sizes = [5, 7, 9]
    found = train(OPTIMIZERS["SGD"], lambda step: sizes[step % 3], steps=45)
    assert fake.num_captures >= 3
    assert fake.num_launches >= 20
    with lazy_backend.config.patch(device_graphs="off"):
        expected = train(OPTIMIZERS["SGD"], lambda step: sizes[step % 3], steps=45)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_graphs_of_sizes_that_are_not_used_give_their_memory_back(fake: FakeDevice) -> None:
    released: list[FakeGraph] = []
    original = FakeGraph.release

    def release(self: FakeGraph) -> None:
        released.append(self)
        original(self)

    with pytest.MonkeyPatch.context() as patches, lazy_backend.config.patch(max_static_shapes=0):
        patches.setattr(FakeGraph, "release", release)
        train(OPTIMIZERS["SGD"], lambda step: 3 + step // 6, steps=72)
    assert fake.num_captures >= 9
    assert len(released) == fake.num_captures - 8


def test_outputs_that_are_used_later_are_not_overwritten(fake: FakeDevice) -> None:
    """An output that nobody kept while the runs were watched, and then somebody does."""
    kept: list[torch.Tensor] = []
    for step in range(12):
        result = torch.full((3,), float(step)).to("lazy") * 2 + 1
        lazy_backend.mark_step()
        if step >= 8:
            kept.append(result)
        del result
    assert [one.tolist() for one in kept] == [[2.0 * step + 1] * 3 for step in range(8, 12)]
    assert metrics.counter_value("DeviceGraphGivenUp") == 1
    assert captured() == 2


def test_a_state_goes_from_step_to_step(fake: FakeDevice) -> None:
    """An output of one run is an input of the next one, so it is in use when that is launched."""
    state = torch.zeros(4).to("lazy")
    expected = torch.zeros(4)
    for step in range(12):
        inputs = torch.randn(4, generator=torch.Generator().manual_seed(step))
        state = torch.tanh(state * 0.5 + inputs.to("lazy"))
        lazy_backend.mark_step()
        expected = torch.tanh(expected * 0.5 + inputs)
    assert torch.equal(state.cpu(), expected)
    assert fake.num_launches >= 6


def test_an_input_that_moves_and_is_written(fake: FakeDevice) -> None:
    buffers = [torch.full((4, 3), float(n)).to("lazy") for n in range(12)]
    for buffer in buffers:
        buffer.t()[1:].mul_(3).add_(1)
        lazy_backend.mark_step()
    for n, buffer in enumerate(buffers):
        expected = torch.full((4, 3), float(n))
        expected.t()[1:].mul_(3).add_(1)
        assert torch.equal(buffer.cpu(), expected)
    assert fake.num_launches >= 8


def test_an_input_that_stayed_and_then_moves(fake: FakeDevice) -> None:
    weight = torch.ones(4).to("lazy")
    lazy_backend.mark_step()
    found, expected = [], []
    for step in range(16):
        if step == 8:
            weight = torch.full((4,), 5.0).to("lazy")
        result = weight * torch.full((4,), float(step)).to("lazy")
        weight.add_(1)
        lazy_backend.mark_step()
        found.append(float(result.sum()))
        expected.append(4.0 * step * (1 + step if step < 8 else 5 + step - 8))
    assert found == expected
    assert metrics.counter_value("DeviceGraphGivenUp") == 1
    assert fake.num_launches >= 8


def test_what_an_input_views_is_found_again(fake: FakeDevice) -> None:
    """Two inputs of one storage that moves."""
    for step in range(8):
        base = torch.arange(6.0).add(step).to("lazy")
        lazy_backend.mark_step()
        base[:3].add_(base[3:])
        lazy_backend.mark_step()
        assert base.tolist() == [3.0 + 2 * step, 5.0 + 2 * step, 7.0 + 2 * step, 3.0 + step, 4.0 + step, 5.0 + step]


def test_signed_zeros_choose_the_graph() -> None:
    with lazy_backend.config.patch(compile="off"), use_device(FakeDevice()):
        for value in [0.0] * 6 + [-0.0] * 6:
            result = torch.ones(2).to("lazy") / (torch.zeros(2).to("lazy") * value)
            lazy_backend.mark_step()
            result = torch.ones(2).to("lazy").mul(value)
            lazy_backend.mark_step()
            assert torch.signbit(result.cpu()).tolist() == [str(value) == "-0.0"] * 2


def test_a_kernel_that_reads_a_value_is_not_captured(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    # as if its kernel were written in C++
    monkeypatch.setattr(launcher, "_REPEATABLE", ("aten", "device_graphs_test"))

    @torch.library.custom_op("device_graphs_test::scaled_by_first", mutates_args=())
    def scaled_by_first(x: torch.Tensor) -> torch.Tensor:
        return x * x[0].item()

    scaled_by_first.register_fake(torch.empty_like)
    for step in range(8):
        result = scaled_by_first(torch.full((3,), float(step)).to("lazy")) + 1
        lazy_backend.mark_step()
        assert result.tolist() == [step * step + 1.0] * 3
    assert fake.num_launches == 0
    assert len(refusals()) == 1
    states = [state.device_graph for state in get_debug_states().values()]
    assert any("reads a value on the host" in str(state) for state in states)
    assert metrics.counter_value("DeviceGraphRefused") == 1


def test_python_code_is_not_captured(fake: FakeDevice) -> None:
    """A launch does what kernels did. What a custom operator does in Python would be what it did at the capture."""
    scale = [1.0]

    @torch.library.custom_op("device_graphs_test::scaled", mutates_args=())
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * scale[0]

    scaled.register_fake(torch.empty_like)
    for step in range(8):
        scale[0] = float(step)
        result = scaled(torch.ones(3).to("lazy") * 2)
        lazy_backend.mark_step()
        assert result.tolist() == [2.0 * step] * 3
    assert fake.num_launches == 0
    assert refusals() == ["device_graphs_test.scaled.default is Python code, which a launch would not run"]


def test_errors_of_linear_algebra_are_not_captured(fake: FakeDevice) -> None:
    for step in range(8):
        matrix = (torch.eye(3) * (-1 if step == 6 else 1)).to("lazy")
        factor = torch.linalg.cholesky(matrix)
        if step == 6:
            with pytest.raises(lazy_backend.ExecutionError, match="not positive-definite"):
                lazy_backend.mark_step(wait=True)
        else:
            assert torch.equal(factor.cpu(), torch.eye(3))
    assert refusals() == ["aten._linalg_check_errors.default cannot be captured"]


def test_indices_are_launched_and_masks_are_not(fake: FakeDevice) -> None:
    rows = torch.arange(12.0).view(4, 3)
    for step in range(8):
        index = torch.tensor([step % 4, 1])
        assert torch.equal((rows.to("lazy")[index.to("lazy")] * 2).cpu(), rows[index] * 2)
    assert fake.num_launches >= 4
    graph = get_debug_states()
    assert [state.device_graph for state in graph.values()] == ["launched"]


def test_kept_outputs_keep_their_strides(fake: FakeDevice) -> None:
    kept = []
    for step in range(10):
        result = torch.empty_strided((3,), (2,), device="lazy")
        result.copy_(torch.full((3,), float(step)).to("lazy") + 1)
        lazy_backend.mark_step()
        kept.append(result)
    assert fake.num_launches >= 4
    assert [one.stride() for one in kept] == [(2,)] * 10
    assert [one.cpu().tolist() for one in kept] == [[step + 1.0] * 3 for step in range(10)]
    assert [one[1:].tolist() for one in kept] == [[step + 1.0] * 2 for step in range(10)]


def served() -> tuple[Callable[[torch.Tensor], torch.Tensor], torch.nn.Module]:
    model = network(dropout=0).eval()
    return lazy_backend.serve(model.to("lazy"), torch.zeros(2, 8)), model.cpu()


def request_of(number: int) -> torch.Tensor:
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(number))


def test_serve_captures_in_inference_mode_and_launches_outside(fake: FakeDevice) -> None:
    function, model = served()
    requests = [request_of(number) for number in range(8)]  # all alive, so that each lies elsewhere
    for modes in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with modes():
            assert all(torch.equal(function(request), model(request)) for request in requests)
    assert captured() == 1
    assert fake.num_launches >= 16


def test_serve_does_not_overwrite_a_storage_that_is_kept(fake: FakeDevice) -> None:
    """The storage alone: `untyped_storage()` returns one object for as long as somebody has it."""
    function, model = served()
    for number in range(8):
        function(request_of(number))
    kept = [function(request_of(number)).untyped_storage() for number in range(8, 14)]
    found = [torch.empty(0).set_(storage).view(2, 1) for storage in kept]  # type: ignore[call-overload]
    with torch.no_grad():
        assert all(torch.equal(one, model(request_of(number))) for one, number in zip(found, range(8, 14), strict=True))


def test_read_only_inputs_may_share_memory(fake: FakeDevice) -> None:
    total = torch.zeros(3).to("lazy")
    expected = torch.zeros(3)
    for step in range(8):
        base = torch.arange(6.0).add(step)
        lazy = base.to("lazy")
        lazy_backend.mark_step()
        total.add_(lazy[:3] * lazy[3:])
        lazy_backend.mark_step()
        expected.add_(base[:3] * base[3:])
    assert torch.equal(total.cpu(), expected)
    assert refusals() == []


def test_what_communicates_is_not_captured(fake: FakeDevice, tmp_path: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        for step in range(8):
            values = torch.full((3,), float(step)).to("lazy") + 1
            torch.distributed.all_reduce(values)
            lazy_backend.mark_step()
            assert values.tolist() == [step + 1.0] * 3
    finally:
        torch.distributed.destroy_process_group()
    assert "it communicates" in refusals()
    assert fake.num_launches == 0


def test_switched_off_in_between(fake: FakeDevice) -> None:
    def step(value: float) -> None:
        result = torch.full((3,), value).to("lazy") * 2
        lazy_backend.mark_step()
        assert result.tolist() == [value * 2] * 3

    for value in range(8):
        step(value)
    launched = fake.num_launches
    assert launched
    with lazy_backend.config.patch(device_graphs="off"):
        for value in range(8):
            step(value)
    assert fake.num_launches == launched
    for value in range(8):
        step(value)
    assert fake.num_launches > launched
    assert captured() == 2


def test_an_interrupted_launch_leaves_the_next_ones_as_they_are(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = FakeGraph.launch
    interrupts = iter([False, True])

    def launch(self: FakeGraph, reads: Any) -> None:
        if next(interrupts, False):
            raise KeyboardInterrupt
        original(self, reads)

    monkeypatch.setattr(FakeGraph, "launch", launch)
    monkeypatch.setattr(lazy_backend.config, "run_in_background", "never")
    interrupted = 0
    for step in range(12):
        result = torch.full((3,), float(step)).to("lazy") * 2
        try:
            lazy_backend.mark_step(wait=True)
        except KeyboardInterrupt:
            interrupted += 1
            with pytest.raises(lazy_backend.PoisonedTensorError, match="interrupted"):
                result.cpu()
        else:
            assert result.tolist() == [step * 2.0] * 3
    assert interrupted == 1
    assert fake.num_launches >= 6


def test_an_interrupt_at_any_line_leaves_nobody_in_the_launcher(fake: FakeDevice) -> None:
    """Also while its traceback, which holds the frames, is kept."""
    graphs = GraphLauncher(fake, Graph((), (), (), 0, 0, CPU))
    operand = torch.ones(3)

    def run() -> None:
        graphs.run(lambda tensors, seeds: [tensors[0] * 2], [operand], [], ())

    for _ in range(6):
        run()
    assert fake.num_launches
    errors = []
    for call in (run, graphs.release):
        for place, times in places_of(call).items():
            for time in range(1, times + 1):
                run()
                with pytest.raises(Interrupted) as error:
                    interrupt(call, place, time, raise_interrupted)
                errors.append(error)
                for _ in range(5):
                    launched = fake.num_launches
                    run()
                assert fake.num_launches == launched + 1, f"nothing is launched after an interrupt at {place}"
    assert len(errors) > 30


def test_a_failed_capture_computes_nothing_twice(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise torch.OutOfMemoryError("no memory for a pool")

    monkeypatch.setattr(FakeDevice, "captured", fail)
    total = torch.zeros(3).to("lazy")
    for _ in range(8):
        total.add_(1)
        lazy_backend.mark_step()
    assert total.tolist() == [8.0] * 3
    assert refusals() == ["no memory for a pool"]


def test_graphs_give_their_memory_to_a_kernel_that_has_none(fake: FakeDevice) -> None:
    failures = iter([True])

    @torch.library.custom_op("device_graphs_test::hungry", mutates_args=())
    def hungry(x: torch.Tensor) -> torch.Tensor:
        if next(failures, False):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x + 1

    hungry.register_fake(torch.empty_like)
    for step in range(8):
        result = torch.full((3,), float(step)).to("lazy") * 2
        lazy_backend.mark_step()
        del result
    assert captured() == 1
    with lazy_backend.config.patch(compile="off", first_sight="record"):
        assert hungry(torch.ones(3).to("lazy")).tolist() == [2.0] * 3
    for step in range(8):
        result = torch.full((3,), float(step)).to("lazy") * 2
        lazy_backend.mark_step()
        assert result.tolist() == [step * 2.0] * 3
    assert captured() == 2


def test_an_error_for_want_of_memory_says_what_to_do() -> None:
    @torch.library.custom_op("device_graphs_test::too_large", mutates_args=())
    def too_large(x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80.00 GiB")

    too_large.register_fake(torch.empty_like)
    with lazy_backend.config.patch(compile="off", first_sight="record"):
        result = too_large(torch.ones(3).to("lazy"))
        with pytest.raises(lazy_backend.ExecutionError, match=r"80.00 GiB[\s\S]*test_device_graphs[\s\S]*memory_stats"):
            result.cpu()


def test_threads_that_run_one_plan() -> None:
    """Two devices with the same graph: who comes second computes without the launch."""
    failures: list[BaseException] = []

    def loop(device: str) -> None:
        try:
            for step in range(200):
                result = torch.full((3,), float(step)).to(device) * 2
                lazy_backend.mark_step(device)
                assert result.tolist() == [step * 2.0] * 3
        except BaseException as error:
            failures.append(error)

    settings = {**PLANS["aot_eager"], "num_devices": 2, "run_in_background": "always"}
    with lazy_backend.config.patch(**settings), use_device(FakeDevice()):
        threads = [threading.Thread(target=loop, args=(f"lazy:{n}",)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []


def test_the_plan_says_that_it_is_launched(fake: FakeDevice) -> None:
    for step in range(8):
        result = torch.full((3,), float(step)).to("lazy") * 2
        lazy_backend.mark_step()
        assert result.tolist() == [step * 2.0] * 3
    assert "compiled, launched as one graph of the device" in str(lazy_backend.explain())
    states = [state.device_graph for state in get_debug_states().values()]
    assert "launched" in states


def test_memory_stats() -> None:
    kept = torch.ones(1 << 10).to("lazy")
    lazy_backend.mark_step(wait=True)
    assert lazy_backend.memory_stats()["allocated"] >= kept.nbytes


# ----- the fake finds what a GPU would not tell of


def planted(fake: FakeDevice, call: Callable[[], Any], *operands: torch.Tensor, **options: Any) -> Any:
    graph, results = fake.captured(call, options.get("generators", []), operands)
    graph.launch(options.get("launched_with", operands))
    return results


def test_a_capture_computes_nothing_and_a_launch_does(fake: FakeDevice) -> None:
    x = torch.ones(3)
    graph, result = fake.captured(lambda: x.add_(1) * 2, [], [x])
    assert x.tolist() == [1.0] * 3
    assert result.isnan().all()
    for step in range(3):
        graph.launch([x])
        assert x.tolist() == [step + 2.0] * 3
        assert result.tolist() == [2 * (step + 2.0)] * 3


def test_planted_memory_from_outside_the_pool(fake: FakeDevice) -> None:
    x = torch.ones(3)

    def call() -> torch.Tensor:
        return x + outside[0]

    outside = [torch.ones(3)]
    graph, _ = fake.captured(call, [], [x])
    graph.launch([x])
    outside.clear()
    with pytest.raises(RuleBroken, match="freed since the capture"):
        graph.launch([x])


def test_planted_host_read(fake: FakeDevice) -> None:
    x = torch.ones(3)
    with pytest.raises(RuleBroken, match="reads a value on the host"):
        planted(fake, lambda: x * float(x.sum()), x)
    with pytest.raises(RuleBroken, match="reads a value on the host"):
        planted(fake, lambda: x[x > 0], x)


def test_planted_missing_event(fake: FakeDevice) -> None:
    pinned = torch.ones(3)
    with fake.on(fake.upload_stream):
        x = fake.from_pinned(pinned)
    with pytest.raises(RuleBroken, match="before the event"):
        planted(fake, lambda: x + 1, x)
    fake.wait(fake.current_stream(), fake.record(fake.upload_stream))
    with pytest.raises(RuleBroken, match="reused too early"):
        planted(fake, lambda: x + 1, x)
    fake.will_use(fake.current_stream(), x)
    assert planted(fake, lambda: x + 1, x).tolist() == [2.0] * 3
    assert planted(fake, lambda: y + 1, y := upload_to(CPU, pinned)).tolist() == [2.0] * 3


def test_uploads_and_runs_are_in_order_whatever_stream_the_caller_is_on(fake: FakeDevice) -> None:
    other = fake.new_stream()
    with fake.on(other):
        x = upload_to(CPU, torch.ones(3))
    assert planted(fake, lambda: x + 1, x).tolist() == [2.0] * 3
    fake.default_stream().time += 1  # a run
    with fake.on(other):
        wait_for_runs(CPU)
        assert other.seen[fake.default_stream()] == fake.default_stream().time
        other.time += 1  # work of the caller
        assert with_runs(CPU, fake.current_stream) is fake.default_stream()
        assert fake.current_stream() is other
    assert fake.default_stream().seen[other] == other.time


def test_planted_launches_on_two_streams(fake: FakeDevice) -> None:
    x, other = torch.ones(3), fake.new_stream()
    graph, _ = fake.captured(lambda: x + 1, [], [x])
    graph.launch([x])
    with fake.on(other), pytest.raises(RuleBroken, match="on another stream"):
        graph.launch([x])
    fake.wait(other, fake.record(fake.current_stream()))
    with fake.on(other):
        graph.launch([x])


def test_runs_on_several_streams_wait_for_each_other(fake: FakeDevice) -> None:
    streams = [fake.new_stream() for _ in range(3)]
    for step in range(12):
        with fake.on(streams[step % 3]):
            result = torch.full((3,), float(step)).to("lazy") * 2
            lazy_backend.mark_step(wait=True)
            assert result.tolist() == [step * 2.0] * 3
    assert fake.num_launches >= 6


def test_planted_stale_input(fake: FakeDevice) -> None:
    x, moved = torch.ones(3), torch.full((3,), 7.0)
    with pytest.raises(RuleBroken, match="no operand of this launch"):
        planted(fake, lambda: x + 1, x, launched_with=[moved])


def test_planted_stale_input_of_the_launcher(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that believes that a batch stays where it is."""
    monkeypatch.setattr(
        "lazy_backend.lowering.device_graphs.launcher._Recurring.note_inputs",
        lambda self, tensors: setattr(self, "num_runs", self.num_runs + 1),
    )
    monkeypatch.setattr(
        GraphLauncher, "_launch_or_compute", lambda self, recurring, *rest: self._launch(rest[0], *rest[2:])
    )
    batches = [torch.full((3,), float(n)).to("lazy") for n in range(8)]

    def run() -> None:
        for batch in batches:
            doubled.append(batch * 2)
            lazy_backend.mark_step(wait=True)
            doubled.clear()

    doubled: list[torch.Tensor] = []
    with pytest.raises(lazy_backend.ExecutionError, match="no operand of this launch"):
        run()


def test_planted_generators(fake: FakeDevice) -> None:
    x, generator = torch.ones(3), torch.Generator()
    with pytest.raises(RuleBroken, match="not registered"):
        planted(fake, lambda: x.bernoulli(generator=generator), x)
    with pytest.raises(RuleBroken, match="was seeded"):
        planted(fake, lambda: x.bernoulli(generator=generator.manual_seed(3)), x, generators=[generator])
    planted(fake, lambda: x.bernoulli(generator=generator), x, generators=[generator])


def test_planted_kernel_that_is_no_operator(fake: FakeDevice) -> None:
    x = torch.ones(3)
    with pytest.raises(RuleBroken, match="no operator of PyTorch"):
        planted(fake, lambda: x.numpy().fill(2.0), x)
    assert x.tolist() == [1.0] * 3


def test_planted_launch_after_release(fake: FakeDevice) -> None:
    x = torch.ones(3)
    graph, _ = fake.captured(lambda: x + 1, [], [x])
    graph.release()
    with pytest.raises(RuleBroken, match="after its release"):
        graph.launch([x])
