"""`tools/gpu_check.py`: its logic, with processes that only pretend to train; and one run through, with tiny models."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parent.parent.parent / "tools"
sys.path.insert(0, str(TOOLS))

from gpu.contenders import slow_steps  # noqa: E402
from gpu.results import GpuResults, failures, make_gpu_tables  # noqa: E402
from gpu.training import GPT2, Scale, fitting_batch, gpt2_size  # noqa: E402
from gpu_check import Budget, GpuCheck, GpuPlan  # noqa: E402
from shared.workers import Worker, WorkerFailed  # noqa: E402

# What answers in place of a contender: one that works, and ways to fail. Imports no torch.
PRETENDER = f"""
import os, signal, sys, time
sys.path.insert(0, {str(TOOLS)!r})
from shared.workers import answer_commands

name, speed = sys.argv[1], {{"captured": 1.0, "lazy": 1.5, "reduce-overhead": 2.0}}.get(sys.argv[1], 3.0)
losses = [2.0, 1.5, float("nan") if name == "compile" else 1.0]

def answer(command, **arguments):
    print("this goes elsewhere")
    if name == "fails" or (name == "fails late" and command == "round"):
        raise ValueError("out of luck")
    if name == "dies":
        print("these are the last words", file=sys.stderr, flush=True)
        os._exit(3)
    if name == "hangs":
        time.sleep(600)
    if name == "interrupts" and command == "round":
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(600)
    counters = {{"DeviceGraphCaptured": 1, "DeviceGraphRefused: it reads the host at train.py:3": 2}}
    start = {{"first": 1.0, "steps": 50, "steps_until_fast": 9, "seconds_until_fast": 2.0, "final": 0.01}}
    return {{
        "smoke": {{"seen": "all is well"}},
        "start": {{**start, "settled": True, "losses": losses, "compiles": 1}},
        "round": {{"seconds": speed * arguments.get("steps", 1), "device_seconds": 1.0, "compiles": 1}},
        "memory": {{"peak": 1048576 * speed}},
        "graphs": {{"counters": counters, "memory": {{}}, "warnings": ["it is warm"]}},
    }}[command]

answer_commands(answer)
"""


class PretendingPlan(GpuPlan):
    """A plan whose workers are `PRETENDER`s."""

    def worker(self, contender: str = "eager", workload: str = "mlp", scale: Scale | None = None) -> Worker:
        return Worker(contender, [sys.executable, "-c", PRETENDER, contender], {})


def make_check(folder: Path, *contenders: str, seconds: float = 1000.0, clock: Any = None, **changes: Any) -> GpuCheck:
    chosen = {"stages": ["bench"], "workloads": ["mlp"], "limit": 60.0, "scale": Scale(tiny=False), **changes}
    plan = PretendingPlan(device="cuda", contenders=contenders, jobs=4, rounds=3, program=Path("-"), **chosen)
    results = GpuResults(folder, {"device": "pretended", "commit": "1"})
    return GpuCheck(plan, results, Budget(seconds, clock) if clock else Budget(seconds))


def statuses(check: GpuCheck) -> dict[str, str]:
    return {key.rpartition(": ")[2]: record["status"] for key, record in check.results.records.items()}


# ----- what is measured


def test_contenders_that_fail_are_rows_and_the_rest_goes_on(tmp_path: Path) -> None:
    check = make_check(tmp_path, "eager", "captured", "fails", "fails late", "dies")
    check.run()
    assert statuses(check) == {
        "eager": "ok",
        "captured": "ok",
        "fails": "failed",
        "fails late": "failed",
        "dies": "failed",
    }
    text = check.results.markdown.read_text()
    assert "fails fails: ValueError: out of luck" in text
    assert "ended with status 3: these are the last words" in text
    assert json.loads(check.results.json.read_text())["records"] == check.results.records


def test_a_contender_that_hangs_is_ended(tmp_path: Path) -> None:
    check = make_check(tmp_path, "eager", "hangs", limit=3.0)
    check.run()
    assert statuses(check) == {"eager": "ok", "hangs": "failed"}
    assert "no answer to `start` within 3 s" in check.results.markdown.read_text()


def test_goals_stand_beside_the_figures(tmp_path: Path) -> None:
    check = make_check(tmp_path, "eager", "reduce-overhead", "lazy", "captured")
    check.run()
    goals, _, _, speed, costs, *_ = make_gpu_tables(check.results.records)
    assert goals.rows == [
        ["captured, >= 1.20 x of the speed of reduce-overhead", "mlp", "2.00", "yes"],
        ["lazy, >= 1.00 x of the speed of eager", "mlp", "2.00", "yes"],
        ["lazy, <= 1.05 x of the peak memory of eager", "mlp", "0.50", "yes"],
        ["captured, <= 1.05 x of the peak memory of eager", "mlp", "0.33", "yes"],
    ]
    assert list(speed.rows[3][:5]) == ["captured", "1000.000", "1000.000 to 1000.000", "3.00", "2.00"]
    assert costs.rows[3] == ["captured", "1.0", "0.33", "1.00", "9", "2.00", "1", "1, 0, 2"]
    assert "captured: DeviceGraphRefused: it reads the host at train.py:3, 2 x" in speed.note
    assert failures(check.results.records) == []


def test_losses_that_are_no_numbers_do_not_hold(tmp_path: Path) -> None:
    check = make_check(tmp_path, "eager", "compile")
    check.run()
    [told] = failures(check.results.records)
    assert told == "bench: mlp: compile: losses differ from eager's by inf, more than 0.001"


def test_smoke_that_fails_leaves_the_rest_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = make_check(tmp_path, "eager", stages=["smoke", "tests", "bench"])
    monkeypatch.setattr(
        PretendingPlan, "worker", lambda self, *_: Worker("x", [sys.executable, "-c", PRETENDER, "fails"], {})
    )
    check.run()
    assert list(statuses(check).values()) == ["failed", *["not run"] * 6]
    assert failures(check.results.records)[0] == "smoke: the device: ValueError: out of luck"


# ----- time


def test_what_the_minutes_do_not_suffice_for_is_listed(tmp_path: Path) -> None:
    def clock() -> float:
        return 1000.0 if check is not None and check.results.is_measured("bench: mlp: eager") else 0.0

    check: GpuCheck | None = None
    check = make_check(tmp_path, "eager", "compile", workloads=["mlp", "lstm"], seconds=60.0, clock=clock)
    check.run()
    found = {key: record["status"] for key, record in check.results.records.items()}
    assert found == {
        "bench: mlp: eager": "ok",
        "bench: lstm: eager": "not run",
        "bench: mlp: compile": "not run",
        "bench: lstm: compile": "not run",
    }
    assert "| bench: lstm: compile | the minutes were over |" in check.results.markdown.read_text()


def test_a_second_run_goes_on_where_the_first_ended(tmp_path: Path) -> None:
    first = make_check(tmp_path, "eager", "fails")
    first.run()
    second = make_check(tmp_path, "eager", "captured", "fails")
    second.results.load()
    assert statuses(second) == {"eager": "ok"}
    kept = second.results.records["bench: mlp: eager"]
    second.run()
    assert second.results.records["bench: mlp: eager"] is kept
    assert statuses(second) == {"eager": "ok", "captured": "ok", "fails": "failed"}


def test_results_of_other_code_are_not_taken_over(tmp_path: Path) -> None:
    make_check(tmp_path, "eager").results.write()
    other = GpuResults(tmp_path, {"device": "pretended", "commit": "2"})
    with pytest.raises(ValueError, match="is of commit 1, not 2"):
        other.load()


INTERRUPTED = f"""
import sys
sys.path[:0] = [{str(TOOLS)!r}, {str(Path(__file__).parent)!r}, {str(Path(__file__).parent.parent)!r}]
import gpu_check, test_gpu_check
gpu_check.GpuPlan.worker = test_gpu_check.PretendingPlan.worker
gpu_check.GPU_CONTENDERS["interrupts"] = None
gpu_check.describe = lambda plan: {{"device": "pretended"}}
sys.exit(gpu_check.main())
"""


def test_ctrl_c_keeps_what_is_there(tmp_path: Path) -> None:
    options = ["--only", "bench", "--workloads", "mlp,lstm", "--contenders", "eager,interrupts", "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 130, done.stderr
    document = json.loads((tmp_path / "gpu_check.json").read_text())
    assert document["about"]["ended"] == "interrupted; --resume goes on"
    found = {key: record["status"] for key, record in document["records"].items()}
    assert found == {"bench: mlp: eager": "ok", "bench: lstm: eager": "ok", "bench: mlp: interrupts": "unfinished"}
    assert "interrupts (unfinished)" in done.stdout


# ----- parts


def test_steps_until_it_is_fast() -> None:
    assert slow_steps([1.0] * 10, 1.0) == 0
    assert slow_steps([30.0] + [1.0] * 10, 1.0) == 1
    assert slow_steps([30.0, 2.0, 2.0, 2.0] + [1.0] * 10, 1.0) == 4
    assert slow_steps([2.0] * 20 + [50.0] + [1.0] * 10, 1.0) == 21
    assert slow_steps([1.0] * 10 + [3.0] + [1.0] * 10, 1.0) == 0  # one slow step, as a comparison of a replay
    assert slow_steps([2.0], 1.0) == 1


def test_the_batch_of_gpt2_fits_the_gpu() -> None:
    assert [fitting_batch(gigabytes * 1e9, 4) for gigabytes in (15, 40, 79, 139)] == [1, 1, 4, 8]


def test_gpt2_has_the_published_size() -> None:
    import torch

    with torch.device("meta"):
        model = GPT2(gpt2_size(Scale()))
    padding = (50304 - 50257) * 768
    assert sum(parameter.numel() for parameter in model.parameters()) - padding == 124_439_808


def test_a_worker_that_did_not_answer_is_gone() -> None:
    with Worker("x", [sys.executable, "-c", PRETENDER, "hangs"], {}) as worker:
        with pytest.raises(WorkerFailed, match="no answer to `start` within 2 s"):
            worker.ask("start", 2.0)
        assert not worker.is_alive()
        with pytest.raises(WorkerFailed, match="ended with status"):
            worker.ask("start", 2.0)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The imitations in place of the packages, as on a machine that has neither."""
    names = ("cachetools", "platformdirs")
    monkeypatch.syspath_prepend(TOOLS / "gpu" / "stand_ins")
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    yield
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(before)


def test_the_stand_in_for_cachetools_drops_what_was_used_least_recently(stand_ins: None) -> None:
    import cachetools

    assert Path(str(cachetools.__file__)).parent.name == "stand_ins"
    cache: Any = cachetools.LRUCache(maxsize=3, getsizeof=len)
    cache["a"] = "1"
    cache["b"] = "2"
    assert cache.get("a") == "1"
    cache["c"] = "33"
    assert dict(cache) == {"a": "1", "c": "33"}
    cache["c"] = "4"
    assert cache.setdefault("d", "5") == "5"
    assert len(cache) == cache.currsize == 3
    with pytest.raises(ValueError, match="too large"):
        cache["e"] = "6666"
    cache.clear()
    assert not cache.currsize


def test_the_package_works_with_stand_ins(tmp_path: Path) -> None:
    program = """
        import torch, lazy_backend, cachetools, platformdirs
        assert "stand_ins" in cachetools.__file__ and "stand_ins" in platformdirs.__file__
        lazy_backend.config.backend, lazy_backend.config.compile = "aot_eager", "foreground"
        x = torch.ones(3, device="lazy")
        for _ in range(5):
            y = (x * 2.5).exp().sum() + 1
            lazy_backend.mark_step()
        assert abs(y.item() - 37.5474) < 1e-3
    """
    import os

    paths = os.pathsep.join([str(TOOLS / "gpu" / "stand_ins"), str(TOOLS.parent)])
    environment = {**os.environ, "PYTHONPATH": paths, "LAZY_BACKEND_CACHE_DIR": str(tmp_path / "cache")}
    (tmp_path / "cache").mkdir(mode=0o700)
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env=environment, check=True, timeout=120)


# ----- all of it


@pytest.mark.scenario
def test_it_runs_through_on_the_cpu(tmp_path: Path) -> None:
    """Every stage, workload and contender, with tiny models, but not every contender with every workload."""
    command = [sys.executable, str(TOOLS / "gpu_check.py"), "--device", "cpu", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "gpu_check.json").read_text())
    assert {record["status"] for record in document["records"].values()} == {"ok"}, done.stdout
    assert len(document["records"]) == 5 + 1 + 7 + 4 * 3
    assert document["about"]["ended"] == "regularly"
    assert "smoke, tests, losses hold" in done.stdout
