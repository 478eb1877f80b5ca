"""Verdicts of trials, which the ranks that run the same plan tell each other.

In: the verdict of this rank about a plan that communicates. Out: whether other ranks still try it, why one of them
refused it, and what the search for the fault found there.

Note [Ranks share verdicts]
A fault that the inputs of one rank show may not show on another, and weights that ranks compute by different plans
drift apart. So ranks use a plan that communicates together, or none does. A rank that asks for a plan counts itself in
the store of the group of all processes (Note [Ranks agree]), under the hash of the plan's key; it counts itself again
when its trial agreed, or when it will have none. Between the two numbers it is interpreted where it has agreed, and
looks at the store now and then, at the start of a run: no rank waits for another. The first rank that refuses a plan
writes why, and searches for the fault; the others refuse the plan as well, and take from the store what was found. So
all repair the graph alike, and use the repaired plan once all of them have tried it.

A rank that asked for a plan and never tries it is waited for `PATIENCE` seconds, or twice as long as the own verdict
took. After the switch a rank looks further where each of its runs asks for a plan (a graph for many shapes, trials of
every run), each time after twice as long; otherwise it does not, as steps must not take longer for it. Where the store
fails, or ranks have graphs of their own, each rank has its own verdict.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from lazy_backend.cache.computation_cache import Key
from lazy_backend.lowering.collectives.agreement import agreements
from lazy_backend.lowering.collectives.communication import is_collective
from lazy_backend.lowering.collectives.groups import WORLD, group_numbers
from lazy_backend.ports.dispatcher import OpOverload

# Seconds for which others are waited for.
PATIENCE = 60.0
# Seconds between two looks at the store: at first, and while others are waited for at most.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.002, 0.02

Found = dict[str, Any]  # what is to be left to kernels, and what is said of it; empty if nothing was found
_COUNTS = ("asked", "settled", "refused")


@dataclass(frozen=True, slots=True)
class RefusalElsewhere:
    """Why another rank refused a plan."""

    rank: int
    text: str

    def __str__(self) -> str:
        return f"{self.text}\n  on rank {self.rank}"


class SharedVerdict:
    """What all ranks say of one plan. `plan`: a name that it has on all of them. See Note [Ranks share verdicts].

    `refusal`: that of another rank, once it was looked at. `num_ranks`: those that are to have a verdict.
    """

    def __init__(
        self, store: Any, rank: int, plan: str, num_ranks: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        stores: Any = dist
        self._store: Any = stores.PrefixStore(f"plan/{plan}", store)
        self._rank = rank
        self._clock = clock
        self._process: int | None = os.getpid()  # a forked child has no connection of its own; None if the store failed
        self._asked_at = clock()
        self._settled_at = math.inf
        self._next_look, self._pause = -math.inf, _SHORTEST_PAUSE
        self.is_awaited = True  # whether others may still refuse the plan
        self.refusal: RefusalElsewhere | None = None
        self.num_ranks = num_ranks
        self._ask(lambda: [self._store.add(name, int(name == "asked")) for name in _COUNTS])

    @property
    def is_led_elsewhere(self) -> bool:
        """Whether another rank refused the plan first, and searches for the fault."""
        return self.refusal is not None

    def settle(self) -> None:
        """Say that this rank does not refuse the plan: its trial agreed, or it has none."""
        if self._settled_at == math.inf:
            self._settled_at = self._clock()
            self._next_look, self._pause = -math.inf, _SHORTEST_PAUSE
            self._ask(lambda: self._store.add("settled", 1))

    def refuse(self, text: str) -> None:
        """Say that this rank refuses the plan, unless another one has said so."""
        self.is_awaited = False
        first = self._ask(lambda: self._store.compare_set("refusal", "", json.dumps([self._rank, text])))
        self._ask(lambda: self._store.add("refused", 1))
        self._note_refusal(first)
        self._next_look = -math.inf
        self.look()

    def look(self) -> None:
        """Look at the store, if the latest look is long ago."""
        now = self._clock()
        if now < self._next_look:
            return
        counts = self._ask(lambda: self._store.multi_get(list(_COUNTS)))
        if counts is not None:
            asked, settled, refused = map(int, counts)
            self.num_ranks = max(self.num_ranks, asked)
            if refused:
                self._note_refusal(self._ask(lambda: self._store.get("refusal")))
            patience = max(PATIENCE, 2 * (self._settled_at - self._asked_at))
            self.is_awaited = settled < self.num_ranks and now < self._settled_at + patience
        self._pause = min(2 * self._pause, _LONGEST_PAUSE if self.is_awaited else math.inf)
        self._next_look = now + self._pause

    def _note_refusal(self, first: bytes | None) -> None:
        if first is not None and (refusal := RefusalElsewhere(*json.loads(first))).rank != self._rank:
            self.refusal = refusal

    def tell_found(self, found: Found) -> None:
        """Say what the search found, which this rank did."""
        self._ask(lambda: self._store.set("found", json.dumps(found)))

    def found_elsewhere(self) -> Found | None:
        """What the search on another rank found; None as long as it goes on. Empty if nobody will say."""
        now = self._clock()
        if now < self._next_look:
            return None
        self._next_look = now + _LONGEST_PAUSE
        told = self._ask(lambda: self._store.get("found") if self._store.check(["found"]) else b"")
        if told is None:
            return {}
        return json.loads(told) if told else None

    def _ask(self, question: Callable[[], Any]) -> Any:
        """What the store answers; None in a forked child, and once it has failed: ranks are not heard any more."""
        if self._process == os.getpid():
            with contextlib.suppress(RuntimeError):
                return question()
        self._process, self.is_awaited = None, False
        return None


def shared_verdict(ops: Iterable[OpOverload], plan: Key, num_ranks: int) -> SharedVerdict | None:
    """What ranks say of a plan that calls `ops`; None if none communicates, or ranks do not hear of each other."""
    if not any(map(is_collective, ops)):
        return None
    with contextlib.suppress(RuntimeError):
        agreement = agreements.of(group_numbers.group_at(WORLD))
        if agreement is not None:
            return SharedVerdict(agreement.store, dist.get_rank(), plan.hash_hex(), num_ranks)
    return None
