"""Stepping aside: calls that run at once in C++ are eager's; recording is given up and taken back by measurement."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness import NoSync, assert_same
from known_calls import FACTORIES, draws
from random_programs import random_chains, random_program

import lazy_backend
from lazy_backend import metrics
from lazy_backend.diagnostics.findings import find
from lazy_backend.diagnostics.run_log import collect
from lazy_backend.execution.sync import executor
from lazy_backend.integrations.replaying import replay_known_parts, replay_steps
from lazy_backend.metrics.recording_costs import Aside, StretchCosts
from lazy_backend.recording.native import native_recorder
from lazy_backend.tensors.contexts import contexts
from lazy_backend.tensors.state import DeviceContext

pytestmark = pytest.mark.skipif(native_recorder.extension is None, reason="calls run at once in C++ only")


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    with lazy_backend.config.patch(compile="off", step_aside=True):  # bit for bit
        yield
    executor.aside.record_again()


def _context() -> DeviceContext:
    return contexts.get_device_context(0)


def _toggle(is_on: bool) -> None:
    """Step aside from the next stretch on, or record again."""
    lazy_backend.mark_step()
    context = _context()
    context.aside.is_on = is_on
    context.follow_aside()


def _at_once(function: Callable[[], Any]) -> tuple[Any, int]:
    """What a function returns while nothing is recorded, and the calls that Python got."""
    _toggle(True)
    torch.ones(2).to("lazy").add_(1)  # Python gets the first call, and waits for runs
    before = native_recorder.counts()[1]
    found = function()
    return found, native_recorder.counts()[1] - before


# ----- calls


@pytest.mark.parametrize("seed", range(60))
def test_random_programs_equal_eager_wherever_it_steps_aside(seed: int) -> None:
    program = (random_chains if seed % 2 else random_program)(seed)
    expected = program.run("cpu", NoSync())
    choices = random.Random(seed)

    def sync() -> None:
        if choices.random() < 0.6:
            _toggle(choices.random() < 0.6)
        else:
            lazy_backend.mark_step()

    for is_on in (False, True):
        _toggle(is_on)
        found = program.run("lazy", sync)
        _toggle(False)
        assert_same(found, expected)


def test_views_and_writes_share_memory_across_a_switch() -> None:
    base = torch.arange(12.0).to("lazy").reshape(3, 4)
    before = base[1:]
    shared = base.detach()
    _toggle(True)
    after = base.t()
    after.mul_(2)
    before[0, 0] = 7
    other = base.data
    other.add_(1)
    _toggle(False)
    shared[2].zero_()
    expected = torch.arange(12.0).reshape(3, 4).mul_(2)
    expected[1, 0] = 7
    expected.add_(1)[2].zero_()
    for found in (base, shared, other, after.t()):
        assert torch.equal(found.cpu(), expected)
    assert torch.equal(before.cpu(), expected[1:])


def test_what_comes_back_is_what_was_given() -> None:
    x = torch.ones(3).to("lazy")

    def calls() -> tuple[torch.Tensor, ...]:
        return x.add_(1), x.view(3), x.contiguous(), torch.add(x, 1, out=torch.empty(3, device="lazy"))

    (added, viewed, same, out), _ = _at_once(calls)
    assert added is x
    assert same is x
    assert viewed._base is x
    assert out.tolist() == [3.0, 3.0, 3.0]
    assert x._version == 1


def test_gradients_and_versions_are_those_of_eager() -> None:
    def step(device: str) -> list[Any]:
        torch.manual_seed(0)
        layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.GELU()).to(device)
        optimizer = torch.optim.AdamW(layer.parameters(), foreach=True)
        for _ in range(3):
            layer(torch.ones(2, 4).to(device) * 0.5).square().sum().backward()
            optimizer.step()
        state = [value.cpu() for value in layer.state_dict().values()]
        return [*state, *[p.grad.cpu() for p in layer.parameters()], [p._version for p in layer.parameters()]]  # type: ignore[union-attr]

    eager, recorded = step("cpu"), step("lazy")
    found, _ = _at_once(lambda: step("lazy"))
    assert found[-1] == recorded[-1]
    assert all(map(torch.equal, found[:-1], eager[:-1]))


def test_a_saved_tensor_that_was_changed_is_noticed() -> None:
    x = torch.ones(3).to("lazy").requires_grad_()
    _toggle(True)
    y = x.exp()
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_modes_of_the_thread_count() -> None:
    _toggle(True)
    x = torch.ones(4, 4).to("lazy")
    with torch.inference_mode():
        inside = x @ x
        assert inside.is_inference()
        assert not x.t().is_inference()
    assert not (x @ x).is_inference()
    assert not contexts.get_device_context(0).registry.alive()[-1].tensor.is_inference()  # type: ignore[union-attr]
    with torch.autocast("lazy", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        inside.add_(1)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.ones(2, device="lazy").dtype == torch.float64
        assert (torch.ones(2, dtype=torch.int64).to("lazy") / 2).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_random_numbers_are_those_that_are_recorded() -> None:
    def draw() -> list[Any]:
        torch.manual_seed(5)
        x = torch.full((8,), 0.5).to("lazy")
        drawn = [x.bernoulli(), torch.rand(3, device="lazy"), torch.nn.functional.dropout(x), x.multinomial(2)]
        own = torch.Generator("lazy").manual_seed(3)
        return [one.cpu() for one in (*drawn, x.clone().normal_(), x.bernoulli(generator=own))] + [
            torch.get_rng_state()
        ]

    expected = draw()
    found, _ = _at_once(draw)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_a_call_that_fails_raises_as_in_eager_and_draws_nothing() -> None:
    _toggle(True)
    x = torch.ones(3).to("lazy")
    with pytest.raises(RuntimeError, match="must match the size"):
        x + torch.ones(4).to("lazy")
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError):
        (x * -1).multinomial(2)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3)
    assert x.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode], ids=lambda one: one.__name__)
@pytest.mark.parametrize("name", FACTORIES)
def test_factories_make_what_eager_makes(name: str, mode: Callable[..., Any]) -> None:
    def look(tensor: torch.Tensor) -> tuple[Any, ...]:
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad, tensor.is_inference(), tensor.is_leaf

    with mode():
        expected = FACTORIES[name]("cpu")
        found, _ = _at_once(lambda: FACTORIES[name]("lazy"))
    assert look(found) == look(expected)
    if not draws(name):
        assert_same(found.detach().cpu(), expected.detach())


def test_storages_that_are_gone_leave_no_references() -> None:
    _toggle(True)
    kept = [torch.ones(2, device="lazy") for _ in range(10)]
    before = len(_context().registry.references)
    for _ in range(4000):
        kept[0] = kept[0] + 1
    # one round of four looks each through what others keep, and what that round left is found by the next
    assert len(_context().registry.references) < 1.5 * before + 200
    assert_same(kept[0].cpu(), torch.full((2,), 4001.0))


def test_usual_calls_do_not_reach_python() -> None:
    x, places = torch.rand(6, 6).to("lazy"), torch.tensor([2, 0]).to("lazy")

    def calls() -> float:
        y = (x[places] * 2).double().sum(1, keepdim=True).expand(2, 3).reshape(-1)
        kept = y[y > 0].nonzero().view(-1)
        torch._foreach_mul_([x, y], 0.5)
        return torch.cat([kept.float(), x.t()[0]]).softmax(0).max().item()

    _at_once(calls)  # Python meets each operator once
    _, others = _at_once(calls)
    assert others == 0


def test_copies_to_the_host_are_reads_that_do_not_reach_python() -> None:
    x = torch.arange(6.0).reshape(2, 3).to("lazy").requires_grad_()

    def calls() -> list[torch.Tensor]:
        scaled = (x * 2).t()[1:]
        return [x.cpu(), scaled.cpu(), x.to("cpu", torch.float64), x.detach().cpu()]

    _at_once(calls)
    before = native_recorder.extension.calls()[1]
    found, others = _at_once(calls)
    assert others == 0
    assert native_recorder.extension.calls()[1] == before + 4
    expected = torch.arange(6.0).reshape(2, 3)
    scaled = (expected * 2).t()[1:].to("cpu", copy=True)
    assert_same([one.detach() for one in found], [expected, scaled, expected.double(), expected])
    assert all(one.device.type == "cpu" and type(one) is torch.Tensor for one in found)
    found[0].sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad.cpu(), torch.ones(2, 3))
    with torch.no_grad():
        found[0].zero_()
    assert x.cpu().sum() == 15
    with torch.inference_mode():
        assert not x.cpu().is_inference()


def test_memory_that_is_only_uploaded_is_not_kept() -> None:
    registry = _context().registry

    def calls() -> None:
        for _ in range(5000):
            torch.ones(2).to("lazy")

    _at_once(calls)
    assert len(registry.references) < 3000


@pytest.mark.parametrize("shape", [(1,), (), (5, 1), (5, 10)])
def test_an_operator_that_broadcasts_what_it_writes_is_like_eager(shape: tuple[int, ...]) -> None:
    def program(device: str) -> list[torch.Tensor]:
        written = torch.full(shape, 2.0).to(device)
        alias, left, right = written.detach(), torch.ones(3, 5, 4).to(device), torch.ones(3, 4, 10).to(device)
        found = written.addbmm_(left, right)
        assert found is written
        return [found.cpu(), alias.cpu(), (written + 1).cpu()]

    for _ in range(3):
        _toggle(True)
        assert_same(program("lazy"), program("cpu"))


def test_finalizers_may_do_anything_while_results_are_wrapped() -> None:
    class Finalized:
        def __init__(self, kind: int) -> None:
            self.itself, self.kind, self.value = self, kind, torch.ones(3).to("lazy")

        def __del__(self) -> None:
            made = self.value + 1
            if self.kind % 3 == 0:
                made.sum().item()
            elif self.kind % 3 == 1:
                _context().aside.is_on = self.kind % 2 == 0
                _context().follow_aside()
            else:
                lazy_backend.mark_step()

    lazy_backend.config.run_in_background = "never"  # on the thread of a run, a finalizer may not read
    # nor on that of a compile, whose modes would take its calls; and none may import, within an import
    lazy_backend.wait_for_compiles()
    lazy_backend.config.compile = "off"
    lazy_backend.config.first_sight = "run"  # PyTorch's fake kernels turn Python's dispatch off: see limits.md
    for kind in range(3):
        Finalized(kind)
    gc.collect()
    threshold = gc.get_threshold()
    try:
        gc.set_threshold(5, 2, 2)
        x, expected = torch.ones(4).to("lazy"), torch.ones(4)
        for kind in range(300):
            Finalized(kind)
            x, expected = (x * 1.01)[:4].add_(0.1), (expected * 1.01)[:4].add_(0.1)
    finally:
        gc.set_threshold(*threshold)
        gc.collect()
    assert torch.equal(x.cpu(), expected)


def test_other_threads_see_the_values() -> None:
    _toggle(True)
    found: list[float] = []

    def work() -> None:
        x = torch.ones(16).to("lazy")
        for _ in range(500):
            x = x + 1
        found.append(x.sum().item())

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        _toggle(bool(random.getrandbits(1)))
    for thread in threads:
        thread.join()
    assert found == [501.0 * 16] * 3


# ----- who may step aside


def test_who_wants_calls_recorded_gets_them_recorded() -> None:
    x = torch.ones(3).to("lazy")
    for begin in (
        lambda: lazy_backend.strict().__enter__(),
        lambda: lazy_backend.capture(lambda y: y * 2)(x),
    ):
        _toggle(True)
        assert _context().trace.cursor is _context().eager_root
        left = begin()
        assert _context().trace.cursor is not _context().eager_root
        if hasattr(left, "__exit__"):
            left.__exit__(None, None, None)
    lazy_backend.metrics.reset()


def _steps(device: str, captures: bool, between: Callable[[int], object]) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Losses and state of a training whose model and optimizer a trainer may have captured; rows of these, by kind."""
    torch.manual_seed(1)
    parts = [torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 8), torch.nn.Tanh()]
    model = torch.nn.Sequential(*parts, torch.nn.Linear(8, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    if captures:
        replay_known_parts(model)
        replay_steps(optimizer)
    found = []
    for number in range(24):
        inputs = torch.linspace(0, 1 + number, 20).view(5, 4).to(device)
        results = model(inputs)
        between(3 * number)
        loss = results.square().mean()
        loss.backward()
        between(3 * number + 1)
        optimizer.step()
        optimizer.zero_grad()
        between(3 * number + 2)
        found.append(loss.detach())
    state = [*[p.detach() for p in model.parameters()], *model.buffers()]
    return [*found, *state], {row["kind"]: row for row in lazy_backend.captures()}


@pytest.mark.parametrize("seed", range(12))
def test_what_trainers_capture_runs_as_written_while_aside(seed: int) -> None:
    """Wherever the device steps aside, between a forward and its backward too."""
    expected, _ = _steps("cpu", False, lambda _: None)
    choices = random.Random(seed)

    def between(place: int) -> None:
        if place > 12 and choices.random() < 0.4:
            _toggle(choices.random() < 0.5)
        elif place % 3 == 2:
            lazy_backend.mark_step()

    _toggle(False)
    before = metrics.counter_value("RegionJump")
    found, rows = _steps("lazy", True, between)
    _toggle(False)
    assert_same([one.cpu() for one in found], expected)
    assert metrics.counter_value("RegionJump") > before
    for kind in ("module", "optimizer"):
        assert rows[kind]["as_written"]["calls run at once, as recording them takes longer"] > 0
        assert rows[kind]["replays"] > 0


def test_calls_that_a_jump_stands_for_count_as_recorded() -> None:
    seen = []

    def between(place: int) -> None:
        if place % 3 == 2:
            seen.append(_context().aside.jumped)
            lazy_backend.mark_step()

    _toggle(False)
    _steps("lazy", True, between)
    assert seen[0] == 0
    assert seen[-1] > 20  # calls of a forward, a backward and a step
    assert _context().aside.jumped == 0


def test_nothing_runs_at_once_where_nothing_may_run() -> None:
    _toggle(True)
    x = torch.ones(3).to("lazy")
    x.add_(1)
    with lazy_backend.allow_execution(False):
        x.add_(1)
        with pytest.raises(lazy_backend.ExecutionNotAllowedError):
            x.sum().item()
    assert x.tolist() == [3.0, 3.0, 3.0]


# ----- the decision


def _run(account: StretchCosts, number: int, recorded: float, at_once: float, cuts: int = 5, unseen: int = 0) -> str:
    """How so many stretches of 100 calls run; `recorded`, `at_once`: seconds of a stretch."""
    how = ""
    for _ in range(number):
        how += "a" if account.is_on else "r"
        if account.is_on:
            account.note_at_once(at_once, 100, cuts)
        else:
            account.note_recorded(recorded, 100, cuts, unseen, is_compiling=False)
    return how


def test_an_account_runs_at_once_what_is_faster_so() -> None:
    how = _run(StretchCosts(), 5000, recorded=10.0, at_once=1.0)
    assert how.startswith("r" * 8 + "a" * 300)
    assert how.count("r") < 40  # recording is tried again, ever more rarely
    assert "ar" in how


def test_an_account_records_what_is_faster_so() -> None:
    how = _run(StretchCosts(), 5000, recorded=1.0, at_once=1.0)
    assert how.startswith("r" * 8 + "aa" + "r" * 16 + "aa" + "r" * 32)
    assert how.count("a") < 30


def test_an_account_takes_recording_back_when_the_program_has_settled() -> None:
    account = StretchCosts()
    assert account.is_on or _run(account, 20, 10.0, 1.0).endswith("a" * 12)
    while account.is_on:
        account.note_at_once(1.0, 100, 5)
    account.note_recorded(0.5, 100, 0, 0, is_compiling=False)
    assert _run(account, 100, 0.5, 1.0, cuts=0) == "r" * 100
    assert metrics.counter_value("RecordedAgain: it has settled") == 1


def test_an_account_takes_recording_back_when_it_takes_no_longer() -> None:
    account = StretchCosts()
    _run(account, 1000, 10.0, 1.0)
    assert metrics.counter_value("SteppedAside: cut by reads") == 1
    assert _run(account, 5000, 1.0, 1.0).count("r") > 4000
    assert metrics.counter_value("RecordedAgain: it takes no longer") == 1
    assert "so they are recorded" in account.describe()


def test_an_account_tries_to_record_stretches_of_another_kind() -> None:
    for calls, reads in ((100, 0), (1000, 5), (10, 5)):
        account = StretchCosts()
        _run(account, 30, 10.0, 1.0)
        assert account.is_on
        account.note_at_once(1.0, calls, reads)
        assert not account.is_on


def test_hits_between_misses_are_no_evidence() -> None:
    account = StretchCosts()
    for _ in range(200):
        _run(account, 7, 10.0, 1.0, cuts=0, unseen=1)
        account.note_recorded(1.0, 100, 0, 0, is_compiling=False)
        assert not account.is_on


def test_a_compile_that_is_under_way_is_given_time() -> None:
    account = StretchCosts()
    for _ in range(60):
        account.note_recorded(10.0, 100, 5, 0, is_compiling=True)
        assert not account.is_on


def _search(x: torch.Tensor) -> float:
    for _ in range(20):
        if (x * 0.5 + 1).square().sum().item() < 0:
            break
    return x.sum().item()


def test_a_program_with_a_read_every_few_operators_steps_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy_backend.config.first_sight = "run"
    monkeypatch.setattr("lazy_backend.metrics.recording_costs._LESS", 100.0)  # whatever the machine's times are
    x = torch.ones(8).to("lazy")
    for _ in range(40):
        assert _search(x) == 8.0
    assert _context().aside.is_on
    syncs = metrics.counter_value("SyncTensorsGraph")
    assert _search(x) == 8.0
    assert metrics.counter_value("SyncTensorsGraph") == syncs
    assert "stretches after reads, cut by reads: " in str(lazy_backend.explain())
    assert metrics.counter_value("SteppedAside: cut by reads") == 1
    assert metrics.counter_value("CallAtOnce") > metrics.counter_value("StretchAtOnce") > 2
    (finding,) = [found for found in find(collect(lazy_backend.explain().lines())) if "ran at once" in found.title]
    assert "cut by reads" in finding.text
    lazy_backend.config.step_aside = False
    assert not _context().aside.is_on


def test_without_the_recorder_nothing_steps_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy_backend.config.first_sight = "run"
    monkeypatch.setattr(Aside, "count", None)
    x = torch.ones(8).to("lazy")
    for _ in range(40):
        _search(x)
    assert not _context().aside.is_on
