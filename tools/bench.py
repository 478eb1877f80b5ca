"""Benchmark: what recording costs, and how fast training runs beside eager, torch.compile and LTC.

    python tools/bench.py --quick
    python tools/bench.py --threads 1 --markdown --json results.json
    python tools/bench.py --speed --json docs/speed.json && python tools/listed_pages.py

In: flags. Out: tables on stdout, or markdown; raw figures as JSON. Progress goes to stderr.
Each contender runs in a process of its own with an empty compiler cache. The processes of a workload live side by side
and take turns, round by round, so that a slow minute of the machine slows all of them; ratios are taken within a round.
`--speed` measures the figures of README.md. `--cold`, `--compile-time`, `--blocks`, `--recording`, `--overlap`,
`--diagnostics`, `--trainers`, `--wild`, `--unmarked`, `--serve`, `--ranks` and `--simulated-ranks` measure something
else: first steps of a process, compiles of deep models, deep models whose blocks are compiled once, what recording a
step costs, recording beside a run, what `config.explain` costs, the loops of other packages' trainers, documented
programs of other packages, loops without `mark_step()`, served modules, several processes that train together, and what
it costs many to agree.
See docs/benchmarks.md and docs/scaling.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from benchmarks import (
    block_plans,
    cold,
    compile_time,
    diagnostics,
    rank_loops,
    rank_scaling,
    recording_costs,
    recording_overlap,
    serving_speed,
    speed_chart,
    trainer_loops,
    unmarked,
    wild,
)
from benchmarks.wild_programs import PROGRAMS
from shared import figures
from shared.command_line import names_among
from shared.contenders import CONTENDERS, MEMORY_ENVIRONMENT, WITHOUT_AUTOLOAD, serve
from shared.tables import Result, Table, make_tables, render
from shared.workers import Worker, WorkerFailed
from shared.workloads import WORKLOADS

FIRST_STEPS = 60
GROWTH_LENGTHS = [100, 1_000, 10_000]
SPEED_WORKLOADS = ["mlp", "cells", "cnn", "gpt-adamw", "branches", "schedule", "lengths", "lstm"]
SPEED_CONTENDERS = ["eager", "compile", "compile-all", "lazy", "captured-parts", "captured"]
GROWTH_BUDGET = 60.0  # seconds for the first sight of one length


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured."""

    workloads: Sequence[str]
    contenders: Sequence[str]
    rounds: int
    threads: int
    traced_steps: int
    growth: Sequence[int]
    memory: bool


def _worker(contender: str, workload: str, plan: Plan, environment: dict[str, str] | None = None) -> Worker:
    changes = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0" if contender in WITHOUT_AUTOLOAD else "1"}
    if plan.threads:
        # not torch.set_num_threads: MKL would obey it in the calling thread only
        changes |= {"OMP_NUM_THREADS": str(plan.threads), "MKL_NUM_THREADS": str(plan.threads)}
    command = [sys.executable, __file__, "--worker", contender, "--workload", workload]
    return Worker(contender, command, changes | (environment or {}), finds_recorder=True)


# ----- one workload


def measure_workload(name: str, plan: Plan) -> Result:
    """Cold starts one after the other, then rounds in turn, then memory."""
    workload = WORKLOADS[name]
    results: dict[str, Result] = {contender: {"rounds": [], "traces": []} for contender in plan.contenders}
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(_worker(contender, name, plan)) for contender in plan.contenders]
        running = [worker for worker in workers if _start(worker, name, results[worker.name])]
        for number in range(plan.rounds):
            _progress(f"{name}: round {number + 1} of {plan.rounds}")
            running = [w for w in _rotated(running) if _round(w, workload.steps, plan, results[w.name])]
    if plan.memory:
        for worker in running:
            results[worker.name]["memory"] = _measure_memory(worker.name, name, plan)
    return {"name": name, "title": workload.title, "steps": workload.steps, "contenders": results}


def _start(worker: Worker, workload: str, result: Result) -> bool:
    _progress(f"{workload}: the first {FIRST_STEPS} steps of {worker.name}")
    try:
        result["start"] = worker.ask("start", steps=FIRST_STEPS)
    except WorkerFailed as failure:
        result["error"] = str(failure)
        return False
    return True


def _round(worker: Worker, steps: int, plan: Plan, result: Result) -> bool:
    try:
        reply = worker.ask("round", steps=steps)
        result["traces"].append(worker.ask("trace", steps=plan.traced_steps))
    except WorkerFailed as failure:
        result["error"] = str(failure)
        return False
    result["rounds"].append(reply["seconds"])
    result["late_compiles"] = reply["compiles"] - result["start"]["compiles"]
    return True


def _rotated(workers: list[Worker]) -> list[Worker]:
    """Nobody is always the one that runs after the slowest."""
    return workers[1:] + workers[:1]


def _measure_memory(contender: str, workload: str, plan: Plan) -> Result | None:
    """In a fresh process, whose allocator is told to be thrifty and therefore slow."""
    if not sys.platform.startswith("linux"):
        return None
    _progress(f"{workload}: memory of {contender}")
    with _worker(contender, workload, plan, MEMORY_ENVIRONMENT) as worker:
        worker.ask("start", steps=5)
        return worker.ask("memory", steps=5)


def measure_growth(plan: Plan) -> Result:
    if not plan.growth:
        return {}
    _progress("growth")
    with _worker("lazy-off", "mlp", plan) as worker:
        return worker.ask("growth", lengths=list(plan.growth), repeats=5, budget=GROWTH_BUDGET)


def measure(plan: Plan) -> Result:
    """Everything in the plan, with what it was measured on."""
    about = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "threads": plan.threads or torch.get_num_threads(),
        "rounds": plan.rounds,
    }
    workloads = [measure_workload(name, plan) for name in plan.workloads]
    return {"about": about, "workloads": workloads, "growth": measure_growth(plan)}


def _progress(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


# ----- command line


def _lengths(text: str) -> list[int]:
    return [length for length in map(int, text.split(",")) if length]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a subset, in less than two minutes")
    parser.add_argument("--full", action="store_true", help="every workload, memory, traces of 100,000 calls")
    parser.add_argument("--workloads", type=names_among(WORKLOADS), help=f"comma-separated: {', '.join(WORKLOADS)}")
    parser.add_argument("--contenders", type=names_among(CONTENDERS), help=f"comma-separated: {', '.join(CONTENDERS)}")
    parser.add_argument("--rounds", type=int, help="rounds per contender (default 5; 3 with --quick)")
    parser.add_argument("--threads", type=int, default=0, help="threads per operator (default: as torch chooses)")
    parser.add_argument("--growth", type=_lengths, help="comma-separated lengths of the long traces; 0 for none")
    parser.add_argument("--memory", action="store_true", help="measure memory too (Linux)")
    parser.add_argument("--speed", action="store_true", help="the figures of README.md, one and two threads")
    parser.add_argument("--cold", action="store_true", help="the first steps of new processes, nothing else")
    parser.add_argument("--compile-time", action="store_true", help="compiles of 4, 12 and 24 blocks, nothing else")
    parser.add_argument("--blocks", type=_lengths, help="comma-separated numbers of blocks of a GPT, nothing else")
    parser.add_argument("--recording", action="store_true", help="what recording a step costs, nothing else")
    parser.add_argument("--overlap", action="store_true", help="recording while a graph runs, nothing else")
    parser.add_argument("--trainers", action="store_true", help="loops of lazy_backend.integrations, nothing else")
    parser.add_argument("--wild", type=names_among(PROGRAMS), nargs="?", const=list(PROGRAMS),
                        help=f"programs of other packages, nothing else; some of {', '.join(PROGRAMS)}")  # fmt: skip
    parser.add_argument("--unmarked", type=names_among(unmarked.NAMES), nargs="?", const=unmarked.NAMES,
                        help=f"loops without mark_step, nothing else; some of {', '.join(unmarked.NAMES)}")  # fmt: skip
    parser.add_argument("--serve", type=names_among(serving_speed.MODELS), nargs="?", const=list(serving_speed.MODELS),
                        help=f"served modules, nothing else; some of {', '.join(serving_speed.MODELS)}")  # fmt: skip
    parser.add_argument("--ranks", type=int, default=0, help="as many processes that train together, nothing else")
    parser.add_argument("--simulated-ranks", action="store_true", help="what agreeing costs 8 to 10,000, nothing else")
    parser.add_argument("--diagnostics", action="store_true", help="what config.explain costs, nothing else")
    parser.add_argument("--json", type=Path, help="write the raw figures to this file; with --speed and what prints "
                        "one table, its section of docs/speed.json")  # fmt: skip
    parser.add_argument("--raw", type=Path, help="of --wild: the raw figures, written after each program")
    parser.add_argument("--markdown", action="store_true", help="print markdown")
    parser.add_argument("--worker", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--workload", choices=WORKLOADS, help=argparse.SUPPRESS)
    return parser


def _plan(arguments: argparse.Namespace) -> Plan:
    quick, full = arguments.quick, arguments.full
    workloads = (
        ["mlp", "gpt-sgd"] if quick else list(WORKLOADS) if full else ["mlp", "gpt-sgd", "gpt-adamw", "gpt-slices"]
    )
    contenders = ["eager", "ltc", "lazy-eager", "lazy-off"] if quick else list(CONTENDERS)
    lengths = GROWTH_LENGTHS + [100_000] * full
    return Plan(
        workloads=arguments.workloads or workloads,
        contenders=arguments.contenders or contenders,
        rounds=arguments.rounds or (3 if quick else 5),
        threads=arguments.threads,
        traced_steps=20 if quick else 30,
        growth=lengths if arguments.growth is None else arguments.growth,
        memory=arguments.memory or full,
    )


class Shown:
    """Renders tables for stdout, and keeps them."""

    def __init__(self, form: str) -> None:
        self._render = render[form]
        self.tables: list[Table] = []

    def __call__(self, table: Table) -> str:
        self.tables.append(table)
        return self._render(table)


def _measure_mode(arguments: argparse.Namespace, show: Shown) -> str | None:
    """Measure what a flag asks for instead of the workloads, and print its table. Returns the flag's name, or None."""
    quick, threads, rounds = arguments.quick, arguments.threads, arguments.rounds
    if arguments.cold:
        cold.main(arguments.workloads or ["mlp", "cnn", "gpt-adamw"], threads, show)
        return "cold"
    if arguments.compile_time:
        compile_time.main(threads, show)
        return "compile-time"
    if arguments.blocks:
        block_plans.main(threads, rounds or 12, show, arguments.blocks)
        return "blocks"
    if arguments.overlap:
        recording_overlap.main(threads, rounds or 15, show)
        return "overlap"
    if arguments.trainers:
        trainer_loops.main(threads, rounds or (1 if quick else 3), show)
        return "trainers"
    if arguments.wild:
        wild.main(arguments.wild, [threads] if threads else [1, 2], rounds or 5, show, arguments.raw)
        return "wild"
    if arguments.ranks:
        rank_loops.main(arguments.ranks, rounds or 5, show)
        return "ranks"
    if arguments.simulated_ranks:
        rank_scaling.main(rank_scaling.RANKS, show)
        return "simulated-ranks"
    if arguments.unmarked:
        unmarked.main(arguments.unmarked, rounds or (2 if quick else 5), show)
        return "unmarked"
    if arguments.diagnostics:
        names = arguments.workloads or ["mlp", "gpt-sgd", "gpt-adamw"]
        diagnostics.main(names, threads, 60 if quick else 300, show)
        return "diagnostics"
    if arguments.recording:
        recording_costs.main(arguments.workloads or ["mlp", "cells", "branches"], rounds or 15, show)
        return "recording"
    return None


def _measure_serving(arguments: argparse.Namespace, show: Shown) -> None:
    rounds = arguments.rounds or (1 if arguments.quick else 3)
    found = serving_speed.measure(arguments.serve, list(serving_speed.EXECUTORS), [1, 2, 8], rounds)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    print("\n\n".join(map(show, serving_speed.tables_of(found))))


def _measure_speed(arguments: argparse.Namespace) -> None:
    """The figures of README.md and of the first tables of docs/benchmarks.md, into the file that they are made of."""
    runs = []
    for threads in [arguments.threads] if arguments.threads else [1, 2]:
        results = measure(
            Plan(
                workloads=arguments.workloads or SPEED_WORKLOADS,
                contenders=arguments.contenders or SPEED_CONTENDERS,
                rounds=arguments.rounds or 4,
                threads=threads,
                traced_steps=1,
                growth=(),
                memory=False,
            )
        )
        machine = f"{os.cpu_count()} cores of {_processor()}"
        about = figures.about(_command(), threads=threads, rounds=results["about"]["rounds"], machine=machine)
        runs.append(speed_chart.run_of(results, about))
        print(f"{speed_chart.heading(runs[-1])}\n\n{speed_chart.table(runs[-1])}\n", flush=True)
    if arguments.json:
        figures.write(arguments.json, "speed", runs)


def _processor() -> str:
    """The processor's name, as far as the system tells it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _command() -> str:
    return " ".join(["python tools/bench.py", *sys.argv[1:]])


def main() -> None:
    arguments = _parser().parse_args()
    if arguments.worker:
        serve(arguments.worker, arguments.workload)
        return
    show = Shown("markdown" if arguments.markdown else "text")
    if arguments.speed:
        _measure_speed(arguments)
        return
    if arguments.serve:
        _measure_serving(arguments, show)
        return
    mode = _measure_mode(arguments, show)
    if mode is not None:
        if arguments.json:
            figures.write(arguments.json, mode, figures.section_of(show.tables, _command()))
        return
    results = measure(_plan(arguments))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    about = results["about"]
    print(f"PyTorch {about['torch']}, Python {about['python']}, {about['cores']} cores, {about['threads']} threads, "
          f"{about['rounds']} rounds\n")  # fmt: skip
    print("\n\n".join(map(show, make_tables(results))))


if __name__ == "__main__":
    main()
