"""The whole graph after its blocks: compiled while cores idle, and kept if it is faster.

In: a plan that runs a graph in blocks. Out: the plan for each run, which is the faster one of the two in the end.

Note [The whole graph after its blocks]
Equal blocks that are compiled once make a large graph fast soon, but the fusions across their borders are lost: a few
percent of a GPT's step. So once the runs in blocks have taken `CompilePolicy.whole_after` seconds, and a core idles,
the graph is compiled whole, at the compiler's low priority, while runs go on in blocks. Then runs take turns, and the
plan with the shortest run stays: the shortest, as what disturbs a run only makes it longer. On a device that computes
while the host goes on, the host's clock says nothing, and the whole graph stays.

The decision is kept with the artefact, so that the next process begins with it: that of the whole graph takes the place
of the blocks', or the blocks' is marked as the faster one. If the compile fails, the blocks stay, and nothing is said:
what a program waits for has been compiled.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace

from lazy_backend.cache.computation_cache import Key
from lazy_backend.lowering.artefacts.artefact import marked
from lazy_backend.lowering.artefacts.run_thread import available_cores
from lazy_backend.lowering.compilation.compiler import CompiledPlan
from lazy_backend.lowering.plans.pending_compile import PendingCompile

# Runs of each plan that are timed.
_TIMED_RUNS = 8
# Seconds of runs between two looks at how busy the machine is.
_BETWEEN_LOOKS = 1.0


class WholeGraph:
    """What may replace the plan of a compile that is over, which is in blocks. One thread at a time uses it."""

    def __init__(self, compiled: PendingCompile, key: Key | None) -> None:
        assert compiled.plan is not None
        self.blocks: CompiledPlan = compiled.plan
        request = replace(compiled.request, shares_blocks=False)
        self.compile = PendingCompile(request, compiled.policy, key, repairs=False)
        self.is_compiled = False  # whether the end of the compile has been reported
        self._of_blocks = compiled
        self._turns = 0
        self._next_look = 2

    @property
    def winner(self) -> CompiledPlan | None:
        """The faster plan, once that is known; the plan in blocks if the compile failed."""
        if not self.compile.is_over:
            return None
        whole = self.compile.plan
        if whole is None or whole.proof.refusal is not None:
            return self.blocks
        if self._computes_elsewhere():
            return whole
        if self._turns < 2 * _TIMED_RUNS + 2:
            return None
        return whole if whole.shortest_run < self.blocks.shortest_run else self.blocks

    def plan(self) -> CompiledPlan:
        """The plan for the next run. Does a part of the compile if one is due."""
        whole = self.compile.plan
        if whole is None:
            self._go_on()
            return self.blocks
        if not self._turns:
            self.blocks.shortest_run = math.inf  # its runs so far were many more than the other one's will be
        self._turns += 1
        return whole if self._turns % 2 else self.blocks

    def keep(self, winner: CompiledPlan) -> None:
        """Keep the decision on disk, if artefacts are."""
        store = self.compile.policy.store
        place, own = self._of_blocks.artefact_key, self.compile.artefact_key
        if store is None or place is None or own is None or self.compile.plan is None:
            return
        found = store.get(place if winner is self.blocks else own)
        if found is not None:
            store.put(place, marked(found, {"is_faster": True}) if winner is self.blocks else found)

    def _go_on(self) -> None:
        if self.compile.is_over:
            return
        if self.compile.is_sent:
            self.compile.poll()
        elif self.compile.is_begun or self._is_due():
            self.compile.advance()

    def _is_due(self) -> bool:
        runs = self.blocks.num_runs
        if runs < self._next_look or self.blocks.shortest_run * runs < self.compile.policy.whole_after:
            return False
        self._next_look = runs + max(1, int(_BETWEEN_LOOKS / self.blocks.shortest_run))
        return _has_idle_core()

    def _computes_elsewhere(self) -> bool:
        return self.compile.request.stored.device.type != "cpu"


def _has_idle_core() -> bool:
    """Whether the compiler would take nothing from those who compute now."""
    return os.getloadavg()[0] + 0.5 < available_cores()
