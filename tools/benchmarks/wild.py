"""How fast documented programs of other packages run, and whether their losses are eager's.

In: names of programs, numbers of threads. Out: a table, and raw figures as JSON. Run by `bench.py --wild`.
A program runs twice, each time in a process of its own: in eager, and on the lazy device with default settings. Once
both have settled, the processes take turns, a window of steps each; ratios are medians over pairs of windows. A program
that gives no answer in time is a row of the table, as is one whose package is not installed.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Generator, Sequence
from itertools import product
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from shared.tables import Result, Table
from shared.workers import Worker, WorkerFailed, module_of, private_stdout

from benchmarks.wild_programs import PROGRAMS

DEVICES = ("cpu", "lazy")

_PATIENCE = 300.0  # seconds for an answer
_WINDOW = 0.5  # seconds, at least
_COMPARED = 60  # steps whose losses are compared

# Rounds of steps until nothing is compiled any more. A round ends after so many steps or seconds.
_FEWEST_ROUNDS, _MOST_ROUNDS, _ROUND_STEPS, _ROUND_SECONDS = 3, 12, 20, 10.0

_COUNTERS = ("GraphCut", "UncachedCompile", "Compile", "MarkStep")
_CAUSES = ("GraphCut: ", "Fallback: ", "CompileDeclined: ")


# ----- within the process of a program


class Steps:
    """Steps of a program, which calls `end` or `ended` after each. Commands are answered in between."""

    integrates = True  # whether trainers run as this package's integrations have them

    def __init__(self, device: str) -> None:
        self.device = device
        self._lazy = importlib.import_module("lazy_backend") if device == "lazy" else None
        self._losses: list[Any] = []
        self._count = 0
        self._commands = self._answers()
        next(self._commands)

    def end(self, loss: Any) -> None:
        """End a step of a loop that the program owns."""
        if self._lazy:
            self._lazy.mark_step()
        self.ended(loss)

    def ended(self, loss: Any = None) -> None:
        """Note the end of a step of a loop that the package owns."""
        self._count += 1
        if loss is not None and self._count <= _COMPARED:
            self._losses.append(loss)  # not detached: that would be a call of the next step
        next(self._commands)

    def _answers(self) -> Generator[None]:
        replies = private_stdout()
        yield
        for line in sys.stdin:
            answer = {"settle": self._settle, "window": self._window}[json.loads(line)["command"]]
            reply = yield from answer()
            print(json.dumps(reply), file=replies, flush=True)
        os._exit(0)  # a trainer would go on

    def _settle(self) -> Generator[None, None, Result]:
        for number in range(_MOST_ROUNDS):
            compiles, start = self._counts()["Compile"], perf_counter()
            for _ in range(_ROUND_STEPS):
                yield
                if perf_counter() - start > _ROUND_SECONDS:
                    break
            if self._lazy:
                self._lazy.wait_for_compiles()
            if number + 1 >= _FEWEST_ROUNDS and self._counts()["Compile"] == compiles:
                break
        losses = [float(loss) for loss in self._losses]
        yield  # the step that begins with these reads is not part of a window
        return {"losses": losses, "counts": self._counts()}

    def _window(self) -> Generator[None, None, Result]:
        counts, count, start, cpu = self._counts(), self._count, perf_counter(), process_time()
        while perf_counter() - start < _WINDOW:
            yield
        if self._lazy:
            self._lazy.wait_device_ops()
        seconds, cpu = perf_counter() - start, process_time() - cpu
        changes = {name: number - counts.get(name, 0) for name, number in self._counts().items()}
        counts = {name: number for name, number in changes.items() if number}
        return {"steps": self._count - count, "seconds": seconds, "cpu": cpu, "counts": counts}

    def _counts(self) -> dict[str, int]:
        counters = self._lazy.metrics.counters() if self._lazy else {}
        causes = {name: number for name, number in counters.items() if name.startswith(_CAUSES)}
        return {name: counters.get(name, 0) for name in _COUNTERS} | causes


def serve(name: str, size: str, device: str) -> None:
    """Run a program until nobody asks any more. An error of the program ends the process."""
    warnings.simplefilter("ignore")
    os.chdir(tempfile.gettempdir())  # trainers write folders
    torch.manual_seed(0)
    PROGRAMS[name].run(Steps(device), **PROGRAMS[name].sizes[size])


# ----- beside it


def worker(name: str, call: str, device: str, threads: int, cache: str) -> Worker:
    """A process in which `call`, such as `benchmarks.wild.serve(...)`, serves a program."""
    environment = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    environment |= {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1" if device == "lazy" else "0", "LAZY_BACKEND_CACHE_DIR": cache}
    code = f"import {module_of(call)}; {call}"
    return Worker(name, [sys.executable, "-c", code], environment, patience=5.0)


def fill(cache: str) -> None:
    """Leave the recorder in a folder, as the self-check does: programs have it from their second run on."""
    check = [sys.executable, "-m", "lazy_backend"]
    subprocess.run(check, env={**os.environ, "LAZY_BACKEND_CACHE_DIR": cache}, stdout=sys.stderr, check=False)


def ask(worker: Worker, command: str) -> Result:
    try:
        return worker.ask(command, _PATIENCE)
    except WorkerFailed as failure:
        raise WorkerFailed(f"{worker.name}: {failure}") from None


def measure(name: str, size: str, threads: int, rounds: int, cache: str) -> Result:
    """Figures of both processes, or the reason why there are none."""
    missing = [package for package in PROGRAMS[name].packages if importlib.util.find_spec(package) is None]
    if missing:
        return {"failure": f"not installed: {', '.join(missing)}"}
    try:
        with contextlib.ExitStack() as stack:
            calls = {device: f"benchmarks.wild.serve({name!r}, {size!r}, {device!r})" for device in DEVICES}
            workers = [stack.enter_context(worker(device, calls[device], device, threads, cache)) for device in DEVICES]
            settled = [ask(worker, "settle") for worker in workers]
            pairs = [[ask(worker, "window") for worker in workers] for _ in range(rounds)]
    except WorkerFailed as failure:
        return {"failure": str(failure)}
    return {"settled": dict(zip(DEVICES, settled, strict=True)), "pairs": pairs}


def _row(result: Result) -> list[str]:
    about = [result["program"], result["size"], str(result["threads"])]
    if "failure" in result:
        return [*about, result["failure"], *["-"] * 8]
    steps = {key: [[window[key] / window["steps"] for window in pair] for pair in result["pairs"]]
             for key in ("seconds", "cpu")}  # fmt: skip
    times = [f"{1e3 * statistics.median(pair[place] for pair in steps['seconds']):.2f}" for place in (0, 1)]
    ratios = [f"{statistics.median(eager / lazy for eager, lazy in pairs):.2f}" for pairs in steps.values()]
    windows = [pair[1] for pair in result["pairs"]]
    late = {name: sum(window["counts"].get(name, 0) for window in windows) for name in _COUNTERS}
    cuts = f"{late['GraphCut'] / sum(window['steps'] for window in windows):.1f}"
    compiles = [str(result["settled"]["lazy"]["counts"]["Compile"]), str(late["Compile"])]
    return [*about, *times, *ratios, cuts, str(late["UncachedCompile"]), *compiles, _losses(result)]


def _losses(result: Result) -> str:
    found = difference([result["settled"][device]["losses"] for device in DEVICES])
    return f"drawn, {found}" if PROGRAMS[result["program"]].draws else found


def difference(losses: Sequence[Sequence[float]]) -> str:
    """The largest difference between losses in eager and others."""
    pairs = list(zip(*losses, strict=False))  # a slow process has made fewer steps
    if not pairs:
        return "none"
    largest = max(abs(eager - lazy) / max(abs(eager), 1e-12) for eager, lazy in pairs)
    return "equal" if largest == 0 else f"{largest:.0e}"


def main(
    names: Sequence[str], threads: Sequence[int], rounds: int, show: Callable[[Table], str], written: Path | None
) -> None:
    """Print the table, with the rows in the order in which they are measured, and write the figures after each."""
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="wild-") as folder:
        cache = os.environ.get("LAZY_BACKEND_CACHE_DIR", folder)
        fill(cache)
        for number, name in product(threads, names):
            for size in PROGRAMS[name].sizes:
                about = {"program": name, "size": size, "threads": number}
                results.append(about | measure(name, size, number, rounds, cache))
                print("bench:", *_row(results[-1]), file=sys.stderr, flush=True)
                if written:
                    written.write_text(json.dumps(results, indent=1))
    print(show(table(results)))


def table(results: Sequence[Result]) -> Table:
    """A row for each result of `measure`."""
    head = ["program", "size", "threads", "eager, ms", "lazy, ms", "speed / eager's", "by CPU time", "cuts a step"]
    rows = [_row(result) for result in results]
    return Table("Programs of other packages", [*head, "misses", "compiles", "late compiles", "losses"], rows)
