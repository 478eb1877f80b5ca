"""Benchmark of the executors: speed-up by threads, cost per node, and memory of an interpreted step.

    python tools/bench_executors.py

Out: one line per figure with its bound; the exit status says whether all hold. Whatever is compared takes turns within
one process, and each ratio is the median over rounds, so that a slow minute of the machine slows both sides. The
figures mean little while other work runs on the machine's cores.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "ir"))

import bench
from builder import Built, branches, chain
from shared.contenders import MEMORY_ENVIRONMENT
from shared.workers import Worker

from lazy_backend.lowering.interpreter.parallel import ParallelGraphExecutor
from lazy_backend.lowering.interpreter.serial import SerialGraphExecutor
from lazy_backend.lowering.ir.graph import Value

Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured number and the bound it has to keep."""

    what: str
    value: float
    bound: float
    at_least: bool = False

    def holds(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        return f"{self.what:<70} {self.value:7.2f}  {sign} {self.bound:g}  {'' if self.holds() else 'MISSED'}".rstrip()


def alternate(runs: Sequence[Run], rounds: int, repeats: int) -> list[tuple[float, ...]]:
    """For each round the seconds of each run: the fastest of `repeats`, since disturbances only ever slow."""
    gc.collect()
    gc.disable()
    try:
        return [tuple(min(_timed(run) for _ in range(repeats)) for run in runs) for _ in range(rounds)]
    finally:
        gc.enable()


def _timed(run: Run) -> float:
    begin = perf_counter()
    run()
    return perf_counter() - begin


# ----- figures


def speed_up(rounds: int) -> Figure:
    """Two threads against one, where two branches always can run."""
    program = branches(count=8, length=8, size=384)
    serial, parallel = SerialGraphExecutor(program.graph), ParallelGraphExecutor(program.graph, num_threads=2)
    times = alternate([_run(serial, program), _run(parallel, program)], rounds, repeats=5)
    ratio = statistics.median(alone / together for alone, together in times)
    return Figure("8 independent branches, two threads: parallel / serial speed", ratio, 1.6, at_least=True)


def cost_per_node(rounds: int) -> list[Figure]:
    """Microseconds per node beyond the aten calls themselves, for tensors of 4 elements and matrices of 4 by 4."""
    figures = []
    for form, program in (("a chain of 1000", chain(1000)), ("8 branches of 100", branches(8, 100, 4))):
        nodes = len(program.graph.nodes)
        executors = [SerialGraphExecutor(program.graph), ParallelGraphExecutor(program.graph, num_threads=2)]
        runs = [_direct_calls(program), *(_run(executor, program) for executor in executors)]
        times = alternate(runs, rounds, repeats=10)
        for place, (name, bound) in enumerate((("serial", 2.0), ("parallel", 15.0)), start=1):
            cost = statistics.median(seconds[place] - seconds[0] for seconds in times) / nodes * 1e6
            figures.append(Figure(f"{form}, {name} executor: µs per node above the aten calls", cost, bound))
    return figures


def _run(executor: SerialGraphExecutor | ParallelGraphExecutor, program: Built) -> Run:
    return lambda: executor.execute(list(program.inputs), program.constants, [])


def _direct_calls(program: Built) -> Run:
    """The graph's calls with the arguments ready: no values are looked up or stored."""
    x = program.inputs[0]
    calls = [(node.op, [x if isinstance(arg, Value) else arg for arg in node.args]) for node in program.graph.nodes]

    def run() -> None:
        with torch.no_grad():
            for op, args in calls:
                op(*args)

    return run


def memory_of_a_step() -> Figure:
    """Bytes that live between steps and rise within them, interpreted, over eager's."""
    interpreted, eager = (_peak_bytes(contender) for contender in ("lazy-off", "eager"))
    return Figure("GPT training step, interpreted: peak memory / eager's", interpreted / eager, 1.05)


def _peak_bytes(contender: str) -> float:
    command = [sys.executable, bench.__file__, "--worker", contender, "--workload", "gpt-sgd"]
    with Worker(contender, command, {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **MEMORY_ENVIRONMENT}) as worker:
        worker.ask("start", steps=5)
        found = worker.ask("memory", steps=5)
    return float(found["live"] + found["rise"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures = [speed_up(arguments.rounds), *cost_per_node(arguments.rounds)]
    if sys.platform.startswith("linux"):
        figures.append(memory_of_a_step())
    print("\n".join(map(str, figures)))
    sys.exit(not all(figure.holds() for figure in figures))


if __name__ == "__main__":
    main()
