"""How long the step of a GPT takes to compile, by its number of blocks.

In: numbers of blocks. Out: a table, one process per row with empty compiler caches. Run by `bench.py --compile-time`.
Seconds are CPU time of the compiler's process and of the C++ compilers under it, its start and imports included: what
other work on the machine changes least.
"""

from __future__ import annotations

import resource
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace

from shared.tables import Result, Table, compile_times
from shared.workers import returned_by
from shared.workloads import GPT, WORKLOADS, GPTSize, make_training

BLOCKS = (4, 12, 24)


def measure(blocks: int) -> Result:
    """Train in this process until the step is compiled. Nodes of its graph, CPU seconds and seconds of the compile."""
    import lazy_backend
    from lazy_backend.lowering.compilation.background import worker

    workload = replace(WORKLOADS["gpt-adamw"], model=lambda: GPT(GPTSize(layers=blocks)))
    training = make_training(workload, "lazy")
    for _ in range(3):
        training.step()
        lazy_backend.mark_step(wait=True)
    lazy_backend.wait_for_compiles()
    training.step()
    lazy_backend.mark_step(wait=True)
    computation = max(lazy_backend.computation.get_cached_computations(), key=lambda found: len(found.graph.nodes))
    state = computation.executor.get_debug_state()
    if state.plan != "optimized":
        raise RuntimeError(f"the step was not compiled: {state.error}")
    worker.close()  # waits for the process, so that its time is known
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "blocks": blocks,
        "nodes": len(computation.graph.nodes),
        "compiles": state.compiles,
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "seconds": lazy_backend.metrics.metric_data("CompileTime").total,
    }


def _run(blocks: int, threads: int) -> Result:
    with tempfile.TemporaryDirectory(prefix="lazy_backend_compile_time_") as folder:
        environment = {"TORCHINDUCTOR_CACHE_DIR": folder, "LAZY_BACKEND_CACHE": "0"}
        return returned_by(f"benchmarks.compile_time.measure({blocks})", environment, threads)  # type: ignore[no-any-return]


def main(threads: int, show: Callable[[Table], str], blocks: Sequence[int] = BLOCKS) -> None:
    """Print the table."""
    results = []
    for count in blocks:
        print(f"bench: compiling {count} blocks", file=sys.stderr, flush=True)
        results.append(_run(count, threads))
    print(show(compile_times(results)))
