"""Compiled plans are tried beside the interpreter before they are used."""

from __future__ import annotations

import contextlib
import ctypes
import re
import signal
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import count, run_python
from interruption import Interrupted, interrupt, places_of, raise_interrupted
from planted_faults import plant
from random_loops import RandomLoop, Statement, as_it_is
from random_loops import _run as run_loop
from torch import fx, nn
from torch.nn import functional as F

import lazy_backend
from lazy_backend import CompileWarning, config, metrics
from lazy_backend.archives import commands
from lazy_backend.lowering.checks import moved_roundings, rounding
from lazy_backend.lowering.checks.proof import Proof
from lazy_backend.lowering.checks.rounding import Spread, difference, is_suspect
from lazy_backend.lowering.collectives.conversation import joined
from lazy_backend.lowering.interpreter import serial
from lazy_backend.lowering.plans import evidence, profiling, trial
from lazy_backend.settings import FLAGS

aten = torch.ops.aten
EPS = torch.finfo(torch.float32).eps


@pytest.fixture(autouse=True)
def tried() -> None:
    config.verify_compiled = "once"
    config.backend = "aot_eager"
    config.num_profiled_runs = 0


def counts() -> tuple[int, int]:
    return metrics.counter_value("PlanAgreed"), metrics.counter_value("PlanRefused")


Alter = Callable[[fx.Node, Any, Sequence[Any]], Any]


def with_fault(alter: Alter) -> Callable[..., Any]:
    """A backend whose code gives `alter(node, result, arguments)` in place of each result."""

    class Faulty(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            made = super().run_node(n)
            return alter(n, made, self.fetch_args_kwargs_from_env(n)[0]) if n.op == "call_function" else made

    def backend(module: fx.GraphModule, examples: list[torch.Tensor]) -> Callable[..., Any]:
        return lambda *args: Faulty(module).run(*args)

    return backend


def with_wrong_results(module: fx.GraphModule, examples: list[torch.Tensor]) -> Callable[..., Any]:
    """A backend whose code is wrong whatever is left to other kernels."""
    return lambda *args: [made * 0.67 for made in module(*args)]


def step(x: torch.Tensor) -> torch.Tensor:
    result = (x * 2).exp() + 1
    lazy_backend.mark_step()
    return result.cpu()


def test_a_plan_that_agrees_is_used_from_the_next_run_on() -> None:
    x = torch.rand(4).to("lazy")
    runs = [step(x) for _ in range(3)]
    assert [record.plan for record in lazy_backend.explain().records if record.plan][-3:] == [
        "interpreted, beside a compiled plan on trial",
        "compiled",
        "compiled",
    ]
    assert counts() == (1, 0)
    assert torch.equal(runs[0], runs[2])


def test_a_plan_that_computes_something_else_is_never_used() -> None:
    config.backend = with_wrong_results
    x = torch.rand(4).to("lazy")
    expected = (x.cpu() * 2).exp() + 1
    with pytest.warns(CompileWarning, match=r"f32\[4\] differs by .*: aten.add recorded at .*test_trials.py:") as told:
        runs = [step(x) for _ in range(8)]
    assert all(torch.equal(run, expected) for run in runs)
    assert counts() == (0, 1)
    assert len(told) == 1
    (graph,) = [state for state in lazy_backend.computation.get_debug_states().values() if state.error]
    assert graph.plan == "fallback"
    assert "refused" in [compiled.outcome for compiled in lazy_backend.explain().compiles]


def test_what_a_refused_plan_writes_is_written_by_the_interpreter() -> None:
    config.backend = with_fault(lambda node, made, args: made.mul_(2) if node.target is aten.add_.Tensor else made)
    weight, expected = torch.ones(3).to("lazy"), torch.ones(3)
    lazy_backend.mark_step()
    with warnings.catch_warnings(action="ignore", category=CompileWarning):
        for _ in range(4):
            weight.add_(1)
            expected.add_(1)
            lazy_backend.mark_step()
    assert torch.equal(weight.cpu(), expected)
    assert counts()[0] == 0
    assert counts()[1] > 0


def test_off_tries_nothing_and_always_tries_every_run() -> None:
    config.verify_compiled = "off"
    x = torch.rand(4).to("lazy")
    step(x)
    assert counts() == (0, 0)
    config.verify_compiled = "always"
    for _ in range(3):
        (x - 3).tan()
        step(x + 1)
    assert counts() == (3, 0)


def test_an_error_of_the_plan_alone_refuses_it() -> None:
    def fail(node: fx.Node, made: Any, args: Sequence[Any]) -> Any:
        raise RuntimeError("a fault of the compiler")

    config.backend = with_fault(fail)
    x = torch.rand(4).to("lazy")
    with pytest.warns(CompileWarning, match="a fault of the compiler"):
        runs = [step(x) for _ in range(8)]
    assert all(torch.equal(run, runs[0]) for run in runs)
    assert counts() == (0, 1)


def test_an_error_of_the_program_is_no_verdict() -> None:
    def look_up(places: list[int]) -> torch.Tensor:
        result = torch.index_select(torch.arange(4.0).to("lazy"), 0, torch.tensor(places).to("lazy")).exp()
        lazy_backend.mark_step(wait=True)  # raises it
        return result.cpu()

    with pytest.raises(lazy_backend.ExecutionError, match="index"):
        look_up([1, 7])
    assert counts() == (0, 0)
    look_up([1, 2])
    assert counts() == (1, 0)


@pytest.mark.parametrize("where", ["differences", "copy_of"])
def test_without_memory_for_a_trial_a_plan_is_used_untried(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*tensors: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(rounding, where, out_of_memory)
    x = torch.rand(4).to("lazy")
    runs = [step(x) for _ in range(3)]
    assert torch.equal(runs[0], runs[2])
    assert (*counts(), metrics.counter_value("PlanUnverified")) == (0, 0, 1)


def test_an_interrupted_trial_has_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    config.run_in_background = "never"
    x = torch.rand(4).to("lazy")
    with monkeypatch.context() as patches:
        patches.setattr(rounding, "differences", lambda *tensors: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            step(x)
    step(x)
    assert counts() == (1, 0)


def lines_that_lose_results() -> set[str]:
    """The lines at which an exception leaves a step's write done and its result lost."""
    weight = torch.ones(()).to("lazy")
    made: list[torch.Tensor] = []

    def step() -> None:
        made[:] = [weight * 3]
        weight.add_(1)
        lazy_backend.mark_step()

    for _ in range(4):
        step()
    found = set()
    for place, number in places_of(step).items():
        for time in {1, number}:
            made.clear()
            before = weight.cpu()
            with contextlib.suppress(Interrupted):
                interrupt(step, place, time, raise_interrupted)
            with contextlib.suppress(lazy_backend.LazyBackendError):
                lazy_backend.wait_device_ops()
            if is_written := not torch.equal(weight.cpu(), before):
                assert torch.equal(weight.cpu(), before + 1), place
            try:
                assert all(torch.equal(one.cpu(), before * 3) for one in made), place
            except lazy_backend.LazyBackendError:
                if is_written:
                    found.add(f"{place[0]}:{place[1]}")
    return found


@pytest.fixture
def suspected_at_each_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each run is a trial, with runs with moved roundings."""
    config.verify_compiled = "always"
    monkeypatch.setattr(rounding, "is_suspect", lambda *found: True)
    agreed = Proof.agree

    def still_suspected(proof: Proof, sizes: Sequence[int]) -> None:
        agreed(proof, sizes)
        proof.is_suspected = True

    monkeypatch.setattr(Proof, "agree", still_suspected)
    yield
    joined.now = None  # exceptions were raised also at the line that does this


def test_an_exception_at_any_line_of_a_trial_loses_no_result_of_the_interpreter(suspected_at_each_run: None) -> None:
    config.run_in_background = "never"
    config.compile = "off"
    interpreted = lines_that_lose_results()
    assert interpreted  # a run that is interrupted after a write
    config.compile = "foreground"
    with count("PlanAgreed") as agreements:
        lost = lines_that_lose_results()
    assert agreements() > 100
    assert lost <= interpreted


class OutOfTime(Exception):
    """Raised from outside of what runs."""

    def __init__(self) -> None:
        super().__init__("out of time")


def from_a_signal_handler() -> None:
    signal.raise_signal(signal.SIGUSR1)


def from_another_thread() -> None:
    """As another thread sends it: it is raised at one of this thread's next instructions."""
    this = ctypes.c_ulong(threading.get_ident())
    ctypes.pythonapi.PyThreadState_SetAsyncExc(this, ctypes.py_object(OutOfTime))
    for _ in range(1000):
        pass


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    def handler(number: int, frame: Any) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def suspicions() -> list[int]:
    return [metrics.counter_value(name) for name in ("PlanAgreed", "PlanSuspected", "PlanRefused")]


@pytest.mark.parametrize("interruption", [from_a_signal_handler, from_another_thread])
@pytest.mark.parametrize("number", [0, 1])
def test_an_error_from_outside_is_no_fault_of_the_plan(interruption: Callable[[], None], number: int) -> None:
    """Neither in its first trial nor in the one that asks what rounding explains."""

    def interrupted(node: fx.Node, made: Any, args: Sequence[Any]) -> Any:
        if node.target is not aten.mul.Tensor:
            return made
        runs[0] += 1
        if runs[0] == number + 1:
            interruption()
        return made.mul_(1 + 40 * EPS) if number else made

    config.run_in_background = "never"
    config.backend = with_fault(interrupted)
    runs = [0]
    x = torch.ones(2).to("lazy")
    for _ in range(number):
        (x * 2 + 1).tolist()
        lazy_backend.mark_step(wait=True)
    before = suspicions()
    result = x * 2 + 1
    # what another thread sends shows no handler that raised it
    told = OutOfTime if interruption is from_a_signal_handler else lazy_backend.ExecutionError
    with signals_raise(), pytest.raises(told, match="out of time"):
        lazy_backend.mark_step(wait=True)
    assert result.tolist() == [3.0, 3.0]
    assert suspicions() == before


def test_an_exception_at_any_line_of_a_trial_is_no_fault_of_the_plan(suspected_at_each_run: None) -> None:
    config.run_in_background = "never"
    x = torch.rand(4).to("lazy")

    def tried() -> torch.Tensor:
        made = (x * 2).exp()
        lazy_backend.mark_step(wait=True)
        return made

    def raise_it() -> None:
        raise OutOfTime

    for _ in range(3):
        tried()
    files = (trial.__file__, rounding.__file__, moved_roundings.__file__, serial.__file__)
    places = {place: number for place, number in places_of(tried).items() if place[0] in files}
    assert len(places) > 30
    left = 0
    for place, number in places.items():
        for which in {1, number}:
            with pytest.raises((OutOfTime, lazy_backend.ExecutionError)):
                interrupt(tried, place, which, raise_it)
            left += joined.now is not None
            with contextlib.suppress(lazy_backend.LazyBackendError):
                lazy_backend.wait_device_ops()
    assert suspicions()[1:] == [0, 0]
    assert left <= 2  # at the line that resets it


def test_a_bias_before_a_batch_norm_is_not_the_compilers_fault() -> None:
    """Its gradient is rounding alone, which Adam makes as large as any."""
    config.backend = with_fault(lambda node, made, args: made + 1e-8 if node.target is aten.sum.dim_IntList else made)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)).to("lazy")
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(64, 8).to("lazy")
    for _ in range(6):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        lazy_backend.mark_step()
    assert metrics.counter_value("PlanSuspected")
    assert counts()[1] == 0


def test_noise_by_whose_sign_an_optimizer_steps_is_not_the_compilers_fault() -> None:
    """The gradient of the bias of attention's keys is rounding alone, and Rprop goes by its sign."""
    config.backend = "aot_eager_decomp_partition"
    config.num_profiled_runs = 1
    loop = RandomLoop(
        500096,  # eager's noise is so far from zero here that moves by one rounding hardly change its sign
        (
            Statement("setup", "model = capture(build(['encoder'], head='tuple').to(device))"),
            Statement("setup", "optimizer = capture(torch.optim.Rprop(model.parameters()))"),
            Statement("input", "x = torch.randn(3 if step % 5 == 4 else 4, 8).to(device)"),
            Statement("zero", "optimizer.zero_grad()", "step % 2 == 0"),
            Statement("forward", "out = model(x, other=x.detach())"),
            Statement("between", "loss = loss_of(out)"),
            Statement("backward", "backward(loss)"),
            Statement("update", "optimizer.step()", "step % 2 == 1"),
            Statement("end", "values.append(loss.item())"),
        ),
        num_steps=9,
    )
    run_loop(loop.program(), "lazy", as_it_is)
    assert counts() == (2, 0)
    if not metrics.counter_value("PlanSuspected"):
        pytest.skip("the kernels for this processor round so that nothing looks like a fault")


def test_memory_that_nobody_has_written_has_no_value_to_compare() -> None:
    config.backend = with_fault(
        lambda node, made, args: made.fill_(7) if node.target is aten.empty.memory_format else made
    )
    for _ in range(3):
        buffer = torch.empty(4, device="lazy")
        buffer[:2] = torch.rand(2).to("lazy")
        buffer.mul_(2)
        lazy_backend.mark_step()
    assert counts()[1] == 0


@pytest.mark.parametrize(
    ("write", "hiding", "showing"),
    [
        (lambda x: x.view(1, 8).expand(1, 8).mul_(-1.0), torch.ones(8), torch.zeros(8)),
        (lambda x: x.unfold(0, 2, 3).mul_(2.0), torch.zeros(8), torch.ones(8)),
    ],
    ids=["expand", "unfold"],
)
def test_values_hide_from_a_trial_what_is_declined(
    write: Callable[[torch.Tensor], object],
    hiding: torch.Tensor,
    showing: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that trials do not replace `why_not_functional`."""

    def is_right(values: torch.Tensor) -> bool:
        x, expected = values.to("lazy"), values.clone()
        lazy_backend.mark_step()
        write(x)
        lazy_backend.mark_step()
        write(expected)
        found = x.cpu()
        return torch.equal(found, expected) and torch.equal(found.signbit(), expected.signbit())

    monkeypatch.setattr(profiling, "why_not_functional", lambda graph: None)
    assert [is_right(hiding) for _ in range(3)] == [True] * 3
    assert counts() == (1, 0)
    assert not is_right(showing)


# ----- what is kept


def inductor_step(x: torch.Tensor) -> torch.Tensor:
    result = torch.softmax(x * 3, 0).cumsum(0)
    lazy_backend.mark_step()
    lazy_backend.wait_for_compiles()
    return result.cpu()


def settle_marks() -> None:
    for thread in threading.enumerate():
        if thread.name == "lazy_backend marks":
            thread.join()


def as_another_process(**settings: Any) -> None:
    settle_marks()
    lazy_backend.compat.runtime.reset()
    for name, value in settings.items():
        setattr(config, name, value)


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[dict[str, Any]]:
    settings: dict[str, Any] = {"backend": "inductor", "cache": True, "cache_dir": str(tmp_path / "kept")}
    with config.patch(**settings):
        yield settings
        settle_marks()


def test_the_next_process_tries_nothing(kept: dict[str, Any]) -> None:
    x = torch.rand(40).to("lazy")
    for _ in range(2):
        inductor_step(x)
    assert counts() == (1, 0)
    as_another_process()
    x = torch.rand(40).to("lazy")
    for _ in range(3):
        inductor_step(x)
    assert counts() == (0, 0)
    assert metrics.counter_value("DiskCacheHit") >= 1
    assert lazy_backend.explain().records[-1].plan == "compiled"


def test_the_next_process_knows_what_was_repaired(kept: dict[str, Any]) -> None:
    def pooled() -> torch.Tensor:
        x = torch.arange(24.0).reshape(1, 2, 12).to("lazy").requires_grad_()
        F.avg_pool1d(x, 3, 2, ceil_mode=True).square().sum().backward()
        lazy_backend.mark_step()
        lazy_backend.wait_for_compiles()
        assert x.grad is not None
        return x.grad.cpu()

    x = torch.arange(24.0).reshape(1, 2, 12).requires_grad_()
    F.avg_pool1d(x, 3, 2, ceil_mode=True).square().sum().backward()
    for tries in (True, False):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            runs = [pooled() for _ in range(9)]
        assert len(told) == tries
        assert all("the fault is in aten.avg_pool2d_backward recorded at" in str(one.message) for one in told)
        assert all(torch.allclose(run, x.grad) for run in runs)  # type: ignore[arg-type]
        assert counts() == (tries, tries)
        assert metrics.counter_value("PlanRepaired") == 1
        assert (metrics.metric_data("TrialTime") is not None) == tries
        assert lazy_backend.explain().records[-1].plan == "compiled"
        as_another_process()


def train_with_a_bias_that_is_rounding_alone(steps: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)).to("lazy")
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(64, 8).to("lazy")
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        lazy_backend.mark_step(wait=True)
        lazy_backend.wait_for_compiles()


@pytest.mark.parametrize("compile", ["foreground", "background"])
def test_rounding_is_judged_by_the_compilers_process(
    compile: Any, kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config.compile = compile
    monkeypatch.setattr(trial, "unexplained", lambda *run: pytest.fail("judged in this process"))
    train_with_a_bias_that_is_rounding_alone(8)
    assert metrics.counter_value("PlanSuspected")
    assert counts()[0] >= 1
    assert counts()[1] == 0
    assert lazy_backend.explain().records[-1].plan == "compiled"


@pytest.mark.parametrize("failing", ["thread", "file", "process"])
def test_what_cannot_be_judged_elsewhere_is_judged_here(
    failing: str, kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if failing == "thread":
        start = threading.Thread.start

        def start_others(thread: threading.Thread) -> None:
            if thread.name == "lazy_backend evidence":
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", start_others)
    elif failing == "file":
        monkeypatch.setattr(evidence, "Evidence", lambda *run: (_ for _ in ()).throw(OSError("the disk is full")))
    else:
        judge = evidence.worker.judge
        monkeypatch.setattr(evidence.worker, "judge", lambda path, idle: judge(path + " is not there", idle))
    train_with_a_bias_that_is_rounding_alone(8)
    assert metrics.counter_value("PlanSuspected")
    assert counts()[0] >= 1
    assert counts()[1] == 0
    assert lazy_backend.explain().records[-1].plan == "compiled"


def test_a_refused_plan_leaves_a_program_that_shows_it(kept: dict[str, Any], capsys: Any, tmp_path: Path) -> None:
    with warnings.catch_warnings(action="ignore", category=CompileWarning):
        for _ in range(4):
            x = torch.arange(24.0).reshape(1, 2, 12).to("lazy").requires_grad_()
            F.avg_pool1d(x, 3, 2, ceil_mode=True).square().sum().backward()
            lazy_backend.mark_step()
            lazy_backend.wait_for_compiles()
    settle_marks()
    assert commands.main(["--dir", kept["cache_dir"], "repro"]) == 0
    (listed,) = [line for line in capsys.readouterr().out.splitlines() if line[0] != " "]
    assert "differs by" in listed
    assert commands.main(["--dir", kept["cache_dir"], "repro", listed.split()[0]]) == 0
    script = capsys.readouterr().out
    assert "lazy_backend" not in script
    assert script.count("torch.ops.") == 1
    assert re.search(r"float32\[1, 2, 1, 12\] differs by [\d.]+ of", run_python(script, tmp_path))
    assert commands.main(["--dir", str(tmp_path / "other"), "repro"]) == 1


def test_each_class_of_sizes_has_a_trial() -> None:
    proof = Proof("once")
    for sizes, is_new in (((32,), True), ((64,), False), ((33,), True), ((3,), True), ((5,), False)):
        assert proof.covers(sizes) is not is_new
        proof.agree(sizes)


def test_a_plan_for_many_shapes_is_tried_again_at_other_classes(kept: dict[str, Any]) -> None:
    config.max_static_shapes = 0
    for size in (20, 24, 48, 64, 20, 24):
        inductor_step(torch.rand(size).to("lazy"))
    assert counts() == (2, 0)


# ----- rounding


def test_equal_nans_and_infinities_agree() -> None:
    one = torch.tensor([1.0, float("nan"), float("inf"), -float("inf")])
    assert not is_suspect(difference(one, one.clone()), EPS)
    for other in ([1.0, 2.0, float("inf"), -float("inf")], [1.0, float("nan"), float("inf"), float("inf")]):
        assert is_suspect(difference(one, torch.tensor(other)), EPS)


# Without quantized ones, and integers of less than a byte, which PyTorch does not even copy.
_STORABLE = sorted(
    {one for one in vars(torch).values() if isinstance(one, torch.dtype) and not re.search("q|int[1-7]$", str(one))},
    key=str,
)


def _bytes_as(dtype: torch.dtype, byte: int) -> torch.Tensor:
    numbers = torch.zeros(4, 16, dtype=torch.uint8)
    numbers[2, -1] = byte
    return numbers.view(dtype)


@pytest.mark.parametrize("dtype", _STORABLE, ids=str)
def test_results_of_every_dtype_are_compared(dtype: torch.dtype) -> None:
    ours, theirs = _bytes_as(dtype, 1), _bytes_as(dtype, 1)
    other = _bytes_as(dtype, 60 if dtype is not torch.bool else 0)
    assert rounding.differences([ours], [theirs]) == {}
    (found,) = rounding.differences([ours], [other]).values()
    assert is_suspect(found, EPS)
    spread = Spread(ours)
    spread.add(theirs)
    assert spread.unexplained(theirs, EPS) is None
    assert spread.unexplained(other, EPS) is not None


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8])
def test_one_integer_that_differs_is_suspected(dtype: torch.dtype) -> None:
    one = torch.zeros(1000, dtype=dtype)
    other = one.clone()
    assert not is_suspect(difference(one, other), EPS)
    other[7] = 1
    assert is_suspect(difference(one, other), EPS)


def test_a_choice_that_hangs_on_a_tie_explains_its_own_element_alone() -> None:
    ours = torch.rand(100)
    spread, moved = Spread(ours), ours.clone()
    moved[3] += 1
    spread.add(moved)
    assert spread.unexplained(moved, EPS) is None
    moved[4] += 1
    assert spread.unexplained(moved, EPS) is not None


def test_ties_of_most_elements_explain_no_other_element() -> None:
    ours = torch.rand(100)
    spread, moved, wrong = Spread(ours), ours.clone(), ours.clone()
    moved[:60] += 1
    spread.add(moved)
    wrong[80] += 1
    assert spread.unexplained(wrong, EPS) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_one_wrong_element_of_a_million_is_suspected(dtype: torch.dtype) -> None:
    one = torch.randn(1_000_000, dtype=dtype)
    eps = torch.finfo(dtype).eps
    rounded = (one * (1 + eps)).to(dtype)
    assert not is_suspect(difference(one, rounded), eps)
    rounded[77] += 1
    assert is_suspect(difference(one, rounded), eps)


def test_a_copy_is_laid_out_as_the_original() -> None:
    whole = torch.randn(4, 6)
    for view in (whole, whole.t(), whole[1:, 2:5], whole[:, 0], whole[0].expand(3, 6), torch.tensor(3.0), whole[:0]):
        copy = rounding.copy_of(view)
        assert (copy.shape, copy.stride(), copy.storage_offset()) == (view.shape, view.stride(), view.storage_offset())
        assert torch.equal(copy, view)
        assert copy.untyped_storage().data_ptr() != view.untyped_storage().data_ptr() or not view.numel()


# ----- planted faults


@pytest.mark.parametrize("block", range(8))
def test_planted_faults_are_found(block: int) -> None:
    with warnings.catch_warnings(action="ignore", category=CompileWarning):
        outcomes = {seed: plant(seed) for seed in range(60 * block, 60 * block + 60)}
    found = Counter(outcome for _, outcome in outcomes.values())
    assert set(found) <= {"refused", "none"}, outcomes
    assert found["refused"] >= 20


def test_the_setting_has_a_help() -> None:
    assert "interpreter" in FLAGS["verify_compiled"].help


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fn], ids=["e5m2", "e4m3fn"])
def test_floats_of_eight_bits_do_not_hide_a_fault(dtype: torch.dtype) -> None:
    config.compile, config.compile_after_operators = "foreground", 0
    config.backend = lambda module, examples: lambda *args: tuple(one * 1.5 for one in module(*args))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CompileWarning)
        for step in range(5):
            x = torch.full((4,), 1.0 + step, device="lazy")
            y = x.to(dtype).float() * 0 + x * 3
            lazy_backend.mark_step(wait=True)
            assert y.tolist() == [3 * (1.0 + step)] * 4
    assert counts() == (0, 1)
