"""The debug ladder, pictures of graphs, ranges in PyTorch's profiler, and the timeline."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import grid, run_program
from torch import nn

import lazy_backend
from lazy_backend import config, debug
from lazy_backend.lowering.ir.shapes import Sizes

# ----- the ladder

PROGRAM = """
import torch, lazy_backend
model = torch.nn.Linear(4, 2).to("lazy")
for size in (3, 3, 3, 5):
    loss = model(torch.ones(size, 4).to("lazy")).sum() * 0.5
    lazy_backend.mark_step()
print(loss.item())
"""
SETTINGS = {"LAZY_BACKEND_BACKEND": "aot_eager", "LAZY_BACKEND_COMPILE": "foreground", "LAZY_BACKEND_CACHE": "0"}

# what each level adds
ADDED = {
    1: [
        "step 3, program 1 (4 calls): hit, level 1, compiled",
        "unlike program 1 in shape, at call 1",
        "a graph of 4 nodes",
    ],
    2: [" ms, wait 0.", "ran, interpreted, in ", "ran, compiled, in "],
    3: ["before prune and number:", "slot0: f32[4, 2]{1,4} in input0 = aten.t.default", "after prune and number:\n"],
    4: ["FX code of that graph:", "def forward(self, input_0"],
}


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """What one program writes at each level. The top level runs in CI, so that it cannot rot."""
    folder = tmp_path_factory.mktemp("ladder")
    for level in range(5):
        log = str(folder / f"{level}-%p.log")
        assert run_program(PROGRAM, folder, **SETTINGS, LAZY_DEBUG=str(level), LAZY_DEBUG_FILE=log)
    written = {level: [*folder.glob(f"{level}-*.log")] for level in range(5)}
    assert all(not file.name.endswith("%p.log") for files in written.values() for file in files)
    return {level: "".join(file.read_text() for file in files) for level, files in written.items()}


@pytest.mark.parametrize("level", range(5))
def test_each_level_adds_its_lines(printed: dict[int, str], level: int) -> None:
    plain = printed[level].replace("lazy_backend: ", "")
    for added, texts in ADDED.items():
        for text in texts:
            assert (text in plain) == (added <= level), (text, plain)


def test_every_line_is_marked(printed: dict[int, str]) -> None:
    assert all(line.startswith("lazy_backend: ") for line in printed[4].splitlines())


def test_level_1_is_a_line_per_hit(printed: dict[int, str]) -> None:
    (line,) = [line for line in printed[1].splitlines() if "step 3, program 1" in line]
    assert line.startswith("lazy_backend: lazy:0 graph #1 ")
    assert line.endswith(" step 3, program 1 (4 calls): hit, level 1, compiled, by mark_step at <string>:6")


def synced() -> torch.Tensor:
    made = torch.ones(2, device="lazy") + 1
    lazy_backend.mark_step(wait=True)
    return made


def test_without_a_file_it_is_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with config.patch(debug=1):
        synced()
    assert "program 1 (2 calls): miss, interpreted" in capsys.readouterr().err


def test_the_file_is_appended_to(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_text("before\n")
    with config.patch(debug=1, debug_file=str(file)):
        synced()
    assert file.read_text().startswith("before\nlazy_backend: ")


def test_a_file_that_cannot_be_written_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with config.patch(debug=1, debug_file=str(tmp_path / "missing" / "log")):
        synced()
        synced()
    error = capsys.readouterr().err
    assert error.count("cannot be written") == 1
    assert error.count("program 1 (2 calls)") == 2


def test_debug_keeps_no_records_that_explain_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    with config.patch(debug=1, explain=False):
        synced()
    assert capsys.readouterr().err
    assert lazy_backend.explain().records == []


def test_replays_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    step = lazy_backend.capture(lambda x: x * 2)
    with config.patch(debug=1):
        for _ in range(4):
            step(grid("lazy", 3))
    assert "(0 calls): replay" in capsys.readouterr().err


def test_passes_of_a_served_function_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with config.patch(debug=3, compile="off"):
        lazy_backend.serve(lambda x: (x * 2).sum(), torch.ones(3))
    error = capsys.readouterr().err
    assert "before fold constants" in error
    assert "after plan buffers" in error


def test_sizes_become_symbols_in_a_pass(capsys: pytest.CaptureFixture[str]) -> None:
    with config.patch(debug=3, backend="aot_eager"):
        for length in (3, 3, 4, 4, 4):
            kept = grid("lazy", length, 2).sum(dim=0, keepdim=True).expand(length, 2) + 1
            lazy_backend.mark_step()
            del kept
    error = capsys.readouterr().err
    assert "after write sizes as symbols" in error
    assert Sizes.__name__ not in error


# ----- graphs


def total() -> torch.Tensor:
    return (torch.ones(3, device="lazy") * 2.0).sum()


@pytest.mark.parametrize("name", ["fx", "backend"])
def test_fx_code(name: str) -> None:
    assert "torch.ops.aten.sum.default" in debug.dump_ir([total()], name)


def test_dot_is_a_format() -> None:
    kept = total()
    assert debug.dump_ir([kept], "dot") == debug.render_ir_graph([kept])


def test_a_picture_has_lines_on_request() -> None:
    kept = total()
    assert "test_debug.py" not in debug.render_ir_graph([kept])
    assert 'return (torch.ones(3, device=\\"lazy\\") * 2.0).sum()' in debug.render_ir_graph([kept], lines=True)


def outer() -> torch.Tensor:
    return inner()


def inner() -> torch.Tensor:
    return torch.ones(3, device="lazy").cos()


def test_one_line_per_call_is_the_default() -> None:
    assert "# from" not in debug.dump_ir([outer()])


@pytest.mark.parametrize("first_sight", ["run", "record"])
def test_further_frames_are_noted_on_request(first_sight: str) -> None:
    with config.patch(source_frames=3, first_sight=first_sight):
        text = debug.dump_ir([outer()])
    lines = text.splitlines()
    place = next(i for i, line in enumerate(lines) if "aten.cos" in line)
    line_of_outer, line_of_test = (line.split("# from ")[1] for line in lines[place + 1 : place + 3])
    assert line_of_outer == f"{__file__}:{outer.__code__.co_firstlineno + 1}"
    assert line_of_test.startswith(__file__)


def test_frames_are_in_no_key() -> None:
    with config.patch(source_frames=4):
        with_frames = lazy_backend.computation.get_graph_hash([outer()])
    lazy_backend.ir_cache.reset()
    assert lazy_backend.computation.get_graph_hash([outer()]) == with_frames


# ----- ranges


def train(steps: int, after: Callable[[], Any] = lambda: None) -> None:
    model = nn.Linear(4, 2).to("lazy")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(3, 4).to("lazy")).sum().backward()
        optimizer.step()
        lazy_backend.mark_step()
        after()
    lazy_backend.wait_device_ops()


def profiled(steps: int) -> list[Any]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(steps, profile.step)
    return [event for event in profile.events() or [] if event.name.startswith("lazy_backend: ")]


def test_the_profiler_shows_trace_sync_compile_run_and_graph() -> None:
    with config.patch(run_in_background="never", backend="aot_eager"):
        counted = Counter(event.name.split(" (")[0].split(" #")[0] for event in profiled(5))
    assert counted["lazy_backend: sync"] == counted["lazy_backend: run"] == counted["lazy_backend: graph"] == 5
    assert counted["lazy_backend: trace"] >= 4  # the first may have begun before the profiler
    assert counted["lazy_backend: compile"] >= 1


def test_ranges_nest() -> None:
    with config.patch(run_in_background="never"):
        events = profiled(3)
    runs, syncs, graphs, traces = (
        [event.time_range for event in events if event.name.startswith(f"lazy_backend: {name}")]
        for name in ("run", "sync", "graph", "trace")
    )
    for inside, outside in ((graphs, runs), (runs, syncs)):
        assert all(any(o.start <= i.start and i.end <= o.end for o in outside) for i in inside)
    assert all(trace.end <= sync.start or sync.end <= trace.start for trace in traces for sync in syncs)


def test_runs_on_the_devices_thread_are_shown_if_all_threads_are() -> None:
    settings = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(experimental_config=settings) as profile:
        train(3)
    assert sum(event.name == "lazy_backend: run" for event in profile.events() or []) == 3


def test_without_a_profiler_there_are_no_ranges() -> None:
    with torch.profiler.profile():
        train(2)
    train(2)
    context = lazy_backend.tensors.contexts.contexts.get_device_context(None)
    synced()
    assert context.trace.range is None
    assert context.trace.default_dtype is torch.get_default_dtype()


def test_a_profiled_step_is_the_same_program() -> None:
    train(2)
    lazy_backend.metrics.reset()
    with torch.profiler.profile():
        train(2)
    assert lazy_backend.metrics.counter_value("UncachedCompile") == 0


def test_the_default_dtype_may_change_under_a_profiler() -> None:
    try:
        with torch.profiler.profile():
            lazy_backend.mark_step()
            torch.set_default_dtype(torch.float64)
            made = torch.ones(2, device="lazy").new_zeros(3) + 1
            lazy_backend.mark_step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert made.dtype == torch.float64


# ----- the timeline


@pytest.fixture(params=["always", "never"])
def events(request: pytest.FixtureRequest, tmp_path: Path) -> list[dict[str, Any]]:
    config.run_in_background = request.param
    train(6)
    step = lazy_backend.capture(lambda x: (x * 2).sum())
    for _ in range(4):
        step(grid("lazy", 3))
    lazy_backend.wait_device_ops()
    debug.export_chrome_trace(tmp_path / "trace.json")
    found: list[dict[str, Any]] = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    return found


def lanes(events: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[names[event["tid"]]].append(event)
    return found


def end_of(event: dict[str, Any]) -> float:
    return float(event["ts"] + event["dur"])


def test_every_event_is_in_the_trace_event_format(events: list[dict[str, Any]]) -> None:
    for event in events:
        assert {"ph", "name", "pid", "tid"} <= event.keys()
        assert event["ph"] in ("M", "X", "s", "f")
        assert event["pid"] == os.getpid()
        if event["ph"] != "M":
            assert event["ts"] >= 0
            assert event["cat"]
        if event["ph"] == "X":
            assert event["dur"] >= 0


def test_there_is_a_lane_for_each_kind_of_work(events: list[dict[str, Any]]) -> None:
    kinds = {name: {event["cat"] for event in found} for name, found in lanes(events).items()}
    assert kinds == {
        "lazy:0 recording": {"record", "sync", "wait"},
        "compiling": {"compile"},
        "lazy:0 queue": {"run"},
    }


def test_slices_of_a_lane_nest(events: list[dict[str, Any]]) -> None:
    for found in lanes(events).values():
        open_ones: list[dict[str, Any]] = []
        for event in found:  # in the order of their beginnings
            while open_ones and end_of(open_ones[-1]) <= event["ts"] + 0.0015:
                open_ones.pop()
            if open_ones:
                assert end_of(event) <= end_of(open_ones[-1]) + 0.0015, (event, open_ones[-1])
            open_ones.append(event)


def test_events_are_in_order(events: list[dict[str, Any]]) -> None:
    times = [event["ts"] for event in events if "ts" in event]
    assert times == sorted(times)


def test_an_arrow_leads_from_each_sync_to_its_run(events: list[dict[str, Any]]) -> None:
    starts = {event["id"]: event["ts"] for event in events if event["ph"] == "s"}
    ends = {event["id"]: event["ts"] for event in events if event["ph"] == "f"}
    assert len(ends) == 6 + 4
    assert starts.keys() == ends.keys()
    assert all(starts[number] < ends[number] for number in ends)


def test_a_slice_tells_the_cause_and_the_explanation(events: list[dict[str, Any]]) -> None:
    syncs = [event for event in events if event.get("cat") == "sync"]
    assert syncs[0]["args"]["cause"] == "mark_step"
    assert syncs[0]["name"] == "sync: miss"
    assert {"replay", "sync: hit, level 1"} <= {event["name"] for event in syncs}


def test_a_wait_lies_within_its_sync(tmp_path: Path) -> None:
    train(4)
    debug.export_chrome_trace(tmp_path / "trace.json", last=2)
    found = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    waits = [event for event in found if event.get("cat") == "wait"]
    syncs = [event for event in found if event.get("cat") == "sync"]
    assert len(waits) == len(syncs) == 2
    for wait, sync in zip(waits, syncs, strict=True):
        assert sync["ts"] <= wait["ts"]
        assert end_of(wait) <= end_of(sync)


def test_a_wait_for_the_compiler_is_in_the_timeline(tmp_path: Path) -> None:
    train(2)
    lazy_backend.wait_for_compiles(timeout=5)
    train(1)
    debug.export_chrome_trace(tmp_path / "trace.json")
    found = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    (wait,) = [event for event in found if event["name"] == "wait: wait_for_compiles()"]
    assert wait in lanes(found)["lazy:0 recording"]
    assert Path(__file__).name in wait["args"]["site"]


def test_a_process_that_did_nothing_has_an_empty_timeline(tmp_path: Path) -> None:
    debug.export_chrome_trace(tmp_path / "trace.json")
    found = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event for event in found if event["ph"] != "M"] == []


# ----- views


def test_dump_ir_shows_views() -> None:
    y = (torch.ones(2, 4, device="lazy") + 1).t()
    text = debug.dump_ir([y])
    assert "aten.t(" in text
    assert "%2: f32[4, 2]" in text
    assert text.endswith("return %2")


def test_dump_ir_of_a_view_shows_writes_through_its_base() -> None:
    base = torch.ones(2, 4, device="lazy") + 1
    row = base[0]
    base.mul_(3)
    assert "aten.mul_" in debug.dump_ir([row])


def test_dump_ir_of_a_view_and_its_base_gives_both() -> None:
    base = torch.ones(2, 4, device="lazy") + 1
    graph = debug._graph_of([base.t(), base])
    assert [value.meta.shape for value in graph.outputs] == [(2, 4), (4, 2)]


@pytest.mark.parametrize("name", ["fx", "dot"])
def test_views_are_in_every_format(name: str) -> None:
    y = (torch.ones(2, 4, device="lazy") + 1).t()
    assert ".t" in debug.dump_ir([y], name)


def test_the_hash_is_still_that_of_the_step() -> None:
    y = (torch.ones(2, 4, device="lazy") + 1).t()
    expected = lazy_backend.computation.get_graph_hash([y])
    lazy_backend.mark_step()
    assert expected in lazy_backend.computation.get_debug_states()
