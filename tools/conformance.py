"""Conformance: PyTorch's own databases of operators, modules and optimizers, on device="lazy" against eager.

    python tools/conformance.py --ops '^add' --jobs 2
    python tools/conformance.py --jobs 2 --baseline --resume --write docs/op_support.md
    python tools/conformance.py --databases op --modes interpreted --every-dtype --jobs 2
    python tools/conformance.py --show op/add/forward/float32/interpreted

In: flags. Out: one line of JSON per case in a file, a summary on stdout, and with --write the table for the docs.
Cases run in worker processes, which may crash or hang: the case is then recorded as such and the worker replaced. The
file is written case by case, so that nothing is lost when the tool is interrupted; --resume goes on from there.
With --baseline the same is measured on PyTorch's Lazy Tensor Core, in workers that do not load lazy_backend.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import multiprocessing
import os
import re
import sys
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch
from conformance_suite.cases import DATABASES, MODES, VARIANTS, Case, baseline_of, list_cases, parse_case
from conformance_suite.checks import Result, run_case
from conformance_suite.tables import Record, summary, write_document
from conformance_suite.targets import TARGETS
from shared.checkout import ROOT, commit
from shared.command_line import names_among
from tqdm import tqdm

DEFAULT_RESULTS = ROOT / "build" / "conformance.jsonl"
SECONDS_PER_CASE = {**dict.fromkeys(MODES, 120), "twice": 60, "inductor": 300}
CASES_PER_WORKER = 200  # then it is replaced: caches of PyTorch's and ours grow

Job = tuple[str, Case]  # the target's name and what to run on it


# ----- workers


def serve(connection: Any, target_name: str, crash_log: str) -> None:
    """What a worker process does: run the cases it is sent, until it is sent None."""
    log = open(crash_log, "w")  # noqa: SIM115 -- open until the process ends
    faulthandler.enable(log)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    torch.set_num_threads(1)
    target = TARGETS[target_name]()
    connection.send("ready")
    while (case := connection.recv()) is not None:
        try:
            result = run_case(case, target)
        except Exception as error:
            result = Result(case.key, target_name, "fail", messages=[f"{type(error).__name__}: {error}"[:300]])
        connection.send(result.as_json())


class Worker:
    """A process that runs cases one by one on one target."""

    _environment = threading.Lock()

    def __init__(self, target: str) -> None:
        self.target = target
        self.cases = 0
        handle, self.crash_log = tempfile.mkstemp(prefix="conformance-")
        os.close(handle)
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other, target, self.crash_log), daemon=True)
        with self._environment:  # a new process takes over the environment as it is
            os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0" if target == "ltc" else "1"
            self.process.start()
        other.close()
        if not self.connection.poll(600) or self.connection.recv() != "ready":
            raise RuntimeError(f"a worker for {target} does not start")

    def run(self, case: Case) -> Result:
        """What came of a case; the worker is unusable after a crash or a timeout."""
        self.cases += 1
        limit = SECONDS_PER_CASE[case.mode]
        try:
            self.connection.send(case)
            if not self.connection.poll(limit):
                return Result(case.key, self.target, "timeout", messages=[f"longer than {limit} s"], seconds=limit)
            return Result(**self.connection.recv())
        except (EOFError, OSError):
            return Result(case.key, self.target, "crash", messages=[self._cause_of_death()])

    def _cause_of_death(self) -> str:
        self.process.join(10)
        lines = Path(self.crash_log).read_text().splitlines()
        return (lines or [f"the process ended with code {self.process.exitcode}"])[0]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.send(None)
        self.process.join(0.5)
        self.process.kill()
        self.process.join()
        self.connection.close()
        Path(self.crash_log).unlink(missing_ok=True)


class Pool:
    """Threads that feed one worker each. Results arrive in the order in which they are ready."""

    def __init__(self, jobs: Iterable[Job], size: int) -> None:
        self._jobs = iter(jobs)
        self._lock = threading.Condition()
        self._results: list[Result | BaseException] = []
        self._stopped = False
        self._threads = [threading.Thread(target=self._feed, daemon=True) for _ in range(size)]

    def __iter__(self) -> Iterator[Result]:
        for thread in self._threads:
            thread.start()
        while True:
            with self._lock:
                while not self._results and any(thread.is_alive() for thread in self._threads):
                    self._lock.wait(0.2)
                if not self._results:
                    return
                result = self._results.pop(0)
            if isinstance(result, BaseException):
                raise result
            yield result

    def stop(self) -> None:
        self._stopped = True

    def _next_job(self) -> Job | None:
        with self._lock:
            return None if self._stopped else next(self._jobs, None)

    def _feed(self) -> None:
        worker: Worker | None = None
        try:
            while (job := self._next_job()) is not None:
                target, case = job
                if worker is not None and (worker.target != target or worker.cases >= CASES_PER_WORKER):
                    worker.close()
                    worker = None
                worker = worker or Worker(target)
                result = worker.run(case)
                if result.status in ("crash", "timeout"):
                    worker.close()
                    worker = None
                self._add(result)
        except BaseException as error:
            self._add(error)
        finally:
            if worker is not None:
                worker.close()

    def _add(self, result: Result | BaseException) -> None:
        with self._lock:
            self._results.append(result)
            self._lock.notify_all()


# ----- results


@dataclass(frozen=True, slots=True)
class Store:
    """The file of results: a line per case; of several lines for one case the last counts."""

    path: Path
    commit: str = ""  # of this package, noted with each result

    def load(self) -> dict[tuple[str, str], Record]:
        found: dict[tuple[str, str], Record] = {}
        if self.path.exists():
            for line in self.path.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):  # the last line of an interrupted run
                    record = json.loads(line)
                    found[record["target"], record["case"]] = record
        return found

    def clear(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("")

    def append(self, result: Result) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({**result.as_json(), "commit": self.commit}) + "\n")


def run_all(jobs: Sequence[Job], store: Store, size: int) -> None:
    """Run `jobs` in `size` workers and store what comes of them."""
    counted: Counter[str] = Counter()
    pool = Pool(jobs, size)
    with tqdm(total=len(jobs), unit="case", disable=not jobs) as bar:
        try:
            for result in pool:
                store.append(result)
                counted[result.status] += 1
                bar.set_postfix(counted, refresh=False)
                bar.update()
        finally:
            pool.stop()


# ----- command line


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from error
    return text


def _case(text: str) -> Case:
    try:
        return parse_case(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _parser() -> argparse.ArgumentParser:
    modes = "; ".join(f"{name}: {text}" for name, text in MODES.items())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", type=_pattern, default="", metavar="REGEX", help="only entries whose name matches")
    parser.add_argument("--databases", type=names_among(DATABASES), default=DATABASES, help=", ".join(DATABASES))
    parser.add_argument("--variants", type=names_among(VARIANTS), default=VARIANTS, help=", ".join(VARIANTS))
    parser.add_argument("--modes", type=names_among(MODES), default=tuple(MODES), help=modes)
    parser.add_argument("--every-dtype", action="store_true", help="operators in every dtype, not in two of them")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes")
    parser.add_argument("--resume", action="store_true", help="keep the results there are, run what is missing")
    parser.add_argument("--only-failed", action="store_true", help="run again what did not pass, keep the rest")
    parser.add_argument("--baseline", action="store_true", help="also measure PyTorch's Lazy Tensor Core")
    parser.add_argument("--results", type=Path, default=DEFAULT_RESULTS, metavar="FILE.jsonl", help="results go here")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="write the table of all results in the file")
    parser.add_argument("--list", action="store_true", help="print the cases, run nothing")
    parser.add_argument("--show", type=_case, metavar="CASE", help="run one case here and print the full traceback")
    parser.add_argument("--target", choices=("lazy", "ltc"), default="lazy", help="for --show")
    return parser


def show(case: Case, target_name: str) -> int:
    """Run a case in this process; a difference is printed with its traceback."""
    if target_name == "ltc" and os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0":
        print("conformance: lazy_backend is loaded: set TORCH_DEVICE_BACKEND_AUTOLOAD=0 to look at LTC")
        return 2
    torch.set_num_threads(1)  # as in a worker
    target = TARGETS[target_name]()
    result = run_case(case, target)
    print(json.dumps(result.as_json(), indent=1))
    if result.status != "fail":
        return 0
    try:
        run_case(case, target, debug=True)
    except Exception:
        traceback.print_exc()
    return 1


def _jobs(cases: Sequence[Case], arguments: argparse.Namespace, known: dict[tuple[str, str], Record]) -> list[Job]:
    jobs = [("lazy", case) for case in cases]
    if arguments.baseline:
        jobs += [("ltc", case) for case in baseline_of(cases)]
    if arguments.only_failed:
        failed = {key for key, record in known.items() if record["status"] not in ("pass", "skip")}
        return [job for job in jobs if (job[0], job[1].key) in failed]
    return [job for job in jobs if (job[0], job[1].key) not in known]


def main() -> int:
    arguments = _parser().parse_args()
    if arguments.show:
        return show(arguments.show, arguments.target)
    every_dtype = arguments.every_dtype
    cases = list_cases(arguments.databases, arguments.ops, arguments.variants, arguments.modes, every_dtype)
    if not cases:
        print("conformance: no case matches; --list without other flags prints all of them", file=sys.stderr)
        return 2
    if arguments.list:
        print("\n".join(case.key for case in cases))
        return 0
    store = Store(arguments.results, commit())
    if not (arguments.resume or arguments.only_failed):
        store.clear()
    jobs = _jobs(cases, arguments, store.load())
    try:
        run_all(jobs, store, arguments.jobs)
    except KeyboardInterrupt:
        print(f"conformance: interrupted; --resume goes on from {arguments.results}", file=sys.stderr)
        return 130
    listed = {case.key for case in list_cases(every_dtype=every_dtype)}  # the file may hold cases of an earlier version
    records = [record for (_, key), record in store.load().items() if key in listed]
    print(summary(records))
    if arguments.write:
        write_document(records, arguments.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
