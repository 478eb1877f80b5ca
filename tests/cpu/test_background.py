"""Graphs compiled by inductor in a process of its own, and kept on disk.

Slow, so graphs are small and most tests share the compiler's process and one folder of compiled graphs.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import subprocess
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from forks import TORCH, Fork
from harness import assert_same, count, reset_state, run_program
from torch import nn
from torch.nn import functional as F

import lazy_backend
from lazy_backend import CacheWarning, CompileWarning, config, metrics
from lazy_backend.cache import scratch
from lazy_backend.computation import get_cached_computations
from lazy_backend.execution.sync import executor
from lazy_backend.lowering.compilation.background import worker
from lazy_backend.lowering.plans.profiling import GraphExecutorState
from lazy_backend.tensors.tensor import backing_tensor

# What a compile may take on a machine that others use as well. Seconds.
LONG = 300.0

# Steps after which a graph is being compiled: it runs as it is recorded, then as a graph; then it is looked for on
# disk, the compiler starts, and the graph is sent to it.
ENOUGH = 5


def use_inductor() -> None:
    config.backend = "inductor"
    config.compile = "background"
    config.first_sight = "run"
    config.run_in_background = "auto"


@pytest.fixture(autouse=True)
def in_background() -> Iterator[None]:
    use_inductor()
    yield
    lazy_backend.wait_device_ops()
    if not lazy_backend.wait_for_compiles(timeout=0.0):
        worker.close()


@pytest.fixture(scope="module", autouse=True)
def close_the_worker() -> Iterator[None]:
    yield
    worker.close()


@pytest.fixture
def cache_dir(compiled_before: Path) -> Path:
    """The folder of compiled graphs that has the graph of `Loop`, in use."""
    config.cache, config.cache_dir = True, str(compiled_before)
    return compiled_before


@pytest.fixture(scope="module")
def compiled_before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compiled")
    folder.chmod(0o700)
    reset_state()
    use_inductor()
    config.cache, config.cache_dir = True, str(folder)
    Loop().run(ENOUGH)
    assert lazy_backend.wait_for_compiles(LONG)
    assert state().plan == "optimized"
    reset_state()
    return folder


# ----- programs


class Loop:
    """A training loop with one graph: a product, a few elementwise operators, a parameter written in place."""

    def __init__(self, device: str = "lazy") -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(4, 8, generator=generator).to(device)
        self.w = nn.Parameter(torch.randn(8, 8, generator=generator).to(device))

    def run(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            loss = (self.x @ self.w).relu().square().mean()
            loss.backward()
            with torch.no_grad():
                self.w.sub_(self.w.grad * 0.5)
            self.w.grad = None
            lazy_backend.mark_step()
            losses.append(loss.detach())
        return [loss.item() for loss in losses]


# the same for programs that run in a process of their own
LOOP = f"""
import os, signal, sys, time, warnings
import torch, lazy_backend
from torch import nn
{inspect.getsource(Loop)}
"""


def state() -> GraphExecutorState:
    """That of the largest graph."""
    largest = max(get_cached_computations(), key=lambda computation: len(computation.graph.nodes))
    return lazy_backend.computation.get_debug_states()[largest.hash]


def start_over() -> None:
    """Forget every graph but what is on disk."""
    executor.clear_computations()
    lazy_backend.ir_cache.reset()
    metrics.reset()


def other_graph(depth: int) -> torch.Tensor:
    """One run of a graph that is another program for each `depth`, from the first call on."""
    made = waves("lazy", depth)
    lazy_backend.mark_step()
    return made


def waves(device: str, depth: int) -> torch.Tensor:
    x = torch.full((4,), depth, dtype=torch.float32, device=device).cumsum(0)
    for _ in range(depth):
        x = x.cos()
    return x * 3


# ----- profiling, compiling, optimized


def test_a_graph_that_recurs_is_compiled_and_swapped_in() -> None:
    config.num_profiled_runs = 2
    loop, expected = Loop(), Loop("cpu").run(8)
    place = backing_tensor(loop.w._data).data_ptr()
    found, plans = loop.run(2), [state().plan]
    found += loop.run(1)
    plans.append(state().plan)
    found += loop.run(2)  # nothing waits for the compiler
    assert lazy_backend.wait_for_compiles(LONG)
    found += loop.run(3)
    plans.append(state().plan)
    assert plans == ["profiling", "compiling", "optimized"]
    assert found == pytest.approx(expected, rel=1e-4)
    assert backing_tensor(loop.w._data).data_ptr() == place
    assert (metrics.counter_value("Compile"), metrics.counter_value("CompileFailed")) == (1, 0)


def test_the_process_imports_no_compiler_to_run_what_another_compiled(cache_dir: Path) -> None:
    code = f"""
{LOOP}
assert Loop().run(6)
state, = {{s.plan for s in lazy_backend.computation.get_debug_states().values()}}
counters = lazy_backend.metrics.counters()
print(state, counters.get("DiskCacheHit"), counters.get("Compile"), counters.get("DiskCacheWrite"))
print([name for name in ("torch._dynamo", "torch._inductor", "torch._functorch.aot_autograd") if name in sys.modules])
"""
    out = run_program(code, cache_dir.parent, TORCH, LAZY_BACKEND_CACHE_DIR=str(cache_dir)).splitlines()
    assert out == ["optimized 1 None None", "[]"]


def test_a_dropout_draws_the_same_numbers_compiled() -> None:
    def step() -> list[torch.Tensor]:
        torch.manual_seed(7)
        made = F.dropout(torch.ones(64, device="lazy"), 0.3) + torch.rand(64, device="lazy")
        lazy_backend.mark_step()
        return [made.cpu(), torch.rand(2)]

    first, second = step(), step()
    assert lazy_backend.wait_for_compiles(LONG)
    assert_same([second, step()], [first] * 2)
    assert state().plan == "optimized"


def test_a_learning_rate_that_changes_compiles_at_most_twice() -> None:
    config.compile = "foreground"

    def trained(device: str) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
        model.to(device)
        x = torch.randn(8, 4).to(device)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
        losses = []
        for _ in range(60):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            schedule.step()
            lazy_backend.mark_step()
            losses.append(loss.detach())
        return [loss.item() for loss in losses]

    assert trained("lazy") == pytest.approx(trained("cpu"), rel=1e-4)
    assert state().plan == "optimized"
    assert 1 <= metrics.counter_value("Compile") <= 2


def test_no_step_makes_a_graph_and_asks_for_its_compile() -> None:
    loop = Loop()
    asked = []
    for _ in range(ENOUGH):
        loop.run(1)
        asked.append(bool(worker._jobs))
    assert asked == [False, False, False, False, True]
    assert lazy_backend.wait_for_compiles(LONG)


@pytest.mark.scenario
def test_waiting_for_compiles_asks_for_what_is_due() -> None:
    loop = Loop()
    loop.run(2)
    assert (state().plan, worker._jobs) == ("compiling", {})
    assert not lazy_backend.wait_for_compiles(timeout=0.0)
    assert worker._jobs
    assert lazy_backend.wait_for_compiles(LONG)
    loop.run(1)
    assert (state().plan, metrics.counter_value("Compile")) == ("optimized", 1)


def test_nothing_to_wait_for() -> None:
    assert lazy_backend.wait_for_compiles(timeout=0.0)


def test_two_graphs_are_compiled_one_after_the_other() -> None:
    for _ in range(ENOUGH):
        other_graph(5)
        other_graph(6)
    assert lazy_backend.wait_for_compiles(LONG)
    plans = [s.plan for s in lazy_backend.computation.get_debug_states().values()]
    assert plans == ["optimized"] * 2
    for depth in (5, 6):
        torch.testing.assert_close(other_graph(depth).cpu(), waves("cpu", depth))


# ----- on disk


def test_a_graph_on_disk_is_not_compiled(cache_dir: Path) -> None:
    with count("Compile") as compiles, count("DiskCacheHit") as hits:
        assert Loop().run(3) == pytest.approx(Loop("cpu").run(3), rel=1e-4)
    assert (compiles(), hits(), state().plan) == (0, 1, "optimized")


def test_what_is_compiled_is_written_to_disk_by_the_compilers_process(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    code = f"""
{LOOP}
loop = Loop()
loop.run({ENOUGH})
assert lazy_backend.wait_for_compiles({LONG})
loop.run(1)
counters = lazy_backend.metrics.counters()
print(counters["Compile"], counters["DiskCacheWrite"], counters.get("DiskCacheError"), "filelock" in sys.modules)
"""
    # what a trial has shown is written by a thread of this process
    settings = {"LAZY_BACKEND_CACHE_DIR": str(folder), "LAZY_BACKEND_VERIFY_COMPILED": "off"}
    assert run_program(code, tmp_path, TORCH, **settings) == "1 1 None False\n"
    assert len(list(folder.rglob("*.entry"))) == 1


def test_a_full_disk_cache_is_told_by_the_compilers_process(tmp_path: Path) -> None:
    config.cache, config.cache_dir, config.cache_bytes = True, str(tmp_path / "small"), 1000
    for _ in range(ENOUGH):
        other_graph(5)
    assert lazy_backend.wait_for_compiles(LONG)
    assert state().plan == "optimized"
    assert (metrics.counter_value("DiskCacheWrite"), metrics.counter_value("DiskCacheError")) == (0, 1)
    store = lazy_backend.execution.disk_cache.current_store()
    assert store is not None
    assert "do not fit into a cache of 1000" in str(store.last_error)


def test_a_readonly_cache_is_read_and_not_written(cache_dir: Path) -> None:
    config.cache_readonly = True
    before = {file: file.stat().st_mtime_ns for file in cache_dir.rglob("*")}
    Loop().run(ENOUGH)
    assert metrics.counter_value("DiskCacheHit") == 1
    for _ in range(ENOUGH):
        other_graph(7)
    assert lazy_backend.wait_for_compiles(LONG)
    assert metrics.counter_value("Compile") == 1
    assert {file: file.stat().st_mtime_ns for file in cache_dir.rglob("*")} == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a megabyte."""
    place = tmp_path / "disk"
    place.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place]).returncode:
        pytest.skip("needs to mount a file system")
    place.chmod(0o700)
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def fill_up(folder: Path) -> None:
    with contextlib.suppress(OSError), open(folder / "filler", "wb", buffering=0) as filler:
        while filler.write(bytes(4096)):
            pass


def test_a_cache_on_a_full_disk_is_told_once_and_training_goes_on(small_disk: Path) -> None:
    config.cache, config.cache_dir = True, str(small_disk / "cache")
    assert lazy_backend.execution.disk_cache.current_store() is not None
    fill_up(small_disk)
    for _ in range(ENOUGH):
        other_graph(5)
    assert lazy_backend.wait_for_compiles(LONG)
    with pytest.warns(CacheWarning, match=r"(?s)disk cache failed: .*No space left on device.*training goes on"):
        other_graph(5)
    for _ in range(3):  # a second warning would be an error
        torch.testing.assert_close(other_graph(5).cpu(), waves("cpu", 5))
    assert (state().plan, metrics.counter_value("DiskCacheError")) == ("optimized", 1)


def test_a_cache_on_a_read_only_disk_is_told_once_and_training_goes_on(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    config.backend = "eager"
    config.cache, config.cache_dir = True, str(small_disk / "cache")
    other_graph(5)
    with pytest.warns(CacheWarning, match="(?s)Read-only file system.*as long as this process"):
        other_graph(5)
    for _ in range(ENOUGH):  # a second warning would be an error
        torch.testing.assert_close(other_graph(5).cpu(), waves("cpu", 5))
    assert state().plan == "optimized"


def test_progress_is_told_where_it_is_asked_for(cache_dir: Path, capsys) -> None:
    config.progress = True
    Loop().run(ENOUGH)
    assert "nodes: found compiled on disk in" in capsys.readouterr().err


def test_a_folder_that_others_may_write_is_refused_with_one_warning(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    config.backend = "eager"
    config.cache, config.cache_dir = True, str(tmp_path)
    other_graph(4)
    with pytest.warns(CacheWarning, match="compiled graphs last as long as this process"):
        other_graph(4)
    assert_same(other_graph(4), waves("cpu", 4))


def entry_of(folder: Path) -> Path:
    (found,) = folder.rglob("*.entry")
    return found


@pytest.mark.parametrize("damage", ["a byte", "the end", "the artefact"])
def test_a_damaged_artefact_is_made_again(cache_dir: Path, damage: str) -> None:
    entry = entry_of(cache_dir)
    whole = entry.read_bytes()
    if damage == "the artefact":  # what the disk cache gives back is what was put, but no artefact
        store = lazy_backend.execution.disk_cache.current_store()
        assert store is not None
        (found,) = store
        store.put(found.key, b"\0" * 1000)
    else:
        broken = whole[:-100] if damage == "the end" else whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:]
        entry.write_bytes(broken)
    assert Loop().run(ENOUGH) == pytest.approx(Loop("cpu").run(ENOUGH), rel=1e-4)
    assert lazy_backend.wait_for_compiles(LONG)
    assert (state().plan, metrics.counter_value("Compile")) == ("optimized", 1)
    start_over()
    Loop().run(ENOUGH)
    assert (metrics.counter_value("DiskCacheHit"), metrics.counter_value("Compile")) == (1, 0)


def test_without_a_cache_nothing_is_written(tmp_path: Path) -> None:
    config.cache, config.cache_dir = False, str(tmp_path / "unused")
    for _ in range(ENOUGH):
        other_graph(5)
    assert lazy_backend.wait_for_compiles(LONG)
    assert not (tmp_path / "unused").exists()


# ----- the compiler's process ends, dies, fails, or is in the way

# these come after the tests that share one, which takes 5 s of a core to start


def processes_until_compiled() -> Iterator[int]:
    """The compiler's processes, one after the other, until no compile is under way."""
    last = 0
    while worker._jobs:
        process = worker._process
        if process is not None and process.pid != last:
            last = process.pid
            yield last
        time.sleep(0.01)


@pytest.mark.scenario
def test_an_idle_compiler_is_ended_and_the_next_compile_starts_another() -> None:
    config.compiler_idle_seconds = 0.1
    for depth in (10, 11):
        for _ in range(ENOUGH):
            other_graph(depth)
        process = next(processes_until_compiled())
        assert lazy_backend.wait_for_compiles(LONG)
        assert gone_within(process, 10)
        with worker._lock:  # it is waited for under the lock
            assert not Path(f"/proc/{process}").exists()  # a zombie has one
    plans = [s.plan for s in lazy_backend.computation.get_debug_states().values()]
    assert plans == ["optimized"] * 2


def test_waiting_for_compiles_ends_in_time() -> None:
    for _ in range(ENOUGH):
        other_graph(3)
    start = time.monotonic()
    assert not lazy_backend.wait_for_compiles(timeout=0.05)
    assert time.monotonic() - start < 5
    assert state().plan == "compiling"


@pytest.mark.parametrize("steps", [2, 3])
def test_what_is_due_is_not_asked_for_once_compiling_is_switched_off(steps: int) -> None:
    loop = Loop()
    loop.run(steps)
    config.compile = "off"
    assert lazy_backend.wait_for_compiles(timeout=0.0)
    assert worker._jobs == {}
    config.compile = "background"
    loop.run(1)
    assert not lazy_backend.wait_for_compiles(timeout=0.0)
    assert worker._jobs


@pytest.mark.parametrize("full", ["before", "meanwhile"])
def test_no_room_for_temporary_files_leaves_graphs_interpreted_with_one_warning(
    full: str, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "_places", lambda: iter([str(small_disk)]))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    worker.close()
    if full == "before":
        fill_up(small_disk)
    for _ in range(ENOUGH):
        other_graph(5)
    if full == "meanwhile":
        next(processes_until_compiled())
        fill_up(small_disk)
    with pytest.warns(CompileWarning, match="No space left on device"):
        assert lazy_backend.wait_for_compiles(LONG)
    for _ in range(ENOUGH):
        torch.testing.assert_close(other_graph(5).cpu(), waves("cpu", 5))
    assert state().plan == "fallback"
    worker.close()
    (small_disk / "filler").unlink()
    assert list(small_disk.iterdir()) == []


def test_a_compiler_that_is_killed_once_is_started_again_and_nobody_told() -> None:
    worker.close()
    for _ in range(ENOUGH):
        other_graph(8)
    os.kill(next(processes_until_compiled()), signal.SIGKILL)
    assert lazy_backend.wait_for_compiles(LONG)
    torch.testing.assert_close(other_graph(8).cpu(), waves("cpu", 8))
    assert state().plan == "optimized"


def test_a_compiler_that_is_killed_always_leaves_graphs_interpreted_with_one_warning() -> None:
    worker.close()
    for _ in range(ENOUGH):
        other_graph(8)
        other_graph(9)
    for process in processes_until_compiled():
        os.kill(process, signal.SIGKILL)
    with pytest.warns(CompileWarning, match="the compiler's process ended with status -9"):
        assert lazy_backend.wait_for_compiles(LONG)
    for depth in (8, 9, 8, 9):  # a second warning would be an error
        torch.testing.assert_close(other_graph(depth).cpu(), waves("cpu", depth))
    assert {s.plan for s in lazy_backend.computation.get_debug_states().values()} == {"fallback"}


@pytest.mark.scenario
def test_after_a_crash_other_graphs_are_compiled() -> None:
    worker.close()
    for _ in range(ENOUGH):
        other_graph(9)
    assert worker._jobs
    worker.close()
    with pytest.warns(CompileWarning):
        other_graph(9)
    for _ in range(ENOUGH):
        other_graph(5)
    assert lazy_backend.wait_for_compiles(LONG)
    plans = sorted(s.plan for s in lazy_backend.computation.get_debug_states().values())
    assert plans == ["fallback", "optimized"]


def test_without_a_cpp_compiler_everything_is_interpreted(tmp_path: Path) -> None:
    code = f"""
{LOOP}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    loop = Loop()
    found = loop.run(3)
    assert lazy_backend.wait_for_compiles({LONG})
    found += loop.run(3)
assert found == Loop("cpu").run(6), found
(warning,) = caught
print(warning.category.__name__, warning.message)
"""
    environment = {"CXX": "/nonexistent/g++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "none")}
    out = run_program(code, tmp_path, TORCH, LAZY_BACKEND_CACHE="0", **environment)
    assert out.startswith("CompileWarning a graph of ")
    assert "No working C++ compiler found" in out
    assert "install a C++ compiler (g++), or name one with CXX" in out


def compile_with(case: str, folder: Path) -> None:
    """Run a program that compiles without a warning, by g++ but for `case`, a clause of the shell on arguments."""
    compiler = folder / "compiler"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in {case} esac\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    code = f"""
{LOOP}
warnings.simplefilter("error")
loop = Loop()
loop.run(3)
assert lazy_backend.wait_for_compiles({LONG})
loop.run(3)
print([s.plan for s in lazy_backend.computation.get_debug_states().values()])
"""
    environment = {"CXX": str(compiler), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    assert run_program(code, folder, TORCH, LAZY_BACKEND_CACHE="0", **environment) == "['optimized']\n"


@pytest.mark.scenario
def test_a_cpp_compiler_that_is_killed_is_started_again(tmp_path: Path) -> None:
    """As the system does when memory runs out: the process that asked for it lives on."""
    killed = tmp_path / "killed"
    compile_with(f"*kernels0.cpp*) [ -e {killed} ] || {{ touch {killed}; kill -KILL $$; }};;", tmp_path)
    assert killed.exists()


@pytest.mark.scenario
def test_nothing_is_built_to_find_out_about_the_processor(tmp_path: Path) -> None:
    compile_with(f'*) echo "$1" >>{tmp_path / "built"};;', tmp_path)
    built = [Path(one).name for one in (tmp_path / "built").read_text().split() if one.endswith(".cpp")]
    assert sorted(built) == ["kernels0.cpp", "runner.cpp"]


@pytest.mark.scenario
def test_a_cpp_compiler_that_does_not_know_the_processor_is_used_as_it_is(tmp_path: Path) -> None:
    refused = tmp_path / "refused"
    refuse = f'echo "unrecognized option" >&2; echo "$*" >>{refused}; exit 1'
    compile_with(f"*-mavx*|*-march=armv9*) {refuse};;", tmp_path)
    assert "kernels0.cpp" in refused.read_text()


@pytest.mark.scenario
@pytest.mark.parametrize("switched_by", ["a variable", pytest.param("a setting", marks=pytest.mark.slow)])
def test_without_inductors_caches_graphs_are_compiled_and_nothing_is_left(switched_by: str, tmp_path: Path) -> None:
    setting = "import torch._functorch.config\ntorch._functorch.config.enable_autograd_cache = False"
    code = f"""
{LOOP}
{setting if switched_by == "a setting" else ""}
loop = Loop()
found = loop.run(3)
assert lazy_backend.wait_for_compiles({LONG})
found += loop.run(3)
print([s.plan for s in lazy_backend.computation.get_debug_states().values()])
assert all(abs(a - b) < 1e-4 for a, b in zip(found, Loop("cpu").run(6)))
"""
    caches = tmp_path / "inductor"
    environment = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"} if switched_by == "a variable" else {}
    environment |= {"LAZY_BACKEND_CACHE": "0", "TORCHINDUCTOR_CACHE_DIR": str(caches)}
    assert run_program(code, tmp_path, TORCH, **environment) == "['optimized']\n"
    assert not [file for file in caches.rglob("*") if file.is_file()]


def alive(pid: int) -> bool:
    """Whether a process of this id runs, or one of its group."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            number, rest = stat.read_text().split(" ", 1)
        except OSError:
            continue
        status, _, group = rest.rpartition(")")[2].split()[:3]
        if status not in "ZX" and pid in (int(number), int(group)):
            return True
    return False


def gone_within(pid: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not alive(pid)


COMPILING = f"""
{LOOP}
from lazy_backend.lowering.compilation.background import worker
loop = Loop()
loop.run({ENOUGH})
while worker._process is None:
    time.sleep(0.001)
print(worker._process.pid, flush=True)


def sleep():
    while True:  # a signal that arrives just before a sleep does not end that sleep
        time.sleep(0.1)
"""


def start_compiling(then: str, cwd: Path) -> tuple[Fork, int]:
    """A process that begins a compile and goes on with `then`; and the id of its compiler. Its files are in `cwd`."""
    environment = {**os.environ, "LAZY_BACKEND_CACHE": "0", "TMPDIR": str(cwd)}
    process = Fork(COMPILING + textwrap.dedent(then), cwd, environment, imports=TORCH)
    started.append(process)
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    return process, int(line)


started: list[Fork] = []


@pytest.fixture(autouse=True)
def end_what_was_started() -> Iterator[None]:
    """Also of a test that failed: the next ones find an idle machine."""
    yield
    while started:
        process = started.pop()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def is_empty_within(folder: Path, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while list(folder.iterdir()) and time.monotonic() < end:
        time.sleep(0.05)
    return not list(folder.iterdir())


@pytest.mark.parametrize("delay", [0.0, pytest.param(5.0, marks=pytest.mark.slow)])
def test_leaving_while_compiling_is_quick_and_silent(delay: float, tmp_path: Path) -> None:
    process, compiler = start_compiling(f"time.sleep({delay}); print('leaving', flush=True)", tmp_path)
    assert process.stdout.readline() == "leaving\n"
    start = time.monotonic()
    assert process.communicate(timeout=60) == ("", "")
    assert time.monotonic() - start < 10
    assert process.returncode == 0
    assert gone_within(compiler, 5)
    assert is_empty_within(tmp_path, 0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("delay", [0.0, pytest.param(3.0, marks=pytest.mark.slow)])
def test_a_killed_program_takes_its_compiler_and_its_files_along(number: int, delay: float, tmp_path: Path) -> None:
    process, compiler = start_compiling("sleep()", tmp_path)
    time.sleep(delay)
    process.send_signal(number)
    process.communicate()
    assert gone_within(compiler, 15)
    assert is_empty_within(tmp_path, 5)


@pytest.mark.parametrize("delay", [0.0, pytest.param(4.0, marks=pytest.mark.slow)])
def test_ctrl_c_leaves_no_compiler_and_no_traceback_of_it(delay: float, tmp_path: Path) -> None:
    process, compiler = start_compiling("sleep()", tmp_path)
    time.sleep(delay)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert errors.count("Traceback") == 1
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert gone_within(compiler, 5)
    assert is_empty_within(tmp_path, 5)


@pytest.mark.scenario
@pytest.mark.parametrize("delay", [0.05, *(pytest.param(delay, marks=pytest.mark.slow) for delay in (0.0, 1.0))])
def test_who_survives_ctrl_c_still_gets_what_was_being_compiled(delay: float, tmp_path: Path) -> None:
    then = f"""
    try:
        print("ready", flush=True)
        sleep()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    assert lazy_backend.wait_for_compiles({LONG})
    loop.run(2)
    print({{s.plan for s in lazy_backend.computation.get_debug_states().values()}})
    """
    process, _ = start_compiling(then, tmp_path)
    assert process.stdout.readline() == "ready\n"
    time.sleep(delay)
    os.killpg(process.pid, signal.SIGINT)
    out, errors = process.communicate(timeout=LONG)
    assert (out, errors, process.returncode) == ("interrupted\n{'optimized'}\n", "", 0)


def test_what_was_left_by_killed_processes_is_cleared_by_the_next(tmp_path: Path) -> None:
    process, compiler = start_compiling("sleep()", tmp_path)
    time.sleep(1)
    os.kill(compiler, signal.SIGSTOP)  # so that it does not clear up itself
    process.send_signal(signal.SIGKILL)
    os.killpg(compiler, signal.SIGKILL)
    process.communicate()
    assert gone_within(compiler, 5)
    (left,) = tmp_path.iterdir()
    process, compiler = start_compiling("sleep()", tmp_path)
    assert not left.exists()
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert is_empty_within(tmp_path, 5)


def test_parent_and_child_go_on_after_a_fork(tmp_path: Path) -> None:
    then = f"""
    pid = os.fork()
    if pid == 0:
        expected = Loop("cpu").run(4)
        assert worker._process is None
        found = Loop().run(4)
        assert worker._jobs or worker._bell, "a compiler of its own"
        worker.close()
        os._exit(0 if all(abs(a - b) < 1e-4 for a, b in zip(found, expected)) else 3)
    assert os.waitpid(pid, 0)[1] == 0
    assert worker._process.poll() is None
    assert lazy_backend.wait_for_compiles({LONG})
    loop.run(2)
    print({{s.plan for s in lazy_backend.computation.get_debug_states().values()}})
    """
    process, compiler = start_compiling(then, tmp_path)
    out, errors = process.communicate(timeout=LONG)
    assert (out, errors, process.returncode) == ("{'optimized'}\n", "", 0)
    assert gone_within(compiler, 5)


def test_a_child_that_outlives_its_parent_does_not_keep_the_compiler(tmp_path: Path) -> None:
    then = """
    if os.fork() == 0:
        os.close(1), os.close(2)
        time.sleep(30)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    process, compiler = start_compiling(then, tmp_path)
    process.communicate()
    assert gone_within(compiler, 15)
    os.killpg(process.pid, signal.SIGKILL)


# last: it loads the compiler into this process
@pytest.mark.scenario
def test_an_operator_that_only_the_program_knows_is_compiled_here() -> None:
    @torch.library.custom_op("lazy_background::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)

    def step() -> torch.Tensor:
        made = twice(torch.ones(3, device="lazy") + 1).sqrt()
        lazy_backend.mark_step()
        return made.cpu()

    first, second = step(), step()
    assert lazy_backend.wait_for_compiles(LONG)
    assert_same([second, step()], [first] * 2)
    assert state().plan == "optimized"
    assert (metrics.counter_value("Compile"), metrics.counter_value("CompileFailed")) == (1, 0)
