"""What agreeing on collectives costs as ranks become many, by simulation.

In: numbers of ranks. Out: a table of milliseconds per step, and of who finds a planted difference. Run by
`bench.py --simulated-ranks`. Every rank is a real `Agreement`, and all write to one real `TCPStore`, as under torchrun;
what is missing is the machines: threads of this process, each with a connection of its own, act for the ranks in turn.
So times are those of a store that is never idle, and a rank's own share is far less.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from shared.tables import Table

from lazy_backend.lowering.collectives.agreement import Agreement, Collective, CollectiveError, RunCollectives

RANKS = (8, 64, 512, 4096, 10_000)

# Connections to the store, each with a thread. A rank has one of its own, and a store with more is slower.
_CONNECTIONS = 64
_STEPS = 7
_COLLECTIVES = 4  # in a step
_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class _Group:
    """As much of a process group as an agreement asks for."""

    number: int
    count: int
    group_name: str = "simulated"
    _device_types: tuple[torch.device, ...] = (torch.device("cpu"),)

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.count

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(options=SimpleNamespace(_timeout=_TIMEOUT))


class SimulatedRanks:
    """Ranks that agree by one store. `step` is one training step of all of them."""

    def __init__(self, count: int) -> None:
        internals: Any = dist
        self._server = internals.TCPStore("127.0.0.1", 0, is_master=True, timeout=_TIMEOUT, wait_for_workers=False)
        self._clients = [self._server.clone() for _ in range(min(count, _CONNECTIONS))]
        self._pool = ThreadPoolExecutor(len(self._clients))
        self.ranks = [
            Agreement(_Group(rank, count), internals.PrefixStore("simulated", self._clients[rank % len(self._clients)]))  # type: ignore[arg-type]
            for rank in range(count)
        ]

    def close(self) -> None:
        self._pool.shutdown()

    def step(self, run_of: Callable[[int], RunCollectives]) -> dict[int, CollectiveError]:
        """All ranks announce what they call, look where they have to, and call it. Returns the errors by rank."""
        runs = [run_of(rank).of_groups[0] for rank in range(len(self.ranks))]
        errors: dict[int, CollectiveError] = {}

        def announce(rank: int) -> None:
            self.ranks[rank].announce(*runs[rank])

        def call(rank: int) -> None:
            agreement, (_, calls) = self.ranks[rank], runs[rank]
            for place in range(len(calls)):
                try:
                    agreement.check(calls[place:])
                except CollectiveError as error:
                    errors[rank] = error
                    agreement.forget()
                    return
                agreement.count(calls[place])

        self._each(announce)
        self._each(call)
        return errors

    def _each(self, act: Callable[[int], None]) -> None:
        """Call `act` for all ranks, each connection for its own ones."""

        def serve(connection: int) -> None:
            for rank in range(connection, len(self.ranks), len(self._clients)):
                act(rank)

        list(self._pool.map(serve, range(len(self._clients))))


def step_of(kind: str, *, at: str = "train.py:28") -> RunCollectives:
    """The collectives of one training step."""
    what = [f"{kind} of float32[{1000 + place}] (sum)" for place in range(_COLLECTIVES)]
    return RunCollectives([Collective(0, one, at) for one in what])


def simulate(count: int) -> dict[str, Any]:
    """Seconds of steps of `count` ranks, and what comes of one rank that takes another branch."""
    ranks = SimulatedRanks(count)
    usual, other = step_of("all_reduce"), step_of("broadcast", at="train.py:40")
    try:
        seconds = []
        for _ in range(_STEPS):
            start = perf_counter()
            errors = ranks.step(lambda rank: usual)
            seconds.append(perf_counter() - start)
            assert not errors
        start = perf_counter()
        astray = count // 3
        found = ranks.step(lambda rank: other if rank == astray else usual)
        return {
            "unlike": seconds[0],
            "like": statistics.median(seconds[2:]),
            "difference": perf_counter() - start,
            "found": {rank: str(error) for rank, error in found.items()},
            "astray": astray,
        }
    finally:
        ranks.close()


def main(counts: Sequence[int], show: Callable[[Table], str]) -> None:
    """Print the table."""
    rows = []
    for count in counts:
        result = simulate(count)
        rows.append(
            [
                f"{count:,}",
                f"{1e3 * result['like']:.1f}",
                f"{count / result['like']:,.0f}",
                f"{1e3 * result['unlike']:.1f}",
                f"rank {result['astray']:,} by {', '.join(f'rank {rank:,}' for rank in result['found'])}",
            ]
        )
    head = [
        "ranks",
        "a step like the one before, ms",
        "writes a second",
        "a step unlike it, ms",
        "which differed, and who found it",
    ]
    print(show(Table("simulated ranks at one store", head, rows)))
