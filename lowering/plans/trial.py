"""The first run of a compiled plan, beside the interpreter.

In: a compiled plan that nobody has seen agree, and the interpreter of its graph. Out: the interpreter's results, and a
verdict: the plan is used from the next run on, or never.

Note [A plan is tried before it is used]
Compilers have silent faults, and a step whose weights are wrong by a little goes on. So a compiled plan computes once
what the interpreter computes: of the same inputs, with copies of those that are written or small, and with the same
seeds. The step's results are the interpreter's. Where all results and copied inputs agree (Note [What rounding
explains]), the plan is used from the next run on, and its artefact on disk says so, for the next process. Where some
are suspected, the interpreter also runs with moved roundings: in the compiler's process where there is one (Note
[Rounding is judged elsewhere]), otherwise in the next run, which is another trial. A plan that rounding does not
explain is refused, and repaired if that is possible (Note [A refused plan is repaired]). Otherwise the graph stays
interpreted, users are warned, and the artefact says so too.

A symbolic plan has a trial for each class of its sizes (`Proof`). A plan that communicates hears in its trial what the
interpreter heard (Note [Trials do not communicate]).

A trial that is interrupted has no verdict: the next run is another one. The interpreter has written the step's tensors
by then, so its results are delivered before the plan runs: an interruption of what only the comparison needs loses
none. An error of the interpreter is the program's own, and no verdict either. Where the plan alone raises, it computes
again at once, of the same inputs. An error that comes again is the plan's, and counts like results that differ. Another
one came from outside, from a signal handler or another thread (`PyThreadState_SetAsyncExc`), and is raised. A plan for
whose trial the device has no memory is used untried, and counted.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import torch

from lazy_backend.lowering.artefacts.run_thread import Overlap
from lazy_backend.lowering.checks import rounding
from lazy_backend.lowering.checks.moved_roundings import MovedRoundings
from lazy_backend.lowering.checks.proof import PlanRefused
from lazy_backend.lowering.checks.refusals import NodeError
from lazy_backend.lowering.checks.rounding import Discrepancy
from lazy_backend.lowering.collectives.communication import is_collective
from lazy_backend.lowering.collectives.conversation import Conversation, Heard, joined, operand
from lazy_backend.lowering.compilation.compiler import CompiledPlan
from lazy_backend.lowering.compilation.plan_kinds import PlanKind
from lazy_backend.lowering.interpreter.serial import SerialGraphExecutor
from lazy_backend.lowering.ir.graph import Graph, Node, Value, makes_views, meta_of
from lazy_backend.ports.cpython import pass_on_interruption
from lazy_backend.ports.dispatcher import base_name

# What is told of a trial: its verdict, which is a stage of `CompileReport`, and its seconds.
Tell = Callable[[str, float], None]
Results = Sequence[torch.Tensor] | Mapping[int, torch.Tensor]
# Results that are suspected, by place: the interpreter's and the plan's.
Compared = Mapping[int, tuple[torch.Tensor, torch.Tensor]]
# Results that an error names.
_MAX_NAMED = 3
# Bytes of inputs that are copied although the graph does not write them: the plan may.
_MAX_COPIED = 1 << 26
_COPIES = frozenset(("clone", "copy_", "_to_copy"))


@dataclass(frozen=True, slots=True)
class TriedRun:
    """The arguments of a run of a graph, as they were before it."""

    graph: Graph
    inputs: Sequence[torch.Tensor]
    constants: Sequence[float]
    seeds: Sequence[int]
    sizes: Sequence[int]
    heard: Sequence[Heard] = ()  # of other ranks


class Trial:
    """A run of `interpreter`, with a trial of `plan` beside it. See Note [A plan is tried before it is used].

    `heard`: what to hear of other ranks in place of communication, also in the run of the interpreter.
    """

    kind = PlanKind.ON_TRIAL

    def __init__(
        self,
        plan: CompiledPlan,
        sizes: Sequence[int],
        interpreter: SerialGraphExecutor,
        tell: Tell,
        heard: Sequence[Heard] | None = None,
    ) -> None:
        self._plan = plan
        self._sizes = sizes
        self._interpreter = interpreter
        self._graph = interpreter.graph
        self._tell = tell
        self._copied = _copied_inputs(interpreter.graph)
        self._written = interpreter.graph.mutated_inputs()
        self._heard = heard
        self.conforms = False
        self.num_runs = 0
        self.shortest_run = math.inf
        self.overlap = Overlap()

    def run_beside(self) -> None:
        """None: the interpreter needs Python."""

    def execute(
        self,
        inputs: list[torch.Tensor],
        constants: Sequence[float],
        seeds: Sequence[int],
        deliver: Callable[[list[torch.Tensor]], None] = lambda outputs: None,
    ) -> list[torch.Tensor]:
        """Run once. Takes ownership of `inputs`. `deliver` gets the outputs before the plan is tried."""
        try:
            with torch.no_grad():
                return self._execute(inputs, constants, seeds, deliver)
        finally:
            joined.now = None  # a plain store: an interruption may keep `Conversation.joined` from it

    def _execute(
        self,
        inputs: list[torch.Tensor],
        constants: Sequence[float],
        seeds: Sequence[int],
        deliver: Callable[[list[torch.Tensor]], None],
    ) -> list[torch.Tensor]:
        copies = self._copies_of(inputs)
        written = [inputs[place] for place in self._copied]
        conversation = Conversation(self._heard)
        with conversation.joined() as sent:
            deliver((outputs := self._interpreter.execute(inputs, constants, seeds)).copy())
        start = perf_counter()
        self._sent = tuple(sent)
        if copies is None:
            self._plan.proof.go_without()
            verdict = "unverified"
        else:
            given, originals = copies
            ours = [*outputs, *written, *sent.values()]
            run = TriedRun(self._graph, originals, constants, seeds, self._sizes, conversation.heard)
            verdict = self._try(ours, given, run, conversation)
        self._tell(verdict, perf_counter() - start)
        return outputs

    def _copies_of(self, inputs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
        """The inputs with copies for the plan, and with those of what the graph writes; None without memory."""
        try:
            return _with_copies(inputs, self._copied), _with_copies(inputs, self._written)
        except (MemoryError, torch.OutOfMemoryError):
            return None

    def _try(
        self, ours: Sequence[torch.Tensor], given: list[torch.Tensor], run: TriedRun, conversation: Conversation
    ) -> str:
        """The verdict. `run`: with copies of what the graph writes."""
        proof, wrong = self._plan.proof, ""
        try:
            theirs, suspects = self._beside(ours, given, run, conversation)
            if suspects and proof.may_ask and proof.ask is not None:
                compared = {place: (rounding.copy_of(ours[place]), theirs[place]) for place in suspects}
                rest = set(range(len(run.inputs))).difference(self._written)
                unshared = replace(run, inputs=_with_copies(run.inputs, rest))
                proof.judgement = proof.ask(unshared, compared, self._sent)
                return "suspected"
            if suspects and proof.is_suspected:
                suspects = unexplained(suspects, ours, theirs, run, self._interpreter)
            if suspects:
                wrong = described(self._graph, self._sent, suspects)
        except (MemoryError, torch.OutOfMemoryError):
            proof.go_without()
            return "unverified"
        except Exception as error:
            pass_on_interruption(error)
            if not self._fails_again(ours, run, conversation):
                raise
            wrong = f"{type(error).__name__}: {error}"
        if not wrong:
            proof.agree(self._sizes)
            return "agreed"
        if not proof.is_suspected:
            proof.is_suspected = True
            return "suspected"
        proof.refuse(PlanRefused(wrong), run)
        return "refused"

    def _beside(
        self, ours: Sequence[torch.Tensor], given: list[torch.Tensor], run: TriedRun, conversation: Conversation
    ) -> tuple[list[torch.Tensor], dict[int, Discrepancy]]:
        """The plan's results and those that are suspected, of copies of the inputs, which are written."""
        copies = [given[place] for place in self._copied]
        with conversation.joined() as sent:
            made = self._plan.execute(given, run.constants, run.seeds, self._sizes, launches=False)
        theirs = [*made, *copies, *sent.values()]
        return theirs, self._suspects(ours, theirs)

    def _fails_again(self, ours: Sequence[torch.Tensor], run: TriedRun, conversation: Conversation) -> bool:
        return _raises(lambda: self._beside(ours, _with_copies(run.inputs, self._copied), run, conversation))

    def _suspects(self, ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> dict[int, Discrepancy]:
        """Results whose differences a few roundings do not explain, by place among outputs and copied inputs."""
        for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            if one.shape != other.shape or one.dtype != other.dtype:
                raise TypeError(f"result {place} is {meta_of(other)} instead of {meta_of(one)}")
        found = rounding.differences(ours, theirs)
        eps = rounding.coarsest_eps(self._graph) if found else 0.0
        return {place: one for place, one in found.items() if rounding.is_suspect(one, eps)}


def _with_copies(inputs: Sequence[torch.Tensor], places: Collection[int]) -> list[torch.Tensor]:
    copied = set(places)
    return [rounding.copy_of(one) if place in copied else one for place, one in enumerate(inputs)]


def unexplained(
    suspects: Collection[int],
    ours: Results,
    theirs: Results,
    run: TriedRun,
    interpreter: SerialGraphExecutor,
) -> dict[int, Discrepancy]:
    """The suspects that are further from the interpreter's results than rounding moves these."""
    eps, found = rounding.coarsest_eps(run.graph), dict[int, Discrepancy]()
    # another one: it may be launched as a graph of the device, which calls no operators
    interpreter = SerialGraphExecutor(run.graph, interpreter.kernels, interpreter.exec_info)
    spreads = {place: rounding.Spread(ours[place]) for place in suspects}
    for sample in range(2 * rounding.SAMPLES):
        roundings = 1 if sample < rounding.SAMPLES else rounding.TIMES
        try:
            further = _moved(sample, roundings, run, interpreter)
        except NodeError:
            if not _raises(functools.partial(_moved, sample, roundings, run, interpreter)):
                raise
            continue  # a value was moved out of an operator's domain
        for place in suspects:
            spreads[place].add(further[place], roundings)
        apart = {place: spreads[place].unexplained(theirs[place], eps) for place in suspects}
        suspects = found = {place: one for place, one in apart.items() if one is not None}
        if not suspects:
            break
    return found


def _moved(sample: int, roundings: int, run: TriedRun, interpreter: SerialGraphExecutor) -> list[torch.Tensor]:
    """The results of a run whose elements are moved by so many roundings."""
    moved = list(map(rounding.copy_of, run.inputs))
    written = [moved[place] for place in _copied_inputs(run.graph)]
    mode = MovedRoundings(sample, roundings * rounding.coarsest_eps(run.graph), either_way=roundings > 1)
    for one in moved:
        mode.move(one, spares_counts=True)
    with Conversation(run.heard).joined() as sent, mode:
        made = interpreter.execute(moved, run.constants, run.seeds)
    return [*made, *written, *sent.values()]


def described(graph: Graph, sent: Sequence[int], suspects: Mapping[int, Discrepancy]) -> str:
    """The results that disagree, those that the program computes first ahead, with the operators that made them.

    `sent`: the places, among the calls that communicate, of those that send something.
    """
    calls = [node for node in graph.nodes if is_collective(node.op)]
    values = [*graph.outputs, *(graph.inputs[place] for place in _copied_inputs(graph))]
    values += [operand(calls[place].args, Value) for place in sent]
    makers = {value.storage: place for place, node in enumerate(graph.nodes) for value in _results(node)}
    ordered = sorted(suspects, key=lambda place: makers.get(values[place].storage, -1))
    lines = []
    for place in ordered[:_MAX_NAMED]:
        found, node = suspects[place], _computed_by(graph, values[place])
        apart = f" by {found.size:.3g} of {found.scale:.3g}" if found.scale else ""
        maker = "an input that no operator writes" if node is None else f"{node.name} recorded at {node.site}"
        lines.append(f"{values[place].meta} differs{apart}: {maker}")
    further = len(ordered) - len(lines)
    return "\n  ".join([*lines, f"and {further} more"] if further else lines)


def _raises(run: Callable[[], object]) -> bool:
    try:
        run()
    except Exception as error:
        pass_on_interruption(error)
        return True
    return False


def _copied_inputs(graph: Graph) -> tuple[int, ...]:
    """The inputs that are copied: all that the graph writes, and as many of the others as are small together."""
    written = set(graph.mutated_inputs())
    copied, nbytes = [], 0
    for place, value in enumerate(graph.inputs):
        if place not in written:
            nbytes += value.meta.nbytes
        if place in written or nbytes <= _MAX_COPIED:
            copied.append(place)
    return tuple(copied)


def _computed_by(graph: Graph, value: Value) -> Node | None:
    """The last node that computes what is in the memory of `value`: not one that copies or looks at it."""
    found = None
    for node in reversed(graph.nodes):
        if makes_views(node) or all(one.storage != value.storage for one in _results(node)):
            continue
        found = node
        if base_name(node.op) not in _COPIES:
            break
        value = node.inputs()[-1]
    return found


def _results(node: Node) -> list[Value]:
    return [value for value in (*node.outputs, *node.mutates) if value is not None]
