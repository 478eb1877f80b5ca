"""Check and measure everything on a GPU, by one command in less than ten minutes.

    python tools/gpu_check.py
    python tools/gpu_check.py --resume              # what the first run had no time for
    python tools/gpu_check.py --only bench --workloads gpt2 --contenders eager,captured
    python tools/gpu_check.py --device cpu          # runs the tool's own logic, with tiny models

In: a checkout and a CUDA build of PyTorch, nothing else. Out: `build/gpu_check.json` and `build/gpu_check.md`, written
anew after each measurement; exit status 0 if smoke, tests and losses hold, 1 if not, 130 if it was interrupted.
Three stages, the most valuable first: `smoke`, `tests` (tests/cuda), `bench`. What the minutes do not suffice for is
listed as not run. Every contender runs in a process of its own with empty compiler caches; those of a workload that are
compared with one another start side by side and take turns round by round. One that fails, dies or does not answer in
time is a row with its error, and the rest goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu.contenders import GPU_CONTENDERS, LAZY_CONTENDERS, serve
from gpu.results import TESTS_KEY, GpuResults, bench_key, failures, make_gpu_tables, smoke_key
from gpu.smoke import CHECKS
from gpu.training import GPU_WORKLOADS, Scale, fitting_batch
from shared.checkout import ROOT, commit, sources
from shared.command_line import names_among
from shared.workers import Reply, Worker, WorkerFailed, limited

# Contenders that start side by side. The first ones have the goals; the last one tries kernels on the GPU to choose
# the fastest, and would choose wrongly beside others.
PASSES = (("eager", "reduce-overhead", "lazy", "captured"), ("compile", "captured-parts"), ("max-autotune",))

# Packages beside PyTorch that lazy_backend needs, and that are imitated where they are missing.
_NEEDED = ("cachetools", "platformdirs")

# Seconds kept for what follows a start, and without which none is begun.
_RESERVE, _LEAST = 10.0, 15.0

# Seconds for a worker to end by itself. Nothing of it is needed any more.
_PATIENCE = 2.0

# The tests' share of the minutes.
_TESTS_SHARE = 0.3

# Seconds in all from which on the slow tests, which wait for a compiler, are run as well.
_LONG = 900.0

OUT_OF_TIME = "the minutes were over"
NO_DEVICE = "smoke found no device"


@dataclass(frozen=True, slots=True)
class Budget:
    """Seconds that are left."""

    seconds: float
    clock: Callable[[], float] = time.monotonic
    begin: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "begin", self.clock())

    def left(self) -> float:
        return self.seconds - (self.clock() - self.begin)


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """What is to be measured, and how."""

    device: str
    scale: Scale
    stages: Sequence[str]
    workloads: Sequence[str]
    contenders: Sequence[str]
    limit: float  # seconds until a worker must have answered
    jobs: int  # starts side by side
    rounds: int
    program: Path  # what workers run: this file, or one that adds contenders to it

    def worker(self, contender: str = "eager", workload: str = "mlp", scale: Scale | None = None) -> Worker:
        """A process for one contender on one workload."""
        chosen = scale or self.scale
        command = [sys.executable, str(self.program), "--worker", contender, "--workloads", workload]
        command += ["--device", self.device, "--batch", str(chosen.batch)]
        command += ["--tiny"] * chosen.tiny + ["--channels-last"] * chosen.channels_last
        autoload = "1" if contender in LAZY_CONTENDERS else "0"
        # tiny steps on a CPU are over before a second thread is awake
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} if self.device == "cpu" else {}
        environment = {**paths(), **threads, "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload}
        # tiny models show whether the tool works, not how fast loops are
        is_timed = contender in LAZY_CONTENDERS and not chosen.tiny
        return Worker(contender, command, environment, _PATIENCE, finds_recorder=is_timed)


def missing() -> list[str]:
    """Packages that have to be imitated here."""
    return [name for name in _NEEDED if importlib.util.find_spec(name) is None]


def paths() -> dict[str, str]:
    """Where programs find lazy_backend without its installation."""
    stand_ins = [str(ROOT / "tools" / "gpu" / "stand_ins")] if missing() else []
    before = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), *before, *stand_ins])}


# ----- stages


@dataclass(slots=True)
class GpuCheck:
    """One run of the tool."""

    plan: GpuPlan
    results: GpuResults
    budget: Budget

    def run(self) -> None:
        """All stages that were asked for."""
        stages = {"smoke": self.smoke, "tests": self.tests, "bench": self.bench}
        for name in self.plan.stages:
            stages[name]()

    def _has_device(self) -> bool:
        return self.results.records.get(smoke_key(next(iter(CHECKS))), {}).get("status") != "failed"

    # ----- smoke

    def smoke(self) -> None:
        """The checks one by one, in one process as long as that lives."""
        with contextlib.ExitStack() as stack:
            worker: Worker | None = None
            for check in CHECKS:
                key = smoke_key(check)
                if self.results.is_measured(key):
                    continue
                if self.budget.left() < _LEAST:
                    self.results.put(key, "not run", why=OUT_OF_TIME)
                    continue
                if not self._has_device():
                    self.results.put(key, "not run", why=NO_DEVICE)
                    continue
                _progress(f"smoke: {check}")
                if worker is None or not worker.is_alive():
                    worker = stack.enter_context(self.plan.worker("lazy"))
                begin = time.monotonic()
                try:
                    reply = worker.ask("smoke", self._limit(), check=check)
                except WorkerFailed as failure:
                    self.results.put(key, "failed", error=str(failure), seconds=time.monotonic() - begin)
                else:
                    self.results.put(key, "ok", **reply, seconds=time.monotonic() - begin)

    def _limit(self) -> float:
        return max(1.0, min(self.plan.limit, self.budget.left() - _RESERVE))

    # ----- tests

    def tests(self) -> None:
        """tests/cuda; on the CPU they are only collected, since the usual test run has them."""
        if self.results.is_measured(TESTS_KEY):
            return
        if importlib.util.find_spec("pytest") is None:
            self.results.put(TESTS_KEY, "not run", why="pytest is not installed")
            return
        limit = min(self.budget.left() - _RESERVE, _TESTS_SHARE * self.budget.seconds)
        if limit <= 0 or not self._has_device():
            self.results.put(TESTS_KEY, "not run", why=NO_DEVICE if limit > 0 else OUT_OF_TIME)
            return
        _progress(f"tests, at most {limit:.0f} s")
        # what another version of PyTorch warns of is no failure
        options = ["-v", "-rfE", "-p", "no:cacheprovider", "-W", "default", "--durations=5"]
        options += ["--collect-only", "-q", "-q"] if self.plan.device == "cpu" else []
        options += ["--runslow"] if self.budget.seconds > _LONG else []
        options += ["--timeout=90"] if importlib.util.find_spec("pytest_timeout") is not None else []
        command = [sys.executable, "-m", "pytest", str(ROOT / "tests" / "cuda"), *options]
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
            log = Path(folder) / "log"
            with limited(command, log, cwd=ROOT, env={**os.environ, **paths(), "PYTHONUNBUFFERED": "1"}) as process:
                try:
                    status: int | None = process.wait(limit)
                except subprocess.TimeoutExpired:
                    status = None
            text = log.read_text(errors="replace")
        self._keep_tests(status, text, limit, time.monotonic() - begin)

    def _keep_tests(self, status: int | None, text: str, limit: float, seconds: float) -> None:
        lines = text.strip().splitlines() or ["pytest printed nothing"]
        failed = [line[:300] for line in lines if re.match(r"(FAILED|ERROR) ", line)]
        if status is None:
            ends = [found[1] for line in lines if (found := re.search(r"::.* (PASSED|FAILED|ERROR|SKIPPED)\b", line))]
            counts = ", ".join(f"{ends.count(end)} {end.lower()}" for end in dict.fromkeys(ends)) or "no test ended"
            error = f"not over after {limit:.0f} s: {counts}; pytest's last line: {lines[-1][:300]}"
            failed = [line[:300] for line in lines if re.search(r"::.* (FAILED|ERROR)\b", line)]
            self.results.put(TESTS_KEY, "failed", error=error, lines=failed, seconds=seconds, log=text[-20_000:])
        elif status:
            error = lines[-1].strip("= ")[:300]
            self.results.put(TESTS_KEY, "failed", error=error, lines=failed, seconds=seconds, log=text[-20_000:])
        else:
            self.results.put(TESTS_KEY, "ok", summary=lines[-1].strip("= ")[:300], seconds=seconds)

    # ----- bench

    def bench(self) -> None:
        """All workloads with the contenders of the goals, then with the others."""
        for names in (*PASSES, self._extras()):
            for workload in self.plan.workloads:
                known = [name for name in names if name in self.plan.contenders and self._takes_part(name, workload)]
                wanted = [name for name in known if not self.results.is_measured(bench_key(workload, name))]
                if wanted:
                    self._bench_safely(workload, wanted)

    def _takes_part(self, contender: str, workload: str) -> bool:
        """On a CPU, where nothing is measured, every contender and every workload are tried, but not each with each."""
        is_first = workload == self.plan.workloads[0]
        return is_first or self.plan.device == "cuda" or contender in ("eager", "lazy", "captured")

    def _extras(self) -> list[str]:
        return [name for name in self.plan.contenders if not any(name in names for names in PASSES)]

    def _bench_safely(self, workload: str, names: list[str]) -> None:
        try:
            self._bench_group(workload, names)
        except Exception as error:  # a fault of this tool must not cost the measurements that follow
            told = f"gpu_check itself: {type(error).__name__}: {error}"
            for name in names:
                if not self.results.is_measured(bench_key(workload, name)):
                    self.results.put(bench_key(workload, name), "failed", error=told)

    def _bench_group(self, workload: str, names: list[str]) -> None:
        if self.budget.left() < _LEAST + _RESERVE or not self._has_device():
            why = OUT_OF_TIME if self._has_device() else NO_DEVICE
            for name in names:
                self.results.put(bench_key(workload, name), "not run", why=why)
            return
        scale = self._scale(workload)
        found: dict[str, dict[str, Any]] = {
            name: {"batch": scale.batch, "tiny": scale.tiny, "beside": names} for name in names
        }
        with contextlib.ExitStack() as stack:
            # left last: its threads wait for answers, which the end of the workers gives them
            pool = stack.enter_context(ThreadPoolExecutor(self.plan.jobs))
            workers = [stack.enter_context(self.plan.worker(name, workload, scale)) for name in names]
            running = self._started(workload, workers, found, pool)
            for number in range(self.plan.rounds):
                _progress(f"{workload}: round {number + 1} of {self.plan.rounds}")
                running = [w for w in _rotated(running, number) if self._is_round_done(workload, w, found[w.name])]
            for worker in running:
                self._finish(workload, worker, found[worker.name])

    def _scale(self, workload: str) -> Scale:
        given = self.plan.scale
        if workload != "gpt2" or given.batch or given.tiny:
            return given
        free = self.results.about.get("free_bytes", 16e9)
        return Scale(given.tiny, given.channels_last, fitting_batch(free, max(map(len, PASSES))))

    def _started(
        self, workload: str, workers: Sequence[Worker], found: dict[str, dict[str, Any]], pool: ThreadPoolExecutor
    ) -> list[Worker]:
        """Cold starts, side by side. Returns who got through."""
        _progress(f"{workload}: cold starts of {', '.join(worker.name for worker in workers)}")
        limit = self._limit()
        futures: dict[Future[Reply], Worker] = {
            pool.submit(worker.ask, "start", limit, limit=0.75 * limit): worker for worker in workers
        }
        running = []
        for future, worker in futures.items():
            key = bench_key(workload, worker.name)
            try:
                found[worker.name]["start"] = future.result()
            except WorkerFailed as failure:
                self.results.put(key, "failed", error=str(failure), **found[worker.name])
            else:
                self.results.put(key, "unfinished", **found[worker.name])
                running.append(worker)
        return running

    def _is_round_done(self, workload: str, worker: Worker, found: dict[str, Any]) -> bool:
        """One round; False if the worker is out of the race."""
        final = found["start"]["final"]
        steps = 3 if self.plan.scale.tiny else max(3, min(3000, round(0.4 / final)))
        try:
            reply = worker.ask("round", self._limit(), steps=steps)
        except WorkerFailed as failure:
            self.results.put(bench_key(workload, worker.name), "failed", error=str(failure), **found)
            return False
        found.setdefault("rounds", []).append(1e3 * reply["seconds"] / steps)
        found.setdefault("device_rounds", []).append(1e3 * reply["device_seconds"] / steps)
        found["late_compiles"] = reply["compiles"] - found["start"]["compiles"]
        self.results.put(bench_key(workload, worker.name), "unfinished", **found)
        return True

    def _finish(self, workload: str, worker: Worker, found: dict[str, Any]) -> None:
        try:
            found["memory"] = worker.ask("memory", self._limit(), steps=3)
            found["graphs"] = worker.ask("graphs", self._limit())
        except WorkerFailed as failure:
            self.results.put(bench_key(workload, worker.name), "failed", error=str(failure), **found)
            return
        self.results.put(bench_key(workload, worker.name), "ok", **found)


def _rotated(workers: list[Worker], by: int) -> list[Worker]:
    """Nobody is always the one that runs after the slowest."""
    place = by % len(workers) if workers else 0
    return workers[place:] + workers[:place]


def _progress(text: str) -> None:
    print(f"gpu_check: {text}", file=sys.stderr, flush=True)


# ----- the header


def describe(plan: GpuPlan) -> dict[str, Any]:
    """What is measured on what."""
    try:
        with plan.worker() as worker:
            found: dict[str, Any] = worker.ask("about", plan.limit)
    except WorkerFailed as failure:
        found = {"device": f"none: {failure}"}
    scale = ("tiny" if plan.scale.tiny else "real") + (", channels last" if plan.scale.channels_last else "")
    found |= {
        "driver": _driver() if plan.device == "cuda" else "-",
        "cores": os.cpu_count(),
        "commit": commit() or "unknown",
        "sources": sources(),
        "scale": scale + (f", batch {plan.scale.batch}" if plan.scale.batch else ""),
        "starts side by side": plan.jobs,
        "stand-ins": ", ".join(missing()) or "none",
    }
    return found


def _driver() -> str:
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return (shown.split() or ["unknown"])[0]


# ----- command line

STAGES = ("smoke", "tests", "bench")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny models, for the tool itself"
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="what does not fit is not run (default: 8)")
    parser.add_argument(
        "--only", type=names_among(STAGES), default=STAGES, help=f"comma-separated: {', '.join(STAGES)}"
    )
    parser.add_argument("--skip", type=names_among(STAGES), default=(), help="stages to leave out")
    parser.add_argument("--workloads", type=names_among(GPU_WORKLOADS), default=tuple(GPU_WORKLOADS),
                        help=f"comma-separated: {', '.join(GPU_WORKLOADS)}")  # fmt: skip
    parser.add_argument("--contenders", type=names_among(GPU_CONTENDERS), default=tuple(GPU_CONTENDERS),
                        help=f"comma-separated: {', '.join(GPU_CONTENDERS)}")  # fmt: skip
    parser.add_argument("--limit", type=float, default=150.0, help="seconds for a cold start of one contender")
    parser.add_argument("--jobs", type=int, default=max(2, min(4, (os.cpu_count() or 2) // 3)),
                        help="cold starts side by side (default: one for three cores, 2 to 4)")  # fmt: skip
    parser.add_argument("--batch", type=int, default=0, help="sequences of GPT-2 (default: what fits)")
    parser.add_argument("--channels-last", action="store_true", help="the memory format of ResNet-50")
    parser.add_argument("--tiny", action="store_true", help="tiny models; --device cpu has them always")
    parser.add_argument("--resume", action="store_true", help="keep what was measured, run what is missing")
    parser.add_argument("--out", type=Path, default=ROOT / "build", metavar="FOLDER", help="results go here")
    parser.add_argument("--worker", choices=GPU_CONTENDERS, help=argparse.SUPPRESS)
    return parser


def _plan(arguments: argparse.Namespace, program: Path) -> GpuPlan:
    tiny = arguments.tiny or arguments.device == "cpu"
    return GpuPlan(
        device=arguments.device,
        scale=Scale(tiny, arguments.channels_last, arguments.batch),
        stages=[name for name in STAGES if name in arguments.only and name not in arguments.skip],
        workloads=arguments.workloads,
        contenders=arguments.contenders,
        limit=arguments.limit,
        jobs=arguments.jobs,
        rounds=2 if tiny else 5,
        program=program,
    )


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def main(program: Path = Path(__file__)) -> int:
    """Run the command line. `program`: the file that workers run; it calls this function as well."""
    arguments = _parser().parse_args()
    plan = _plan(arguments, program.resolve())
    sys.path += paths()["PYTHONPATH"].split(os.pathsep)
    if arguments.worker:
        serve(arguments.worker, arguments.workloads[0], plan.device, plan.scale)
        return 0
    signal.signal(signal.SIGTERM, _interrupt)  # as a batch system ends what takes too long
    budget = Budget(60 * arguments.minutes)
    results = GpuResults(arguments.out, describe(plan))
    if arguments.resume:
        try:
            results.load()
        except ValueError as error:
            print(f"gpu_check: {error}", file=sys.stderr)
            return 2
    status = 0
    try:
        GpuCheck(plan, results, budget).run()
        results.about["ended"] = "regularly"
    except KeyboardInterrupt:
        results.about["ended"] = "interrupted; --resume goes on"
        status = 130
    results.about["seconds"] = round(budget.seconds - budget.left(), 1)
    results.write()
    print("\n\n".join(table.aligned() for table in make_gpu_tables(results.records) if table.rows))
    wrong = failures(results.records)
    print(
        f"\n{results.markdown}: " + ("\n  ".join(["does not hold:", *wrong]) if wrong else "smoke, tests, losses hold")
    )
    return status or bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
