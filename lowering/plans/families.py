"""Programs that differ only in shapes, and the plans they share.

In: graphs that recur. Out: `Family`, which decides whether a graph gets a plan of its own or the symbolic one.
See Note [Shapes are checked, not assumed].

Note [Programs of many shapes]
The first shape of a program that recurs gets a plan of its own, since most programs have one shape. Of a program that
was seen with several shapes, each once, as when text is generated token by token, that plan would hardly be used. So
its first shapes wait a few runs for another one to recur, and are then served by one plan together (`Form`). Floats
that differ between the shapes, such as a length in a formula, are inputs of that plan from the start.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence, Set

import torch

from lazy_backend.cache.computation_cache import Key
from lazy_backend.lowering.artefacts.run_thread import Overlap
from lazy_backend.lowering.compilation.compiler import CompiledPlan, CompiledRun
from lazy_backend.lowering.compilation.plan_kinds import PlanKind
from lazy_backend.lowering.ir.portable import StoredGraph
from lazy_backend.lowering.ir.shapes import Sizes, generalise, input_sizes, numbers_of
from lazy_backend.lowering.plans.policy import CompilePolicy, FusionStrategy
from lazy_backend.lowering.plans.specialise import CompileReport, GraphCompiler

# Samples from which a guess is made. The oldest are kept, since every guess has to hold for the first shapes too.
_MAX_SAMPLES = 16

# Shapes of a program from which on it is one of many shapes, and runs that a shape of it waits for others to recur.
_MANY = 3
_PATIENCE = 4

# Shapes that the compiler's guards on symbols refuse (a batch of one, say) and that get plans of their own.
_MAX_REFUSED = 4


class TooManyShapes(RuntimeError):
    """A program has more shapes than its limits allow, so shapes that fit no plan are interpreted."""


class SizedPlan:
    """A symbolic plan with the values of its symbols."""

    kind = PlanKind.COMPILED_FOR_SHAPES

    def __init__(self, plan: CompiledPlan, sizes: tuple[int, ...]) -> None:
        self.plan = plan
        self.sizes = sizes
        self.conforms = False
        self.num_runs = 0
        self.shortest_run = math.inf
        self.overlap = Overlap()

    def execute(
        self, inputs: list[torch.Tensor], constants: Sequence[float], seeds: Sequence[int]
    ) -> list[torch.Tensor]:
        return self.plan.execute(inputs, constants, seeds, self.sizes)

    def run_beside(self) -> CompiledRun | None:
        return self.plan.run_beside(self.sizes)


class Form:
    """What is known of all paths that call the same operators in the same order, whatever the shapes."""

    __slots__ = ("num_paths",)

    def __init__(self) -> None:
        self.num_paths = 0


class Member:
    """One graph of a family."""

    def __init__(self, stored: StoredGraph, key: Key | None) -> None:
        self.stored = stored
        self.key = key
        self.numbers = numbers_of(stored.get())
        self.is_static = False  # has plans of its own
        self.is_refused = False  # static because the symbolic plan does not take its sizes
        self.is_sample = False
        # the latest result of `Family._bind`, which compares thousands of numbers: too much to repeat at every sync
        self.bound: tuple[Sizes, tuple[int, ...] | None] | None = None
        self.failed_with: tuple[int, int] | None = None  # number of samples and of symbols, when no guess held for it
        self.is_counted = False
        self.limited: TooManyShapes | None = None  # why it has no plan, until the limits are raised


class Family:
    """All graphs of one skeleton and one set of settings. Thread-safe."""

    def __init__(self, report: Callable[[CompileReport], None]) -> None:
        self._report = report
        self._samples: list[tuple[int, ...]] = []
        self._shapes = 0  # shapes that recurred
        self._told = False  # whether passing the limits was reported
        self._statics = 0
        self._refused = 0
        self._guesses = 0
        self._constants: tuple[float, ...] | None = None  # of the member that was asked for first
        self._changed: set[int] = set()
        self._sizes: Sizes | None = None
        self._compiler: GraphCompiler | None = None
        self._lock = threading.RLock()

    def plan_for(
        self,
        member: Member,
        constants: Sequence[float],
        changed: Set[int],
        policy: CompilePolicy,
        form: Form | None = None,
        runs: int = 0,
    ) -> SizedPlan | None:
        """The symbolic plan for a member that recurs, if that plan is valid for it. May make the member static.

        `changed`: constants that were seen to change in this member. `form`, `runs`: the member's form, and its runs so
        far; see Note [Programs of many shapes].
        """
        with self._lock:
            self._changed |= changed
            if member.is_static:
                return None
            self._note_constants(tuple(constants))
            if not member.is_sample and len(self._samples) < _MAX_SAMPLES:
                member.is_sample = True
                self._samples.append(member.numbers)
            if not member.is_counted:
                member.is_counted = True
                self._shapes += 1
            waits = form is not None and form.num_paths >= _MANY
            waits = waits and (runs <= _PATIENCE or self._bind(member) is not None)
            if self._statics < policy.strategy.static and not waits:
                self._statics += 1
                member.is_static = True
                return None
            return self._symbolic(member, constants, policy)

    def _note_constants(self, constants: tuple[float, ...]) -> None:
        """Note which constants differ between members."""
        if self._constants is None:
            self._constants = constants
        elif self._constants != constants:
            pairs = zip(self._constants, constants, strict=True)
            self._changed.update(place for place, (first, now) in enumerate(pairs) if first != now)

    def _symbolic(self, member: Member, constants: Sequence[float], policy: CompilePolicy) -> SizedPlan | None:
        values = self._bind(member)
        if values is None and self._guess(member, policy):
            values = self._bind(member)
        if values is None or self._compiler is None:
            return None
        if min(values, default=2) < 2:  # compilers specialise on the sizes 0 and 1
            self._refuse(member, policy)
            return None
        member.limited = None
        self._compiler.observe(constants)
        self._compiler.changed |= self._changed
        plan = self._compiler.plan_for(constants, policy)
        if plan is None:
            return None
        if not plan.accepts_sizes(values):
            self._refuse(member, policy)
            return None
        return SizedPlan(plan, values)

    def _bind(self, member: Member) -> tuple[int, ...] | None:
        """The symbols' values for a member, if the guess holds for it."""
        if self._sizes is None:
            return None
        if member.bound is None or member.bound[0] is not self._sizes:
            member.bound = self._sizes, self._sizes.bind(member.numbers)
        return member.bound[1]

    def _guess(self, member: Member, policy: CompilePolicy) -> bool:
        """Generalise once more, with this member among the samples. False if there is no new guess."""
        if self._guesses >= policy.strategy.dynamic:
            self._limit(member, policy, "max_dynamic_shapes")
            return False
        samples = self._samples if member.is_sample else [*self._samples, member.numbers]
        attempt = len(samples), policy.strategy.symbols
        if len(samples) < 2 or member.failed_with == attempt:
            return False
        sizes = generalise(samples, input_sizes(member.stored.get()), policy.strategy.symbols)
        if sizes is None:
            member.failed_with = attempt
            self._limit(member, policy, "max_symbols")
            return False
        values = sizes.bind(member.numbers)
        if values is None or min(values, default=2) < 2:
            member.failed_with = attempt
            self._refuse(member, policy)
            return False
        self._guesses += 1
        self._sizes = sizes
        self._compiler = GraphCompiler(member.stored, self._report, member.key, sizes)
        return True

    def _refuse(self, member: Member, policy: CompilePolicy) -> None:
        if self._refused < _MAX_REFUSED:
            self._refused += 1
            member.is_refused = member.is_static = True
        else:
            self._limit(member, policy, "max_static_shapes")

    def _limit(self, member: Member, policy: CompilePolicy, setting: str) -> None:
        """Note why a member has no plan, and report it once per program."""
        if member.limited is not None or self._statics < policy.strategy.static:
            return  # told already, or soon to have a plan of its own
        member.limited = TooManyShapes(_describe_limits(member, self._shapes, policy.strategy, setting))
        if not self._told:
            self._told = True
            self._report(CompileReport(member.stored.get(), "limited", error=member.limited))

    def forget(self, member: Member) -> None:
        """Forget the plan of a member, for all members that share it."""
        with self._lock:
            if member.is_static:
                member.is_static = False
                if member.is_refused:
                    self._refused -= 1
                else:
                    self._statics -= 1
            else:
                self._sizes = self._compiler = None
                self._guesses = 0
            member.is_refused = False
            member.failed_with = None
            member.limited = None

    def leave(self, member: Member) -> None:
        """Give the plan of its own that a member may have to others: the member's graph is dropped."""
        with self._lock:
            if member.is_static:
                if member.is_refused:
                    self._refused -= 1
                else:
                    self._statics -= 1
                member.is_static = member.is_refused = False

    def begin_due(self) -> None:
        """Advance the pending compile at once until its request is sent."""
        with self._lock:
            if self._compiler is not None:
                self._compiler.begin_due()

    def adopt_compiled(self) -> None:
        with self._lock:
            if self._compiler is not None:
                self._compiler.adopt()

    def error(self) -> Exception | None:
        """Why there is no symbolic plan, if its compile failed."""
        return None if self._compiler is None else self._compiler.error

    def is_compiling(self) -> bool:
        compiler = self._compiler
        return compiler is not None and (compiler.is_compiling() or compiler.is_judging())


def _describe_limits(member: Member, shapes: int, strategy: FusionStrategy, setting: str) -> str:
    nodes = member.stored.get().nodes
    name = "" if member.key is None else f" {member.key.hash_hex()[:8]}"
    return (
        f"the program{name} of {len(nodes)} nodes came back with {shapes} shapes, more than its limits allow: "
        f"max_static_shapes = {strategy.static}, max_dynamic_shapes = {strategy.dynamic}, "
        f"max_symbols = {strategy.symbols}\n  it starts at {nodes[0].site or 'an unknown line'}; shapes that fit none "
        f"of its plans are interpreted from now on, with the same results, only slower\n  "
        f"pad sizes or sort them into buckets, or raise lazy_backend.config.{setting}"
    )
