"""A deep GPT whose blocks are compiled once, beside the same as one whole graph: how soon it is fast, and how fast.

In: numbers of blocks. Out: a table; run by `bench.py --blocks`. For each kind a process trains from an empty cache,
while the compiler works in the background: CPU seconds of the compile, and seconds until steps stay at 0.8 of the final
speed. Then one process with both plans from the cache has their loops take turns. Loops are plain, with captured module
and optimizer.
"""

from __future__ import annotations

import itertools
import resource
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from shared.tables import Result, Table
from shared.workers import returned_by
from shared.workloads import GPT, WORKLOADS, GPTSize, make_training

KINDS = ("blocks", "whole")

_STEPS_AFTER = 30  # once everything is compiled
_WINDOW = 5  # steps, whose median is compared
_SPEED = 0.8
_STEPS_PER_TURN = 5


def _loop(kind: str, blocks: int) -> Callable[[], None]:
    """A step of the training. Compiled as it is of this kind, and not otherwise later."""
    import lazy_backend

    lazy_backend.config.compile_blocks_once = kind == "blocks"
    lazy_backend.config.compile_whole_after_seconds = 1e9
    workload = replace(WORKLOADS["gpt-adamw"], model=lambda: GPT(GPTSize(layers=blocks)))
    training = make_training(workload, "lazy")
    lazy_backend.mark_step()
    lazy_backend.capture(training.model)
    training.update = lazy_backend.capture(training.optimizer).step

    def step() -> None:
        lazy_backend.config.compile_blocks_once = kind == "blocks"
        training.step()
        lazy_backend.mark_step()

    return step


def from_the_start(kind: str, blocks: int) -> Result:
    """Train in this process until it is compiled. Seconds since the start at the end of each step, and CPU seconds."""
    import lazy_backend
    from lazy_backend.lowering.compilation.background import worker

    step = _loop(kind, blocks)
    ends, left, start = [0.0], _STEPS_AFTER, perf_counter()
    while left:
        step()
        ends.append(perf_counter() - start)
        states = lazy_backend.computation.get_debug_states().values()
        left -= len(ends) > 8 and all(state.plan != "compiling" for state in states)
    lazy_backend.wait_device_ops()
    worker.close()  # waits for the process, so that its time is known
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"ends": ends, "cpu_seconds": used.ru_utime + used.ru_stime}


def in_turn(blocks: int, rounds: int) -> Result:
    """Seconds per step of both kinds in each round, with plans from the cache."""
    import lazy_backend

    loops = {kind: _loop(kind, blocks) for kind in KINDS}
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for loop in loops.values():
        for _ in range(12):
            loop()
        lazy_backend.wait_for_compiles()
    for _ in range(rounds):
        for kind, loop in loops.items():
            loop()
            lazy_backend.wait_device_ops()
            begin = perf_counter()
            for _ in range(_STEPS_PER_TURN):
                loop()
            lazy_backend.wait_device_ops()
            found[kind].append((perf_counter() - begin) / _STEPS_PER_TURN)
    states = lazy_backend.computation.get_debug_states().values()
    if any(state.compiles for state in states if state.runs > rounds):
        raise RuntimeError("the plan of a step was not found in the cache")
    return {**found}


def until_fast(ends: Sequence[float]) -> float:
    """Seconds until windows of steps stay at `_SPEED` of the final speed."""
    steps = [end - begin for begin, end in itertools.pairwise(ends)]
    medians = [statistics.median(steps[place : place + _WINDOW]) for place in range(len(steps) - _WINDOW + 1)]
    slow = [place for place, median in enumerate(medians) if median * _SPEED > statistics.median(steps[-20:])]
    return ends[slow[-1] + _WINDOW] if slow else 0.0


def _run(call: str, folder: str, threads: int) -> Result:
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "inductor"),
        "LAZY_BACKEND_CACHE_DIR": str(Path(folder) / "lazy"),
    }
    return returned_by(f"benchmarks.block_plans.{call}", environment, threads)  # type: ignore[no-any-return]


def main(threads: int, rounds: int, show: Callable[[Table], str], sizes: Sequence[int]) -> None:
    """Print the table."""
    rows = []
    for blocks in sizes:
        with tempfile.TemporaryDirectory(prefix="lazy_backend_blocks_") as folder:
            starts = {}
            for kind in KINDS:
                print(f"bench: {blocks} blocks, {kind}", file=sys.stderr, flush=True)
                starts[kind] = _run(f"from_the_start({kind!r}, {blocks})", folder, threads)
            turns = _run(f"in_turn({blocks}, {rounds})", folder, threads)
        speeds = [whole / own for own, whole in zip(turns["blocks"], turns["whole"], strict=True)]
        for kind in KINDS:
            figures = [f"{starts[kind]['cpu_seconds']:.1f}", f"{until_fast(starts[kind]['ends']):.1f}"]
            figures.append(f"{statistics.median(turns[kind]) * 1e3:.1f}")
            speed = f"{statistics.median(speeds):.3f} ({min(speeds):.3f} to {max(speeds):.3f})"
            rows.append([str(blocks), kind, *figures, speed if kind == "blocks" else "1"])
    head = ["blocks", "compiled", "compile CPU s", "at 0.8 of its speed after s", "step, ms", "speed / whole's"]
    print(show(Table("Blocks compiled once, beside the whole graph: GPT, foreach AdamW", head, rows)))
