"""Captured modules: `capture(module)`.

In: a module's calls within an ordinary loop. Out: what the module returns, recorded without running its Python.

Note [What a captured module does]
The first call runs as written; the second does too, within one autograd node (Note [One node for a region]). Each shows
where the tensors come from that the calls use, and where the trace was led. What two calls recorded alike, forward and
backward, is replayed from then on: `take_jump` moves the trace, and the results are tensors with one node. A call runs
as written again if anything was changed that its Python may look at (`StructureGuard`, the arguments' geometry and
values, modes), or if the trace is at a place where this module was not called before. What cannot be replayed keeps
running as written; `CaptureWarning` and `explain` say why.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from time import perf_counter
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lazy_backend import metrics
from lazy_backend.errors import CaptureError
from lazy_backend.errors.captures import no_longer_alike
from lazy_backend.errors.sites import user_site
from lazy_backend.errors.tracebacks import hide_internals
from lazy_backend.lowering.ir.program import Token
from lazy_backend.ports.autograd_engine import backward_hooks_of, keep_versions, next_node_number
from lazy_backend.ports.cpython import attributes_of, frame_at, is_a
from lazy_backend.ports.hooks import (
    BUFFERS,
    CALL_HOOKS,
    PARAMETERS,
    call_of,
    called_from,
    entry_of,
    modules_within,
    set_entry,
)
from lazy_backend.ports.table import REGIONS
from lazy_backend.ports.tensor_types import PLACE_IN_GRAPH, grad_fn_of, is_leaf, version_of
from lazy_backend.ports.thread_modes import is_any_autocast_enabled
from lazy_backend.precision.autocast import autocast_as
from lazy_backend.precision.autocast_state import autocast_state
from lazy_backend.regions.autograd import (
    Grads,
    JumpedCall,
    Lesson,
    WrittenCall,
    cannot_run_again,
    checkpoints_reentrantly,
    leads_to_older,
    leaves_of,
    parts_of,
    with_node,
)
from lazy_backend.regions.call_arguments import CallArguments, describe
from lazy_backend.regions.conditions import why_as_written
from lazy_backend.regions.jump import Known, Saved, key_of, learn_jump, make_jump, take_jump
from lazy_backend.regions.members import MemberPlace, members_of
from lazy_backend.regions.module_state import AlikeCalls, ModuleState
from lazy_backend.regions.named_by_code import NamedByCode
from lazy_backend.regions.programs import ArgumentLeaf, MadeLeaf, Program, learn_program
from lazy_backend.regions.results import (
    ResultStructure,
    flatten_result,
    kept_container,
    opaque_in,
    unflatten_result,
    why_not_made_anew,
)
from lazy_backend.regions.stretch import Stretch, StretchStart
from lazy_backend.replay.accounts import PATIENCE, RETRY, Account, NotReplayable
from lazy_backend.replay.recorded_call import RandomState
from lazy_backend.replay.unseen_reads import DIFFERENTIATES, LEAVES_TENSOR, CodeThatRan, watching_reads, why_written
from lazy_backend.tensors.state import DeviceContext, TensorData
from lazy_backend.tensors.tensor import LazyTensor, wrap, wrap_with
from lazy_backend.tensors.thread_state import ModesBefore

# Traces, one after another, with calls but without a backward: gradients may be accumulated over so many.
_MAX_WAITING = 16
# States of one module that are remembered: training and evaluation, some layers frozen.
_MAX_STATES = 8
_MARKS = (
    "it gives an argument a hook, an attribute or another place in autograd's graph, or keeps a result's gradient\n"
    "  do it outside of the captured module"
)
_NO_BACKWARD = "no backward without retain_graph has run through its results"


# Whether a hook on a module's calls does nothing besides what is recorded, so that a replay need not call it.
KnowsHook = Callable[[Any], bool]


def _knows_none(hook: Any) -> bool:
    return False


def capture_module(
    module: torch.nn.Module, verify: bool = True, is_asked: bool = True, knows_hook: KnowsHook = _knows_none
) -> torch.nn.Module:
    """Let `module` replay its calls. Returns it; its parameters, its `state_dict` and its class stay as they are."""
    if not REGIONS.fits():
        return module
    known = entry_of(module)
    if known is not None and not isinstance(known, _ModuleEntry):
        raise CaptureError(
            f"{type(module).__name__} was compiled with .compile(), and cannot be captured too\n  at {user_site()}\n"
            "  capture it instead: what it records is compiled as part of its step"
        )
    # where `Module.compile` puts its function: copies and pickles of the module leave it out
    set_entry(module, _ModuleEntry(CapturedModule(module, verify, is_asked, knows_hook)))
    return module


def uncapture_module(module: torch.nn.Module) -> None:
    """Let the calls of `module` run as written, if it is captured. A call under way ends as it began."""
    if isinstance(entry_of(module), _ModuleEntry):
        set_entry(module, None)


class _ModuleEntry:
    """What `Module.__call__` of a captured module calls in place of `_call_impl`. Opaque to structure guards."""

    __slots__ = ("_captured",)

    def __init__(self, captured: CapturedModule) -> None:
        self._captured = captured

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # nothing else says which module is called: a copy that was made by its `__dict__` has this entry, too
        module = called_from(frame_at(1))
        if module is not None and not self._captured.is_of(module):
            return call_of(module)(*args, **kwargs)
        return self._captured.call(args, kwargs)

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of the module is not captured; parametrized ones copy all their attributes."""

    def __reduce__(self) -> Any:
        return _nothing, ()


def _nothing() -> None:
    """What an entry is in a pickle."""


class CapturedModule:
    """Replays the calls of one module."""

    __slots__ = (
        "_name",
        "_verify",
        "_states",
        "_failures",
        "_changes",
        "_waiting",
        "_knows_hook",
        "_ran",
        "account",
        "_reference",
        "__weakref__",
    )

    def __init__(self, module: torch.nn.Module, verify: bool, is_asked: bool, knows_hook: KnowsHook) -> None:
        forget = weakref.WeakMethod(self._forget)
        # states refer to the module's attributes, and these to us: that cycle ends with the module
        self._reference = weakref.ref(module, lambda _: (method := forget()) and method())
        self._name = type(module).__name__
        self._verify = verify
        self._knows_hook = knows_hook
        self._states: list[ModuleState] = []  # the latest first
        self._ran = CodeThatRan()
        self._failures = 0  # calls, one after another, that changed the module itself
        self._changes = 0  # calls, one after another, before which it was changed, or what it reads
        self._waiting = 0  # traces with calls of any kind, and without a backward
        self.account = Account(self._name, "module", is_asked)

    def _forget(self) -> None:
        self._states.clear()

    def is_of(self, module: torch.nn.Module) -> bool:
        return self._reference() is module

    @hide_internals
    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self._reference()
        assert module is not None  # it is being called
        begin = perf_counter()
        account = self.account
        account.calls += 1
        reason = why_as_written(account.is_asked)
        arguments = describe(args, kwargs) if reason is None else reason
        if isinstance(arguments, str):
            account.ran_as_written(arguments)
            return _run_body(module, args, kwargs)
        if (self._failures >= PATIENCE or self._changes >= 2 * PATIENCE) and account.calls % RETRY > 1:
            return _run_body(module, args, kwargs)
        if not arguments.tensors:
            arguments.context = _context_of(module) or arguments.context
        state, signature = self._known(module, arguments)
        program = signature.program
        is_due = program is not None and signature.replayed and signature.calls >= signature.check_at
        if program is not None and not is_due:
            replayed = self._replay(module, state, signature, program, arguments)
            if replayed is not None:
                signature.replayed = True
                account.replays += 1
                account.seconds += perf_counter() - begin
                return replayed[0]
        if signature.is_hopeless():
            return _run_body(module, args, kwargs)
        if is_due:
            signature.check_at = 2 * signature.calls if self._verify else 2**62
        return self._write(module, state, signature, arguments, args, kwargs, is_due)

    def _known(self, module: torch.nn.Module, arguments: CallArguments) -> tuple[ModuleState, AlikeCalls]:
        """What is known of the module as it is now, and of its calls with this kind of arguments."""
        state, change = self._state(module)
        signature, other_change = state.signature((arguments.key, state.named_among(arguments.tensors)))
        if not (change or other_change):
            self._changes = 0
        else:
            self._changes += 1
            reason = f"it changed before the call: {change or other_change}"
            if self._changes == 2 * PATIENCE:
                reason = f"it changed before each of {self._changes} calls: {change or other_change}"
                self.account.warn(reason)
            self.account.ran_as_written(reason)
        return state, signature

    def _state(self, module: torch.nn.Module) -> tuple[ModuleState, str]:
        """What is known of the module as it is now; and what changed since the call before, if that is nothing."""
        states = self._states
        for holds in (ModuleState.is_untouched, ModuleState.is_equal):  # the second takes longer
            for place, state in enumerate(states):
                if holds(state, module):
                    if place:
                        states.insert(0, states.pop(place))
                    return state, ""
        made, change = ModuleState(module), states[0].why() if states else ""
        # a state keeps alive what it refers to, so it must not outlive what was replaced
        self._states = [made, *[state for state in states if state.refers_only_to(made)]][:_MAX_STATES]
        return made, change

    def _state_of(self, signature: AlikeCalls) -> ModuleState | None:
        """Not kept by what a graph holds: a state refers to the module's attributes, which may hold the graph."""
        return next((state for state in self._states if signature in state.signatures()), None)

    def _holds(self, state: ModuleState) -> bool:
        module = self._reference()
        return module is not None and state.holds(module)

    def _named(self, module: torch.nn.Module, state: ModuleState, signature: AlikeCalls) -> NamedByCode:
        """What the code of the module can name now."""
        named = state.named_by_code(module, self._ran)
        for one in self._states:
            one.keep(named, signature)
        return named

    # ----- a replayed call

    def _replay(
        self,
        module: torch.nn.Module,
        state: ModuleState,
        signature: AlikeCalls,
        program: Program,
        arguments: CallArguments,
    ) -> tuple[Any] | None:
        operands = program.operands(arguments.tensors)
        if operands is None:
            return None
        context = arguments.context
        with context.lock:
            taken = take_jump(context, program.name, [o._data for o in operands], program.is_differentiable)
        if taken is None:
            return None
        known, made, saved = taken
        if program.versioned:
            written = [operands[place] for place in program.versioned]
            torch.autograd.graph.increment_version([tensor for tensor in written if not tensor.is_inference()])
        wrappers = known.jump.wrappers
        results: list[torch.Tensor] = [wrap_with(wrappers[place], made[place]) for place in program.differentiable]
        others = {place: wrap(made[place]) for place in known.saved_others}
        if saved is not None:
            call = JumpedCall(
                context,
                program,
                saved,
                operands,
                program.inputs,
                lambda: self._rebuild(module, state, signature, program, saved, operands, arguments),
                self._refuse,
                [*others.values()],
            )
            used = known.saved_results
            if call.parts:  # the node would check all of them in each backward, and the engine frees them after one
                call.saved_results = [(n, own := results[n].detach(), version_of(own)) for n in used]
                used = []
            results = list(with_node(call, results, [operands[n] for n in program.inputs], used))
        return (self._result(program, arguments.tensors, made, results, others),)

    def _result(
        self,
        program: Program,
        arguments: Sequence[torch.Tensor],
        made: Sequence[TensorData],
        differentiable: Sequence[torch.Tensor],
        others: Mapping[int, torch.Tensor],
    ) -> Any:
        """`others`: tensors made already, by place."""
        following = iter(differentiable)
        leaves: list[Any] = []
        for leaf in program.leaves:
            if isinstance(leaf, MadeLeaf):
                own = next(following) if leaf.requires_grad else others.get(leaf.place)
                leaves.append(wrap(made[leaf.place]) if own is None else own)
            elif isinstance(leaf, ArgumentLeaf):
                leaves.append(arguments[leaf.place])
            else:
                leaves.append(leaf.value)
        return unflatten_result(leaves, program.structure)

    def _rebuild(
        self,
        module: torch.nn.Module,
        state: ModuleState,
        signature: AlikeCalls,
        program: Program,
        saved: Saved,
        operands: Sequence[LazyTensor],
        arguments: CallArguments,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The differentiable results and the inputs of a call, with the graph of the body, which runs again.

        It draws the random numbers that the call drew, and leaves the buffers that it writes as they are.
        """
        change = state.why() if not state.holds(module) else signature.change()
        if change:
            raise cannot_run_again(f"was changed since ({change})")
        written = [operands[place] for place in program.written]
        with torch.no_grad():
            before = [tensor.clone() for tensor in written]
        now = torch.default_generator.get_state()
        try:
            if saved.random is not None:
                torch.default_generator.set_state(saved.random)
            leaves, inner = _run_again(module, arguments)
        finally:
            torch.default_generator.set_state(now)
        if written:
            # the graph that was just made refers to the buffers at this version
            with torch.no_grad(), keep_versions(tuple(written)):
                for tensor, value in zip(written, before, strict=True):
                    tensor.copy_(value)
        results = [
            leaf
            for leaf, known in zip(leaves, program.leaves, strict=True)
            if isinstance(known, MadeLeaf) and known.requires_grad
        ]
        inputs = [operands[place] for place in program.inputs]
        return results, [inner.get(id(one), one) for one in inputs]

    # ----- a call as written

    def _write(
        self,
        module: torch.nn.Module,
        state: ModuleState,
        signature: AlikeCalls,
        arguments: CallArguments,
        args: Any,
        kwargs: Any,
        is_check: bool,
    ) -> Any:
        """Run the body, and learn from it."""
        metrics.increment("RegionRecorded")
        context, before = arguments.context, signature.program
        members = members_of(module)
        has_node = before is not None and before.is_differentiable and _are_leaves_without_hooks(members)
        given = arguments.detached() if has_node else arguments
        data = [tensor._data for tensor in arguments.tensors]
        grads = _grads_of(members)
        followed = [(tensor, version_of(tensor) if tensor.requires_grad else -1) for tensor in arguments.tensors]
        marks = given.marks()
        named = self._named(module, state, signature)
        with context.lock:
            start = StretchStart(context, RandomState(named.generators, named.states))
        number, modes = next_node_number(), ModesBefore()
        with named.watching():
            result, read, ran = watching_reads(lambda: _run_body(module, given.args, given.kwargs))
        held = [result]
        del result
        signature.named, unfit_read = state.named_after(module, named, ran, read, arguments.tensors)
        leaves, structure = flatten_result(held[0])
        kept = None if structure is None else kept_container(held)
        original = held.pop() if kept is not None else None
        del held
        is_changed, is_marked = given.has_changed(), given.marks() != marks
        ends = leaves_of(_differentiable(leaves)) if has_node else None
        if has_node:
            self._check_arguments(followed, is_changed, is_marked)
            self._check_result(leaves, kept, unfit_read)
        unfit = why_not_made_anew(leaves, structure, kept) or unfit_read or modes.change()
        unfit = unfit or self._why_unfit(named, arguments, leaves, is_changed, is_marked)
        lesson: tuple[Known, Stretch, Program] | None = None
        try:
            if unfit:
                raise NotReplayable(unfit)
            self._check_module(module, state, named)
            if not all(map(operator.is_, grads, _grads_of(members))):
                raise NotReplayable("it sets the gradients of its parameters")
            stretch = Stretch(context, start)
            if any(epoch is stretch.epoch and token in stretch.made for epoch, token in signature.named.left):
                raise NotReplayable(LEAVES_TENSOR)
            program, tokens = learn_program(stretch, given.tensors, data, members_of(module), leaves, structure, ends)
            if not program.is_differentiable:
                stretch.check_nothing_kept(start.trace, tokens)
            elif not has_node and checkpoints_reentrantly(_differentiable(leaves)):
                raise NotReplayable(
                    "it uses reentrant checkpointing\n  give torch.utils.checkpoint use_reentrant=False"
                )
            lesson = self._learn(state, signature, start, stretch, program, tokens, is_check)
        except NotReplayable as reason:
            self._give_up(signature, str(reason))
        if ends is None:
            return unflatten_result(leaves, structure) if kept is None else original
        return self._with_node(signature, arguments, given, leaves, structure, ends, lesson, number)

    def _learn(
        self,
        state: ModuleState,
        signature: AlikeCalls,
        start: StretchStart,
        stretch: Stretch,
        program: Program,
        tokens: Sequence[Token],
        is_check: bool,
    ) -> tuple[Known, Stretch, Program]:
        """Learn the jump over what a call recorded. Raises `CaptureError` if a replay would have done otherwise."""
        before, difference = signature.program, None
        if before is not None and before.fits(program):
            before.reach(program.reached or before.reached)
            program = before
            difference = self._difference(start, stretch, program)
        elif is_check:
            difference = "calls that use or return other tensors"
        if difference is not None and is_check:
            state.forget()
            raise no_longer_alike(self._name, f"it recorded {difference}")
        known = learn_jump(stretch, program.name, tokens)
        if known.is_confirmed:
            signature.misses = 0
        elif before is not None:
            signature.miss(self.account)
        signature.program, signature.is_alike, self._failures = program, difference is None, 0
        if difference is not None:  # it may be alike from now on
            signature.fail(self.account, f"it recorded {difference}")
        elif not program.is_differentiable:  # otherwise its backward may fail
            signature.failures = 0
        elif before is not None and known.is_confirmed and not known.has_backward:
            self._wait_for_backward(signature, stretch.epoch)
        return known, stretch, program

    def _why_unfit(
        self,
        named: NamedByCode,
        arguments: CallArguments,
        leaves: Sequence[Any],
        is_changed: bool,
        is_marked: bool,
    ) -> str:
        """Why what a body did to its arguments and results keeps the call from being replayed; "" if nothing does."""
        if is_changed:
            return "it writes to a list or dict among its arguments"
        if is_marked or any(is_a(leaf, torch.Tensor) and leaf.retains_grad for leaf in leaves):
            return _MARKS
        # from the next call on, the body gets other tensors in place of those that require gradients
        if arguments.tensors and (asked := self._ran.names & PLACE_IN_GRAPH):
            return f"its code asks for {min(asked)}, which a replay would not do again"
        wanting = {id(one): one for one in arguments.tensors if one.requires_grad}
        if not wanting.keys().isdisjoint(number for _, number in named.those_of(arguments.tensors)):
            return "it got a tensor that its code can name, too, and may compare with that"
        if len(wanting) > 1 and DIFFERENTIATES in self._ran.about and not all(is_leaf(one) for one in wanting.values()):
            return "it may differentiate one argument by another, whose graphs are separate while it is learned"
        return ""

    def _check_arguments(self, followed: Sequence[tuple[LazyTensor, int]], is_changed: bool, is_marked: bool) -> None:
        """Raise `CaptureError` if a call changed the arguments that its body was given in place of the user's."""
        what = "a list or dict among its arguments" if is_changed else ""
        if is_marked:
            what = "a hook or an attribute of an argument"
        if any(tensor.requires_grad and version_of(tensor) != version for tensor, version in followed):
            what = "an argument that autograd follows"
        if what:
            raise CaptureError(
                f"the captured {self._name} wrote to {what}, which it did not do before\n  at {user_site()}\n"
                "  do not capture a module that does this only in some calls"
            )

    def _check_result(self, leaves: Sequence[Any], kept: str | None, unfit: str) -> None:
        """Raise `CaptureError` if tensors may be where no node can be put between them and the body's graph.

        `unfit`: see `NamedByCode.after_body`.
        """
        holder = opaque_in(leaves)
        if kept is not None:
            raise CaptureError(
                f"the captured {self._name} returned a {kept} that something else holds, and did not do so before\n"
                f"  at {user_site()}\n  return a copy, or do not capture this module"
            )
        if holder is not None:
            raise CaptureError(
                f"the captured {self._name} returned a {holder}, which may hold tensors, and did not do so before\n"
                f"  at {user_site()}\n  return its tensors, or do not capture this module"
            )
        if unfit == LEAVES_TENSOR:
            raise CaptureError(
                f"the captured {self._name} left a tensor outside of itself, where code can come to it, and did not do "
                f"so before\n  at {user_site()}\n  return it instead, or do not capture this module"
            )

    def _check_module(self, module: torch.nn.Module, state: ModuleState, named: NamedByCode) -> None:
        change = state.why() if not state.holds(module) else named.change_of_others()
        if change:
            self._failures += 1
            if self._failures >= PATIENCE:
                self.account.warn(f"a call changes what it is made of: {change}")
            raise NotReplayable(f"a call changes what it is made of: {change}")
        for path, inner in modules_within(module):
            registries = [dict.get(attributes_of(inner), name) or {} for name in CALL_HOOKS]
            if not all(map(self._knows_hook, chain.from_iterable(map(dict.values, registries)))):
                raise NotReplayable(f"{path or self._name} has hooks, which a replay would not call")
        if other := named.hooked(self._knows_hook):
            raise NotReplayable(f"another module that it names, {other}, has hooks, which a replay would not call")
        hooked = _hooked(members_of(module))
        if hooked is not None:
            raise NotReplayable(f"{hooked} has hooks")

    def _difference(self, start: StretchStart, stretch: Stretch, program: Program) -> str | None:
        """What differs from what was recorded here before, for the same operands; None if nothing does."""
        known: Known | None = (start.cursor.jumps or {}).get(key_of(stretch, program.name))
        if known is None or known.jump.agrees_with(make_jump(stretch, ())):
            return None
        return stretch.first_difference(known.jump.end, known.jump.constants)

    def _with_node(
        self,
        signature: AlikeCalls,
        arguments: CallArguments,
        given: CallArguments,
        leaves: list[Any],
        structure: ResultStructure | None,
        ends_of_leaves: Mapping[int, tuple[torch.Tensor, GradientEdge]],
        lesson: tuple[Known, Stretch, Program] | None,
        number: int,
    ) -> Any:
        """What the body returned, with one node between it and the body's graph, whose nodes begin with `number`."""
        outer: dict[int, torch.Tensor] = {}
        outer.update((id(inner), own) for inner, own in zip(given.tensors, arguments.tensors, strict=True))
        inner = _differentiable(leaves)
        # each once: a tensor that is given twice has one gradient
        detached = list({id(one): one for one in given.tensors if id(one) in ends_of_leaves}.values())
        others = [leaf for leaf, _ in ends_of_leaves.values() if id(leaf) not in outer]
        inputs = [outer[id(one)] for one in detached] + others

        def finish(reason: str | None) -> None:
            signature.waiting = self._waiting = 0
            if reason is not None:
                self._give_up(signature, reason)
            elif signature.is_alike:
                signature.failures = 0

        ends, see = list(map(get_gradient_edge, inner)), partial(self._see_backward, signature)
        edges = {number: edge for number, (_, edge) in ends_of_leaves.items()}
        reaches_back = leads_to_older(inner, number)
        call = WrittenCall(
            arguments.context, ends, [*detached, *others], edges, inputs, reaches_back, self._refuse, see, finish
        )
        call.parts = parts_of(inner, number)
        if signature.named is not None:
            call.generators, call.states = signature.named.generators, signature.named.states
        if lesson is not None:
            known, stretch, program = lesson
            known.parts = tuple(call.parts)
            operands = program.operands(arguments.tensors) or []
            places = {id(operand): place for place, operand in enumerate(operands)}
            tokens = [one._data.token for one in inner]  # type: ignore[attr-defined]
            data = [operand._data for operand in operands]
            call.lesson = Lesson(known, stretch, data, [places.get(id(one)) for one in inputs], tokens)
        made = with_node(call, [one.detach() for one in inner], inputs, []) if inner else ()
        outer |= {id(one): result for one, result in zip(inner, made, strict=True)}
        leaves = [outer.get(id(leaf), leaf) for leaf in leaves]
        return unflatten_result(leaves, structure)

    def _see_backward(self, signature: AlikeCalls, run: Callable[[], Grads]) -> tuple[Grads, str]:
        """The gradients that `run` computes, and why what it ran, read and wrote keeps it from being replayed."""
        named, state = signature.named, self._state_of(signature)
        if named is None or state is None:
            return run(), "the module was changed after the forward, or is gone"
        before, grads, holds = named.changed(), named.grads(), self._holds(state)
        with named.watching():
            found, read, ran = watching_reads(run)
        ran.about.discard(DIFFERENTIATES)  # that is how it is run
        after, reads_more = named.changed(), named.add(ran)
        if ran.leaves_tensor() or (after.stores_tensor and not before.stores_tensor):
            read = read or LEAVES_TENSOR
        if holds and not self._holds(state):
            read = read or f"it changes what the module is made of: {state.why()}"
        if after.read != before.read or not after.parts <= before.parts:
            read = read or why_written(after.read or "a value")
        if named.grads() != grads:
            read = read or "it sets the gradients of parameters"
        return found, read or ("it ran code that no call before it did" if reads_more else "")

    # ----- what cannot be replayed

    def _refuse(self, reason: str) -> None:
        """Record the calls as written from now on."""
        for state in self._states:
            for signature in state.signatures():
                signature.program, signature.failures = None, PATIENCE
        self.account.ran_as_written(reason)
        self.account.warn(reason)

    def _give_up(self, signature: AlikeCalls, reason: str) -> None:
        signature.program = None
        signature.fail(self.account, reason)

    def _wait_for_backward(self, signature: AlikeCalls, epoch: object) -> None:
        if signature.waits_in is not epoch:  # a backward through many calls in one trace may be about to come
            signature.waits_in = epoch
            signature.waiting += 1
            self._waiting += 1
        if signature.waiting >= PATIENCE:
            self.account.ran_as_written(_NO_BACKWARD)
        if signature.waiting > _MAX_WAITING:
            signature.failures = PATIENCE  # calls whose backward is never asked for need not be learned
        if self._waiting > _MAX_WAITING:
            self.account.tell(
                f"runs as written, because {_NO_BACKWARD} in {self._waiting} steps\n"
                "  call it under torch.no_grad() if its results need no gradients"
            )


def _run_body(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    """Call the module as written. Its casts of weights are its own: it records the same wherever it is called."""
    if not is_any_autocast_enabled():
        return call_of(module)(*args, **kwargs)
    with autocast_state.own_casts():
        return call_of(module)(*args, **kwargs)


def _run_again(module: torch.nn.Module, arguments: CallArguments) -> tuple[list[Any], dict[int, Any]]:
    """The leaves of what the body returns, and the arguments that it was given, detached, by the id of the caller's."""
    given = arguments.detached(copies=True)
    with torch.enable_grad(), autocast_as(arguments.autocast):
        leaves, _ = flatten_result(call_of(module)(*given.args, **given.kwargs))
    return leaves, {id(own): one for own, one in zip(arguments.tensors, given.tensors, strict=True)}


def _grads_of(members: Sequence[tuple[MemberPlace, LazyTensor]]) -> list[torch.Tensor | None]:
    return [tensor.grad if is_leaf(tensor) else None for _, tensor in members]


def _context_of(module: torch.nn.Module) -> DeviceContext | None:
    """The lazy device of a module, going by its first parameter or buffer."""
    attributes = [attributes_of(one) for _, one in modules_within(module)]
    registries: list[Any] = [dict.get(each, name) or {} for name in (PARAMETERS, BUFFERS) for each in attributes]
    tensors = chain.from_iterable(map(dict.values, registries))
    first = next((tensor for tensor in tensors if tensor is not None), None)
    return first._data.context if type(first) is LazyTensor else None


def _are_leaves_without_hooks(members: Sequence[tuple[MemberPlace, LazyTensor]]) -> bool:
    """Whether a node may stand for the body's graph: one that leads through a member is not the body's alone."""
    return not _hooked(members) and all(is_leaf(tensor) for _, tensor in members)


def _hooked(members: Sequence[tuple[MemberPlace, LazyTensor]]) -> str | None:
    """The name of a member that has hooks on its gradient: the engine would call them for the body's graph too."""
    return next((member.name for member, tensor in members if backward_hooks_of(tensor)), None)


def _differentiable(leaves: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors among the results of a body that its graph leads to, each once."""
    found = {id(leaf): leaf for leaf in leaves if is_a(leaf, LazyTensor) and grad_fn_of(leaf) is not None}
    return list(found.values())
