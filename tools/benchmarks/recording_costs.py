"""The cost of recording a step, or of replaying it, in the thread that runs the program.

In: workloads. Out: a table of CPU time per step: of eager with its kernels, and of a plain loop recorded in Python and
in C++, with captured module and optimizer, and as one captured function, each with its `mark_step`; run by
`bench.py --recording`. Runs take place on another thread, and are waited for between steps. The processes of a step
live side by side and take turns.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Callable, Sequence
from time import thread_time

from shared.contenders import CONTENDERS, recorded_calls
from shared.tables import Table
from shared.workers import Reply, Worker, answer_commands
from shared.workloads import WORKLOADS, make_training

# of each way: the contender that prepares the training, and the ports that are off
WAYS = {
    "eager": ("eager", ""),
    "plain, in Python": ("lazy-off", "known calls in C++"),
    "plain, in C++": ("lazy-off", ""),
    "captured parts": ("captured-parts", ""),
    "captured function": ("captured", ""),
}

_STEPS = 40  # of a round; the first round warms up


def main(names: Sequence[str], rounds: int, show: Callable[[Table], str]) -> None:
    """Print the table."""
    rows = [_row(name, rounds) for name in names]
    head = ["step", "recorded calls", *(f"{way}, µs" for way in WAYS)]
    print(show(Table("Recording: CPU time per step of the program's thread", head, rows)))


def _row(name: str, rounds: int) -> list[str]:
    found: dict[str, list[Reply]] = {way: [] for way in WAYS}
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(_worker(way, name)) for way in WAYS]
        for number in range(rounds + 1):
            print(f"bench: {name}: round {number} of {rounds}", file=sys.stderr, flush=True)
            for worker in workers:
                found[worker.name].append(worker.ask("round"))
    micro = [1e6 * statistics.median(one["seconds"] for one in results[1:]) for results in found.values()]
    calls = found["plain, in Python"][-1]["calls"]
    return [WORKLOADS[name].title, f"{calls:.0f}", *(f"{spent:,.0f}" for spent in micro)]


def _worker(way: str, name: str) -> Worker:
    environment = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "LAZY_BACKEND_PORTS_OFF": WAYS[way][1]}
    return Worker(way, [sys.executable, __file__, way, name], environment, finds_recorder=True)


# ----- the process


def serve(way: str, name: str) -> None:
    """Answer commands until stdin ends: each is a round of steps."""
    contender = CONTENDERS[WAYS[way][0]]()
    is_lazy = way != "eager"
    if is_lazy:
        import lazy_backend

        # which plan runs does not matter to the thread that hands it over
        lazy_backend.config.compile = "off"
        lazy_backend.config.run_in_background = "always"
    training = make_training(WORKLOADS[name], contender.device)
    contender.prepare(training)

    def step() -> float:
        begin = thread_time()
        training.step()
        contender.mark()
        seconds = thread_time() - begin
        contender.wait()
        return seconds

    def answer(command: str) -> Reply:
        before = recorded_calls() if is_lazy else 0
        seconds = statistics.median([step() for _ in range(_STEPS)])
        return {"seconds": seconds, "calls": (recorded_calls() - before) / _STEPS if is_lazy else 0}

    answer_commands(answer)


if __name__ == "__main__":
    serve(*sys.argv[1:])
