"""Random programs on the lazy device and in eager, compared bit by bit.

    python tools/fuzz.py --programs 10000 --seed 0
    python tools/fuzz.py --programs 1000 --backend aot_eager
    python tools/fuzz.py --programs 3000 --backend aot_eager --kind chains
    python tools/fuzz.py --programs 500 --replay
    python tools/fuzz.py --programs 500 --replay functions
    python tools/fuzz.py --programs 500 --replay carried
    python tools/fuzz.py --programs 500 --trials 20
    python tools/fuzz.py --programs 5000 --trials 1 --backend aot_eager_decomp_partition
    python tools/fuzz.py --programs 2000 --planted

`--trials` compiles programs with Inductor or another backend, so many in one graph, or training loops (`--kind loops`),
or programs of floats with other numbers in each run (`--kind floats`), and counts what came of the trials of their
plans: a plan that is refused is a fault of the compiler or a false alarm. `--planted` plants a fault at a random place
of what a backend makes of each program: one that makes a difference and whose plan is used is missed.
`--replay` runs random training loops instead, with captured modules and optimizers, or with captured functions whose
state changes between calls, and compares them with the same loops as written.

In: flags. Out: a summary on stdout, after each program that differs, made as small as it still fails, as a script that
runs by itself. The exit status is 1 if any did.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from harness import NoSync, assert_same, reset_state, settle
from planted_faults import float_program, plant
from random_functions import random_function
from random_loops import KNOWN, NOT_COMPARED, RandomLoop, as_it_is, random_loop
from random_loops import _run as run_loop
from random_loops import failure as replay_failure
from random_loops import minimize as minimize_loop
from random_programs import RandomProgram, minimize, random_chains, random_program

import lazy_backend
from lazy_backend import config, metrics

_COMPILES = ("Compile", "CompileFailed", "CompileDeclined")
_COUNTERS = ("GraphCut", "UncachedCompile", *_COMPILES)
_VERDICTS = (*_COMPILES, "PlanAgreed", "PlanSuspected", "PlanRefused", "PlanRepaired")

# What `--replay` runs, and the counter of what is replayed.
_REPLAYED = {"loops": "RegionJump", "functions": "CapturedCall", "carried": "CapturedCall"}

Sync = Callable[[], None]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=1000, help="how many (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the next ones follow (default 0)")
    parser.add_argument("--backend", default="interpreted", help="'interpreted' (default), or a torch.compile backend")
    parser.add_argument(
        "--kind", choices=("all", "chains", "floats", "loops"), default="all", help="'chains': of views and writes only"
    )
    parser.add_argument("--steps", type=int, default=24, help="statements tried per program (default 24)")
    parser.add_argument("--failures", type=int, default=10, help="stop after so many (default 10)")
    parser.add_argument(
        "--replay",
        nargs="?",
        const="loops",
        choices=tuple(_REPLAYED),
        help="loops: with captured modules and optimizers (default); functions: captured ones with state; "
        "carried: these, where code that they come to by a detour reads what changes",
    )
    parser.add_argument("--trials", type=int, default=0, help="compile so many together, and count verdicts of trials")
    parser.add_argument("--progress", type=int, default=0, help="print counts each so many programs")
    parser.add_argument("--planted", action="store_true", help="count the planted faults that trials find")
    parser.add_argument(
        "--known", action="append", choices=tuple(KNOWN), default=[], help="loops may have defects of this known class"
    )
    return parser.parse_args()


def failure(program: RandomProgram, backend: str, sync: Sync) -> str | None:
    """What differs, as text; None if nothing does, or if the program does not run in eager either."""
    try:
        expected = program.run("cpu", NoSync())
    except Exception:
        return None  # minimising took something it needs
    reset_state()
    if backend == "interpreted":
        config.compile = "off"
    else:
        config.backend = backend
    try:
        # the second run compiles, the third uses what was compiled
        for _ in range(1 if backend == "interpreted" else 3):
            difference = _difference(program.run("lazy", sync), expected)
            if difference:
                return difference
    except Exception as error:
        return "".join(traceback.format_exception_only(error)).strip()
    finally:
        unraised = settle()
    return f"nobody was told of {unraised}" if unraised else None


def _difference(found: list[Any], expected: list[Any]) -> str | None:
    for one, other in zip(found, expected, strict=True):
        try:
            assert_same(one, other)
        except AssertionError:
            return f"differs: {one}, in eager {other}"
    return None


def alike(text: str, backend: str, sync: Sync) -> Callable[[RandomProgram], bool]:
    """Whether a smaller program fails in the same way."""

    def fails(program: RandomProgram) -> bool:
        found = failure(program, backend, sync)
        return found is not None and found.split(":")[0] == text.split(":")[0]

    return fails


def report(program: RandomProgram, text: str, backend: str, sync: Sync) -> None:
    smaller = minimize(program, alike(text, backend, sync))
    print(f"----- program {program.seed}: {failure(smaller, backend, sync)}\n{smaller.script(backend)}", flush=True)


def kind_of(text: str | None) -> str | None:
    """What minimising must keep of a failure: which run differs or what it raises, not the values."""
    return text and text.split(": value")[0][:60]


def fails_alike(text: str) -> Callable[[RandomLoop], bool]:
    """Whether a smaller loop fails in the same way."""
    return lambda loop: kind_of(replay_failure(loop)) == kind_of(text)


def report_smallest(loops: list[tuple[RandomLoop, str]]) -> None:
    """Print the failing loop that is the smallest after minimising."""
    smaller = [minimize_loop(loop, fails_alike(text)) for loop, text in loops]
    smallest = min(smaller, key=lambda loop: (len(loop.source()), loop.num_steps))
    print(f"----- loop {smallest.seed}: {replay_failure(smallest)}\n{smallest.script()}", flush=True)


def replay_loops(arguments: argparse.Namespace) -> int:
    """Run random training loops; the exit status is 1 if any failed."""
    start, found, totals = time.perf_counter(), [], Counter[str]()
    for seed in range(arguments.seed, arguments.seed + arguments.programs):
        if arguments.replay == "loops":
            loop: RandomLoop = random_loop(seed, arguments.known)
        else:
            loop = random_function(seed, carried=arguments.replay == "carried")
        text = replay_failure(loop)
        if text is not None and text.startswith(NOT_COMPARED):
            totals["not compared"] += 1
            continue
        counter = _REPLAYED[arguments.replay]
        num_replays = metrics.counter_value(counter)
        totals.update({arguments.replay: 1, counter: num_replays, "without any": int(num_replays == 0)})
        if arguments.progress and totals[arguments.replay] % arguments.progress == 0:
            print(f"{len(found)} failures, {totals[arguments.replay]} {arguments.replay}", flush=True)
        if text is not None:
            print(f"loop {seed}: {text[:200]}", flush=True)
            found.append((loop, text))
            if len(found) >= arguments.failures:
                break
    if found:
        report_smallest(found)
    counts = ", ".join(f"{count} {name}" for name, count in totals.items())
    print(f"{len(found)} failures, {counts}, {time.perf_counter() - start:.0f} s")
    return min(len(found), 1)


def count_verdicts(arguments: argparse.Namespace) -> int:
    """Have plans tried; the exit status is 1 if any was refused."""
    start, totals, plans = time.perf_counter(), Counter[str](), set[str]()
    backend = "inductor" if arguments.backend == "interpreted" else arguments.backend
    for first in range(arguments.seed, arguments.seed + arguments.programs, arguments.trials):
        seeds = range(first, first + arguments.trials)
        reset_state()
        config.backend, config.verify_compiled = backend, "always" if arguments.kind == "floats" else "once"
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", lazy_backend.CompileWarning)
            try:
                tried_together(arguments, seeds)
            except Exception as error:
                totals["errors"] += 1
                print(f"{seeds}: {type(error).__name__}: {error}", flush=True)
        settle()
        states = lazy_backend.computation.get_debug_states()
        plans.update(name for name, state in states.items() if state.compiles)
        totals.update({"programs": len(seeds), **{name: metrics.counter_value(name) for name in _VERDICTS}})
        for one in told if metrics.counter_value("PlanRefused") else ():
            print(f"{seeds}: {one.message}", flush=True)
        if arguments.progress and totals["programs"] % arguments.progress < arguments.trials:
            print(_told(totals, plans, start), flush=True)
    print(_told(totals, plans, start))
    return min(totals["PlanRefused"], 1)


def _told(totals: Counter[str], plans: set[str], start: float) -> str:
    counts = ", ".join(f"{count} {name}" for name, count in totals.items())
    return f"{len(plans)} different graphs compiled, {counts}, {time.perf_counter() - start:.0f} s"


def tried_together(arguments: argparse.Namespace, seeds: range) -> None:
    """Run programs in one trace until what was compiled of it has been tried."""
    if arguments.kind == "loops":
        for seed in seeds:
            run_loop(random_loop(seed).program(), "lazy", as_it_is)
        return
    if arguments.kind == "floats":
        for run in range(6):
            torch.manual_seed(run)
            found = [float_program(random.Random(one), list(torch.randn(3, 8, 8).to("lazy"))) for one in seeds]
            lazy_backend.mark_step()
        return
    programs = [random_chains(one) if arguments.kind == "chains" else random_program(one) for one in seeds]
    for _ in range(4):  # the second compiles, the third may be the trial with moved roundings
        found = [program.run("lazy", NoSync()) for program in programs]
        lazy_backend.mark_step()
        del found


def count_planted(arguments: argparse.Namespace) -> int:
    """Have trials find planted faults; the exit status is 1 if any was missed."""
    start, totals = time.perf_counter(), Counter[str]()
    for seed in range(arguments.seed, arguments.seed + arguments.programs):
        reset_state()
        config.verify_compiled, config.num_profiled_runs = "once", 0
        kind, outcome = plant(seed)
        totals.update((outcome, f"{outcome}: {kind}"))
        if outcome == "missed":
            print(f"program {seed}: missed {kind}", flush=True)
    counts = ", ".join(f"{count} {name}" for name, count in sorted(totals.items()))
    print(f"{counts}, {time.perf_counter() - start:.0f} s")
    return min(totals["missed"], 1)


def main() -> int:
    arguments = parse_arguments()
    warnings.simplefilter("ignore")  # of compilers that refuse a graph: it is interpreted, and counted below
    if arguments.planted:
        return count_planted(arguments)
    if arguments.trials:
        return count_verdicts(arguments)
    if arguments.replay:
        return replay_loops(arguments)
    start, failures, totals = time.perf_counter(), 0, Counter[str]()
    for seed in range(arguments.seed, arguments.seed + arguments.programs):
        chains = arguments.kind == "chains"
        program = random_chains(seed) if chains else random_program(seed, arguments.steps)
        sync = lazy_backend.mark_step if seed % 4 else NoSync()  # every fourth is one trace
        text = failure(program, arguments.backend, sync)
        totals.update({"programs": 1, "statements": len(program.statements)})
        totals.update({name: metrics.counter_value(name) for name in _COUNTERS})
        if text is not None:
            failures += 1
            report(program, text, arguments.backend, sync)
            if failures >= arguments.failures:
                break
    counts = ", ".join(f"{count} {name}" for name, count in totals.items())
    print(f"{failures} failures, {counts}, {time.perf_counter() - start:.0f} s")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
