"""How fast the main thread records while a compiled graph runs in the background.

In: numbers of recorded operators and rounds. Out: microseconds per recorded operator alone, and during a run; run by
`bench.py --overlap`. A run whose kernels, or what calls them, held the GIL would stop the recording. Both are measured
in turn, on one known program, one thread per operator.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter

import torch
from shared.tables import Result, Table

_WIDTH, _PRODUCTS = 1536, 24  # of the run: some seconds' worth of products, on any machine longer than a recording


def measure(operators: int, rounds: int) -> Result:
    """Seconds per recorded operator, in each of `rounds` rounds: alone, and during a run in the background."""
    import lazy_backend
    from lazy_backend.tensors.contexts import contexts

    lazy_backend.config.compile = "foreground"
    lazy_backend.config.run_in_background = "always"
    locker = contexts.get_device_context(None).locker
    weight = torch.eye(_WIDTH, device="lazy")
    small = torch.ones(16, 16, device="lazy")
    kept: list[torch.Tensor] = []

    def run() -> None:
        x = weight
        for _ in range(_PRODUCTS):
            x = (x @ weight).relu()
        kept[:] = [x]
        lazy_backend.mark_step()

    def record() -> float:
        begin = perf_counter()
        x = small
        for _ in range(operators // 2):
            x = (x @ small).relu()
        seconds = perf_counter() - begin
        kept.append(x)
        return seconds / operators

    def alone() -> float:
        found = record()
        lazy_backend.mark_step(wait=True)
        return found

    def during() -> float:
        run()
        found = record()
        if locker.finish_if_over():
            raise RuntimeError("the run was over before the recording was: more products are needed")
        lazy_backend.mark_step(wait=True)
        return found

    measured: dict[str, Callable[[], float]] = {"alone": alone, "during a run": during}
    for _ in range(4):  # until both programs are known and compiled
        run()
        lazy_backend.wait_device_ops()
        alone()
    seconds: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(rounds):
        for name, once in measured.items():
            seconds[name].append(once())
    return {"operators": operators, "seconds": seconds}


def main(threads: int, rounds: int, show: Callable[[Table], str]) -> None:
    """Print the table."""
    torch.set_num_threads(threads or 1)
    found = measure(400, rounds)
    alone, during = found["seconds"]["alone"], found["seconds"]["during a run"]
    ratios = [one / other for one, other in zip(alone, during, strict=True)]
    rows = [
        ["alone", f"{1e6 * statistics.median(alone):.2f}", "1.00", ""],
        [
            "during a run",
            f"{1e6 * statistics.median(during):.2f}",
            f"{statistics.median(ratios):.2f}",
            f"{min(ratios):.2f} to {max(ratios):.2f}",
        ],
    ]
    title = f"Recording {found['operators']} known operators while a compiled graph runs"
    print(show(Table(title, ["", "µs per operator", "speed / alone's", "range over rounds"], rows)))
