"""The compiled plans of one graph: which constants are compiled in, and which became inputs.

In: a graph, concrete or with symbolic sizes, and the constants of a run. Out: a `CompiledPlan` that holds for them, or
None while the compiler works, or for good if it failed.

Note [Scalars promote once]
Floats are literals at first, because compilers fold them. A float that was seen to change becomes an input. If a
literal changes after the compile, all floats that can be inputs become inputs at once: so scalars cost one further
compile per graph, ever. A float that cannot be an input (`eps` of a norm) gets up to `max_specializations` plans; for
further values, the graph is interpreted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lazy_backend.cache.computation_cache import Key
from lazy_backend.lowering.checks.proof import PlanRepaired
from lazy_backend.lowering.compilation.compiler import CompiledPlan
from lazy_backend.lowering.compilation.request import CompileRequest
from lazy_backend.lowering.compilation.scalars import can_promote
from lazy_backend.lowering.device_graphs.launcher import launches
from lazy_backend.lowering.ir.graph import Graph, constants_of
from lazy_backend.lowering.ir.portable import StoredGraph
from lazy_backend.lowering.ir.shapes import Sizes
from lazy_backend.lowering.plans.pending_compile import PendingCompile
from lazy_backend.lowering.plans.policy import CompilePolicy
from lazy_backend.lowering.plans.repair import known
from lazy_backend.lowering.plans.whole_graph import WholeGraph


@dataclass(frozen=True, slots=True)
class CompileReport:
    """A compile that began, ended, failed or was declined, an artefact loaded from disk, or limits that were passed.

    For metrics and messages.

    `stage`: "started" (in the background), "compiled", "loaded" (from disk), "failed", "declined"
    (`NotFunctional`: no compiler was asked), "limited" (`TooManyShapes`), or what came of a trial: "agreed",
    "suspected", "unverified", "refused" (`PlanRefused`), "repaired" (`PlanRepaired`, if users have to be told).
    """

    graph: Graph
    stage: str
    seconds: float = 0.0
    plan: CompiledPlan | None = None
    error: Exception | None = None
    symbolic: bool = False  # compiled for many shapes
    after_blocks: bool = False  # the whole graph, which may replace a plan in blocks
    changed: tuple[tuple[int, float, float], ...] = ()  # constants no plan accepts: place, value before, value now


class GraphCompiler:
    """Makes and keeps the compiled plans of one graph. The caller ensures that one thread at a time uses it.

    `sizes`: what the numbers of a symbolic graph are, `stored` being one sample.
    """

    def __init__(
        self,
        stored: StoredGraph,
        report: Callable[[CompileReport], None],
        key: Key | None = None,
        sizes: Sizes | None = None,
    ) -> None:
        self.stored = stored
        self.report = report
        self.key = key  # without a key nothing is stored
        self.sizes = sizes
        self.compiles = 0
        self.error: Exception | None = None
        self.plans: list[CompiledPlan] = []
        self._compiled: list[PendingCompile] = []  # the compiles of these plans
        self._seen: tuple[float, ...] | None = None
        self.changed: set[int] = set()
        self._promotable: frozenset[int] | None = None
        self._pending: PendingCompile | None = None
        self.whole_graph: WholeGraph | None = None  # what may replace the latest plan
        self._changed_values: tuple[tuple[int, float, float], ...] = ()

    @property
    def graph(self) -> Graph:
        return self.stored.get()

    def plan_for(self, constants: Sequence[float], policy: CompilePolicy) -> CompiledPlan | None:
        """A plan for these constants, if there is one. Otherwise has one compiled, unless there are too many already.

        If compiles run in the background, each call does one part of the work here. See Note [No step pays twice].
        """
        self.adopt()
        plan = self.find_for_run(constants)
        if self._pending is None and plan is None and self._wants_another(policy):
            self._pending = self._begin(constants, policy)
            self._go_on(waits=not policy.background)
            plan = self.find(constants)
        elif self._pending is not None and not self._pending.is_sent:
            self._go_on()
            plan = plan or self.find(constants)
        return plan

    def _wants_another(self, policy: CompilePolicy) -> bool:
        return self.error is None and len(self.plans) < policy.max_specializations

    def is_compiling(self) -> bool:
        return self._pending is not None

    def is_judging(self) -> bool:
        """Whether the compiler's process judges a trial. See Note [Rounding is judged elsewhere]."""
        return any(plan.proof.judgement is not None for plan in self._all_plans())

    def begin_due(self) -> None:
        """Advance the pending compile at once until its request is sent, and ask what is to be judged."""
        for plan in self._all_plans():
            if plan.proof.judgement is not None:
                plan.proof.judgement.begin()
        while self._pending is not None and not self._pending.is_sent:
            self._go_on()

    def adopt(self) -> None:
        """Turn a finished compile into a plan, and drop plans that a trial has refused, here or on another rank."""
        self._listen()
        self._drop_refused()
        self._tell_of_repaired()
        if self._pending is not None and self._pending.is_sent:
            self._pending.poll()
            self._settle(self._pending)

    def _begin(self, constants: Sequence[float], policy: CompilePolicy) -> PendingCompile:
        promoted = self._promotable_constants()
        if not self.plans:
            promoted &= self.changed
        self._changed_values = self.plans[-1].refused(constants) if self.plans else ()
        left = known.left(policy.backend, self.stored, promoted)
        settings = policy.backend, self.sizes, policy.shares_blocks, left, policy.shares_threads
        request = CompileRequest(self.stored, tuple(constants), promoted, *settings)
        return PendingCompile(request, policy, self.key)

    def _go_on(self, waits: bool = False) -> None:
        """Do the next part of the pending compile; if `waits`, do all of it and wait for the answer."""
        pending = self._pending
        assert pending is not None
        if waits:
            pending.advance_to_the_end()
        else:
            pending.advance()
        if pending.is_sent:
            self._tell("started")
            if waits:
                pending.wait()
        self._settle(pending)

    def _settle(self, pending: PendingCompile) -> None:
        """Take the plan or the error of a compile that is over."""
        if not pending.is_over:
            return
        self._pending = None
        plan = pending.plan
        if plan is None:
            self.error = pending.error
        else:
            self.compiles += pending.stage == "compiled"
            plan.launcher = launches.launcher_of(self.stored)
            # a plan with more inputs replaces the older plans that it covers
            self.plans = [p for p in self.plans if not _covers(plan, p)] + [plan]
            if plan.proof.seen and plan.proof.left:  # an earlier process has told of it
                plan.proof.left = ""
                self._tell("repaired", 0.0, plan)
            self._compiled = [one for one in self._compiled if one.plan in self.plans] + [pending]
            self.whole_graph = WholeGraph(pending, self.key) if plan.may_be_slower else None
        self._tell(pending.stage, pending.seconds, plan, pending.error)

    def find(self, constants: Sequence[float]) -> CompiledPlan | None:
        return next((plan for plan in self.plans if plan.accepts(constants) and not plan.proof.refusal), None)

    def has_untried(self) -> bool:
        """Whether some plan is on trial, or was refused or repaired since the latest call of `adopt`."""
        return any(one.proof.refusal or one.proof.left or not one.proof.covers(()) for one in self._all_plans())

    def _listen(self) -> None:
        for plan in self._all_plans():
            proof = plan.proof
            was_judged, was_used = proof.judgement is not None, proof.refusal is None
            proof.listen()
            if was_used and proof.refusal is not None:
                self._tell("refused")
            elif was_judged and proof.judgement is None and not proof.is_suspected:
                self._tell("agreed")

    def _all_plans(self) -> list[CompiledPlan]:
        whole = None if self.whole_graph is None else self.whole_graph.compile.plan
        return self.plans if whole is None else [*self.plans, whole]

    def _drop_refused(self) -> None:
        refused = [plan for plan in self.plans if plan.proof.refusal is not None]
        for plan in refused:
            self.plans.remove(plan)
            self.whole_graph = None
            compiled = next((one for one in self._compiled if one.plan is plan), None)
            if compiled is not None and compiled.begins_search(self._pending is None):
                self._pending = compiled
            else:
                self.error = plan.proof.refusal
                self._tell("refused", 0.0, plan, self.error)

    def _tell_of_repaired(self) -> None:
        for plan in self.plans:
            if plan.proof.left and plan.proof.seen:
                told, plan.proof.left = PlanRepaired(plan.proof.left), ""
                self._tell("repaired", 0.0, plan, told)

    def find_for_run(self, constants: Sequence[float]) -> CompiledPlan | None:
        """As `find`, for a run: while another plan is compared with the one found, they take turns."""
        plan, whole_graph = self.find(constants), self.whole_graph
        if plan is None or whole_graph is None or plan is not whole_graph.blocks:
            return plan
        chosen = whole_graph.plan()
        compiled = whole_graph.compile
        if compiled.is_over and not whole_graph.is_compiled:
            whole_graph.is_compiled = True
            if compiled.plan is not None:
                compiled.plan.launcher = launches.launcher_of(self.stored)
            self.compiles += compiled.stage == "compiled"
            self._tell(compiled.stage, compiled.seconds, compiled.plan, compiled.error, after_blocks=True)
        winner = whole_graph.winner
        if winner is None:
            return plan if chosen.proof.waits(()) else chosen
        self.whole_graph = None
        whole_graph.keep(winner)
        if compiled.plan is not None and compiled.plan.proof.refusal is not None:
            compiled.begins_search(False)
            self._tell("refused", 0.0, compiled.plan, compiled.plan.proof.refusal, after_blocks=True)
        self.plans = [winner if one is plan else one for one in self.plans]
        self._compiled.append(compiled)
        return winner

    def observe(self, constants: Sequence[float]) -> None:
        """Note which constants change from run to run."""
        if self._seen is None:
            self._seen = tuple(constants)
        elif self._seen is not constants and self._seen != tuple(constants):
            # a constant that is NaN differs from itself, so it is promoted: correct, though not cheap
            self.changed.update(i for i, (a, b) in enumerate(zip(self._seen, constants, strict=True)) if a != b)
            self._seen = tuple(constants)

    def _tell(
        self,
        stage: str,
        seconds: float = 0.0,
        plan: CompiledPlan | None = None,
        error: Exception | None = None,
        after_blocks: bool = False,
    ) -> None:
        changed = () if after_blocks else self._changed_values
        symbolic = self.sizes is not None
        self.report(CompileReport(self.graph, stage, seconds, plan, error, symbolic, after_blocks, changed))

    def _promotable_constants(self) -> frozenset[int]:
        """See Note [Scalars promote once]. A constant used by two nodes needs a rule for both."""
        if self._promotable is None:
            places = [(node, constants_of(node)) for node in self.graph.nodes]
            fixed = {place for node, own in places if own and not can_promote(node) for place in own}
            self._promotable = frozenset(range(self.graph.num_constants)) - fixed
        return self._promotable


def _covers(new: CompiledPlan, old: CompiledPlan) -> bool:
    return new.specialised.items() <= old.specialised.items()
