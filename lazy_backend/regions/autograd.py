"""The backward of a region: one autograd node.

In: a call of a region that autograd follows. Out: results that carry one node. Its backward takes a jump, if the call
did; otherwise it runs the engine on the graph of the body, and what it records is learned.

Note [One node for a region]
While a region is learned, its body runs on detached arguments, and the results of the region are detached from the
body's graph: between them stands one node, whose inputs are the arguments and all leaves that the body's graph leads
to. So what the engine records between the gradients of the results and those of the inputs is one stretch. A call that
took a jump has no graph of its body. Its backward is a jump too or, where the trace is at a place that is new, the
calls of the known backward are recorded again one by one. A backward of another kind than those that were learned needs
the body's graph: the body runs again, with the random numbers of the call, and leaves its buffers as they are. If it
uses what it writes there, or draws from a generator of its own, there is a `CaptureError`.

Results whose graphs share nothing, as those of an actor and a critic, may get their gradients in backwards of their
own, as in eager. Each frees its part, and jumps are taken once a backward is known of each part that ever had one.

Note [Gradients written directly]
The engine adds a gradient to a leaf's `.grad` in a node of its own, which detaches it first: 14 µs for each parameter
of this device. So a jump gives `.grad` its value itself, where the engine would have done nothing else: the leaf's node
is executed for `.backward()`, the leaf has no hooks, and when the backward was learned, nothing besides this region
gave it a gradient. The engine then gets none.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from lazy_backend import metrics
from lazy_backend.errors import CaptureError
from lazy_backend.errors.sites import user_site
from lazy_backend.errors.tracebacks import hide_internals
from lazy_backend.lowering.ir.graph import Constant
from lazy_backend.lowering.ir.program import Call, Token
from lazy_backend.ports.autograd_engine import (
    accumulate_hooks_of,
    backward_hooks_of,
    call_at_the_end,
    keeps_graph,
    node_number,
    nodes_of,
    plain_apply,
    saves_tensors,
    will_execute,
)
from lazy_backend.ports.tensor_types import is_leaf, version_of
from lazy_backend.ports.thread_modes import WithoutSubclasses, dispatch_depth
from lazy_backend.recording.arguments import with_leaves
from lazy_backend.recording.record import record
from lazy_backend.regions.jump import Known, Saved, learn_jump, save, take_jump
from lazy_backend.regions.programs import (
    BackwardProgram,
    FromForward,
    FromGradient,
    FromOperand,
    Pattern,
    Program,
    Source,
    pattern_of,
)
from lazy_backend.regions.stretch import Stretch, StretchStart
from lazy_backend.replay.accounts import NotReplayable
from lazy_backend.replay.recorded_call import RandomState
from lazy_backend.tensors.state import DeviceContext, TensorData, Trace
from lazy_backend.tensors.tensor import LazyTensor, wrap, wrap_with

Grads = Sequence[torch.Tensor | None]

# Why a module is recorded as written from now on.
_DIFFERENTIATED_AGAIN = "its gradients are differentiated again"


class RegionCall:
    """One call that autograd follows, from its forward to its backward.

    `parts`: results whose graphs share nothing, by their places; none if all share. `freed`: whose graphs are gone.
    """

    parts: Sequence[frozenset[int]] = ()
    freed: frozenset[int] = frozenset()

    def freed_by(self, grads: Grads) -> frozenset[int]:
        """The results whose graphs are gone after a backward for `grads` that keeps nothing."""
        if not self.parts:
            return frozenset(range(len(grads)))
        given = {place for place, grad in enumerate(grads) if grad is not None}
        return self.freed.union(*[part for part in self.parts if not part.isdisjoint(given)])

    def backward(self, ctx: Any, grads: Grads, freed: frozenset[int]) -> Grads:
        """The gradients of the inputs of the call's node, whose context is `ctx`. `freed`: as it is from then on."""
        raise NotImplementedError


class _Node(torch.autograd.Function):
    """See Note [One node for a region]."""

    @staticmethod
    def forward(ctx: Any, call: RegionCall, results: list[torch.Tensor], saved: list[int], *inputs: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.saved_results = bool(saved)
        if saved:
            ctx.save_for_backward(*[results[place] for place in saved])
        return tuple(results)

    @staticmethod
    @hide_internals
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        if not any(grad is not None for grad in grads):  # somebody else differentiates what this call was given to
            return (None,) * (3 + len(ctx.needs_input_grad[3:]))
        call: RegionCall | None = ctx.call
        if call is None or (call.freed and any(grads[place] is not None for place in call.freed)):
            raise RuntimeError(
                "Trying to backward through a captured module a second time. Its intermediate values are freed when "
                "you call .backward() or autograd.grad(). Specify retain_graph=True if you need to backward through "
                "it a second time."
            )
        is_kept = keeps_graph()  # AOTAutograd asks the same way
        freed = call.freed if is_kept else call.freed_by(grads)
        found = call.backward(ctx, grads, freed)
        call.freed = freed
        if len(freed) == len(grads):
            ctx.call = None
        return (None, None, None, *found)


_apply = plain_apply(_Node)  # no transform of torch.func is active here


def with_node(
    call: RegionCall, results: list[torch.Tensor], inputs: Sequence[torch.Tensor], saved: list[int]
) -> tuple[torch.Tensor, ...]:
    """`results` with a node whose backward is `call.backward`. `saved`: the results that the backward uses."""
    made: tuple[torch.Tensor, ...]
    if torch.is_grad_enabled():
        made = _apply(call, results, saved, *inputs)
    else:  # the body turned them on for itself
        with torch.enable_grad():
            made = _apply(call, results, saved, *inputs)
    return made


def leaves_of(results: Sequence[torch.Tensor]) -> dict[int, tuple[torch.Tensor, GradientEdge]]:
    """The leaves that the graph of `results` leads to, by id, and where it does. Walks the graph.

    After `leaf.set_(...)` the leaf has another edge, and this graph still leads to this one.
    """
    # only the nodes that add to the gradients of leaves have a variable
    found = [(node.variable, GradientEdge(node, 0)) for node in nodes_of(results) if hasattr(node, "variable")]
    return {id(leaf): (leaf, edge) for leaf, edge in found}


def leads_to_older(results: Sequence[torch.Tensor], number: int) -> bool:
    """Whether the graph of `results` has nodes that were made before `number`. See `next_node_number`."""
    return any(node_number(node) < number for node in nodes_of(results))


def parts_of(results: Sequence[torch.Tensor], number: int) -> list[frozenset[int]]:
    """The places of `results` whose graphs share no node made since `number` that a backward uses up; none if all do.

    Walks the graphs.
    """
    parts: list[tuple[frozenset[int], set[Any]]] = []
    for place, result in enumerate(results if len(results) > 1 else ()):
        nodes = {node for node in nodes_of([result]) if node_number(node) >= number and saves_tensors(node)}
        sharing = [part for part in parts if not part[1].isdisjoint(nodes)]
        places = frozenset([place]).union(*[part[0] for part in sharing])
        parts = [part for part in parts if part not in sharing] + [(places, nodes.union(*[one[1] for one in sharing]))]
    return [places for places, _ in parts] if len(parts) > 1 else []


def checkpoints_reentrantly(results: Sequence[torch.Tensor]) -> bool:
    """Whether the graph of `results` holds a reentrant checkpoint, which `torch.autograd.grad` refuses to run."""
    return any(node.name() == "CheckpointFunctionBackward" for node in nodes_of(results))


# ----- a call whose body ran


class WrittenCall(RegionCall):
    """A call whose body ran as written; its backward is learned.

    `inner` is where the graphs of the body's own results end: the user may write to these, and a view that was written
    would get another graph. `inputs` are the tensors whose gradients are asked for: detached arguments, leaves;
    `edges`: where the graph leads to them, by id. `outer`: the inputs of the node, the same but for the arguments.
    `reaches_back`: whether the graph leads to nodes that are older than the call, and belong to others, too.
    """

    def __init__(
        self,
        context: DeviceContext,
        inner: list[GradientEdge],
        inputs: list[torch.Tensor],
        edges: Mapping[int, GradientEdge],
        outer: list[torch.Tensor],
        reaches_back: bool,
        refuse: Callable[[str], None],
        see: Callable[[Callable[[], Grads]], tuple[Grads, str]],
        finish: Callable[[str | None], None],
    ) -> None:
        self._context = context
        self._outer = outer
        self._see = see  # runs the backward, and says why what it ran, read and wrote keeps it from being replayed
        self._finish = finish  # takes why the backward cannot be replayed, or None
        self._inner: list[GradientEdge | None] | None = [*inner]
        self._inputs = inputs
        self._edges = edges
        self._reaches_back = reaches_back
        self._refuse = refuse
        self.lesson: Lesson | None = None
        self.generators: Sequence[torch.Generator] = ()  # of the user's own
        self.states: Sequence[Callable[[], Any]] = ()

    def backward(self, ctx: Any, grads: Grads, freed: frozenset[int]) -> Grads:
        assert self._inner is not None
        keeps_graph = freed == self.freed
        lesson, self.lesson = self.lesson, None
        if torch.is_grad_enabled():
            self._refuse(_DIFFERENTIATED_AGAIN)
            return differentiable_gradients(self._inner, self._inputs, self._outer, grads, keeps_graph)
        with self._context.lock:
            start = StretchStart(self._context, RandomState(self.generators, self.states))
        # not by a variable: it would keep what the check below must find gone
        found, unfit = self._see(
            partial(_run_engine, self._inner, self._inputs, grads, keeps_graph or self._reaches_back, self._edges)
        )
        # what a retained graph keeps alive cannot be told from what the body keeps
        if not keeps_graph:
            is_over = len(freed) == len(grads)
            self._inner = None if is_over else [None if n in freed else end for n, end in enumerate(self._inner)]
            if lesson is not None and all(grad is None or type(grad) is LazyTensor for grad in grads):
                try:
                    self._check_not_frozen()
                    if unfit:
                        raise NotReplayable(unfit)
                    program = lesson.learn(self._context, start, grads, found, freed)
                    lesson.watch_leaves(program, self._outer, found)
                    self._finish(None)
                    self.lesson = None if is_over else lesson
                except NotReplayable as reason:
                    self._finish(f"in its backward, {reason}")
        return found

    def _check_not_frozen(self) -> None:
        # a backward that gave a leaf no gradient for that would be taken where the leaf is not frozen; one that gives
        # it a gradient can be taken in both cases, as the engine drops what a frozen leaf gets
        if not all(one.requires_grad for one in self._inputs):
            raise NotReplayable("a leaf was frozen after the forward\n  freeze it before, or after the backward")


def _run_engine(
    results: Sequence[Any],
    inputs: Sequence[torch.Tensor],
    grads: Grads,
    keeps_graph: bool,
    edges: Mapping[int, GradientEdge] = MappingProxyType({}),
) -> Grads:
    """The gradients of `inputs`. A leaf's hooks are not called: they are when the leaf gets its gradient.

    `edges`: of the inputs in the graph of `results`, by id, where they may have others by now.
    """
    given = [(result, grad) for result, grad in zip(results, grads, strict=True) if grad is not None]
    wanted = [one for one in inputs if one.requires_grad]  # a leaf may have been frozen since
    if not wanted or not given:
        return [None] * len(inputs)
    ends: list[Any] = [edges.get(id(one), one) for one in wanted]
    hooks = [(found, dict(found)) for found in map(backward_hooks_of, wanted) if found]
    for registered, _ in hooks:
        registered.clear()
    try:
        found = torch.autograd.grad(
            [result for result, _ in given],
            ends,
            [grad for _, grad in given],
            create_graph=torch.is_grad_enabled(),
            retain_graph=keeps_graph,
            allow_unused=True,
        )
    finally:
        for registered, known in hooks:
            registered.update(known)
    following = iter(found)
    return [next(following) if one.requires_grad else None for one in inputs]


class _Differentiated(torch.autograd.Function):
    """See `differentiable_gradients`."""

    @staticmethod
    def forward(ctx: Any, made: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], *outer: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.made, ctx.inputs, ctx.outer = made, inputs, outer
        return tuple(one.detach() for one in made)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        return None, None, *differentiable_gradients(ctx.made, ctx.inputs, ctx.outer, grads, True)


def differentiable_gradients(
    results: Sequence[Any],
    inputs: Sequence[torch.Tensor],
    outer: Sequence[torch.Tensor],
    grads: Grads,
    keeps_graph: bool,
) -> Grads:
    """The gradients of `inputs`, where the graph of `results` ends. If gradients are on, their own graph goes on beyond
    that: from the tensors `outer`, which `inputs` stand for, and from `grads`."""
    if not torch.is_grad_enabled():
        return _run_engine(results, inputs, grads, keeps_graph)
    beyond = {id(one): one for one in grads if one is not None and one.requires_grad}
    behind = {number: one.detach().requires_grad_() for number, one in beyond.items()}
    found = _run_engine(results, inputs, [behind.get(id(one), one) for one in grads], keeps_graph)
    made = [one for one in found if one is not None and one.requires_grad]
    if not made:
        return found
    following = iter(_Differentiated.apply(made, [*inputs, *behind.values()], *outer, *beyond.values()))
    return [next(following) if one is not None and one.requires_grad else one for one in found]


def cannot_run_again(what: str) -> CaptureError:
    return CaptureError(
        "the backward of a captured module is new to it (second derivatives, gradients of other results, or another "
        f"autocast), and its forward, which {what}, cannot run again\n  at {user_site()}\n"
        "  do not capture a module whose gradients are differentiated, or whose results get gradients only at times; "
        "call backward() outside of autocast"
    )


# Runs the body again. Returns its differentiable results, and the tensors at which their graph ends: detached arguments
# and leaves.
Rebuild = Callable[[], tuple[list[torch.Tensor], list[torch.Tensor]]]


class Lesson:
    """What is needed to learn the backward of a call: its forward stretch and program. Keeps no tensors alive."""

    def __init__(
        self,
        known: Known,
        stretch: Stretch,
        data: Sequence[TensorData],
        operands: Sequence[int | None],
        results: Sequence[Token],
    ) -> None:
        self._known = known
        self._stretch = stretch
        self._data = [weakref.ref(one) for one in data]  # of the operands of the program
        self._operands = operands  # for each input of the node, its place among the operands of the program
        self._results = results  # tokens of the differentiable results

    def learn(
        self, context: DeviceContext, start: StretchStart, grads: Grads, found: Grads, freed: frozenset[int]
    ) -> BackwardProgram:
        """Learn the backward that was recorded since `start`. Raises `NotReplayable`.

        `freed`: the results whose graphs are gone. Those of others keep what they need.
        """
        forward, trace = self._stretch, start.trace
        is_cut = trace.epoch is not forward.epoch
        if is_cut:
            context.locker.wait_idle()  # a run under way holds what the forward made
        stretch = Stretch(context, start, may_be_empty=True)  # where gradients are passed on
        check = forward.check_nothing_kept_after if is_cut else forward.check_nothing_kept
        left = forward.needed_for(token for place, token in enumerate(self._results) if place not in freed)
        check(trace, [*self._known.tokens, *left])  # the loop may hold all results
        program = self._program(stretch, self._sources(trace), grads, found)
        stretch.check_nothing_kept(start.trace, program.made)
        pattern = pattern_of(grads), is_cut
        before: BackwardProgram | None = self._known.backwards.get(pattern)
        if before is not None and before.fits(program):
            program.confirm(before)
        self._known.backwards[pattern] = program
        given = {n for one in self._known.backwards.values() if one.is_confirmed for n in one.given}
        # results that share nothing may wait for backwards of their own, each of which is known then
        is_part = bool(self._known.parts)
        self._known.has_backward = bool(given) and not (is_part and given < self._known.ever_given())
        save(self._known, forward, program.saved, self._results)
        if program.folds and not is_cut:
            learn_jump(stretch, (program.name, self._known), program.made, implied=set(program.saved))
        else:
            learn_jump(stretch, program.name, program.made)
        return program

    def watch_leaves(self, program: BackwardProgram, inputs: Sequence[torch.Tensor], found: Grads) -> None:
        """See at the end of the backward which leaves got their .grad from this region alone."""
        given = [
            (place, leaf, gradient._data)
            for place, leaf, gradient in zip(self._operands, inputs, found, strict=True)
            if place is not None and isinstance(gradient, LazyTensor) and is_leaf(leaf)
        ]

        def see() -> None:
            grads = [(place, leaf.grad, data) for place, leaf, data in given]
            sole = [place for place, grad, data in grads if isinstance(grad, LazyTensor) and grad._data is data]
            uses = Counter(program.results.values())
            program.sole = frozenset(place for place in sole if uses[program.results[place]] == 1)

        call_at_the_end(see)  # as DistributedDataParallel does

    def _sources(self, trace: Trace) -> dict[Token | None, Source]:
        """Where the tensors come from that the forward used and made, by their tokens in the backward's trace."""
        forward = self._stretch
        sources: dict[Token | None, Source] = {token: FromForward(token) for token in forward.made}
        sources |= {token: FromOperand(n) for n, token in enumerate(forward.operands)}
        if trace.epoch is forward.epoch:
            return sources
        # the graph was cut since: they have entered the trace anew, or not at all
        looks = forward.looks([reference() for reference in self._data])
        entered = [(data, looks.get((data.storage, data.meta))) for data in trace.inputs]
        return {data.token: sources[token] for data, token in entered if token is not None}

    def _program(
        self, stretch: Stretch, sources: dict[Token | None, Source], grads: Grads, found: Grads
    ) -> BackwardProgram:
        given: dict[Token | None, int] = {}
        for place, grad in enumerate(grads):
            if grad is not None and grad._data.epoch is stretch.epoch:  # type: ignore[attr-defined]
                given.setdefault(grad._data.token, place)  # type: ignore[attr-defined]
        if not given.keys().isdisjoint(sources):
            raise NotReplayable("it is given one of the forward's own tensors as a gradient")
        sources |= {token: FromGradient(place) for token, place in given.items()}
        for token in stretch.operands:
            if token not in sources:
                raise NotReplayable(f"it uses a tensor at {stretch.site_of(token)} that the forward did not use")
            if token in stretch.mutates:
                raise NotReplayable(f"it writes to a tensor that it did not make at {stretch.site_of_write(token)}")
        if any(stretch.generators):
            raise NotReplayable("it draws random numbers from a torch.Generator")
        results: dict[int, int | Source] = {}
        made: dict[Token, int] = {}
        for operand, gradient in zip(self._operands, found, strict=True):
            if gradient is None:
                continue
            if operand is None:
                raise NotReplayable("a tensor gets a gradient that is neither an argument nor part of the module")
            if type(gradient) is not LazyTensor:
                raise NotReplayable(f"a gradient is a {type(gradient).__name__}")
            named: Any = gradient._data.token
            if gradient._data.epoch is not stretch.epoch or (named not in stretch.made and named not in sources):
                raise NotReplayable("a gradient was not computed by recorded calls")
            if named not in stretch.made and not isinstance(sources[named], FromGradient):
                raise NotReplayable("a gradient is a tensor of the forward")
            results[operand] = made.setdefault(named, len(made)) if named in stretch.made else sources[named]
        return BackwardProgram(
            calls=tuple(stretch.calls),
            tokens=stretch.operands,
            sources=tuple(sources[token] for token in stretch.operands),
            made=tuple(made),
            results=results,
            constants=stretch.constants,
            folds=all(stretch.root(token) in stretch.places for token in made),
            given=frozenset(place for place, grad in enumerate(grads) if grad is not None),
            shape=(stretch.shape(), tuple(map(list(stretch.made).index, made))),
            uses=frozenset(self._operand_of(sources[token]) for token in stretch.operands) - {-1},
        )

    def _operand_of(self, source: Source) -> int:
        """The forward operand that `source` is, or looks into; -1 for anything else."""
        if isinstance(source, FromOperand):
            return source.place
        root = self._stretch.root(source.token) if isinstance(source, FromForward) else None
        return self._stretch.operands.index(root) if root in self._stretch.operands else -1


# ----- a call that took a jump


class JumpedCall(RegionCall):
    """A call that took a jump: what its backward needs, and how to get the body's graph after all."""

    def __init__(
        self,
        context: DeviceContext,
        program: Program,
        saved: Saved,
        operands: list[LazyTensor],
        inputs: list[int],
        rebuild: Rebuild,
        refuse: Callable[[str], None],
        others: Sequence[torch.Tensor],
    ) -> None:
        """`others`: results without gradients whose memory the backward uses."""
        self._context = context
        self._program = program
        self._others = [(tensor, version_of(tensor)) for tensor in others if not tensor.is_inference()]
        self._saved: Saved | None = saved
        self._operands = operands
        # 60 ns each instead of 150: a getter need not ask whether a subclass overrides it
        with WithoutSubclasses():
            self._versions = list(map(version_of, operands))
        self._inputs = inputs
        self._rebuild = rebuild
        self._refuse = refuse
        self._writes = True  # gradients, see Note [Gradients written directly]
        self.parts = saved.known.parts
        # results that the backwards of some parts use, with their places and versions
        self.saved_results: list[tuple[int, torch.Tensor, int]] = []

    def backward(self, ctx: Any, grads: Grads, freed: frozenset[int]) -> Grads:
        if any(grad is not None and grad.__class__ is not LazyTensor for grad in grads):  # several at once, by vmap
            return self._differentiate(grads)
        if torch.is_anomaly_enabled():  # it looks at what nodes return
            self._writes = False
        if ctx.saved_results:
            _ = ctx.saved_tensors  # raises if the user has written to a result that the backward uses
        for place, result, version in self.saved_results:
            if place in self.freed_by(grads) - self.freed:
                _check_version(result, version)
        for tensor, version in self._others:
            _check_version(tensor, version)
        assert self._saved is not None
        program = self._find_program(self._saved, pattern_of(grads))
        if program is None:
            return self._differentiate(grads)
        for place in program.uses:
            _check_version(self._operands[place], self._versions[place])
        made = self._made(program, self._saved, grads)
        if len(freed) == len(grads):
            self._saved = None
        with WithoutSubclasses():  # 70 ns for each attribute of a tensor instead of 150
            return self._deliver(ctx, program, made, grads)

    def _made(self, program: BackwardProgram, saved: Saved, grads: Grads) -> list[LazyTensor]:
        """What the calls of the backward make: by a jump, or recorded again."""
        context, name, data = self._context, program.name, None
        if dispatch_depth():
            with context.lock:
                data = self._all(program, saved, grads)
            return _shown_again(program, data)
        with context.lock:
            folds = program.folds and saved.epoch is context.trace.epoch
            if folds:
                name = (program.name, saved.known)
                outer = [self._outer(source, grads) for source in program.outer]
                taken = take_jump(context, name, outer)
            else:
                data = self._all(program, saved, grads)
                taken = take_jump(context, name, data)
            if taken is not None:
                return list(map(wrap_with, taken[0].jump.wrappers, taken[1]))
            data = data or self._all(program, saved, grads)
        return self._record_again(program, data, name, folds)

    def _all(self, program: BackwardProgram, saved: Saved, grads: Grads) -> list[TensorData]:
        known = saved.data()
        return [
            known[source.token] if isinstance(source, FromForward) else self._outer(source, grads)
            for source in program.sources
        ]

    def _deliver(self, ctx: Any, program: BackwardProgram, made: Sequence[LazyTensor], grads: Grads) -> Grads:
        """Write the gradients that can be written directly; the others are for the engine."""
        found: list[torch.Tensor | None] = []
        writes, results, sole = self._writes, program.results, program.sole
        for place, (node, _) in zip(self._inputs, ctx.next_functions, strict=True):
            result = results.get(place)
            if result is None:
                found.append(None)
            elif isinstance(result, FromGradient):
                # the tensor itself, not another one for its data: the engine copies what somebody else holds too
                found.append(grads[result.place])
            elif (
                writes
                and place in sole
                and _takes(self._operands[place], made[result])  # type: ignore[index]
                and (writes := _accumulates(node))
            ):
                _add_to_grad(self._operands[place], made[result])  # type: ignore[index]
                found.append(None)
            else:
                found.append(made[result])  # type: ignore[index]
        return found

    def _find_program(self, saved: Saved, pattern: Pattern) -> BackwardProgram | None:
        if torch.is_grad_enabled():
            self._refuse(_DIFFERENTIATED_AGAIN)
            self._writes = False  # leaves get gradients of gradients too
            return None
        is_cut = saved.epoch is not self._context.trace.epoch
        for one in (is_cut, not is_cut):  # of the other, the calls are recorded anew
            found: BackwardProgram | None = saved.known.backwards.get((pattern, one))
            if found is not None and found.is_confirmed and saved.has(found.saved):
                return found
        return None

    def _outer(self, source: Any, grads: Grads) -> TensorData:
        """A tensor that the forward did not make."""
        if source.__class__ is FromOperand:
            return self._operands[source.place]._data
        grad = grads[source.place]
        assert isinstance(grad, LazyTensor)
        return grad._data

    def _differentiate(self, grads: Grads) -> Grads:
        """The gradients by the body's graph, which is made again."""
        for tensor, version in zip(self._operands, self._versions, strict=True):
            _check_version(tensor, version)
        assert self._saved is not None
        if any(self._saved.known.jump.generators):
            raise cannot_run_again("draws random numbers from a generator of its own")
        if not self._program.can_run_again:
            raise cannot_run_again("writes to its buffers")
        results, inputs = self._rebuild()
        for place in self._program.written:  # which puts the old values back
            self._versions[place] = version_of(self._operands[place])
        outer = [self._operands[place] for place in self._inputs]
        return differentiable_gradients(results, inputs, outer, grads, True)

    def _record_again(
        self, program: BackwardProgram, data: Sequence[TensorData], name: Any, folds: bool
    ) -> list[LazyTensor]:
        """Record the calls of `program` one by one, and learn the jump over them at this place."""
        metrics.increment("RegionRecorded")
        with self._context.lock:
            start = StretchStart(self._context)
        made = _calls_again(program, data, record)
        try:
            stretch = Stretch(self._context, start, may_be_empty=True)
        except NotReplayable:
            return made
        tokens = [one._data.token for one in made if one._data.token in stretch.made]
        # otherwise two operands are the same tensor here, or a result is one: not what the program was learned from
        if len(stretch.operands) == len(program.tokens) and len(tokens) == len(made):
            pairs = zip(stretch.operands, program.sources, strict=True)
            implied = {token for token, source in pairs if folds and isinstance(source, FromForward)}
            learn_jump(stretch, name, tokens, implied=implied)  # type: ignore[arg-type]
        return made


def _calls_again(program: BackwardProgram, data: Sequence[TensorData], do: Callable[..., Any]) -> list[LazyTensor]:
    """What the calls of `program` make of `data`. `do` takes an operator, its arguments and those by name."""
    tensors = dict(zip(program.tokens, map(wrap, data), strict=True))
    constants = iter(program.constants)
    with torch.no_grad():
        for call in program.calls:
            _call_again(call, tensors, constants, do)
    return [wrap(tensors[token]._data) for token in program.made]  # the body's results may be one tensor


def _shown_again(program: BackwardProgram, data: Sequence[TensorData]) -> list[LazyTensor]:
    """As `_calls_again`, through PyTorch's dispatcher: modes see the calls, and may do something else."""
    return _calls_again(program, data, lambda op, args, kwargs: op(*args, **kwargs))


def _check_version(tensor: torch.Tensor, expected: int) -> None:
    if version_of(tensor) != expected:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape)}], is at version {version_of(tensor)}; expected version "
            f"{expected} instead.\n  it was used by a captured module"
        )


def _accumulates(node: Any) -> bool:
    """Whether the engine executes `node`, which adds to a leaf's .grad."""
    try:
        return will_execute(node)
    except RuntimeError:  # within torch.autograd.grad, which returns the gradient
        return False


def _takes(leaf: LazyTensor, gradient: LazyTensor) -> bool:
    """Whether a leaf takes `gradient` as it is, and nothing is to be called when it does."""
    return (
        leaf.requires_grad
        and is_leaf(leaf)  # it was one when the backward was learned
        and backward_hooks_of(leaf) is None
        and accumulate_hooks_of(leaf) is None
        and gradient._data.meta is leaf._data.meta
        and leaf.grad_dtype is leaf.dtype  # type: ignore[attr-defined]
        and (leaf.grad is None or type(leaf.grad) is LazyTensor)  # the engine adds to sparse ones otherwise
    )


def _add_to_grad(leaf: LazyTensor, gradient: LazyTensor) -> None:
    grad = leaf.grad
    if grad is None:
        leaf.grad = gradient
    else:
        with torch.no_grad():
            grad += gradient


def _call_again(call: Call, tensors: dict[Token, LazyTensor], constants: Any, do: Callable[..., Any]) -> None:
    """Do `call` with `tensors` for its tokens; adds its results to them."""
    numbers = [next(constants) for _ in range(call.num_constants)]

    def given(arg: Any) -> Any:
        if isinstance(arg, Token):
            return tensors[arg]
        if isinstance(arg, Constant):
            return numbers[arg.index]
        if isinstance(arg, torch.device):
            return next(iter(tensors.values())).device
        return arg

    named = {name: with_leaves(given, arg) for name, arg in call.kwargs}
    results = do(call.op, with_leaves(given, call.args), named)
    given_back = results if isinstance(results, list | tuple) else [results]
    for result, tensor in zip(call.results, given_back, strict=False):
        if result is not None:
            tensors[result.token] = tensor
