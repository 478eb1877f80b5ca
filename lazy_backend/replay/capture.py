"""Replay a function of lazy tensors without running its Python.

In: a function, such as a training step. Out: a function that runs as written at first, and from then on binds its
arguments to the program that was recorded.

Note [What a captured call does]
A recorded call is a step of its own: what was pending is synced first, the body runs, and its trace is synced. Two
consecutive recorded calls that record the same path are compared input by input. Each input must be an argument, the
same data as before, an output that the previous call left, or an upload that is equal or that a formula gives. Each
float that differs must follow by a formula from floats of the arguments, hyperparameters and step counts (Note
[Floats by formula]). Whatever the first call left, the second must have left in the same way. Then a
`CapturedProgram` is bound, and calls are replayed until a guard fails. After that, one recorded call is enough to
bind a program again, if that call matches what the replays left. Nothing is assumed about a body that cannot be
captured: it runs as written, with a warning that says why.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from lazy_backend import metrics
from lazy_backend.diagnostics.history import history
from lazy_backend.diagnostics.limits import GraphLimit
from lazy_backend.errors import CaptureError
from lazy_backend.errors.captures import no_longer_alike
from lazy_backend.errors.sites import user_site
from lazy_backend.errors.tracebacks import hide_internals
from lazy_backend.execution.run import Async, RunPlace
from lazy_backend.execution.sync import executor
from lazy_backend.floats.float_recorder import FloatRecorder, call_traced
from lazy_backend.floats.formula_program import Stale
from lazy_backend.ports import trees
from lazy_backend.ports.cpython import is_a, name_of
from lazy_backend.ports.table import REPLAYS
from lazy_backend.ports.tensor_types import PLACE_IN_GRAPH, base_of, device_of, is_leaf
from lazy_backend.ports.thread_modes import active_transform
from lazy_backend.precision.grad_scaler import UnsettledStep, unsettled_steps
from lazy_backend.replay.accounts import PATIENCE, RETRY, Account, Attempts, NotReplayable
from lazy_backend.replay.binding import bind, check_same_program, follow_floats
from lazy_backend.replay.captured_state import GradsAtStart, Watch, watches, young_objects_stay_young
from lazy_backend.replay.methods import bound_to
from lazy_backend.replay.plain_values import value_key
from lazy_backend.replay.reachable import Reachable
from lazy_backend.replay.recorded_call import (
    Given,
    ReadsUnseen,
    RecordedCall,
    Start,
    check_side_effects,
    find_holders,
    flatten_result,
    note_changes,
    record_call,
    start_of_call,
    unflatten_result,
)
from lazy_backend.replay.replayed_call import Arguments, CapturedProgram, PreparedReplay
from lazy_backend.replay.state_guard import Found, LeftAlone
from lazy_backend.replay.state_places import argument_places
from lazy_backend.replay.structure import StructureGuard, hooks_of, same_containers
from lazy_backend.replay.unseen_reads import LEAVES_TENSOR, CodeThatRan, Ran, watching_reads, why_unseen, why_written
from lazy_backend.replay.value_guard import ValueGuard
from lazy_backend.settings import config
from lazy_backend.tensors.bodies import (
    MAX_TIMES_LET_THROUGH,
    Body,
    are_others_on_their_way,
    let_others_through,
    running,
)
from lazy_backend.tensors.contexts import context_of, contexts
from lazy_backend.tensors.state import DeviceContext, LazyStorage, TensorData
from lazy_backend.tensors.tensor import LazyTensor, is_parameter, own_attributes
from lazy_backend.tensors.thread_state import describe_modes

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

# Argument signatures that one captured function remembers.
_MAX_SIGNATURES = 64
# Calls, one after another, each with another value of the same argument, before there is a warning.
_MAX_VALUES = 8
# Recordings that are compared to learn which floats a program's constants follow.
_MAX_RECORDS = 4

_FLOAT, _NEGATIVE_ZERO = object(), object()
# Their values are keys by themselves, unlike those of floats and complex numbers.
_PLAIN = frozenset(map(id, (int, bool, str, bytes, type(None), torch.dtype, torch.device)))
_NO_OBJECTS: tuple[Any, ...] = ()


# ----- arguments


def _flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Sequence[Any], Any]:
    if not kwargs and not any(is_a(arg, list | tuple | dict) for arg in args):
        return args, len(args)  # 0.5 µs instead of 10
    leaves, spec = trees.tree_flatten((args, kwargs))
    return leaves, (spec, same_containers(args, kwargs))


def _describe(leaves: Sequence[Any], spec: Any) -> tuple[tuple[Any, ...], Arguments, tuple[Any, ...]]:
    """The key of what a program depends on among the arguments, and the values that it takes from them.

    Last the arguments that the key names by id, as nothing else tells them apart, and functions and classes.
    """
    key: list[Any] = [spec, describe_modes()]
    objects = _NO_OBJECTS
    tensors: list[LazyTensor] = []
    floats: list[float] = []
    named: list[Any] = []
    for leaf in leaves:
        kind = type(leaf)
        if kind is LazyTensor:
            data = leaf._data
            storage = data.storage
            key.append((data.context, data.meta, storage.meta, leaf.requires_grad, _place_of(leaf)))
            tensors.append(leaf)
            if given := own_attributes(leaf):
                value = value_key(given, named)
                key.append(value if value is not None else tuple(map(id, given.values())))
                objects += tuple(given.values()) if value is None else ()
            if leaf.requires_grad:
                hooks = hooks_of(leaf)
                key.extend(map(id, hooks))
                objects += hooks
        elif kind is float:
            key.append(_FLOAT if leaf or str(leaf) == "0.0" else _NEGATIVE_ZERO)
            floats.append(leaf)
        elif id(kind) in _PLAIN:
            key.append((kind, leaf))
        elif is_a(leaf, torch.Tensor):
            raise CaptureError(
                f"a captured function got a tensor on {device_of(leaf)}, which a replay would not upload\n"
                f"  at {user_site()}\n  move it before the call, as in tensor.to('lazy')"
            )
        elif (value := value_key(leaf, named)) is not None:
            key.append(value)
        else:
            key.append((id(kind), id(leaf)))
            objects += (leaf,)
    if len(tensors) > 1:
        first: dict[LazyStorage, int] = {}
        key.extend(first.setdefault(tensor._data.storage, place) for place, tensor in enumerate(tensors))
        if len(first) < len(tensors):  # for autograd, one tensor twice differs from two for the same memory
            known: dict[int, int] = {}
            key.extend(known.setdefault(id(tensor), place) for place, tensor in enumerate(tensors))
    objects += tuple(named)
    return tuple(key), Arguments(tuple(tensors), tuple(floats)), objects


def _place_of(tensor: LazyTensor) -> tuple[bool, ...]:
    """What code may ask of a tensor besides its values, and what decides whether autograd takes it.

    Whether it is a leaf, a view, a parameter or an inference tensor, or has a .grad.
    """
    of_autograd = is_leaf(tensor)
    return (
        of_autograd,
        of_autograd and tensor.grad is None,
        base_of(tensor) is None,
        is_parameter(tensor),
        tensor.is_inference(),
    )


def _context_of(tensors: Sequence[LazyTensor]) -> DeviceContext | None:
    """The device that the arguments are on; None if there is no tensor among them."""
    found = {tensor._data.context for tensor in tensors}
    if not found:
        return None
    if len(found) > 1:
        raise CaptureError(
            f"a captured function got tensors of several lazy devices\n  at {user_site()}\n  capture one per device"
        )
    return found.pop()


# ----- calls


@dataclass(slots=True, eq=False)
class _Signature(Attempts):
    """What is known about the calls with one argument signature."""

    objects: Sequence[Callable[[], Any]]  # that the key names by id: weak references where there can be
    context: DeviceContext  # what the body computes on
    records: list[RecordedCall] = field(default_factory=list)  # the latest recorded calls, all of one program
    program: CapturedProgram | None = None
    grads: GradsAtStart = field(default_factory=GradsAtStart)  # as those calls found them
    left_alone: LeftAlone = field(default_factory=LeftAlone)
    stale: int = 0  # consecutive calls that could not be replayed, because something had changed
    reason: str = ""  # the latest change

    def is_for(self, objects: Sequence[Any]) -> bool:
        """Whether the ids in the key still stand for these objects."""
        return all(reference() is one for reference, one in zip(self.objects, objects, strict=True))

    def is_dead(self) -> bool:
        return any(reference() is None for reference in self.objects)

    def named(self) -> list[Any]:
        """The objects that are alive."""
        return [one for reference in self.objects if (one := reference()) is not None]


def _only_other_value(before: tuple[Any, ...], key: tuple[Any, ...]) -> int:
    """The place of the int or string that alone differs between two keys; -1 if something else differs."""
    if len(before) != len(key):
        return -1
    places = [place for place, (old, new) in enumerate(zip(before, key, strict=True)) if old != new]
    if len(places) != 1:
        return -1
    old, new = before[places[0]], key[places[0]]
    are_values = all(type(one) is tuple and len(one) == 2 and one[0] in (int, str) for one in (old, new))
    return places[0] if are_values and old[0] is new[0] else -1


def _name_of_argument(function: Callable[..., Any], args: Any, kwargs: Any, value: Any) -> str:
    """Which arguments have this value, for the user; empty if none has it by itself."""
    try:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        given = kwargs
    names = [repr(name) for name, one in given.items() if type(one) is type(value) and one == value]
    return f", as {' or '.join(names)}" if names else ""


def _reference_to(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def _is_fresh(program: CapturedProgram | None, arguments: Arguments) -> bool:
    if program is None:
        return False
    try:
        program.check(arguments)
    except Stale:
        return False
    return True


class Captured(Generic[P, R]):
    """What `capture` returns: call it like the function."""

    def __init__(self, function: Callable[P, R], verify_every: int | None, max_different_graphs: int | None) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._max_different_graphs = max_different_graphs
        self._limit = GraphLimit("max_different_graphs")
        self._verify_every = verify_every
        self._replays = REPLAYS.fits()
        self._name = getattr(function, "__qualname__", None) or f"a {name_of(type(function))}"
        self._signatures: dict[tuple[Any, ...], _Signature] = {}
        self._account = Account(self._name, "function")
        self._counts: frozenset[str] = frozenset()  # names of entries of optimizers' groups that the body changes
        self._ran = CodeThatRan()
        self._unbound = 0  # signatures since a program was bound
        self._latest_key: tuple[Any, ...] = ()  # of the latest new signature
        self._values = 0  # signatures, one after another, that differ by the value of one argument
        self._value_place = -1  # of this argument in their keys
        # the optimizers whose steps in a body a GradScaler may skip
        self._scaled: list[weakref.ref[torch.optim.Optimizer]] = []

    def written(self) -> Callable[P, R]:
        """The function that was captured."""
        return self._function

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else bound_to(self, instance)

    def bind(self, instance: Any) -> Captured[..., R]:
        """The captured method of `instance`, with signatures of its own."""
        method = types.MethodType(self._function, instance)
        return Captured(method, self._verify_every, self._max_different_graphs)

    @hide_internals
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        # within another captured function: part of its program; under a transform of torch.func: of what that makes
        if executor.rules.is_refusing() or active_transform() is not None:
            return self._function(*args, **kwargs)
        if config.eager or not self._replays:
            return unflatten_result(*flatten_result(self._function(*args, **kwargs)))  # type: ignore[no-any-return]
        executor.rules.check_allowed("a captured call")
        executor.aside.record_always()
        leaves, spec = _flatten(args, kwargs)
        key, arguments, objects = _describe(leaves, spec)
        context = _context_of(arguments.tensors) or self._home(key, objects)
        counted, attempts = False, 0
        while True:  # again if something was recorded or run in between
            context.wait_for_body()
            if context.has_pending():
                executor.sync_tensors_graph_internal(context, "a captured call")
            with context.lock:
                if context.has_pending():
                    continue
                signature = self._signature(key, objects, context)
                if not counted:
                    signature.calls += 1
                    self._account.calls += 1
                    counted = True
                    if signature.calls == 1:
                        self._note_value(key, args, kwargs)
                attempts += 1
                replayed = self._replay_or_record(context, signature, arguments, args, kwargs, attempts)
            if isinstance(replayed, tuple):
                break
            # not while the lock is held: see Note [Interruption] and Note [Threads and bodies]
            executor.barrier(context)
            if replayed is not None:
                with context.lock:
                    replayed = replayed.commit()
                if replayed is not None:
                    break
            if are_others_on_their_way():
                let_others_through()
        result, run = replayed
        self._account.replays += run is not None
        if run is not None and run.place is RunPlace.WITHIN_CALL:
            run.do()
        return result  # type: ignore[no-any-return]

    def _replay_or_record(
        self,
        context: DeviceContext,
        signature: _Signature,
        arguments: Arguments,
        args: Any,
        kwargs: Any,
        attempts: int,
    ) -> tuple[Any, Async | None] | PreparedReplay | None:
        """What a call returns, and the run that the caller must do; or a replay to commit once no run is under way.

        None, with nothing done, if a run is under way or other threads are about to take the lock.
        """
        program = signature.program
        is_due = self._is_due(signature)
        is_idle = context.locker.is_idle()
        if not is_idle and (program is None or is_due or self._scaled or not program.may_prepare_early()):
            return None  # a body runs with the lock held, and would wait for the run under way
        self._settle_steps()
        if program is not None and not is_due:
            # a replay delivers only once it is prepared: a delivery drops the old value, and a finalizer may run then
            try:
                prepared = program.prepare(arguments)
            except Stale as reason:
                signature.stale += attempts == 1
                signature.reason = str(reason)
                self._account.ran_as_written(signature.reason)
            else:
                signature.stale = 0
                return prepared.commit() if is_idle else prepared
        if not context.locker.is_idle():
            return None  # a body runs with the lock held, and would wait for the run under way
        fails = program is None and signature.failures >= PATIENCE
        is_hopeless = not is_due and (fails or signature.stale > 2 * PATIENCE)
        del program  # it holds the flags of steps that may be skipped, which the body replaces
        with watches.shown_to(None):
            body = Body(self._name, context.name)
            try:
                try:
                    context.body = body
                    if attempts <= MAX_TIMES_LET_THROUGH and are_others_on_their_way():
                        return None
                    if is_hopeless and signature.calls % RETRY > 1:
                        return self._run_as_written(context, body, args, kwargs), None
                    return self._record(context, body, signature, arguments, args, kwargs, is_due), None
                finally:
                    context.body, body.ended = None, True
            finally:  # once more, see Note [Interruption]
                context.body, body.ended = None, True

    def _settle_steps(self) -> None:
        """Settle the steps that the call before left, see Note [Skipped steps of a captured function]."""
        for reference in self._scaled:
            optimizer = reference()
            for step in unsettled_steps(optimizer) if optimizer is not None else ():
                step.forget()

    def _is_due(self, signature: _Signature) -> bool:
        """Whether this call is to be compared with what was captured."""
        if self._verify_every is not None:
            return self._verify_every > 0 and signature.calls % self._verify_every == 0
        return signature.program is not None and signature.calls >= signature.check_at

    def _home(self, key: tuple[Any, ...], objects: Sequence[Any]) -> DeviceContext:
        """The device of a call without tensor arguments: that of the call before, or of a module that it reaches."""
        signature = self._signatures.get(key)
        if signature is not None and signature.is_for(objects):
            return signature.context
        reach = Reachable([self._function, *objects])
        parameters = StructureGuard(reach.modules).tensors
        lazy = [tensor for tensor in (*parameters, *reach.tensors.values()) if type(tensor) is LazyTensor]
        return lazy[0]._data.context if lazy else contexts.get_device_context(None)

    def _signature(self, key: tuple[Any, ...], objects: Sequence[Any], context: DeviceContext) -> _Signature:
        found = self._signatures.get(key)
        if found is None or not found.is_for(objects):
            for old in [old for old, signature in self._signatures.items() if signature.is_dead()]:
                del self._signatures[old]
            if len(self._signatures) >= _MAX_SIGNATURES:
                self._signatures.clear()
            self._unbound += 1
            if self._unbound == _MAX_SIGNATURES:
                self._account.tell(
                    f"got other shapes or Python values in each of {_MAX_SIGNATURES} calls, and only "
                    "calls with the same ones can be replayed\n"
                    "  pass numbers that change as floats or as lazy tensors, and objects that stay the same"
                )
            found = self._signatures[key] = _Signature(list(map(_reference_to, objects)), context)
        return found

    def _note_value(self, key: tuple[Any, ...], args: Any, kwargs: Any) -> None:
        """Tell the user of an int or a string among the arguments that differs from call to call."""
        place, self._latest_key = _only_other_value(self._latest_key, key), key
        self._values = self._values + 1 if place >= 0 and place == self._value_place else 2
        self._value_place = place
        if place >= 0 and self._values == _MAX_VALUES and self._unbound >= _MAX_VALUES:
            kind, value = key[place]
            name = _name_of_argument(self._function, args, kwargs, value)
            fix = "pass it as a float, which is followed, or as a lazy tensor, or " if kind is int else ""
            self._account.tell(
                f"got another {kind.__name__} in each of {_MAX_VALUES} calls{name}, and only calls with the same one "
                f"can be replayed\n  {fix}leave it out"
            )

    def _run_as_written(self, context: DeviceContext, body: Body, args: Any, kwargs: Any) -> Any:
        leaves, spec = self._run_body(context, body, lambda: flatten_result(self._function(*args, **kwargs)))
        self._sync(context)
        return unflatten_result(leaves, spec)

    def _run_body(self, context: DeviceContext, body: Body, function: Callable[[], T]) -> T:
        """What `function`, which calls the body, returns. Other threads wait, see Note [Threads and bodies]."""
        thread = body.thread
        try:
            try:
                running[thread] = body
                made = executor.rules.call_refusing(self._refuse, function)
            finally:
                context.body, body.ended = None, True
                running.pop(thread, None)
        finally:  # once more, see Note [Interruption]
            context.body, body.ended = None, True
            running.pop(thread, None)
            body.check()
        return made

    def _sync(self, context: DeviceContext) -> Async | None:
        with executor.records.limiting(self._limit, self._max_different_graphs):
            run = executor.sync_tensors_graph_internal(context, "a captured call")
        history.steps += 1
        return run

    # ----- recording

    def _record(
        self,
        context: DeviceContext,
        body: Body,
        signature: _Signature,
        arguments: Arguments,
        args: Any,
        kwargs: Any,
        verify: bool,
    ) -> Any:
        """Run the body as written, and bind its program if it can be replayed from now on."""
        unsettled: list[UnsettledStep] = []
        try:
            return self._record_and_bind(context, body, signature, arguments, args, kwargs, verify, unsettled)
        finally:
            for step in unsettled:
                step.resume()

    def _set_aside(self, watch: Watch) -> list[UnsettledStep]:
        """The steps of the body that GradScalers may skip, after they were set aside."""
        found = [(optimizer, step) for optimizer in watch.optimizers for step in unsettled_steps(optimizer)]
        known = [reference for reference in self._scaled if reference() is not None]
        self._scaled = list(dict.fromkeys((*known, *(weakref.ref(optimizer) for optimizer, _ in found))))
        for _, step in found:
            step.set_aside()
        return [step for _, step in found]

    def _record_and_bind(
        self,
        context: DeviceContext,
        body: Body,
        signature: _Signature,
        arguments: Arguments,
        args: Any,
        kwargs: Any,
        verify: bool,
        unsettled: list[UnsettledStep],
    ) -> Any:
        """As `_record`. The caller resumes the steps that are added to `unsettled`."""
        metrics.increment("CaptureRecorded")
        if verify:
            signature.check_at = 2 * signature.calls
        verified = verify and _is_fresh(signature.program, arguments)
        program, signature.program = signature.program, None
        last = signature.records[-1] if signature.records else None
        roots = [self._function, *signature.named(), *self._ran.roots()]
        start = start_of_call(last, program.carried() if program else None, roots, arguments.tensors, self._ran)
        moved = program.state_guard.moved() if program else []
        del program  # otherwise its state would outlive its replacement
        argument_data: list[weakref.ref[TensorData]] = [weakref.ref(tensor._data) for tensor in arguments.tensors]
        watch = Watch(arguments.tensors)
        given = Given(_flatten(args, kwargs)[0])
        with young_objects_stay_young():
            with watches.shown_to(watch), context.registry.watching() as uploads:
                recorder = watch.recorder = FloatRecorder(context, uploads, arguments.floats, self._counts)
                leaves, spec, read, ran = self._run_recorded(recorder, given, start, last, context, body, args, kwargs)
            unfit = self._look_at_reads(start, roots, read, ran, any(one.requires_grad for one in arguments.tensors))
            watch.recorder = None
            # what the body made to compute into is no upload, and may be gone
            uploads[:] = [storage for storage in uploads if storage.tensor is not None]
            unsettled += self._set_aside(watch)
            if body.has_read_once:
                recorder.close()
                self._sync(context)
                signature.records = []  # what it did is not done again
                return unflatten_result(leaves, spec)
            record, storages = record_call(
                context, arguments, argument_data, start, watch, uploads, leaves, spec, recorder, self._counts
            )
            uploads.clear()
            note_changes(start, record, last, self._counts)
            self._counts |= record.changed_settings
            signature.left_alone.add(moved)
            self._note_devices(signature, record, body)
            record.changed_argument, record.unfit_read, record.unnamed = given.changed(), unfit, start.unnamed
            found = self._find(start, record, roots, unsettled)
            record.after = record.numbers.state(found.reach, found.structure.walk, found.leaves)
            record.argument_places = argument_places(start.state, record.after, arguments.tensors)
            returned = [leaf for leaf in leaves if is_a(leaf, LazyTensor)]
            pending = context.trace.pending
            held = None
            if last is not None:
                held = find_holders(storages, returned, watch.parameters(), found.tensors.values(), pending)
        del storages, pending
        run = self._sync(context)
        record.bound = None if run is None else run.cached_computation
        executor.barrier(context)  # otherwise what the run holds would look like state
        try:
            bound = self._bind(signature, start, record, held, arguments, found, unsettled)
            del found
            bound.settle()
        except NotReplayable as reason:
            # without `held` something cannot be seen; that alone is no difference
            may_differ = verified and not isinstance(reason, ReadsUnseen)
            if may_differ and (held is not None or self._verify_every is not None):
                raise no_longer_alike(self._name, str(reason)) from None
            # the first steps with a scaler are often skipped, and each makes the state anew: patience begins after them
            if not any(step.makes_state() for step in unsettled):
                signature.fail(self._account, str(reason))
            else:
                self._account.ran_as_written(str(reason))
        return unflatten_result(leaves, spec)

    def _note_devices(self, signature: _Signature, record: RecordedCall, body: Body) -> None:
        """Note on which other devices the body computed. If it computed there only, the next call is bound there."""
        used = {context.name: context for context in record.watch.contexts}
        used |= {name: context_of(name) for name in body.devices}
        used.pop(record.context.name, None)
        record.other_devices = tuple(used)
        if len(used) == 1 and not record.calls():
            (signature.context,) = used.values()

    def _look_at_reads(self, start: Start, roots: Sequence[Any], read: str, ran: Ran, asks: bool) -> str:
        """Why what the body, which just ran, has read keeps it from being replayed; "" if nothing does.

        What it wrote is not what it goes by: then `start` has a guard of what it left. `read`, `ran`: see
        `watching_reads`. `asks`: whether what it may ask of an argument's graph is no part of the key.
        """
        changed = start.values.changed()
        if changed is not None:
            start.values = ValueGuard(Reachable(roots, self._ran), changed.parts)
        start.values.end()
        reads_more, leaves_tensor = self._ran.add(ran, start.values.functions), ran.leaves_in_context()
        if changed is not None and changed.read:
            return why_written(changed.read)
        if leaves_tensor:
            return LEAVES_TENSOR
        if changed is not None and changed.piles_up:
            return "it adds a tensor to a container, which a replay would not do\n  return it, and keep it outside"
        if read:
            return read
        if start.values.unseen:
            return why_unseen(start.values.unseen)
        if asks and (asked := self._ran.names & PLACE_IN_GRAPH):
            return f"its code asks for {min(asked)} of a tensor, which may be another one in each call"
        return "code of it ran that none of its earlier calls did" if reads_more else ""

    def _find(
        self, start: Start, record: RecordedCall, roots: Sequence[Any], unsettled: Sequence[UnsettledStep]
    ) -> Found:
        """What the function reaches and used, after a call."""
        watch = record.watch
        used = (*watch.leaves(), *(step.flag for step in unsettled))
        found = Found(Reachable(roots), watch.modules, watch.optimizers, used)
        found.young.difference_update(map(id, roots))  # which were there before, whenever the collector ran last
        record.roots = found.roots
        record.left_graph = start.graphs.place_in(record.numbers, found)
        record.reached_generators = tuple(found.reach.generators)
        record.random_states = tuple(found.reach.random_states)
        return found

    def _run_recorded(
        self,
        recorder: FloatRecorder,
        given: Given,
        start: Start,
        last: RecordedCall | None,
        context: DeviceContext,
        body: Body,
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Run the body with traced floats.

        Returns the leaves of its result, with plain floats, their structure, why its reads keep it from being replayed,
        and what ran.
        """
        recorder.on_backward = (given.see_backward, start.graphs.see_backward)
        try:
            for guard in last.guards if last is not None else ():
                recorder.install(guard.optimizer)
            with start.values.watching():
                (leaves, spec), read, ran = recorder.show(
                    self._run_body,
                    context,
                    body,
                    lambda: watching_reads(lambda: flatten_result(call_traced(self._function, recorder, args, kwargs))),
                )
            return recorder.plain_results(leaves), spec, read, ran
        except BaseException:
            recorder.close()
            raise
        finally:
            given.end()
            recorder.restore()

    def _bind(
        self,
        signature: _Signature,
        start: Start,
        record: RecordedCall,
        held: Any,
        arguments: Arguments,
        found: Found,
        unsettled: Sequence[UnsettledStep],
    ) -> CapturedProgram:
        records, signature.records = signature.records, [record]
        grads, signature.grads = signature.grads, GradsAtStart()
        signature.grads.add(start.grads)
        if not records:
            raise NotReplayable("it ran once")
        last = records[-1]
        check_same_program(last, record)
        signature.records, signature.grads = [*records, record][-_MAX_RECORDS:], grads
        grads.add(start.grads)
        check_side_effects(start, record)
        floats = follow_floats(signature.records)
        program = bind(
            self._name, start, last, record, held, floats, grads, arguments, found, signature.left_alone, unsettled
        )
        # last, as any other reason says more
        if record.unfit_read:
            raise ReadsUnseen(record.unfit_read)
        # what changed since the call before, which recorded the same, decides nothing
        changed = [one for one, now in start.unnamed.items() if last.unnamed.get(one, now) != now]
        self._ran.left_out |= set(changed)
        signature.program = program
        signature.failures = self._unbound = self._values = 0
        if signature.stale >= 2 * PATIENCE:
            self._account.tell(
                f"ran {signature.stale} times as written, because what it uses changed before each call: "
                f"{signature.reason}"
            )
        return program

    def _refuse(self, cause: str) -> CaptureError:
        return CaptureError(
            f"{cause} inside the captured function {self._name}, which a replay would not do again\n"
            f"  at {user_site()}\n  return the tensor and use it after the call; control flow that depends on values "
            "takes torch.where"
        )


def capture_function(
    step: Callable[..., Any] | None = None, *, verify_every: int | None = None, max_different_graphs: int | None = None
) -> Any:
    """`lazy_backend.capture` of a function; without one, a decorator."""
    if step is None:
        return lambda function: Captured(function, verify_every, max_different_graphs)
    return Captured(step, verify_every, max_different_graphs)
