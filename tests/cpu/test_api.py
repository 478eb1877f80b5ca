"""The public functions under the names of `torch._lazy`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness import count, run_program

import lazy_backend
from lazy_backend import computation, config, debug, ir_cache, metrics
from lazy_backend.execution import run
from lazy_backend.tensors.contexts import contexts

# ----- step closures (after pytorch's test/lazy/test_step_closures.py)


def total() -> torch.Tensor:
    return torch.ones(3, device="lazy").sum()


def test_a_closure_has_run_when_mark_step_returns() -> None:
    seen: list[float] = []
    lazy_backend.add_step_closure(lambda value: seen.append(value.item()), (total(),))
    assert seen == []
    lazy_backend.mark_step()
    assert seen == [3.0]


def test_mark_step_does_not_wait_for_an_asynchronous_closure() -> None:
    may_run, seen = threading.Event(), []

    def closure() -> None:
        may_run.wait()
        seen.append(1)

    lazy_backend.add_step_closure(closure, run_async=True)
    lazy_backend.mark_step()
    assert seen == []
    may_run.set()
    lazy_backend.wait_device_ops()
    assert seen == [1]


def fail() -> None:
    raise RuntimeError("closure failed")


def test_an_error_of_a_closure_is_raised_by_mark_step() -> None:
    lazy_backend.add_step_closure(fail)
    with pytest.raises(RuntimeError, match="closure failed"):
        lazy_backend.mark_step()
    lazy_backend.mark_step()


@pytest.mark.parametrize("next_call", [lazy_backend.mark_step, lambda: lazy_backend.add_step_closure(print)])
def test_an_error_of_an_asynchronous_closure_is_raised_once_by_the_next_call(next_call) -> None:
    failed = threading.Event()

    def closure() -> None:
        failed.set()
        fail()

    lazy_backend.add_step_closure(closure, run_async=True)
    lazy_backend.mark_step()
    failed.wait()
    with pytest.raises(RuntimeError, match="closure failed"):
        lazy_backend.wait_device_ops()
    next_call()
    lazy_backend.mark_step()


def test_an_error_of_the_last_closure_is_printed_at_exit(tmp_path: Path) -> None:
    code = """
import sys; sys.stderr = sys.stdout
import lazy_backend
def closure(): raise RuntimeError("nobody asked")
lazy_backend.add_step_closure(closure, run_async=True)
lazy_backend.mark_step()
"""
    out = run_program(code, tmp_path)
    assert "an asynchronous step closure failed" in out
    assert "nobody asked" in out


def test_a_thread_that_logs_cuts_nothing() -> None:
    weight = torch.zeros(4, 4, device="lazy", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    logged: list[float] = []
    for _ in range(30):
        loss = ((torch.ones(4, 4, device="lazy") @ weight).tanh() - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        lazy_backend.add_step_closure(lambda value: logged.append(value.item()), (loss.detach(),), run_async=True)
        lazy_backend.mark_step()
    lazy_backend.wait_device_ops()
    assert len(logged) == 30
    assert metrics.counter_value("GraphCut") == 0


# ----- where a run happens


@pytest.mark.parametrize(
    ("setting", "threads", "wait", "is_long", "background"),
    [
        ("always", 2, True, False, True),
        ("never", 1, False, True, False),
        ("auto", 1, False, True, True),
        ("auto", 1, False, False, False),
        ("auto", 1, True, True, False),
        ("auto", 2, False, True, False),
    ],
)
def test_where_a_run_happens(
    setting: str, threads: int, wait: bool, is_long: bool, background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lazy_backend.config.run_in_background = setting
    monkeypatch.setattr(run, "_SHORT_RUN", 0.0 if is_long else 60.0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ran_on.clear()
        for _ in range(5):  # how long a run takes is known after the first two of a plan
            noted = note_thread(torch.ones(2, device="lazy"))
            lazy_backend.mark_step(wait=wait)
        lazy_backend.wait_device_ops()
    finally:
        torch.set_num_threads(before)
    assert noted.tolist() == [1.0, 1.0]
    assert (ran_on[-1] is not threading.main_thread()) == background


@pytest.mark.parametrize(("setting", "background"), [("always", True), ("auto", False)])
def test_a_read_runs_what_it_needs_itself(setting: str, background: bool) -> None:
    lazy_backend.config.run_in_background = setting
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ran_on.clear()
        assert note_thread(torch.ones(2, device="lazy")).tolist() == [1.0, 1.0]
    finally:
        torch.set_num_threads(before)
    assert (ran_on[-1] is not threading.main_thread()) == background


@pytest.mark.parametrize("setting", ["always", "never"])
@pytest.mark.parametrize("wait", [lambda made: lazy_backend.mark_step(wait=True), lambda made: made.sum().item()])
def test_a_wait_is_no_part_of_the_next_recording(setting: str, wait: Callable[[torch.Tensor], object]) -> None:
    lazy_backend.config.run_in_background = setting
    wait(sleep_a_little(torch.ones(2, device="lazy")))
    torch.ones(2, device="lazy").add_(1)
    lazy_backend.mark_step()
    first, second = lazy_backend.explain().records
    assert first.run_seconds is not None
    assert first.run_seconds >= 0.3
    assert second.trace_seconds < 0.2


@torch.library.custom_op("lazy_test::sleep_a_little", mutates_args=())
def sleep_a_little(x: torch.Tensor) -> torch.Tensor:
    time.sleep(0.3)
    return x.clone()


@sleep_a_little.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


ran_on: list[threading.Thread] = []


@torch.library.custom_op("lazy_test::note_thread", mutates_args=())
def note_thread(x: torch.Tensor) -> torch.Tensor:
    ran_on.append(threading.current_thread())
    return x.clone()


@note_thread.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


# ----- reads


def test_a_read_of_what_is_computed_cuts_nothing() -> None:
    computed = torch.ones(3, device="lazy") + 1
    lazy_backend.mark_step()
    pending = computed * 2
    with count("GraphCut") as cuts:
        assert computed.tolist() == [2.0, 2.0, 2.0]
    assert cuts() == 0
    assert pending.tolist() == [4.0, 4.0, 4.0]


def test_a_read_of_what_is_under_way_waits_and_cuts_nothing() -> None:
    release = threading.Event()
    contexts.get_device_context(0).queue.add(release.wait)
    computed = torch.ones(3, device="lazy") + 1
    lazy_backend.mark_step()
    pending = computed * 2
    threading.Timer(0.2, release.set).start()
    with count("GraphCut") as cuts:
        assert computed.tolist() == [2.0, 2.0, 2.0]
    assert cuts() == 0
    assert pending.tolist() == [4.0, 4.0, 4.0]


def test_a_read_of_what_is_written_in_this_step_sees_the_write() -> None:
    computed = torch.ones(3, device="lazy") + 1
    view = computed[1:]
    lazy_backend.mark_step()
    view.mul_(5)
    assert computed.tolist() == [2.0, 10.0, 10.0]


def test_nothing_is_computed_twice() -> None:
    x = total()
    x.item()
    with count("SyncTensorsGraph") as syncs:
        x.item()
        lazy_backend.mark_step()
    assert syncs() == 0


def test_sync_multi_computes_the_tensors() -> None:
    x, y = total(), total()
    lazy_backend.sync_multi([x])
    with count("GraphCut") as cuts:
        assert (x.item(), y.item()) == (3.0, 3.0)
    assert cuts() == 0


# ----- looking


def test_dump_ir_text() -> None:
    text = debug.dump_ir([total() * 0.5], "text")
    assert "aten.mul(%1, c0)  # " in text
    assert "test_api.py:" in text


def test_dump_ir_backend() -> None:
    assert "torch.ops.aten.sum.default" in debug.dump_ir([total()], "backend")


def test_dump_ir_of_another_format() -> None:
    with pytest.raises(ValueError, match="expected 'text', 'dot', 'fx' or 'backend'"):
        debug.dump_ir([total()], "xml")


def test_looking_runs_nothing() -> None:
    x = total()
    with count("SyncTensorsGraph") as syncs:
        debug.dump_ir([x])
        debug.render_ir_graph([x])
        computation.get_graph_hash([x])
    assert syncs() == 0
    assert x.item() == 3.0


def test_render_ir_graph() -> None:
    x = torch.ones(2, device="lazy")
    x.add_(1)
    dot = debug.render_ir_graph([x])
    assert dot.startswith("digraph G {")
    assert "n0 -> n1" in dot


def test_a_graph_hash_names_the_program_in_every_process(tmp_path: Path) -> None:
    code = """
import torch, lazy_backend
lazy_backend.config.compile = "foreground"
lazy_backend.config.backend = "eager"
print(lazy_backend.computation.get_graph_hash([torch.ones(3, device="lazy").sum()]))
"""
    assert run_program(code, tmp_path).split() == [computation.get_graph_hash([total()])]


def test_a_graph_hash_takes_lazy_tensors() -> None:
    with pytest.raises(TypeError, match="expected lazy tensors, got one on cpu"):
        computation.get_graph_hash([torch.ones(2)])


def test_ir_cache(tmp_path: Path) -> None:
    total()
    ir_cache.dump(str(tmp_path / "trie.dot"))
    assert "aten.sum" in (tmp_path / "trie.dot").read_text()
    x = total()
    ir_cache.reset()
    assert x.item() == 3.0


def test_debug_states() -> None:
    for _ in range(3):
        total().item()
    (state,) = computation.get_debug_states().values()
    assert (state.runs, state.plan, state.compiles) == (3, "optimized", 1)


# ----- metrics


def test_counters_have_the_names_of_ltc() -> None:
    total().item()
    torch.nonzero(torch.ones(2, device="lazy"))
    lazy_backend.mark_step()
    names = {"MarkStep", "UncachedCompile", "CreateLtcTensor", "lazy::sum", "aten::nonzero"}
    assert names <= set(metrics.counter_names())
    assert metrics.counter_value("lazy::sum") == 1


def test_equal_host_constants_are_uploaded_once() -> None:
    for _ in range(3):
        _ = torch.ones(2, device="lazy") * torch.tensor(0.12345)
    assert metrics.counter_value("DeviceDataCacheMiss") <= 1
    assert metrics.counter_value("DeviceDataCacheHit") >= 2


def test_reset_sets_everything_to_zero() -> None:
    total().item()
    metrics.reset()
    assert metrics.counter_names() == []
    assert metrics.metric_names() == []


def test_reports() -> None:
    total().item()
    assert "Counter: lazy::sum" in metrics.metrics_report()
    assert "Metric: ExecuteTime" in metrics.metrics_report()
    assert "GraphCut: item() at " in metrics.short_report()


def test_torch_lazy_reaches_this_package(tmp_path: Path) -> None:
    code = """
import torch, torch._lazy, lazy_backend
x = torch.ones(2, device="lazy")
torch._lazy.mark_step()
torch._lazy.wait_device_ops()
print(lazy_backend.metrics.counter_value("MarkStep"))
"""
    assert run_program(code, tmp_path) == "1\n"


# ----- which plan runs: TorchScript's words


def doubled() -> torch.Tensor:
    made = torch.ones(3, device="lazy") * 2
    lazy_backend.mark_step()
    return made


def test_the_strategy_is_the_settings() -> None:
    assert lazy_backend.get_fusion_strategy() == [("static", 1), ("dynamic", 3)]
    assert lazy_backend.set_fusion_strategy([("STATIC", 2), ("DYNAMIC", 5)]) == [("static", 1), ("dynamic", 3)]
    assert (config.max_static_shapes, config.max_dynamic_shapes) == (2, 5)
    config.max_static_shapes = 7
    assert lazy_backend.get_fusion_strategy() == [("static", 7), ("dynamic", 5)]


def test_a_strategy_is_set_back_with_what_was_returned() -> None:
    before = lazy_backend.set_fusion_strategy([("dynamic", 1)])
    assert lazy_backend.set_fusion_strategy(before) == [("static", 0), ("dynamic", 1)]
    assert lazy_backend.get_fusion_strategy() == before


@pytest.mark.parametrize("entries", [[("dynamic", 1), ("static", 1)], [("static", -1)], [("lazy", 1)]])
def test_a_strategy_that_means_nothing_is_refused(entries: list[tuple[str, int]]) -> None:
    with pytest.raises(ValueError, match=r"cannot stand there\n  expected \[\(\"static\", k\)"):
        lazy_backend.set_fusion_strategy(entries)
    assert lazy_backend.get_fusion_strategy() == [("static", 1), ("dynamic", 3)]


@pytest.mark.parametrize(("depth", "static", "dynamic"), [(0, 0, 0), (1, 1, 0), (2, 1, 1), (9, 1, 8)])
def test_the_bailout_depth_is_the_number_of_plans(depth: int, static: int, dynamic: int) -> None:
    assert lazy_backend.set_bailout_depth(depth) == 4
    assert lazy_backend.get_bailout_depth() == depth
    assert lazy_backend.get_fusion_strategy() == [("static", static), ("dynamic", dynamic)]


def test_a_depth_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match=r"set_bailout_depth\(-1\): expected a whole number"):
        lazy_backend.set_bailout_depth(-1)


def test_one_graphs_state_by_its_hash() -> None:
    pending = torch.ones(3, device="lazy") * 2
    name = computation.get_graph_hash([pending])
    lazy_backend.mark_step()
    assert (computation.is_optimized(name), computation.get_debug_state(name).runs) == (False, 1)
    del pending
    doubled()
    assert computation.is_optimized(name)
    assert computation.get_debug_states() == {name: computation.get_debug_state(name)}


@pytest.mark.parametrize("one", [True, False])
def test_flushed_plans_are_compiled_anew(one: bool) -> None:
    doubled(), doubled()
    (name,) = computation.get_debug_states()
    computation.debug_flush_compilation_cache(name if one else None)
    assert computation.get_debug_state(name).plan == "profiling"
    with count("Compile") as compiles:
        doubled(), doubled()
    assert (compiles(), computation.is_optimized(name)) == (1, True)


def test_a_hash_that_nobody_has() -> None:
    with pytest.raises(LookupError, match="no cached computation has the hash 'abc'"):
        computation.get_debug_state("abc")


def test_a_captured_step_goes_on_after_its_graph_was_set_aside() -> None:
    config.release_delay_seconds = 0.0
    step = lazy_backend.capture(lambda x, factor: x * factor)
    x = torch.ones(3).to("lazy")
    for _ in range(6):
        assert step(x, 2.0).tolist() == [2.0] * 3
    assert [state.released for state in computation.get_debug_states().values()] == [True]
    assert step(x, 3.0).tolist() == [3.0] * 3
